"""What masks and position biases amount to, and when the answer is remembered."""

from __future__ import annotations

import gc

import pytest
import torch
from packaging.version import Version

from kvcache_plugins.attention import bias, remembered
from kvcache_plugins.attention.bias import logit_bias, row_bias
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.attention.row_masks import row_mask


def mask_of(hidden: int, length: int = 6) -> torch.Tensor:
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[0, ..., :hidden] = False
    return mask


def test_one_mask_is_converted_once_for_all_layers() -> None:
    mask = mask_of(2)
    first, second = (logit_bias(AttentionOptions(mask=mask), 1, 6).bias for _ in range(2))
    assert first is not None and first is second
    assert torch.equal(first == -torch.inf, ~mask)


def test_a_mask_that_was_written_to_is_looked_at_again() -> None:
    mask = mask_of(2)
    before = logit_bias(AttentionOptions(mask=mask), 1, 6).bias
    mask[0, ..., 2] = False
    after = logit_bias(AttentionOptions(mask=mask), 1, 6).bias
    assert before is not None and after is not None
    assert torch.equal(after == -torch.inf, ~mask) and not torch.equal(before, after)


@pytest.mark.parametrize("change", ["length", "mask", "causal", "hidden"])
def test_another_question_has_another_answer(change: str) -> None:
    mask = mask_of(2)
    logit_bias(AttentionOptions(mask=mask), 1, 6)
    if change == "length":
        found = logit_bias(AttentionOptions(mask=mask), 1, 5)
        assert found.bias is not None and found.bias.shape[-1] == 5
    elif change == "mask":
        found = logit_bias(AttentionOptions(mask=mask_of(3)), 1, 6)
        assert found.bias is not None and int((found.bias == -torch.inf).sum()) == 3
    elif change == "hidden":  # as of layers with a window, of which another number of tokens has left
        found = logit_bias(AttentionOptions(mask=mask), 1, 6, hidden=3)
        assert found.bias is not None and found.bias.shape[-1] == 9
    else:
        assert logit_bias(AttentionOptions(mask=mask, sliding_window=4), 1, 6).is_causal
        assert not logit_bias(AttentionOptions(mask=mask), 1, 6).is_causal


def test_nothing_is_kept_of_a_mask_that_is_gone() -> None:
    mask = mask_of(2)
    logit_bias(AttentionOptions(mask=mask), 1, 6)
    assert remembered._seen
    del mask
    gc.collect()
    assert not remembered._seen


def test_the_masks_of_full_and_of_sliding_layers_are_both_remembered() -> None:
    masks = mask_of(2), mask_of(1)
    first = [logit_bias(AttentionOptions(mask=mask), 1, 6).bias for mask in masks]
    again = [logit_bias(AttentionOptions(mask=mask), 1, 6).bias for mask in masks]
    assert all(a is b for a, b in zip(first, again, strict=True))


def test_a_bias_of_many_queries_and_masks_of_inference_mode_are_not_kept() -> None:
    many = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    many[..., 3, 1] = False
    found = logit_bias(AttentionOptions(mask=many), 6, 6).bias
    assert found is not None and found.shape == (1, 1, 6, 6)
    assert id(many) not in remembered._seen
    with torch.inference_mode():
        mask = mask_of(2)
        first = logit_bias(AttentionOptions(mask=mask), 1, 6).bias
        mask[0, ..., 2] = False
        second = logit_bias(AttentionOptions(mask=mask), 1, 6).bias
    assert first is not None and second is not None and not torch.equal(first, second)


def test_a_row_for_many_queries_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(bias, "row_mask", lambda *args: looked.append(args) or row_mask(*args))
    windowed, other = window_mask(6), window_mask(6)
    other[..., 1, 4] ^= True
    for mask in (windowed, other):
        options = AttentionOptions(mask=mask)
        found = [row_bias(options, 5, 12, window=6) for _ in range(3)]
        assert len(looked) == 1
        if mask is other:
            assert found == [None] * 3
        else:
            assert found[0].bias is not None and all(one.bias is found[0].bias for one in found)
        looked.clear()
        row_bias(options, 5, 12, window=5)  # another question
        assert len(looked) == 1
        mask[..., 0, 2] ^= True  # another mask
        row_bias(options, 5, 12, window=6)
        assert len(looked) == 2
        looked.clear()


def test_a_row_is_what_all_is_told_by_or_there_is_none() -> None:
    visible = window_mask(12)
    visible[..., 3] = False
    options = AttentionOptions(mask=visible)
    row, whole = row_bias(options, 5, 12, hidden=2), logit_bias(options, 5, 12, hidden=2)
    assert row is not None and row.bias is not None and row.bias.shape == (1, 1, 1, 14)
    assert whole.bias is not None and torch.equal(row.bias, whole.bias) and row[1:] == whole[1:]
    visible[..., 4, 5] = False
    assert row_bias(options, 5, 12) is None
    position_bias = torch.randn(1, 2, 1, 12)
    found = row_bias(AttentionOptions(position_bias=position_bias), 5, 12)
    assert found is not None and found.bias is not None and torch.equal(found.bias, position_bias)
    assert row_bias(AttentionOptions(position_bias=position_bias.expand(1, 2, 5, 12)), 5, 12) is None


def test_a_causal_mask_is_a_flag_and_one_row() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None].clone()
    found = logit_bias(AttentionOptions(mask=mask), 4, 4)
    assert found.bias is None and found.is_causal
    mask[..., 0] = False
    found = logit_bias(AttentionOptions(mask=mask), 4, 4)
    assert found.bias is not None and found.bias.shape == (1, 1, 1, 4) and found.is_causal


def window_mask(window: int, new: int = 5, length: int = 12) -> torch.Tensor:
    slots, own = torch.arange(length), torch.arange(length - new, length)[:, None]
    return ((slots <= own) & (slots > own - window))[None, None].clone()


def test_a_sliding_window_is_a_number_and_one_row() -> None:
    mask = window_mask(6)
    found = logit_bias(AttentionOptions(mask=mask), 5, 12, window=6)
    assert found.is_causal and found.window == 6
    assert (
        found.bias is not None and (found.bias == -torch.inf).squeeze().tolist() == [True] * 2 + [False] * 10
    )
    assert logit_bias(AttentionOptions(mask=mask, sliding_window=6), 5, 12).window == 6
    mask[..., 4] = False  # a token that nobody sees
    found = logit_bias(AttentionOptions(mask=mask), 5, 12, window=6)
    assert found.window == 6 and found.bias is not None and found.bias[0, 0, 0, 4] == -torch.inf
    for other in (window_mask(5), window_mask(7)):
        found = logit_bias(AttentionOptions(mask=other), 5, 12, window=6)
        assert found.window == 0 and found.bias is not None and found.bias.shape == (1, 1, 5, 12)
        assert torch.equal(found.bias == -torch.inf, ~other)


def test_an_additive_mask_of_zeros_and_the_least_number_hides() -> None:
    visible = window_mask(12)
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16)
    mask.masked_fill_(~visible, torch.finfo(torch.bfloat16).min)
    assert logit_bias(AttentionOptions(mask=mask), 5, 12) == (None, True, 0)
    mask[..., 2, 3] = -1.0  # a number that moves a logit
    found = logit_bias(AttentionOptions(mask=mask), 5, 12)
    assert found.bias is not None and torch.equal(found.bias, mask.float()) and not found.is_causal
    mask[..., 2, :] = torch.finfo(torch.bfloat16).min  # hidden alike, so seen alike
    found = logit_bias(AttentionOptions(mask=mask), 5, 12)
    assert found.bias is not None and torch.equal(found.bias, mask.float())


def test_an_integer_mask_is_added() -> None:
    mask = torch.tensor([0, -3, 0, 0, -1, 0])[None, None, None]
    found = logit_bias(AttentionOptions(mask=mask), 1, 6)
    assert found.bias is not None and torch.equal(found.bias, mask.float())


@pytest.mark.parametrize("window", [None, 8])
def test_slots_that_no_query_may_see_come_first(window: int | None) -> None:
    found = logit_bias(AttentionOptions(sliding_window=window), 1, 12, hidden=3)
    assert found.bias is None and found.window == (window or 12) and found.is_causal
    found = logit_bias(AttentionOptions(mask=mask_of(2, 12)), 1, 12, hidden=3)
    assert found.bias is not None and found.bias.shape == (2, 1, 1, 15) and found.window == 12
    assert bool((found.bias[..., :3] == -torch.inf).all()) and bool((found.bias[1, ..., 3:] == 0).all())
    for options in (
        AttentionOptions(),
        AttentionOptions(mask=window_mask(12)),
        AttentionOptions(mask=window_mask(4)),
    ):
        found = logit_bias(options, 5, 12, hidden=3)
        assert found.bias is not None and found.bias.shape[-1] == 15
        assert bool((found.bias[..., :3] == -torch.inf).all()) and bool((found.bias[..., -1] == 0).any())


def test_a_position_bias_is_added_and_carries_no_gradient() -> None:
    position_bias = torch.randn(1, 3, 1, 6, requires_grad=True)
    mask = mask_of(2)
    found = logit_bias(AttentionOptions(mask=mask, position_bias=position_bias), 1, 6).bias
    assert found is not None and found.shape == (2, 3, 1, 6) and not found.requires_grad
    visible = mask.expand(2, 3, 1, 6)
    assert torch.equal(found[visible], position_bias.expand(2, 3, 1, 6)[visible])
    assert bool((found[~visible] == -torch.inf).all())


@pytest.mark.parametrize("masked", [False, True])
def test_slots_lie_side_by_side_in_memory(masked: bool) -> None:
    # T5 looks biases up by slot and gives all heads of one at once; the kernels read them row by row
    position_bias = torch.randn(1, 6, 4).permute(2, 0, 1)[None]
    mask = torch.randn(6, 2).T[:, None, None] if masked else None
    found = logit_bias(AttentionOptions(mask=mask, position_bias=position_bias), 1, 6, device="meta").bias
    assert found is not None and found.stride(-1) == 1
    assert torch.equal(found, position_bias if mask is None else position_bias + mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hidden_slots_are_fp32_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        bias = logit_bias(AttentionOptions(is_causal=True), 3, 6, hidden=2).bias
    finally:
        torch.set_default_dtype(before)
    assert bias is not None and bias.dtype == torch.float32
    assert bias.flatten().tolist() == [-torch.inf] * 2 + [0.0] * 6


@pytest.mark.no_poison
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"),
    reason="torch 2.11 loses a named tuple where a graph ends; nothing else traces this",
)
def test_what_is_compiled_remembers_nothing() -> None:
    # masks of other calls come and go meanwhile, and compiled code would look for those it was made with
    gc.collect()
    kept, mask = mask_of(3), mask_of(2)
    logit_bias(AttentionOptions(mask=kept), 1, 6)
    seen = set(remembered._seen)
    torch.compiler.reset()
    compiled = torch.compile(lambda m: logit_bias(AttentionOptions(mask=m), 1, 6).bias, backend="eager")
    found = compiled(mask)
    assert torch.equal(found == -torch.inf, ~mask)
    assert set(remembered._seen) == seen
    del kept
    gc.collect()
    assert torch.equal(compiled(mask_of(1)) == -torch.inf, ~mask_of(1))
    torch.compiler.reset()


@pytest.mark.parametrize("why", ["is_of_a_graph", "is_recorded"])
def test_masks_that_change_unseen_are_not_remembered(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that is replayed writes its tensors anew, and no version counts that."""

    class OnGPU(torch.Tensor):
        is_cuda = True

    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool).as_subclass(OnGPU)
    monkeypatch.setattr(remembered, "_is_of_a_graph", lambda mask: why == "is_of_a_graph")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "is_recorded")
    options = AttentionOptions(mask=mask)
    assert logit_bias(options, 1, 9).bias is None
    version = mask._version
    mask.data[..., 4] = False
    assert mask._version == version
    found = logit_bias(options, 1, 9).bias
    assert found is not None and found.flatten().tolist() == [0.0] * 4 + [-torch.inf] + [0.0] * 4
    assert id(mask) not in remembered._seen
