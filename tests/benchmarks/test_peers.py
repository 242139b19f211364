"""The comparison with peers: medians over turns, and rows whose loss differs are void."""

from typing import Any

import peers
import pytest


def turn(*steps_s: float, loss: float = 9.0) -> dict[str, Any]:
    return {"steps_s": list(steps_s), "peak_rss_bytes": 2**30, "wire_bytes": 1e6, "loss": loss}


def test_a_row_holds_the_median_over_all_turns() -> None:
    row = peers.Row("gather-moe", "gather_tokens", False)
    (summary,) = peers.summarise({row: [turn(1.0, 5.0, 2.0), turn(3.0, 2.5, 9.0)]})
    assert summary == {
        "system": "gather-moe",
        "strategy": "gather_tokens",
        "overlap": False,
        "step_s": 2.75,
        "peak_rss_bytes": 2**30,
        "wire_bytes": 1e6,
        "loss": 9.0,
    }


def test_rows_that_failed_or_computed_something_else_are_void(capsys: pytest.CaptureFixture[str]) -> None:
    rows = peers.summarise(
        {
            peers.ROWS[0]: [turn(1.0)],
            peers.ROWS[6]: [turn(0.1, loss=9.0002)],
            peers.ROWS[7]: [turn(0.1), {"error": "ended with exit code 1"}],
            peers.ROWS[8]: [turn(2.0, loss=9.00005)],
        }
    )
    assert [row.get("void") for row in rows] == [
        None,
        "its loss 9.00020 is not 9.00000",
        "ended with exit code 1",
        None,
    ]
    peers.print_table(rows)
    shown = capsys.readouterr().out
    assert "transformers-tp-ep" in shown
    assert "void: ended with exit code 1" in shown
