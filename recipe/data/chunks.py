"""Long texts are cut before they are encoded, because a tokenizer's time and memory grow faster than its input.

The rule: a chunk has at most CHUNK_CHARS characters. The cut goes in front of the last single space, in the second
half of the chunk, that stands between two letters or digits; where there is none, in front of the last white space of
that half; where there is none either, at exactly CHUNK_CHARS. Byte-level BPE tokenizers in the manner of GPT-2 start a
word at such a space anyway, so there the first kind of cut changes no token. Tokenizers that mark the start of a text,
and text without spaces, may get a token more or less at a cut.
"""

import re
from collections.abc import Iterable, Iterator

CHUNK_CHARS = 16_384

_WORD_GAP = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
_ANY_GAP = re.compile(r"(?<=\S)\s")


def split_text(pieces: Iterable[str], *, chunk_chars: int = CHUNK_CHARS) -> Iterator[str]:
    """Cut a text that arrives in pieces; the chunks joined are the pieces joined, however those were cut.

    Holds one piece and one chunk at a time. `chunk_chars` is at least 2.
    """
    rest = ""
    for piece in pieces:
        text, start = rest + piece, 0
        # One character more than a chunk must be known: whether a cut at the very end is good depends on it.
        while len(text) - start > chunk_chars:
            end = start + _cut(text[start : start + chunk_chars + 1], chunk_chars=chunk_chars)
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _cut(window: str, *, chunk_chars: int) -> int:
    """Where to cut a window of chunk_chars + 1 characters: between half of chunk_chars and chunk_chars."""
    for gap in (_WORD_GAP, _ANY_GAP):
        found = [match.start() for match in gap.finditer(window, chunk_chars // 2)]
        fitting = [position for position in found if 0 < position <= chunk_chars]
        if fitting:
            return fitting[-1]
    return chunk_chars
