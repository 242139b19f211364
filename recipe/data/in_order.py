"""Work done by several threads on a stream of items, with the results in the order of the items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 2  # items for each worker: bounds what is in memory whatever the stream


def map_in_order(items: Iterable[Item], *, work: Callable[[Item], Result], num_workers: int) -> Iterator[Result]:
    """`work` of each item, up to `num_workers` at once. An error of `work` is raised in its item's place."""
    with ThreadPoolExecutor(num_workers, thread_name_prefix="tokenise") as pool:
        ahead: deque[Future[Result]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) >= AHEAD * num_workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
