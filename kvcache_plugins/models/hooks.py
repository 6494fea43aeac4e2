"""Hooks that stay on a user's model: put there once, carried by its copies, taken away together.

They are functions of modules of this package, called with the module they sit on. So a model that has some
can be pickled, and those of a copy work on the copy. Each tells by the cache of a call whether it has
anything to do; without one of ours it returns at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..undoing import at_uninstall

__all__ = ["HookOwner", "add_hooks", "remove_all_hooks"]

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called with a module and the arguments of a call; may return others."""
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
"""Called with the output as well, which is `None` if the call failed."""

_lock = threading.RLock()
"""Held while hooks are put on, and while the set of their owners is read or added to."""


class HookOwner(ABC):
    """Something that has put hooks on modules; so have the copies of it that are made with the modules'."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        with _lock:
            _owners.add(made)
        return made

    @abstractmethod
    def remove_hooks(self) -> None:
        """Take the hooks off; nothing happens if there are none."""


_owners: WeakSet[HookOwner] = WeakSet()
"""Those alive; unpickling and `copy.deepcopy` make objects by `__new__`, too."""


class _Hook(HookOwner):
    """A function on one module."""

    handle: RemovableHandle

    def __init__(self, function: Before | After) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def remove_hooks(self) -> None:
        self.handle.remove()


def add_hooks(module: nn.Module, *, before: Before | None = None, after: After | None = None) -> None:
    """Call functions before and after every forward of a module; the same one only once.

    Args:
        module (`torch.nn.Module`): The module.
        before (`Callable`, *optional*): A function of a module of this package.
        after (`Callable`, *optional*): Another; called also if the forward fails.
    """
    with _lock:
        if before is not None and not _has(module._forward_pre_hooks, before):
            hook = _Hook(before)
            hook.handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        if after is not None and not _has(module._forward_hooks, after):
            hook = _Hook(after)
            hook.handle = module.register_forward_hook(hook, with_kwargs=True, always_call=True)


@at_uninstall
def remove_all_hooks() -> None:
    """Take the hooks of this package off every model."""
    with _lock:
        owners = list(_owners)
    for owner in owners:
        owner.remove_hooks()


def _has(hooks: dict[int, Any], function: Before | After) -> bool:
    return any(isinstance(hook, _Hook) and hook.function is function for hook in hooks.values())
