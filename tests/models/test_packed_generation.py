"""`generate()` in all its modes with caches that really pack, on six families that differ in what they cache.

Llama and Qwen2 (with key biases) are the plain cases, Gemma-2 has a softcap and sliding layers, GPT-NeoX
partial rotary embeddings and no grouped queries, DeepSeek-V3 caches latents, gpt-oss has sink logits and
sliding layers. Prompts and generations are long enough to cross every residual boundary, and the 64-token
storage blocks, at least twice.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvcache_plugins
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.generation import SCENARIOS, padded_prompt, run_scenario
from kvcache_plugins.testing.models import tiny_model

# Heads of 32 channels, so that a quantization group of 32 fits.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"kv_lora_rank": 32, "qk_rope_head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gpt_neox": {"hidden_size": 128},
    "gpt_oss": {"head_dim": 32},
    "llama": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "kivi": {"backend": "kivi", "nbits": 4, "residual_length": 32, "q_group_size": 32},
    "int8": {"backend": "int8"},
    "int4": {"backend": "int4", "residual_length": 16},
    "float8": {"backend": "float8"},
}
# Their scales belong to one token, so what one row stores cannot depend on the other rows or on padding.
PER_TOKEN = ("int8", "int4", "float8")

LENGTHS = (77, 61)
NEW_TOKENS = 70


@functools.cache
def _model(architecture: str) -> PreTrainedModel:
    return tiny_model(architecture, **ARCHITECTURES[architecture])


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return _model(request.param)


@functools.cache
def _generated(model: PreTrainedModel, backend: str, scenario: str) -> torch.Tensor:
    """Tokens, once for all tests of a process; nothing may change them."""
    return run_scenario(
        model, scenario, cache_config=BACKENDS[backend], lengths=LENGTHS, max_new_tokens=NEW_TOKENS
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_mode_runs(model: PreTrainedModel, backend: str, scenario: str) -> None:
    output = _generated(model, backend, scenario)
    lengths = LENGTHS[:1] if scenario == "prompt_lookup" else LENGTHS
    prompt = padded_prompt(lengths)["input_ids"]
    copies = SCENARIOS[scenario].get("num_return_sequences", 1)
    turns = NEW_TOKENS + 5 + NEW_TOKENS if scenario == "second_turn" else NEW_TOKENS
    assert output.shape == (len(lengths) * copies, LENGTHS[0] + turns)
    assert torch.equal(output[:, : LENGTHS[0]], prompt.repeat_interleave(copies, dim=0))
    # A cache that returned NaN or zeros would leave a constant token behind.
    assert len(set(output[0, LENGTHS[0] :].tolist())) > 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cache_really_packs(model: PreTrainedModel, backend: str) -> None:
    cache = kvcache_plugins.build_cache(model, BACKENDS[backend])
    dense = DynamicCache(config=model.config)
    inputs = padded_prompt(LENGTHS)
    with torch.no_grad():
        for past in (cache, dense):
            model(**inputs, **as_argument(past))
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        token = torch.full((2, 1), 7)
        packed, exact = (
            model(token, attention_mask=mask, **as_argument(past)).logits for past in (cache, dense)
        )
    error = (packed - exact).norm() / exact.norm()
    # Low-bit storage that changes nothing was never read. These random networks amplify rounding (at 4 bits
    # up to 0.8 in this measure); reading something else than what was stored gives about 1.4, the distance of
    # two unrelated outputs.
    assert 0 < error < (1.0 if backend in ("kivi", "int4") else 0.2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_beams_keep_the_history_they_were_scored_with(model: PreTrainedModel, backend: str) -> None:
    # Feeding a returned beam token by token to a fresh cache gives its score again only if the packed data
    # followed every reorder.
    inputs = padded_prompt(LENGTHS[:1])
    output = model.generate(
        **inputs,
        cache_implementation="quantized",
        cache_config=dict(BACKENDS[backend]),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        num_beams=4,
        num_return_sequences=4,
        length_penalty=0.0,  # scores are plain sums of log-probabilities
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt, new = output.sequences.split([LENGTHS[0], NEW_TOKENS], dim=1)
    cache = kvcache_plugins.build_cache(model, BACKENDS[backend])
    scores = torch.zeros(4)
    step = prompt
    with torch.no_grad():
        for token in new.split(1, dim=1):
            logits = model(step, **as_argument(cache), logits_to_keep=1).logits[:, -1]
            scores += logits.log_softmax(-1).gather(1, token).squeeze(1)
            step = token
    assert len({tuple(row) for row in new.tolist()}) == 4
    torch.testing.assert_close(output.sequences_scores, scores, atol=2e-2, rtol=0)


@pytest.mark.parametrize("backend", PER_TOKEN)
def test_rows_of_a_padded_batch_equal_the_rows_alone(model: PreTrainedModel, backend: str) -> None:
    batch = _generated(model, backend, "greedy")
    inputs = padded_prompt(LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone = model.generate(
            input_ids=inputs["input_ids"][row : row + 1, -length:],
            cache_implementation="quantized",
            cache_config=dict(BACKENDS[backend]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        assert batch[row, -len(alone[0]) :].tolist() == alone[0].tolist()


def test_int8_starts_like_the_ordinary_cache() -> None:
    # A prompt on which the exact choices are clear: the two best logits differ by at least 0.14 (spread 2).
    run = functools.partial(
        run_scenario, _model("llama"), "greedy", lengths=LENGTHS, max_new_tokens=16, seed=38
    )
    exact, packed = run(), run(cache_config=BACKENDS["int8"])
    assert packed.tolist() == exact.tolist()
