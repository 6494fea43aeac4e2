"""Optimal weighted k-means on a line, by dynamic programming.

Clusters of points on a line are intervals, so the best partition into `k` of them is found exactly:
`E_j(n) = min_i E_{j-1}(i) + cost(i, n)`, where `cost` is the weighted variance of points `i .. n-1` and the
best `i` does not decrease with `n`. That monotony lets every round be solved by halving, `O(k n log n)` in
all (Wang and Song, "Ckmeans.1d.dp", The R Journal 3(2), 2011; divide and conquer as in Gronlund et al., "Fast
exact k-means, k-medians and Bregman divergence clustering in 1D", 2017). No start to draw, no local optimum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["optimal_kmeans"]

_Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]


def optimal_kmeans(points: _Floats, weights: _Floats, num_clusters: int) -> _Floats:
    """Return the centers of the best partition of weighted points into clusters.

    Args:
        points (`numpy.ndarray` of shape `(n,)`): Points, in any order.
        weights (`numpy.ndarray` of shape `(n,)`): Their weights, not negative; points whose weight is below
            2^-50 of the sum count for nothing.
        num_clusters (`int`): Clusters, at least 1.

    Returns:
        `numpy.ndarray` of shape `(num_clusters,)`: Centers in increasing order. With fewer distinct points
        than clusters the largest center is repeated.

    Raises:
        ValueError: If a weight is negative, a number is not finite, or no weight is positive.
    """
    points, weights = np.asarray(points, np.float64), np.asarray(weights, np.float64)
    if num_clusters < 1:
        raise ValueError(f"num_clusters must be at least 1, got {num_clusters}.")
    if points.shape != weights.shape or points.ndim != 1:
        raise ValueError(
            f"points and weights must be two lists of one length, got {points.shape}, {weights.shape}."
        )
    if not (np.isfinite(points).all() and np.isfinite(weights).all()) or (weights < 0).any():
        raise ValueError("points and weights must be finite, and weights not negative.")
    distinct, owner = np.unique(points[weights > 0], return_inverse=True)
    if not distinct.size:
        raise ValueError("k-means needs at least one point of positive weight.")
    mass: _Floats = np.bincount(owner, weights[weights > 0]).astype(np.float64)
    # A weight that vanishes in the sum of all could be a cluster of its own, and that of no weight.
    kept = mass > mass.sum() * 2.0**-50
    costs = _Costs(distinct[kept], mass[kept])
    bounds = _partition(costs, min(num_clusters, costs.count))
    centers = costs.means(bounds[:-1])
    return np.concatenate([centers, np.full(num_clusters - centers.size, centers[-1])])


class _Costs:
    """Weighted squared distances of runs of sorted points to their means, in constant time."""

    def __init__(self, points: _Floats, mass: _Floats) -> None:
        # relative to the overall mean, which keeps the difference of sums below accurate
        self._center = float(np.average(points, weights=mass))
        shifted = points - self._center
        self.count = points.size
        self._parts = mass, mass * shifted
        self._mass, self._first, self._second = (
            np.concatenate([[0.0], np.cumsum(mass * power)]) for power in (1.0, shifted, shifted**2)
        )

    def __call__(self, start: _Indices, stop: _Indices) -> _Floats:
        """Cost of points `start .. stop - 1`, which are at least one."""
        first = self._first[stop] - self._first[start]
        cost = self._second[stop] - self._second[start] - first**2 / (self._mass[stop] - self._mass[start])
        return np.asarray(np.maximum(cost, 0.0))

    def means(self, starts: _Indices) -> _Floats:
        """Means of the runs that begin there, each up to the next one: of their own sums.

        Differences of sums of all would leave a run of next to no weight a mean beyond its own points.
        """
        mass, first = (np.add.reduceat(part, starts) for part in self._parts)
        return np.asarray(self._center + first / mass)


def _partition(costs: _Costs, num_clusters: int) -> _Indices:
    """Bounds `0 = b_0 < b_1 < ... < b_k = n` of the best partition into exactly `num_clusters` runs."""
    n = costs.count
    stops = np.arange(1, n + 1)
    best = np.concatenate([[np.inf], costs(np.zeros(n, np.int64), stops)])  # E_1
    choices = []
    for used in range(1, num_clusters):
        best, choice = _extend(costs, best, used)
        choices.append(choice)
    bounds = [n]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return np.array([0, *reversed(bounds)])


def _extend(costs: _Costs, best: _Floats, used: int) -> tuple[_Floats, _Indices]:
    """One more cluster: `E_{j+1}` and the start of its last cluster, for every number of points.

    All numbers of points of one level of the halving are solved at once: candidates of each lie between the
    choices of its solved neighbours, which together are hardly more than there are points.
    """
    n = costs.count
    extended, choice = np.full(n + 1, np.inf), np.full(n + 1, used, np.int64)
    low_end, high_end = used + 1, n
    # intervals of unsolved stops, with the first and last candidate for their middle
    intervals = np.array([[low_end, high_end, used, n - 1]])
    while intervals.size:
        low, high, first, last = intervals.T
        middle = (low + high) // 2
        last_here = np.minimum(last, middle - 1)
        sizes = last_here - first + 1
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        owner = np.repeat(np.arange(middle.size), sizes)
        start = first[owner] + np.arange(owner.size) - offsets[owner]
        total = best[start] + costs(start, middle[owner])
        least = np.minimum.reduceat(total, offsets)
        # the first candidate that reaches the least total
        is_least = total == least[owner]
        chosen = start[np.flatnonzero(is_least)[np.searchsorted(owner[is_least], np.arange(middle.size))]]
        extended[middle], choice[middle] = least, chosen
        left = np.stack([low, middle - 1, first, chosen], axis=1)[low < middle]
        right = np.stack([middle + 1, high, chosen, last], axis=1)[middle < high]
        intervals = np.concatenate([left, right])
    return extended, choice
