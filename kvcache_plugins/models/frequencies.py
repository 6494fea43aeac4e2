"""What rotary embeddings rotate by in the calls of one thread, where that is not their own choice.

Transformers keeps one set of frequencies on a module, and chooses anew in every call where they follow the
length (dynamic, longrope). What a cache of ours wants instead is on the module only while it computes, under
a lock: a model may be serving other threads, whose calls have nothing to do with that cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .hooks import add_hooks

__all__ = ["attribute_of", "frequencies_kept", "remember_frequencies", "state", "withdraw"]


_PATIENCE_SECONDS = 10.0
"""How long a call waits for another, which takes a fraction of a millisecond, unless it was interrupted."""


class _Entered(NamedTuple):
    """A module that computes, the attributes it had before, and whether this thread has the lock."""

    rotary: nn.Module
    before: dict[str, Any]
    has_lock: bool


class _Calls(threading.local):
    """What a thread is in the middle of.

    Attributes:
        stated (`dict`): Attributes that modules are to have, by module and by who has said so.
        entered (`list`): Modules that compute: one, or none.
        used (`WeakKeyDictionary`): Of modules whose frequencies follow the length, those of the last call.
    """

    def __init__(self) -> None:
        self.stated: WeakKeyDictionary[nn.Module, dict[str, dict[str, Any]]] = WeakKeyDictionary()
        self.entered: list[_Entered] = []
        self.used: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


_calls = _Calls()
_lock = threading.Lock()
"""Held while a module that has hooks of ours computes."""


def state(rotary: nn.Module, who: str, **attributes: Any) -> None:
    """Let a rotary embedding have other attributes in the calls of this thread, until `withdraw`.

    Args:
        rotary (`torch.nn.Module`): The module.
        who (`str`): Says so; what the same has said before is forgotten, as of a call that was interrupted.
        attributes (`Any`): By name; of several who say so, the last one to begin counts.
    """
    add_hooks(rotary, before=_enter, after=_leave)
    stated = _calls.stated.setdefault(rotary, {})
    stated.pop(who, None)
    stated[who] = attributes


def withdraw(rotary: nn.Module, who: str) -> None:
    """Forget what `who` has said in this thread; nothing happens if it is nothing."""
    _calls.stated.get(rotary, {}).pop(who, None)


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
        state(rotary, "kept", rope_type=kind, **_calls.used.get(rotary, {}))
    try:
        yield
    finally:
        for rotary in following:
            withdraw(rotary, "kept")


def _stated_of(rotary: nn.Module) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for stated in _calls.stated.get(rotary, {}).values():
        attributes |= stated
    return attributes


def _enter(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    while _calls.entered:  # hooks are not called at the end of what a KeyboardInterrupt ends
        _put_back(_calls.entered.pop())
    has_lock = _lock.acquire(timeout=_PATIENCE_SECONDS)
    before: dict[str, Any] = {}
    _calls.entered.append(_Entered(rotary, before, has_lock))
    for name, value in _stated_of(rotary).items():
        before[name] = getattr(rotary, name)
        setattr(rotary, name, value)


def _leave(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not _calls.entered or _calls.entered[-1].rotary is not rotary:  # what comes before it has failed
        return
    if _follows_length(getattr(rotary, "rope_type", None)):
        _calls.used[rotary] = {
            name: buffer.clone()
            for name, buffer in rotary.named_buffers(recurse=False)
            if name.endswith("inv_freq") and "original" not in name
        }
    _put_back(_calls.entered.pop())


def _put_back(entered: _Entered) -> None:
    try:
        for name, value in entered.before.items():
            setattr(entered.rotary, name, value)
    finally:
        if entered.has_lock:
            _lock.release()


def _following(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _follows_length(getattr(module, "rope_type", None))]


def _follows_length(rope_type: Any) -> bool:
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)
