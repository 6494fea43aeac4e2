"""Speed and memory of `generate()` with every cache: the time to the first token, and per token after it.

Each measurement runs in a fresh process, which makes its peak memory its own. With `repeats` above one, the
processes follow one another in rounds over all caches, and their times are put together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..artifacts.files import read_json
from ..registry import TRANSFORMERS_BACKENDS
from .caches import why_unavailable
from .generation_worker import model_config
from .labels import DENSE, cache_label
from .progress import Progress, silent
from .results import build_document
from .speed_options import DTYPES, GenerationOptions
from .timing import Spread

__all__ = ["measure_generation"]

_WORKER = f"{__package__}.generation_worker"
_ROOT = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """A measurement ended without an answer."""


def measure_generation(options: GenerationOptions, progress: Progress = silent) -> dict[str, Any]:
    """Generate with every cache at every length and batch size.

    A failure of a cache of transformers' is noted under `skipped`; one of ours stops the run.

    Args:
        options (`GenerationOptions`): What to measure.
        progress (`Progress`): Told of every finished measurement.

    Returns:
        `dict`: The document of `results.json`.

    Raises:
        ValueError: If an option of a cache is wrong.
        RuntimeError: If a measurement failed; the message ends with what its process said last.
    """
    config = model_config(options.model)
    skipped = [
        {"cache_config": cache_config, "reason": reason}
        for cache_config in options.cache_configs
        if (reason := why_unavailable(config, cache_config))
    ]
    left_out = [entry["cache_config"] for entry in skipped]
    cache_configs = [c for c in options.cache_configs if c not in left_out]
    results: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for length in options.lengths:
        for batch_size in options.batch_sizes:
            answers: dict[int, list[dict[str, Any]]] = {}
            failed: set[int] = set()
            for _ in range(options.repeats):
                for index, cache_config in enumerate(cache_configs):
                    progress(f"{length} tokens: {cache_label(cache_config)}")
                    job = _job(options, cache_config, length, batch_size)
                    try:
                        if index not in failed:
                            answer = _run(job)
                            answers.setdefault(index, []).append(answer)
                    except WorkerError as error:
                        if cache_config["backend"] not in TRANSFORMERS_BACKENDS:
                            raise
                        failed.add(index)
                        reason = f"failed at {length} tokens: {error}"
                        skipped.append({"cache_config": cache_config, "reason": reason})
                    progress(f"{length} tokens", advance=1)
            first = answers[0][0]
            results += _compare(
                [_row(cache_configs[index], length, batch_size, found) for index, found in answers.items()],
                8 * getattr(torch, DTYPES[options.dtype]).itemsize,
            )
    settings = options.settings() | {"parameters": first["parameters"]}
    return build_document(
        "bench generate", results, settings=settings, skipped=skipped, threads=first["threads"]
    )


def _job(
    options: GenerationOptions, cache_config: dict[str, Any], length: int, batch_size: int
) -> dict[str, Any]:
    return {
        "cache_config": cache_config,
        "length": length,
        "batch_size": batch_size,
        "model": options.model,
        "dtype": DTYPES[options.dtype],
        "max_new_tokens": options.max_new_tokens,
        "threads": options.threads,
    }


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a fresh process."""
    # Found wherever the caller was started from, and with it the tools installed beside the interpreter:
    # quanto compiles an extension with ninja, which often is not on the PATH.
    search = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", _WORKER, str(question), str(answer)],
            env={**os.environ, "PYTHONPATH": search, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = " ".join(done.stderr.split()[-40:]) or "nothing (it may have run out of memory)"
            raise WorkerError(f"{cache_label(job['cache_config'])} ended with {done.returncode}: {said}")
        return read_json(answer) | {"seconds": time.perf_counter() - started}


def _row(
    cache_config: dict[str, Any], length: int, batch_size: int, answers: list[dict[str, Any]]
) -> dict[str, Any]:
    prefill = Spread.of([answer["prefill_ms"] for answer in answers])
    steps = Spread.of([ms for answer in answers for ms in answer["step_ms"]])
    last = answers[-1]
    return {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        "length": length,
        "batch_size": batch_size,
        "prefill_ms": prefill.median_ms,
        "ms_per_token": steps.median_ms,
        "p20_ms": steps.p20_ms,
        "p80_ms": steps.p80_ms,
        "ms_per_token_mean": steps.mean_ms,
        "kv_bytes": last["kv_bytes"],
        "memory_before_bytes": max(answer["memory_before_bytes"] for answer in answers),
        "peak_memory_bytes": max(answer["peak_memory_bytes"] for answer in answers),
        "kernel": last["kernel"],
        "fallback_reads": last["fallback_reads"],
        "seconds": sum(answer["seconds"] for answer in answers),
    }


def _compare(rows: list[dict[str, Any]], dense_bits: int) -> list[dict[str, Any]]:
    """Add what is relative to the dense cache, and to transformers' `quanto` where it was measured."""
    dense = rows[0]
    assert dense["cache_config"] == DENSE
    quanto = next((row for row in rows if row["cache_config"]["backend"] == "quanto"), None)
    for row in rows:
        fraction = row["kv_bytes"] / dense["kv_bytes"]
        row |= {
            "memory_fraction": fraction,
            "bits_per_value": dense_bits * fraction,  # the dense cache keeps every value in the model's dtype
            "ratio_to_dense": row["ms_per_token"] / dense["ms_per_token"],
            "prefill_ratio_to_dense": row["prefill_ms"] / dense["prefill_ms"],
            "ratio_to_quanto": row["ms_per_token"] / quanto["ms_per_token"] if quanto else None,
        }
    return rows
