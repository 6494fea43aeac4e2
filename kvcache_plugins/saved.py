"""What caches of one half and of both have of `persistence`, by the names that transformers uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import KVCache
    from .encoder_decoder import KVEncoderDecoderCache

__all__ = ["SavedCache"]


class SavedCache:
    """A cache that can be kept on disk."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Save the cache, packed, into `directory` (see `persistence.save_cache`)."""
        from .persistence import save_cache

        cache: Any = self
        save_cache(cache, directory)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike[str],
        model_or_config: Any,
        *,
        artifacts: Mapping[str, str] | None = None,
    ) -> KVCache | KVEncoderDecoderCache:
        """Load a cache saved by `save_pretrained`, of whatever backend (see `persistence.load_cache`)."""
        from .persistence import load_cache

        return load_cache(directory, model_or_config, artifacts)
