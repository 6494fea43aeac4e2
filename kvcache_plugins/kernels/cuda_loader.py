"""The CUDA kernels: built when a tensor on a GPU is first served, kept beside the CPU builds, and checked.

A build is named after its sources, the operators' signatures, the releases of torch, CUDA and nvcc, and the
architectures it is for. `torch.utils.cpp_extension.load` makes it under a file lock. Where none can be made,
as without nvcc, any of the same sources and the same torch serves that the GPUs can run, so that a cache
directory may be filled elsewhere.

No kernel here is trusted unseen. On every device, before the first use, they run on random tokens of every
format and are compared with torch on that device (`cuda_check`); after a deviation torch serves there. Before
a build does so for the first time on a model of GPU, a process of its own does (`cuda_trial`), since a kernel
that goes astray takes its process with it.

Environment: `KVCACHE_CUDA_KERNELS=0` leaves everything on a GPU to torch, `KVCACHE_CUDA_KERNELS=1` does
without the process of its own. `KVCACHE_KERNEL_CACHE` and `KVCACHE_NO_BUILD` as for the CPU library
(`builds`), `CUDA_HOME` the toolkit to build with instead of the one found (`cuda_toolkit`),
`TORCH_CUDA_ARCH_LIST` the architectures to build for instead of those present, of which those too old for the
kernels are left out (`cuda_architectures`; with it, a machine without a GPU builds too, for others that have
the same setting or no nvcc), `MAX_JOBS` the compilers run at once.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import tempfile
import threading
import warnings
from pathlib import Path

import torch

from ..errors import KernelUnavailableError
from . import builds, cuda_architectures, cuda_check, cuda_packages, cuda_trial
from .builds import KernelStatus
from .compiler import BUILD_PREFIX, find_compiler
from .cuda_architectures import OLDEST, asked_for
from .cuda_toolkit import find_ninja, find_toolkit, used_by_torch, why_unusable
from .ops import SCHEMAS

__all__ = ["CUDA_FLAGS", "build", "check", "sources", "status", "try_load", "why_not"]

CUDA_FLAGS = ("-O3", "-lineinfo")
"""For the device code, beside what torch adds. Nothing that changes rounding."""
_SOURCES = Path(__file__).with_name("csrc") / "cuda"
_NAME = "kvcache_plugins_cuda"

_SWITCH = "KVCACHE_CUDA_KERNELS"
_NO_GPU = "torch sees no GPU."
_PROGRESS = re.compile(r"\[\d+/\d+\] ")
"""How ninja begins a line about a command that it runs."""

_logger = logging.getLogger(__name__)
_lock = threading.RLock()
_path: Path | None = None
_failure: str | None = None
_checked: set[int] = set()
_faults: dict[int, str] = {}
"""Of devices on which the kernels have failed their check."""


def sources() -> list[Path]:
    """The files that are compiled."""
    return sorted([*_SOURCES.glob("*.cu"), *_SOURCES.glob("*_binding.cpp")])


def try_load(device: torch.device) -> bool:
    """Make the kernels available for tensors of a device, building and checking them if need be.

    Never raises, whatever building, checking and the driver raise. With `KVCACHE_CUDA_KERNELS=0`, which is
    looked at until they have been checked, there are none. A failure is told in one warning and remembered;
    later calls return false at once.
    """
    try:
        index = _index(device)
        if index in _checked:
            return True
        if _failure is not None or index in _faults or _why_switched_off() is not None:
            return False
        if not torch.cuda.is_available():  # where only other machines would have something of a build
            raise RuntimeError(_why_no_device() or _NO_GPU)
        if torch.cuda.is_current_stream_capturing():
            return False  # neither build nor check may be recorded; the next call outside a capture does both
        with _lock:
            if _failure is None and index not in _faults and index not in _checked:
                check(torch.device("cuda", index))
            return index in _checked
    except Exception as error:
        _tell(error)
        return False


def _tell(error: Exception) -> None:
    """Warn of what disables the kernels, unless they are not wanted anyway or it has been told."""
    global _failure
    if not isinstance(error, KernelUnavailableError):  # before anything was asked of the kernels
        if _failure is not None or _why_switched_off() is not None:
            return
        _failure = _reason(error)
    warnings.warn(
        f"Attention over packed keys and values on the GPU runs in plain torch, which is slower "
        f"({_SWITCH}=0 chooses that): {_reason(error)}",
        RuntimeWarning,
        stacklevel=3,
    )


def why_not(device: torch.device) -> str:
    """Say why [`try_load`] has just returned false for a device."""
    # the last asks the driver, which answers where none of the others is the reason
    reason = _failure or _why_switched_off() or _faults.get(_index(device))
    return reason or "they are yet to be checked, which a CUDA graph cannot record: run a step before it."


def build(*, force: bool = False) -> Path:
    """Load the kernels, building them first if there is no intact build.

    Args:
        force (`bool`): Build anew even if there is one. What the process has loaded stays in use.

    Returns:
        `Path`: The library.

    Raises:
        KernelUnavailableError: If it can neither be found nor built, with the reason.
    """
    global _path, _failure
    with _lock:
        if _path is not None and not force:
            return _path
        try:
            if _failure is not None and not force:
                raise KernelUnavailableError(_failure)
            path = _find_or_build(force)
        except Exception as error:  # whatever it is, torch serves instead
            _failure = _reason(error)
            raise KernelUnavailableError(_failure) from error
        _path, _failure = path, None
        return path


def check(device: torch.device) -> None:
    """Load the kernels, and compare them with torch on a device; what that finds disables them there.

    Args:
        device (`torch.device`): The GPU.

    Raises:
        KernelUnavailableError: If there are none, or they are not to be used there.
    """
    index = _index(device)
    device = torch.device("cuda", index)
    with _lock:
        path = build()
        if index not in _checked and index not in _faults:
            fault = _fault(path, device)
            if fault is None:
                _checked.add(index)
            else:
                _faults[index] = f"the kernels failed their check on {device}: {fault}"
        if index in _faults:
            raise KernelUnavailableError(_faults[index])


def _fault(path: Path, device: torch.device) -> str | None:
    try:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            return _too_old([capability])
        fault = None if os.environ.get(_SWITCH) == "1" else cuda_trial.find_fault(path, device)
        return cuda_check.find_deviation(device) if fault is None else fault
    except Exception as error:  # a launch that fails, an illegal address: torch serves instead
        return _reason(error)


def status() -> KernelStatus:
    """Return the state of the kernels. Never builds, loads or raises."""
    directory, release = builds.cache_directory(), _nvcc_release()
    try:
        return _status(directory, release)
    except Exception as error:  # of a driver that does not say which GPUs there are, or of torch
        return KernelStatus("unavailable", None, directory, release, reason=_reason(error))


def _status(directory: Path, release: str | None) -> KernelStatus:
    reason = "\n".join(filter(None, [_failure, *_faults.values()])) or None
    if _checked:
        return KernelStatus("loaded", _path, directory, release, reason=reason)
    reason = reason or _why_switched_off() or (_why_no_device() if _path is None else None)
    if reason is not None:
        return KernelStatus("unavailable", None, directory, release, reason=reason)
    if _path is not None:
        return KernelStatus("loaded", _path, directory, release)
    cached = _cached()
    if cached is not None:
        return KernelStatus("cached", cached, directory, release)
    reason = _why_none()
    return KernelStatus(
        "missing" if reason is None else "unavailable", _target(), directory, release, reason=reason
    )


def _find_or_build(force: bool) -> Path:
    reason = _why_switched_off() or _why_no_device()
    if reason is not None:
        raise KernelUnavailableError(reason)
    cached, refused = None if force else _cached(), ""
    if cached is not None:
        try:
            if cached != _target():
                _logger.info("%s serves, since nothing can be built: %s", cached, _why_not_buildable())
            return _load(cached)
        except OSError as error:  # intact, but not for this process
            force, refused = True, f"{cached} does not load ({error}), and "
    reason = _why_not_buildable() if force else _why_none()
    if reason is not None:
        raise KernelUnavailableError(f"{refused}{reason}")
    target = _target()
    assert target is not None
    if builds.install(target, "CUDA", lambda: _compile(target), force=force):
        return target  # which torch has loaded
    return _load(target)


def _cached() -> Path | None:
    """An intact build: the one made here or, where none can be made, another that the GPUs here can run.

    Raises:
        KernelUnavailableError: If neither GPUs nor the user say for what.
    """
    target = _target()
    if target is not None and builds.is_intact(target):
        return target
    return None if _why_not_buildable() is None else next(filter(builds.is_intact, _substitutes()), None)


def _substitutes() -> list[Path]:
    """Builds of these sources that the GPUs here can run, at first those nothing is translated of."""
    wanted, prefix = cuda_architectures.to_serve(_capabilities()), f"cuda-{_source_key()}-"

    def serves(path: Path, from_ptx: bool) -> bool:
        _, *architectures = path.stem.removeprefix(prefix).split("-")  # the first is the release of nvcc
        return all(
            cuda_architectures.runs_on(architectures, capability, from_ptx=from_ptx) for capability in wanted
        )

    found = sorted(builds.cache_directory().glob(f"{prefix}*.so"), reverse=True)
    chosen = [path for path in found if serves(path, True)]
    return sorted(chosen, key=lambda path: not serves(path, False))


def _load(path: Path) -> Path:
    builds.load(path)
    return path


def _compile(target: Path) -> None:
    """Build and load the library, and keep a sealed copy at `target`."""
    from torch.utils import cpp_extension

    # A network file system may keep the file of a library that is loaded, and the folder with it.
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f"{BUILD_PREFIX}cuda-", ignore_cleanup_errors=True
    ) as directory:
        toolkit = find_toolkit()
        assert toolkit is not None  # or there were no `target`
        try:
            architectures = cuda_architectures.to_build()
            with used_by_torch(toolkit), cuda_architectures.told_to_torch(architectures):
                cpp_extension.load(
                    name=_NAME,
                    sources=[str(path) for path in sources()],
                    extra_cflags=["-O2"],
                    extra_cuda_cflags=list(CUDA_FLAGS),
                    extra_include_paths=toolkit.include_paths(),
                    extra_ldflags=toolkit.linker_options(Path(directory)),
                    build_directory=directory,
                    with_cuda=True,
                    is_python_module=False,
                )
            (built,) = Path(directory).glob(f"{_NAME}*.so")
        except Exception as error:  # torch documents none, and raises many
            # without the commands that have succeeded
            lines = [line for line in _reason(error).splitlines() if not _PROGRESS.match(line)][-20:]
            lines += cuda_packages.advice(toolkit.home, torch.version.cuda)
            raise KernelUnavailableError("\n".join(["the CUDA kernels do not build:", *lines])) from error
        sealed = Path(directory) / "sealed.so"
        sealed.write_bytes(builds.sealed(built.read_bytes()))
        sealed.replace(target)


def _reason(error: Exception) -> str:
    """What went wrong, with the name of an exception whose message needs it."""
    speaks = type(error) in (RuntimeError, KernelUnavailableError) or isinstance(error, OSError)
    return str(error) if speaks and str(error) else f"{type(error).__name__}: {error}"


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def _why_switched_off() -> str | None:
    given = os.environ.get(_SWITCH, "")
    if given in ("", "1"):
        return None
    return f"{_SWITCH}=0 leaves them out." if given == "0" else f"{_SWITCH} must be 0 or 1, got {given!r}."


def _why_no_device() -> str | None:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA."
    if not torch.cuda.is_available():  # as where the image of a machine with GPUs is made
        return None if asked_for() else _NO_GPU
    present = _capabilities()
    return _too_old(present) if max(present) < OLDEST else None


def _too_old(capabilities: list[tuple[int, int]]) -> str:
    found = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    return f"the kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, and here is {found}."


def _capabilities() -> list[tuple[int, int]]:
    return sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})


def _why_none() -> str | None:
    """Why there is no build and can be none; `None` if one can be made."""
    if (reason := _why_not_buildable()) is None:
        return None
    wanted = ", ".join(f"{major}.{minor}" for major, minor in cuda_architectures.to_serve(_capabilities()))
    return (
        f"{reason} Nor is there an intact build of these sources, for torch {torch.__version__} and compute "
        f"capability {wanted}, in {builds.cache_directory()}."
    )


def _why_not_buildable() -> str | None:
    if (forbidden := builds.why_forbidden()) is not None:
        return forbidden
    if (reason := why_unusable(find_toolkit())) is not None:
        return reason
    if find_compiler() is None:
        return "no C++ compiler was found (CXX, or g++ or c++ on the PATH)."
    if find_ninja() is None:
        return "ninja, with which torch builds extensions, was not found (on the PATH, or beside Python)."
    try:
        cuda_architectures.to_build()
    except KernelUnavailableError as error:
        return str(error)
    return None


def _nvcc_release() -> str | None:
    toolkit = find_toolkit()
    return None if toolkit is None else toolkit.description


def _target() -> Path | None:
    """The build made here; `None` where `_why_not_buildable` says why there is none."""
    toolkit = find_toolkit()
    if toolkit is None:
        return None
    try:
        architectures = cuda_architectures.to_build()
    except KernelUnavailableError:
        return None
    name = "-".join(["cuda", _source_key(), toolkit.version, *architectures])
    return builds.cache_directory() / f"{name}.so"


def _source_key() -> str:
    parts = [torch.__version__, str(torch.version.cuda), platform.system(), platform.machine(), repr(SCHEMAS)]
    parts += CUDA_FLAGS
    for path in sorted(_SOURCES.iterdir()):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return builds.short_hash("\0".join(parts))
