"""Models that pass through some layers several times, with keys and values of their own in every pass.

Their caches have a layer for every pass: those of the model's layers first, then those of the second pass, of
the third, and so on. A cache of transformers begins with the first ones, and the model adds the others as
copies when it reads its first tokens; one that has them all is left as it is.
"""

from __future__ import annotations

from typing import Any

from .origins import is_of_family

__all__ = ["check_loops", "repeated_layers"]


def repeated_layers(config: Any) -> list[int]:
    """Indices of the model's layers that the cache layers after the model's own serve, in their order.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration.
    """
    if is_of_family(config, {"dory"}):
        begin, count, passes = config.n_input_layers, config.n_recurrent_layers, config.n_recurrent_loops
    elif is_of_family(config, {"inkling2_loop_text"}):
        begin, passes = config.loop_layer_index_start, config.loop_num_passes
        count = config.loop_layer_index_end - begin
    else:
        return []
    indices = list(range(begin, begin + count))
    return indices * int(passes - 1)


def check_loops(config: Any) -> None:
    """Refuse models whose earlier passes read what the last one has stored, and read it past the cache.

    Raises:
        ValueError: Naming the field of the configuration.
    """
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ValueError(
            f"Models of type {config.model_type!r} with recurrent_kv_cache_mode='last_loop' read keys and "
            "values past their cache, which no cache of this package shows. Allowed is 'per_loop'."
        )
