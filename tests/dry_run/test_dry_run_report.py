"""What a dry run says: rows that differ from the plan are seen, and impossible ranks refused."""

import json
import re
from pathlib import Path

import pytest
import torch

from modeling.layout import ParallelLayout
from recipe.cli import main
from recipe.dry_run import ledger
from recipe.dry_run.dry_run import DryRun, dry_run
from recipe.dry_run.engine_trace import UntouchedLedger
from recipe.dry_run.fake_world import fake_world
from recipe.dry_run.report import Compared, Comparison, as_json, describe, even_share
from recipe.shared.sent import Sent
from tests.ranks import run_ranks
from tests.traffic_jobs import small_job

# The second row is counted to a part of a byte, which is none; the third was not counted at all.
ROWS = (Sent("group", "all_gather", "attention", 4, 8192.0), Sent("group", "all_reduce", "head", 2, 1384.4))
PLANNED = (ROWS[0], ROWS[1]._replace(num_calls=8, sent_bytes=1384.0), Sent("dp", "all_reduce", "zero", 1, 12.0))


FOUND = DryRun(ROWS, {"weights": 2**21, "activations": 3 * 2**20, "logits": 0}, "head", ("an assumption",))
COMPARED = (
    Compared(ROWS[0], PLANNED[0]),
    Compared(ROWS[1], PLANNED[1]),
    Compared(Sent("dp", "all_reduce", "zero", 0, 0.0), PLANNED[2]),
)
MEMORY = {"weights": (2**21, 2**21), "activations": (3 * 2**20, 2**22), "logits": (4, 0)}


def test_a_row_is_equal_to_the_byte() -> None:
    assert [row.is_equal for row in COMPARED] == [True, True, False]
    assert not Compared(ROWS[1], ROWS[1]._replace(sent_bytes=1385.0)).is_equal


def test_lines_for_people() -> None:
    job = small_job(2, 2, 2)
    lines = list(describe(FOUND, job, rank=3, comparison=Comparison(COMPARED, MEMORY)))
    assert lines == [
        "rank 3 of 4, dp=2 tp=2 ep=2 etp=1, ZeRO-1, fp32, one step:",
        "  axis   op          purpose    calls  bytes sent  calls planned  bytes planned",
        "  group  all_gather  attention      4       8,192              4          8,192",
        "  group  all_reduce  head           2       1,384              8          1,384  other calls",
        "  dp     all_reduce  zero           -           -              1             12      differs",
        "in all 9 KiB",
        "memory of a micro-batch at its fullest, head: 5 MiB, states as without ZeRO",
        "  kind         counted  planned",
        "  weights        2 MiB    2 MiB",
        "  activations    3 MiB    4 MiB",
        "note: an assumption",
        "1 of 3 rows differ from the plan",
        "1 rows of equal bytes are sent in other numbers of calls than planned",
    ]
    alone = list(describe(FOUND, job, rank=3, comparison=None))
    assert alone[1:3] == [
        "  axis   op          purpose    calls  bytes sent",
        "  group  all_gather  attention      4       8,192",
    ]
    assert alone[5:] == [
        "memory of a micro-batch at its fullest, head: 5 MiB, states as without ZeRO",
        "      3 MiB  activations",
        "      2 MiB  weights",
        "note: an assumption",
    ]
    assert (
        list(describe(FOUND, job, rank=0, comparison=Comparison(COMPARED[:1], MEMORY)))[-1]
        == "the plan is equal to the byte"
    )


def test_one_object_for_programs() -> None:
    found = as_json(FOUND, small_job(2, 2, 2), rank=3, comparison=Comparison(COMPARED, MEMORY))
    assert json.loads(json.dumps(found)) == found
    assert found["compare"]["collective_bytes_equal"] is False
    assert found["compare"]["collectives"][2] == {
        "axis": "dp",
        "op": "all_reduce",
        "purpose": "zero",
        "counted_calls": 0,
        "counted_bytes": 0.0,
        "planned_calls": 1,
        "planned_bytes": 12.0,
        "equal": False,
        "calls_equal": False,
    }
    assert [row["calls_equal"] for row in found["compare"]["collectives"]] == [True, False, False]
    assert found["compare"]["collective_calls_equal"] is False
    assert found["compare"]["memory"][0] == {"kind": "weights", "counted_bytes": 2**21, "planned_bytes": 2**21}
    assert "compare" not in as_json(FOUND, small_job(2, 2, 2), rank=3, comparison=None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8 --tp 3", r"world_size=8 cannot be cut into groups of tp=3; tp must be one of \[1, 2, 4, 8\]"),
        ("--gpus 8 --tp 2 --ep 2 --strategy gather_weights", "strategy=gather_weights needs a slice of every expert"),
        ("--gpus 12", "--gpus 12 do not fill nodes of 8, the usual number"),
        ("--gpus 8 --gpu cpu --device cuda", "hardware 'cpu' is a cpu, but the plan is for device cuda"),
        ("--gpus 8 --gpu k80", "hardware 'k80' is not known"),
    ],
)
def test_what_no_run_could_be_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", "--model", "demo", "--seq_len", "64", *words.split()]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_frozen_parameters_have_no_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"arguments": {"freeze_parameters": ["embed_tokens"]}}))
    words = ["dry-run", "--model", "demo", "--gpus", "8", "--ds_config", str(config)]
    assert main(words) == 2
    assert "freeze_parameters embed_tokens has no formula here" in capsys.readouterr().err


def test_where_rows_do_not_divide_a_rank_sends_whole_ones() -> None:
    """34 pairs of each of four ranks: 8, 9, 8 and 9 of them to each."""
    job = small_job(1, 4, 4, strategy="all_to_all", num_sequences=1, block_size=68)
    rows = [even_share(job, rank=rank) * 34 * 3 / 4 for rank in range(5)]
    assert rows == pytest.approx([26, 25, 26, 25, 26], rel=1e-12)
    assert even_share(small_job(1, 4, 4, strategy="all_to_all"), rank=1) == 1
    assert even_share(small_job(1, 4, 4, block_size=17), rank=1) == 1


def test_addresses_that_cannot_be_reserved_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with UntouchedLedger(), pytest.raises(ValueError, match=r"no 4.0 GiB of addresses .* \(Cannot allocate memory\)"):
        torch.empty(2**30)


def test_only_the_report_and_the_command_ask_the_planner() -> None:
    """The job, which says what is run, is all that counting takes from there."""
    asking = {
        path.name
        for path in Path(ledger.__file__).parent.glob("*.py")
        if "recipe.plan" in path.read_text().replace("from recipe.plan.job import Job", "")
    }
    assert asking == {"report.py", "command.py"}


def test_copies_of_experts_cannot_be_run_dry() -> None:
    with pytest.raises(ValueError, match="resident_experts=1 are copied by the loads of the step before"):
        dry_run(small_job(1, 2, 2, resident_experts=1), engine_config={})


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 8 is none of 8 ranks, which are 0 to 7"):
        fake_world(ParallelLayout(dp=4, tp=2), num_key_value_heads=2, rank=8).__enter__()


def in_a_real_group(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        fake_world(ParallelLayout(), num_key_value_heads=2).__enter__()
    return str(caught.value)


@pytest.mark.slow
def test_a_real_rank_cannot_run_dry() -> None:
    assert (
        run_ranks(in_a_real_group, 2)
        == ["a dry run needs a process of its own, and this one is a rank of a real group"] * 2
    )
