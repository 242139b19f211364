"""How many whole weights ZeRO-3 has on a rank at each module's turn, by its fetches played out."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from modeling.layout import ModelSizes, ParallelLayout
from recipe.plan.zero3_fetches import ROOT, Fetch, Thresholds, Way, persistent
from recipe.plan.zero_traffic import held_fetches, held_modules


class Whole(NamedTuple):
    """Numbers of weights, without those that are never parted.

    at_work   while the module is, those on their way for later ones included
    arriving  at most before that, when weights are there both as they came, in one tensor, and one by one
    """

    at_work: int = 0
    arriving: int = 0


class WholeWeights(NamedTuple):
    """`unparted`: numbers that stay whole from step to step; the rest by module, as in `held_modules`."""

    unparted: int
    forward: Mapping[str, Whole]
    backward: Mapping[str, Whole]


@lru_cache(maxsize=64)
def whole_weights(sizes: ModelSizes, layout: ParallelLayout, thresholds: Thresholds, *, way: Way) -> WholeWeights:
    """Of a rank, in every micro-batch."""
    modules = held_modules(sizes, layout)
    numel = {name: number for module in modules for name, number in module.parameters.items()}
    passes: tuple[dict[str, Whole], dict[str, Whole]] = ({}, {})
    fetches = held_fetches(sizes, layout, thresholds, way=way)
    roots = [place for place, fetch in enumerate(fetches) if fetch.module == ROOT]
    own = {module.name: tuple(module.parameters) for module in modules}
    for place, (fetch, found) in enumerate(_play(fetches, own, numel)):
        seen = passes[place >= roots[1]]  # the model as a whole is asked for once in each pass
        before = seen.get(fetch.module, Whole())
        seen[fetch.module] = Whole(*map(max, before, found))
    return WholeWeights(sum(persistent(modules, thresholds).values()), *passes)


def _play(
    fetches: Sequence[Fetch], own: Mapping[str, tuple[str, ...]], numel: Mapping[str, int]
) -> Iterator[tuple[Fetch, Whole]]:
    on_their_way: dict[str, tuple[str, ...]] = {}  # by each name what comes in the same call
    for fetch in fetches:
        on_their_way |= dict.fromkeys(fetch.missing, fetch.missing)
        here = fetch.num_live - sum(numel[name] for name in fetch.ahead)
        arriving = 0
        for name in own.get(fetch.module, ()):
            call = on_their_way.get(name, ())
            for other in call:
                del on_their_way[other]
            if len(call) > 1:  # a single weight is used as it came
                arriving = max(arriving, here + sum(numel[other] for other in call))
        on_their_way |= dict.fromkeys(fetch.ahead, fetch.ahead)
        yield fetch, Whole(fetch.num_live, arriving)
