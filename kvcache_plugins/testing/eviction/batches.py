"""Left-padded batches: every row keeps what it would keep alone, and pads are the first to go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ...eviction.options import EvictingConfig
from .feeding import bound_cache, chunks_of, feed, heads_of, ids, mask_of, real_positions
from .fixtures import EvictionFixtures

__all__ = ["BatchConformance"]


class BatchConformance(EvictionFixtures):
    """Rows of a padded batch, and their pads."""

    @pytest.mark.parametrize(
        ("pads", "is_whole"), [((0, 9, 31, 60), True), ((0, 16, 64), False)], ids=["whole", "chunks"]
    )
    def test_a_row_keeps_what_it_would_keep_alone(
        self,
        model: Any,
        config: dict[str, Any],
        options: EvictingConfig,
        pads: tuple[int, ...],
        is_whole: bool,
    ) -> None:
        """In chunks too, where those of a row alone end where the batch's do."""
        if options.is_uneven:
            pytest.skip("the rows of a batch share out their heads' budget together")
        if options.storage is not None:
            # in fp32 the last bits of a row alone are others, and may round to another code
            model = copy.deepcopy(model).double()
        length, new = 77, 5
        size = length if is_whole else self.chunk_size
        tokens, mask = ids(length + new, len(pads), pads=pads), mask_of(length + new, pads)
        cache = bound_cache(model, config, length, mask[:, :length])
        together = feed(model, cache, tokens, [*chunks_of(length, size), *[1] * new], mask)
        assert torch.isfinite(together[mask.bool()]).all()
        for row, pad in enumerate(pads):
            alone = bound_cache(model, config, length - pad)
            counts = [*chunks_of(length - pad, size), *[1] * new]
            logits = feed(model, alone, tokens[row : row + 1, pad:], counts)
            for layer, own in zip(cache.evicting_layers, alone.evicting_layers, strict=True):
                positions = [[p - pad for p in head] for head in real_positions(layer)[row]]
                assert positions == real_positions(own)[0]
            torch.testing.assert_close(together[row, pad:], logits[0], atol=1e-4, rtol=0.0)

    def test_pads_go_first(self, model: Any, config: dict[str, Any]) -> None:
        length, pads = 77, (0, 21, 70)
        tokens, mask = ids(length, len(pads), pads=pads), mask_of(length, pads)
        cache = bound_cache(model, config, length, mask)
        seen = 0
        for count in chunks_of(length, 11):
            seen += count
            logits = feed(model, cache, tokens[:, seen - count : seen], [count], mask)
            assert torch.isfinite(logits).all()  # also of a row that has been all pads so far
            for layer in cache.evicting_layers:
                for _, part, place in heads_of(layer):
                    for row, pad in enumerate(pads):
                        held = part.ledger.positions[row, place]
                        spare = max(0, len(held) - max(0, seen - pad))
                        assert int((held < pad).sum()) == min(spare, pad)
                        assert (held.diff() > 0).all()  # in the order of time: pads at the left edge
