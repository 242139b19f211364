"""An emulated cluster on one machine: each rank in a network namespace of its own, behind a link of limited rate.

    python benchmarks/cluster.py run 2 --rate 1gbit -- python script.py      a cluster for one command
    python benchmarks/cluster.py up 4 --rate 100mbit                          one that stays, for several
    python benchmarks/cluster.py run 4 -- python script.py
    python benchmarks/cluster.py down

A token bucket on each link limits what leaves a rank, so that waiting for the wire costs no CPU time, as it does not on
a real network: overlap and volume become measurable on a laptop. Needs root and iproute2; elsewhere `run` says so and
uses loopback, where transfers cost CPU time instead.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recipe.launch.processes import wait_for_exits

STAYING = "gmoe"  # prefix of a cluster made by `up`
PASSING = "gmoe-run"  # prefix, with the process id behind it, of one made by `run`
SUBNET = "10.77.0"
PORT = "29500"  # inside the first rank's namespace, where nothing else listens
BURST = "128kb"
LOOPBACK = "loopback"
RATE_HELP = "of each rank's link, as tc writes it, or loopback: no cluster (default: 1gbit)"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_ranks` namespaces PREFIX-h0, PREFIX-h1, ... on the bridge of the namespace PREFIX-sw."""

    prefix: str
    num_ranks: int
    rate: str

    def host(self, rank: int) -> str:
        return f"{self.prefix}-h{rank}"

    @property
    def switch(self) -> str:
        return f"{self.prefix}-sw"


def build(cluster: Cluster) -> None:
    """Make namespaces, bridge and links. RuntimeError with the command that failed."""
    _ip(f"netns add {cluster.switch}")
    _ip(f"-n {cluster.switch} link add br0 type bridge")
    _ip(f"-n {cluster.switch} link set br0 up")
    for rank in range(cluster.num_ranks):
        host, port = cluster.host(rank), f"p{rank}"
        _ip(f"netns add {host}")
        _ip(f"-n {host} link add eth0 type veth peer name {port} netns {cluster.switch}")
        _ip(f"-n {cluster.switch} link set {port} master br0 up")
        _ip(f"-n {host} addr add {SUBNET}.{rank + 1}/24 dev eth0")
        _ip(f"-n {host} link set eth0 up")
        _ip(f"-n {host} link set lo up")
        limit = f"tc qdisc add dev eth0 root tbf rate {cluster.rate} burst {BURST} latency 400ms"
        _ip(f"netns exec {host} {limit}")


def remove(prefix: str) -> int:
    """Delete all namespaces of a prefix, and with them their links; returns how many there were."""
    names = [name for name in namespaces() if name.startswith(f"{prefix}-")]
    for name in names:
        _ip(f"netns delete {name}")
    return len(names)


def remove_dead() -> None:
    """Delete what a `run` that was killed left behind."""
    for name in namespaces():
        if name.startswith(f"{PASSING}"):
            owner = name.removeprefix(PASSING).split("-")[0]
            if not os.path.exists(f"/proc/{owner}"):
                _ip(f"netns delete {name}")


def namespaces() -> list[str]:
    """The names of all network namespaces there are."""
    return [line.split()[0] for line in _ip("netns list").splitlines() if line.strip()]


def why_not_here() -> str | None:
    """Why namespaces cannot be made on this machine; None where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    probe = f"{PASSING}{os.getpid()}-probe"
    try:
        _ip(f"netns add {probe}")
        _ip(f"netns delete {probe}")
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def cluster_for(num_ranks: int, *, rate: str) -> Iterator[Cluster | None]:
    """The cluster that is up, or one for as long as the block lasts; None where there can be, or shall be, none."""
    if rate == LOOPBACK:
        print("running on loopback, as asked: transfers cost CPU time", flush=True)
        yield None
        return
    reason = why_not_here()
    if reason is not None:
        print(f"no namespaces here, since {reason}: running on loopback, where transfers cost CPU time", flush=True)
        yield None
        return
    remove_dead()
    standing = [name for name in namespaces() if name.startswith(f"{STAYING}-h")]
    if standing:
        if len(standing) != num_ranks:
            raise ValueError(f"the cluster that is up has {len(standing)} ranks, not {num_ranks}; take it down first")
        yield Cluster(prefix=STAYING, num_ranks=num_ranks, rate="")
        return
    cluster = Cluster(prefix=f"{PASSING}{os.getpid()}", num_ranks=num_ranks, rate=rate)
    try:
        build(cluster)
        yield cluster
    finally:
        remove(cluster.prefix)


def run(cluster: Cluster | None, command: Sequence[str], *, num_ranks: int) -> int:
    """Start one process per rank, each pinned to a core; a failing rank ends the others, and its code is returned."""
    cores = sorted(os.sched_getaffinity(0))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            inside = [] if cluster is None else ["ip", "netns", "exec", cluster.host(rank)]
            pin = ["taskset", "-c", str(cores[rank % len(cores)])]
            variables = os.environ | _variables(rank, num_ranks, on_loopback=cluster is None)
            processes.append(subprocess.Popen([*inside, *pin, *command], env=variables, start_new_session=True))
        return wait_for_exits(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _variables(rank: int, num_ranks: int, *, on_loopback: bool) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1" if on_loopback else f"{SUBNET}.1",
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "lo" if on_loopback else "eth0",
        "OMP_NUM_THREADS": "1",
    }


def _ip(words: str) -> str:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`ip {words}` failed: {done.stderr.strip()}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    arguments, command = _parse(argv)
    if arguments.action == "down":
        print(f"removed {remove(STAYING)} namespaces")
        return 0
    if arguments.action == "up":
        reason = why_not_here()
        if reason is not None:
            print(f"no cluster can be made here: {reason}", file=sys.stderr)
            return 2
        remove_dead()
        if any(name.startswith(f"{STAYING}-h") for name in namespaces()):
            print("a cluster is up already; take it down first", file=sys.stderr)
            return 2
        try:
            build(Cluster(prefix=STAYING, num_ranks=arguments.num_ranks, rate=arguments.rate))
        except BaseException:
            remove(STAYING)
            raise
        return 0
    # A polite end (Ctrl-C, a time-out's SIGTERM) must reach the clean-up too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with cluster_for(arguments.num_ranks, rate=arguments.rate) as cluster:
        return run(cluster, command, num_ranks=arguments.num_ranks)


def _parse(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("up", "run"):
        action = actions.add_parser(name)
        action.add_argument("num_ranks", type=int)
        action.add_argument("--rate", default="1gbit", help=RATE_HELP)
    actions.add_parser("down")
    arguments = parser.parse_args(words[: len(words) - len(command) - 1] if command else words)
    if arguments.action == "run" and not command:
        parser.error("give the command after --")
    if arguments.action == "up" and arguments.rate == LOOPBACK:
        parser.error("loopback is always up; give a rate, or use `run`")
    if arguments.action != "down" and arguments.num_ranks < 1:
        parser.error(f"{arguments.num_ranks} ranks make no cluster")
    return arguments, command


if __name__ == "__main__":
    sys.exit(main())
