"""Claims and tables as text for a terminal, as one JSON object, and as a page of Markdown."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from claims.claim import Judged, Unit, Value
from claims.table import Table, cell_text, column_title

WIDTH = 110
ARTICLES = {1: "five tuning techniques for a model on 16 A100", 2: "Megatron and Switch Transformer combined"}
HEAD = """\
# The claims this project began with, recomputed

Made by `python benchmarks/claims --markdown`; edit `benchmarks/claims` instead. A test holds this page against it.

Two articles asked for what is built here: article 1 is about five tuning techniques for a model on 16 A100, article 2
about Megatron and the Switch Transformer combined. What they ask for is sound; many of their numbers are not. Each is
worked out again below, from sizes, by the formulas that the project itself plans with (`modeling/cost.py`,
`recipe/shared/flops.py`, `recipe/plan`), and the verdict follows from the number by a rule.

The case of both: L = 16,384 positions, H = 1024 wide, 64 heads, E = 8 experts of which a token visits k = 2, each of
m = 2 matrices, F = 4096 wide, b = 2 bytes per number; groups of N = TP = EP = 4 ranks, DP = 4 of them. T are the
tokens in a group, q = (N-1)/N what a rank sends of a whole in an all-gather or a reduce-scatter, rho the busiest
rank's load over the mean. MiB and GiB are powers of two, and the articles' MB and GB are taken for them where they
count memory or tensors.
"""


def amount(number: float, unit: Unit) -> str:
    """Four digits, all of whole numbers; without the unit."""
    shown = number / unit.size
    if unit.base == "year":
        return f"{shown:.0f}"
    if shown == round(shown) or abs(shown) >= 1000:
        return f"{shown:,.0f}"
    return f"{shown:.4g}"


def value_text(value: Value) -> str:
    unit = value.unit
    computed = amount(value.computed, unit)
    if value.upto is not None:
        computed += f" to {amount(value.upto, unit)}"
    text = f"{value.name}: {computed} {unit.name}".rstrip()
    return text if value.stated is None else f"{text} (stated {amount(value.stated, unit)})"


def count_verdicts(judged: Iterable[Judged]) -> dict[str, int]:
    """The commonest first."""
    return {str(verdict): count for verdict, count in Counter(one.verdict for one in judged).most_common()}


def as_json(judged: Sequence[Judged], tables: Sequence[Table]) -> dict[str, Any]:
    """Numbers in bytes, seconds, FLOP and shares; `unit` says which."""
    return {
        "claims": [_claim_json(one) for one in judged],
        "verdicts": count_verdicts(judged),
        "tables": [_table_json(table) for table in tables],
    }


def _claim_json(one: Judged) -> dict[str, Any]:
    claim = one.claim
    return {
        "number": claim.number,
        "article": claim.article,
        "claim": claim.says,
        "formula": claim.formula,
        "values": [
            {
                "name": value.name,
                "unit": value.unit.base,
                "computed": value.computed,
                "upto": value.upto,
                "stated": value.stated,
                "tolerance": value.tolerance,
                "agrees": value.agrees,
            }
            for value in one.values
        ],
        "rule": claim.rule.words,
        "verdict": str(one.verdict),
        "why": claim.why,
        "sources": list(claim.sources),
    }


def _table_json(table: Table) -> dict[str, Any]:
    return {
        "key": table.key,
        "title": table.title,
        "intro": table.intro,
        "columns": [
            {"key": column.key, "title": column.title, "unit": None if column.unit is None else column.unit.base}
            for column in table.columns
        ],
        "rows": [dict(row) for row in table.rows()],
        "notes": list(table.notes),
        "sources": list(table.sources),
    }


def as_text(judged: Sequence[Judged], tables: Sequence[Table]) -> Iterator[str]:
    """Lines for a terminal."""
    article = None
    for one in judged:
        if one.claim.article != article:
            article = one.claim.article
            yield f"Article {article}: {ARTICLES[article]}"
        yield from _claim_lines(one)
    if len(judged) > 1:
        yield f"{len(judged)} claims: " + ", ".join(f"{count} {name}" for name, count in count_verdicts(judged).items())
    for table in tables:
        yield ""
        yield table.title
        yield from textwrap.wrap(table.intro, WIDTH)
        yield from _aligned(table)
        for note in (*table.notes, *(f"source: {source}" for source in table.sources)):
            yield from textwrap.wrap(note, WIDTH)


def _claim_lines(one: Judged) -> Iterator[str]:
    claim = one.claim
    indent = " " * 22
    first = f"{claim.number:>4}  {one.verdict:<14}  "
    yield from textwrap.wrap(claim.says, WIDTH, initial_indent=first, subsequent_indent=indent)
    texts = [value_text(value) for value in one.values]
    if claim.formula:
        texts.insert(0, f"= {claim.formula}")
    for text in (*texts, claim.why, *(f"source: {source}" for source in claim.sources)):
        yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _cells(table: Table) -> list[list[str]]:
    return [[cell_text(row[column.key], column) for column in table.columns] for row in table.rows()]


def _aligned(table: Table) -> Iterator[str]:
    """Numbers to the right, texts to the left; titles on as many lines as their columns' widths make them."""
    rows, titles = _cells(table), [column_title(column) for column in table.columns]
    longest = [max(len(word) for word in title.split()) for title in titles]
    widths = [max(8, longest[i], *(len(row[i]) for row in rows)) for i in range(len(titles))]
    is_text = [any(isinstance(row[column.key], str) for row in table.rows()) for column in table.columns]
    wrapped = [textwrap.wrap(title, width) for title, width in zip(titles, widths, strict=True)]
    for row in (*zip_longest(*wrapped, fillvalue=""), *rows):
        parts = zip(row, widths, is_text, strict=True)
        yield "  ".join(f"{cell:{'<' if text else '>'}{width}}" for cell, width, text in parts).rstrip()


def as_markdown(judged: Sequence[Judged], tables: Sequence[Table]) -> str:
    """A whole page, with a line feed at its end."""
    lines = [HEAD, _verdict_sentence(judged), ""]
    for article, subject in ARTICLES.items():
        lines += [f"## Article {article}: {subject}", ""]
        lines += ["| # | claim | formula | computed | verdict | why |", "|---|---|---|---|---|---|"]
        lines += [_claim_row(one) for one in judged if one.claim.article == article] + [""]
    lines += ["## How a verdict is found", ""]
    lines += [f"* {words[0].upper()}{words[1:]}." for words in dict.fromkeys(one.claim.rule.words for one in judged)]
    lines.append("")
    for table in tables:
        lines += [f"## {table.title}", "", *textwrap.wrap(table.intro, 120), ""]
        lines.append(_markdown_row(column_title(column) for column in table.columns))
        lines.append(_markdown_row("---" for _ in table.columns))
        lines += [_markdown_row(cells) for cells in _cells(table)]
        lines.append("")
        for note in (*table.notes, *((f"Sources: {'; '.join(table.sources)}.",) if table.sources else ())):
            lines += [*textwrap.wrap(note, 120), ""]
    return "\n".join(lines)


def _verdict_sentence(judged: Sequence[Judged]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in count_verdicts(judged).items())
    return f"Of {len(judged)} claims: {counts}."


def _claim_row(one: Judged) -> str:
    claim = one.claim
    why = claim.why if not claim.sources else f"{claim.why} [{'; '.join(claim.sources)}]"
    values = "<br>".join(value_text(value) for value in one.values)
    return _markdown_row((str(claim.number), claim.says, claim.formula, values, f"**{one.verdict}**", why))


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
