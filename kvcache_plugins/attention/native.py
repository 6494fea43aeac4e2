"""Attention over packed data by native kernels, where they fit; else by the torch reference.

A few query tokens are a pass over the codes (`kernels.ops.decode_attention`). Many are several passes where
the processor's vectors make those faster than torch's products, else dense attention over tiles that are
decoded natively (`tiles`). Here a layer's streams are described to the kernels in their own terms
(`kernels.layout`), and whatever may hide a slot becomes a window, a causal flag, or an additive bias.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import KernelUnavailableError
from ..kernels import cuda_loader, loader
from ..kernels.layout import FORMATS, MAX_HEAD_DIM, MAX_METADATA, Side
from ..kernels.ops import decode_attention
from ..layers.codec import RotatedCodec, ScaledCodec, code_format_of
from ..layers.field_layout import side_layout
from ..layers.handle import KVHandle
from ..layers.nonuniform import ChannelNonUniformCodec, NonUniformCodec, UnrotatedCodec
from ..layers.view import StreamView
from ..models.rotary import Rotary
from .cuda import attend_on_device
from .reference import AttentionOptions, attend
from .tiles import attend_tiles, can_attend_tiles

__all__ = ["attend_handles", "describe"]

_MOST_QUERIES = 8
"""Query tokens up to which one pass over the codes is bound by reading them, on any processor."""
_MOST_PACKED_QUERIES = 16
"""The same where the heads of a group come as query tokens of one head."""
_PASS_QUERIES = 64
"""Query tokens of one of several passes: as many rows as the kernels take at once."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend_handles(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor:
    """Attend from `query` over what two handles stand for; their layer notes which kernel served.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest tokens.
        key (`KVHandle`): What the keys are.
        value (`KVHandle`): What the values are, of the same layer and call.
        options (`AttentionOptions`): Scaling, masks and biases.

    Raises:
        KernelUnavailableError: If the layer was configured with `kernel="native"`, its device has native
            kernels, and none of them reads its codecs.
    """
    layer = key.layer
    kind = query.device.type
    if layer.config.kernel != "torch" and value.layer is layer and _is_served(query, key):
        output = (_attend_on_cpu if kind == "cpu" else _attend_on_cuda)(query, key, value, options)
        if output is not None:
            layer.kernel = kind
            return output
    layer.kernel = "torch"
    return attend(query, key.tokens, value.tokens, options)


def _attend_on_cpu(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor | None:
    """Attend by a native kernel; `None` if none serves this."""
    query_length, length = query.shape[2], key.tokens.length
    sides = _sides(key, value)
    if sides is None or not loader.try_load():
        return None
    keys, values = sides
    if _is_decode(query, key, options) or _has_fast_passes(query.dtype):
        bias, is_causal = _bias(options, query_length, length)
        # of many queries, rows of a bias each would take more memory than the codes do
        if _is_decode(query, key, options) or bias is None or bias.shape[2] == 1:
            return _attend_in_passes(query, key.tokens, keys, values, options, bias, is_causal)
    if can_attend_tiles(options, length, query_length):
        records = key.tokens.stream.records.data
        return attend_tiles(query, records, keys, values, options, _sink_start(key.tokens, keys, values))
    return None


def _attend_on_cuda(
    query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions
) -> Tensor | None:
    """Attend by the CUDA kernels; `None` if they cannot serve this, or there are none."""
    sides = _sides(key, value)
    if sides is None:
        return None
    if not cuda_loader.try_load(query.device):
        if key.layer.config.kernel == "native":
            reason = cuda_loader.status().reason
            raise KernelUnavailableError(
                f"kernel='native' was given, but there are no CUDA kernels: {reason}"
            )
        return None
    return attend_on_device(query, key.tokens, value.tokens, sides, options)


def _sides(key: KVHandle, value: KVHandle) -> tuple[Side, Side] | None:
    """Both streams as the kernels read them; `None` if no kernel reads their codecs."""
    keys, values = describe(key.tokens), describe(value.tokens)
    if keys is not None and values is not None:
        return keys, values
    if key.layer.config.kernel == "native":
        raise KernelUnavailableError(
            f"kernel='native' was given, but no native kernel reads the codecs of layer "
            f"{key.layer.layer_idx}; kernel='auto' and kernel='torch' work without."
        )
    return None


def describe(view: StreamView) -> Side | None:
    """Describe what attention reads of a stream to the kernels; `None` if they cannot read it."""
    stream = view.stream
    codec = outer = stream.codec
    factors: Tensor | None = None
    rotary: Rotary | None = None
    period = 0
    if type(outer) is ScaledCodec:
        codec, factors = outer.inner, outer.factors
    elif type(outer) is RotatedCodec:
        codec, rotary, period = outer.inner, outer.rotary, outer.period
    nonuniform = _describe_nonuniform(view)
    code_format = FORMATS["nonuniform"] if nonuniform else code_format_of(codec)
    if code_format is None:
        return None
    records = stream.records
    layout = side_layout(
        stream,
        view.packed_length,
        code_format,
        period=period,
        rotary_dim=2 * len(nonuniform.get("inv_freq", ()))
        or (rotary.rotary_dim if rotary is not None else 0),
    )
    cos, sin = _tables(rotary, period) if rotary is not None else (None, None)
    heads = records.data.shape[1]
    static = getattr(codec, "static_scale", None)
    side = Side(
        layout,
        list(view.segments),
        static_scale=None if static is None else static.reshape(-1).float().expand(heads).contiguous(),
        factors=None if factors is None or view.packed_length == 0 else factors.squeeze(2),
        cos=cos,
        sin=sin,
        sinks=stream.sinks if view.packed_length else None,
        **nonuniform,
    )
    is_readable = (
        layout.head_dim <= MAX_HEAD_DIM
        and layout.rows * layout.width <= MAX_METADATA
        and len(side.dtypes) == 1
        and side.dtypes <= {*_DTYPES}
    )
    return side if is_readable else None


def _describe_nonuniform(view: StreamView) -> dict[str, Tensor]:
    """What kernels are told of non-uniform codes besides the layout; nothing of other codecs."""
    stream = view.stream
    outer = stream.codec
    codec = outer.inner if type(outer) is UnrotatedCodec else outer
    if not isinstance(codec, NonUniformCodec):
        return {}
    found = {"levels": codec.levels}
    if isinstance(codec, ChannelNonUniformCodec) and codec.scale is not None and codec.offset is not None:
        found |= {"channel_scale": codec.scale[:, :, 0], "channel_offset": codec.offset[:, :, 0]}
    if isinstance(outer, UnrotatedCodec):
        found["inv_freq"] = _frequencies(outer.rotary)
        if stream.padding.lengths is not None:
            found["positions"] = -stream.padding.lengths.to(stream.records.data.device, torch.int64)
    if stream.outliers is not None and view.packed_length:
        found |= {"outliers": stream.outliers.entries, "outlier_starts": stream.outliers.starts}
    return found


@lru_cache(maxsize=64)
def _frequencies(rotary: Rotary) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rotary.inv_freq, dtype=torch.float64)


@lru_cache(maxsize=64)
def _tables(rotary: Rotary, period: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return rotary.tables(torch.arange(period))


def _is_served(query: Tensor, key: KVHandle) -> bool:
    return query.device.type in ("cpu", "cuda") and key.device == query.device and query.dtype in _DTYPES


def _has_fast_passes(dtype: torch.dtype) -> bool:
    """Whether passes of the decode kernel beat dense attention for any number of queries.

    With 64 queries of 32 heads over 8192 tokens of 8 kv heads of 128 channels (one thread of a Zen 5 core),
    bf16: 34 ms by AVX-512, 90 by AVX2, 225 without either; by tiles 112, dense 124, torch using AVX-512.
    In fp32: 54, 90, 225, 108, 116. Processors with AMX have half-precision products in torch that the
    kernels here do not use. And the kernels round fp16 queries to bf16, which tiles do not: over many tokens
    that is more than twice the error of plain fp16 attention.
    """
    if dtype == torch.float16 or (dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
        return False
    return loader.instruction_set() in ("avx512", "avx2")


def _is_decode(query: Tensor, key: KVHandle, options: AttentionOptions) -> bool:
    """Whether the queries are so few that one pass over the codes serves them best."""
    if query.shape[2] <= _MOST_QUERIES:
        return True
    is_packed = query.shape[1] == key.shape[1] and not options.is_causal and options.sliding_window is None
    return is_packed and query.shape[2] <= _MOST_PACKED_QUERIES


def _attend_in_passes(
    query: Tensor,
    tokens: StreamView,
    keys: Side,
    values: Side,
    options: AttentionOptions,
    bias: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Attend by the decode kernel, `_PASS_QUERIES` query tokens at a time, each over what it may see."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    query_length = query.shape[2]
    parts = []
    for start in range(0, query_length, _PASS_QUERIES):
        stop = min(start + _PASS_QUERIES, query_length)
        hidden = query_length - stop if is_causal else 0
        seen = keys.length - hidden
        part = decode_attention(
            query[:, :, start:stop],
            tokens.stream.records.data,
            _without_newest(keys, hidden),
            _without_newest(values, hidden),
            scaling=options.scaling if options.scaling is not None else query.shape[3] ** -0.5,
            sink_start=_sink_start(tokens, keys, values),
            bias=None if bias is None else bias[:, :, :, :seen] if bias.shape[2] == 1 else bias,
            is_causal=is_causal,
            window=options.sliding_window or 0,
            softcap=options.softcap or 0.0,
            sink_logits=_per_head(options.sink_logits),
            alibi_slopes=_per_head(options.alibi_slopes),
        )
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _without_newest(side: Side, count: int) -> Side:
    """The side less its `count` newest tokens, which are part of the last segment."""
    if count == 0:
        return side
    return replace(side, segments=[*side.segments[:-1], side.segments[-1][:, :, :-count]])


def _sink_start(tokens: StreamView, keys: Side, values: Side) -> Tensor | None:
    """Slot of the first exact sink of every row; `None` where there are none, or all start at 0."""
    starts = tokens.stream.padding.lengths
    if starts is None or (keys.sinks is None and values.sinks is None):
        return None
    return starts.to("cpu", torch.int64)


def _per_head(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().reshape(-1).float().contiguous()


def _bias(options: AttentionOptions, query_length: int, length: int) -> tuple[Tensor | None, bool]:
    """What the mask and the position bias add to the logits, and whether attention is causal besides.

    A mask that hides nothing is dropped, and one that is only causal beside what it hides from every query
    is reduced to the row of the newest.
    """
    is_causal = options.is_causal or options.sliding_window is not None
    bias: Tensor | None = None
    if options.mask is not None:
        mask = _four_dimensional(options.mask, length)
        if mask.dtype == torch.bool:
            if mask.shape[2] > 1 and _is_causal_mask(mask):
                mask, is_causal = mask[:, :, -1:], True
            if not bool(mask.all()):
                bias = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        elif bool(mask.any()):
            bias = mask.float()
    if options.position_bias is not None:
        position_bias = _four_dimensional(options.position_bias, length).float()
        bias = position_bias if bias is None else bias + position_bias
    if query_length == 1:
        is_causal = options.sliding_window is not None
    return (None if bias is None else bias.detach()), is_causal


def _four_dimensional(tensor: Tensor, length: int) -> Tensor:
    tensor = tensor[(None,) * (4 - tensor.dim())]
    return tensor.expand(*tensor.shape[:3], length) if tensor.shape[3] == 1 else tensor[..., :length]


def _is_causal_mask(mask: Tensor) -> bool:
    query_length, length = mask.shape[2:]
    slots = torch.arange(length)
    causal = slots <= slots[length - query_length :, None]
    return torch.equal(mask, mask[:, :, -1:] & causal)
