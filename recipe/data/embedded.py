"""The corpus for a machine with nothing but Python: the source and texts of the running Python's standard library."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from recipe.data.documents import Corpus, digest_of
from recipe.data.files import read_text_files

SUFFIXES = (".py", ".rst", ".txt")
# Test suites and third-party packages are no part of the library; lib2to3's and idlelib's data are mostly neither.
LEFT_OUT = frozenset(
    {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)


def embedded_corpus(root: Path | None = None) -> Corpus:
    """Each file of the standard library under `root` is a document, in sorted order of path.

    The manifest is a digest of every file's name and content; it differs between releases of Python. The few modules
    that declare another encoding than UTF-8 are no part of the corpus.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts, contents = [], []
    for path in sorted(_library_files(root)):
        raw = path.read_bytes()
        if _is_utf8(raw):
            texts.append(path)
            contents.append((path.relative_to(root).as_posix(), hashlib.sha256(raw).hexdigest()))
    if not texts:
        raise ValueError(f"there is no standard library in source form under {root}; name a corpus with --train_file")
    return Corpus(
        name=f"the standard library of Python {platform.python_version()}",
        files=tuple(map(str, texts)),
        manifest=digest_of(contents),
        read=partial(read_text_files, texts),
    )


def _library_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]  # os.walk does not enter the others
        yield from (Path(folder) / name for name in names if name.endswith(SUFFIXES))


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
