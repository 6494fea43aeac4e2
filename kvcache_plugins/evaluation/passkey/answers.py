"""Asking for hidden keys through one cache: at the end of the prompt, or once the prompt has been read."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...models.cache_argument import as_argument, cache_of
from ...runs.loading import Subject
from ..caches import cache_bytes, generation_options
from ..finite import FiniteLogits
from .prompts import Trial, first_integer

__all__ = ["ask_afterwards", "ask_with_prompt"]


@torch.inference_mode()
def ask_with_prompt(
    subject: Subject, cache_config: Mapping[str, Any], batch: Sequence[Trial], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Generate the answers of one batch of prompts that end with their question.

    Args:
        subject (`Subject`): The model and its tokenizer.
        cache_config (`Mapping`): The cache to read through.
        batch (`Sequence[Trial]`): Trials of one length, each with a prompt of its own.
        max_new_tokens (`int`): Of an answer.

    Returns:
        `list[dict]`: For each trial, `answer`, `is_right`, and its share of the cache's bytes and of the
        time; `cached_tokens` are those the cache has seen.

    Raises:
        NotFiniteError: If a logit is NaN or infinite, after which anything may be answered.
    """
    started = time.perf_counter()
    prompts = torch.tensor([trial.ids for trial in batch], device=subject.device)
    output = _generate(subject, cache_config, prompts, max_new_tokens, **generation_options(cache_config))
    answers = subject.tokenizer.batch_decode(
        output.sequences[:, prompts.shape[1] :], skip_special_tokens=True
    )
    kv_bytes = subject.shard.total(cache_bytes(cache_of(output)))
    seconds = time.perf_counter() - started
    return [
        {
            "answer": answer,
            "is_right": first_integer(answer) == trial.key,
            "kv_bytes": kv_bytes / len(batch),
            "cached_tokens": output.sequences.shape[1] - 1,  # the last one was not read any more
            "seconds": seconds / len(batch),
        }
        for trial, answer in zip(batch, answers, strict=True)
    ]


def ask_afterwards(
    subject: Subject, cache_config: Mapping[str, Any], batch: Sequence[Trial], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Read one prompt, then ask for each of its keys on a copy of the cache: a turn that nothing foresaw.

    Args:
        subject (`Subject`): The model and its tokenizer.
        cache_config (`Mapping`): The cache to read through.
        batch (`Sequence[Trial]`): All trials of one prompt, which differ in key and question.
        max_new_tokens (`int`): Of an answer.

    Returns:
        `list[dict]`: For each trial, `answer`, `is_right`, its share of the time, and the cache's bytes and
        `cached_tokens` after the prompt.

    Raises:
        NotFiniteError: If a logit is NaN or infinite, after which anything may be answered.
    """
    started = time.perf_counter()
    prompt = torch.tensor([batch[0].ids], device=subject.device)
    # The one new token is not read any more: the cache has seen the prompt, in chunks if it wants them.
    cache = cache_of(_generate(subject, cache_config, prompt, 1, **generation_options(cache_config)))
    kv_bytes = subject.shard.total(cache_bytes(cache))
    answers = []
    for trial in batch:
        turn = torch.tensor([[*trial.ids, *trial.question]], device=subject.device)
        # outside of inference mode, whose copies could not be written to by caches that leave it
        own = cache if trial is batch[-1] else copy.deepcopy(cache)
        sequences = _generate(subject, cache_config, turn, max_new_tokens, **as_argument(own)).sequences
        answers.append(subject.tokenizer.decode(sequences[0, turn.shape[1] :], skip_special_tokens=True))
    seconds = time.perf_counter() - started
    return [
        {
            "answer": answer,
            "is_right": first_integer(answer) == trial.key,
            "kv_bytes": kv_bytes,
            "cached_tokens": trial.length,
            "seconds": seconds / len(batch),
        }
        for trial, answer in zip(batch, answers, strict=True)
    ]


def _generate(
    subject: Subject,
    cache_config: Mapping[str, Any],
    ids: torch.Tensor,
    max_new_tokens: int,
    /,
    **options: Any,
) -> Any:
    logits = FiniteLogits()
    output = subject.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,  # a checkpoint may bring another, which punishes the digits of the key
        max_new_tokens=max_new_tokens,
        pad_token_id=_pad_token_id(subject),
        logits_processor=[logits],
        return_dict_in_generate=True,
        **options,
    )
    logits.check(cache_config, subject.model)
    return output


def _pad_token_id(subject: Subject) -> int | None:
    """Return what `generate()` puts behind an answer that ended before the others of its batch."""
    if subject.tokenizer.pad_token_id is not None:
        return int(subject.tokenizer.pad_token_id)
    return subject.tokenizer.eos_token_id  # type: ignore[no-any-return]  # transformers declares Any
