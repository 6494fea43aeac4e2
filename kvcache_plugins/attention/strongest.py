"""The most attention that tokens receive from any query: maxima over attention weights, without the weights.

Few keys and many queries: a softmax over all of the keys at once, a tile of queries at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .limits import tile_scores
from .reference import AttentionOptions, adjust_logits, sink_column

__all__ = ["strongest_attention"]


def strongest_attention(
    query: Tensor, keys: Tensor, visible: Tensor, options: AttentionOptions, counted: Tensor
) -> Tensor:
    """Return the largest weight that any query, of any query head of a group, gives to every key.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The queries.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): All that they share their attention among.
        visible (`torch.Tensor` of shape `(B or 1, q, T)`): Bool, which keys each of them sees; at least one.
        options (`AttentionOptions`): Scaling, softcap and sink logits, which take their share. Its masks and
            biases are of other slots and are not used.
        counted (`torch.Tensor` of shape `(B, q)`): Bool, which queries count.

    Returns:
        `torch.Tensor` of shape `(B, Hkv, T)`: fp32, from 0 to 1.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _strongest(query, keys, visible, options, counted)


def _strongest(
    query: Tensor, keys: Tensor, visible: Tensor, options: AttentionOptions, counted: Tensor
) -> Tensor:
    batch_size, query_heads, query_length, head_dim = query.shape
    kv_heads, length = keys.shape[1:3]
    scaling = options.scaling if options.scaling is not None else head_dim**-0.5
    transposed = keys.float().transpose(2, 3)
    plain = AttentionOptions(softcap=options.softcap)
    step = max(1, tile_scores(is_cpu=query.is_cpu) // (batch_size * query_heads * length))
    # Logarithms, as the largest weight is the exponential of the largest of them: one exponential per key.
    strongest = query.new_full((batch_size, kv_heads, length), -torch.inf, dtype=torch.float32)
    for start in range(0, query_length, step):
        tile = slice(start, min(start + step, query_length))
        rows = (query[:, :, tile].float() * scaling).reshape(batch_size, kv_heads, -1, head_dim)
        logits = (rows @ transposed).view(batch_size, query_heads, -1, length)
        masked = replace(plain, mask=visible[:, None, tile])
        logits = adjust_logits(logits, 0, length, length, masked)
        total = logits.logsumexp(-1, keepdim=True)
        if options.sink_logits is not None:
            sinks = sink_column(options.sink_logits).float()
            total = total.logaddexp(sinks if sinks.shape[2] == 1 else sinks[:, :, tile])
        total.masked_fill_(~counted[:, None, tile, None], torch.inf)
        weights = logits.sub_(total).view(batch_size, kv_heads, -1, length)
        strongest = strongest.maximum(weights.amax(2))
    return strongest.exp_()
