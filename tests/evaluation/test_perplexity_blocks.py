"""Blocks read at once give what one token at a time gives, and what is read from codes is counted.

In fp64: two ways of adding up the same numbers differ in their last digits, and in fp32 that is enough for a
value on the edge between two codes to fall to the other side once in a while.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer, QuantizedCache

import kvcache_plugins as kvp
from kvcache_plugins.evaluation.caches import new_cache
from kvcache_plugins.evaluation.perplexity.blocks import exact_blocks, packed_shares, room
from kvcache_plugins.evaluation.perplexity.scoring import (
    Prediction,
    Schedule,
    bin_edges,
    divergence_of,
    predictions,
    score_window,
)
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.models import tiny_model

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
WINDOW, PREFILL = 64, 8
HAS_FP8 = hasattr(__import__("transformers").cache_utils, "Fp8QuantizedLayer")
HQQ_COMPILES = pytest.mark.allow_deprecation(
    "torch.jit.script", reason="hqq compiles with it when it is imported"
)


@lru_cache(maxsize=1)
def model() -> Any:
    # three of its layers: what is compared are ways of reading one cache, not what the model predicts
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64, num_hidden_layers=3).eval()


@lru_cache(maxsize=1)
def window() -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(MODEL)(topics["specialnames"][:2000])["input_ids"]
    return torch.tensor([ids[:WINDOW]])


def read(cache_config: dict[str, Any], block_length: int, approximate: bool = False) -> list[Prediction]:
    return _read(json.dumps(cache_config), block_length, approximate)


@lru_cache(maxsize=64)
def _read(cache_config: str, block_length: int, approximate: bool) -> list[Prediction]:
    cache = new_cache(model(), json.loads(cache_config))
    return list(predictions(model(), window(), cache, Schedule(PREFILL, block_length, approximate)))


def nll(found: list[Prediction]) -> torch.Tensor:
    logits = torch.cat([prediction.logits for prediction in found])
    return torch.nn.functional.cross_entropy(logits, window()[0, PREFILL:], reduction="none")


def require(cache_config: dict[str, Any]) -> None:
    module = {"quanto": "optimum.quanto", "hqq": "hqq"}.get(cache_config["backend"])
    if module is not None:
        pytest.importorskip(module)
    if cache_config["backend"] == "fp8" and not HAS_FP8:
        pytest.skip("this transformers has no fp8 cache")


# Each has room for blocks of more than one token somewhere after a prefill of 8.
CASES: dict[str, dict[str, Any]] = {
    "dense": {"backend": "dense"},
    "kivi": {"backend": "kivi", "nbits": 2, "residual_length": 32},
    "int8": {"backend": "int8", "residual_length": 40},
    "int4": {"backend": "int4", "nbits": 2, "residual_length": 24},
    "int4-smooth": {"backend": "int4", "smooth": 0.5, "residual_length": 24},
    "float8": {"backend": "float8", "residual_length": 40},
    "fp8": {"backend": "fp8"},
    "quanto": {"backend": "quanto", "nbits": 2, "residual_length": 32},
    "hqq": {"backend": "hqq", "nbits": 2, "residual_length": 32, "axis_key": 1, "axis_value": 1},
    "h2o-heads": {
        "backend": "h2o",
        "budget": 6,
        "local_length": 1,
        "head_floor": 0.1,
        "stabilizer_length": 1,
    },
    "kvzip": {"backend": "kvzip", "budget": 6, "sink_length": 1},
}


@pytest.mark.parametrize("name", [name for name in CASES if name != "hqq"])
def test_longer_blocks_change_nothing(name: str) -> None:
    cache_config = CASES[name]
    require(cache_config)
    one, many = read(cache_config, 1), read(cache_config, 64)
    assert len(one) == WINDOW - PREFILL
    assert len(many) < len(one) and all(prediction.is_exact for prediction in many)
    assert float((nll(many) - nll(one)).abs().max()) < 1e-6
    shares = [[s for prediction in found for s in prediction.packed_shares] for found in (one, many)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-12)
    if name != "dense":
        assert float((nll(one) - nll(read(CASES["dense"], 1))).abs().max()) > 1e-6, "the cache was not read"


@pytest.mark.parametrize("cache_config", [CASES["dense"], CASES["int8"], CASES["kvzip"]], ids=repr)
def test_bytes_of_a_model_with_windows_do_not_depend_on_the_blocks(cache_config: dict[str, Any]) -> None:
    """Its windows lie in memory with the last block that was read."""
    sliding = tiny_model("gemma2", num_hidden_layers=2)
    one, *many = (
        score_window(sliding, window() % 100 + 3, cache_config, Schedule(PREFILL, length))[0]["kv_bytes"]
        for length in (1, 7, 64)
    )
    assert many == [one, one]


@pytest.mark.parametrize("name", ["kivi", "int8", "int4", "float8"])
def test_blocks_that_are_not_cut_are_called_approximate(name: str) -> None:
    cut, uncut = read(CASES[name], 64), read(CASES[name], 64, approximate=True)
    assert len(uncut) < len(cut)
    assert [prediction.is_exact for prediction in uncut].count(False) >= 1
    assert float((nll(uncut) - nll(cut)).abs().max()) > 1e-6


@HQQ_COMPILES
@pytest.mark.parametrize("name", ["quanto", "hqq"])
@torch.inference_mode()
def test_transformers_own_equal_their_own_token_by_token_run(name: str) -> None:
    cache_config = dict(CASES[name])
    require(cache_config)
    record, _ = score_window(model(), window(), cache_config, Schedule(PREFILL, 64))
    cache = QuantizedCache(cache_config.pop("backend"), model().config, **cache_config)
    logits = [model()(window()[:, :PREFILL], **as_argument(cache)).logits[0, -1]]
    for position in range(PREFILL, WINDOW - 1):
        logits.append(model()(window()[:, position : position + 1], **as_argument(cache)).logits[0, -1])
    expected = torch.nn.functional.cross_entropy(torch.stack(logits), window()[0, PREFILL:])
    assert record["nll"] / record["tokens"] == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("block_length", [1, 7, 64])
@torch.inference_mode()
def test_dense_equals_one_forward_without_a_cache(block_length: int) -> None:
    record, _ = score_window(model(), window(), {"backend": "dense"}, Schedule(PREFILL, block_length))
    logits = model()(window(), use_cache=False).logits[0, PREFILL - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, window()[0, PREFILL:])
    assert record["tokens"] == WINDOW - PREFILL
    assert record["nll"] / record["tokens"] == pytest.approx(float(expected), abs=1e-6)


@torch.inference_mode()
def test_a_record_sums_up_what_is_predicted() -> None:
    schedule = Schedule(PREFILL, 64)
    _, reference = score_window(model(), window(), CASES["dense"], schedule, keep_logits=True)
    record, _ = score_window(model(), window(), CASES["kivi"], schedule, reference)
    found = [read(CASES[name], 64) for name in ("dense", "kivi")]
    dense, own = (torch.cat([prediction.logits for prediction in some]).log_softmax(-1) for some in found)
    values = {
        "nll": nll(found[1]),
        "increase": nll(found[1]) - nll(found[0]),
        "kl": torch.nn.functional.kl_div(own, dense, reduction="none", log_target=True).sum(-1),
    }
    count = WINDOW - PREFILL
    edges = [index * count // 16 for index in range(17)]
    for name, of_tokens in values.items():
        assert record[name] == pytest.approx(float(of_tokens.sum()), rel=1e-6)
        assert record[f"{name}_squares"] == pytest.approx(float((of_tokens * of_tokens).sum()), rel=1e-6)
        parts = [float(of_tokens[low:high].sum()) for low, high in pairwise(edges)]
        assert record[f"{name}_by_position"] == pytest.approx(parts, rel=1e-6)
    assert record["agreement"] == int((dense.argmax(-1) == own.argmax(-1)).sum()) < count
    assert record["packed_read"] == pytest.approx(sum(share for p in found[1] for share in p.packed_shares))


def test_few_tokens_have_a_part_each() -> None:
    assert bin_edges(3) == [0, 1, 2, 3]
    assert bin_edges(40)[::4] == [0, 10, 20, 30, 40]


def test_tokens_that_the_dense_cache_rules_out_do_not_diverge() -> None:
    dense, other = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 1.0, -torch.inf]]).log_softmax(-1)[:, None]
    expected = torch.nn.functional.kl_div(other[:, :2], dense[:, :2], reduction="sum", log_target=True)
    assert divergence_of(dense, other).tolist() == pytest.approx([float(expected)])
    assert divergence_of(dense, torch.zeros(1, 3).log_softmax(-1)).isfinite().all()


def test_one_block_that_is_not_exact_makes_a_window_approximate() -> None:
    require(CASES["quanto"])
    found = read(CASES["quanto"], 20, approximate=True)
    assert [prediction.is_exact for prediction in found[:3]] == [True, True, False]
    record, _ = score_window(model(), window(), CASES["quanto"], Schedule(PREFILL, 20, approximate=True))
    assert record["is_exact"] is False


@HQQ_COMPILES
def test_hqq_is_read_one_token_at_a_time() -> None:
    require(CASES["hqq"])
    assert len(read(CASES["hqq"], 64)) == WINDOW - PREFILL


# ---- what is read from codes ----


def _kivi(held: int) -> float:
    return (held // 32 * 32 + max(0, held - 32)) / 2


PACKED = {
    "dense": (CASES["dense"], lambda held: 0),
    "int8": ({"backend": "int8"}, lambda held: held),
    "int8-sinks": ({"backend": "int8", "sink_length": 3}, lambda held: held - 3),
    "kivi": (CASES["kivi"], _kivi),
    "int4": (CASES["int4"], lambda held: max(0, held - 24)),
    "quanto": (CASES["quanto"], lambda held: PREFILL + (held - PREFILL) // 32 * 32),
    "fp8": (CASES["fp8"], lambda held: held + 1),  # the new token too is read from its code
}


@pytest.mark.parametrize("name", PACKED)
def test_share_read_from_codes(name: str) -> None:
    cache_config, packed = PACKED[name]
    require(cache_config)
    found = read(cache_config, 1)
    assert [prediction.first for prediction in found] == list(range(PREFILL, WINDOW))
    expected = [0.0] + [packed(held) / (held + 1) for held in range(PREFILL, WINDOW - 1)]
    assert [prediction.packed_shares[0] for prediction in found] == pytest.approx(expected, abs=1e-12)


@torch.inference_mode()
def test_heads_that_hold_different_numbers_of_tokens() -> None:
    config = {**CASES["h2o-heads"], "storage": {"backend": "int8"}}
    cache = kvp.build_cache(model(), config).bind(model(), prompt_length=PREFILL)
    model()(window()[:, :PREFILL], **as_argument(cache))
    held = [
        part.layer.held_length for layer in cache.layers for part in layer.parts for _ in part.group.heads
    ]
    assert len(held) == 2 * len(cache.layers) and len(set(held)) > 1
    for n, share in enumerate(packed_shares(cache, 3)):
        assert share == pytest.approx(sum(m / (m + 1 + n) for m in held) / len(held), abs=1e-12)


@torch.inference_mode()
def test_a_share_is_the_mean_over_heads_not_over_groups_of_them() -> None:
    four = tiny_model("llama", num_attention_heads=4, num_key_value_heads=4)
    config = {**CASES["h2o-heads"], "storage": {"backend": "int8"}}
    cache = kvp.build_cache(four, config).bind(four, prompt_length=12)
    four(torch.arange(3, 15)[None], **as_argument(cache))
    shares = [
        [(len(part.group.heads), part.layer.held_length) for part in layer.parts] for layer in cache.layers
    ]
    assert any(len({heads for heads, _ in parts}) > 1 for parts in shares), "groups of different sizes"
    expected = [sum(heads * held / (held + 1) for heads, held in parts) / 4 for parts in shares]
    assert packed_shares(cache, 1) == pytest.approx([sum(expected) / len(expected)], abs=1e-12)


def test_layers_left_dense_do_not_count_as_packing() -> None:
    some = read({"backend": "int8", "skip_layers": [0, -1]}, 1)
    assert some[-1].packed_shares == pytest.approx([(WINDOW - 2) / (WINDOW - 1)])


# ---- kinds of layers ----


class _Strange(DynamicLayer):
    """A layer of a kind nothing is known of."""


def test_of_an_unknown_layer_nothing_is_claimed() -> None:
    cache = DynamicCache(config=model().config)
    model()(window()[:, :PREFILL], **as_argument(cache))
    assert [block.is_exact for block in exact_blocks(cache, PREFILL, PREFILL + 10, 4)] == [True] * 3
    strange = _Strange()
    strange.update(*(torch.zeros(1, 2, PREFILL, 64) for _ in range(2)))
    cache.layers[2] = strange
    assert room(strange, 4) is None
    blocks = list(exact_blocks(cache, PREFILL, PREFILL + 9, 4))
    assert [(block.start, block.stop, block.is_exact) for block in blocks] == [
        (8, 12, False),
        (12, 16, False),
        (16, 17, True),
    ]


def test_the_token_that_fills_a_window_of_transformers_is_read_by_itself() -> None:
    require(CASES["quanto"])
    layer = new_cache(model(), CASES["quanto"]).layers[0]
    for count, left in ((8, 31), (20, 11), (11, 1), (1, 31)):
        layer.update(*torch.randn(2, 1, 2, count, 64))
        assert room(layer, 64) == left

    class Own(type(layer)):  # type: ignore[misc]
        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, **kwargs)

    layer.__class__ = Own
    assert room(layer, 64) is None


def test_a_layer_with_its_own_rule_is_unknown() -> None:
    cache = kvp.build_cache(model(), {"backend": "int8", "residual_length": 40})
    layer = cache.layers[0]
    assert room(layer, 4) == 1, "an empty layer reads its first call exactly, whatever its length"
    model()(window()[:, :PREFILL], **as_argument(cache))
    assert room(layer, 64) == 40 - PREFILL + 1
    assert packed_shares(cache, 3) == [0.0] * 3

    class Own(type(layer)):  # type: ignore[misc]
        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, **kwargs)

    layer.__class__ = Own
    assert room(layer, 64) is None


def test_a_token_reads_its_window() -> None:
    cache = kvp.build_cache(tiny_model("phi3", sliding_window=512), {"backend": "int8", "sink_length": 4})
    for count in (300, 400, 1):
        for layer in cache.layers:
            layer.update(*torch.randn(2, 1, 2, count, 16))
        seen = layer.get_seq_length()
        if seen == 300:
            assert packed_shares(cache, 2) == pytest.approx([296 / 301, 296 / 302])
    # of the last 512 tokens the newest three are exact: themselves and what came with them
    assert packed_shares(cache, 3) == pytest.approx([511 / 512, 510 / 512, 509 / 512])


def test_sinks_that_a_window_has_left_are_no_exact_tokens_of_it() -> None:
    cache = kvp.build_cache(tiny_model("phi3", sliding_window=512), {"backend": "int8", "sink_length": 40})
    for count in (300, 260, 20):
        for layer in cache.layers:
            layer.update(*torch.randn(2, 1, 2, count, 16))
    assert cache.layers[0].padding.dropped > 40
    assert packed_shares(cache, 1) == pytest.approx([511 / 512])


def test_sinks_that_leave_a_window_take_no_codes_with_them() -> None:
    cache = kvp.build_cache(tiny_model("phi3", sliding_window=512), {"backend": "int8", "sink_length": 40})
    for layer in cache.layers:
        layer.update(*torch.randn(2, 1, 2, 520, 16))
    assert cache.layers[0].padding.dropped == 0
    shares = packed_shares(cache, 600)
    # a query sees the sinks from slot 9 on, the next one from slot 10 on, and all 480 codes
    assert shares[:32] == pytest.approx([480 / 512] * 32)
    assert (shares[32], shares[-1]) == (479 / 512, 0), "of the last one's window nothing is in codes yet"


def test_tokens_that_are_all_sinks_are_in_no_codes() -> None:
    cache = kvp.build_cache(tiny_model("llama"), {"backend": "int8", "sink_length": 20})
    for layer in cache.layers:
        layer.update(*torch.randn(2, 1, 2, 10, 16))
    assert cache.layers[0].stored_keys.packed_length == 10
    assert packed_shares(cache, 3) == [0.0] * 3
