"""When CUDA kernels are built, when they are trusted, and what serves otherwise. Needs no GPU."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.attention.description import describe
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import builds, cuda_check, cuda_inputs, cuda_loader, cuda_writing_check
from kvcache_plugins.kernels.cuda_check import samples
from kvcache_plugins.kernels.cuda_inputs import on_device
from kvcache_plugins.kernels.cuda_toolkit import Toolkit
from kvcache_plugins.kernels.layout import FORMATS, Side
from tests.kernels.cuda import emulation
from tests.kernels.decode_cases import CASES, build_layer, step

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has loaded no CUDA kernels, and a GPU of which nothing is asked."""
    monkeypatch.setenv("KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_loader, "_path", None)
    monkeypatch.setattr(cuda_loader, "_failure", None)
    monkeypatch.setattr(cuda_loader, "_checked", set())
    monkeypatch.setattr(cuda_loader, "_faults", {})
    monkeypatch.setattr(cuda_loader, "_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(cuda_loader, "find_toolkit", lambda: Toolkit("nvcc", "release 13.0", None))
    monkeypatch.setattr(cuda_loader, "_why_no_device", lambda: None)
    monkeypatch.setattr(cuda_loader, "_why_not_buildable", lambda: None)
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_none() -> None:
    status = cuda_loader.status()
    assert status.state == "unavailable" and status.reason
    with pytest.raises(KernelUnavailableError):
        cuda_loader._find_or_build(False)


def test_nothing_is_trusted_unchecked(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[torch.device] = []
    monkeypatch.setattr(cuda_loader, "_find_or_build", lambda force: fresh / "library.so")
    monkeypatch.setattr(cuda_check, "find_deviation", lambda device: checks.append(device))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_loader.try_load(DEVICE) and cuda_loader.try_load(DEVICE)
    assert checks == [DEVICE]
    assert cuda_loader.status().state == "loaded"


def test_a_deviation_disables_them(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loader, "_find_or_build", lambda force: fresh / "library.so")
    monkeypatch.setattr(cuda_check, "find_deviation", lambda device: "2 bit: attention deviates by 0.3")
    with pytest.warns(RuntimeWarning, match=r"plain torch.*failed their check on cuda:0: 2 bit.*by 0\.3"):
        assert not cuda_loader.try_load(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cuda_loader.try_load(DEVICE)
    assert cuda_loader.status().state == "unavailable"


def test_a_check_that_breaks_disables_them(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cuda_loader, "_find_or_build", lambda force: fresh / "library.so")
    monkeypatch.setattr(cuda_check, "find_deviation", fail)
    with pytest.warns(RuntimeWarning, match="an illegal memory access"):
        assert not cuda_loader.try_load(DEVICE)


def test_building_may_be_forbidden(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("KVCACHE_NO_BUILD", "1")
    reason = cuda_loader._why_not_buildable()
    assert reason is not None and "KVCACHE_NO_BUILD" in reason


def test_a_build_is_sealed_and_found_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    def build(*, name: str, build_directory: str, sources: list[str], **options: Any) -> None:
        assert len(sources) == len(cuda_loader.sources()) and options["is_python_module"] is False
        (Path(build_directory) / f"{name}.so").write_bytes(b"machine code")

    loaded: list[str] = []
    monkeypatch.setattr(cpp_extension, "load", build)
    monkeypatch.setattr(builds.ctypes, "CDLL", loaded.append)
    path = cuda_loader.build()
    assert path.parent == fresh and path.name.startswith("cuda-") and builds.is_intact(path)
    assert not loaded and not list(fresh.glob("build-*"))  # torch has loaded what it built
    monkeypatch.setattr(cuda_loader, "_path", None)
    assert cuda_loader.status().state == "cached"
    assert cuda_loader.build() == path and loaded == [str(path)]

    def refuse(path: str) -> None:
        raise OSError("undefined symbol")

    # intact, but not for this torch: built again
    path.write_bytes(builds.sealed(b"of another torch"))
    monkeypatch.setattr(builds.ctypes, "CDLL", refuse)
    monkeypatch.setattr(cuda_loader, "_path", None)
    assert cuda_loader.build() == path and path.read_bytes() == builds.sealed(b"machine code")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("ninja: nvcc fatal: the disk is made of cheese"), "do not build:\\nninja: .* cheese"),
        (ValueError("Unknown CUDA arch (9.x)"), r"ValueError: Unknown CUDA arch \(9\.x\)"),
        (KeyError("sm_90"), "KeyError: 'sm_90'"),
        (IndexError("list index out of range"), "IndexError: list index"),
        # the twenty last lines, of which none is of a command that has succeeded
        (
            RuntimeError(
                "\n".join(["Error", *20 * ["[1/2] nvcc a"], "FAILED: b", *20 * ["[2/2] nvcc c"], "fatal"])
            ),
            "do not build:\nError\nFAILED: b\nfatal$",
        ),
        (FileNotFoundError(2, "No such file", "/no/bin/nvcc"), "No such file: '/no/bin/nvcc'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_build_that_fails_says_why(
    error: Exception, said: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    def build(**options: Any) -> None:
        raise error

    monkeypatch.setattr(cpp_extension, "load", build)
    with pytest.warns(RuntimeWarning, match=said):
        assert not cuda_loader.try_load(DEVICE)
    assert not list(fresh.iterdir()) or [path.suffix for path in fresh.iterdir()] == [".lock"]
    with pytest.raises(KernelUnavailableError, match=said):
        cuda_loader.build()


def test_a_build_without_a_library_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "load", lambda **options: None)
    with pytest.raises(KernelUnavailableError, match="do not build"):
        cuda_loader.build()


def test_a_driver_that_fails_is_no_end(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(cuda_loader, "_why_no_device", fail)
    with pytest.warns(RuntimeWarning, match="AssertionError: Invalid device id"):
        assert not cuda_loader.try_load(DEVICE)


@pytest.fixture
def loads_without_a_driver(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was built; whatever asks the driver fails, as torch says it."""

    def fail(*arguments: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    built: list[bool] = []
    monkeypatch.setattr(cuda_loader, "_find_or_build", built.append)
    for name in ("current_device", "get_device_capability", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, fail)
    return built


@pytest.mark.parametrize("device", [DEVICE, torch.device("cuda")], ids=str)
@pytest.mark.parametrize("is_available", [False, True], ids=["no device", "broken"])
def test_no_driver_is_no_end(
    is_available: bool,
    device: torch.device,
    loads_without_a_driver: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor a reason to build, not even where builds for others are asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    reason = "torch sees no GPU" if not is_available and device.index == 0 else "Found no NVIDIA driver"
    with pytest.warns(RuntimeWarning, match=rf"plain torch.*: {reason}"):
        assert not cuda_loader.try_load(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cuda_loader.try_load(device)
    assert reason in cuda_loader.why_not(device)
    status = cuda_loader.status()
    assert status.state == "unavailable" and reason in (status.reason or "")
    assert loads_without_a_driver == []


def test_status_without_an_answer_of_the_driver(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("device >= 0 && device < num_gpus INTERNAL ASSERT FAILED")

    monkeypatch.setattr(cuda_loader, "_why_no_device", fail)
    status = cuda_loader.status()
    assert status.state == "unavailable" and "INTERNAL ASSERT FAILED" in (status.reason or "")


def test_kernels_that_are_not_wanted_need_no_driver(
    loads_without_a_driver: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "0")
    for device in (DEVICE, torch.device("cuda")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not cuda_loader.try_load(device)
        assert cuda_loader.why_not(device) == "KVCACHE_CUDA_KERNELS=0 leaves them out."


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of torch itself."""
    monkeypatch.setattr(cuda_loader, "_failure", None)
    expected = "has no CUDA" if torch.version.cuda is None else "sees no GPU"
    with pytest.warns(RuntimeWarning, match=expected):
        assert not cuda_loader.try_load(DEVICE)
    assert expected in cuda_loader.why_not(DEVICE)


def test_the_check_of_working_kernels(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself, with the emulated kernels in the place of a GPU's."""
    emulate(monkeypatch)
    attend, kernels = cuda_check.decode_attention, set()

    def watched(query: torch.Tensor, records: torch.Tensor, keys: Side, values: Side, **options: Any) -> Any:
        if cuda_inputs.is_fast(query.dtype, records.shape[3], keys, values, 232448):
            rows = query.shape[1] // records.shape[1] * query.shape[2]
            kernels.add(
                ("levels" if keys.levels is not None else "codes", rows > 8, values.layout.head_dim > 128)
            )
        else:
            kernels.add("general wide" if keys.layout.head_dim > 256 else "general")
        return attend(query, records, keys, values, **options)

    monkeypatch.setattr(cuda_check, "decode_attention", watched)
    assert cuda_check.find_deviation(torch.device("cpu")) is None
    codes = {("codes", False, False), ("codes", True, False), ("codes", False, True)}
    assert kernels >= codes | {"general", "general wide", ("levels", False, False), ("levels", False, True)}


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def coarse_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


ONE_OF_EACH_KIND = (
    "2 bit, 32 tokens", "4 bit, 64 tokens, rotated", "4 bit per token and sinks", "symmetric per token",
    "e4m3 per token", "3 bit levels with outliers and sinks",
)  # fmt: skip
"""Of the formats. What a user sets reaches the same calls of torch, however many bits there are."""


def one_of_each_kind(*args: Any) -> Iterator[cuda_check.Sample]:
    found = [sample for sample in samples(*args) if sample.name in ONE_OF_EACH_KIND]
    assert len(found) == len(ONE_OF_EACH_KIND)
    return iter(found)


@pytest.mark.parametrize(
    "state",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.enable_grad,
        default_dtype,
        coarse_products,
    ],
    ids=["autocast", "default device", "gradients", "default dtype", "coarse products"],
)
def test_the_check_whatever_the_user_has_set(
    state: Callable[[], Any], emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(cuda_check, "_CALLS", cuda_check._CALLS[5:])
    monkeypatch.setattr(cuda_check, "samples", one_of_each_kind)
    drawn = torch.random.get_rng_state()
    with state():
        before = torch.get_default_dtype()
        assert cuda_check.find_deviation(torch.device("cpu")) is None
        assert torch.get_default_dtype() == before
    assert torch.equal(torch.random.get_rng_state(), drawn)


_CHECKS = {
    cuda_check: ("decode_attention", "decode_tokens", "gather_tokens"),
    cuda_writing_check: ("append_tokens", "encode_levels", "encode_tokens"),
}
_OPERATORS = {name: module for module, names in _CHECKS.items() for name in names}
"""Every operator, and the module whose check calls it."""


@pytest.mark.parametrize("name", _OPERATORS)
def test_the_check_of_broken_kernels(name: str, emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel read codes of the record beside the right one."""
    emulate(monkeypatch)
    monkeypatch.setattr(cuda_check, "_CALLS", cuda_check._CALLS[5:6] if name == "decode_attention" else ())
    working = getattr(_OPERATORS[name], name)

    def broken(*args: Any, **options: Any) -> Any:
        place = next(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype == torch.uint8)
        moved = args[place].clone()
        moved[..., :-1] = args[place][..., 1:]
        result = working(*args[:place], moved, *args[place + 1 :], **options)
        if _OPERATORS[name] is cuda_writing_check:
            args[0][..., 1:] = moved[..., :-1]
        return result

    monkeypatch.setattr(_OPERATORS[name], name, broken)
    found = cuda_check.find_deviations(torch.device("cpu"))
    assert found and all("deviates" in deviation or "differ" in deviation for deviation in found)
    if name == "decode_attention":
        formats = len(list(cuda_check.samples(torch.float16, 128, 2)))
        assert len(found) == formats and all(
            "3 queries, torch.float16, bias: attention" in said for said in found
        )


def test_deviations_are_told_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [f"{i} bit: differs" for i in range(9)]
    monkeypatch.setattr(cuda_check, "find_deviations", lambda device: found)
    said = "0 bit: differs; 1 bit: differs; 2 bit: differs"
    assert cuda_check.find_deviation(DEVICE) == f"{said}; and 6 more"
    del found[3:]
    assert cuda_check.find_deviation(DEVICE) == said
    found.clear()
    assert cuda_check.find_deviation(DEVICE) is None


def test_a_kernel_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_attention(query: torch.Tensor, *args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cuda_check, "decode_attention", decode_attention)
    said = r"^2 bit, 32 tokens, 128 channels, 2 queries, torch.bfloat16, plain: RuntimeError: CUDA error: an"
    with pytest.raises(RuntimeError, match=said):
        cuda_check.find_deviations(torch.device("cpu"))


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check call the emulated operators."""
    for name, module in _OPERATORS.items():
        monkeypatch.setattr(module, name, emulation.emulated(getattr(module, name)))


def test_tables_are_moved_once() -> None:
    layer = build_layer(CASES["kivi-2bit-block"], 300)
    _, key, _ = step(layer, 1, 1)
    side = describe(key.tokens)
    assert side is not None and side.cos is not None
    assert on_device(side, torch.device("cpu")) is side
    meta = torch.device("meta")
    moved = [on_device(side, meta).cos for _ in range(2)]
    assert moved[0] is moved[1] and moved[0] is not None and moved[0].device == meta
    assert cuda_inputs.MAX_QUERIES == 64


def test_every_format_that_has_a_kernel_is_checked() -> None:
    """Of 128 channels: known_formats.h says which."""
    source = (emulation.SOURCES / "known_formats.h").read_text()
    formats = re.findall(r"using \w+ = Known<(\d), k(\w+), (\d+)(, true)?>;", source)
    known = {(int(bits), kind, int(group), bool(rotated)) for bits, kind, group, rotated in formats}
    levels = {int(bits) for bits in re.findall(r"using \w+ = KnownLevels<(\d)>;", source)}
    assert len(known) == 9 and levels == {2, 3, 4}
    found, found_levels = set(), set()
    kinds = {FORMATS["affine"]: "Affine", FORMATS["symmetric"]: "Symmetric", FORMATS["e4m3"]: "E4M3"}
    for sample in cuda_check.samples(torch.float16, 128):
        key, value = sample.keys.layout, sample.values.layout
        if key.format == FORMATS["nonuniform"]:
            found_levels |= {key.nbits} if key.nbits == value.nbits else set()
            continue
        grouped = key.group_tokens if key.width > 1 else 0
        if (value.nbits, value.format, value.group_tokens) != (key.nbits, key.format, 1):
            continue
        if value.width != (128 // grouped if grouped else 1) or key.period not in (0, grouped):
            continue
        found.add((key.nbits, kinds.get(key.format), grouped, key.period > 0))
    assert known <= found and levels <= found_levels
