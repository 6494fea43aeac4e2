"""How a stream is stored: by which codec, and when its tokens are packed."""

from __future__ import annotations

from dataclasses import dataclass

from .codec import Codec, check_codec

__all__ = ["StreamSpec"]


@dataclass(frozen=True)
class StreamSpec:
    """How a stream is stored.

    Args:
        codec (`Codec`): Turns tokens into codes.
        block_length (`int`): Tokens packed together; a multiple of the codec's `unit_tokens`.
        keep_recent (`int`): Newest tokens never packed.
    """

    codec: Codec
    block_length: int = 1
    keep_recent: int = 0

    def __post_init__(self) -> None:
        check_codec(self.codec)
        if self.block_length < 1 or self.block_length % self.codec.unit_tokens or self.keep_recent < 0:
            raise ValueError(
                f"A stream needs keep_recent >= 0 and a block_length that is a multiple of the codec's "
                f"unit of {self.codec.unit_tokens} tokens, got {self.keep_recent} and {self.block_length}."
            )

    def packed_length(self, length: int) -> int:
        """Tokens packed once `length` have been seen (the closed form)."""
        surplus = length - self.keep_recent
        return surplus - surplus % self.block_length if surplus > 0 else 0
