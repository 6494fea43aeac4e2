"""Rotary position embedding as a cache needs it: rotate keys by an angle per token, exactly invertibly.

Keys reach a cache already rotated, without `cos` and `sin`. Here the rotation is rebuilt from the model's
inverse frequencies as an exactly orthogonal map (angles in fp64, no attention factor), so that rotating and
rotating back is the identity to fp32 rounding. A cache that undoes and redoes with the *same* map stays
correct even where the frequencies differ from the model's own (bf16 tables, yarn, dynamic scaling); only the
benefit of the un-rotated form shrinks.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..device_dtypes import doubled, has_every_dtype
from .frequencies import attribute_of
from .layer_plan import caches_latents
from .origins import class_names, forward_names, is_of_family, modeling_module

__all__ = ["Rotary", "find_rotary", "names_rotation", "rotary_module"]

_FAMILIES_OF_AXES = frozenset({"ernie4_5_vl_moe_text"})
"""Families whose frequencies are kept by axis (height, width, time), and not in the order of pairs."""


@dataclass(frozen=True)
class Rotary:
    """The rotation of one layer's keys.

    Args:
        inv_freq (`tuple[float, ...]`): Radians per position for each channel pair, negative where the second
            channel turns towards the first; `2 * len(inv_freq)` leading channels rotate, the others pass
            through.
        interleaved (`bool`): Whether pairs are `(2i, 2i + 1)` instead of `(i, i + n / 2)`.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Channels that rotate."""
        return 2 * len(self.inv_freq)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position, fp64 `(rotary_dim / 2,)`, on a device that has such numbers.

        A GPU keeps them: to copy them from the host's memory would wait for it, and end a CUDA graph.
        """
        return _kept(self.inv_freq, device) if device.type == "cuda" else _made(self.inv_freq, device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, fp32, of shape `(len(positions), rotary_dim / 2)`."""
        exact = positions if has_every_dtype(positions.device) else positions.cpu()
        angles = exact[:, None] * self.frequencies(exact.device)  # in fp64, whatever the positions are
        cos, sin = (torch.empty(angles.shape, dtype=torch.float32, device=angles.device) for _ in range(2))
        torch.cos(angles, out=cos)  # in fp64 too, and rounded in the same launch
        torch.sin(angles, out=sin)
        return cos.to(positions.device), sin.to(positions.device)

    def block_tables(self, period: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tables of the first `period` positions, fp32 `(period, rotary_dim / 2)`, on a device.

        All layers and caches have the same ones, made once: they are not to be written to.
        """
        return _block_tables(self, period, device)

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate `states` `(B, H, T, D)` by `positions` `(T,)`; negative ones undo positive ones."""
        return self.turn(states, *self.tables(positions))

    def turn(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `states` `(B, H, T, D)` by angles whose `cos` and `sin` are `(T, rotary_dim / 2)`."""
        rotated = states.clone()
        first, second = self.pairs(states)
        out_first, out_second = self.pairs(rotated)
        out_first.mul_(cos).addcmul_(second, sin, value=-1.0)
        out_second.mul_(cos).addcmul_(first, sin)
        return rotated

    def pairs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second channel of every pair, each `(..., rotary_dim / 2)`."""
        turning = states[..., : self.rotary_dim]
        if self.interleaved:
            return turning[..., 0::2], turning[..., 1::2]
        half = self.rotary_dim // 2
        return turning[..., :half], turning[..., half:]


def _made(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(inv_freq, dtype=torch.float64, device=device)


@lru_cache(maxsize=256)
def _kept(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _made(inv_freq, device)


@lru_cache(maxsize=256)
def _block_tables(rotary: Rotary, period: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        cos, sin = rotary.tables(torch.arange(period, device="cpu"))
        return cos.to(device), sin.to(device)


def find_rotary(
    model: nn.Module | None,
    config: Any,
    layer_type: str | None,
    head_dim: int,
    own: tuple[tuple[str, Any], ...] = (),
) -> Rotary | None:
    """Find how a layer's keys are rotated.

    Args:
        model (`torch.nn.Module`, *optional*): The model; without it the family's rotary module is built from
            `config`.
        config (`PreTrainedConfig`): The decoder's configuration.
        layer_type (`str`, *optional*): Such as `"full_attention"`, where frequencies depend on it (Gemma 3).
        head_dim (`int`): Channels of a key.
        own (`tuple[tuple[str, Any], ...]`): By name, parameters in the place of those in `rope_parameters`,
            where layers differ in these.

    Returns:
        `Rotary | None`: `None` if the model has no rotary embedding, or one whose layout is not known.
    """
    if caches_latents(config):  # what is cached as key is not rotated
        return None
    if own:
        model, config = None, copy.deepcopy(config)
        config.rope_parameters = {**config.rope_parameters, **dict(own)}
    holder = rotary_module(model) if model is not None else _build_rotary_module(config)
    if holder is not None and any(buffer.is_meta for buffer in holder.buffers()):  # a model without data
        holder = _build_rotary_module(config)
    names = _names_of_attention(model, config)
    layout = _layout_of(names)
    inv_freq = None if holder is None else _inverse_frequencies(holder, layer_type)
    if inv_freq is not None and is_of_family(config, _FAMILIES_OF_AXES):
        inv_freq = _by_pairs(holder, inv_freq)
    if inv_freq is None and "create_sinusoidal_positions" in names:
        inv_freq = _sinusoidal_frequencies(config)
    if layout is None or inv_freq is None or 2 * inv_freq.numel() > head_dim:
        return None
    return Rotary(tuple((layout.sense * doubled(inv_freq)).tolist()), layout.interleaved)


def _inverse_frequencies(holder: nn.Module, layer_type: str | None) -> Tensor | None:
    prefixes = ("", *([f"{layer_type}_"] if layer_type else []))
    # Scalings that follow the length replace the live buffer after a long text; the original does not change.
    for name in (*(f"{p}original_inv_freq" for p in prefixes), *(f"{p}inv_freq" for p in prefixes)):
        found = attribute_of(holder, name)
        if isinstance(found, Tensor) and found.dim() == 1 and not found.is_meta:
            return found
    return None


def _by_pairs(holder: Any, inv_freq: Tensor) -> Tensor:
    """Frequencies in the order of the pairs that they turn, of a module that keeps them by axes."""
    of_channels: Tensor = holder.recomposition_frequencies(inv_freq.expand(3, 1, 1, -1))
    return of_channels.flatten()[::2]


def _sinusoidal_frequencies(config: Any) -> Tensor | None:
    """Those that GPT-J and CodeGen make their tables of sines with."""
    if (channels := getattr(config, "rotary_dim", None)) is None:
        return None
    exponents = torch.arange(0, channels, 2, dtype=torch.float64, device="cpu") / channels
    return torch.pow(10000.0, -exponents)


def rotary_module(model: nn.Module) -> nn.Module | None:
    """Return the first rotary embedding of a model that is not for images."""
    for module in model.modules():
        if any(_rotates_text(name) for name in class_names(module)):
            return module
    return None


def _rotates_text(class_name: str) -> bool:
    """Whether a rotary embedding is for text; of a family with "Vision" in its name, the one named so is."""
    is_text = "Vision" not in class_name or "Text" in class_name
    return "RotaryEmbedding" in class_name and is_text


def _build_rotary_module(config: Any) -> nn.Module | None:
    source = modeling_module(config)
    for name in dir(source) if source is not None else ():
        if name.endswith("RotaryEmbedding") and _rotates_text(name):
            with torch.device("cpu"):
                try:
                    return getattr(source, name)(config)  # type: ignore[no-any-return]
                except Exception:  # a family whose module wants other arguments: unknown layout, not an error
                    return None
    return None


def _names_of_attention(model: nn.Module | None, config: Any) -> dict[str, Any]:
    """The names that a model's attention, or its family's modelling file, is written with."""
    for module in model.modules() if model is not None else ():
        if hasattr(module, "layer_idx") and any("Attention" in name for name in class_names(module)):
            return forward_names(module)
    source = modeling_module(config)
    return vars(source) if source is not None else {}


def names_rotation(attention: nn.Module) -> bool:
    """Whether what an attention module calls, or looks up, has names as have what rotates keys."""
    functions = (vars(kind).get("forward") for kind in type(attention).__mro__ if kind is not nn.Module)
    codes = (getattr(inspect.unwrap(each), "__code__", None) for each in functions if each is not None)
    names = {name for code in codes for name in getattr(code, "co_names", ())}
    return any("rotary" in name or "rotate" in name for name in names)


class _Layout(NamedTuple):
    """Which channels make a pair, and which way it turns.

    Args:
        interleaved (`bool`): As of [`Rotary`].
        sense (`float`): 1 where positions turn the first channel towards the second, else -1 (NanoChat).
    """

    interleaved: bool
    sense: float


def _layout_of(names: dict[str, Any]) -> _Layout | None:
    """Tell the layout by the function that attention is written with; `None` if it has none known.

    A file may have a helper of each layout, of a text model and of a tower for images: what calls its helper
    says which one turns keys.
    """
    apply = _as_written(names.get("apply_rotary_pos_emb"))
    if {"cos", "sin"} <= set(_parameters(apply)):
        return _layout_by_ramp(_turn_by_tables(apply))
    turn = names.get("rotate_half") or names.get("rotate_every_two")
    if turn is None and "freqs_cis" in _parameters(names.get("apply_rotary_emb")):
        turn = _turn_by_complex(names["apply_rotary_emb"])
    return None if turn is None else _layout_by_ramp(turn)


def _as_written(function: Any) -> Any:
    """A function as its file has it, where the library `kernels` has made it a module with other kernels."""
    return MethodType(type(function).forward, function) if isinstance(function, nn.Module) else function


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    is_python = inspect.isfunction(function) or inspect.ismethod(function)
    return inspect.signature(function).parameters if is_python else {}


@cache
def _turn_by_tables(apply: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """What a function that takes cosines and sines makes of `(B, H, T, D)` and a quarter turn."""
    wanted = [
        name
        for name, each in _parameters(apply).items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]

    def turn(states: Tensor) -> Tensor:
        channels = states.shape[-1]
        try:
            return by_columns(states, channels)
        except RuntimeError:  # its tables have a column for a pair, not for a channel
            return by_columns(states, channels // 2)

    def by_columns(states: Tensor, columns: int) -> Tensor:
        arguments = dict.fromkeys(wanted, states)
        arguments["cos"] = torch.zeros(1, 1, columns, device=states.device)
        arguments["sin"] = torch.ones_like(arguments["cos"])
        if "position_ids" in wanted:
            arguments["position_ids"] = torch.zeros(1, 1, dtype=torch.long, device=states.device)
        turned: Any = apply(**arguments)
        first: Tensor = turned[0] if isinstance(turned, tuple) else turned
        return first.view_as(states)

    return turn


@cache
def _turn_by_complex(apply: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """What a function that multiplies with complex numbers makes of `(B, T, H, D)` and a quarter turn."""

    def turn(states: Tensor) -> Tensor:
        quarters = torch.full((*states.shape[:2], states.shape[3] // 2), 1j, device=states.device)
        return apply(states, states, quarters)[0]

    return turn


@cache
def _layout_by_ramp(turn: Callable[[Tensor], Tensor]) -> _Layout | None:
    """Tell by what a quarter turn makes of a ramp; `None` if that is nothing known."""
    ramp = torch.arange(1.0, 9.0, device="cpu").view(1, 1, 1, 8)
    try:
        turned = turn(ramp)
    except Exception:  # a function that wants other arguments: unknown layout, not an error
        return None
    for layout in (_Layout(*each) for each in itertools.product((False, True), (1.0, -1.0))):
        sines = torch.full((1, 4), layout.sense, device="cpu")
        known = Rotary((0.0,) * 4, layout.interleaved).turn(ramp, torch.zeros_like(sines), sines)
        if torch.equal(turned, known):
            return layout
    return None
