"""One training step (forward, backward, AdamW) of this project beside its peers', on the same weights and tokens.

    python benchmarks/peers.py --ranks 2 --rate 1gbit --dtype fp32 --json FILE

Every system runs in processes of its own on the emulated cluster (cluster.py), one pinned to each core, in turns:
A B C A B C ... Printed and written are the median time over all steps of all turns, the highest resident memory of a
rank, the bytes that left the first rank's link, and the loss. A row whose loss differs from the first row's by more
than 1e-4 is void.

    gather-moe              each strategy, N ranks share one group
    transformers-tp         tensor parallelism of transformers (DistributedConfig)
    transformers-tp-ep      the same with its expert parallelism
    deepspeed-autotp-autoep DeepSpeed's own tensor and expert parallelism, ZeRO-1
    deepspeed-autoep        its expert parallelism with data-parallel ranks, ZeRO-1
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import cluster

MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 32768,
    "use_cache": False,
}
NUM_TOKENS = 2048
STEPS_PER_TURN = 3  # after one that warms up
LOSS_TOLERANCE = 1e-4


class Row(NamedTuple):
    """A line of the table."""

    system: str
    strategy: str | None
    overlap: bool | None


ROWS = (
    Row("gather-moe", "gather_tokens", True),
    Row("gather-moe", "gather_tokens", False),
    Row("gather-moe", "all_to_all", True),
    Row("gather-moe", "all_to_all", False),
    Row("gather-moe", "gather_weights", True),
    Row("gather-moe", "gather_weights", False),
    Row("transformers-tp", None, None),
    Row("transformers-tp-ep", None, None),
    Row("deepspeed-autotp-autoep", None, None),
    Row("deepspeed-autoep", None, None),
)

Step = Callable[[], float]  # forward, backward and update; the loss over the whole batch


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help=cluster.RATE_HELP)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="systems or strategies to run; all if absent")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        work(Row(*json.loads(arguments.worker)), arguments.folder, dtype=arguments.dtype)
        return 0
    chosen = [row for row in ROWS if not arguments.only or {row.system, row.strategy} & set(arguments.only)]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        answers = take_turns(chosen, Path(folder), arguments)
    rows = summarise(answers)
    print_table(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0


def take_turns(chosen: Sequence[Row], folder: Path, arguments: Any) -> dict[Row, list[dict[str, Any]]]:
    """Run every system once per turn; what each reported."""
    answers: dict[Row, list[dict[str, Any]]] = {row: [] for row in chosen}
    with cluster.cluster_for(arguments.ranks, rate=arguments.rate) as ranks:
        for turn in range(arguments.turns):
            for row in chosen:
                print(f"turn {turn + 1} of {arguments.turns}: {describe(row)}", flush=True)
                command = [sys.executable, __file__, "--worker", json.dumps(row), "--folder", str(folder)]
                answer = folder / "answer.json"
                answer.unlink(missing_ok=True)
                code = cluster.run(ranks, [*command, "--dtype", arguments.dtype], num_ranks=arguments.ranks)
                if code or not answer.exists():
                    answers[row].append({"error": f"ended with exit code {code}"})
                else:
                    answers[row].append(json.loads(answer.read_text()))
    return answers


def summarise(answers: dict[Row, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per system; void where its loss is not that of the first row."""
    rows = []
    for row, turns in answers.items():
        summary: dict[str, Any] = {**row._asdict()}
        errors = [turn["error"] for turn in turns if "error" in turn]
        if errors:
            summary["void"] = errors[0]
        else:
            summary |= {
                "step_s": statistics.median(seconds for turn in turns for seconds in turn["steps_s"]),
                "peak_rss_bytes": max(turn["peak_rss_bytes"] for turn in turns),
                "wire_bytes": statistics.median(turn["wire_bytes"] for turn in turns),
                "loss": turns[0]["loss"],
            }
        rows.append(summary)
    want = next((row["loss"] for row in rows if "loss" in row), None)
    for row in rows:
        if "loss" in row and want is not None and abs(row["loss"] - want) > LOSS_TOLERANCE:
            row["void"] = f"its loss {row['loss']:.5f} is not {want:.5f}"
    return rows


def describe(row: Row) -> str:
    """In words: system, strategy, and whether transfers overlap."""
    overlapped = {True: "overlapped", False: "one after another", None: ""}[row.overlap]
    return f"{row.system:<24} {row.strategy or '':<15} {overlapped:<17}"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'system':<24} {'strategy':<15} {'transfers':<17} {'step s':>8} {'peak GiB':>9} {'wire MB':>9} {'loss':>9}")
    for row in rows:
        name = describe(Row(row["system"], row["strategy"], row["overlap"]))
        if "step_s" not in row:
            print(f"{name} void: {row['void']}")
            continue
        void = f"  void: {row['void']}" if "void" in row else ""
        print(
            f"{name} {row['step_s']:>8.3f} {row['peak_rss_bytes'] / 2**30:>9.2f} {row['wire_bytes'] / 1e6:>9.1f} "
            f"{row['loss']:>9.4f}{void}"
        )


def save_model(folder: Path) -> None:
    """The stock model that every system loads."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).save_pretrained(folder)


def work(row: Row, folder: Path, *, dtype: str) -> None:
    """One rank of one system: warm up, time some steps, and let the first rank write the answer."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    step = STARTERS[row.system](folder / "model", row, precision)
    step()
    sent_before = sent_bytes()
    steps_s = []
    for _ in range(STEPS_PER_TURN):
        dist.barrier()
        start_s = time.perf_counter()
        loss = step()
        steps_s.append(time.perf_counter() - start_s)
    wire_bytes = (sent_bytes() - sent_before) / STEPS_PER_TURN
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_rss_bytes())
    if dist.get_rank() == 0:
        answer = {"steps_s": steps_s, "peak_rss_bytes": max(peaks), "wire_bytes": wire_bytes, "loss": loss}
        (folder / "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # some systems leave threads that never end


def start_ours(folder: Path, row: Row, dtype: Any) -> Step:
    import torch.distributed as dist

    from modeling.config import GatherMoeConfig
    from modeling.execution import Execution
    from modeling.init import build_model
    from modeling.layout import ParallelLayout
    from modeling.mesh import build_mesh
    from recipe.hf.load import load_weights

    size = dist.get_world_size()
    # Slices of every expert where the strategy allows: all ranks do the same work, whatever the routing is.
    layout = ParallelLayout(tp=size, ep=size if row.strategy == "all_to_all" else 1)
    config = GatherMoeConfig(**MODEL, qk_norm="head")
    execution = Execution(strategy=row.strategy, overlap=row.overlap)
    config._attn_implementation = "sdpa"
    mesh = build_mesh(layout, num_key_value_heads=MODEL["num_key_value_heads"])
    model = build_model(config, mesh=mesh, execution=execution, seed=0, dtype=dtype)
    load_weights(model, config=config, mesh=mesh, folder=folder)
    ids = global_batch()
    return plain_step(model, input_ids=ids, labels=ids, document_starts=tuple((0,) for _ in range(len(ids))))


def start_transformers(folder: Path, row: Row, dtype: Any) -> Step:
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    size = dist.get_world_size()
    sizes = {"tp_size": size} | ({"ep_size": size} if row.system.endswith("-ep") else {})
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes), dtype=dtype)
    model.train()
    ids = global_batch()
    return plain_step(model, input_ids=ids, labels=ids, use_cache=False)


def start_deepspeed(folder: Path, row: Row, dtype: Any) -> Step:
    import logging

    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeForCausalLM

    _let_presets_look_up_by_name()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    size, rank = dist.get_world_size(), dist.get_rank()
    tp = size if "autotp" in row.system else 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size if tp > 1 else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "expert_parallel": {"enabled": True, "autoep_size": size},
        "steps_per_print": 10**9,
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if tp > 1:
        layers = [
            {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*self_attn\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
        ]
        config["tensor_parallel"] = {
            "autotp_size": tp,
            "partition_config": {"use_default_specs": False, "layer_specs": layers},
        }
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = global_batch() if tp > 1 else global_batch()[rank : rank + 1]

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / size

    return step


STARTERS: dict[str, Callable[[Path, Row, Any], Step]] = {
    "gather-moe": start_ours,
    "transformers-tp": start_transformers,
    "transformers-tp-ep": start_transformers,
    "deepspeed-autotp-autoep": start_deepspeed,
    "deepspeed-autoep": start_deepspeed,
}


def plain_step(model: Any, **inputs: Any) -> Step:
    """Forward, backward, and AdamW on this rank's shards as fast as it goes, which leaves every weight as it is."""
    import torch
    from torch.distributed.tensor import DTensor

    def local(tensor: Any, like: Any) -> Any:
        # The fused step does not take transformers' distributed tensors.
        return tensor.redistribute(placements=like.placements).to_local() if isinstance(tensor, DTensor) else tensor

    parameters = list(model.parameters())
    shards = [torch.nn.Parameter(local(p.detach(), p)) for p in parameters]
    optimizer = torch.optim.AdamW(shards, lr=0.0, fused=True)

    def step() -> float:
        loss = model(**inputs).loss
        loss.backward()
        for shard, parameter in zip(shards, parameters, strict=True):
            shard.grad = local(parameter.grad, parameter)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        return loss.item()

    return step


def global_batch() -> Any:
    """As many sequences as there are ranks, 2,048 tokens together."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, MODEL["vocab_size"], (size, NUM_TOKENS // size), generator=generator)


def sent_bytes() -> float:
    """What has left this rank's link so far, protocol headers included; on loopback, which all share, its share."""
    import torch.distributed as dist

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    # sysfs shows the interfaces of the namespace that mounted it; /proc shows this process's.
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8]) / (dist.get_world_size() if interface == "lo" else 1)
    return 0


def peak_rss_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def _let_presets_look_up_by_name() -> None:
    """DeepSpeed 0.19.8 asks transformers' registry of recorded outputs by class name, which 5.24 no longer takes."""
    import transformers.utils.output_capturing as capturing

    look_up = capturing._CanRecordRegistry.get

    def by_name_too(registry: Any, key: Any, default: Any = None) -> Any:
        if isinstance(key, str):
            return dict.get(registry, key) or default or {}
        return look_up(registry, key)

    capturing._CanRecordRegistry.get = by_name_too  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
