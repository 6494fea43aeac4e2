"""Compiling a library, of a few lines in the place of the kernels."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from kvcache_plugins import KernelUnavailableError
from kvcache_plugins.kernels import compiler

SOURCES = Path(compiler.__file__).with_name("csrc") / "cpu"
BINDING = """
    #include <c10/core/ScalarType.h>

    #include "half.h"

    #if defined(KVCACHE_NO_AVX512)
    int half(int x) { return x / 2; }
    #endif

    extern "C" int kvcache_answer() { return half(84) + (c10::ScalarType::Byte == c10::ScalarType::Char); }
"""


@pytest.fixture
def found() -> compiler.Compiler:
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A binding, which knows torch, and a file beside it, which does not."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "half.h").write_text("int half(int x);\n")
    (directory / "binding.cpp").write_text(BINDING)
    (directory / "decode_attention_avx512.cpp").write_text("int half(int x) { return x / 2; }\n")
    return directory


def test_a_library_is_compiled_and_sealed(found: compiler.Compiler, sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "library.so"
    compiler.compile_library(found, sources, target, lambda content: content + b"seal")
    assert target.read_bytes().endswith(b"seal")
    assert ctypes.CDLL(str(target)).kvcache_answer() == 42
    assert sorted(tmp_path.iterdir()) == [target, sources]


def test_a_compiler_without_avx512(found: compiler.Compiler, sources: Path, tmp_path: Path) -> None:
    (sources / "decode_attention_avx512.cpp").write_text("#error what are these instructions\n")
    compiler.compile_library(found, sources, tmp_path / "library.so")
    assert ctypes.CDLL(str(tmp_path / "library.so")).kvcache_answer() == 42


def test_sources_that_do_not_compile(found: compiler.Compiler, sources: Path, tmp_path: Path) -> None:
    (sources / "binding.cpp").write_text("#error made of cheese\n")
    with pytest.raises(KernelUnavailableError, match=r"exit status 1.*\n.*made of cheese"):
        compiler.compile_library(found, sources, tmp_path / "library.so")
    assert list(tmp_path.iterdir()) == [sources]


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(SOURCES.glob("*.cpp")) if not file.stem.endswith("binding")],
    ids=lambda file: file.stem,
)
def test_nothing_of_x86_is_asked_of_other_processors(found: compiler.Compiler, file: Path) -> None:
    # headers of the system that another processor would have are missing here, and are no errors
    command = [found.path, "-std=c++20", "-M", "-MG", "-U__x86_64__", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert file.name in done.stdout
    assert "intrin.h" not in done.stdout


def test_apples_clang_is_spoken_to_in_its_own_way(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses `-fopenmp` as such; a second OpenMP runtime beside torch's would end a process."""
    program = tmp_path / "clang"
    program.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> "$(dirname "$0")/commands"\n'
        'while [ "$1" != -o ]; do shift; done\n'
        'echo made > "$2"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(compiler.platform, "system", lambda: "Darwin")
    compiler.compile_library(compiler.Compiler(str(program), "clang"), sources, tmp_path / "library.so")
    *compiled, linked = (tmp_path / "commands").read_text().splitlines()
    (binding,) = [command for command in compiled if "binding.cpp" in command]
    assert " -Xpreprocessor -fopenmp " in binding and "-isystem" in binding
    assert not any("-fopenmp" in command for command in compiled if command != binding)
    assert "-undefined dynamic_lookup -Wl,-rpath," in linked and "-ltorch_cpu -lc10" in linked
    assert "-lomp" not in linked and "-fopenmp" not in linked
