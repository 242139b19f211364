"""What `python benchmarks/claims` prints and writes."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from claims.all_claims import CLAIMS, TABLES
from claims.claim import COUNT, judge
from claims.command import main
from claims.report import amount, as_text, count_verdicts

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
