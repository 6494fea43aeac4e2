"""A cache in which nothing is ever packed gives the tokens of `DynamicCache`, however `generate()` drives it.

Every family of the zoo, every scenario of `kvcache_plugins.testing.generation`, fp32, a left-padded batch.
What is compared is therefore the plumbing (masks, lengths, reordering, cropping, hybrid layers, dispatch),
not the quantization.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import kvcache_plugins  # noqa: F401  (the import installs the dispatch)
from kvcache_plugins.testing.generation import SCENARIOS, run_scenario
from kvcache_plugins.testing.models import ARCHITECTURES, tiny_model

# The second turn ends in slot 66: the first room of a tail, 64 slots, is outgrown.
SIZES: dict[str, Any] = {"lengths": (37, 29), "max_new_tokens": 12}
# Drafts are seldom taken: `run_scenario`'s own 24 tokens.
SCENARIO_SIZES: dict[str, dict[str, Any]] = dict.fromkeys(SCENARIOS, SIZES) | {"prompt_lookup": {}}
# Longer than any text here.
NEVER_PACKED: dict[str, Any] = {"backend": "kivi", "residual_length": 4096}


class DenseFailure(NamedTuple):
    """What Transformers itself cannot do; `None` means any."""

    architectures: tuple[str, ...]
    implementation: str | None
    scenario: str | None
    reason: str


# A row permits a skip only where `DynamicCache` raises: a Transformers version in which it works is tested.
DENSE_FAILURES = (
    DenseFailure(
        ("bloom", "codegen", "gptj", "mpt"), "sdpa", None, "the family's attention has no sdpa variant"
    ),
    DenseFailure(("gpt_oss",), "sdpa", None, "sdpa cannot take the family's sink logits"),
    DenseFailure(
        ("gemma2",), "sdpa", None, "newer Transformers refuse sdpa, which cannot take the family's softcap"
    ),
    DenseFailure(
        ("falcon_h1", "qwen3_next"),
        None,
        "prompt_lookup",
        "assisted generation refuses models with a recurrent state",
    ),
)


def _known_failure(architecture: str, implementation: str, scenario: str | None) -> str | None:
    """Returns the reason if a row covers the combination; `scenario=None` asks about building the model."""
    for row in DENSE_FAILURES:
        covered = architecture in row.architectures and row.implementation in (None, implementation)
        if covered and row.scenario == scenario:
            return row.reason
    return None


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    architecture, implementation = request.param
    try:
        return tiny_model(architecture, attn_implementation=implementation)
    except ValueError:
        reason = _known_failure(architecture, implementation, None)
        if reason is None:
            raise
        pytest.skip(reason)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "model",
    [(name, implementation) for name in ARCHITECTURES for implementation in ("sdpa", "eager")],
    indirect=True,
    ids=lambda pair: "-".join(pair),
)
def test_unpacked_cache_gives_the_tokens_of_dynamic_cache(model: PreTrainedModel, scenario: str) -> None:
    try:
        expected = run_scenario(model, scenario, **SCENARIO_SIZES[scenario])
    except ValueError:
        reason = _known_failure(model.config.model_type, model.config._attn_implementation, scenario)
        if reason is None:
            raise
        pytest.skip(reason)
    got = run_scenario(model, scenario, cache_config=NEVER_PACKED, **SCENARIO_SIZES[scenario])
    assert got.tolist() == expected.tolist()


def test_every_row_of_the_table_names_known_things() -> None:
    for row in DENSE_FAILURES:
        assert set(row.architectures) <= set(ARCHITECTURES)
        assert row.implementation in (None, "sdpa", "eager")
        assert row.scenario is None or row.scenario in SCENARIOS


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_scenarios_reach_what_they_are_for(architecture: str) -> None:
    # With an ordinary cache: what must not change the result does not; drafts are both taken and rejected.
    model = tiny_model(architecture)
    greedy = run_scenario(model, "greedy", **SIZES)
    assert torch.equal(run_scenario(model, "chunked_prefill", **SIZES), greedy)
    assert not torch.equal(run_scenario(model, "beams", **SIZES), greedy)
    alone = run_scenario(model, "greedy", lengths=(21,))
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(run_scenario(model, "prompt_lookup"), alone)
    hook.remove()
    new_tokens = alone.shape[1] - 21
    assert new_tokens / 4 < len(calls) < new_tokens
