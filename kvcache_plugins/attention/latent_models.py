"""How models with latents hand them to attention: as they are cached, and not as keys and values.

Their attention modules have a method, `expand_kv`, between the cache and the attention function. It is
replaced in the module's class, once: handles go through it as handles of what it would make
(`layers.expanded`), tensors go on to the original. A module is first compared with what it is taken to do, on
a few numbers; one that does anything else, or whose projection is more than a weight, makes its keys and
values itself, which `kernel="native"` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..kernels.selection import native_is_unavailable
from ..layers.expanded import Expansion, Make
from ..layers.handle import KVHandle
from ..models.latent import LatentProjection, projection_of
from ..undoing import at_uninstall

__all__ = ["let_latents_pass", "restore_expansions", "why_expanded"]

Method = Callable[..., tuple[Tensor, Tensor]]

_NAME = "expand_kv"
_READ = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")

_originals: dict[type[nn.Module], Method] = {}
_obstacles: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def let_latents_pass(model: nn.Module) -> None:
    """Let handles through the modules of a model that make keys and values of latents.

    Args:
        model (`torch.nn.Module`): Nothing is done to one that has no such modules. The method is replaced in
            the module's class, where tensors go on to the original.
    """
    for module in _expanding_modules(model):
        owner = next(cls for cls in type(module).__mro__ if _NAME in vars(cls))
        if owner not in _originals:
            _originals[owner] = vars(owner)[_NAME]
            setattr(owner, _NAME, _handing_on(_originals[owner]))


def why_expanded(model: Any) -> str | None:
    """Why a model will make keys and values of all latents itself; `None` where nothing speaks for it."""
    found = (projection_of(module, model.dtype) for module in _expanding_modules(model))
    return next((obstacle for obstacle in found if isinstance(obstacle, str)), None)


def _expanding_modules(model: nn.Module) -> Iterator[nn.Module]:
    names = (_NAME, *_READ)
    return (module for module in model.modules() if all(hasattr(module, name) for name in names))


@at_uninstall
def restore_expansions() -> None:
    """Undo what `let_latents_pass` did."""
    while _originals:
        cls, original = _originals.popitem()
        setattr(cls, _NAME, original)


def _handing_on(original: Method) -> Method:
    @wraps(original)
    def expand_kv(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if kwargs or len(args) != 2 or not all(isinstance(states, KVHandle) for states in args):
            return original(self, *args, **kwargs)
        latents, rotated = args

        def make(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
            return original(self, latents, rotated)

        projection = projection_of(self, latents.dtype)
        if not isinstance(projection, LatentProjection):
            obstacle: str | None = projection
        elif projection.weight.device != latents.device:
            obstacle = f"kv_b_proj is on {projection.weight.device}, the latents are on {latents.device}"
        else:
            if self not in _obstacles:
                _obstacles[self] = _compare(projection, make, latents, rotated)
            obstacle = _obstacles[self]
            if obstacle is None:
                weights = self.get_submodule("kv_b_proj").parameters()
                latents.sources = (*latents.sources, *weights)
                return Expansion(latents, rotated, projection, make).handles()
        layer, reason = latents.layer, f"all latents are expanded at every step: {obstacle}"
        if layer.config.kernel == "native":
            raise native_is_unavailable(f"layer {layer.layer_idx}", reason)
        made = original(self, latents.dense(), rotated.dense())
        layer.kernel_reason = reason
        return made

    return expand_kv


def _compare(projection: LatentProjection, make: Make, latents: KVHandle, rotated: KVHandle) -> str | None:
    """What a model makes of a few numbers, beside what it is taken to make; `None` if that is the same."""
    weight = projection.weight
    given = [
        # whole numbers, which layers that quantize what they are given represent exactly
        (torch.arange(3 * width, device=weight.device) ** 2 * step % 5 - 2).view(1, 1, 3, width)
        for width, step in ((weight.shape[2], 3), (rotated.shape[3], 7))
    ]
    if latents.shape[1] != 1 or weight.shape[2] != latents.shape[3]:
        return f"{latents.shape[1]} latents of {latents.shape[3]} numbers meet a weight of {weight.shape[2]}"
    given = [states.to(weight.dtype) for states in given]
    made, known = make(given[0], given[1]), projection.expand(given[0], given[1])
    is_same = all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=0.02 * float(b.abs().max()))
        for a, b in zip(made, known, strict=True)
    )
    return None if is_same else "the model makes something else of its latents than is known"
