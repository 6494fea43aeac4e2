"""How models reach attention over packed data.

Four doors, all leading to [`attend`]:

* `torch.nn.functional.scaled_dot_product_attention` called with handles by any modelling code;
* transformers' attention functions (`sdpa`, the flash and flex names), wrapped by `integration.install`: a
  handle goes to us before anything repeats or slices it, everything else passes straight through;
* the `eager` functions of the modelling files (`attention.eager`), where ours computes the same;
* our own attention function, `model.set_attn_implementation("kvcache_plugins")`, which adds softcap, sink
  logits, ALiBi and position biases, also over dense tensors.

Tensors that a cache of ours returned come as a [`TensorHandle`], and are attended to a block of queries at a
time where that is faster (`attention.unpacked`). Models that call none of these multiply with handles
themselves (`attention.products`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..compilation import outside_graphs
from ..layers.compiled import CompiledHandle, handed_over
from ..layers.concatenated import ConcatenatedHandle
from ..layers.expanded import ExpandedHandle
from ..layers.gradients import refusing_gradients
from ..layers.handle import KVHandle
from ..layers.handle_view import HandleView
from ..layers.heads import GroupedHandle
from ..layers.lazy import LazyTensor, intercept
from ..layers.padded import PaddedHandle
from ..layers.tensor_handle import TensorHandle
from ..layers.view import joined
from . import products  # noqa: F401  # registers the products that models write out
from .arguments import attention_options, mask_of_blocks, whole_mask
from .compiled import attend_in_graph
from .concatenated import attend_concatenated
from .exact import TorchAttention, reads_exact_tokens_faster
from .grouped import attend_groups, options_of_heads
from .latent import attend_latents
from .limits import MOST_QUERIES
from .masks import fitted, mask_fits
from .native import attend_handles
from .reference import AttentionOptions
from .unpacked import attend_tensors, attend_unpacked

__all__ = [
    "attention_forward",
    "forward_over_handles",
    "wrap_attention_function",
]

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
Handle: TypeAlias = KVHandle | HandleView | ConcatenatedHandle | PaddedHandle


@intercept(F.scaled_dot_product_attention)
@outside_graphs
def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's signature; reached when at least one argument is a handle."""
    handles = _as_handles(key, value)
    if handles is None or dropout_p > 0.0:
        query, key, value = (x.dense() if isinstance(x, LazyTensor) else x for x in (query, key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"scaled_dot_product_attention got {query.shape[1]} query heads for {key.shape[1]} key heads "
            "without enable_gqa."
        )
    mask = attn_mask
    if is_causal:  # torch aligns its causal mask to the upper left
        shape = (query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return _attend(query, *handles, AttentionOptions(scaling=scale, mask=mask))


def _as_handles(key: Tensor, value: Tensor) -> tuple[Handle, Handle] | None:
    """Both as handles; `None` if they are not, have been changed, or cannot be attended to together."""
    if not isinstance(key, LazyTensor) or not isinstance(value, LazyTensor):
        return None
    if key.is_changed or value.is_changed:
        return None
    if type(key) is KVHandle and type(value) is KVHandle:  # nearly all
        return key, value
    if isinstance(key, HandleView) and isinstance(value, HandleView):
        is_alike = key.seen == value.seen and key.has_heads_as_stored
        return (key, value) if is_alike and _as_handles(key.handle, value.handle) is not None else None
    if isinstance(key, PaddedHandle) and isinstance(value, PaddedHandle):
        return key, value
    if isinstance(key, ConcatenatedHandle) and isinstance(value, ConcatenatedHandle):
        return (key, value) if key.lengths == value.lengths else None
    if not (isinstance(key, KVHandle) and isinstance(value, KVHandle)):
        return None
    # of latents, both must come of one call; other handles have no expansion
    return (key, value) if getattr(key, "expansion", None) is getattr(value, "expansion", None) else None


def _attend(query: Tensor, key: Handle, value: Handle, options: AttentionOptions) -> Tensor:
    if type(key) is KVHandle and type(value) is KVHandle and not torch.is_grad_enabled():
        return _attend_plain(query, key, value, fitted(options, key, query.shape[2]))
    if isinstance(key, HandleView) and isinstance(value, HandleView):
        return _attend_repeated(query, key, value, options)
    if isinstance(key, ConcatenatedHandle) and isinstance(value, ConcatenatedHandle):
        return attend_concatenated(query, key, value, options)
    if isinstance(key, PaddedHandle) and isinstance(value, PaddedHandle):
        return _attend_padded(query, key, value, options)
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    options = fitted(options, key, query.shape[2])
    if not torch.is_grad_enabled():
        return _attend_alone(query, key, value, options)
    with torch.no_grad():
        output = _attend_alone(query, key, value, options)
    return refusing_gradients(output, query, *key.sources, *value.sources)


def _attend_alone(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor:
    if isinstance(key, ExpandedHandle):
        return attend_latents(query, key.expansion, options)
    if isinstance(key, GroupedHandle) and isinstance(value, GroupedHandle):
        return attend_groups(query, key, value, options)
    return _attend_plain(query, key, value, options)


def _attend_plain(query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions) -> Tensor:
    output = attend_handles(query, key, value, options)
    key.layer.attended(query, key.tokens, options)
    return output


def _attend_repeated(query: Tensor, key: HandleView, value: HandleView, options: AttentionOptions) -> Tensor:
    """Attend over heads that a model has repeated for its query heads (JetMoE), from each head only once."""
    order = key.query_order(query.shape[1])
    if order is None:
        return _attend(query, key.handle, value.handle, options)
    options = options_of_heads(options, order, query.shape[1])
    output = _attend(query.index_select(1, order), key.handle, value.handle, options)
    return output.index_select(1, order.argsort())


def _attend_padded(
    query: Tensor, key: PaddedHandle, value: PaddedHandle, options: AttentionOptions
) -> Tensor:
    """Attend without the channels that are zero, which add nothing to logits and are zero in the output."""
    scaling = options.scale_for(query.shape[3])
    own = query[..., : key.handle.shape[3]]
    output = _attend(own, key.handle, value.handle, replace(options, scaling=scaling))
    return F.pad(output, (0, value.added))


def forward_over_handles(
    module: nn.Module,
    query: Tensor,
    key: Handle,
    value: Handle,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function in transformers' sense, over handles.

    Args:
        module (`torch.nn.Module`): The attention module.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of the newest tokens.
        key (`KVHandle` of shape `(B, Hkv, T, D)`): Keys to attend to.
        value (`KVHandle` of shape `(B, Hkv, T, Dv)`): Their values.
        attention_mask (`torch.Tensor`, *optional*): `(B, 1 or Hq, q, T)`, `(B, T)` as the flash functions
            get, or the `BlockMask` of flex attention.
        scaling (`float`, *optional*): Factor of the logits.
        kwargs: `softcap`, `s_aux`, `sinks`, `sliding_window`, `position_bias`, `alibi_slopes`, `is_causal`,
            and `indices`, the slots `(B, q, k)` an indexer has chosen, are honoured.

    Returns:
        `tuple[torch.Tensor, None]`: `(B, q, Hq, Dv)`, and no attention weights.
    """
    if torch.compiler.is_dynamo_compiling():
        return _forward_untraced(module, query, key, value, attention_mask, scaling, **kwargs)
    # asked of what is read: a handle, as a tensor subclass, takes a microsecond to answer
    length = key.tokens.length if type(key) is KVHandle else key.shape[2]
    options = attention_options(module, query, length, attention_mask, scaling, **kwargs)
    output = _attend(query, key, value, options)
    return output.transpose(1, 2).contiguous(), None


@outside_graphs
def _forward_untraced(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return forward_over_handles(*args, **kwargs)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the function registered as `"kvcache_plugins"`: over handles or dense tensors."""
    if (chosen := kwargs.pop("block_indices", None)) is not None:
        told = attention_mask, chosen, kwargs.get("is_causal")
        attention_mask = mask_of_blocks(module, query, key.shape[2], *told)
    if isinstance(key, CompiledHandle):
        call = module, query, key, value, attention_mask, scaling
        put = attend_in_graph("kvcache_plugins", *call, **kwargs)
        if put is not None:
            return put
        key, value = handed_over(key, value)
    # one by one: of tuples torch 2.11 cannot trace it
    is_plain = kwargs.get("softcap") is None and kwargs.get("alibi_slopes") is None
    is_plain = is_plain and kwargs.get("s_aux") is None and kwargs.get("sinks") is None
    handles = _as_handles(key, value)
    has_dropout = dropout > 0.0 and module.training
    if handles is not None and not has_dropout:
        if is_plain and query.shape[2] > MOST_QUERIES:
            exact = module, query, handles, attention_mask, scaling
            return _attend_or_leave(attention_forward, TorchAttention.FLASH, *exact, **kwargs)
        return forward_over_handles(module, query, *handles, attention_mask, scaling, **kwargs)
    key, value = (x.dense() if isinstance(x, LazyTensor) else x for x in (key, value))
    options = attention_options(module, query, key.shape[2], attention_mask, scaling, **kwargs)
    if is_plain or has_dropout:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if not is_plain:
            raise ValueError(
                "The `kvcache_plugins` attention function serves inference; dropout must be 0, "
                f"got {dropout} in training mode."
            )
        kwargs.pop("indices", None)  # the mask says what they do
        given = module, query, key, value, whole_mask(options, query, key.shape[2])
        if not has_dropout:
            attended = attend_tensors(TorchAttention.FLASH, *given, scaling, **kwargs)
            if attended is not None:
                return attended
        output, _ = sdpa_attention_forward(*given, dropout=dropout, scaling=scaling, **kwargs)
        return output, None
    output = attend_unpacked(query, key, value, options)
    return output.transpose(1, 2).contiguous(), None


def wrap_attention_function(original: AttentionFunction, *, is_eager: bool = False) -> AttentionFunction:
    """Return `original` with handles taken out of its way; anything but handles passes through unchanged.

    Args:
        original (`Callable`): An attention function in transformers' sense.
        is_eager (`bool`): Whether it is a model's own.
    """
    is_sdpa = original.__name__ == "sdpa_attention_forward"
    way = TorchAttention.FLASH if is_sdpa else TorchAttention.EAGER if is_eager else TorchAttention.SPARSE

    @wraps(original)
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(key, CompiledHandle):
            if is_sdpa and (put := attend_in_graph("sdpa", module, query, key, value, *args, **kwargs)):
                return put
            key, value = handed_over(key, value)
        handles = _as_handles(key, value)
        if handles is not None and not _needs_dropout(module, kwargs):
            return _attend_or_leave(original, way, module, query, handles, *args, **kwargs)
        if isinstance(key, TensorHandle) and isinstance(value, TensorHandle):
            key, value = key.states, value.states
            if not _needs_dropout(module, kwargs):
                attended = attend_tensors(way, module, query, key, value, *args, **kwargs)
                if attended is not None:
                    return attended
        return original(module, query, key, value, *args, **kwargs)

    return forward


def _attend_or_leave(
    original: AttentionFunction,
    way: TorchAttention,
    module: nn.Module,
    query: Tensor,
    handles: tuple[Handle, Handle],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend over handles; over exact tokens alone as over tensors, where that is faster."""
    key, value = handles
    if (
        type(key) is type(value) is KVHandle
        and key.tokens.packed_length == value.tokens.packed_length == 0
        and mask_fits(key, *args, **kwargs)
        and not reads_exact_tokens_faster(query, key.layer.config.kernel, way)
    ):
        return _over_exact(original, way, module, query, key, value, *args, **kwargs)
    return forward_over_handles(module, query, key, value, *args, **kwargs)


@outside_graphs
def _over_exact(
    original: AttentionFunction,
    way: TorchAttention,
    module: nn.Module,
    query: Tensor,
    key: KVHandle,
    value: KVHandle,
    attention_mask: Any = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to what exact handles stand for as to tensors, and show the layer the queries."""
    keys, values = (joined(handle.tokens, *handle.sources) for handle in (key, value))
    length = key.tokens.length
    with torch.no_grad():
        options = attention_options(module, query, length, attention_mask, scaling, **kwargs)
    if attention_mask is None and way is TorchAttention.FLASH:
        attention_mask = whole_mask(options, query, length)
    call = module, query, keys, values, attention_mask
    result: tuple[Tensor, Tensor | None] | None = None
    if key.layer.config.kernel != "torch":
        result = attend_tensors(way, *call, scaling, **kwargs)
    if result is None:
        result = original(*call, scaling=scaling, **kwargs)
    with torch.no_grad():
        key.layer.attended(query, key.tokens, options)
    return result


def _needs_dropout(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    return bool(module.training and kwargs.get("dropout"))
