"""Attention of models with latents (`models.latent`), over the packed latents themselves.

A few query tokens are *absorbed*: the latents, with the rotated keys beside them, are keys of one head, and
the latents alone its values, for which every query head is one row. On the CPU one kernel then decodes and
multiplies (`kernels.ops.attend_latents`); on GPUs, and where that kernel lacks something, torch multiplies
tiles that kernels decode. Of many query tokens that would be more work than making keys and values of a tile
and attending to those, so then tiles are *expanded*, one at a time; either way nothing is ever held of all
tokens but their codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..kernels import loader
from ..kernels.cuda_inputs import on_device
from ..kernels.ops import attend_latents as attend_decoded_latents
from ..kernels.selection import UNREADABLE, native_is_unavailable, why_no_kernels
from ..layers.expanded import Expansion
from ..layers.view import StreamView
from ..models.latent import LatentProjection
from ..quantizers.half_range import kept_finite
from .bias import LogitBias, logit_bias, row_bias, sinks_for_kernels
from .cuda import can_attend_tiles_on_device
from .decoded import DecodedView
from .description import describe, first_sinks
from .limits import KERNEL_DTYPES
from .passes import in_passes
from .reference import AttentionOptions, TokenView, attend
from .tiles import attend_tiles, can_attend_tiles

__all__ = ["LatentKeys", "attend_latents", "latent_keys"]

_BIASED_QUERIES = 8
"""Query tokens up to which each may have a bias of its own: of more, it would take more memory than codes."""
_COSTS = {
    ("avx512", True): 1 / 3,
    ("avx512", False): 0.45,
    ("avx2", True): 1.9,
    ("avx2", False): 0.8,
    ("torch", True): 2.5,
    ("torch", False): 1.0,
}
"""What a product of absorbed queries costs on a CPU, by what multiplies and whether queries are bf16; 1 is
what one of torch in their dtype does."""
_COPIED = "kv_b_proj is quantized, so a dense copy of it is kept"
_TORCH_MULTIPLIES = "latents are decoded by the kernels, a tile at a time, and multiplied by torch"


@dataclass(eq=False, slots=True)
class LatentKeys(StreamView):
    """Latents with the rotated keys beside them, as the keys of one head; remembers the last run it read.

    Args:
        parts (`tuple[TokenView, TokenView]`): Both, as they are read.
        last (`dict`): The last run.
    """

    parts: tuple[TokenView, TokenView] = field(kw_only=True)
    last: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def boundaries(self) -> tuple[int, ...]:
        return tuple(sorted({*self.parts[0].boundaries, *self.parts[1].boundaries}))

    def read(self, start: int, stop: int) -> Tensor:
        if (start, stop) not in self.last:
            self.last.clear()
            states = [part.read(start, stop) for part in self.parts]
            wider = torch.promote_types(states[0].dtype, states[1].dtype)
            self.last[start, stop] = torch.cat([part.to(wider) for part in states], dim=-1)
        return self.last[start, stop]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.read(0, self.length).to(dtype)


@dataclass(frozen=True)
class _MadeOfLatents:
    """What is read of the same slots as the latents."""

    tokens: LatentKeys

    @property
    def length(self) -> int:
        return self.tokens.length

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.tokens.boundaries


@dataclass(frozen=True)
class _LatentValues(_MadeOfLatents):
    """The latents of the run that was read as keys last."""

    rank: int

    def read(self, start: int, stop: int) -> Tensor:
        return self.tokens.read(start, stop)[..., : self.rank]


@dataclass(frozen=True)
class _ExpandedSide(_MadeOfLatents):
    """Keys or values of all heads, made of a run of latents when it is read; both share the last run."""

    projection: LatentProjection
    is_key: bool
    head_dim: int
    last: dict[tuple[int, int], tuple[Tensor, Tensor]]

    @property
    def heads(self) -> int:
        return self.projection.heads

    def read(self, start: int, stop: int) -> Tensor:
        return self.read_as(start, stop, self.projection.weight.dtype)

    def read_as(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if (start, stop) not in self.last:
            self.last.clear()
            made_of = self.projection.weight.dtype
            latents, rotated = (_read_as(part, start, stop, made_of) for part in self.tokens.parts)
            self.last[start, stop] = self.projection.expand(latents, rotated)
        return self.last[start, stop][0 if self.is_key else 1].to(dtype)


def _read_as(part: TokenView, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    if isinstance(part, DecodedView) and dtype in KERNEL_DTYPES:
        return part.read_as(start, stop, dtype)
    return kept_finite(part.read(start, stop), dtype).to(dtype)


def latent_keys(expansion: Expansion, parts: tuple[TokenView, TokenView] | None = None) -> LatentKeys:
    """The keys that absorbed queries meet, read through `parts` where given, else decoded by torch."""
    tokens = expansion.latents.tokens
    parts = parts or (tokens, expansion.rotated.tokens)
    return LatentKeys(tokens.stream, tokens.packed_length, tokens.segments, parts=parts)


def attend_latents(query: Tensor, expansion: Expansion, options: AttentionOptions) -> Tensor:
    """Attend from `query` over the latents of a layer, which notes what served.

    Args:
        query (`torch.Tensor` of shape `(B, H, q, Dn + Dr)`): The newest tokens'.
        expansion (`Expansion`): What keys and values would be made of.
        options (`AttentionOptions`): Scaling, masks and biases.

    Returns:
        `torch.Tensor` of shape `(B, H, q, Dv)`: in the dtype of `query`.

    Raises:
        KernelUnavailableError: If the layer was configured with `kernel="native"` and no kernel decodes it.
    """
    projection, layer = expansion.projection, expansion.latents.layer
    options = replace(options, scaling=options.scale_for(query.shape[3]))
    tokens = latent_keys(expansion, _served_parts(query, expansion))
    added = None
    multiplier = _multiplier(query, tokens, options)
    if multiplier != "torch" and _absorbing_is_cheaper(query, projection, multiplier):
        added = _bias_of_rows(query, tokens, options)
    if added is not None:
        output = _attend_in_passes(query, tokens, projection, options, added)
        layer.kernel_reason = None
    elif _absorbing_is_cheaper(query, projection, "torch"):
        output = _attend_absorbed(query, tokens, projection, options)
    else:
        output = _attend_expanded(query, tokens, projection, options)
    if projection.copied_bytes and _COPIED not in str(layer.kernel_reason):
        copied = f"{_COPIED}, {projection.copied_bytes:,} bytes"
        layer.kernel_reason = copied if layer.kernel_reason is None else f"{layer.kernel_reason}; {copied}"
    if layer.observes_queries:
        layer.attended(_absorbed(query, projection), tokens, options)
    return output


def _attend_absorbed(
    query: Tensor, tokens: LatentKeys, projection: LatentProjection, options: AttentionOptions
) -> Tensor:
    rows = _absorbed(query, projection)
    outputs = attend(rows, tokens, _LatentValues(tokens, projection.weight.shape[2]), options)
    return projection.lift(outputs).to(query.dtype)


def _multiplier(query: Tensor, tokens: LatentKeys, options: AttentionOptions) -> str:
    """Instruction set of the kernel that decodes and multiplies; `"torch"` if it does not serve.

    Without vectors of eight numbers it would lose to torch's products.
    """
    is_decoded = all(isinstance(part, DecodedView) for part in tokens.parts)
    if (
        not is_decoded
        or not query.is_cpu
        or query.dtype not in KERNEL_DTYPES
        or options.alibi_slopes is not None
    ):
        return "torch"
    instructions = loader.instruction_set()
    return instructions if (instructions, True) in _COSTS else "torch"


def _bias_of_rows(query: Tensor, tokens: LatentKeys, options: AttentionOptions) -> LogitBias | None:
    """What the kernel adds to the logits; `None` if that would be too large."""
    bias_of = row_bias if query.shape[2] > _BIASED_QUERIES else logit_bias
    return bias_of(options, query.shape[2], tokens.length)


def _attend_in_passes(
    query: Tensor,
    tokens: LatentKeys,
    projection: LatentProjection,
    options: AttentionOptions,
    added: LogitBias,
) -> Tensor:
    """Attend by the kernel, `PASS_QUERIES` query tokens at a time, each over what it may see."""
    latents, rotated = tokens.parts
    assert isinstance(latents, DecodedView) and isinstance(rotated, DecodedView)
    assert options.scaling is not None
    scaling, query_length = options.scaling, query.shape[2]

    def attend_pass(start: int, stop: int) -> Tensor:
        hidden = query_length - stop if added.is_causal else 0
        sums = attend_decoded_latents(
            _absorbed(query[:, :, start:stop], projection),
            latents.tokens.stream.records.data,
            latents.side.without_newest(hidden),
            rotated.side.without_newest(hidden),
            scaling=scaling,
            is_bfloat16=query.dtype == torch.bfloat16,
            sink_start=latents.sink_start,
            bias=None if added.bias is None else added.bias[:, :, :, : tokens.length - hidden],
            is_causal=added.is_causal,
            window=added.window,
            softcap=options.softcap or 0.0,
            sink_logits=sinks_for_kernels(options.sink_logits, query.device, slice(start, stop)),
        )
        return projection.lift(sums).to(query.dtype)

    return in_passes(attend_pass, query_length)


def _attend_expanded(
    query: Tensor, tokens: LatentKeys, projection: LatentProjection, options: AttentionOptions
) -> Tensor:
    last: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    keys = _ExpandedSide(tokens, projection, True, query.shape[3], last)
    values = _ExpandedSide(tokens, projection, False, projection.value_dim, last)
    if query.is_cpu:
        serves = query.dtype in KERNEL_DTYPES and can_attend_tiles(options, tokens.length, query.shape[2])
    else:
        serves = can_attend_tiles_on_device(query, projection.value_dim, tokens.length, options)
    return (attend_tiles if serves else attend)(query, keys, values, options)


def _absorbed(query: Tensor, projection: LatentProjection) -> Tensor:
    """Queries as rows over latents and rotated keys, `(B, H, q, R + Dr)`, in fp32 or fp64."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    first, rotated = query.to(compute).split(
        (projection.key_dim, query.shape[3] - projection.key_dim), dim=-1
    )
    return torch.cat((projection.absorb(first).to(compute), rotated), dim=-1)


def _absorbing_is_cheaper(query: Tensor, projection: LatentProjection, multiplier: str) -> bool:
    """By the products a head makes of one cached token, those of absorbed queries weighted by `_COSTS`.

    Of 16 heads of DeepSeek-V2-Lite over 4096 tokens, `q` queries take so many milliseconds (one thread of a
    Zen 5 core):

        bf16: 0.5 q by AVX-512, 1.4 q by AVX2, 1.8 q by torch; expanded 62 + 0.6 q
        fp32: 0.8 q by AVX-512, 1.4 q by AVX2, 1.8 q by torch; expanded 195 + 0.65 q

    In bf16 AVX-512 wins whatever `q` is, AVX2 up to 75, torch up to 50; in fp32 many hundreds, 260, and 170.
    In fp16 tiles take three times as long to expand, and all else is as in fp32. Where torch has AMX for
    bf16, which these kernels have not, they count as torch.
    """
    query_length, key_dim = query.shape[2:]
    rank = projection.weight.shape[2]
    rotated = key_dim - projection.key_dim
    is_bfloat16 = query.dtype == torch.bfloat16
    if is_bfloat16 and query.is_cpu and torch.cpu._is_amx_tile_supported():
        multiplier = "torch"
    cost = _COSTS[multiplier, is_bfloat16] if query.is_cpu else 1.0
    absorbed = query_length * (2 * rank + rotated)
    made = rank * (projection.key_dim + projection.value_dim)
    return cost * absorbed <= made + query_length * (key_dim + projection.value_dim)


def _served_parts(query: Tensor, expansion: Expansion) -> tuple[TokenView, TokenView] | None:
    """Both streams as kernels decode them, if any do; the layer notes it."""
    layer = expansion.latents.layer
    if expansion.latents.tokens.packed_length == expansion.rotated.tokens.packed_length == 0:
        return None  # there is nothing to decode
    parts = _decoded_parts(query, expansion)
    if not isinstance(parts, str):
        layer.kernel, layer.kernel_reason = query.device.type, _TORCH_MULTIPLIES
        return parts
    if layer.config.kernel == "native":
        raise native_is_unavailable(f"layer {layer.layer_idx}", parts)
    layer.kernel, layer.kernel_reason = "torch", parts
    return None


def _decoded_parts(query: Tensor, expansion: Expansion) -> tuple[DecodedView, DecodedView] | str:
    """Both streams as the kernels decode them; the reason if none does."""
    tokens = expansion.latents.tokens, expansion.rotated.tokens
    device = tokens[0].segments[-1].device
    if expansion.latents.layer.config.kernel == "torch":
        return "kernel='torch' was given"
    if device != query.device or device.type not in ("cpu", "cuda"):
        return f"there is no native kernel for {query.dtype} queries on {query.device} and keys on {device}"
    sides = [describe(view) for view in tokens]
    if sides[0] is None or sides[1] is None:
        return UNREADABLE
    if (reason := why_no_kernels(device)) is not None:
        return reason
    sink_start = first_sinks(tokens[0], sides[0], sides[1])
    first, second = (
        side if device.type == "cpu" else on_device(side, device) for side in (sides[0], sides[1])
    )
    return DecodedView(tokens[0], first, sink_start), DecodedView(tokens[1], second, sink_start)
