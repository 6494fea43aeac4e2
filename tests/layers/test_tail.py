"""The residual window: a queue that behaves like a list of tokens, and rarely moves."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_plugins.layers.tail import Tail

CPU = torch.device("cpu")
B, H, D = 2, 3, 4


def new_tail(limit: int, dtype: torch.dtype = torch.float32) -> Tail:
    return Tail(B, H, D, limit, dtype, CPU)


def tokens(numbers: list[int]) -> Tensor:
    """Tokens `(B, H, n, D)` that can be told apart, in every row, head and channel."""
    places = torch.arange(B * H * D).view(B, H, 1, D) / 64
    return torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1) + places


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "drop", "truncate", "replace", "shrink"]), st.integers(0, 70)),
    max_size=40,
)


@given(operations=OPERATIONS, limit=st.integers(1, 130))
@settings(max_examples=200, deadline=None)
def test_behaves_like_a_list(operations: list[tuple[str, int]], limit: int) -> None:
    tail, model, fresh, seen = new_tail(limit), [], itertools.count(), 0
    for operation, amount in operations:
        before = tail.view()
        copy = before.clone()
        match operation:
            case "append":
                numbers = list(itertools.islice(fresh, amount))
                seen += amount
                tail.append(tokens(numbers), seen)
                model += numbers
            case "replace":
                model = list(itertools.islice(fresh, amount))
                seen += amount
                tail.replace(tokens(model), seen)
            case "drop":
                tail.drop(min(amount, len(model)))
                model = model[min(amount, len(model)) :]
            case "truncate":
                tail.truncate(min(amount, len(model)))
                model = model[: len(model) - min(amount, len(model))]
            case "shrink":
                tail.shrink(seen)
        assert tail.length == len(model) <= tail.capacity
        assert torch.equal(tail.view(), tokens(model))
        if operation not in ("append", "replace"):
            assert torch.equal(before, copy)  # attention may still read it


def test_room_is_bounded_by_the_window_and_by_what_was_seen() -> None:
    tail = new_tail(limit=128)
    assert tail.capacity == 0 and tail.view().shape == (B, H, 0, D)
    rooms = [tail.room(seen) for seen in range(1, 2000)]
    assert rooms == sorted(rooms)
    assert rooms[0] < 32 and rooms[-1] == 128 + 16


def test_capacity_follows_from_what_was_seen_however_it_arrived() -> None:
    for split in ([300], [1] * 300, [40] * 7 + [20]):
        tail, seen = new_tail(limit=64), 0
        for count in split:
            seen += count
            tail.append(tokens(list(range(seen - count, seen))), seen)
            tail.drop(max(0, tail.length - 64))
            tail.shrink(seen)
        assert tail.capacity == tail.room(300) == 80
        assert torch.equal(tail.view(), tokens(list(range(236, 300))))


def test_one_token_in_and_one_out_rarely_moves() -> None:
    tail = new_tail(limit=33)
    tail.append(tokens(list(range(33))), 33)
    begins = []
    for number in range(33, 233):
        tail.drop(1)
        tail.append(tokens([number]), number + 1)
        begins.append(tail.start)
    assert begins.count(0) <= -(-200 // 16)
    assert tail.capacity == tail.room(233)


def test_the_dtype_is_the_models() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        tail = new_tail(16, dtype)
        exact = torch.randn(B, H, 5, D).to(dtype)
        tail.append(exact, 5)
        assert tail.view().dtype == dtype and torch.equal(tail.view(), exact)


def test_new_memory_is_not_mistaken_for_tokens() -> None:
    # The tests fill fresh memory with NaN; what lies beyond the view stays so.
    tail = new_tail(32)
    tail.append(tokens([1, 2, 3]), 3)
    assert tail.buffer[:, :, 3:].isnan().all() and tail.buffer[:, :, 3:].numel() > 0
