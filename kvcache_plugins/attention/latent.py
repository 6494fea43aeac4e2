"""Attention of models with latents (`models.latent`), over the packed latents themselves.

A few query tokens are *absorbed*: the latents, with the rotated keys beside them, are keys of one head, and
the latents alone its values, for which every query head is one row. Of many query tokens that would be more
products than making keys and values of a tile and attending to those, so then tiles are *expanded*, one at a
time; either way nothing is ever held of all tokens but their codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..kernels import cuda_loader, loader
from ..kernels.cuda_inputs import on_device
from ..kernels.selection import native_is_unavailable
from ..layers.expanded import Expansion
from ..layers.view import StreamView
from ..models.latent import LatentProjection
from .cuda import can_attend_tiles_on_device
from .decoded import DecodedView
from .description import describe
from .reference import AttentionOptions, TokenView, attend
from .tiles import attend_tiles, can_attend_tiles

__all__ = ["LatentKeys", "attend_latents", "latent_keys"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TORCH_MULTIPLIES = "latents are decoded by the kernels, a tile at a time, and multiplied by torch"


@dataclass(frozen=True)
class LatentKeys(StreamView):
    """Latents with the rotated keys beside them, as the keys of one head; remembers the last run it read.

    Args:
        parts (`tuple[TokenView, TokenView]`): Both, as they are read.
        last (`dict`): The last run.
    """

    parts: tuple[TokenView, TokenView]
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
class _LatentValues:
    """The latents of the run that was read as keys last."""

    keys: LatentKeys
    rank: int

    @property
    def length(self) -> int:
        return self.keys.length

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.keys.boundaries

    def read(self, start: int, stop: int) -> Tensor:
        return self.keys.read(start, stop)[..., : self.rank]


@dataclass(frozen=True)
class _ExpandedSide:
    """Keys or values of all heads, made of a run of latents when it is read; both share the last run."""

    tokens: LatentKeys
    projection: LatentProjection
    is_key: bool
    head_dim: int
    last: dict[tuple[int, int], tuple[Tensor, Tensor]]

    @property
    def length(self) -> int:
        return self.tokens.length

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.tokens.boundaries

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
    if isinstance(part, DecodedView) and dtype in _DTYPES:
        return part.read_as(start, stop, dtype)
    return part.read(start, stop).to(dtype)


def latent_keys(expansion: Expansion, parts: tuple[TokenView, TokenView] | None = None) -> LatentKeys:
    """The keys that absorbed queries meet, read through `parts` where given, else decoded by torch."""
    tokens = expansion.latents.tokens
    return LatentKeys(
        tokens.stream, tokens.packed_length, tokens.segments, parts or (tokens, expansion.rotated.tokens)
    )


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
    if options.scaling is None:
        options = replace(options, scaling=query.shape[3] ** -0.5)
    tokens = latent_keys(expansion, _served_parts(query, expansion))
    if _absorbing_is_cheaper(query, projection):
        output = _attend_absorbed(query, tokens, projection, options)
    else:
        output = _attend_expanded(query, tokens, projection, options)
    if layer.observes_queries:
        layer.attended(_absorbed(query, projection), tokens, options)
    return output


def _attend_absorbed(
    query: Tensor, tokens: LatentKeys, projection: LatentProjection, options: AttentionOptions
) -> Tensor:
    rows = _absorbed(query, projection)
    outputs = attend(rows, tokens, _LatentValues(tokens, projection.weight.shape[2]), options)
    return projection.lift(outputs).to(query.dtype)


def _attend_expanded(
    query: Tensor, tokens: LatentKeys, projection: LatentProjection, options: AttentionOptions
) -> Tensor:
    last: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    keys = _ExpandedSide(tokens, projection, True, query.shape[3], last)
    values = _ExpandedSide(tokens, projection, False, projection.value_dim, last)
    if query.is_cpu:
        serves = query.dtype in _DTYPES and can_attend_tiles(options, tokens.length, query.shape[2])
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


def _absorbing_is_cheaper(query: Tensor, projection: LatentProjection) -> bool:
    """By the products a head makes of one cached token."""
    query_length, key_dim = query.shape[2:]
    rank = projection.weight.shape[2]
    rotated = key_dim - projection.key_dim
    absorbed = query_length * (2 * rank + rotated)
    made = rank * (projection.key_dim + projection.value_dim)
    return absorbed <= made + query_length * (key_dim + projection.value_dim)


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
        return "no native kernel reads these codecs or head sizes"
    if device.type == "cpu":
        if not loader.try_load():
            return f"there are no CPU kernels: {loader.status().reason}"
    elif not cuda_loader.try_load(device):
        return f"there are no CUDA kernels: {cuda_loader.why_not(device)}"
    starts = tokens[0].stream.padding.lengths
    has_sinks = starts is not None and (sides[0].sinks is not None or sides[1].sinks is not None)
    sink_start = starts.to(device, torch.int64) if starts is not None and has_sinks else None
    first, second = (
        side if device.type == "cpu" else on_device(side, device) for side in (sides[0], sides[1])
    )
    return DecodedView(tokens[0], first, sink_start), DecodedView(tokens[1], second, sink_start)
