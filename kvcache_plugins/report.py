"""What a cache says of itself: true bytes, and which layers run how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["CacheReport"]


@dataclass(frozen=True)
class CacheReport:
    """State of a cache at one moment.

    Args:
        backend (`str`): Registry name.
        tokens_seen (`int`): Tokens the cache was given (per row, pads included).
        tokens_held (`int`): Tokens it still holds, in the head that holds most; fewer only for evicting
            backends, and where nothing is packed, which leaves what the longest dense layer holds.
        kv_bytes (`int`): Bytes of every live tensor the cache owns.
        dense_bytes (`int`): Bytes of the tokens seen in transformers' own cache layers, without slack; of
            layers left to these, those they take.
        kernel (`list[str]`): What reads each layer: `"cuda"`, `"cpu"`, `"torch"`, or `"dense"`.
        dense_layers (`dict[int, str]`): Layers left to transformers' own classes, with the reason.
        fallback_reads (`int`): Times an operation without a fused path decoded a whole layer.
        values (`int`): Numbers (key and value entries) held.
        kernel_reasons (`dict[int, str]`): Layers whose latest attention over packed tokens was not by a fast
            kernel, with the reason; before there has been any, that there was none.
        exact_layers (`dict[int, str]`): Layers of which keys or values are exact although some could be
            packed, with the reason.
        whole_prompt_reason (`str`, *optional*): Why the latest prompt was read in one call, although chunks
            would have bounded memory.
        host_bytes (`int`, *optional*): Those of `kv_bytes` that rest in the host's memory, beside a GPU;
            `None` unless that was asked for (`offload`).
        dropped_outliers (`int`): Numbers that are no longer exact, because too many outliers of tokens that
            moved came into one block.
        cross_attention (`CacheReport`, *optional*): Of an encoder-decoder model, what the decoder reads of
            the encoder by cross-attention, whose tokens are the encoder's. Tokens, kernels and layers above
            are then those of the decoder's own text; bytes, values and reads count both.
    """

    backend: str
    tokens_seen: int
    tokens_held: int
    kv_bytes: int
    dense_bytes: int
    kernel: list[str] = field(default_factory=list)
    dense_layers: dict[int, str] = field(default_factory=dict)
    fallback_reads: int = 0
    values: int = 0
    kernel_reasons: dict[int, str] = field(default_factory=dict)
    whole_prompt_reason: str | None = None
    host_bytes: int | None = None
    dropped_outliers: int = 0
    cross_attention: CacheReport | None = None
    exact_layers: dict[int, str] = field(default_factory=dict)

    @property
    def memory_fraction(self) -> float:
        """`kv_bytes` over `dense_bytes`; 0 for an empty cache."""
        return self.kv_bytes / self.dense_bytes if self.dense_bytes else 0.0

    @property
    def bits_per_value(self) -> float:
        """Bits spent per key or value entry held, metadata, tail and slack included; 0 for an empty cache.

        Tables of evaluations and of `kvcache-plugins estimate` count the entries of all tokens seen instead,
        so for a cache that evicts they show fewer bits.
        """
        return 8 * self.kv_bytes / self.values if self.values else 0.0

    def __str__(self) -> str:
        rows = [
            ("backend", self.backend),
            ("tokens seen / held", f"{self.tokens_seen} / {self.tokens_held}"),
            ("bytes", f"{self.kv_bytes:,} of {self.dense_bytes:,} dense ({self.memory_fraction:.1%})"),
            ("bits per value", f"{self.bits_per_value:.2f}"),
            *([] if self.host_bytes is None else [("of these off the GPU", f"{self.host_bytes:,}")]),
            ("kernel", self._kernels()),
            ("decoded whole layers", f"{self.fallback_reads} times"),
            *self._reasons(),
        ]
        if self.cross_attention is not None:
            rows += self.cross_attention._rows_of_encoder()
        if self.whole_prompt_reason is not None:
            rows.append(("prompt read whole", self.whole_prompt_reason))
        if self.dropped_outliers:
            rows.append(("outliers dropped", f"{self.dropped_outliers:,}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _kernels(self) -> str:
        return ", ".join(f"{name} x{self.kernel.count(name)}" for name in dict.fromkeys(self.kernel))

    def _reasons(self) -> list[tuple[str, str]]:
        kernels = _by_reason(lambda index: self.kernel[index], self.kernel_reasons)
        exact = _by_reason(lambda index: "exact", self.exact_layers)
        return kernels + exact + _by_reason(lambda index: "dense", self.dense_layers)

    def _rows_of_encoder(self) -> list[tuple[str, str]]:
        """Rows of the half that holds what a decoder reads of its encoder."""
        share = f"{self.kv_bytes:,} of {self.dense_bytes:,} dense ({self.memory_fraction:.1%})"
        rows = [("tokens", str(self.tokens_seen)), ("bytes", share), ("kernel", self._kernels())]
        return [(f"encoder's {name}", value) for name, value in rows + self._reasons()]


def _by_reason(kind_of: Callable[[int], str], reasons: dict[int, str]) -> list[tuple[str, str]]:
    """A row for the layers of one kind that share a reason."""
    layers: dict[tuple[str, str], list[int]] = {}
    for index, reason in reasons.items():
        layers.setdefault((kind_of(index), reason), []).append(index)
    return [(f"{kind} layers {_ranges(indices)}", reason) for (kind, reason), indices in layers.items()]


def _ranges(indices: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
