"""The two products of attention by themselves, for models that write their attention out.

Some modelling files (BLOOM, MPT, GPT-Neo, XGLM) call no attention function: they multiply queries with keys,
do to the logits what is theirs, and multiply weights with values. Each product then reads the packed codes,
by a kernel or tile by tile, and logits and weights are ordinary tensors in between. Whoever asks another
model for attention weights has its `eager` function multiply in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compilation import outside_graphs
from ..kernels.cuda_inputs import on_device
from ..kernels.layout import dense_rows
from ..kernels.ops import multiply_keys, multiply_values
from ..kernels.selection import UNREADABLE, native_is_unavailable, why_no_kernels
from ..layers.gradients import refusing_gradients
from ..layers.handle import KVHandle
from ..layers.handle_view import HandleView, as_view
from ..layers.lazy import LazyTensor, intercept
from ..layers.view import StreamView
from .decoded import DecodedView
from .description import describe, first_sinks
from .limits import KERNEL_DTYPES, MOST_QUERIES
from .native import has_fast_passes
from .passes import in_passes
from .reference import cut_tiles

__all__ = ["multiply"]

_TILES = "the model multiplies keys and values itself: they are decoded tile by tile"


@intercept(torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm)
@outside_graphs
def _matmul(rows: Any, states: Any) -> Any:
    view = _multiplied(rows, states)
    return NotImplemented if view is None else _refusing(multiply(rows, view), rows, view)


@intercept(torch.baddbmm, Tensor.baddbmm)
@outside_graphs
def _baddbmm(added: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    view = _multiplied(batch1, batch2)
    if view is None or isinstance(added, LazyTensor) or batch1.dim() != 3:
        return NotImplemented
    with torch.no_grad():
        sums = multiply(batch1, view) * alpha
        if beta != 0:  # what counts for nothing may hold anything
            sums = torch.add(sums, added, alpha=beta)
    return _refusing(sums, batch1, view, added)


def _multiplied(rows: Any, states: Any) -> HandleView | None:
    """The view that `rows` are multiplied with; `None` where torch's own function is to take tensors."""
    view = as_view(states)
    if view is None or not isinstance(rows, Tensor) or isinstance(rows, LazyTensor):
        return None
    is_served = (
        type(view.handle) is KVHandle
        and view.tokens.packed_length > 0
        and (rows.dtype, rows.device.type) == (view.dtype, view.device.type)
        and _has_its_batch(rows, view)
        and rows.shape[-1] == view.shape[-2]
        and not torch.is_autocast_enabled(rows.device.type)
    )
    return view if is_served else None


def _has_its_batch(rows: Tensor, view: HandleView) -> bool:
    """Whether there is a matrix of rows for each of a view, or several for a head that stands there once."""
    batch: tuple[int, ...] = view.shape[:-2]
    if view.seen.form == "spread" and view.seen.repeats == 1:
        batch = (*batch[:2], *rows.shape[2:3])
    return rows.dim() == len(batch) + 2 and rows.shape[:-2] == batch


def _refusing(sums: Tensor, rows: Tensor, view: HandleView, *others: Tensor) -> Tensor:
    return refusing_gradients(sums.to(rows.dtype), rows, *view.handle.sources, *others)


def multiply(rows: Tensor, view: HandleView) -> Tensor:
    """Multiply rows with packed and exact keys or values.

    Args:
        rows (`torch.Tensor`): Matrices for all heads of the view, of which each has `n` columns.
        view (`HandleView`): Matrices of `n` rows: keys with channels before tokens, or values.

    Returns:
        `torch.Tensor`: The products, in fp32 or, where rows are fp64, in that.

    Raises:
        KernelUnavailableError: If the layer was configured with `kernel="native"` and no kernel serves this.
    """
    handle, batch_size = view.handle, view.handle.shape[0]
    heads = rows.reshape(batch_size, -1, *rows.shape[-2:])
    order = view.query_order(heads.shape[1])
    if order is not None:
        heads = heads.index_select(1, order)
    with torch.no_grad():
        products = _of_heads(heads, handle, is_transposed=view.seen.is_transposed)
    if order is not None:
        products = products.index_select(1, order.argsort())
    return products.view(*rows.shape[:-1], products.shape[-1])


def _of_heads(rows: Tensor, handle: KVHandle, *, is_transposed: bool) -> Tensor:
    """Products of `rows` `(B, Hq, q, n)`, of which neighbours share a head: by a kernel, or tile by tile."""
    layer, tokens = handle.layer, handle.tokens
    source, reason = _source(handle, rows)
    if source is None:
        if layer.config.kernel == "native":
            raise native_is_unavailable(f"layer {layer.layer_idx}", reason)
        layer.kernel, layer.kernel_reason = "torch", f"{_TILES}; {reason}"
        return _by_tiles(rows, None, tokens, is_transposed=is_transposed)
    layer.kernel, layer.kernel_reason = rows.device.type, None if rows.is_cpu else _TILES
    is_key = tokens.stream.side == "key"
    is_short = rows.shape[2] <= MOST_QUERIES or has_fast_passes(rows.dtype)
    if rows.is_cpu and is_key == is_transposed and is_short and (is_key or _are_weights(rows)):
        return _by_kernel(rows, source, is_key=is_key)
    return _by_tiles(rows, source, tokens, is_transposed=is_transposed)


def _source(handle: KVHandle, rows: Tensor) -> tuple[DecodedView | None, str]:
    """The tokens where native code decodes them; the reason if none does."""
    if handle.layer.config.kernel == "torch":
        return None, "kernel='torch' was given"
    if rows.dtype not in KERNEL_DTYPES or rows.device.type not in ("cpu", "cuda"):
        return None, f"there is no native kernel for {rows.dtype} on {rows.device}"
    side = describe(handle.tokens)
    if side is None:
        return None, UNREADABLE
    if (reason := why_no_kernels(rows.device)) is not None:
        return None, reason
    if rows.is_cuda:  # its tables may lie elsewhere
        side = on_device(side, rows.device)
    return DecodedView(handle.tokens, side, first_sinks(handle.tokens, side)), ""


def _are_weights(rows: Tensor) -> bool:
    """Whether no number is negative or not finite, as the kernels want it of weights."""
    least, most = rows.aminmax()
    return bool(least >= 0) and bool(most < torch.inf)


def _by_kernel(rows: Tensor, source: DecodedView, *, is_key: bool) -> Tensor:
    product = multiply_keys if is_key else multiply_values
    records, start = source.tokens.stream.records.data, source.tokens.first
    rows = dense_rows(rows)

    def multiply_pass(first: int, last: int) -> Tensor:
        part = rows[:, :, first:last]
        return product(part, records, source.side, start=start, sink_start=source.sink_start)

    return in_passes(multiply_pass, rows.shape[2]).float()


def _by_tiles(rows: Tensor, source: DecodedView | None, tokens: StreamView, *, is_transposed: bool) -> Tensor:
    """Decode a tile, by native code if there is a source, multiply with it, go on; sums are fp32 at least."""
    newest = tokens.segments[-1]
    kv_heads, dim = newest.shape[1], newest.shape[3]
    wide = torch.promote_types(rows.dtype, torch.float32)
    grouped = rows.reshape(rows.shape[0], kv_heads, -1, rows.shape[-1])
    grouped = grouped if source is not None else grouped.to(wide)
    width = tokens.length if is_transposed else dim
    products = rows.new_zeros((*grouped.shape[:3], width), dtype=wide)
    for start, stop in cut_tiles(rows, tokens, tokens, 0, kv_heads):
        if source is not None:
            tile = source.read_as(start, stop, rows.dtype)
        else:
            tile = tokens.read(start, stop).to(wide)
        if is_transposed:
            products[..., start:stop] = grouped @ tile.transpose(-1, -2)
        else:
            products += grouped[..., start:stop] @ tile
    return products.view(*rows.shape[:3], width)
