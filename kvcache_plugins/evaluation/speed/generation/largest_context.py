"""The largest context that fits a given memory: predicted for every cache, and measured there on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....capacity import GIGABYTE
from ....runs.labels import DENSE, cache_label
from ....runs.progress import Progress, silent
from ..devices import machine_bytes
from ..options import DTYPES, GenerationOptions
from ..outcomes import Outcomes
from .memory_prediction import longest_context, not_predicted, predicted_bytes, prompt_and_new_tokens
from .process import DidNotFitError, WorkerError, make_job, peak_above_model, run_job

__all__ = ["largest_contexts"]


def largest_contexts(
    config: Any,
    options: GenerationOptions,
    cache_configs: Sequence[dict[str, Any]],
    model_bytes: int,
    device: torch.device,
    outcomes: Outcomes,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Find, for every cache and batch size, how many tokens fit beside the model.

    Model and cache are counted, nothing else: what the model computes on the way, what transformers' own
    quantized caches decode, and the interpreter, come on top. `verify_memory` generates at that length in a
    fresh process and reports what it really took.

    Args:
        config (`PreTrainedConfig`): The model's.
        options (`GenerationOptions`): With `memory_gb`.
        cache_configs (`Sequence[dict]`): The caches, the dense one among them.
        model_bytes (`int`): Parameters and buffers.
        device (`torch.device`): Where to generate.
        outcomes (`Outcomes`): Keeps every verification until the run is finished.
        progress (`Progress`): Told of every verification.

    Returns:
        `list[dict]`: `cache_config`, `label`, `batch_size`, `model_bytes`, `tokens` (per row; None if unknown
        or unlimited, as `note` says), `kv_bytes` (predicted at that length), `of_dense`, `note`; if verified
        also `measured_kv_bytes`, `peak_memory_bytes`, `peak_above_model_bytes` and `device_peak_bytes`.
    """
    entries = [
        _entry(config, options, cache_config, batch_size, model_bytes, device, outcomes, progress)
        for batch_size in options.batch_sizes
        for cache_config in cache_configs
    ]
    dense = {entry["batch_size"]: entry["tokens"] for entry in entries if entry["cache_config"] == DENSE}
    for entry in entries:
        base = dense[entry["batch_size"]]
        entry["of_dense"] = entry["tokens"] / base if base and entry["tokens"] is not None else None
    return entries


def _entry(
    config: Any,
    options: GenerationOptions,
    cache_config: dict[str, Any],
    batch_size: int,
    model_bytes: int,
    device: torch.device,
    outcomes: Outcomes,
    progress: Progress,
) -> dict[str, Any]:
    """Predict the largest context of one cache, and generate there if that was asked for."""
    assert options.memory_gb is not None
    dtype = getattr(torch, DTYPES[options.dtype])
    limit = int(options.memory_gb * GIGABYTE)
    entry: dict[str, Any] = {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        "batch_size": batch_size,
        "model_bytes": model_bytes,
        "tokens": None,
        "kv_bytes": None,
        "note": None,
    }
    if cache_config.get("offload"):
        return entry | {"note": "offloaded: most of it rests in the host's memory, which is not bounded"}
    try:
        tokens = longest_context(config, cache_config, limit - model_bytes, batch_size, dtype)
    except Exception as error:  # everything has been measured, and is not lost
        return entry | {"note": not_predicted(error)}
    if tokens is None:
        return entry | {"note": "any length fits"}
    entry["tokens"] = tokens
    if tokens == 0:
        return entry | {"kv_bytes": 0, "note": "the model alone leaves no room"}
    length, new_tokens = prompt_and_new_tokens(tokens)
    entry["kv_bytes"] = predicted_bytes(config, cache_config, length, batch_size, dtype, None, new_tokens)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    notes = [f"beyond the model's {positions:,} positions"] if positions and tokens > positions else []
    if options.verify_memory:
        progress(f"{tokens} tokens: {cache_label(cache_config)}")
        if limit > (there := machine_bytes(device)):
            notes.append(f"not verified: this machine has {there / GIGABYTE:.1f} GB")
        else:
            job = make_job(options, cache_config, length, batch_size, device, new_tokens)
            point = f"verified, {length} and {new_tokens} tokens, {batch_size} rows"
            try:
                if (found := outcomes.find([cache_config], point)) is None:
                    found = [{"answer": run_job(job)}]
                    outcomes.keep(cache_config, point, found[0])
                entry |= _verified(found[0]["answer"])
            except DidNotFitError as error:
                notes.append(str(error))
            except WorkerError as error:
                notes.append(f"not verified: {error}")
        progress(f"{tokens} tokens", advance=1)
    return entry | {"note": "; ".join(notes) or None}


def _verified(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "measured_kv_bytes": answer["kv_bytes"],
        "peak_memory_bytes": answer["peak_memory_bytes"],
        "peak_above_model_bytes": peak_above_model(answer),
        "device_peak_bytes": answer["device_peak_bytes"],
    }
