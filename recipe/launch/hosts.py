"""Reads a hostfile strictly: every line that is not understood stops the run instead of changing its size."""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"(?P<name>[^\s=#]+)\s+slots=(?P<slots>[1-9][0-9]*)", re.ASCII)
BOM = "\ufeff"


class Host(NamedTuple):
    """A machine, as ssh is told its name, and the number of ranks it runs."""

    name: str
    slots: int


class Hostfile(NamedTuple):
    """The hosts in the order of the file, and notes on what can be used but is probably not meant."""

    hosts: tuple[Host, ...]
    notes: tuple[str, ...]


def read_hostfile(path: Path) -> Hostfile:
    """Read lines of the form `NAME slots=N`; blank lines, comments, CRLF and a byte-order mark are fine.

    Raises ValueError that names the file and every line that cannot be used.
    """
    if not path.is_file():
        raise ValueError(f"hostfile {path} is not a file; give the path of a file with lines like `worker-1 slots=8`")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"hostfile {path} is not UTF-8 text: {error}") from error
    hosts: list[Host] = []
    first_line: dict[str, int] = {}
    faults = []
    for number, line in enumerate(text.removeprefix(BOM).splitlines(), start=1):
        content = re.sub(r"(^|\s)#.*", "", line).strip()
        match = LINE.fullmatch(content)
        if match:
            host = Host(match["name"], int(match["slots"]))
            earlier = first_line.setdefault(_machine(host.name), number)
            if earlier == number:
                hosts.append(host)
            else:
                faults.append(f"line {number}: {host.name!r} is already on line {earlier}; give each host one line")
        elif content:
            faults.append(f"line {number}: {content!r} {_explain(content)}")
    if not hosts and not faults:
        faults.append("it names no host; add lines like `worker-1 slots=8`")
    if faults:
        raise ValueError("\n".join([f"hostfile {path} cannot be used:", *(f"  {fault}" for fault in faults)]))
    return Hostfile(tuple(hosts), tuple(_notes(text, hosts)))


def _machine(name: str) -> str:
    """Return the machine's name, which is the same for `user@host` and `HOST`."""
    return name.rpartition("@")[2].lower()


def _explain(content: str) -> str:
    words = content.split()
    if len(words) == 1:
        return "has no slots=N"
    key, equals, value = words[1].partition("=")
    if key != "slots" and equals:
        guess = difflib.get_close_matches(key, ["slots"], cutoff=0.4)
        return f"has {key!r} where slots=N belongs" + ("; did you mean 'slots'?" if guess else "")
    if key == "slots" and not re.fullmatch("[1-9][0-9]*", value):
        return f"has slots={value}, which is not a whole number of at least 1"
    return "is not of the form NAME slots=N"


def _notes(text: str, hosts: Sequence[Host]) -> Iterator[str]:
    if text.startswith(BOM):
        yield (
            "the file starts with a byte-order mark, which the deepspeed launcher takes for a part of the first "
            "host's name; save it without one"
        )
    if len({host.slots for host in hosts}) > 1:
        yield "the hosts have different numbers of slots, which a training run refuses; give all of them the smallest"
