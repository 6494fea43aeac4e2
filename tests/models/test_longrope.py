"""Phi-3's two sets of frequencies: a long prompt keeps its cache, and reads as a dense one does."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from kvcache_plugins import ArtifactError, KVCache, build_cache, install, uninstall
from kvcache_plugins.models import frequencies
from kvcache_plugins.models.cache_argument import as_argument, cache_of

SWITCH = 32


@pytest.fixture(scope="module")
def model() -> Any:
    return phi3()


def phi3() -> Any:
    """A Phi-3 that changes its frequencies at 32 tokens."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=SWITCH,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8, "original_max_position_embeddings": SWITCH,
        },
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def generate(model: Any, length: int, max_new_tokens: int = 12, **arguments: Any) -> Any:
    """Greedy continuation of a random prompt."""
    ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length))
    return model.generate(
        ids, do_sample=False, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **arguments
    )


def quantized(**cache_config: Any) -> dict[str, Any]:
    """Arguments of `generate` for a cache of ours."""
    return {"cache_implementation": "quantized", "cache_config": cache_config}


@pytest.mark.parametrize(
    "cache_config",
    [
        {"backend": "kivi", "residual_length": 4096},
        {"backend": "knorm", "budget": 200},
        {"backend": "knorm", "budget": 200, "chunk_size": None},
        {"backend": "h2o", "budget": 200, "chunk_size": 16},
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_a_long_prompt_reads_as_with_a_dense_cache(model: Any, cache_config: dict[str, Any]) -> None:
    expected = generate(model, 90)
    got = generate(model, 90, **quantized(**cache_config))
    assert cache_of(got).get_seq_length() == 101  # and not a dense one in its place
    assert type(cache_of(got)).__module__.startswith("kvcache_plugins")
    assert torch.equal(expected.sequences, got.sequences)
    assert torch.equal(expected.sequences, generate(model, 90).sequences)  # other calls are left alone


@pytest.mark.parametrize("length", [SWITCH, SWITCH + 1])
def test_the_last_short_prompt_and_the_first_long_one(model: Any, length: int) -> None:
    given = {"max_new_tokens": 1, "output_logits": True}
    expected = generate(model, length, **given).logits[0]
    found = generate(model, length, **given, **quantized(backend="kivi", residual_length=4096)).logits[0]
    assert torch.allclose(found, expected, atol=1e-5)


def test_keys_carry_the_frequencies_of_long_texts(model: Any) -> None:
    dense = cache_of(generate(model, 90, max_new_tokens=1)).layers[0].keys
    evicting = quantized(backend="knorm", budget=60, chunk_size=16)
    layer = cache_of(generate(model, 90, max_new_tokens=1, **evicting)).evicting_layers[0]
    kept = layer.ledger.positions.long()[..., None].expand(-1, -1, -1, dense.shape[-1])
    # the first layer's keys depend on nothing before them
    assert torch.allclose(dense.gather(2, kept), _held(layer), atol=1e-5)
    assert int(kept.min()) < SWITCH  # some of them come from the chunks before the change


def test_after_reset_a_short_text_reads_as_with_a_new_cache(model: Any) -> None:
    config = {"backend": "kivi", "residual_length": 4096}
    cache = build_cache(model, config)
    generate(model, 90, **as_argument(cache))
    cache.reset()
    got = generate(model, 20, max_new_tokens=4, **as_argument(cache), output_logits=True)
    expected = generate(model, 20, max_new_tokens=4, output_logits=True)
    assert torch.allclose(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-4)


@pytest.mark.parametrize(
    "cache_config",
    [
        {"backend": "kivi", "rope_mode": "block", "residual_length": 32},
        {"backend": "kvquant", "calibration": "normal_float", "residual_length": 32},
        {"backend": "knorm", "budget": 60, "chunk_size": 16},
    ],
    ids=lambda config: config["backend"],
)
def test_a_saved_long_text_is_continued(model: Any, cache_config: dict[str, Any], tmp_path: Path) -> None:
    cache = build_cache(model, cache_config)
    turn = torch.cat([generate(model, 90, **as_argument(cache)).sequences, torch.full((1, 6), 9)], dim=1)
    cache.save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, model)

    def logits(past: KVCache) -> Tensor:
        kwargs = {"max_new_tokens": 4, "do_sample": False, **as_argument(past)}
        output = model.generate(turn, return_dict_in_generate=True, output_logits=True, **kwargs)
        return torch.stack(output.logits)

    assert torch.equal(logits(loaded), logits(cache))
    with pytest.raises(ArtifactError, match="two sets of rotary frequencies"):
        KVCache.from_pretrained(tmp_path, model.config)


def test_between_calls_a_model_has_its_own_frequencies() -> None:
    model = phi3()
    rotary = model.model.rotary_emb
    short = rotary.original_inv_freq.clone()
    evicting = quantized(backend="knorm", budget=60, chunk_size=16)
    cache = cache_of(generate(model, 90, **evicting))
    assert cache.reads_long_text and torch.equal(rotary.original_inv_freq, short)
    cache.bind(model, prompt_length=120)  # those it will be read with, and no call that follows
    assert torch.equal(rotary.original_inv_freq, short)
    with pytest.raises(IndexError):
        model(torch.full((1, 2), 128), **as_argument(cache))  # no such token
    assert torch.equal(rotary.original_inv_freq, short)


@pytest.mark.parametrize(("length", "factor"), [(90, 4.0), (20, 1.0)], ids=["long", "short"])
def test_layers_know_the_frequencies_of_their_text(length: int, factor: float) -> None:
    model = phi3()
    cache: Any = build_cache(model, {"backend": "knorm", "budget": 60}).bind(model, prompt_length=length)
    rotary = cache.evicting_layers[0].facts.rotary
    expected = model.model.rotary_emb.original_inv_freq / factor
    torch.testing.assert_close(torch.tensor(rotary.inv_freq), expected)
    assert bool(model.model._forward_pre_hooks) == (factor > 1)  # who reads short texts is left alone


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_frequencies_of_its_own(copied: Callable[[Any], Any]) -> None:
    model, evicting = phi3(), quantized(backend="knorm", budget=60, chunk_size=16)
    long, short = generate(model, 90, **evicting), generate(model, 20)
    twin = copied(model)
    with torch.no_grad():
        model.model.rotary_emb.original_inv_freq.mul_(2)
    del model
    assert torch.equal(generate(twin, 90, **evicting).sequences, long.sequences)
    assert torch.equal(generate(twin, 20).sequences, short.sequences)
    uninstall()
    try:
        assert not twin.model._forward_pre_hooks and not twin.model._forward_hooks
        assert torch.equal(generate(twin, 20).sequences, short.sequences)
    finally:
        install()


def test_nothing_of_ours_stays_on_the_model() -> None:
    model = phi3()
    before = set(vars(model.model))
    generate(model, 90, **quantized(backend="knorm", budget=60, chunk_size=16))
    uninstall()
    try:
        assert set(vars(model.model)) == before
        assert b"kvcache_plugins" not in pickle.dumps(model)
    finally:
        install()
    decoder = weakref.ref(model.model)
    del model
    assert decoder() is None


@pytest.mark.parametrize("backend", ["int8", "snapkv", "kvzip"])
def test_other_threads_have_the_frequencies_of_their_own_texts(backend: str) -> None:
    """A short text is read, with a dense cache, in the middle of every call that reads a long one."""
    model = phi3()
    options = {"budget": 60, "chunk_size": 16} if backend != "int8" else {}
    long, short = generate(model, 90, **quantized(backend=backend, **options)), generate(model, 20)
    found: list[bool] = []

    def meanwhile(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: found.append(torch.equal(again(), short.sequences)))
            thread.start()
            thread.join()

    def again() -> Tensor:
        return generate(model, 20, max_new_tokens=12).sequences

    handle = model.model.rotary_emb.register_forward_pre_hook(meanwhile, prepend=True)
    with handle, model.model.layers[0].register_forward_pre_hook(meanwhile):
        during = generate(model, 90, **quantized(backend=backend, **options))
    assert found and all(found)
    assert torch.equal(during.sequences, long.sequences)


@pytest.mark.parametrize("where", ["in the embedding", "in a layer"])
def test_an_interrupted_call_leaves_nothing_to_the_next(where: str) -> None:
    """A KeyboardInterrupt, at the end of which torch calls no hooks."""
    model = phi3()
    evicting = quantized(backend="knorm", budget=60, chunk_size=16)
    long, short = generate(model, 90, **evicting), generate(model, 20)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    part = model.model.layers[1] if where == "in a layer" else model.model.rotary_emb
    handle = part.register_forward_pre_hook(interrupt)
    with handle, pytest.raises(KeyboardInterrupt):
        generate(model, 90, **evicting)
    shorter = build_cache(model, {"backend": "kivi", "rope_mode": "block"}).bind(model, prompt_length=20)
    turning: Any = shorter.packed_layers[0].facts.rotary
    torch.testing.assert_close(torch.tensor(turning.inv_freq), model.model.rotary_emb.original_inv_freq)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(generate(model, 90, **evicting).sequences))
    thread.start()
    thread.join()
    assert torch.equal(found[0], long.sequences)
    assert torch.equal(generate(model, 20).sequences, short.sequences)
    assert torch.equal(generate(model, 90, **evicting).sequences, long.sequences)
    assert frequencies._active == 0


def test_a_module_stays_as_it_is_while_it_computes_for_a_long_text() -> None:
    """Other threads ask it at any time, which frequencies it has and of which kind they are."""
    model, seen = phi3(), []
    rotary = model.model.rotary_emb
    short = rotary.original_inv_freq.clone()

    def look(*_: Any) -> None:
        seen.append((rotary.rope_type, torch.equal(rotary.original_inv_freq, short)))

    handles = [module.register_forward_pre_hook(look) for module in (rotary, model.model.layers[0])]
    handles += [rotary.register_forward_hook(look), rotary.register_forward_hook(look, prepend=True)]
    for backend in ("kvzip", "knorm"):
        generate(model, 90, **quantized(backend=backend, budget=60, chunk_size=16))
    for handle in handles:
        handle.remove()
    assert set(seen) == {("longrope", True)}


@torch.no_grad()
def test_a_model_that_has_read_a_long_text_compiles_whole() -> None:
    ids = torch.arange(5, 25)[None]

    def compiled(model: Any) -> Tensor:
        logits: Tensor = torch.compile(model, fullgraph=True, backend="eager")(ids, use_cache=False).logits
        return logits

    try:
        compiled(phi3())
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this release of transformers has no such model that compiles whole")
    model = phi3()
    generate(model, 90, **quantized(backend="kvzip", budget=60, chunk_size=16))
    torch.testing.assert_close(compiled(model), model(ids, use_cache=False).logits)


def test_a_forward_that_fails_leaves_nothing_to_the_next() -> None:
    model = phi3()
    evicting = quantized(backend="knorm", budget=60, chunk_size=16)
    expected = generate(model, 90, **evicting)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    rotary = model.model.rotary_emb
    for register in (rotary.register_forward_pre_hook, rotary.register_forward_hook):
        for prepend in (True, False):
            with register(fail, prepend=prepend), pytest.raises(RuntimeError, match="in the middle"):
                generate(model, 90, **evicting)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(generate(model, 90, **evicting)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert torch.equal(got[0].sequences, expected.sequences)


def test_crossing_the_change_is_announced(model: Any) -> None:
    with pytest.warns(UserWarning, match="changes its rotary frequencies at 32 tokens"):
        generate(model, 20, max_new_tokens=20, **quantized(backend="int8"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, 20, max_new_tokens=10, **quantized(backend="int8"))


def test_what_cannot_be_right_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"prefill_chunk_size must be at most 32 .* got 64"):
        generate(model, 90, prefill_chunk_size=64, **quantized(backend="int8"))
    cache = build_cache(model, {"backend": "int8"})
    generate(model, 20, max_new_tokens=2, **as_argument(cache))
    with pytest.raises(
        ValueError, match="holds 21 tokens from before; a text of 90 tokens needs a new cache"
    ):
        generate(model, 90, **as_argument(cache))
    with pytest.raises(ValueError, match=r"this prompt of 90 cannot be split: .*verifies drafted tokens"):
        generate(model, 90, prompt_lookup_num_tokens=3, **quantized(backend="int8"))


def _held(layer: Any) -> Tensor:
    tail: Tensor = layer.stored_keys.tail.view()
    return tail
