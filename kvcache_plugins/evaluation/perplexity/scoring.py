"""What a cache does to the predictions of one window of tokens.

The first `P` tokens of a window are read by one forward, the others in blocks through the cache. Every token
after the prefill is predicted exactly once, from the tokens of its window that precede it::

    tokens     | prefill (one forward) | block | block | ... | block |
    predicted  |          no           |  yes  |  yes  | ... |  yes  |

The first of them is predicted by the last position of the prefill, hence exactly, whatever the cache; all
others by positions that read the cache. The last token is read too, so that the cache has been filled with
the whole window when its bytes are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...cache import KVCache
from ...device_dtypes import doubled
from ...models.cache_argument import as_argument
from ..caches import cache_bytes, new_cache, prefill
from ..finite import refuse_wrong
from .blocks import exact_blocks, packed_shares

__all__ = [
    "BINS",
    "Prediction",
    "Reference",
    "Schedule",
    "bin_edges",
    "check_finite",
    "divergence_of",
    "predictions",
    "score_window",
]

BINS = 16
"""Equal parts of the predicted tokens over which the curve by position is averaged."""


@dataclass(frozen=True)
class Schedule:
    """How a window is read.

    Args:
        prefill (`int`): Tokens of the first forward.
        block_length (`int`): Most tokens of each later one.
        approximate (`bool`): Whether blocks are left uncut, see [`exact_blocks`].
    """

    prefill: int
    block_length: int = 1
    approximate: bool = False


@dataclass
class Reference:
    """The dense run over a window, with which the other caches are compared.

    Args:
        nll (`list[float]`): Negative log-likelihood of every predicted token, in nats.
        logits (`torch.Tensor` of shape `(predicted tokens, vocabulary)`, *optional*): As the model gave them,
            on the CPU.
    """

    nll: list[float]
    logits: Tensor | None = None


class Prediction(NamedTuple):
    """What one forward predicts: tokens `first`, `first + 1`, ..., from `logits` `(n, vocabulary)`.

    `packed_shares` holds, for each, the share of the tokens attended to that was read from codes, and
    `is_exact` says whether one token at a time would have read the same.
    """

    first: int
    logits: Tensor
    packed_shares: list[float]
    is_exact: bool


@torch.inference_mode()
def predictions(model: Any, token_ids: Tensor, cache: Cache, schedule: Schedule) -> Iterator[Prediction]:
    """Read a window through an empty cache and yield the predictions of its tokens after the prefill.

    Args:
        model (`PreTrainedModel`): A causal language model in evaluation mode.
        token_ids (`torch.Tensor` of shape `(1, T)`): The window.
        cache (`Cache`): Empty; holds all `T` tokens afterwards. Ours is bound as `generate()` does it.
        schedule (`Schedule`): How the window is read.
    """
    length = token_ids.shape[1]
    output = prefill(model, token_ids[:, : schedule.prefill], cache, length, logits_to_keep=1)
    yield Prediction(schedule.prefill, output.logits[0], [0.0], True)
    blocks = exact_blocks(
        cache, schedule.prefill, length, schedule.block_length, approximate=schedule.approximate
    )
    for block in blocks:
        shares = packed_shares(cache, block.stop - block.start)
        step = token_ids[:, block.start : block.stop]
        logits = model(input_ids=step, **as_argument(cache), use_cache=True).logits[0]
        # the last position predicts a token beyond the text
        count = min(block.stop, length - 1) - block.start
        if count:
            yield Prediction(block.start + 1, logits[:count], shares[:count], block.is_exact)


def score_window(
    model: Any,
    token_ids: Tensor,
    cache_config: Mapping[str, Any],
    schedule: Schedule,
    reference: Reference | None = None,
    *,
    keep_logits: bool = False,
) -> tuple[dict[str, Any], Reference]:
    """Read a window through a fresh cache and sum up what it predicts.

    Log-probabilities are taken in fp64 from the logits the model gives: divergences near 1e-6 would drown in
    fp32 sums.

    Args:
        model (`PreTrainedModel`): A causal language model in evaluation mode.
        token_ids (`torch.Tensor` of shape `(1, T)`): The window.
        cache_config (`Mapping`): The cache, as for [`new_cache`].
        schedule (`Schedule`): How the window is read.
        reference (`Reference`, *optional*): The dense run; none for the dense run itself.
        keep_logits (`bool`): Keep the logits for runs to be compared with this one.

    Returns:
        `tuple[dict, Reference]`: A record of plain values (sums over the predicted tokens, see the code), and
        this run as a reference.

    Raises:
        NotFiniteError: If a logit is NaN or infinite, so that nothing can be said of the predictions.
    """
    started = time.perf_counter()
    cache = new_cache(model, cache_config, max_cache_length=token_ids.shape[1])
    nll: list[float] = []
    shares: list[float] = []
    divergence: list[float] = []
    agreement = 0
    is_exact = True
    kept: list[Tensor] = []
    for prediction in predictions(model, token_ids, cache, schedule):
        logits = prediction.logits
        logp = doubled(logits).log_softmax(-1)
        targets = token_ids[0, prediction.first : prediction.first + len(logits)].to(logp.device)
        done = len(nll)
        nll += (-logp.gather(1, targets[:, None])[:, 0]).tolist()
        shares += prediction.packed_shares
        is_exact &= prediction.is_exact
        if keep_logits:
            kept.append(logits.cpu().clone())
        if reference is not None and reference.logits is not None:
            dense = reference.logits[done : len(nll)].to(logits.device)
            divergence += divergence_of(doubled(dense).log_softmax(-1), logp).tolist()
            agreement += int((dense.argmax(-1) == logits.argmax(-1)).sum())
    check_finite([*nll, *divergence], len(nll), cache_config, model.dtype)
    record: dict[str, Any] = {
        "tokens": len(nll),
        "nll": sum(nll),
        "nll_squares": sum(value * value for value in nll),
        "nll_by_position": _bin_sums(nll),
        "packed_read": sum(shares),
        "is_exact": is_exact,
        "kv_bytes": cache_bytes(cache),
        "kernel": sorted(set(cache.report().kernel)) if isinstance(cache, KVCache) else None,
    }
    if reference is not None:
        increases = [own - dense for own, dense in zip(nll, reference.nll, strict=True)]
        record |= {
            "increase": sum(increases),
            "increase_squares": sum(value * value for value in increases),
            "increase_by_position": _bin_sums(increases),
        }
    if divergence:
        record |= {
            "kl": sum(divergence),
            "kl_squares": sum(value * value for value in divergence),
            "kl_by_position": _bin_sums(divergence),
            "agreement": agreement,
        }
    record["seconds"] = time.perf_counter() - started
    return record, Reference(nll, torch.cat(kept) if keep_logits else None)


def bin_edges(tokens: int) -> list[int]:
    """Return the ends of at most `BINS` parts of nearly equal length, from 0 to `tokens`."""
    parts = min(BINS, tokens)
    return [index * tokens // parts for index in range(parts + 1)]


def _bin_sums(values: list[float]) -> list[float]:
    edges = bin_edges(len(values))
    return [sum(values[low:high]) for low, high in pairwise(edges)]


def check_finite(
    values: Sequence[float], tokens: int, cache_config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Refuse to sum up predictions that are no numbers: a NaN has its highest logit where any other has.

    Args:
        values (`Sequence[float]`): What was measured of the predictions: of each, the negative log-likelihood
            of the true token and perhaps the divergence from the dense run.
        tokens (`int`): How many were predicted.
        cache_config (`Mapping`): The cache they were made with.
        dtype (`torch.dtype`): Of the model.

    Raises:
        NotFiniteError: If one of them is not finite.
    """
    wrong = {index % tokens for index, value in enumerate(values) if not math.isfinite(value)}
    refuse_wrong(len(wrong), tokens, cache_config, dtype)


def divergence_of(dense: Tensor, other: Tensor) -> Tensor:
    """KL(dense || other) of log-probabilities `(n, vocabulary)`, in nats; impossible tokens count nothing.

    Args:
        dense (`torch.Tensor` of shape `(n, vocabulary)`): Of the dense run.
        other (`torch.Tensor` of shape `(n, vocabulary)`): Of the run that is compared with it.

    Returns:
        `torch.Tensor` of shape `(n,)`: One for each token.
    """
    return (dense.exp() * (dense - other)).masked_fill(dense == -torch.inf, 0.0).sum(-1)
