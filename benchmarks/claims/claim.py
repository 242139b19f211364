"""A claim, the numbers that it states beside those worked out, and the rules by which its verdict follows from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

ROUNDED = 0.05  # two digits, the second one not exact


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNDERDETERMINED = "underdetermined"
    PLAUSIBLE = "plausible"
    IMPLAUSIBLE = "implausible"
    SUSPICIOUS = "suspicious"
    OBSOLETE = "obsolete"


class Unit(NamedTuple):
    """What a number is printed in: `size` of `base`, which it is kept in."""

    name: str
    base: str
    size: float


MB = Unit("MB", "bytes", 1e6)
GB = Unit("GB", "bytes", 1e9)
MIB = Unit("MiB", "bytes", 2**20)
GIB = Unit("GiB", "bytes", 2**30)
GB_PER_S = Unit("GB/s", "bytes/s", 1e9)
MS = Unit("ms", "s", 1e-3)
TFLOP = Unit("TFLOP", "FLOP", 1e12)
TFLOPS = Unit("TFLOP/s", "FLOP/s", 1e12)
TOKENS_PER_S = Unit("K tokens/s", "tokens/s", 1e3)
PERCENT = Unit("%", "share", 1e-2)
TIMES = Unit("x", "ratio", 1)
MILLION = Unit("M", "count", 1e6)
BILLION = Unit("B", "count", 1e9)
COUNT = Unit("", "count", 1)
YEAR = Unit("", "year", 1)


@dataclass(frozen=True)
class Value:
    """One number, in the base of its unit.

    upto       what the claim leaves open makes it anything from `computed` to `upto`
    stated     what the claim says; None: worked out for the reason alone
    tolerance  |stated / computed - 1| that still agrees
    """

    name: str
    unit: Unit
    computed: float
    stated: float | None = None
    upto: float | None = None
    tolerance: float = ROUNDED

    @property
    def agrees(self) -> bool | None:
        """Whether what is stated is what it should be; None where nothing is."""
        if self.stated is None:
            return None
        low, high = sorted((self.computed, self.computed if self.upto is None else self.upto))
        return low - self.tolerance * abs(low) <= self.stated <= high + self.tolerance * abs(high)


Values = tuple[Value, ...]


class Rule(NamedTuple):
    """How a verdict is found; `words` go into the report."""

    words: str
    judge: Callable[[Sequence[Value]], Verdict]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """
    article  1: five tuning techniques on 16 A100; 2: Megatron and Switch Transformer combined
    says     the claim, in other words
    formula  what `compute` works out
    why      the reason, for every verdict that `rule` may give with these values
    sources  of what cannot be computed
    """

    number: int
    article: int
    says: str
    formula: str
    compute: Callable[[], Values]
    rule: Rule
    why: str
    sources: tuple[str, ...] = ()


class Judged(NamedTuple):
    claim: Claim
    values: Values
    verdict: Verdict


def judge(claim: Claim) -> Judged:
    values = claim.compute()
    return Judged(claim, values, claim.rule.judge(values))


def _all_agree(values: Sequence[Value]) -> bool:
    stated = [value.agrees for value in values if value.stated is not None]
    assert stated, "a rule about stated numbers needs one"
    return all(stated)


def _if_all_agree(yes: Verdict, no: Verdict) -> Callable[[Sequence[Value]], Verdict]:
    return lambda values: yes if _all_agree(values) else no


def from_sources(verdict: Verdict) -> Rule:
    """For a claim without a number to recompute."""
    return Rule("from the sources named", lambda values: verdict)


NUMBERS = Rule(
    "right if every stated number is within its tolerance (5 % where not said) of the computed one, else wrong",
    _if_all_agree(Verdict.RIGHT, Verdict.WRONG),
)
LEFT_OPEN = Rule(
    "underdetermined if the stated numbers lie within what is possible over everything the claim leaves open, else "
    "wrong",
    _if_all_agree(Verdict.UNDERDETERMINED, Verdict.WRONG),
)
IN_RANGE = Rule(
    "plausible if the stated numbers lie within the range computed or published, else implausible",
    _if_all_agree(Verdict.PLAUSIBLE, Verdict.IMPLAUSIBLE),
)
TOO_EXACT = Rule(
    "suspicious if measurements follow a short formula without any error, else plausible",
    _if_all_agree(Verdict.SUSPICIOUS, Verdict.PLAUSIBLE),
)


def _needed(values: Sequence[Value]) -> Verdict:
    ((kept, wanted),) = ((value.computed, value.stated) for value in values if value.stated is not None)
    return Verdict.OBSOLETE if kept < wanted / 100 else Verdict.RIGHT


NEEDED = Rule("obsolete if less than a hundredth of what the claim wants room for has to be kept, else right", _needed)


def best_inside(low: float, high: float) -> Rule:
    """For the best choice in a range: at its edge there is no best one, only more or less."""

    def judge_best(values: Sequence[Value]) -> Verdict:
        (best,) = (value for value in values if value.stated is not None)
        return Verdict.UNDERDETERMINED if best.computed in (low, high) else NUMBERS.judge(values)

    return Rule(
        f"underdetermined if the best of {low:g} to {high:g} is at an end, so that none is; else by its number",
        judge_best,
    )
