"""Pooling inside a cache: every chunk, against loops over what the layer was given; weights and options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcache_plugins import build_cache
from kvcache_plugins.errors import ArtifactError
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.eviction.pooling import weights as weights_module
from kvcache_plugins.eviction.pooling.convolution import pool_evicted
from kvcache_plugins.eviction.pooling.merging import merge_evicted
from kvcache_plugins.eviction.pooling.stage import Pooling, read_pooling
from kvcache_plugins.eviction.pooling.weights import (
    LayerWeights,
    import_pooling_weights,
    load_pooling_weights,
    save_pooling_weights,
)
from kvcache_plugins.eviction.selection import choose_slots
from kvcache_plugins.models.cache_argument import cache_of
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids, mask_of, model_of

BUDGET, PROMPT, CHUNK, POOLED = 24, 60, 16, 6
PADS = [0, 10, 40]


@pytest.fixture
def weights_file(tmp_path: Path) -> str:
    """Weights for two layers with heads of the tiny model's width."""
    width = int(_head_dim())
    generator = torch.Generator().manual_seed(3)
    layers = [
        LayerWeights(
            torch.randn(POOLED, 2 * width, 21, generator=generator) / 5,
            torch.randn(POOLED, generator=generator),
            torch.tensor(0.5),
        )
        for _ in range(2)
    ]
    path = tmp_path / "pooling.safetensors"
    save_pooling_weights(path, layers)
    return str(path)


def _head_dim() -> int:
    config = model_of().config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pooling], None]:
    """Make every evicting layer pool."""

    def install(pooling: Pooling) -> None:
        monkeypatch.setattr(EvictingConfig, "pooling", lambda config: pooling)

    return install


def _read(backend: str = "knorm", pads: list[int] | None = None, **options: Any) -> EvictingCache:
    model, rows = model_of(), len(pads or [0])
    config = {"backend": backend, "budget": BUDGET, "chunk_size": CHUNK, **options}
    mask = None if pads is None else mask_of(PROMPT, pads)
    cache = bound_cache(model, config, PROMPT, mask)
    feed(model, cache, ids(PROMPT, rows, pads=pads), chunks_of(PROMPT, CHUNK), mask)
    return cache


def _given(pads: list[int] | None) -> tuple[Tensor, Tensor]:
    """Keys and values that the first layer is given, which no cache has touched yet."""
    cache = build_cache(model_of(), {"backend": "knorm", "budget": 1000})
    mask = None if pads is None else mask_of(PROMPT, pads)
    assert isinstance(cache, EvictingCache)
    cache.bind(model_of(), mask, prompt_length=PROMPT)
    feed(model_of(), cache, ids(PROMPT, len(pads or [0]), pads=pads), [PROMPT], mask)
    keys, values = (stream.tail.view().clone() for stream in cache.evicting_layers[0].streams)
    return keys, values


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("kind", ["merge", "conv"])
def test_the_first_layer_equals_a_loop_over_chunks(
    kind: str, sinks: int, weights_file: str, pooled: Callable[[Pooling], None]
) -> None:
    all_keys, all_values = _given(None)
    pooled(Pooling(weights_file, POOLED / BUDGET) if kind == "conv" else Pooling())
    layer = _read(sink_length=sinks).evicting_layers[0]
    weights = load_pooling_weights(weights_file)[0]
    keys, values = all_keys[:, :, :0], all_values[:, :, :0]
    scores, where = torch.empty(*keys.shape[:3]), torch.empty(*keys.shape[:3], dtype=torch.int32)
    lowest = -torch.finfo(torch.float32).max
    for start in range(0, PROMPT, CHUNK):
        new = slice(start, min(start + CHUNK, PROMPT))
        keys = torch.cat([keys, all_keys[:, :, new]], 2)
        values = torch.cat([values, all_values[:, :, new]], 2)
        scores = torch.cat([scores, -all_keys[:, :, new].norm(dim=-1)], 2)
        places = torch.arange(new.start, new.stop, dtype=torch.int32)
        where = torch.cat([where, places.expand(*keys.shape[:2], -1)], 2)
        if keys.shape[2] <= BUDGET:
            continue
        kept = {"sink_length": sinks, "recent": BUDGET // 8}
        if kind == "merge":
            index = choose_slots(scores, BUDGET, **kept)
            values = merge_evicted(keys, values, index)
            keys = keys.gather(2, index[..., None].expand(-1, -1, -1, keys.shape[3]))
            scores, where = scores.gather(2, index), where.gather(2, index)
        else:
            found = pool_evicted(keys, values, scores, BUDGET, weights, positions=where, **kept)
            keys, values = found.keys, found.values
            scores = scores.gather(2, found.index)
            where = where.gather(2, found.index)
            scores[..., sinks : sinks + POOLED] = lowest
            where[..., sinks : sinks + POOLED] = -new.stop
    assert torch.equal(layer.ledger.positions, where)
    assert torch.allclose(layer.stored_keys.tail.view(), keys, atol=1e-5)
    assert torch.allclose(layer.stored_values.tail.view(), values, atol=1e-5)
    assert torch.allclose(layer.ledger.scores, scores, atol=1e-5)
    assert int((where < 0).sum()) == (where.shape[1] * POOLED if kind == "conv" else 0)
    if sinks:
        assert where[..., :sinks].tolist() == torch.arange(sinks).expand(1, where.shape[1], -1).tolist()


@pytest.mark.parametrize("pads", [None, [0, 17]], ids=["plain", "padded"])
def test_convolution_sees_the_units_in_the_order_of_the_published_code(
    weights_file: str, pads: list[int] | None
) -> None:
    # Its cache is [heavy ; pooled], to which a chunk is appended; the rest is convolved in this order.
    pool = {"kind": "conv", "weights": weights_file, "fraction": POOLED / BUDGET}
    options = {"pool": pool, "sink_length": 0, "local_length": 0, "stabilizer_length": 0}
    cache, length, width = build_cache(model_of(), {"backend": "knorm", "budget": BUDGET, **options}), 160, 16
    layer: Any = cache.layers[0]
    layer.bind(layer.facts, None if pads is None else torch.tensor(pads), None)
    layer.set_prompt_length(length)
    generator = torch.Generator().manual_seed(4)
    assert width == _head_dim()
    all_keys, all_values = (torch.randn(2, 2, length, width, generator=generator) for _ in range(2))
    for start in range(0, length, 32):
        layer.update(all_keys[:, :, start : start + 32], all_values[:, :, start : start + 32])
    weights = load_pooling_weights(weights_file)[0]
    heavy = BUDGET - POOLED
    for row, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        units, norms = torch.zeros(0, 2 * width), torch.zeros(0)
        for start in range(0, length, 32):
            new = slice(max(start, (pads or [0, 0])[row]), start + 32)
            keys, values = all_keys[row, head, new], all_values[row, head, new]
            units = torch.cat([units, torch.cat([keys, values], dim=1)])
            norms = torch.cat([norms, keys.norm(dim=1)])
            if len(units) <= BUDGET:
                continue
            order = norms.argsort()
            chosen = order[:heavy].sort().values
            rest = order[heavy:].sort().values
            best = norms[rest].argsort(stable=True)[:POOLED].sort().values
            x = units[rest]
            conv = torch.conv1d(x.T[None], weights.weight, weights.bias, padding=10)
            mixture = conv.relu().softmax(2)[0] * weights.gamma
            mixture[torch.arange(POOLED), best] += 1 - weights.gamma
            units, norms = torch.cat([units[chosen], mixture @ x]), norms[chosen]
            norms = torch.cat([norms, torch.full((POOLED,), 3e38)])
        held = torch.cat([stream.tail.view()[row, head] for stream in layer.streams], dim=1)
        is_unit = layer.ledger.positions[row, head] < 0
        torch.testing.assert_close(held[~is_unit], units[:heavy], atol=0.0, rtol=0.0)
        torch.testing.assert_close(held[is_unit], units[heavy:], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("kind", ["merge", "conv"])
@pytest.mark.parametrize(
    "backend", ["expected_attention", "knorm", "keydiff", "lagkv", "h2o", "snapkv", "tova", "streaming_llm"]
)
def test_padded_rows_equal_the_rows_alone(
    kind: str, backend: str, weights_file: str, pooled: Callable[[Pooling], None]
) -> None:
    pooled(Pooling(weights_file, POOLED / BUDGET) if kind == "conv" else Pooling())
    model = model_of()
    tokens, mask = ids(PROMPT + 3, 3, pads=PADS), mask_of(PROMPT + 3, PADS)
    config = {"backend": backend, "budget": BUDGET, "chunk_size": CHUNK}
    together = bound_cache(model, config, PROMPT, mask[:, :PROMPT])
    counts = [*chunks_of(PROMPT, CHUNK), 1, 1, 1]
    logits = feed(model, together, tokens, counts, mask)
    for row, first in enumerate(PADS):
        alone = bound_cache(model, config, PROMPT - first)
        own, passed = [], 0
        for count in counts:  # chunks end at the same tokens
            passed += count
            if passed > first:
                own.append(min(count, passed - first))
        expected = feed(model, alone, tokens[row : row + 1, first:], own)
        # convolutions of other lengths add in another order, which a second layer passes on
        assert torch.allclose(logits[row, first:], expected[0], atol=1e-4)


def test_later_turns_and_generation(weights_file: str, pooled: Callable[[Pooling], None]) -> None:
    pooled(Pooling(weights_file, POOLED / BUDGET))
    model, tokens = model_of(), ids(PROMPT, 2)
    config = {"backend": "knorm", "budget": BUDGET, "chunk_size": CHUNK, "evict_at_decode": True}
    output: Any = model.generate(  # type: ignore[operator]
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=90, do_sample=False, num_beams=2,
        cache_implementation="quantized", cache_config=config, return_dict_in_generate=True,
    )  # fmt: skip
    cache = cache_of(output)
    assert cache.get_seq_length() == PROMPT + 89 and cache.num_held() <= BUDGET + 64
    for layer in cache.evicting_layers:
        assert int((layer.ledger.positions < 0).sum(2).min()) == POOLED
        assert bool(layer.stored_values.tail.view().isfinite().all())


def test_pooling_differs_from_dropping(weights_file: str, pooled: Callable[[Pooling], None]) -> None:
    def values() -> Tensor:
        return _read().evicting_layers[1].stored_values.tail.view()

    dropped = values().clone()
    for pooling in (Pooling(), Pooling(weights_file, POOLED / BUDGET)):
        pooled(pooling)
        assert not torch.allclose(values(), dropped)


def test_a_prompt_that_fits_is_left_alone(pooled: Callable[[Pooling], None]) -> None:
    pooled(Pooling())
    layer = _read(budget=PROMPT).evicting_layers[0]
    assert torch.equal(layer.stored_values.tail.view(), _given(None)[1])


# ---- weights ----


def test_saved_and_loaded(weights_file: str) -> None:
    names = {f"layers.{i}.{part}" for i in (0, 1) for part in ("conv.weight", "conv.bias", "gamma")}
    tensors = load_file(weights_file)
    assert set(tensors) == names
    first = load_pooling_weights(weights_file)
    assert first is load_pooling_weights(weights_file) and first[1].pooled_length == POOLED
    assert torch.equal(first[1].weight, tensors["layers.1.conv.weight"])
    first[1].check(5, 2 * _head_dim() - 5, POOLED)
    with pytest.raises(ValueError, match="keys of 5 and values of 5 channels"):
        first[1].check(5, 5, None)
    save_pooling_weights(weights_file, first[::-1])  # as long as before, and read again
    later = os.stat(weights_file).st_mtime_ns + 10**9  # their clocks tick in milliseconds
    os.utime(weights_file, ns=(later, later))
    assert torch.equal(load_pooling_weights(weights_file)[0].weight, tensors["layers.1.conv.weight"])


def test_the_file_is_made_as_the_documentation_says(
    weights_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trained:
        def state_dict(self) -> dict[str, Tensor]:
            own = {"conv.weight": "layers.0.weight", "conv.bias": "layers.0.bias", "gamma": "normalizer"}
            return {"model.embed_tokens.weight": torch.zeros(3)} | {
                f"model.layers.{i}.self_attn.memory_saver.{own[part]}": tensor.reshape(tensor.shape or (1,))
                for name, tensor in load_file(weights_file).items()
                for _, i, part in (name.split(".", 2),)
            }

    example = re.search(r"^```python\n(.*?)^```$", str(weights_module.__doc__), re.MULTILINE | re.DOTALL)
    assert example is not None
    monkeypatch.chdir(tmp_path)
    exec(example[1], vars(weights_module) | {"model": Trained()})
    for layer, same in zip(
        load_pooling_weights("pooling.safetensors"), load_pooling_weights(weights_file), strict=True
    ):
        assert torch.equal(layer.weight, same.weight) and torch.equal(layer.bias, same.bias)
        assert layer.gamma.item() == same.gamma.item()
    pool = {"kind": "conv", "weights": "pooling.safetensors", "fraction": POOLED / BUDGET}
    assert _read(pool=pool).num_held() == BUDGET
    with pytest.raises(ValueError, match="names must hold"):
        import_pooling_weights({}, {"weight": "w"})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.0.conv.weight", torch.zeros(4, 8, 20), "odd kernel"),
        ("layers.0.conv.weight", torch.zeros(4, 8), r"must have the shape \(M, 2 D, odd kernel\)"),
        ("layers.0.conv.bias", torch.zeros(5), r"conv.bias must have the shape \(6,\)"),
        ("layers.1.gamma", torch.zeros(2), "Layer 1: gamma must be a single number"),
        ("layers.1.gamma", None, "weights of layer 1 lack"),
        ("layers.3.gamma", torch.zeros(()), "holds more than the weights of layers 0 to 1"),
    ],
)
def test_wrong_weights(weights_file: str, name: str, tensor: Tensor | None, message: str) -> None:
    tensors = load_file(weights_file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    changed = f"{weights_file}.changed"
    save_file(tensors, changed)
    with pytest.raises(ValueError, match=message):
        load_pooling_weights(changed)


CONV = {"kind": "conv", "fraction": POOLED / BUDGET}


@pytest.mark.usefixtures("_no_forward")
@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        ({"weights": "nowhere.safetensors"}, {}, r"KnormConfig\.pool: nowhere\.safetensors cannot be read"),
        ({"weights": "nowhere.safetensors"}, {"budget": 0.5}, r"pool: nowhere\.safetensors cannot be read"),
        ({"fraction": 0.5}, {}, r"KnormConfig\.pool: .*conv.weight must have the shape \(12, 32, 'kernel'\)"),
        ({"fraction": 0.01}, {}, r"KnormConfig\.pool: .* 0 units are pooled"),
        (
            {"fraction": 0.75},
            {"local_length": 2, "stabilizer_length": 2},
            "18 units are pooled .* and up to 6 are protected",
        ),
        ({"fraction": 0.6}, {}, "14 units are pooled .* and up to 10 are protected"),  # in a later turn
    ],
)
def test_what_cannot_be_pooled_is_told_when_the_cache_is_built(
    pool: dict[str, Any], options: dict[str, Any], message: str, weights_file: str
) -> None:
    config = {"backend": "knorm", "budget": BUDGET, "chunk_size": CHUNK, **options}
    config["pool"] = {**CONV, "weights": weights_file, **pool}
    with pytest.raises(ValueError, match=message.replace("32", str(2 * _head_dim()))) as failure:
        build_cache(model_of(), config)
    assert isinstance(failure.value, ArtifactError) == ("weights" in pool)
    with pytest.raises(ValueError, match="pool"):
        model_of().generate(  # type: ignore[operator]
            ids(PROMPT), max_new_tokens=2, cache_implementation="quantized", cache_config=config
        )


@pytest.mark.usefixtures("_no_forward")
def test_weights_for_other_layers_or_widths(weights_file: str) -> None:
    config = {"backend": "knorm", "budget": BUDGET, "pool": {**CONV, "weights": weights_file}}
    build_cache(model_of(), config)
    with pytest.raises(ValueError, match=r"KnormConfig\.pool: .*weights of 2 layers, none of layer 2"):
        build_cache(model_of(num_hidden_layers=3), config)
    build_cache(model_of(num_hidden_layers=3), config | {"skip_layers": [2]})
    with pytest.raises(ValueError, match=r"keys of 8 and values of 8 channels and 6 pooled tokens"):
        build_cache(model_of(head_dim=8), config)
    # of a fraction of the prompt, how many units are pooled is known once the prompt's length is
    cache = build_cache(model_of(), config | {"budget": 0.5})
    with pytest.raises(ValueError, match=rf"shape \(10, .*got \({POOLED}, "):
        cache.bind(model_of(), prompt_length=80)
    cache.bind(model_of(), prompt_length=2 * BUDGET)
    with pytest.raises(ValueError, match="0 units are pooled"):
        build_cache(
            model_of(), config | {"layer_overrides": {"1": {"pool": config["pool"] | {"fraction": 0.01}}}}
        )


def test_a_prompt_of_unknown_length_finds_out_when_it_is_pooled(weights_file: str) -> None:
    config = {"backend": "knorm", "budget": 0.5, "pool": {**CONV, "weights": weights_file}}
    with pytest.raises(ValueError, match=r"KnormConfig\.pool: .*conv.weight must have the shape \(8, "):
        feed(model_of(), build_cache(model_of(), config), ids(PROMPT), [PROMPT])


# ---- the option ----


def test_options() -> None:
    def read(pool: Any, storage: Any = None, positions: str = "absolute") -> Pooling | None:
        return read_pooling(pool, "XConfig", storage=storage, positions=positions)

    assert read(None) is None and read(None, {"backend": "int8"}, "compact") is None
    assert read("merge") == Pooling() and Pooling().pooled_length(100) == 0
    conv = {"kind": "conv", "weights": "w.safetensors"}
    assert read(conv) == Pooling("w.safetensors", 0.125)
    assert read(conv | {"fraction": 0.25}) == Pooling("w.safetensors", 0.25)
    assert Pooling("w", 0.125).pooled_length(16384) == 2048
    for wrong in ("mean", 3, {"kind": "mean"}, {"kind": "conv"}, conv | {"weights": 3}, conv | {"gamma": 1}):
        with pytest.raises(ValueError, match=r"XConfig\.pool must be 'merge'"):
            read(wrong)
    for fraction in (0, 1, -0.5, "a", True):
        with pytest.raises(ValueError, match="a fraction between 0 and 1"):
            read(conv | {"fraction": fraction})
    for pool in ("merge", conv):
        with pytest.raises(ValueError, match="storage must be None"):
            read(pool, {"backend": "int8"})
        with pytest.raises(ValueError, match="must be 'absolute', got 'compact'"):
            read(pool, None, "compact")


def test_the_option_reaches_the_layers(weights_file: str) -> None:
    given = {None: None, "merge": Pooling(), "conv": Pooling(weights_file, 0.25)}
    read = {}
    for name in given:
        pool = {"kind": "conv", "weights": weights_file, "fraction": 0.25} if name == "conv" else name
        read[name] = _read(pool=pool)
        assert read[name].config.pooling() == given[name]
    values = {name: cache.evicting_layers[0].stored_values.tail.view() for name, cache in read.items()}
    assert {len(cache.evicting_layers[0].ledger.scores[0, 0]) for cache in read.values()} == {BUDGET}
    assert not torch.equal(values[None], values["merge"]) and not torch.equal(values[None], values["conv"])
