"""Building and finding the native library, and every way in which that fails: each in its own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins import KernelUnavailableError
from kvcache_plugins.cli import main
from kvcache_plugins.kernels import builds, compiler, loader
from kvcache_plugins.kernels.selection import select_kernel
from tests.kernels import fresh_process

ATTEND = """
    import warnings, torch
    from kvcache_plugins.backends.int8 import Int8Config, Int8Layer
    from kvcache_plugins.attention.native import attend_handles
    from kvcache_plugins.attention.reference import AttentionOptions
    from kvcache_plugins.kernels import loader
    from kvcache_plugins.models.facts import LayerFacts

    def attend():
        layer = Int8Layer(Int8Config(residual_length=0), 0, LayerFacts())
        layer.update(torch.randn(1, 2, 100, 32), torch.randn(1, 2, 100, 32))
        key, value = layer.update(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32))
        output = attend_handles(torch.randn(1, 4, 1, 32), key, value, AttentionOptions())
        assert torch.isfinite(output).all()
        return layer.kernel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = [attend(), attend()]
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    print("kernels", *kernels)
    print("warnings", len(said))
    print(*said)
"""


def python(code: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCACHE_") and k != "CXX"}
    environment |= {"KVCACHE_KERNEL_CACHE": str(cache), **variables}
    return fresh_process.run(code, environment)


def attend(cache: Path, **variables: str) -> tuple[list[str], int, str]:
    """Kernels that served two calls, number of warnings, and what they said."""
    done = python(ATTEND, cache, **variables)
    assert done.returncode == 0, done.stderr
    kernels, count, *said = done.stdout.splitlines()
    return kernels.split()[1:], int(count.split()[1]), "\n".join(said)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with an intact build: this user's, or a new one."""
    if loader.status().compiler is None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("built")
    shutil.copy(loader.build(), directory)
    return directory


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A copy of that, to be damaged."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


@pytest.fixture
def broken_compiler(tmp_path: Path) -> Path:
    """A compiler that answers `--version` and fails at everything else."""
    return script(tmp_path / "broken", 'echo "fatal: the disk is made of cheese" >&2; exit 3')


def script(path: Path, body: str) -> Path:
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "test 1.0" && exit 0\n{body}\n')
    path.chmod(0o755)
    return path


def test_importing_builds_nothing(tmp_path: Path) -> None:
    code = """
        import kvcache_plugins, kvcache_plugins.attention.dispatch, kvcache_plugins.kernels.loader as loader
        print(loader.status().state)
    """
    environment = os.environ | {"KVCACHE_KERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", textwrap.dedent(code)]  # a process that has imported nothing
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() in (["missing"], ["unavailable"])
    assert not (tmp_path / "cache").exists()


def test_a_cached_build_is_used(cache: Path) -> None:
    assert attend(cache) == (["cpu", "cpu"], 0, "")
    # neither a compiler nor the permission to build is needed for it
    assert attend(cache, KVCACHE_NO_BUILD="1")[:2] == (["cpu", "cpu"], 0)
    assert attend(cache, CXX="/no/compiler")[:2] == (["cpu", "cpu"], 0)


def test_building_forbidden(tmp_path: Path) -> None:
    kernels, count, said = attend(tmp_path / "cache", KVCACHE_NO_BUILD="1")
    assert kernels == ["torch", "torch"] and count == 1
    assert "plain torch" in said and "KVCACHE_NO_BUILD" in said
    assert not (tmp_path / "cache").exists()


def test_no_compiler(tmp_path: Path) -> None:
    kernels, count, said = attend(tmp_path / "cache", CXX="/no/compiler")
    assert kernels == ["torch", "torch"] and count == 1
    assert "no C++ compiler was found (CXX=/no/compiler)" in said


def test_where_builds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVCACHE_KERNEL_CACHE", raising=False)
    for given in (None, "", "relative/cache"):  # such a path is to be ignored, says its specification
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if given is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert builds.cache_directory() == tmp_path / ".cache" / "kvcache_plugins"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert builds.cache_directory() == tmp_path / "other" / "kvcache_plugins"
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", "~/kernels")
    assert builds.cache_directory() == tmp_path / "kernels"


def test_cache_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # a directory below a file cannot be made, whoever asks
    kernels, count, said = attend(tmp_path / "file" / "cache")
    assert kernels == ["torch", "torch"] and count == 1
    assert "cannot be used" in said and "KVCACHE_KERNEL_CACHE" in said


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    kernels, count, said = attend(tmp_path)
    assert kernels == ["torch", "torch"] and count == 1 and "cannot be used" in said


def test_failing_compiler(tmp_path: Path, broken_compiler: Path) -> None:
    kernels, count, said = attend(tmp_path / "cache", CXX=str(broken_compiler))
    assert kernels == ["torch", "torch"] and count == 1
    assert "exit status 3" in said and "made of cheese" in said
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("build-*"))


def test_native_kernel_names_the_failure(tmp_path: Path, broken_compiler: Path) -> None:
    code = """
        from transformers import LlamaConfig
        import kvcache_plugins as kvp
        config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
        try:
            kvp.build_cache(config, {"backend": "int8", "kernel": "native"})
        except kvp.KernelUnavailableError as error:
            print(error)
    """
    done = python(code, tmp_path / "cache", CXX=str(broken_compiler))
    assert "kernel='native'" in done.stdout and "made of cheese" in done.stdout, done.stderr


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty"])
def test_corrupted_build_that_cannot_be_rebuilt(cache: Path, damage: str, broken_compiler: Path) -> None:
    """Never mapped, hence never a crash; with a compiler it is rebuilt (see the next test)."""
    (library,) = cache.glob("*.so")
    content = bytearray(library.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "overwritten":
        content[len(content) // 2 :: 100] = bytes(len(content[len(content) // 2 :: 100]))
    else:
        content.clear()
    library.write_bytes(content)
    kernels, count, said = attend(cache, KVCACHE_NO_BUILD="1")
    assert kernels == ["torch", "torch"] and count == 1 and "none is cached" in said
    kernels, count, said = attend(cache, CXX=str(broken_compiler))
    assert kernels == ["torch", "torch"] and count == 1 and "made of cheese" in said


def test_corrupted_build_is_rebuilt_by_one_of_two_processes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a compiler that takes its time, and whose library is the one there was."""
    (library,) = cache.glob("*.so")
    intact, log, made = library.read_bytes(), tmp_path / "calls", tmp_path / "made.so"
    made.write_bytes(intact[: -builds._DIGEST_BYTES])
    body = f"""
        echo "$@" >> {log}
        case " $* " in *" -shared "*) sleep 1; source={made};; *) source=/dev/null;; esac
        while [ "$1" != -o ]; do shift; done
        exec cp $source "$2"
    """
    monkeypatch.setenv("CXX", str(script(tmp_path / "g++", textwrap.dedent(body))))
    found = compiler.find_compiler()
    assert found is not None
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(cache))
    target = loader._target(found)
    target.write_bytes(intact[:1000])
    library.unlink()
    for done in fresh_process.run_together([ATTEND] * 2):
        assert done.stdout.startswith("kernels cpu cpu\nwarnings 0"), done.stderr
    assert target.read_bytes() == intact
    calls = log.read_text().splitlines()
    assert len([line for line in calls if "-shared" in line]) == 1
    assert len(calls) == 1 + len(list(loader._SOURCES.glob("*.cpp")))


def test_status_never_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCACHE_CPU_ISA", "sse9")
    assert loader.status().state in ("loaded", "cached", "missing", "unavailable")
    monkeypatch.setattr(loader, "_library", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    assert loader.status().state in ("missing", "unavailable")


def age(path: Path, days: float) -> Path:
    """Make a file, or let an existing one be, last used so long ago."""
    path.touch()
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


def build_name(digit: str) -> str:
    return f"cpu-{digit * 16}-{digit * 16}.so"


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory, and a compiler at whose place an empty file is installed as it was found."""
    found = compiler.Compiler("/usr/bin/c++", "test 1.0")
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.delenv("KVCACHE_NO_BUILD", raising=False)
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(compiler, "find_compiler", lambda: found)
    monkeypatch.setattr(
        compiler, "compile_library", lambda found, sources, target, seal: target.open("a").close()
    )
    return tmp_path


def test_installing_removes_what_was_not_used_for_90_days(installs: Path) -> None:
    status = loader.status()
    assert status.path is not None and status.path.parent == installs
    kept = {age(status.path, 200), age(installs / build_name("a"), 89), installs / build_name("d")}
    (installs / build_name("d")).mkdir()  # what cannot be removed is left
    os.utime(installs / build_name("d"), (1, 1))
    other = ["libtorch.so", "cpu-notes.so", build_name("A"), f"{build_name('a')}.old", f"x{build_name('a')}"]
    kept |= {age(installs / name, 200) for name in other}
    kept |= {age(installs / build_name("a").replace(".so", ".lock"), 200)}
    gone = {age(installs / build_name(digit), 91) for digit in "0f"}
    gone |= {age(installs / build_name("0").replace(".so", ".lock"), 91)}
    of_a_gpu = build_name("1").replace("cpu", "cuda")
    names = (of_a_gpu, *(of_a_gpu.replace(".so", end) for end in (".lock", ".trial.lock", ".0a1b.trial")))
    gone |= {age(installs / name, 91) for name in names}
    assert loader._find_or_build(force=True) == (status.path, None)
    assert set(installs.iterdir()) == kept | {status.path.with_suffix(".lock")}
    assert not kept & gone


def test_installing_removes_what_killed_builds_have_left(installs: Path) -> None:
    left, under_way, other = (
        installs / name for name in (".kvcache-build-1f", ".kvcache-build-cuda-2e", "build-1")
    )
    for directory in (left, under_way, other):
        directory.mkdir()
        (directory / "binding.o").touch()
    for directory in (left, other):
        age(directory, 2)
    loader._find_or_build(force=True)
    assert not left.exists()
    assert under_way.exists() and other.exists()


def test_finding_removes_nothing(installs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "is_intact", lambda path: True)
    monkeypatch.setattr(loader, "_load", lambda path: None)
    old = age(installs / build_name("0"), 200)
    assert loader._find_or_build(force=False) == (loader.status().path, None)
    assert old.exists()


def test_another_process_may_remove_the_same(installs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [age(installs / build_name(digit), 91) for digit in "01"]
    (installs / build_name("2")).symlink_to(installs / "gone")  # listed, but no longer there
    found = builds.cached_builds()
    assert list(found) == paths
    paths[0].unlink()
    monkeypatch.setattr(builds, "cached_builds", lambda: found)
    loader._find_or_build(force=True)
    assert not paths[1].exists()


@pytest.mark.parametrize("is_allowed", [True, False])
def test_loading_renews_the_time_of_last_use(cache: Path, is_allowed: bool) -> None:
    (library,) = cache.glob("*.so")
    age(library, 200)
    code = f"""
        import os
        from kvcache_plugins.kernels import loader

        def refuse(*args, **kwargs):
            raise PermissionError("a read-only directory")

        if not {is_allowed}:
            os.utime = refuse
        print(loader.build())
    """
    assert python(code, cache).stdout.split() == [str(library)]
    assert (time.time() - library.stat().st_mtime < 86400) is is_allowed


def test_status_counts_the_builds(installs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for digit, size in (("0", 3), ("f", 5)):
        (installs / build_name(digit)).write_bytes(bytes(size * 2**20))
    (installs / "libtorch.so").write_bytes(bytes(100))
    assert main(["kernels", "status"]) == 0
    assert "cached builds:   2 (8.0 MiB)" in capsys.readouterr().out.splitlines()


def test_many_threads_load_once(cache: Path) -> None:
    code = """
        import threading
        from kvcache_plugins.kernels import loader
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(loader.try_load())) for _ in range(16)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(answers == [True] * 16)
    """
    assert python(code, cache).stdout.strip() == "True"


def test_a_forked_child_attends(cache: Path) -> None:
    """OpenMP's threads do not survive a fork; the kernel must not wait for them."""
    code = textwrap.dedent(ATTEND) + textwrap.dedent("""
        import os
        torch.set_num_threads(2)
        layer = Int8Layer(Int8Config(residual_length=0), 0, LayerFacts())
        layer.update(torch.randn(1, 2, 5000, 64), torch.randn(1, 2, 5000, 64))
        key, value = layer.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        query = torch.randn(1, 4, 1, 64)
        expected = attend_handles(query, key, value, AttentionOptions())
        child = os.fork()
        if child == 0:
            got = attend_handles(query, key, value, AttentionOptions())
            os._exit(0 if torch.allclose(got, expected, atol=1e-4) else 1)
        print("child", os.waitpid(child, 0)[1])
    """)
    done = python(code, cache)
    assert done.stdout.splitlines()[-1] == "child 0", done.stderr


def test_failure_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(force: bool) -> Any:
        calls.append(force)
        raise KernelUnavailableError("no")

    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", None)
    monkeypatch.setattr(loader, "_find_or_build", fail)
    with pytest.warns(RuntimeWarning, match="plain torch.*no"):
        assert not loader.try_load()
    assert not loader.try_load()
    with pytest.raises(KernelUnavailableError):
        loader.build()
    assert calls == [False]
    with pytest.raises(KernelUnavailableError, match=r"kernel='native'.*'kivi'.*kernel='torch'.*no"):
        select_kernel("native", "kivi")
    assert select_kernel("auto", "kivi") == select_kernel("torch", "kivi") == "torch"
