"""Encoding by a native kernel, where one fits; the codecs remain the reference and serve everything else."""

from __future__ import annotations

from torch import Tensor

from ..kernels import cuda_loader, loader
from ..kernels.layout import MAX_HEAD_DIM, MAX_METADATA, dense_rows
from ..kernels.writing_ops import encode_tokens
from ..quantizers.packing import BLOCK_TOKENS
from .codec import Codec, RotatedCodec, ScaledCodec, code_format_of
from .outliers import OutlierStore
from .padding import Padding
from .records import Records

__all__ = ["NativeEncoder"]

_SLABS_OF_A_LAUNCH = 16
"""Slabs that a GPU encodes at once: a launch there costs more than a slab, and makes no temporaries."""


class NativeEncoder:
    """What native kernels must know of one side of a layer's records to encode it, looked up once.

    It depends on the codec, the layout of the records and the device, and serves as long as these are the
    same objects (see `is_for`). What changes from call to call is read from them.

    Args:
        codec (`Codec`): What encodes the stream.
        side (`str`): `"key"` or `"value"`.
        records (`Records`): Where codes and metadata go.

    Attributes:
        layout (`list[int]`): As `encode_tokens` takes it; empty if no kernel encodes what the codec does.
        rotation (`tuple`): `cos` and `sin` as `encode_tokens` takes them, or `None` twice.
        slabs_at_once (`int`): Slabs of a stream that one call should be given.
    """

    def __init__(self, codec: Codec, side: str, records: Records) -> None:
        self.codec, self.is_key = codec, side == "key"
        self.record_layout, self.device = records.layout, records.data.device
        self._device_type = self.device.type
        self.layout = _layout(codec, side, records)
        self._scaled = codec if isinstance(codec, ScaledCodec) else None  # asked once, not in every step
        has_many = self._device_type == "cuda" and self._scaled is None  # dividing makes temporaries
        self.slabs_at_once = _SLABS_OF_A_LAUNCH if has_many else 1
        self.rotation: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.layout and isinstance(codec, RotatedCodec):
            self.rotation = codec.rotary.block_tables(codec.period, self.device)

    def is_for(self, codec: Codec, records: Records) -> bool:
        """Whether what was looked up still holds."""
        return (
            self.codec is codec
            and self.record_layout is records.layout
            and self.device == records.data.device
        )

    @property
    def factors(self) -> Tensor | None:
        """What numbers are divided by before they are encoded: fp32 `(B, H, 1, D)`, or nothing."""
        return None if self._scaled is None else self._scaled.factors

    def may_step(self) -> bool:
        """Whether `append_tokens` may be called on the device: not if its kernels have failed their check."""
        return self._device_type != "cuda" or cuda_loader.try_load(self.device)

    def may_encode(self) -> bool:
        """Whether the device has kernels; the first question may build them."""
        if self._device_type == "cuda":
            return cuda_loader.try_load(self.device)
        return self._device_type == "cpu" and loader.try_load()

    def first_slot(self, start: int, padding: Padding) -> int:
        """First slot from `start` on that a kernel might encode: of no block that holds pads or sinks."""
        if start >= padding.first_plain_slot:
            return start
        unit = max(BLOCK_TOKENS, self.codec.unit_tokens)
        return -(-padding.first_plain_slot // unit) * unit

    def can_encode(self, start: int, padding: Padding) -> bool:
        """Whether there is a kernel for tokens from slot `start` on, see `may_encode`.

        Pads and sinks take no part in statistics, which is the codec's to respect.
        """
        return bool(self.layout) and start >= padding.first_plain_slot and self.may_encode()

    def encode(
        self, records: Records, states: Tensor, start: int, padding: Padding, outliers: OutlierStore | None
    ) -> bool:
        """Encode tokens and write them into the records, with the same bytes as the codec would give.

        Args:
            records (`Records`): Where to write.
            states (`torch.Tensor` of shape `(B, H, n, D)`): Whole groups of tokens.
            start (`int`): Slot of the first.
            padding (`Padding`): Pads and sinks of every row.
            outliers (`OutlierStore`, *optional*): Where lists of outliers go, of codecs that have some.

        Returns:
            `bool`: Whether it was done; if not, nothing was written.
        """
        if states.device != self.device or not self.can_encode(start, padding):
            return False
        if self.factors is not None:
            states = states.float() / self.factors
        states = dense_rows(states)
        return encode_tokens(records.data, states, self.is_key, self.layout, start, *self.rotation)


def _layout(codec: Codec, side: str, records: Records) -> list[int]:
    inner = codec.inner if isinstance(codec, (RotatedCodec, ScaledCodec)) else codec
    code_format = code_format_of(inner)
    _, head_dim = records.layout.codecs[side]
    if code_format is None or "scale" not in inner.metadata_names or inner.granularity.across_heads:
        return []
    places = records.layout.places[side]
    entries = BLOCK_TOKENS // places.group_tokens * places.width
    # a thread block of a GPU keeps them in its shared memory, and no kernel reads so many
    if head_dim > MAX_HEAD_DIM or (records.data.is_cuda and entries > MAX_METADATA):
        return []
    fields = records.layout.fields
    return [
        inner.nbits,
        code_format,
        head_dim,
        inner.group_tokens,
        inner.granularity.width(head_dim),
        records.layout.metadata_bytes,
        int(codec.interleaved),
        *(fields.get(f"{side}_{name}", (-1, 0))[0] for name in ("codes", "scale", "minimum")),
    ]
