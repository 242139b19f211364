"""A campaign against checkpoints: real runs under the launcher, killed, told to stop, damaged, starved of disk.

    python benchmarks/checkpoint_faults.py --times 20

Two ranks train a small model on CPU and save after every step. After each fault the same command is started again with
`--resume_from_checkpoint auto`; it must go on from the newest step that was ever complete, and never from zero.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.folders import LATEST, list_checkpoints, step_in_name
from recipe.checkpoint.manifest import MANIFEST_NAME
from recipe.shared import errors
from recipe.shared.errors import STOPPED
from recipe.shared.ranks import OneRank

ROOT = Path(__file__).parent.parent
LIMIT_S = 60.0  # a run that was told to stop, or whose peer died, must be gone by then
START_S = 120.0
MODEL = {
    "model_type": "gather_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 64,
    "qk_norm": "head",
}


@dataclass
class Row:
    """What came of one kind of fault. All counts but the first two must be 0."""

    fault: str
    times: int = 0
    interrupted: int = 0  # faults that met a save half done
    lost: int = 0  # a complete checkpoint was gone afterwards
    broken: int = 0  # a broken checkpoint was resumed from, or left where a run had ended
    fresh: int = 0  # training began again at step 0
    hung: int = 0  # processes were left after LIMIT_S
    odd_exit: int = 0  # another exit code than documented
    longest_s: float = 0.0

    @property
    def failures(self) -> int:
        return self.lost + self.broken + self.fresh + self.hung + self.odd_exit


class Campaign:
    """One run folder that is trained on, a few steps between two faults."""

    def __init__(self, folder: Path, *, seed: int, asynchronous: bool) -> None:
        self.folder, self.run = folder, folder / "run"
        self.checkpoints = self.run / "checkpoints"
        self.moments = random.Random(seed)
        self._asynchronous = asynchronous
        text = " ".join(f"word{self.moments.randrange(100)}" for _ in range(20000))
        (folder / "text.txt").write_text(text)
        (folder / "model.json").write_text(json.dumps(MODEL))

    def start(self, *, max_steps: int = 100000, output_dir: Path | None = None) -> subprocess.Popen[str]:
        flags = {
            "config_name": self.folder / "model.json",
            "train_file": self.folder / "text.txt",
            "cache_dir": self.folder / "cache",
            "output_dir": output_dir or self.run,
            "train_vocab_size": 400,
            "block_size": 32,
            "per_device_train_batch_size": 2,
            "max_steps": max_steps,
            "learning_rate": 1e-3,
            "save_steps": 1,
            "save_total_limit": 2,
            "logging_steps": 1,
            "eval_steps": 5,
            "max_eval_samples": 8,
            "async_save": self._asynchronous,
            "resume_from_checkpoint": "auto",
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", "run_pretrain.py", *words]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
            stdout=(self.folder / "said.txt").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")

    def newest(self) -> int:
        """The step that `latest` names, 0 without one."""
        link = self.checkpoints / LATEST
        return (step_in_name(Path(os.readlink(link))) or 0) if link.is_symlink() else 0

    def wait_for_a_save(self, process: subprocess.Popen[str], *, after: int) -> None:
        deadline = time.monotonic() + START_S
        while self.newest() <= after:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not come to save:\n{self.said()[-3000:]}")
            time.sleep(0.01)


def ranks_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "run_pretrain.py" in child.cmdline() and "-m" not in child.cmdline()]


def kill_one(campaign: Campaign, process: subprocess.Popen[str]) -> None:
    campaign.moments.choice(ranks_below(process)).kill()


def kill_all(campaign: Campaign, process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def tell_one(campaign: Campaign, process: subprocess.Popen[str]) -> None:
    campaign.moments.choice(ranks_below(process)).send_signal(signal.SIGTERM)


def strike(campaign: Campaign, row: Row, fault: Callable[[Campaign, subprocess.Popen[str]], None], times: int) -> None:
    """Start, save, strike at a random moment of the next half second, start again, and see what is gone on from."""
    known = campaign.newest()
    for _ in range(times):
        sound = [folder.step for folder in list_checkpoints(campaign.checkpoints) if is_sound(folder.path)]
        process = campaign.start()
        campaign.wait_for_a_save(process, after=known)
        check_beginning(campaign, row, known=known, sound=sound)
        time.sleep(campaign.moments.uniform(0.0, 0.5))
        session, committed, began_s = process.pid, campaign.newest(), time.monotonic()
        fault(campaign, process)
        code = wait_until_gone(process, session)
        row.times += 1
        row.longest_s = max(row.longest_s, time.monotonic() - began_s)
        row.hung += code is None
        row.odd_exit += fault is tell_one and code != STOPPED
        row.interrupted += any(campaign.checkpoints.glob(".staging-step-*"))
        known = campaign.newest()
        row.lost += known < committed
        say(row)


def is_sound(folder: Path) -> bool:
    try:
        verify_checkpoint(folder, ranks=OneRank())
    except errors.CheckpointBrokenError:
        return False
    return True


def check_beginning(campaign: Campaign, row: Row, *, known: int, sound: list[int]) -> None:
    """What the run that has just been started says it goes on from, beside what had been saved, and what was sound."""
    resumed = re.search(r"resuming from \S*/step-(\d+)", campaign.said())
    step = int(resumed[1]) if resumed else 0
    row.fresh += known > 0 and step == 0
    row.lost += 0 < step < known
    row.broken += step > 0 and step not in sound


def wait_until_gone(process: subprocess.Popen[str], session: int) -> int | None:
    """The launcher's exit code once no process of its session is left; None where some are, which are then killed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None and not members(session):
            return code
        time.sleep(0.05)
    for member in members(session):
        member.kill()
    process.wait()
    return None


def members(session: int) -> list[psutil.Process]:
    found = []
    for candidate in psutil.process_iter():
        try:
            if os.getsid(candidate.pid) == session and candidate.status() != psutil.STATUS_ZOMBIE:
                found.append(candidate)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def damage(campaign: Campaign, row: Row, spoil: Callable[[Path], None], times: int) -> None:
    """Spoil the newest of two checkpoints: the run must say so and go on from the older one."""
    for _ in range(times):
        make_two(campaign)
        spoiled, older = (folder.path for folder in reversed(list_checkpoints(campaign.checkpoints)[-2:]))
        spoil(spoiled)
        process = campaign.start(max_steps=step_in_name(older) or 0)
        code = process.wait(START_S)
        said = campaign.said()
        row.times += 1
        row.odd_exit += code != 0
        row.broken += f"resuming from {spoiled}" in said
        row.fresh += "starting at step 0" in said
        row.lost += f"passing over {spoiled.name}" not in said or f"resuming from {older}" not in said
        say(row)
        shutil.rmtree(spoiled)


def replace_damaged(campaign: Campaign, row: Row) -> None:
    """Spoil the newest and train up to its step: it must be saved anew, and gone on from behind it."""
    make_two(campaign)
    spoiled = list_checkpoints(campaign.checkpoints)[-1]
    flip_a_bit(spoiled.path)
    for last in (spoiled.step, spoiled.step + 1):
        process = campaign.start(max_steps=last)
        row.odd_exit += process.wait(START_S) != 0
        row.lost += campaign.newest() != last
        row.broken += not is_sound(spoiled.path)
    row.fresh += f"resuming from {spoiled.path}" not in campaign.said()
    row.times += 1
    say(row)


def make_two(campaign: Campaign) -> None:
    """Train until there are two complete checkpoints."""
    known = list_checkpoints(campaign.checkpoints)
    process = campaign.start()
    campaign.wait_for_a_save(process, after=known[-1].step + 1 if known else 1)
    tell_one(campaign, process)
    wait_until_gone(process, process.pid)


def some_file(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    path = some_file(folder, "deepspeed/*optim_states.pt")
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(folder: Path) -> None:
    path = some_file(folder, "deepspeed/*optim_states.pt")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def remove_a_ranks_file(folder: Path) -> None:
    some_file(folder, "ranks/*.pt").unlink()


@contextmanager
def small_disk(folder: Path, *, size_mib: int) -> Iterator[Path]:
    """A file system of its own in memory. Needs root."""
    place = folder / "disk"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill_the_disk(campaign: Campaign, row: Row) -> None:
    """Something else takes the space after the first saves; what was saved stays, and counts when there is room."""
    with small_disk(campaign.folder, size_mib=400) as disk:
        output = disk / "run"
        checkpoints = output / "checkpoints"
        process = campaign.start(output_dir=output)
        deadline = time.monotonic() + START_S
        while not (checkpoints / LATEST).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with (disk / "full").open("wb") as file:
            try:
                while file.write(bytes(1 << 20)):
                    file.flush()
            except OSError:
                pass  # now it is full
        code = wait_until_gone(process, process.pid)
        row.times += 1
        row.hung += code is None
        row.odd_exit += code != errors.CheckpointWriteError.exit_code
        complete = [folder.step for folder in list_checkpoints(checkpoints) if (folder.path / MANIFEST_NAME).exists()]
        row.lost += not complete
        process = campaign.start(output_dir=output)
        row.odd_exit += process.wait(START_S) not in (
            errors.NotEnoughSpaceError.exit_code,
            errors.CheckpointWriteError.exit_code,
        )
        (disk / "full").unlink()
        process = campaign.start(max_steps=complete[-1], output_dir=output)
        row.odd_exit += process.wait(START_S) != 0
        row.fresh += f"resuming from {checkpoints}/step-{complete[-1]}" not in campaign.said()
    say(row)


def write_protect(campaign: Campaign, row: Row) -> None:
    """A folder that became read-only stops the run before it trains; nothing in it changes."""
    with small_disk(campaign.folder, size_mib=400) as disk:
        shutil.copytree(campaign.run, disk / "run", symlinks=True)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        process = campaign.start(output_dir=disk / "run")
        code = process.wait(START_S)
        row.times += 1
        row.odd_exit += code in (0, 1) or "Read-only file system" not in campaign.said()
    say(row)


def spoil_all(campaign: Campaign, row: Row) -> None:
    """With nothing but broken checkpoints a run stops, and says so by its exit code."""
    copy = campaign.folder / "all-broken"
    shutil.copytree(campaign.run, copy, symlinks=True)
    for folder in list_checkpoints(copy / "checkpoints"):
        flip_a_bit(folder.path)
    process = campaign.start(output_dir=copy)
    row.odd_exit += process.wait(START_S) != errors.NoCompleteCheckpointError.exit_code
    row.times += 1
    row.fresh += "starting at step 0" in campaign.said()
    shutil.rmtree(copy)
    say(row)


def say(row: Row) -> None:
    print(f"{row.fault}: {row.times} times, {row.failures} failures", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> Iterator[str]:
    counts = ("lost", "broken loaded", "fresh starts", "hung", "odd exits")
    heads = ("fault", "times", "met a save half done", *counts, "gone after")
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        gone = f"{row.longest_s:.1f} s" if row.longest_s else ""
        numbers = (row.times, row.interrupted, row.lost, row.broken, row.fresh, row.hung, row.odd_exit)
        yield f"| {row.fault} | {' | '.join(map(str, numbers))} | {gone} |"


KILLS = (("SIGKILL, one rank", kill_one), ("SIGKILL, all", kill_all), ("SIGTERM, one rank", tell_one))
DAMAGES = (("file cut in half", truncate), ("bit flipped", flip_a_bit), ("a rank's file gone", remove_a_ranks_file))
ENDS = (
    ("newest broken, trained again", replace_damaged),
    ("all broken", spoil_all),
    ("read-only folder", write_protect),
    ("disk full", fill_the_disk),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="how often ranks are killed, of each kind")
    parser.add_argument("--damages", type=int, default=2, help="how often a checkpoint is damaged, of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", default=["sync", "async"], choices=["sync", "async"], help="of saving")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for way in arguments.ways:
        with tempfile.TemporaryDirectory(prefix="checkpoint-faults-") as folder:
            campaign = Campaign(Path(folder), seed=arguments.seed, asynchronous=way == "async")
            for name, fault in KILLS:
                rows.append(Row(f"{name} ({way})"))
                strike(campaign, rows[-1], fault, arguments.times)
            for name, spoil in DAMAGES:
                rows.append(Row(f"{name} ({way})"))
                damage(campaign, rows[-1], spoil, arguments.damages)
            for name, end in ENDS:
                rows.append(Row(f"{name} ({way})"))
                end(campaign, rows[-1])
    print("\n".join(table(rows)))
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
