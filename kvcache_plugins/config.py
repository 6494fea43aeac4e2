"""Options of a backend: frozen dataclasses filled from a plain `cache_config` dictionary.

Every check happens here, when the cache is built, so that a wrong option stops before any token is processed.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from textwrap import shorten
from typing import Any, ClassVar, TypeVar

from .registry import LEGACY_OPTIONS, suggest, without_legacy

__all__ = [
    "KERNELS",
    "BackendConfig",
    "BitsConfig",
    "check_choice",
    "check_count",
    "check_flag",
    "check_integer",
    "check_length",
    "check_number",
    "check_path_or_id",
    "drop_legacy_keys",
    "is_path",
    "plain",
    "uniform_sqnr_db",
]

KERNELS = ("auto", "torch", "native")
_LARGEST = 2**31 - 1  # positions have 32 bits
_LAYER = re.compile("-?[0-9]{1,9}")
_TRUTHS_OF_NUMPY = (("numpy", "bool"), ("numpy", "bool_"))
"""What numpy 2 and numpy 1 call their truth values, which are no numbers to Python."""
_Self = TypeVar("_Self", bound="BackendConfig")


def drop_legacy_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without the keys older tutorials pass and no cache uses, warning once about them."""
    dropped = [key for key in LEGACY_OPTIONS if key in options]
    if dropped:
        warnings.warn(
            f"cache_config: {dropped} no longer mean anything for a cache and are ignored.", stacklevel=3
        )
    return without_legacy(options)


def plain(value: Any) -> Any:
    """Return numbers of other kinds, such as numpy's, as Python's own; those in lists and dictionaries, too.

    Options travel through JSON, which knows no others. Whatever is not a number is returned as it is.
    """
    kind = type(value)
    if (kind.__module__, kind.__name__) in _TRUTHS_OF_NUMPY:
        return bool(value)
    if kind is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    if kind in (list, tuple, set, frozenset):
        return kind(plain(item) for item in value)
    if kind in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_choice(owner: object, name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed` and of its type: 4.0 is not 4, nor `True` 1."""
    options = tuple(allowed)
    is_one = (isinstance(value, type(option)) and value == option for option in options)
    if isinstance(value, bool) or not any(is_one):
        raise ValueError(f"{type(owner).__name__}.{name} must be one of {options}, got {value!r}.")


def check_flag(owner: object, name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is `True` or `False`."""
    if not isinstance(value, bool):
        raise ValueError(f"{type(owner).__name__}.{name} must be true or false, got {value!r}.")


def check_integer(owner: object, name: str, value: object, *, minimum: int = 0, multiple_of: int = 1) -> None:
    """Raise `ValueError` unless `value` is an integer, at least `minimum` and a multiple of `multiple_of`.

    No option counts beyond `2**31 - 1`, either.
    """
    given = plain(value)
    number = given if isinstance(given, int) and not isinstance(given, bool) else minimum - 1
    if not minimum <= number <= _LARGEST or number % multiple_of:
        rule = f"an integer >= {minimum}" + (f" and a multiple of {multiple_of}" if multiple_of > 1 else "")
        rule += f" and at most {_LARGEST}" if number > _LARGEST else ""
        raise ValueError(f"{type(owner).__name__}.{name} must be {rule}, got {value!r}.")


def check_number(owner: object, name: str, value: object, *, minimum: float, maximum: float) -> None:
    """Raise `ValueError` unless `value` is a real number in `[minimum, maximum]`."""
    given = plain(value)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not minimum <= given <= maximum:
        raise ValueError(
            f"{type(owner).__name__}.{name} must be a number in [{minimum}, {maximum}], got {value!r}."
        )


def check_count(name: str, value: Any, otherwise: str = "") -> int:
    """Return how many there are of something, as Python's own integer.

    Args:
        name (`str`): Of the argument, as the message begins.
        value (`int`): What was given.
        otherwise (`str`): What else is allowed, for the message.

    Raises:
        ValueError: Naming the argument and the value, unless it is an integer of at least 1.
    """
    count = plain(value)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be an integer >= 1{otherwise}, got {value!r}.")
    return count


def check_length(name: str, value: Any) -> int | None:
    """Return a number of tokens that a cache is told of, or `None` if it is not known.

    Args:
        name (`str`): Of the argument.
        value (`int`, *optional*): What was given.

    Raises:
        ValueError: Naming the argument and the value, unless it is an integer of at least 1.
    """
    return None if value is None else check_count(name, value, ", or None if it is not known")


def check_path_or_id(owner: object, name: str, value: object, what: str) -> None:
    """Raise `ValueError` unless `value` is a string that can name a directory or a repository of the hub.

    Args:
        owner (`object`): Whose option it is.
        name (`str`): Of the option.
        value (`object`): What was given; an empty string would be the current directory.
        what (`str`): What is to be found there, for the message.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{type(owner).__name__}.{name} must be the directory or hub id of {what}, as a string, got "
            f"{value!r}."
        )


def is_path(name: str) -> bool:
    """Whether what may be a directory or a hub id can only be a path, whether there is anything or not."""
    return name.startswith((".", "/", "~", "\\"))


def uniform_sqnr_db(nbits: int) -> float:
    """Least SQNR (dB) of uniform codes over groups of up to 128 Gaussian numbers.

    Their range is about 5.5 deviations, a step is `range / (2^nbits - 1)` and its error `step^2 / 12`.
    """
    return 20.0 * math.log10(2**nbits - 1) - 4.0


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Options every backend takes. Backends derive from it and add their own fields.

    Args:
        kernel (`str`): `"auto"` (a native kernel where one exists, else torch), `"torch"` (the reference) or
            `"native"` (raise where no native kernel can serve: on a GPU the CUDA kernels must, elsewhere
            those for CPUs).
        residual_length (`int`): Newest tokens kept exact.
        sink_length (`int`): First real (unpadded) tokens kept exact.
        skip_layers (`list[int]`): Layer indices, negative ones counted from the end, left in the model's
            dtype.
        layer_overrides (`dict[str, dict]`): `{"0": {"nbits": 8}}`: other options for single layers.
        offload (`bool`): Whether what is packed rests in the host's memory, and is on a GPU while its layer
            is at work; sliding windows, images, sinks, the exact window and KVQuant's outliers stay there.

    A field may have `metadata={"shown": "required"}`, or other words for tables of options to show in the
    place of its default.

    Attributes:
        block_tokens (`int`): Tokens that evicting caches over this storage keep or move as one count: where
            lists beside the codes are those of whole blocks.
        per_cache (`frozenset[str]`): Options that mean nothing for a single layer.
    """

    kernel: str = "auto"
    residual_length: int = 0
    sink_length: int = 0
    skip_layers: tuple[int, ...] = ()
    layer_overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    offload: bool = False
    block_tokens: ClassVar[int] = 1
    per_cache: ClassVar[frozenset[str]] = frozenset({"skip_layers", "layer_overrides", "kernel", "offload"})

    @property
    def packs_single_tokens(self) -> bool:
        """Whether single tokens can leave what is packed, so that evicting caches may use this as storage."""
        return True

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, plain(getattr(self, option.name)))
        check_choice(self, "kernel", self.kernel, KERNELS)
        check_integer(self, "residual_length", self.residual_length)
        check_integer(self, "sink_length", self.sink_length)
        check_flag(self, "offload", self.offload)
        given: object = self.skip_layers  # whatever a dictionary held
        if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, Set)):
            raise ValueError(
                f"{type(self).__name__}.skip_layers must be a list of integers, got {self.skip_layers!r}."
            )
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))
        for index in self.skip_layers:
            if isinstance(index, bool) or not isinstance(index, int):
                raise ValueError(
                    f"{type(self).__name__}.skip_layers must be a list of integers, got {index!r} in it."
                )
        if not isinstance(self.layer_overrides, Mapping):
            raise ValueError(
                f"{type(self).__name__}.layer_overrides must be a dict of dicts such as "
                f'{{"0": {{"nbits": 8}}}}, got {self.layer_overrides!r}.'
            )

    @classmethod
    def tiny(cls: type[_Self]) -> _Self:
        """Settings small enough for tests that must cross every boundary within a few dozen tokens."""
        return cls()

    @property
    def is_calibrated(self) -> bool:
        """Whether these options name an artifact that was made by reading texts."""
        return getattr(self, "calibration", None) is not None

    @property
    def sqnr_floor_db(self) -> float:
        """SQNR (dB) these options promise on Gaussian states of up to 128 channels."""
        return 0.0

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names accepted as keys of `cache_config`, besides `backend`."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_dict(cls: type[_Self], options: Mapping[str, Any]) -> _Self:
        """Build the config from plain values.

        Raises:
            ValueError: On an unknown key or a value out of range; the message names the option, what was
                given and what is allowed.
        """
        cls.check_names(options)
        return cls(**options)

    @classmethod
    def check_names(cls, options: Mapping[Any, Any]) -> None:
        """Raise `ValueError` unless all keys name options; the message names the closest and all others."""
        for key in options:
            if key not in cls.option_names():
                # which may be a model, or its configuration
                given = shorten(repr(options[key]), 200, placeholder=" ...")
                raise ValueError(
                    f"{key!r} is not an option of {cls.__name__}.{suggest(str(key), cls.option_names())} "
                    f"Its options are {sorted(cls.option_names())}, got {key}={given}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` rebuilds this config."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["skip_layers"] = list(self.skip_layers)
        values["layer_overrides"] = {key: dict(value) for key, value in self.layer_overrides.items()}
        return values

    def skipped_layers(self, num_layers: int) -> frozenset[int]:
        """Return `skip_layers` as non-negative indices of a model with `num_layers` layers."""
        return frozenset(self._layer_index("skip_layers", index, num_layers) for index in self.skip_layers)

    def for_layer(self: _Self, layer_idx: int, num_layers: int) -> _Self:
        """Return the options of one layer, `layer_overrides` applied."""
        merged: dict[str, Any] = {}
        names: list[str] = []
        allowed = sorted(set(self.option_names()) - self.per_cache)
        for key, override in self.layer_overrides.items():
            name = f"{type(self).__name__}.layer_overrides[{key!r}]"
            if not isinstance(override, Mapping):
                raise ValueError(f"{name} must be a dict of options, got {override!r}.")
            for option, value in override.items():
                if option not in allowed:
                    raise ValueError(
                        f"{name}: {option!r} cannot be set for a single layer."
                        f"{suggest(str(option), allowed)} Allowed are {allowed}, got {option}={value!r}."
                    )
            if self._layer_index("layer_overrides", key, num_layers) != layer_idx:
                continue
            if layer_idx in self.skipped_layers(num_layers):
                raise ValueError(
                    f"{name}: layer {layer_idx} is left dense by skip_layers={list(self.skip_layers)}, so "
                    f"that these options would do nothing. Allowed is one of the two, got {dict(override)}."
                )
            for option, value in override.items():
                if merged.get(option, value) != value:
                    raise ValueError(
                        f"{name}: layer {layer_idx} is named twice, also with {option}={merged[option]!r}. "
                        f"Allowed is one of them, got {option}={value!r}."
                    )
            merged.update(override)
            names.append(name)
        if not merged:
            return self
        options = {**self.not_inherited(merged), **merged}
        try:
            return replace(self, **options, layer_overrides={}, skip_layers=())
        except ValueError as error:
            raise ValueError(f"{' and '.join(names)}: {error}") from error

    def not_inherited(self, override: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a layer has in place of options that mean nothing with its own ones.

        Args:
            override (`Mapping`): The options that are given for the layer, which win over these.
        """
        return {}

    def check_overrides(self, dense_reasons: Sequence[str | None]) -> None:
        """Refuse `layer_overrides` of layers that are left dense with or without them.

        Args:
            dense_reasons (`Sequence[str]`): Why they are, by layer; `None` of one that is not.
        """
        for key, override in self.layer_overrides.items():
            reason = dense_reasons[self._layer_index("layer_overrides", key, len(dense_reasons))]
            if override and reason is not None:
                raise ValueError(
                    f"{type(self).__name__}.layer_overrides[{key!r}]: the layer is left dense ({reason}), so "
                    f"that these options would do nothing. Allowed are layers that are packed, got "
                    f"{dict(override)}."
                )

    def _layer_index(self, name: str, index: object, num_layers: int) -> int:
        # JSON turns the keys of a dict into strings
        is_index = _LAYER.fullmatch(index) if isinstance(index, str) else type(index) is int
        number = int(index) if is_index else num_layers  # type: ignore[call-overload]  # one of the two
        if not -num_layers <= number < num_layers:
            raise ValueError(
                f"{type(self).__name__}.{name} must name layers from {-num_layers} to {num_layers - 1}, "
                f"got {index!r}."
            )
        return number % num_layers


@dataclass(frozen=True, kw_only=True)
class BitsConfig(BackendConfig):
    """Options of backends whose codes have a number of bits.

    Args:
        nbits (`int`): Bits of keys and values.
        key_bits (`int`, *optional*), value_bits (`int`, *optional*): Override `nbits`.

    Attributes:
        allowed_bits (`tuple[int, ...]`): What they may be.
    """

    nbits: int = 4
    key_bits: int | None = None
    value_bits: int | None = None
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "nbits", self.nbits, self.allowed_bits)
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) is not None:
                check_choice(self, name, getattr(self, name), self.allowed_bits)

    def bits_of(self, side: str) -> int:
        """Bits of a `"key"`'s or a `"value"`'s code."""
        own: int | None = getattr(self, f"{side}_bits")
        return self.nbits if own is None else own

    @property
    def sqnr_floor_db(self) -> float:
        return min(self.sqnr_db_of(self.bits_of(side)) for side in ("key", "value"))

    @staticmethod
    def sqnr_db_of(nbits: int) -> float:
        """SQNR (dB) that codes of `nbits` promise."""
        return uniform_sqnr_db(nbits)
