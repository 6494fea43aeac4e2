"""Flash attention of tiles with log-sum-exps: masked rows in fp32, and when a GPU's is not trusted."""

from __future__ import annotations

import pytest
import torch

from kvcache_plugins.attention import flash

CPU = torch.device("cpu")


def some_states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 40, 64), torch.randn(2, 3, 300, 64), torch.randn(2, 3, 300, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("apart", ["query", "key", "value"])
def test_strides_may_be_any(apart: str, dtype: torch.dtype) -> None:
    given = {name: x.to(dtype) for name, x in zip(("query", "key", "value"), some_states(), strict=True)}
    expected = flash.attend_flash(**given, mask=None, scaling=0.2)
    given[apart] = given[apart].mT.contiguous().mT
    assert given[apart].stride(3) > 1
    for found, right in zip(flash.attend_flash(**given, mask=None, scaling=0.2), expected, strict=True):
        assert torch.equal(found, right)


def test_what_lies_side_by_side_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in some_states())
    assert not query.is_contiguous()

    def copied(states: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a copy")

    monkeypatch.setattr(torch.Tensor, "contiguous", copied)
    flash.attend_flash(query, key, value, None, 0.2)


@pytest.mark.parametrize("scores", [1, 1 << 26])
def test_masked_rows(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_SCORES", scores)  # 64 slots at a time, and all of them
    query, key, value = some_states()
    mask = torch.zeros(2, 1, 40, 300).masked_fill_(torch.rand(2, 1, 40, 300) > 0.3, -torch.inf)
    mask[:, :, :5, 200:] = -torch.inf
    mask[0, 0, 7] = -torch.inf
    output, total = flash._attend_masked(query, key, value, mask, 0.2)
    logits = query.double() @ key.double().mT * 0.2 + mask
    assert torch.equal(total[0, :, 7], torch.full((3,), -torch.inf)) and not output[0, :, 7].any()
    seen = torch.ones(2, 40, dtype=torch.bool)
    seen[0, 7] = False
    for got, expected in ((output, logits.softmax(-1) @ value.double()), (total, logits.logsumexp(-1))):
        torch.testing.assert_close(
            got.transpose(1, 2)[seen], expected.transpose(1, 2)[seen].float(), rtol=1e-5, atol=1e-5
        )


def test_what_is_not_a_number_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_SCORES", 1)
    query, key, value = some_states()
    value[0, 0, 130, 3], key[1, 1, 70, 5] = torch.nan, torch.nan
    output, _ = flash._attend_masked(query, key, value, torch.zeros(1, 1, 40, 300), 0.2)
    assert output[0, 0, :, 3].isnan().all() and output[1, 1].isnan().all()
    assert not output[0, 0, :, :3].isnan().any() and not output[0, 1:].isnan().any()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "said"),
    [
        (torch.float32, 64, "not torch.float32"),
        (torch.float16, 264, "not 264"),
        (torch.float16, 20, "not 20"),
    ],
)
def test_what_it_does_not_take(dtype: torch.dtype, head_dim: int, said: str) -> None:
    reason = flash.why_no_flash(CPU, dtype, head_dim)
    assert reason is not None and said in reason


def test_it_is_compared_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    flash._fault.cache_clear()
    with torch.device("meta"):  # a default device of the user's own
        assert flash.why_no_flash(CPU, torch.bfloat16, 64) is None
    right = flash.attend_flash
    wrong = {
        "deviates": lambda *given: (right(*given)[0] * 1.1, right(*given)[1]),
        "other shapes": lambda *given: (right(*given)[0], right(*given)[1][..., None]),
        "cannot be used": lambda *given: torch.empty(2) @ torch.empty(3),
    }
    for said, attend in wrong.items():
        flash._fault.cache_clear()
        monkeypatch.setattr(flash, "attend_flash", attend)
        reason = flash.why_no_flash(CPU, torch.bfloat16, 64)
        assert reason is not None and said in reason
    flash._fault.cache_clear()
