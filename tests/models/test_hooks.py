"""Hooks that stay on a model: once each, carried by copies, taken away together, and no more than that."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from kvcache_plugins.models.hooks import add_hooks, remove_all_hooks

calls: list[tuple[str, nn.Module, Any]] = []


def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    calls.append(("before", module, None))


def doubled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (2 * args[0],), kwargs


def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    calls.append(("after", module, output))


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    for _ in range(2):
        add_hooks(module, before=before, after=after)
    return module


def number_of_hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def calls_of(module: nn.Module) -> list[str]:
    calls.clear()
    module(torch.ones(1, 2))
    assert all(called is module for _, called, _ in calls)
    return [name for name, _, _ in calls]


def test_the_same_function_is_put_on_once_and_others_beside_it() -> None:
    module = hooked()
    assert calls_of(module) == ["before", "after"]
    plain = module(torch.ones(1, 2))
    add_hooks(module, before=doubled)
    assert number_of_hooks(module) == 3
    assert torch.equal(module(torch.ones(1, 2)) - module.bias, 2 * (plain - module.bias))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_called_with_itself(copied: Any) -> None:
    module = hooked()
    twin = copied(module)
    assert calls_of(twin) == ["before", "after"] == calls_of(module)
    add_hooks(twin, before=before, after=after)  # it has them already
    assert number_of_hooks(twin) == 2
    remove_all_hooks()
    assert calls_of(twin) == [] == calls_of(module)
    assert number_of_hooks(twin) == number_of_hooks(module) == 0
    assert not twin._forward_hooks_with_kwargs and not twin._forward_hooks_always_called


def test_a_call_that_fails_is_ended() -> None:
    module = hooked()
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert calls == [("before", module, None), ("after", module, None)]


def test_hooks_of_others_stay() -> None:
    module = hooked()
    module.register_forward_pre_hook(before, with_kwargs=True)
    assert calls_of(module) == ["before", "before", "after"]
    remove_all_hooks()
    assert calls_of(module) == ["before"]


def test_a_model_goes_when_its_user_lets_go_of_it() -> None:
    module = hooked()
    left = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert left() is None
    finally:
        gc.enable()
    remove_all_hooks()
