"""What caches make of answers: the last thing a training measures, with the heads it has made.

Examples that no step has seen are read through a cache as `generate()` reads a prompt, and the tokens behind
the prompt are predicted one after the other. How much less likely they are than with the dense cache is what
a cache has forgotten, or has rounded away.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifacts.files import write_json, write_tensors
from ..evaluation.caches import why_unavailable
from ..evaluation.perplexity.scoring import Reference, Schedule, score_window
from ..evaluation.perplexity.summary import summarize
from ..retaining.heads import RetainingHeads
from ..retaining.loading import CONFIG_FILE, WEIGHTS_FILE
from ..runs.failures import Failures
from ..runs.labels import cache_label, dense_first
from ..runs.progress import ProgressBar, no_bar
from .examples import Example

__all__ = ["check_caches", "score_answers", "with_heads"]

_CacheConfig = dict[str, Any]
_BLOCK = 64
"""Most tokens of an answer read at once, where that changes nothing: their logits are taken in fp64."""


def with_heads(cache_config: Mapping[str, Any], heads: str) -> _CacheConfig:
    """Return the options of a cache, with these heads if it is a `locret` that names none.

    Args:
        cache_config (`Mapping`): `"backend"` in lower case and its options.
        heads (`str`): Where the heads of the training are.
    """
    return {**cache_config, "heads": heads} if _is_without_heads(cache_config) else dict(cache_config)


def _is_without_heads(cache_config: Mapping[str, Any]) -> bool:
    """Whether options are of a `locret` that names no heads."""
    return cache_config["backend"] == "locret" and cache_config.get("heads") is None


def check_caches(
    model_config: Any, heads: RetainingHeads, cache_configs: Sequence[_CacheConfig]
) -> list[dict[str, Any]]:
    """Build every cache once, before the training, and without the model.

    Args:
        model_config (`PreTrainedConfig`): Of the model.
        heads (`RetainingHeads`): Those that are to be trained.
        cache_configs (`Sequence[dict]`): What the answers are to be read through.

    Returns:
        `list[dict]`: Those of transformers' own that cannot be had here, each with its `reason`.

    Raises:
        ValueError: On a wrong option, or a cache that does not serve the model.
    """
    skipped = []
    with tempfile.TemporaryDirectory() as folder:
        if any(_is_without_heads(cache_config) for cache_config in cache_configs):
            _write(heads, Path(folder))
        for cache_config in cache_configs:
            reason = why_unavailable(model_config, with_heads(cache_config, folder))
            if reason is not None:
                skipped.append({"cache_config": cache_config, "reason": reason})
    return skipped


def _write(heads: RetainingHeads, folder: Path) -> None:
    """Write heads for this process: `save_pretrained` writes those of the first of several alone."""
    weights = {name: weight.bfloat16() for name, weight in heads.state_dict().items()}
    write_json(folder / CONFIG_FILE, heads.config.to_dict())
    write_tensors(folder / WEIGHTS_FILE, weights)


def score_answers(
    model: Any,
    examples: Sequence[Example],
    cache_configs: Sequence[_CacheConfig],
    progress_bar: ProgressBar = no_bar,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read examples through caches, and sum up how likely their answers are.

    Args:
        model (`PreTrainedModel`): The model, in evaluation mode.
        examples (`Sequence[Example]`): Prompts with their answers.
        cache_configs (`Sequence[dict]`): The caches; the dense one is measured first, always.
        progress_bar (`ProgressBar`): Told of every example and cache.

    Returns:
        `tuple[list[dict], list[dict]]`: The result of every cache, of [`summarize`], and an entry for each
        that has failed, of transformers' own or of a third party's.

    Raises:
        Exception: Of a cache of ours.
    """
    records: list[tuple[_CacheConfig, list[dict[str, Any]]]] = [(c, []) for c in dense_first(cache_configs)]
    failures = Failures()
    device = model.get_input_embeddings().weight.device
    with progress_bar(len(records) * len(examples)) as progress:
        for example in examples:
            token_ids = torch.tensor([[*example.prompt_ids, *example.answer_ids]], device=device)
            schedule = Schedule(len(example.prompt_ids), block_length=_BLOCK)
            reference: Reference | None = None
            for cache_config, found in records:
                doing = f"answers: {cache_label(cache_config)}"
                progress(doing)
                if failures.said_of(cache_config) is None:
                    try:
                        record, own = score_window(model, token_ids, cache_config, schedule, reference)
                        found.append(record)
                        reference = reference or own  # the dense cache comes first
                    except Exception as error:
                        failures.note(cache_config, error)
                progress(doing, advance=1)
    dense, bits = records[0][1], 8 * model.dtype.itemsize
    results, failed = [], []
    for cache_config, found in records:
        said = failures.said_of(cache_config)
        if said is None:
            results.append(summarize(cache_config, found, dense, prefill=None, dense_bits=bits))
        else:
            failed.append({"cache_config": cache_config, "reason": f"failed: {said}", "is_failure": True})
    return results, failed
