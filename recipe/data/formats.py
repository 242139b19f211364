"""What the rows of a corpus are: plain text, conversations, or prompts with their completions."""

from typing import NamedTuple

from recipe.data.conversations import CHAT_COLUMNS, PAIR_COLUMNS
from recipe.data.documents import Corpus, InvalidTextError
from recipe.data.options import DataOptions


class DataFormat(NamedTuple):
    """How rows are read.

    name      "text", "chat" or "prompt_completion"
    train_on  "responses" (what the assistant says, or the completion) or "all"
    packing   "wrapped" (documents are cut at the end of a block) or "whole" (they are not, if they fit in one)
    reason    why it is this format, for the log
    """

    name: str
    train_on: str
    packing: str
    reason: str


def choose_format(corpus: Corpus, *, options: DataOptions) -> DataFormat:
    """The format that the options name, or the one that the first row has the columns of; text where it has none."""
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
    """The formats whose columns are there, each with the reason."""
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
    """The fields of the first row that can be read, those that are null left out."""
    for row in corpus.rows():
        try:
            return [name for name, value in row.read().items() if value is not None]
        except InvalidTextError:
            if not skip_invalid_text:
                raise
    return []
