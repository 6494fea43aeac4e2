"""What models do to the outputs of their heads, found from logits they made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvcache_plugins.models.logits import LogitRule, find_logit_rule

OUTPUTS = 4 * torch.randn(3, 200, generator=torch.Generator().manual_seed(0))


def found(logits: Tensor, outputs: Tensor = OUTPUTS, **config: Any) -> LogitRule:
    return find_logit_rule(
        SimpleNamespace(config=PreTrainedConfig(num_hidden_layers=1, **config)), outputs, logits
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, LogitRule(200)),
        ({"logit_scale": 0.0625}, LogitRule(200, 0.0625)),
        ({"logits_scaling": 8.0}, LogitRule(200, 0.125)),
        ({"logits_scaling": 8.0}, LogitRule(200, 8.0)),  # the same name, in another family
        ({"lm_head_multiplier": 0.0195}, LogitRule(200, 0.0195)),
        ({"logits_mup_width_multiplier": 24.0}, LogitRule(150, 1 / 24.0)),  # and a padded vocabulary
        ({"final_logit_softcapping": 5.0}, LogitRule(200, 1.0, 5.0)),
        ({"logits_soft_cap": 5}, LogitRule(200, 1.0, 5.0)),
        ({"output_multiplier": 0.5, "final_logit_softcapping": 5.0}, LogitRule(200, 0.5, 5.0)),
        ({"logit_scale": 0.0625, "final_logit_softcapping": 5.0}, LogitRule(200)),  # neither is applied
        ({"logit_scale": "inv_sqrt_d_model"}, LogitRule(200)),
        ({"logit_scale": None, "final_logit_softcapping": None, "logits_scaling": 0}, LogitRule(200)),
    ],
    ids=repr,
)
def test_what_gives_the_logits_is_taken(
    config: dict[str, Any], expected: LogitRule, dtype: torch.dtype
) -> None:
    outputs = OUTPUTS.to(dtype)
    logits = outputs[:, : expected.vocab_size] * expected.scale
    if expected.softcap is not None:
        logits = expected.softcap * torch.tanh(logits / expected.softcap)
    assert logits.dtype == dtype
    assert found(logits, outputs, **config) == expected
    torch.testing.assert_close(
        expected.apply(outputs), logits.float(), atol=0, rtol=4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_a_cap_does_not_show_it_is_the_configuration_that_tells(dtype: torch.dtype) -> None:
    outputs = (1e-4 * OUTPUTS).to(dtype)
    for logits in (30.0 * torch.tanh(outputs / 30.0), outputs):
        assert found(logits, outputs, final_logit_softcapping=30.0) == LogitRule(200, 1.0, 30.0)
    zeros = torch.zeros(3, 200)
    assert found(zeros, zeros, final_logit_softcapping=30.0) == LogitRule(200, 1.0, 30.0)


@pytest.mark.parametrize(
    "logits",
    [
        1.01 * OUTPUTS,
        OUTPUTS + torch.randn(200, generator=torch.Generator().manual_seed(1)),
        OUTPUTS.flip(1),
        torch.cat((OUTPUTS[:2], OUTPUTS[:1])),
        OUTPUTS.masked_fill(torch.arange(200) < 9, torch.finfo(torch.float32).min),
        OUTPUTS * torch.nan,
        torch.cat((OUTPUTS, OUTPUTS), dim=1),
    ],
    ids=["scaled", "biased", "permuted", "of another row", "masked", "nan", "too many"],
)
def test_anything_else_is_refused(logits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"logits of SimpleNamespace \(model_type='.*are not what its head"):
        found(logits, logits_scaling=8.0, final_logit_softcapping=30.0)
