"""Weights of pooling by convolution: a safetensors file with one convolution and one scalar for each layer.

```
layers.{i}.conv.weight   (M, 2 D, 21)   channels: those of a key, then those of a value; 21 neighbours
layers.{i}.conv.bias     (M,)
layers.{i}.gamma         ()             share of the convolution, the rest is that of the M best tokens
```

They come with a model that was trained to be pooled, of which [`import_pooling_weights`] takes them by their
names, for [`save_pooling_weights`] to write. Of one trained with LoCoCo's own code, one convolution a layer:

```python
memory = "model.layers.{i}.self_attn.memory_saver"
names = {
    "weight": f"{memory}.layers.0.weight",
    "bias": f"{memory}.layers.0.bias",
    "gamma": f"{memory}.normalizer",
}
save_pooling_weights("pooling.safetensors", import_pooling_weights(model.state_dict(), names))
```

`M` is what `fraction` of the budget comes to, rounded: there, `1 - hh_keep_rate` of `mem_size`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from ...artifacts.files import read_tensors, write_tensors

__all__ = ["NAMES", "LayerWeights", "import_pooling_weights", "load_pooling_weights", "save_pooling_weights"]

NAMES = {
    "weight": "layers.{i}.conv.weight",
    "bias": "layers.{i}.conv.bias",
    "gamma": "layers.{i}.gamma",
}
"""Names of a layer's tensors in a file, `{i}` being the layer."""


@dataclass(frozen=True)
class LayerWeights:
    """How one layer pools; the same for all its heads.

    Args:
        weight (`torch.Tensor` of shape `(M, C, kernel)`): Convolution over `C` channels, those of a key and
            those of a value; the kernel is odd.
        bias (`torch.Tensor` of shape `(M,)`): Of the convolution.
        gamma (`torch.Tensor`): Scalar.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    weight: Tensor
    bias: Tensor
    gamma: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.weight.shape)
        if len(shape) != 3 or shape[2] % 2 == 0:
            raise ValueError(f"conv.weight must have the shape (M, 2 D, odd kernel), got {shape}.")
        if tuple(self.bias.shape) != shape[:1]:
            raise ValueError(f"conv.bias must have the shape ({shape[0]},), got {tuple(self.bias.shape)}.")
        if self.gamma.numel() != 1:
            raise ValueError(f"gamma must be a single number, got the shape {tuple(self.gamma.shape)}.")

    @property
    def pooled_length(self) -> int:
        """Units that come out."""
        return self.weight.shape[0]

    def check(self, key_dim: int, value_dim: int, pooled_length: int | None) -> None:
        """Raise `ValueError` unless this pools keys and values of these widths to so many units, if known."""
        units = self.pooled_length if pooled_length is None else pooled_length
        if tuple(self.weight.shape[:2]) != (units, key_dim + value_dim):
            raise ValueError(
                f"conv.weight must have the shape {(units, key_dim + value_dim, 'kernel')} for keys of "
                f"{key_dim} and values of {value_dim} channels and {units} pooled tokens (fraction times "
                f"budget), got {tuple(self.weight.shape)}."
            )


def load_pooling_weights(path: str | Path) -> tuple[LayerWeights, ...]:
    """Read a file once and remember it until it changes.

    Raises:
        ArtifactError: If it is missing or damaged.
        ValueError: If a tensor is missing, too many, or has a wrong shape.
    """
    path = Path(path)
    found = path.stat() if path.exists() else None
    return _read(path, None if found is None else (found.st_mtime_ns, found.st_size))


def import_pooling_weights(
    tensors: Mapping[str, Tensor], names: Mapping[str, str] = NAMES
) -> tuple[LayerWeights, ...]:
    """Put the weights of all layers together.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): Such as the state dict of a trained model; others are ignored
            unless they bear one of the names.
        names (`Mapping[str, str]`): For `"weight"`, `"bias"` and `"gamma"`, the name of a layer's tensor with
            `{i}` in place of the layer.

    Raises:
        ValueError: If a tensor is missing, or has a wrong shape.
    """
    if set(names) != set(NAMES) or not all("{i}" in name for name in names.values()):
        raise ValueError(
            f"names must hold {sorted(NAMES)}, each with {{i}} for the layer, got {dict(names)!r}."
        )
    layers: list[LayerWeights] = []
    while True:
        own = {part: name.replace("{i}", str(len(layers))) for part, name in names.items()}
        missing = [name for name in own.values() if name not in tensors]
        if len(missing) == len(own) and layers:
            return tuple(layers)
        if missing:
            raise ValueError(
                f"The weights of layer {len(layers)} lack {missing}; there are {sorted(tensors)}."
            )
        try:
            layers.append(LayerWeights(**{part: tensors[name].float() for part, name in own.items()}))
        except ValueError as error:
            raise ValueError(f"Layer {len(layers)}: {error}") from error


def save_pooling_weights(path: str | Path, layers: Sequence[LayerWeights]) -> None:
    """Write the weights of all layers to a safetensors file."""
    tensors = {}
    for index, layer in enumerate(layers):
        for part, name in NAMES.items():
            tensors[name.replace("{i}", str(index))] = getattr(layer, part).detach().contiguous().cpu()
    write_tensors(Path(path), tensors)


@lru_cache(maxsize=4)
def _read(path: Path, version: tuple[int, int] | None) -> tuple[LayerWeights, ...]:
    tensors = read_tensors(path)
    try:
        layers = import_pooling_weights(tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if len(tensors) != len(NAMES) * len(layers):
        raise ValueError(f"{path} holds more than the weights of layers 0 to {len(layers) - 1}.")
    return layers
