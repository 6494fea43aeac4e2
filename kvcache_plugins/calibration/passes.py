"""The two passes over the samples: ranges of keys, then histograms of what is normalized by them.

Nothing of the size of tokens times channels is kept from one sample to the next, and of a backward pass only
the gradient of the layer it has reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..device_dtypes import doubled
from ..layers.nonuniform import outliers_per_side
from ..models.cache_argument import as_argument
from ..models.decoder import decoder_only_config
from ..runs.progress import Progress, silent
from .histograms import Normalized, normalize_keys, normalize_values, squared_gradient
from .recording import CalibratedLayer, RecordingCache
from .statistics import Statistics

__all__ = ["observe_ranges", "observe_weights", "run_passes"]


def run_passes(
    model: Any,
    samples: Tensor,
    layers: dict[int, CalibratedLayer],
    statistics: Statistics,
    *,
    outlier_fraction: float,
    sink_length: int,
    weight: str,
    progress: Progress = silent,
) -> None:
    """Fill the statistics with what they lack.

    Args:
        model (`PreTrainedModel`): In evaluation mode; its weights stay as they are.
        samples (`torch.Tensor` of shape `(num_samples, sequence_length)`): Token ids.
        layers (`dict[int, CalibratedLayer]`): Layers to observe.
        statistics (`Statistics`): What was observed so far.
        outlier_fraction (`float`): Share of outliers of a vector.
        sink_length (`int`): First tokens of a sample that take no part.
        weight (`str`): `"fisher_scale"`, `"fisher"` or `"none"`.
        progress (`Progress`): Told of every sample of every pass.

    Raises:
        ValueError: If keys or gradients are not finite.
    """
    device = model.get_input_embeddings().weight.device
    with _frozen(model):
        for step in range(2 * len(samples)):
            which, index = divmod(step, len(samples))
            progress(("ranges of keys", "weights of errors")[which])
            if step >= statistics.steps:
                sample = samples[index : index + 1].to(device)
                if which == 0:
                    observe_ranges(model, sample, layers, statistics, sink_length)
                else:
                    observe_weights(model, sample, layers, statistics, outlier_fraction, sink_length, weight)
                statistics.finish_step()
            progress(("ranges of keys", "weights of errors")[which], advance=1)


def observe_ranges(
    model: Any, sample: Tensor, layers: dict[int, CalibratedLayer], statistics: Statistics, sink_length: int
) -> None:
    """First pass over a sample `(1, T)`: extremes of keys before the rotary embedding, largest magnitudes."""

    def observe(layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx in layers:
            layer = statistics.layers[layer_idx]
            layer.key_range.add(layers[layer_idx].unrotate(keys)[0, :, sink_length:])
            layer.add_magnitudes("key", keys)
            layer.add_magnitudes("value", values)
        return keys, values

    cache = RecordingCache(decoder_only_config(model.config), observe)
    with torch.no_grad():
        model.base_model(input_ids=sample, **as_argument(cache), use_cache=True)


def observe_weights(
    model: Any,
    sample: Tensor,
    layers: dict[int, CalibratedLayer],
    statistics: Statistics,
    outlier_fraction: float,
    sink_length: int,
    weight: str,
) -> None:
    """Second pass over a sample `(1, T)`: normalized keys and values with the weights of their errors.

    The loss is the sum of the tokens', not their mean, so that the gradients of fp16 do not vanish; a common
    factor of all weights has no effect.
    """

    def count(layer_idx: int, side: str, states: Tensor, gradient: Tensor | None) -> None:
        layer = statistics.layers[layer_idx]
        if side == "key":
            states = layers[layer_idx].unrotate(states)
            # the rotation is orthogonal: the gradient turns back as the key itself does
            gradient = None if gradient is None else layers[layer_idx].unrotate(gradient)
        states = states[0, :, sink_length:].float()
        if side == "key":
            normalized = normalize_keys(states, *layer.key_range.bounds())
        else:
            size = states.shape[0] * states.shape[-1]
            normalized = normalize_values(states, outliers_per_side(outlier_fraction, size))
        cut = None if gradient is None else gradient[0, :, sink_length:]
        layer.histograms[side].add(normalized, _weights(normalized, cut, weight))

    def observe(layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx not in layers:
            return keys, values
        if weight == "none":
            count(layer_idx, "key", keys, None)
            count(layer_idx, "value", values, None)
            return keys, values
        return watch(layer_idx, "key", keys), watch(layer_idx, "value", values)

    def watch(layer_idx: int, side: str, states: Tensor) -> Tensor:
        if not states.requires_grad:  # the first layer: with frozen weights, gradients begin here
            states = states.detach().requires_grad_()
        plain = states.detach()  # the hook must not hold the tensor that holds the hook
        states.register_hook(lambda gradient: count(layer_idx, side, plain, gradient))
        return states

    cache = RecordingCache(decoder_only_config(model.config), observe)
    with torch.set_grad_enabled(weight != "none"):
        if weight == "none":
            model.base_model(input_ids=sample, **as_argument(cache), use_cache=True)
        else:
            logits = model(input_ids=sample, **as_argument(cache), use_cache=True).logits[0, :-1]
            targets = sample[0, 1:].to(logits.device)
            nn.functional.cross_entropy(logits.float(), targets, reduction="sum").backward()


def _weights(normalized: Normalized, gradient: Tensor | None, weight: str) -> Tensor:
    """fp64 weights of the numbers: what an error of one unit of `u` costs the loss, to second order."""
    if gradient is None:
        return doubled(torch.ones_like(normalized.numbers))
    fisher = squared_gradient(gradient)
    return fisher * doubled(normalized.scale) ** 2 if weight == "fisher_scale" else fisher


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Ask for no gradients of weights meanwhile."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
