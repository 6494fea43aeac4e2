"""Expected Attention: which queries count, where they are turned to, and what is remembered of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import kvcache_plugins as kvp
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.backends import expected_attention
from kvcache_plugins.backends.expected_attention import ExpectedAttentionLayer
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.testing.generation import padded_prompt
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of
from tests.models.families import small_model
from tests.reference.eviction import expected_weights

BACKEND = {"backend": "expected_attention", "budget": 24}
SINKS = 4
LENGTH, PADS = 77, [0, 19, 74]
# Llama and Qwen 3 rotate pairs of halves, GLM-4 neighbours, Phi and GPT-NeoX the first channels only.
ROTATING = ("glm4", "gpt_neox", "llama", "phi", "qwen3")


@contextmanager
def _plain_queries(model: Any, found: list[list[Tensor]]) -> Iterator[None]:
    """Collect the queries `(B, T, Hq, D)` of every layer and call, before rotation."""
    config, handles = model.config, []
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def note(layer_idx: int, projected: Tensor, name: str) -> None:
        if name == "query_key_value":  # of every head: its query, its key, its value
            projected = projected.unflatten(-1, (-1, 3, dim))[..., 0, :]
        elif name == "c_attn":
            projected = projected[..., : projected.shape[-1] // 3]
        found[layer_idx].append(projected.reshape(*projected.shape[:2], -1, dim).clone())

    for module in model.modules():
        if not hasattr(module, "layer_idx"):
            continue
        for name in ("q_norm", "q_proj", "query_key_value", "c_attn"):
            part = getattr(module, name, None)
            if part is not None:
                handles.append(
                    part.register_forward_hook(
                        lambda _, __, output, index=module.layer_idx, name=name: note(index, output, name)
                    )
                )
                break
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _remembered(layer: EvictingLayer) -> dict[str, Tensor]:
    """What a layer remembers of the queries so far, none of which waits any more."""
    assert isinstance(layer, ExpectedAttentionLayer)
    layer.count_waiting()
    return {name: tensor for name, tensor in layer.companions.items() if name != "waiting"}


def _check_moments(cache: EvictingCache, found: list[list[Tensor]], pads: list[int]) -> None:
    """Compare with mean and covariance of what counts of `found`, in float64."""
    for layer, parts in zip(cache.evicting_layers, found, strict=True):
        queries = torch.cat(parts, 1).transpose(1, 2).double()
        moments = _remembered(layer)
        assert set(moments) == {"count", "mean", "scatter"}
        for row, pad in enumerate(pads):
            own = queries[row, :, pad + SINKS :]
            assert int(moments["count"][row]) == own.shape[1]
            torch.testing.assert_close(moments["mean"][row].double(), own.mean(1), atol=1e-4, rtol=0.0)
            spread = torch.stack([torch.cov(head.T, correction=0) for head in own])
            got = moments["scatter"][row].double() / own.shape[1]
            torch.testing.assert_close(got, spread, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [16, LENGTH])
@pytest.mark.parametrize(
    ("family", "positions"),
    [("gpt2", "absolute"), *((family, kind) for family in ROTATING for kind in ("absolute", "compact"))],
)
def test_moments_are_those_of_queries_before_rotation(family: str, positions: str, chunk: int) -> None:
    model = model_of(family)
    found: list[list[Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    tokens, mask = ids(LENGTH + 9, 3, pads=PADS), mask_of(LENGTH + 9, PADS)
    cache = bound_cache(model, {**BACKEND, "positions": positions, "evict_at_decode": True}, LENGTH, mask)
    with _plain_queries(model, found):
        feed(model, cache, tokens, [*chunks_of(LENGTH, chunk), *[1] * 9], mask)
    assert len(found[0]) == len(chunks_of(LENGTH, chunk)) + 9
    assert cache.num_held() == 24 + 9
    _check_moments(cache, found, PADS)


def test_many_runs_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_attention, "_TILE_VALUES", 4 * 16 * 3 * 7)  # of three rows, seven tokens
    test_moments_are_those_of_queries_before_rotation("llama", "absolute", 16)


def test_rotary_embeddings_with_a_factor() -> None:
    # YaRN multiplies cosines and sines; its factor stays with the queries, as it does with the keys.
    model = tiny_model("gpt_oss", attn_implementation="kvcache_plugins", vocab_size=512)
    layer_idx = model.config.layer_types.index("full_attention")
    found: list[list[Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    cache = bound_cache(model, BACKEND, LENGTH)
    with _plain_queries(model, found):
        feed(model, cache, ids(LENGTH, 2), chunks_of(LENGTH, 16))
    factor = model.model.rotary_emb.attention_scaling
    assert abs(factor - 1) > 0.05
    kept = [layer for layer in cache.evicting_layers if layer.layer_idx == layer_idx]
    assert len(kept) == 1 and kept[0].held_length == 24
    queries = torch.cat(found[layer_idx], 1).transpose(1, 2)[:, :, SINKS:] * factor
    torch.testing.assert_close(kept[0].companions["mean"], queries.mean(2), atol=1e-4, rtol=0.0)


# ---- drafts ----


def _same_moments(one: EvictingCache, other: EvictingCache) -> None:
    for layer, twin in zip(one.evicting_layers, other.evicting_layers, strict=True):
        ours, others = _remembered(layer), _remembered(twin)
        assert ours.keys() == others.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, others[name], atol=1e-4, rtol=1e-4)
        assert torch.equal(layer.ledger.positions, twin.ledger.positions)


def test_rejected_drafts_do_not_count() -> None:
    model, tokens, wrong = model_of(), ids(LENGTH + 80, 2), ids(40, 2, seed=9)
    config = {**BACKEND, "evict_at_decode": True}
    caches = [bound_cache(model, config, LENGTH) for _ in range(2)]
    for cache in caches:
        feed(model, cache, tokens[:, :LENGTH], chunks_of(LENGTH, 16))
    plain, drafted = caches
    for layer in drafted.evicting_layers:
        layer.activate_past_recording()
    start = LENGTH
    while start < LENGTH + 80:
        count = min(3, LENGTH + 80 - start)
        rejected = start % 5  # none, now and then
        parts = [tokens[:, start : start + count], wrong[:, :rejected]]
        drafts = torch.cat(parts, 1)
        # in one call, or in two before the crop
        calls = [drafts.shape[1]] if start % 2 else [1, drafts.shape[1] - 1]
        feed(model, drafted, drafts, [call for call in calls if call])
        assert "drafted" in drafted.evicting_layers[0].companions
        drafted.crop(-rejected)
        feed(model, plain, parts[0], [count])
        _same_moments(drafted, plain)
        start += count
    assert plain.num_held() < LENGTH  # room was made, by the same worth


def test_drafts_that_nobody_crops_count_once_others_come() -> None:
    model, tokens = model_of(), ids(LENGTH + 20, 2)
    found: list[list[Tensor]] = [[] for _ in range(2)]
    cache = bound_cache(model, BACKEND, LENGTH)
    with _plain_queries(model, found):
        feed(model, cache, tokens[:, :LENGTH], [LENGTH])
        for layer in cache.evicting_layers:
            layer.activate_past_recording()
        feed(model, cache, tokens[:, LENGTH : LENGTH + 9], [5, 4])
        assert [layer.companions["drafted"].shape[2] for layer in cache.evicting_layers] == [9, 9]
        assert int(cache.evicting_layers[0].companions["count"][0]) == LENGTH - SINKS
        cache.bind(model, prompt_length=LENGTH + 20)  # of a second turn, which is no draft
        feed(model, cache, tokens[:, LENGTH + 9 :], [11])
    _check_moments(cache, found, [0, 0])


def test_other_tokens_that_crop_removes_have_counted() -> None:
    model, cache = model_of(), bound_cache(model_of(), BACKEND, LENGTH)
    feed(model, cache, ids(LENGTH + 3, 2), [LENGTH, 3])
    before = copy.deepcopy(cache)
    cache.crop(-3)
    for layer, other in zip(cache.evicting_layers, before.evicting_layers, strict=True):
        assert int(layer.companions["count"][0]) == LENGTH + 3 - SINKS
        ours, others = _remembered(layer), _remembered(other)
        assert all(torch.equal(tensor, others[name]) for name, tensor in ours.items())
    cache.crop(-LENGTH)
    assert [layer.companions for layer in cache.evicting_layers] == [{}, {}]
    cache.bind(model, prompt_length=LENGTH)
    feed(model, cache, ids(LENGTH, 2, seed=4), chunks_of(LENGTH, 16))
    fresh = bound_cache(model, BACKEND, LENGTH)
    feed(model, fresh, ids(LENGTH, 2, seed=4), chunks_of(LENGTH, 16))
    _same_moments(cache, fresh)


def test_drafts_of_prompt_lookup() -> None:
    model = model_of(vocab_size=16)
    tokens = padded_prompt((40,), vocab_size=16)["input_ids"]
    settings: dict[str, Any] = {
        "cache_implementation": "quantized", "cache_config": {**BACKEND, "budget": 120}, "max_new_tokens": 60,
        "do_sample": False, "return_dict_in_generate": True,
    }  # fmt: skip
    drafted = model.generate(tokens, prompt_lookup_num_tokens=3, **settings)  # type: ignore[operator]
    greedy = model.generate(tokens, **settings)  # type: ignore[operator]
    assert drafted.sequences.tolist() == greedy.sequences.tolist()
    _same_moments(cache_of(drafted), cache_of(greedy))


# ---- worth ----


@pytest.mark.parametrize(
    ("storage", "positions"),
    [
        (None, "absolute"),
        ({"backend": "int8"}, "absolute"),
        ({"backend": "int4", "key_bits": 8, "residual_length": 7}, "absolute"),
        ({"backend": "float8"}, "absolute"),
        ({"backend": "kvquant", "calibration": "normal_float", "residual_length": 3}, "compact"),
    ],
    ids=["dense", "int8", "int4", "float8", "kvquant"],
)
def test_worth_is_that_of_what_is_stored(storage: Any, positions: str) -> None:
    model, pads = model_of(), [0, 50]
    config = {
        **BACKEND, "budget": 200, "sink_length": 2, "storage": storage, "positions": positions,
        "epsilon": 0.01, "future_length": 20,
    }  # fmt: skip
    tokens, mask = ids(330, 2, pads=pads), mask_of(330, pads)
    cache = bound_cache(model, config, 329, mask)
    feed(model, cache, tokens[:, :329], [150, 150, 29], mask)
    feed(model, cache, tokens[:, 329:], [1], mask)
    scaling = model.config.head_dim**-0.5
    for layer in cache.evicting_layers:
        assert isinstance(layer, ExpectedAttentionLayer) and 120 < layer.held_length <= 201
        worth = layer.ranks()
        keys, values = (
            StreamView(stream, stream.packed_length, (stream.tail.view(),)).dense(torch.float64)
            for stream in layer.streams
        )
        assert layer.facts.rotary is not None
        units = torch.eye(16)[None, :, None].expand(1, 16, 20, 16)
        for row, pad in enumerate(pads):
            first = 330 - pad if positions == "absolute" else layer.held_length
            turn = layer.facts.rotary.rotate(units, torch.arange(first, first + 20))[0].mean(1).double().T
            for head in range(2):
                drawn = _with_moments(layer, row, slice(2 * head, 2 * head + 2))
                expected = expected_weights(drawn, keys[row, head, 2:], turn, scaling)
                expected = (expected + 0.01) * values[row, head, 2:].norm(dim=-1)
                torch.testing.assert_close(worth[row, head, 2:].double(), expected, atol=1e-5, rtol=1e-3)


def _with_moments(layer: Any, row: int, heads: slice) -> Tensor:
    """Vectors `(G, 2 D, D)` that have the mean and the covariance a layer remembers."""
    mean = layer.companions["mean"][row, heads].double()
    spread = layer.companions["scatter"][row, heads].double() / int(layer.companions["count"][row])
    values, vectors = torch.linalg.eigh(spread)
    arms = (vectors * (values.clamp_min(0) * len(values[0])).sqrt()[:, None]).mT
    return torch.cat([mean[:, None] + arms, mean[:, None] - arms], 1)


def test_worth_in_a_model_with_latents() -> None:
    """As if keys were made of all latents: the mean over all heads, times the lengths of the latents."""
    model, length = small_model("deepseek_v3"), 60
    tokens = padded_prompt((length,))["input_ids"]
    shown: list[tuple[Tensor, Tensor, float]] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        shown.append((query, key, scaling))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("shows_states", attend)
    AttentionMaskInterface.register("shows_states", lambda *args, **kwargs: None)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("shows_states")
    cache = kvp.build_cache(model, {**BACKEND, "budget": 200})
    with torch.no_grad():
        eager(tokens, use_cache=False)
        model(tokens[:, :40], **as_argument(cache))
        model(tokens[:, 40:], **as_argument(cache))
    assert len(shown) == len(cache.packed_layers) == 2
    for layer, (query, keys, scaling) in zip(cache.packed_layers, shown, strict=True):
        assert isinstance(layer, ExpectedAttentionLayer)
        turn = torch.eye(query.shape[3], dtype=torch.float64)
        weights = [
            expected_weights(query[0, head, None, SINKS:], keys[0, head, SINKS:], turn, scaling)
            for head in range(query.shape[1])
        ]
        latents = layer.stored_keys.tail.view()[0, 0, SINKS:].double()
        expected = torch.stack(weights).mean(0) * latents.norm(dim=-1)
        torch.testing.assert_close(layer.ranks()[0, 0, SINKS:].double(), expected, atol=1e-5, rtol=1e-3)


def test_worth_without_rounding_of_autocast() -> None:
    model, cache = model_of(), bound_cache(model_of(), {**BACKEND, "budget": 100}, LENGTH)
    feed(model, cache, ids(LENGTH, 2), [LENGTH])
    layer = cache.evicting_layers[0]
    expected = layer.ranks()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.ranks(), expected)


# ---- what is remembered ----


@pytest.mark.parametrize("use_covariance", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma4_text", "deepseek_v3", "gpt2"])
def test_bytes_are_counted_and_predicted(family: str, use_covariance: bool) -> None:
    model = small_model(family) if family == "deepseek_v3" else tiny_model(family)
    if model.config._attn_implementation == "eager":
        model.set_attn_implementation("kvcache_plugins")
    config = {"budget": 64, "chunk_size": 50}
    ours = {**config, "backend": "expected_attention", "use_covariance": use_covariance}
    others = {**config, "backend": "keydiff", "sink_length": 4}
    cache, other = (bound_cache(model, options, 90) for options in (ours, others))
    for filled in (cache, other):
        feed(model, filled, ids(90, 2) % 128, chunks_of(90, 50))
    beside = 0
    for layer in cache.evicting_layers:
        width = layer.stored_keys.head_dim
        width += layer.stored_values.head_dim if family == "deepseek_v3" else 0
        numbers = width + width * width if use_covariance else width
        beside += 2 * (8 + 4 * (numbers + 8 * width) * model.config.num_attention_heads)
    assert cache.kv_bytes() - other.kv_bytes() == beside > 0
    assert kvp.estimate(model, ours, 90, 2) - kvp.estimate(model, others, 90, 2) == beside


def test_layers_that_keep_everything_remember_nothing() -> None:
    model = model_of()
    cache = bound_cache(model, {**BACKEND, "skip_layers": [0]}, LENGTH)
    feed(model, cache, ids(LENGTH, 2), chunks_of(LENGTH, 16))
    assert cache.evicting_layers[0].companions == {} != cache.evicting_layers[1].companions
    assert [layer.held_length for layer in cache.evicting_layers] == [LENGTH, 24]


def test_begun_in_inference_mode() -> None:
    model, tokens = model_of(), ids(LENGTH + 70, 2)
    config = {**BACKEND, "evict_at_decode": True}
    caches = [bound_cache(model, config, LENGTH) for _ in range(2)]
    for cache, mode in zip(caches, (torch.inference_mode, torch.no_grad), strict=True):
        with mode():
            feed(model, cache, tokens[:, :LENGTH], chunks_of(LENGTH, 16))
        feed(model, cache, tokens[:, LENGTH:], [1] * 70)
    _same_moments(*caches)


def test_queries_in_half_precision_are_added_in_fp32() -> None:
    layer = bound_cache(model_of(), {**BACKEND, "budget": 500}, 400).evicting_layers[0]
    query = (torch.randn(1, 4, 400, 16) + 3).bfloat16()
    states = torch.zeros(1, 2, 400, 16, dtype=torch.bfloat16)
    for start in range(0, 400, 50):
        part = states[:, :, start : start + 50]
        handle, _ = layer.update(part, part)
        assert isinstance(handle, KVHandle)
        layer.attended(query[:, :, start : start + 50], handle.tokens, AttentionOptions())
    assert layer.facts.rotary is not None
    plain = layer.facts.rotary.rotate(query.double(), -torch.arange(400))[:, :, SINKS:]
    assert layer.companions["mean"].dtype == torch.float32
    torch.testing.assert_close(layer.companions["mean"].double(), plain.mean(2), atol=1e-5, rtol=0.0)
