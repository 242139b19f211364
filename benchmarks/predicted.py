"""Predicted beside measured seconds of a training step, for several configurations and networks.

    python benchmarks/predicted.py --networks loopback 1gbit --json FILE

For each network `gather-moe probe` measures this machine once, as two ranks of it on a core each; what it wrote is all
that the predictions know. Then the configurations run in turns, each in processes of its own: steps of the engine, from
counting targets to AdamW, of which the median counts. How unevenly the random routers load the ranks is no speed of the
machine: it is read from the first run of a configuration and given to its prediction.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cluster

MODEL = (
    "hidden_size=512,moe_intermediate_size=768,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=4,"
    "head_dim=64,vocab_size=8192,num_experts=8,num_experts_per_tok=2,max_position_embeddings=4096"
)
TINY = (
    "hidden_size=64,moe_intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=16,vocab_size=512,num_experts=4,num_experts_per_tok=2,max_position_embeddings=4096"
)
RANKS = 2  # of the probe, and the most of a case


class Case(NamedTuple):
    """A configuration: the flags that `plan` and `dry-run` have, and changes to the model."""

    name: str
    ranks: int = 2
    tp: int = 2
    ep: int = 1
    strategy: str = "gather_tokens"
    zero_stage: int = 1
    micro_batch: int = 2
    accumulation: int = 1
    seq_len: int = 1024
    precision: str = "fp32"
    recompute: bool = False
    overrides: str = ""


CASES = (
    Case("one rank", ranks=1, tp=1, zero_stage=0),
    Case("sliced experts"),
    Case("whole experts", ep=2),
    Case("whole experts, rows exchanged", ep=2, strategy="all_to_all"),
    Case("weights gathered, 8,192 tokens", strategy="gather_weights", micro_batch=8),
    Case("data parallel, ZeRO-1", tp=1, micro_batch=1),
    Case("data parallel, ZeRO-2, twice", tp=1, zero_stage=2, micro_batch=1, accumulation=2),
    Case("32 experts, full-width norms", ep=2, overrides="num_experts=32,moe_intermediate_size=256,qk_norm=full"),
    Case("recomputed, 4,096 tokens long", micro_batch=1, seq_len=4096, recompute=True),
    Case("bf16", precision="bf16"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["loopback", "1gbit"], help=cluster.RATE_HELP)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases with one of these in their name")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="per turn, after one that warms up")
    parser.add_argument("--tiny", action="store_true", help="a model of no size and a quick probe: whether it works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where hardware files stay; those there are used")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        work(Case(*json.loads(arguments.worker)), arguments)
        return 0
    chosen = [case for case in CASES if not arguments.only or any(word in case.name for word in arguments.only)]
    with tempfile.TemporaryDirectory() as folder:
        keep = arguments.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        tables = {name: one_network(name, chosen, keep, arguments) for name in arguments.networks}
    for name, rows in tables.items():
        print_table(name, rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"networks": tables}, indent=2) + "\n")
    return exit_code(tables)


def exit_code(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """1 where a case gave no figure; how far a figure is off is for people to judge."""
    return int(any("void" in row for rows in tables.values() for row in rows))


def one_network(name: str, chosen: Sequence[Case], keep: Path, arguments: Any) -> list[dict[str, Any]]:
    """Probe it, run every case in turns, and predict each from the probe."""
    with cluster.cluster_for(RANKS, rate=name) as ranks:
        hardware = keep / f"hardware-{name}{'-tiny' if arguments.tiny else ''}.json"
        if not hardware.exists():
            probe(ranks, hardware, quick=arguments.tiny)
        answers: dict[Case, list[dict[str, Any]]] = {case: [] for case in chosen}
        for turn in range(arguments.turns):
            for case in chosen:
                print(f"{name}, turn {turn + 1} of {arguments.turns}: {case.name}", file=sys.stderr, flush=True)
                answers[case].append(run_case(case, ranks, keep, arguments))
    return [summarise(case, turns, hardware, tiny=arguments.tiny) for case, turns in answers.items()]


def probe(ranks: cluster.Cluster | None, out: Path, *, quick: bool) -> None:
    words = ["probe", "--out", str(out), *(["--quick"] if quick else [])]
    code = cluster.run(ranks, [sys.executable, "-m", "recipe.cli", *words], num_ranks=RANKS)
    if code:
        raise RuntimeError(f"the probe ended with exit code {code}")


def run_case(case: Case, ranks: cluster.Cluster | None, folder: Path, arguments: Any) -> dict[str, Any]:
    answer = folder / f"answer-{os.getpid()}.json"
    answer.unlink(missing_ok=True)
    words = ["--worker", json.dumps(case), "--answer", str(answer), "--steps", str(arguments.steps)]
    words += ["--tiny"] if arguments.tiny else []
    code = cluster.run(ranks, [sys.executable, __file__, *words], num_ranks=case.ranks)
    if code or not answer.exists():
        return {"error": f"ended with exit code {code}"}
    found: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    return found


def summarise(case: Case, turns: Sequence[dict[str, Any]], hardware: Path, *, tiny: bool) -> dict[str, Any]:
    """A line of the table: what was measured, what was predicted by part, and their ratio."""
    from recipe.plan.hardware import find_hardware
    from recipe.plan.step_time import predict_time

    errors = [turn["error"] for turn in turns if "error" in turn]
    if errors:
        return {**case._asdict(), "void": errors[0]}
    job = replace(settle(case, tiny=tiny).job, rho=turns[0]["rho"])
    plan = predict_time(job, hardware=find_hardware(str(hardware)), ranks_per_node=RANKS)
    measured_s = median(seconds for turn in turns for seconds in turn["steps_s"])
    return {
        **case._asdict(),
        "layout": str(job.layout),
        "rho": job.rho,
        "measured_s": measured_s,
        "predicted_s": plan.step_s,
        "ratio": plan.step_s / measured_s,
        "parts": plan._asdict(),
    }


def print_table(network: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{network}\n{'case':<32} {'layout':<22} {'rho':>5} {'predicted s':>11} {'measured s':>10} {'ratio':>6}")
    for row in rows:
        if "void" in row:
            print(f"{row['name']:<32} void: {row['void']}")
            continue
        numbers = f"{row['rho']:>5.2f} {row['predicted_s']:>11.3f} {row['measured_s']:>10.3f} {row['ratio']:>6.2f}"
        print(f"{row['name']:<32} {row['layout']:<22} {numbers}")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    inside = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    print(f"{inside} of {len(rows)} within 20 %")


def settle(case: Case, *, tiny: bool) -> Any:
    """The job and the settings of the run that a case is."""
    from recipe.plan.flags import read_job

    overrides = [TINY if tiny else MODEL, *([case.overrides] if case.overrides else [])]
    flags = argparse.Namespace(
        model="demo",
        config_overrides=",".join(merged(overrides)),
        seq_len=128 if tiny else case.seq_len,
        gpus=case.ranks,
        gpus_per_node=case.ranks,
        tp=case.tp,
        ep=case.ep,
        strategy=case.strategy,
        zero_stage=case.zero_stage,
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        precision=case.precision,
        recompute=case.recompute,
        ds_config=None,
    )
    return read_job(flags, device="cpu", compute_capability=None)


def merged(overrides: Sequence[str]) -> Iterator[str]:
    """Later values of a key in place of earlier ones."""
    pairs = dict(pair.split("=", 1) for text in overrides for pair in text.split(","))
    return (f"{key}={value}" for key, value in pairs.items())


def work(case: Case, arguments: Any) -> None:
    """One rank: warm up, time some steps, and let the first rank write the answer."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine, steps = start(case, num_steps=1 + arguments.steps, tiny=arguments.tiny)
    steps_s = []
    for micro_batches in steps:
        dist.barrier()
        start_s = time.perf_counter()
        engine.accumulate(micro_batches, counts=engine.count(micro_batches))
        engine.update(learning_rate=1e-6)
        steps_s.append(time.perf_counter() - start_s)
    if dist.get_rank() == 0:
        arguments.answer.write_text(json.dumps({"steps_s": steps_s[1:], "rho": rho_of(engine)}))
    dist.barrier()
    os._exit(0)  # gloo's threads need not end


def start(case: Case, *, num_steps: int, tiny: bool) -> Any:
    """The engine as run_pretrain.py makes it, and each step's random tokens, every sequence a document."""
    import torch

    from modeling.init import build_model
    from modeling.mesh import build_mesh
    from recipe.data.batches import MicroBatch
    from recipe.dry_run.fake_world import config_of
    from recipe.engine.engine import Engine, build_optimizer
    from recipe.train.prepare import quieten_libraries

    quieten_libraries(is_first=False)
    job, settings = settle(case, tiny=tiny)
    mesh = build_mesh(job.layout, num_key_value_heads=job.sizes.num_key_value_heads)
    model = build_model(config_of(job), mesh=mesh, execution=job.execution, seed=0)
    if job.recompute:
        model.gradient_checkpointing_enable()
    engine = Engine(model, ds_config=settings.engine, optimizer=build_optimizer(model, settings.optimizer))
    generator = torch.Generator().manual_seed(1 + mesh.dp_rank)
    shape = (num_steps, job.accumulation, job.num_sequences, job.block_size)
    ids = torch.randint(0, job.sizes.vocab_size, shape, generator=generator)
    starts, positions = ((0,),) * job.num_sequences, tuple(range(job.num_sequences))
    num_targets = job.num_sequences * (job.block_size - 1)
    return engine, [[MicroBatch(part, part, starts, None, num_targets, positions) for part in step] for step in ids]


def rho_of(engine: Any) -> float:
    """The rows of the busiest rank's experts over the mean, of all layers together; 1 where experts are sliced."""
    import torch

    loads_LE, layout = torch.tensor(engine.loads()), engine.mesh.layout
    if layout.ep == 1:
        return 1.0
    by_rank = loads_LE.unflatten(1, (layout.ep, -1)).sum(-1)
    return (by_rank.amax(1) / by_rank.mean(1)).mean().item()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
