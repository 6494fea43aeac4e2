"""What all artifacts share: a folder, here or on the hub, of known files, of a known kind and version."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import is_path
from ..errors import ArtifactError
from .files import naming, read_json

__all__ = [
    "check_card",
    "check_finite",
    "check_kind",
    "check_no_model",
    "check_push",
    "locate",
    "push",
    "replacing",
    "stamps",
]


def locate(
    name_or_path: str, files: Iterable[str], option: str = "calibration", revision: str | None = None
) -> Path:
    """Return the folder of an artifact, downloaded if it is a hub repository.

    Args:
        name_or_path (`str`): Directory or hub id, which may end in the revision: `"org/name@revision"`.
        files (`Iterable[str]`): What to download.
        option (`str`): Cache option that names the artifact, for the message.
        revision (`str`, *optional*): Of the repository, if its id does not say.

    Raises:
        ArtifactError: If it is neither a directory nor a repository that can be read, or a directory without
            any of the files.
    """
    files, folder = tuple(files), Path(name_or_path)
    if folder.is_dir():
        is_known = bool(files) and not any("*" in name for name in files)
        if is_known and not any((folder / name).exists() for name in files):
            is_model = " It is the folder of a model." if (folder / "config.json").is_file() else ""
            raise ArtifactError(f"{option}={name_or_path!r} has none of the files {list(files)}.{is_model}")
        return folder
    if is_path(name_or_path):
        raise ArtifactError(f"{option}={name_or_path!r} is neither a directory nor a hub repository.")
    repo_id, _, tagged = name_or_path.partition("@")
    try:
        return _downloaded(repo_id, tagged or revision, files)
    except Exception as error:  # the hub client raises many kinds; all mean the artifact cannot be had
        raise ArtifactError(
            f"{option}={name_or_path!r} is neither a directory nor a hub repository that can be read: {error}"
        ) from error


@lru_cache
def _downloaded(repo_id: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Download once, because every layer of a cache asks."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(files)))


def stamps(folder: Path, files: Sequence[str]) -> tuple[int, ...]:
    """Return when each file was last written, 0 for a missing one: changes whenever the artifact does."""
    return tuple((folder / name).stat().st_mtime_ns if (folder / name).is_file() else 0 for name in files)


def check_kind(path: Path, facts: Mapping[str, Any], kind: str, format_version: int) -> None:
    """Check that facts are of the expected kind and version.

    Raises:
        ArtifactError: Naming the file, what is expected and what was found.
    """
    if facts.get("kind") != kind or facts.get("format_version") != format_version:
        raise ArtifactError(
            f"{path}: expected kind {kind!r} and format_version {format_version}, got "
            f"{facts.get('kind')!r} and {facts.get('format_version')!r}."
        )


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors hold nothing but finite numbers.

    Raises:
        ArtifactError: Naming the file and the tensor.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{path}: {name} holds numbers that are not finite.")


def check_no_model(directory: Path, *, own: str | None = None) -> None:
    """Check that a directory is not the folder of a model, of whose files ours would take the place.

    Args:
        directory (`Path`): Where something is to be written; it need not exist.
        own (`str`, *optional*): The `model_type` of what may be replaced.

    Raises:
        ValueError: If it holds a `config.json` of another kind.
    """
    config = directory / "config.json"
    if config.is_file() and (own is None or read_json(config).get("model_type") != own):
        raise ValueError(
            f"--output must not be the folder of a model, whose files would be replaced: {str(directory)!r} "
            "has a config.json."
        )


def check_card(directory: Path) -> None:
    """Check that a directory has no `README.md` but a card of ours, of which another one may take the place.

    Args:
        directory (`Path`): Where an artifact is to be written; it need not exist.

    Raises:
        ValueError: If it has another one.
    """
    card = directory / "README.md"
    if card.exists() and b"\nlibrary_name: kvcache-plugins\n" not in card.read_bytes()[:1000]:
        raise ValueError(
            f"--output must be a folder of its own: {str(card)!r} is no card of an artifact, and one would "
            "take its place."
        )


@contextmanager
def replacing(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a directory at once: files written into the yielded folder arrive when the block ends well.

    A new directory is the folder renamed. In one that exists, the folder is made, because what holds it may
    be another file system or may not be ours to write to; the files replace those of the same name, json
    files (the facts, which say what the others must be) last, and other files stay. If the block raises,
    nothing changes.

    Raises:
        OSError: Naming the file or the directory, if it cannot be written, for instance because the disk is
            full.
    """
    target = Path(directory)
    place = target if target.is_dir() else target.parent
    place.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.unfinished-", dir=place))
    try:
        with naming(target, unfinished):
            yield unfinished
            mask = _umask()
            for path in unfinished.iterdir():
                # some writers make files for their owner only, as mkdtemp does folders
                path.chmod(0o666 & ~mask)
            if target.exists():
                for path in sorted(unfinished.iterdir(), key=lambda p: (p.suffix == ".json", p.name)):
                    path.replace(target / path.name)
            else:
                unfinished.chmod(0o777 & ~mask)
                unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_push(repo_id: str, option: str, token: str | None = None) -> None:
    """Check that the hub can be reached and knows the user, before there is anything to upload.

    Args:
        repo_id (`str`): Where it will go.
        option (`str`): The option that names it, for messages.
        token (`str`, *optional*): Of the user; the one that is logged in if not given.

    Raises:
        ValueError: If no repository could have that name.
        OSError: If the hub cannot be reached or does not know the user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented as public

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"--{option} must name a repository such as 'name/artifact', got {repo_id!r} ({error})."
        ) from error
    with _uploading():
        HfApi(token=token).whoami()


def push(
    directory: str | os.PathLike[str],
    files: Iterable[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload files of a directory to a hub repository, which is made if need be.

    Args:
        directory (`str`): Where they are.
        files (`Iterable[str]`): Which ones.
        repo_id (`str`): Such as `"name/artifact"`; without an owner, of the user.
        private (`bool`, *optional*): Of a repository that is made; what its owner's are if not given.
        token (`str`, *optional*): Of the user; the one that is logged in if not given.
        revision (`str`, *optional*): Branch, made if need be; the main one if not given.

    Returns:
        `str`: The address of the commit.

    Raises:
        OSError: If the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with _uploading():
        # without an owner it is a repository of the user, of whose whole name an upload must be told
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=str(directory),
            allow_patterns=list(files),
            revision=revision,
            commit_message="Upload with kvcache-plugins",
        )
    return str(commit)


@contextmanager
def _uploading() -> Iterator[None]:
    """Raise `OSError` for all that the hub client raises: what it raises without a network is none."""
    try:
        yield
    except Exception as error:
        raise OSError(f"Nothing can be uploaded to the hub: {error}") from error


def _umask() -> int:
    # Elsewhere it can only be read by setting it, which is meanwhile that of all threads: strict, then.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
