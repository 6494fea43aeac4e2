"""Moments of queries and the attention expected of them, against definitions in fp64 and against samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention import reference
from kvcache_plugins.attention.expected import expected_attention
from kvcache_plugins.attention.query_moments import QueryMoments, average_rotation
from kvcache_plugins.attention.reference import DenseView
from kvcache_plugins.models.rotary import Rotary
from tests.reference.eviction import expected_weights

ROWS, HEADS, DIM, LENGTH = 2, 3, 8, 60
ROTARIES = {
    "halves": Rotary((1.0, 0.3, 0.05, 0.001)),
    "neighbours": Rotary((1.0, 0.3, 0.05, 0.001), interleaved=True),
    "partial": Rotary((0.7, 0.02)),
}


def _states(mean: float = 0.0, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(seed)) + mean


def _moments(
    states: Tensor, is_counted: Tensor, counts: list[int], *, has_scatter: bool = True
) -> QueryMoments:
    moments = QueryMoments.of_nothing((ROWS, HEADS, DIM), states.device, has_scatter=has_scatter)
    start = 0
    for count in counts:
        run = slice(start, start + count)
        moments.add(states[:, :, run], is_counted[:, run])
        start += count
    assert start == LENGTH
    return moments


def _by_definition(states: Tensor, is_counted: Tensor) -> tuple[Tensor, Tensor]:
    chosen = [states[row][:, is_counted[row]].double() for row in range(ROWS)]
    means = [part.mean(1) for part in chosen]
    covariances = [torch.stack([torch.cov(head.T, correction=0) for head in part]) for part in chosen]
    return torch.stack(means), torch.stack(covariances)


@pytest.mark.parametrize(
    "counts", [[LENGTH], [1] * LENGTH, [7, 1, 30, 22], [59, 1]], ids=["whole", "singly", "chunks", "one-more"]
)
def test_moments_do_not_depend_on_the_split(counts: list[int]) -> None:
    # Far from zero, where a difference of squares would have lost half of its digits.
    states, is_counted = _states(300.0), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    is_counted[1, :23] = False
    states[1, :, :20] = torch.nan
    moments = _moments(states, is_counted, counts)
    mean, covariance = _by_definition(states, is_counted)
    assert moments.count.tolist() == [60, 37]
    torch.testing.assert_close(moments.mean.double(), mean, atol=0.0, rtol=1e-6)  # a few last digits
    found = moments.covariance()
    assert found is not None and found.dtype == moments.mean.dtype == torch.float32
    torch.testing.assert_close(found.double(), covariance, atol=3e-4, rtol=0.0)
    without = _moments(states, is_counted, counts, has_scatter=False)
    assert torch.equal(without.mean, moments.mean) and without.covariance() is None
    assert set(without.tensors()) == {"count", "mean"} and set(moments.tensors()) == {
        "count",
        "mean",
        "scatter",
    }


def test_a_row_in_which_nothing_counts() -> None:
    is_counted = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    is_counted[0, 40:] = True
    moments = _moments(_states(), is_counted, [20, 20, 20])
    found = moments.covariance()
    assert found is not None
    assert moments.count.tolist() == [20, 0]
    assert float(moments.mean[1].abs().max()) == float(found[1].abs().max()) == 0.0
    assert bool((found[0].diagonal(dim1=1, dim2=2) > 0).all())


@pytest.mark.parametrize("name", ROTARIES)
def test_the_average_of_rotations(name: str) -> None:
    rotary, length = ROTARIES[name], 50
    first, states = torch.tensor([3, 4000]), _states()
    moments = _moments(states, torch.ones(ROWS, LENGTH, dtype=torch.bool), [LENGTH])
    cos, sin = average_rotation(rotary, first, length)
    mean, covariance = moments.turned(rotary, cos, sin)
    assert covariance is not None
    for row in range(ROWS):
        positions = torch.arange(int(first[row]), int(first[row]) + length)
        # the matrix of a rotation has the rotated unit vectors as its columns
        units = torch.eye(DIM)[None, :, None].expand(1, DIM, length, DIM)
        average = rotary.rotate(units, positions)[0].mean(1).double().T
        expected = moments.mean[row].double() @ average.T
        torch.testing.assert_close(mean[row].double(), expected, atol=1e-5, rtol=0.0)
        own = moments.covariance()
        assert own is not None
        expected = average @ own[row].double() @ average.T
        torch.testing.assert_close(covariance[row].double(), expected, atol=1e-5, rtol=0.0)
    alone, _ = _moments(
        states, torch.ones(ROWS, LENGTH, dtype=torch.bool), [LENGTH], has_scatter=False
    ).turned(rotary, cos, sin)
    assert torch.equal(alone, mean)


@pytest.mark.parametrize("name", ROTARIES)
def test_the_average_of_many_rotations(name: str) -> None:
    rotary, first = ROTARIES[name], torch.tensor([3, 10**8])
    cos, sin = average_rotation(rotary, first, 10**5)
    for row in range(2):
        tables = rotary.tables(torch.arange(int(first[row]), int(first[row]) + 10**5))
        for found, table in zip((cos, sin), tables, strict=True):
            torch.testing.assert_close(found[row], table.double().mean(0).float(), atol=1e-6, rtol=0.0)
    cos, sin = average_rotation(rotary, first, 10**9)  # which nothing of that length is made for
    assert torch.all(cos.square() + sin.square() <= 1.0) and float(cos[:, 0].abs().max()) < 1e-8


def _spread(query_heads: int, scale: float = 1.0, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `(B, Hq, 40, D)`, their mean and their covariance."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(ROWS, query_heads, 40, DIM, generator=generator) * scale
    queries += torch.randn(ROWS, query_heads, 1, DIM, generator=generator) * scale
    deviations = queries - queries.mean(2, keepdim=True)
    return queries, queries.mean(2), deviations.mT @ deviations / 40


@pytest.mark.parametrize("has_covariance", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_against_the_formula(
    groups: int, has_covariance: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = _states().repeat(1, 1, 4, 1) + torch.linspace(-1, 1, 4 * LENGTH)[:, None]
    queries, mean, covariance = _spread(HEADS * groups, scale)
    is_counted = torch.ones(ROWS, 4 * LENGTH, dtype=torch.bool)
    is_counted[1, :31] = False
    keys[1, :, :31] = torch.nan
    given = covariance if has_covariance else None
    got = expected_attention(mean, given, DenseView(keys), 0.4, is_counted)
    assert got.shape == (ROWS, HEADS, 4 * LENGTH) and got.dtype == torch.float32
    assert float(got[1, :, :31].abs().max()) == 0.0
    for row in range(ROWS):
        for head in range(HEADS):
            own = queries[row, head * groups : (head + 1) * groups]
            turn = torch.eye(DIM, dtype=torch.float64)
            expected = expected_weights(
                own, keys[row, head, is_counted[row]], turn, 0.4, covariance=has_covariance
            )
            found = got[row, head, is_counted[row]].double()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
    monkeypatch.setattr(reference, "_TILE_VALUES", 1)  # 64 tokens each
    tiles = expected_attention(mean, given, DenseView(keys), 0.4, is_counted)
    torch.testing.assert_close(tiles, got, atol=1e-6, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(expected_attention(mean, given, DenseView(keys), 0.4, is_counted), tiles)


def test_against_drawn_queries() -> None:
    # What normal queries give each token on average, before it is divided by what all get.
    _, mean, covariance = _spread(HEADS, 0.7)
    keys, scaling = _states()[:, :, :12], 0.5
    normal = torch.distributions.MultivariateNormal(mean, covariance + 1e-6 * torch.eye(DIM))
    torch.manual_seed(3)
    drawn = normal.sample((400_000,)).permute(1, 2, 0, 3)
    given = (drawn @ keys.mT * scaling).double().exp().mean(2)
    counted = torch.ones(ROWS, 12, dtype=torch.bool)
    got = expected_attention(mean, covariance, DenseView(keys), scaling, counted)
    expected = (given / given.sum(-1, keepdim=True)).float()
    torch.testing.assert_close(got, expected, atol=0.0, rtol=0.05)
    without = expected_attention(mean, None, DenseView(keys), scaling, counted)
    assert float((without / expected - 1).abs().max()) > 0.15


def test_nothing_counts() -> None:
    _, mean, covariance = _spread(HEADS)
    counted = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    counted[1] = False
    got = expected_attention(mean, covariance, DenseView(_states()), 1.0, counted)
    torch.testing.assert_close(got.sum(-1), torch.tensor([[1.0] * HEADS, [0.0] * HEADS]))
