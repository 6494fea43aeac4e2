"""Which entries of a `[B, H, T, D]` tensor share one scale.

Every granularity here tiles the (token, channel) plane of a head, optionally spanning all heads, so one class
with two sizes and a flag covers them; the named constructors say what each is called in the literature.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Granularity", "per_block", "per_channel_group", "per_token", "per_token_group", "per_token_head"]


@dataclass(frozen=True)
class Granularity:
    """A group is `tokens` x `channels` entries of one head, or of all heads.

    Args:
        tokens (`int`): Consecutive tokens in a group.
        channels (`int | None`): Consecutive channels in a group; `None` is the whole head.
        across_heads (`bool`): Whether the group spans all heads of a token.

    A tensor of shape `(B, H, T, D)` has scales of shape `(B, H, T / tokens, D / channels)`, with `H` replaced
    by 1 if `across_heads`.
    """

    tokens: int = 1
    channels: int | None = None
    across_heads: bool = False

    def width(self, head_dim: int) -> int:
        """Scales per row of groups for heads of `head_dim` channels."""
        channels = self.channels or head_dim
        if head_dim % channels:
            raise ValueError(f"A group of {channels} channels does not divide a head of {head_dim}.")
        return head_dim // channels

    def split(self, states: Tensor) -> Tensor:
        """View `(B, H, T, D)` as `(B, H, T / tokens, tokens, D / channels, channels)`."""
        batch, heads, length, head_dim = states.shape
        if length % self.tokens:
            raise ValueError(f"Groups of {self.tokens} tokens do not divide {length} tokens.")
        width = self.width(head_dim)
        return states.reshape(batch, heads, length // self.tokens, self.tokens, width, head_dim // width)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Dimensions of `split`'s result that one group spans."""
        return (1, 3, 5) if self.across_heads else (3, 5)

    @staticmethod
    def spread(scale: Tensor) -> Tensor:
        """View scales `(B, H, rows, width)` so that they broadcast against `split`'s result."""
        return scale[:, :, :, None, :, None]


def per_token_head() -> Granularity:
    """One scale per token and head: `(B, H, T, D)` -> `(B, H, T, 1)`. LMDeploy, QServe, int8 "per head"."""
    return Granularity()


def per_token_group(channels: int) -> Granularity:
    """One scale per token and `channels` of a head: -> `(B, H, T, D / channels)`. KIVI's values."""
    return Granularity(channels=channels)


def per_token() -> Granularity:
    """One scale per token, shared by all heads: -> `(B, 1, T, 1)`."""
    return Granularity(across_heads=True)


def per_channel_group(tokens: int) -> Granularity:
    """One scale per channel and `tokens` consecutive tokens: -> `(B, H, T / tokens, D)`. KIVI's keys."""
    return Granularity(tokens=tokens, channels=1)


def per_block(tokens: int) -> Granularity:
    """One scale for `tokens` consecutive tokens of all heads and channels: -> `(B, 1, T / tokens, 1)`."""
    return Granularity(tokens=tokens, across_heads=True)
