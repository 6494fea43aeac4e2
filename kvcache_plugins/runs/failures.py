"""Caches that break down in an evaluation: whose failure ends it, and whose is noted while others go on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from ..errors import NotFiniteError
from ..registry import TRANSFORMERS_BACKENDS
from .code_versions import is_foreign
from .labels import DENSE

__all__ = ["Failures"]


class Failures:
    """What has failed in a run, which does not try it again.

    What transformers' own class cannot serve (a head dimension its groups do not divide, say) must not end a
    comparison, and neither must a mistake of a third party. One of ours must: nobody should trust the rest.
    Whoever's it is, a cache with which the model predicts no numbers is noted: that is what was found of it.
    """

    def __init__(self) -> None:
        self._said: list[tuple[Mapping[str, Any], str]] = []

    def said_of(self, cache_config: Mapping[str, Any]) -> str | None:
        """Return why a cache has failed; None if it has not."""
        return next((said for failed, said in self._said if failed == cache_config), None)

    def note(self, cache_config: Mapping[str, Any], error: Exception) -> str:
        """Note the failure of a cache, and return in words what it was.

        The traceback of a third party's is shown, whose author wants to know where.

        Raises:
            Exception: The error itself, if it is ours.
        """
        said = " ".join(str(error).split())
        is_found = isinstance(error, NotFiniteError) and cache_config != DENSE
        if cache_config["backend"] in TRANSFORMERS_BACKENDS or is_found:
            said = said or type(error).__name__
        elif is_foreign(cache_config):
            traceback.print_exception(error)
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        else:
            raise error
        self._said.append((cache_config, said))
        return said
