"""Every way to split attention gives one rank's results and sends what its formula says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attention_layers
import attention_modes
import pytest
import torch
import torch.distributed as dist
from attention_layers import MODES, Sizes, Weights, check_sizes, draw, formula, make_job
from attention_modes import Answer, Measured, Report, Traffic, solve_alone, summarise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.launching import run_cluster_ranks_here
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

SIZES = Sizes(num_tokens=24, hidden=32, num_heads=4, num_kv_heads=4, head_size=8)
GROUPED = SIZES._replace(num_heads=8, num_kv_heads=4)


def every_mode(rank: int, world_size: int, sizes: Sizes) -> dict[str, tuple[Answer, Answer, Traffic]]:
    """By mode, what this rank computes, its part of what one rank computes, and what it sends."""
    job, found = make_job(sizes, group=dist.group.WORLD), {}
    for name, mode in MODES.items():
        whole = solve_alone(name, sizes=sizes)
        got = attention_modes.solve(attention_modes.own_task(mode, job=job))
        want = attention_modes.own_answer(whole, mode=mode, job=job)
        found[name] = got, want, attention_modes.measure(name, job=job, whole=whole).sent
    return found


@pytest.mark.parametrize(("size", "sizes"), [(2, SIZES), (2, GROUPED), (4, GROUPED)])
def test_every_mode_computes_what_one_rank_does_and_sends_what_its_formula_says(size: int, sizes: Sizes) -> None:
    for by_mode in run_ranks(every_mode, size, sizes):
        assert by_mode.keys() == MODES.keys()
        for name, (got, want, sent) in by_mode.items():
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
            assert sent == formula(name, sizes, num_ranks=size), name


def test_formulas_of_a_layer_done_by_hand() -> None:
    """T=24, D=32, HK=GK=32, fp32, N=2: half of a [T, D] is 1,536 bytes, of two numbers per token twice that is 192."""
    sent = {name: formula(name, SIZES, num_ranks=2) for name in MODES}
    assert sent["heads-no-qk-norm"] == Traffic(3072, 3072)
    assert sent["heads"] == sent["heads-overlapped"] == Traffic(3072 + 192, 3072 + 192)
    assert sent["gather-qk"] == sent["gather-qk-one-by-one"] == Traffic(6144, 6144)
    assert sent["column-o"] == Traffic(3072 + 192 + 768, 3072 + 192 + 768)
    whole_weights = 4 * (4 * 32 * 32 + 64)
    assert sent["context"] == Traffic(3072, 3072 + whole_weights)
    assert sent["ulysses"] == Traffic(3072, 3072 + whole_weights)


def test_one_rank_computes_what_transformers_does() -> None:
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeAttention, OlmoeRotaryEmbedding

    x, grad, weights = draw(SIZES)
    config = OlmoeConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=attention_layers.EPS
    )
    config._attn_implementation = "sdpa"
    stock = OlmoeAttention(config, layer_idx=0)
    modules = (stock.q_proj, stock.k_proj, stock.v_proj, stock.o_proj, stock.q_norm, stock.k_norm)
    for module, weight in zip(modules, weights, strict=True):
        module.weight.data.copy_(weight)
    x.requires_grad_()
    tables = OlmoeRotaryEmbedding(config)(x[None], torch.arange(SIZES.num_tokens)[None])
    out = stock(x[None], position_embeddings=tables, attention_mask=None)[0][0]
    out.backward(grad)
    assert x.grad is not None
    want = Answer(out.detach(), x.grad, Weights(*(module.weight.grad for module in modules)))
    torch.testing.assert_close(solve_alone("heads", sizes=SIZES), want, atol=1e-5, rtol=1e-5)


class Products(TorchDispatchMode):
    """Notes matrix products among other events."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname == "mm":
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def order_of_events(rank: int, world_size: int) -> list[str]:
    """When the gather of q and k and its gradient's scatter start and end, among the products."""
    events: list[str] = []

    def noted(what: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def starting(x: Tensor, *args: Any, **options: Any) -> Any:
            transfer = start(x, *args, **options)
            events.append(f"{what} starts")
            finish = transfer.finish

            def finishing() -> Tensor:
                events.append(f"{what} ends")
                return finish()

            transfer.finish = finishing
            return transfer

        return starting

    task = attention_modes.own_task(MODES["gather-qk"], job=make_job(SIZES, group=dist.group.WORLD))
    with (
        patch.object(attention_layers, "start_gather", noted("gather", attention_layers.start_gather)),
        patch.object(attention_layers, "start_scatter", noted("scatter", attention_layers.start_scatter)),
        Products(events),
    ):
        attention_modes.solve(task)
    return events


def test_v_is_projected_while_q_and_k_travel() -> None:
    for events in run_ranks(order_of_events, 2):
        for what in ("gather", "scatter"):
            between = events[events.index(f"{what} starts") : events.index(f"{what} ends")]
            assert "product" in between, events


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "message"),
    [
        (Sizes(num_tokens=10), 4, r"4 ranks cannot share 10 tokens evenly; take 2 or more that divide 4, and tokens"),
        (Sizes(), 8, r"8 ranks cannot share 4 key-value heads evenly"),
        (Sizes(), 3, r"3 ranks cannot share 2048 tokens and 8 heads and 4 key-value heads evenly"),
        (Sizes(), 1, r"1 ranks cannot share a layer evenly; take 2 or more"),
    ],
)
def test_what_cannot_be_split_is_refused(sizes: Sizes, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sizes(sizes, num_ranks=num_ranks)


def test_a_row_is_the_slowest_rank_and_void_where_it_computes_or_sends_something_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = {name: formula(name, SIZES, num_ranks=2) for name in MODES}
    good = {name: Measured(sent[name], 1e-7) for name in ("heads", "ulysses", "context")}
    bad = good | {"ulysses": Measured(sent["ulysses"], 2e-4), "context": Measured(Traffic(1.0, 2.0), 0.0)}
    first = Report(good, {name: [1.0, 2.0, 3.0] for name in good})
    second = Report(bad, {name: [1.5, 9.0, 0.5] for name in good})
    rows = summarise([first, second], sizes=SIZES)
    assert [row["step_s"] for row in rows] == [3.0, 3.0, 3.0], "of 1.5, 9 and 3"
    assert [row.get("void") for row in rows] == [
        None,
        "its result differs from one rank's by 2.0e-04 of the largest number",
        f"a rank sent Traffic(forward=1.0, backward=2.0), where the formula says {sent['context']}",
    ]
    attention_modes.print_table(rows)
    assert "void: its result differs" in capsys.readouterr().out


def test_the_script_prints_and_writes_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cluster_ranks_here(attention_modes, tmp_path, monkeypatch)
    words = ["--ranks", "2", "--rate", "loopback", "--tokens", "128", "--turns", "2"]
    assert attention_modes.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    assert "void" not in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == list(MODES)
    assert all(row["step_s"] > 0 for row in rows)
