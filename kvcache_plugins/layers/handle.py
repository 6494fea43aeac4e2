"""What `update` returns instead of a dense tensor: a tensor without data that knows the layer it stands for.

A handle has the shape, dtype and device of the keys (or values) attention would have received, and goes
through unmodified modelling code. An attention function that knows handles reads the packed tokens directly,
and so does a product of matrices (`attention.products`); for any other operation the handle decodes itself,
and the layer counts the read: slow, never wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from ..kernels.selection import native_is_unavailable
from .gradients import refusing_gradients
from .lazy import LazyTensor
from .storing import storing
from .view import StreamView

if TYPE_CHECKING:
    from .base import PackedLayer

__all__ = ["KVHandle"]

_Self = TypeVar("_Self", bound="KVHandle")
_DECODED = "decoded whole: the model asks for keys or values by other means than attention and products"


class KVHandle(LazyTensor):
    """The keys or values of one layer in one call, of shape `(B, H, T, D)`.

    Attributes:
        layer (`PackedLayer`): The layer it stands for.
        tokens (`StreamView`): What to read.
        sources (`tuple[torch.Tensor, ...]`): The newest of them as the model gave them, which a gradient
            would have to reach.
        may_be_decoded (`bool`): Whether it is there for whoever asks the layer, also to take it apart
            (Whisper, the rows of a batch: each is decoded alone), and not for attention alone.
    """

    layer: PackedLayer
    tokens: StreamView
    sources: tuple[Tensor, ...]
    may_be_decoded = False

    @staticmethod
    def __new__(cls, layer: PackedLayer, tokens: StreamView, *sources: Tensor) -> KVHandle:
        newest = tokens.segments[-1]
        handle = cls.standing_for(layer, tokens, heads=newest.shape[1], head_dim=newest.shape[3])
        handle.sources = sources
        return handle

    @classmethod
    def standing_for(
        cls: type[_Self], layer: PackedLayer, tokens: StreamView, *, heads: int, head_dim: int
    ) -> _Self:
        """A handle of `heads` heads of `head_dim` channels for every one of `tokens`."""
        newest = tokens.segments[-1]
        shape = (newest.shape[0], heads, tokens.length, head_dim)
        handle: _Self = Tensor._make_wrapper_subclass(cls, shape, dtype=newest.dtype, device=newest.device)
        handle.layer, handle.tokens, handle.sources = layer, tokens, ()
        return handle

    def _made(self) -> Tensor:
        """Bring everything into one tensor; the layer counts the read if anything had to be decoded.

        Raises:
            KernelUnavailableError: If it had to be, and the layer was configured with `kernel="native"`,
                unless `may_be_decoded`.
        """
        if self.tokens.packed_length:
            self.layer.fallback_reads += 1
            self.layer.kernel, self.layer.kernel_reason = "torch", _DECODED
            if self.layer.config.kernel == "native" and not self.may_be_decoded:
                raise native_is_unavailable(f"layer {self.layer.layer_idx}", _DECODED)
        else:
            self.layer.is_read_as_tensors = True
        with storing():
            dense = self.tokens.dense(self.tokens.segments[-1].dtype)
        return refusing_gradients(dense, *self.sources)

    def row(self, index: int) -> Tensor:
        """Return one row, `(H, T, D)`: only that is decoded, which is no read of the whole layer.

        Raises:
            IndexError: If there is no such row.
        """
        chosen = range(self.shape[0])[index]
        with storing():
            return self.tokens.of_row(chosen).dense(self.tokens.segments[-1].dtype)[0]

    def __repr__(self) -> str:  # type: ignore[override]
        packed = self.tokens.packed_length
        return f"KVHandle(shape={tuple(self.shape)}, packed_length={packed}, layer={self.layer!r})"
