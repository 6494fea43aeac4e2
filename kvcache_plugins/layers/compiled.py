"""The layers of a cache in the graph of a compiled model, where update and attention are one operator.

A graph of what a layer does and counts would have to be compiled anew whenever one of its numbers has
changed. So an operator does that when the graph runs, as it is done in a model that is not compiled. While a
graph is made, an update only notes the new keys and values; it is made by the operator of attention
(`attention.compiled`), to which go a number by which it finds the layers, and what was noted. Whatever else
is asked of the keys and values ends the graph there, makes the update and is answered by what it returns.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from ..compilation import makes_graph, outside_graphs
from .base import PackedLayer
from .moving import move_layer
from .storing import storing
from .tensor_handle import shown

__all__ = [
    "CompiledHandle",
    "CompiledLayers",
    "CompiledUpdates",
    "LayerUpdate",
    "handed_over",
    "known_layers",
    "update_of",
]

_known: WeakValueDictionary[int, CompiledLayers] = WeakValueDictionary()


class CompiledLayers:
    """The layers of a cache, as the operator of a graph finds them.

    Args:
        cache (`Cache`): Whose layers they are; a copy of it has a copy of this.

    Attributes:
        number (`torch.Tensor`): int64 `(1,)` on the CPU, another for every cache: as a plain integer it would
            be a constant of the graph, which would then serve one cache alone.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = weakref.ref(cache)
        with storing():  # to compilers, one made in inference mode is of another kind
            self.number = torch.tensor([id(self)], dtype=torch.int64, device="cpu")
        _known[id(self)] = self

    def update(
        self, layer_idx: int, seen: int, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hand new keys and values, `(B, H, n, D)` each, to a layer that has seen `seen` tokens before.

        Where a graph ended since they were noted, the layer has counted them already.

        Raises:
            RuntimeError: If earlier ones were noted, and nobody has read them.
        """
        cache = self._cache()
        assert cache is not None  # it holds this
        layer: Any = cache.layers[layer_idx]
        layer.cumulative_length = seen
        if layer.held_length == seen > layer.stored_length:  # of a window that is full nothing can be said
            raise RuntimeError(
                f"A compiled model gave layer {layer_idx} keys and values that it did not attend to, so that "
                f"the layer holds {layer.stored_length} tokens where it should hold {seen}. Allowed are "
                "models that attend to what they give a layer in the same call, or are not compiled."
            )
        move_layer(layer, key_states.device)
        states: tuple[Tensor, Tensor] = layer.update(key_states, value_states)
        return states

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledLayers, (self._cache(),)


def known_layers(number: Tensor) -> CompiledLayers:
    """The layers of a number."""
    return _known[int(number)]


class LayerUpdate:
    """New keys and values of a layer, of which it is not told before somebody reads them.

    Args:
        layers (`CompiledLayers`): Of the cache.
        layer_idx (`int`): Index of the layer.
        seen (`int`): Tokens that the layer has seen before.
        key_states (`torch.Tensor` of shape `(B, H, n, D)`): The new keys.
        value_states (`torch.Tensor` of shape `(B, H, n, Dv)`): The new values.

    Attributes:
        is_taken (`bool`): Whether the layer has been told, or will be by an operator of the graph.
        returned (`tuple`, *optional*): What it has returned, where no operator did that.
    """

    def __init__(
        self, layers: CompiledLayers, layer_idx: int, seen: int, key_states: Tensor, value_states: Tensor
    ) -> None:
        self.layers, self.layer_idx, self.seen = layers, layer_idx, seen
        self.key_states, self.value_states = key_states, value_states
        self.is_taken = False
        self.returned: tuple[Tensor, Tensor] | None = None

    @outside_graphs
    def made(self) -> tuple[Tensor, Tensor]:
        """Tell the layer, once, and return what it did: handles, or exact states.

        Raises:
            RuntimeError: If an operator has done so, which keeps nothing.
        """
        if self.returned is None:
            if self.is_taken:
                raise RuntimeError(
                    f"A compiled model read the keys and values of layer {self.layer_idx} once more after it "
                    "had attended to them, when nothing of them is kept. Allowed are models that attend to "
                    "them once, or are not compiled."
                )
            self.is_taken = True
            self.returned = self.layers.update(self.layer_idx, self.seen, self.key_states, self.value_states)
        return self.returned


class CompiledHandle:
    """The keys or the values of a layer while a graph is made; what they are is known when it runs.

    It is no tensor, lest anything in the graph take it for one. An attention function that knows it calls an
    operator. Whatever else is asked of it ends the graph there, and is answered by what the update returned.

    Args:
        update (`LayerUpdate`): What the layer is to be told.
        side (`int`): 0 for keys, 1 for values.
    """

    def __init__(self, update: LayerUpdate, side: int) -> None:
        self.update, self.side = update, side

    @outside_graphs
    def states(self) -> Tensor:
        """What the update returned: a handle, or exact states."""
        return self.update.made()[self.side]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "update":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self.states(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*tree_map(_resolved, args), **tree_map(_resolved, kwargs or {}))


def _of_states(operation: Any) -> Any:
    return lambda self, *args: operation(self.states(), *args)


def _behind(operation: Any) -> Any:
    return lambda self, other: operation(other, self.states())


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(CompiledHandle, f"__{_name}__", _of_states(getattr(operator, _name)))
    setattr(CompiledHandle, f"__r{_name}__", _behind(getattr(operator, _name)))
for _name in ("getitem", "neg", "lt", "le", "gt", "ge"):
    setattr(CompiledHandle, f"__{_name}__", _of_states(getattr(operator, _name)))
CompiledHandle.__len__ = _of_states(len)  # type: ignore[attr-defined]


def update_of(key: Any, value: Any) -> LayerUpdate | None:
    """The update of which two handles of a graph are the keys and the values; `None` of anything else."""
    if not isinstance(key, CompiledHandle) or not isinstance(value, CompiledHandle):
        return None
    return key.update if key.update is value.update and (key.side, value.side) == (0, 1) else None


def handed_over(key: Any, value: Any) -> tuple[Any, Any]:
    """What two handles of a graph stand for, for whoever attends to them; anything else as it is."""
    return _resolved(key), _resolved(value)


def _resolved(states: Any) -> Any:
    return states.states() if isinstance(states, CompiledHandle) else states


class CompiledUpdates(Cache):
    """The part of a cache that hands new keys and values to its layers, also in a compiled model.

    Attributes:
        compiled_layers (`CompiledLayers`, *optional*): Its layers, if they go into graphs. Others end them.
        is_compiled (`bool`): Whether the call of `generate()` has a `compile_config`.
        shown_from (`int`, *optional*): New tokens of a call from which on attention is given handles of
            tensors, which it may read faster; if not given, it knows none.
    """

    compiled_layers: CompiledLayers | None = None
    is_compiled = False
    shown_from: int | None = None

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` compiles what decodes: only if it was asked to, for that takes its time."""
        return self.is_compiled

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Hand new keys and values, `(B, H, n, D)` each, to a layer, and return what attention reads.

        No compiler traces what the layer does.
        """
        layer = self.layers[layer_idx]
        if torch.compiler.is_dynamo_compiling() and isinstance(layer, PackedLayer):
            layers = self.compiled_layers if makes_graph(key_states.device.type) else None
            if layers is None:
                return self._update_untraced(key_states, value_states, layer_idx, *args, **kwargs)
            update = LayerUpdate(layers, layer_idx, layer.cumulative_length, key_states, value_states)
            # as the update will have set it, for what else is traced and asks how many tokens there are
            layer.cumulative_length = layer.cumulative_length + key_states.shape[2]
            return CompiledHandle(update, 0), CompiledHandle(update, 1)
        move_layer(layer, key_states.device)
        returned = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        least = self.shown_from
        if least is None or key_states.shape[2] < least or torch.compiler.is_compiling():
            return returned
        return shown(*returned)

    @outside_graphs
    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]  # transformers declares no types here

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        if self.compiled_layers is not None:
            copied.compiled_layers = CompiledLayers(copied)
        return copied

    @outside_graphs
    def _update_untraced(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(*args, **kwargs)
