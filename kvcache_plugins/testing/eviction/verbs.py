"""What is done to a filled cache: scores, positions and padding follow the keys and values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ...cache import KVCache
from ...eviction.cache import EvictingCache
from ...eviction.options import EvictingConfig
from ...models.cache_argument import as_argument
from .feeding import bound_cache, chunks_of, feed, ids, mask_of, snapshot
from .fixtures import EvictionFixtures

__all__ = ["EvictedVerbConformance"]

_VERBS: dict[str, tuple[Any, list[int]]] = {
    "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    "reorder_cache": (torch.tensor([5, 0, 2, 2, 1, 4]), [2, 0, 1, 1, 0, 2]),
    "batch_select_indices": (torch.tensor([True, True, False, True, False, False]), [2, 0, 1]),
}
"""What is done to the rows of a batch of three, one after the other, and which are there then."""


class EvictedVerbConformance(EvictionFixtures):
    """Batch operations, crop, moving, copies, reset, saving, later texts: after something has gone."""

    def test_rows_go_together(self, model: Any, started: EvictingCache, options: EvictingConfig) -> None:
        untouched, before, rows = copy.deepcopy(started), snapshot(started), [0, 1, 2]
        for verb, (given, rows) in _VERBS.items():
            getattr(started, verb)(given)
            _check_same(snapshot(started), [{name: t[rows] for name, t in state.items()} for state in before])
        if not options.is_uneven:  # where rows share out together
            expected = self.go_on(model, untouched)[rows]
            torch.testing.assert_close(self.go_on(model, started, rows), expected, atol=1e-4, rtol=0.0)

    def test_away_and_back_a_copy_goes_on_the_same(self, model: Any, started: EvictingCache) -> None:
        twin, before = copy.deepcopy(started), snapshot(started)
        for layer in started.evicting_layers:
            layer.offload()
            layer.prefetch()
        _check_same(snapshot(started), before)
        expected = self.go_on(model, started)
        _check_same(snapshot(twin), before)
        assert torch.equal(self.go_on(model, twin), expected)

    def test_reset_forgets_the_text_and_its_padding(
        self, model: Any, config: dict[str, Any], started: EvictingCache
    ) -> None:
        for layer in started.evicting_layers:
            layer.activate_past_recording()
        started.reset()
        assert started.get_seq_length() == started.num_held() == started.kv_bytes() == 0
        tokens = ids(self.prompt_length + 4, 2, seed=3)
        counts = [*chunks_of(self.prompt_length, self.chunk_size), *[1] * 4]
        fresh = bound_cache(model, {**config, "evict_at_decode": True}, self.prompt_length)
        started.bind(model, prompt_length=self.prompt_length)
        assert torch.equal(feed(model, started, tokens, counts), feed(model, fresh, tokens, counts))

    def test_crop_takes_back_what_is_still_held(
        self, model: Any, started: EvictingCache, options: EvictingConfig, forgets_rejected_tokens: bool
    ) -> None:
        untouched, before = copy.deepcopy(started), snapshot(started)
        mask = mask_of(self.prompt_length + 3, self.pads)
        feed(model, started, self.tokens(seed=7)[:, :3], [1, 1, 1], mask)
        started.crop(-3)
        assert started.get_seq_length() == self.prompt_length
        for now, state in zip(snapshot(started), before, strict=True):
            positions = {name for name in state if name.endswith("positions")}
            assert positions and all(torch.equal(now[name], state[name]) for name in positions)
        if forgets_rejected_tokens and options.storage is None:  # of which an exact window has moved on
            _check_same(snapshot(started), before)
            assert torch.equal(self.go_on(model, started), self.go_on(model, untouched))

    def test_crop_refuses_what_is_gone(self, started: EvictingCache) -> None:
        before = snapshot(started)
        for removed in (30, self.prompt_length - 1):
            with pytest.raises(
                NotImplementedError, match=rf"crop\(-{removed}\): layer \d has evicted some of the newest"
            ):
                started.crop(-removed)
        assert started.get_seq_length() == self.prompt_length
        _check_same(snapshot(started), before)
        started.crop(-self.prompt_length)  # everything may go
        assert started.get_seq_length() == started.num_held() == 0

    @pytest.mark.parametrize("length", [50, 32], ids=["after-the-prompt", "in-the-prompt"])
    def test_saved_and_loaded_it_goes_on(
        self, model: Any, config: dict[str, Any], options: EvictingConfig, length: int, tmp_path: Path
    ) -> None:
        cache = self.start(model, config, length)
        cache.save_pretrained(tmp_path)
        loaded = KVCache.from_pretrained(tmp_path, model)
        assert isinstance(loaded, EvictingCache) and type(loaded) is type(cache)
        assert loaded.config == cache.config and loaded.num_held() == cache.num_held()
        assert loaded.get_seq_length() == length
        _check_same(snapshot(loaded), snapshot(cache))
        if length == self.prompt_length or options.positions == "compact":  # else it need not be told again
            loaded.bind(model, mask_of(self.prompt_length, self.pads), prompt_length=self.prompt_length)
        assert torch.equal(self.go_on(model, loaded), self.go_on(model, cache))
        _check_same(snapshot(loaded), snapshot(cache))

    def test_several_questions_to_one_text(self, model: Any, config: dict[str, Any]) -> None:
        """Each on a copy: as if the text had been read for it alone."""
        document = ids(60, 2)

        def read() -> EvictingCache:
            cache = bound_cache(model, config, 60)
            feed(model, cache, document, chunks_of(60, self.chunk_size))
            return cache

        def ask(cache: EvictingCache, question: int) -> tuple[Tensor, ...]:
            tokens = torch.cat([document, ids(11, 2, seed=50 + question)], dim=1)
            answer: tuple[Tensor, ...] = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), **as_argument(cache), max_new_tokens=6,
                do_sample=False, return_dict_in_generate=True, output_logits=True,
            ).logits  # fmt: skip
            return answer

        prefilled = read()
        before = snapshot(prefilled)
        for question in range(2):
            answers = ask(copy.deepcopy(prefilled), question), ask(read(), question)
            assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
        _check_same(snapshot(prefilled), before)

    def test_a_text_that_follows_in_a_loop_is_evicted_from(self, model: Any, config: dict[str, Any]) -> None:
        """Although the last that was said of a prompt is where the one before it ended."""
        cache = bound_cache(model, config, self.prompt_length)
        feed(model, cache, ids(self.prompt_length), [self.prompt_length])

        def held() -> list[int]:
            return [layer.mean_held for layer in cache.evicting_layers if layer.evicts]

        before = held()
        feed(model, cache, ids(12, seed=1), [12])  # as drafts are, which may be taken back
        assert held() == [count + 12 for count in before]
        feed(model, cache, ids(100, seed=2), [100])
        seen = cache.get_seq_length()
        assert held() == before and seen == self.prompt_length + 112
        cache.bind(model, max_cache_length=seen + 100, prompt_length=seen)
        feed(model, cache, ids(100, seed=2), [100])  # as was to come
        assert held() == [count + 100 for count in before]


def _check_same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor.nan_to_num(), other[name].nan_to_num()), name
