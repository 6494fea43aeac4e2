"""The two passes against keys, values and gradients taken at the projections, before any rotation.

The oracle reads the outputs of `k_proj` and `v_proj` by hooks and all gradients of a sample at once, with
numpy's percentiles and k-means on the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache_plugins.calibration.fitting import fit_layers
from kvcache_plugins.calibration.passes import run_passes
from kvcache_plugins.calibration.recording import calibrated_layers
from kvcache_plugins.calibration.statistics import Statistics
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.models.layer_plan import key_value_heads
from kvcache_plugins.quantizers.kmeans import optimal_kmeans
from kvcache_plugins.testing import tiny_model

FAMILIES = ("llama", "glm4", "phi", "qwen2", "smollm3")
"""Half-split, interleaved and partial rotation, key biases, and layers without rotation."""
SINK, FRACTION = 2, 0.1
VOCABULARY = 256
Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def samples() -> Tensor:
    # no token twice: equal keys of the first layer would make the ends of a range a matter of rounding
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))[: 3 * 48].view(3, 48)


def observe(model: Any, samples: Tensor, folder: Path, weight: str, fraction: float = FRACTION) -> Statistics:
    layers = calibrated_layers(model)
    tokens = samples.shape[1] - SINK
    statistics = Statistics(folder, {}, layers, tokens, len(samples), fraction / 2)
    run_passes(model, samples, layers, statistics, outlier_fraction=fraction, sink_length=SINK, weight=weight)
    return statistics


class Oracle:
    """Keys, values `(N, T, H, D)` before the rotation and gradients of the summed loss, by layer."""

    def __init__(self, model: Any, samples: Tensor) -> None:
        self.states: dict[tuple[int, str], list[Tensor]] = {}
        self.gradients: dict[tuple[int, str], list[Tensor]] = {}
        handles = []
        heads, head_dim, _ = key_value_heads(model.config, 0)
        for module in model.modules():
            index = getattr(module, "layer_idx", None)
            if index is None or not hasattr(module, "k_proj"):
                continue
            for side in ("key", "value"):
                projection = getattr(module, f"{side[0]}_proj")
                handles.append(projection.register_forward_hook(self._keep(index, side, heads, head_dim)))
        for sample in samples:
            model(input_ids=sample[None], labels=sample[None]).loss.mul(len(sample) - 1).backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()

    def _keep(self, index: int, side: str, heads: int, head_dim: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            shape = (output.shape[1], heads, head_dim)
            self.states.setdefault((index, side), []).append(output.detach().view(shape))
            gradients = self.gradients.setdefault((index, side), [])
            output.register_hook(lambda gradient: gradients.append(gradient.view(shape)))

        return hook

    def of(self, index: int, side: str) -> tuple[Floats, Floats]:
        """States and gradients `(N, T, H, D)` without the first tokens."""
        states, gradients = (torch.stack(kept[index, side]) for kept in (self.states, self.gradients))
        return states[:, SINK:].double().numpy(), gradients[:, SINK:].double().numpy()

    def ranges(self, index: int) -> tuple[Floats, Floats]:
        keys = self.of(index, "key")[0]
        flat = keys.reshape(-1, *keys.shape[2:])
        lower, upper = (np.percentile(flat, p, axis=0) for p in (50 * FRACTION, 100 - 50 * FRACTION))
        return lower, upper

    def points(self, index: int, side: str, weight: str) -> tuple[Floats, Floats]:
        """Normalized numbers within their range, and their weights."""
        states, gradients = self.of(index, side)
        if side == "key":
            lower, upper = self.ranges(index)
        else:
            vectors = np.sort(states.reshape(*states.shape[:2], -1), axis=-1)
            cut = max(1, round(FRACTION / 2 * vectors.shape[-1]))
            lower, upper = vectors[..., cut, None, None], vectors[..., -1 - cut, None, None]
        scale = np.broadcast_to((upper - lower) / 2, states.shape)
        inside = (states >= lower) & (states <= upper)
        weights = {
            "fisher_scale": gradients**2 * scale**2,
            "fisher": gradients**2,
            "none": np.ones_like(states),
        }
        numbers = (states - (upper + lower) / 2) / scale
        return numbers[inside], weights[weight][inside]


@pytest.mark.parametrize("family", FAMILIES)
def test_ranges_are_percentiles_before_the_rotation(family: str, samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model(family, vocab_size=VOCABULARY)
    statistics, oracle = observe(model, samples, tmp_path, "none"), Oracle(model, samples)
    for index, layer in statistics.layers.items():
        for found, expected in zip(layer.key_range.bounds(), oracle.ranges(index), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert len(statistics.layers) == model.config.num_hidden_layers


@pytest.mark.parametrize("weight", ["fisher_scale", "fisher", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_histograms_hold_the_weighted_numbers(
    family: str, weight: str, samples: Tensor, tmp_path: Path
) -> None:
    model = tiny_model(family, vocab_size=VOCABULARY)
    statistics, oracle = observe(model, samples, tmp_path, weight), Oracle(model, samples)
    for index, layer in statistics.layers.items():
        for side, histogram in layer.histograms.items():
            numbers, weights = oracle.points(index, side, weight)
            assert histogram.count.sum() == pytest.approx(len(numbers), abs=2)  # an end may fall either way
            edges = np.linspace(-1, 1, 17)
            expected, _ = np.histogram(numbers.clip(-1, 1), edges, weights=weights)
            found = histogram.mass.reshape(16, -1).sum(1)
            np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2 * expected.mean())
            assert histogram.mass.sum() == pytest.approx(weights.sum(), rel=1e-2)
            moment = (weights * numbers).sum() / (weights * np.abs(numbers)).sum()
            assert histogram.first.sum() / (weights * np.abs(numbers)).sum() == pytest.approx(
                moment, abs=5e-3
            )


@pytest.mark.parametrize("weight", ["fisher_scale", "none"])
def test_levels_are_those_of_the_numbers_themselves(weight: str, samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    tensors = fit_layers(observe(model, samples, tmp_path, weight), [2, 3], q_norm=False)
    oracle = Oracle(model, samples)
    for index in range(2):
        for side in ("key", "value"):
            numbers, weights = oracle.points(index, side, weight)
            matters = weights > weights.sum() * 1e-14  # far below what the comparison can see
            numbers, weights = numbers[matters], weights[matters]
            for bits in (2, 3):
                levels = tensors[f"layers.{index}.{side}_codebook_{bits}"].double().numpy()
                exact = optimal_kmeans(numbers, weights, 2**bits)
                cost, least = (
                    (weights * ((numbers[:, None] - centers) ** 2).min(1)).sum()
                    for centers in (levels, exact)
                )
                assert least <= cost <= least * 1.001


def test_weights_make_a_difference(samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    fitted = [
        fit_layers(observe(model, samples, tmp_path / weight, weight), [2], q_norm=False)
        for weight in ("fisher_scale", "fisher", "none")
    ]
    for name in ("layers.0.key_codebook_2", "layers.1.value_codebook_2"):
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert not torch.allclose(fitted[one][name], fitted[other][name], atol=1e-3)


def test_static_magnitudes_are_those_of_what_is_cached(samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    statistics = observe(model, samples, tmp_path, "none")
    with torch.no_grad():
        caches = [cache_of(model(sample[None], use_cache=True)) for sample in samples]
    for index, layer in statistics.layers.items():
        for side in ("key", "value"):
            cached = torch.cat([getattr(cache.layers[index], f"{side}s") for cache in caches])
            assert torch.equal(layer.absmax[side], cached.abs().amax(dim=(0, 2, 3)))


def test_no_outliers_gives_minimum_and_maximum(samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    statistics, oracle = observe(model, samples, tmp_path, "none", fraction=0.0), Oracle(model, samples)
    keys = oracle.of(0, "key")[0].reshape(-1, 2, 16)
    lower, upper = statistics.layers[0].key_range.bounds()
    np.testing.assert_allclose(lower.numpy(), keys.min(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(upper.numpy(), keys.max(0), rtol=1e-4, atol=1e-5)
    for histogram in statistics.layers[0].histograms.values():
        assert histogram.count.sum() == 3 * (48 - SINK) * 2 * 16, "nothing is left out"


def test_the_model_stays_as_it_was(samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    observe(model, samples, tmp_path, "fisher")
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * (
        len(list(model.parameters())) - 1
    )
    assert all(p.grad is None for p in model.parameters())


def test_sliding_and_linear_layers_are_left_out(samples: Tensor, tmp_path: Path) -> None:
    for family, expected in (("gemma3_text", {1}), ("qwen3_next", {1})):
        statistics = observe(
            tiny_model(family, vocab_size=VOCABULARY), samples, tmp_path / family, "fisher_scale"
        )
        assert statistics.layers.keys() == expected
        for histogram in statistics.layers[1].histograms.values():
            assert histogram.mass.sum() > 0


def test_half_precision_has_gradients(samples: Tensor, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, vocab_size=VOCABULARY)
    statistics = observe(model, samples, tmp_path, "fisher_scale")
    tensors = fit_layers(statistics, [3], q_norm=True)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert {"layers.0.key_levels_3", "layers.1.value_levels_3"} <= tensors.keys()


def test_a_layer_the_loss_does_not_depend_on(samples: Tensor, tmp_path: Path) -> None:
    model: Any = tiny_model("llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    statistics = observe(model, samples, tmp_path, "fisher")
    with pytest.raises(ValueError, match=r"does not depend on the keys of layer 1.*--weight none"):
        fit_layers(statistics, [2], q_norm=False)
