"""Fine-tuning what was exported: the names PEFT needs for every model type, and a save that is whole or fails.

The experts are 3-D parameters, not linear layers, and PEFT skips a name that it does not find without an error.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from recipe.shared.ranks import OneRank, TorchRanks
from recipe.shared.together import on_first

# The same names in Mixtral, Qwen3-MoE, OLMoE and our own class, as transformers holds them in memory.
PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "experts": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "router": ("mlp.gate.weight",),
    "dense": ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
    "embeddings": ("embed_tokens", "lm_head"),
}
# As the last part of a module's name PEFT takes these for the experts of transformers 4 and adapts the fused ones.
TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj")


def lora_targets(model: nn.Module, *, adapt: Sequence[str] = ("attention", "experts")) -> dict[str, Any]:
    """Return keyword arguments of peft's LoraConfig, `target_modules` and `target_parameters`, for parts of a model.

    adapt   names of PARTS, or ends of names of modules and parameters, like "layers.0.self_attn.q_proj"

    Experts, routers and dense layers are adapted as parameters, for which LoraConfig's lora_dropout must be 0.

    Raises ValueError where one of them finds nothing in the model.
    """
    names = [name for part in adapt for name in PARTS.get(part, (part,))]
    modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    parameters = {name for name, _ in model.named_parameters()}
    targets: dict[str, list[str]] = {"target_modules": [], "target_parameters": []}
    for name in names:
        if _finds(name, modules):
            as_module = name.rpartition(".")[2] not in TAKEN_FOR_EXPERTS
            targets["target_modules" if as_module else "target_parameters"].append(
                name if as_module else f"{name}.weight"
            )
        elif _finds(name, parameters):
            targets["target_parameters"].append(name)
        else:
            raise ValueError(
                f"{name!r} is found neither among the linear layers and embeddings of this {type(model).__name__} nor "
                f"among its parameters, so nothing would be adapted; parts that can be named are {sorted(PARTS)}"
            )
    return targets


def save_finetuned(model: Any, folder: Path | str) -> None:
    """Write an adapter (a PeftModel) or a whole transformers model, gathered where ZeRO-3 holds it in parts.

    Collective. Under DeepSpeed `model` is what is inside the engine. Weights keep their type; rank 0 holds them all.

    Raises RanksFailedError on every rank where a file holds an empty tensor, or not exactly those of the adapter.
    """
    state = model.state_dict(keep_vars=True)
    is_adapter = hasattr(model, "peft_config")
    wanted: Mapping[str, Any] = state
    if is_adapter:
        from peft import get_peft_model_state_dict

        wanted = get_peft_model_state_dict(model, state_dict=state)
    needed = {id(tensor) for tensor in wanted.values()}
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in wanted.items()}
    ranks = TorchRanks() if dist.is_initialized() else OneRank()
    whole = {}
    for name, tensor in state.items():
        value = _whole(tensor) if id(tensor) in needed else tensor.detach()
        if ranks.rank == 0:
            whole[name] = value

    def write() -> None:
        model.save_pretrained(str(folder), state_dict=whole)
        check_saved(folder, shapes=shapes if is_adapter else None)

    on_first(write, ranks=ranks)


def check_saved(folder: Path | str, *, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise ValueError unless the safetensors of a folder hold whole tensors, and exactly those of `shapes` if given.

    Tensors that Trainer saved under ZeRO-3 may be empty or missing.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            found |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    empty = [name for name, shape in found.items() if 0 in shape]
    if empty or not found:
        raise ValueError(
            f"{folder} holds {len(found)} tensors, {len(empty)} of them empty, like {empty[:3]}: the parameters were "
            "not gathered when it was saved; use recipe.hf.fine_tuning.save_finetuned on all ranks, or set "
            '"stage3_gather_16bit_weights_on_model_save": true for Trainer'
        )
    if shapes is not None and found != shapes:
        wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ValueError(f"{folder} does not hold the adapter's tensors; missing, unexpected or misshapen: {wrong[:3]}")


def _finds(end: str, names: set[str]) -> bool:
    """Return whether peft finds the target: as a whole name, or as the end of one after a dot."""
    return any(name == end or name.endswith(f".{end}") for name in names)


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor in its own type, gathered on the CPU where ZeRO-3 has it in parts; then collective."""
    if not hasattr(tensor, "ds_shape"):
        return tensor.detach()
    from recipe.checkpoint.native import full_precision_shard

    assert isinstance(tensor, nn.Parameter)
    return full_precision_shard(tensor).to(dtype=tensor.dtype, device="cpu")
