"""The emulated cluster: ranks meet over their own limited links, and nothing of it stays."""

import os
import signal
import subprocess
import sys
import time

import cluster as cluster_script
import pytest

CLUSTER = [sys.executable, cluster_script.__file__]
MEET = r"""
import os, subprocess, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(x)
link = subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout
cores = len(os.sched_getaffinity(0))
line = f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {x[0]:.0f}, {cores} core, link {link.strip()}"
os.write(1, line.encode() + b"\n")  # in one piece, beside the other rank's
dist.destroy_process_group()
os._exit(0)  # threads of gloo that outlive their group can abort an interpreter that ends
"""


def cluster(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLUSTER, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )


def our_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("gmoe")]


@pytest.mark.netns
def test_ranks_meet_over_links_of_the_rate_asked_for() -> None:
    done = cluster("run", "2", "--rate", "200mbit", "--", sys.executable, "-c", MEET)
    assert done.returncode == 0, done.stdout
    for rank in (0, 1):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank} of 2: sum 3, 1 core")]
        assert "tbf" in line
        assert "rate 200Mbit" in line
    assert our_namespaces() == []


@pytest.mark.netns
def test_a_cluster_stays_up_until_it_is_taken_down() -> None:
    try:
        assert cluster("up", "2", "--rate", "100mbit").returncode == 0
        assert "a cluster is up already" in cluster("up", "2").stdout
        done = cluster("run", "2", "--", sys.executable, "-c", MEET)
        assert "rate 100Mbit" in done.stdout
        assert "has 2 ranks, not 3" in cluster("run", "3", "--", "true").stdout
        assert sorted(our_namespaces()) == ["gmoe-h0", "gmoe-h1", "gmoe-sw"]
    finally:
        assert "removed 3 namespaces" in cluster("down").stdout
    assert our_namespaces() == []


@pytest.mark.netns
def test_a_failing_rank_ends_the_others_and_its_code_comes_back() -> None:
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    done = cluster("run", "2", "--", sys.executable, "-c", script, timeout_s=30.0)
    assert done.returncode == 7
    assert our_namespaces() == []


@pytest.mark.netns
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_after_an_interruption(how: signal.Signals) -> None:
    words = [*CLUSTER, "run", "2", "--", sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(words, start_new_session=True) as process:
        deadline = time.monotonic() + 20
        while len(our_namespaces()) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(our_namespaces()) == 3
        time.sleep(0.5)
        os.kill(process.pid, how)
        process.wait(20)
    if how is signal.SIGKILL:
        assert cluster("run", "1", "--", "true").returncode == 0, "the next run cleans up after a killed one"
    assert our_namespaces() == []


def test_without_root_the_ranks_run_on_loopback_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with cluster_script.cluster_for(2, rate="1gbit") as none:
        assert none is None
        assert cluster_script.run(none, [sys.executable, "-c", "pass"], num_ranks=2) == 0
    assert "running on loopback" in capsys.readouterr().out


def test_loopback_can_be_asked_for() -> None:
    done = cluster("run", "2", "--rate", "loopback", "--", sys.executable, "-c", "import os; print(os.environ['RANK'])")
    assert done.returncode == 0
    assert sorted(done.stdout.split()[-2:]) == ["0", "1"]
    assert "running on loopback, as asked" in done.stdout
    assert "loopback is always up" in cluster("up", "2", "--rate", "loopback").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["run", "2"], "give the command after --"), (["up", "0"], "0 ranks make no cluster")],
)
def test_a_call_that_makes_no_sense_is_explained(words: list[str], message: str) -> None:
    done = cluster(*words)
    assert done.returncode == 2
    assert message in done.stdout
