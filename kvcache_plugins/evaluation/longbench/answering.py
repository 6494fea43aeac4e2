"""One answer of a model through one cache, by plain greedy `generate()`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from ...models.cache_argument import as_argument, cache_of
from ...runs.loading import Subject
from ..caches import cache_bytes, generation_options, new_cache, prefill
from ..finite import FiniteLogits
from .prompting import Prompt
from .tasks import Task

__all__ = ["answer"]


@torch.inference_mode()
def answer(subject: Subject, cache_config: Mapping[str, Any], task: Task, prompt: Prompt) -> dict[str, Any]:
    """Answer one question.

    Args:
        subject (`Subject`): Model and tokenizer.
        cache_config (`Mapping`): The cache.
        task (`Task`): Its length of answers; samsum ends them at a line break, and has at least one token.
        prompt (`Prompt`): If it comes in two parts, the first is read into the cache by a forward pass of its
            own, before `generate()` is given the second.

    Returns:
        `dict`: `pred`, `prompt_tokens`, `new_tokens`, `kv_bytes`, `cached_tokens` (those the cache has seen)
        and `seconds`.

    Raises:
        NotFiniteError: If a logit is NaN or infinite, after which anything may be answered.
    """
    started = time.perf_counter()
    ids = torch.tensor([prompt.ids], device=subject.device)
    options = _cache_options(subject, cache_config, task, prompt)
    if task.name == "samsum":
        # models go on with another dialogue otherwise; both as published
        line_break = subject.encode("\n")[-1]
        ends = [token for token in (subject.tokenizer.eos_token_id, line_break) if token is not None]
        options |= {"eos_token_id": ends, "min_new_tokens": 1}
    logits = FiniteLogits()
    output = subject.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=task.max_new_tokens,
        logits_processor=[logits],
        return_dict_in_generate=True,
        **options,
    )
    logits.check(cache_config, subject.model)
    new = output.sequences[0, ids.shape[1] :]
    return {
        "pred": subject.tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(new),
        "kv_bytes": subject.shard.total(cache_bytes(cache_of(output))),
        "cached_tokens": output.sequences.shape[1] - 1,  # the last one was not read any more
        "seconds": time.perf_counter() - started,
    }


def _cache_options(
    subject: Subject, cache_config: Mapping[str, Any], task: Task, prompt: Prompt
) -> dict[str, Any]:
    """Return what `generate()` is told of the cache, after reading the first part of the prompt into it."""
    if not prompt.context_ids:
        return generation_options(cache_config)
    final_length = len(prompt.ids) + task.max_new_tokens
    cache = new_cache(subject.model, cache_config, max_cache_length=final_length)
    context = torch.tensor([prompt.context_ids], device=subject.device)
    prefill(subject.model, context, cache, final_length, logits_to_keep=1)
    return as_argument(cache)
