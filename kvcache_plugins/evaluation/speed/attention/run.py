"""Speed of one decode step of attention: a packed layer against the dense ways to do the same.

A step is what one layer does for one new token: take its key and value (`layer.update`, encoding included)
and attend over everything held. `median_ms` is the time of such a step, per token, of dense ways and caches
alike, on states that lie in no cache of the processor:

* on a CPU the median of whole steps by the clock, plus the share of encoding that falls due only every so
  many tokens (`on_host`);
* on a GPU the device's time: the median of attention over what the append left (`attention_ms`), plus the
  mean of appending over whole periods of encoding (`append_ms`), both as part of a CUDA graph where they can
  be; what Python and the launches take on the CPU stands beside it (`on_device`).

A point, of a length and a batch size, is kept when it is finished, and whole: what is compared has been timed
in turn. An interrupted run goes on behind its last one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ....runs.labels import DENSE
from ....runs.other_work import OtherWork
from ....runs.output_lock import writing_alone
from ....runs.progress import Progress, silent
from ....runs.results import build_document, write_results
from ...caches import new_cache, split_available
from ..devices import check_fits, choose_device, device_settings
from ..options import DTYPES, AttentionOptions
from ..outcomes import Outcomes
from .device_timing import DeviceTimer
from .layers import find_layer
from .on_device import failure, measure_on_device
from .on_host import measure_on_host
from .states import AttentionShape, heads_of, layer_config

__all__ = ["measure_attention"]


def measure_attention(
    options: AttentionOptions, progress: Progress = silent, output: Path | None = None
) -> dict[str, Any]:
    """Time every cache at every length and batch size.

    On a GPU a cache that fails is noted under `skipped`, as `is_failure`, and what fails while all are timed
    in turn ends the run there, with the points before it; on a CPU the first failure ends the run.

    Args:
        options (`AttentionOptions`): What to measure.
        progress (`Progress`): Told of every finished round.
        output (`Path`, *optional*): Directory of the results, made if need be, into which `results.json` is
            written; an unfinished run in it is continued.

    Returns:
        `dict`: The document of `results.json`.

    Raises:
        ValueError: If an option of a cache is wrong, the device does not exist, its memory holds no such
            layer, or the output directory holds another run or is being written to.
        RuntimeError: If no dense way runs on the device.
        OSError: If nothing can be written.
    """
    device = choose_device(options.device)
    config = layer_config(options)
    available, skipped = split_available(config, options.cache_configs)
    measured = [cache_config for cache_config in available if cache_config != DENSE]
    for cache_config in measured:
        find_layer(new_cache(config, cache_config), cache_config)  # nothing to measure: say so now
    heads = heads_of(config)
    dtype = getattr(torch, DTYPES[options.dtype])
    shapes = [
        AttentionShape(batch_size, **heads, length=length, dtype=dtype)
        for length in options.lengths
        for batch_size in options.batch_sizes
    ]
    for shape in shapes:
        asked = f"--lengths {shape.length} with --batch_sizes {shape.batch_size}: the dense cache of a layer"
        check_fits(shape.dense_bytes, device, asked)
    compared = [DENSE, *measured]
    settings = options.settings() | heads
    results: list[dict[str, Any]] = []
    with (
        nullcontext() if output is None else writing_alone(output),
        _threads(options.threads),
        _current(device),
        torch.inference_mode(),
    ):
        outcomes = Outcomes(output, options, config, device, compared)
        timer, other_work = _timer(device), OtherWork()
        if timer is not None:
            settings["copy_gb_per_s"] = _bandwidth(timer, outcomes)
        for shape in shapes:
            point = f"{shape.length} tokens, {shape.batch_size} rows"
            where = f"{shape.length} tokens" + (f" x {shape.batch_size}" if shape.batch_size > 1 else "")
            if (kept := _kept(outcomes, compared, point)) is not None:
                progress("finished before", advance=len(measured) + options.repeats + options.warm_up)
                results += kept
                continue
            progress(f"{where}: dense")
            started = time.perf_counter()
            if timer is None:
                rows = measure_on_host(config, options, measured, shape, where, progress)
            else:
                bandwidth = settings["copy_gb_per_s"]
                try:
                    rows, failures = measure_on_device(
                        config, options, measured, shape, timer, bandwidth, where, progress
                    )
                except Exception as error:  # after which a GPU may answer no more
                    if not results:
                        raise
                    skipped += [failure(cache_config, where, error) for cache_config in measured]
                    break
                skipped += failures
            for row in rows:
                row["seconds"] = (time.perf_counter() - started) / len(rows)  # measured together
            _keep(outcomes, rows, point)
            results += rows
        document = build_document(
            "bench attention",
            results,
            settings=settings | device_settings(options.device, device),
            inputs={"artifacts": outcomes.artifacts},
            skipped=skipped,
            device=device,
            other_work=other_work,
        )
        if output is not None:
            write_results(output, document)
            outcomes.finish()
        return document


def _keep(outcomes: Outcomes, rows: list[dict[str, Any]], point: str) -> None:
    """Keep what was timed in turn, marked as such; without a row, a cache that failed is measured again."""
    turn = secrets.token_hex(8)
    for row in rows:
        outcomes.keep(row["cache_config"], point, {"turn": turn, "row": row})


def _kept(outcomes: Outcomes, cache_configs: list[dict[str, Any]], point: str) -> list[dict[str, Any]] | None:
    """Rows of a point, if all of them were timed in turn."""
    found = outcomes.find(cache_configs, point)
    if found is None or len({each["turn"] for each in found}) > 1:
        return None
    return [each["row"] for each in found]


def _bandwidth(timer: DeviceTimer, outcomes: Outcomes) -> float:
    """Bandwidth of a copy, in GB/s: that of the run that is continued, for one result file has one."""
    if (found := outcomes.find([DENSE], "copy")) is not None:
        return float(found[0]["gb_per_s"])
    measured = timer.copy_gb_per_s()
    outcomes.keep(DENSE, "copy", {"gb_per_s": measured})
    return measured


def _timer(device: torch.device) -> DeviceTimer | None:
    return DeviceTimer(device) if device.type == "cuda" else None


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, which graphs, events and other libraries go by."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Use `count` CPU threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
