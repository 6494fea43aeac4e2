"""What is kept: how much, which tokens always, and that it is what the model gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...eviction.cache import EvictingCache
from ...eviction.layer import EvictingLayer
from ...eviction.options import EvictingConfig
from ...models.cache_argument import cache_of
from ..conformance.feeding import decoded
from ..generation import run_scenario
from .feeding import bound_cache, chunks_of, feed, heads_of, ids, real_positions
from .fixtures import EvictionFixtures

__all__ = ["KeepingConformance"]


class KeepingConformance(EvictionFixtures):
    """The budget, protected tokens, contents; `generate()` and a budget that nothing exceeds."""

    def test_the_budget_is_kept_and_protected_tokens_stay(self, model: Any, config: dict[str, Any]) -> None:
        prompt, seen = 3 * self.prompt_length, 0
        tokens, cache = ids(prompt + 3, 2), bound_cache(model, config, prompt)
        for count in [*chunks_of(prompt, 11), 1, 1, 1]:
            feed(model, cache, tokens[:, seen : seen + count], [count])
            seen += count
            for layer in cache.evicting_layers:
                assert layer.get_seq_length() == seen
                read = min(seen, prompt)
                assert layer.mean_held == seen - read + (min(read, _budget(layer)) if layer.evicts else read)
                _check_positions(layer, seen, "chunk" if seen < prompt else "prompt")
        report = cache.report()
        assert (report.tokens_seen, report.tokens_held) == (seen, cache.num_held())
        assert report.kv_bytes == cache.kv_bytes() and report.fallback_reads == 0

    def test_generated_tokens_make_room_if_asked_to(self, model: Any, started: EvictingCache) -> None:
        self.go_on(model, started)
        for layer in started.evicting_layers:
            slack, seen = layer.config.decode_slack, self.prompt_length + self.steps
            assert self.steps > slack, "generate more, so that room is made"
            held = _budget(layer) + self.steps - (slack + 1) if layer.evicts else seen
            assert layer.mean_held == held
            _check_positions(layer, seen, "decode")

    def test_what_is_kept_is_what_was_given(
        self, model: Any, config: dict[str, Any], options: EvictingConfig
    ) -> None:
        """The first layer's tokens do not depend on what was evicted: a cache that keeps all has the same."""
        if options.pool is not None:
            pytest.skip("what is evicted is added to what stays")
        tokens, counts = ids(self.prompt_length, 2), chunks_of(self.prompt_length, self.chunk_size)
        caches = [
            bound_cache(model, {**config, **given}, self.prompt_length)
            for given in ({}, {"budget": 8192, "layer_overrides": {}})
        ]
        for cache in caches:
            feed(model, cache, tokens, counts)
        first, whole = (cache.evicting_layers[0] for cache in caches)
        for head, part, place in heads_of(first):
            index = part.ledger.positions[:, place].long()
            for side, got, every in zip(("key", "value"), decoded(part), decoded(whole), strict=True):
                if side == "key" and options.positions == "compact":
                    continue  # turned to where they are now
                expected = every[:, head].gather(1, index[..., None].expand(-1, -1, every.shape[3]))
                assert torch.equal(got[:, place], expected), f"the {side}s of head {head}"

    def test_a_budget_that_nothing_exceeds_keeps_everything(
        self, model: Any, config: dict[str, Any], options: EvictingConfig
    ) -> None:
        """It is the ordinary cache, or its storage, however the prompt is cut."""
        reference = None if options.storage is None else {"sink_length": options.sink_length}
        if reference is not None:
            reference |= dict(options.storage or {})
        given: dict[str, Any] = {"lengths": (40, 29), "max_new_tokens": 12}
        expected = run_scenario(model, "greedy", cache_config=reference, **given)
        config = {**config, "budget": 1000, "layer_overrides": {}, "evict_at_decode": True}
        assert torch.equal(run_scenario(model, "greedy", cache_config=config, **given), expected)
        if reference is None:  # later chunks read the earlier ones packed
            assert torch.equal(run_scenario(model, "chunked_prefill", cache_config=config, **given), expected)

    def test_generate_is_a_loop_by_hand(self, model: Any, config: dict[str, Any]) -> None:
        prompt, new = self.prompt_length, 9
        output = model.generate(
            ids(prompt, 2), cache_implementation="quantized", cache_config=config, max_new_tokens=new,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        by_hand = bound_cache(model, config, prompt)
        counts = [*chunks_of(prompt, self.chunk_size), *[1] * (new - 1)]
        logits = feed(model, by_hand, output.sequences[:, :-1], counts)
        torch.testing.assert_close(
            torch.stack(output.logits, dim=1), logits[:, prompt - 1 :], atol=1e-5, rtol=0.0
        )
        for layer, own in zip(cache_of(output).evicting_layers, by_hand.evicting_layers, strict=True):
            assert real_positions(layer) == real_positions(own)


def _budget(layer: EvictingLayer) -> int:
    assert isinstance(layer.config.budget, int)
    return layer.config.budget


def _check_positions(layer: EvictingLayer, seen: int, phase: str) -> None:
    """In the order of time, each once; the first and the newest real ones; of every one a score."""
    newest = min(seen, layer.config.protected_at(phase, _budget(layer)))
    pads = [0] * len(layer.uniform_layers[0].records.data) if layer.pads is None else layer.pads.tolist()
    for pad, row in zip(pads, real_positions(layer), strict=True):
        for positions in row:
            assert positions == sorted(set(positions)) and positions[-1] < seen
            stays = {*range(pad, min(seen, pad + layer.config.sink_length)), *range(seen - newest, seen)}
            assert stays <= set(positions), "a sink or one of the newest tokens has gone"
    for part in layer.uniform_layers:
        assert isinstance(part, EvictingLayer)
        assert part.ledger.scores.shape[2] == part.held_length == part.stored_values.length
        assert not part.ledger.scores.isnan().any()
