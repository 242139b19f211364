"""A run whose checkpoints will not fit ends before it trains; a disk that fills up later costs no checkpoint."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from recipe.checkpoint.find import verify_checkpoint
from recipe.checkpoint.manifest import file_sizes
from recipe.settings.flags import Arguments
from recipe.shared.ranks import OneRank
from recipe.train.disk_room import more_at_a_time
from tests.engine_runs import Case, slow, start_engine, train_steps
from tests.exports import export_engine
from tests.ranks import run_ranks
from tests.referee import full_state, tiny_config
from tests.training import Flags, train_on_ranks, write_ds_config, write_inputs


@pytest.mark.parametrize(
    ("options", "step", "num_there", "want"),
    [
        *(({"save_steps": 2}, step, 0, want) for step, want in ((0, 3), (2, 2), (3, 2), (6, 0))),
        *(({"save_steps": every}, 0, 5, want) for every, want in ((0, 1), (500, 1), (1, 6), (4, 2))),
        ({"save_steps": 1, "save_strategy": "no"}, 0, 0, 0),
        *(({"save_steps": 1, "save_total_limit": 2}, 0, there, want) for there, want in ((0, 3), (1, 2), (5, 1))),
        ({"save_steps": 4, "save_total_limit": 2}, 0, 0, 2),
        ({"save_total_limit": 1}, 6, 1, 0),
    ],
)
def test_all_saves_to_the_last_step_or_one_more_than_is_kept_are_there_at_a_time(
    options: dict[str, Any], step: int, num_there: int, want: int
) -> None:
    assert more_at_a_time(Arguments(**options), step=step, max_steps=6, num_there=num_there) == want


def _sizes(rank: int, world_size: int, cases: list[Case], folder: Path) -> list[Any]:
    """Per case: the estimate before anything was trained, and after a step."""
    from recipe.checkpoint.native import save_native
    from recipe.shared.ranks import TorchRanks
    from recipe.train.disk_room import estimate_size

    config = tiny_config(hidden_size=128, moe_intermediate_size=256, vocab_size=999, head_dim=32, num_hidden_layers=1)
    state, ranks, estimates = full_state(config), TorchRanks(), []
    for case in cases:
        engine = start_engine(config, state, case)
        dtype = torch.bfloat16 if case.bf16 else torch.float32
        before = estimate_size(engine, hf_dtype=dtype, ranks=ranks)
        train_steps(engine, config, case, range(1))
        place = folder / name_of(case)
        place.mkdir(exist_ok=True)
        save_native(engine, place, rank_state={})
        export_engine(engine, place / "hf", dtype=dtype)
        estimates.append((before, estimate_size(engine, hf_dtype=None, ranks=ranks)))
    return estimates


def name_of(case: Case) -> str:
    return f"ZeRO-{case.stage}-{'bf16' if case.bf16 else 'fp32'}"


@pytest.mark.parametrize(
    ("dp", "tp", "kinds"),
    [
        (1, 1, [(2, True)]),
        slow(1, 1, [(0, False), (1, False), (1, True), (2, False), (3, False), (3, True)]),
        slow(2, 2, [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]),
    ],
)
@pytest.mark.requirement("R-CKPT-10")
def test_the_estimate_is_within_a_tenth_of_a_real_checkpoint(
    dp: int, tp: int, kinds: list[tuple[int, bool]], tmp_path: Path
) -> None:
    cases = [Case(dp=dp, tp=tp, ep=tp, stage=stage, bf16=bf16) for stage, bf16 in kinds]
    estimates = run_ranks(_sizes, dp * tp, cases, tmp_path)[0]
    for case, (before, after) in zip(cases, estimates, strict=True):
        sizes = file_sizes(tmp_path / name_of(case))
        hf_bytes = sum(size for name, size in sizes.items() if name.startswith("hf/"))
        native_bytes = sum(sizes.values()) - hf_bytes
        assert before.native_bytes == pytest.approx(native_bytes, rel=0.02), case
        assert before.hf_bytes == pytest.approx(hf_bytes, rel=0.02), case
        assert before.total_bytes(with_hf=False) == before.native_bytes
        assert before.total_bytes(with_hf=True) == before.native_bytes + before.hf_bytes
        assert after == (before.native_bytes, 0), "training and gathered weights do not change it"


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own in memory, of as many KiB as the test asks for."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={request.param}k"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"this process may not mount file systems: {mount.stderr.strip()}")
    yield folder
    # Lazily: until it is collected as garbage, the error of a rank may hold on to the file it was about.
    subprocess.run(["umount", "--lazy", folder], check=True)


def refused(rank: int, world_size: int, flags: Flags) -> tuple[int, str]:
    """The exit code and text that the entry script ends with before it trains."""
    from recipe.shared.errors import NotEnoughSpaceError

    with pytest.raises(NotEnoughSpaceError) as caught:
        train_on_ranks(rank, world_size, flags)
    return caught.value.exit_code, str(caught.value)


@pytest.mark.parametrize("small_disk", [1024], indirect=True)
@pytest.mark.requirement("R-CKPT-10")
def test_start_up_refuses_a_disk_that_is_too_small(small_disk: Path, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"output_dir": small_disk / "run", "save_steps": 2, "save_total_limit": 1}
    code, text = run_ranks(refused, 1, flags)[0]
    assert code == 16
    assert text.startswith(f"checkpoints in {small_disk / 'run' / 'checkpoints'} need about ")
    assert "; up to 2 more at a time, each " in text
    assert " are free; free some space, keep fewer checkpoints with --save_total_limit, " in text
    assert sorted(path.name for path in (small_disk / "run").iterdir()) == [".lock"]


@pytest.mark.parametrize("small_disk", [1536], indirect=True)
def test_the_run_that_is_overwritten_makes_room_for_the_new_one(small_disk: Path, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path) | {"output_dir": small_disk / "run", "save_steps": 0, "max_steps": 2}
    run_ranks(train_on_ranks, 1, flags)
    again = flags | {"overwrite_output_dir": True}
    _, text = run_ranks(refused, 1, again | {"save_steps": 1})[0]
    assert "of the run that is overwritten included" in text
    assert (small_disk / "run" / "checkpoints" / "step-2").is_dir(), "a run that cannot start costs nothing"
    _, said = run_ranks(train_on_ranks, 1, again)[0]
    assert any(line.startswith("checkpoints: about ") and "up to 1 more at a time" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_have_no_moments(stage: int, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path, hidden_size=128, num_hidden_layers=1, moe_intermediate_size=128)
    flags |= write_ds_config(tmp_path, zero_optimization={"stage": stage}, parallel={"tp": 1})
    flags |= {"freeze_parameters": "experts", "hf_save": "never", "max_steps": 1}
    _, said = run_ranks(train_on_ranks, 2, flags)[0]
    (line,) = (line for line in said if line.startswith("checkpoints: about "))
    real = sum(file_sizes(tmp_path / "run" / "checkpoints" / "step-1").values())
    assert float(line.split()[2].replace(",", "")) == pytest.approx(real, rel=0.05)
    assert "and 0 under hf/" in line


def fill(folder: Path, *, leave_bytes: int = 0) -> None:
    """Take all of a disk but so many bytes."""
    free = os.statvfs(folder)
    wanted = free.f_bavail * free.f_bsize - leave_bytes
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, wanted)


def train_until_full(rank: int, world_size: int, flags: Flags, *, disk: Path, moment: str) -> tuple[str, int]:
    """The disk fills up after the first save, before the second one or in it; the error, and the step reached."""
    from recipe.engine.engine import Engine
    from recipe.shared.errors import CheckpointWriteError

    write, update = torch.save, Engine.update
    num_steps = num_saves = 0

    def updating(self: Engine, **kwargs: Any) -> float:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4 and rank == 0 and moment == "before":
            fill(disk, leave_bytes=200_000)
        return update(self, **kwargs)

    def writing(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal num_saves
        num_saves += "optim_states" in str(file)
        if num_saves == 2 and rank == 0 and moment == "within":
            (disk / "filler").exists() or fill(disk)
        write(value, file, *args, **kwargs)

    with (
        patch.object(torch, "save", writing),
        patch.object(Engine, "update", updating),
        pytest.raises(CheckpointWriteError) as caught,
    ):
        train_on_ranks(rank, world_size, flags)
    return str(caught.value), num_steps


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", [6144], indirect=True)
@pytest.mark.parametrize(
    ("moment", "in_background", "last_steps"),
    [("before", False, [4]), ("within", False, [4]), ("within", True, [5, 6])],  # heard at the end of a step
)
@pytest.mark.requirement("R-CKPT-10")
def test_a_disk_that_fills_up_after_the_first_save_leaves_it_usable(
    moment: str, in_background: bool, last_steps: list[int], small_disk: Path, tmp_path: Path
) -> None:
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 1})
    flags |= {"output_dir": small_disk / "run", "save_steps": 2, "save_total_limit": 1, "async_save": in_background}
    answers = run_ranks(train_until_full, 2, flags, disk=small_disk, moment=moment)
    assert answers[0] == answers[1]
    text, num_steps = answers[0]
    assert num_steps in last_steps
    root = small_disk / "run" / "checkpoints"
    why = {"before": r"it needs about [\d,]+ bytes, but only [\d,]+ are free", "within": r"rank 0: .*"}[moment]
    assert re.fullmatch(
        rf"step-4 could not be saved in {root}: {why}\. [\d,]+ bytes of about [\d,]+ needed were written when [\d,]+ "
        r"were still free; they have been removed\. The other checkpoints are untouched: step-2",
        text,
    ), text
    # Where the error was heard at the end only, the last step was saved first, if there was room again.
    kept = 6 if num_steps == 6 and (root / "step-6").exists() else 2
    assert sorted(path.name for path in root.iterdir()) == ["latest", f"step-{kept}"]
    verify_checkpoint(root / f"step-{kept}", ranks=OneRank())
    (small_disk / "filler").unlink()
    results, said = run_ranks(train_on_ranks, 2, flags | {"resume_from_checkpoint": "auto"})[0]
    assert f"resuming from {root / f'step-{kept}'}" in said
    assert results["steps"] == 6
