"""What one MoE layer sends, forward and backward: each strategy of this project beside DeepSpeed's folded AutoEP.

    python benchmarks/moe_bytes.py --ranks 4 --active 2 8 --json FILE

N ranks share one group (EP = TP = N). Payload and routing (ids, weights, counts) are counted where collectives pass
(the dry run's ledger) and printed in units of T*D*bytes, the size of all the group's tokens; the busiest rank counts.
DeepSpeed runs its own layer, AutoEPMoELayer, whose expert and tensor-parallel groups are the same here: every rank
holds all tokens, dispatches its N-th of the token-expert pairs by all-to-all, gathers every pair's output back, and
sums their gradients in N padded all-reduces. Every layer has the same weights and tokens. A row is void where its
output or input gradient differs from one rank's, or its payload from the formula. Sums of parameter gradients happen
outside of all these layers and are not counted.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cluster
import torch
import torch.distributed as dist
from torch import Tensor, nn

from modeling.config import GatherMoeConfig
from modeling.cost import MoeTraffic
from modeling.execution import Execution
from modeling.init import cut
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.moe import GatherMoeSparseBlock
from modeling.shard_table import ShardTable
from recipe.dry_run.ledger import Ledger, Volume, widest_routing_row

SIZES: Mapping[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 8,
    "use_cache": False,
}
TOLERANCE = 1e-4
ROUTINGS = ("even", "random")


class Problem(NamedTuple):
    """A layer's work. routing "even" gives every expert equally many tokens of every rank, "random" does not."""

    num_tokens: int
    num_active: int
    routing: str


class Row(NamedTuple):
    """A way to do it; strategy and ep are None for DeepSpeed, which has one.

    regather  the backward gathers the tokens again instead of keeping all of them
    """

    system: str
    strategy: str | None = None
    ep: int | None = None
    regather: bool = False


class Measured(NamedTuple):
    """What this rank sent, and how far its output or input gradient is from one rank's, as a part of the largest."""

    sent: Volume
    error: float


class Answer(NamedTuple):
    """Output and the gradient of the tokens, [T, D]."""

    out: Tensor
    grad: Tensor


def rows_for(size: int) -> list[Row]:
    """Every system in a group of `size` ranks."""
    return [
        Row("gather-moe", "gather_tokens", size),
        Row("gather-moe", "gather_tokens", 1),
        Row("gather-moe", "gather_tokens", size, regather=True),
        Row("gather-moe", "gather_weights", 1),
        Row("gather-moe", "all_to_all", size),
        Row("deepspeed-folded-autoep"),
    ]


def stock_model(problem: Problem) -> Any:
    """transformers' Qwen3-MoE of one layer, the weights of which every system uses."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts_per_tok=problem.num_active))
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
        # The first E channels of a token are its preferences.
        num_experts = SIZES["num_experts"]
        layer.gate.weight.zero_()
        layer.gate.weight[:, :num_experts] = torch.eye(num_experts)
    return model


def tokens(problem: Problem) -> Tensor:
    """The group's normed tokens [T, D]; with even routing token i prefers the experts i, i + 1, ..."""
    num_experts = SIZES["num_experts"]
    x_TD = torch.randn(problem.num_tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    if problem.routing == "even":
        distance = torch.arange(num_experts) - torch.arange(problem.num_tokens)[:, None]
        x_TD[:, :num_experts] = -(distance % num_experts).float()
    return x_TD


def output_gradient(problem: Problem) -> Tensor:
    """[T, D]"""
    return torch.randn(problem.num_tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))


def reference(problem: Problem) -> Answer:
    """One rank, transformers' own layer."""
    x_TD = tokens(problem).requires_grad_()
    out = stock_model(problem).model.layers[0].mlp(x_TD[None])
    out = (out[0] if isinstance(out, tuple) else out).view_as(x_TD)
    out.backward(output_gradient(problem))
    assert x_TD.grad is not None
    return Answer(out.detach(), x_TD.grad)


def measure(row: Row, *, problem: Problem, want: Answer) -> Measured:
    """Run one row on this rank and hold it against the reference. Collective: every rank of the world calls it."""
    run = measure_deepspeed if row.system.startswith("deepspeed") else measure_ours
    return run(row, problem=problem, want=want)


def measure_ours(row: Row, *, problem: Problem, want: Answer) -> Measured:
    assert row.ep is not None
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = ParallelLayout(tp=size, ep=row.ep)
    execution = Execution(strategy=row.strategy or "gather_tokens", regather=row.regather)
    mesh = build_mesh(layout, num_key_value_heads=SIZES["num_key_value_heads"])
    block = GatherMoeSparseBlock(config_for(problem), mesh=mesh, execution=execution)
    table = ShardTable(layout, SIZES["num_key_value_heads"], "none")
    whole = dict(stock_model(problem).model.layers[0].mlp.named_parameters())
    for name, parameter in block.named_parameters():
        shard = table.shard(f"model.layers.0.mlp.{name}", tuple(whole[name].shape), group_rank=rank)
        parameter.data.copy_(cut(whole[name].detach(), shard))
    x_tD = tokens(problem).chunk(size)[rank].clone().requires_grad_()
    with Ledger() as ledger:
        out_tD = block(x_tD)[0]
        out_tD.backward(output_gradient(problem).chunk(size)[rank])
    assert x_tD.grad is not None
    mine = Answer(*(part.chunk(size)[rank] for part in want))
    sent = ledger.volume(narrow_bytes=widest_routing_row(problem.num_active))
    return Measured(sent, _difference(Answer(out_tD.detach(), x_tD.grad), want=mine))


def config_for(problem: Problem, **changes: Any) -> GatherMoeConfig:
    """The layer's configuration, with changes."""
    return GatherMoeConfig(**SIZES, num_experts_per_tok=problem.num_active, **changes)


def measure_deepspeed(row: Row, *, problem: Problem, want: Answer) -> Measured:
    layer = _folded_layer(problem)
    x_TD = tokens(problem).requires_grad_()
    with Ledger() as ledger:
        out = layer(x_TD[None])
        out_TD = (out[0] if isinstance(out, tuple) else out).view_as(x_TD)
        out_TD.backward(output_gradient(problem))
    assert x_TD.grad is not None
    sent = ledger.volume(narrow_bytes=widest_routing_row(problem.num_active))
    return Measured(sent, _difference(Answer(out_TD.detach(), x_TD.grad), want=want))


def _folded_layer(problem: Problem) -> nn.Module:
    """DeepSpeed's layer as its engine sets it up, with expert and tensor-parallel groups that are the whole world."""
    import deepspeed
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.module_inject.auto_ep_folding import FoldingGroupHandles, build_folding_spec, local_folding_ranks
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    # It would be compiled for half a minute, and serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    size, rank, everyone = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    model = stock_model(problem)
    config = AutoEPConfig(enabled=True, autoep_size=size, load_balance_coeff=None)
    [spec] = AutoEP(model, config).ep_parser()
    layer = AutoEPMoELayer(spec, model.model.layers[0].mlp, ep_size=size, ep_rank=rank, config=config)
    folding = build_folding_spec(world_size=size, pp_size=1, tp_size=size, ep_size=size)
    handles = FoldingGroupHandles(
        spec=folding,
        tp_group=everyone,
        ep_group=everyone,
        # The layer itself does not use data-parallel groups.
        dense_dp_group=None,
        edp_group=None,
        ep_group_name=f"ep_size_{size}",
        **{f"{name}_ranks": ranks for name, ranks in local_folding_ranks(rank, folding).items()},
    )
    layer.set_deepspeed_parallelism(folding_group_handles=handles)
    return layer


def _difference(got: Answer, *, want: Answer) -> float:
    """The largest, over both parts, as a part of the largest number wanted."""
    parts = [(g - w).abs().max() / w.abs().max() for g, w in zip(got, want, strict=True)]
    return torch.stack(parts).max().item()  # unlike Python's, torch's max keeps a NaN


def formula_payload(row: Row, *, problem: Problem, size: int, rank: int) -> float | None:
    """Bytes of payload this rank should send; None for rows exchanged under random routing, which has no formula."""
    if row.system.startswith("deepspeed"):
        return _deepspeed_payload(problem, size=size, rank=rank)
    if row.strategy == "all_to_all" and problem.routing != "even":
        return None
    assert row.ep is not None
    assert row.strategy is not None
    traffic = MoeTraffic(
        sizes=config_for(problem).sizes,
        layout=ParallelLayout(tp=size, ep=row.ep),
        num_tokens=problem.num_tokens,
        element_bytes=4,
        regather=row.regather,
    )
    return traffic.wire_bytes(row.strategy).payload


def _deepspeed_payload(problem: Problem, *, size: int, rank: int) -> float:
    """From how DeepSpeed shares the pairs out: pair j of an expert goes to rank j % N first.

    dispatch and combine, forward and backward   pairs kept here for experts elsewhere, and the other way round; twice
    outputs gathered back                        (N-1) * rows, where rows is the most pairs a rank kept
    their gradients                              N all-reduces of rows
    the input's gradient                         one all-reduce of T
    With even routing together q * (A * (3 + 4/N) + 2) * T*D*bytes, q = (N-1)/N.
    """
    num_experts = SIZES["num_experts"]
    chosen = tokens(problem)[:, :num_experts].topk(problem.num_active, dim=-1).indices
    counts_E = torch.bincount(chosen.flatten(), minlength=num_experts)
    kept_NE = torch.stack([(counts_E + size - 1 - first) // size for first in range(size)])
    by_owner_NN = kept_NE.unflatten(1, (size, -1)).sum(-1)
    away = int(by_owner_NN[rank].sum() + by_owner_NN[:, rank].sum() - 2 * by_owner_NN[rank, rank])
    rows = int(kept_NE.sum(1).max())
    num_rows = 2 * away + (size - 1) * rows + 2 * (size - 1) * rows + 2 * (size - 1) / size * problem.num_tokens
    return num_rows * SIZES["hidden_size"] * 4


def summarise(row: Row, *, problem: Problem, by_rank: Sequence[Measured]) -> dict[str, Any]:
    """A line of the table: the rank that sent most, and that rank's formula."""
    rank = max(range(len(by_rank)), key=lambda r: by_rank[r].sent.payload)
    sent = by_rank[rank].sent
    whole_bytes = problem.num_tokens * SIZES["hidden_size"] * 4
    summary = {
        **row._asdict(),
        **problem._asdict(),
        "payload_bytes": sent.payload,
        "routing_bytes": sent.routing,
        "payload": sent.payload / whole_bytes,
        "formula_payload_bytes": formula_payload(row, problem=problem, size=len(by_rank), rank=rank),
        "error": max(measured.error for measured in by_rank),
    }
    wrong = [measured.error for measured in by_rank if not measured.error <= TOLERANCE]
    want = summary["formula_payload_bytes"]
    if wrong:
        summary["void"] = f"its result differs from one rank's by {wrong[0]:.1e} of the largest number"
    elif want is not None and want != sent.payload:
        summary["void"] = f"it sent {sent.payload:.0f} bytes of payload, where the formula says {want:.0f}"
    return summary


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    head = f"{'system':<24} {'strategy':<25} {'ep':>3} {'top':>3} {'routing':<7}"
    print(f"{head} {'payload':>8} {'formula':>8} {'ids etc':>8}")
    for row in rows:
        unit = row["payload_bytes"] / row["payload"]
        formula = row["formula_payload_bytes"]
        strategy = (row["strategy"] or "") + (", regather" if row["regather"] else "")
        print(
            f"{row['system']:<24} {strategy:<25} {row['ep'] or '':>3} {row['num_active']:>3} "
            f"{row['routing']:<7} {row['payload']:>8.3f} {'' if formula is None else format(formula / unit, '.3f'):>8} "
            f"{row['routing_bytes'] / unit:>8.3f}" + (f"  void: {row['void']}" if "void" in row else "")
        )
    print(f"payload and formula in T*D*bytes, ids etc too (at D = {SIZES['hidden_size']}, fp32; they shrink as 1/D)")


def work(folder: Path, *, arguments: Any) -> None:
    """One rank: measure everything, and let the first one write the answer."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    rows = []
    for num_active in arguments.active:
        for routing in ROUTINGS:
            problem = Problem(arguments.tokens, num_active, routing)
            want = reference(problem)
            for row in rows_for(size):
                by_rank: list[Any] = [None] * size
                dist.all_gather_object(by_rank, measure(row, problem=problem, want=want))
                rows.append(summarise(row, problem=problem, by_rank=by_rank))
    if rank == 0:
        (folder / "answer.json").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # DeepSpeed leaves threads that never end


def check(arguments: Any) -> None:
    """Refuse what the layers cannot split; ValueError."""
    size, num_experts = arguments.ranks, SIZES["num_experts"]
    if size < 2 or num_experts % size:
        raise ValueError(f"--ranks {size} cannot share {num_experts} experts; take 2, 4 or 8")
    if arguments.tokens % (size * num_experts):
        raise ValueError(f"--tokens {arguments.tokens} must be a multiple of {size * num_experts} to be routed evenly")
    wrong = [active for active in arguments.active if not 1 <= active <= num_experts]
    if wrong:
        raise ValueError(f"--active {wrong} must lie between 1 and {num_experts}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--active", type=int, nargs="+", default=[2, 8], help="experts per token")
    parser.add_argument("--tokens", type=int, default=2048, help="of the whole group")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    check(arguments)
    if arguments.folder is not None:
        work(arguments.folder, arguments=arguments)
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        words = ["--ranks", arguments.ranks, "--tokens", arguments.tokens, "--active", *arguments.active]
        command = [sys.executable, __file__, *map(str, words), "--folder", folder]
        # Bytes do not depend on the link.
        code = cluster.run(None, command, num_ranks=arguments.ranks)
        if code:
            return code
        rows = json.loads((Path(folder) / "answer.json").read_text())
    print_table(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"ranks": arguments.ranks, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
