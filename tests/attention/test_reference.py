"""Attention tile by tile against the naive fp64 oracle: shapes, masks, biases, precision, packed extents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention import reference
from kvcache_plugins.attention.reference import AttentionOptions, DenseView, TokenView, attend
from kvcache_plugins.backends.kivi import KIVIConfig, KIVILayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.models.facts import LayerFacts
from tests.reference.attention import naive_attention

INF = float("inf")
B, HEADS = 2, 2


def assert_near(expected: Tensor, got: Tensor, ratio: float = 1e-5) -> None:
    """The largest difference is at most `ratio` of the largest number."""
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    error = float((got.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    assert error <= ratio, f"relative error {error:.2e}"


def qkv(
    query_length: int,
    length: int,
    groups: int = 2,
    head_dim: int = 48,
    value_dim: int = 32,
    heads: int = HEADS,
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(B, heads * groups, query_length, head_dim)
    keys = torch.randn(B, heads, length, head_dim) * torch.linspace(0.2, 3, head_dim)
    return query, keys, torch.randn(B, heads, length, value_dim)


@dataclass
class Watched:
    """A view that writes down what is read of it."""

    view: TokenView
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.view.length

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.view.boundaries

    def read(self, start: int, stop: int) -> Tensor:
        self.reads.append((start, stop))
        return self.view.read(start, stop)


@pytest.fixture(params=["one-tile", "small-tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small-tiles":
        small_tiles(monkeypatch)


def small_tiles(monkeypatch: pytest.MonkeyPatch, tokens: int = 16) -> None:
    for name, value in (("_TILE_VALUES", 1), ("TILE_SCORES", 1), ("_SMALLEST_TILE", tokens)):
        monkeypatch.setattr(reference, name, value)


# -- shapes


def _shapes() -> list[Any]:
    """Every query length with every length; groups and widths take turns, so that each meets several."""
    groups = itertools.cycle([1, 2, 3, 4, 6, 7, 8, 16])
    widths = itertools.cycle([(16, 64), (64, 16), (80, 48), (96, 128), (112, 80), (128, 112), (64, 64)])
    cases = []
    for query_length, length in itertools.product((1, 3, 8, 33), (1, 63, 64, 65, 1000)):
        if query_length <= length:
            ratio, (head_dim, value_dim) = next(groups), next(widths)
            name = f"q{query_length}-T{length}-g{ratio}-D{head_dim}-Dv{value_dim}"
            cases.append(pytest.param(query_length, length, ratio, head_dim, value_dim, id=name))
    return cases


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("query_length", "length", "groups", "head_dim", "value_dim"), _shapes())
def test_shapes(
    query_length: int, length: int, groups: int, head_dim: int, value_dim: int, is_causal: bool
) -> None:
    query, keys, values = qkv(query_length, length, groups, head_dim, value_dim)
    got = attend(query, DenseView(keys), DenseView(values), AttentionOptions(is_causal=is_causal))
    assert got.dtype == torch.float32
    assert_near(naive_attention(query, keys, values, is_causal=is_causal), got)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 7, 8, 16], ids=lambda g: f"g{g}")
def test_every_query_head_reads_its_own_kv_head(groups: int) -> None:
    # Constant values per kv head: the output says which head was read.
    query, keys, _ = qkv(3, 65, groups, heads=3)
    values = torch.arange(1.0, 4.0).view(1, 3, 1, 1).expand(B, 3, 65, 5)
    got = attend(query, DenseView(keys), DenseView(values), AttentionOptions())
    torch.testing.assert_close(got, values[:, :, :3].repeat_interleave(groups, dim=1))


# -- what may change a logit

LENGTH = 130
PADS = torch.tensor([0, 37])


def _real() -> Tensor:
    """`(B, 1, 1, T)`: true where a slot is not left padding."""
    return (torch.arange(LENGTH) >= PADS[:, None])[:, None, None]


def _random_mask(query_length: int) -> Tensor:
    return torch.rand(B, 1, query_length, LENGTH) > 0.4


def _additive(mask: Tensor, hidden: float = -INF) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


HEADS_Q = HEADS * 3
# What `attend` is told, and the same for the oracle.
Variant = Callable[[int], tuple[dict[str, Any], dict[str, Any]]]


def same(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    renamed = {"sinks" if name == "sink_logits" else name: value for name, value in options.items()}
    return options, renamed


VARIANTS: dict[str, Variant] = {
    "plain": lambda q: same(),
    "causal": lambda q: same(is_causal=True),
    "scaling": lambda q: same(scaling=0.03, is_causal=True),
    "boolean-mask": lambda q: same(mask=_random_mask(q)),
    "boolean-mask-per-head": lambda q: same(mask=torch.rand(B, HEADS_Q, q, LENGTH) > 0.5),
    "additive-mask": lambda q: same(mask=_additive(_random_mask(q))),
    "additive-mask-of-finite-numbers": lambda q: same(mask=torch.randn(1, 1, q, LENGTH)),
    "additive-mask-with-the-smallest-number": lambda q: same(
        mask=_additive(_random_mask(q), torch.finfo(torch.float32).min)
    ),
    "mask-of-one-row": lambda q: same(mask=torch.rand(1, LENGTH) > 0.5),
    "left-padding": lambda q: same(mask=_real()),
    "left-padding-causal": lambda q: same(mask=_real(), is_causal=True),
    "left-padding-additive": lambda q: same(mask=_additive(_real()), is_causal=True),
    "window-1": lambda q: same(is_causal=True, sliding_window=1),
    "window-23": lambda q: same(is_causal=True, sliding_window=23),
    "window-longer-than-the-text": lambda q: same(is_causal=True, sliding_window=4096),
    "window-and-padding": lambda q: same(is_causal=True, sliding_window=100, mask=_real()),
    "softcap": lambda q: same(softcap=2.0),
    "softcap-and-mask": lambda q: same(softcap=0.5, mask=_random_mask(q)),
    "sinks": lambda q: same(sink_logits=torch.randn(HEADS_Q) * 3, is_causal=True),
    "sinks-that-take-all": lambda q: same(sink_logits=torch.full((HEADS_Q,), 30.0)),
    "sinks-that-take-nothing": lambda q: same(sink_logits=torch.full((HEADS_Q,), -1e4)),
    "sinks-and-window": lambda q: same(sink_logits=torch.randn(HEADS_Q), is_causal=True, sliding_window=9),
    "sinks-of-queries": lambda q: same(sink_logits=torch.randn(B, HEADS_Q, q) * 3, mask=_random_mask(q)),
    "alibi": lambda q: same(alibi_slopes=torch.linspace(0.01, 0.5, HEADS_Q), is_causal=True),
    "alibi-softcap-sinks-padding": lambda q: same(
        alibi_slopes=torch.linspace(0.01, 0.5, HEADS_Q),
        sink_logits=torch.randn(HEADS_Q),
        softcap=3.0,
        mask=_real(),
        is_causal=True,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("query_length", [1, 7], ids=lambda q: f"q{q}")
@pytest.mark.parametrize("name", VARIANTS)
def test_options(name: str, query_length: int) -> None:
    ours, theirs = VARIANTS[name](query_length)
    query, keys, values = qkv(query_length, LENGTH, groups=3)
    got = attend(query, DenseView(keys), DenseView(values), AttentionOptions(**ours))
    assert_near(naive_attention(query, keys, values, **theirs), got)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("shape", [(B, HEADS_Q, 7, LENGTH), (1, HEADS_Q, 7, LENGTH), (1, HEADS_Q, 1, LENGTH)])
def test_position_bias_comes_after_the_softcap(shape: tuple[int, ...]) -> None:
    bias, query, keys, values = torch.randn(shape) * 3, *qkv(7, LENGTH, groups=3)
    for softcap in (None, 1.5):
        options = AttentionOptions(position_bias=bias, softcap=softcap, is_causal=True)
        got = attend(query, DenseView(keys), DenseView(values), options)
        assert_near(naive_attention(query, keys, values, mask=bias, softcap=softcap, is_causal=True), got)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("sinks", [None, 2.0, -100.0, -1e4], ids=lambda s: f"sink{s}")
@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
def test_a_query_that_sees_nothing_gets_zeros(additive: bool, sinks: float | None) -> None:
    query, keys, values = qkv(3, LENGTH, groups=3)
    mask = torch.ones(B, 1, 3, LENGTH, dtype=torch.bool)
    mask[0, :, 1], mask[1, :, :, :50] = False, False
    sink_logits = None if sinks is None else torch.full((HEADS_Q,), sinks)
    options = AttentionOptions(mask=_additive(mask) if additive else mask, sink_logits=sink_logits)
    got = attend(query, DenseView(keys), DenseView(values), options)
    assert (got[0, :, 1] == 0).all() and (got[0, :, 0] != 0).any()
    assert_near(naive_attention(query, keys, values, mask=mask, sinks=sink_logits), got)


@pytest.mark.usefixtures("tiles")
def test_huge_logits() -> None:
    query, keys, values = qkv(3, LENGTH)
    got = attend(query * 1e4, DenseView(keys), DenseView(values), AttentionOptions(is_causal=True))
    # The softmax is an argmax; an fp32 logit of 1e5 is known to 1e-2, so compare where the choice is clear.
    exact = naive_attention(query * 1e4, keys, values, is_causal=True)
    assert torch.isfinite(got).all()
    assert ((got - exact).abs().amax(-1) < 1e-3).float().mean() > 0.9


def test_an_empty_cache_is_an_error() -> None:
    query, keys, values = qkv(1, 1)
    with pytest.raises(ValueError, match="at least one token"):
        attend(query, DenseView(keys[:, :, :0]), DenseView(values[:, :, :0]), AttentionOptions())


# -- tiles


@pytest.mark.parametrize("window", [None, 40], ids=["full", "window40"])
def test_every_token_is_read_once_in_bounded_tiles(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    small_tiles(monkeypatch, tokens=32)
    query, keys, values = qkv(5, 301)
    watched = Watched(DenseView(keys)), Watched(DenseView(values))
    attend(query, *watched, AttentionOptions(is_causal=True, sliding_window=window))
    first = 0 if window is None else 301 - 5 - window + 1
    for reads in (watched[0].reads[1:], watched[1].reads):  # the first read of the keys asks for their shape
        assert len(reads) == -(-(301 - first) // 32)
        assert reads[0][0] == first and reads[-1][1] == 301
        assert all(stop - start <= 32 for start, stop in reads)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(reads))


def test_a_long_text_is_not_one_tile() -> None:
    # 8 MB of decoded keys at most: 2 x 8 heads of 128 channels in fp32 is 8 kB a token.
    query, keys, values = (
        torch.randn(2, 8, 1, 128),
        torch.randn(2, 8, 3000, 128),
        torch.randn(2, 8, 3000, 128),
    )
    watched = Watched(DenseView(keys))
    got = attend(query, watched, DenseView(values), AttentionOptions())
    assert max(stop - start for start, stop in watched.reads) * 2 * 8 * 128 * 4 <= 8 << 20
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    assert_near(expected.double(), got)


# -- precision


def test_fp64_stays_fp64() -> None:
    query, keys, values = (t.double() for t in qkv(3, 65))
    got = attend(query, DenseView(keys), DenseView(values), AttentionOptions(is_causal=True))
    assert got.dtype == torch.float64
    assert_near(naive_attention(query, keys, values, is_causal=True), got, 1e-14)


@pytest.mark.parametrize("length", [65, 1000], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("query_length", [1, 8], ids=lambda q: f"q{q}")
def test_bf16_is_not_worse_than_plain_bf16(query_length: int, length: int) -> None:
    query, keys, values = (t.bfloat16() for t in qkv(query_length, length, groups=4))
    exact = naive_attention(query, keys, values, is_causal=True)
    got = attend(query, DenseView(keys), DenseView(values), AttentionOptions(is_causal=True))
    assert got.dtype == torch.bfloat16
    # As transformers' eager attention computes it.
    logits = query @ keys.repeat_interleave(4, dim=1).mT * query.shape[-1] ** -0.5
    visible = torch.ones(query_length, length, dtype=torch.bool).tril(length - query_length)
    weights = logits.masked_fill(~visible, -INF).float().softmax(-1).bfloat16()
    plain = weights @ values.repeat_interleave(4, dim=1)
    ours, theirs, rounding = (
        (x.double() - exact).square().mean().sqrt() for x in (got, plain, exact.bfloat16())
    )
    assert 0 < ours <= 2 * theirs
    assert ours <= 1.01 * rounding  # only the result is rounded


def test_the_dtype_of_the_tokens_does_not_matter() -> None:
    query, keys, values = qkv(3, 65)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = attend(query, DenseView(keys.to(dtype)), DenseView(values.to(dtype)), AttentionOptions())
        assert got.dtype == torch.float32
        assert_near(naive_attention(query, keys.to(dtype), values.to(dtype)), got)


# -- packed tokens


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("query_length", [1, 3, 40], ids=lambda q: f"q{q}")
@pytest.mark.parametrize("held", [31, 64, 65, 200], ids=lambda t: f"T{t}")
def test_keys_and_values_packed_to_different_extents(held: int, query_length: int) -> None:
    layer = KIVILayer(KIVIConfig(q_group_size=16, residual_length=32, nbits=3), 0, LayerFacts())
    _, keys, values = qkv(1, held + query_length, head_dim=80, value_dim=48)
    layer.update(keys[:, :, : held - 5], values[:, :, : held - 5])
    layer.update(keys[:, :, held - 5 : held], values[:, :, held - 5 : held])
    extents = layer.stored_keys.packed_length, layer.stored_values.packed_length
    assert extents == (held // 32 * 32, max(0, held - 32))
    key, value = layer.update(keys[:, :, held:], values[:, :, held:])
    query = torch.randn(B, HEADS * 6, query_length, 80)
    if held < 32:
        assert torch.equal(key, keys) and torch.equal(value, values)  # nothing is packed yet
        return
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    got = attend(query, key.tokens, value.tokens, AttentionOptions(is_causal=True))
    dense = key.dense(), value.dense()
    assert not torch.equal(dense[0], keys)
    assert_near(naive_attention(query, *dense, is_causal=True), got)


def test_no_tile_mixes_codes_and_exact_tokens() -> None:
    layer = KIVILayer(KIVIConfig(q_group_size=16, residual_length=32), 0, LayerFacts())
    _, keys, values = qkv(1, 150)
    layer.update(keys[:, :, :149], values[:, :, :149])
    key, value = layer.update(keys[:, :, 149:], values[:, :, 149:])
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    watched = Watched(key.tokens), Watched(value.tokens)
    attend(torch.randn(B, HEADS, 1, 48), *watched, AttentionOptions())
    assert watched[1].reads == [(0, 117), (117, 128), (128, 150)]
    assert watched[0].reads[1:] == watched[1].reads


def test_autocast_rounds_nothing() -> None:
    query, keys, values = qkv(3, 70)
    views, options = (DenseView(keys), DenseView(values)), AttentionOptions(is_causal=True)
    expected = attend(query, *views, options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(query, *views, options), expected)
