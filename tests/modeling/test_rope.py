"""Rotary tables: exact after every kind of cast, and the same as transformers' for every type it knows."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from modeling import model as model_module
from modeling.attention import RotaryTables, rotary_tables, rotate
from modeling.config import GatherMoeConfig
from modeling.model import GatherMoeForCausalLM
from tests.engine_runs import Case, start_engine
from tests.ranks import run_ranks
from tests.referee import full_state, tiny_config

POSITIONS = 4096
LONG = {"max_position_embeddings": 8192, "head_dim": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


def exact_tables(config: GatherMoeConfig, positions: Tensor) -> RotaryTables:
    """The definition in float64."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = positions[..., None].double() * (1 / config.rope_parameters["rope_theta"] ** pairs)
    angles = torch.cat((angles, angles), dim=-1)
    return RotaryTables(angles.cos(), angles.sin())


def worst_error(model: Any) -> float:
    """Of the tables that a call of the model makes, before their final cast, compared with the definition."""
    errors = []
    original = model_module.rotary_tables

    def watched(config: Any, position_ids: Tensor, *, dtype: torch.dtype) -> RotaryTables:
        before_cast = original(config, position_ids, dtype=torch.float32)
        want = exact_tables(config, position_ids)
        errors.extend((got - table).abs().max().item() for got, table in zip(before_cast, want, strict=True))
        after = original(config, position_ids, dtype=dtype)
        assert after.cos.dtype == dtype
        assert torch.equal(after.cos, before_cast.cos.to(dtype))
        return after

    with patch.object(model_module, "rotary_tables", watched):
        ids = torch.zeros(1, 16, dtype=torch.int64)
        with torch.no_grad():
            model(input_ids=ids, position_ids=torch.linspace(0, POSITIONS, 16).long()[None], use_cache=False)
    assert errors
    return max(errors)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.requirement("R-LEN-01")
def test_tables_are_exact_in_a_model_that_is_cast_or_loaded_in_bf16(loaded: bool, tmp_path: Path) -> None:
    model = GatherMoeForCausalLM(tiny_config(**LONG))
    if loaded:
        model.save_pretrained(tmp_path)
        model = GatherMoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    else:
        model.bfloat16()
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert worst_error(model) < 1e-3


def _under_deepspeed(rank: int, world_size: int, stage: int) -> float:
    config = tiny_config(**LONG)
    engine = start_engine(config, full_state(config), Case(dp=world_size, stage=stage, bf16=True))
    return worst_error(engine.ds)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.requirement("R-LEN-01")
def test_tables_are_exact_under_a_bf16_engine(stage: int) -> None:
    assert max(run_ranks(_under_deepspeed, 2, stage)) < 1e-3


def test_float64_tables_are_exact_in_float64() -> None:
    config = tiny_config(**LONG)
    positions = torch.arange(POSITIONS)[None]
    got = rotary_tables(config, positions, dtype=torch.float64)
    for table, want in zip(got, exact_tables(config, positions), strict=True):
        torch.testing.assert_close(table, want, atol=1e-12, rtol=0)


TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "other base": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    },
}


def stock_tables(rope: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=64, rope_parameters=rope
    )
    return LlamaRotaryEmbedding(config)(torch.zeros(1), positions)


@pytest.mark.parametrize("name", list(TYPES))
@pytest.mark.parametrize(
    "positions",
    [torch.arange(16)[None], torch.arange(64)[None], torch.arange(100)[None], torch.tensor([[90]])],
    ids=["short", "as trained", "longer", "one far token"],
)
def test_every_type_matches_transformers(name: str, positions: Tensor) -> None:
    rope = {"rope_theta": 10000.0, **TYPES[name]}
    got = rotary_tables(tiny_config(rope_parameters=dict(rope)), positions, dtype=torch.float32)
    for table, want in zip(got, stock_tables(dict(rope), positions), strict=True):
        torch.testing.assert_close(table, want)


def test_rotating_matches_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 10, 8, generator=generator) for heads in (4, 2))
    tables = rotary_tables(tiny_config(), torch.arange(10)[None], dtype=torch.float32)
    want = apply_rotary_pos_emb(q, k, tables.cos, tables.sin)
    torch.testing.assert_close((rotate(q, tables), rotate(k, tables)), want)
