"""The memory plan counts all parameters and all activations, each line with its formula; it grows as a step does."""

import math
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modeling.config import GatherMoeConfig
from modeling.init import full_shapes, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, one_rank_mesh
from modeling.model import GatherMoeForCausalLM
from modeling.spec import layer_shapes, outer_shapes
from recipe.plan.job import Job
from recipe.plan.memory import ASSUMED, KINDS, MEASURED, READ, explain_memory, moments, predict_memory
from recipe.plan.memory_lines import Letters
from recipe.plan.parameters import rank_parameters
from recipe.plan.traffic import flat_groups, weights_of
from recipe.plan.zero3 import DEFAULTS, PLAIN_BUCKET
from recipe.settings.model import sizes_of
from recipe.shared.flops import count_parameters, model_flops_per_token
from tests.referee import TINY, mixed_config
from tests.traffic_jobs import changed, small_job


def job(*, layout: ParallelLayout | None = None, model: dict[str, Any] | None = None, **changes: Any) -> Job:
    run = {"experts_backend": "grouped", "precision": "bf16", "device": "cuda", "num_sequences": 4, "block_size": 64}
    run |= {"model": {**TINY, **(model or {})}, "layout": layout or ParallelLayout(tp=2, ep=2)}
    return changed(small_job(zero={"stage": 2, "reduce_bucket_size": 1024}), **(run | changes))


def meta_model(config: GatherMoeConfig, layout: ParallelLayout) -> Any:
    """The real modules of the first rank of a group, without memory."""
    group: Any = SimpleNamespace()
    mesh = one_rank_mesh()
    if layout.tp > 1:
        mesh = ParallelMesh(layout=layout, rank=0, tp_group=group, dp_group=group, kv_group=None)
    with torch.device("meta"):
        return GatherMoeForCausalLM(config, mesh=mesh)


@pytest.mark.requirement("R-PLAN-01")
def test_memory_grows_with_experts_but_operations_do_not() -> None:
    few, many = sizes_of(TINY), sizes_of({**TINY, "num_experts": 64})
    plans = [predict_memory(job(layout=ParallelLayout(), model={"num_experts": n})) for n in (4, 64)]
    added = 2 * 60 * 3 * 32 * 32 + 2 * 60 * 32  # experts and the router's rows
    assert count_parameters(many).total - count_parameters(few).total == added
    assert plans[1].weights - plans[0].weights == 2 * added
    assert plans[1].optimizer - plans[0].optimizer == 12 * added
    flops = [model_flops_per_token(sizes, attention_length=16) for sizes in (few, many)]
    assert flops[1] - flops[0] == 6 * 2 * 60 * 32  # the router alone


@pytest.mark.parametrize(
    "changes",
    [
        [{"model": {"num_experts_per_tok": k}} for k in (1, 2, 4)],
        [{"model": {"moe_intermediate_size": f}} for f in (16, 32, 64)],
        [{"num_sequences": b} for b in (2, 4, 8)],
        [{"block_size": s} for s in (32, 64, 128)],
        [{"recompute": recompute} for recompute in (True, False)],
        [{"model": {"qk_norm": kind}} for kind in ("none", "head")],
        [{"model": {"num_hidden_layers": n}} for n in (2, 3, 4)],
        [{"model": {"clip_qkv": limit}} for limit in (None, 8.0)],
        [{"device": "cpu", "attention_length": length} for length in (None, 16.0)],
        [{"resident_experts": n} for n in (0, 1, 2)],
    ],
    ids=lambda changes: "-".join(changes[-1]),
)
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp=2, tp=2, ep=2), ParallelLayout(tp=2)], ids=str)
@pytest.mark.requirement("R-PLAN-02")
def test_memory_is_monotone(changes: list[dict[str, Any]], layout: ParallelLayout) -> None:
    peaks = [predict_memory(job(layout=layout, **change)).peak_bytes for change in changes]
    assert all(a < b for a, b in pairwise(peaks)), peaks


def test_a_busier_rank_needs_more_where_experts_are_whole() -> None:
    whole, sliced = (
        [predict_memory(job(rho=rho, experts_backend="loop", layout=layout)) for rho in (1.0, 1.5)]
        for layout in (ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2))
    )
    assert whole[0].peak_bytes < whole[1].peak_bytes
    assert sliced[0] == sliced[1]


@pytest.mark.requirement("R-PLAN-02")
def test_gathered_tokens_are_counted_and_lines_say_what_they_are() -> None:
    for regather in (False, True):
        plan = job(regather=regather)
        rows = explain_memory(plan)
        gathered = sum(row.num_bytes for row in rows if row.kind == "gathered")
        one = 4 * 64 * 32 * 2
        # In both layers for attention and the experts, and the gradients that the experts' backward gathers; or the
        # tokens and the gradients of the one that is at work.
        assert gathered == (2 if regather else 5) * one == predict_memory(plan).gathered
        assert all(row.what and row.formula and row.basis in (MEASURED, ASSUMED) for row in rows)
        assert sum(row.num_bytes for row in rows) == pytest.approx(predict_memory(plan).total_bytes, abs=len(KINDS) + 1)
        assert rows[-1].num_bytes == pytest.approx(0.08 * predict_memory(plan).peak_bytes, rel=1e-6)
        assert rows[-1][1:3] == ("margin", "0.08 of the rest")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_sequences": 64, "model": {"qk_norm": "full"}},
        {"layout": ParallelLayout(dp=2, tp=2), "strategy": "gather_weights", "precision": "fp32"},
        {"layout": ParallelLayout(dp=4), "zero": {"stage": 3, "reduce_bucket_size": 10**6}, "accumulation": 2},
        {"device": "cpu", "experts_backend": "loop", "model": {"mlp_only_layers": [1], "intermediate_size": 4096}},
        {"num_sequences": 1, "block_size": 2, "zero": {"stage": 2, "reduce_bucket_size": 10**6}},
    ],
    ids=str,
)
def test_a_printed_formula_gives_its_own_number(changes: dict[str, Any]) -> None:
    """Read as products of what stands side by side, with the values of the letters."""
    one = job(**changes)
    weights = weights_of(one)
    values: dict[str, Any] = {**Letters(one).values, "M": one.zero["reduce_bucket_size"], "ceil": math.ceil}
    for row in explain_memory(one)[:-1]:
        product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", row.formula.replace(" x ", " * "))
        names = {"P_unparted": [weights.unparted], "P_fetched": weights.at_work.values()}
        name = next((name for name in names if name in product), None)
        found = [eval(product, {}, values | {str(name): number}) for number in names.get(str(name), [0])]
        assert any(number == pytest.approx(row.num_bytes) for number in found), row


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"device": "cpu", "attention_length": 16.0}, set()),
        ({"attention_length": 16.0}, {"attention's output"}),
        ({"experts_backend": "triton"}, {"router's input"}),
        ({"token_dtype": "float8_e4m3"}, {"router's input"}),
        ({"model": {"capacity_factor": 1.0}}, {"router's input"}),
        ({"zero": {"stage": 2, "reduce_bucket_size": 1024, "overlap_comm": True}}, {"weights"}),
    ],
    ids=str,
)
def test_what_no_step_was_held_against_is_called_read(changes: dict[str, Any], read: set[str]) -> None:
    basis = {row.what: row.basis for row in explain_memory(job(**changes))}
    assert {what for what in ("attention's output", "router's input", "weights") if basis[what] == READ} == read
    assert set(basis.values()) == {MEASURED, ASSUMED} | ({READ} if read else set())


@pytest.mark.slow
def test_defaults_are_deepspeeds() -> None:
    from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs = DeepSpeedZeroConfig().model_dump(by_alias=True)
    assert {key: theirs[key] for key in DEFAULTS} == DEFAULTS
    assert MEMORY_OPT_ALLREDUCE_SIZE == PLAIN_BUCKET


def test_the_fullest_moment_moves_from_the_activations_to_the_optimizer() -> None:
    assert predict_memory(job(num_sequences=64)).moment == "backward of layer 2, experts"
    assert predict_memory(job(num_sequences=64, model={"vocab_size": 100_000})).moment == "loss"
    few = job(num_sequences=1, block_size=2, zero={"stage": 2, "reduce_bucket_size": 10**6})
    assert predict_memory(few).moment == "reduction"


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=4, ep=2)], ids=str)
def test_a_rank_holds_what_the_real_modules_hold(layout: ParallelLayout, qk_norm: str, tie: bool) -> None:
    config = mixed_config(qk_norm=qk_norm, tie_word_embeddings=tie)
    model, held = meta_model(config, layout), rank_parameters(config.sizes, layout)
    numels = {name: p.numel() for name, p in model.named_parameters()}
    assert held.total == sum(numels.values())
    assert held.largest == max(numels.values())
    groups = flat_groups(config.sizes, layout)
    assert sum(groups[1].values()) == sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert sum(sum(group.values()) for group in groups) == sum(numels.values())
    for number, is_dense in ((0, True), (1, False)):
        layer = sum(num for name, num in numels.items() if name.startswith(f"model.layers.{number}."))
        assert held.layer(is_dense=is_dense) == layer
    mesh: Any = SimpleNamespace(layout=layout)
    whole = full_shapes(model, config=config, table=shard_table(config, mesh))
    named = outer_shapes(config.sizes)
    for number in range(3):
        shapes = layer_shapes(config.sizes, is_dense=number == 0)
        named |= {f"model.layers.{number}.{name}": shape for name, shape in shapes.items()}
    assert {name: math.prod(shape) for name, shape in named.items()} == {n: math.prod(s) for n, s in whole.items()}


def test_graphs_keep_what_a_block_works_with() -> None:
    """Their memory is theirs from the first capture on: beside the head's at the loss, and at the update."""
    eager = job(recompute=True, num_sequences=16)
    graphed = changed(eager, cuda_graph=True)
    found, before = ({moment.name: moment for moment in moments(each)} for each in (graphed, eager))
    assert found.keys() == before.keys()
    added = {name: found[name].num_bytes - before[name].num_bytes for name in found}
    # Gradients of a block's weights, and its tokens in and out with theirs; what it works with is there already.
    held, numbers = rank_parameters(eager.sizes, eager.layout), eager.tokens_per_rank * eager.sizes.hidden_size
    buffers = 2 * (held.experts + held.attention) + 8 * numbers
    last = eager.sizes.num_hidden_layers
    assert added[f"backward of layer {last}, experts"] == pytest.approx(buffers)
    assert added["loss"] == pytest.approx(added["update"])
    assert added["loss"] > buffers
    assert predict_memory(graphed).total_bytes >= predict_memory(eager).total_bytes
