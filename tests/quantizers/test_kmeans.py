"""k-means on a line is optimal: against all partitions, and against the plain dynamic program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache_plugins.quantizers.kmeans import optimal_kmeans

Floats = NDArray[np.float64]


def cost_of(points: Floats, weights: Floats, centers: Floats) -> float:
    """Weighted squared distance of every point to its nearest center."""
    return float((weights * ((points[:, None] - centers) ** 2).min(axis=1)).sum())


def run_cost(points: Floats, weights: Floats) -> float:
    """Cost of one cluster, from its mean."""
    mean = (weights * points).sum() / weights.sum()
    return float((weights * (points - mean) ** 2).sum())


def least_cost_of_all_partitions(points: Floats, weights: Floats, num_clusters: int) -> float:
    """Clusters of points on a line are runs, so every choice of cuts between sorted points is tried."""
    order = np.argsort(points)
    points, weights = points[order], weights[order]
    costs = []
    for cuts in itertools.combinations(range(1, len(points)), min(num_clusters, len(points)) - 1):
        bounds = [0, *cuts, len(points)]
        costs.append(sum(run_cost(points[a:b], weights[a:b]) for a, b in itertools.pairwise(bounds)))
    return min(costs)


def least_cost_of_plain_program(points: Floats, weights: Floats, num_clusters: int) -> float:
    """The O(k n^2) dynamic program, with the cost of every run from its own mean."""
    order = np.argsort(points)
    points, weights = points[order], weights[order]
    n = len(points)
    runs = np.full((n, n + 1), np.inf)
    for start in range(n):
        mass = first = cost = 0.0
        for stop in range(start, n):  # Welford's update: no difference of large sums
            mass += weights[stop]
            delta = points[stop] - first
            first += delta * weights[stop] / mass
            cost += weights[stop] * delta * (points[stop] - first)
            runs[start, stop + 1] = cost
    best = np.concatenate([[0.0], np.full(n, np.inf)])
    for _ in range(num_clusters):
        best = np.array([0.0, *((best[:stop] + runs[:stop, stop]).min() for stop in range(1, n + 1))])
    return float(best[n])


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(12))
def test_no_partition_is_better(seed: int, num_clusters: int) -> None:
    random = np.random.default_rng(seed)
    points, weights = random.normal(size=11), random.exponential(size=11)
    centers = optimal_kmeans(points, weights, num_clusters)
    assert centers.shape == (num_clusters,) and (np.diff(centers) > 0).all()
    least = least_cost_of_all_partitions(points, weights, num_clusters)
    assert cost_of(points, weights, centers) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("num_clusters", [2, 4, 8, 16])
@pytest.mark.parametrize("shape", ["normal", "heavy-tailed", "two-lumps"])
def test_cost_of_the_plain_dynamic_program(shape: str, num_clusters: int) -> None:
    random = np.random.default_rng(num_clusters)
    points = {
        "normal": lambda: random.normal(size=300),
        "heavy-tailed": lambda: random.standard_cauchy(size=300),
        "two-lumps": lambda: np.concatenate([random.normal(-3, 0.01, 250), random.normal(5, 1.0, 50)]),
    }[shape]()
    weights = random.exponential(size=300) ** 3
    centers = optimal_kmeans(points, weights, num_clusters)
    least = least_cost_of_plain_program(points, weights, num_clusters)
    assert cost_of(points, weights, centers) == pytest.approx(least, rel=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_points_of_next_to_no_weight_have_centers_of_their_own(seed: int) -> None:
    """Where there are clusters enough, beside points that outweigh them by far."""
    random = np.random.default_rng(seed)
    points, weights = np.sort(random.uniform(-1, 1, 16)), 10.0 ** random.uniform(-14, 0, 16)
    np.testing.assert_allclose(optimal_kmeans(points, weights, 16), points, rtol=1e-12, atol=1e-14)


def test_the_oracles_agree() -> None:
    random = np.random.default_rng(3)
    points, weights = random.normal(size=10), random.exponential(size=10)
    by_program = least_cost_of_plain_program(points, weights, 4)
    assert by_program == pytest.approx(least_cost_of_all_partitions(points, weights, 4), rel=1e-9)
    # Lloyd's iterations from a bad start end above, so that the comparison means something
    assert cost_of(points, weights, np.sort(points)[:4]) > 1.5 * by_program


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_ties(num_clusters: int) -> None:
    """Points that coincide are one point of their summed weight."""
    points = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 4.0, 4.0, 10.0])
    weights = np.array([1.0, 2.0, 3.0, 1.0, 1.0, 0.5, 0.5, 1.0])
    merged = optimal_kmeans(np.array([0.0, 1.0, 4.0, 10.0]), np.array([6.0, 2.0, 1.0, 1.0]), num_clusters)
    assert optimal_kmeans(points, weights, num_clusters) == pytest.approx(merged, rel=1e-12)
    assert merged == pytest.approx({2: [6 / 9, 10.0], 3: [0.25, 4.0, 10.0]}[num_clusters], rel=1e-12)


def test_equally_good_partitions_give_one_of_them() -> None:
    points, weights = np.array([-1.0, 0.0, 1.0]), np.ones(3)
    centers = optimal_kmeans(points, weights, 2)
    assert cost_of(points, weights, centers) == pytest.approx(0.5)


def test_fewer_points_than_clusters() -> None:
    centers = optimal_kmeans(np.array([3.0, -1.0, 3.0]), np.ones(3), 5)
    assert centers == pytest.approx([-1.0, 3.0, 3.0, 3.0, 3.0], rel=1e-12)
    assert (np.diff(centers) >= 0).all()
    assert optimal_kmeans(np.array([2.5]), np.array([0.1]), 1).tolist() == [2.5]


def test_points_of_weight_zero_count_for_nothing() -> None:
    points, weights = np.array([0.0, 1.0, 50.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    kept = weights > 0
    expected = optimal_kmeans(points[kept], weights[kept], 2)
    assert optimal_kmeans(points, weights, 2).tolist() == expected.tolist() == [0.5, 2.5]


def test_order_does_not_matter() -> None:
    random = np.random.default_rng(0)
    points, weights = random.normal(size=50), random.exponential(size=50)
    order = random.permutation(50)
    shuffled = optimal_kmeans(points[order], weights[order], 6)
    assert shuffled == pytest.approx(optimal_kmeans(points, weights, 6), rel=1e-12)


@pytest.mark.parametrize("offset", [1e3, -1e5])
def test_a_large_offset_costs_no_accuracy(offset: float) -> None:
    random = np.random.default_rng(1)
    points, weights = random.normal(size=200), random.exponential(size=200)
    moved = optimal_kmeans(points + offset, weights, 8) - offset
    assert moved == pytest.approx(optimal_kmeans(points, weights, 8), abs=1e-10 * abs(offset))


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scales_of_weights_do_not_matter(scale: float) -> None:
    random = np.random.default_rng(2)
    points, weights = random.normal(size=100), random.exponential(size=100)
    scaled = optimal_kmeans(points, weights * scale, 5)
    assert scaled == pytest.approx(optimal_kmeans(points, weights, 5), rel=1e-10)


@pytest.mark.parametrize(
    ("points", "weights", "num_clusters", "message"),
    [
        ([1.0], [1.0], 0, "at least 1, got 0"),
        ([1.0, 2.0], [1.0], 1, "one length"),
        ([1.0, float("nan")], [1.0, 1.0], 1, "finite"),
        ([1.0, 2.0], [1.0, -1.0], 1, "not negative"),
        ([1.0, 2.0], [0.0, 0.0], 1, "positive weight"),
        ([], [], 1, "positive weight"),
    ],
)
def test_what_is_refused(points: list[float], weights: list[float], num_clusters: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal_kmeans(np.array(points), np.array(weights), num_clusters)


def test_weights_that_vanish_in_the_sum_make_no_cluster() -> None:
    points, weights = np.arange(6.0), np.array([1.0, 1.0, 1e-30, 1e-30, 1.0, 1.0])
    centers = optimal_kmeans(points, weights, 3)
    assert np.isfinite(centers).all() and (np.diff(centers) >= 0).all()
    cost = (weights[:, None] * (points[:, None] - centers) ** 2).min(1).sum()
    assert cost == pytest.approx(0.5)  # {0, 1} or {4, 5} stays together


def test_weights_over_forty_decades_give_finite_centers() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        points, weights = generator.normal(size=40), 10.0 ** generator.uniform(-40, 0, size=40)
        centers = optimal_kmeans(points, weights, 4)
        assert np.isfinite(centers).all() and (np.diff(centers) >= 0).all()
