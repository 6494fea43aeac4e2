"""The layers of a cache in the graph of a compiled model, where an update is one operator.

A graph of what a layer does and counts would have to be compiled anew whenever one of its numbers has
changed. So operators do that when the graph runs, as it is done in a model that is not compiled; the other
one, of attention, is in `attention.compiled`. Through the graph go a number by which they find the layers,
the new keys and values, and a token: a tensor by which attention comes after the update that it reads. What
the update returned waits beside the layers until then.
"""

from __future__ import annotations

import operator
import sys
import weakref
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from ..compilation import define_opaque, makes_graph, outside_graphs
from .base import PackedLayer
from .storing import storing

__all__ = [
    "CompiledHandle",
    "CompiledLayers",
    "CompiledUpdates",
    "are_of_one_update",
    "handed_over",
    "known_layers",
]

_known: WeakValueDictionary[int, CompiledLayers] = WeakValueDictionary()


class CompiledLayers:
    """The layers of a cache, as the operators of a graph find them.

    Args:
        cache (`Cache`): Whose layers they are; a copy of it has a copy of this.

    Attributes:
        number (`torch.Tensor`): int64 `(1,)` on the CPU, another for every cache: as a plain integer it would
            be a constant of the graph, which would then serve one cache alone.
        taken (`dict`): Keys and values that the latest update of a layer returned, by its index, until they
            are attended to.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = weakref.ref(cache)
        with storing():  # to compilers, one made in inference mode is of another kind
            self.number = torch.tensor([id(self)], dtype=torch.int64, device="cpu")
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}
        _known[id(self)] = self

    @property
    def layers(self) -> list[Any]:
        """What the cache consists of now."""
        cache = self._cache()
        assert cache is not None  # it holds this
        return cache.layers

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledLayers, (self._cache(),)


class CompiledHandle:
    """The keys or the values of a layer while a graph is made; what they are is known when it runs.

    It is no tensor, lest anything in the graph take it for one. An attention function that knows it calls an
    operator. Whatever else is asked of it ends the graph there, and is answered by what the update returned.

    Args:
        layers (`CompiledLayers`): Of the cache.
        layer_idx (`int`): Index of the layer.
        token (`torch.Tensor`): What its update has left in the graph.
        head_dim (`int`): Channels.
        side (`int`): 0 for keys, 1 for values.
    """

    def __init__(
        self, layers: CompiledLayers, layer_idx: int, token: Tensor, head_dim: int, side: int
    ) -> None:
        self.layers, self.layer_idx, self.token = layers, layer_idx, token
        self.head_dim, self.side = head_dim, side

    @outside_graphs
    def states(self) -> Tensor:
        """What the update returned: a handle, or exact states."""
        return self.layers.taken[self.layer_idx][self.side]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "layers":  # of one that is being copied
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


def handed_over(key: Any, value: Any) -> tuple[Any, Any]:
    """What two handles of a graph stand for, for whoever attends to them; anything else as it is.

    Nothing else holds it from then on, lest a prompt be there until the next update.
    """
    if are_of_one_update(key, value):
        return _hand_over(key.layers, key.layer_idx)
    return _resolved(key), _resolved(value)


def are_of_one_update(key: Any, value: Any) -> bool:
    """Whether two handles of a graph are the keys and the values that one update returned."""
    is_pair = isinstance(key, CompiledHandle) and isinstance(value, CompiledHandle)
    return is_pair and key.token is value.token and (key.side, value.side) == (0, 1)


@outside_graphs
def _hand_over(layers: CompiledLayers, layer_idx: int) -> tuple[Tensor, Tensor]:
    return layers.taken.pop(layer_idx)


def _resolved(states: Any) -> Any:
    return states.states() if isinstance(states, CompiledHandle) else states


def known_layers(number: Tensor) -> CompiledLayers:
    """The layers of a number."""
    return _known[int(number)]


def _update(number: Tensor, layer_idx: int, key_states: Tensor, value_states: Tensor) -> Tensor:
    # an operator is registered once, also where this module is imported again
    known: CompiledLayers = sys.modules[__name__].known_layers(number)
    known.taken.clear()  # of layers that were read and not taken over
    # copies: what is returned may be the states themselves, whose memory is free for the graph from here on
    known.taken[layer_idx] = known.layers[layer_idx].update(key_states.clone(), value_states.clone())
    return key_states.new_empty(1)


def _token(number: Tensor, layer_idx: int, key_states: Tensor, value_states: Tensor) -> Tensor:
    return key_states.new_empty(1)


define_opaque(
    "update_layer",
    "(Tensor number, int layer_idx, Tensor key_states, Tensor value_states) -> Tensor",
    _update,
    _token,
)


class CompiledUpdates(Cache):
    """The part of a cache that hands new keys and values to its layers, also in a compiled model.

    Attributes:
        compiled_layers (`CompiledLayers`, *optional*): Its layers, if they go into graphs. Others end them.
        is_compiled (`bool`): Whether the call of `generate()` has a `compile_config`.
    """

    compiled_layers: CompiledLayers | None = None
    is_compiled = False

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
            # as the operator will have set it, for what else is traced and asks how many tokens there are
            layer.cumulative_length = layer.cumulative_length + key_states.shape[2]
            token = torch.ops.kvcache_plugins.update_layer(layers.number, layer_idx, key_states, value_states)
            return (
                CompiledHandle(layers, layer_idx, token, key_states.shape[3], 0),
                CompiledHandle(layers, layer_idx, token, value_states.shape[3], 1),
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @outside_graphs
    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]  # transformers declares no types here
        if self.compiled_layers is not None:
            self.compiled_layers.taken.clear()

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        if self.compiled_layers is not None:
            copied.compiled_layers = CompiledLayers(copied)
        return copied

    @outside_graphs
    def _update_untraced(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(*args, **kwargs)
