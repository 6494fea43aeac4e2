"""The outputs of a model's query, key and value projections, caught on their way by forward hooks.

Hooks on the projections fire before the attention module rotates anything and before it calls the cache, so
that a cache finds the features of exactly the tokens it is given:

```
attention pre-hook     does anyone want this forward (decided by its cache)? open a slot
q_proj, k_proj, v_proj hooks put their outputs into the slot
cache.update -> tap.take(layer_idx): the features, and the slot is empty
attention post-hook    whatever was not taken is forgotten, also if the forward failed
```

Slots belong to the thread that runs the forward: one model may serve several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..models.cache_argument import given_cache
from ..models.decoder import decoder_of, decoder_only_config, split_model_or_config
from ..models.hooks import HookOwner
from ..models.layer_plan import key_value_heads
from .layouts import Layout, find_layout

__all__ = ["ProjectionTap"]

Wants = Callable[[Any], bool]
"""Called with an attention module's cache, or `None`: whether to catch this forward."""

_ATTRIBUTE = "_kvcache_plugins_projection_tap"

_lock = threading.RLock()
"""Held while hooks are registered: a second thread waits until the first has registered all of them."""
_slots = threading.local()
"""Per thread: `open`, a dictionary from the id of an attention module to the outputs of its projections."""


class ProjectionTap(HookOwner):
    """Catches the projections of every attention layer of a model.

    The tap is no part of the model's parameters and is not saved with it. [`ProjectionTap.of`] gives the one
    tap of a model.

    Args:
        model (`torch.nn.Module`): A model of transformers, wrapped (PEFT, quantized, dispatched) or not.

    Raises:
        ValueError: If no attention layer with known projections is found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wants: list[Wants] = []
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, list[nn.Module]] = {}
        self._projection_handles: dict[int, list[RemovableHandle]] = {}
        self.layers: dict[int, nn.Module] = {}
        self._layouts: dict[int, Layout] = {}
        config = decoder_only_config(split_model_or_config(model)[1])
        for module in decoder_of(model).modules():
            layer_idx = getattr(module, "layer_idx", None)
            if not isinstance(layer_idx, int) or not 0 <= layer_idx < config.num_hidden_layers:
                continue
            kv_heads, head_dim, _ = key_value_heads(config, layer_idx)
            multi_query = bool(getattr(config, "multi_query", False))
            layout = find_layout(module, kv_heads, head_dim, multi_query=multi_query)
            if layout is not None and layer_idx not in self.layers:
                self.layers[layer_idx], self._layouts[layer_idx] = module, layout
        if not self.layers:
            raise ValueError(
                "No attention layer with q_proj, k_proj and v_proj, or with qkv_proj, Wqkv, W_pack, "
                f"query_key_value or c_attn, was found in {type(model).__name__}: retaining heads read the "
                "outputs of these."
            )

    @classmethod
    def of(cls, model: nn.Module) -> ProjectionTap:
        """Return the tap of a model, made at the first call.

        Raises:
            ValueError: If no attention layer with known projections is found.
        """
        with _lock:
            tap: ProjectionTap | None = model.__dict__.get(_ATTRIBUTE)
            if tap is None:
                tap = cls(model)
                model.__dict__[_ATTRIBUTE] = tap  # past nn.Module.__setattr__: no sub-module
            return tap

    def attach(self, wants: Wants) -> ProjectionTap:
        """Catch the forwards that `wants` says yes to; several may want, and one only once.

        Args:
            wants (`Callable`): Called at the beginning of every attention layer's forward with its
                cache, or with `None`.
        """
        with _lock:
            if wants not in self._wants:
                self._wants.append(wants)
            if not self._handles:
                for layer_idx, attention in self.layers.items():
                    self._hook_projections(layer_idx)
                    self._handles += [
                        attention.register_forward_pre_hook(partial(self._open, layer_idx), with_kwargs=True),
                        attention.register_forward_hook(_close, always_call=True),
                    ]
        return self

    def detach(self, wants: Wants | None = None) -> None:
        """Stop catching for `wants`, or for all; without any left the hooks are removed."""
        with _lock:
            self._wants = [known for known in self._wants if wants is not None and known != wants]
            if self._wants:
                return
            groups = self._projection_handles.values()
            for handle in (*self._handles, *(handle for group in groups for handle in group)):
                handle.remove()
            self._handles, self._hooked, self._projection_handles = [], {}, {}

    def remove_hooks(self) -> None:
        self.detach()

    def take(self, layer_idx: int) -> Tensor:
        """Return and forget the features of the forward that this thread is in.

        Args:
            layer_idx (`int`): The layer whose attention module is running.

        Returns:
            `torch.Tensor` of shape `(B, n, input_dim)`: Outputs of the projections, queries, keys and values
                side by side, heads flattened, before any norm or rotation; on the layer's device, in its
                dtype, without gradient.

        Raises:
            RuntimeError: If nothing was caught: outside of the layer's forward, in one that nobody wanted, or
                taken already.
        """
        attention = self.layers.get(layer_idx)
        outputs = _open_slots().pop(id(attention), None) if attention is not None else None
        if attention is None or outputs is None or any(output is None for output in outputs):
            called = "" if outputs is None else ": its projections were not called as modules"
            raise RuntimeError(
                f"The projections of layer {layer_idx} were not caught{called}. They can be taken once, "
                f"while the attention layer runs, after attach(); known layers are {sorted(self.layers)}."
            )
        with torch.no_grad():
            return self._layouts[layer_idx].arrange(
                [output.detach() for output in outputs if output is not None]
            )

    def _open(
        self, layer_idx: int, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        slots = _open_slots()
        slots.pop(id(attention), None)
        cache = given_cache(kwargs, args)
        if not any(wants(cache) for wants in self._wants):
            return
        modules = self._layouts[layer_idx].modules(attention)
        if any(now is not hooked for now, hooked in zip(modules, self._hooked[layer_idx], strict=True)):
            self._hook_projections(layer_idx)  # wrapped since, by PEFT or a quantizer
        slots[id(attention)] = [None] * len(modules)

    def _hook_projections(self, layer_idx: int) -> None:
        with _lock:
            for handle in self._projection_handles.get(layer_idx, ()):
                handle.remove()
            attention = self.layers[layer_idx]
            modules = self._layouts[layer_idx].modules(attention)
            self._projection_handles[layer_idx] = [
                module.register_forward_hook(partial(_catch, attention, index))
                for index, module in enumerate(modules)
            ]
            self._hooked[layer_idx] = modules


def _open_slots() -> dict[int, list[Tensor | None]]:
    """Slots of this thread."""
    slots: dict[int, list[Tensor | None]] | None = getattr(_slots, "open", None)
    if slots is None:
        slots = _slots.open = {}
    return slots


def _catch(attention: nn.Module, index: int, module: nn.Module, args: Any, output: Any) -> None:
    slot = _open_slots().get(id(attention))
    if slot is not None:
        slot[index] = output[0] if isinstance(output, tuple) else output


def _close(attention: nn.Module, args: Any, output: Any) -> None:
    _open_slots().pop(id(attention), None)
