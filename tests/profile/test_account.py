"""The account of a step, held against counting it unit by unit."""

import random
from collections import Counter

from recipe.profile.account import account_for
from recipe.profile.spans import Copy, Part, Transfer, Window, Work

LAST = 60


def some_intervals(random: random.Random, most: int) -> list[tuple[int, int]]:
    starts = [random.randrange(LAST) for _ in range(random.randrange(most + 1))]
    return [(start, min(LAST, start + random.randrange(12))) for start in starts]


def test_the_account_of_a_step_is_that_of_its_units() -> None:
    window = Window(1, 10, 50)
    for seed in range(200):
        generator = random.Random(seed)
        part = Part("a", None, "forward")
        works = [Work(s, e, part, "") for s, e in sorted(some_intervals(generator, 6))]
        transfers = [
            Transfer(s, e, "all_gather", part, 2, (0, 1), "", 1.0) for s, e in sorted(some_intervals(generator, 5))
        ]
        waits = [generator.randrange(6) for _ in transfers]
        copies = [Copy(s, e, "") for s, e in some_intervals(generator, 3)]
        account = account_for(window, works=works, transfers=transfers, waits_s=waits, copies=copies)

        counted: Counter[str] = Counter()
        for unit in range(10, 50):
            at = [t for t in zip(transfers, waits, strict=True) if t[0].start_s <= unit < t[0].end_s]
            moving = any(unit >= t.start_s + wait for t, wait in at)
            if any(w.start_s <= unit < w.end_s for w in works):
                counted["work"] += 1
                counted["hidden"] += bool(at)
            elif at:
                counted["exposed" if moving else "waiting"] += 1
            else:
                counted["copies" if any(c.start_s <= unit < c.end_s for c in copies) else "idle"] += 1
        sums = {name: sum(getattr(account, name).values()) for name in ("work", "hidden", "exposed", "waiting")}
        assert sums | {"copies": account.copies, "idle": account.idle} == {
            name: counted[name] for name in ("work", "hidden", "exposed", "waiting", "copies", "idle")
        }
        starts = [s.start_s for s in (*works, *transfers, *copies) if s.end_s > max(10, s.start_s)]
        assert account.idle_before == min((max(start, 10) for start in starts if start < 50), default=50) - 10
