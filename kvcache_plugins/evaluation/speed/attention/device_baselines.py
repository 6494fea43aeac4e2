"""The dense ways to attend on a GPU: those of every device, SDPA held to one backend each, and FlashInfer.

Which of them run depends on the GPU, the dtype and the head size. One that does not is named with its reason,
and so is one whose output is not attention: neither may be what a cache is compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .dense_attention import BASELINES, exact_attention, max_rel_error
from .device_timing import DeviceTimer, Recording
from .flashinfer_baseline import flashinfer_ways
from .states import AttentionShape, States

__all__ = ["DenseWays", "dense_ways", "record_ways"]

_Way = Callable[[States], Callable[[], Tensor]]
"""Prepares attention over states, outside of what is timed; the output is `(B, Hq, 1, Dv)`."""

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_SDPA_FORMS = ("sdpa_enable_gqa", "sdpa_packed_query")
_LARGEST_ERROR = 0.05
"""Relative to the largest entry; half-precision attention is below 0.02, another function's far above."""
_LONGEST_REASON = 240


@dataclass(frozen=True)
class DenseWays:
    """The dense ways that ran at one point.

    Args:
        recordings (`dict[str, Recording]`): Attention over all sets of states, by name.
        calls (`dict[str, Callable]`): Attention over the first set.
        errors (`dict[str, float]`): Of their outputs, against fp32.
        not_run (`dict[str, str]`): Reasons of the others.
    """

    recordings: dict[str, Recording]
    calls: dict[str, Callable[[], Tensor]]
    errors: dict[str, float]
    not_run: dict[str, str]


def dense_ways(shape: AttentionShape, device: torch.device) -> tuple[dict[str, _Way], dict[str, str]]:
    """Return the ways to try at a point, and the reasons of those that are not even there."""
    ways: dict[str, _Way] = {name: partial(_plain, attend) for name, attend in BASELINES.items()}
    for form in _SDPA_FORMS:
        for name, backend in _BACKENDS.items():
            ways[f"{form}_{name}"] = partial(_pinned, BASELINES[form], backend)
    others, reasons = flashinfer_ways(shape, device)
    return ways | others, reasons


def record_ways(
    ways: Mapping[str, _Way], reasons: Mapping[str, str], sets: Sequence[States], timer: DeviceTimer
) -> DenseWays:
    """Record attention of every way that runs over every set of states.

    Args:
        ways (`Mapping[str, Callable]`): What to try.
        reasons (`Mapping[str, str]`): Of ways that are not there; they are kept.
        sets (`Sequence[States]`): Whose turn it is.
        timer (`DeviceTimer`): What records.

    Raises:
        RuntimeError: If none runs.
    """
    found = DenseWays({}, {}, {}, dict(reasons))
    first = sets[0]
    exact = exact_attention(first.query, first.keys, first.values)
    for name, way in ways.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                calls = [way(states) for states in sets]
                error = max_rel_error(calls[0](), exact)
                if error <= _LARGEST_ERROR:
                    found.recordings[name] = timer.record(calls)
                    found.calls[name], found.errors[name] = calls[0], error
                    continue
                found.not_run[name] = f"its output is not attention: off by {error:.2g} of the largest entry"
            except Exception as failure:  # another library's, or torch's own: one way less to compare with
                found.not_run[name] = _reason(failure, [str(warning.message) for warning in caught])
        timer.release()
    if not found.recordings:
        raise RuntimeError(f"no dense attention runs on {timer.device}: {found.not_run}")
    return found


def _plain(attend: Callable[[Tensor, Tensor, Tensor], Tensor], states: States) -> Callable[[], Tensor]:
    return partial(attend, states.query, states.keys, states.values)


def _pinned(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], backend: SDPBackend, states: States
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return attend(states.query, states.keys, states.values)

    return call


def _reason(failure: Exception, warned: Sequence[str]) -> str:
    """Say why a way failed; SDPA warns of it, a line for each backend, those switched off among them."""
    lines = str(failure).splitlines()
    words = [lines[0] if lines and lines[0] else type(failure).__name__]
    for text in warned:
        text = text.partition(" (Triggered internally")[0].strip()
        if not text.endswith("because:") and "disabled" not in text and text not in words:
            words.append(text)
    reason = " ".join(words)
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
