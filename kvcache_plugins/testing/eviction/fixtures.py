"""What the tests of an evicting backend are given, and a cache that has evicted something."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import Tensor

from ...eviction.cache import EvictingCache
from ...eviction.options import EvictingConfig
from ...registry import get_backend
from ..models import tiny_model
from .feeding import bound_cache, chunks_of, feed, ids, mask_of

__all__ = ["EvictionFixtures"]


class EvictionFixtures:
    """What the tests of one backend are given; `cache_config` says which backend."""

    budget: ClassVar[int] = 24
    chunk_size: ClassVar[int] = 16
    prompt_length: ClassVar[int] = 50
    steps: ClassVar[int] = 70
    """Generated tokens, of which the 65th makes something go again."""
    pads: ClassVar[tuple[int, ...]] = (0, 9, 30)

    @pytest.fixture
    def cache_config(self) -> dict[str, Any]:
        """The backend and its options; the suite chooses `budget`, `chunk_size` and `evict_at_decode`."""
        raise NotImplementedError("Give the suite a `cache_config` fixture.")

    @pytest.fixture
    def model(self) -> Any:
        """A tiny model, of a family with grouped queries and rotary embeddings; no test changes it."""
        return tiny_model("llama", num_hidden_layers=3, vocab_size=512)

    @pytest.fixture
    def forgets_rejected_tokens(self) -> bool:
        """Whether `crop` leaves nothing of the tokens it removes; not where their queries have counted."""
        return True

    @pytest.fixture
    def config(self, cache_config: dict[str, Any]) -> dict[str, Any]:
        """The same with a budget that the prompts of the suite exceed twice."""
        assert get_backend(cache_config["backend"]).evicts, "a backend that keeps every token does not evict"
        return {**cache_config, "budget": self.budget, "chunk_size": self.chunk_size}

    @pytest.fixture
    def options(self, config: dict[str, Any]) -> EvictingConfig:
        """Its options, as its layers have them."""
        found = get_backend(config["backend"]).config_class.from_dict(
            {name: value for name, value in config.items() if name != "backend"}
        )
        assert isinstance(found, EvictingConfig)
        return found

    @pytest.fixture
    def started(self, model: Any, config: dict[str, Any]) -> EvictingCache:
        """A cache that has read a padded batch in chunks, and will make room while tokens are generated."""
        return self.start(model, config)

    def start(self, model: Any, config: dict[str, Any], length: int | None = None) -> EvictingCache:
        """A cache that has read `length` tokens of the prompt, or all."""
        length = self.prompt_length if length is None else length
        mask = mask_of(self.prompt_length, self.pads)
        cache = bound_cache(model, {**config, "evict_at_decode": True}, self.prompt_length, mask)
        counts = chunks_of(length, self.chunk_size)
        feed(model, cache, self.tokens()[:, :length], counts, mask_of(length, self.pads))
        return cache

    def tokens(self, seed: int = 0) -> Tensor:
        """The prompt and what is generated after it."""
        return ids(self.prompt_length + self.steps, len(self.pads), seed, self.pads)

    def go_on(self, model: Any, cache: EvictingCache, rows: list[int] | None = None) -> Tensor:
        """Logits of the rest of the tokens, of `rows` of the batch only."""
        rows = list(range(len(self.pads))) if rows is None else rows
        seen, prompt = cache.get_seq_length(), self.prompt_length
        counts = [*chunks_of(max(0, prompt - seen), self.chunk_size), *_generated(self.steps)]
        mask = mask_of(prompt + self.steps, [self.pads[row] for row in rows])
        return feed(model, cache, self.tokens()[rows, seen:], counts, mask)


def _generated(steps: int) -> list[int]:
    """Sizes of calls: tokens one by one, several together, as accepted drafts are, and one by one again."""
    alone, together = 4, 9
    calls = max(0, steps - 4 * alone) // together
    return [*[1] * alone, *[together] * calls, *[1] * (steps - alone - together * calls)]
