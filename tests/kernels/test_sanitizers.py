"""The kernels under the address and undefined-behaviour sanitizers, as a program of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvcache_plugins.kernels import compiler, loader

SOURCES = Path(compiler.__file__).with_name("csrc") / "cpu"
KERNELS = ("attend_latents", "decode_attention", "encode_unit")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Og", "-g1"]


@pytest.mark.slow
def test_no_kernel_reads_what_it_should_not(tmp_path: Path) -> None:
    found = compiler.find_compiler()
    if found is None or not loader.try_load():
        pytest.skip("no native library can be built here")
    program = tmp_path / "sanitize"
    kernels = [str(file) for name in KERNELS for file in sorted(SOURCES.glob(f"{name}_*.cpp"))]
    source = Path(__file__).with_name("sanitize.cpp")
    flags = [flag for flag in compiler.FLAGS if flag != "-O3"]
    command = [found.path, *flags, *SANITIZE, f"-I{SOURCES}", str(source), *kernels, "-o", str(program)]
    if not _links_sanitizers(found, tmp_path):
        pytest.skip(f"{found.description} has no sanitizers")
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run([str(program), "1500"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _links_sanitizers(found: compiler.Compiler, folder: Path) -> bool:
    """Whether the sanitizers' libraries, which are often packages of their own, are there."""
    (folder / "nothing.cpp").write_text("int main() {}\n")
    command = [found.path, *SANITIZE, str(folder / "nothing.cpp"), "-o", str(folder / "nothing")]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
