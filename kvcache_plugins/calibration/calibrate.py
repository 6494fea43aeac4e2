"""The whole job: load, observe, fit, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..artifacts.codebooks import Codebooks, push_to_hub, save_codebooks
from ..artifacts.folders import check_push
from ..artifacts.model_facts import model_facts, rotary_facts
from ..artifacts.scales import Scales
from ..backends.kvquant import NORMAL_FLOAT
from ..models.decoder import decoder_only_config
from ..runs.code_versions import PACKAGES, code_settings, version_of
from ..runs.file_digests import model_settings
from ..runs.journal import progress_folder
from ..runs.loading import Subject, load_config, load_subject
from ..runs.output_lock import writing_alone
from ..runs.progress import Progress, silent
from ..runs.text_files import read_text_file
from .fitting import fit_layers
from .options import CalibrationOptions
from .passes import run_passes
from .precision import CONFIG_FILE, MEASURED_FILE, choose_precision
from .recording import CalibratedLayer, calibrated_layers
from .samples import Samples, read_samples
from .sensitivity import check_candidates
from .statistics import Statistics

__all__ = ["calibrate", "calibrate_subject", "steps_of"]

_RELEVANT = ("revision", "dtype", "attn_implementation")
"""Options on which all that is observed depends, beside the text."""


def steps_of(options: CalibrationOptions) -> int:
    """Return how many steps `progress` will be told of, samples times passes."""
    judged = 0 if options.target_bits is None else min(options.precision_samples, options.num_samples)
    return judged + (2 * options.num_samples if options.needs_codebooks else 0)


def calibrate(
    options: CalibrationOptions, output: Path, progress: Progress = silent, *, push_to: str | None = None
) -> None:
    """Calibrate a model and write the artifact; an interrupted run is continued.

    Args:
        options (`CalibrationOptions`): What to do.
        output (`Path`): Directory of the artifact.
        progress (`Progress`): Told of every step.
        push_to (`str`, *optional*): Hub repository to upload the artifact to.

    Raises:
        ValueError: If the model or the text cannot be calibrated with, or no precision can be chosen as
            asked; nothing is written then.
        OSError: If something cannot be read or written.
    """
    if push_to is not None:
        check_push(push_to, "push_to_hub")
    _check_length(options, load_config(options))
    for name in options.text_files or ():
        read_text_file(name, "--text_files")  # what is wrong with one is told before the weights are loaded
    with writing_alone(output):
        calibrate_subject(load_subject(options), options, output, progress)
    if push_to is not None:
        push_to_hub(output, push_to)


def calibrate_subject(
    subject: Subject, options: CalibrationOptions, output: Path, progress: Progress = silent
) -> None:
    """Calibrate a loaded model, as [`calibrate`] does.

    Raises:
        ValueError: If the model or the text cannot be calibrated with, or no precision can be chosen as
            asked; nothing is written then.
        OSError: If something cannot be read or written.
    """
    layers = calibrated_layers(subject.model)
    if subject.shard.count > 1:
        raise ValueError(f"A calibration runs in one process, got {subject.shard.count}.")
    _check_length(options, subject.model.config)
    if options.target_bits is not None:
        # the artifact is yet to be made; what its levels and ranges are does not matter to what is checked
        base = _cache_options(options, NORMAL_FLOAT)
        check_candidates(subject.model, base, options.candidate_bits, options.sequence_length)
    samples = read_samples(subject, options)
    statistics: Statistics | None = None
    if options.needs_codebooks:
        statistics = _observe(subject.model, samples, layers, options, progress_folder(output), progress)
        tensors = fit_layers(statistics, options.fitted_bits, q_norm=options.q_norm)
        facts = _facts(subject.model.config, samples, layers, options)
        scales = Scales(
            {index: layer.absmax["key"] for index, layer in statistics.layers.items()},
            {index: layer.absmax["value"] for index, layer in statistics.layers.items()},
            {name: facts[name] for name in ("model", "text_source", "text_sha256", "versions")},
        )
        save_codebooks(output, Codebooks(tensors, facts), scales)
    if options.target_bits is not None:
        _choose(subject.model, samples, options, output, progress)
    elif (output / MEASURED_FILE).exists():  # of an earlier calibration there, whose levels are gone
        for name in (CONFIG_FILE, MEASURED_FILE):
            (output / name).unlink(missing_ok=True)
    if statistics is not None:
        statistics.remove()


def _check_length(options: CalibrationOptions, config: Any) -> None:
    """Check that the model can read a sample; encoder-decoder models are refused as well."""
    context = getattr(decoder_only_config(config), "max_position_embeddings", None)
    if context is not None and options.sequence_length > context:
        raise ValueError(
            f"--sequence_length must be at most the model's context of {context} tokens, got "
            f"{options.sequence_length}."
        )


def _observe(
    model: Any,
    samples: Samples,
    layers: dict[int, CalibratedLayer],
    options: CalibrationOptions,
    folder: Path,
    progress: Progress,
) -> Statistics:
    settings = _what_observations_depend_on(model, samples, options)
    settings |= {name: getattr(options, name) for name in ("outlier_fraction", "sink_length", "weight")}
    statistics = Statistics(
        folder,
        settings,
        layers,
        tokens=options.sequence_length - options.sink_length,
        num_samples=len(samples),
        tail=options.outlier_fraction / 2,
    )
    run_passes(
        model,
        samples.token_ids,
        layers,
        statistics,
        outlier_fraction=options.outlier_fraction,
        sink_length=options.sink_length,
        weight=options.weight,
        progress=progress,
    )
    return statistics


def _choose(
    model: Any, samples: Samples, options: CalibrationOptions, output: Path, progress: Progress
) -> None:
    """Choose the precision on samples from all over the text."""
    settings = _what_observations_depend_on(model, samples, options)
    if options.needs_codebooks:
        settings |= {"weight": options.weight, "q_norm": options.q_norm}
    chosen = torch.linspace(0, len(samples) - 1, min(options.precision_samples, len(samples))).round().long()
    assert options.target_bits is not None
    choose_precision(
        model,
        samples.token_ids[chosen],
        _cache_options(options, str(output.absolute())),  # from wherever it is used
        options.candidate_bits,
        options.target_bits,
        output,
        settings,
        progress,
    )


def _what_observations_depend_on(model: Any, samples: Samples, options: CalibrationOptions) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in _RELEVANT}
    # the same tokens may be many short samples or few long ones
    settings |= {"text": samples.digest, "shape": list(samples.token_ids.shape)}
    settings |= {"fingerprint": model_facts(model.config)["fingerprint"]}
    return settings | model_settings(options.model, model.config) | code_settings()


def _cache_options(options: CalibrationOptions, calibration: str) -> dict[str, Any]:
    """Options of the cache whose precision is chosen, for all layers and without bits."""
    base: dict[str, Any] = {"backend": options.backend}
    if options.needs_codebooks:
        base |= {"calibration": calibration, "outlier_fraction": options.outlier_fraction}
        base |= {"sink_length": options.sink_length}
    for given in options.cache_config:
        base |= given
    return base


def _facts(
    config: Any, samples: Samples, layers: dict[int, CalibratedLayer], options: CalibrationOptions
) -> dict[str, Any]:
    return {
        "nbits": list(options.fitted_bits),
        "outlier_fraction": options.outlier_fraction,
        "sink_length": options.sink_length,
        "num_samples": len(samples),
        "sequence_length": options.sequence_length,
        "weight": options.weight,
        "q_norm": options.q_norm,
        "seed": options.seed,
        "text_source": samples.source,
        "text_sha256": samples.digest,
        "model": model_facts(config),
        "rope": {str(index): rotary_facts(layer.rotary) for index, layer in layers.items()},
        "versions": ", ".join(f"{name} {version_of(name)}" for name in PACKAGES),
    }
