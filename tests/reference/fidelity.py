"""How far a cache moves the predictions of a model on a real text."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .host import CACHE

__all__ = ["block_logits", "fidelity"]

_DENSE: WeakKeyDictionary[PreTrainedModel, dict[tuple[tuple[int, ...], int, int], torch.Tensor]]
_DENSE = WeakKeyDictionary()
"""Dense runs, for as long as their models are there."""


def fidelity(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    make_cache: Callable[[], Cache],
    *,
    window: int = 1024,
    prefill: int = 512,
    block: int = 32,
    max_windows: int | None = None,
) -> dict[str, float]:
    """Compares a cache with `DynamicCache` on consecutive windows of a text.

    The text is cut into non-overlapping windows of `window` tokens (an incomplete last one is dropped), each
    read with a fresh cache: `prefill` tokens in one forward, the rest in blocks of `block` tokens that read
    the cache. Every token after the prefill is predicted exactly once, from the tokens of its window that
    precede it::

        tokens     | prefill (one forward, exact) | block | block | ... | block |
        predicted  |            no                |  yes  |  yes  | ... |  yes  |

    The first of them is predicted by the last position of the prefill, hence exactly. Both caches run the
    same schedule, so that the difference is the cache alone.

    Args:
        model: A causal language model, the same in every call; load it in fp32 for the numbers to mean the
            cache.
        token_ids: Integer `torch.Tensor` of shape `(N,)` or `(1, N)`.
        make_cache: Returns a new, empty cache.
        window: Tokens in a window.
        prefill: Tokens read by the first forward of a window.
        block: Tokens read by each later forward.
        max_windows: Stop after so many windows.

    Returns:
        Means per predicted token: `kl`, the divergence KL(dense || cache) in nats; `top1`, the fraction whose
        most likely token is the dense one; `nll` and `dense_nll`, negative log-likelihoods of the text in
        nats.

    Raises:
        ValueError: If the text is shorter than one window.
    """
    token_ids = token_ids.reshape(-1)
    windows = token_ids.shape[0] // window
    if max_windows is not None:
        windows = min(windows, max_windows)
    if windows < 1:
        raise ValueError(f"the text must hold at least one window ({window} tokens), got {len(token_ids)}")

    totals = dict.fromkeys(("kl", "top1", "nll", "dense_nll"), 0.0)
    for index in range(windows):
        ids = token_ids[index * window : (index + 1) * window][None].to(model.device)  # [1, window]
        schedule = {"prefill": prefill, "block": block}
        # The logits are the model's fp32; the log-softmax is taken in fp64 because KLs near 1e-6 drown in
        # fp32 sums.
        dense_logp = _dense_logp(model, ids, **schedule)
        logp = torch.log_softmax(block_logits(model, ids, make_cache(), **schedule).double(), dim=-1)
        targets = ids[0, prefill:, None]
        totals["kl"] += float((dense_logp.exp() * (dense_logp - logp)).sum())
        totals["top1"] += float((dense_logp.argmax(-1) == logp.argmax(-1)).sum())
        totals["nll"] -= float(logp.gather(-1, targets).sum())
        totals["dense_nll"] -= float(dense_logp.gather(-1, targets).sum())
    predictions = windows * (window - prefill)
    return {name: total / predictions for name, total in totals.items()}


def _dense_logp(model: PreTrainedModel, ids: torch.Tensor, *, prefill: int, block: int) -> torch.Tensor:
    """Of the dense run, with which all caches of a model are compared: made once."""
    runs = _DENSE.setdefault(model, {})
    key = (tuple(ids[0].tolist()), prefill, block)
    if key not in runs:
        dense = block_logits(model, ids, DynamicCache(config=model.config), prefill=prefill, block=block)
        runs[key] = torch.log_softmax(dense.double(), dim=-1)
    return runs[key]


@torch.no_grad()
def block_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, *, prefill: int, block: int
) -> torch.Tensor:
    """Logits that predict the tokens after the prefill, read block by block through `cache`.

    Args:
        model: A causal language model.
        input_ids: `torch.Tensor` of shape `(1, T)`.
        cache: An empty cache; holds all `T` tokens afterwards.
        prefill: Tokens of the first forward.
        block: Tokens of each later forward.

    Returns:
        `torch.Tensor` of shape `(T - prefill, vocabulary)`; row `i` predicts token `prefill + i`.
    """
    logits = [model(input_ids[:, :prefill], **{CACHE: cache}, use_cache=True).logits[0, -1:]]
    for start in range(prefill, input_ids.shape[1], block):
        step = input_ids[:, start : start + block]
        logits.append(model(step, **{CACHE: cache}, use_cache=True).logits[0])
    # The last position predicts a token beyond the text.
    return torch.cat(logits)[:-1].float()
