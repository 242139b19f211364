"""DeepSpeed and its kind tell much on the standard output, where only the result belongs."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """What is printed inside is dropped, and only errors are logged. Their handlers are made at the first import."""
    before = logging.root.manager.disable
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
