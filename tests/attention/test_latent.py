"""Attention over latents: against fp64 attention to the keys and values that a model would make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcache_plugins.attention import latent
from kvcache_plugins.attention.latent import attend_latents, latent_keys
from kvcache_plugins.attention.received import received_attention
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.kernels import loader
from kvcache_plugins.layers.expanded import Expansion
from kvcache_plugins.models.latent import LatentProjection
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, build_layer, library, masks, step
from tests.reference.attention import naive_attention

__all__ = ["library"]  # a fixture

HEADS, RANK, KEY_DIM, ROTATED, VALUE_DIM = 6, 64, 24, 16, 40
SCALING = 0.2
PADS = torch.tensor([70, 3])


def make(projection: LatentProjection, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, from the definition, head by head."""
    keys, values = [], []
    for weight in projection.weight.to(latents.dtype):
        keys.append(torch.cat((latents[:, 0] @ weight[:KEY_DIM].T, rotated[:, 0]), dim=-1))
        values.append(latents[:, 0] @ weight[KEY_DIM:].T)
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def expansion_of(
    options: dict[str, Any], length: int, query_length: int, **layer: Any
) -> tuple[Tensor, Expansion]:
    """Queries of the newest tokens, and what a layer then holds."""
    dtype = layer.get("dtype", torch.float32)
    weight = torch.randn(HEADS, KEY_DIM + VALUE_DIM, RANK) / RANK**0.5
    projection = LatentProjection(weight.to(dtype), KEY_DIM)
    built = build_layer(options, length, kv_heads=1, head_dim=RANK, value_dim=ROTATED, **layer)
    _, latents, rotated = step(built, query_length, 1)
    query = torch.randn(len(latents), HEADS, query_length, KEY_DIM + ROTATED).to(dtype)
    return query, Expansion(latents, rotated, projection, lambda a, b: make(projection, a, b))


def truth(query: Tensor, expansion: Expansion, **options: Any) -> Tensor:
    """In fp64, over what the layer holds."""
    held = (handle.tokens.dense(torch.float64) for handle in (expansion.latents, expansion.rotated))
    return naive_attention(query.double(), *make(expansion.projection, *held), **options)


def check(query: Tensor, expansion: Expansion, bound: float = 1e-5, **options: Any) -> None:
    got = attend_latents(query, expansion, AttentionOptions(**options))
    renamed = {"sinks" if name == "sink_logits" else name: option for name, option in options.items()}
    if isinstance(mask := options.get("mask"), Tensor):  # some reach further than the tokens
        renamed["mask"] = mask[..., : expansion.latents.tokens.length]
    expected = truth(query, expansion, **renamed)
    assert got.dtype == query.dtype and got.shape == expected.shape
    assert torch.isfinite(got).all()
    assert relative_rms(expected, got) <= bound
    assert expansion.latents.layer.fallback_reads == 0


@pytest.fixture(params=["absorbed", "expanded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, whatever would be cheaper."""
    monkeypatch.setattr(latent, "_absorbing_is_cheaper", lambda *_: request.param == "absorbed")
    return str(request.param)


@pytest.mark.parametrize("name", CASES)
def test_every_backend(name: str, way: str) -> None:
    query, expansion = expansion_of(CASES[name], 250, 3)
    check(query, expansion, is_causal=True, scaling=SCALING)
    assert expansion.latents.layer.kernel == "cpu"


@pytest.mark.parametrize("query_length", [1, 2, 9, 33])
def test_query_lengths(query_length: int, way: str) -> None:
    query, expansion = expansion_of(CASES["kivi-default"], 300, query_length)
    check(query, expansion, is_causal=True)


@pytest.mark.parametrize("query_length", [1, 20])
def test_plain_torch(query_length: int, way: str) -> None:
    query, expansion = expansion_of(CASES["int8-default"] | {"kernel": "torch"}, 150, query_length)
    check(query, expansion, is_causal=True)
    layer = expansion.latents.layer
    assert (layer.kernel, layer.kernel_reason) == ("torch", "kernel='torch' was given")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_length", [1, 20])
def test_dtypes(dtype: torch.dtype, query_length: int, way: str) -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, query_length, dtype=dtype)
    # what the decoded tokens are rounded to bounds what can be asked of fp64: codes are decoded in fp32
    bounds = {torch.float64: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    check(query, expansion, bounds[dtype], is_causal=True)


def test_absorbed_half_precision_is_no_worse_than_what_a_model_makes() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        query, expansion = expansion_of(CASES["int8-default"], 300, 1, dtype=dtype)
        expected = truth(query, expansion)
        got = attend_latents(query, expansion, AttentionOptions())
        keys, values = expansion.dense()
        made = nn.functional.scaled_dot_product_attention(query, keys, values)
        assert relative_rms(expected, got) <= relative_rms(expected, made)


@pytest.mark.parametrize("query_length", [1, 20])
def test_masks_and_biases(query_length: int, way: str) -> None:
    query, expansion = expansion_of(CASES["kivi-default"], 200, query_length)
    length = 200 + query_length
    for mask in masks(2, HEADS, query_length, length).values():
        check(query, expansion, mask=mask)
    check(query, expansion, is_causal=True, softcap=3.0)
    check(query, expansion, is_causal=True, sliding_window=90)
    check(query, expansion, is_causal=True, sink_logits=torch.randn(HEADS))


def test_sinks_kept_exact_with_padding(way: str) -> None:
    query, expansion = expansion_of(CASES["int4-sinks"], 200, 2, padding=PADS)
    mask = (torch.arange(202) >= PADS[:, None])[:, None, None]
    check(query, expansion, mask=mask, is_causal=True)


def test_the_cheaper_way_is_taken() -> None:
    projection = LatentProjection(torch.zeros(16, 256, 512), 128)  # DeepSeek-V2-Lite

    def most_absorbed(dtype: torch.dtype, multiplier: str) -> int:
        query = torch.empty(1, 16, 1, 192, dtype=dtype)
        counts = [2**i for i in range(12)]
        cheaper = [
            latent._absorbing_is_cheaper(query.expand(-1, -1, q, -1), projection, multiplier) for q in counts
        ]
        assert cheaper == sorted(cheaper, reverse=True)
        return counts[sum(cheaper) - 1]

    # 512 * 256 products to make a key and a value, 1088 against 320 for a query
    assert most_absorbed(torch.float32, "torch") == 128
    assert most_absorbed(torch.float32, "avx2") == 128
    assert most_absorbed(torch.float32, "avx512") == 512
    has_amx = torch.cpu._is_amx_tile_supported()
    assert most_absorbed(torch.bfloat16, "torch") == 32
    assert most_absorbed(torch.bfloat16, "avx2") == (32 if has_amx else 64)
    assert most_absorbed(torch.bfloat16, "avx512") == (32 if has_amx else 2048)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the kernel that decodes and multiplies: their queries, and their options."""
    if loader.instruction_set() == "portable":
        pytest.skip("torch multiplies here")
    calls: list[tuple[Any, ...]] = []
    original = latent.attend_decoded_latents

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append((args[0], options))
        return original(*args, **options)

    monkeypatch.setattr(latent, "attend_decoded_latents", counted)
    monkeypatch.setattr(latent, "_absorbing_is_cheaper", lambda *_: True)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_kernel_decodes_and_multiplies(kernel: list[tuple[Any, ...]], dtype: torch.dtype) -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, 2, dtype=dtype)
    check(query, expansion, 1e-5 if dtype == torch.float32 else 8e-3, is_causal=True)
    ((rows, options),) = kernel
    assert rows.dtype == torch.float32 and rows.shape == (2, HEADS, 2, RANK + ROTATED)
    assert options["is_bfloat16"] == (dtype == torch.bfloat16)
    layer = expansion.latents.layer
    assert (layer.kernel, layer.kernel_reason) == ("cpu", None)


@pytest.mark.parametrize("name", ["kivi-default", "kivi-no-window", "int8-default", "int4-sinks"])
def test_many_queries_are_several_passes(kernel: list[tuple[Any, ...]], name: str) -> None:
    query, expansion = expansion_of(CASES[name], 130, 150)
    check(query, expansion, is_causal=True)
    assert [rows.shape[2] for rows, _ in kernel] == [64, 64, 22]
    check(query, expansion, is_causal=True, sliding_window=77)
    mask = torch.rand(2, 1, 1, 280) > 0.5
    check(query, expansion, mask=mask)
    check(query, expansion, mask=mask, is_causal=True)
    assert len(kernel) == 12 and expansion.latents.layer.kernel_reason is None


def test_what_is_left_to_torchs_products(
    kernel: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, 9)
    layer = expansion.latents.layer
    check(query, expansion, is_causal=True, alibi_slopes=torch.rand(HEADS))
    check(query, expansion, mask=torch.rand(2, 1, 9, 159) > 0.5)  # a bias for every query
    check(query.double(), expansion, is_causal=True)
    monkeypatch.setenv("KVCACHE_CPU_ISA", "portable")
    check(query, expansion, is_causal=True)
    assert not kernel
    assert layer.kernel == "cpu" and "multiplied by torch" in str(layer.kernel_reason)


def test_a_tile_is_read_once(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    query, expansion = expansion_of(CASES["int8-default"], 300, 1)
    reads: list[tuple[int, int]] = []
    original = latent.DecodedView._decode

    def counted(self: Any, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        reads.append((start, stop))
        return original(self, start, stop, dtype)

    monkeypatch.setattr(latent.DecodedView, "_decode", counted)
    monkeypatch.setattr(latent, "_multiplier", lambda *_: "torch")
    attend_latents(query, expansion, AttentionOptions())
    assert reads and len(reads) == 2 * len(set(reads)), "latents and rotated keys of each run"


def test_received_attention_is_that_of_all_heads() -> None:
    query, expansion = expansion_of(CASES["kivi-default"], 200, 5)
    options = AttentionOptions(is_causal=True, scaling=SCALING)
    absorbed = latent._absorbed(query, expansion.projection)
    got = received_attention(absorbed, latent_keys(expansion), options)
    held = (handle.tokens.dense(torch.float64) for handle in (expansion.latents, expansion.rotated))
    keys, _ = make(expansion.projection, *held)
    logits = query.double() @ keys.transpose(2, 3) * SCALING
    hidden = torch.ones(5, 205, dtype=torch.bool).triu(201)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((1, 2))[:, None]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


# -- handles


def test_handles_look_like_what_they_stand_for() -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, 1)
    keys, values = expansion.handles()
    assert keys.shape == (2, HEADS, 151, KEY_DIM + ROTATED)
    assert values.shape == (2, HEADS, 151, VALUE_DIM)
    assert (keys.dtype, keys.device) == (query.dtype, query.device)


def test_any_other_operation_makes_keys_and_values_and_is_counted() -> None:
    _, expansion = expansion_of(CASES["int8-default"], 150, 1)
    keys, values = expansion.handles()
    made = make(expansion.projection, expansion.latents.dense(), expansion.rotated.dense())
    assert torch.equal(keys + 0, made[0]) and torch.equal(values * 1, made[1])
    assert expansion.latents.layer.fallback_reads == 2, "latents and rotated keys, once each"


def test_torchs_own_attention_reads_latents() -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, 1)
    keys, values = expansion.handles()
    got = nn.functional.scaled_dot_product_attention(query, keys, values)
    assert relative_rms(truth(query, expansion), got) <= 1e-5
    assert expansion.latents.layer.fallback_reads == 0


@pytest.mark.parametrize("changed", ["keys", "values"])
def test_keys_and_values_that_were_changed_in_place_are_attended_to_as_they_are(changed: str) -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, 1)
    handles = expansion.handles()
    expected = [states.clone() for states in handles]
    for states in (handles[changed == "values"], expected[changed == "values"]):
        states.mul_(3)
    got = nn.functional.scaled_dot_product_attention(query, *handles)
    torch.testing.assert_close(got, nn.functional.scaled_dot_product_attention(query, *expected))


def test_keys_and_values_of_two_calls_are_dense() -> None:
    query, expansion = expansion_of(CASES["int8-default"], 150, 1)
    _, other = expansion_of(CASES["int8-default"], 150, 1)
    got = nn.functional.scaled_dot_product_attention(query, expansion.handles()[0], other.handles()[1])
    expected = nn.functional.scaled_dot_product_attention(query, expansion.dense()[0], other.dense()[1])
    torch.testing.assert_close(got, expected)
