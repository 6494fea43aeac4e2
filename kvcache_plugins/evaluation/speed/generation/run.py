"""Speed and memory of `generate()` with every cache: the time to the first token, and per token after it.

Each measurement runs in a fresh process, which makes its peak memory its own. With `repeats` above one, the
processes follow one another in rounds over all caches, and their times are put together. Bytes stand beside
their prediction, and where a memory is given, so does the largest context that fits it. An interrupted run
goes on behind its last round.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from ....errors import NotPredictedError
from ....runs.labels import DENSE, cache_label
from ....runs.other_work import OtherWork
from ....runs.output_lock import writing_alone
from ....runs.progress import Progress, silent
from ....runs.results import build_document, write_results
from ...caches import split_available
from ..devices import choose_device, device_settings
from ..options import DTYPES, GenerationOptions
from ..outcomes import Outcomes
from ..timing import Spread
from .largest_context import largest_contexts
from .memory_prediction import not_predicted, predicted_bytes, predicted_peak_bytes
from .process import peak_above_model
from .rounds import Rounds
from .worker import model_config

__all__ = ["measure_generation"]

# What the outcome of one process does not depend on.
_NOT_OF_AN_OUTCOME = ("repeats", "time_limit", "memory_gb", "verify_memory")


def measure_generation(
    options: GenerationOptions, progress: Progress = silent, output: Path | None = None
) -> dict[str, Any]:
    """Generate with every cache at every length and batch size.

    A cache that fails is noted under `skipped`, as `is_failure`; the dense cache stops the run, or, of a
    compiled model, becomes a result with `fits` false. A point that needs more memory than there is becomes a
    result with `fits` false and a `reason`.

    Args:
        options (`GenerationOptions`): What to measure.
        progress (`Progress`): Told of every finished measurement.
        output (`Path`, *optional*): Directory of the results, made if need be, into which `results.json` is
            written; an unfinished run in it is continued.

    Returns:
        `dict`: The document of `results.json`; with `memory_gb` also `largest_context`, one entry per cache
        and batch size.

    Raises:
        ValueError: If an option of a cache is wrong, the device does not exist, nothing fitted, or the output
            directory holds another run or is being written to.
        RuntimeError: If the dense cache failed; the message ends with what its process said last.
        OSError: If nothing can be written.
    """
    device = choose_device(options.device)
    config = model_config(options.model, options.preset, options.num_layers)
    _check_encoder(config, options)
    cache_configs, skipped = split_available(config, options.cache_configs)
    # all of them before the first measurement: an option that is wrong at a later point costs none
    predictions = {
        (length, batch_size): [_predictions(config, options, c, length, batch_size) for c in cache_configs]
        for length in options.lengths
        for batch_size in options.batch_sizes
    }
    with nullcontext() if output is None else writing_alone(output):
        outcomes = Outcomes(output, options, config, device, cache_configs, independent_of=_NOT_OF_AN_OUTCOME)
        rounds = Rounds(options, device, cache_configs, outcomes, progress)
        results: list[dict[str, Any]] = []
        any_answer: dict[str, Any] | None = None
        other_work = OtherWork()
        for (length, batch_size), predicted in predictions.items():
            answers = rounds.run(length, batch_size, [row["estimated_peak_bytes"] for row in predicted])
            rows = []
            for index, row in enumerate(predicted):
                if index in answers:
                    any_answer = answers[index][0]
                    rows.append(row | _measured(answers[index]))
                elif (reason := rounds.reason(index, length, batch_size)) is not None:
                    rows.append(row | dict.fromkeys(_MEASURED) | {"fits": False, "reason": reason})
            results += _compare(rows, 8 * getattr(torch, DTYPES[options.dtype]).itemsize)
        if any_answer is None:
            outcomes.finish()
            raise ValueError(f"no measurement fitted the memory: {results[0]['reason']}")
        facts = {"parameters": any_answer["parameters"], "model_bytes": any_answer["model_bytes"]}
        document = build_document(
            "bench generate",
            results,
            settings=options.settings() | facts | device_settings(options.device, device),
            inputs={"artifacts": outcomes.artifacts},
            skipped=[*skipped, *rounds.failures],
            device=device,
            threads=any_answer["threads"],
            other_work=other_work,
        )
        if options.memory_gb is not None:
            document["largest_context"] = largest_contexts(
                config, options, cache_configs, any_answer["model_bytes"], device, outcomes, progress
            )
        if output is not None:
            write_results(output, document)
            outcomes.finish()
        return document


def _check_encoder(config: Any, options: GenerationOptions) -> None:
    """Refuse what is not measured of encoder-decoder models."""
    if not config.is_encoder_decoder:
        return
    if type(config) not in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"bench generate has models read tokens, and the encoder of {type(config).__name__} reads "
            "something else. Allowed are models that read text."
        )
    if options.memory_gb is not None:
        raise ValueError(
            "--memory_gb predicts the context of decoder-only models; "
            f"{type(config).__name__} is of an encoder-decoder one. `kvcache-plugins estimate` has "
            "--encoder_tokens."
        )


_MEASURED = (
    "ttft_ms", "prefill_ms", "ms_per_token", "p20_ms", "p80_ms", "ms_per_token_mean", "kv_bytes",
    "memory_before_bytes", "peak_memory_bytes", "peak_above_model_bytes", "device_peak_bytes", "kernel",
    "fallback_reads", "seconds",
)  # fmt: skip


def _predictions(
    config: Any, options: GenerationOptions, cache_config: dict[str, Any], length: int, batch_size: int
) -> dict[str, Any]:
    """Begin a row with what is known without measuring.

    Layers of a third party may take no tensors without data, and models may keep states of a form of their
    own. Their bytes are then not predicted, as a `note` says, and they are measured all the same.

    Raises:
        ValueError: On a wrong option.
    """
    # a decoder with an encoder begins with one token of its own
    begun_with, encoder_tokens = (1, length) if config.is_encoder_decoder else (length, None)
    new_tokens = options.max_new_tokens
    dtype = getattr(torch, DTYPES[options.dtype])
    row: dict[str, Any] = {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        "length": length,
        "batch_size": batch_size,
        "estimated_kv_bytes": None,
        "estimated_peak_bytes": None,
    }
    try:
        row["estimated_kv_bytes"] = predicted_bytes(
            config, cache_config, begun_with, batch_size, dtype, encoder_tokens, new_tokens
        )
        row["estimated_peak_bytes"] = predicted_peak_bytes(
            config, cache_config, length, new_tokens, batch_size, dtype
        )
    except NotPredictedError as error:  # of the model, whatever the cache
        row["note"] = not_predicted(error)
    except ValueError:
        raise
    except Exception as error:
        if cache_config == DENSE:
            raise  # with which all others are compared
        row["note"] = not_predicted(error)
    return row


def _measured(answers: list[dict[str, Any]]) -> dict[str, Any]:
    steps = Spread.of([ms for answer in answers for ms in answer["step_ms"]])
    last = answers[-1]
    peaks = [peak for answer in answers if (peak := peak_above_model(answer)) is not None]
    device_peaks = [a["device_peak_bytes"] for a in answers if a["device_peak_bytes"] is not None]
    return {
        "fits": True,
        "ttft_ms": Spread.of([answer["ttft_ms"] for answer in answers]).median_ms,
        "prefill_ms": Spread.of([answer["prefill_ms"] for answer in answers]).median_ms,
        "ms_per_token": steps.median_ms,
        "p20_ms": steps.p20_ms,
        "p80_ms": steps.p80_ms,
        "ms_per_token_mean": steps.mean_ms,
        "kv_bytes": last["kv_bytes"],
        "memory_before_bytes": max(answer["memory_before_bytes"] for answer in answers),
        "peak_memory_bytes": max(answer["peak_memory_bytes"] for answer in answers),
        "peak_above_model_bytes": max(peaks) if peaks else None,
        "device_peak_bytes": max(device_peaks) if device_peaks else None,
        "kernel": last["kernel"],
        "fallback_reads": last["fallback_reads"],
        "seconds": sum(answer["seconds"] for answer in answers),
    }


def _compare(rows: list[dict[str, Any]], dense_bits: int) -> list[dict[str, Any]]:
    """Add what is relative to the dense cache, and to transformers' `quanto` where it was measured.

    The bytes of a dense cache that did not fit are those predicted, which are exact.
    """
    dense = rows[0]
    assert dense["cache_config"] == DENSE
    quanto = next((row for row in rows if row["cache_config"]["backend"] == "quanto"), None)
    dense_bytes = dense["kv_bytes"] if dense["fits"] else dense["estimated_kv_bytes"]
    for row in rows:
        # nothing to compare with: a dense cache that did not fit, of a model whose bytes are not predicted
        fraction = row["kv_bytes"] / dense_bytes if row["fits"] and dense_bytes else None
        row |= {
            "memory_fraction": fraction,
            # the dense cache keeps every value in the model's dtype
            "bits_per_value": None if fraction is None else dense_bits * fraction,
            "ratio_to_dense": _ratio(row, dense, "ms_per_token"),
            "prefill_ratio_to_dense": _ratio(row, dense, "prefill_ms"),
            "ratio_to_quanto": _ratio(row, quanto, "ms_per_token"),
        }
    return rows


def _ratio(row: dict[str, Any], other: dict[str, Any] | None, key: str) -> float | None:
    if other is None or row[key] is None or other[key] is None:
        return None
    return float(row[key] / other[key])
