"""SirLLM's scores are the surprise of the model's own logits, whatever a family does to them."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, LlamaModel, PreTrainedModel

import kvcache_plugins as kvp
from kvcache_plugins.backends import sirllm
from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.facts import masks_all_columns
from kvcache_plugins.models.logits import LogitRule, find_logit_rule
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import feed, ids, model_of
from tests.models.families import small_model
from tests.models.multimodal import subject
from tests.models.showing import TEXT, make

CONFIG = {"backend": "sirllm", "budget": 100, "chunk_size": None}
TOKENS = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, tuple[dict[str, Any], LogitRule]] = {
    "llama": ({}, LogitRule(128)),
    "cohere": ({"logit_scale": 0.25}, LogitRule(128, 0.25)),
    "falcon_h1": ({"lm_head_multiplier": 0.02}, LogitRule(128, 0.02)),
    "gemma2": ({"final_logit_softcapping": 3.0}, LogitRule(128, 1.0, 3.0)),
    "granite": ({"logits_scaling": 4.0}, LogitRule(128, 0.25)),
    "hyperclovax": ({"logits_scaling": 4.0}, LogitRule(128, 4.0)),  # a factor, which is a divisor of Granite
}


@functools.cache
def model_in(family: str, dtype: torch.dtype) -> PreTrainedModel:
    options, _ = FAMILIES[family]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {family}")
    if family != "hyperclovax":
        return tiny_model(family, dtype=dtype, **options)
    model = small_model(family).to(dtype)  # type: ignore[arg-type]
    model.config.update(options)
    return model


def new_cache(model: Any, **options: Any) -> Any:
    return kvp.build_cache(model, CONFIG | options)


def scores(cache: Any) -> Tensor:
    """Of all tokens but the first, which nothing predicts: `(B, T - 1)`."""
    found: Tensor = cache.evicting_layers[-1].ledger.scores[:, 0, 1:]
    return found


def surprise(logits: Tensor, tokens: Tensor = TOKENS) -> Tensor:
    log_p = logits.float()[:, :-1].log_softmax(-1)
    return -log_p.gather(2, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_surprise_of_the_models_own_logits(family: str) -> None:
    model = model_in(family, torch.float32)
    cache = new_cache(model)
    logits = feed(model, cache, TOKENS, [20, 1, 19])
    torch.testing.assert_close(scores(cache), surprise(logits), atol=1e-5, rtol=1e-5)
    assert cache.logit_rule == FAMILIES[family][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_hides_nothing(family: str) -> None:
    model = model_in(family, torch.bfloat16)
    cache = new_cache(model)
    feed(model, cache, TOKENS, [40])
    assert cache.logit_rule == FAMILIES[family][1]


# Between their decoder and the embeddings of their outputs is a layer, of the last two to another width.
@pytest.mark.parametrize("name", ["bert", "modernbert-decoder", "electra", "rembert"])
def test_a_family_that_does_something_else_is_refused(name: str) -> None:
    model = small_model(name)
    match = rf"logits of {type(model).__name__} \(model_type='{name}'\) are not what its"
    if masks_all_columns(model.config):  # RemBERT in older releases, which is refused before it is called
        match = "make their masks, in this release of transformers"
    with pytest.raises(ValueError, match=match):
        model(TOKENS, **as_argument(new_cache(model)))


def test_logits_that_a_model_overwrites_are_refused() -> None:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    pictures = {"embed_dim": 16, "num_embeddings": 32, "base_channels": 32, "latent_channels": 16}
    names = {"<image>": 125} | {f"IMGIMGA{chr(65 + i)}Z": 90 + i for i in range(26)}
    config = CONFIG_MAPPING["chameleon"](**text, vq_config=pictures, vocabulary_map=names)
    model = make(config)
    with pytest.raises(ValueError, match=r"logits of Chameleon.* are not what its head gives"):
        model(TOKENS, **as_argument(new_cache(model)))


def test_one_token_at_a_time_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def asking(*given: Any) -> LogitRule:
        asked.append(given[1].shape)
        return find_logit_rule(*given)

    monkeypatch.setattr(sirllm, "find_logit_rule", asking)
    model = model_of()
    cache = new_cache(model)
    logits = feed(model, cache, TOKENS, [1] * 5 + [2] + [1] * 33)
    assert len(asked) == 2
    torch.testing.assert_close(scores(cache), surprise(logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [0, 1, 7, torch.tensor([3, 20, 11]), torch.tensor([39])], ids=repr)
def test_whatever_logits_are_asked_for(kept: Any) -> None:
    model, plain, cache = model_of(), new_cache(model_of()), new_cache(model_of())
    with torch.no_grad():
        model(TOKENS, **as_argument(plain))
        model(TOKENS, **as_argument(cache), logits_to_keep=kept)
    assert torch.equal(scores(cache), scores(plain))


@torch.no_grad()
def test_arguments_by_position_and_outputs_as_tuples() -> None:
    model, plain, cache = model_of(), new_cache(model_of()), new_cache(model_of())
    model(TOKENS, **as_argument(plain))
    model(TOKENS, None, None, cache, return_dict=False)
    assert torch.equal(scores(cache), scores(plain))


def test_the_decoder_alone_makes_no_logits() -> None:
    model: Any = model_of()
    cache = new_cache(model)
    with pytest.raises(UnsupportedOperationError, match=r"needs logits, got a call of LlamaModel alone"):
        model.model(TOKENS, **as_argument(cache))


def test_what_a_call_that_failed_has_seen_is_forgotten(recwarn: pytest.WarningsRecorder) -> None:
    model: Any = subject("llava").model
    cache = new_cache(model)
    for each in (model_of(), model):  # which fail in their decoder, and before
        with pytest.raises(IndexError):
            each(input_ids=TOKENS[:, :3] + 10_000, **as_argument(cache))  # no such tokens
    embedded = model.get_input_embeddings()(TOKENS[:, :3])
    with pytest.raises(UnsupportedOperationError, match="needs `input_ids`"):
        model.get_decoder()(inputs_embeds=embedded, **as_argument(cache))
    assert not any("silenced" in str(warning.message) for warning in recwarn)  # one error is enough


def test_images_are_refused_before_they_are_read() -> None:
    given = subject("llava")
    cache = new_cache(given.model)
    with pytest.raises(UnsupportedOperationError, match="Allowed is text"):
        given.model(**given.prompt, **as_argument(cache))
    assert cache.get_seq_length() == 0


def test_a_decoder_that_puts_states_before_those_of_its_tokens_is_named() -> None:
    class Prepending(LlamaModel):
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            embedded = self.embed_tokens(input_ids)
            return super().forward(inputs_embeds=torch.cat([embedded[:, :1], embedded], dim=1), **kwargs)

    model: Any = tiny_model("llama")
    made = Prepending(model.config)
    made.load_state_dict(model.model.state_dict())
    model.model = made.eval()
    with pytest.raises(
        UnsupportedOperationError,
        match=r"needs one state for each token, got 21 for 20 tokens from a Prepend",
    ):
        model(input_ids=TOKENS[:, :20], **as_argument(new_cache(model)))


def test_threads_do_not_see_each_other() -> None:
    model: Any = subject("llava").model
    words = TOKENS.clamp_min(20)  # below are those that stand for images
    texts, caches = [words[:1], words[1:]], [new_cache(model) for _ in range(2)]
    both = threading.Barrier(2)

    def meet(*_: Any) -> None:
        both.wait(20)

    handle = model.get_decoder().register_forward_pre_hook(meet)

    def read(index: int) -> None:
        with torch.no_grad():
            model(input_ids=texts[index], **as_argument(caches[index]))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    for text, cache in zip(texts, caches, strict=True):
        alone = new_cache(model)
        with torch.no_grad():
            logits = model(input_ids=text, **as_argument(alone)).logits
        torch.testing.assert_close(scores(alone), surprise(logits, text), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores(cache), scores(alone), atol=1e-5, rtol=1e-5)


def test_a_model_in_which_nothing_is_evicted() -> None:
    model = tiny_model("mistral", sliding_window=16)
    with pytest.warns(UserWarning, match="packs none of the 2 layers"):
        cache = new_cache(model, budget=8)
    logits = feed(model, cache, TOKENS, [20, 1, 19])
    with torch.no_grad():
        torch.testing.assert_close(logits, model(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_a_cache_for_the_decoder_alone_leaves_calls_of_the_whole_model_alone() -> None:
    model = tiny_model("llama")
    tokens = ids(70) % 120 + 3
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    asked = {
        backend: {"cache_implementation": "quantized", "cache_config": {"backend": backend, "budget": 24}}
        for backend in ("sirllm", "kvzip")
    }
    expected = {name: model.generate(tokens, **settings, **cache) for name, cache in asked.items()}
    again = tiny_model("llama")
    cache: Any = kvp.build_cache(again.model, asked["kvzip"]["cache_config"])
    again.model(tokens, **as_argument(cache))
    assert cache.num_held() == 24
    for name, config in asked.items():
        assert torch.equal(again.generate(tokens, **settings, **config), expected[name])
    whole = kvp.build_cache(again, asked["sirllm"]["cache_config"])
    with pytest.raises(UnsupportedOperationError, match="a call of LlamaModel alone"):
        again.model(tokens, **as_argument(whole))


@pytest.mark.parametrize("backend", ["sirllm", "kvzip"])
def test_copies_of_an_interrupted_cache_take_no_model_along(backend: str) -> None:
    model = tiny_model("llama")
    cache: Any = kvp.build_cache(model, {"backend": backend, "budget": 24})
    hook = model.lm_head.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(TOKENS, **as_argument(cache))
    hook.remove()
    assert cache._call.model is model
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied._call is None


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt
