"""Exported folders in use: adapters, Trainer, TRL, ZeRO-3 saves that are whole, padded batches, more tokens."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe.hf.fine_tuning import PARTS, check_saved, lora_targets, save_finetuned
from tests.engine_runs import Case
from tests.exports import CONFIGS, export, read_export
from tests.ranks import run_ranks
from tests.referee import LOGITS_ATOL, Tensors, assert_all_match, full_state, mixed_config, referee_model, tiny_config
from tests.tuning import (
    FILE,
    Exported,
    adapters,
    ids,
    open_model,
    open_with_adapters,
    plain_engine,
    plain_settings,
    trainer,
    training_arguments,
)

TYPES = tuple(CONFIGS)


def model_of(name: str) -> Any:
    config = CONFIGS[name]()
    return referee_model(config, full_state(config))


def parts_of(name: str) -> list[str]:
    return [part for part in PARTS if part != "dense" or name in ("qwen3_moe", "gather_moe")]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.requirement("R-FT-01")
def test_every_type_has_the_same_names(name: str) -> None:
    model = model_of(name)
    assert lora_targets(model) == {
        "target_modules": [f"self_attn.{kind}_proj" for kind in "qkvo"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    assert lora_targets(model, adapt=parts_of(name))["target_modules"][4:] == ["embed_tokens", "lm_head"]
    assert lora_targets(model, adapt=["layers.1.self_attn.q_proj"])["target_modules"] == ["layers.1.self_attn.q_proj"]


@pytest.mark.requirement("R-FT-01")
def test_a_name_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mlp.gate_proj.weight' is found neither .* of this MixtralForCausalLM"):
        lora_targets(model_of("mixtral"), adapt=["attention", "dense"])
    for usual in ("w1", "experts.0.w1", "mlp.experts"):
        with pytest.raises(ValueError, match=f"'{usual}' is found neither .* nothing would be adapted"):
            lora_targets(model_of("mixtral"), adapt=[usual])


@pytest.mark.requirement("R-FT-01")
def test_a_dense_layer_is_not_taken_for_the_experts() -> None:
    """PEFT would turn the module's name into that of all experts of a Qwen3-MoE."""
    targets = lora_targets(model_of("qwen3_moe"), adapt=["layers.0.mlp.down_proj"])
    assert targets == {"target_modules": [], "target_parameters": ["layers.0.mlp.down_proj.weight"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.requirement("R-FT-01")
def test_adapters_of_every_part_train_merge_and_come_back(name: str, exported: Exported, tmp_path: Path) -> None:
    from peft import PeftModel

    model = open_with_adapters(exported(name), adapt=parts_of(name))
    config = CONFIGS[name]()
    for wanted in ("gate_up_proj", "down_proj", "gate.weight"):
        assert sum(key.endswith(wanted) for key in model.base_model.targeted_parameter_names) >= 2
    shape = model.get_parameter("base_model.model.model.layers.1.mlp.experts.lora_A.default.weight").shape
    assert shape == (4 * config.num_experts, config.moe_intermediate_size)
    start = {key: p.detach().clone() for key, p in adapters(model).items()}
    base = {key: p.detach().clone() for key, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(adapters(model).values(), lr=0.02)
    for _ in range(2):  # the first step moves B alone, which starts as zeros
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [key for key, p in adapters(model).items() if torch.equal(p, start[key])] == []
    assert all(torch.equal(p, base[key]) for key, p in model.named_parameters() if not p.requires_grad)
    want = model.eval()(ids()).logits.detach()
    assert (want - open_model(exported(name))(ids()).logits).abs().max() > 0.1
    save_finetuned(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(open_model(exported(name)), tmp_path / "adapter").eval()
    assert torch.equal(again(ids()).logits, want)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids()).logits, want, atol=LOGITS_ATOL, rtol=0)
    save_finetuned(merged, tmp_path / "merged")
    assert type(merged) is type(open_model(tmp_path / "merged"))
    torch.testing.assert_close(open_model(tmp_path / "merged").eval()(ids()).logits, want, atol=LOGITS_ATOL, rtol=0)


def adapter_gradients(folder: Path, *, reentrant: bool | None) -> dict[str, Tensor]:
    model = open_with_adapters(folder, adapt=["attention", "experts", "router"]).train()
    for key, parameter in adapters(model).items():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    model(input_ids=ids(), labels=ids()).loss.backward()
    return {key: p.grad for key, p in adapters(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.requirement("R-FT-05")
def test_checkpointing_changes_no_gradient_of_an_adapter(name: str, exported: Exported) -> None:
    want = adapter_gradients(exported(name), reentrant=None)
    assert all(gradient.any() for gradient in want.values())
    for reentrant in (False, True):
        got = adapter_gradients(exported(name), reentrant=reentrant)
        assert got.keys() == want.keys()
        assert_all_match(got, want, atol=1e-6)


@pytest.mark.requirement("R-FT-02")
def test_an_empty_or_missing_tensor_makes_the_save_fail(tmp_path: Path) -> None:
    for tensors in ({}, {"a.lora_A.weight": torch.ones(4, 2), "a.lora_B.weight": torch.empty(0)}):
        save_file(tensors, tmp_path / FILE)
        with pytest.raises(ValueError, match=rf"{len(tensors)} tensors, {len(tensors) // 2} of them empty, .* gather"):
            check_saved(tmp_path)
    save_file({"a.lora_A.weight": torch.ones(4, 2)}, tmp_path / FILE)
    check_saved(tmp_path)
    with pytest.raises(ValueError, match=r"not hold the adapter's tensors; .* \['a.lora_A.weight', 'b'\]"):
        check_saved(tmp_path, shapes={"a.lora_A.weight": (4, 3), "b": (2,)})


def tune_under_deepspeed(rank: int, world_size: int, name: str, folder: Path, stage: int, out: Path) -> str | None:
    """Two steps of adapters under DeepSpeed, saved by us; and what is said of how PEFT alone saves them."""
    engine = plain_engine(open_with_adapters(folder), plain_settings(stage, num_sequences=8 // world_size))
    mine = ids().chunk(world_size)[rank]
    for _ in range(2):
        engine.backward(engine(input_ids=mine, labels=mine).loss)
        engine.step()
    save_finetuned(engine.module, out)
    if rank or stage < 3:
        return None
    engine.module.save_pretrained(str(out / "unguarded"))
    try:
        check_saved(out / "unguarded")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe"])
@pytest.mark.requirement("R-FT-02")
def test_an_adapter_is_saved_whole_under_zero_3(name: str, exported: Exported, tmp_path: Path) -> None:
    for stage in (0, 3):
        out = tmp_path / str(stage)
        said, _ = run_ranks(tune_under_deepspeed, 2, name, exported(name), stage, out)
    assert said is not None
    assert "of them empty" in said
    want, got = load_file(tmp_path / "0" / FILE), load_file(tmp_path / "3" / FILE)
    assert got.keys() == want.keys()
    assert sum("experts" in key for key in want) == 8
    assert_all_match(got, want)


VOCAB, ADDED = 51, 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe", "adapters"])
@pytest.mark.requirement("R-CKPT-03")
def test_in_trainer_the_schedule_goes_on(name: str, exported: Exported, tmp_path: Path) -> None:
    """The model is opened from the checkpoint: of its files Trainer itself puts only those tensors back that it finds.

    Experts, whose files hold one by one what the model holds together, it would leave as they were.
    """
    options = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 8, "save_strategy": "steps"}
    logs = []
    for checkpoint in (None, tmp_path / "checkpoint-3"):
        if name == "adapters":
            model = open_with_adapters(exported("mixtral"))
        else:
            model = open_model(checkpoint or exported(name))
        run = trainer(model, training_arguments(tmp_path, save_steps=3, **options))
        run.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        steps = [line for line in run.state.log_history if "loss" in line and line["step"] > 3]
        logs.append([(line["step"], line["learning_rate"], line["loss"]) for line in steps])
    assert [step for step, _, _ in logs[0]] == list(range(4, 9))
    assert logs[0] == logs[1]
    assert len({rate for _, rate, _ in logs[0]}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe"])
@pytest.mark.requirement("R-FT-05")
def test_in_trainer_checkpointing_changes_no_adapter(name: str, exported: Exported, tmp_path: Path) -> None:
    tuned = []
    for options in ({}, {"gradient_checkpointing": True}):
        model = open_with_adapters(exported(name))
        trainer(model, training_arguments(tmp_path, max_steps=2, **options)).train()
        tuned.append({key: p.detach() for key, p in adapters(model).items()})
    assert_all_match(*tuned, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe"])
def test_trl_learns_completions_alone(name: str, exported: Exported, tmp_path: Path) -> None:
    """By TRL's defaults, activation checkpointing among them: the loss it reports is that of plain torch."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    model = open_model(exported(name))
    logits = model(ids()).logits[:, 9:-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids()[:, 10:].flatten()).item()
    words = Tokenizer(models.WordLevel({str(i): i for i in range(51)}, unk_token="0"))
    rows = [{"input_ids": row, "completion_mask": [0] * 10 + [1] * 6} for row in ids().tolist()]
    options = {"max_steps": 1, "logging_steps": 1, "bf16": False, "use_cpu": True, "disable_tqdm": True}
    run = SFTTrainer(
        model,
        SFTConfig(str(tmp_path), completion_only_loss=True, save_strategy="no", **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0"),
    )
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    run.train()
    assert model.is_gradient_checkpointing
    assert run.state.log_history[0]["loss"] == pytest.approx(want, abs=LOGITS_ATOL)
    assert not any(torch.equal(p, before[key]) for key, p in model.named_parameters() if "experts" in key)


@contextmanager
def trainers_state() -> Iterator[None]:
    """Whatever Trainer leaves behind in the process for the next one to find, taken back."""
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    environment = dict(os.environ)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # asked for, but the ranks have met already
    groups.mpu = None  # that of the engine before, whose groups have ended
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(environment)


def train_under_zero(
    rank: int, world_size: int, folder: Path, out: Path, *, stage: int, flag: bool | None, with_adapters: bool
) -> None:
    """Two steps of Trainer under DeepSpeed, saved by Trainer in `theirs` and by us in `ours`."""
    from recipe.engine.engine import join_communication

    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if flag is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = flag
    settings = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    join_communication()
    with trainers_state():
        # The arguments first: under ZeRO-3 from_pretrained then loads into parts.
        arguments = training_arguments(out, max_steps=2, deepspeed=settings)
        run = trainer(open_with_adapters(folder) if with_adapters else open_model(folder), arguments)
        assert run.accelerator.num_processes == world_size
        run.train()
        run.save_model(str(out / "theirs"))
        save_finetuned(run.model, out / "ours")


def tune(folder: Path, out: Path, **options: Any) -> tuple[Tensors, Tensors]:
    """What Trainer saved after a training on two ranks, and what we did."""
    run_ranks(train_under_zero, 2, folder, out, **options)
    return read_export(out / "theirs"), read_export(out / "ours")


@pytest.mark.slow
@pytest.mark.requirement("R-FT-02")
def test_adapters_of_trainer_are_whole_under_zero_3(exported: Exported, tmp_path: Path) -> None:
    saved = [
        tune(exported("gather_moe"), tmp_path / str(stage), stage=stage, flag=None, with_adapters=True)
        for stage in (0, 3)
    ]
    [(want, _), (theirs, ours)] = saved
    assert len(want) == 32
    for got in (theirs, ours):
        assert got.keys() == want.keys()
        assert_all_match(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.requirement("R-CKPT-06")
def test_trainer_under_zero_3(flag: bool | None, exported: Exported, tmp_path: Path) -> None:
    """Without the flag Trainer leaves no weights at all, none that are empty; save_finetuned needs no flag."""
    theirs, ours = tune(exported("mixtral"), tmp_path, stage=3, flag=flag, with_adapters=False)
    start = read_export(exported("mixtral"))
    assert theirs.keys() == (start.keys() if flag else set())
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in start.items()}
    assert not any(torch.equal(tensor, start[key]) for key, tensor in ours.items())
    assert_all_match(theirs, ours, atol=0)


class Growth(NamedTuple):
    """Rows of the embedding and of the head right after the resize and after one step, and the sizes told."""

    before: list[Tensor]
    after: list[Tensor]
    told: set[int]


def grow(rank: int, world_size: int, folder: Path, stage: int, out: Path) -> Growth:
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from recipe.checkpoint.native import full_precision_shard

    settings = plain_settings(stage, num_sequences=4)

    def rows(model: Any) -> list[Tensor]:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        return [full_precision_shard(end.weight).clone() for end in ends]

    with ExitStack() as stack:
        keep_alive = HfDeepSpeedConfig(settings)  # from_pretrained then loads into ZeRO-3's parts
        stack.callback(unset_hf_deepspeed_config)
        model = open_model(folder).train()
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + ADDED)
        engine = plain_engine(model, settings)
        before = rows(model)
        ids = torch.arange(4 * 14).view(4, 14).clamp(max=VOCAB + ADDED - 1)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        save_finetuned(engine.module, out)
        told = {model.config.vocab_size, model.lm_head.out_features, model.get_input_embeddings().num_embeddings}
        assert keep_alive.is_zero3() == (stage == 3)
        return Growth(before, rows(model), told)


@pytest.mark.slow
@pytest.mark.parametrize(  # all pairs of two
    ("kind", "tied", "stage"),
    [("qwen3_moe", False, 0), ("qwen3_moe", True, 3), ("gather_moe", False, 3), ("gather_moe", True, 0)],
)
@pytest.mark.requirement("R-FT-04")
def test_three_more_tokens(kind: str, tied: bool, stage: int, tmp_path: Path) -> None:
    make = tiny_config if kind == "qwen3_moe" else mixed_config
    config = make(vocab_size=VOCAB, qk_norm="head" if kind == "qwen3_moe" else "none", tie_word_embeddings=tied)
    state = full_state(config)
    assert run_ranks(export, 1, config, state, Case(), tmp_path / "hf") == [kind]
    [growth] = run_ranks(grow, 1, tmp_path / "hf", stage, tmp_path / "grown")
    assert growth.told == {VOCAB + ADDED}
    names = ["model.embed_tokens.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"]
    for name, before, after in zip(names, growth.before, growth.after, strict=True):
        assert before.shape == after.shape == (VOCAB + ADDED, config.hidden_size)
        assert torch.equal(before[:VOCAB], state[name])
        assert ((before != after).any(dim=1))[VOCAB:].all()
    check_saved(tmp_path / "grown")
    assert all(tensor.numel() for tensor in read_export(tmp_path / "grown").values())
    model = open_model(tmp_path / "grown")
    assert model.config.vocab_size == VOCAB + ADDED
    for end, after in zip((model.get_input_embeddings(), model.get_output_embeddings()), growth.after, strict=True):
        assert torch.equal(end.weight, after)
    assert model(torch.tensor([[VOCAB + ADDED - 1]])).logits.shape == (1, 1, VOCAB + ADDED)
