"""How many positions a model has a row of a table for, beyond which it reads nothing at all."""

from __future__ import annotations

from typing import Any

from torch import nn

from .decoder import decoder_of

__all__ = ["check_positions"]

_MOST_OFFSET = 8  # rows in front of the first position: OPT and BART have 2


def check_positions(model: Any, tokens: int, option: str) -> None:
    """Check that a model that looks positions up in a table has a row for every token.

    Rotary positions go on beyond what a model was made for, if badly; in a table there is nothing to be found
    (GPT-2, OPT, GPT-J), and the error of torch says only that an index is out of range.

    Args:
        model (`PreTrainedModel`): The model.
        tokens (`int`): Tokens that are read of one text.
        option (`str`): What asked for them, as the message begins.

    Raises:
        ValueError: If the table ends before.
    """
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and tokens > positions and _has_table(decoder_of(model), positions):
        raise ValueError(
            f"{option} must be at most {positions}, got {tokens}: the model looks its {positions} positions "
            "up in a table, and finds nothing beyond its end."
        )


def _has_table(decoder: nn.Module, positions: int) -> bool:
    """Whether rows of an embedding, or of a buffer that layers keep, are positions.

    A table of sines that grows with what is asked of it (XGLM) is a module of its own, and no such embedding.
    """
    rows = range(positions, positions + _MOST_OFFSET + 1)
    for name, module in decoder.named_modules():
        is_table = isinstance(module, nn.Embedding) and ("pos" in name.lower() or name.endswith("wpe"))
        if is_table and module.num_embeddings in rows:
            return True
    return any(
        name.endswith("embed_positions") and buffer.ndim == 2 and len(buffer) in rows
        for name, buffer in decoder.named_buffers()
    )
