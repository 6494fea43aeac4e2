"""Compiling a library, of a few lines in the place of the kernels."""

from __future__ import annotations

import ctypes
import logging
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache_plugins import KernelUnavailableError
from kvcache_plugins.kernels import compiler

SOURCES = Path(compiler.__file__).with_name("csrc") / "cpu"
KERNELS = [file for file in sorted(SOURCES.glob("*.cpp")) if not file.stem.endswith("binding")]
OTHERS = [name for name in ("clang++", "g++-13", "g++-14", "g++-15", "g++-16") if shutil.which(name)]
"""Compilers that are stricter than others about targets, and need not be the one that is used."""
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


def test_a_compiler_that_could_not_say_why(tmp_path: Path, sources: Path) -> None:
    """A full disk has no room for what it writes; the others are not waited for."""
    program = tmp_path / "clang"
    program.write_text('#!/bin/sh\ncase "$*" in *binding*) exit 1;; *) exec sleep 60;; esac\n')
    program.chmod(0o755)
    (sources / "later.cpp").write_text("int later;\n")
    (sources / "decode_attention_avx512.cpp").unlink()
    began = time.perf_counter()
    with pytest.raises(KernelUnavailableError, match=r"It has written nothing; \S+ has [\d,]+ bytes left"):
        compiler.compile_library(compiler.Compiler(str(program), "clang"), sources, tmp_path / "library.so")
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_nothing_of_x86_is_asked_of_other_processors(found: compiler.Compiler, file: Path) -> None:
    # headers of the system that another processor would have are missing here, and are no errors
    command = [found.path, "-std=c++20", "-M", "-MG", "-U__x86_64__", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert file.name in done.stdout
    assert "intrin.h" not in done.stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="targets are set on x86-64 alone")
@pytest.mark.parametrize(
    "file", [file for file in KERNELS if not file.stem.endswith("portable")], ids=lambda file: file.stem
)
def test_what_files_share_is_read_before_a_target_is_set(found: compiler.Compiler, file: Path) -> None:
    """Of an inline function one copy stays in the library, and every processor has to be able to run it."""
    command = [found.path, "-std=c++20", "-E", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    before: set[Path] = set()
    after: set[Path] = set()
    place, read = file, before
    for line in lines:
        marker = re.match(r'# \d+ "(.+)"', line)
        if marker is not None:
            place = Path(marker[1])
            read.add(place)
        elif place == file and line.startswith("#pragma") and "target(" in line:
            read = after
    first_read = after - before  # headers of the system may be read once more, which adds nothing
    command = [found.path, "-std=c++20", "-MM", "-MG", str(SOURCES / "binding.cpp")]
    rule = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    interface = {Path(name).name for name in rule.split()}
    assert SOURCES / "decode_attention.h" in before and "decode_attention.h" in interface
    assert {path.parent for path in first_read} == {SOURCES}
    assert not interface & {path.name for path in first_read}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_compilers_take_the_kernels(name: str, tmp_path: Path) -> None:
    flags = [flag for flag in compiler.FLAGS if flag != "-O3"]
    command = [name, *flags, "-c", *map(str, KERNELS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


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


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds a lock until it is killed."""
    pytest.importorskip("fcntl")
    hold = "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
    hold += "print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", hold, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_waits_for_a_lock_says_so_and_gets_it_when_the_holder_is_gone(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(compiler, "_SILENT_SECONDS", 0.15)
    monkeypatch.setattr(compiler, "_TIMEOUT_SECONDS", 0.0)  # of compilers: who builds may take longer
    threading.Timer(0.5, holder.kill).start()
    with caplog.at_level(logging.WARNING), compiler.file_lock(tmp_path / "lock"):
        (said,) = caplog.messages
    assert f"the process that has locked {tmp_path / 'lock'}, for up to 60 minutes" in said


def test_who_waits_for_a_lock_gives_up_in_the_end(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_LOCK_SECONDS", 0.2)
    with (
        pytest.raises(TimeoutError, match=r"lock has been locked for 0 s"),
        compiler.file_lock(tmp_path / "lock"),
    ):
        pass


def test_who_does_not_wait_for_a_lock_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fcntl")
    with caplog.at_level(logging.DEBUG), compiler.file_lock(tmp_path / "lock"):
        pass
    assert caplog.messages == []
