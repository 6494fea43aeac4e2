"""The most attention that tokens receive from any query: maxima over attention weights, without the weights.

Few keys and many queries: a softmax over all of the keys at once, a tile of queries at a time; by a native
kernel where one serves (`measured`), else by torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import tile_scores
from .measured import measure_strongest
from .reference import AttentionOptions, adjust_logits, sink_column

__all__ = ["strongest_attention"]


def strongest_attention(
    query: Tensor,
    keys: Tensor,
    visible: Tensor,
    options: AttentionOptions,
    counted: Tensor,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Return the largest weight that any query, of any query head of a group, gives to every key.

    Args:
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): The queries, of the newest keys.
        keys (`torch.Tensor` of shape `(B, Hkv, T, D)`): All that they share their attention among.
        visible (`torch.Tensor` of shape `(B, T)`): Bool, which keys they see, as far as these do not come
            after them; every query its own.
        options (`AttentionOptions`): Scaling, softcap and sink logits, which take their share. Its masks and
            biases are of other slots and are not used.
        counted (`torch.Tensor` of shape `(B, q)`): Bool, which queries count.
        kernel (`str`): The option of a cache of that name.

    Returns:
        `torch.Tensor` of shape `(B, Hkv, T)`: fp32, from 0 to 1.
    """
    with torch.autocast(query.device.type, enabled=False):
        found = measure_strongest(query, keys, visible, options, counted, kernel)
        return _strongest(query, keys, visible, options, counted) if found is None else found


def _strongest(
    query: Tensor, keys: Tensor, visible: Tensor, options: AttentionOptions, counted: Tensor
) -> Tensor:
    batch_size, query_heads, query_length, head_dim = query.shape
    kv_heads, length = keys.shape[1:3]
    scaling = options.scale_for(head_dim)
    transposed = keys.float().transpose(2, 3)
    masked = AttentionOptions(softcap=options.softcap, is_causal=True, mask=visible[:, None, None])
    step = max(1, tile_scores(is_cpu=query.is_cpu) // (batch_size * query_heads * length))
    # Logarithms, as the largest weight is the exponential of the largest of them: one exponential per key.
    strongest = query.new_full((batch_size, kv_heads, length), -torch.inf, dtype=torch.float32)
    for start in range(0, query_length, step):
        tile = slice(start, min(start + step, query_length))
        seen = length - (query_length - tile.stop)
        rows = (query[:, :, tile].float() * scaling).reshape(batch_size, kv_heads, -1, head_dim)
        logits = (rows @ transposed[..., :seen]).view(batch_size, query_heads, -1, seen)
        logits = adjust_logits(logits, 0, seen, seen, masked)
        total = logits.logsumexp(-1, keepdim=True)
        if options.sink_logits is not None:
            sinks = sink_column(options.sink_logits).float()
            total = total.logaddexp(sinks if sinks.shape[2] == 1 else sinks[:, :, tile])
        total.masked_fill_(~counted[:, None, tile, None], torch.inf)
        weights = logits.sub_(total).view(batch_size, kv_heads, -1, seen)
        found = strongest[:, :, :seen]
        torch.maximum(found, weights.amax(2), out=found)
    return strongest.exp_()
