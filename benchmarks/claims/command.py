"""`python -m claims` in benchmarks/: the claims of the articles that this project began with, each recomputed."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

PAGE = Path("docs/claims.md")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="claims", description=__doc__)
    _add_arguments(parser)
    try:
        return _run(parser.parse_args(argv))
    except ValueError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as one JSON object")
    output.add_argument(
        "--markdown",
        type=Path,
        nargs="?",
        const=PAGE,
        metavar="FILE",
        help=f"write a page, {PAGE} where no file is named; '-' prints it",
    )
    parser.add_argument("--number", type=int, metavar="N", help="this claim alone, without the tables")


def _run(arguments: argparse.Namespace) -> int:
    from claims.all_claims import CLAIMS, TABLES
    from claims.claim import judge
    from claims.report import as_json, as_markdown, as_text

    chosen, tables = CLAIMS, TABLES
    if arguments.number is not None:
        if arguments.markdown is not None:
            raise ValueError("--number shows one claim and --markdown writes the page of all of them; leave one out")
        chosen, tables = tuple(claim for claim in CLAIMS if claim.number == arguments.number), ()
        if not chosen:
            raise ValueError(f"--number {arguments.number}: there is no such claim, they are 1 to {CLAIMS[-1].number}")
    judged = [judge(claim) for claim in chosen]
    if arguments.json:
        print(json.dumps(as_json(judged, tables), indent=2, ensure_ascii=False))
    elif arguments.markdown is not None:
        _write_page(arguments.markdown, text=as_markdown(judged, tables))
    else:
        for line in as_text(judged, tables):
            print(line)
    return 0


def _write_page(path: Path, *, text: str) -> None:
    if path == Path("-"):
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--markdown {path} cannot be written: {error.strerror}; name a file, or '-' to print it"
        ) from None
    print(f"wrote {path}")
