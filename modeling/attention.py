"""Grouped-query attention over this rank's heads, with rotary positions and packed documents kept apart."""

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .comm import cut_in_chunks, sum_gradients
from .config import GatherMoeConfig
from .execution import BY_MASK, PER_DOCUMENT, VARLEN, Execution
from .layers import Linear, RmsNorm, SplitNorm, gather_linear, linear_scatter, plain_weight, split_rms_norms
from .mesh import ParallelMesh
from .operators import turn

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
# Types of rotary embeddings whose frequencies depend on the furthest position, which the host reads.
BY_REACH = ("dynamic", "longrope")


class RotaryTables(NamedTuple):
    """cos and sin, each [B or 1, S, K], in the type they are applied in."""

    cos: Tensor
    sin: Tensor


class Documents(NamedTuple):
    """Where the documents of packed sequences begin.

    starts        per sequence, host integers, the first of each 0
    cu_seqlens    int32, boundaries in the flattened batch, padded with B*S to a power of two and one, so that few
                  lengths occur; only for implementations that read it
    max_length    no document is longer: S, or S/4 where that is enough, so that few values occur
    block_size    S
    """

    starts: tuple[tuple[int, ...], ...]
    cu_seqlens: Tensor | None
    max_length: int
    block_size: int


class AttentionInputs(NamedTuple):
    """What every layer's attention needs beside the hidden states; built once per forward."""

    rotary: RotaryTables
    mask: Any  # None where causality alone decides; else what the attention function takes
    documents: Documents | None
    function: AttentionFunction
    implementation: str
    cache: Any
    options: dict[str, Any]  # passed on to the attention function


def find_documents(
    starts: tuple[tuple[int, ...], ...], *, block_size: int, implementation: str, device: torch.device
) -> Documents | None:
    """Describe packed sequences for attention; None where every sequence is a document, but for torch's "varlen"."""
    if all(len(row) == 1 for row in starts) and implementation != "varlen":
        return None
    if implementation not in VARLEN:
        return Documents(starts, None, block_size, block_size)
    flat = [b * block_size + start for b, row in enumerate(starts) for start in row]
    # Documents of length 0 at the end; a kernel works through every one, so not as many as there are tokens.
    num_documents = 1 << (len(flat) - 1).bit_length()
    padded = flat + [len(starts) * block_size] * (num_documents + 1 - len(flat))
    longest = max(end - start for row in starts for start, end in itertools.pairwise((*row, block_size)))
    # A kernel starts blocks for every document as if it were the longest, and most would find nothing to do.
    quarter = -(-block_size // 4)
    bound = quarter if longest <= quarter else block_size
    return Documents(starts, send_to(device, torch.tensor(padded, dtype=torch.int32)), bound, block_size)


def document_positions(starts: tuple[tuple[int, ...], ...], *, block_size: int, device: torch.device) -> Tensor:
    """Positions [B, S] that begin at 0 in every document."""
    rows = []
    for row in starts:
        ends = (*row[1:], block_size)
        rows.append(torch.cat([torch.arange(end - start) for start, end in zip(row, ends, strict=True)]))
    return send_to(device, torch.stack(rows))


def send_to(device: torch.device, x: Tensor) -> Tensor:
    """Copy what the host has made, without the host's waiting for a GPU: only pinned memory is copied so."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def check_isolation(implementation: str) -> None:
    """Refuse an attention implementation that would let packed documents see each other."""
    known = (*VARLEN, *PER_DOCUMENT, *BY_MASK)
    if implementation not in known:
        raise ValueError(
            f"attn_implementation={implementation!r} is not known to keep packed documents apart; "
            f"choose one of {sorted(known)}"
        )


def check_documents(starts: tuple[tuple[int, ...], ...], *, num_sequences: int, block_size: int) -> None:
    """Refuse document starts that do not describe a batch of this shape."""
    rising = (all(a < b for a, b in itertools.pairwise((-1, *row, block_size))) for row in starts)
    if len(starts) != num_sequences or not all(rising) or any(row[:1] != (0,) for row in starts):
        raise ValueError(
            f"document_starts={starts} must hold, for each of {num_sequences} sequences, positions that rise from 0 "
            f"and stay below {block_size}"
        )


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention that also returns its weights: q [B,h,S,K], k and v [B,g,Z,K] -> [B,S,h,K], [B,h,S,Z]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is None:
        num_queries, num_keys = scores.shape[-2:]
        future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(future.triu(num_keys - num_queries + 1), torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=exact).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@cache
def register_varlen() -> None:
    """Make "varlen" known to transformers, which refuses names that it does not know."""
    AttentionInterface.register("varlen", varlen_attention)
    AttentionMaskInterface.register("varlen", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    """torch's attention over documents of any length in one call: q [1, h, T, K], k and v [1, g, T, K] -> [1, T, h, K].

    Its kernels run on a GPU, in bfloat16 or float16. Without boundaries (evaluating with a mask, generating with a
    cache) it is transformers' "sdpa". ValueError for dropout, which these kernels do not know.
    """
    if cu_seq_lens_q is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)  # type: ignore[no-any-return]
    if dropout:
        raise ValueError(f"attn_implementation='varlen' knows no dropout, and attention_dropout={dropout}; use 'sdpa'")
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    ends, most = cu_seq_lens_q, max_length_q
    # torch 2.11 shares key-value heads without being asked to.
    shares: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(q, k, v, ends, ends, most, most, scale=scaling, window_size=(-1, 0), **shares)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


class GatherMoeAttention(nn.Module):
    """Attention of the heads that this rank holds: tokens are gathered before, sums over the heads scattered after."""

    is_causal = True
    sliding_window = None

    def __init__(self, config: GatherMoeConfig, *, layer_idx: int, mesh: ParallelMesh, execution: Execution) -> None:
        super().__init__()
        sizes, tp = config.sizes, mesh.layout.tp
        self.config, self.layer_idx, self.mesh, self.execution = config, layer_idx, mesh, execution
        self.head_dim = sizes.head_dim
        self.num_heads = sizes.num_attention_heads // tp
        self.num_key_value_heads = max(sizes.num_key_value_heads // tp, 1)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = Linear(config.hidden_size, self.num_heads * self.head_dim)
        self.k_proj = Linear(config.hidden_size, self.num_key_value_heads * self.head_dim)
        self.v_proj = Linear(config.hidden_size, self.num_key_value_heads * self.head_dim)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size)
        if config.qk_norm == "head":
            self.q_norm: RmsNorm | SplitNorm = RmsNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm: RmsNorm | SplitNorm = RmsNorm(self.head_dim, eps=config.rms_norm_eps)
        elif config.qk_norm == "full":
            self.q_norm = SplitNorm(self.num_heads * self.head_dim)
            self.k_norm = SplitNorm(self.num_key_value_heads * self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        inputs: AttentionInputs,
        summed_weights: Mapping[nn.Module, Tensor],
        *,
        num_sequences: int,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, S, D] on one process, this rank's tokens [t, D] of B sequences under a mesh -> the same.

        Also the attention weights where the attention function returns them. `summed_weights` has, under a mesh, what
        replaces the per-head norms' own weights: the block sums their gradients.
        """
        group = self.mesh.group
        if group is None:
            parts = [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]
            out, weights = self._attend_to(parts, inputs, summed_weights)
            return self.o_proj(out.flatten(2)), weights
        chunks = cut_in_chunks(hidden_states, group, self.execution)
        shared = sum_gradients([plain_weight(self.k_proj), plain_weight(self.v_proj)], self.mesh.kv_group, upcast=False)
        parts = gather_linear(hidden_states, [plain_weight(self.q_proj), *shared], chunks=chunks)
        # Each its own memory: attention keeps v, which must not keep what q and k were before they were turned.
        parts = [part.contiguous().unflatten(0, (num_sequences, -1)) for part in parts]
        out, weights = self._attend_to(parts, inputs, summed_weights)
        return linear_scatter(out.flatten(2).flatten(0, 1), plain_weight(self.o_proj), chunks=chunks), weights

    def _attend_to(
        self, parts: list[Tensor], inputs: AttentionInputs, summed_weights: Mapping[nn.Module, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Projections q [B, S, hK], k and v [B, S, gK] -> [B, S, h, K], and the weights where there are any."""
        q, k, v = parts
        if self.config.qk_norm == "full":
            q, k = self._normalise_full_width(q, k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.config.qk_norm == "head":
            q = self.q_norm(q, weight=summed_weights.get(self.q_norm))
            k = self.k_norm(k, weight=summed_weights.get(self.k_norm))
        if self.config.clip_qkv is not None:
            q, k, v = (part.clamp(-self.config.clip_qkv, self.config.clip_qkv) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, h, S, K] and [B, g, S, K]
        q, k = rotate(q, inputs.rotary), rotate(k, inputs.rotary)
        if inputs.cache is not None:
            k, v = inputs.cache.update(k, v, self.layer_idx)
        return self._attend(q, k, v, inputs)

    def _normalise_full_width(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        sizes, tp = self.config.sizes, self.mesh.layout.tp
        [k_weight] = sum_gradients([self.k_norm.weight], self.mesh.kv_group)
        return split_rms_norms(
            (q, k),
            (self.q_norm.weight, k_weight),
            full_widths=(sizes.num_attention_heads * self.head_dim, sizes.num_key_value_heads * self.head_dim),
            # Where ranks share a key-value head, each one's copy counts for its part only.
            shares=(1.0, min(sizes.num_key_value_heads / tp, 1.0)),
            eps=self.config.rms_norm_eps,
            group=self.mesh.group,
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        dropout = self.config.attention_dropout if self.training else 0.0
        options = {"scaling": self.scaling, "dropout": dropout, **inputs.options}
        documents = inputs.documents
        if documents is None:
            return inputs.function(self, q, k, v, inputs.mask, **options)
        if inputs.implementation in VARLEN:
            # All documents of the batch in one call: static shapes, lengths on the device.
            flat = [part.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for part in (q, k, v)]
            options |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), documents.cu_seqlens)
            options |= dict.fromkeys(("max_length_q", "max_length_k"), documents.max_length)
            out, _ = inputs.function(self, *flat, None, **options)
            return out.squeeze(0).unflatten(0, (q.shape[0], -1)), None
        parts = []
        for b, starts in enumerate(documents.starts):
            for start, end in zip(starts, (*starts[1:], documents.block_size), strict=True):
                here = (slice(b, b + 1), slice(None), slice(start, end))
                parts.append(inputs.function(self, q[here], k[here], v[here], None, **options)[0])
        out = torch.cat([part.squeeze(0) for part in parts])
        return out.unflatten(0, (q.shape[0], documents.block_size)), None


def rotary_tables(config: Any, position_ids: Tensor, *, dtype: torch.dtype) -> RotaryTables:
    """Tables for position_ids [B or 1, S]; angles in float32 (float64 when dtype is), cast to `dtype` at the end.

    The frequencies (Su et al., 2104.09864) are derived from the configuration in every forward and are no buffer of the
    model, so nothing that casts a model can round them: in bfloat16 positions 256 and 257 would already be the same.
    """
    exact = torch.promote_types(dtype, torch.float32)
    device = position_ids.device
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=exact, device=device) / config.head_dim
        frequencies, scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
    else:
        # A token decoded with a cache stands far along although the call is one token long.
        reach = int(position_ids.max()) + 1 if rope["rope_type"] in BY_REACH else None
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=device, seq_len=reach)
    angles = position_ids[..., None].to(exact) * frequencies.to(exact)
    angles = torch.cat((angles, angles), dim=-1)
    return RotaryTables((angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype))


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """x [B, heads, S, K] turned by its positions; channel i pairs with channel i + K/2, as in transformers."""
    return _Rotate.apply(x, tables.cos, tables.sin)


class _Rotate(torch.autograd.Function):
    """Its backward turns the gradient the other way; nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, sign=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return turn(grad, *ctx.saved_tensors, sign=-1), None, None
