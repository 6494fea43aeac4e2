"""State that does not grow with the text: of recurrent and convolutional branches.

transformers keeps it in a `LinearAttentionLayer`: numbered convolution and recurrent states, batch first.
Where a layer has such a branch beside full attention (Falcon-H1, Zamba2), its keys and values are packed as
anywhere else, and the state stays with that class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from .base import PackedLayer
from .dense import cropped, working_states
from .extending import extended

__all__ = ["BranchedLayer", "load_recurrent_state", "recurrent_state", "with_recurrent_branch"]

_KINDS = ("conv_states", "recurrent_states")
_DELEGATED = frozenset(
    {
        *_KINDS,
        "conv_kernel_size",
        "has_previous_state",
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
        "number_of_states",
    }
)


class BranchedLayer(PackedLayer):
    """A packed layer that keeps the state of a recurrent branch too, as transformers' hybrid layer does.

    Every verb acts on both. Made by [`with_recurrent_branch`].

    Attributes:
        branch (`LinearAttentionLayer`): transformers' own layer for that state.
    """

    branch: LinearAttentionLayer

    def __getattr__(self, name: str) -> Any:
        if name in _DELEGATED:
            return getattr(self.branch, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a fact of the class elsewhere
        """Whether `crop` can put the branch back as well: not if it has recurrent states."""
        return bool(self.branch.is_croppable)

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take new convolution states `(B, channels, n)`; see transformers' `LinearAttentionLayer`."""
        states: Tensor = self.branch.update_conv_state(conv_states, *args, **kwargs)
        return states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replace recurrent states `(B, ...)`; see transformers' `LinearAttentionLayer`."""
        states: Tensor = self.branch.update_recurrent_state(recurrent_states, *args, **kwargs)
        return states

    def bind(self, *args: Any, **kwargs: Any) -> None:
        super().bind(*args, **kwargs)
        self.branch.record_past = self.record_past

    def reset(self) -> None:
        super().reset()
        # its own `reset` leaves zeros of as many rows as there were
        self.branch = LinearAttentionLayer(self.branch.number_of_states)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.branch.activate_past_recording()

    def check_crop(self, tokens_to_remove: int) -> None:
        super().check_crop(tokens_to_remove)
        cropped(self.branch, int(tokens_to_remove))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens, of the branch too.

        Raises:
            UnsupportedOperationError: If the branch has recurrent states, or has not recorded its past.
        """
        self.check_crop(tokens_to_remove)
        branch = cropped(self.branch, int(tokens_to_remove))
        super().crop(tokens_to_remove)
        vars(self.branch).update(branch)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        for kind in _KINDS:
            states = getattr(self.branch, kind)
            for index, state in states.items():
                if state is not None:
                    states[index] = state[indices.to(state.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = next((len(state) for state in _states_by_name(self.branch).values()), 0)
        if self.is_initialized or not rows:
            super().batch_repeat_interleave(repeats)
        else:
            self.batch_select_indices(torch.arange(rows, device="cpu").repeat_interleave(repeats))

    def offload(self) -> None:
        super().offload()
        self.branch.offload()

    def prefetch(self) -> None:
        super().prefetch()
        self.branch.prefetch()

    def beside(self) -> dict[str, Tensor]:
        return _branch_names(_states_by_name(self.branch))

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self.beside()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        states, branch_facts = recurrent_state(self.branch)
        return tensors | _branch_names(states), facts | {"branch": branch_facts}

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        prefix = "branch."
        states = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        super().load_state({name: t for name, t in tensors.items() if not name.startswith(prefix)}, facts)
        load_recurrent_state(self.branch, states, facts.get("branch", {}))


# It is one in all that is asked of one, without inheriting verbs that would take the place of those for keys.
LinearAttentionCacheLayerMixin.register(BranchedLayer)  # type: ignore[type-abstract]


def with_recurrent_branch(layer_class: type[PackedLayer]) -> type[BranchedLayer]:
    """Return the class of a backend's layers that keep the state of a recurrent branch too.

    Args:
        layer_class (`type[PackedLayer]`): The backend's class. Set `branch` of the instances.
    """
    made: type[BranchedLayer] = extended(BranchedLayer, layer_class)
    return made


def recurrent_state(layer: LinearAttentionLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of a layer by name, and plain facts: what [`load_recurrent_state`] takes.

    Without what was recorded to be taken back: a layer that takes them over records nothing.
    """
    working = {f"{_KINDS[0]}.{index}": state for index, state in working_states(layer).items()}
    tensors = _states_by_name(layer) | working
    return tensors, {"has_previous_state": [bool(flag) for flag in layer.has_previous_state.values()]}


def load_recurrent_state(layer: Any, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Take over what [`recurrent_state`] returned.

    Args:
        layer (`LinearAttentionLayer`): An empty one.
        tensors (`dict[str, torch.Tensor]`): The states by name.
        facts (`dict`): Which of them have seen any token.

    Raises:
        KeyError: If a state is missing.
        RuntimeError: If one has no place in this layer.
    """
    for name, tensor in tensors.items():
        kind, _, number = name.partition(".")
        if kind not in _KINDS or int(number) >= layer.number_of_states:
            raise RuntimeError(f"there is no place for {name!r} among {layer.number_of_states} states")
        layer.lazy_initialization(**{kind: tensor}, state_idx=int(number))
        getattr(layer, kind)[int(number)].copy_(tensor)
    for index, flag in enumerate(facts.get("has_previous_state", [])):
        if flag and f"conv_states.{index}" not in tensors:
            raise KeyError(f"conv_states.{index}")
        layer.has_previous_state[index] = flag


def _states_by_name(layer: LinearAttentionLayer) -> dict[str, Tensor]:
    return {
        f"{kind}.{index}": state
        for kind in _KINDS
        for index, state in getattr(layer, kind).items()
        if state is not None
    }


def _branch_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"branch.{name}": tensor for name, tensor in tensors.items()}
