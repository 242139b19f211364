"""The seam to DeepSpeed: process groups, tags, optimizer, and one optimizer step over micro-batches.

DeepSpeed sees a tensor-parallel model. Sharded parameters carry `tensor_model_parallel`, replicated ones have their
gradients summed inside the model, and nothing here is one of DeepSpeed's own MoE layers. Besides the native
checkpoints no other file imports deepspeed.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from modeling.auxiliary import TokenSums
from modeling.comm import scope
from modeling.config import GatherMoeConfig
from modeling.copies import choose_copies
from modeling.init import full_shapes, shard_table, stored_tensors
from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from modeling.noise import NoiseOrigin
from modeling.router import GatherMoeRouter
from recipe.data.batches import MicroBatch
from recipe.settings.training import OptimizerOptions


class Mpu:
    """What DeepSpeed asks about model parallelism.

    It must not have `initialize_sequence_parallel`: its mere presence makes DeepSpeed ignore the rest.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    def get_model_parallel_group(self) -> Any:
        return self._mesh.tp_group

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.layout.tp

    def get_model_parallel_rank(self) -> int:
        return self._mesh.group_rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_group(self) -> Any:
        return self._mesh.dp_group

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.layout.dp

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp_rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._mesh.dp_ranks

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0


class StepCounts(NamedTuple):
    """Targets and valid tokens of a whole global batch."""

    num_targets: int
    num_tokens: int


class Evaluation(NamedTuple):
    """Sum of negative log-likelihoods in nats over `num_targets` targets, of all ranks."""

    nll: float
    num_targets: int


def tag_parameters(model: nn.Module, *, config: GatherMoeConfig, mesh: ParallelMesh) -> None:
    """Tell DeepSpeed which parameters each rank of the group holds a part of, so that norms count each number once.

    Of a key-value head that several ranks hold, only the first copy is tagged: DeepSpeed counts untagged parameters
    on the group's first rank only, which always holds a first copy itself.
    """
    table = shard_table(config, mesh)
    for name, shape in full_shapes(model, config=config, table=table).items():
        shard = table.shard(name, shape, group_rank=mesh.group_rank)
        if not shard.is_replicated and shard.replica == 0:
            model.get_parameter(name).tensor_model_parallel = True  # type: ignore[attr-defined]


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter in whose name one of these regular expressions is found; before the optimizer is built.

    Raises ValueError for a pattern that is no regular expression, is found in no name, or only in that of a head that
    is tied to the embedding.
    """
    names = [name for name, _ in model.named_parameters()]
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}.difference(names)
    for pattern in patterns:
        try:
            found = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            raise ValueError(f"freeze_parameters: {pattern!r} is not a regular expression: {error}") from None
        if not found:
            doubles = [name for name in tied if re.search(pattern, name)]
            if doubles:
                raise ValueError(
                    f"freeze_parameters: {pattern!r} is found in {doubles[0]} alone, which is tied to the embedding; "
                    "name embed_tokens, and both are frozen"
                )
            raise ValueError(
                f"freeze_parameters: {pattern!r} is found in none of the {len(names)} parameters' names, which are "
                f"like {names[len(names) // 2]}"
            )
        for name in found:
            model.get_parameter(name).requires_grad_(False)


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over all trainable parameters, weight decay on matrices alone; ValueError if there are none."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train")
    decayed = [p for p in trainable if p.dim() > 1]
    plain = [p for p in trainable if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, options.weight_decay), (plain, 0.0))
        if params
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)


class Engine:
    """A model under DeepSpeed. Every method is collective over the whole world."""

    def __init__(
        self,
        model: GatherMoeForCausalLM,
        *,
        ds_config: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        seed: int = 0,
    ) -> None:
        """`ds_config` is DeepSpeed's alone: no "auto", no scheduler, no optimizer block. `seed` is the jitter's.

        Raises ValueError where a trainable parameter is in no group of the optimizer, for copies with ZeRO-3, and for
        a model that something was added to.
        """
        _check_ownership(model, optimizer)
        _check_plain(model)
        self.zero_stage = int(ds_config.get("zero_optimization", {}).get("stage", 0))
        if self.zero_stage == 3 and model.experts_with_copies:
            raise ValueError(
                f"resident_experts={model.execution.resident_experts} cannot be used with ZeRO-3, which leaves no rank "
                "whole experts to lend; use stage 0, 1 or 2, or resident_experts=0"
            )
        self.mesh = model.mesh
        tag_parameters(model, config=model.config, mesh=self.mesh)
        if not deepspeed.comm.is_initialized():
            join_communication()
        self.ds, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, mpu=Mpu(self.mesh), config=ds_config, dist_init_required=False
        )
        self._seed = seed
        self._choices: Tensor | None = None  # [L_moe, E] of the accumulated micro-batches, for the routers' biases
        self._loads: Tensor | None = None  # [L_moe, E] of the step before, which the next one's copies are chosen by
        self.tokens_read = 0  # of the stream, by all groups in all steps so far, resumed ones included
        self.accumulation = int(ds_config.get("gradient_accumulation_steps", 1))

    @property
    def model(self) -> GatherMoeForCausalLM:
        return self.ds.module

    @property
    def skipped_steps(self) -> int:
        """Steps that DeepSpeed left out because their norm was not a number."""
        return self.ds.skipped_steps

    @scope("counts")
    def count(self, micro_batches: Sequence[MicroBatch]) -> StepCounts:
        """Targets and valid tokens of the global batch, which must be known before its first forward."""
        targets = sum(m.num_targets for m in micro_batches)
        tokens = sum(m.input_ids.numel() if m.token_mask is None else int(m.token_mask.sum()) for m in micro_batches)
        counts = torch.tensor([targets, tokens], dtype=torch.int64, device=self.ds.device)
        dist.all_reduce(counts, group=self.mesh.dp_group)
        return StepCounts(*counts.tolist())

    @scope("zero")
    def accumulate(self, micro_batches: Sequence[MicroBatch], *, counts: StepCounts) -> TokenSums:
        """Forward and backward of all micro-batches of a step; afterwards the gradients are complete.

        Returns the sums of this group over all micro-batches.
        """
        if len(micro_batches) != self.accumulation:
            raise ValueError(
                f"{len(micro_batches)} micro-batches were given, but gradient_accumulation_steps={self.accumulation}"
            )
        self.ds.train()
        self._fill_copies()
        sums: list[TokenSums] = []
        choices = None
        for i, micro_batch in enumerate(micro_batches):
            if i:
                self.ds.step()  # between micro-batches it only counts
            output = self.ds(
                **self._inputs(micro_batch),
                num_items_in_batch=counts.num_targets,
                num_tokens_in_batch=counts.num_tokens,
                earlier_choices=choices,
                noise=self._noise(micro_batch, index=i),
            )
            choices = output.choices
            # DeepSpeed divides by the accumulation count and averages over dp; the loss is already a share of the
            # global mean, so undo both.
            self.ds.backward(output.loss * (self.accumulation * self.mesh.layout.dp))
            sums.append(output.sums)
        self.tokens_read += sum(m.input_ids.numel() for m in micro_batches) * self.mesh.layout.dp
        # In float64, where whole numbers stay exact however many micro-batches there are.
        choices_LE = torch.stack([part.expert_counts for part in sums]).double().sum(0)
        # Two uses of the same numbers: the biases' are summed over groups in place.
        self._choices, self._loads = choices_LE.clone() if counts.num_targets else None, choices_LE
        return TokenSums(*(torch.stack(parts).sum(0) for parts in zip(*sums, strict=True)))

    @scope("zero")
    def update(self, *, learning_rate: float) -> float:
        """Clip, take one optimizer step with `learning_rate`, and return the gradient norm before clipping.

        The routers' biases move, too, unless DeepSpeed leaves the step out or nothing in its batch had a target.
        """
        for group in self.ds.optimizer.param_groups:
            group["lr"] = learning_rate
        plain_norm, skipped_before = self._plain_gradient_norm(), self.skipped_steps
        self.ds.step()
        for experts in self.model.experts_with_copies:
            experts.drop()
        choices_LE, self._choices = self._choices, None
        if choices_LE is not None and self.skipped_steps == skipped_before:
            self._move_router_biases(choices_LE)
        norm = self.ds.get_global_grad_norm()
        return plain_norm if norm is None else float(norm)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Evaluation:
        """Cross-entropy over all ranks' micro-batches, of which every dp rank must have the same number."""
        self.ds.eval()
        nll, num_targets = torch.zeros((), dtype=torch.float64), 0
        for micro_batch in micro_batches:
            output = self.ds(**self._inputs(micro_batch))
            nll += output.sums.nll.double().cpu()
            num_targets += micro_batch.num_targets
        self.ds.train()
        totals = torch.stack([nll, torch.tensor(num_targets, dtype=torch.float64)]).to(self.ds.device)
        dist.all_reduce(totals, group=self.mesh.dp_group)
        total_nll, count = totals.tolist()
        return Evaluation(total_nll, int(count))

    def loads(self) -> list[list[float]] | None:
        """How often each expert of each MoE layer was chosen by this group in the last step; None before the first."""
        return None if self._loads is None else self._loads.tolist()

    def restore_loads(self, loads: list[list[float]] | None) -> None:
        """Choose the next step's copies by these, of which all ranks of a group give the same."""
        self._loads = None if loads is None else torch.tensor(loads, dtype=torch.float64, device=self.ds.device)

    def _fill_copies(self) -> None:
        """Copy the experts that were hot in this group's last step, once for all micro-batches of this one."""
        layers, num_copies = self.model.experts_with_copies, self.model.execution.resident_experts
        if self._loads is None or not layers:
            return
        chosen_LPC = choose_copies(self._loads, num_ranks=self.mesh.layout.ep, num_copies=num_copies)
        for experts, copies in zip(layers, chosen_LPC.tolist(), strict=True):
            experts.fill(copies)

    def _inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        device = self.ds.device
        inputs: dict[str, Any] = {
            "input_ids": micro_batch.input_ids.to(device, non_blocking=True),
            "labels": micro_batch.labels.to(device, non_blocking=True),
            "document_starts": micro_batch.document_starts,
            "use_cache": False,
            "output_logits": False,
        }
        if micro_batch.token_mask is not None:
            inputs["attention_mask"] = micro_batch.token_mask.to(device, non_blocking=True)
        return inputs

    def _noise(self, micro_batch: MicroBatch, *, index: int) -> NoiseOrigin | None:
        """Return the noise of micro-batch `index`, by the place of its tokens in the stream that all groups read."""
        if not self.model.config.router_jitter_noise:
            return None
        parts_before = index * self.mesh.layout.dp + self.mesh.dp_rank
        return NoiseOrigin(self._seed, self.tokens_read + parts_before * micro_batch.input_ids.numel())

    @scope("router_bias")
    @torch.no_grad()
    def _move_router_biases(self, choices_LE: Tensor) -> None:
        """Experts chosen less than the mean of their layer become more attractive by a fixed step (2408.15664, §3).

        choices_LE [L_moe, E] float64 are this group's; those of the whole global batch decide. The host reads nothing.
        """
        rate = self.model.config.balance_bias_update_rate
        routers = [module for module in self.model.modules() if isinstance(module, GatherMoeRouter)]
        if not rate or not routers:
            return
        dist.all_reduce(choices_LE, group=self.mesh.dp_group)
        lacking_LE = choices_LE.sum(-1, keepdim=True) - choices_LE * choices_LE.shape[-1]
        for router, lacking_E in zip(routers, lacking_LE, strict=True):
            bias_E = router.e_score_correction_bias
            assert bias_E is not None
            bias_E += rate * lacking_E.sign().to(bias_E.dtype)

    @scope("norm")
    def _plain_gradient_norm(self) -> float:
        """The global norm where DeepSpeed keeps none (stage 0 in float32); 0.0 elsewhere, where it is not needed."""
        if self.zero_stage > 0 or hasattr(self.ds.optimizer, "_global_grad_norm"):
            return 0.0
        square = torch.zeros((), dtype=torch.float64, device=self.ds.device)
        for parameter in self.model.parameters():
            counted = getattr(parameter, "tensor_model_parallel", False) or self.mesh.group_rank == 0
            if counted and parameter.grad is not None:
                square += parameter.grad.double().square().sum()
        dist.all_reduce(square, group=self.mesh.tp_group)
        return math.sqrt(square.item())


def join_communication() -> None:
    """Let DeepSpeed use the process group that is already there.

    On CPU without its shared-memory all-reduce: it would be compiled for half a minute, needs a compiler, leaves
    buffers behind, and serves inference only.
    """
    if dist.get_backend() in ("gloo", "fake"):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def _check_plain(model: GatherMoeForCausalLM) -> None:
    table = shard_table(model.config, model.mesh)
    foreign = [name for name in stored_tensors(model) if not table.covers(name)]
    if foreign:
        raise ValueError(
            f"{len(foreign)} tensors are none of the model's own, among them {foreign[:3]}, so how ranks share them is "
            "not known; train adapters with transformers' Trainer, from a checkpoint's hf/ folder"
        )


def _check_ownership(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    orphans = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned]
    if orphans:
        raise ValueError(
            f"{len(orphans)} trainable parameters are in no group of the optimizer and would never change, among them "
            f"{orphans[:3]}; build the optimizer from the parameters of the model that is trained"
        )
