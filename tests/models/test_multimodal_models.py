"""Models of text and images, or sounds: their prompts, modes, positions and layers of cross-attention."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad

import kvcache_plugins as kvp
from kvcache_plugins import KVCache
from kvcache_plugins.artifacts.scales import Scales, save_scales
from kvcache_plugins.calibration.recording import calibrated_layers
from kvcache_plugins.calibration.sensitivity import candidates_of
from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.evaluation.perplexity.blocks import packed_shares
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.layers.crossing import CrossAttentionLayer
from kvcache_plugins.layers.windowed import WindowedLayer
from kvcache_plugins.models.cache_argument import as_argument, cache_name, cache_of
from tests.models.multimodal import NAMES, blip, gemma3, phi4_multimodal, subject
from tests.models.rounded import Rounded
from tests.models.showing import LENGTH, Subject

NEW = 8
IMAGE_TOKENS = 17  # of Mllama
INT8 = {"backend": "int8"}
NEVER_PACKED = {"backend": "int4", "residual_length": 1024}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}
# Transformers takes tokens of the text back from Mllama's images, and from then on masks do not fit them.
NOT_WITH_DENSE = {("mllama", "prompt_lookup")}
# Earlier releases would give every chunk all images.
SPLITS_IMAGES = Version(transformers.__version__) >= Version("5.23")
SPLITS_POSITIONS = Version(transformers.__version__) >= Version("5.19")
# Tokens that see later ones, sounds, images that are not encoded beforehand or with what cannot be split.
READ_WHOLE = frozenset(
    {
        "blip-2",
        "fuyu",
        "gemma3",
        "gemma4",
        "granite4_vision",
        "kosmos-2",
        "mllama",
        "ovis2",
        "paligemma",
        "phi4_multimodal",
        "qwen2_5_omni_thinker",
        "qwen2_audio",
        "video_llama_3",
    }
)


def generate(
    given: Subject,
    cache_config: dict[str, Any] | None = None,
    prompt: dict[str, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Any]:
    """New tokens `(B, NEW)`, logits `(B, NEW, vocabulary)` and the cache."""
    if cache_config is not None:
        options |= {"cache_implementation": "quantized", "cache_config": cache_config}
    prompt = dict(given.prompt if prompt is None else prompt)
    if options.get("prompt_lookup_num_tokens"):  # for a single row
        prompt = {key: value[: len(value) // 2] for key, value in prompt.items()}
    torch.manual_seed(0)
    output = given.model.generate(
        **prompt,
        **{"do_sample": False, **options},
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, -NEW:], torch.stack(output.logits, dim=1), output.get(cache_name())


def rounded(given: Subject) -> Rounded:
    """A dense cache that rounds as int8 does, in the layers that int8 packs."""
    packed = {layer.layer_idx for layer in kvp.build_cache(given.model, INT8).packed_layers}
    return Rounded(packed, config=given.model.config.get_text_config(decoder=True))


def second_turn(given: Subject, shows_image: bool, **options: Any) -> tuple[Tensor, Any]:
    """Logits of a second turn `(B, NEW, vocabulary)`, and the cache, which goes on from the first."""
    tokens, _, cache = generate(given, **options)
    more = torch.randint(20, 100, (2, 40), generator=torch.Generator().manual_seed(9))
    if shows_image:
        more[:, 5 : 5 + int((given.prompt["input_ids"][0] == 5).sum())] = 5
    text = torch.cat((given.prompt["input_ids"], tokens, more), dim=1)
    grown = NEW + more.shape[1]
    prompt = {"input_ids": text, "attention_mask": pad(given.prompt["attention_mask"], (0, grown), value=1)}
    if shows_image:
        prompt = {**given.with_other_features(), **prompt}
    if "token_type_ids" in prompt:
        prompt["token_type_ids"] = (text == 5).long()
    if "cross_attention_mask" in given.prompt:
        seen = pad(given.prompt["cross_attention_mask"], (0, 0, 0, 0, 0, grown), value=1)
        second = torch.zeros_like(seen)
        second[:, -more.shape[1] :] = 1
        prompt["cross_attention_mask"] = torch.cat((seen, second), dim=2) if shows_image else seen
    _, logits, cache = generate(given, None, prompt, **as_argument(cache))
    return logits, cache


@pytest.mark.parametrize("name", NAMES)
def test_the_image_is_seen(name: str) -> None:
    given = subject(name)
    _, logits, _ = generate(given)
    _, other, _ = generate(given, None, given.with_other_features())
    assert (logits - other).norm() > 0.05 * logits.norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_generation(name: str, mode: str) -> None:
    given = subject(name)
    run = functools.partial(generate, given, **MODES[mode])
    if (name, mode) not in NOT_WITH_DENSE:
        tokens, logits, _ = run()
        same, exact, cache = run(NEVER_PACKED)
        assert same.tolist() == tokens.tolist()
        torch.testing.assert_close(exact, logits, atol=1e-4, rtol=1e-4)

    tokens, logits, cache = run(INT8)
    assert isinstance(cache, KVCache)
    assert cache.report().dense_layers.keys() <= {0}  # a window of 32 tokens
    if (name, mode) not in NOT_WITH_DENSE:
        same, expected, _ = run(**as_argument(rounded(given)))
        assert tokens.tolist() == same.tolist()
        assert (logits - expected).norm() < 0.002 * expected.norm()


@pytest.mark.parametrize("shows_image", [False, True])
@pytest.mark.parametrize("name", ["internvl", "llava", "mllama"])
def test_second_turn(name: str, shows_image: bool) -> None:
    given = subject(name)
    expected, _ = second_turn(given, shows_image)
    exact, _ = second_turn(given, shows_image, cache_config=NEVER_PACKED)
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
    expected, _ = second_turn(given, shows_image, **as_argument(rounded(given)))
    near, cache = second_turn(given, shows_image, cache_config=INT8)
    assert (near - expected).norm() < 0.002 * expected.norm()
    if name == "mllama":
        assert cache.layers[1].get_seq_length() == IMAGE_TOKENS * (1 + shows_image)


def test_an_image_beside_packed_windows() -> None:
    """Its tokens see one another across what a window would hide."""
    given = gemma3(window=256, length=420)
    expected, _ = second_turn(given, True)
    near, cache = second_turn(given, True, cache_config=INT8)
    assert isinstance(cache.layers[0], WindowedLayer)
    assert (near[:, 0] - expected[:, 0]).norm() < 0.01 * expected[:, 0].norm()


class TestChunks:
    """Prompts of evicting caches are read in chunks, unless some of their tokens see later ones."""

    EVICTING: ClassVar[dict[str, Any]] = {
        "backend": "knorm",
        "budget": 40,
        "chunk_size": 24,
        "sink_length": 2,
    }

    def run(
        self,
        given: Subject,
        cache_config: dict[str, Any],
        prompt: dict[str, Tensor] | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> tuple[list[int], Tensor, Any]:
        """Tokens of every call that reads the prompt, all logits, and the cache."""
        counts = []
        decoder = type(given.model.get_decoder())
        forward = decoder.forward

        @functools.wraps(forward)
        def counted(model: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
            counts.append((kwargs["inputs_embeds"] if input_ids is None else input_ids).shape[1])
            return forward(model, input_ids, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "forward", counted)
            _, logits, cache = generate(given, cache_config, prompt)
        return counts[: -NEW + 1], logits, cache

    @pytest.mark.parametrize("name", sorted(set(NAMES) - {"git"}))
    def test_prompts_with_images(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first token comes before anything is evicted, so it is that of the whole prompt."""
        given, evicting = subject(name), {**self.EVICTING, "budget": LENGTH - 1}
        is_split = SPLITS_IMAGES and name not in READ_WHOLE
        counts, logits, cache = self.run(given, evicting, None, monkeypatch)
        assert counts == ([24, 24, 12] if is_split else [LENGTH])
        assert (cache.report().whole_prompt_reason is None) == is_split
        assert ("prompt read whole" in str(cache.report())) != is_split
        torch.testing.assert_close(logits[:, 0], generate(given)[1][:, 0], atol=1e-4, rtol=1e-4)

    def test_a_long_prompt_that_the_model_would_read_without_its_cache_is_refused(self) -> None:
        given = phi4_multimodal(switch=32)
        with pytest.raises(ValueError, match=r"more than 32 tokens.* of 60 cannot.*audio_input_features"):
            generate(given, NEVER_PACKED)
        _, logits, cache = generate(given, NEVER_PACKED, given.text_alone())
        assert isinstance(cache, KVCache)
        torch.testing.assert_close(logits, generate(given, None, given.text_alone())[1], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", ["qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
    def test_text_that_is_numbered_by_time_row_and_column(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given, evicting = subject(name), {**self.EVICTING, "budget": LENGTH - 1}
        text = given.text_alone()
        counts, logits, cache = self.run(given, evicting, text, monkeypatch)
        assert counts == ([24, 24, 12] if SPLITS_POSITIONS else [LENGTH])
        assert (cache.report().whole_prompt_reason is None) == SPLITS_POSITIONS
        torch.testing.assert_close(logits[:, 0], generate(given, None, text)[1][:, 0], atol=1e-4, rtol=1e-4)

    def test_text_alone_is_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given = subject("gemma3")
        prompt = given.text_alone()
        assert self.run(given, self.EVICTING, prompt, monkeypatch)[0] == [24, 24, 12]
        prompt["token_type_ids"] = torch.zeros_like(prompt["input_ids"])
        assert self.run(given, self.EVICTING, prompt, monkeypatch)[0] == [24, 24, 12]


class TestCompactPositions:
    COMPACT: ClassVar[dict[str, Any]] = {"backend": "streaming_llm", "budget": 500, "positions": "compact"}

    @pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
    def test_images_numbered_by_row_and_column_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"positions='compact'.*time, row and column.*'absolute'"):
            generate(subject(name), self.COMPACT)

    @pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
    def test_their_text_alone_is_not(self, name: str) -> None:
        given = subject(name)
        _, expected, _ = generate(given, None, given.text_alone())
        _, logits, _ = generate(given, self.COMPACT, given.text_alone())
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(
        "name", ["granite4_vision", "llava", "mistral3", "mllama", "qwen2_5_omni_thinker"]
    )
    def test_images_numbered_as_text_are_not(self, name: str) -> None:
        _, logits, _ = generate(subject(name), self.COMPACT)
        torch.testing.assert_close(logits, generate(subject(name))[1], atol=1e-4, rtol=1e-4)


class TestSurprise:
    """SirLLM scores tokens, which the decoder of such a model is not given."""

    @pytest.mark.parametrize("name", ["gemma3", "llava", "mllama", "qwen2_vl"])
    def test_text_is_scored(self, name: str) -> None:
        given = subject(name)
        tokens = given.text_alone()["input_ids"][:1]
        cache = kvp.build_cache(given.model, {"backend": "sirllm", "budget": 100, "chunk_size": None})
        with torch.no_grad():
            logits = given.model(input_ids=tokens, **as_argument(cache)).logits
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
        scores = cache.packed_layers[-1].ledger.scores  # type: ignore[attr-defined]
        torch.testing.assert_close(scores[0, 0, 1:], expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", ["llava", "git"])
    def test_tokens_of_a_call_are_not_those_of_the_next(self, name: str) -> None:
        """Whether the decoder was given them (GIT) or not: it is now called by itself, with embeddings."""
        given = subject(name)
        tokens = given.text_alone()["input_ids"][:1]
        cache = kvp.build_cache(given.model, {"backend": "sirllm", "budget": 100, "chunk_size": None})
        with torch.no_grad():
            given.model(input_ids=tokens, **as_argument(cache))
            embedded = given.model.get_input_embeddings()(tokens)
            with pytest.raises(UnsupportedOperationError, match=r"needs `input_ids`"):
                given.model.get_decoder()(inputs_embeds=embedded, **as_argument(cache))

    @pytest.mark.parametrize("backend", ["kvzip", "sirllm"])
    @pytest.mark.parametrize(
        "name", ["git", "kosmos-2", "llava", "phi4_multimodal", "qwen2_audio", "video_llama_3"]
    )
    @pytest.mark.parametrize("budget", [40, 600])
    def test_images_and_sounds_are_refused(self, name: str, backend: str, budget: int) -> None:
        """Also of models whose configuration names no token for them (GIT, Kosmos-2)."""
        with pytest.raises(
            UnsupportedOperationError, match=rf"'{backend}'.*images or sounds.*Allowed is text"
        ):
            generate(subject(name), {"backend": backend, "budget": budget})

    @pytest.mark.parametrize("backend", ["kvzip", "sirllm"])
    def test_an_image_in_layers_of_cross_attention_is_beside_the_text(self, backend: str) -> None:
        given = subject("mllama")
        prompt = {**given.prompt, "input_ids": given.text_alone()["input_ids"]}
        _, expected, _ = generate(given, None, prompt)
        _, logits, cache = generate(given, {"backend": backend, "budget": 500}, prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert cache.layers[1].get_seq_length() == IMAGE_TOKENS

    @pytest.mark.parametrize("name", ["gemma3", "llava", "mllama", "qwen2_vl"])
    def test_text_is_repeated(self, name: str) -> None:
        """As before, of a model whose decoder is given embeddings; what it reads next is not disturbed."""
        given, logits = subject(name), []
        text = given.text_alone()
        for backend in ("kvzip", "knorm"):
            config = {"backend": backend, "budget": LENGTH - 1, "chunk_size": 16, "sink_length": 2}
            _, found, cache = generate(given, config, text)
            logits.append(found[:, 0])
            assert isinstance(cache, EvictingCache)
            for layer in cache.evicting_layers:
                assert layer.ledger.scores[:, :, 2:-NEW].count_nonzero() > 0
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


class TestCrossAttention:
    """Layers of Mllama that hold an image, among those of its text."""

    def cache(self, cache_config: dict[str, Any], **options: Any) -> Any:
        return generate(subject("mllama"), cache_config, **options)[2]

    def test_it_is_packed_and_counts_as_no_text(self) -> None:
        cache = self.cache(INT8)
        layer = cache.layers[1]
        assert isinstance(layer, CrossAttentionLayer)
        assert layer.stored_keys.packed_length == layer.get_seq_length() == IMAGE_TOKENS
        report = cache.report()
        assert report.tokens_seen == report.tokens_held == LENGTH + NEW - 1
        assert report.fallback_reads == 0

    def test_more_tokens_than_the_text_has_are_not_reported_as_text(self) -> None:
        cache = kvp.build_cache(subject("mllama").model, INT8)
        cache.update(torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16), 1)
        assert (cache.report().tokens_seen, cache.report().tokens_held) == (0, 0)

    def test_the_padding_of_the_text_is_not_the_images(self) -> None:
        """Both rows are shown the same image, and one has pads."""
        given = subject("mllama")
        image = given.prompt["pixel_values"][:1].expand(2, -1, -1, -1, -1, -1)
        _, _, cache = generate(given, INT8, {**given.prompt, "pixel_values": image})
        layer = cache.layers[1]
        first, padded = layer.keys.dense()
        assert torch.equal(first, padded)
        assert padded.abs().amax(dim=(0, 2)).min() > 0

    @pytest.mark.parametrize("kernel", ["auto", "torch"])
    @pytest.mark.parametrize(
        "cache_config",
        [INT8, {"backend": "kivi", "q_group_size": 16, "residual_length": 0}],
        ids=["int8", "kivi"],
    )
    def test_what_is_read_is_the_images_own(self, cache_config: dict[str, Any], kernel: str) -> None:
        """A cache whose images are exact differs by their rounding only; one without them differs by far."""
        given = subject("mllama")
        _, packed, _ = generate(given, {**cache_config, "kernel": kernel})
        _, exact, _ = generate(given, {**cache_config, "kernel": kernel, "skip_layers": [1]})
        _, blind, _ = generate(given, {**cache_config, "kernel": kernel}, given.text_alone())
        assert 0 < (packed[:, 1] - exact[:, 1]).norm() < 0.2 * (blind[:, 1] - exact[:, 1]).norm()

    def test_crops_and_recording_leave_it_alone(self) -> None:
        """Prompt lookup takes tokens back, which are never those of an image."""
        tokens, _, cache = generate(subject("mllama"), INT8, prompt_lookup_num_tokens=3)
        alone = {key: value[:1] for key, value in subject("mllama").prompt.items()}
        greedy, _, _ = generate(subject("mllama"), INT8, alone)
        assert tokens.tolist() == greedy.tolist()
        assert cache.layers[1].get_seq_length() == IMAGE_TOKENS

    def test_it_records_no_past_to_take_back(self) -> None:
        cache = kvp.build_cache(subject("mllama").model, INT8)
        cache.activate_past_recording()
        cache.update(torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16), 1)
        assert cache.layers[1].stored_keys.packed_length == 300

    def test_its_keys_are_not_rotated(self) -> None:
        text, image, _ = kvp.build_cache(subject("mllama").model, INT8).layers
        assert text.facts.rotary is not None
        assert image.facts.rotary is None

    def test_it_reads_nothing_of_a_text(self) -> None:
        cache = generate(subject("mllama"), INT8, subject("mllama").text_alone())[2]
        tokens = cache.get_seq_length() + 1
        assert packed_shares(cache, 1) == pytest.approx([(tokens - 1) / tokens])

    def test_its_verbs(self) -> None:
        layer = self.cache(INT8).layers[1]
        keys = layer.keys.dense()
        layer.batch_repeat_interleave(2)
        layer.reorder_cache(torch.tensor([3, 0, 1, 2]))
        torch.testing.assert_close(layer.keys.dense(), keys[[1, 0, 0, 1]], atol=0, rtol=0)
        layer.offload()
        layer.reset()
        assert not layer.is_initialized
        assert layer.keys is None and layer.values is None

    def test_room_is_made_for_its_images_and_no_more(self) -> None:
        layer = self.cache({"backend": "int8"}).layers[1]
        text = self.cache({"backend": "int8"}).layers[0]
        assert layer.final_length == IMAGE_TOKENS
        assert layer.kv_bytes <= text.kv_bytes

    def test_it_is_saved_and_loaded(self, tmp_path: Path) -> None:
        model = subject("mllama").model
        cache = self.cache(INT8)
        cache.save_pretrained(tmp_path)
        loaded = KVCache.from_pretrained(tmp_path, model)
        for name, tensor in cache.layers[1].state()[0].items():
            assert torch.equal(loaded.layers[1].state()[0][name], tensor)
        assert loaded.layers[1].get_seq_length() == IMAGE_TOKENS

    def test_a_text_without_images_leaves_it_empty(self) -> None:
        given = subject("mllama")
        prompt = given.text_alone()
        _, expected, _ = generate(given, None, prompt)
        _, near, cache = generate(given, INT8, prompt)
        assert not cache.layers[1].is_initialized
        assert (near[:, 1] - expected[:, 1]).norm() < 0.05 * expected[:, 1].norm()
        tokens = LENGTH + NEW - 1
        pads = cache.layers[0].padding.lengths.nbytes * len(cache.packed_layers)
        estimated = kvp.estimate(given.model, INT8, tokens, 2, max_cache_length=tokens)
        assert cache.kv_bytes() - pads <= estimated <= cache.kv_bytes()

    def test_nothing_of_it_is_evicted(self) -> None:
        evicting = {"backend": "knorm", "budget": 12, "chunk_size": 8, "sink_length": 2}
        cache = self.cache(evicting)
        assert cache.report().dense_layers == {1: "cross_attention: what it holds of images is not evicted"}
        assert cache.layers[1].get_seq_length() == IMAGE_TOKENS
        cache = self.cache({**evicting, "storage": {"backend": "int8"}})
        assert isinstance(cache.layers[1], CrossAttentionLayer)
        assert cache.layers[1].held_length == IMAGE_TOKENS

    def test_a_calibration_knows_text_only(self, tmp_path: Path) -> None:
        largest = {index: torch.ones(2) for index in (0, 2)}
        save_scales(tmp_path, Scales(largest, largest))
        config = subject("mllama").model.config
        cache = kvp.build_cache(config, {**INT8, "calibration": str(tmp_path)})
        reason = "cross_attention: a calibration knows keys and values of text only"
        assert cache.report().dense_layers == {1: reason}
        assert sorted(calibrated_layers(subject("mllama").model)) == [0, 2]
        learnt_from_itself = {"backend": "kvquant", "calibration": "normal_float"}
        assert kvp.build_cache(config, learnt_from_itself).report().dense_layers == {}

    def test_bits_are_chosen_for_text_only(self) -> None:
        candidates = candidates_of(subject("mllama").model, {"backend": "kivi", "q_group_size": 16}, [2, 4])
        assert {candidate.layer_idx for candidate in candidates} == {0, 2}


def test_an_evicting_cache_masks_for_models_that_do_not_ask_what_it_holds() -> None:
    """Kosmos-2 makes masks for every token seen. A dense cache, with what is gone hidden, reads the same."""
    given = subject("kosmos-2")
    streaming = {"backend": "streaming_llm", "budget": 40, "sink_length": 4}
    tokens, logits, cache = generate(given, streaming)  # of a row without pads alone, transformers drops it
    assert cache.num_held() == 40 + NEW - 1

    row = {key: value[:1] for key, value in given.prompt.items()}
    with torch.no_grad():
        past = cache_of(given.model(**row, use_cache=True))
        mask = torch.ones(1, LENGTH + 1, dtype=torch.long)
        mask[:, 4:-37] = 0  # the first of 4 and the last of 36, and the new one
        step = given.model.text_model(tokens[:1, :1], attention_mask=mask, **as_argument(past))
    torch.testing.assert_close(logits[:1, 1], step.logits[:, -1], atol=1e-4, rtol=1e-4)


def test_a_decoder_that_hands_out_no_states_is_named(recwarn: pytest.WarningsRecorder) -> None:
    model = subject("kosmos-2").model.text_model
    cache = kvp.build_cache(model, {"backend": "sirllm", "budget": 40})
    with pytest.raises(
        UnsupportedOperationError, match="Kosmos2TextForCausalLM, which does not hand them out"
    ):
        model(torch.arange(20, 60)[None], **as_argument(cache))
    assert not any("silenced" in str(warning.message) for warning in recwarn)  # one error is enough


def test_a_cache_of_two_parts_is_refused() -> None:
    """BLIP puts images beside the text in transformers' own cache, and among the text in any other."""
    given = blip()
    with pytest.raises(ValueError, match="of images among those of text"):
        generate(given, INT8)
    with pytest.raises(ValueError, match="of images among those of text"):
        kvp.build_cache(given.model, INT8)
