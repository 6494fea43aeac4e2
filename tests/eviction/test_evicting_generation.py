"""`generate()` with evicting caches: as with a cache that holds everything, or as a loop by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache

import kvcache_plugins
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.models.cache_argument import as_argument, cache_of, given_cache
from kvcache_plugins.testing.generation import padded_prompt, run_scenario
from tests.eviction.feeding import (
    EVICTING,
    bound_cache,
    chunks_of,
    feed,
    ids,
    mask_of,
    model_of,
)

FAMILIES = ("gpt_neox", "llama", "mistral", "phi3", "qwen3")
SPLITS_LATER_TURNS = Version(transformers.__version__) >= Version("5.21")
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@contextmanager
def _calls(model: nn.Module) -> Iterator[list[int]]:
    """Tokens of every call of `model`, but for what KVzip has it repeat."""
    lengths: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not getattr(given_cache(kwargs), "is_repeating", False):
            lengths.append((args[0] if args else kwargs["input_ids"]).shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


def _generate(model: Any, tokens: Tensor, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    if config is not None:
        arguments |= {"cache_implementation": "quantized", "cache_config": dict(config)}
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(tokens, **{**settings, **arguments})


def _logits(output: Any) -> Tensor:
    return torch.stack(output.logits, dim=1)


# --- a budget that nothing exceeds


@functools.cache
def _dense(family: str, attention: str) -> Tensor:
    return run_scenario(model_of(family, attention), "greedy", lengths=(40, 29), max_new_tokens=12)


@pytest.mark.parametrize(
    ("backend", "family", "attention"),
    # every two of them meet
    [
        (backend, family, ("sdpa", "eager")[(i + j) % 2])
        for i, backend in enumerate(EVICTING)
        for j, family in enumerate(FAMILIES)
    ],
)
def test_a_huge_budget_is_the_ordinary_cache(backend: str, family: str, attention: str) -> None:
    run = functools.partial(
        run_scenario,
        model_of(family, attention),
        lengths=(40, 29),
        max_new_tokens=12,
        cache_config={"backend": backend, "budget": 1000, "chunk_size": 16, "evict_at_decode": True},
    )
    expected = _dense(family, attention)
    assert run("greedy").tolist() == expected.tolist()
    assert run("chunked_prefill").tolist() == expected.tolist()


@pytest.mark.parametrize("storage", ["int8", "int4", "float8"])
@pytest.mark.parametrize("backend", ["knorm", "h2o"])
def test_a_huge_budget_over_packed_storage_is_that_storage(backend: str, storage: str) -> None:
    model, tokens = model_of(), ids(70, 2)
    options = {"residual_length": 8} if storage == "int4" else {}
    config = {
        "backend": backend,
        "budget": 1000,
        "sink_length": 0,
        "storage": {"backend": storage, **options},
    }
    got = _generate(model, tokens, config, max_new_tokens=12)
    expected = _generate(model, tokens, {"backend": storage, **options}, max_new_tokens=12)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(_logits(got), _logits(expected), **CLOSE)


@functools.cache
def _drafting() -> tuple[Any, Tensor]:
    """A model and a prompt of so few tokens that drafts are found, and some are accepted."""
    return model_of(vocab_size=16), padded_prompt((40,), vocab_size=16)["input_ids"]


@functools.cache
def _undrafted() -> list[list[int]]:
    model, tokens = _drafting()
    cache = as_argument(DynamicCache(config=model.config))
    return _generate(model, tokens, **cache, max_new_tokens=40).sequences.tolist()  # type: ignore[no-any-return]


# --- generate() against a loop


@pytest.mark.parametrize("evict_at_decode", [False, True])
@pytest.mark.parametrize("backend", EVICTING)
def test_generate_is_the_loop_by_hand(backend: str, evict_at_decode: bool) -> None:
    model, tokens, new = model_of(), ids(77, 2), 70 if evict_at_decode else 9
    config = {"backend": backend, "budget": 24, "chunk_size": 16, "evict_at_decode": evict_at_decode}
    with _calls(model) as calls:
        output = _generate(model, tokens, config, max_new_tokens=new)
    assert calls == [16, 16, 16, 16, 13] + [1] * (new - 1)
    cache = cache_of(output)
    assert isinstance(cache, EvictingCache)
    assert cache.get_seq_length() == 77 + new - 1
    # The 65th generated token is one too many; 69 have been stored.
    assert cache.num_held() == (24 + 4 if evict_at_decode else 24 + new - 1)
    assert all(layer.held_length == cache.num_held() for layer in cache.evicting_layers)

    by_hand = bound_cache(model, config, 77)
    logits = feed(model, by_hand, output.sequences[:, :-1], [*chunks_of(77, 16), *[1] * (new - 1)])
    torch.testing.assert_close(_logits(output), logits[:, 76:], **CLOSE)
    assert by_hand.num_held() == cache.num_held()
    for layer, other in zip(cache.evicting_layers, by_hand.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, other.ledger.positions)


@pytest.mark.parametrize("with_mask", [False, True], ids=["no-mask", "mask-of-ones"])
def test_the_prompt_length_is_found(with_mask: bool) -> None:
    model, tokens = model_of(), ids(50, 2)
    mask = {"attention_mask": torch.ones_like(tokens)} if with_mask else {}
    cache = cache_of(_generate(model, tokens, {"backend": "knorm", "budget": 24}, max_new_tokens=3, **mask))
    assert cache.prompt_length == 50
    assert [layer.prompt_length for layer in cache.evicting_layers] == [50, 50]


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ({"chunk_size": 16}, {}, [16, 16, 16, 2]),
        ({"chunk_size": None}, {}, [50]),
        ({"chunk_size": 16}, {"prefill_chunk_size": 20}, [20, 20, 10]),
        ({"chunk_size": 16, "budget": 50}, {}, [50]),  # everything is kept anyway
        ({"chunk_size": 16, "budget": 49}, {}, [16, 16, 16, 2]),
        ({"chunk_size": 60}, {}, [50]),
        ({"chunk_size": 16, "budget": 0.5}, {}, [16, 16, 16, 2]),
    ],
)
def test_how_a_prompt_is_split(options: dict[str, Any], given: dict[str, Any], expected: list[int]) -> None:
    model, tokens = model_of(), ids(50, 2)
    with _calls(model) as calls:
        output = _generate(
            model, tokens, {"backend": "knorm", "budget": 24, **options}, max_new_tokens=2, **given
        )
    assert calls == [*expected, 1]
    budget = options.get("budget", 24)
    assert cache_of(output).num_held() == (25 if budget == 0.5 else budget) + 1


def test_a_fraction_of_the_prompt_is_rounded_up() -> None:
    model = model_of()
    for length, held in ((51, 26), (50, 25)):
        output = _generate(model, ids(length), {"backend": "keydiff", "budget": 0.5}, max_new_tokens=1)
        assert cache_of(output).num_held() == held


def test_a_budget_that_nothing_exceeds_is_not_announced_to_other_calls() -> None:
    # `generate()` is told of chunks on the call's own copy of the configuration.
    model = model_of()
    _generate(model, ids(50), {"backend": "knorm", "budget": 24, "chunk_size": 16}, max_new_tokens=2)
    assert model.generation_config.prefill_chunk_size is None
    with _calls(model) as calls:
        _generate(model, ids(50), max_new_tokens=2)
    assert calls == [50, 1]


# --- beams, several sequences, turns, drafts


@pytest.mark.parametrize("backend", EVICTING)
def test_beams_keep_the_history_they_were_scored_with(backend: str) -> None:
    # 70 tokens: some beams have been replaced, and then all of them evict.
    model, tokens, new = model_of(), ids(45), 70
    config = {"backend": backend, "budget": 24, "chunk_size": 16, "evict_at_decode": True}
    output = _generate(
        model, tokens, config, max_new_tokens=new, num_beams=3, num_return_sequences=3, length_penalty=0.0,
        output_scores=True,
    )  # fmt: skip
    beams = output.sequences
    assert len({tuple(row) for row in beams.tolist()}) == 3
    cache = bound_cache(model, config, 45)
    logits = feed(model, cache, beams[:, :-1], [*chunks_of(45, 16), *[1] * (new - 1)])
    log_probabilities = logits[:, 44:].log_softmax(-1).gather(2, beams[:, 45:, None]).sum((1, 2))
    torch.testing.assert_close(output.sequences_scores, log_probabilities, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("backend", EVICTING)
def test_several_sampled_sequences(backend: str) -> None:
    model = model_of()
    config = {"backend": backend, "budget": 24, "chunk_size": 16}
    output = _generate(model, ids(45, 2), config, max_new_tokens=6, do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6
    cache = bound_cache(model, config, 45)
    logits = feed(model, cache, output.sequences[:, :-1], [*chunks_of(45, 16), *[1] * 5])
    torch.testing.assert_close(_logits(output), logits[:, 44:], **CLOSE)


@pytest.mark.parametrize("pads", [None, [0, 32]], ids=["plain", "padded"])
@pytest.mark.parametrize("backend", EVICTING)
def test_a_second_turn_on_the_same_cache(backend: str, pads: list[int] | None) -> None:
    model = model_of()
    config = {"backend": backend, "budget": 24, "chunk_size": 16}
    first_tokens, question = ids(45, 2, pads=pads), ids(37, 2, seed=5)

    def masked(length: int) -> dict[str, Tensor]:
        # Given even where it is all ones: an answer may contain the padding token.
        return {"attention_mask": mask_of(length, [0, 0] if pads is None else pads)}

    cache = kvcache_plugins.build_cache(model, config)
    first = _generate(model, first_tokens, **as_argument(cache), max_new_tokens=6, **masked(45))
    conversation = torch.cat([first.sequences, question], dim=1)  # 45 + 6 + 37, of which 50 have been seen
    with _calls(model) as calls:
        second = _generate(model, conversation, **as_argument(cache), max_new_tokens=6, **masked(88))
    later = chunks_of(38, 16) if SPLITS_LATER_TURNS else [38]
    assert calls == [*later, *[1] * 5]
    assert cache.get_seq_length() == 93
    assert cache.num_held() == 24 + 5  # type: ignore[attr-defined]

    mask = None if pads is None else mask_of(93, pads)
    by_hand = bound_cache(model, config, 45, None if mask is None else mask[:, :45])
    feed(model, by_hand, conversation[:, :50], [*chunks_of(45, 16), *[1] * 5], mask)
    by_hand.bind(model, None if mask is None else mask[:, :88], prompt_length=88)
    logits = feed(model, by_hand, second.sequences[:, 50:-1], [*later, *[1] * 5], mask)
    torch.testing.assert_close(_logits(second), logits[:, 37:], **CLOSE)


@pytest.mark.parametrize("prompt_length", [None, 88], ids=["unknown", "told"])
@pytest.mark.parametrize("backend", ["knorm", "snapkv"])
def test_a_cache_that_is_bound_in_an_answer_goes_on(backend: str, prompt_length: int | None) -> None:
    """A later turn protects more of what is newest, and so does the answer to it."""
    model, tokens = model_of(), ids(240)
    options = {"backend": backend, "budget": 64, "evict_at_decode": True}
    caches = [bound_cache(model, options, 45) for _ in range(2)]
    for cache in caches:
        feed(model, cache, tokens[:, :45], [45])
        cache.bind(model, prompt_length=88)
        feed(model, cache, tokens[:, 45:100], [43, *[1] * 12])
    caches[1].bind(model, prompt_length=prompt_length)
    feed_on = [feed(model, cache, tokens[:, 100:], [1] * 140) for cache in caches]
    assert torch.equal(*feed_on)


@pytest.mark.parametrize("evict_at_decode", [False, True])
@pytest.mark.parametrize("backend", EVICTING)
def test_drafted_tokens(backend: str, evict_at_decode: bool) -> None:
    model, tokens = _drafting()
    config = {"backend": backend, "evict_at_decode": evict_at_decode}
    with _calls(model) as calls:
        drafted = _generate(
            model, tokens, {**config, "budget": 120}, max_new_tokens=40, prompt_lookup_num_tokens=3
        )
    assert max(calls[1:]) == 4
    assert len(calls) < 40
    assert drafted.sequences.tolist() == _undrafted()
    cache = cache_of(drafted)
    assert cache.get_seq_length() == cache.num_held() == 79

    drafted = _generate(
        model, tokens, {**config, "budget": 24}, max_new_tokens=80, prompt_lookup_num_tokens=3
    )
    assert drafted.sequences.shape == (1, 120)
    cache = cache_of(drafted)
    assert cache.get_seq_length() == 119
    assert cache.num_held() <= (24 + 64 if evict_at_decode else 24 + 79)
    newest = cache.evicting_layers[0].ledger.positions[..., -3:]
    assert torch.equal(newest, torch.tensor([116, 117, 118], dtype=newest.dtype).expand_as(newest))


@pytest.mark.parametrize("backend", EVICTING)
def test_drafts_that_come_with_the_prompt(backend: str) -> None:
    model, tokens = model_of(), ids(54)
    drafted, whole = (bound_cache(model, {"backend": backend, "budget": 24}, length) for length in (50, 54))
    drafted.activate_past_recording()
    for cache in (drafted, whole):
        feed(model, cache, tokens, [54])
    assert (drafted.num_held(), whole.num_held()) == (54, 24)
    drafted.crop(0)  # all four are right
    for layer, other in zip(drafted.evicting_layers, whole.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, other.ledger.positions)


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
@pytest.mark.parametrize("backend", ["knorm", "h2o", "streaming_llm"])
def test_a_text_may_hold_the_padding_token_where_an_assistant_drafts(backend: str) -> None:
    """Transformers drops the mask of ones that was given, and the assistant's own call sees a hole there."""
    model, tokens = model_of(), ids(50)
    tokens[0, 20] = 0
    config = {
        "backend": backend,
        "budget": 32,
        "chunk_size": 64,
    }  # the whole prompt, as drafts are read with it
    given = {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0, "max_new_tokens": 6}
    plain = _generate(model, tokens, config, **given)
    drafted = _generate(model, tokens, config, assistant_model=model_of(seed=3), **given)
    assert torch.equal(drafted.sequences, plain.sequences)


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
def test_a_prompt_that_is_read_with_drafts_is_read_whole() -> None:
    # transformers verifies the first drafts in the call that reads the prompt, so memory is not bounded
    model, tokens = model_of(), ids(50)
    config = {"backend": "knorm", "budget": 24, "chunk_size": 16}
    for arguments in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model_of("gpt_neox")}):
        with _calls(model) as calls:
            report = cache_of(_generate(model, tokens, config, max_new_tokens=3, **arguments)).report()
        assert calls[0] >= 50
        assert "verifies drafted tokens" in str(report.whole_prompt_reason)
    with _calls(model_of("gpt_neox")) as calls:  # the assistant reads it in chunks
        _generate(model, tokens, config, max_new_tokens=3, assistant_model=model_of("gpt_neox"))
    assert calls[:4] == [16, 16, 16, 2]
