"""What the user chose about data, every choice that cannot hold listed in one error, and what the rows then are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from recipe.data.documents import Corpus, InvalidTextError

FORMATS = ("auto", "text", "chat", "prompt_completion")
TRAIN_ON = ("auto", "responses", "all")
PACKING = ("auto", "wrapped", "whole")
MIN_TRAINED_VOCAB_SIZE = 257  # every byte, and the end of a document
# Columns that tell a format.
CHAT_COLUMNS = ("messages", "conversations")
PAIR_COLUMNS = ("prompt", "completion")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Choices about data; names follow the Hugging Face script run_clm.py where the thing exists there.

    Without `dataset_name` and `train_file` the corpus is the running Python's own standard library; without
    `tokenizer_name` a byte-level BPE of `train_vocab_size` entries is trained on the training corpus.
    """

    block_size: int
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_file: str | None = None  # a path or glob pattern, or several separated by commas
    validation_file: str | None = None
    data_format: str = "auto"  # one of FORMATS; "auto": as the first row's columns say
    train_on: str = "auto"  # one of TRAIN_ON; "auto": all of a text, and the responses of anything else
    chat_template: str | None = None  # a file; None takes the tokenizer's own
    packing_strategy: str = "auto"  # one of PACKING; "auto": wrapped for text, whole for anything else
    text_column_name: str = "text"
    validation_split_percentage: int = 5  # used where there is no validation set of its own; 0 makes none
    tokenizer_name: str | None = None
    eos_token: str | None = None  # an entry of the vocabulary; None takes the tokenizer's own
    train_vocab_size: int = 8192
    streaming: bool = False  # read `dataset_name` as a stream; files always are
    max_train_documents: int | None = None
    skip_invalid_text: bool = False
    preprocessing_num_workers: int | None = None  # batches of text encoded at once; None takes one for each CPU
    cache_dir: str | None = None
    overwrite_cache: bool = False


def option_faults(options: DataOptions) -> list[str]:
    """Return every choice that cannot hold, in words; nothing is read from disk."""
    settled = options.data_format in FORMATS and options.data_format != "auto"
    of_format = format_faults(options, data_format=options.data_format) if settled else []
    return [*_count_faults(options), *_source_faults(options), *_choice_faults(options), *of_format]


def check_options(options: DataOptions) -> None:
    """Raise one ValueError that lists every choice that cannot hold."""
    faults = option_faults(options)
    if faults:
        raise ValueError("the data options do not hold:\n" + "\n".join(f"  - {fault}" for fault in faults))


def format_faults(options: DataOptions, *, data_format: str) -> list[str]:
    """Return what cannot hold where the rows are "text", "chat" or "prompt_completion"."""
    faults = []
    if data_format == "text":
        if options.train_on == "responses":
            faults.append("train_on=responses clashes with data_format=text: a text has no responses")
        if options.chat_template is not None:
            faults.append(
                f"chat_template={options.chat_template!r} clashes with data_format=text; it is for chat and "
                "prompt_completion"
            )
        return faults
    if not options.dataset_name and not options.train_file:
        faults.append(f"data_format={data_format} needs a train_file or a dataset_name")
    if options.tokenizer_name is None:
        faults.append(
            f"data_format={data_format} needs a tokenizer_name, or a model_name_or_path that brings a tokenizer along: "
            "one is trained on text alone"
        )
    return faults


def _choice_faults(options: DataOptions) -> Iterator[str]:
    for name, allowed in (("data_format", FORMATS), ("train_on", TRAIN_ON), ("packing_strategy", PACKING)):
        if getattr(options, name) not in allowed:
            yield f"{name}={getattr(options, name)!r} is not one of {', '.join(allowed)}"


def _count_faults(options: DataOptions) -> Iterator[str]:
    if options.block_size < 2:
        yield f"block_size={options.block_size} must be at least 2: a block of one token predicts nothing"
    if not 0 <= options.validation_split_percentage < 100:
        yield f"validation_split_percentage={options.validation_split_percentage} must lie between 0 and 99"
    if options.tokenizer_name is None and options.train_vocab_size < MIN_TRAINED_VOCAB_SIZE:
        yield (
            f"train_vocab_size={options.train_vocab_size} must be at least {MIN_TRAINED_VOCAB_SIZE}: "
            "256 bytes and the end of a document"
        )
    if options.eos_token == "":
        yield "eos_token='' names no token"
    for name in ("max_train_documents", "preprocessing_num_workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"{name}={value} must be at least 1"


def _source_faults(options: DataOptions) -> Iterator[str]:
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


def choose_format(corpus: Corpus, *, options: DataOptions) -> DataFormat:
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
