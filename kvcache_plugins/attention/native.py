"""Attention over packed data by a native kernel, where one fits; else by the torch reference.

Here a layer's streams are described to the kernels in their own terms (`kernels.layout`), and whatever may
hide a slot becomes a window, a causal flag, or an additive bias.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import KernelUnavailableError
from ..kernels import loader
from ..kernels.layout import MAX_HEAD_DIM, MAX_METADATA, Side, SideLayout
from ..kernels.ops import decode_attention
from ..layers.codec import RotatedCodec, ScaledCodec, code_format_of
from ..layers.handle import KVHandle
from ..layers.stream import StreamView
from ..models.rotary import Rotary
from .reference import AttentionOptions, attend

__all__ = ["attend_handles", "describe"]

_MOST_QUERIES = 8
"""Query tokens up to which a pass over the codes is bound by reading them; more are a matrix product."""
_MOST_PACKED_QUERIES = 16
"""The same where the heads of a group come as query tokens of one head."""
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
    if layer.config.kernel != "torch" and value.layer is layer and _is_decode(query, key, options):
        sides = describe(key.tokens), describe(value.tokens)
        if sides[0] is not None and sides[1] is not None:
            if loader.try_load():
                layer.kernel = "cpu"
                return _attend_native(query, key.tokens, sides[0], sides[1], options)
        elif layer.config.kernel == "native":
            raise KernelUnavailableError(
                f"kernel='native' was given, but no native kernel reads the codecs of layer "
                f"{layer.layer_idx}; kernel='auto' and kernel='torch' work without."
            )
    layer.kernel = "torch"
    return attend(query, key.tokens, value.tokens, options)


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
    code_format = code_format_of(codec)
    if code_format is None:
        return None
    records = stream.records
    fields = {
        name.removeprefix(f"{stream.side}_"): offset for name, (offset, _) in records.layout.fields.items()
        if name.startswith(f"{stream.side}_")
    }  # fmt: skip
    layout = SideLayout(
        packed_length=view.packed_length,
        nbits=codec.nbits,
        format=code_format,
        head_dim=stream.head_dim,
        group_tokens=codec.stored_granularity.tokens,
        width=codec.granularity.width(stream.head_dim),
        metadata_bytes=records.layout.metadata_bytes,
        interleaved=int(stream.interleaved),
        codes_offset=fields["codes"],
        scale_offset=fields.get("scale", -1),
        minimum_offset=fields.get("minimum", -1),
        period=period,
        rotary_dim=rotary.rotary_dim if rotary is not None else 0,
    )
    cos, sin = _tables(rotary, period) if rotary is not None else (None, None)
    heads = records.data.shape[1]
    static = getattr(codec, "static_scale", None)
    side = Side(
        layout,
        list(view.segments),
        static_scale=None if static is None else static.reshape(-1).float().expand(heads),
        factors=None if factors is None or view.packed_length == 0 else factors.squeeze(2),
        cos=cos,
        sin=sin,
        sinks=stream.sinks if view.packed_length else None,
    )
    is_readable = (
        layout.head_dim <= MAX_HEAD_DIM
        and layout.rows * layout.width <= MAX_METADATA
        and len(side.dtypes) == 1
        and side.dtypes <= {*_DTYPES}
    )
    return side if is_readable else None


@lru_cache(maxsize=64)
def _tables(rotary: Rotary, period: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return rotary.tables(torch.arange(period))


def _is_decode(query: Tensor, key: KVHandle, options: AttentionOptions) -> bool:
    """Whether this is a case the kernels are for; others are the reference's."""
    if query.device.type != "cpu" or key.device.type != "cpu" or query.dtype not in _DTYPES:
        return False
    if query.shape[2] <= _MOST_QUERIES:
        return True
    is_packed = query.shape[1] == key.shape[1] and not options.is_causal and options.sliding_window is None
    return is_packed and query.shape[2] <= _MOST_PACKED_QUERIES


def _attend_native(
    query: Tensor, tokens: StreamView, keys: Side, values: Side, options: AttentionOptions
) -> Tensor:
    stream = tokens.stream
    bias, is_causal = _bias(options, query.shape[2], keys.length)
    has_sinks = keys.sinks is not None or values.sinks is not None
    sink_start = stream.padding.lengths if has_sinks else None
    return decode_attention(
        query if query.stride(-1) == 1 else query.contiguous(),
        stream.records.data,
        keys,
        values,
        scaling=options.scaling if options.scaling is not None else query.shape[3] ** -0.5,
        sink_start=None if sink_start is None else sink_start.to("cpu", torch.int64),
        bias=bias,
        is_causal=is_causal,
        window=options.sliding_window or 0,
        softcap=options.softcap or 0.0,
        sink_logits=_per_head(options.sink_logits),
        alibi_slopes=_per_head(options.alibi_slopes),
    )


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
