"""Rows of chat data to tokens, each with whether it is trained on: checked, written out by the template, encoded.

A conversation is written out by the tokenizer's chat template and then encoded as one text; a token belongs to a
response where it overlaps the response's stretch of that text. The template itself says where responses lie if it has
{% generation %} markers. Otherwise they are found by writing the conversation out up to each response, with what the
template puts before one (the generation prompt), and up to its end: each must be a beginning of the whole. A message
whose "weight" is 0 is none of the responses.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipe.data.documents import Row, checked, digest_of
from recipe.data.options import CHAT_COLUMNS, PAIR_COLUMNS, DataFormat
from recipe.data.tokenizer import TextEncoder, private_copy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
# Who speaks where messages are spelt {"from": …, "value": …}.
SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
}
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for a chat template.

    place           the file and the line or row in it, for messages
    tools           what the template may be told of tools; None: there are none
    num_in_prompt   the first messages, after which everything is the response; None: each assistant message is one
    """

    messages: list[Message]
    place: str
    tools: list[Any] | None
    num_in_prompt: int | None = None


class Pair(NamedTuple):
    """Two plain texts, of which the second is the response to the first."""

    prompt: str
    completion: str


def is_response(message: Message) -> bool:
    """Return whether to train on a message: the assistant's, unless its "weight" is 0."""
    return message["role"] == ASSISTANT and not weighs_nothing(message)


def weighs_nothing(message: Message) -> bool:
    """Return whether a message asks not to be trained on, as OpenAI's format for fine-tuning spells it."""
    return bool(message.get("weight", 1) == 0)


def read_chat(fields: Mapping[str, Any], *, place: str) -> Conversation:
    """Read a row with "messages" or, without them, "conversations"; ValueError with its place if it has neither."""
    column = next((name for name in CHAT_COLUMNS if fields.get(name) is not None), None)
    if column is None:
        raise ValueError(_lacks(fields, needed="'messages' (or 'conversations')", place=place))
    messages = _messages(fields[column], column=column, place=place)
    return Conversation(messages=messages, place=place, tools=_tools(fields, place))


def read_pair(fields: Mapping[str, Any], *, place: str) -> Conversation | Pair:
    """Read a row with "prompt" and "completion", two texts or two lists of messages, or ValueError with its place."""
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
    tools = _tools(fields, place)
    return Conversation(messages=[*before, *after], place=place, tools=tools, num_in_prompt=len(before))


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
    """Check a message and spell it with "role" and "content"; nulls, which tables fill in, are left out."""
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
    """Read schemas of tools; tables cannot hold different shapes, so data sets often keep them as JSON in a text."""
    tools = fields.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: 'tools' is a text that is not JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{place}: 'tools' must be a list of schemas, not {type(tools).__name__}")
    return tools or None


class Span(NamedTuple):
    """A stretch of a text, in characters."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A row as one text. `prefix` are ids that go before it; `responses` are the stretches to train on."""

    text: str
    responses: tuple[Span, ...]
    prefix: tuple[int, ...] = ()


class EncodedRow(NamedTuple):
    """A row as a document.

    ids      [num_ids]  int64
    trained  [num_ids]  bool
    """

    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]


class RowEncoder:
    """Encodes rows of one format. `encode` may be called from several threads, `render` from one.

    Special tokens that a text spells are special tokens, as in transformers' apply_chat_template. A document ends with
    the end-of-document token: it is added where the text does not already end with it, and trained on where it ends a
    response.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, data_format: DataFormat) -> None:
        plain = TextEncoder(tokenizer)
        self._tokenizer = tokenizer
        self._format = data_format
        self._prefix, self._eos_id, self._eos = plain.prefix, plain.eos_id, str(tokenizer.eos_token)
        self._fast = private_copy(tokenizer)
        if self._fast is None:
            raise ValueError(
                f"{data_format.name} data needs a fast tokenizer, one that says where in the text a token lies; "
                f"{type(tokenizer).__name__} is none"
            )
        self._fast.encode_special_tokens = False
        if data_format.name == "chat":
            self._template(None)
        self.max_workers = None
        self.vocab_size = plain.vocab_size
        self.trains_on_all = data_format.train_on == "all"
        parts = [plain.identity, data_format.name, data_format.train_on, tokenizer.chat_template]
        self.identity = digest_of([*parts, sorted(tokenizer.special_tokens_map.items())])

    def render(self, row: Row) -> Rendered:
        """Return the row's text and where its responses lie; ValueError with the row's place if it does not fit."""
        fields = row.read()
        if self._format.name == "chat":
            content: Conversation | Pair = read_chat(fields, place=row.place)
        else:
            content = read_pair(fields, place=row.place)
        if isinstance(content, Pair):
            text = checked(content.prompt + content.completion, place=row.place)
            return Rendered(text, (Span(len(content.prompt), len(text)),), self._prefix)
        rendered = self._render_conversation(content)
        checked(rendered.text, place=row.place)
        return rendered

    def encode(self, rows: Sequence[Rendered]) -> list[EncodedRow]:
        """Return each row as a document, which has no ids if the row has no text."""
        encodings = self._fast.encode_batch([row.text for row in rows], add_special_tokens=False)
        return [self._document(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]

    def _document(self, row: Rendered, encoding: Any) -> EncodedRow:
        if not encoding.ids:
            return EncodedRow(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_))
        ids = np.array(encoding.ids, dtype=np.int64)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).T
        trained = np.full(len(ids), self.trains_on_all)
        for response in row.responses:
            trained |= (starts < response.end) & (ends > response.start)
        if row.prefix != tuple(ids[: len(row.prefix)].tolist()):  # a text may spell it
            ids = np.concatenate([row.prefix, ids])
            trained = np.concatenate([np.full(len(row.prefix), self.trains_on_all), trained])
        if not row.text.rstrip().endswith(self._eos):
            ends_response = any(r.end > r.start and not row.text[r.end :].strip() for r in row.responses)
            ids = np.append(ids, self._eos_id)
            trained = np.append(trained, self.trains_on_all or ends_response)
        return EncodedRow(ids, trained)

    def _render_conversation(self, talk: Conversation) -> Rendered:
        messages, place = talk.messages, talk.place
        if self.trains_on_all:
            _check_weights(messages, reason="--train_on all trains on every token", place=place)
            return Rendered(self._write(talk), ())
        if talk.num_in_prompt is not None:
            completion = messages[talk.num_in_prompt :]
            _check_weights(completion, reason="a completion is trained on as a whole", place=place)
            whole = self._write(talk)
            start = self._length_of_beginning(talk, talk.num_in_prompt, whole=whole, is_prompt=True)
            return Rendered(whole, (Span(start, len(whole)),))
        if GENERATION.search(self._template(talk.tools)):
            whole, marked = self._run_template(talk, messages, return_assistant_tokens_mask=True)
            return Rendered(whole, _weighted(marked, text=whole, messages=messages, place=place))
        whole = self._write(talk)
        responses = []
        for number, message in enumerate(messages):
            if is_response(message):
                start = self._length_of_beginning(talk, number, whole=whole, is_prompt=True)
                end = self._length_of_beginning(talk, number + 1, whole=whole, is_prompt=False)
                responses.append(Span(start, end))
        return Rendered(whole, tuple(responses))

    def _length_of_beginning(self, talk: Conversation, num_messages: int, *, whole: str, is_prompt: bool) -> int:
        """Return how far the first messages reach in the whole conversation, in characters."""
        first = f"the first {num_messages} messages"
        try:
            beginning, _ = self._run_template(talk, talk.messages[:num_messages], add_generation_prompt=is_prompt)
        except ValueError as error:
            raise ValueError(_cannot_find(f"refuses {first} by themselves ({error.__cause__})", talk.place)) from error
        if not whole.startswith(beginning):
            raise ValueError(_cannot_find(f"writes {first} otherwise when more follow", talk.place))
        return len(beginning)

    def _write(self, talk: Conversation) -> str:
        return self._run_template(talk, talk.messages, add_generation_prompt=False)[0]

    def _run_template(
        self, talk: Conversation, messages: list[Message], **options: bool
    ) -> tuple[str, tuple[Span, ...]]:
        """Write some messages out: apply_chat_template before it encodes. With the stretches between its markers."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        inputs: dict[str, Any] = {**self._tokenizer.special_tokens_map, **options}
        template = self._template(talk.tools)
        try:
            rendered: Any = render_jinja_template([messages], tools=talk.tools, chat_template=template, **inputs)
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"{talk.place}: the chat template refuses this row: {error}") from error
        texts, marked = rendered
        return texts[0], tuple(Span(*span) for span in marked[0]) if marked else ()

    def _template(self, tools: list[Any] | None) -> str:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer {self._tokenizer.name_or_path!r} has no chat template to write messages out by; give "
                "one by --chat_template FILE"
            )
        template: str = self._tokenizer.get_chat_template(tools=tools)
        return template


def _cannot_find(fault: str, place: str) -> str:
    return (
        f"{place}: the chat template {fault}, so responses cannot be found in it; give another template by "
        "--chat_template FILE (for chat data one with {% generation %} and {% endgeneration %} around responses, as "
        "TRL has for many models), or --train_on all"
    )


def _check_weights(messages: list[Message], *, reason: str, place: str) -> None:
    if any(map(weighs_nothing, messages)):
        raise ValueError(
            f"{place}: the 'weight' of a message is 0, but {reason}; leave the weight out, or train "
            "on the responses of rows with 'messages'"
        )


def _weighted(marked: tuple[Span, ...], *, text: str, messages: list[Message], place: str) -> tuple[Span, ...]:
    """Drop the marked stretches of messages whose weight is 0; ValueError if it cannot be told which those are."""
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if not any(map(weighs_nothing, answers)):
        return marked
    pairs = list(zip(answers, marked, strict=False))
    if len(answers) != len(marked) or any(
        str(message.get("content", "")).strip() not in text[span.start : span.end] for message, span in pairs
    ):
        raise ValueError(
            f"{place}: the 'weight' of a message is 0, but the chat template does not put each of the {len(answers)} "
            f"assistant messages as it is between markers of its own ({len(marked)} stretches are marked); leave the "
            "weight out, or give a template without {% generation %} by --chat_template FILE"
        )
    return tuple(span for message, span in pairs if is_response(message))
