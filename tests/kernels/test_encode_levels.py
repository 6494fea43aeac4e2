"""Native encoding by non-uniform levels writes the bytes and lists that KVQuant's codecs write."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.kernels import loader
from kvcache_plugins.kernels.writing_ops import encode_levels
from kvcache_plugins.layers import level_encoding
from kvcache_plugins.quantizers.nonuniform import boundaries_of, normal_float_codebook
from kvcache_plugins.quantizers.outliers import Outliers
from kvcache_plugins.quantizers.packing import packed_bytes
from tests.kernels import fresh_process
from tests.kernels.decode_cases import isa
from tests.kernels.test_encode_tokens import check, rotary, states, zeros_of_either_sign

__all__ = ["isa"]  # a fixture

KVQUANT: dict[str, Any] = {"backend": "kvquant", "calibration": "normal_float", "residual_length": 64}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the operator answered, call by call."""
    answers: list[bool] = []

    def record(*args: Any, **options: Any) -> bool:
        answers.append(encode_levels(*args, **options))
        return answers[-1]

    monkeypatch.setattr(level_encoding, "encode_levels", record)
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_the_bytes_are_the_same(nbits: int, head_dim: int, dtype: torch.dtype, encoded: list[bool]) -> None:
    check({**KVQUANT, "nbits": nbits}, *states(head_dim, dtype), turning=rotary(head_dim, False))
    assert encoded and all(encoded)


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("head_dim", [8, 24, 80])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_every_instruction_set(
    nbits: int, head_dim: int, fraction: float, isa: str, encoded: list[bool]
) -> None:
    options = {**KVQUANT, "nbits": nbits, "outlier_fraction": fraction}
    check(options, *states(head_dim, torch.float32), turning=rotary(head_dim, False))
    assert encoded and all(encoded)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 32), (24, 10), (328, 328)], ids=str)
def test_rotations(head_dim: int, rotary_dim: int, interleaved: bool, encoded: list[bool]) -> None:
    check(KVQUANT, *states(head_dim, torch.bfloat16), turning=rotary(rotary_dim, interleaved))
    assert encoded and all(encoded)


@pytest.mark.parametrize("sinks", [0, 1, 70])
def test_pads_and_sinks(sinks: int, encoded: list[bool]) -> None:
    """They are encoded as other tokens are, and have no outliers."""
    mask = (torch.arange(333) >= torch.tensor([[3], [70]])).long()
    keys, values = states(64, torch.float32)
    keys[:, :, :100] *= 20
    values[:, :, :100] *= 20
    check({**KVQUANT, "sink_length": sinks}, keys, values, mask, rotary(64, False))
    assert encoded and all(encoded)


@pytest.mark.parametrize("fraction", [0.02, 0.1])
def test_of_equal_numbers_the_first_are_outliers(fraction: float, isa: str, encoded: list[bool]) -> None:
    """Few different numbers: most outliers lack as much as others do that are none."""
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randint(-4, 5, (2, 2, 333, 64), generator=generator).float() for _ in range(2))
    check({**KVQUANT, "outlier_fraction": fraction}, keys, values)
    assert encoded and all(encoded)


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5])
def test_numbers_that_are_all_the_same(constant: float, isa: str, encoded: list[bool]) -> None:
    check(KVQUANT, *(torch.full((2, 2, 333, 80), constant) for _ in range(2)))
    assert encoded and all(encoded)


def test_zeros_have_no_sign(isa: str, encoded: list[bool]) -> None:
    check({**KVQUANT, "nbits": 4}, *zeros_of_either_sign(80))
    assert encoded and all(encoded)


def test_threads_share_the_blocks(encoded: list[bool]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(KVQUANT, *states(80, torch.bfloat16), turning=rotary(80, False))
    finally:
        torch.set_num_threads(before)
    assert encoded and all(encoded)


def test_states_that_are_not_contiguous(encoded: list[bool]) -> None:
    keys, values = states(64, torch.float32)
    check(KVQUANT, keys.transpose(1, 2).contiguous().transpose(1, 2), values[..., ::2].repeat(1, 1, 1, 2))
    check(KVQUANT, *(t.transpose(2, 3).contiguous().transpose(2, 3) for t in (keys, values)))
    assert all(encoded)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e5])
def test_what_is_rare_is_left_to_torch(number: float, encoded: list[bool]) -> None:
    keys, values = states(64, torch.float32)
    keys[1, 0, 140, 3] = values[0, 1, 170, 5] = number
    check(KVQUANT, keys, values, turning=rotary(64, False))
    assert not all(encoded) and any(encoded)


def test_torch_that_rounds_products() -> None:
    """Whether torch fuses a multiplication and an addition depends on the instructions it may use."""
    code = """
        import torch
        from tests.kernels.test_encode_levels import KVQUANT
        from tests.kernels.test_encode_tokens import check, rotary, states
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        check(KVQUANT, *states(80, torch.float32), turning=rotary(64, False))
    """
    done = fresh_process.run(code, os.environ | {"ATEN_CPU_CAPABILITY": "default"}, timeout=600)
    assert done.returncode == 0, done.stderr


def arguments(is_key: bool, heads: int = 2, dim: int = 32, tokens: int = 128) -> dict[str, Any]:
    """What the operator takes for two rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    book, end = normal_float_codebook(3), packed_bytes(dim, 3)
    given: dict[str, Any] = {
        "records": torch.zeros(2, heads, 3, end + 512, dtype=torch.uint8),  # room for metadata of fp32
        "outliers": Outliers(
            torch.zeros(2, 3, 128, dtype=torch.int32), torch.zeros(2, 3, heads + 1, dtype=torch.int16)
        ),
        "states": torch.randn(2, heads, tokens, dim, generator=generator),
        "is_key": is_key,
        "layout": [3, 0, dim, 1, 1, 2, 0, 0, *((-1, -1) if is_key else (end, end + 256))],
        "boundaries": boundaries_of(book),
        "levels": book,
        "per_side": 1,
        "start": 64,
    }
    if is_key:
        ranges = torch.ones(1, heads, 1, dim)
        turning = torch.ones(1, tokens, dim // 2), torch.zeros(1, tokens, dim // 2)
        given |= {"scale": ranges, "offset": torch.zeros_like(ranges), "cos": turning[0], "sin": turning[1]}
    return given


WRONG: dict[str, tuple[bool, dict[str, Any], str]] = {
    "room": (True, {"start": 128}, "room for 256 tokens"),
    "start": (True, {"start": 32}, "whole blocks"),
    "states": (False, {"states": torch.zeros(2, 2, 100, 32)}, "whole blocks"),
    "side": (False, {"per_side": 256}, "a side of 256"),
    "no outliers": (False, {"per_side": 0}, "entries and starts come together"),
    "no lists": (False, {"outliers": None}, "entries and starts come together"),
    "short lists": (False, {"per_side": 2}, "at least 256"),
    "boundaries": (False, {"boundaries": torch.zeros(8)}, r"Invalid boundaries: .* \[7\]"),
    "levels": (False, {"levels": torch.zeros(8, dtype=torch.float64)}, "Invalid levels"),
    "no range": (True, {"scale": None}, "keys have a scale"),
    "a range of values": (False, {"scale": torch.ones(1, 2, 1, 32)}, "keys have a scale"),
    "range": (True, {"offset": torch.zeros(1, 2, 1, 16)}, "Invalid range"),
    "no places": (False, {"layout": [3, 0, 32, 1, 1, 2, 0, 0, -1, -1]}, "values need a place"),
    "first_plain": (True, {"first_plain": torch.zeros(3, dtype=torch.long)}, "Invalid first_plain"),
    "no sines": (True, {"sin": None}, "cos and sin come together"),
    "pairs": (True, {"cos": torch.ones(1, 128, 17)}, "Invalid rotation"),
    "rows": (True, {"cos": torch.ones(1, 64, 16), "sin": torch.ones(1, 64, 16)}, "Invalid rotation"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    is_key, changed, said = WRONG[name]
    assert encode_levels(**arguments(is_key))
    given = {**arguments(is_key), **changed}
    with pytest.raises(ValueError, match=said):
        encode_levels(**given)
    assert not given["records"].any()


@pytest.mark.parametrize("is_key", [True, False])
def test_it_is_a_proper_operator(is_key: bool) -> None:
    given = arguments(is_key)
    entries, starts = given.pop("outliers")
    order = ("records", "states", "is_key", "layout", "boundaries", "levels", "per_side", "start")
    records, *rest = (given.pop(name) for name in order)
    torch.library.opcheck(
        torch.ops.kvcache_plugins.encode_levels.default,
        (records, entries, starts, *rest),
        given,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_other_blocks_are_left_alone() -> None:
    given = arguments(False)
    given["outliers"].entries.fill_(7)
    assert encode_levels(**{**given, "states": given["states"][:, :, :64]})
    assert not given["records"][:, :, [0, 2]].any() and given["records"][:, :, 1].any()
    entries: Tensor = given["outliers"].entries
    assert (entries[:, [0, 2]] == 7).all() and not (entries[:, 1] == 7).any()
