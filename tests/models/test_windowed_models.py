"""Models with sliding windows and chunks, whose windowed layers are packed, in all modes of `generate()`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedModel

import kvcache_plugins as kvp
from kvcache_plugins.layers import windowed as windowed_module
from kvcache_plugins.layers.windowed import WindowedLayer
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.models.short_windows import ShortWindowLayer
from kvcache_plugins.testing import assert_close
from kvcache_plugins.testing.generation import SCENARIOS, run_scenario
from kvcache_plugins.testing.models import tiny_model
from tests.models.families import greedy, small_model

# Softcap and eager attention, sink logits, every layer windowed, layers without rotation, heads of two sizes.
ARCHITECTURES = ("gemma2", "gpt_oss", "phi3", "exaone4", "gemma4_text")
WINDOW = 48
# 64 tokens leave with the prompt, and 64 more when token 175 comes.
LENGTHS, NEW_TOKENS = (170, 151), 12
INT8 = {"backend": "int8"}
BACKENDS: dict[str, dict[str, Any]] = {
    "int8": INT8,
    "kivi": {"backend": "kivi", "residual_length": 32, "q_group_size": 16},
    "kvquant": {"backend": "kvquant", "residual_length": 8, "calibration": "normal_float"},
}


@functools.cache
def _model(architecture: str, window: int = WINDOW) -> PreTrainedModel:
    return tiny_model(architecture, sliding_window=window, num_hidden_layers=4)


@pytest.fixture
def every_window_pays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows short enough for small models are packed."""
    monkeypatch.setattr(windowed_module, "pays_off", lambda *_: True)


def windowed(cache: Any) -> list[WindowedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, WindowedLayer)]


@pytest.mark.usefixtures("every_window_pays_off")
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_windows_give_the_tokens_of_dynamic_cache(architecture: str, scenario: str) -> None:
    model = _model(architecture)
    run = functools.partial(run_scenario, model, scenario, lengths=(61, 40), max_new_tokens=NEW_TOKENS)
    assert torch.equal(run(cache_config={**INT8, "residual_length": 4096}), run())


@pytest.mark.usefixtures("every_window_pays_off")
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "exaone4"])
def test_what_has_left_the_window_is_not_missed(
    architecture: str, backend: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(architecture)
    sizes = {"lengths": LENGTHS, "max_new_tokens": NEW_TOKENS}
    run = functools.partial(run_scenario, model, scenario, cache_config=BACKENDS[backend], **sizes)
    left, leaving = [], WindowedLayer._leaving

    def observed(self: WindowedLayer, seen: int) -> int:
        left.append(leaving(self, seen))
        return left[-1]

    monkeypatch.setattr(WindowedLayer, "_leaving", observed)
    tokens = run()
    assert max(left) >= 64
    monkeypatch.setattr(WindowedLayer, "_leaving", lambda self, seen: 0)  # everything stays, and is not shown
    assert torch.equal(tokens, run())


@pytest.mark.parametrize("name", ["cohere2", "llama4_text", "mimo_v2_flash", "olmo3", "ministral"])
def test_other_families(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.models import families

    monkeypatch.setitem(families._SIZES, "sliding_window", 256)
    monkeypatch.setitem(families._OWN["llama4_text"], "attention_chunk_size", 256)
    try:
        model = small_model(name)
    except KeyError:
        pytest.skip("this release of transformers does not know it")
    lengths, new = (400, 311), 4
    expected, dense, _ = greedy(model, lengths, new)
    got, logits, cache = greedy(model, lengths, new, INT8)
    packed = windowed(cache)
    assert packed and not cache.report().dense_layers and cache.report().fallback_reads == 0
    assert all(layer.stored_length < 400 and layer.held_length == 255 for layer in packed)
    assert torch.equal(got[:, 0], expected[:, 0])
    assert_close("logits", dense[:, :2], logits[:, :2], 0.06)


def test_the_real_sizes_of_gemma_and_gpt_oss() -> None:
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    gemma = AutoConfig.for_model("gemma3_text", sliding_window=1024, max_position_embeddings=131072, **sizes)
    for backend in ({"backend": "kivi"}, INT8, {"backend": "int4"}):
        cache = kvp.build_cache(gemma, backend)
        assert cache.report().dense_layers == {} and len(windowed(cache)) == 5
        dense = kvp.estimate(gemma, {"backend": "dense"}, 32768)
        assert kvp.estimate(gemma, backend, 32768) < 0.56 * dense
    oss = AutoConfig.for_model("gpt_oss", num_hidden_layers=2)
    assert set(kvp.build_cache(oss, INT8).report().dense_layers.values()) == {
        "sliding_attention: holds at most 128 tokens already"
    }


def test_who_is_left_dense() -> None:
    config = _model("phi3", 512).config
    assert len(windowed(kvp.build_cache(config, INT8))) == 4
    skipping = kvp.build_cache(config, {**INT8, "skip_layers": [-1]})
    assert skipping.report().dense_layers == {3: "skip_layers"} and len(windowed(skipping)) == 3
    overridden = {**INT8, "layer_overrides": {"1": {"residual_length": 512}}}
    assert kvp.build_cache(config, overridden).report().dense_layers == {
        1: "sliding_attention: holds at most 512 tokens already"
    }
    with pytest.warns(UserWarning, match="packs none of the 4 layers"):
        evicting = kvp.build_cache(config, {"backend": "knorm", "budget": 64})
    assert len(evicting.report().dense_layers) == 4


@pytest.mark.parametrize("scorer", ["knorm", "h2o"])
def test_beside_layers_that_evict(scorer: str, tmp_path: Path) -> None:
    model = _model("gemma2", 320)
    options = {"backend": scorer, "budget": 64, "chunk_size": 128, "storage": {"backend": "int8"}}
    ids = torch.randint(3, 120, (2, 500))
    out = model.generate(
        ids, max_new_tokens=30, cache_implementation="quantized", cache_config=options,
        return_dict_in_generate=True, do_sample=False,
    )  # fmt: skip
    cache = cache_of(out)
    report = cache.report()
    assert report.dense_layers == {} and report.fallback_reads == 0
    assert (report.tokens_seen, report.tokens_held) == (529, 64 + 29)
    assert [layer.held_length for layer in windowed(cache)] == [319, 319]
    cache.save_pretrained(tmp_path)
    loaded = kvp.KVCache.from_pretrained(tmp_path, model)
    with torch.no_grad():
        more = ids[:, :1]
        expected = model(more, **as_argument(cache)).logits
        assert_close("logits", expected, model(more, **as_argument(loaded)).logits, 1e-5)
    skipping = kvp.build_cache(model, options | {"skip_layers": [0, 1]})
    assert skipping.report().dense_layers == {0: "skip_layers", 1: "skip_layers"}
    assert len(windowed(skipping)) == 1 and type(skipping.layers[0]) is ShortWindowLayer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [100, 400, 1000])
def test_bytes_are_predicted_and_reported(backend: str, tokens: int) -> None:
    options = {**BACKENDS[backend], "outlier_fraction": 0.0} if backend == "kvquant" else BACKENDS[backend]
    model = _model("exaone4", 320)
    cache, own = kvp.build_cache(model, options), DynamicCache(config=model.config)
    ids = torch.randint(3, 120, (2, tokens))
    with torch.no_grad():
        for past in (cache, own):
            model(ids[:, :-1], **as_argument(past))
            model(ids[:, -1:], **as_argument(past))
    assert cache.kv_bytes() == kvp.estimate(model, options, tokens, batch_size=2)
    report = cache.report()
    assert report.tokens_seen == report.tokens_held == tokens
    assert report.dense_bytes == sum(2 * layer.keys.numel() * 4 for layer in own.layers)
    assert report.values == report.dense_bytes // 4
    # a window is never more than its length, a sixteenth of it or a block, and what is exact
    grown = [layer.kv_bytes for layer in windowed(cache)]
    assert max(grown) < 0.75 * 2 * 319 * 2 * 4 * 2 * 16


@pytest.mark.usefixtures("every_window_pays_off")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_cache_goes_on(backend: str, tmp_path: Path) -> None:
    model = _model("gemma2")
    cache = kvp.build_cache(model, BACKENDS[backend])
    ids = torch.randint(3, 120, (1, 250))
    with torch.no_grad():
        model(ids[:, :180], **as_argument(cache))
        cache.save_pretrained(tmp_path)
        loaded = kvp.KVCache.from_pretrained(tmp_path, model)
        assert loaded.get_seq_length() == 180
        for start in range(180, 250, 5):
            more = ids[:, start : start + 5]
            expected = model(more, **as_argument(cache)).logits
            assert_close("logits", expected, model(more, **as_argument(loaded)).logits, 1e-5)
    assert [layer.stored_length for layer in windowed(loaded)] == [
        layer.stored_length for layer in windowed(cache)
    ]


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
@pytest.mark.usefixtures("every_window_pays_off")
def test_drafts_of_an_assistant() -> None:
    model = _model("gemma2")
    assistant = tiny_model("gemma2", sliding_window=WINDOW)
    arguments: dict[str, Any] = {
        "max_new_tokens": 40,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": "quantized",
        "cache_config": INT8,
    }
    ids = torch.randint(3, 120, (1, 120))
    expected = model.generate(ids, **arguments)
    drafted = model.generate(ids, assistant_model=assistant, return_dict_in_generate=True, **arguments)
    assert torch.equal(drafted.sequences, expected)
    assert all(layer.stored_length < 120 for layer in windowed(cache_of(drafted)))
