"""The CUDA kernels on a machine without a GPU: compiled by the C++ compiler for `emulated_gpu`.

The library is the one a GPU would get, bindings and all, registered under another namespace for CPU tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.attention.bias import logit_bias, per_head, sinks_for_kernels
from kvcache_plugins.attention.description import describe, first_sinks
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.kernels import compiler
from kvcache_plugins.kernels.ops import SCHEMAS
from kvcache_plugins.layers.handle import KVHandle
from tests.kernels.cuda import kept

SOURCES = Path(compiler.__file__).with_name("csrc") / "cuda"
BINDINGS = Path(__file__).with_name("emulated_gpu") / "bindings.cpp"
_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
_FLAGS += ["-Wno-clobbered", "-Wno-unknown-warning-option", "-Wno-pass-failed"]  # GCC's, and Clang's two
_GPU = Path(__file__).with_name("emulated_gpu")
_FLAGS += ["-DKVCACHE_EMULATION", "-xc++", f"-I{_GPU}", f"-I{SOURCES}"]
_SANITIZER = _GPU / "sanitizer" / "sanitizer.cpp"
# Only the compiler's calls are wanted, which the sanitizer takes; the libraries that usually do are left out.
_WATCHED = ["-Og", "-g1", "-fsanitize=thread"]
_WATCHED += ["-fsanitize=alignment,shift,signed-integer-overflow,integer-divide-by-zero,bounds"]
_WATCHED += ["-fsanitize=float-cast-overflow", "-fno-sanitize-recover=all"]
_WATCHED_BY_GCC = ["--param=tsan-instrument-func-entry-exit=0"]
_WATCHED_BY_CLANG = ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
_KNOW_TORCH = ("bindings", "sanitizer", "tensors")
_loaded: dict[Path, ctypes.CDLL] = {}


def build(sources: Path, directory: Path) -> Path:
    """Compile the sources, or what of them has changed, into `directory`."""
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    directory.mkdir(parents=True, exist_ok=True)
    with compiler.file_lock(directory / "lock"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # other test processes are waiting for this one
            objects = list(pool.map(lambda file: compiled(found, file, directory), _units(sources)))
        return linked(found, objects, directory)


def build_changed(sources: Path, units: Collection[str], directory: Path, intact: Path) -> Path:
    """Compile `units` (stems) of changed sources, and link them with the intact others into `directory`.

    Of inline functions that several units have, the linker takes the first, hence the changed ones. `intact`
    is where `build` has built the intact sources, or builds them now, and where the changed objects are kept.
    """
    build(SOURCES, intact)
    found = compiler.find_compiler()
    assert found is not None
    # they run once, for less time than it takes to optimize them
    changed = [compiled(found, file, intact, "-O0") for file in _units(sources) if file.stem in units]
    assert len(changed) == len(units), f"no such unit among {units}"
    others = [compiled(found, file, intact) for file in _units(SOURCES) if file.stem not in units]
    return linked(found, changed + others, directory)


def build_sanitizing(
    directory: Path, intact: Path, changed: Sequence[Path] = (), to: Path | None = None
) -> Path:
    """As `build`, with the device units watched by the sanitizer.

    Units of `changed` stand for those of the same name; the library is then linked into `to`. `intact` is
    where `build` has built the sources, or builds them now: bindings are taken from there.
    """
    build(SOURCES, intact)
    found = compiler.find_compiler()
    assert found is not None
    names = [file.name for file in changed]
    units = [file for file in _units(SOURCES) if file.suffix == ".cu" and file.name not in names]
    # the changed come first: of inline functions that several units have, the linker takes the first
    objects = [compiled(found, file, directory, *_watching(found)) for file in changed]
    objects += _watched(units, directory)
    objects += [compiled(found, file, intact) for file in _units(SOURCES) if file.suffix != ".cu"]
    return linked(found, [*objects, _sanitizer(directory)], to or directory)


def build_watched(unit: Path, directory: Path) -> Path:
    """A device unit that needs no other, watched by the sanitizer."""
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    machine = compiled(found, _GPU / "emulation.cpp", directory)
    return linked(found, [*_watched([unit], directory), machine, _sanitizer(directory)], directory)


def emulated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the package that calls an operator, calling that of the emulated GPU."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "operators": torch.ops.kvcache_emulated}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def why_not_watched(directory: Path) -> str | None:
    """Why device units cannot be compiled so that the sanitizer sees what they do; `None` if they can."""
    found = compiler.find_compiler()
    if found is None:
        return "no C++ compiler"
    command = [found.path, *_FLAGS, *_watching(found), "-c", os.devnull, "-o", str(directory / "nothing.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{found.description} does not sanitize: {done.stderr}"


def _watching(found: compiler.Compiler) -> list[str]:
    return [*_WATCHED, *(_WATCHED_BY_CLANG if "clang" in found.description else _WATCHED_BY_GCC)]


def _watched(units: Sequence[Path], directory: Path) -> list[Path]:
    found = compiler.find_compiler()
    assert found is not None
    directory.mkdir(parents=True, exist_ok=True)
    with compiler.file_lock(directory / "lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda file: compiled(found, file, directory, *_watching(found)), units))


def _sanitizer(directory: Path) -> Path:
    found = compiler.find_compiler()
    assert found is not None
    with compiler.file_lock(directory / "lock"):
        return compiled(found, _SANITIZER, directory)


def _units(sources: Path) -> list[Path]:
    return [BINDINGS, *sorted(sources.glob("*.cu")), _GPU / "emulation.cpp"]  # what takes longest comes first


def compiled(found: compiler.Compiler, file: Path, directory: Path, *flags: str) -> Path:
    """The object of a source file in `directory`, compiled unless it is there.

    `flags` go to the compiler, after the usual ones.
    """
    options = [*(compiler._binding_options() if file.stem.endswith(_KNOW_TORCH) else []), *flags]
    read = [path.read_text() for path in included(file)]
    output = (
        directory / f"{file.stem}-{key_of([torch.__version__, found.description, *_FLAGS, *flags, *read])}.o"
    )
    if not kept.is_there(output):
        new = output.with_suffix(f".{os.getpid()}.new")  # another test process may be compiling it, too
        run([found.path, *_FLAGS, *options, "-c", str(file), "-o", str(new)])
        new.replace(output)
    return output


def included(file: Path) -> list[Path]:
    """A file and what it includes of its folder, of `SOURCES` or of `emulated_gpu`, directly or not.

    In a fixed order.
    """
    found = [file]
    for path in found:  # which grows meanwhile
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            places = (path.parent / name, SOURCES / name, _GPU / name)
            new = next(place for place in places if place.exists())
            if new not in found:
                found.append(new)
    return found


def linked(found: compiler.Compiler, objects: list[Path], directory: Path) -> Path:
    """The library of some objects, which may need torch's, in `directory`, linked unless it is there."""
    target = directory / f"{key_of([path.name for path in objects])}.so"
    if not kept.is_there(target):
        library = str(Path(torch.__file__).parent / "lib")
        files = [*map(str, objects), f"-L{library}", "-ltorch_cpu", "-lc10"]
        new = target.with_suffix(f".{os.getpid()}.new")  # another test process may be linking it, too
        run([found.path, "-shared", "-o", str(new), *files])
        new.replace(target)
    return target


def key_of(parts: list[str]) -> str:
    """What tells builds of other parts apart."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def run(command: list[str]) -> None:
    """Run a compiler, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def load(library: Path) -> ctypes.CDLL:
    """Register the emulated operators; a process can have one library of them."""
    if library not in _loaded:
        assert not _loaded, "another library is loaded"
        for name, schema in SCHEMAS.items():
            torch.library.define(f"kvcache_emulated::{name}", schema)
        _loaded[library] = ctypes.CDLL(str(library))
    return _loaded[library]


def products() -> int:
    """Products of the emulated tensor core so far."""
    (library,) = _loaded.values()
    return int(library.kvcache_emulated_products())


def launched() -> list[str]:
    """Names of the kernels that this thread has launched since this was asked, among other text.

    Of the emulated GPU how many thread blocks follows, as " of X x Y".
    """
    (library,) = _loaded.values()
    library.kvcache_emulated_kernels.restype = ctypes.c_char_p
    return str(library.kvcache_emulated_kernels().decode()).splitlines()


def attend(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor:
    """What `attention.native` does, by the emulated operator."""
    keys, values = describe(key.tokens), describe(value.tokens)
    assert keys is not None and values is not None
    tokens = key.tokens
    bias, is_causal, window = logit_bias(options, query.shape[2], tokens.length, hidden=tokens.first)
    output: Tensor = torch.ops.kvcache_emulated.decode_attention(
        query,
        key.tokens.stream.records.data,
        keys.contiguous_rows(),
        values.contiguous_rows(),
        keys.extras,
        values.extras,
        first_sinks(tokens, keys, values),
        keys.layout.integers(),
        values.layout.integers(),
        options.scaling if options.scaling is not None else query.shape[3] ** -0.5,
        bias,
        is_causal,
        window,
        options.softcap or 0.0,
        sinks_for_kernels(options.sink_logits, query.device),
        per_head(options.alibi_slopes, query.device),
    )
    return output
