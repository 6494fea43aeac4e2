"""Models whose last layers attend to the keys of earlier ones, and are asked for the last logits only.

For those they give these layers no other queries (Gemma 4), and no mask where they would be given none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import assert_close
from tests.models.families import NAMES, small_model

pytestmark = pytest.mark.skipif("gemma4_text" not in NAMES, reason="transformers does not know it")
OWN = "kvcache_plugins"
CACHES: dict[str, Any] = {
    "none": None,
    "dense": {"backend": "dense"},
    "exact": {"backend": "int4", "residual_length": 512},
    "int4": {"backend": "int4", "residual_length": 8},
    "streaming_llm": {"backend": "streaming_llm", "budget": 500},
}


@pytest.fixture
def model() -> PreTrainedModel:
    return small_model(
        "gemma4_text",
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_hidden_layers=6,
        num_kv_shared_layers=4,
        sliding_window=16,
    )


def cache_argument(model: PreTrainedModel, name: str) -> dict[str, Any]:
    config = CACHES[name]
    if config is None:
        return {"use_cache": False}
    return {} if name == "dense" else as_argument(kvp.build_cache(model, config))


@pytest.mark.parametrize("length", [12, 60], ids=["within the window", "beyond it"])
@pytest.mark.parametrize("name", CACHES)
def test_the_last_logits_are_those_of_all(model: PreTrainedModel, name: str, length: int) -> None:
    ids = torch.randint(20, 100, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits[:, -5:]
        model.set_attn_implementation(OWN)
        for count in (5, 1):
            got = model(ids, logits_to_keep=count, **cache_argument(model, name)).logits
            assert_close(f"{count} logits", expected[:, -count:], got, 1e-4)


@pytest.mark.parametrize("name", ["dense", "exact"])
def test_drafts_of_the_prompt_change_nothing(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(OWN)
    config: Any = {} if name == "dense" else {
        "cache_implementation": "quantized", "cache_config": CACHES[name]
    }  # fmt: skip
    for seed in range(6):
        ids = torch.randint(20, 40, (1, 12), generator=torch.Generator().manual_seed(seed)).repeat(1, 5)
        call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, **config}
        call |= {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
        drafted = model.generate(ids, prompt_lookup_num_tokens=4, **call)
        assert drafted.tolist() == model.generate(ids, **call).tolist()
