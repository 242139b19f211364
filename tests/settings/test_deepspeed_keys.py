"""The tables of DeepSpeed keys are those of the installed DeepSpeed, and typos in them are named."""

from typing import Any

import pytest

from recipe.settings.deepspeed_keys import (
    FIXED_VALUES,
    MERGED_KEYS,
    NESTED_KEYS,
    OUR_BLOCKS,
    PASSED_KEYS,
    REFUSED_BLOCKS,
    REMOVED_BLOCKS,
    auto_paths,
    refused_keys,
    unknown_keys,
)


class _KeysRead(dict[str, Any]):
    """A configuration that remembers which of its top-level keys DeepSpeed asks for."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __copy__(self) -> "_KeysRead":
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def test_every_top_level_key_that_deepspeed_reads_is_in_one_table() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = _KeysRead(train_batch_size=1)
    DeepSpeedConfig(config)
    tables = [PASSED_KEYS, MERGED_KEYS, tuple(REFUSED_BLOCKS), REMOVED_BLOCKS, OUR_BLOCKS]
    ours = [key for table in tables for key in table]
    assert len(ours) == len(set(ours))
    # The two sizes are read by deepspeed.initialize itself, before the configuration is parsed.
    assert config.asked | {"sequence_parallel_size", "data_parallel_size"} == set(ours) - set(OUR_BLOCKS)


def test_keys_inside_blocks_are_those_of_deepspeed_s_own_models() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    for block, model in models.items():
        theirs = {field.alias or name for name, field in model.model_fields.items()}
        assert set(NESTED_KEYS[block]) == theirs, block


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"gradient_cliping": 0.25}, 'unknown key "gradient_cliping"; did you mean "gradient_clipping"?'),
        ({"bf16": {"enable": True}}, 'unknown key "bf16.enable"; did you mean "enabled"?'),
        ({"parallel": {"pp": 2}}, 'unknown key "parallel.pp"; valid here: combine_dtype, cuda_graph, ep,'),
        ({"parallel": {"etp": 2}}, 'unknown key "parallel.etp"; did you mean "tp"?'),
        ({"checkpoint": {"qqq": 2}}, 'unknown key "checkpoint.qqq"; valid here: checkpoint_serialization,'),
    ],
)
@pytest.mark.requirement("R-CFG-01")
def test_unknown_keys_are_named_with_the_nearest(config: dict[str, Any], fault: str) -> None:
    found = dict(unknown_keys(config))
    assert len(found) == 1
    assert next(iter(found.values())).startswith(fault)


@pytest.mark.requirement("R-CFG-01")
def test_blocks_that_clash_with_the_trainer_or_are_gone_are_refused_by_name() -> None:
    for key in REFUSED_BLOCKS:
        assert list(unknown_keys({key: {}})) == []
        (text,) = refused_keys({key: {"enabled": True}})
        assert text.startswith(f'"{key}" cannot be used: ')
        assert list(refused_keys({key: {"enabled": False}})) == []
    for key in REMOVED_BLOCKS:
        assert list(refused_keys({key: {}})) == [f'"{key}" was removed from DeepSpeed; leave it out']


@pytest.mark.parametrize(("path", "allowed", "reason"), FIXED_VALUES)
def test_values_the_trainer_relies_on_cannot_be_changed(path: str, allowed: tuple[Any, ...], reason: str) -> None:
    def config_with(value: Any) -> dict[str, Any]:
        for key in reversed(path.split(".")):
            value = {key: value}
        return dict(value)

    assert list(unknown_keys(config_with("something else"))) == []
    for value in ("something else", {}):
        (fault,) = refused_keys(config_with(value))
        instead = f"must be {allowed[0]!r}" if allowed else "must be left out"
        assert fault == f'"{path}": {value!r} cannot be used: it {instead}, since {reason}'
    for value in allowed:
        assert list(refused_keys(config_with(value))) == []


def test_autos_are_found_at_any_depth() -> None:
    config = {"a": "auto", "b": {"c": [1, "auto"], "d": {"e": "auto"}}, "f": 1}
    assert list(auto_paths(config)) == ["a", "b.c[1]", "b.d.e"]
