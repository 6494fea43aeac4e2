"""Options every evicting backend takes, and what they come to for a given prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..config import BackendConfig, check_choice, check_flag, check_integer, plain
from ..registry import get_backend, suggest
from .pooling.stage import Pooling, read_pooling

__all__ = ["POSITIONS", "STORAGES", "EvictingConfig"]

POSITIONS = ("absolute", "compact")
STORAGES = (
    "Allowed are codes whose scale belongs to one token: 'int8' (granularity 'head', 'group', 'token'), "
    "'int4', 'float8'; 'kvquant' with positions='compact'; or None, the model's dtype."
)
"""What an error says of the storages there are."""
_STABILIZER_LENGTH = 128
_LOCAL_LENGTH = 100
_DECODE_SLACK = 64
_Self = TypeVar("_Self", bound="EvictingConfig")


@dataclass(frozen=True, kw_only=True)
class EvictingConfig(BackendConfig):
    """Options of every [`EvictingCache`].

    Args:
        budget (`int | float`): Tokens kept per layer and head once a prompt has been read, those that are
            protected among them; below 1, as a fraction of the prompt, but no fewer than what is protected
            and one more.
        chunk_size (`int`, *optional*): Prompt tokens read at once, so that memory is bounded while a prompt
            is read; `None` reads it whole. `generate()` is told so, unless it was given a
            `prefill_chunk_size`.
        sink_length (`int`): First real tokens never evicted; a packed storage keeps them exact.
        stabilizer_length (`int`, *optional*): Newest tokens not evicted between two chunks of a prompt;
            128, at most an eighth of the budget, if not given.
        local_length (`int`, *optional*): Newest tokens not evicted at the end of a prompt, and while
            generating. If not given, 100, at most an eighth of the budget; and of a later turn of a
            conversation up to 100 tokens, at most a quarter of the budget.
        positions (`str`): `"absolute"`: what is kept stays where it was in the text. `"compact"`: it moves up
            to close the gaps, so that no position exceeds the budget, a chunk and what was generated; for
            models with rotary embeddings of a known layout all of whose layers keep as many tokens. If
            frequencies follow the length, no more may be held at an eviction than leaves them as they are.
        evict_at_decode (`bool`): Whether generated tokens count against the budget too: up to 64 more are
            held before it is enforced again.
        storage (`dict`, *optional*): Backend that stores what is kept, and its options, such as `{"backend":
            "int4", "key_bits": 8, "value_bits": 4}`; in the model's dtype if not given. Where keys rotate,
            `"kvquant"` needs compact positions, with which no other packs. It keeps up to 63 tokens fewer
            than `budget`, so that its blocks are whole. Its sinks are `sink_length`, not its own default.
        pool (`str | dict`, *optional*): What becomes of what is evicted: nothing; `"merge"`, its values are
            added to those of the most similar keys that stay; or `{"kind": "conv", "weights": FILE,
            "fraction": 0.125}`, LoCoCo's convolution with trained weights (`eviction.pooling.weights` says
            how to make the file). Only without a `storage`, and with absolute positions.
        residual_length (`int`, *optional*): Newest tokens the storage keeps exact, in place of its own
            default; refused without a storage, which keeps all of them so, and beside another one's in
            `storage`.
    """

    budget: int | float | None = field(default=None, metadata={"shown": "required"})
    chunk_size: int | None = 1024
    stabilizer_length: int | None = None
    local_length: int | None = None
    positions: str = "absolute"
    evict_at_decode: bool = False
    storage: Mapping[str, Any] | None = None
    pool: str | Mapping[str, Any] | None = None
    residual_length: int | None = None  # type: ignore[assignment]  # the storage has one of its own
    per_cache: ClassVar[frozenset[str]] = BackendConfig.per_cache | {"chunk_size", "positions"}

    def __post_init__(self) -> None:
        residual_length = plain(self.residual_length)
        object.__setattr__(self, "residual_length", 0 if residual_length is None else residual_length)
        super().__post_init__()
        object.__setattr__(self, "residual_length", residual_length)
        self._check_budget()
        if self.chunk_size is not None:
            check_integer(self, "chunk_size", self.chunk_size, minimum=1)
        for name in ("stabilizer_length", "local_length"):
            if getattr(self, name) is not None:
                check_integer(self, name, getattr(self, name))
        check_choice(self, "positions", self.positions, POSITIONS)
        check_flag(self, "evict_at_decode", self.evict_at_decode)
        self.pooling()
        if self.residual_length and self.storage is None:
            raise ValueError(
                f"{type(self).__name__}.residual_length is the exact window of a packed storage; without one "
                "all that is kept is exact, and None and 0 are allowed. Tokens that are never evicted are "
                f"counted by local_length and stabilizer_length; got {self.residual_length}."
            )
        storage = self.storage_config()
        if self.offload or (storage is not None and storage.offload):
            raise ValueError(
                f"{type(self).__name__}.offload must be False, also of its storage: what is held is bounded "
                "by `budget`, and is read and chosen from where the model is; got True."
            )
        if isinstance(self.budget, int):
            self.check_budget(self.budget)

    @classmethod
    def tiny(cls: type[_Self]) -> _Self:
        return cls(budget=8192, storage={"backend": "int8"})

    def storage_config(self) -> BackendConfig | None:
        """Options of the storage, those given here applied; `None` for the model's dtype.

        Raises:
            ValueError: If `storage` is not a dictionary, or wrong.
        """
        if self.storage is None:
            return None
        if not isinstance(self.storage, Mapping) or "backend" not in self.storage:
            raise ValueError(
                f"{type(self).__name__}.storage must be a dict such as {{'backend': 'int8'}}, or None, got "
                f"{self.storage!r}."
            )
        options: dict[str, Any] = {"sink_length": self.sink_length, **self.storage, "kernel": self.kernel}
        for name in ("skip_layers", "layer_overrides", "kernel"):
            if name in self.storage:
                raise ValueError(
                    f"{type(self).__name__}.storage takes no {name!r}: give it beside `storage`, got "
                    f"{self.storage[name]!r}."
                )
        given = f"{type(self).__name__}.storage={dict(self.storage)!r}"
        if self.residual_length is not None:
            if options.get("residual_length", self.residual_length) != self.residual_length:
                raise ValueError(
                    f"{given} has another residual_length than the one beside it, {self.residual_length}. "
                    "Allowed is one of the two."
                )
            options["residual_length"] = self.residual_length
        name = options.pop("backend")
        try:
            config_class = get_backend(name).config_class
        except ValueError:
            hint = suggest(name, ("int8", "int4", "float8", "kvquant"))
            raise ValueError(f"{given} names no backend that can store.{hint} {STORAGES}") from None
        if issubclass(config_class, EvictingConfig):
            raise ValueError(
                f"{type(self).__name__}.storage must name a backend that keeps every token, got "
                f"{self.storage!r}. {STORAGES}"
            )
        found = config_class.from_dict(options)
        if not found.packs_single_tokens:
            raise ValueError(f"{given} cannot evict single tokens: several share their scales. {STORAGES}")
        if found.sink_length > self.sink_length:
            raise ValueError(
                f"{type(self).__name__}.storage keeps {found.sink_length} sinks exact, of which sink_length="
                f"{self.sink_length} are never evicted; sink_length must be at least as large."
            )
        return found

    def pooling(self) -> Pooling | None:
        """What becomes of evicted tokens; `None` if nothing does.

        Raises:
            ValueError: If `pool` is wrong, or does not go with `storage` or `positions`.
        """
        return read_pooling(self.pool, type(self).__name__, storage=self.storage, positions=self.positions)

    @property
    def is_uneven(self) -> bool:
        """Whether heads of one layer may hold different numbers of tokens."""
        return False

    @property
    def exact_length(self) -> int:
        """Newest tokens that a packed storage has not packed yet, and that cannot be evicted therefore."""
        storage = self.storage_config()
        return 0 if storage is None else storage.residual_length

    @property
    def _block_tokens(self) -> int:
        """Tokens that a packed storage packs together."""
        storage = self.storage_config()
        return 1 if storage is None else storage.block_tokens

    def budget_of(self, prompt_length: int) -> int:
        """Tokens kept of a prompt of `prompt_length` tokens.

        A fraction is at least as much as leaves room for one token beside what is protected: however short a
        prompt is, it can be read.
        """
        assert self.budget is not None
        if isinstance(self.budget, int):
            return self.budget
        budget = max(1, math.ceil(self.budget * prompt_length))
        while budget < (needed := self._protected_in(budget)[0] + 1):
            budget = needed  # of which an eighth may be protected in turn
        self.check_budget(budget)
        return budget

    def protected_at(self, phase: str, budget: int, turn_length: int = 0) -> int:
        """Newest tokens that are not evicted.

        Args:
            phase (`str`): `"chunk"` between two chunks of a prompt, `"prompt"` at its end, `"decode"` after.
            budget (`int`): Tokens that will be kept.
            turn_length (`int`): Tokens of a later turn of a conversation; 0 for the first.
        """
        if phase == "chunk":
            given, length = self.stabilizer_length, min(_STABILIZER_LENGTH, budget // 8)
        else:
            given, length = self.local_length, min(_LOCAL_LENGTH, budget // 8)
            # what is asked now matters most
            length = max(length, min(turn_length, _LOCAL_LENGTH, budget // 4))
        return max(length if given is None else given, self.exact_length)

    @property
    def decode_slack(self) -> int:
        """Tokens beyond the budget that are held before generated ones are evicted."""
        return _DECODE_SLACK

    def check_budget(self, budget: int) -> None:
        """Raise `ValueError` unless `budget` leaves room for at least one token that is not protected."""
        protected, newest, name = self._protected_in(budget)
        if budget > protected:
            self._check_pooled(budget, newest)
            return
        partial = self._block_tokens - 1
        missing = f", and {partial} that may be missing from whole blocks" if partial else ""
        needed = " Where keys rotate, this storage needs positions='compact', too."
        also = needed if partial and self.positions != "compact" else ""
        of_newest = f" and {newest} newest tokens ({name})" if newest else ""
        raise ValueError(
            f"{type(self).__name__}.budget must exceed what is protected: {self.sink_length} sinks{of_newest}"
            f"{missing}; got a budget of {budget} tokens.{also}"
        )

    def _protected_in(self, budget: int) -> tuple[int, int, str]:
        """Tokens of a budget that are never evicted, the newest among them, and what makes these so many."""
        parts = {
            "stabilizer_length": self.protected_at("chunk", budget),
            "local_length": self.protected_at("decode", budget),
        }
        # of whole blocks, one may be filling, and as many tokens be missing from the budget
        partial = self._block_tokens - 1
        name = max(parts, key=lambda key: parts[key])
        newest = max(parts[name], self.exact_length + partial)
        if newest == self.exact_length + partial > 0:
            name = "the residual_length of the storage" + f" and {partial} of a block" * bool(partial)
        return newest + self.sink_length + partial, newest, name

    def _check_pooled(self, budget: int, newest: int) -> None:
        pooling = self.pooling()
        if pooling is not None:
            later = self.protected_at("prompt", budget, turn_length=budget)  # the most in any later turn
            pooling.check_budget(type(self).__name__, budget, self.sink_length + max(newest, later))

    def _check_budget(self) -> None:
        budget = self.budget
        is_count = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
        is_fraction = isinstance(budget, float) and 0.0 < budget < 1.0
        # JSON of other languages; 1.0 ends a series of fractions, and a single token is not meant
        if isinstance(budget, float) and budget > 1 and budget.is_integer():
            object.__setattr__(self, "budget", int(budget))
        elif not is_count and not is_fraction:
            raise ValueError(
                f"{type(self).__name__}.budget must be a number of tokens >= 1, or a fraction of the prompt "
                f"above 0 and below 1, got {budget!r}."
            )
