"""`generate()` with retaining heads: batches, beams, turns, questions on copies, drafts, saved caches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache

import kvcache_plugins
from kvcache_plugins.backends.locret import LocretCache
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.testing.generation import padded_prompt
from tests.eviction.feeding import chunks_of, feed, ids, mask_of, model_of, real_positions
from tests.eviction.locret_feeding import bound_locret, inputs_of_attention, locret

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "compact": {"positions": "compact"},
    "int8": {"storage": {"backend": "int8"}},
    "k8v4": {"storage": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 4}},
    "ragged": {"layer_overrides": {"0": {"budget": 40}}},
}
SPLITS_LATER_TURNS = Version(transformers.__version__) >= Version("5.21")
CLOSE = {"atol": 1e-5, "rtol": 0.0}


def _generate(model: Any, tokens: Tensor, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    if config is not None:
        arguments |= {"cache_implementation": "quantized", "cache_config": config}
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(tokens, **{**settings, **arguments})


def _logits(output: Any) -> Tensor:
    return torch.stack(output.logits, dim=1)


# --- a prompt within the budget


@pytest.mark.parametrize("pads", [None, [0, 17]], ids=["plain", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "qwen3"])
def test_a_prompt_within_the_budget_is_read_as_ever(
    family: str, attention: str, pads: list[int] | None
) -> None:
    model, tokens = model_of(family, attention), ids(60, 2, pads=pads)
    mask = {} if pads is None else {"attention_mask": mask_of(60, pads)}
    expected = _generate(model, tokens, max_new_tokens=12, **mask)
    for options in ({"budget": 60}, {"budget": 500, "evict_at_decode": True}):
        for kernel in ("auto", "torch"):
            got = _generate(model, tokens, locret(model, kernel=kernel, **options), max_new_tokens=12, **mask)
            assert type(cache_of(got)) is LocretCache
            assert torch.equal(got.sequences, expected.sequences)
            if (attention, kernel) == ("sdpa", "torch"):
                assert torch.equal(_logits(got), _logits(expected))
            else:  # kernels read the prompt, or tiles, in other sums
                torch.testing.assert_close(_logits(got), _logits(expected), atol=1e-4, rtol=1e-4)


def test_one_token_more_than_the_budget() -> None:
    model, tokens = model_of(), ids(61)
    got = _generate(model, tokens, locret(model, budget=60), max_new_tokens=12)
    assert cache_of(got).num_held() == 60 + 11
    assert not torch.equal(_logits(got), _logits(_generate(model, tokens, max_new_tokens=12)))


# --- batches


def _compare_with_rows_alone(attention: str, pads: list[int], options: dict[str, Any]) -> None:
    model, prompt, new = model_of("llama", attention), 77, 5
    total, chunk = prompt + new, options["chunk_size"]
    tokens, mask = ids(total, len(pads), pads=pads), mask_of(total, pads)
    cache = bound_locret(model, prompt, mask[:, :prompt], **options)
    together = feed(model, cache, tokens, [*chunks_of(prompt, chunk), *[1] * new], mask)
    for row, pad in enumerate(pads):
        by_itself = bound_locret(model, prompt - pad, **options)
        counts = [*chunks_of(prompt - pad, chunk), *[1] * new]
        alone = feed(model, by_itself, tokens[row : row + 1, pad:], counts)
        for layer, own in zip(cache.evicting_layers, by_itself.evicting_layers, strict=True):
            assert [[p - pad for p in head] for head in real_positions(layer)[row]] == real_positions(own)[0]
            held = own.ledger.scores.shape[2]
            torch.testing.assert_close(
                layer.ledger.scores[row, :, -held:], own.ledger.scores[0], atol=1e-4, rtol=1e-4
            )
        torch.testing.assert_close(together[row, pad:], alone[0], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache_plugins"])
@pytest.mark.parametrize("name", ["dense", "compact", "int8", "k8v4"])
def test_rows_of_a_batch_are_rows_alone(name: str, attention: str) -> None:
    # The last row is shorter than the budget.
    _compare_with_rows_alone(attention, [0, 9, 31, 60], {**OPTIONS[name], "chunk_size": 77})
    # Chunks of a row alone end where those of the batch do if its pads fill whole ones.
    _compare_with_rows_alone(attention, [0, 16, 64], {**OPTIONS[name], "chunk_size": 16})


# --- generate() against a loop


@pytest.mark.parametrize("evict_at_decode", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_generate_is_the_loop_by_hand(name: str, evict_at_decode: bool) -> None:
    model, tokens, new = model_of(), ids(77, 2), 70 if evict_at_decode else 9
    options = {**OPTIONS[name], "evict_at_decode": evict_at_decode}
    output = _generate(model, tokens, locret(model, **options), max_new_tokens=new)
    cache = cache_of(output)
    held = [24 + 4 if evict_at_decode else 24 + new - 1, (40 if name == "ragged" else 24) + new - 1]
    if name == "ragged" and evict_at_decode:
        held[1] = 40 + 4
    assert [layer.held_length for layer in cache.evicting_layers] == [held[name == "ragged"], held[0]]
    by_hand = bound_locret(model, 77, **options)
    logits = feed(model, by_hand, output.sequences[:, :-1], [*chunks_of(77, 16), *[1] * (new - 1)])
    torch.testing.assert_close(_logits(output), logits[:, 76:], **CLOSE)
    for layer, other in zip(cache.evicting_layers, by_hand.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, other.ledger.positions)
        assert torch.equal(layer.ledger.scores, other.ledger.scores)


@pytest.mark.parametrize("name", ["dense", "compact", "ragged"])
def test_beams_keep_the_history_they_were_scored_with(name: str) -> None:
    model, tokens, new = model_of(), ids(45), 70
    options = {**OPTIONS[name], "evict_at_decode": True}
    output = _generate(
        model, tokens, locret(model, **options), max_new_tokens=new, num_beams=3, num_return_sequences=3,
        length_penalty=0.0, output_scores=True,
    )  # fmt: skip
    beams = output.sequences
    assert len({tuple(row) for row in beams.tolist()}) == 3
    cache = bound_locret(model, 45, **options)
    logits = feed(model, cache, beams[:, :-1], [*chunks_of(45, 16), *[1] * (new - 1)])
    log_probabilities = logits[:, 44:].log_softmax(-1).gather(2, beams[:, 45:, None]).sum((1, 2))
    torch.testing.assert_close(output.sequences_scores, log_probabilities, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("name", ["dense", "compact", "k8v4"])
def test_several_sampled_sequences(name: str) -> None:
    model = model_of()
    output = _generate(
        model, ids(45, 2), locret(model, **OPTIONS[name]), max_new_tokens=6, do_sample=True,
        num_return_sequences=3, temperature=2.0,
    )  # fmt: skip
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6
    cache = bound_locret(model, 45, **OPTIONS[name])
    logits = feed(model, cache, output.sequences[:, :-1], [*chunks_of(45, 16), *[1] * 5])
    torch.testing.assert_close(_logits(output), logits[:, 44:], **CLOSE)


# --- turns


@pytest.mark.parametrize("pads", [None, [0, 32]], ids=["plain", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_second_turn_on_the_same_cache(name: str, pads: list[int] | None) -> None:
    model, options = model_of(), OPTIONS[name]
    first_tokens, question = ids(45, 2, pads=pads), ids(37, 2, seed=5)

    def masked(length: int) -> dict[str, Tensor]:
        return {"attention_mask": mask_of(length, [0, 0] if pads is None else pads)}

    cache: Any = kvcache_plugins.build_cache(model, locret(model, **options))
    first = _generate(model, first_tokens, **as_argument(cache), max_new_tokens=6, **masked(45))
    conversation = torch.cat([first.sequences, question], dim=1)  # 45 + 6 + 37, of which 50 have been seen
    second = _generate(model, conversation, **as_argument(cache), max_new_tokens=6, **masked(88))
    assert cache.get_seq_length() == 93
    later = chunks_of(38, 16) if SPLITS_LATER_TURNS else [38]

    mask = None if pads is None else mask_of(93, pads)
    by_hand = bound_locret(model, 45, None if mask is None else mask[:, :45], **options)
    feed(model, by_hand, conversation[:, :50], [*chunks_of(45, 16), *[1] * 5], mask)
    by_hand.bind(model, None if mask is None else mask[:, :88], prompt_length=88)
    logits = feed(model, by_hand, second.sequences[:, 50:-1], [*later, *[1] * 5], mask)
    torch.testing.assert_close(_logits(second), logits[:, 37:], **CLOSE)
    for layer, other in zip(cache.evicting_layers, by_hand.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.scores, other.ledger.scores)


@pytest.mark.parametrize("name", OPTIONS)
def test_several_questions_to_one_text(name: str) -> None:
    # Each on a copy of the cache: as if the text had been read for it alone.
    model, document = model_of(), ids(60, 2)

    def read() -> LocretCache:
        cache = bound_locret(model, 60, **OPTIONS[name])
        feed(model, cache, document, chunks_of(60, 16))
        return cache

    def ask(cache: LocretCache, question: int) -> Tensor:
        tokens = torch.cat([document, ids(11, 2, seed=50 + question)], dim=1)
        mask = {"attention_mask": torch.ones_like(tokens)}
        return _logits(_generate(model, tokens, **as_argument(cache), max_new_tokens=6, **mask))

    prefilled = read()
    before = _state(prefilled)
    for question in range(3):
        assert torch.equal(ask(copy.deepcopy(prefilled), question), ask(read(), question))
    _same_state(_state(prefilled), before)


def test_a_copy_serves_a_copy_of_the_model() -> None:
    model = model_of()
    other, cache = copy.deepcopy(model), bound_locret(model, 60)
    feed(model, cache, ids(60), chunks_of(60, 16))
    copied = copy.deepcopy(cache).bind(other, prompt_length=60)
    new = ids(3, seed=4)
    assert torch.equal(feed(other, copied, new, [1, 1, 1]), feed(model, cache, new, [1, 1, 1]))


# --- drafts


@pytest.mark.parametrize("evict_at_decode", [False, True])
@pytest.mark.parametrize("name", ["dense", "compact"])
def test_drafted_tokens(name: str, evict_at_decode: bool) -> None:
    model: Any = model_of(vocab_size=16)  # so small that drafts are found, and some are accepted
    tokens = padded_prompt((40,), vocab_size=16)["input_ids"]
    drafts = {"prompt_lookup_num_tokens": 3}
    options = {**OPTIONS[name], "evict_at_decode": evict_at_decode}
    with inputs_of_attention(model) as seen:
        drafted = _generate(model, tokens, locret(model, budget=120, **options), max_new_tokens=60, **drafts)
    assert len(seen[0]) < 60 and max(states.shape[1] for states in seen[0][1:]) == 4
    greedy = _generate(model, tokens, **as_argument(DynamicCache(config=model.config)), max_new_tokens=60)
    assert torch.equal(drafted.sequences, greedy.sequences)

    drafted = _generate(model, tokens, locret(model, **options), max_new_tokens=60, **drafts)
    cache = cache_of(drafted)
    assert cache.get_seq_length() == 99
    assert cache.num_held() == 24 + 59  # not yet more than the budget and 64
    if not evict_at_decode:
        # Accepted drafts are what greedy decoding would have given, with a prompt that is read whole:
        # transformers reads it together with the first drafts.
        greedy = _generate(model, tokens, locret(model, **options, chunk_size=None), max_new_tokens=60)
        assert torch.equal(drafted.sequences, greedy.sequences)
        for layer, other in zip(cache.evicting_layers, cache_of(greedy).evicting_layers, strict=True):
            assert torch.equal(layer.ledger.positions, other.ledger.positions)
            torch.testing.assert_close(layer.ledger.scores, other.ledger.scores, atol=1e-4, rtol=1e-4)


# --- saved caches


def _state(cache: LocretCache) -> list[dict[str, Tensor]]:
    return [{name: t.clone() for name, t in layer.state()[0].items()} for layer in cache.evicting_layers]


def _same_state(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys() >= {"scores", "positions"}
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("length", [77, 32], ids=["after-the-prompt", "in-the-prompt"])
@pytest.mark.parametrize("name", OPTIONS)
def test_save_load_continue(name: str, length: int, tmp_path: Path) -> None:
    model, pads, total = model_of(), [0, 9, 30], 77 + 70
    tokens, mask = ids(total, 3, pads=pads), mask_of(total, pads)
    options = {**OPTIONS[name], "evict_at_decode": True}
    cache = bound_locret(model, 77, mask[:, :77], **options)
    feed(model, cache, tokens[:, :length], chunks_of(length, 16), mask)
    cache.save_pretrained(tmp_path)
    loaded = kvcache_plugins.KVCache.from_pretrained(tmp_path, model)
    assert isinstance(loaded, LocretCache) and loaded.config == cache.config
    _same_state(_state(loaded), _state(cache))
    if name == "compact":
        loaded.bind(model, mask[:, :77], prompt_length=77)  # what a restarted generate() does
    # the 65th token, alone as those around it, makes room
    rest = [*chunks_of(77 - length, 16), *[1] * 4, *[9] * 6, *[1] * 12]
    answers = [feed(model, one, tokens[:, length:], rest, mask) for one in (loaded, cache)]
    assert torch.equal(*answers)
    _same_state(_state(loaded), _state(cache))


def test_a_cache_loaded_for_a_configuration_is_bound_by_generate(tmp_path: Path) -> None:
    model, tokens = model_of(), ids(77)
    cache = bound_locret(model, 77)
    feed(model, cache, tokens[:, :32], [16, 16])
    cache.save_pretrained(tmp_path)
    loaded = kvcache_plugins.KVCache.from_pretrained(tmp_path, model.config)
    mask = {"attention_mask": torch.ones_like(tokens)}
    got = _generate(model, tokens, **as_argument(loaded), max_new_tokens=6, **mask)
    expected = _generate(model, tokens, **as_argument(cache), max_new_tokens=6, **mask)
    assert torch.equal(_logits(got), _logits(expected))
