"""The kernels under the address and undefined-behavior sanitizers, as a program of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvcache_plugins.kernels import compiler, loader
from tests.kernels.cuda import emulation, kept

SOURCES = Path(compiler.__file__).with_name("csrc") / "cpu"
KERNELS = ("attend_latents", "decode_attention", "encode_unit", "receive_weights")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Og", "-g1"]


@pytest.mark.in_depth
def test_no_kernel_reads_what_it_should_not(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = compiler.find_compiler()
    if found is None or not loader.try_load():
        pytest.skip("no native library can be built here")
    if not _links_sanitizers(found, tmp_path):
        pytest.skip(f"{found.description} has no sanitizers")
    program = _built(found, kept.folder(request.config, "sanitizers") or tmp_path)
    done = subprocess.run([str(program), "1500"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _built(found: compiler.Compiler, folder: Path) -> Path:
    """The program in `folder`, built unless it is there."""
    kernels = [str(file) for name in KERNELS for file in sorted(SOURCES.glob(f"{name}_*.cpp"))]
    source = Path(__file__).with_name("sanitize.cpp")
    flags = [flag for flag in compiler.FLAGS if flag != "-O3"]
    read = sorted([*SOURCES.iterdir(), *source.parent.glob("sanitize*")])
    parts = [found.description, *flags, *SANITIZE, *(f"{file.name}\n{file.read_text()}" for file in read)]
    program = folder / f"sanitize-{emulation.key_of(parts)}.program"
    if not kept.is_there(program):
        new = program.with_suffix(f".{os.getpid()}.new")  # another test process may be building it, too
        command = [found.path, *flags, *SANITIZE, f"-I{SOURCES}", str(source), *kernels, "-o", str(new)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert built.returncode == 0, built.stderr[-4000:]
        new.replace(program)
    return program


def _links_sanitizers(found: compiler.Compiler, folder: Path) -> bool:
    """Whether the sanitizers' libraries, which are often packages of their own, are there."""
    (folder / "nothing.cpp").write_text("int main() {}\n")
    command = [found.path, *SANITIZE, str(folder / "nothing.cpp"), "-o", str(folder / "nothing")]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
