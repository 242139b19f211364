"""Which of the user's choices about data cannot hold together, and what the rows then are: text or conversations."""

from collections.abc import Iterator
from typing import NamedTuple

from recipe.data.documents import Corpus, InvalidTextError
from recipe.settings.flags import Arguments

# Columns that tell a format.
CHAT_COLUMNS = ("messages", "conversations")
PAIR_COLUMNS = ("prompt", "completion")
EMBEDDED = "stdlib"  # as a train_file: the source code of the running Python


def option_faults(options: Arguments) -> Iterator[str]:
    """Yield every combination of data flags that cannot hold, in words; nothing is read from disk."""
    if not options.dataset_name and not options.train_file:
        yield (
            "there is nothing to train on: name files with --train_file or a dataset with --dataset_name; to try "
            f"things out, --train_file {EMBEDDED} is the source code of this Python"
        )
    if options.eos_token == "":
        yield "eos_token='' names no token"
    if options.dataset_name and (options.train_file or options.validation_file):
        yield (
            f"dataset_name={options.dataset_name!r} clashes with "
            f"train_file={options.train_file!r} validation_file={options.validation_file!r}; give one kind of source"
        )
    if options.validation_file and not options.train_file:
        yield f"validation_file={options.validation_file!r} needs a train_file"
    if options.dataset_config_name and not options.dataset_name:
        yield f"dataset_config_name={options.dataset_config_name!r} needs a dataset_name"
    if options.streaming and not options.dataset_name:
        yield "streaming=True needs a dataset_name; files are read as a stream in any case"
    if options.data_format != "auto":
        yield from format_faults(options, data_format=options.data_format)


def format_faults(options: Arguments, *, data_format: str) -> Iterator[str]:
    """Yield what cannot hold where the rows are "text", "chat" or "prompt_completion"."""
    if data_format == "text":
        if options.train_on == "responses":
            yield "train_on=responses clashes with data_format=text: a text has no responses"
        if options.chat_template is not None:
            yield (
                f"chat_template={options.chat_template!r} clashes with data_format=text; it is for chat and "
                "prompt_completion"
            )
        return
    if options.train_file == EMBEDDED:
        yield f"data_format={data_format} clashes with train_file={EMBEDDED}, which is text"
    if options.tokenizer_name is None:
        yield (
            f"data_format={data_format} needs a tokenizer_name, or a model_name_or_path that brings a tokenizer along: "
            "one is trained on text alone"
        )


class DataFormat(NamedTuple):
    """How the rows of a corpus are read: as plain text, as conversations, or as prompts with their completions.

    name      "text", "chat" or "prompt_completion"
    train_on  "responses" (what the assistant says, or the completion) or "all"
    packing   "wrapped" (documents are cut at the end of a block) or "whole" (they are not, if they fit in one)
    reason    why it is this format, for the log
    """

    name: str
    train_on: str
    packing: str
    reason: str


def choose_format(corpus: Corpus, *, options: Arguments) -> DataFormat:
    """Return the format that the options name, or else the one whose columns the first row has; text if it has none."""
    name, reason = options.data_format, "as --data_format says"
    if name == "auto":
        columns = _first_columns(corpus, skip_invalid_text=options.skip_invalid_text)
        found = _formats_of(columns, text_column=options.text_column_name)
        if len(found) > 1:
            raise ValueError(
                f"the first row of {corpus.name} has {columns}, which can be read as {' or '.join(found)}; "
                "say which by --data_format"
            )
        name, reason = next(iter(found.items()), ("text", "because it has no columns of conversations"))
    train_on, packing = ("all", "wrapped") if name == "text" else ("responses", "whole")
    if options.train_on != "auto":
        train_on = options.train_on
    if options.packing_strategy != "auto":
        packing = options.packing_strategy
    return DataFormat(name, train_on, packing, reason)


def _formats_of(columns: list[str], *, text_column: str) -> dict[str, str]:
    """Return the formats whose columns are there, each with the reason."""
    found = {}
    if text_column in columns:
        found["text"] = f"because its first row has {text_column!r}"
    for column in CHAT_COLUMNS:
        if column in columns:
            found["chat"] = f"because its first row has {column!r}"
    if all(column in columns for column in PAIR_COLUMNS):
        found["prompt_completion"] = "because its first row has 'prompt' and 'completion'"
    return found


def _first_columns(corpus: Corpus, *, skip_invalid_text: bool) -> list[str]:
    """Return the fields of the first row that can be read, without those that are null."""
    for row in corpus.rows():
        try:
            return [name for name, value in row.read().items() if value is not None]
        except InvalidTextError:
            if not skip_invalid_text:
                raise
    return []
