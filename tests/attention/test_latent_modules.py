"""Which attention modules make keys and values of latents in a known way, and what becomes of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcache_plugins.attention import dispatch, latent_models
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.models.latent import LatentProjection, projection_of
from tests.attention.test_latent import HEADS, KEY_DIM, RANK, ROTATED, VALUE_DIM
from tests.kernels.decode_cases import CASES, build_layer, library, step

__all__ = ["library"]  # a fixture


class Attention(nn.Module):
    """As much of an attention module as is looked at."""

    kv_lora_rank, qk_nope_head_dim, v_head_dim = RANK, KEY_DIM, VALUE_DIM

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj: nn.Module = nn.Linear(RANK, HEADS * (KEY_DIM + VALUE_DIM), bias=False)
        self.is_reversed = False

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        made = self.kv_b_proj(kv_nope[:, 0]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        keys, values = made.split((KEY_DIM, VALUE_DIM), dim=-1)
        parts = [keys, k_rot.expand(-1, HEADS, -1, -1)]
        return torch.cat(parts[::-1] if self.is_reversed else parts, dim=-1), values


@pytest.fixture
def module() -> Any:
    module = Attention()
    latent_models.let_latents_pass(module)
    yield module
    latent_models.restore_expansions()


def held_by(options: dict[str, Any]) -> tuple[PackedLayer, Any, Any]:
    layer = build_layer(options, 150, kv_heads=1, head_dim=RANK, value_dim=ROTATED)
    _, latents, rotated = step(layer, 1, 1)
    return layer, latents, rotated


def test_a_projection_is_the_models(module: Any) -> None:
    projection = projection_of(module, torch.float32)
    assert isinstance(projection, LatentProjection)
    assert (projection.heads, projection.key_dim, projection.value_dim) == (HEADS, KEY_DIM, VALUE_DIM)
    given = torch.randn(2, 1, 7, RANK), torch.randn(2, 1, 7, ROTATED)
    for made, known in zip(module.expand_kv(*given), projection.expand(*given), strict=True):
        torch.testing.assert_close(known, made)


def test_handles_pass_and_tensors_do_as_before(module: Any) -> None:
    layer, latents, rotated = held_by(CASES["int8-default"])
    keys, values = module.expand_kv(latents, rotated)
    assert keys.expansion is values.expansion
    query = torch.randn(2, HEADS, 1, KEY_DIM + ROTATED)
    with torch.no_grad():
        got, _ = dispatch.forward_over_handles(module, query, keys, values, None)
        assert layer.fallback_reads == 0
        made = module.expand_kv(latents.dense(), rotated.dense())
        expected = nn.functional.scaled_dot_product_attention(query, *made)
    torch.testing.assert_close(got.transpose(1, 2), expected)


class Adapted(nn.Linear):
    """A linear layer with parts of its own, as adapters have them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part = nn.Linear(2, 2)


class Quantized(nn.Module):
    """A linear layer whose weight is stored in another way, and unpacked at every call."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-127, 128, (HEADS * (KEY_DIM + VALUE_DIM), RANK), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.calls = 0

    def forward(self, states: Tensor) -> Tensor:
        self.calls += 1
        return states @ (self.codes.to(states.dtype) / 1000).T


def _with_bias(module: Any) -> None:
    module.kv_b_proj = nn.Linear(RANK, HEADS * (KEY_DIM + VALUE_DIM))


def _with_hook(module: Any) -> None:
    module.kv_b_proj.register_forward_hook(lambda module, args, output: 2 * output)


def _adapted(module: Any) -> None:
    module.kv_b_proj = Adapted(RANK, HEADS * (KEY_DIM + VALUE_DIM), bias=False)


def _reversed(module: Any) -> None:
    module.is_reversed = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with_bias, "more than a weight"),
        (_with_hook, "more than a weight"),
        (_adapted, "(Adapted) is more than a weight"),
        (_reversed, "something else of its latents"),
    ],
)
def test_what_is_not_known_is_left_to_the_model(module: Any, change: Any, reason: str) -> None:
    change(module)
    layer, latents, rotated = held_by(CASES["int8-default"])
    with torch.no_grad():
        keys, values = module.expand_kv(latents, rotated)
        made = module.expand_kv(latents.dense(), rotated.dense())
    assert torch.equal(keys, made[0]) and torch.equal(values, made[1])
    assert reason in str(layer.kernel_reason)
    assert layer.fallback_reads == 2


def test_the_class_is_put_back() -> None:
    original = Attention.expand_kv
    latent_models.let_latents_pass(Attention())
    latent_models.let_latents_pass(nn.Sequential(Attention(), Attention()))
    assert Attention.expand_kv is not original
    latent_models.restore_expansions()
    assert Attention.expand_kv is original


def test_native_kernels_that_cannot_serve_are_said_to_be_missing(module: Any) -> None:
    _with_hook(module)
    _, latents, rotated = held_by(CASES["int8-default"] | {"kernel": "native"})
    with pytest.raises(KernelUnavailableError, match=r"layer 0.*all latents are expanded at every step"):
        module.expand_kv(latents, rotated)


def test_a_quantized_weight_is_unpacked_once(module: Any) -> None:
    module.kv_b_proj = quantized = Quantized()
    layer, latents, rotated = held_by(CASES["int8-default"])
    query = torch.randn(2, HEADS, 1, KEY_DIM + ROTATED)
    with torch.no_grad():
        for _ in range(3):
            got, _ = dispatch.forward_over_handles(module, query, *module.expand_kv(latents, rotated), None)
        assert quantized.calls == 2, "once to unpack it, and once to see that it is a weight"
        copied = 4 * HEADS * (KEY_DIM + VALUE_DIM) * RANK
        assert (
            layer.kernel_reason == f"kv_b_proj is quantized, so a dense copy of it is kept, {copied:,} bytes"
        )
        assert layer.fallback_reads == 0
        made = module.expand_kv(latents.dense(), rotated.dense())
        expected = nn.functional.scaled_dot_product_attention(query, *made)
        torch.testing.assert_close(got.transpose(1, 2), expected)
        quantized.codes += 1
        changed, _ = dispatch.forward_over_handles(module, query, *module.expand_kv(latents, rotated), None)
        assert quantized.calls == 4, "the weight is another"
    assert not torch.allclose(changed, got)


@pytest.mark.filterwarnings("ignore")
def test_a_weight_of_quanto(module: Any) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(module, weights=quanto.qint8)
    quanto.freeze(module)
    assert type(module.kv_b_proj) is not nn.Linear
    layer, latents, rotated = held_by(CASES["int8-default"])
    query = torch.randn(2, HEADS, 1, KEY_DIM + ROTATED)
    with torch.no_grad():
        got, _ = dispatch.forward_over_handles(module, query, *module.expand_kv(latents, rotated), None)
        assert layer.fallback_reads == 0
        expected = nn.functional.scaled_dot_product_attention(
            query, *module.expand_kv(latents.dense(), rotated.dense())
        )
    torch.testing.assert_close(got.transpose(1, 2), expected, atol=1e-4, rtol=1e-4)


def test_a_module_that_is_called_in_another_way(module: Any) -> None:
    layer, latents, rotated = held_by(CASES["int8-default"])
    with torch.no_grad():
        keys, values = module.expand_kv(kv_nope=latents, k_rot=rotated)
        made = module.expand_kv(latents.dense(), rotated.dense())
    assert torch.equal(keys, made[0]) and torch.equal(values, made[1])
    assert layer.fallback_reads == 2


def test_a_module_of_which_less_is_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    latent_models.restore_expansions()
    original = Attention.expand_kv
    monkeypatch.delattr(Attention, "kv_lora_rank")
    latent_models.let_latents_pass(Attention())
    assert Attention.expand_kv is original


def test_weights_that_are_elsewhere_are_left_to_the_model(module: Any) -> None:
    module.kv_b_proj.to("meta")
    assert "not on a device" in str(projection_of(module, torch.float32))
