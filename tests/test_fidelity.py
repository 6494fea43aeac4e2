"""Fidelity on a model whose attention uses its context, and on text it never saw.

Windows of 1024 tokens; the first 512 are read in one forward, the others in blocks of 48 that read the cache.
Compared is the mean KL divergence from the dense run, of our caches, of caches fake-quantized from the
formulas (`tests/reference`), and of transformers' own.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import QuantizedCache

import kvcache_plugins as kvp

from .reference.caches import oracle_cache
from .reference.fidelity import fidelity
from .reference.kvquant import kvquant_oracle_cache

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama-books"
ARTIFACT = MODEL.with_name(f"{MODEL.name}-kvquant3")
UNSEEN = ("attribute-access", "exprlists", "nonlocal", "numeric-types", "operator-summary", "specialattrs",
          "specialnames", "subscriptions")  # fmt: skip
WINDOWS = 2
BLOCK = 48
"""So that lengths are at many places of a block of 64 tokens and of a window of 128."""


@lru_cache(maxsize=1)
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@lru_cache(maxsize=1)
def token_ids() -> torch.Tensor:
    # The longest topic is tens of windows long and comes last in every release that has it.
    text = "\n\n".join(
        topics[name] for name in sorted(UNSEEN, key=lambda n: (n == "specialnames", n)) if name in topics
    )
    return torch.tensor(AutoTokenizer.from_pretrained(MODEL)(text, verbose=False).input_ids)


def ours(**options: Any) -> dict[str, float]:
    return _ours(tuple(sorted(options.items())))


@cache
def _ours(items: tuple[tuple[str, Any], ...]) -> dict[str, float]:
    options = dict(items)
    return fidelity(
        model(), token_ids(), lambda: kvp.build_cache(model(), options), max_windows=WINDOWS, block=BLOCK
    )


def oracle(method: str, **options: Any) -> dict[str, float]:
    if options.get("rope_mode") == "block":
        options |= {"inv_freq": model().model.rotary_emb.inv_freq, "rope_period": 32}
    return fidelity(
        model(),
        token_ids(),
        lambda: oracle_cache(model().config, method, **options),
        max_windows=WINDOWS,
        block=BLOCK,
    )


def kvquant_oracle(residual_length: int) -> dict[str, float]:
    tensors = load_file(ARTIFACT / "kvquant.safetensors")
    inv_freq = model().model.rotary_emb.inv_freq
    options: dict[str, Any] = {"nbits": 3, "outlier_fraction": 0.01, "residual_length": residual_length}
    return fidelity(
        model(),
        token_ids(),
        lambda: kvquant_oracle_cache(model().config, tensors, inv_freq, **options),
        max_windows=WINDOWS,
        block=BLOCK,
    )


@cache
def theirs(backend: str, nbits: int | None) -> dict[str, float]:
    options: dict[str, Any] = {} if nbits is None else {"nbits": nbits}
    if backend == "hqq":
        options |= {"axis_key": 1, "axis_value": 1}
    return fidelity(
        model(),
        token_ids(),
        lambda: QuantizedCache(backend, model().config, **options),
        max_windows=WINDOWS,
        block=BLOCK,
    )


CASES = {
    "kivi-4": ({"backend": "kivi", "nbits": 4}, {"method": "kivi"}),
    "kivi-3": ({"backend": "kivi", "nbits": 3}, {"method": "kivi", "key_bits": 3, "value_bits": 3}),
    "kivi-2": ({"backend": "kivi", "nbits": 2}, {"method": "kivi", "key_bits": 2, "value_bits": 2}),
    "kivi-k4v2-block": (
        {"backend": "kivi", "key_bits": 4, "value_bits": 2, "rope_mode": "block"},
        {"method": "kivi", "key_bits": 4, "value_bits": 2, "rope_mode": "block"},
    ),
    "int8": ({"backend": "int8"}, {"method": "int8"}),
    "int4": ({"backend": "int4"}, {"method": "int4"}),
    "int4-smooth": ({"backend": "int4", "smooth": 0.5}, {"method": "int4", "smooth": 0.5}),
    "int4-k8v4": ({"backend": "int4", "key_bits": 8}, {"method": "int4", "key_bits": 8}),
    "float8": ({"backend": "float8"}, {"method": "float8"}),
}


def assert_as_faithful(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got["kl"] > 1e-7, "no quantization error at all: the cache was not read"
    assert got["kl"] == pytest.approx(expected["kl"], rel=0.08)


@pytest.mark.parametrize("name", CASES)
def test_as_faithful_as_the_formulas(name: str) -> None:
    options, formula = CASES[name]
    assert_as_faithful(ours(**options), oracle(**formula))


def kvquant(residual_length: int) -> dict[str, float]:
    return ours(backend="kvquant", nbits=3, calibration=str(ARTIFACT), residual_length=residual_length)


@pytest.mark.parametrize("residual_length", [128, 0])
def test_kvquant_is_as_faithful_as_the_formulas(residual_length: int) -> None:
    assert_as_faithful(kvquant(residual_length), kvquant_oracle(residual_length))


@pytest.mark.parametrize("rope_mode", ["post", "block"])
def test_kvquant_beats_kivi_at_the_same_bits(rope_mode: str) -> None:
    # Its keys and values keep 64 to 127 exact tokens, KIVI's keys 0 to 127 and values 128: 96 on average
    # each.
    kivi = ours(backend="kivi", nbits=3, rope_mode=rope_mode)
    assert kvquant(64)["kl"] < kivi["kl"]


@pytest.mark.allow_deprecation("torch.jit.script", reason="hqq compiles with it when it is imported")
@pytest.mark.parametrize("nbits", [4, 2])
@pytest.mark.parametrize(("backend", "module"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_kivi_beats_transformers_own_at_the_same_bits(backend: str, module: str, nbits: int) -> None:
    pytest.importorskip(module)
    assert ours(backend="kivi", nbits=nbits)["kl"] < theirs(backend, nbits)["kl"]


def test_float8_is_no_worse_than_transformers_own() -> None:
    try:
        QuantizedCache("fp8", model().config)
    except ValueError:
        pytest.skip("this transformers has no fp8 cache")
    assert ours(backend="float8")["kl"] <= 1.1 * theirs("fp8", None)["kl"]


def test_more_bits_are_more_faithful() -> None:
    kl = [ours(backend="kivi", nbits=nbits)["kl"] for nbits in (2, 3, 4, 8)]
    assert kl == sorted(kl, reverse=True)


def test_the_model_is_left_as_it_was() -> None:
    # The dense run is that of before our caches served it, and is compared with one of now.
    ours(backend="kivi", rope_mode="block"), ours(backend="int4", smooth=0.5)
    got = fidelity(
        model(), token_ids(), lambda: DynamicCache(config=model().config), max_windows=WINDOWS, block=BLOCK
    )
    assert got["kl"] == 0.0 and got["top1"] == 1.0
