"""Transformers' own quantized caches: predicted as they are measured, and refused where there are none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, cache_utils

import kvcache_plugins as kvp
from kvcache_plugins.capacity import most_tokens
from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.caches import cache_bytes, generate, why_unavailable
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.transformers_caches import build_quantized_cache, sized_layers

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama-books"
CONFIG = AutoConfig.from_pretrained(BUNDLED)
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq", "fp8": "torch"}
CACHES = [
    {"backend": "quanto"},
    {"backend": "quanto", "nbits": 2, "residual_length": 5},
    {"backend": "quanto", "axis_key": -1, "q_group_size": 2, "residual_length": 2},
    {"backend": "quanto", "residual_length": 1},
    {"backend": "quanto", "residual_length": 0},
    {"backend": "hqq", "nbits": 3, "residual_length": 5},
    {"backend": "hqq", "axis_key": 1, "axis_value": 1, "residual_length": 1},
    {"backend": "hqq", "nbits": 8, "q_group_size": 16},
    {"backend": "fp8"},
]


def named(cache_config: dict[str, Any]) -> str:
    return " ".join(map(str, cache_config.values()))


def available(cache_config: dict[str, Any]) -> None:
    """Skip where there is no such cache."""
    pytest.importorskip(PACKAGES[cache_config["backend"]])
    if (why := why_unavailable(CONFIG, cache_config)) is not None:
        pytest.skip(f"{cache_config['backend']}: {why}")


@pytest.mark.parametrize("cache_config", CACHES, ids=named)
@pytest.mark.parametrize(("batch_size", "length"), [(1, 1), (2, 48)])
def test_what_is_predicted_is_what_generate_leaves(
    cache_config: dict[str, Any], batch_size: int, length: int
) -> None:
    available(cache_config)
    model = tiny_model("llama", head_dim=64).to(torch.bfloat16)
    prompt = torch.randint(0, model.config.vocab_size, (batch_size, length))
    for new_tokens in (1, 2, 3, 5, 6, 8):  # before, at and behind where exact tokens are encoded
        cache = cache_of(generate(model, prompt, cache_config, new_tokens))
        predicted = kvp.estimate(model, cache_config, length, batch_size, new_tokens=new_tokens)
        assert predicted == cache_bytes(cache)


def test_the_bytes_are_those_of_codes_scales_and_shifts() -> None:
    pytest.importorskip("optimum.quanto")
    pytest.importorskip("hqq")
    values, exact = 6 * 2 * 2 * 1000 * 64, 6 * 2 * 2 * 9 * 64
    for backend in ("quanto", "hqq"):
        for nbits, group in ((2, 32), (4, 64)):
            options = {"backend": backend, "nbits": nbits, "q_group_size": group}
            predicted = kvp.estimate(CONFIG, options, 1000, new_tokens=10, dtype=torch.bfloat16)
            assert predicted == values * nbits // 8 + 2 * 2 * values // group + 2 * exact


def test_generated_tokens_are_encoded_a_window_at_a_time() -> None:
    pytest.importorskip("optimum.quanto")
    options = {"backend": "quanto", "residual_length": 100}
    encoded = kvp.estimate(CONFIG, options, 2001, dtype=torch.bfloat16)
    assert kvp.estimate(CONFIG, options, 1, new_tokens=2001, dtype=torch.bfloat16) == encoded
    exact = 6 * 2 * 2 * 3 * 64 * 2
    assert kvp.estimate(CONFIG, options, 1, new_tokens=2004, dtype=torch.bfloat16) == encoded + exact


@pytest.mark.parametrize("backend", ["quanto", "hqq", "fp8"])
def test_one_token_more_does_not_fit(backend: str) -> None:
    available({"backend": backend})
    room = 6_000_000
    for told in ({}, {"new_tokens": 70, "batch_size": 3}):
        tokens = most_tokens(CONFIG, {"backend": backend}, room, dtype=torch.bfloat16, **told)
        assert tokens is not None and tokens > 300
        fits, more = (
            kvp.estimate(CONFIG, {"backend": backend}, count, dtype=torch.bfloat16, **told)
            for count in (tokens, tokens + 1)
        )
        assert fits <= room < more


def test_the_command_compares_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    available({"backend": "quanto"})
    options = ["--model", str(BUNDLED), "--dtype", "bf16", "--json"]
    options += ["--cache_config", '{"backend": "QUANTO"}']
    assert main(["estimate", *options, "--tokens", "640"]) == 0
    dense, quanto = json.loads(capsys.readouterr().out)
    assert (dense["memory_fraction"], quanto["bits_per_value"]) == (1, 4.5)
    assert main(["estimate", *options, "--memory_gb", "0.006"]) == 0
    dense, quanto = json.loads(capsys.readouterr().out)
    assert quanto["of_dense"] == pytest.approx(16 / 4.5, rel=1e-3)


def test_old_keys_and_other_cases_are_read_as_generate_reads_them() -> None:
    available({"backend": "hqq"})
    old = {"backend": "HQQ", "nbits": 4, "q_group_size": 128, "residual_length": 64, "device": "cpu"}
    with pytest.warns(UserWarning, match=r"\['device'\] no longer mean anything"):
        predicted = kvp.estimate(CONFIG, old, 640)
    assert predicted == kvp.estimate(CONFIG, {"backend": "hqq", "q_group_size": 128}, 640)


# ---- where there are none ----


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_utils, "is_optimum_quanto_available", lambda: False)
    with pytest.raises(
        kvp.UnavailableCacheError, match=r"not installed \(pip install optimum-quanto\)"
    ) as caught:
        kvp.estimate(CONFIG, {"backend": "quanto"}, 10)
    assert caught.value.reason == "not installed"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert main(["estimate", "--cache_config", '{"backend": "quanto"}']) == 2
    assert "'quanto' is transformers' own cache, and cannot be had here" in capsys.readouterr().err


def test_a_backend_of_a_later_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ValueError("Unknown quantization backend `fp8`")

    monkeypatch.setattr(transformers.QuantizedCache, "__init__", refuse)
    with pytest.raises(kvp.UnavailableCacheError, match=f"not in transformers {transformers.__version__}"):
        kvp.estimate(CONFIG, {"backend": "fp8"}, 10)


@pytest.mark.parametrize(
    ("kind", "told", "reason"),
    [
        ("Gemma2Config", {}, "models of full attention layers alone"),
        ("BartConfig", {"encoder_tokens": 9}, "decoder-only models alone"),
    ],
)
def test_models_it_does_not_serve_are_refused(kind: str, told: dict[str, Any], reason: str) -> None:
    available({"backend": "quanto"})
    with pytest.raises(kvp.UnavailableCacheError, match=reason):
        kvp.estimate(getattr(transformers, kind)(), {"backend": "quanto"}, 10, **told)


@pytest.mark.parametrize(
    ("cache_config", "said"),
    [
        ({"backend": "quanto", "nbits": 3}, "nbits.*3"),
        ({"backend": "quanto", "nbit": 4}, "is not what transformers' own cache takes.*nbit"),
        (
            {"backend": "quanto", "q_group_size": 48},
            "48} does not take 10 tokens, and 0 generated ones, of 1 rows",
        ),
        (
            {"backend": "hqq", "q_group_size": 48},
            "48} does not take 10 tokens, and 0 generated ones, of 1 rows",
        ),
    ],
    ids=lambda value: named(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_told(cache_config: dict[str, Any], said: str) -> None:
    available({"backend": cache_config["backend"]})
    with pytest.raises(ValueError, match=said):
        kvp.estimate(CONFIG, cache_config, 10)


def test_what_fits_numbers_is_left_to_real_tensors() -> None:
    available({"backend": "hqq"})
    from transformers.cache_utils import HQQQuantizer

    built = build_quantized_cache(CONFIG, {"backend": "hqq"}).layers[0]
    assert built.quantizer is HQQQuantizer
    assert issubclass(sized_layers(CONFIG, {"backend": "hqq"})[0].quantizer, HQQQuantizer)
