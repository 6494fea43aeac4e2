"""The attention oracle against weights worked out on paper, and against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from .attention import naive_attention

INF, NAN = float("inf"), float("nan")


class TestAttention:
    @staticmethod
    def states(*, queries: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query `(2, 4, Q, 8)`, keys `(2, 2, 7, 8)`, values `(2, 2, 7, 6)`."""
        return torch.randn(2, 4, queries, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)

    @staticmethod
    def scalar(logits: list[float], **options: Any) -> float:
        """Attention of one query whose logits (before softcap) are given, over the values 1, 2, 3, ..."""
        keys = torch.tensor(logits).reshape(1, 1, -1, 1)
        values = torch.arange(1.0, len(logits) + 1).reshape(1, 1, -1, 1)
        return float(naive_attention(torch.ones(1, 1, 1, 1), keys, values, scaling=1.0, **options))

    def test_by_hand(self) -> None:
        log2, log3 = math.log(2), math.log(3)
        # Weights 1, 2, 3 of 6: (1 + 4 + 9) / 6.
        assert self.scalar([0.0, log2, log3]) == pytest.approx(14 / 6)
        # A sink of weight 6 halves it.
        assert self.scalar([0.0, log2, log3], sinks=torch.tensor([math.log(6)])) == pytest.approx(7 / 6)
        assert self.scalar([0.0, log2, log3], sliding_window=2) == pytest.approx((4 + 9) / 5)
        assert self.scalar([0.0, log2, log3], mask=torch.tensor([True, False, True])) == pytest.approx(10 / 4)
        # An additive mask of log 3 triples the first weight: 3, 2, 3.
        assert self.scalar([0.0, log2, log3], mask=torch.tensor([log3, 0.0, 0.0])) == pytest.approx(16 / 8)
        # ALiBi with slope log 2: distances 2, 1, 0 divide the weights 4, 2, 1 by 4, 2, 1.
        slopes = torch.tensor([log2])
        assert self.scalar([2 * log2, log2, 0.0], alibi_slopes=slopes) == pytest.approx(2.0)
        # Softcap log 2: huge logits become +-log 2, so the weights are 2 and 1/2.
        assert self.scalar([1e9, -1e9], softcap=log2) == pytest.approx((2 + 1) / 2.5)

    def test_softcap_comes_before_alibi_and_mask(self) -> None:
        log2 = math.log(2)
        # Capped weights 2, 2; ALiBi then divides the first by 8; the mask is not capped either.
        read = self.scalar([1e9, 1e9], softcap=log2, alibi_slopes=torch.tensor([3 * log2]))
        assert read == pytest.approx((1 / 8 + 2) / (1 / 8 + 1))
        assert self.scalar([0.0, 0.0], softcap=1.0, mask=torch.tensor([-INF, 0.0])) == 2.0

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_agrees_with_torch(self, is_causal: bool) -> None:
        query, keys, values = self.states()
        # Lower-right: query i of 3 sees slots up to 4 + i of 7.
        mask = torch.ones(3, 7, dtype=torch.bool).tril(4) if is_causal else None
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.double(), keys.double(), values.double(), attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(naive_attention(query, keys, values, is_causal=is_causal), expected)
        torch.testing.assert_close(naive_attention(query, keys, values, mask=mask), expected)

    def test_window_is_counted_from_each_query(self) -> None:
        query, keys, values = self.states(queries=7)
        full = naive_attention(query, keys, values, is_causal=True, sliding_window=2)
        assert torch.equal(full[0, 0, 0], values[0, 0, 0].double())
        expected = naive_attention(query[:, :, 4:5], keys[:, :, 3:5], values[:, :, 3:5])
        torch.testing.assert_close(full[:, :, 4:5], expected)

    def test_nothing_to_read_gives_zeros_and_masked_slots_may_hold_anything(self) -> None:
        query, keys, values = self.states()
        mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
        mask[0], mask[1, ..., :2] = False, False
        clean = naive_attention(query, keys, values, mask=mask)
        assert (clean[0] == 0).all()
        assert (clean[1] != 0).all()
        values[0], values[1, :, :2] = INF, NAN
        keys[1, :, :2] = NAN
        assert torch.equal(naive_attention(query, keys, values, mask=mask), clean)
        additive = torch.zeros(mask.shape).masked_fill(~mask, -INF)
        assert torch.equal(naive_attention(query, keys, values, mask=additive), clean)

    def test_a_visible_nan_is_not_hidden(self) -> None:
        query, keys, values = self.states()
        keys[0, 0, 3] = NAN
        output = naive_attention(query, keys, values)
        assert output[0, :2].isnan().all()
        assert output[0, 2:].isfinite().all()
