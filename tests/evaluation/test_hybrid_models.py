"""Evaluations of models that have recurrent layers, or windows, beside full attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from kvcache_plugins.evaluation.caches import new_cache, prefill, split_available
from kvcache_plugins.evaluation.perplexity.scoring import Schedule, predictions, score_window
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing.models import tiny_model
from tests.models.families import small_model

LENGTH, PREFILL = 60, 24
INT8 = {"backend": "int8"}


@lru_cache(maxsize=4)
def model(family: str) -> Any:
    return small_model("jamba") if family == "jamba" else tiny_model(family, num_hidden_layers=4)


def window() -> torch.Tensor:
    return torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba"])
@torch.inference_mode()
def test_a_block_is_never_more_than_a_recurrent_layer_can_take(family: str, approximate: bool) -> None:
    """Jamba begins anew in a call of several tokens, which moves the mean by 0.2 nats."""
    schedule = Schedule(PREFILL, 12, approximate)
    record, reference = score_window(model(family), window(), {"backend": "dense"}, schedule)
    logits = model(family)(window(), use_cache=False).logits[0, PREFILL - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, window()[0, PREFILL:])
    assert record["nll"] / record["tokens"] == pytest.approx(float(expected), abs=1e-5)
    assert record["is_exact"] and record["packed_read"] == 0
    packed, _ = score_window(model(family), window(), INT8, schedule, reference)
    assert 1e-6 < abs(packed["increase"]) / packed["tokens"] < 0.1


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_shares_are_of_the_layers_that_have_tokens(family: str) -> None:
    found = predictions(model(family), window(), new_cache(model(family), INT8), Schedule(PREFILL))
    expected = [0.0] + [held / (held + 1) for held in range(PREFILL, LENGTH - 1)]
    assert [prediction.packed_shares[0] for prediction in found] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
@torch.inference_mode()
def test_a_prompt_is_read_as_generate_reads_it(family: str) -> None:
    """In chunks, but for the families of which that would make something else."""
    ids, options = window(), {"backend": "knorm", "budget": 24, "chunk_size": 12}
    cache = new_cache(model(family), options)
    first = prefill(model(family), ids, cache, LENGTH + 1, logits_to_keep=1).logits[:, -1]
    output = model(family).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        cache_implementation="quantized",
        cache_config=options,
        do_sample=False,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(first, output.logits[0])
    assert cache.report().tokens_held == cache_of(output).report().tokens_held < LENGTH


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "falcon_h1"])
def test_what_transformers_has_for_full_attention_alone_is_left_out(family: str) -> None:
    pytest.importorskip("optimum.quanto")
    dense, quanto = {"backend": "dense"}, {"backend": "quanto", "nbits": 4}
    reason = "transformers has it for models of full attention layers alone"
    found = split_available(model(family).config, [dense, quanto, INT8])
    assert found == ([dense, INT8], [{"cache_config": quanto, "reason": reason}])
    with pytest.raises(ValueError, match="nbits"):
        split_available(model(family).config, [INT8 | {"nbits": 3}])
