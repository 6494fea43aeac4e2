"""Automatic precision: bits for the keys and the values of every layer, chosen by what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts.files import write_json
from ..runs.journal import Journal
from ..runs.progress import Progress, silent
from .allocation import allocate_bits
from .samples import token_digest
from .sensitivity import Candidate, candidates_of, measure_candidates

__all__ = ["CONFIG_FILE", "MEASURED_FILE", "choose_precision"]

CONFIG_FILE = "cache_config.json"
MEASURED_FILE = "precision.json"


def choose_precision(
    model: Any,
    samples: Tensor,
    cache_config: Mapping[str, Any],
    bits: Sequence[int],
    target_bits: float,
    output: Path,
    settings: Mapping[str, Any],
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure every candidate, choose, and write `cache_config.json` and `precision.json`.

    Losses of different layers and sides are taken to add up, which small ones do. Finished measurements are
    kept in the output directory and not repeated.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        samples (`torch.Tensor` of shape `(num_samples, sequence_length)`): Token ids to judge on.
        cache_config (`Mapping`): The backend and its options for all layers, without bits.
        bits (`Sequence[int]`): Numbers of bits to choose from.
        target_bits (`float`): Mean bits of keys and values over all packed layers, at most; one with a window
            counts as much as one without.
        output (`Path`): Directory to write to.
        settings (`Mapping`): Plain values on which the measurements depend, beside the above.
        progress (`Progress`): Told of every sample.

    Returns:
        `dict`: The chosen `cache_config`.

    Raises:
        ValueError: If the options are wrong, the samples too short, or the directory holds an unfinished run
            with other settings.
        OSError: If the files cannot be written.
    """
    candidates = candidates_of(model, cache_config, bits)
    journal = Journal(output, {**settings, "cache_config": dict(cache_config)})
    device = model.get_input_embeddings().weight.device
    for sample in samples:
        progress("loss of each layer's bits")
        missing = [c for c in candidates if _key(c, sample) not in journal]
        for candidate, loss in measure_candidates(model, sample[None].to(device), cache_config, missing):
            journal.add(_key(candidate, sample), {"loss": loss})
        progress("loss of each layer's bits", advance=1)
    losses = {
        candidate: float(
            torch.tensor([journal[_key(candidate, sample)]["loss"] for sample in samples]).double().mean()
        )
        for candidate in candidates
    }
    chosen = _choose(losses, target_bits)
    overrides: dict[str, dict[str, Any]] = {}
    for candidate in chosen:
        overrides.setdefault(str(candidate.layer_idx), {}).update(candidate.options)
    config = {**cache_config, "layer_overrides": overrides}
    write_json(
        output / MEASURED_FILE,
        {
            "target_bits": target_bits,
            "average_bits": sum(c.nbits for c in chosen) / len(chosen),
            "summed_loss": sum(losses[c] for c in chosen),
            "unit": "mean Kullback-Leibler divergence from the dense cache, nats per token",
            "losses": [{**asdict(c), "loss": loss, "chosen": c in chosen} for c, loss in losses.items()],
        },
    )
    write_json(output / CONFIG_FILE, config)
    journal.remove()
    return config


def _key(candidate: Candidate, sample: Tensor) -> str:
    """The name of a record: by the tokens, as which samples are judged on depends on how many are."""
    return f"{candidate.name} sample {token_digest(sample)}"


def _choose(losses: Mapping[Candidate, float], target_bits: float) -> list[Candidate]:
    """The candidate of every side of every layer. A mode of rotation costs no bits, so the better serves."""
    best: dict[tuple[int, str], dict[int, Candidate]] = {}
    for candidate, loss in losses.items():
        by_bits = best.setdefault((candidate.layer_idx, candidate.side), {})
        if candidate.nbits not in by_bits or loss < losses[by_bits[candidate.nbits]]:
            by_bits[candidate.nbits] = candidate
    items = list(best.values())
    bits = allocate_bits([{b: losses[c] for b, c in item.items()} for item in items], target_bits)
    return [item[chosen] for item, chosen in zip(items, bits, strict=True)]
