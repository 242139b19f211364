"""Exporting takes memory for one file and one gathered tensor, however large a model is: seen in fresh processes."""

import multiprocessing as mp
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.parity import Case, tiny_config

MB = 10**6
SIZES = {"hidden_size": 512, "moe_intermediate_size": 640, "num_experts": 16, "head_dim": 64, "vocab_size": 8000}
NUM_RANKS = 4
CASES = {"float32": NUM_RANKS, "bfloat16": NUM_RANKS // 2}  # precision and ep; with the second experts are sliced
MAX_FILE_BYTES = 12 * MB
GATHERED_BYTES = 8000 * 512 * 4  # the largest tensor
SLACK_BYTES = 6 * MB


class Growth(NamedTuple):
    """Of one rank: peaks of resident memory above where they began, in bytes, and the bytes of its files."""

    writing_bytes: int
    checking_bytes: int
    file_bytes: list[int]


def measure(rank: int, store: Path, root: Path, answers: Any) -> None:
    """What one of four ranks needs to export the same model in two precisions and layouts."""
    import torch
    import torch.distributed as dist
    from transformers.initialization import no_init_weights

    from modeling.model import GatherMoeForCausalLM
    from recipe.checkpoint.files import Files, complete
    from recipe.hf.weights import WeightSource, write_weights
    from recipe.shared.ranks import TorchRanks
    from tests.engine_runs import make_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    config, ranks = tiny_config(**SIZES), TorchRanks()
    for dtype, ep in CASES.items():
        mesh = make_mesh(config, Case(tp=NUM_RANKS, ep=ep))
        with no_init_weights():
            model = GatherMoeForCausalLM(config, mesh=mesh)
        for number, parameter in enumerate(model.parameters()):
            parameter.data.fill_(number)
        source = WeightSource(model=model, config=config, mesh=mesh, read=lambda parameter: parameter.detach())
        folder, sink = root / dtype, Files()
        ranks.barrier()
        before_bytes = reset_peak()
        write_weights(
            folder,
            source=source,
            model_type="mixtral",
            dtype=getattr(torch, dtype),
            files=sink,
            max_file_bytes=MAX_FILE_BYTES,
        )
        writing_bytes = peak() - before_bytes
        files = [path.stat().st_size for path in folder.glob(f"part-{rank:05d}-*")]
        before_bytes = reset_peak()
        complete(sink, ranks=ranks)
        answers.put((rank, dtype, Growth(writing_bytes, peak() - before_bytes, files)))
    dist.destroy_process_group()


def reset_peak() -> int:
    """Let the peak begin anew; the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(key: str) -> int:
    (kib,) = re.findall(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(kib) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_holds_one_file_and_one_gathered_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Freed memory goes back at once, so that what is resident is what is in use.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    for dtype in CASES:
        (tmp_path / dtype).mkdir()
    context = mp.get_context("spawn")
    answers = context.Queue()
    arguments = (tmp_path / "store", tmp_path, answers)
    processes = [context.Process(target=measure, args=(rank, *arguments), daemon=True) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in range(NUM_RANKS * len(CASES))]
    for process in processes:
        process.join(30)
    for rank, dtype, growth in found:
        largest_bytes = max(growth.file_bytes)
        # A rank checks files that others wrote.
        checked_bytes = max(size for _, name, other in found if name == dtype for size in other.file_bytes)
        assert growth.writing_bytes < largest_bytes + GATHERED_BYTES + SLACK_BYTES, (rank, dtype, growth)
        assert growth.checking_bytes < checked_bytes + SLACK_BYTES, (rank, dtype, growth)
    written_bytes = {rank: sum(growth.file_bytes) for rank, dtype, growth in found if dtype == "float32"}
    assert max(written_bytes.values()) > 2 * GATHERED_BYTES + 2 * SLACK_BYTES, "or nothing would be seen"
