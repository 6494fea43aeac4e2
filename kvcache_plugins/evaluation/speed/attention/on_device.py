"""One point of `bench attention` on a GPU: the device's time to attend, and to append a token.

Attention over what the append of a token left is recorded as a CUDA graph over several layers of the same
content, so many that none lies in the GPU's cache, and timed in turn with the dense ways over as many states.
Appending is recorded by itself, over whole periods of encoding, of dense states as well (where it is a copy).
`median_ms` is the sum of both. Beside it stands what both take as a program makes them, launch by launch,
which is what `generate()` does today.

Transformers' own caches decode everything in `update` and decide anew in Python at every call: they are timed
as whole steps, as launched, and have no append of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ....layers.base import PackedLayer
from ....runs.labels import DENSE, cache_label
from ....runs.progress import Progress
from ..options import AttentionOptions
from ..timing import Spread, time_in_turn
from .device_baselines import DenseWays, dense_ways, record_ways
from .device_timing import DeviceTimer, Recording
from .layers import LayerStep, filled_layer, layer_bytes, period_of
from .rows import result_row
from .states import AttentionShape, States

__all__ = ["failure", "measure_on_device"]

_LEAST_TOKENS = 64
"""Tokens appended at least to know the time of one; a window moves up every few tokens."""
_WINDOWS = 3
"""Windows of appending a recorded layer goes through; the one that is only launched goes through fewer."""
_STEPS = 16
"""Whole steps launched to know the CPU's time of one."""
_LONGEST_REASON = 400


@dataclass(frozen=True)
class _Append:
    """What a token's append takes: of the device, and of the CPU that launches it."""

    device_ms: float
    host_ms: float
    note: str | None = None


@dataclass(frozen=True)
class _Candidate:
    """A cache at a point, with attention over as many layers as there are sets."""

    steps: list[LayerStep]
    attention: Recording
    error: float
    kv_bytes: int


def measure_on_device(
    config: PreTrainedConfig,
    options: AttentionOptions,
    cache_configs: list[dict[str, Any]],
    shape: AttentionShape,
    timer: DeviceTimer,
    copy_gb_per_s: float,
    where: str,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time the dense ways and every cache at one length and batch size.

    Args:
        config (`PreTrainedConfig`): The decoder's.
        options (`AttentionOptions`): Repeats and warm-up.
        cache_configs (`list[dict]`): The caches, without the dense one.
        shape (`AttentionShape`): The point.
        timer (`DeviceTimer`): Of the GPU.
        copy_gb_per_s (`float`): Bandwidth of a copy there.
        where (`str`): Name of the point, for the progress.
        progress (`Progress`): Told of every cache and round.

    Returns:
        `tuple[list, list]`: The rows, the dense one first, and the caches that failed, as entries of
        `skipped`: on a machine that was got for an hour, one of them need not end the run. Beyond the keys of
        [`result_row`], rows have `attention_ms`, `append_ms` and `append_host_ms` (None for transformers'
        caches), `host_ms` (the CPU's time of a whole step), `fraction_of_copy` (bytes read per
        `attention_ms`, of the bandwidth of a copy; per `median_ms` without one), `sets` and `note`; the dense
        row has `baseline_attention_ms` and `baselines_not_run` with the reasons.

    Raises:
        RuntimeError: If no dense way runs.
    """
    timer.release()  # what the point before took
    sets = [States.random(shape, timer.device, seed) for seed in range(timer.sets(shape.dense_bytes))]
    candidates: dict[int, _Candidate] = {}
    failures: list[dict[str, Any]] = []
    for index, cache_config in enumerate(cache_configs):
        progress(f"{where}: {cache_label(cache_config)}")
        with _listed(failures, cache_config, where):
            candidates[index] = _candidate(config, cache_config, shape, sets, timer)
        progress(where, advance=1)
    progress(f"{where}: dense")
    dense = record_ways(*dense_ways(shape, timer.device), sets, timer)
    spreads = time_in_turn(
        {f"dense {name}": recording for name, recording in dense.recordings.items()}
        | {f"cache {index}": candidate.attention for index, candidate in candidates.items()},
        repeats=options.repeats,
        warm_up=options.warm_up,
        stopwatch=timer.milliseconds,
        advance=lambda: progress(f"{where}: timing", advance=1),
    )
    append = _append(timer, [_dense_append(states) for states in sets[:2]], _LEAST_TOKENS, options.repeats)
    attention = {name: spreads[f"dense {name}"] for name in dense.recordings}
    baselines = {name: spread.plus(append.device_ms) for name, spread in attention.items()}
    rows = [_dense_row(shape, dense, baselines, attention, append)]
    best_call, dense_append = dense.calls[rows[0]["kernel"]], _dense_append(sets[0])
    rows[0] |= {"sets": len(sets), "host_ms": _host_ms(timer, lambda: (dense_append(), best_call()))}
    for index, candidate in candidates.items():
        cache_config = cache_configs[index]
        progress(f"{where}: {cache_label(cache_config)}")
        kernel = candidate.steps[0].kernel
        spread = spreads[f"cache {index}"]
        with _listed(failures, cache_config, where):
            own = _layer_append(timer, candidate, shape, options.repeats)
            total = spread if own is None else spread.plus(own.device_ms)
            row = result_row(cache_config, shape, baselines, total, candidate.kv_bytes, candidate.error)
            row |= {"kernel": kernel, **_parts(None if own is None else spread, own)}
            row["host_ms"] = _host_ms(timer, candidate.steps[-1])  # the one that was not recorded
            row["sets"] = len(candidate.steps)
            row["note"] = _note(candidate.attention.note, own, _warm_sets(candidate, timer))
            rows.append(row)
    for row in rows:
        ms = row["median_ms"] if row["attention_ms"] is None else row["attention_ms"]
        row["fraction_of_copy"] = row["kv_bytes"] / ms / 1e6 / copy_gb_per_s
    return rows, failures


@contextmanager
def _listed(failures: list[dict[str, Any]], cache_config: dict[str, Any], where: str) -> Iterator[None]:
    """Turn the failure of a cache, whatever it is, into an entry of `failures`."""
    try:
        yield
    except Exception as error:
        failures.append(failure(cache_config, where, error))


def failure(cache_config: dict[str, Any], where: str, error: Exception) -> dict[str, Any]:
    """Describe why a cache failed at a point: an entry of `skipped`."""
    said = " ".join(str(error).split())[:_LONGEST_REASON]
    reason = f"failed at {where}: {type(error).__name__}: {said}"
    return {"cache_config": cache_config, "reason": reason, "is_failure": True}


def _candidate(
    config: PreTrainedConfig,
    cache_config: dict[str, Any],
    shape: AttentionShape,
    sets: Sequence[States],
    timer: DeviceTimer,
) -> _Candidate:
    """Fill layers, append a token to each, and record attention over what that left."""

    def step(index: int) -> LayerStep:
        states = sets[index % len(sets)]
        layer = filled_layer(config, cache_config, shape, states, _room)
        return LayerStep(layer, states)

    steps = [step(0)]
    left = [steps[0].append()]
    error = steps[0].error(*left[0])
    kv_bytes = layer_bytes(config, cache_config, shape, steps[0].layer)
    for index in range(1, timer.sets(kv_bytes)):
        steps.append(step(index))
        left.append(steps[-1].append())
    if not isinstance(steps[0].layer, PackedLayer):
        note = "timed as launched, append and all: transformers' caches decode in their update"
        attention = Recording(lambda: [each() for each in steps], len(steps), is_graph=False, note=note)
    else:
        attention = timer.record([_attention(*pair) for pair in zip(steps, left, strict=True)])
    return _Candidate(steps, attention, error, kv_bytes)


def _attention(step: LayerStep, left: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    return lambda: step.attend(*left)


def _room(period: int) -> int:
    return 1 + _WINDOWS * _window(period) + _STEPS


def _window(period: int) -> int:
    """Whole periods of at least `_LEAST_TOKENS` tokens."""
    return period * -(-_LEAST_TOKENS // period)


def _layer_append(
    timer: DeviceTimer, candidate: _Candidate, shape: AttentionShape, repeats: int
) -> _Append | None:
    first, *_, last = candidate.steps
    if not isinstance(first.layer, PackedLayer):
        return None
    tokens = _window(period_of(first.layer, shape))
    return _append(timer, [first.append, last.append], tokens, repeats)


def _append(
    timer: DeviceTimer, appends: Sequence[Callable[[], object]], tokens: int, repeats: int
) -> _Append:
    """Time the append of a token over `tokens` of them.

    Args:
        timer (`DeviceTimer`): What times.
        appends (`Sequence[Callable]`): To two layers. One is recorded and the other launched, because what
            fails half-way through a capture leaves a layer in no state to go on.
        tokens (`int`): Whole periods.
        repeats (`int`): Timed runs of the recording.
    """
    recorded, launched = appends

    def window() -> None:
        for _ in range(tokens):
            launched()

    window()
    host_ms, device_ms = timer.window(window)
    recording = timer.record([recorded] * tokens)
    if recording.is_graph:
        device_ms = tokens * statistics.median(timer.milliseconds(recording) for _ in range(repeats))
    return _Append(device_ms / tokens, host_ms / tokens, recording.note)


def _dense_append(states: States) -> Callable[[], object]:
    key, value = states.new

    def append() -> None:
        states.keys[:, :, -1:].copy_(key)
        states.values[:, :, -1:].copy_(value)

    return append


def _host_ms(timer: DeviceTimer, step: Callable[[], object]) -> float:
    """The CPU's time of a whole step, launch by launch."""

    def steps() -> None:
        for _ in range(_STEPS):
            step()

    return timer.window(steps)[0] / _STEPS


def _dense_row(
    shape: AttentionShape,
    dense: DenseWays,
    baselines: dict[str, Spread],
    attention: dict[str, Spread],
    append: _Append,
) -> dict[str, Any]:
    best = min(baselines, key=lambda name: baselines[name].median_ms)
    row = result_row(DENSE, shape, baselines, baselines[best], shape.dense_bytes, dense.errors[best])
    return row | {
        "kernel": best,
        **_parts(attention[best], append),
        "note": _note(dense.recordings[best].note, append, None),
        "baseline_spread_ms": {name: [spread.p20_ms, spread.p80_ms] for name, spread in baselines.items()},
        "baseline_attention_ms": {name: spread.median_ms for name, spread in attention.items()},
        "baselines_not_run": dense.not_run,
    }


def _parts(attention: Spread | None, append: _Append | None) -> dict[str, float | None]:
    return {
        "attention_ms": None if attention is None else attention.median_ms,
        "append_ms": None if append is None else append.device_ms,
        "append_host_ms": None if append is None else append.host_ms,
    }


def _warm_sets(candidate: _Candidate, timer: DeviceTimer) -> str | None:
    if len(candidate.steps) * candidate.kv_bytes >= 2 * timer.cache_bytes():
        return None
    return "so small that it stays in the GPU's cache"


def _note(attention: str | None, append: _Append | None, size: str | None) -> str | None:
    notes = [attention and f"attention {attention}", append and append.note and f"append {append.note}", size]
    return "; ".join(note for note in notes if note) or None
