"""The quantizer oracles against numbers worked out on paper."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .quantizers import FLOAT8_FORMATS, SMALLEST_HALF, asymmetric, float8, symmetric8

INF, NAN = float("inf"), float("nan")


def half(value: float) -> float:
    """Nearest fp16 number, by way of the standard library."""
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


class TestAsymmetric:
    def test_exact_grid(self) -> None:
        # (3 - 0) / 3 = 1: every number is a code.
        result = asymmetric(torch.tensor([0.0, 1.0, 2.0, 3.0]), 2, axis=-1)
        assert result.codes.tolist() == [0, 1, 2, 3]
        assert result.scale.tolist() == [1.0]
        assert result.minimum.tolist() == [0.0]
        assert result.dequantized.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_rounds_half_to_even(self) -> None:
        # Scale 1, minimum 0: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2.
        result = asymmetric(torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0]), 2, axis=-1)
        assert result.codes.tolist() == [0, 0, 2, 2, 3]

    def test_divides_by_the_stored_scale_and_subtracts_the_stored_minimum(self) -> None:
        # (1 - 0.1) / 15 = 0.06; neither 0.06 nor 0.1 is an fp16 number.
        result = asymmetric(torch.tensor([0.1, 0.5, 1.0]), 4, axis=-1)
        scale, minimum = half(0.06), half(0.1)
        assert scale == 0.05999755859375
        assert minimum == 0.0999755859375
        assert result.scale.item() == scale
        assert result.minimum.item() == minimum
        assert result.codes.tolist() == [0, 7, 15]  # 0.40002 / 0.059998 = 6.667
        assert result.dequantized.tolist() == pytest.approx([code * scale + minimum for code in (0, 7, 15)])

    def test_clamps_what_rounded_metadata_push_out_of_range(self) -> None:
        # fp16 numbers near 2049 are 2 apart: 2049 rounds to 2048, 2051 to 2052 (half to even).
        above = asymmetric(torch.tensor([2049.0, 2050.0]), 1, axis=-1)
        assert (above.minimum.item(), above.scale.item()) == (2048.0, 1.0)
        assert above.codes.tolist() == [1, 1]  # (2050 - 2048) / 1 = 2, clamped
        below = asymmetric(torch.tensor([2051.0, 2052.0]), 1, axis=-1)
        assert below.minimum.item() == 2052.0
        assert below.codes.tolist() == [0, 0]  # (2051 - 2052) / 1 = -1, clamped

    @pytest.mark.parametrize("value", [0.0, -3.25, 500.0, 1e-30])
    def test_constant_group_reads_as_its_minimum(self, value: float) -> None:
        result = asymmetric(torch.full((8,), value), 4, axis=-1)
        assert result.scale.item() == 0.0
        assert result.codes.tolist() == [0] * 8
        assert result.dequantized.tolist() == [half(value)] * 8

    def test_range_too_small_for_half_is_constant(self) -> None:
        # 15 * 2**-26 / 15 = 2**-26 rounds to zero in fp16; 2**-25 is a tie and rounds to even, zero.
        for exponent in (-26, -25):
            result = asymmetric(torch.tensor([0.0, 15 * 2.0**exponent]), 4, axis=-1)
            assert result.scale.item() == 0.0
            assert result.codes.tolist() == [0, 0]
        assert asymmetric(torch.tensor([0.0, 15 * 2.0**-24]), 4, axis=-1).codes.tolist() == [0, 15]

    def test_metadata_beyond_half_stays_single(self) -> None:
        # 3e6 / 15 = 200000 > 65504, minimum -1e6 < -65504.
        result = asymmetric(torch.tensor([-1e6, 2e6]), 4, axis=-1)
        assert result.scale.item() == 200000.0
        assert result.minimum.item() == -1e6
        assert result.codes.tolist() == [0, 15]
        assert result.dequantized.tolist() == [-1e6, 2e6]

    def test_range_beyond_single_is_constant(self) -> None:
        result = asymmetric(torch.tensor([-3e38, 3e38]), 4, axis=-1)
        assert result.scale.item() == 0.0
        assert result.codes.tolist() == [0, 0]
        assert torch.isfinite(result.dequantized).all()

    def test_non_finite_members(self) -> None:
        result = asymmetric(torch.tensor([0.0, INF, -INF, NAN, 3.0]), 2, axis=-1)
        assert result.scale.item() == 1.0
        assert result.minimum.item() == 0.0
        assert result.codes.tolist() == [0, 3, 0, 0, 3]
        nothing = asymmetric(torch.tensor([INF, -INF, NAN]), 2, axis=-1)
        assert nothing.scale.item() == 0.0
        assert nothing.minimum.item() == 0.0
        assert nothing.codes.tolist() == [0, 0, 0]
        assert nothing.dequantized.tolist() == [0.0] * 3

    def test_invalid_members_are_ignored_and_take_code_zero(self) -> None:
        x = torch.tensor([[100.0, -1.0, 2.0], [100.0, 100.0, 100.0]])
        valid = torch.tensor([[False, True, True], [False, False, False]])
        result = asymmetric(x, 2, axis=-1, valid=valid)
        assert result.minimum.flatten().tolist() == [-1.0, 0.0]
        assert result.scale.flatten().tolist() == [1.0, 0.0]
        assert result.codes.tolist() == [[0, 0, 3], [0, 0, 0]]

    def test_axis_and_several_axes(self) -> None:
        x = torch.arange(12.0).reshape(2, 2, 3)
        assert asymmetric(x, 4, axis=1).scale.shape == (2, 1, 3)
        assert asymmetric(x, 4, axis=(1, 2)).minimum.flatten().tolist() == [0.0, 6.0]

    @given(
        values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=24),
        nbits=st.sampled_from([1, 2, 3, 4, 8]),
    )
    @settings(max_examples=100, deadline=None)
    def test_error_is_half_a_step(self, values: list[float], nbits: int) -> None:
        x = torch.tensor(values)
        result = asymmetric(x, nbits, axis=-1)
        top = 2**nbits - 1
        # fp16 rounds the minimum by 2**-11 of itself and the scale by 2**-11 of itself or 2**-25, the latter
        # times `top`.
        slack = 2**-11 * (x.abs().max() + top * result.scale) + top * 2**-25 + 2**-25
        # A scale that rounded to zero was at most 2**-25.
        assert ((x - result.dequantized).abs() <= result.scale / 2 + slack + 1e-6 * x.abs().max()).all()
        assert int(result.codes.max()) <= top


class TestSymmetric8:
    def test_exact_grid(self) -> None:
        result = symmetric8(torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5]), axis=-1)
        assert result.scale.item() == 1.0
        assert result.codes.tolist() == [127, -127, 0, 2, -2]

    def test_scale_rounds_up(self) -> None:
        # 1 / 127 = 0.00787401...: the fp16 neighbours are 0.007873535 (nearest) and 0.007881165 (above).
        result = symmetric8(torch.tensor([1.0, -0.5]), axis=-1)
        assert half(1 / 127) == 0.00787353515625 < 1 / 127
        assert result.scale.item() == 0.00788116455078125
        assert result.codes.tolist() == [127, -63]  # 126.885, -63.44

    @pytest.mark.parametrize("absmax", [0.0, 1e-30, 127 * 2.0**-26])
    def test_scale_has_a_floor(self, absmax: float) -> None:
        result = symmetric8(torch.tensor([absmax, 0.0]), axis=-1)
        assert result.scale.item() == SMALLEST_HALF
        assert abs(result.codes[0].item()) <= 127
        assert result.codes[1].item() == 0

    def test_non_finite_members(self) -> None:
        result = symmetric8(torch.tensor([127.0, INF, -INF, NAN]), axis=-1)
        assert result.scale.item() == 1.0
        assert result.codes.tolist() == [127, 127, -127, 0]
        assert symmetric8(torch.tensor([NAN, NAN]), axis=-1).codes.tolist() == [0, 0]

    def test_scale_beyond_half_stays_single(self) -> None:
        result = symmetric8(torch.tensor([127 * 70000.0]), axis=-1)
        assert result.scale.item() == 70000.0
        assert result.codes.item() == 127

    @given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=24))
    @settings(max_examples=100, deadline=None)
    def test_scale_is_the_smallest_half_that_covers(self, values: list[float]) -> None:
        x = torch.tensor(values)
        result = symmetric8(x, axis=-1)
        exact = (x.abs().max() / torch.tensor(127.0)).item()
        stored = result.scale.item()
        assert half(stored) == stored >= exact
        pattern = int.from_bytes(struct.pack("<e", stored), "little")
        below = struct.unpack("<e", (pattern - 1).to_bytes(2, "little"))[0]
        assert below < exact or stored == SMALLEST_HALF
        assert ((x - result.dequantized).abs() <= stored / 2 * (1 + 1e-5)).all()


class TestFloat8:
    def test_exact_grid(self) -> None:
        # Scale 1. e4m3 has three mantissa bits: 17 lies between 16 and 18 and goes to the even one.
        result = float8(torch.tensor([448.0, -448.0, 17.0, 19.0, 0.0]), "e4m3", axis=-1)
        assert result.scale.item() == 1.0
        assert result.dequantized.tolist() == [448.0, -448.0, 16.0, 20.0, 0.0]
        assert result.codes.tolist()[0] == 0b0_1111_110
        wide = float8(torch.tensor([57344.0, 9.0, 11.0]), "e5m2", axis=-1)
        assert wide.dequantized.tolist() == [57344.0, 8.0, 12.0]

    def test_scale_rounds_up(self) -> None:
        result = float8(torch.tensor([1.0]), "e4m3", axis=-1)
        assert half(1 / 448) == 0.0022315979003906250 < 1 / 448
        assert result.scale.item() == 0.002233505249023437500
        # 1 / scale = 447.72; the nearest e4m3 number is 448.
        assert result.dequantized.item() == pytest.approx(448 * result.scale.item())

    @pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
    def test_non_finite_members_and_zeros(self, fmt: str) -> None:
        largest = FLOAT8_FORMATS[fmt][1]
        result = float8(torch.tensor([largest, INF, -INF, NAN]), fmt, axis=-1)
        assert result.dequantized.tolist() == [largest, largest, -largest, 0.0]
        assert float8(torch.zeros(4), fmt, axis=-1).scale.item() == SMALLEST_HALF

    @pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
    def test_cast_takes_the_nearest_number_of_the_format(self, fmt: str) -> None:
        dtype, largest = FLOAT8_FORMATS[fmt]
        table = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        table = table[torch.isfinite(table)]
        x = torch.cat([torch.tensor([largest]), torch.randn(500) * 100])
        result = float8(x, fmt, axis=-1)
        assert result.scale.item() == 1.0
        nearest = (x[:, None] - table).abs().amin(dim=1)
        assert torch.equal((x - result.dequantized).abs(), nearest)
