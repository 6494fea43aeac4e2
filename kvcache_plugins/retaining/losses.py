"""What retaining heads are trained to lower, and how good they are: Locret (arXiv 2410.01805), as published.

Rows of a batch count alike, whatever their lengths: a batch of two, two processes with one each and two
accumulated steps give the same gradients, and a batch of one is the authors' own recipe.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["SMOOTHNESS", "layer_loss", "row_losses", "top_recall"]

SMOOTHNESS = 0.0025
"""Weight of the smoothness term, which is summed over the layers."""


def layer_loss(scores: Tensor, labels: Tensor, mask: Tensor | None, num_layers: int) -> tuple[Tensor, Tensor]:
    """Return what one layer adds to the loss: `SmoothL1 / num_layers` and `0.0025 * MSE` of neighbours.

    The loss of a model is the sum of both over its layers: the mean of the first over layers, the sum of the
    second, as the authors' code has it.

    Args:
        scores (`torch.Tensor` of shape `(B, H, n)`): What a head predicts, fp32.
        labels (`torch.Tensor` of shape `(B, H, n)`): What it should.
        mask (`torch.Tensor` of shape `(B, n)`, *optional*): Which tokens count; all by default.
        num_layers (`int`): Layers of the model.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Regression (beta 1) and smoothness, scalars: means over the rows.
    """
    regression, smoothness = row_losses(scores, labels, mask, num_layers)
    return regression.mean(), smoothness.mean()


def row_losses(scores: Tensor, labels: Tensor, mask: Tensor | None, num_layers: int) -> tuple[Tensor, Tensor]:
    """Return what one layer adds to the loss of every row, `(B,)` each: see [`layer_loss`]."""
    if mask is None:
        mask = torch.ones(scores.shape[0], scores.shape[-1], dtype=torch.bool, device=scores.device)
    weights = mask.to(scores.dtype)[:, None]
    labels = labels.masked_fill(~mask[:, None], 0.0)  # what lies beyond a row may be anything, even infinite
    # pads may predict anything, too: their errors are multiplied by zero, which needs them finite
    errors = F.smooth_l1_loss(scores.masked_fill(~mask[:, None], 0.0), labels, reduction="none")
    regression = _means_of_rows(errors, weights) / num_layers
    pairs = weights[..., 1:] * weights[..., :-1]
    steps = (scores[..., 1:] - scores[..., :-1]).square()
    smoothness = SMOOTHNESS * _means_of_rows(steps.masked_fill(pairs == 0, 0.0), pairs)
    return regression, smoothness


@torch.no_grad()
def top_recall(scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return which part of the tokens with the largest labels is among those with the largest scores.

    Of either a tenth of a row's tokens is taken, at least one.

    Args:
        scores (`torch.Tensor` of shape `(B, H, n)`): What a head predicts.
        labels (`torch.Tensor` of shape `(B, H, n)`): What it should.
        mask (`torch.Tensor` of shape `(B, n)`, *optional*): Which tokens count.

    Returns:
        `torch.Tensor` of shape `(B,)`: Mean over heads, between 0 and 1; NaN for a row without tokens.
    """
    rows = []
    for row in range(scores.shape[0]):
        chosen = slice(None) if mask is None else mask[row]
        predicted, wanted = scores[row][:, chosen], labels[row][:, chosen]
        length = predicted.shape[-1]
        if length == 0:
            rows.append(scores.new_tensor(math.nan))
            continue
        count = max(1, length // 10)
        picked = torch.zeros_like(predicted, dtype=torch.bool)
        picked.scatter_(-1, predicted.topk(count, dim=-1).indices, True)
        rows.append(picked.gather(-1, wanted.topk(count, dim=-1).indices).float().mean())
    return torch.stack(rows)


def _means_of_rows(errors: Tensor, weights: Tensor) -> Tensor:
    """Of every row, the mean over its heads and counted tokens."""
    counts = (weights.sum((1, 2)) * errors.shape[1]).clamp_min(1.0)
    return (errors * weights).sum((1, 2)) / counts
