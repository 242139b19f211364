"""GatherMoe as a transformers model: an ordinary one on a single process, a shared one when it is given a mesh.

Importing this file registers the classes with transformers' Auto classes and the layout of expert weights on disk
with its loader, so that code which travels with a checkpoint needs nothing else.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import initialization as hf_init
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import (
    AttentionInputs,
    GatherMoeAttention,
    check_documents,
    check_isolation,
    document_positions,
    eager_attention,
    find_documents,
    register_varlen,
    rotary_tables,
)
from .auxiliary import (
    GatherMoeCausalLMOutput,
    GatherMoeModelOutput,
    LossCounts,
    TokenSums,
    add_auxiliary_losses,
)
from .comm import at_least_one, cut_in_chunks, scatter_tokens
from .config import GatherMoeConfig, expert_weight_conversions
from .copies import ExpertsWithCopies
from .decoder import GatherMoeDecoderLayer, tokens_of_layers, with_noise
from .execution import BY_MASK, Execution
from .experts import GatherMoeExperts
from .layers import RmsNorm, SplitNorm
from .layout import LayoutRequest, check_layout
from .mesh import ParallelMesh, one_rank_mesh
from .noise import NoiseOrigin
from .router import GatherMoeRouter, RouterStatistics
from .vocabulary import IGNORED, VocabularyEmbedding, VocabularyHead, losses_of_logits, shifted

DocumentStarts = tuple[tuple[int, ...], ...]


class GatherMoePreTrainedModel(PreTrainedModel):
    """What transformers has to know of all our classes."""

    config: GatherMoeConfig
    config_class = GatherMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GatherMoeDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GatherMoeRouter, index=0),
        "hidden_states": OutputRecorder(GatherMoeDecoderLayer, index=0),
        "attentions": OutputRecorder(GatherMoeAttention, index=1),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, GatherMoeExperts):
            hf_init.normal_(module.gate_up_proj, mean=0.0, std=std)
            hf_init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, GatherMoeRouter):
            hf_init.normal_(module.weight, mean=0.0, std=std)
            if module.e_score_correction_bias is not None:
                hf_init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, (RmsNorm, SplitNorm)):
            hf_init.ones_(module.weight)

    mesh: ParallelMesh

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """transformers' check of a name, which "varlen" passes, too."""
        register_varlen()
        name: str = super().get_correct_attn_implementation(requested_attention, is_init_check)
        return name

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute every block in the backward; under a mesh only the non-reentrant way."""
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"] and self.mesh.group is not None:
            raise ValueError(
                "use_reentrant=True is not supported under a mesh: reentrant checkpointing cannot be combined with "
                "collectives in the block; use use_reentrant=False"
            )
        super().gradient_checkpointing_enable(options, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """transformers' resize, for a model that lives on one process."""
        if self.mesh.group is not None:
            raise ValueError(
                f"resize_token_embeddings() serves one process, and this model is shared by tp={self.mesh.layout.tp} "
                "ranks; resize the saved hf/ folder's model and start from that"
            )
        return super().resize_token_embeddings(*args, **kwargs)


class GatherMoeModel(GatherMoePreTrainedModel):
    """The decoder without a head."""

    def __init__(
        self, config: GatherMoeConfig, mesh: ParallelMesh | None = None, execution: Execution | None = None
    ) -> None:
        super().__init__(config)
        self.mesh, self.execution = mesh or one_rank_mesh(), execution or Execution()
        layout = self.mesh.layout
        request = LayoutRequest(
            sizes=config.sizes, layout=layout, world_size=layout.world_size, strategy=self.execution.strategy
        )
        check_layout(request)
        if self.mesh.group is not None and config.attention_dropout > 0:
            raise ValueError(
                f"attention_dropout={config.attention_dropout} is not supported when tp={self.mesh.layout.tp} ranks "
                "share a model; set it to 0"
            )
        if self.mesh.group is None:
            # No padding_idx: masks say what padding is, and a token used for it must be learnt where it is real.
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, mesh=self.mesh)
        self.layers = nn.ModuleList(
            GatherMoeDecoderLayer(config, layer_idx=i, mesh=self.mesh, execution=self.execution)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps, group=self.mesh.group)
        self.gradient_checkpointing = False
        if config.router_bias:
            # DeepSpeed reads this name, too: its ZeRO-3 would make a low-precision tensor of the buffer otherwise.
            self._keep_in_fp32_modules_strict = {"e_score_correction_bias"}
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_starts: DocumentStarts | None = None,
        noise: NoiseOrigin | None = None,
        **kwargs: Any,
    ) -> GatherMoeModelOutput:
        """input_ids [B, S], the whole group's on every rank -> last_hidden_state [B, S, D], or [t, D] under a mesh.

        attention_mask   [B, past + S], 0 for padding, which no token attends to and no expert sees
        document_starts  per sequence, where its packed documents begin (the first at 0). Attention then goes by them
                         alone, without a cache: padding must be a document of its own or the end of one.
        noise            which jitter the routers draw in training, where there is any; on one process drawn if absent
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if self.mesh.group is not None:
            _check_mesh_call(self, input_ids, cache)
        if document_starts is not None and cache is not None:
            raise ValueError("document_starts cannot be combined with a cache: documents are packed for training only")
        if self.mesh.group is not None or document_starts is not None:
            use_cache = False
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        inputs = self._attention_inputs(inputs_embeds, attention_mask, position_ids, cache, document_starts, kwargs)
        layer_tokens = tokens_of_layers(inputs_embeds, attention_mask, config=self.config, mesh=self.mesh)
        if self.training and self.config.router_jitter_noise:
            layer_tokens = with_noise(layer_tokens, inputs_embeds, config=self.config, mesh=self.mesh, origin=noise)
        x = inputs_embeds if self.mesh.group is None else scatter_tokens(inputs_embeds.flatten(0, 1), self.mesh.group)
        if torch.is_grad_enabled() and not x.requires_grad and any(p.requires_grad for p in self.layers.parameters()):
            # Reentrant checkpointing and ZeRO-3 follow a block's backward by its input, frozen embeddings or not.
            x = x.detach().requires_grad_()
        statistics = []
        for layer, tokens in zip(self.layers, layer_tokens, strict=True):
            x, *router_sums = layer(x, inputs=inputs, tokens=tokens)
            if router_sums:
                statistics.append(RouterStatistics(*router_sums))
        return GatherMoeModelOutput(last_hidden_state=self.norm(x), cache=cache, router_statistics=statistics)

    def _attention_inputs(
        self,
        embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        document_starts: DocumentStarts | None,
        options: dict[str, Any],
    ) -> AttentionInputs:
        implementation = self.config._attn_implementation
        block_size, device = embeds.shape[1], embeds.device
        documents = None
        if document_starts is not None:
            check_isolation(implementation)
            check_documents(document_starts, num_sequences=embeds.shape[0], block_size=block_size)
            documents = find_documents(
                document_starts, block_size=block_size, implementation=implementation, device=device
            )
        if documents is not None:
            position_ids = document_positions(documents.starts, block_size=block_size, device=device)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + block_size, device=device).unsqueeze(0)
        by_mask = documents is None or implementation in BY_MASK
        # Packed training needs no mask and must not build one: S x S numbers per layer's call.
        mask = None
        if by_mask and not (document_starts is not None and documents is None and implementation == "sdpa"):
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=embeds,
                # Beside a mask or a cache transformers does not look for documents among the positions.
                attention_mask=attention_mask if documents is None else None,
                cache=cache,
                position_ids=position_ids,
            )
        return AttentionInputs(
            rotary=rotary_tables(self.config, position_ids, dtype=embeds.dtype),
            mask=mask,
            documents=None if by_mask else documents,
            function=ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention),
            implementation=implementation,
            cache=cache,
            # Where document starts say it all, flash attention must not look for documents among positions: it would
            # read them on the host, in every layer.
            options={"position_ids": position_ids, **options} if by_mask and document_starts is None else options,
        )


class GatherMoeForCausalLM(GatherMoePreTrainedModel, GenerationMixin):
    """The decoder with a language-model head and its losses."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(
        self, config: GatherMoeConfig, mesh: ParallelMesh | None = None, execution: Execution | None = None
    ) -> None:
        super().__init__(config)
        self.mesh, self.execution = mesh or one_rank_mesh(), execution or Execution()
        self.model = GatherMoeModel(config, mesh=self.mesh, execution=self.execution)
        # Of every MoE layer, in their order, where there are slots for copies; else none.
        self.experts_with_copies = [m for m in self.model.modules() if isinstance(m, ExpertsWithCopies)]
        self.lm_head = VocabularyHead(config.hidden_size, config.vocab_size, mesh=self.mesh)
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Take over the weight of another head: resizing makes a plain one, which has no losses."""
        self.lm_head.weight, self.lm_head.out_features = new_embeddings.weight, new_embeddings.weight.shape[0]

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        num_tokens_in_batch: Tensor | int | None = None,
        earlier_choices: Tensor | None = None,
        output_logits: bool | None = None,
        **kwargs: Any,
    ) -> GatherMoeCausalLMOutput:
        """Logits and, with labels, the loss.

        labels               [B, S], shifted here, -100 where there is no target
        shift_labels         the same, shifted already; by name only, for Trainer takes every named label for required
        num_items_in_batch   targets the loss is divided by; default: those in this call
        num_tokens_in_batch  valid tokens the auxiliary losses are divided by; default: in proportion to the targets
        earlier_choices      `choices` of the batch's call before this one, for balance_scope="global_batch"
        output_logits        default: on one process yes, under a mesh no. Without them the loss needs no [B, S, V].
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden, group = outputs.last_hidden_state, self.mesh.group
        assert hidden is not None
        with_logits = output_logits if output_logits is not None else group is None
        if with_logits and group is not None:
            raise ValueError(
                "output_logits=True is not supported under a mesh; load the saved hf/ folder on one process"
            )
        logits = None
        if with_logits:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept, :])
        result = GatherMoeCausalLMOutput(
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )
        targets = shift_labels if shift_labels is not None or labels is None else shifted(labels)
        if targets is not None:
            num_targets = (targets != IGNORED).sum()
            num_items = num_targets if num_items_in_batch is None else num_items_in_batch
            counts = LossCounts(num_targets, targets.numel(), num_items, num_tokens_in_batch, earlier_choices)
            self._add_losses(result, hidden, outputs.router_statistics, targets, counts)
        return result

    def _add_losses(
        self,
        result: GatherMoeCausalLMOutput,
        hidden: Tensor,
        router_statistics: list[RouterStatistics],
        targets: Tensor,
        counts: LossCounts,
    ) -> None:
        """Fill in the losses, each a sum over this group's tokens divided by a count over the whole batch."""
        config, num_items = self.config, at_least_one(counts.batch_targets)
        if result.logits is not None and result.logits.shape[:2] == targets.shape:
            total, nll = losses_of_logits(result.logits, targets, z_coef=config.logits_z_loss_coef)
        else:
            chunks = cut_in_chunks(hidden.flatten(0, -2), self.mesh.group, self.execution)
            total, nll, _ = self.lm_head(hidden, targets=targets, z_coef=config.logits_z_loss_coef, chunks=chunks)
        result.loss, result.lm_loss = total / num_items, nll.detach() / num_items
        result.sums = TokenSums(nll.detach(), *[nll.new_zeros(0)] * 7)
        if router_statistics and self.training:
            add_auxiliary_losses(
                result,
                statistics=router_statistics,
                counts=counts,
                copies=self.experts_with_copies,
                config=config,
                mesh=self.mesh,
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' generate, for a model that lives on one process."""
        if self.mesh.group is not None:
            raise ValueError(
                f"generate() serves one process, and this model is shared by tp={self.mesh.layout.tp} ranks; "
                "load a checkpoint's hf/ folder with AutoModelForCausalLM.from_pretrained instead"
            )
        return super().generate(*args, **kwargs)


def _check_mesh_call(model: GatherMoeModel, input_ids: Tensor | None, cache: Cache | None) -> None:
    tp = model.mesh.layout.tp
    if input_ids is None or cache is not None:
        raise ValueError("under a mesh a model takes input_ids only, without inputs_embeds and without a cache")
    if input_ids.numel() % tp:
        raise ValueError(
            f"{input_ids.shape[0]} sequences of {input_ids.shape[1]} tokens cannot be shared by tp={tp} ranks; "
            f"their product must be a multiple of {tp}"
        )


AutoConfig.register("gather_moe", GatherMoeConfig, exist_ok=True)
AutoModel.register(GatherMoeConfig, GatherMoeModel, exist_ok=True)
AutoModelForCausalLM.register(GatherMoeConfig, GatherMoeForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping("gather_moe", expert_weight_conversions(), overwrite=True)
