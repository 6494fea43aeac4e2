"""Models cut short, for good or while they draft by their first layers, which list the types of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcache_plugins as kvp
from kvcache_plugins import assistant_calls
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing import tiny_model

DRAFTING = "Passing `generation_config` together with"
"""What transformers says to itself."""
INT8 = {"cache_implementation": "quantized", "cache_config": {"backend": "int8"}}


def generated(model: Any, **options: Any) -> Any:
    ids = torch.randint(3, 100, (1, 50), generator=torch.Generator().manual_seed(5))
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.allow_deprecation(DRAFTING)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_drafts_by_its_first_layers(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=4)
    expected = generated(model, **INT8).sequences
    output = generated(model, assistant_early_exit=2, **INT8)
    assert torch.equal(output.sequences, expected)
    assert len(cache_of(output).layers) == model.config.num_hidden_layers == 4


@pytest.mark.allow_deprecation(DRAFTING)
def test_a_failure_while_drafting_leaves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers puts the number of layers back only if nothing is raised meanwhile."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no such layer")

    model = tiny_model("qwen2", num_hidden_layers=4)
    try:
        generated(model, assistant_early_exit=2)
    except TypeError:
        pytest.skip("this transformers has no dense caches of fewer layers than a model to draft with")
    expected = generated(model, **INT8).sequences
    check, calls = assistant_calls.check_request, []

    def checked(called: Any, generation_config: Any, model_kwargs: Any) -> None:
        calls.append(called.config.num_hidden_layers)
        if calls[-1] == 2:
            fail()
        check(called, generation_config, model_kwargs)

    monkeypatch.setattr(assistant_calls, "check_request", checked)
    with pytest.warns(UserWarning, match="drafts with a dense cache.*RuntimeError: no such layer"):
        output = generated(model, assistant_early_exit=2, **INT8)
    assert 2 in calls and model.config.num_hidden_layers == 4
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_model_without_its_last_layers(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=4)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    cache = cache_of(generated(model, **INT8))
    assert len(cache.layers) == 2
    assert kvp.estimate(model, {"backend": "int8"}, 50, new_tokens=20) == cache.kv_bytes()
