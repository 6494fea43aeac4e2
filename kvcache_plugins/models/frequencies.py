"""What rotary embeddings rotate by in the calls of one thread, where that is not their own choice.

Transformers keeps one set of frequencies on a module, and chooses anew in every call where they follow the
length (dynamic, longrope). What a cache of ours wants instead is on the module only while it computes, under
a lock: a model may be serving other threads, whose calls have nothing to do with that cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .hooks import add_hooks

__all__ = ["attribute_of", "frequencies_kept", "remember_frequencies", "state", "withdraw"]


class _Calls(threading.local):
    """What a thread is in the middle of.

    Attributes:
        stated (`list`): Modules and the attributes they are to have, the newest last.
        entered (`list`): Modules that compute, and the attributes they had before.
        used (`WeakKeyDictionary`): Of modules whose frequencies follow the length, those of the last call.
    """

    def __init__(self) -> None:
        self.stated: list[tuple[nn.Module, dict[str, Any]]] = []
        self.entered: list[tuple[nn.Module, dict[str, Any]]] = []
        self.used: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


_calls = _Calls()
_lock = threading.RLock()
"""Held while a module that has hooks of ours computes."""


def state(rotary: nn.Module, **attributes: Any) -> None:
    """Let a rotary embedding have other attributes in the calls of this thread, until `withdraw`.

    Args:
        rotary (`torch.nn.Module`): The module; of several statements on an attribute, the last one counts.
        attributes (`Any`): By name.
    """
    add_hooks(rotary, before=_enter, after=_leave)
    _calls.stated.append((rotary, attributes))


def withdraw(rotary: nn.Module) -> None:
    """Forget the newest statement of this thread on a module; nothing happens if there is none."""
    for i in range(len(_calls.stated) - 1, -1, -1):
        if _calls.stated[i][0] is rotary:
            del _calls.stated[i]
            return


def attribute_of(rotary: nn.Module, name: str) -> Any:
    """The attribute that a module has in the calls of this thread, or `None`."""
    return _stated_of(rotary).get(name, getattr(rotary, name, None))


def remember_frequencies(model: nn.Module) -> None:
    """Have the frequencies of a thread's last call remembered, where they follow the length."""
    for rotary in _following(model):
        add_hooks(rotary, before=_enter, after=_leave)


@contextmanager
def frequencies_kept(model: nn.Module) -> Iterator[None]:
    """Let a model rotate by the frequencies of this thread's last call, however far its positions go."""
    following = _following(model)
    for rotary in following:
        kind: Any = rotary.rope_type
        kind = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
        state(rotary, rope_type=kind, **_calls.used.get(rotary, {}))
    try:
        yield
    finally:
        for rotary in following:
            withdraw(rotary)


def _stated_of(rotary: nn.Module) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for module, stated in _calls.stated:
        if module is rotary:
            attributes |= stated
    return attributes


def _enter(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    attributes = _stated_of(rotary)
    _lock.acquire()
    _calls.entered.append((rotary, {name: getattr(rotary, name) for name in attributes}))
    for name, value in attributes.items():
        setattr(rotary, name, value)


def _leave(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not _calls.entered or _calls.entered[-1][0] is not rotary:  # what comes before it has failed
        return
    if _follows_length(getattr(rotary, "rope_type", None)):
        _calls.used[rotary] = {
            name: buffer.clone()
            for name, buffer in rotary.named_buffers(recurse=False)
            if name.endswith("inv_freq") and "original" not in name
        }
    _, before = _calls.entered.pop()
    try:
        for name, value in before.items():
            setattr(rotary, name, value)
    finally:
        _lock.release()


def _following(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _follows_length(getattr(module, "rope_type", None))]


def _follows_length(rope_type: Any) -> bool:
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)
