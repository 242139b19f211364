"""Rows of chat data: messages, or a prompt and its completion, checked before a template or a tokenizer sees them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ASSISTANT = "assistant"
CHAT_COLUMNS = ("messages", "conversations")
PAIR_COLUMNS = ("prompt", "completion")
# Who speaks where messages are spelt {"from": …, "value": …}.
SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
}

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for a chat template.

    tools           what the template may be told of tools; None: there are none
    num_in_prompt   the first messages, after which everything is the response; None: each assistant message is one
    """

    messages: list[Message]
    tools: list[Any] | None = None
    num_in_prompt: int | None = None


class Pair(NamedTuple):
    """Two plain texts, of which the second is the response to the first."""

    prompt: str
    completion: str


def is_response(message: Message) -> bool:
    """Whether a message is one to train on: what the assistant says, unless its "weight" is 0."""
    return message["role"] == ASSISTANT and not weighs_nothing(message)


def weighs_nothing(message: Message) -> bool:
    """Whether a message asks not to be trained on, as OpenAI's format for fine-tuning spells it."""
    return bool(message.get("weight", 1) == 0)


def read_chat(fields: Mapping[str, Any], *, place: str) -> Conversation:
    """A row with "messages" or, where there are none, "conversations"; ValueError with its place where neither is."""
    column = next((name for name in CHAT_COLUMNS if fields.get(name) is not None), None)
    if column is None:
        raise ValueError(_lacks(fields, needed="'messages' (or 'conversations')", place=place))
    return Conversation(messages=_messages(fields[column], column=column, place=place), tools=_tools(fields, place))


def read_pair(fields: Mapping[str, Any], *, place: str) -> Conversation | Pair:
    """A row with "prompt" and "completion", both texts or both lists of messages; ValueError with its place if not."""
    prompt, completion = (fields.get(name) for name in PAIR_COLUMNS)
    if prompt is None or completion is None:
        raise ValueError(_lacks(fields, needed="'prompt' and 'completion'", place=place))
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(prompt, completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise ValueError(f"{place}: 'prompt' and 'completion' must be two texts or two lists of messages, not {kinds}")
    before = _messages(prompt, column="prompt", place=place)
    after = _messages(completion, column="completion", place=place)
    return Conversation(messages=[*before, *after], tools=_tools(fields, place), num_in_prompt=len(before))


def _lacks(fields: Mapping[str, Any], *, needed: str, place: str) -> str:
    held = [name for name, value in fields.items() if value is not None]
    return (
        f"{place}: every row must have {needed}, and this one has {held}; rows of another kind belong in a run of "
        "their own, which --data_format names"
    )


def _messages(value: object, *, column: str, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{place}: {column!r} must be a list of one or more messages, not {found}")
    return [_message(item, place=f"{place}, message {number} of {column!r}") for number, item in enumerate(value, 1)]


def _message(item: object, *, place: str) -> Message:
    """What is null is left out: tables fill it in where other rows have a field."""
    if not isinstance(item, Mapping):
        raise ValueError(f"{place}: it must be an object with 'role' and 'content', not {type(item).__name__}")
    message = {name: value for name, value in item.items() if value is not None}
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"{place}: 'weight' must be 0 (do not train on this message) or 1, not {message['weight']!r}")
    if "from" in message and "role" not in message:
        speaker = str(message["from"])
        if speaker not in SPEAKERS:
            raise ValueError(f"{place}: 'from' is {speaker!r}, which is none of {', '.join(SPEAKERS)}")
        weight = {"weight": message["weight"]} if "weight" in message else {}
        return {"role": SPEAKERS[speaker], "content": message.get("value", ""), **weight}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{place}: it must have a 'role' that is a text (or 'from' and 'value'); it is {item!r}")
    return message


def _tools(fields: Mapping[str, Any], place: str) -> list[Any] | None:
    """Tables cannot hold schemas of different shapes, so data sets often keep them as JSON in a text."""
    tools = fields.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: 'tools' is a text that is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{place}: 'tools' must be a list of schemas, not {type(tools).__name__}")
    return tools or None
