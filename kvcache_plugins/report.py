"""What a cache says of itself: true bytes, and which layers run how."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CacheReport"]


@dataclass(frozen=True)
class CacheReport:
    """State of a cache at one moment.

    Args:
        backend (`str`): Registry name.
        tokens_seen (`int`): Tokens the cache was given (per row, pads included).
        tokens_held (`int`): Tokens it still holds; fewer only for evicting backends.
        kv_bytes (`int`): Bytes of every live tensor the cache owns.
        dense_bytes (`int`): Bytes of the tokens seen in transformers' own cache layers, without slack.
        kernel (`list[str]`): What reads each layer: `"cuda"`, `"cpu"`, `"torch"`, or `"dense"`.
        dense_layers (`dict[int, str]`): Layers left to transformers' own classes, with the reason.
        fallback_reads (`int`): Times an operation without a fused path decoded a whole layer.
        values (`int`): Numbers (key and value entries) held.
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

    @property
    def memory_fraction(self) -> float:
        """`kv_bytes` over `dense_bytes`; 0 for an empty cache."""
        return self.kv_bytes / self.dense_bytes if self.dense_bytes else 0.0

    @property
    def bits_per_value(self) -> float:
        """Bits spent per key or value entry held, metadata, tail and slack included; 0 for an empty cache."""
        return 8 * self.kv_bytes / self.values if self.values else 0.0

    def __str__(self) -> str:
        rows = [
            ("backend", self.backend),
            ("tokens seen / held", f"{self.tokens_seen} / {self.tokens_held}"),
            ("bytes", f"{self.kv_bytes:,} of {self.dense_bytes:,} dense ({self.memory_fraction:.1%})"),
            ("bits per value", f"{self.bits_per_value:.2f}"),
            (
                "kernel",
                ", ".join(f"{name} x{self.kernel.count(name)}" for name in dict.fromkeys(self.kernel)),
            ),
            ("decoded whole layers", f"{self.fallback_reads} times"),
        ]
        by_reason: dict[str, list[int]] = {}
        for layer_idx, reason in self.dense_layers.items():
            by_reason.setdefault(reason, []).append(layer_idx)
        rows += [(f"dense layers {indices}", reason) for reason, indices in by_reason.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
