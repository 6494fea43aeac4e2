"""Having a model read again what it has just read, and noting which tokens it looks at while it does.

A text is repeated passage by passage, each after the whole text and as its continuation. What repeats is
never stored: every passage meets the cache as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.reference import AttentionOptions
from ..attention.strongest import strongest_attention
from ..layers.view import StreamView

__all__ = ["LEAD_LENGTH", "Judgement", "Passage", "cut_passages"]

LEAD_LENGTH = 8
"""Tokens before a passage that are repeated with it, so that its first ones are looked for as well."""


@dataclass(frozen=True)
class Passage:
    """Some of the newest tokens of every row, and what repeats them.

    Args:
        start (`int`): Where they begin, counted from the first of the tokens that are repeated.
        after (`int`): Tokens from there to the end of the text.
        is_real (`torch.Tensor` of shape `(B, n)`): Bool, which of its `n` tokens are no pads.
        token_ids (`torch.Tensor` of shape `(B, q)`): What the model is given; a row that is shorter than
            others, because of pads, ends in tokens without meaning.
        counted (`torch.Tensor` of shape `(B, q)`): Bool, which of these are meant.
    """

    start: int
    after: int
    is_real: Tensor
    token_ids: Tensor
    counted: Tensor

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.start + self.is_real.shape[1]

    def needed(
        self, query: Tensor, tokens: StreamView, options: AttentionOptions, sink_length: int, kernel: str
    ) -> Tensor:
        """Return how much each token of the passage is needed, at most, by what repeats it.

        Attention is shared among the sinks, the passage and what repeats it alone (as in KVzip), so
        that it means the same in a long text and in a short one.

        Args:
            query (`torch.Tensor` of shape `(B, Hq, q, D)`): Queries of `token_ids`.
            tokens (`StreamView`): The keys of the text, then those of `token_ids`.
            options (`AttentionOptions`): As they were answered.
            sink_length (`int`): First real tokens that count as sinks, as far as the passage follows them.
            kernel (`str`): The option of a cache of that name.

        Returns:
            `torch.Tensor` of shape `(B, H, n)`: fp32, from 0 to 1.
        """
        count, length, device = query.shape[2], self.is_real.shape[1], query.device
        end = tokens.length - count
        first = end - self.after
        sinks = tokens.stream.padding.starts(query)[:, None] + torch.arange(sink_length, device=device)
        sinks = sinks[:, : min(sink_length, first)]
        runs = [(first, first + length), (end, tokens.length)]
        keys = [_gathered(tokens, sinks.clamp(0, first - 1))] if sinks.shape[1] else []
        keys += [tokens.read(*run) for run in runs]
        dtype = query.dtype if all(part.dtype == query.dtype for part in keys) else torch.float32
        repeated = torch.ones(len(query), count, dtype=torch.bool, device=device)
        is_sink = (sinks >= 0) & (sinks < first)
        found = strongest_attention(
            query,
            torch.cat([part.to(dtype) for part in keys], dim=2),
            torch.cat([is_sink, self.is_real.to(device), repeated], dim=1),
            options,
            self.counted.to(device),
            kernel=kernel,
        )
        return found[:, :, sinks.shape[1] : sinks.shape[1] + length]


class Judgement:
    """What is found of the newest tokens of a layer while they are repeated.

    Args:
        scores (`torch.Tensor` of shape `(B, H, n)`): Of how many rows, heads and tokens.

    Attributes:
        is_shown (`bool`): Whether any query was seen.
    """

    def __init__(self, scores: Tensor) -> None:
        self.scores = torch.zeros_like(scores)
        self.is_shown = False

    def take(self, passage: Passage, needed: Tensor) -> None:
        """Take notice that tokens of a passage are needed that much, `(B, H, n)`."""
        place = self.scores[:, :, passage.start : passage.stop]
        place.copy_(place.maximum(needed))
        self.is_shown = True


def _gathered(tokens: StreamView, slots: Tensor) -> Tensor:
    """Keys `(B, H, n, D)` of the slots `(B, n)`."""
    states = tokens.read(0, int(slots.max()) + 1)
    return states.gather(2, slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def cut_passages(
    lead: Tensor, token_ids: Tensor, pads: Tensor | None, length: int, prompt: Sequence[int]
) -> Iterator[Passage]:
    """Cut the newest tokens of a text into passages.

    Args:
        lead (`torch.Tensor` of shape `(B, k)`): The tokens before them.
        token_ids (`torch.Tensor` of shape `(B, n)`): The tokens.
        pads (`torch.Tensor` of shape `(B,)`, *optional*): How many of both together, from the left, are pads.
        length (`int`): Tokens of a passage, at most.
        prompt (`list[int]`): Tokens that ask for a repetition.
    """
    batch_size, count = token_ids.shape
    text = torch.cat([lead, token_ids], dim=1).long()
    columns = torch.arange(text.shape[1], device=text.device).expand(batch_size, -1)
    is_real = torch.ones_like(text, dtype=torch.bool) if pads is None else columns >= pads[:, None]
    asked = text.new_tensor(prompt).expand(batch_size, -1)
    for start in range(0, count, length):
        stop = min(start + length, count)
        begin = lead.shape[1] + start
        repeated = slice(max(0, begin - LEAD_LENGTH), lead.shape[1] + stop)
        meant = is_real[:, repeated]
        if not bool(meant.any()):
            continue
        # pads go to the end, where nothing that is meant sees them
        order = (~meant).to(torch.uint8).argsort(dim=1, stable=True)
        longest = int(meant.sum(1).max())
        chosen = text[:, repeated].gather(1, order)[:, :longest]
        yield Passage(
            start=start,
            after=count - start,
            is_real=is_real[:, begin : lead.shape[1] + stop],
            token_ids=torch.cat([asked, chosen], dim=1),
            counted=torch.cat(
                [torch.ones_like(asked, dtype=torch.bool), meant.gather(1, order)[:, :longest]], 1
            ),
        )
