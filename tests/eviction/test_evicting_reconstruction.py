"""KVzip against brute force, and what a repetition must leave as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import kvcache_plugins
from kvcache_plugins.attention import limits, strongest
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.eviction.repetition import LEAD_LENGTH, Passage
from kvcache_plugins.models.cache_argument import as_argument, cache_of, given_cache
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import bound_cache, feed, ids, mask_of, model_of, real_positions
from tests.models.families import small_model
from tests.reference.eviction import Call, Policy, own_calls
from tests.reference.reconstruction import Repetition, run_with_reconstruction

PROMPT: list[Call] = [(32, "chunk"), (16, "chunk"), (29, "prompt")]
DECODE: list[Call] = [(1, "decode")] * 4
POLICY = Policy("given", 24, sinks=4, stabilizers=3, local=3)
INT8 = {"backend": "int8"}
PADS = [0, 32, 48]  # whole calls, so that those of the rows alone are the same


@contextmanager
def _repetitions(model: nn.Module) -> Iterator[list[int]]:
    """Tokens of every call that repeats something."""
    lengths: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(given_cache(kwargs), "is_repeating", False):
            lengths.append(kwargs["input_ids"].shape[1])

    handle = model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


def _interrupted(*args: Any) -> Tensor:
    raise KeyboardInterrupt


def _compare(
    calls: list[Call],
    pads: list[int] | None = None,
    policy: Policy = POLICY,
    repetition: Repetition | None = None,
    rows: int = 2,
    **options: Any,
) -> None:
    model, counts, repetition = model_of(), [count for count, _ in calls], repetition or Repetition()
    total = sum(counts)
    tokens = ids(total, rows if pads is None else len(pads), pads=pads)
    mask = None if pads is None else mask_of(total, pads)
    cache, parts, start = None, [], 0
    for end in [i + 1 for i, (_, phase) in enumerate(calls) if phase == "decode"]:
        if end < len(calls) and calls[end][1] == "decode":
            continue  # one turn: a prompt and its answer
        prompt = sum(counts[: max(i + 1 for i, (_, phase) in enumerate(calls[:end]) if phase == "prompt")])
        if cache is None:
            config = {"backend": "kvzip", "budget": 24, "repeat_length": repetition.length, **options}
            cache = bound_cache(model, config | {"repeat_prompt": list(repetition.prompt)}, prompt, mask)
        cache.bind(model, mask, prompt_length=prompt)
        turn = slice(sum(counts[:start]), sum(counts[:end]))
        parts.append(feed(model, cache, tokens[:, turn], counts[start:end], mask))
        start = end
    assert cache is not None
    logits = torch.cat(parts, dim=1)
    for row, pad in enumerate(pads or [0] * len(tokens)):
        expected, survivors = run_with_reconstruction(
            model, tokens[row : row + 1, pad:], own_calls(calls, pad), policy, repetition
        )
        for layer, held in zip(cache.evicting_layers, survivors, strict=True):
            assert [[p - pad for p in head] for head in real_positions(layer)[row]] == held[0]
        torch.testing.assert_close(logits[row, pad:], expected[0], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("pads", [None, PADS], ids=["plain", "padded"])
def test_what_a_repetition_needs_stays(pads: list[int] | None) -> None:
    _compare([*PROMPT, *DECODE], pads)


@pytest.mark.parametrize(
    "repetition", [Repetition(length=11), Repetition(prompt=[7, 300, 41]), Repetition(9, [5])], ids=str
)
def test_passages_and_words_that_ask(repetition: Repetition) -> None:
    _compare([*PROMPT, *DECODE], repetition=repetition)


@pytest.mark.parametrize("pads", [None, PADS], ids=["plain", "padded"])
def test_a_second_turn_is_repeated_with_the_answer_before_it(pads: list[int] | None) -> None:
    _compare([*PROMPT, *DECODE, (20, "chunk"), (9, "prompt"), *DECODE], pads, local_length=3)


def test_generated_tokens_are_judged_when_some_must_go() -> None:
    policy = Policy("given", 24, sinks=4, stabilizers=3, local=3, evicts_at_decode=True)
    _compare([*PROMPT, *[(1, "decode")] * 135], policy=policy, evict_at_decode=True)


def test_heads_share_a_budget() -> None:
    # one row: those of a batch share alike
    policy = Policy("given", 24, sinks=2, stabilizers=3, local=3, head_floor=0.5)
    _compare([*PROMPT, *DECODE, (20, "chunk"), (9, "prompt"), *DECODE], policy=policy, rows=1,
             sink_length=2, head_floor=0.5, local_length=3)  # fmt: skip


# --- the weights themselves


def _attention(groups: int, keys: int, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, which see which, and which count."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, queries, 16, generator=generator, dtype=torch.float64) * 3
    key = torch.randn(2, 2, keys, 16, generator=generator, dtype=torch.float64)
    visible = torch.rand(2, keys, generator=generator) < 0.4
    visible[:, keys - queries :] = True  # themselves
    return query, key, visible, torch.rand(2, queries, generator=generator) < 0.7


@pytest.mark.parametrize("tile", [1, 1 << 22], ids=["query-by-query", "at-once"])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_strongest_attention(
    tile: int, softcap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TILE_SCORES", tile)
    query, key, visible, counted = _attention(groups=3, keys=19, queries=11)
    sinks = torch.linspace(-1, 2, 6) if has_sinks else None
    options = AttentionOptions(scaling=0.3, softcap=softcap, sink_logits=sinks, mask=torch.zeros(1).bool())
    found = strongest.strongest_attention(query, key, visible, options, counted)
    visible = visible[:, None] & torch.ones(11, 19, dtype=torch.bool).tril(19 - 11)
    logits = torch.einsum("bhgqd,bhkd->bhgqk", query.unflatten(1, (2, 3)), key) * 0.3
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    weights = logits.masked_fill(~visible[:, None, None], -torch.inf).exp()
    share = torch.zeros(6) if sinks is None else sinks.double().exp()
    weights = weights / (weights.sum(-1, keepdim=True) + share.view(1, 2, 3, 1, 1))
    expected = weights.masked_fill(~counted[:, None, None, :, None], 0.0).amax((2, 3))
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0.0)
    assert found.max() > 0.5


def _scores_of_the_dense_model(
    model: Any, text: Tensor, length: int, sinks: int, layer: int, num_heads: int
) -> Tensor:
    """Largest weights that the model itself returns, shared out anew: `(B, H, T)`."""
    seen, found = text.shape[1], []
    for start in range(0, seen, length):
        passage = slice(start, min(start + length, seen))
        repeated = text[:, max(0, start - 8) : passage.stop]
        with torch.no_grad():
            output = model(torch.cat([text, repeated], dim=1), output_attentions=True, use_cache=False)
        shared = torch.zeros(repeated.shape[1], seen + repeated.shape[1], dtype=torch.bool)
        shared[:, : min(sinks, start)] = shared[:, passage] = True
        shared[:, seen:] = torch.ones(repeated.shape[1], repeated.shape[1], dtype=torch.bool).tril()
        weights = output.attentions[layer][:, :, seen:].double() * shared
        weights = weights / weights.sum(-1, keepdim=True)
        found.append(weights.unflatten(1, (num_heads, -1)).amax((2, 3))[..., passage])
    return torch.cat(found, dim=-1)


@pytest.mark.parametrize(
    ("family", "layer", "attention"),
    [
        ("bamba", 1, 0),  # counts tokens of every call from 0, unless it is told
        ("gemma2", 1, 1),
        ("deepseek_v3", 1, 1),
        ("opt", 0, 0),
    ],
)
def test_scores_are_what_the_dense_model_attends_to(family: str, layer: int, attention: int) -> None:
    model = small_model(family)
    model.set_attn_implementation("eager")
    text = ids(50, 2) % 125 + 3
    config = {"backend": "kvzip", "budget": 49, "sink_length": 3, "repeat_length": 17}
    cache = bound_cache(model, config, 50)
    feed(model, cache, text, [50])
    held = cache.layers[layer]
    expected = _scores_of_the_dense_model(model, text, 17, 3, attention, held.num_heads)
    expected = expected.gather(2, held.ledger.positions.long())
    torch.testing.assert_close(held.ledger.scores.double(), expected, atol=1e-4, rtol=0.0)


# --- what a repetition leaves as it was


@pytest.mark.parametrize(
    ("family", "storage"),
    [("falcon_h1", None), ("qwen3_next", None), ("gemma2", INT8), ("deepseek_v3", INT8)],
    ids=str,
)
def test_models_with_other_layers_go_on_where_they_were(family: str, storage: Any) -> None:
    # Branches, recurrent layers, windows and latents: read in chunks, each repeated, nothing evicted before
    # the last one. A storage packs behind what is read exactly, so there two caches are compared.
    model = tiny_model(family)
    tokens = ids(60, 2)[:, :60] % model.config.vocab_size
    config = {"budget": 59, "chunk_size": 16, "sink_length": 2, "storage": storage}
    found = [
        feed(model, bound_cache(model, {"backend": name, **config}, 60), tokens, [16, 16, 16, 12])
        for name in ("kvzip", "knorm")
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0.0)


def test_frequencies_that_follow_the_length_do_not_follow_a_repetition() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", vocab_size=512, max_position_embeddings=40, rope_parameters=rope)
    found = [
        feed(model, bound_cache(model, {"backend": name, "budget": 76}, 77), ids(77), [30, 30, 17])
        for name in ("kvzip", "knorm")
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0.0)


def test_nothing_is_repeated_of_a_prompt_that_fits() -> None:
    model = model_of()
    cache = bound_cache(model, {"backend": "kvzip", "budget": 77}, 77)
    with _repetitions(model) as lengths:
        feed(model, cache, ids(77), [32, 45])
        assert lengths == []
        cache.bind(model, prompt_length=90)  # the next turn does not: now all of it is judged
        feed(model, cache, ids(13, seed=1), [13])
    assert lengths == [90]
    assert [layer.held_length for layer in cache.evicting_layers] == [77, 77]


def test_pads_alone_are_not_repeated() -> None:
    model, mask = model_of(), mask_of(77, [40, 50])
    cache = bound_cache(model, {"backend": "kvzip", "budget": 24}, 77, mask)
    with _repetitions(model) as lengths:
        feed(model, cache, ids(77, 2, pads=[40, 50]), [20, 20, 20, 17], mask)
    assert lengths == [20, 25]  # 8 of those before; 20 and 10 real ones, then 17
    assert all(layer.held_length == 24 for layer in cache.evicting_layers)


def test_drafts_are_judged_once_they_are_accepted() -> None:
    model, prompt = model_of(), torch.cat([ids(30)] * 3, dim=1)
    config = {"backend": "kvzip", "budget": 40, "chunk_size": 32}

    def generated(config: dict[str, Any], **drafting: Any) -> Any:
        return model.generate(
            prompt, do_sample=False, max_new_tokens=90, min_new_tokens=90, return_dict_in_generate=True,
            cache_implementation="quantized", cache_config=config, **drafting,
        )  # fmt: skip

    plain = generated({**config, "chunk_size": None})  # drafting reads a prompt whole
    assert generated(config, prompt_lookup_num_tokens=4).sequences.tolist() == plain.sequences.tolist()

    cache = cache_of(generated({**config, "evict_at_decode": True}, prompt_lookup_num_tokens=4))
    new, lead = cache.evicting_layers[0].text()
    assert cache.num_held() <= 40 + 64 + 4
    assert new.shape[1] < 90 and lead.shape[1] == 8
    held = [layer.ledger for layer in cache.evicting_layers]
    assert all((ledger.positions[:, :, -new.shape[1] :].diff() == 1).all() for ledger in held)
    assert all((ledger.scores[:, :, -new.shape[1] :] == 0).all() for ledger in held)  # not judged yet
    assert all((ledger.scores[:, :, : -new.shape[1]] > 0).float().mean() > 0.9 for ledger in held)


def test_a_copy_judges_by_the_model_it_is_used_with() -> None:
    model = model_of()
    cache = bound_cache(model, {"backend": "kvzip", "budget": 24}, 77)
    feed(model, cache, ids(40), [40])
    copied, other = copy.deepcopy(cache), copy.deepcopy(model)
    rest = [feed(used, kept, ids(37, seed=3), [37]) for used, kept in ((model, cache), (other, copied))]
    assert torch.equal(*rest)
    for layer, twin in zip(cache.evicting_layers, copied.evicting_layers, strict=True):
        assert torch.equal(layer.ledger.positions, twin.ledger.positions)


def test_weights_that_are_offloaded_are_fetched_for_a_repetition() -> None:
    model = model_of()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert offloaded.device.type == "meta"
    read = []
    for used in (model, offloaded):
        # by torch: of a model whose weights lie elsewhere it is not known where it will attend
        cache = bound_cache(used, {"backend": "kvzip", "budget": 24, "kernel": "torch"}, 77)
        read.append(feed(used, cache, ids(77), [40, 37]))
    assert torch.equal(*read)


@pytest.mark.parametrize("first", [16, 36], ids=["nothing-has-gone", "some-has"])
@pytest.mark.parametrize("head_floor", [None, 0.3])
def test_an_interrupted_repetition_is_made_up_for(
    head_floor: float | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = model_of(), ids(77)
    config = {"backend": "kvzip", "budget": 24, "head_floor": head_floor}
    cache, other = (bound_cache(model, config, 77) for _ in range(2))
    feed(model, cache, tokens[:, :first], [first])
    with monkeypatch.context() as patch:
        patch.setattr(Passage, "needed", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, tokens[:, first:40], [40 - first])
    cache.bind(model, prompt_length=77)
    feed(model, cache, tokens[:, 40:], [20, 17])
    feed(model, other, tokens, [first, 60 - first, 17])  # what was not repeated then is with the next tokens
    assert [real_positions(layer) for layer in cache.evicting_layers] == [
        real_positions(layer) for layer in other.evicting_layers
    ]


def test_a_cache_that_was_interrupted_can_be_reset_and_cropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of(), ids(40)
    found = []
    for forget in (lambda cache: cache.crop(-40), lambda cache: cache.reset()):
        cache = bound_cache(model, {"backend": "kvzip", "budget": 24}, 40)
        with monkeypatch.context() as patch:
            patch.setattr(Passage, "needed", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                feed(model, cache, tokens, [40])
        forget(cache)
        cache.bind(model, prompt_length=77)
        feed(model, cache, ids(77), [40, 37])
        found.append([real_positions(layer) for layer in cache.evicting_layers])
    other = bound_cache(model, {"backend": "kvzip", "budget": 24}, 77)
    feed(model, other, ids(77), [40, 37])
    assert found == [[real_positions(layer) for layer in other.evicting_layers]] * 2


# --- what is refused


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat_length": 0}, r"KVzipConfig\.repeat_length must be an integer >= 1, got 0"),
        ({"repeat_prompt": "Repeat."}, r"repeat_prompt must be a list of token ids, .*got 'Repeat\.'"),
        ({"repeat_prompt": [5, -1]}, r"repeat_prompt must be a list of token ids, .*got \[5, -1\]"),
        ({"repeat_prompt": [5, 512]}, r"repeat_prompt.*512.*vocabulary of 512"),
        ({"repeat_prompt": [True]}, r"repeat_prompt must be a list of token ids, .*got \[True\]"),
        (
            {"layer_overrides": {"0": {"repeat_length": 9}}},
            r"'repeat_length' cannot be set for a single layer",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvcache_plugins.build_cache(model_of(), {"backend": "kvzip", "budget": 24, **options})


def test_heads_of_several_processes_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    monkeypatch.setattr(model, "_tp_size", 2)
    bound_cache(model, {"backend": "kvzip", "budget": 24}, 40)
    message = r"KVzipConfig\.head_floor .*spread over 2 by tp_plan\. Allowed here is None"
    with pytest.raises(ValueError, match=message):
        bound_cache(model, {"backend": "kvzip", "budget": 24, "head_floor": 0.2}, 40)


def test_embeddings_cannot_be_repeated() -> None:
    """Which is said before a token of them is read."""
    model: Any = model_of()
    embedded, read = model.get_input_embeddings()(ids(40)), []
    cache = bound_cache(model, {"backend": "kvzip", "budget": 24}, 40)
    message = r"'kvzip' has the model repeat .* needs `input_ids`"
    handle = model.model.layers[0].register_forward_pre_hook(lambda *given: read.append(given))
    with handle, pytest.raises(UnsupportedOperationError, match=message):
        model(inputs_embeds=embedded, **as_argument(cache))
    assert not read and cache.get_seq_length() == 0


@pytest.mark.usefixtures("_no_forward")
def test_a_table_of_positions_must_have_room_for_the_repetition() -> None:
    model = tiny_model("gpt2", max_position_embeddings=128)
    config = {"backend": "kvzip", "budget": 40, "chunk_size": 32}
    bound_cache(model, config, 128 - 32 - 8)
    with pytest.raises(
        ValueError, match=r"'kvzip' .* takes 129 positions here, .*'gpt2' have 128\. Allowed are"
    ):
        bound_cache(model, config, 128 - 32 - 7)
    bound_cache(model, {**config, "budget": 100}, 100)  # nothing is repeated
    bound_cache(model, {**config, "chunk_size": 1024}, 60)  # no more is repeated at once than there is
    with pytest.raises(ValueError, match=r"takes 130 positions here"):
        bound_cache(model, {**config, "chunk_size": 1024}, 61)


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("prompt", "positions", "length", "takes"),
    [(60, 256, 183, 257), (30, 256, 183, 257), (30, 200, 104, 218)],
    ids=["judged-prompt", "prompt-that-fits", "first-eviction"],
)
def test_a_table_of_positions_must_have_room_for_what_an_answer_repeats(
    prompt: int, positions: int, length: int, takes: int
) -> None:
    # 8 + 65 tokens behind the last one; of a prompt that fits, all of the first 105 at once
    model = tiny_model("gpt2", max_position_embeddings=positions)
    config = {"backend": "kvzip", "budget": 40, "chunk_size": 32, "evict_at_decode": True}
    kvcache_plugins.build_cache(model, config).bind(model, None, length, prompt_length=prompt)
    with pytest.raises(ValueError, match=rf"takes {takes} positions here, .* have {positions}\."):
        kvcache_plugins.build_cache(model, config).bind(model, None, length + 1, prompt_length=prompt)


def test_a_table_of_positions_must_have_room_for_an_answer_that_is_repeated_with_the_next_turn() -> None:
    model = tiny_model("gpt2", max_position_embeddings=320)
    cache = bound_cache(model, {"backend": "kvzip", "budget": 40, "chunk_size": 32}, 60)
    feed(model, cache, ids(160) % 128, [32, 28, *[1] * 100])
    with pytest.raises(ValueError, match=r"takes 332 positions here"):  # 160 + 32, 8, 100 + 32
        cache.bind(model, prompt_length=200)


def test_attention_that_is_not_shown_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_plugins.eviction.cache.takes_values_apart", lambda config: False)
    model = small_model("diffllama")  # multiplies decoded keys itself
    cache = bound_cache(model, {"backend": "kvzip", "budget": 24}, 40)
    with pytest.raises(UnsupportedOperationError, match="was not shown by its model"):
        feed(model, cache, ids(40) % model.config.vocab_size, [40])


def test_of_the_text_that_was_judged_the_last_tokens_are_kept_and_no_more() -> None:
    model, tokens = model_of(), ids(96)
    cache = bound_cache(model, {"backend": "kvzip", "budget": 24, "evict_at_decode": True}, 96)
    feed(model, cache, tokens, [32, 32, 32])
    new, lead = cache._memory.text()  # type: ignore[attr-defined]
    assert new.shape[1] == 0 and lead.tolist() == tokens[:, -LEAD_LENGTH:].tolist()
