"""Numbers that are none: native kernels leave unused memory alone, and they spoil only what sees them."""

from __future__ import annotations

import pytest
import torch

from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.testing.comparison import relative_rms
from tests.kernels.decode_cases import CASES, FP32_ERROR, build_layer, isa, library, step

__all__ = ["isa", "library"]  # fixtures


@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-no-window", "int8-default", "int4-default", "float8-default"]
)
@pytest.mark.parametrize("length", [65, 200, 300])
def test_unused_memory_is_not_read(isa: str, name: str, length: int) -> None:
    """Records beyond the packed tokens, and metadata of unused slots in the last one, are NaN."""
    layer = build_layer(CASES[name], length)
    layer.records.ensure(1000)
    query, key, value = step(layer, 1, 4)
    expected = attend(query, key.tokens, value.tokens, AttentionOptions())
    for handle in (key, value):
        stream, packed = handle.tokens.stream, handle.tokens.packed_length
        first = -(-packed // 64)
        layer.records.codes(stream.side, first, layer.records.num_blocks).fill_(0xFF)
        for field in stream.codec.metadata_names:
            rows = layer.records.metadata(stream.side, field, 0, layer.records.num_blocks)
            used = -(-packed // stream.codec.stored_granularity.tokens)
            per_block = rows.shape[3]
            rows[:, :, used // per_block + (used % per_block > 0) :] = torch.nan
            if used % per_block:
                rows[:, :, used // per_block, used % per_block :] = torch.nan
    got = attend_handles(query, key, value, AttentionOptions())
    assert layer.kernel == "cpu"
    assert relative_rms(expected, got) <= FP32_ERROR


def test_what_is_hidden_does_not_count(isa: str) -> None:
    layer = build_layer({"backend": "kivi", "residual_length": 32}, 85)
    query, key, value = step(layer, 3, 4)
    length = key.shape[2]
    mask = torch.ones(2, 1, 3, length, dtype=torch.bool)
    mask[:, :, :, length - 9] = False
    mask[:, :, 0, length - 5] = False
    expected = attend(query, key.tokens, value.tokens, AttentionOptions(mask=mask))
    for handle in (key, value):
        handle.tokens.segments[-1][:, :, -9] = torch.nan
    value.tokens.segments[-1][:, :, -5] = torch.nan
    got = attend_handles(query, key, value, AttentionOptions(mask=mask))
    assert relative_rms(expected[:, :, 0], got[:, :, 0]) <= FP32_ERROR
    assert torch.isnan(got[:, :, 1:]).all()


@pytest.mark.parametrize("case", ["kivi-default", "int8-default", "float8-default", "kivi-3bit-block"])
def test_what_is_not_a_number_spoils_the_rows_that_see_it(isa: str, case: str) -> None:
    layer = build_layer(CASES[case], 300)
    query, key, value = step(layer, 2, 3)
    exact = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    query[0, 4, 1, 7] = torch.nan  # one query head and token
    got = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    assert got[0, 4, 1].isnan().all()
    spoilt = torch.zeros(got.shape[:3], dtype=torch.bool)
    spoilt[0, 4, 1] = True
    assert torch.equal(got[~spoilt], exact[~spoilt])
    key.tokens.segments[-1][1, 1, -1, 3] = torch.nan  # the newest key: only its own query sees it
    got = attend_handles(query, key, value, AttentionOptions(is_causal=True))
    assert got[1, 3:, 1].isnan().all() and torch.equal(got[1, :, 0], exact[1, :, 0])
