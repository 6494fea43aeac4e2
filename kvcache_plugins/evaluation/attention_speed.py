"""Speed of one decode step of attention: a packed layer against the dense ways to do the same.

A step is what one layer does for one new token: take its key and value (`layer.update`, encoding included)
and attend over everything held. Dense and packed steps are timed in turn, in one run, on states that lie in
no processor cache.

Encoding that falls due only every so many tokens would hide from a median. It is timed apart, over whole
periods, and its share per token (`encode_ms`) is added to the times of the step. Transformers' own caches
re-encode everything they hold whenever their residual window is full; that is left out, in their favour.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedConfig

from ..cache import KVCache
from ..layers.base import PackedLayer
from ..layers.handle import KVHandle
from ..models.facts import decoder_config
from ..models.layer_plan import key_value_heads
from ..models.presets import preset_config
from .caches import cache_bytes, new_cache, why_unavailable
from .dense_attention import BASELINES, exact_attention, max_rel_error
from .labels import DENSE, cache_label
from .progress import Progress, silent
from .results import build_document
from .speed_options import DTYPES, AttentionOptions
from .timing import Spread, time_in_turn

__all__ = ["measure_attention"]

_PERIODS = 3
"""Whole periods over which encoding is timed."""


@dataclass(frozen=True)
class _Shape:
    """An attention layer: `query` is `(B, Hq, 1, D)`, keys and values are `(B, Hkv, T, D)`."""

    batch_size: int
    num_attention_heads: int
    num_key_value_heads: int
    key_dim: int
    value_dim: int
    length: int
    dtype: torch.dtype

    @property
    def values(self) -> int:
        """Numbers held after the step."""
        width = self.key_dim + self.value_dim
        return self.batch_size * self.num_key_value_heads * (self.length + 1) * width

    @property
    def dense_bytes(self) -> int:
        return self.values * self.dtype.itemsize


@dataclass(frozen=True)
class _States:
    """The query and the dense keys and values, whose last token is the new one."""

    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, shape: _Shape) -> _States:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, tokens: int, width: int) -> Tensor:
            states = torch.empty(shape.batch_size, heads, tokens, width, dtype=shape.dtype)
            return states.normal_(generator=generator)

        heads, tokens = shape.num_key_value_heads, shape.length + 1
        return cls(
            # a longer query makes attention attend to something, instead of averaging everything to nothing
            2 * normal(shape.num_attention_heads, 1, shape.key_dim),
            normal(heads, tokens, shape.key_dim),
            normal(heads, tokens, shape.value_dim),
        )

    @property
    def past(self) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, :-1], self.values[:, :, :-1]

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, -1:].clone(), self.values[:, :, -1:].clone()


class _Step:
    """One decode step of a cache layer, ours or transformers'."""

    def __init__(self, layer: Any, states: _States) -> None:
        self.layer, self.query, self.new = layer, states.query, states.new

    def __call__(self) -> Tensor:
        keys, values = self.layer.update(*self.new)
        return F.scaled_dot_product_attention(self.query, keys, values, enable_gqa=True)

    def error(self) -> float:
        """Run one step and compare it with fp32 attention over the same tokens, decoded."""
        keys, values = self.layer.update(*self.new)
        output = F.scaled_dot_product_attention(self.query, keys, values, enable_gqa=True)
        return max_rel_error(output, exact_attention(self.query, _decoded(keys), _decoded(values)))

    @property
    def period(self) -> int:
        """Tokens after which the encoding of a packed layer repeats itself; 1 for others."""
        if not isinstance(self.layer, PackedLayer):
            return 1
        key, value = self.new
        streams = self.layer.key_stream(key.shape[3]), self.layer.value_stream(value.shape[3])
        return max(stream.block_length for stream in streams)

    def encode_ms(self) -> float:
        """Time per token of the encoding that most steps do not see."""
        if self.period == 1:
            return 0.0
        periods = [[self._update_ms() for _ in range(self.period)] for _ in range(_PERIODS)]
        # an interruption hits a place in one period only, the encoding comes at the same place in all
        places = [statistics.median(times) for times in zip(*periods, strict=True)]
        return max(0.0, statistics.fmean(places) - float(statistics.median(places)))

    def _update_ms(self) -> float:
        started = time.perf_counter()
        self.layer.update(*self.new)
        return 1000 * (time.perf_counter() - started)


def measure_attention(options: AttentionOptions, progress: Progress = silent) -> dict[str, Any]:
    """Time every cache at every length and batch size.

    Args:
        options (`AttentionOptions`): What to measure.
        progress (`Progress`): Told of every finished round.

    Returns:
        `dict`: The document of `results.json`.

    Raises:
        ValueError: If an option of a cache is wrong.
    """
    config = _model_config(options)
    skipped = [
        {"cache_config": cache_config, "reason": reason}
        for cache_config in options.cache_configs
        if (reason := why_unavailable(config, cache_config))
    ]
    left_out = [entry["cache_config"] for entry in skipped]
    measured = [c for c in options.cache_configs if c not in left_out and c != DENSE]
    for cache_config in measured:
        _find_layer(new_cache(config, cache_config), cache_config)  # nothing to measure: say so now
    results: list[dict[str, Any]] = []
    with _threads(options.threads), torch.inference_mode():
        for length in options.lengths:
            for batch_size in options.batch_sizes:
                results += _measure_point(config, options, measured, length, batch_size, progress)
        return build_document(
            "bench attention", results, settings=options.settings() | _heads(config), skipped=skipped
        )


def _measure_point(
    config: PreTrainedConfig,
    options: AttentionOptions,
    cache_configs: list[dict[str, Any]],
    length: int,
    batch_size: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    started = time.perf_counter()
    heads = _heads(config)
    shape = _Shape(batch_size, **heads, length=length, dtype=getattr(torch, DTYPES[options.dtype]))
    where = f"{length} tokens" + (f" x {batch_size}" if batch_size > 1 else "")
    progress(f"{where}: dense")
    states = _States.random(shape)
    rounds = options.repeats + options.warm_up
    steps: list[_Step] = []
    for cache_config in cache_configs:
        progress(f"{where}: {cache_label(cache_config)}")
        steps.append(_filled(config, cache_config, states, length + rounds))
        progress(where, advance=1)
    errors = [step.error() for step in steps]
    candidates: dict[str, Callable[[], object]] = {
        f"dense {name}": _dense_step(attend, states) for name, attend in BASELINES.items()
    }
    candidates |= {f"cache {index}": step for index, step in enumerate(steps)}
    spreads = time_in_turn(
        candidates,
        repeats=options.repeats,
        warm_up=options.warm_up,
        device=torch.device("cpu"),
        advance=lambda: progress(f"{where}: timing", advance=1),
    )
    baselines = {name: spreads[f"dense {name}"] for name in BASELINES}
    best = min(baselines, key=lambda name: baselines[name].median_ms)
    exact = exact_attention(states.query, states.keys, states.values)
    error = max_rel_error(BASELINES[best](states.query, states.keys, states.values), exact)
    rows = [_row(DENSE, shape, baselines, baselines[best], shape.dense_bytes, error)]
    rows[0] |= {
        "kernel": best,
        "encode_ms": 0.0,
        "baseline_spread_ms": {name: [spread.p20_ms, spread.p80_ms] for name, spread in baselines.items()},
    }
    for index, (cache_config, step) in enumerate(zip(cache_configs, steps, strict=True)):
        progress(f"{where}: {cache_label(cache_config)}")
        kernel = step.layer.kernel if isinstance(step.layer, PackedLayer) else "transformers"
        encode_ms = step.encode_ms()
        spread = spreads[f"cache {index}"]
        spread = replace(
            spread,
            median_ms=spread.median_ms + encode_ms,
            p20_ms=spread.p20_ms + encode_ms,
            p80_ms=spread.p80_ms + encode_ms,
        )
        kv_bytes = _kv_bytes(config, cache_config, shape, step.layer)
        row = _row(cache_config, shape, baselines, spread, kv_bytes, errors[index])
        rows.append(row | {"kernel": kernel, "encode_ms": encode_ms})
    for row in rows:
        row["seconds"] = (time.perf_counter() - started) / len(rows)  # they were measured together
    return rows


def _row(
    cache_config: dict[str, Any],
    shape: _Shape,
    baselines: Mapping[str, Spread],
    spread: Spread,
    kv_bytes: int,
    error: float,
) -> dict[str, Any]:
    best_ms = min(baseline.median_ms for baseline in baselines.values())
    return {
        "cache_config": dict(cache_config),
        "label": cache_label(dict(cache_config)),
        "length": shape.length,
        "batch_size": shape.batch_size,
        "median_ms": spread.median_ms,
        "p20_ms": spread.p20_ms,
        "p80_ms": spread.p80_ms,
        "baseline_ms": {name: baseline.median_ms for name, baseline in baselines.items()},
        "ratio_to_best_dense": spread.median_ms / best_ms,
        "ratio_to_sdpa_gqa": spread.median_ms / baselines["sdpa_enable_gqa"].median_ms,
        "gb_per_s": kv_bytes / spread.median_ms / 1e6,
        "kv_bytes": kv_bytes,
        "memory_fraction": kv_bytes / shape.dense_bytes,
        "bits_per_value": 8 * kv_bytes / shape.values,
        "max_rel_error": error,
    }


def _dense_step(attend: Callable[[Tensor, Tensor, Tensor], Tensor], states: _States) -> Callable[[], Tensor]:
    new_key, new_value = states.new

    def step() -> Tensor:
        states.keys[:, :, -1:] = new_key
        states.values[:, :, -1:] = new_value
        return attend(states.query, states.keys, states.values)

    return step


def _filled(
    config: PreTrainedConfig, cache_config: dict[str, Any], states: _States, final_length: int
) -> _Step:
    """Build a layer that holds the past, with room for all steps to come."""
    layer = _find_layer(new_cache(config, cache_config), cache_config)
    step = _Step(layer, states)
    if isinstance(layer, PackedLayer):
        layer.final_length = final_length + 1 + _PERIODS * step.period
    layer.update(*states.past)
    return step


def _kv_bytes(config: PreTrainedConfig, cache_config: dict[str, Any], shape: _Shape, layer: Any) -> int:
    """Bytes of a layer that holds the tokens of one step and has room for no more."""
    if not isinstance(layer, PackedLayer):
        return cache_bytes([layer])
    fresh = _find_layer(new_cache(config, cache_config, max_cache_length=shape.length + 1), cache_config)
    rows, heads = shape.batch_size, shape.num_key_value_heads
    with torch.device("meta"):  # where tensors have a shape and no data
        for tokens in (shape.length, 1):
            keys = torch.empty(rows, heads, tokens, shape.key_dim, dtype=shape.dtype)
            fresh.update(keys, torch.empty(rows, heads, tokens, shape.value_dim, dtype=shape.dtype))
    return int(fresh.kv_bytes)


def _find_layer(cache: Any, cache_config: dict[str, Any]) -> Any:
    """Return the first layer the cache packs."""
    if not isinstance(cache, KVCache):
        return cache.layers[0]
    for layer in cache.packed_layers:
        return layer
    raise ValueError(
        f"--cache_config {cache_config!r} packs no layer of this model, so there is nothing to time."
    )


def _model_config(options: AttentionOptions) -> PreTrainedConfig:
    if options.preset is not None:
        return preset_config(options.preset)
    assert options.model is not None
    config: PreTrainedConfig = decoder_config(AutoConfig.from_pretrained(options.model))
    return config


def _heads(config: PreTrainedConfig) -> dict[str, int]:
    kv_heads, key_dim, value_dim = key_value_heads(config, 0)
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": kv_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def _decoded(states: Tensor) -> Tensor:
    return states.tokens.dense(torch.float32) if isinstance(states, KVHandle) else states


@contextmanager
def _threads(count: int | None) -> Any:
    """Use `count` CPU threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
