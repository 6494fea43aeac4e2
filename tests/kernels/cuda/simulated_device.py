"""Two GPUs played by main memory, so that what is written for GPUs runs on a machine without one.

`install` gives a torch without CUDA tensors of the CUDA device type (`simulated_device.cpp`), our kernels
as the emulated GPU runs them, called for that device type, and a `torch.cuda` with streams that do
everything at once, events that tell the time, and graphs that repeat what was recorded. Operators refuse
tensors of two devices, and waiting for a device is refused or told as `torch.cuda.set_sync_debug_mode` wants
it, and refused while a graph is recorded. It is for a process of its own: nothing is undone. As a plugin of
pytest,

    python -m pytest -p tests.kernels.cuda.simulated_device -m cuda

runs the tests marked `cuda` that do not say `simulated=False`. It shows nothing about the machine code, time,
the order of what runs at the same time, or random numbers: generators are those of the CPU. There is no
backward pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_plugins.kernels import compiler, cuda_check, cuda_loader
from kvcache_plugins.kernels.ops import SCHEMAS
from kvcache_plugins.layers import offloading
from tests.kernels.cuda import emulation, kept

_SOURCE = Path(__file__).with_suffix(".cpp")
_FOLDER = "KVCACHE_SIMULATION"
"""Environment variable: where builds are kept, instead of pytest's cache or a temporary directory."""
_DEFAULT = "KVCACHE_SIMULATION_DEFAULT"
"""With 1, tensors are made on a simulated device where nothing else is said."""
_MOST = "KVCACHE_SIMULATION_MOST"
"""So many parameter sets of a test are run at most; all if unset."""
_installed: list[ctypes.CDLL] = []
_operators = torch.library.Library("aten", "IMPL")
_served = torch.library.Library("kvcache_plugins", "IMPL")


def build(folder: Path) -> tuple[Path, Path]:
    """Compile the devices and the kernels for them into `folder`, unless they are there."""
    kernels = emulation.build(emulation.SOURCES, folder)
    return build_devices(folder), kernels


def build_devices(folder: Path) -> Path:
    """Compile devices into `folder`, unless they are there."""
    found = compiler.find_compiler()
    assert found is not None
    parts = (torch.__version__, found.description, _SOURCE.read_text())
    key = hashlib.sha256("".join(parts).encode()).hexdigest()
    device = folder / f"device-{key[:16]}.so"
    with compiler.file_lock(folder / "device.lock"):
        if not kept.is_there(device):
            library = Path(torch.__file__).parent / "lib"
            new = device.with_suffix(".new")
            command = [found.path, "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]
            command += [*compiler._binding_options(), str(_SOURCE), "-o", str(new)]
            command += [f"-L{library}", "-ltorch_cpu", "-lc10"]
            subprocess.run(command, check=True)
            new.replace(device)
    return device


def install(folder: Path | None = None) -> None:
    """Make the devices, and the kernels on them, those of this process."""
    if _installed:
        return
    if torch.version.cuda is not None:
        raise RuntimeError("simulated devices need a torch without CUDA")
    folder = folder or Path(os.environ.get(_FOLDER) or tempfile.mkdtemp(prefix="kvcache-simulation-"))
    device, kernels = build(folder)
    library = ctypes.CDLL(str(device))
    library.kvcache_simulate(False)
    library.kvcache_simulated_bytes.restype = ctypes.c_int64
    library.kvcache_most_simulated_bytes.restype = ctypes.c_int64
    _installed.append(library)
    torch.version.cuda = "simulated"
    _operators.impl("_scaled_dot_product_flash_attention", _flash_attention, "CUDA")
    for name, fake in vars(_fakes(library)).items():
        setattr(torch.cuda, name, fake)
    for name in ("is_available", "device_count", "synchronize", "empty_cache"):
        setattr(torch.accelerator, name, getattr(torch.cuda, name))
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    offloading._pinned_like = lambda states, device: torch.empty_like(states, device="cpu")
    torch.Generator = _Generator  # type: ignore[misc]
    torch.UntypedStorage.clone = _cloned  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    os.environ["KVCACHE_CUDA_KERNELS"] = "1"  # another process has no such devices
    os.environ["KVCACHE_EMULATED_SIMULATION"] = "1"  # to the kernels
    cuda_loader._find_or_build = lambda force: _load(kernels)
    cuda_loader._target = lambda: kernels
    # Seconds, for the loader and for whoever asks again; the whole check is run by test_loading.
    cuda_check._CALLS = cuda_check._CALLS[5:6]
    cuda_check.find_deviation = functools.cache(cuda_check.find_deviation)


@functools.cache
def _load(kernels: Path) -> Path:
    """Register the emulated kernels, and calls of them for tensors of the devices."""
    emulation.load(kernels)
    for name in SCHEMAS:
        _served.impl(name, _emulated(getattr(torch.ops.kvcache_emulated, name).default), "CUDA")
    return kernels


def _emulated(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *arguments: operator.redispatch(cpu, *arguments)


def pytest_configure(config: pytest.Config) -> None:
    if compiler.find_compiler() is None:
        raise pytest.UsageError("simulated devices need a C++ compiler")
    install(None if _FOLDER in os.environ else kept.folder(config, "emulated_cuda"))
    if os.environ.get(_DEFAULT) == "1":
        torch.set_default_device("cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("cuda")
        if marker is not None and not marker.kwargs.get("simulated", True):
            item.add_marker(pytest.mark.skip(reason="needs a GPU that is there"))
    most = int(os.environ.get(_MOST, 0))
    if most:
        chosen = {id(item) for group in _by_function(items) for item in _spread(group, most)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]


def _by_function(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    return list(groups.values())


def _spread(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most so many items, from the first to the last."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _fakes(library: ctypes.CDLL) -> types.SimpleNamespace:
    """What of `torch.cuda` is replaced."""
    count = 2

    def index(device: Any = None) -> int:
        device = torch.device(device) if isinstance(device, str) else device
        given = device.index if isinstance(device, torch.device) else device
        return library.kvcache_simulated_device() if given is None or given < 0 else given

    def properties(device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="simulated GPU", major=9, minor=0, multi_processor_count=2, L2_cache_size=1 << 17,
            total_memory=1 << 34, shared_memory_per_block_optin=232448,
        )  # fmt: skip

    def set_device(device: Any) -> None:
        device = torch.device(device) if isinstance(device, str) else device
        if isinstance(device, torch.device) and device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, got {device}")  # as torch
        library.kvcache_set_simulated_device(index(device))

    def set_sync_debug_mode(mode: int | str) -> None:
        modes = {"default": 0, "warn": 1, "error": 2}
        library.kvcache_set_simulated_waits(modes[mode] if isinstance(mode, str) else mode)

    return types.SimpleNamespace(
        _lazy_init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: count,
        current_device=index,
        set_device=set_device,
        _exchange_device=lambda given: library.kvcache_set_simulated_device(index(given)),
        _maybe_exchange_device=lambda given: library.kvcache_set_simulated_device(index(given)),
        get_device_name=lambda device=None: "simulated GPU",
        get_device_capability=lambda device=None: (9, 0),
        get_device_properties=properties,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (1 << 30, 1 << 34),
        memory_allocated=lambda device=None: library.kvcache_simulated_bytes(index(device)),
        max_memory_allocated=lambda device=None: library.kvcache_most_simulated_bytes(index(device), 0),
        reset_peak_memory_stats=lambda device=None: library.kvcache_most_simulated_bytes(index(device), 1),
        get_sync_debug_mode=lambda: library.kvcache_simulated_waits(),
        set_sync_debug_mode=set_sync_debug_mode,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        is_current_stream_capturing=lambda: bool(_Graph.recording),
        Stream=_Stream,
        current_stream=_Stream,
        stream=contextlib.nullcontext,
        Event=_Event,
        CUDAGraph=_Graph,
        graph=_recorded,
    )


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What torch's operator for GPUs returns, which the CPU does not have."""
    assert query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0 and not is_causal
    rows, keys, values = (states.cpu().float() for states in (query, key, value))
    logits = torch.einsum("bhqd,bhkd->bhqk", rows, keys) * (scale or query.shape[-1] ** -0.5)
    weights = logits.softmax(-1).to(query.dtype).float()
    output = torch.einsum("bhqk,bhkd->bhqd", weights, values).to(query)
    nothing = output.new_empty(0)
    counts = (nothing, nothing, query.shape[2], key.shape[2])
    return output, logits.logsumexp(-1).to(query.device), *counts, nothing, nothing, nothing


class _Generator(torch.Generator):
    """A generator of the CPU for every device: there the numbers are made."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls, "cpu")


def _cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """What `UntypedStorage.clone` returns, which knows the devices torch was built for."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return content.clone().untyped_storage()


class _Stream:
    """A stream on which nothing is ever left to do."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = device

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass


class _Event:
    """A moment."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.seconds - self.seconds)


class _Graph:
    """Operators with their tensors, which are run again over the same memory."""

    recording: bool = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, result))
        return result


@contextlib.contextmanager
def _recorded(graph: _Graph, **options: Any) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    _Graph.recording = True
    try:
        with _Recorder(graph):
            yield
    finally:
        _Graph.recording = False
        torch.cuda.set_sync_debug_mode(before)


def _tensors(result: Any) -> list[torch.Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [entry for entry in results if isinstance(entry, torch.Tensor)]
