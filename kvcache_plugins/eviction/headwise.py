"""Heads that share a budget: those whose tokens matter most keep more of them (Ada-KV, arXiv 2407.11550).

Until something has to go, a layer is one. Then its heads are put into a few groups by how much they keep,
each a layer of its own, so that what a head does not keep takes no memory. Every eviction shares out anew.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.reference import AttentionOptions
from ..config import check_number
from ..layers.base import PackedLayer
from ..layers.checking import changing
from ..layers.handle import KVHandle
from ..layers.heads import GroupedHandle, HeadGroup
from ..layers.padding import Padding
from ..layers.storing import storing
from ..layers.stream import Stream
from ..layers.view import StreamView
from .layer import EvictingLayer
from .options import EvictingConfig
from .refusals import check_shown
from .sharing import HeadPart, share_among_heads

__all__ = ["HeadwiseConfig", "HeadwiseLayer"]


@dataclass(frozen=True, kw_only=True)
class HeadwiseConfig(EvictingConfig):
    """Options of backends whose scores can be compared between heads; see [`EvictingConfig`].

    Args:
        head_floor (`float`, *optional*): Least part of `budget` that every key-value head keeps, 0 to 1, and
            no less than what is protected and one token. The rest of what the heads of a layer keep goes to
            those that score highest (as kvpress has Ada-KV, with 0.2; in its authors' code every head keeps
            0.2 of an equal share, and 0.8 of what it would have of all); rows of a batch share alike, and
            under tensor parallelism the heads of one process. Every head keeps `budget` if not given.

    Heads that share are put into groups, four at most, and every further group is a call of its own: 0.11 ms
    a layer and token on a core of a Zen 5 processor. What sharing gains depends on the scores. With the
    bundled model, of two key-value heads, the mean KL divergence from the dense cache (nats per token, 384
    tokens after 1536, three windows of each of three novels, read whole: `eval perplexity --dataset text
    --context_length 1920 --prefill_length 1536 --max_windows_per_text 3`; budgets of 128, 256 and 512) was

        snapkv              0.0231  0.0147  0.0071    with head_floor=0.2  0.0207  0.0128  0.0065
        expected_attention  0.0212  0.0127  0.0056                         0.0202  0.0126  0.0067
        h2o                 0.0239  0.0151  0.0072                         0.0241  0.0154  0.0071
        kvzip               0.0185  0.0111  0.0050                         0.0177  0.0106  0.0049

    and it remembered no more of the facts of `configs/passkey/tiny_eviction.yaml`; `kvzip` did (its options
    say how much).
    """

    head_floor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_floor is None:
            return
        check_number(self, "head_floor", self.head_floor, minimum=0.0, maximum=1.0)
        name = f"{type(self).__name__}.head_floor"
        if self.positions == "compact":
            raise ValueError(
                f"{name} makes heads hold different numbers of tokens, and positions='compact' numbers what "
                f"is held; allowed with it is 'absolute', or head_floor=None, got {self.head_floor!r}."
            )
        if self.pool is not None:
            raise ValueError(
                f"{name} cannot be combined with pool={self.pool!r}, whose room is the same in every head; "
                f"allowed is one of them, got {self.head_floor!r}."
            )
        storage = self.storage_config()
        if storage is not None and (storage.block_tokens > 1 or getattr(storage, "calibration", None)):
            raise ValueError(
                f"{name} moves heads apart, which storage={dict(self.storage or {})!r} knows together, by an "
                "artifact; allowed with it are 'int8', 'int4' and 'float8' without `calibration`, or None."
            )

    @property
    def is_uneven(self) -> bool:
        return self.head_floor is not None


class HeadwiseLayer(EvictingLayer):
    """An evicting layer whose heads may hold different numbers of tokens.

    Attributes:
        parts (`tuple[HeadPart, ...]`): Once something was evicted with `head_floor`: the heads, group by
            group, most tokens first. This layer then holds nothing by itself.
        is_part (`bool`): Whether this is one of them.
        is_asked (`bool`): Whether something will be evicted, for which it must look at the queries.
        mean_budget (`int`): Tokens that the heads of the layer keep, on average, where something is evicted.
    """

    scored_after = "attention"
    config: HeadwiseConfig
    parts: tuple[HeadPart, ...] = ()
    is_part = is_asked = False
    _asked_budget = 0

    def _take(self, key_states: Tensor, value_states: Tensor, has_drafts: bool) -> tuple[Tensor, Tensor]:
        if not self.parts:
            return super()._take(key_states, value_states, has_drafts)
        keys, values = [], []
        self.is_torn = True  # until all groups have taken theirs
        for group, layer in self.parts:
            layer.record_past = self.record_past
            key, value = layer.update(group.of_states(key_states), group.of_states(value_states))
            assert isinstance(key, KVHandle) and isinstance(value, KVHandle)  # to see the queries
            keys.append((group, key))
            values.append((group, value))
        return GroupedHandle(self, keys, key_states), GroupedHandle(self, values, value_states)

    def _postpone(self, phase: str, has_drafts: bool) -> None:
        super()._postpone(phase, has_drafts)
        for _, layer in self.parts:
            layer.is_asked, layer._asked_budget = self._exceeds(phase), self.mean_budget

    def attended(self, query: Tensor, tokens: StreamView, options: AttentionOptions) -> None:
        """Evict, if that is due: the groups have seen their queries."""
        if not self.parts:
            super().attended(query, tokens, options)
            return
        layers = [layer for _, layer in self.parts]  # one that a fast kernel did not serve is told of
        served = next((layer for layer in layers if layer.kernel_reason is not None), layers[0])
        self.kernel, self.kernel_reason = served.kernel, served.kernel_reason
        self.evict_due()

    def check_crop(self, tokens_to_remove: int) -> None:
        if not self.parts:
            super().check_crop(tokens_to_remove)
        elif -int(tokens_to_remove) < self.cumulative_length:
            for _, layer in self.parts:
                layer.check_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        if not self.parts or -int(tokens_to_remove) >= self.cumulative_length:
            super().crop(tokens_to_remove)
            return
        self.check_crop(tokens_to_remove)
        with changing(self):
            for _, layer in self.parts:
                layer.crop(tokens_to_remove)
            self.cumulative_length += int(tokens_to_remove)
            self._due, self._postponed = self._postponed, None
            self.evict_due()

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.parts:
            super().batch_select_indices(indices)
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        with changing(self):
            self.padding.index(indices)
            if self.pads is not None:
                self.pads = self.pads[indices.to(self.pads.device)]
            for _, layer in self.parts:
                layer.batch_select_indices(indices)

    def prefetch(self) -> None:
        if not self.parts:
            super().prefetch()
            return
        for _, layer in self.parts:
            layer.prefetch()

    def tensors(self) -> dict[str, Tensor]:
        if not self.parts:
            return super().tensors()
        owned = {} if self.pads is None else {"pads": self.pads}
        for i, (_, layer) in enumerate(self.parts):
            owned |= {f"part{i}_{name}": tensor for name, tensor in layer.tensors().items()}
        return owned

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if not self.parts:
            return super().state()
        tensors = {} if self.pads is None else {"pads": self.pads}
        parts = []
        for i, (group, layer) in enumerate(self.parts):
            owned, facts = layer.state()
            tensors |= {f"part{i}_{name}": tensor for name, tensor in owned.items()}
            parts.append({"heads": list(group.heads), "facts": facts})
        return tensors, {
            "parts": parts,
            "cumulative_length": self.cumulative_length,
            "prompt_length": self.prompt_length,
            "turn_length": self._turn_length,
            "kept": self._budget,
        }

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if "parts" not in facts:
            super().load_state(tensors, facts)
            return
        self._forget()
        parts = []
        for i, part in enumerate(facts["parts"]):
            prefix, layer = f"part{i}_", self._empty_part()
            owned = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            layer.load_state(owned, part["facts"])
            parts.append(HeadPart(HeadGroup(part["heads"], layer.device), layer))
        if sorted(head for group, _ in parts for head in group.heads) != list(range(self.num_heads)):
            raise ValueError(f"parts of the heads {[group.heads for group, _ in parts]}, of {self.num_heads}")
        self.parts, self.is_initialized = tuple(parts), True
        self.dtype, self.device = parts[0].layer.dtype, parts[0].layer.device
        self.pads = tensors.get("pads")
        self.cumulative_length, self._budget = facts["cumulative_length"], facts["kept"]
        self.prompt_length, self._turn_length = facts["prompt_length"], facts["turn_length"]

    @property
    def uniform_layers(self) -> tuple[PackedLayer, ...]:
        return tuple(layer for _, layer in self.parts) or (self,)

    @property
    def streams(self) -> tuple[Stream, ...]:
        if not self.parts:
            return super().streams
        return tuple(stream for _, layer in self.parts for stream in layer.streams)

    @property
    def stored_length(self) -> int:
        """Tokens stored per row, of the head that holds most."""
        if not self.parts:  # written out: a compiler does not find properties by `super`
            return self.stored_keys.length if self.is_initialized else 0
        return max(layer.stored_length for _, layer in self.parts)

    @property
    def mean_budget(self) -> int:
        if self.is_part:  # its own is what its heads were given
            return self._asked_budget
        assert self._budget is not None
        return self._budget

    @property
    def mean_held(self) -> int:
        if not self.parts:
            return super().mean_held
        return -(-sum(layer.num_heads * layer.held_length for _, layer in self.parts) // self.num_heads)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self.parts[0].layer.keys if self.parts else super().keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.parts[0].layer.values if self.parts else super().values

    def _set_final_length(self) -> None:
        super()._set_final_length()
        for _, layer in self.parts:  # each ends as much longer or shorter as it is
            layer.prompt_length, layer._full_length = self.prompt_length, self._full_length
            layer._set_final_length()

    def _forget(self) -> None:
        super()._forget()
        self.parts = ()

    def _move(self, device: torch.device) -> None:
        if not self.parts:
            super()._move(device)
            return
        for _, layer in self.parts:
            layer._move(device)

    def _exceeds(self, phase: str, coming: int = 0) -> bool:
        return self.is_asked if self.is_part else super()._exceeds(phase, coming)

    def _evict(self, phase: str) -> None:
        if self.is_part:
            return  # that is for all groups to decide together
        if not self.config.is_uneven or self.num_heads == 1 or (not self.parts and self.records.data.is_meta):
            super()._evict(phase)
            return
        if not self._exceeds(phase):
            return
        self._has_missed |= any(layer._has_missed for _, layer in self.parts)
        check_shown(self)
        assert self._budget is not None
        with storing(), changing(self):
            recent = self.config.protected_at(phase, self._budget, self._turn_length)
            parts = share_among_heads(self, self._budget, recent)
            self._let_go()
            self.parts = parts

    def _empty_part(self) -> HeadwiseLayer:
        part = copy.copy(self)
        part.padding = Padding(self.config.sink_length)
        part.is_part = True
        part._prepared = None
        part._forget()
        return part

    def _let_go(self) -> None:
        """Hold nothing by itself any more."""
        for name in ("records", "stored_keys", "stored_values", "ledger"):
            self.__dict__.pop(name, None)
        self.companions = {}
