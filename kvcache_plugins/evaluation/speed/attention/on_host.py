"""One point of `bench attention` on the CPU: whole decode steps by the clock, in turn with the dense ways.

Encoding that falls due only every so many tokens would hide from a median. It is timed apart, over whole
periods, and its share per token (`encode_ms`) is added to the times of the step. Transformers' own caches
re-encode everything they hold whenever their residual window is full; that is left out, in their favor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ....runs.labels import DENSE, cache_label
from ....runs.progress import Progress
from ..options import AttentionOptions
from ..timing import HostStopwatch, time_in_turn
from .dense_attention import BASELINES, exact_attention, max_rel_error
from .layers import LayerStep, filled_layer, layer_bytes, period_of
from .rows import result_row
from .states import AttentionShape, States

__all__ = ["encode_ms", "measure_on_host"]

_PERIODS = 3
"""Whole periods over which encoding is timed."""


def measure_on_host(
    config: PreTrainedConfig,
    options: AttentionOptions,
    cache_configs: list[dict[str, Any]],
    shape: AttentionShape,
    where: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Time the dense ways and every cache at one length and batch size.

    Args:
        config (`PreTrainedConfig`): The decoder's.
        options (`AttentionOptions`): Repeats and warm-up.
        cache_configs (`list[dict]`): The caches, without the dense one.
        shape (`AttentionShape`): The point.
        where (`str`): Its name, for the progress.
        progress (`Progress`): Told of every cache and round.

    Returns:
        `list[dict]`: The dense row, then one per cache.
    """
    states = States.random(shape)
    rounds = options.repeats + options.warm_up
    steps: list[LayerStep] = []
    for cache_config in cache_configs:
        progress(f"{where}: {cache_label(cache_config)}")
        layer = filled_layer(
            config, cache_config, shape, states, lambda period: 1 + rounds + _PERIODS * period
        )
        steps.append(LayerStep(layer, states))
        progress(where, advance=1)
    errors = [step.error(*step.append()) for step in steps]
    candidates: dict[str, Callable[[], object]] = {
        f"dense {name}": _dense_step(attend, states) for name, attend in BASELINES.items()
    }
    candidates |= {f"cache {index}": step for index, step in enumerate(steps)}
    spreads = time_in_turn(
        candidates,
        repeats=options.repeats,
        warm_up=options.warm_up,
        stopwatch=HostStopwatch(),
        advance=lambda: progress(f"{where}: timing", advance=1),
    )
    baselines = {name: spreads[f"dense {name}"] for name in BASELINES}
    best = min(baselines, key=lambda name: baselines[name].median_ms)
    exact = exact_attention(states.query, states.keys, states.values)
    error = max_rel_error(BASELINES[best](states.query, states.keys, states.values), exact)
    rows = [result_row(DENSE, shape, baselines, baselines[best], shape.dense_bytes, error)]
    rows[0] |= {
        "kernel": best,
        "encode_ms": 0.0,
        "baseline_spread_ms": {name: [spread.p20_ms, spread.p80_ms] for name, spread in baselines.items()},
    }
    for index, (cache_config, step) in enumerate(zip(cache_configs, steps, strict=True)):
        progress(f"{where}: {cache_label(cache_config)}")
        kernel = step.kernel
        encode = encode_ms(step, period_of(step.layer, shape))
        kv_bytes = layer_bytes(config, cache_config, shape, step.layer)
        spread = spreads[f"cache {index}"].plus(encode)
        row = result_row(cache_config, shape, baselines, spread, kv_bytes, errors[index])
        rows.append(row | {"kernel": kernel, "encode_ms": encode})
    return rows


def encode_ms(step: LayerStep, period: int) -> float:
    """Time per token of the encoding that most steps do not see.

    Args:
        step (`LayerStep`): Of the layer.
        period (`int`): Tokens after which encoding repeats itself.
    """
    if period == 1:
        return 0.0
    periods = [[_append_ms(step) for _ in range(period)] for _ in range(_PERIODS)]
    # an interruption hits a place in one period only, the encoding comes at the same place in all
    places = [statistics.median(times) for times in zip(*periods, strict=True)]
    return max(0.0, statistics.fmean(places) - float(statistics.median(places)))


def _append_ms(step: LayerStep) -> float:
    started = time.perf_counter()
    step.append()
    return 1000 * (time.perf_counter() - started)


def _dense_step(attend: Callable[[Tensor, Tensor, Tensor], Tensor], states: States) -> Callable[[], Tensor]:
    new_key, new_value = states.new

    def step() -> Tensor:
        states.keys[:, :, -1:] = new_key
        states.values[:, :, -1:] = new_value
        return attend(states.query, states.keys, states.values)

    return step
