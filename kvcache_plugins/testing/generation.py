"""Generation scenarios: the ways `generate()` drives a cache, each reduced to one call.

A cache is exercised by what `generate()` does with it: beams reorder rows, sampling repeats them, drafted
tokens are cropped again, a chunked prompt or a second chat turn sends several queries against a filled cache.
Running the same scenario with two caches and comparing the tokens tests all of that through unmodified
Transformers code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from ..models.cache_argument import as_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SCENARIOS", "padded_prompt", "run_scenario"]

# Scenario -> arguments of `generate()`. "second_turn" generates twice on one cache.
SCENARIOS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams_return_two": {"num_beams": 4, "num_return_sequences": 2},
    "sample_return_three": {"do_sample": True, "num_return_sequences": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunked_prefill": {"prefill_chunk_size": 16},
    "second_turn": {},
}


def padded_prompt(
    lengths: tuple[int, ...], *, vocab_size: int = 128, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Draws a left-padded batch of random prompts.

    Args:
        lengths (`tuple[int, ...]`): Real tokens of each row. A row's tokens depend on `seed` and its place in
            the batch only.
        vocab_size (`int`): Tokens are drawn from 3 to `vocab_size - 1`; 0 is the padding.
        seed (`int`): Seed of the draw; the global random state is left as it was.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, int64 of shape `(B, max(lengths))`.
    """
    longest = max(lengths)
    input_ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        # The second half repeats the first, as text does: prompt lookup finds drafts to propose.
        tokens = torch.randint(3, vocab_size, ((length + 1) // 2,), generator=generator).repeat(2)[:length]
        input_ids[row, longest - length :] = tokens
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def run_scenario(
    model: PreTrainedModel,
    scenario: str,
    *,
    cache_config: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = (21, 13),
    max_new_tokens: int = 24,
    seed: int = 0,
    **generate_kwargs: Any,
) -> torch.Tensor:
    """Generates in one of the ways of `SCENARIOS`, with one kind of cache.

    Args:
        model (`PreTrainedModel`): Model to generate with, on any device.
        scenario (`str`): A key of `SCENARIOS`.
        cache_config (`dict`, *optional*): Options of the cache as `generate(cache_config=...)` takes them;
            `None` is the ordinary `DynamicCache`.
        lengths (`tuple[int, ...]`): Prompt lengths of the left-padded batch. Prompt lookup, which
            Transformers offers for a single sequence only, uses the first.
        max_new_tokens (`int`): Tokens to generate (in each turn of `"second_turn"`).
        seed (`int`): Seed of the prompt and of sampling.
        generate_kwargs: Further arguments of `generate()`.

    Returns:
        `torch.Tensor`: int64 of shape `(B * num_return_sequences, T)`, prompt included.
    """
    if scenario == "prompt_lookup":
        lengths = lengths[:1]
    inputs = padded_prompt(lengths, vocab_size=model.config.vocab_size, seed=seed)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    arguments |= SCENARIOS[scenario] | generate_kwargs
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    torch.manual_seed(seed)
    if scenario == "second_turn":
        return _two_turns(model, inputs, cache_config, arguments, seed)
    if cache_config is not None:
        arguments |= {"cache_implementation": "quantized", "cache_config": dict(cache_config)}
    return _generate(model, **inputs, **arguments)


def _two_turns(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    cache_config: dict[str, Any] | None,
    arguments: dict[str, Any],
    seed: int,
) -> torch.Tensor:
    """Generates, appends a short question, and generates again on the same cache object."""
    from transformers import Cache, DynamicCache

    cache: Cache
    if cache_config is None:
        cache = DynamicCache(config=model.config)
    else:
        from ..building import build_cache

        cache = build_cache(model, dict(cache_config))
    first = _generate(model, **inputs, **arguments, **as_argument(cache))
    question = padded_prompt((5,) * len(first), vocab_size=model.config.vocab_size, seed=seed + 1)
    input_ids = torch.cat([first, question["input_ids"].to(first.device)], dim=1)  # [B, T]
    seen = input_ids.shape[1] - inputs["attention_mask"].shape[1]
    attention_mask = torch.nn.functional.pad(inputs["attention_mask"], (0, seen), value=1)
    return _generate(
        model, input_ids=input_ids, attention_mask=attention_mask, **as_argument(cache), **arguments
    )


def _generate(model: PreTrainedModel, **arguments: Any) -> torch.Tensor:
    # The method comes from a mixin that the annotation `PreTrainedModel` does not include.
    generate = cast(Any, model).generate
    return cast(torch.Tensor, generate(**arguments))
