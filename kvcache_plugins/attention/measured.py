"""How much attention tokens receive, by a native kernel: what `received` and `strongest` say in plain torch.

A kernel computes logits once, from the codes where tokens are packed, a thread the rows of some heads; their
weights are added up while they are in its cache. Of 32 heads, over keys of 8 heads of 128 channels, in
milliseconds (one thread of a Zen 5 core; in brackets with AVX2): 1024 queries of 2048 exact tokens in bf16 54
(146), torch 442, in fp32 83 (146) and 310; 8 of 8192 tokens in int4 2.4 (4.5) and 17.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import loader
from ..kernels.layout import FORMATS, MAX_HEAD_DIM, Side, SideLayout, dense_rows
from ..kernels.ops import measure_attention
from ..layers.view import StreamView
from .bias import LogitBias, logit_bias, per_head, row_bias, sinks_of_pass
from .description import describe, first_sinks
from .limits import KERNEL_DTYPES, MOST_QUERIES, TILE_SCORES
from .passes import PASS_QUERIES
from .reference import AttentionOptions

__all__ = ["measure_received", "measure_strongest"]


def measure_received(
    query: Tensor, tokens: StreamView, options: AttentionOptions, counted: Tensor | None, kernel: str
) -> Tensor | None:
    """What [`received.received_attention`] returns; `None` if no kernel serves this.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest `q` tokens.
        tokens (`StreamView`): The keys.
        options (`AttentionOptions`): As the queries were answered.
        counted (`torch.Tensor` of shape `(B, q)`, *optional*): Which queries count.
        kernel (`str`): The option of that name.
    """
    if not _is_served(query, tokens.segments[-1], kernel):
        return None
    side = describe(tokens)
    if side is None:
        return None
    are_few = query.shape[2] <= _pass_length(tokens.length)
    bias_of = logit_bias if are_few else row_bias  # of many, a row for each would take more than the codes
    added = bias_of(options, query.shape[2], tokens.length, hidden=tokens.first)
    if added is None:
        return None
    return _measure(
        query,
        tokens.stream.records.data,
        side,
        options,
        added,
        counted,
        start=tokens.first,
        sink_start=first_sinks(tokens, side),
    )


def measure_strongest(
    query: Tensor,
    keys: Tensor,
    visible: Tensor,
    options: AttentionOptions,
    counted: Tensor,
    kernel: str,
) -> Tensor | None:
    """What [`strongest.strongest_attention`] returns; `None` if no kernel serves this.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The queries, of the newest keys.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): All that they share their attention among.
        visible (`torch.Tensor` of shape `(B, T)`): Which keys they see, as far as these come before them.
        options (`AttentionOptions`): Scaling, softcap and sink logits.
        counted (`torch.Tensor` of shape `(B, q)`): Which queries count.
        kernel (`str`): The option of that name.
    """
    batch_size, heads, _, head_dim = keys.shape
    if head_dim > MAX_HEAD_DIM or not _is_served(query, keys, kernel):
        return None
    layout = SideLayout(0, 8, FORMATS["symmetric"], head_dim, 1, 1, 2, 0, 0)  # nothing is packed
    records = torch.empty((batch_size, heads, 0, 1), dtype=torch.uint8, device="cpu")
    options = AttentionOptions(
        scaling=options.scaling, softcap=options.softcap, sink_logits=options.sink_logits
    )
    hidden = torch.zeros(visible.shape, dtype=torch.float32, device="cpu").masked_fill_(~visible, -torch.inf)
    added = LogitBias(None if bool(visible.all()) else hidden[:, None, None], is_causal=True)
    return _measure(query, records, Side(layout, [keys]), options, added, counted, is_strongest=True)


def _is_served(query: Tensor, keys: Tensor, kernel: str) -> bool:
    if kernel == "torch" or not (query.is_cpu and keys.is_cpu):
        return False
    if query.dtype not in KERNEL_DTYPES or keys.dtype not in KERNEL_DTYPES or not loader.try_load():
        return False
    # without vectors, torch multiplies many queries faster
    return query.shape[2] <= MOST_QUERIES or loader.instruction_set() != "portable"


def _pass_length(length: int) -> int:
    """Queries that are taken at once, so that the logits of a task are few, too."""
    return max(MOST_QUERIES, min(PASS_QUERIES, TILE_SCORES // length))


def _measure(
    query: Tensor,
    records: Tensor,
    keys: Side,
    options: AttentionOptions,
    added: LogitBias,
    counted: Tensor | None,
    *,
    start: int = 0,
    sink_start: Tensor | None = None,
    is_strongest: bool = False,
) -> Tensor:
    bias, is_causal, window = added
    query_length, length = query.shape[2], keys.length
    query = query.detach()
    if query.dtype == torch.float16:  # which kernels round to bf16
        query = query.float()
    query = dense_rows(query)
    sinks = options.sink_logits
    if sinks is not None and sinks.dim() == 3:
        options = replace(options, sink_logits=sinks.expand(len(query), -1, query_length))
    step = _pass_length(length - start)
    received = torch.zeros((*records.shape[:2], length - start), dtype=torch.float32, device="cpu")
    alibi_slopes = per_head(options.alibi_slopes, query.device)
    for first in range(0, query_length, step):
        stop = min(first + step, query_length)
        later = query_length - stop
        hidden = later if is_causal else 0
        seen = length - hidden
        found = measure_attention(
            query[:, :, first:stop],
            records,
            keys.without_newest(hidden),
            start=start,
            scaling=options.scale_for(query.shape[3]),
            sink_start=sink_start,
            bias=None if bias is None else bias[..., :seen],
            is_causal=is_causal,
            window=window,
            softcap=options.softcap or 0.0,
            sink_logits=sinks_of_pass(options, query.device, slice(first, stop), later - hidden),
            alibi_slopes=alibi_slopes,
            counted=None if counted is None else counted[:, first:stop].contiguous(),
            is_strongest=is_strongest,
        )
        received_by = received[:, :, : seen - start]
        if is_strongest:
            torch.maximum(received_by, found, out=received_by)
        else:
            received_by += found
    return received
