"""Handles: asking about them is free, SDPA reads the codes, anything else decodes, once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.attention import dispatch  # noqa: F401  (teaches handles about SDPA)
from kvcache_plugins.backends.kivi import KIVIConfig, KIVILayer
from kvcache_plugins.errors import KernelUnavailableError, UnsupportedOperationError
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.testing.comparison import assert_close

B, H, T, D, DV = 2, 3, 101, 48, 32
OPTIONS: dict[str, Any] = {"q_group_size": 16, "residual_length": 32, "kernel": "torch"}


@pytest.fixture
def layer() -> PackedLayer:
    layer = KIVILayer(KIVIConfig(**OPTIONS), 7, LayerFacts())
    layer.update(torch.randn(B, H, T - 1, D), torch.randn(B, H, T - 1, DV))
    return layer


@pytest.fixture
def handles(layer: PackedLayer) -> tuple[KVHandle, KVHandle]:
    key, value = layer.update(torch.randn(B, H, 1, D), torch.randn(B, H, 1, DV))
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    return key, value


@pytest.fixture
def dense(handles: tuple[KVHandle, KVHandle]) -> tuple[Tensor, Tensor]:
    """What the handles stand for, read past them, so that nothing is counted."""
    return handles[0].tokens.dense(torch.float32), handles[1].tokens.dense(torch.float32)


# -- free of charge


def test_asking_about_a_handle_decodes_nothing(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle]
) -> None:
    for handle, width in zip(handles, (D, DV), strict=True):
        assert tuple(handle.shape) == tuple(handle.size()) == (B, H, T, width)
        assert (handle.shape[-2], handle.size(2), handle.dim(), handle.ndim) == (T, T, 4, 4)
        assert len(handle) == B
        assert handle.dtype == torch.float32 and handle.is_floating_point() and handle.element_size() == 4
        assert handle.device == torch.device("cpu") and not handle.is_cuda and not handle.is_meta
        assert handle.numel() == B * H * T * width
        assert handle.is_contiguous() and handle.contiguous() is handle
        assert not handle.requires_grad and handle.layout == torch.strided
        assert f"shape=({B}, {H}, {T}, {width})" in repr(handle) and "layer_idx=7" in repr(handle)
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=lambda d: str(d)[6:])
def test_it_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    layer = KIVILayer(KIVIConfig(**OPTIONS), 0, LayerFacts())
    states = torch.randn(B, H, 40, D).to(dtype)
    layer.update(states, states)
    key, value = layer.update(states[:, :, :1], states[:, :, :1])
    for handle in (key, value):
        assert isinstance(handle, KVHandle) and handle.dtype == dtype
        assert (handle * 1).dtype == dtype
    assert torch.equal((value * 1)[:, :, -1:], states[:, :, :1])


# -- reads that decode


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x, torch.ones(B, H, 2, x.shape[3])], dim=2),
    "cat-itself": lambda x: torch.cat([x, x], dim=-1),
    "transpose": lambda x: x.transpose(1, 2),
    "matmul": lambda x: x @ torch.ones(x.shape[3], 1),
    "slice": lambda x: x[:, :, -3:],
    "to-float64": lambda x: x.to(torch.float64),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1),
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "reshape": lambda x: x.reshape(B, -1),
    "view": lambda x: x.view(B * H, T, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[3])),
    "einsum": lambda x: torch.einsum("bhtd->btd", x),
    "out-of-place-index": lambda x: x.index_select(2, torch.tensor([5, 0])),
    "keyword": lambda x: torch.softmax(input=x, dim=-1),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "unbind": lambda x: torch.stack(list(x)),
}


@pytest.mark.parametrize("name", READS)
def test_an_unknown_operation_decodes_and_is_counted(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor], name: str
) -> None:
    for count, (handle, exact) in enumerate(zip(handles, dense, strict=True), start=1):
        got = READS[name](handle)
        assert not isinstance(got, KVHandle)
        expected = READS[name](exact)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
        assert layer.fallback_reads == count


def test_a_second_read_is_not_decoded_again(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = handles
    first = key * 1
    assert layer.fallback_reads == 1

    def refuse(*args: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(layer.stored_keys, "decode", refuse)
    assert torch.equal(key[:, :, 5:9], first[:, :, 5:9])
    assert key.dense() is key.dense()
    assert layer.fallback_reads == 1


def test_what_is_read_does_not_change_the_cache(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor]
) -> None:
    handles[0].dense().fill_(7.0)
    assert torch.equal(handles[0].tokens.dense(torch.float32), dense[0])


def test_handles_refuse_gradients_and_no_gradient_mode(layer: PackedLayer) -> None:
    # Outside `no_grad`, as in an own loop: states that require gradients are cached without their history.
    states = torch.randn(B, H, 1, D, requires_grad=True)
    key, value = layer.update(states, torch.randn(B, H, 1, DV))
    assert not key.requires_grad
    assert torch.equal(key * 1, key.dense()) and not (value * 1).requires_grad
    with pytest.raises(UnsupportedOperationError, match="gradient"):
        (key * 1).sum().backward()


# -- scaled dot product attention


SDPA: dict[str, tuple[Callable[[], dict[str, Any]], tuple[int, int]]] = {
    # arguments, (query heads, query length)
    "decode-gqa": (lambda: {"enable_gqa": True}, (6, 1)),
    "decode": (dict, (3, 1)),
    "packed-queries": (dict, (3, 4)),
    "scale": (lambda: {"scale": 0.3}, (3, 2)),
    "boolean-mask": (lambda: {"attn_mask": torch.rand(B, 1, 5, T) > 0.5}, (3, 5)),
    "additive-mask": (lambda: {"attn_mask": torch.randn(5, T)}, (3, 5)),
    "mask-of-one-row-gqa": (lambda: {"attn_mask": torch.rand(1, T) > 0.3, "enable_gqa": True}, (9, 2)),
    # torch aligns its causal mask to the upper left, and so must we
    "causal": (lambda: {"is_causal": True}, (3, 5)),
    "causal-gqa": (lambda: {"is_causal": True, "enable_gqa": True, "scale": 1.0}, (6, 33)),
}


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_reads_the_codes(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor], name: str
) -> None:
    build, (heads, length) = SDPA[name]
    options, query = build(), torch.randn(B, heads, length, D)
    got = F.scaled_dot_product_attention(query, *handles, **options)
    assert type(got) is Tensor and got.dtype == query.dtype
    assert_close(name, F.scaled_dot_product_attention(query, *dense, **options), got, 1e-5)
    assert layer.fallback_reads == 0


def test_sdpa_with_a_positional_mask(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: Any
) -> None:
    query, mask = torch.randn(B, H, 3, D), torch.rand(3, T) > 0.5
    got = F.scaled_dot_product_attention(query, *handles, mask, 0.0, False)
    assert_close("positional", F.scaled_dot_product_attention(query, *dense, mask), got, 1e-5)
    assert layer.fallback_reads == 0


def test_sdpa_with_dropout_decodes(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: Any
) -> None:
    query = torch.randn(B, H, 3, D)
    outputs = []
    for key, value in (handles, dense):
        torch.manual_seed(3)
        outputs.append(F.scaled_dot_product_attention(query, key, value, dropout_p=0.5))
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], F.scaled_dot_product_attention(query, *dense))
    assert layer.fallback_reads == 2


def test_sdpa_with_one_handle_decodes_it(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: Any
) -> None:
    query = torch.randn(B, H, 1, D)
    got = F.scaled_dot_product_attention(query, handles[0], dense[1])
    assert torch.equal(got, F.scaled_dot_product_attention(query, *dense))
    assert layer.fallback_reads == 1


def test_sdpa_needs_enable_gqa_as_torch_does(handles: tuple[KVHandle, KVHandle]) -> None:
    with pytest.raises(ValueError, match="6 query heads for 3 key heads without enable_gqa"):
        F.scaled_dot_product_attention(torch.randn(B, 6, 1, D), *handles)


# -- copies


def test_copies_of_a_layer_are_independent_of_its_handles(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor]
) -> None:
    twin = copy.deepcopy(layer)
    assert layer.fallback_reads == 0
    step = torch.randn(B, H, 1, D), torch.randn(B, H, 1, DV)
    ours, theirs = layer.update(*step), twin.update(*step)
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, KVHandle) and isinstance(other, KVHandle)
        assert one.layer is layer and other.layer is twin
        assert torch.equal(one.dense(), other.dense())
    assert layer.fallback_reads == twin.fallback_reads == 2
    twin.crop(-90)
    twin.update(torch.full((B, H, 1, D), 1e3), torch.full((B, H, 1, DV), 1e3))
    assert torch.equal(layer.update(*step)[0][:, :, :T], ours[0].dense()[:, :, :T])


def test_no_attribute_of_a_handle_hides_one_of_tensors() -> None:
    own = {"dense", "layer", "tokens", "_dense"}
    assert not [name for name in own if hasattr(torch.Tensor, name)]


# -- heads with channels of zeros behind their own


@pytest.mark.parametrize("scale", [None, 0.3])
def test_padded_heads_are_attended_to_without_the_zeros(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor], scale: float | None
) -> None:
    query = torch.randn(B, H, 1, D)
    padded = [F.pad(handle, (0, 8)) for handle in handles]
    assert [tuple(states.shape) for states in padded] == [(B, H, T, D + 8), (B, H, T, DV + 8)]
    found = F.scaled_dot_product_attention(F.pad(query, (0, 8)), *padded, scale=scale)
    expected = F.scaled_dot_product_attention(
        *(F.pad(states, (0, 8)) for states in (query, *dense)), scale=scale
    )
    assert_close("padded", expected, found, 1e-5)
    assert torch.equal(found[..., DV:], torch.zeros(B, H, 1, 8))
    assert layer.fallback_reads == 0


@pytest.mark.parametrize("pad", [(8, 0), (0, -8), (0, 0, 0, 8)])
def test_other_padding_decodes(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor], pad: tuple[int, ...]
) -> None:
    assert torch.equal(F.pad(handles[0], pad), F.pad(dense[0], pad))
    assert torch.equal(F.pad(handles[1], (0, 8), value=1.0), F.pad(dense[1], (0, 8), value=1.0))
    assert layer.fallback_reads == 2


def test_padded_heads_elsewhere_are_decoded_with_their_zeros(
    layer: PackedLayer, handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor]
) -> None:
    padded = F.pad(handles[0], (0, 8))
    assert torch.equal(padded + 1, F.pad(dense[0], (0, 8)) + 1)
    assert layer.fallback_reads == 1 and "PaddedHandle(8, KVHandle(" in repr(padded)


def test_padded_heads_of_a_handle_that_was_changed_in_place(
    handles: tuple[KVHandle, KVHandle], dense: tuple[Tensor, Tensor]
) -> None:
    query, padded = torch.randn(B, H, 1, D + 8), [F.pad(handle, (0, 8)) for handle in handles]
    for states in (handles[0], dense[0]):
        states.mul_(2)
    expected = F.scaled_dot_product_attention(query, *(F.pad(states, (0, 8)) for states in dense))
    assert_close("padded", expected, F.scaled_dot_product_attention(query, *padded), 1e-5)


def test_native_refuses_what_has_to_be_decoded() -> None:
    layer = KIVILayer(KIVIConfig(**{**OPTIONS, "kernel": "native"}), 7, LayerFacts())
    layer.update(torch.randn(B, H, T - 1, D), torch.randn(B, H, T - 1, DV))
    key, _ = layer.update(torch.randn(B, H, 1, D), torch.randn(B, H, 1, DV))
    with pytest.raises(
        KernelUnavailableError, match=r"layer 7 .* by other means than attention and products"
    ):
        key + 1
