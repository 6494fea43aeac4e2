"""What a cache says of itself, against sums over its own tensors and against what the dense cache takes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import CacheReport, build_cache
from kvcache_plugins.kernels import loader
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from tests.models import text_parts
from tests.models.families import small_model


def filled(model: Any, config: dict[str, Any], lengths: tuple[int, ...], batch_size: int = 2) -> Any:
    cache = build_cache(model, {**config, "kernel": "torch"})
    with torch.no_grad():
        for length in lengths:
            model(torch.randint(3, 120, (batch_size, length)), **as_argument(cache))
    return cache


def test_numbers_that_follow_from_others() -> None:
    report = CacheReport("kivi", tokens_seen=10, tokens_held=10, kv_bytes=300, dense_bytes=1200, values=600)
    assert report.memory_fraction == 0.25
    assert report.bits_per_value == 4.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.kv_bytes = 0  # type: ignore[misc]


def test_slack_may_take_more_than_the_dense_cache() -> None:
    report = CacheReport("int8", tokens_seen=1, tokens_held=1, kv_bytes=300, dense_bytes=200, values=100)
    assert (report.memory_fraction, report.bits_per_value) == (1.5, 24.0)


def test_a_report_shows_what_was_read_of_the_encoder() -> None:
    encoder = CacheReport("int8", 50, 50, kv_bytes=250, dense_bytes=1000, kernel=["cpu", "cpu"])
    report = CacheReport("int8", 10, 9, 350, 1400, ["torch"], cross_attention=encoder)
    shown = dict(re.split("  +", line, maxsplit=1) for line in str(report).splitlines())
    assert (shown["tokens seen / held"], shown["encoder's tokens"]) == ("10 / 9", "50")
    assert shown["bytes"] == "350 of 1,400 dense (25.0%)"
    assert shown["encoder's bytes"] == "250 of 1,000 dense (25.0%)"
    assert (shown["kernel"], shown["encoder's kernel"]) == ("torch x1", "cpu x2")


def test_an_empty_cache() -> None:
    report = build_cache(tiny_model("llama"), {"backend": "kivi"}).report()
    assert (report.tokens_seen, report.tokens_held, report.kv_bytes, report.dense_bytes) == (0, 0, 0, 0)
    assert report.memory_fraction == report.bits_per_value == 0.0
    assert "kivi" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    "config", [{"backend": "int8"}, {"backend": "kivi", "residual_length": 32}], ids=lambda c: c["backend"]
)
def test_bytes_are_those_of_the_tensors(config: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    cache = filled(model, config, (130, 1, 1))
    report = cache.report()
    assert (report.backend, report.tokens_seen, report.tokens_held) == (config["backend"], 132, 132)
    owned = [tensor for layer in cache.packed_layers for tensor in layer.tensors().values()]
    assert report.kv_bytes == sum(t.untyped_storage().nbytes() for t in owned) > 0
    # 2 rows, 2 layers, 2 kv heads, 132 tokens, keys and values of 16 channels
    assert report.values == 2 * 2 * 2 * 132 * 32
    dense = filled_dense(model)
    assert report.dense_bytes == dense == report.values * dtype.itemsize
    assert report.memory_fraction == report.kv_bytes / dense
    assert report.bits_per_value == 8 * report.kv_bytes / report.values


def filled_dense(model: Any) -> int:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, 120, (2, 132)), **as_argument(cache))
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def test_int8_costs_what_it_says_it_costs() -> None:
    # 8 + 16 / head_dim bits; 6400 tokens fill their blocks, and the exact window has only its slack.
    layer = build_cache(tiny_model("llama"), {"backend": "int8"}).packed_layers[0]
    layer.update(torch.randn(1, 2, 6400, 128), torch.randn(1, 2, 6400, 128))
    tail = sum(stream.tail.buffer.nbytes for stream in layer.streams)
    assert 8 * (layer.kv_bytes - tail) / (2 * 2 * 6400 * 128) == pytest.approx(8 + 16 / 128)
    assert tail < 0.02 * layer.kv_bytes


def test_hybrid_models() -> None:
    model = tiny_model("gemma2", num_hidden_layers=4)
    cache = filled(model, {"backend": "int8", "skip_layers": [3]}, (100, 1))
    report = cache.report()
    sliding = "sliding_attention: holds at most 16 tokens already"
    assert report.kernel == ["dense", "torch", "dense", "dense"]
    assert report.dense_layers == {0: sliding, 2: sliding, 3: "skip_layers"}
    assert report.tokens_seen == report.tokens_held == 101
    # Sliding layers hold 15 or 16 tokens, the skipped one all of them.
    held = [layer.keys.shape[2] for layer in (cache.layers[0], cache.layers[2])]
    assert held[0] == held[1] in (15, 16)
    assert report.values == 2 * 2 * 32 * (held[0] + 101 + held[1] + 101)
    dense = sum(t.nbytes for i in (0, 2, 3) for t in (cache.layers[i].keys, cache.layers[i].values))
    assert report.kv_bytes >= cache.packed_layers[0].kv_bytes + dense
    text = str(report)
    assert re.search(rf"^dense layers 0, 2 +{sliding}$", text, re.MULTILINE)
    assert re.search(r"^dense layers 3 +skip_layers$", text, re.MULTILINE)
    assert "torch x1" in text and "dense x3" in text


def test_windows_that_stay_dense_weigh_as_much_on_both_sides() -> None:
    model = tiny_model("gemma2", num_hidden_layers=4)
    cache = filled(model, {"backend": "int8", "skip_layers": [3]}, (100,))
    report, token, windows = cache.report(), 2 * 2 * 32 * 4, 2 * 16
    assert cache.layers[0].keys.shape[2] in (15, 16)
    assert report.dense_bytes == (2 * 100 + windows) * token
    lengths = 2 * 8  # a tensor in each of the windows
    assert report.kv_bytes == cache.packed_layers[0].kv_bytes + (100 + windows) * token + lengths


def test_why_layers_are_read_by_torch() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    cache = build_cache(model, {"backend": "int8", "kernel": "torch", "skip_layers": [1]})
    with torch.no_grad():
        for length in (100, 1):
            assert cache.report().kernel_reasons == {}, "nothing packed has been read yet"
            model(torch.randint(3, 120, (1, length)), **as_argument(cache))
    report = cache.report()
    assert report.kernel_reasons == dict.fromkeys((0, 2, 3), "kernel='torch' was given")
    assert re.search(r"^torch layers 0, 2-3 +kernel='torch' was given$", str(report), re.MULTILINE)


def test_before_anything_was_read() -> None:
    model = tiny_model("llama")
    cache = build_cache(model, {"backend": "int8"})
    with torch.no_grad():
        model(torch.randint(3, 120, (1, 100)), **as_argument(cache))  # which attends to exact tokens
        assert set(cache.report().kernel_reasons.values()) == {"nothing packed has been read yet"}
        assert re.search(r"^torch layers 0-\d+ +nothing packed has been read yet$", str(cache.report()), re.M)
        model(torch.randint(3, 120, (1, 1)), **as_argument(cache))
    assert cache.report().kernel_reasons == {} and set(cache.report().kernel) == {"cpu"}


def test_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", "no C++ compiler was found.")
    model = tiny_model("llama")
    cache = build_cache(model, {"backend": "int8"})
    with torch.no_grad():
        for length in (100, 1):
            model(torch.randint(3, 120, (1, length)), **as_argument(cache))
    assert set(cache.report().kernel_reasons.values()) == {
        "there are no CPU kernels: no C++ compiler was found."
    }


def test_recurrent_states_are_counted() -> None:
    model = tiny_model("qwen3_next")
    cache = filled(model, {"backend": "int8"}, (40,))
    linear, packed = cache.layers
    states = [t for value in vars(linear).values() for t in _tensors(value)]
    assert states
    assert cache.kv_bytes() == packed.kv_bytes + sum(t.untyped_storage().nbytes() for t in states)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def test_reads_that_decoded_are_counted() -> None:
    model = small_model("diffllama")  # takes apart what it is given
    cache = filled(model, {"backend": "int8"}, (40, 1, 1))
    assert cache.report().fallback_reads == 2 * 2 * 2  # calls, layers, keys and values
    assert "8 times" in str(cache.report())
    assert set(cache.report().kernel) == {"torch"}
    assert set(cache.report().kernel_reasons.values()) == {
        "decoded whole: the model asks for keys or values by other means than attention and products"
    }


def test_the_table_is_aligned_and_readable() -> None:
    report = CacheReport(
        "kivi", 2000, 1500, 1234567, 9876543, ["torch", "torch", "dense"], {2: "skip_layers"}, 3, values=10**6
    )
    values = [
        "kivi",
        "2000 / 1500",
        "1,234,567 of 9,876,543 dense (12.5%)",
        "9.88",
        "torch x2, dense x1",
        "3 times",
        "skip_layers",
    ]
    columns = {row.index(value) for row, value in zip(str(report).splitlines(), values, strict=True)}
    assert len(columns) == 1


@pytest.mark.parametrize(
    ("options", "learnt_from"),
    [
        ({"backend": "kvquant", "calibration": "normal_float", "residual_length": 0}, 128),
        ({"backend": "int4", "smooth": 0.5}, 64),
        ({"backend": "knorm", "budget": 250, "storage": {"backend": "int4", "smooth": 0.5}}, 64),
    ],
    ids=lambda value: value["backend"] if isinstance(value, dict) else str(value),
)
def test_what_a_short_row_keeps_from_being_packed_is_told(options: dict[str, Any], learnt_from: int) -> None:
    model = tiny_model("llama")
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, :-3] = 0
    cache = build_cache(model, options).bind(model, mask)
    with torch.no_grad():
        model(torch.randint(3, 120, (2, 300)), attention_mask=mask, **as_argument(cache))
        sinks = cache.packed_layers[0].padding.sink_length
        awaited = learnt_from + sinks - 3
        reasons = cache.report().exact_layers
        assert set(reasons) == {0, 1}
        assert f"from the first {learnt_from} tokens of every row" in reasons[0]
        assert re.search(rf"keys (and values )?are packed after {awaited} more$", reasons[0])
        assert "exact layers 0-1" in str(cache.report())
        for _ in range(awaited):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            model(torch.randint(3, 120, (2, 1)), attention_mask=mask, **as_argument(cache))
    assert cache.report().exact_layers == {} and cache.packed_layers[0].stored_keys.packed_length > 0


def test_what_is_not_yet_due_is_no_exception() -> None:
    model = tiny_model("llama")
    options = {"backend": "kvquant", "calibration": "normal_float"}
    assert filled(model, options, (100,)).report().exact_layers == {}


@pytest.mark.parametrize(("skipped", "held"), [([], {15, 16}), ([1], {41})])
def test_a_cache_that_packs_nothing_holds_what_its_dense_layers_do(
    skipped: list[int], held: set[int]
) -> None:
    """Windows of 16 tokens, and beside them a layer that has all."""
    model = tiny_model("gemma2" if skipped else "mistral", sliding_window=16)
    with pytest.warns(UserWarning, match="packs none of the 2 layers"):
        cache = filled(model, {"backend": "int8", "skip_layers": skipped}, (40, 1))
    report = cache.report()
    assert report.tokens_seen == 41
    assert report.tokens_held == max(layer.keys.shape[2] for layer in cache.layers)
    assert report.tokens_held in held
    cache.reset()
    assert (cache.report().tokens_seen, cache.report().tokens_held) == (0, 0)


def test_a_prompt_beside_a_window_is_held_as_well() -> None:
    if "unlimited_ocr_text" not in text_parts.NAMES:
        pytest.skip("this release of transformers does not have it")
    model = text_parts.text_part("unlimited_ocr_text")
    with pytest.warns(UserWarning, match="packs none of the 2 layers"):
        report = filled(model, {"backend": "int8"}, (40, 1, 1)).report()
    assert report.tokens_seen == report.tokens_held == 42
