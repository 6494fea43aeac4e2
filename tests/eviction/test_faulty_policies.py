"""The conformance suite of evicting backends finds policies that are wrong, each by the test meant for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins import register_backend, registry
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.testing import EvictionConformance
from kvcache_plugins.testing.conformance.fixtures import refuse_to_evict
from tests.eviction.feeding import model_of


class RaisesWhenAsked(EvictingLayer):
    def ranks(self) -> Tensor:
        raise RuntimeError("never worked")


class KeepsOneToken(EvictingLayer):
    def _kept_length(self, budget: int) -> int:
        return budget - 1


class LooksAtPads(EvictingLayer):
    """A token is worth its distance from all that is in the batch, pads too."""

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        found: Tensor = (keys - keys.mean((0, 2), keepdim=True)).norm(dim=-1).float()
        return found


class RemembersBeside(EvictingLayer):
    """A factor of every row, which no verb knows of."""

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        if self.cumulative_length == 0:
            self.sign = torch.tensor([1.0, 1.0, -1.0])[: len(keys)]
        found: Tensor = keys.float().norm(dim=-1) * self.sign[:, None, None]
        return found


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    @register_backend("faulty")
    class FaultyCache(EvictingCache):
        """Wrong."""

        config_class, layer_class = EvictingConfig, request.param

    yield {"backend": "faulty"}
    del registry._registered["faulty"]  # the registry is for the whole process


class Suite(EvictionConformance):
    __test__ = False


def _budget(suite: Suite, config: dict[str, Any]) -> None:
    suite.test_the_budget_is_kept_and_protected_tokens_stay(model_of(num_hidden_layers=3), config)


def _rows_alone(suite: Suite, config: dict[str, Any]) -> None:
    options = EvictingConfig(budget=24)
    suite.test_a_row_keeps_what_it_would_keep_alone(
        model_of(num_hidden_layers=3), config, options, (0, 9, 31), True
    )


def _rows_together(suite: Suite, config: dict[str, Any]) -> None:
    model = model_of(num_hidden_layers=3)
    suite.test_rows_go_together(model, suite.start(model, config), EvictingConfig(budget=24))


@pytest.mark.parametrize(
    ("registered", "test", "error"),
    [
        (RaisesWhenAsked, _budget, RuntimeError),
        (KeepsOneToken, _budget, AssertionError),
        (LooksAtPads, _rows_alone, AssertionError),
        (RemembersBeside, _rows_together, AssertionError),
    ],
    indirect=["registered"],
)
def test_a_faulty_policy_is_found(
    registered: dict[str, Any], test: Callable[[Suite, dict[str, Any]], None], error: type[Exception]
) -> None:
    with pytest.raises(error):
        test(Suite(), {**registered, "budget": Suite.budget, "chunk_size": Suite.chunk_size})


@pytest.mark.parametrize(
    "options", [{"budget": 128, "storage": {"backend": "int8"}}, {"budget": 8192}, {"budget": 0.5}]
)
def test_the_suite_of_all_backends_says_what_it_needs_of_one_that_evicts(options: dict[str, Any]) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"needs a budget of at least 1200 .* EvictionConformance"
    ):
        refuse_to_evict({"backend": "knorm", **options})
    for config in ({"backend": "int8"}, {"backend": "knorm", **EvictingConfig.tiny().to_dict()}):
        refuse_to_evict(config)
