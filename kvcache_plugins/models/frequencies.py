"""What rotary embeddings rotate by in the calls of one thread, where that is not their own choice.

Transformers keeps one set of frequencies on a module, and chooses anew in every call where they follow the
length (dynamic, longrope). Once a cache of ours has wanted another set, what the module computes is replaced
by what a twin of it computes, which has the set that this call is to have. The module itself is left alone:
it may be serving other threads, whose calls have nothing to do with that cache. All that is put back on it is
what it has grown by where a text was repeated (`frequencies_kept`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .hooks import add_hooks

__all__ = [
    "TOLD",
    "Change",
    "attribute_of",
    "frequencies_kept",
    "frequency_change",
    "is_told",
    "remember_frequencies",
    "state",
    "withdraw",
]

TOLD = "told"
"""Who says what holds for questions about a module as well, and not in a call of it alone."""
_KEPT = "kept"


class Change(NamedTuple):
    """When a model begins to rotate by other frequencies than those of short texts.

    Args:
        rope_type (`str`): What transformers calls them: `"longrope"`, or one with `"dynamic"` in it.
        length (`int`): Tokens of a text, by the largest position of a call, with which it does not yet.
        can_be_told (`bool`): Whether a cache that knows of a long text has it rotate all of it by one set
            (`models.longrope`).
    """

    rope_type: str
    length: int
    can_be_told: bool = False


def frequency_change(config: Any, layer_type: str | None = None) -> Change | None:
    """Say when a model changes its frequencies; `None` if they never follow the length.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration.
        layer_type (`str`, *optional*): Such as `"full_attention"`, where frequencies depend on it.
    """
    given: Mapping[Any, Any] = getattr(config, "rope_parameters", None) or {}
    parameters: Any = given if "rope_type" in given else given.get(layer_type)
    kind = str(parameters.get("rope_type")) if isinstance(parameters, Mapping) else ""
    if kind == "longrope":
        length = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        return Change(kind, length, hasattr(config, "original_max_position_embeddings"))
    if "dynamic" in kind:  # with exactly as many as the limit it keeps what a longer text before has left
        return Change(kind, config.max_position_embeddings - 1)
    return None


class _Calls(threading.local):
    """What a thread is in the middle of.

    Attributes:
        stated (`WeakKeyDictionary`): Attributes that modules are to have, by module and by who has said so.
        used (`WeakKeyDictionary`): Of modules whose frequencies follow the length, those of the last call.
    """

    def __init__(self) -> None:
        self.stated: WeakKeyDictionary[nn.Module, dict[str, dict[str, Any]]] = WeakKeyDictionary()
        self.used: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


_calls = _Calls()
_lock = threading.Lock()
_active = 0
"""Statements of all threads: without any, a compiler meets nothing of this in a model."""


def state(rotary: nn.Module, who: str, **attributes: Any) -> None:
    """Let a rotary embedding have other attributes in the calls of this thread, until `withdraw`.

    Args:
        rotary (`torch.nn.Module`): The module.
        who (`str`): Says so; what the same has said before is forgotten, as of a call that was interrupted.
        attributes (`Any`): By name; of several who say so, the last one to begin counts.
    """
    add_hooks(rotary, after=_rotate)
    withdraw(rotary, who)
    _calls.stated.setdefault(rotary, {})[who] = attributes
    _count(1)


def withdraw(rotary: nn.Module, who: str) -> None:
    """Forget what `who` has said in this thread; nothing happens if it is nothing."""
    if _active and _calls.stated.get(rotary, {}).pop(who, None) is not None:
        _count(-1)


def attribute_of(rotary: nn.Module, name: str) -> Any:
    """Return the attribute that a module has for this thread: by what it was [`TOLD`], or else by itself.

    Args:
        rotary (`torch.nn.Module`): The module.
        name (`str`): The attribute; `None` is returned if there is none of this name.
    """
    told = _calls.stated.get(rotary, {}).get(TOLD, {})
    return told.get(name, getattr(rotary, name, None))


def is_told(rotary: nn.Module) -> bool:
    """Whether this thread has been [`TOLD`] what a module has."""
    return TOLD in _calls.stated.get(rotary, {})


def remember_frequencies(model: nn.Module) -> None:
    """Have the frequencies of a thread's last call remembered, where they follow the length."""
    for rotary in _following(model):
        add_hooks(rotary, after=_rotate)


@contextmanager
def frequencies_kept(model: nn.Module) -> Iterator[None]:
    """Let a model rotate by the frequencies of this thread's last call, however far its positions go."""
    following = _following(model)
    grown = [(rotary, _growing_attributes(rotary)) for rotary in following]
    for rotary in following:
        kind: Any = rotary.rope_type
        kind = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
        state(rotary, _KEPT, rope_type=kind, **_calls.used.get(rotary, {}))
    try:
        yield
    finally:
        for rotary, before in grown:
            withdraw(rotary, _KEPT)
            for name, value in before.items():
                setattr(rotary, name, value)


def _count(change: int) -> None:
    global _active
    with _lock:
        _active += change


def _rotate(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if output is None or any(buffer.is_meta for buffer in rotary.buffers(recurse=False)):
        return None  # the call has failed, or what it computed with has been offloaded
    if torch.compiler.is_compiling():
        return _uncompiled()(rotary, args, kwargs) if _active else None
    return _rotated(rotary, args, kwargs)


@cache
def _uncompiled() -> Any:
    return torch.compiler.disable(_rotated)


def _rotated(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module computes by what is stated of it, or by a choice of its own that no thread can change."""
    attributes: dict[str, Any] = {}
    for stated in _calls.stated.get(rotary, {}).values():
        attributes |= stated
    twin = _twin(rotary, attributes)
    output = type(rotary).forward(twin, *args, **kwargs)
    _calls.used[rotary] = {
        name: buffer
        for name, buffer in twin._buffers.items()
        if buffer is not None and name.endswith("inv_freq") and "original" not in name
    }
    return output


def _twin(rotary: nn.Module, attributes: dict[str, Any]) -> nn.Module:
    """A module like another, with some attributes of its own, and buffers that it may write to."""
    twin = type(rotary).__new__(type(rotary))
    vars(twin).update(vars(rotary))
    # two of them may be one tensor
    vars(twin)["_buffers"] = {name: None if b is None else b.clone() for name, b in rotary._buffers.items()}
    for name, value in attributes.items():
        setattr(twin, name, value)
    return twin


def _growing_attributes(rotary: Any) -> dict[str, Any]:
    """What a module changes of itself when it meets a longer text than before (dynamic)."""
    if not any("dynamic" in kind for kind in _kinds(rotary.rope_type)):
        return {}
    own = vars(rotary) | rotary._buffers
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in own.items()
        if name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
    }


def _following(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _follows_length(getattr(module, "rope_type", None))]


def _follows_length(rope_type: Any) -> bool:
    return any("dynamic" in kind or kind == "longrope" for kind in _kinds(rope_type))


def _kinds(rope_type: Any) -> list[str]:
    """The kinds of a module, of which some have one for every type of layer."""
    return [str(kind) for kind in (rope_type.values() if isinstance(rope_type, dict) else [rope_type])]
