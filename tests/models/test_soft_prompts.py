"""Models that put tokens of their own before a prompt, as PEFT's prompt tuning does, unknown to the mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument, cache_of, given_cache
from kvcache_plugins.testing import tiny_model

LENGTH, SOFT, NEW = 90, 20, 12
PADS = 33


class SoftPrompt:
    """Speaks for a model in `generate()`: the first call gets embeddings before those of the prompt."""

    def __init__(self, model: Any, kind: str = "PROMPT_TUNING") -> None:
        self.active_peft_config = SimpleNamespace(
            is_prompt_learning=True, peft_type=SimpleNamespace(value=kind)
        )
        self.model, self.original = model, model.prepare_inputs_for_generation
        generator = torch.Generator().manual_seed(3)
        self.embeddings = torch.randn(1, SOFT, model.config.hidden_size, generator=generator)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = self.original(*args, **kwargs)
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if mask is not None:
            inputs["attention_mask"] = torch.cat((mask.new_ones(len(mask), SOFT), mask), dim=1)
        inputs["position_ids"] = None
        if given_cache(inputs).get_seq_length() >= ids.shape[1]:
            inputs["input_ids"] = ids[:, -1:]  # whatever the chunk is
        else:
            words = self.model.get_input_embeddings()(ids)
            inputs["input_ids"] = None
            inputs["inputs_embeds"] = torch.cat((self.embeddings.expand(len(ids), -1, -1), words), dim=1)
        return inputs


def inputs_of(pads: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 120, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :pads], mask[1, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = tiny_model("llama")
    monkeypatch.setattr(made, "prepare_inputs_for_generation", SoftPrompt(made).prepare_inputs_for_generation)
    return made


def logits(model: Any, pads: int, cache_config: dict[str, Any] | None = None) -> tuple[Tensor, Any]:
    cache = (
        {} if cache_config is None else {"cache_implementation": "quantized", "cache_config": cache_config}
    )
    output = model.generate(
        **inputs_of(pads),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **cache,
    )
    return torch.stack(output.logits, dim=1), cache_of(output)


@pytest.mark.parametrize("pads", [0, PADS])
@pytest.mark.parametrize(
    "cache_config",
    [
        {"backend": "int8"},
        {"backend": "kivi", "nbits": 8, "residual_length": 32},
        {"backend": "int8", "kernel": "torch"},
    ],
    ids=["int8", "kivi", "int8-torch"],
)
def test_all_tokens_count(model: Any, cache_config: dict[str, Any], pads: int) -> None:
    # Pads are somewhere behind the soft prompt. Taken for the first slots, 20 of the 33 would hide all of it.
    ours, cache = logits(model, pads, cache_config)
    dense, _ = logits(model, pads)
    assert cache.get_seq_length() == SOFT + LENGTH + NEW - 1
    # Up to the first token that differs, both have read the same.
    read = 1 + int((ours.argmax(-1) == dense.argmax(-1)).all(0).long().cumprod(0).sum())
    error = (ours - dense)[:, :read].norm(dim=-1) / dense[:, :read].norm(dim=-1)
    assert read > 2
    assert error.max() < 0.06


def test_an_evicting_cache_reads_the_prompt_whole(model: Any) -> None:
    options = {"backend": "streaming_llm", "budget": 60, "chunk_size": 16, "kernel": "torch"}  # bit by bit
    ours, cache = logits(model, 0, options)
    assert torch.equal(ours[:, 0], logits(model, 0)[0][:, 0])
    assert cache.report().tokens_held == 60 + NEW - 1
    ours, _ = logits(model, 0, {"backend": "streaming_llm", "budget": 4096, "chunk_size": 16})
    torch.testing.assert_close(ours, logits(model, 0)[0], atol=1e-5, rtol=1e-5)


def test_a_turn_shorter_than_the_soft_prompt_is_refused(model: Any) -> None:
    # the cache has seen more tokens than the mask has columns, and PEFT would read the last of the new alone
    cache = kvp.build_cache(model, {"backend": "int8"})
    first = model.generate(**inputs_of(0), **as_argument(cache), max_new_tokens=NEW)
    turn = torch.cat([first, first[:, :5]], dim=1)
    with pytest.raises(ValueError, match=r"has 107 tokens, and its cache has seen 121 before"):
        model.generate(turn, attention_mask=torch.ones_like(turn), **as_argument(cache), max_new_tokens=NEW)


def test_an_evicting_cache_must_know_the_pads(model: Any) -> None:
    with pytest.raises(
        kvp.UnsupportedOperationError, match=r"110 tokens .* 90 columns.* prompts without padding"
    ):
        logits(model, PADS, {"backend": "streaming_llm", "budget": 60})


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "CARTRIDGE"])
def test_a_prefix_that_is_a_cache_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = tiny_model("llama")
    owner = SoftPrompt(model, kind)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", owner.prepare_inputs_for_generation)
    with pytest.raises(ValueError, match=rf"PEFT's {kind} .*backend='int8' would be ignored.*PROMPT_TUNING"):
        logits(model, 0, {"backend": "int8"})
    cache = kvp.build_cache(model, {"backend": "int8"})
    with pytest.raises(ValueError, match=rf"PEFT's {kind} .*a cache of the backend 'int8' would be"):
        model.generate(**inputs_of(0), **as_argument(cache), max_new_tokens=NEW)
