"""What the keys of records call a cache: nobody finds records of what it no longer is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..artifacts.named import named_artifacts
from .code_versions import code_digests
from .file_digests import artifact_digests
from .labels import cache_label

__all__ = ["CacheNames"]


class CacheNames:
    """Names of caches: their options, and digests of the artifacts that they name and of foreign code.

    Records of heads or of a calibration that have been replaced, or of a third party's code that has changed,
    are not found, and made anew. What comes from the hub is told apart by its id alone.

    Args:
        cache_configs (`Iterable[dict]`): The caches of a run, which have been built before. Their artifacts
            and their code are read now.

    Attributes:
        artifacts (`dict[str, str]`): Of [`artifact_digests`].

    Raises:
        OSError: If a file cannot be read.
    """

    def __init__(self, cache_configs: Iterable[dict[str, Any]]) -> None:
        self._caches = list(cache_configs)
        self.artifacts = artifact_digests(self._caches)
        self._digests = {_options(cache_config): self._found(cache_config) for cache_config in self._caches}
        self._names = {
            options: " ".join([options, *digests.values()]) for options, digests in self._digests.items()
        }

    def __getitem__(self, cache_config: Mapping[str, Any]) -> str:
        return self._names[_options(cache_config)]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield every cache and its name, in the order they were given."""
        return ((cache_config, self[cache_config]) for cache_config in self._caches)

    def is_outdated(self, key: str) -> bool:
        """Whether the key of a record, which begins with a name, is of artifacts or code of before."""
        return any(self._is_outdated(key, options) for options in self._names)

    def tell_outdated(self, keys: Iterable[str]) -> None:
        """Say in a line for each cache how many records are not used any more, and what has changed.

        Args:
            keys (`Iterable[str]`): Of all records that there are.
        """
        keys = list(keys)
        for cache_config in self._caches:
            options = _options(cache_config)
            outdated = [key for key in keys if self._is_outdated(key, options)]
            if outdated:
                digests = self._digests[options].items()
                changed = [what for what, digest in digests if any(digest not in key for key in outdated)]
                print(
                    f"made anew: {len(outdated)} records of {cache_label(cache_config)}, which an unfinished "
                    f"run has left, because of a change of {' and '.join(changed)}"
                )

    def _is_outdated(self, key: str, options: str) -> bool:
        name = self._names[options]
        return name != options and key.startswith(f"{options} ") and not key.startswith(name)

    def _found(self, cache_config: Mapping[str, Any]) -> dict[str, str]:
        """Return the digest of all that a cache is made with beside its options, by what it is."""
        named = [place for place in named_artifacts(cache_config) if place in self.artifacts]
        return {place: self.artifacts[place] for place in named} | code_digests(cache_config)


def _options(cache_config: Mapping[str, Any]) -> str:
    return json.dumps(cache_config, sort_keys=True)
