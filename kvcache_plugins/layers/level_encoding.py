"""Encoding by non-uniform levels, with outliers, in native kernels; the codecs remain the reference."""

from __future__ import annotations

from torch import Tensor

from ..kernels.layout import MAX_HEAD_DIM, dense_rows
from ..kernels.writing_ops import encode_levels
from ..quantizers.packing import BLOCK_TOKENS
from .codec import Codec
from .native_encoding import NativeEncoder
from .nonuniform import ChannelNonUniformCodec, NonUniformCodec, UnrotatedCodec
from .outliers import OutlierStore
from .padding import Padding
from .records import Records

__all__ = ["LevelEncoder", "encoder_for"]


class LevelEncoder(NativeEncoder):
    """A [`NativeEncoder`] for the codecs of KVQuant.

    Whole blocks are encoded, pads and sinks among them. `append_tokens` does not: a step leaves them to it.

    Args:
        codec (`NonUniformCodec` or `UnrotatedCodec` of one), side, records: See there.
    """

    def __init__(self, codec: Codec, side: str, records: Records) -> None:
        super().__init__(codec, side, records)
        inner = codec.inner if isinstance(codec, UnrotatedCodec) else codec
        assert isinstance(inner, NonUniformCodec)
        self.level_codec = inner
        _, self.head_dim = records.layout.codecs[side]
        is_known = isinstance(inner, ChannelNonUniformCodec) == self.is_key
        self.is_possible = is_known and self.head_dim <= MAX_HEAD_DIM
        fields = records.layout.fields
        places = (fields.get(f"{side}_{name}", (-1, 0))[0] for name in ("codes", "scale", "offset"))
        kinds = records.layout.metadata_bytes, int(codec.interleaved)
        self.level_layout = [inner.nbits, 0, self.head_dim, 1, 1, *kinds, *places]

    def first_slot(self, start: int, padding: Padding) -> int:
        return start

    def encode(
        self, records: Records, states: Tensor, start: int, padding: Padding, outliers: OutlierStore | None
    ) -> bool:
        """Encode whole blocks and write them into the records and lists, with the codec's bytes."""
        if not self.is_possible or states.device != self.device or not self.may_encode():
            return False
        assert start % BLOCK_TOKENS == 0 and states.shape[2] % BLOCK_TOKENS == 0
        _, levels = self.level_codec.codebooks_on(self.device)
        options: dict[str, Tensor] = {}
        if isinstance(self.level_codec, ChannelNonUniformCodec):
            options["scale"], options["offset"] = self.level_codec.range_on(self.device)
        if isinstance(self.codec, UnrotatedCodec):
            options["cos"], options["sin"] = self.codec.tables(states, start)
        if start < padding.first_plain_slot:
            options["first_plain"] = padding.starts(states) + padding.sink_length
        return encode_levels(
            records.data,
            None if outliers is None else outliers.lists,
            dense_rows(states),
            self.is_key,
            self.level_layout,
            self.level_codec.boundaries_on(self.device),
            levels,
            self.level_codec.per_side,
            start,
            **options,
        )


def encoder_for(codec: Codec, side: str, records: Records) -> NativeEncoder:
    """The encoder of a codec. The arguments are those of [`NativeEncoder`]."""
    inner = codec.inner if isinstance(codec, UnrotatedCodec) else codec
    kind = LevelEncoder if isinstance(inner, NonUniformCodec) else NativeEncoder
    return kind(codec, side, records)
