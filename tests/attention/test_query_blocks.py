"""Attention a block of queries at a time, against attention written out, and who is given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins as kvp
from kvcache_plugins.attention import exact, query_blocks, unpacked
from kvcache_plugins.attention.query_blocks import attend_query_blocks, can_attend_query_blocks
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.layers.tensor_handle import TensorHandle, shown
from kvcache_plugins.models.cache_argument import as_argument
from tests.models.families import small_model

HEADS, KV_HEADS, DIM = 6, 2, 32
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 2e-3}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slots(queries: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length), torch.arange(length - queries, length)[:, None]


def causal(queries: int, length: int) -> Tensor:
    keys, own = slots(queries, length)
    return (keys <= own)[None, None]


def window(queries: int, length: int, size: int = 50) -> Tensor:
    keys, own = slots(queries, length)
    return causal(queries, length) & (keys > own - size)


def pads(queries: int, length: int) -> Tensor:
    mask = causal(queries, length).repeat(2, 1, 1, 1)
    mask[1, :, :, : length // 3] = False  # whole blocks of them, where the prompt is long
    return mask


def chunks(queries: int, length: int) -> Tensor:
    keys, own = slots(queries, length)
    return causal(queries, length) & (keys // 70 == own // 70)


def images(queries: int, length: int) -> Tensor:
    """Tokens of an image see all of it, what comes later included, beside a window."""
    keys, own = slots(queries, length)
    of_image = (keys >= length // 4) & (keys < length // 2)
    mine = (own >= length // 4) & (own < length // 2)
    return window(queries, length) | (of_image & mine)


def by_head(queries: int, length: int) -> Tensor:
    return torch.cat([window(queries, length, 20 + 30 * head) for head in range(HEADS)], 1)


def scattered(queries: int, length: int) -> Tensor:
    chosen = torch.rand(2, 1, queries, length, generator=torch.Generator().manual_seed(9)) < 0.05
    return chosen & causal(queries, length)  # some see nothing


def one_row(queries: int, length: int) -> Tensor:
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[0, ..., :9] = False
    return mask


MASKS: list[Callable[[int, int], Tensor]] = [
    causal, window, pads, chunks, images, by_head, scattered, one_row
]  # fmt: skip


def written_out(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """In fp64, all logits at once; zeros where nothing is visible."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = (query.double() @ keys.transpose(2, 3) * 0.3).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sinks = sinks.double().view(-1, HEADS, sinks.shape[-1] if sinks.dim() == 3 else 1, 1)
        column = sinks.expand(2, HEADS, query.shape[2], 1)
    else:
        column = logits.new_full((2, HEADS, query.shape[2], 1), -torch.inf)
    weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    return weights.nan_to_num(0.0) @ values


def states(queries: int, length: int, dtype: torch.dtype, value_dim: int = DIM) -> tuple[Tensor, ...]:
    shapes = (2, HEADS, queries, DIM), (2, KV_HEADS, length, DIM), (2, KV_HEADS, length, value_dim)
    return tuple(numbers(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes))


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("queries", "length"), [(20, 20), (300, 300), (40, 700), (129, 400)])
@pytest.mark.parametrize("mask_of", MASKS, ids=lambda f: f.__name__)
def test_what_a_mask_shows(
    mask_of: Callable[[int, int], Tensor], queries: int, length: int, dtype: torch.dtype
) -> None:
    query, keys, values = states(queries, length, dtype)
    visible = mask_of(queries, length)
    options = AttentionOptions(scaling=0.3, mask=visible)
    assert can_attend_query_blocks(query, keys, options)
    found = attend_query_blocks(query, keys, values, options)
    expected = written_out(query, keys, values, visible, None)
    assert found.dtype == dtype and found.shape == query.shape
    assert (found.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()
    assert not found[~visible.any(-1).expand(2, HEADS, queries)].any()


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("sinks", [(HEADS,), (2, HEADS, 300), (2, HEADS, 1)], ids=lambda s: str(len(s)) + "d")
@pytest.mark.parametrize("value_dim", [16, 48])
def test_sinks_and_values_of_another_size(value_dim: int, sinks: tuple[int, ...], dtype: torch.dtype) -> None:
    query, keys, values = states(300, 300, dtype, value_dim)
    given, visible = numbers(*sinks, seed=5).to(dtype), pads(300, 300)
    found = attend_query_blocks(
        query, keys, values, AttentionOptions(scaling=0.3, mask=visible, sink_logits=given)
    )
    expected = written_out(query, keys, values, visible, given)
    assert found.shape[3] == value_dim
    assert (found.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


@pytest.mark.parametrize("is_also_masked", [False, True])
@pytest.mark.parametrize("size", [None, 1, 50, 128, 1000])
def test_windows_and_causality_by_name(size: int | None, is_also_masked: bool) -> None:
    query, keys, values = states(300, 420, torch.float32)
    mask = pads(300, 420) if is_also_masked else None
    options = AttentionOptions(scaling=0.3, mask=mask, is_causal=True, sliding_window=size)
    visible = causal(300, 420) if size is None else window(300, 420, size)
    visible = (visible if mask is None else visible & mask).expand(2, 1, -1, -1)
    expected = written_out(query, keys, values, visible, None)
    torch.testing.assert_close(
        attend_query_blocks(query, keys, values, options).double(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
@pytest.mark.parametrize("apart", ["query", "key", "value"])
def test_channels_that_lie_apart(apart: str, kv_heads: int, dtype: torch.dtype) -> None:
    # the last of 129 queries is a block, whose heads are rows of one view whatever their strides
    shapes = {"query": (HEADS, 129), "key": (kv_heads, 200), "value": (kv_heads, 200)}
    given = [numbers(2, *shape, DIM, seed=seed).to(dtype) for seed, shape in enumerate(shapes.values())]
    options = AttentionOptions(scaling=0.3, is_causal=True)
    expected = attend_query_blocks(*given, options)
    place = list(shapes).index(apart)
    given[place] = given[place].mT.contiguous().mT
    assert given[place].stride(3) > 1
    assert torch.equal(attend_query_blocks(*given, options), expected)


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("hidden", ["least", "-inf"])
@pytest.mark.parametrize("mask_of", [window, pads, images, by_head], ids=lambda f: f.__name__)
def test_masks_that_are_added(mask_of: Callable[[int, int], Tensor], hidden: str, dtype: torch.dtype) -> None:
    query, keys, values = states(300, 300, dtype)
    visible = mask_of(300, 300)
    moved = numbers(300, 300, seed=7).to(dtype).expand(visible.shape)  # and a bias, besides
    least = torch.finfo(dtype).min if hidden == "least" else -torch.inf
    options = AttentionOptions(scaling=0.3, mask=moved.masked_fill(~visible, least))
    assert can_attend_query_blocks(query, keys, options)
    found = attend_query_blocks(query, keys, values, options).double()
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = query.double() @ keys.transpose(2, 3) * 0.3 + moved.double()
    expected = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0) @ values
    real = visible.any(-1).expand(2, HEADS, 300)
    assert found.isfinite().all()
    assert (found - expected)[real].norm() <= BOUNDS[dtype] * expected[real].norm()


def test_only_what_a_block_sees_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[tuple[int, int]] = []
    attend = query_blocks.attend_tile

    def noted(rows: Tensor, keys: Tensor, *others: Any) -> Any:
        tiles.append((rows.shape[3], keys.shape[2]))
        return attend(rows, keys, *others)

    monkeypatch.setattr(query_blocks, "attend_tile", noted)
    query, keys, values = states(500, 500, torch.float32)
    attend_query_blocks(query, keys, values, AttentionOptions(mask=window(500, 500)))
    assert tiles == [(128, 128), (128, 177), (128, 177), (116, 165)]
    tiles.clear()
    rows = torch.zeros(1, 1, 500, 500, dtype=torch.bool)
    rows[..., 300:310, 40:45] = True
    attend_query_blocks(query, keys, values, AttentionOptions(mask=rows))
    assert tiles == [(128, 5)]


blank = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)
blank[7] = torch.finfo(torch.float32).min  # which later tokens see


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"alibi_slopes": torch.ones(HEADS)},
        {"position_bias": torch.zeros(1, HEADS, 40, 40)},
        {"mask": torch.ones(1, 1, 40, 39, dtype=torch.bool)},
        {"mask": torch.ones(1, 1, 39, 40, dtype=torch.bool)},
        {"mask": torch.ones(3, 1, 40, 40, dtype=torch.bool)},
        {"mask": torch.ones(1, KV_HEADS, 40, 40, dtype=torch.bool)},
        {"mask": torch.ones(1, 1, 1, 40, 40, dtype=torch.bool)},
        {"mask": torch.ones(1, 1, 40, 40, dtype=torch.int64)},
        {"mask": blank},
    ],
    ids=["softcap", "alibi", "bias", "short", "rows", "batch", "heads", "5d", "integers", "blank"],
)  # fmt: skip
def test_what_is_left_to_others(options: dict[str, Any]) -> None:
    query, keys, _ = states(40, 40, torch.float32)
    assert can_attend_query_blocks(query, keys, AttentionOptions())
    assert not can_attend_query_blocks(query, keys, AttentionOptions(**options))
    assert not can_attend_query_blocks(query.double(), keys, AttentionOptions())


# ---- models


LENGTH = 300
FULL = ("llama", "qwen2", "mistral", "falcon_h1")  # without windows, a mask is made of padding alone
CASES = [
    ("gpt_oss", "eager"), ("gemma3_text", "sdpa"), ("gemma3_text", "eager"), ("llama", "sdpa"),
    ("mistral", "kvcache_plugins"), ("llama4_text", "sdpa"), ("gemma4_text", "sdpa"), ("qwen2", "sdpa"),
    ("gemma3n_text", "sdpa"), ("cohere2", "sdpa"), ("exaone4", "eager"), ("falcon_h1", "sdpa"),
]  # fmt: skip


def ids(count: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(5, 100, (2, count), generator=torch.Generator().manual_seed(seed))


def padding(count: int = 140) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :count] = 0
    return mask


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries were attended from at every call."""
    counts: list[int] = []
    attend = unpacked.attend_query_blocks
    monkeypatch.setattr(
        unpacked, "attend_query_blocks", lambda *args: counts.append(args[0].shape[2]) or attend(*args)
    )
    # the kernels do not take what is exact from torch
    monkeypatch.setattr(exact, "_multiplies_faster", lambda dtype: False)
    return counts


def windowed_model(family: str, attention: str) -> Any:
    try:
        model = small_model(family)
    except KeyError:
        pytest.skip("this release of transformers does not know it")
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("pads", [0, 140])
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_prompts_and_turns_give_the_logits_of_dynamic_cache(
    family: str, attention: str, pads: int, blocks: list[int]
) -> None:
    model = windowed_model(family, attention)
    found = []
    for options in ({"backend": "int8", "residual_length": 4096}, None):
        mask, given = padding(pads), {}
        if options is not None:
            given = as_argument(kvp.build_cache(model, options).bind(model, mask))
        logits = []
        with torch.no_grad():
            for turn in (ids(), ids(1, 2), ids(40, 3)):
                if turn.shape[1] != LENGTH:
                    mask = torch.cat([mask, torch.ones_like(turn)], 1)
                out = model(turn, attention_mask=mask, **given)
                name = "cache" if "cache" in out else "past_key_values"
                given = {name: out[name]}
                logits.append(out.logits if turn.shape[1] != LENGTH else out.logits[mask.bool()])
        found.append(logits)
        if options is not None:
            assert 1 not in blocks
            assert (LENGTH in blocks) == (pads > 0 or family not in FULL)
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["h2o", "snapkv", "knorm"])
def test_chunks_of_a_prompt_that_layers_are_shown_the_queries_of(backend: str, blocks: list[int]) -> None:
    model = windowed_model("llama", "sdpa")
    options = {"backend": backend, "budget": 100, "chunk_size": 120}
    found = []
    for kernel in ("auto", "torch"):
        blocks.clear()
        out = model.generate(
            ids(), attention_mask=padding(), max_new_tokens=10, do_sample=False, output_logits=True,
            cache_implementation="quantized", cache_config={**options, "kernel": kernel},
            return_dict_in_generate=True,
        )  # fmt: skip
        assert set(blocks) == ({120, 60} if kernel == "auto" else set())
        found.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "case", ["torch", "fp64", "unbound", "gradients", "few tokens", "without a mask", "dropout", "flex"]
)
@pytest.mark.allow_deprecation("_compile flag", reason="Transformers makes its block masks so")
def test_who_is_left_to_torch(case: str, blocks: list[int]) -> None:
    model = windowed_model("llama" if case == "without a mask" else "gemma3_text", "sdpa")
    model = model.double() if case == "fp64" else model
    if case == "flex":
        model.set_attn_implementation("flex_attention")
    if case == "dropout":
        model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
    cache = kvp.build_cache(model, {"backend": "int8", "kernel": "torch" if case == "torch" else "auto"})
    if case != "unbound":
        cache.bind(model)
    with torch.set_grad_enabled(case == "gradients"):
        model(ids(8 if case == "few tokens" else LENGTH), **as_argument(cache))
        assert blocks == []
        model.eval().float().set_attn_implementation("sdpa")
    if case in ("few tokens", "gradients", "dropout"):
        with torch.no_grad():
            model(ids(40), **as_argument(cache))
        assert 40 in blocks  # so it is the case that matters


@pytest.mark.parametrize("asked", ["weights", "hook"])
def test_attention_weights_are_the_models_own(asked: str, blocks: list[int]) -> None:
    model = windowed_model("gpt_oss", "eager")
    found: list[Any] = []
    for kernel in ("auto", "torch"):
        cache = kvp.build_cache(model, {"backend": "int8", "kernel": kernel}).bind(model)
        weights: list[Tensor] = []
        attention = model.model.layers[0].self_attn
        hook = attention.register_forward_hook(lambda *args, weights=weights: weights.append(args[2][1]))
        with torch.no_grad():
            out = model(ids(), output_attentions=asked == "weights", **as_argument(cache))
        hook.remove()
        found.append(weights[0] if asked == "hook" else out.attentions[0])
    assert found[0].shape == (2, model.config.num_attention_heads, LENGTH, LENGTH)
    assert torch.equal(*found)


def test_handles_are_the_tensors_to_all_others() -> None:
    states = numbers(2, 3, 20, 4).float()
    with torch.no_grad():
        keys, values = shown(states, states + 1)
    assert isinstance(keys, TensorHandle) and "(2, 3, 20, 4)" in repr(keys)
    assert keys.shape == states.shape and keys.dtype == states.dtype and keys.device == states.device
    assert torch.equal(keys @ values.transpose(2, 3), states @ (states + 1).transpose(2, 3))
    assert type(keys[:, :, 1:]) is Tensor and torch.equal(keys[:, :, 1:], states[:, :, 1:])
    keys.mul_(2)
    assert torch.equal(keys.dense(), states) and keys.dense() is states
    assert shown(states, states)[0] is states, "gradients"
    with torch.no_grad():
        assert shown(keys, values)[0] is keys
        elsewhere = states.to("meta")
        assert shown(elsewhere, elsewhere)[0] is elsewhere
