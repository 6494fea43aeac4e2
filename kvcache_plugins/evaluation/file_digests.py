"""What the files of a model or an artifact hold, in a few letters.

An unfinished run is continued by path, and the file at a path may have become another one: a model that was
trained further, heads that were trained anew. Its records must not be mixed with those of the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CacheNames", "digest_files", "digest_folder", "model_digest"]

_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.json", "*.jinja", "*.model", "*.py", "tokenizer*", "vocab*",
    "merges.txt",
)  # fmt: skip
"""Weights, and what says how to use them; not the pictures, cards and checkpoints that may lie beside."""
_WHOLE = 64 * 2**20
"""Bytes up to which a file is read whole."""
_STEP, _PIECE = 4 * 2**20, 4096
"""Of a larger one, a piece of so many bytes in every step: training changes a matrix all over."""


def model_digest(model: str, config: Any) -> str | None:
    """Return what tells the files of a model from others.

    Args:
        model (`str`): Directory or hub id.
        config (`PreTrainedConfig`): Its configuration, which knows the commit of what came from the hub.
    """
    return digest_folder(Path(model)) or getattr(config, "_commit_hash", None)


def digest_folder(folder: Path) -> str | None:
    """Return a digest of the weights in a folder and of what describes them; None if there is none.

    Of files above 64 MB a thousandth is read: 4 kB of every 4 MB.

    Raises:
        OSError: If a file cannot be read.
    """
    paths = {path for pattern in _FILES for path in folder.glob(pattern)}
    return digest_files(sorted(path for path in paths if path.is_file()))


def digest_files(paths: Sequence[Path]) -> str | None:
    """Return a digest of files, of their names and of their order, as [`digest_folder`] does.

    Raises:
        OSError: If a file cannot be read.
    """
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            yield file.read()
            return
        for start in (*range(0, size, _STEP), size - _PIECE):
            file.seek(start)
            yield file.read(_PIECE)


class CacheNames:
    """What the keys of records call a cache: its options, and a digest of each folder that they name.

    Records of heads or of a calibration that have been replaced are not found, and made anew. What comes from
    the hub is told apart by its id alone.

    Args:
        cache_configs (`Iterable[dict]`): The caches of a run. Their folders are read now.

    Raises:
        OSError: If a file cannot be read.
    """

    def __init__(self, cache_configs: Iterable[dict[str, Any]]) -> None:
        self._caches = list(cache_configs)
        words = {word for cache_config in self._caches for word in _words(cache_config)}
        digests = {word: digest_folder(Path(word)) for word in words}
        self._names = {}
        for cache_config in self._caches:
            found = [digest for word in _words(cache_config) if (digest := digests[word]) is not None]
            self._names[_options(cache_config)] = " ".join([_options(cache_config), *found])

    def __getitem__(self, cache_config: Mapping[str, Any]) -> str:
        return self._names[_options(cache_config)]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield every cache and its name, in the order they were given."""
        return ((cache_config, self[cache_config]) for cache_config in self._caches)


def _options(cache_config: Mapping[str, Any]) -> str:
    return json.dumps(cache_config, sort_keys=True)


def _words(value: Any) -> Iterator[str]:
    """Yield all words among options, those of layers and of a storage included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _words(part)
