"""What the files of a model or an artifact hold, in a few letters.

An unfinished run is continued by path, and the file at a path may have become another one: a model that was
trained further, heads that were trained anew. Its records must not be mixed with those of the new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifacts.named import named_artifacts

__all__ = [
    "artifact_digests",
    "digest_files",
    "digest_folder",
    "digest_words",
    "model_settings",
]

_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.json", "*.jinja", "*.model", "*.py", "tokenizer*", "vocab*",
    "merges.txt",
)  # fmt: skip
"""Weights, and what says how to use them; not the pictures, cards and checkpoints that may lie beside."""
_RESULTS = "results*"
"""Nor what was measured with them."""
_WHOLE = 64 * 2**20
"""Bytes up to which a file is read whole."""
_STEP, _PIECE = 4 * 2**20, 4096
"""Of a larger one, a piece of so many bytes in every step: training changes a matrix all over."""


def model_settings(model: str, config: Any) -> dict[str, str | None]:
    """Return which model a run is of, for the settings of its records: `model` and `model_digest`.

    A directory is known by its files alone, wherever it lies; what came from the hub by its id and commit.

    Args:
        model (`str`): Directory or hub id.
        config (`PreTrainedConfig`): Its configuration, which knows the commit of what came from the hub.
    """
    digest = digest_folder(Path(model))
    if digest is not None:
        return {"model": "a directory", "model_digest": digest}
    return {"model": model, "model_digest": getattr(config, "_commit_hash", None)}


def digest_folder(folder: Path) -> str | None:
    """Return a digest of the weights in a folder and of what describes them; None if there is none.

    Of files above 64 MB a thousandth is read: 4 kB of every 4 MB.

    Raises:
        OSError: If a file cannot be read.
    """
    paths = {path for pattern in _FILES for path in folder.glob(pattern)}
    return digest_files(sorted(path for path in paths if path.is_file() and not path.match(_RESULTS)))


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


def digest_words(words: Iterable[str]) -> str:
    """Return a digest of strings and of their order."""
    digest = hashlib.sha256()
    for word in words:
        encoded = word.encode("utf-8", "surrogatepass")
        digest.update(f"{len(encoded)} ".encode() + encoded)
    return digest.hexdigest()[:16]


def artifact_digests(cache_configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a digest of each artifact that caches name and that lies here, by the name they have for it.

    Raises:
        OSError: If a file cannot be read.
    """
    places = {place for cache_config in cache_configs for place in named_artifacts(cache_config)}
    digests = {place: _digest(Path(place)) for place in sorted(places)}
    return {place: digest for place, digest in digests.items() if digest is not None}


def _digest(place: Path) -> str | None:
    return digest_files([place]) if place.is_file() else digest_folder(place)


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            yield file.read()
            return
        for start in (*range(0, size, _STEP), size - _PIECE):
            file.seek(start)
            yield file.read(_PIECE)
