"""Rules every test of this repository runs under.

* Nothing is downloaded: the Hugging Face libraries are switched offline before they are imported.
* Every test starts from the same seed, on one thread: the suite is run by two workers on two cores, and these
  models are so small that a second thread costs more than it brings. A test of threading asks for its threads
  itself.
* A deprecation that Transformers announces, by warning or by log, fails the test in which it appears: the
  host's changes are to reach us as red tests. What we cannot change yet is listed in `ALLOWED_DEPRECATIONS`,
  with the reason.
* Memory that `kvcache_plugins` allocates without initializing it is filled with NaN (floats) or 0xAB bytes
  (integers), so that reading it before writing it shows. `@pytest.mark.no_poison` switches this off for one
  test (one that compiles a function which calls `Tensor.new_empty` needs it: the compiler cannot look through
  the replacement of a method).
* What quanto does in C++, Python does: its extension takes a minute to compile, in every new environment.
* `@pytest.mark.begun_first` tests, which take most of a minute in a process of their own, come before all
  others: workers that have those of a second left end together.
* `@pytest.mark.in_depth` tests, of simulated GPUs, of what kernels do to memory, of the PTX of nvcc, of
  whether broken kernels are found, and further cases of what takes many seconds, are run where `-m` names
  them: `-m in_depth`, by whoever changes a kernel, what runs on GPUs, or a tool of these tests, and by CI.
* `@pytest.mark.cuda` tests skip without a GPU; `KVCACHE_REQUIRE_CUDA=1` makes that skip, and any other skip
  of such a test, a failure. Only `@pytest.mark.cuda(devices=2)` and `cuda(free_gib=40)` are skipped even then
  where there are fewer GPUs, or less of the first one's memory is free.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported: where tests of threading have more threads than there are cores, OpenMP's must not
# spend their time spinning at barriers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import functools
import gc
import logging
import random
import re
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

# Regular expression (matched from the start of the message, ignoring case) -> why it is allowed for now.
# A colon cannot be used: pytest separates the parts of a warning filter with it. A single test uses
# `@pytest.mark.allow_deprecation("regex", reason="...")` instead.
ALLOWED_DEPRECATIONS: dict[str, str] = {}

_DEPRECATION = re.compile(r"deprecat|will be removed", re.IGNORECASE)
_PACKAGE = "kvcache_plugins"
_REQUIRE_CUDA = os.environ.get("KVCACHE_REQUIRE_CUDA") == "1"
_IN_DEPTH = "one of the tests in depth, which -m in_depth runs"
_LACK = pytest.StashKey[str]()
_NO_CUDA = "needs a CUDA device (KVCACHE_REQUIRE_CUDA=1 makes this a failure)"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "cuda(devices, free_gib): needs CUDA devices, and memory of the first; skipped without one, unless "
        "KVCACHE_REQUIRE_CUDA=1",
    )
    config.addinivalue_line("markers", "begun_first: takes so long that a worker would end alone with it")
    config.addinivalue_line("markers", "in_depth: takes long, and is run where -m names it")
    config.addinivalue_line("markers", "no_poison: leave uninitialized memory of kvcache_plugins as it is")
    config.addinivalue_line(
        "markers",
        "allow_deprecation(regex, reason): a deprecation message of Transformers this test may cause",
    )
    # A warning is attributed to the module `stacklevel` points at: Transformers itself, our package, or a
    # test module. Here rather than in the configuration file, so that the exceptions of
    # `ALLOWED_DEPRECATIONS` come after, and prevail.
    for module in ("transformers", _PACKAGE, r"(tests\.)?(\w+\.)*(test_\w+|conftest)$"):
        for category in ("DeprecationWarning", "FutureWarning"):
            config.addinivalue_line("filterwarnings", f"error::{category}:{module}")
    for pattern in ALLOWED_DEPRECATIONS:
        config.addinivalue_line("filterwarnings", f"ignore:{pattern}")
    config.pluginmanager.register(_Machine())
    logging.getLogger("transformers").addHandler(_LOGGED)
    cpp_extension.load = _loaded(cpp_extension.load)  # before quanto is imported, which keeps the function


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    in_depth = "in_depth" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("in_depth") is not None and not in_depth:
            item.add_marker(pytest.mark.skip(reason=_IN_DEPTH))
        if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=_NO_CUDA))
        for marker in item.iter_markers("allow_deprecation"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{marker.args[0]}"))
    items.sort(key=lambda item: item.get_closest_marker("begun_first") is None)  # the others as they come


def pytest_collection_finish(session: pytest.Session) -> None:
    # Thousands of tests and the libraries stay until the end: no collection of garbage needs to look at them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


# -- seeds, threads


@pytest.fixture(autouse=True)
def _same_start() -> None:
    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # `torch.manual_seed` also notes, with a traceback each, what to tell devices that may come later
        torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_num_threads(1)


# -- deprecations


class _DeprecationLog(logging.Handler):
    """Keeps what the Transformers logger says about deprecation."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if _DEPRECATION.search(message):
            self.messages.append(message)


_LOGGED = _DeprecationLog()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    _LOGGED.messages.clear()
    _let_the_host_speak()
    result = yield
    _let_the_host_speak()  # what a module's fixtures have run may have silenced it
    return result


def _let_the_host_speak() -> None:
    """As a fresh process would: our commands silence Transformers, and `warning_once` speaks once."""
    host_logging = sys.modules.get("transformers.utils.logging")
    if host_logging is not None:
        if host_logging.get_verbosity() != logging.WARNING:  # setting it, every logger forgets what it knows
            host_logging.set_verbosity_warning()
        host_logging.enable_progress_bar()
        host_logging.warning_once.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    result = yield
    allowed = [*ALLOWED_DEPRECATIONS, *(marker.args[0] for marker in item.iter_markers("allow_deprecation"))]
    unexpected = [m for m in _LOGGED.messages if not any(re.match(p, m, re.IGNORECASE) for p in allowed)]
    if unexpected:
        pytest.fail("Transformers logged a deprecation: " + " | ".join(unexpected), pytrace=False)
    return result


# -- quanto


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers in bytes: those in the lowest bits of all bytes, then the next."""
    return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])


def _loaded(load: Callable[..., Any]) -> Callable[..., Any]:
    """What loads extensions, of which quanto's for the CPU, which has this one function, is not compiled."""

    @functools.wraps(load)
    def wrapper(name: str, *args: Any, **kwargs: Any) -> Any:
        return types.SimpleNamespace(unpack=_unpack) if name == "quanto_cpp" else load(name, *args, **kwargs)

    return wrapper


# -- CUDA, device


class _Machine:
    """Skips what a machine lacks something for; apart, as it comes after what else prepares a test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if (lack := _lack_of(item)) is not None:
            item.stash[_LACK] = lack
            pytest.skip(lack)


def _lack_of(item: pytest.Item) -> str | None:
    """What a GPU that is there lacks for a test; `None` if nothing, or there is none."""
    marker = item.get_closest_marker("cuda")
    if marker is None or not marker.kwargs or not torch.cuda.is_available():
        return None
    devices, free_gib = marker.kwargs.get("devices", 1), marker.kwargs.get("free_gib", 0)
    if (count := torch.cuda.device_count()) < devices:
        return f"needs {devices} GPUs, and there is {count}"
    if free_gib and (free := torch.cuda.mem_get_info()[0] >> 30) < free_gib:
        return f"needs {free_gib} GiB of the GPU's memory, of which {free} are free"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (
        _REQUIRE_CUDA
        and report.skipped
        and _LACK not in item.stash
        and item.get_closest_marker("cuda")
        and not hasattr(report, "wasxfail")
    ):
        reason = call.excinfo.value if call.excinfo is not None else "skipped"
        report.outcome = "failed"
        report.longrepr = f"KVCACHE_REQUIRE_CUDA=1 forbids this skip: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = sum(_NO_CUDA in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} CUDA tests skipped: no device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device a test should cover."""
    return torch.device(request.param)


# -- eager attention


@pytest.fixture(scope="module")
def cuda_kernels() -> Iterator[None]:
    """The CUDA kernels serve the first GPU, checked in this process alone, before a test patches anything."""
    from kvcache_plugins.kernels import cuda_loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_CUDA_KERNELS", "1")
        assert cuda_loader.try_load(torch.device("cuda", 0)), cuda_loader.status().reason
        yield


@pytest.fixture
def eager_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager attention of models multiplies decoded tensors, as something to compare with."""
    from kvcache_plugins.attention import eager, products

    monkeypatch.setattr(eager, "_wanted_weights", lambda *_: "a test compares with it")
    monkeypatch.setattr(products, "_multiplied", lambda *_: None)


# -- uninitialized memory


def _poison(tensor: torch.Tensor) -> None:
    """Overwrites fresh memory of any dtype with a value nobody can mistake for data."""
    if tensor.requires_grad:
        with torch.no_grad():
            tensor.fill_(_poison_of(tensor.dtype))
    else:
        tensor.fill_(_poison_of(tensor.dtype))


@functools.cache
def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    # 0xAB in every byte.
    return int.from_bytes(b"\xab" * dtype.itemsize, "little", signed=dtype.is_signed)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps an allocating function so that calls from `kvcache_plugins` return poisoned memory."""

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        # First, and alone: a compiler evaluates this to a constant and never sees the frame inspection below.
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        result = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        ours = caller == _PACKAGE or caller.startswith(_PACKAGE + ".")
        if ours and type(result) is torch.Tensor and result.device.type != "meta":
            _poison(result)
        return result

    return wrapper


_PATCH = pytest.MonkeyPatch()


def _poison_empty_memory() -> None:
    for name in ("empty", "empty_like", "empty_strided"):
        _PATCH.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        _PATCH.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))


@pytest.fixture(scope="session", autouse=True)
def _poison_for_the_session() -> Iterator[None]:
    # For the session rather than for a test, so that what the fixtures of a module allocate is covered too.
    with torch.device("meta"):
        torch.empty(0)  # a context of a device knows these functions from its first use on, and no others
    _poison_empty_memory()
    yield
    _PATCH.undo()


@pytest.fixture(autouse=True)
def _poison_switch(request: pytest.FixtureRequest) -> Iterator[None]:
    spared = request.node.get_closest_marker("no_poison") is not None
    if spared:
        _PATCH.undo()
    yield
    if spared:
        _poison_empty_memory()
