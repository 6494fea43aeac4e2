"""What is known of tokens is the same whether it has been asked for after each of them or not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcache_plugins.eviction.ledger import Ledger
from kvcache_plugins.layers.heads import HeadGroup

ROWS, HEADS = 3, 4
DEVICE = torch.device("cpu")


def filled(counts: list[int], *, is_asked: bool, first: int = 0) -> tuple[Ledger, Tensor, Tensor]:
    """A ledger of tokens that came in such calls, and what it must know."""
    ledger, generator, scores = Ledger(ROWS, HEADS, DEVICE), torch.Generator().manual_seed(0), []
    for count in counts:
        scores.append(torch.randn(ROWS, HEADS, count, generator=generator))
        ledger.append(scores[-1], first)
        first += count
        if is_asked:
            assert ledger.scores.shape[2] == ledger.positions.shape[2] == sum(len(s[0, 0]) for s in scores)
    positions = torch.arange(first - sum(counts), first, dtype=torch.int32).expand(ROWS, HEADS, -1)
    return ledger, torch.cat(scores, dim=2), positions


COUNTS = {
    "one": [1],
    "some": [1] * 9,
    "a prompt": [40],
    "a prompt and some": [40, *[1] * 7],
    "many": [5, *[1] * 200],
    "turns": [30, *[1] * 70, 20, 1, 1],
}


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_appended(counts: list[int], is_asked: bool) -> None:
    ledger, scores, positions = filled(counts, is_asked=is_asked, first=17)
    assert torch.equal(ledger.positions, positions) and ledger.positions.dtype == torch.int32
    assert torch.equal(ledger.scores, scores)
    other, *_ = filled(counts, is_asked=not is_asked, first=17)
    sizes = [{name: t.shape for name, t in each.tensors().items()} for each in (ledger, other)]
    assert sizes[0] == sizes[1], "the same bytes, however often somebody asked"


INDEX = torch.tensor([0, 3, 10, 45]).expand(ROWS, HEADS, -1)
ORDER = torch.tensor([2, 0, 2])
GROUP = HeadGroup([3, 1], DEVICE)
# What is done to a ledger that others have not asked, and to what it knows.
ACTS: dict[str, tuple[Callable[[Ledger], Ledger | None], Callable[[Tensor], Tensor]]] = {
    "gather": (lambda ledger: ledger.gather(INDEX), lambda t: t.gather(2, INDEX)),
    "truncate": (lambda ledger: ledger.truncate(3), lambda t: t[..., :-3]),
    "index": (lambda ledger: ledger.index_batch(ORDER), lambda t: t[ORDER]),
    "move": (lambda ledger: ledger.to(DEVICE), lambda t: t),
    "copy": (copy.deepcopy, lambda t: t),
    "heads": (lambda ledger: ledger.of_heads(GROUP), lambda t: t[:, [3, 1]]),
    "join": (lambda ledger: Ledger.joined([ledger, ledger]), lambda t: torch.cat([t, t], dim=1)),
}


@pytest.mark.parametrize("act", ACTS)
def test_what_is_not_written_down_goes_along(act: str) -> None:
    ledger, scores, positions = filled([40, *[1] * 7], is_asked=False)
    do, expected = ACTS[act]
    ledger = do(ledger) or ledger
    assert torch.equal(ledger.scores, expected(scores))
    assert torch.equal(ledger.positions, expected(positions))
    rows, heads, held = ledger.scores.shape
    new = torch.randn(rows, heads, 1)
    ledger.append(new, 900)
    assert torch.equal(ledger.scores, torch.cat([expected(scores), new], dim=2))
    assert ledger.positions[..., held].unique().tolist() == [900]


def test_saved_and_loaded() -> None:
    ledger, scores, positions = filled([40, *[1] * 7], is_asked=False)
    loaded, *_ = filled([1] * 3, is_asked=False)  # which it had not written down
    loaded.load(ledger.saved_tensors())
    assert torch.equal(loaded.scores, scores) and torch.equal(loaded.positions, positions)


def test_a_view_is_written_to() -> None:
    ledger, scores, _ = filled([1] * 5, is_asked=False)
    ledger.scores.add_(1.0)
    ledger.append(torch.zeros(ROWS, HEADS, 1), 5)
    assert torch.equal(ledger.scores[..., :5], scores + 1.0)


def test_begun_in_inference_mode() -> None:
    ledger = Ledger(ROWS, HEADS, DEVICE)
    for position in range(3):
        ledger.append(torch.zeros(ROWS, HEADS, 1), position)
    with torch.inference_mode():
        assert ledger.scores.shape[2] == 3
    ledger.scores.add_(1.0)
    assert bool((ledger.scores == 1).all())
