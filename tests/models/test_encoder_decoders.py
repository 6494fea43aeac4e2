"""Encoder-decoder models: both halves of their cache are packed, in every family and every verb."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, DPRConfig, DynamicCache, EncoderDecoderCache, RagConfig

import kvcache_plugins as kvp
from kvcache_plugins.layers.crossing import _without_padding
from kvcache_plugins.layers.stream import Stream
from kvcache_plugins.models.cache_argument import as_argument, cache_of, given_cache
from kvcache_plugins.models.decoder import decoder_config
from tests.models.encoders import HEARING, OTHERS, READING, decoded, encoder_decoder, source, target
from tests.models.rounded import Rounded, flipped

INT8 = {"backend": "int8"}
PACKING = {
    "float8": {"backend": "float8"},
    "int4": {"backend": "int4", "residual_length": 16},
    "int8": INT8,
    "kivi-2": {"backend": "kivi", "nbits": 2, "residual_length": 32},
    "kivi-4": {"backend": "kivi", "residual_length": 32},
    "kvquant": {"backend": "kvquant", "calibration": "normal_float", "residual_length": 0},
}
SMOOTH = {"backend": "int4", "residual_length": 8, "smooth": 0.5}
SINKS = {"backend": "int4", "residual_length": 16, "sink_length": 4}
PARTS = [70, 1, 1, 5, 1]
TOKENS = target(sum(PARTS))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error."""
    return float((found - expected).norm() / expected.norm())


def built(model: Any, config: dict[str, Any], given: dict[str, Tensor]) -> kvp.KVEncoderDecoderCache:
    """A cache that knows what is padding."""
    cache = kvp.build_cache(model, config)
    assert isinstance(cache, kvp.KVEncoderDecoderCache)
    return cache.bind(model, encoder_attention_mask=given.get("attention_mask"))


def generate(
    model: Any, given: dict[str, Tensor], config: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Forty tokens, with what `generate()` has built."""
    cache = {} if config is None else {"cache_implementation": "quantized", "cache_config": dict(config)}
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True} | options
    return model.generate(**given, **cache, max_new_tokens=40, min_new_tokens=40, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*READING, *HEARING])
def test_family(name: str) -> None:
    model, given = encoder_decoder(name), source(name)
    config = decoder_config(model.config)
    every = set(range(config.num_hidden_layers))
    cache = built(model, INT8, given)
    logits = decoded(model, given, cache, TOKENS, PARTS)
    packed = {layer.layer_idx for layer in cache.self_attention_cache.packed_layers}
    rounded = EncoderDecoderCache(Rounded(packed, config=config), Rounded(every))
    expected = decoded(model, given, rounded, TOKENS, PARTS)
    exact = decoded(
        model, given, EncoderDecoderCache(DynamicCache(config=config), DynamicCache()), TOKENS, PARTS
    )
    # FSMT reads the last token of a call only, in releases such as 5.17
    first = PARTS[0] if logits.shape[1] == TOKENS.shape[1] else 1
    torch.testing.assert_close(logits[:, :first], exact[:, :first], atol=1e-4, rtol=1e-4)
    later = slice(first, None)  # what was read of packed tokens
    effect = error(exact[:, later], expected[:, later])
    flips = flipped(cache.self_attention_cache.packed_layers, rounded.self_attention_cache)
    assert flips <= 2
    assert error(logits[:, later], expected[:, later]) < (0.005 + 0.02 * flips) * effect
    assert 3e-4 < effect < 0.2
    report = cache.report()
    assert report.tokens_seen == logits.shape[1] and report.cross_attention is not None
    assert report.cross_attention.kernel == ["cpu"] * len(every) and report.fallback_reads == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_other_encoders(name: str) -> None:
    model, given = encoder_decoder(name), source(name)
    every = set(range(decoder_config(model.config).num_hidden_layers))
    assert every == {0, 1}  # of the decoder, not of the encoder
    imitation = EncoderDecoderCache(Rounded(every), Rounded(every))
    expected = generate(model, given, **as_argument(imitation))
    found = generate(model, given, INT8)
    assert found.sequences.tolist() == expected.sequences.tolist()
    report = cache_of(found).report()
    assert report.kernel == report.cross_attention.kernel == ["cpu"] * 2 and report.fallback_reads == 0


def test_a_model_that_prepares_no_cache_takes_one() -> None:
    model, given = encoder_decoder("musicgen"), source("bart")
    model.generation_config.update(
        decoder_start_token_id=32, pad_token_id=32, bos_token_id=32, guidance_scale=3.0
    )
    options = {"max_new_tokens": 12, "do_sample": False}
    with pytest.raises(
        ValueError, match=r"prepares no cache .* backend='int8' would be ignored. .*build_cache"
    ):
        model.generate(**given, **options, cache_implementation="quantized", cache_config=INT8)
    expected = model.generate(
        **given, **options, **as_argument(EncoderDecoderCache(Rounded({0, 1}), Rounded({0, 1})))
    )
    cache = kvp.build_cache(model, INT8)
    torch.testing.assert_close(model.generate(**given, **options, **as_argument(cache)), expected)
    assert cache.get_seq_length() == 13 and cache.report().fallback_reads == 0


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize(
    "config",
    [
        INT8,
        {"backend": "kivi", "residual_length": 32, "skip_layers": [0]},
        {"backend": "int4", "layer_overrides": {"1": {"nbits": 8}}},
    ],
    ids=["int8", "skipped", "overridden"],
)
def test_a_decoder_that_begins_with_its_encoder(
    config: dict[str, Any], guidance: float, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """MusicGen Melody's: what was read is among its tokens, and there is no cross-attention."""
    model, given = encoder_decoder("musicgen_melody"), source("bart", (150,))
    model.generation_config.update(
        decoder_start_token_id=32, pad_token_id=32, bos_token_id=32, guidance_scale=guidance
    )
    options = {"max_new_tokens": 44, "do_sample": False, "return_dict_in_generate": True}
    seen = cache_of(model.generate(**given, **options)).get_seq_length()
    assert seen in (20 + 150 + 44, 44)  # 5.17 gives a cache that was made before no more than the text
    asked = {"cache_implementation": "quantized", "cache_config": config}
    cache = cache_of(model.generate(**given, **options, **asked))
    report, rows = cache.report(), 1 if guidance == 1 else 2
    assert report.tokens_seen == seen and report.fallback_reads == 0
    assert report.cross_attention is None and "encoder" not in str(report)
    assert not [warning for warning in recwarn if "packs none" in str(warning.message)]
    assert kvp.estimate(model, config, report.tokens_seen, rows) == cache.kv_bytes() == report.kv_bytes
    assert kvp.estimate(model, {"backend": "dense"}, report.tokens_seen, rows) == report.dense_bytes
    with pytest.raises(ValueError, match=r"encoder reads among its own tokens.* must be None, got 150"):
        kvp.estimate(model, config, 100, encoder_tokens=150)
    cache.save_pretrained(tmp_path)
    loaded = kvp.KVCache.from_pretrained(tmp_path, model)
    assert loaded.get_seq_length() == seen and loaded.kv_bytes() == cache.kv_bytes()
    cache.batch_repeat_interleave(2)
    cache.crop(-4)
    assert cache.get_seq_length() == seen - 4
    assert cache.report().values == 2 * rows * (seen - 4) * 2 * 2 * 64


def test_what_a_decoder_begins_with_is_not_evicted() -> None:
    model = encoder_decoder("musicgen_melody")
    with pytest.raises(ValueError, match="a model whose decoder begins with what an encoder has read"):
        kvp.build_cache(model, {"backend": "streaming_llm", "budget": 64})
    with pytest.raises(ValueError, match=r"skip_layers must name layers from -2 to 1, got 7"):
        kvp.build_cache(model, {**INT8, "skip_layers": [7]})


def test_a_model_that_takes_its_caches_apart_is_refused() -> None:
    config = RagConfig.from_question_encoder_generator_configs(DPRConfig(), BartConfig())
    with pytest.raises(ValueError, match="'rag' take their caches apart to search beams"):
        kvp.build_cache(config, INT8)


@pytest.fixture(scope="module", params=["bart", "t5"])
def model(request: pytest.FixtureRequest) -> Any:
    """One that asks for plain attention, and one that adds a bias to it."""
    return encoder_decoder(request.param)


@pytest.fixture
def given() -> dict[str, Tensor]:
    """A batch of texts of two lengths."""
    return source("bart")


@pytest.mark.parametrize("name", PACKING)
def test_kernels_and_the_reference_agree(model: Any, given: dict[str, Tensor], name: str) -> None:
    config = PACKING[name]
    native = decoded(model, given, cache := built(model, config, given), TOKENS, PARTS)
    reference = decoded(model, given, built(model, {**config, "kernel": "torch"}, given), TOKENS, PARTS)
    exact = decoded(model, given, EncoderDecoderCache(DynamicCache(), DynamicCache()), TOKENS, PARTS)
    effect = error(exact, reference)
    assert error(native, reference) < 0.01 * effect and effect > 1e-4
    assert set(cache.report().kernel) == set(cache.report().cross_attention.kernel) == {"cpu"}


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams_return_two": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "attention_weights": {"output_attentions": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_generation(model: Any, given: dict[str, Tensor], mode: str) -> None:
    # A cache of 8 bits that a dense one imitates: what is compared is what generation does with both halves.
    if mode == "prompt_lookup":
        given = {name: tensor[:1] for name, tensor in given.items()}
    if mode == "attention_weights":
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
    layers = set(range(2))
    torch.manual_seed(0)
    imitation = EncoderDecoderCache(Rounded(layers), Rounded(layers))
    expected = generate(model, given, **MODES[mode], **as_argument(imitation))
    torch.manual_seed(0)
    found = generate(model, given, INT8, **MODES[mode])
    assert found.sequences.tolist() == expected.sequences.tolist()
    report = cache_of(found).report()
    assert report.fallback_reads == 0 and report.cross_attention.tokens_seen == given["input_ids"].shape[1]
    if mode == "attention_weights":
        with torch.no_grad():
            last = model(
                encoder_outputs=model.get_encoder()(**given), attention_mask=given["attention_mask"],
                decoder_input_ids=found.sequences[:, -2:-1], output_attentions=True,
                **as_argument(without_newest(cache_of(found))),
            )  # fmt: skip
        for name in ("decoder_attentions", "cross_attentions"):
            for mine, theirs in zip(getattr(found, name)[-1], getattr(last, name), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0.0)


def without_newest(cache: Any) -> EncoderDecoderCache:
    """A dense cache of the numbers that codes stand for, as the last step found it."""
    dense = EncoderDecoderCache(DynamicCache(), DynamicCache())
    parts = (cache.self_attention_cache, dense.self_attention_cache, 1), (
        cache.cross_attention_cache, dense.cross_attention_cache, 0,
    )  # fmt: skip
    for packed, half, newest in parts:
        for layer in packed.packed_layers:
            keys, values = (stream.decode(0, stream.packed_length - newest) for stream in layer.streams)
            half.update(keys, values, layer.layer_idx)
            dense.is_updated[layer.layer_idx] = True
    return dense


@pytest.mark.allow_deprecation("Passing `generation_config` together", reason="assistants are called so")
def test_an_assistant_drafts_with_a_cache_of_its_own(given: dict[str, Tensor]) -> None:
    model, assistant = encoder_decoder("bart"), encoder_decoder("bart", decoder_layers=1)
    one = {name: tensor[:1] for name, tensor in given.items()}
    arguments = {"do_sample": False, "max_new_tokens": 30, "return_dict_in_generate": True}
    imitation = EncoderDecoderCache(Rounded({0, 1}), Rounded({0, 1}))
    expected = model.generate(**one, **arguments, **as_argument(imitation))
    drafting = []
    hook = assistant.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: drafting.append(given_cache(kwargs)), with_kwargs=True
    )
    arguments |= {"cache_implementation": "quantized", "cache_config": INT8}
    found = model.generate(**one, **arguments, assistant_model=assistant)
    hook.remove()
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert {type(cache) for cache in drafting} == {kvp.KVEncoderDecoderCache}


def test_padding_stands_for_the_nearest_real_token() -> None:
    real_tokens = torch.tensor([[0, 0, 1, 0, 1], [1, 1, 0, 0, 0]])
    states = torch.arange(10.0).view(2, 1, 5, 1)
    (found,) = _without_padding(real_tokens, states)
    assert found.flatten(1).tolist() == [[2, 2, 2, 2, 4], [5, 6, 6, 6, 6]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PACKING)
def test_padding_takes_no_part_in_what_is_shared(name: str, side: str) -> None:
    # a row's codes are those of the row alone, though its last block is shared with padding
    model, length, whole = encoder_decoder("bart"), 310, 448
    states = torch.randn(2, 4, whole, 16, generator=torch.Generator().manual_seed(2))
    real = torch.ones(2, whole, dtype=torch.long)
    place = slice(0, length) if side == "right" else slice(whole - length, whole)
    real[1] = 0
    real[1, place] = 1
    states = torch.where(real[:, None, :, None] > 0, states, 50 * states)

    def stored(states: Tensor, mask: Tensor | None) -> Any:
        cache = kvp.build_cache(model, PACKING[name]).bind(model, encoder_attention_mask=mask)
        cache.cross_attention_cache.update(states, 2 * states, 0)
        return cache.cross_attention_cache.layers[0]

    alone, batch, untold = stored(states[1:, :, place], None), stored(states, real), stored(states, None)
    packed = alone.stored_keys.packed_length
    assert packed in (256, 288, 304, 310)
    for side_of in ("keys", "values"):
        of_alone, of_batch, of_untold = (getattr(x, side_of).dense() for x in (alone, batch, untold))
        if side == "right":  # where blocks begin at the same token
            assert torch.equal(of_batch[1:, :, :packed], of_alone[:, :, :packed])
        sinks = batch.config.sink_length
        shift = (of_batch - of_untold)[1, :, place][:, sinks:].abs().max()
        shares_scales = side_of == "keys" and name.startswith(("kivi", "kvquant"))
        assert (shift > 0) == shares_scales
        # KVQuant's ranges are learnt of all rows
        assert torch.equal(of_batch[0], of_untold[0]) or (name == "kvquant" and shares_scales)


@pytest.mark.parametrize("name", PACKING)
def test_verbs_are_those_of_a_cache_that_read_other_rows(
    model: Any, given: dict[str, Tensor], name: str
) -> None:
    order = torch.tensor([1, 0, 0])
    more = target(20)
    cache = built(model, PACKING[name], given)
    decoded(model, given, cache, TOKENS, PARTS)
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(order)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(torch.tensor([1, 1]))
    pickled = pickle.loads(pickle.dumps(cache)).bind(model)
    logits = decoded(model, given, cache, more, [1, 7, 12])
    assert torch.equal(decoded(model, given, pickled, more, [1, 7, 12]), logits)
    for other, rows in ((chosen, order), (repeated, torch.tensor([0, 0, 1, 1]))):
        of_rows = {key: tensor[rows] for key, tensor in given.items()}
        found = decoded(model, of_rows, other, more[rows], [1, 7, 12])
        torch.testing.assert_close(found, logits[rows], atol=1e-4, rtol=1e-4)
    twice = {key: tensor[[1, 1]] for key, tensor in given.items()}
    found = decoded(model, twice, reordered, more[[1, 1]], [1, 7, 12])
    torch.testing.assert_close(found[0], logits[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [*PACKING.values(), SMOOTH, SINKS], ids=[*PACKING, "smooth", "sinks"])
def test_a_row_that_is_asked_for_is_decoded_alone(
    given: dict[str, Tensor], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Moonshine, whose keys are rotated; rows have pads, so that their positions differ."""
    model = encoder_decoder("moonshine")
    pads = torch.tensor([[0] * 9 + [1] * 141, [1] * 150])
    states = torch.randn(2, 4, 150, 16, generator=torch.Generator().manual_seed(3))
    cache = kvp.build_cache(model, options).bind(model, pads, encoder_attention_mask=pads)
    for half in (cache.self_attention_cache, cache.cross_attention_cache):
        half.update(states, 2 * states, 0)
        half.update(states, 2 * states, 0)
    decode, rows = Stream.decode, []

    def counted(stream: Stream, start: int, stop: int) -> Tensor:
        found = decode(stream, start, stop)
        rows.append(len(found))
        return found

    monkeypatch.setattr(Stream, "decode", counted)
    before = cache.report()
    for half in (cache.self_attention_cache, cache.cross_attention_cache):
        layer = half.layers[0]
        for side in ("keys", "values"):
            with pytest.raises(IndexError):
                getattr(layer, side)[2]
            found = [getattr(layer, side)[row] for row in (0, -1)]
            assert rows and set(rows) == {1}
            assert torch.equal(torch.stack(found), getattr(layer, side).tokens.dense(torch.float32))
            rows.clear()
    assert cache.report() == before and before.fallback_reads == 0


def test_what_is_cropped_is_text(model: Any, given: dict[str, Tensor]) -> None:
    cache = built(model, INT8, given)
    decoded(model, given, cache, TOKENS, PARTS)
    expected = decoded(model, given, copy.deepcopy(cache), target(9), [9])
    assert cache.is_croppable
    decoded(model, given, cache, target(5), [5])
    cache.crop(-5)
    assert cache.get_seq_length() == TOKENS.shape[1]
    assert cache.cross_attention_cache.get_seq_length() == given["input_ids"].shape[1]
    torch.testing.assert_close(decoded(model, given, cache, target(9), [9]), expected, atol=1e-4, rtol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0 and not any(cache.is_updated.values())
    again = decoded(model, given, cache.bind(model), TOKENS, PARTS)
    fresh = decoded(model, given, built(model, INT8, {}), TOKENS, PARTS)
    assert torch.equal(again, fresh)


@pytest.mark.parametrize("name", PACKING)
def test_saved_and_loaded(model: Any, given: dict[str, Tensor], name: str, tmp_path: Path) -> None:
    cache = built(model, PACKING[name], given)
    decoded(model, given, cache, TOKENS, PARTS)
    cache.save_pretrained(tmp_path)
    for loader in (kvp.KVCache, kvp.KVEncoderDecoderCache):
        loaded = loader.from_pretrained(tmp_path, model)
        assert isinstance(loaded, kvp.KVEncoderDecoderCache) and loaded.config == cache.config
        assert loaded.is_updated == {0: True, 1: True}
        expected = decoded(model, given, copy.deepcopy(cache), target(20), [1, 7, 12])
        assert torch.equal(decoded(model, given, loaded, target(20), [1, 7, 12]), expected)


def test_half_a_cache_is_not_taken_for_a_whole_one(given: dict[str, Tensor], tmp_path: Path) -> None:
    model = encoder_decoder("bart")
    kvp.Int8Cache(model).save_pretrained(tmp_path)
    with pytest.raises(kvp.ArtifactError, match="holds 2 layers, expected 4"):
        kvp.KVCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("name", [*PACKING, "dense"])
def test_predicted_bytes(model: Any, given: dict[str, Tensor], name: str) -> None:
    given = {key: tensor[:1] for key, tensor in given.items()}  # without padding
    tokens, encoder_tokens = TOKENS.shape[1], given["input_ids"].shape[1]
    config = PACKING.get(name, {"backend": "dense"})
    predicted = kvp.estimate(model, config, tokens, encoder_tokens=encoder_tokens)
    if name == "dense":
        report = built(model, INT8, given).report()
        cache = built(model, INT8, given)
        decoded(model, given, cache, TOKENS[:1], PARTS)
        report = cache.report()
        assert report.dense_bytes == predicted
        assert report.cross_attention.dense_bytes == 2 * 2 * encoder_tokens * 64 * 4
        return
    cache = built(model, config, given)
    decoded(model, given, cache, TOKENS[:1], [tokens - 1, 1])
    assert cache.kv_bytes() == predicted
    assert cache.report().kv_bytes == predicted
    halves = cache.self_attention_cache, cache.cross_attention_cache
    assert sum(half.kv_bytes() for half in halves) == predicted


def test_predictions_need_the_encoders_tokens(model: Any) -> None:
    with pytest.raises(
        ValueError, match=r"encoder-decoder model, for which encoder_tokens must be an int.* got None"
    ):
        kvp.estimate(model, INT8, 100)
    with pytest.raises(ValueError, match=r"encoder_tokens must be an integer >= 1, got 0"):
        kvp.estimate(model, INT8, 100, encoder_tokens=0)


def test_the_exact_window_is_of_text_alone(model: Any, given: dict[str, Tensor]) -> None:
    cache = built(model, {"backend": "kivi", "residual_length": 128}, given)
    decoded(model, given, cache, TOKENS, PARTS)
    assert {layer.stored_keys.packed_length for layer in cache.self_attention_cache.packed_layers} == {0}
    assert {layer.stored_keys.packed_length for layer in cache.cross_attention_cache.packed_layers} == {128}


def test_layers_left_out(model: Any, given: dict[str, Tensor]) -> None:
    config = {
        "backend": "kivi",
        "residual_length": 32,
        "skip_layers": [0],
        "layer_overrides": {"1": {"nbits": 2}},
    }
    found = generate(model, given, config)
    report = cache_of(found).report()
    assert report.dense_layers == report.cross_attention.dense_layers == {0: "skip_layers"}
    for half in (cache_of(found).self_attention_cache, cache_of(found).cross_attention_cache):
        assert half.layers[1].config.bits_of("key") == 2
    text = str(report)
    assert text.count("skip_layers") == 2 and "encoder's tokens" in text


@pytest.mark.parametrize("backend", ["h2o", "knorm", "streaming_llm"])
def test_backends_that_evict_are_refused(model: Any, given: dict[str, Tensor], backend: str) -> None:
    message = (
        rf"'{backend}', which evicts tokens, serves decoder-only models; .* Allowed are backends that keep"
    )
    with pytest.raises(ValueError, match=message):
        generate(model, given, {"backend": backend, "budget": 64})
    with pytest.raises(ValueError, match=message):
        kvp.build_cache(model.config, {"backend": backend, "budget": 64})


@pytest.fixture
def unread(model: Any) -> Iterator[list[Any]]:
    """Calls of the encoder."""
    calls: list[Any] = []
    hook = model.get_encoder().register_forward_pre_hook(lambda *call: calls.append(call))
    yield calls
    hook.remove()


def test_wrong_options_are_named_before_the_encoder_reads(
    model: Any, given: dict[str, Tensor], unread: list[Any]
) -> None:
    for config, message in (
        ({"backend": "kivi", "nbits": 5}, r"nbits must be one of \(2, 3, 4, 8\), got 5"),
        ({"backend": "int3"}, "Did you mean 'int8'"),
        ({"backend": "int8", "group": 3}, "'group' is not an option"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, given, config)
    with pytest.raises(ValueError, match="use_cache is False"):
        generate(model, given, INT8, use_cache=False)
    with pytest.raises(
        ValueError, match=r"has an encoder, and this cache of the backend 'int8' is for the decoder"
    ):
        generate(model, given, **as_argument(kvp.Int8Cache(model)))
    assert not unread
    with pytest.raises(ValueError, match="Passing both"):
        generate(model, given, INT8, **as_argument(kvp.build_cache(model, INT8)))
    assert unread  # as of a call that succeeds


def test_a_cache_built_before_goes_on(model: Any, given: dict[str, Tensor]) -> None:
    cache = kvp.build_cache(model, INT8)
    first = generate(model, given, **as_argument(cache))
    assert cache_of(first) is cache
    assert first.sequences.tolist() == generate(model, given, INT8).sequences.tolist()
    assert cache.get_seq_length() == 40


def test_what_was_asked_for_is_left_as_it_was(model: Any, given: dict[str, Tensor]) -> None:
    config = {"backend": "KIVI", "nbits": 4}
    generation = copy.deepcopy(model.generation_config)
    generation.update(
        cache_implementation="quantized", cache_config=config, max_new_tokens=3, return_dict_in_generate=True
    )
    for _ in range(2):
        found = model.generate(**given, generation_config=generation)
        assert isinstance(cache_of(found), kvp.KVEncoderDecoderCache)
    assert config == {"backend": "KIVI", "nbits": 4}
    assert generation.cache_implementation == "quantized" and generation.cache_config == config


def test_more_layers_in_the_decoder(given: dict[str, Tensor]) -> None:
    # where transformers' own cache is too short
    model = encoder_decoder("t5", num_layers=2, num_decoder_layers=3)
    cache = built(model, INT8, given)
    logits = decoded(model, given, cache, TOKENS, PARTS)
    every = {0, 1, 2}
    expected = decoded(model, given, EncoderDecoderCache(Rounded(every), Rounded(every)), TOKENS, PARTS)
    assert error(logits, expected) < 1e-4
    assert len(cache_of(generate(model, given, INT8)).self_attention_cache.layers) == 3


def test_heads_that_are_padded_for_attention() -> None:
    """As those of the published Moonshine models are, from 36 channels to 40."""
    model, heard = encoder_decoder("moonshine", pad_head_dim_to_multiple_of=24), source("moonshine")
    assert model.model.decoder.layers[0].self_attn.head_dim_padding == 8
    expected = generate(model, heard, **as_argument(EncoderDecoderCache(Rounded({0, 1}), Rounded({0, 1}))))
    found = generate(model, heard, {**INT8, "kernel": "native"})
    assert found.sequences.tolist() == expected.sequences.tolist()
    report = cache_of(found).report()
    assert report.kernel == report.cross_attention.kernel == ["cpu"] * 2 and report.fallback_reads == 0


@pytest.mark.allow_deprecation("Passing `generation_config` together", reason="Whisper calls generate() so")
def test_whisper_generates() -> None:
    model, heard = encoder_decoder("whisper"), source("whisper")
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "return_timestamps": False,
    }
    expected = model.generate(
        **heard, **options, **as_argument(EncoderDecoderCache(Rounded({0, 1}), Rounded({0, 1})))
    )
    asked = {"cache_implementation": "quantized", "cache_config": {**INT8, "kernel": "native"}}
    found = model.generate(**heard, **options, **asked)
    assert found.sequences.tolist() == expected.sequences.tolist()
    # it takes the rows of a batch apart, and puts what they have read together again as dense tensors
    for half in ("self_attention_cache", "cross_attention_cache"):
        pairs = zip(
            getattr(cache_of(found), half).layers, getattr(cache_of(expected), half).layers, strict=True
        )
        for mine, theirs in pairs:
            # where what is rounded lies between two codes, noise of the last digit decides
            assert error(mine.keys, theirs.keys) < 1e-3 and error(mine.values, theirs.values) < 1e-3
    cache = kvp.build_cache(model, INT8)
    again = model.generate(**heard, **options, **as_argument(cache))
    assert again.sequences.tolist() == expected.sequences.tolist()
    report = cache.report()
    assert report.cross_attention.tokens_seen == 1500
    assert report.kernel == report.cross_attention.kernel == ["cpu"] * 2 and report.fallback_reads == 0
