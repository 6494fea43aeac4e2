"""Attention in fp64, one row and one query head at a time."""

from __future__ import annotations

import torch

__all__ = ["naive_attention"]


def naive_attention(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    *,
    scaling: float | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Softmax attention with grouped queries and every variant a decoder may ask for.

    Query `i` of `Q` sits at slot `T - Q + i` (lower-right alignment), which is what the causal flag, the
    window and ALiBi refer to. A logit is built in this order: `scaling * q.k`, softcap, ALiBi, mask.

    Args:
        query_states: `torch.Tensor` of shape `(B, Hq, Q, D)`.
        key_states: `torch.Tensor` of shape `(B, Hkv, T, D)`; query head `h` reads kv head `h // (Hq / Hkv)`.
        value_states: `torch.Tensor` of shape `(B, Hkv, T, Dv)`.
        scaling: Factor of the dot product, `D ** -0.5` by default.
        mask: `torch.Tensor` that broadcasts to `(B, Hq, Q, T)`: boolean (True = may attend) or additive.
        softcap: `z` becomes `softcap * tanh(z / softcap)`.
        sinks: `torch.Tensor` of shape `(Hq,)` or `(B, Hq, Q)`: one extra logit per head, or per query, that
            takes probability but has no value.
        alibi_slopes: `torch.Tensor` of shape `(Hq,)`: adds `slope * (key slot - query slot)`.
        sliding_window: A query sees only the last `sliding_window` slots up to and including its own.
        is_causal: A query does not see slots after its own.

    Returns:
        fp64 `torch.Tensor` of shape `(B, Hq, Q, Dv)`. A query that may see nothing gets zeros.
    """
    batch_size, num_heads, query_length, head_dim = query_states.shape
    num_key_value_heads, kv_length = key_states.shape[1:3]
    group = num_heads // num_key_value_heads
    scaling = head_dim**-0.5 if scaling is None else scaling

    key_slot = torch.arange(kv_length)[None, :]  # [1, T]
    query_slot = torch.arange(kv_length - query_length, kv_length)[:, None]  # [Q, 1]
    visible = torch.ones(query_length, kv_length, dtype=torch.bool)
    if is_causal:
        visible &= key_slot <= query_slot
    if sliding_window is not None:
        visible &= key_slot > query_slot - sliding_window
    if mask is not None:
        mask = mask.expand(batch_size, num_heads, query_length, kv_length).cpu()

    output = torch.zeros(batch_size, num_heads, query_length, value_states.shape[-1], dtype=torch.float64)
    for row in range(batch_size):
        for head in range(num_heads):
            query = query_states[row, head].double().cpu()  # [Q, D]
            key = key_states[row, head // group].double().cpu()  # [T, D]
            value = value_states[row, head // group].double().cpu()  # [T, Dv]

            logits = scaling * (query @ key.T)  # [Q, T]
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if alibi_slopes is not None:
                logits = logits + float(alibi_slopes[head]) * (key_slot - query_slot)
            logits = logits.masked_fill(~visible, float("-inf"))
            if mask is not None and mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask[row, head], float("-inf"))
            elif mask is not None:
                added = mask[row, head].double()
                logits = (logits + added).masked_fill(added == float("-inf"), float("-inf"))

            if sinks is not None:
                own = sinks[head] if sinks.dim() == 1 else sinks[row, head][:, None]
                sink = own.double().cpu().expand(query_length, 1)
                logits = torch.cat([logits, sink], dim=-1)  # [Q, T + 1]
            # Softmax of a row of -inf is NaN; such a query has nothing to read.
            nothing = (logits == float("-inf")).all(dim=-1, keepdim=True)
            probabilities = torch.softmax(logits, dim=-1).masked_fill(nothing, 0.0)[:, :kv_length]
            # Masked values may be anything, infinities included: 0 * inf must not reach the sum.
            for position in range(query_length):
                read = probabilities[position] != 0
                output[row, head, position] = probabilities[position, read] @ value[read]
    return output
