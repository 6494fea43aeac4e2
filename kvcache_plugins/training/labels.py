"""What a key is worth: the largest logit that any query of the answer gives it (Locret, arXiv 2410.01805).

```
S[j, k] = max over the query heads g of group j, max over the answer's positions p of
          RoPE(q[g, p]) . RoPE(k[j, k]) * scaling,           k a position of the prompt
```

As in the authors' code, and unlike the paper's formula, the logits are scaled. They are those of the model's
own attention before its softmax: taken after norms and rotation, with its scaling and soft cap.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["max_logits"]

_LARGEST_BLOCK = 1 << 24
"""Logits computed at once, or those of one answer token if these are more: 64 MiB in fp32."""


@torch.no_grad()
def max_logits(query: Tensor, key: Tensor, scaling: float, *, softcap: float | None = None) -> Tensor:
    """Return the largest logit of every key, over all queries of its group.

    A running maximum over blocks of queries: all logits are never there at once.

    Args:
        query (`torch.Tensor` of shape `(Hq, n_a, D)`): Queries of the answer, rotated.
        key (`torch.Tensor` of shape `(H_kv, n_p, D)`): Keys of the prompt, rotated.
        scaling (`float`): Factor of the logits, positive.
        softcap (`float`, *optional*): `c` of the models that use `c * tanh(logit / c)`.

    Returns:
        `torch.Tensor` of shape `(H_kv, n_p)`: fp32.

    Raises:
        ValueError: If there is no query, or the query heads are no multiple of the key heads.
    """
    heads, tokens, channels = query.shape
    kv_heads, length, _ = key.shape
    if tokens == 0 or heads % kv_heads:
        raise ValueError(
            f"Labels need at least one query and a whole number of query heads per key head, got queries "
            f"{tuple(query.shape)} and keys {tuple(key.shape)}."
        )
    grouped = query.view(kv_heads, heads // kv_heads, tokens, channels)
    step = max(1, _LARGEST_BLOCK // max(1, heads * length))
    with torch.autocast(query.device.type, enabled=False):
        transposed = key.float().transpose(1, 2)
        best: Tensor | None = None
        for block in grouped.split(step, dim=2):
            found = (block.float().flatten(1, 2) @ transposed).amax(1)
            best = found if best is None else torch.maximum(best, found)
    assert best is not None
    best = best * scaling  # monotone, as is the cap: both may follow the maximum
    return best if softcap is None else softcap * torch.tanh(best / softcap)
