"""Models that run `eager`: their own attention function is left out where ours computes the same.

Families whose attention has a softcap or sink logits (Gemma 2, gpt-oss) run `eager` unless they are told
otherwise: a function in the modelling file that multiplies whole tensors, for which a packed layer would have
to be decoded at every step. It is asked for by name, so it can be exchanged when it is given handles. What it
computes is the family's own affair: GPT-2 may scale by the layer's number, others add biases. So it is first
compared, for every attention module, with what ours makes of a few numbers and the same arguments; a module
that computes anything else goes on as before, and the layer says why.

It returns attention weights, which ours does not have. Whoever asks for them gets them from the model's own
function, whose products then read the packed codes one after the other (`attention.products`).
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, wraps
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..compilation import outside_graphs
from ..errors import KernelUnavailableError, UnsupportedOperationError
from ..kernels.selection import native_is_unavailable
from ..layers.compiled import handed_over
from ..layers.handle import KVHandle
from ..layers.tensor_handle import TensorHandle
from .arguments import attention_options
from .dispatch import AttentionFunction, wrap_attention_function
from .masks import mask_fits
from .reference import DenseView, attend

__all__ = ["wrap_eager_function"]

Handle: TypeAlias = KVHandle | TensorHandle

_HANDLES = (KVHandle, TensorHandle)
_CAPTURING = "transformers.utils.output_capturing"
_SAID_BY_MASK = ("is_causal", "sliding_window")
"""Arguments that do not reach ours: eager attention reads of its mask alone what is hidden."""
_SCALES = (0.3, 3.0, 30.0)
"""Sizes of the queries compared: weights about equal, peaked, and logits that a softcap bends."""
_TOKENS = 6
_OF_QUERIES = {"position_bias": _TOKENS, "sinks": 1}
"""Arguments `(B, Hq, q, n)` that differ from call to call, and `n` in a comparison, which makes some up."""
_TOLERANCE = 1e-3

_wrapped: dict[AttentionFunction, AttentionFunction] = {}
"""Of every function that was wrapped; not by `functools.cache`, of which compilers warn."""
_obstacles: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


def wrap_eager_function(eager: AttentionFunction) -> AttentionFunction:
    """Return a family's eager attention function with handles taken out of its way, where ours does the same.

    Args:
        eager (`Callable`): What `AttentionInterface.get_interface("eager", ...)` gives.
    """
    known = _wrapped.get(eager)
    if known is None:
        known = _wrapped[eager] = _wrap(eager)
    return known


def _wrap(eager: AttentionFunction) -> AttentionFunction:
    @wraps(eager)
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        key, value = handed_over(key, value)
        # what comes behind a mask by position, nobody says
        if isinstance(key, _HANDLES) and isinstance(value, _HANDLES) and len(args) <= 1:
            return _exchanged(eager, module, query, key, value, *args, **kwargs)
        return eager(module, query, key, value, *args, **kwargs)

    return forward


@cache
def _over_handles(eager: AttentionFunction) -> AttentionFunction:
    return wrap_attention_function(eager, is_eager=True)


@outside_graphs
def _exchanged(
    eager: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Handle,
    value: Handle,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend by ours where it does the same as `eager`, else by `eager` itself."""
    others = {name: value for name, value in kwargs.items() if name not in _SAID_BY_MASK}
    mask = args[0] if args else others.pop("attention_mask", None)
    others["is_causal"] = False
    call = _Call(module, query, key, value, mask, others)
    obstacle = _wanted_weights(module, kwargs) or _difference(eager, call)
    if obstacle is None:
        return _over_handles(eager)(module, query, key, value, mask, **others)
    if isinstance(key, TensorHandle) or isinstance(value, TensorHandle):
        return eager(module, query, key.dense(), value.dense(), *args, **kwargs)
    layer = key.layer
    if not mask_fits(key, mask):
        raise UnsupportedOperationError(
            f"Layer {layer.layer_idx} holds {key.tokens.length} tokens, and the model's mask is for "
            f"{mask.shape[-1]}, as of other layers; attn_implementation='eager' cannot attend to it so: "
            f"{obstacle}. model.set_attn_implementation('kvcache_plugins') can."
        )
    reads = layer.fallback_reads
    where = f"for attn_implementation='eager': {obstacle}"
    try:
        result = eager(module, query, key, value, *args, **kwargs)
    except KernelUnavailableError as error:
        raise native_is_unavailable(f"layer {layer.layer_idx}", f"decoded whole {where}") from error
    if max(key.tokens.packed_length, value.tokens.packed_length) > 0:
        how = "decoded whole" if layer.fallback_reads > reads else "multiplied apart"
        layer.kernel_reason = f"{how} {where}"
    if layer.observes_queries:
        with torch.no_grad():
            options = attention_options(module, query, key.tokens.length, mask, **others)
            layer.attended(query, key.tokens, options)
    return result


def _wanted_weights(module: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Who may want attention weights; `None` if nobody can."""
    config = getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        return "attention weights are asked for"
    capturing = sys.modules.get(_CAPTURING)
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        return "this release of transformers does not tell whether attention weights are asked for"
    if any("attentions" in name for name in collector.get() or ()):
        return "attention weights are asked for"
    if not all(_is_known(hook) for hook in module._forward_hooks.values()):
        return "a hook is shown what the attention module returns"
    return None


def _is_known(hook: Any) -> bool:
    """Whether a hook is one of ours, or of those that collect what was asked for."""
    owner = str(getattr(hook, "__module__", None))
    return owner == _CAPTURING or owner.split(".")[0] == __name__.split(".")[0]


class _Call(NamedTuple):
    """What an attention function is given; beside the mask, by name."""

    module: nn.Module
    query: Tensor
    key: Handle
    value: Handle
    mask: Any
    others: dict[str, Any]


def _difference(eager: AttentionFunction, call: _Call) -> str | None:
    """Why ours cannot take the place of `eager` in a module; `None` if it can. Found out once."""
    mask, query = call.mask, call.query
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        return "its mask is of another kind"
    given = frozenset(name for name, argument in call.others.items() if argument is not None)
    known = _obstacles.setdefault(call.module, {})
    kind = (eager, given, None if mask is None else mask.dtype, query.device)
    if kind not in known:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return "it has not been compared with ours before a CUDA graph was captured"
        with torch.no_grad():
            known[kind] = _compare(eager, call)
    return known[kind]


def _compare(eager: AttentionFunction, call: _Call) -> str | None:
    module, query = call.module, call.query
    if "output_attentions" in inspect.signature(type(module).forward).parameters:
        return "the model does not tell its attention function whether attention weights are asked for"
    generator = torch.Generator().manual_seed(0)

    def numbers(states: Tensor, tokens: int, width: int | None = None) -> Tensor:
        shape = (1, states.shape[1], tokens, width or states.shape[3])
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(query.device)

    others = dict(call.others)
    for name, width in _OF_QUERIES.items():
        if isinstance(given := others.get(name), Tensor) and given.dim() == 4:
            others[name] = numbers(given, len(_SCALES), width)
    scales = torch.tensor(_SCALES, dtype=torch.float32, device=query.device)[:, None]
    queries, keys = numbers(query, len(_SCALES)) * scales, numbers(call.key, _TOKENS)
    values = numbers(call.value, _TOKENS)
    mask: Tensor | None = None
    if call.mask is not None:
        mask = torch.ones(len(_SCALES), _TOKENS, dtype=torch.bool, device=query.device)
        mask = mask.tril(_TOKENS - len(_SCALES))[None, None]
        if call.mask.dtype != torch.bool:
            added = torch.zeros(mask.shape, dtype=torch.float32, device=query.device)
            mask = added.masked_fill(~mask, torch.finfo(torch.float32).min)
    try:
        made, _ = eager(module, queries, keys, values, mask, **others)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"it cannot be compared with ours ({type(error).__name__})"
    options = attention_options(module, queries, _TOKENS, mask, **others)
    found = attend(queries, DenseView(keys), DenseView(values), options).transpose(1, 2)
    is_same = made.shape == found.shape and torch.allclose(
        made.float(), found, rtol=0.0, atol=_TOLERANCE * float(values.abs().max())
    )
    return None if is_same else f"{type(module).__name__} computes something else than is known"
