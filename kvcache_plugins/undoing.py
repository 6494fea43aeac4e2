"""What modules of this package have changed elsewhere, and how it is put back when all is uninstalled."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["at_uninstall", "undo_all"]

_undo: list[Callable[[], None]] = []


def at_uninstall(undo: Callable[[], None]) -> Callable[[], None]:
    """Have a function called by `kvcache_plugins.uninstall`, as often as that is; a decorator.

    It is kept here, and not looked up by name, so that it is found after its module has been taken out of
    `sys.modules`.
    """
    _undo.append(undo)
    return undo


def undo_all() -> None:
    """Call all of them."""
    for undo in _undo:
        undo()
