"""KVQuant's blocks encoded by the CUDA kernels on an emulated GPU: the bytes and lists are those of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.kernels import writing_ops
from kvcache_plugins.layers import level_encoding
from kvcache_plugins.quantizers.outliers import Outliers
from tests.kernels import test_encode_levels as encoding
from tests.kernels.cuda import emulation
from tests.kernels.test_encode_levels import KVQUANT, WRONG, arguments
from tests.kernels.test_encode_tokens import check, rotary, states

pytestmark = pytest.mark.usefixtures("emulated")
library = encoding.library
encode = emulation.emulated(writing_ops.encode_levels)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Layers encode by the emulated kernels; their answers, call by call."""
    answers: list[bool] = []

    def record(*args: Any, **options: Any) -> bool:
        answers.append(encode(*args, **options))
        return answers[-1]

    monkeypatch.setattr(level_encoding, "encode_levels", record)
    return answers


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("head_dim", [24, 80, 128])
@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_the_bytes_are_the_same(nbits: int, head_dim: int, fraction: float, encoded: list[bool]) -> None:
    dtype = [torch.float32, torch.bfloat16, torch.float16][(head_dim + nbits) % 3]
    options = {**KVQUANT, "nbits": nbits, "outlier_fraction": fraction}
    check(options, *states(head_dim, dtype), turning=rotary(head_dim, False))
    assert encoded and all(encoded)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 32), (24, 10), (328, 328)], ids=str)
def test_rotations(head_dim: int, rotary_dim: int, interleaved: bool, encoded: list[bool]) -> None:
    encoding.test_rotations(head_dim, rotary_dim, interleaved, encoded)


@pytest.mark.parametrize("sinks", [0, 1, 70])
def test_pads_and_sinks(sinks: int, encoded: list[bool]) -> None:
    encoding.test_pads_and_sinks(sinks, encoded)


@pytest.mark.parametrize("fraction", [0.02, 0.1])
def test_of_equal_numbers_the_first_are_outliers(fraction: float, encoded: list[bool]) -> None:
    encoding.test_of_equal_numbers_the_first_are_outliers(fraction, "emulated", encoded)


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5])
def test_numbers_that_are_all_the_same(constant: float, encoded: list[bool]) -> None:
    encoding.test_numbers_that_are_all_the_same(constant, "emulated", encoded)


def test_zeros_have_no_sign(encoded: list[bool]) -> None:
    encoding.test_zeros_have_no_sign("emulated", encoded)


def test_states_that_are_not_contiguous(encoded: list[bool]) -> None:
    encoding.test_states_that_are_not_contiguous(encoded)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e5, 3e38])
def test_numbers_beyond_fp16(number: float, encoded: list[bool]) -> None:
    """Of keys, and of a block of values, they are encoded; a prompt's values are left to torch."""
    keys, values = states(64, torch.float32)
    keys[1, 0, 140, 3] = keys[0, 1, 141, 5] = number
    check(KVQUANT, keys, values, turning=rotary(64, False))
    assert encoded and all(encoded)
    encoded.clear()
    values[0, 1, 170, 5] = number
    check(KVQUANT, keys, values, turning=rotary(64, False))
    assert not all(encoded) and any(encoded)


def test_ranges_beyond_fp16_are_reported() -> None:
    """Of a single block nobody waits for what is found out; the next call tells."""
    given = {**arguments(False, tokens=64), "start": 0}
    assert encode(**{**given, "states": given["states"] * 1e6})
    with pytest.raises(RuntimeError, match=r"beyond fp16.*kernel='torch'"):
        encode(**given)
    assert encode(**given)


def compare(is_key: bool, heads: int, dim: int, side: int, tokens: int = 128, **changed: Any) -> None:
    """The operator of the emulated GPU, and that of the CPU."""
    given = {**arguments(is_key, heads, dim, tokens), "per_side": side}
    lists = torch.full((2, 3, 128 * side + 5), 7, dtype=torch.int32)
    starts = torch.full((2, 3, heads + 1), 7, dtype=torch.int16)
    given["outliers"] = Outliers(lists, starts) if side else None
    given |= {name: value(given) if callable(value) else value for name, value in changed.items()}
    results: list[list[Tensor]] = []
    for call in (encode, writing_ops.encode_levels):
        records = given["records"].clone()
        lists = given["outliers"] and Outliers(*(tensor.clone() for tensor in given["outliers"]))
        assert call(**{**given, "records": records, "outliers": lists})
        results.append([records, *(lists or ())])
    for got, expected in zip(*results, strict=True):
        assert got.any() and torch.equal(got, expected)


SHAPES = {
    "a head": (1, 64, 1),
    "wide heads": (2, 512, 5),
    "many heads": (40, 16, 3),
    "small heads": (3, 8, 1),
    "as many outliers as there may be": (8, 24, 10),
    "few numbers": (1, 8, 5),
    "no outliers": (2, 32, 0),
    "more than is listed": (24, 128, 154),
}


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, is_key: bool) -> None:
    heads, dim, side = SHAPES[shape]
    tokens = 64 if side > 100 else 128
    compare(is_key, heads, dim, side, tokens, start=0 if tokens == 64 else 64)


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_outliers_of_a_head(is_key: bool) -> None:
    """All in one place: parts of the numbers hold none of the largest, and others many."""
    compare(
        is_key,
        8,
        64,
        5,
        states=lambda given: given["states"] * torch.tensor([9.0] + [1.0] * 7)[:, None, None],
    )
    compare(is_key, 8, 64, 5, states=lambda given: given["states"] * torch.tensor([9.0] * 2 + [1.0] * 62))


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_first_plain_tokens(is_key: bool) -> None:
    for slots in ([0, 70], [100, 500]):
        compare(is_key, 2, 32, 2, first_plain=torch.tensor(slots))


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_a_batch_without_rows(is_key: bool) -> None:
    given = arguments(is_key)
    given |= {name: given[name][:0] for name in ("records", "states")}
    given["outliers"] = Outliers(*(tensor[:0] for tensor in given["outliers"]))
    assert encode(**given)


def test_ranges_of_a_batch_and_of_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    for rows in (1, 2):
        scale, offset = torch.rand(2, rows, 3, 1, 32, generator=generator) + 0.2
        compare(True, 3, 32, 2, scale=scale, offset=offset)
        angles = torch.rand(rows, 128, 12, generator=generator)
        compare(True, 3, 32, 2, cos=angles.cos(), sin=angles.sin())


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_metadata_of_four_bytes(is_key: bool) -> None:
    def wide(given: dict[str, Any]) -> list[int]:
        layout: list[int] = given["layout"]
        return [*layout[:5], 4, *layout[6:]]

    compare(is_key, 2, 32, 2, layout=wide)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    is_key, changed, said = WRONG[name]
    given = {**arguments(is_key), **changed}
    with pytest.raises(ValueError, match=said):
        encode(**given)
    assert not given["records"].any()


def test_tokens_of_more_numbers_are_left_to_torch() -> None:
    given = {**arguments(True, heads=65, dim=512), "records": torch.zeros(2, 65, 3, 2**15, dtype=torch.uint8)}
    given["cos"] = given["sin"] = None
    assert not encode(**given) and not given["records"].any()


def test_other_blocks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "encode_levels", encode)
    encoding.test_other_blocks_are_left_alone()
