"""Every claim's verdict and its rule, parts of the numbers by other ways, and the page, which pins all of them."""

import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from claims import case
from claims.all_claims import CLAIMS, TABLES
from claims.claim import COUNT, NEEDED, Claim, Value, Verdict, judge
from claims.command import main
from claims.machines import A100, A100_LINK_BYTES_PER_S, H100, H100_LINK_BYTES_PER_S, NETWORK_BYTES_PER_S
from claims.report import amount, as_text, count_verdicts
from claims.roofline import BACKWARD_TRANSFERS, FORWARD_TRANSFERS
from claims.shadowing import Routing, draw_loads, shadowing_rows, share_surplus, zipf

from modeling.cost import MATRICES
from recipe.plan.hardware import SHEETS, USUAL, find_hardware
from recipe.plan.traffic import planned_traffic
from recipe.shared.flops import count_parameters, model_flops_per_token
from tests.traffic_jobs import small_job


def rows_of(key: str) -> list[dict[str, Any]]:
    (table,) = (table for table in TABLES if table.key == key)
    return [dict(row) for row in table.rows()]


def claim_of(number: int) -> Claim:
    (claim,) = (claim for claim in CLAIMS if claim.number == number)
    return claim


def test_all_claims_are_there_in_order() -> None:
    """Their verdicts stand on the page."""
    assert [claim.number for claim in CLAIMS] == list(range(1, 49))
    assert [claim.article for claim in CLAIMS] == [1] * 26 + [2] * 22


def test_rates_are_those_of_the_planners_table_where_they_are_data_sheets_or_called_so() -> None:
    for name, row in zip((A100, H100), rows_of("rates"), strict=True):
        planned = find_hardware(name)
        assert planned.efficiencies is not None
        assert row["planned_products"] == planned.efficiencies.product
        assert row["planned_attention"] == planned.efficiencies.attention[USUAL].forward
        assert planned.intra is not None
        assert row["planned_link"] == planned.intra.bytes_per_s
    assert SHEETS[A100].link_gbs * 1e9 == A100_LINK_BYTES_PER_S
    assert SHEETS[H100].link_gbs * 1e9 == H100_LINK_BYTES_PER_S
    assert SHEETS[A100].nic_gbs * 1e9 == NETWORK_BYTES_PER_S


@pytest.mark.parametrize(
    ("row", "rho", "placed", "few", "copies"),
    [
        (0, 1.01, 1.00, 1.00, 3.0),
        (1, 1.27, 1.20, 1.03, 3.0),
        (2, 1.61, 1.47, 1.05, 3.0),
        (3, 1.33, 1.01, 1.08, 3.2),
        (4, 1.72, 1.09, 1.17, 7.5),
        (5, 1.34, 1.00, 1.11, 8.6),
    ],
)
def test_simulated_routings_agree_with_another_simulation(
    row: int, rho: float, placed: float, few: float, copies: float
) -> None:
    """Of the same distributions by other random numbers, packed without swaps: within three standard errors of both."""
    got: dict[str, Any] = dict(shadowing_rows()[row])
    assert got["rho"] == pytest.approx(rho, abs=0.01 + 3 * 2**0.5 * got["rho_error"])
    assert placed - 0.05 <= got["placed"] <= placed + 0.01
    assert got["few_copies"] == pytest.approx(few, abs=0.06)
    assert got["copies"] == pytest.approx(copies, abs=0.8)
    assert got["full_rho"] == pytest.approx(1.0)


def test_tokens_visit_experts_by_popularity_and_none_twice() -> None:
    """The first of two choices among weights 1, 1/2 and 1/3, and the second among what is left."""
    import numpy as np

    def falling(generator: np.random.Generator, experts: int) -> "np.ndarray[Any, Any]":
        return 1 / np.arange(1, experts + 1)

    loads = draw_loads(Routing(3, 2, 1, "", falling), np.random.Generator(np.random.PCG64(1)))
    p = [6 / 11, 3 / 11, 2 / 11]
    chance = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    assert sum(loads) == 2 * case.LENGTH
    assert [load / case.LENGTH for load in loads] == pytest.approx(chance, abs=0.015)
    even = draw_loads(Routing(4, 1, 1, "", zipf(0.0)), np.random.Generator(np.random.PCG64(1)))
    assert [load / case.LENGTH for load in even] == pytest.approx([0.25] * 4, abs=0.015)


@pytest.mark.parametrize(
    ("loads", "num_ranks", "max_copies", "num_copies", "rho"),
    [
        # The first rank's expert 0 has 6 of 8 rows: a copy of it on the second rank makes 4 each.
        ([6.0, 0.0, 1.0, 1.0], 2, None, 1, 1.0),
        ([6.0, 0.0, 1.0, 1.0], 2, 0, 0, 1.5),
        ([8.0, 0.0, 0.0, 0.0], 4, None, 3, 1.0),  # each idle rank needs a copy
    ],
)
def test_surplus_goes_from_hot_experts_to_idle_ranks(
    loads: list[float], num_ranks: int, max_copies: int | None, num_copies: int, rho: float
) -> None:
    copies = share_surplus(loads, num_ranks=num_ranks, max_copies=max_copies)
    assert copies.num_copies == num_copies
    assert copies.rho == pytest.approx(rho)


# Sources decide these, or they say no number; the computed best of 43 is at the end of its range, whatever is stated.
SILENT, AT_THE_END = {22, 26, 34, 44, 46, 48}, {43}


def test_nearly_all_claims_say_a_number() -> None:
    assert {c.number for c in CLAIMS if all(value.stated is None for value in c.compute())} == SILENT


@pytest.mark.parametrize("number", sorted(set(range(1, 49)) - SILENT - AT_THE_END))
def test_a_verdict_follows_from_the_stated_numbers(number: int) -> None:
    """Other stated numbers, another verdict: those computed, and ones far off."""
    claim = claim_of(number)
    values = claim.compute()

    def with_stated(factor: float) -> tuple[Value, ...]:
        # Plus something, since 0 times anything is 0.
        return tuple(
            v if v.stated is None else replace(v, stated=factor * (v.upto or v.computed) + factor - 1) for v in values
        )

    true, far = claim.rule.judge(with_stated(1.0)), claim.rule.judge(with_stated(1000.0))
    assert true != far
    if claim.rule is NEEDED:
        assert (true, far) == (Verdict.RIGHT, Verdict.OBSOLETE)
    else:
        assert true in (Verdict.RIGHT, Verdict.UNDERDETERMINED, Verdict.PLAUSIBLE, Verdict.SUSPICIOUS)
        assert far in (Verdict.WRONG, Verdict.IMPLAUSIBLE, Verdict.PLAUSIBLE)


def test_rules_for_the_best_of_a_range_and_for_one_size_at_every_length() -> None:
    best, same = claim_of(43), claim_of(34)
    value = best.compute()[0]
    inside = replace(value, computed=1.5)
    assert best.rule.judge((value,)) is Verdict.UNDERDETERMINED
    assert best.rule.judge((inside,)) is Verdict.RIGHT
    assert best.rule.judge((replace(inside, stated=3.0),)) is Verdict.WRONG
    first, *others = same.compute()
    assert same.rule.judge((replace(first, computed=8), *others)) is Verdict.PLAUSIBLE


def test_a_value_agrees_within_its_tolerance_of_a_number_or_a_span() -> None:
    value = Value("", COUNT, 100.0, stated=104.9)
    assert value.agrees is True
    assert replace(value, stated=105.1).agrees is False
    assert replace(value, stated=104.9, tolerance=0).agrees is False
    assert replace(value, stated=150.0, upto=200.0).agrees is True
    assert replace(value, stated=None).agrees is None


def test_parts_of_a_layer_are_the_projects_own_counts() -> None:
    """With its three matrices per expert: all parts together, and the parameters."""
    flops = case.layer_flops(matrices=MATRICES)
    assert 3 * (flops.products + flops.attention) == pytest.approx(
        model_flops_per_token(case.LAYER, attention_length=case.LENGTH)
    )
    hidden, width = case.WIDTH, case.LAYER.moe_intermediate_size
    assert case.layer_flops().experts == pytest.approx(2 * 2 * 2 * hidden * width)
    assert flops.qkv == pytest.approx(3 * flops.output) == pytest.approx(2 * 3 * hidden * hidden)
    assert flops.attention == pytest.approx(2 * case.LENGTH * hidden)
    assert case.layer_parameters() == pytest.approx(71.3e6, rel=1e-3)
    assert count_parameters(case.LAYER).total - case.layer_parameters() == pytest.approx(8 * hidden * width)


def test_a_layer_sends_what_the_planner_says() -> None:
    """Ten transfers of the tokens, forward and backward, both inputs gathered again."""
    layers = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    model = {**asdict(case.LAYER), "vocab_size": 1024, "intermediate_size": 4096, **layers}
    run = {"overlap": True, "regather": True, "experts_backend": "grouped", "precision": "bf16", "device": "cuda"}
    options: dict[str, Any] = {**run, "num_sequences": 1, "block_size": case.LENGTH}
    job = small_job(tp=case.RANKS, ep=case.RANKS, model=model, **options)
    sent = sum(row.sent_bytes for row in planned_traffic(job) if row.purpose in ("attention", "experts"))
    transfer = case.gather_bytes(case.tokens_bytes())
    assert sent == pytest.approx((FORWARD_TRANSFERS + BACKWARD_TRANSFERS) * transfer)


ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "claims.md"
    assert main(["--markdown", str(page)]) == 0
    assert "wrote" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text == (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), "run: python benchmarks/claims --markdown"
    assert main(["--markdown", "-"]) == 0
    assert capsys.readouterr().out == text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for above, below in pairwise(rows):
        if re.fullmatch(r"\|(\s*-+\s*\|)+", below):
            assert above.count("|") == below.count("|")
    assert all(line.count("|") == 7 for line in rows if re.match(r"\| \d+ \| .*\*\*", line))
    allowed = text.replace("nccl-tests issue", "").replace("recipe/shared/", "")
    assert not re.search(r"session|helper|shared/|issue \d|\.txt", allowed)


def test_json_is_one_object_in_base_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"claims", "verdicts", "tables"}
    assert sum(found["verdicts"].values()) == len(found["claims"]) == 48
    keys = {"number", "article", "claim", "formula", "values", "rule", "verdict", "why", "sources"}
    value_keys = {"name", "unit", "computed", "upto", "stated", "tolerance", "agrees"}
    for claim in found["claims"]:
        assert set(claim) == keys
        assert all(set(value) == value_keys for value in claim["values"])
        assert all((value["agrees"] is None) == (value["stated"] is None) for value in claim["values"])
        assert claim["why"]
    assert [table["key"] for table in found["tables"]] == [table.key for table in TABLES]
    for table in found["tables"]:
        assert set(table) == {"key", "title", "intro", "columns", "rows", "notes", "sources"}
        assert all({column["key"] for column in table["columns"]} <= set(row) for row in table["rows"])
    (scores,) = (claim["values"][0] for claim in found["claims"] if claim["number"] == 12)
    assert (scores["computed"], scores["stated"], scores["unit"]) == (8 * 2**30, 8 * 2**30, "bytes")


def test_one_claim_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--number", "30"]) == 0
    text = capsys.readouterr().out
    assert "wrong" in text
    assert "2·16,384² bytes: 0.5 GiB (stated 2)" in text
    assert main(["--number", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [claim["number"] for claim in found["claims"]] == [30]
    assert found["tables"] == []


def test_text_has_every_claim_and_table() -> None:
    judged = [judge(claim) for claim in CLAIMS]
    text = "\n".join(as_text(judged, TABLES))
    assert all(table.title in text for table in TABLES)
    assert all(re.search(rf"^ *{one.claim.number}  {one.verdict} ", text, re.M) for one in judged)
    assert f"48 claims: {count_verdicts(judged)['wrong']} wrong" in text


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--number", "49"], "--number 49: there is no such claim, they are 1 to 48"),
        (["--number", "3", "--markdown"], "--number shows one claim .* leave one out"),
        (["--markdown", str(tmp_path / "no" / "page.md")], "page.md cannot be written: No such file .* name a file"),
    ):
        assert main([*arguments]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_numbers_are_printed_with_four_digits() -> None:
    claim = CLAIMS[27].compute()[0]
    assert amount(2021, claim.unit) == "2021"
    assert [amount(x, COUNT) for x in (0.12345, 1402.0, 28.248, 33600.4)] == [
        "0.1235",
        "1,402",
        "28.25",
        "33,600",
    ]
