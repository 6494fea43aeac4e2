"""A check of the CUDA kernels on the GPU they are to run on, against torch on the same GPU.

A few random packed tokens per format, laid out by `quantizers.packing`: several seconds, most of them on the
CPU, once per process and device. What the user has set does not reach it (autocast, default device and dtype,
products in TF32), and it draws no number from the user's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..quantizers.packing import BLOCK_TOKENS, pack_keys, pack_values, packed_bytes
from .cuda_writing_check import encoding_deviation, levels_deviation, step_deviation
from .decoding import decode_side
from .gathering import gather_records
from .layout import FORMATS, Side, SideLayout
from .level_sample import random_levels
from .ops import decode_attention, decode_tokens
from .writing_ops import gather_tokens

__all__ = ["Sample", "find_deviation", "find_deviations", "samples"]

_BLOCKS = 6
_EXACT, _SINKS = 37, 5
_WAITING = 84
"""Values that are still exact where keys of several tokens share their scales: more than a block."""
_HEADS, _GROUP, _ROWS = 2, 4, 2
_SOFTCAP = 30.0
_CALLS = (
    (torch.bfloat16, 128, _BLOCKS, 2, "plain"),
    (torch.bfloat16, 80, _BLOCKS, 2, "softcap"),
    (torch.bfloat16, 256, 2, 2, "plain"),
    (torch.bfloat16, 512, 2, 2, "softcap"),
    (torch.float16, 128, _BLOCKS, 2, "softcap"),
    (torch.float16, 128, 2, 3, "bias"),
    (torch.float32, 128, _BLOCKS, 2, "softcap"),
)
"""Dtype, channels, packed blocks, query tokens, what changes logits: up to 8 query rows or more, values of up
to 128 channels, 256 or more, half precision or fp32 each have a kernel of their own, and blocks in which
nothing changes logits are read in another way."""
_KIVI = {2: ((32, True),), 4: ((32, True), (64, False), (64, True))}
"""By bits: groups, and whether keys are rotated, that have kernels of their own beside (32, False)."""
_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Largest relative deviation, root mean square. Broken layouts deviate by about 1."""
_TOLD = 3
"""Deviations that are told to a user; how many more there are is said."""


@dataclass(frozen=True)
class Sample:
    """Random packed keys and values.

    Args:
        name (`str`): Format, bits and grouping.
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): The packed blocks.
        keys (`Side`), values (`Side`): Their description, with a segment of exact tokens each.
    """

    name: str
    records: Tensor
    keys: Side
    values: Side

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Sample:
        """The same on a device, its exact tokens in `dtype`."""

        def moved(side: Side) -> Side:
            extras = (None if extra is None else extra.to(device) for extra in side.extras)
            there = Side(side.layout, [segment.to(device, dtype) for segment in side.segments], *extras)
            return there if there.sinks is None else replace(there, sinks=there.sinks.to(dtype))

        return Sample(self.name, self.records.to(device), moved(self.keys), moved(self.values))


def samples(
    dtype: torch.dtype, head_dim: int = 128, blocks: int = _BLOCKS, seed: int = 0
) -> Iterator[Sample]:
    """Yield a sample of every way in which keys and values are stored, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for nbits in (2, 3, 4, 8):
        for group, is_rotated in ((32, False), (64, nbits < 8)):
            keys = _Stored("affine", nbits, group, head_dim, is_rotated)
            yield _sample(
                f"{nbits} bit, {group} tokens{', rotated' if is_rotated else ''}",
                keys, _Stored("affine", nbits, 1, head_dim // 32), head_dim, blocks, dtype, generator,
            )  # fmt: skip
        for group, is_rotated in _KIVI.get(nbits, ()):  # groups of as many tokens as channels
            keys = _Stored("affine", nbits, group, head_dim, is_rotated)
            yield _sample(
                f"{nbits} bit, groups of {group}{', rotated' if is_rotated else ''}",
                keys, _Stored("affine", nbits, 1, head_dim // group), head_dim, blocks, dtype, generator,
            )  # fmt: skip
        token = _Stored("affine", nbits, 1, 1)
        plain = _sample(f"{nbits} bit per token", token, token, head_dim, blocks, dtype, generator)
        yield plain
        if nbits == 4:
            yield _with_sinks(plain)
    for name in ("symmetric", "e4m3", "e5m2"):
        token = _Stored(name, 8, 1, 1)
        yield _sample(f"{name} per token", token, token, head_dim, blocks, dtype, generator)
    for nbits in (2, 3, 4):
        exact = list(torch.randn(2, _ROWS, _HEADS, _EXACT, head_dim, generator=generator).to(dtype))
        records, *sides = random_levels((_ROWS, _HEADS, blocks), nbits, head_dim, exact, generator)
        levels = Sample(f"{nbits} bit levels with outliers", records, *sides)
        yield _with_sinks(levels) if nbits == 3 else levels


def _with_sinks(sample: Sample) -> Sample:
    """The same, of which the first tokens are others, and exact: they are read apart from their block."""
    keys, values = (
        replace(side, sinks=side.segments[0][:, :, -_SINKS:].contiguous())
        for side in (sample.keys, sample.values)
    )
    return Sample(f"{sample.name} and sinks", sample.records, keys, values)


def find_deviation(device: torch.device) -> str | None:
    """Run the kernels on a device; return what is wrong with them, or `None`.

    Raises:
        RuntimeError: If one cannot be run, with what it was to do.
    """
    found = find_deviations(device)
    if not found:
        return None
    more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return "; ".join(found[:_TOLD]) + more


def find_deviations(device: torch.device) -> list[str]:
    """Run the kernels on a device; return everything that is wrong with them.

    Raises:
        RuntimeError: If one cannot be run, with what it was to do.
    """
    found = []
    with _undisturbed(device):
        for name, deviation in _checks(device):
            try:
                said = deviation()
            except Exception as error:
                raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
            if said is not None:
                found.append(f"{name}: {said}")
    return found


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    made = {size: list(samples(torch.float32, *size)) for size in {call[1:3] for call in _CALLS}}
    for dtype, head_dim, blocks, tokens, changed in _CALLS:
        for sample in made[head_dim, blocks]:
            name = f"{sample.name}, {head_dim} channels, {tokens} queries, {dtype}, {changed}"
            yield name, partial(_attention_deviation, sample, dtype, tokens, changed, device)
    for sample in (*samples(torch.float32), *samples(torch.float32, 512, 2)):
        yield sample.name, partial(_tokens_deviation, sample, device)
    yield "encoding", partial(encoding_deviation, device)
    yield "encoding levels", partial(levels_deviation, device)
    yield "appending", partial(step_deviation, device)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Torch as a new process finds it."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.random.fork_rng(devices=[]))  # numbers are drawn on the CPU only
        torch.default_generator.manual_seed(0)
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


def _attention_deviation(
    sample: Sample, dtype: torch.dtype, tokens: int, changed: str, device: torch.device
) -> str | None:
    moved = sample.to(device, dtype)
    head_dim, length = sample.keys.layout.head_dim, sample.keys.length
    query = torch.randn(_ROWS, _HEADS * _GROUP, tokens, head_dim).to(dtype).to(device)
    bias = torch.randn(_ROWS, 1, tokens, length).to(device) if changed == "bias" else None
    softcap = _SOFTCAP if changed == "softcap" else 0.0
    got = decode_attention(
        query, moved.records, moved.keys, moved.values, scaling=head_dim**-0.5, is_causal=True,
        softcap=softcap, bias=bias,
    )  # fmt: skip
    keys = decode_side(moved.keys, moved.records, is_key=True, sink_start=None)
    values = decode_side(moved.values, moved.records, is_key=False, sink_start=None)
    expected = _attend_exactly(query, keys, values, softcap, bias)
    error = float((got.double() - expected).norm() / expected.norm())
    return None if error <= _BOUNDS[dtype] else f"attention deviates by {error:.2e}"


def _attend_exactly(
    query: Tensor, keys: Tensor, values: Tensor, softcap: float, bias: Tensor | None
) -> Tensor:
    """Causal attention in fp64, whose products no setting of torch makes less precise."""
    kv_heads, length, head_dim = keys.shape[1:]
    rows = query.double().unflatten(1, (kv_heads, -1))  # [B, H, group, q, D]
    logits = rows @ keys.double()[:, :, None].mT * head_dim**-0.5
    if softcap > 0.0:
        logits = softcap * (logits / softcap).tanh()
    if bias is not None:
        logits = logits + bias.double()[:, :, None]
    newest = torch.arange(length - query.shape[2], length, device=keys.device)
    hidden = torch.arange(length, device=keys.device) > newest[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    output: Tensor = (weights @ values.double()[:, :, None]).flatten(1, 2)
    return output


def _tokens_deviation(sample: Sample, device: torch.device) -> str | None:
    sample = sample.to(device)
    for side, is_key in ((sample.keys, True), (sample.values, False)):
        got = decode_tokens(
            sample.records, side, is_key=is_key, start=5, stop=side.length - 3, dtype=torch.float32
        )
        expected = decode_side(side, sample.records, is_key=is_key, sink_start=None)[:, :, 5:-3]
        if not torch.allclose(got, expected, rtol=1e-6, atol=4e-6 * float(expected.abs().max())):
            return f"decoded {'keys' if is_key else 'values'} differ"
    layouts = [side.layout for side in (sample.keys, sample.values)]
    if any(layout.group_tokens != 1 for layout in layouts):
        return None
    index = torch.randint(0, layouts[0].packed_length, (_ROWS, _HEADS, 100)).to(sample.records.device)
    results = [torch.zeros_like(sample.records[:, :, :2]) for _ in range(2)]
    gather_tokens(sample.records, results[0], index, layouts[0], layouts[1])
    gather_records(sample.records, results[1], index, layouts[0], layouts[1])
    return None if torch.equal(results[0], results[1]) else "gathered records differ"


@dataclass(frozen=True)
class _Stored:
    """How a side of a sample is stored: `width` 0 stands for one metadata entry per channel."""

    format: str
    nbits: int
    group_tokens: int
    width: int
    is_rotated: bool = False


def _sample(
    name: str,
    keys: _Stored,
    values: _Stored,
    head_dim: int,
    blocks: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Sample:
    parts: list[Tensor] = []
    sides = []
    offset = 0
    for stored, is_key in ((keys, True), (values, False)):
        width = next(w for w in range(min(stored.width, head_dim), 0, -1) if head_dim % w == 0)
        if not is_key and head_dim // width % 16:
            width = 1
        shape = (_ROWS, _HEADS, blocks)
        codes = _random_codes(stored, (*shape, BLOCK_TOKENS, head_dim), generator)
        interleaved = not stored.is_rotated
        packed = pack_keys(codes, stored.nbits, interleaved) if is_key else pack_values(codes, stored.nbits)
        rows = BLOCK_TOKENS // stored.group_tokens
        levels = {"affine": 2**stored.nbits - 1, "symmetric": 127, "e4m3": 448, "e5m2": 57344}[stored.format]
        scale = (torch.rand(*shape, rows, width, generator=generator) + 0.2) * 4 / levels
        fields = [packed, scale.half().flatten(3).contiguous().view(torch.uint8)]
        if stored.format == "affine":
            minimum = torch.randn(*shape, rows, width, generator=generator) - 2
            fields.append(minimum.half().flatten(3).contiguous().view(torch.uint8))
        offsets = [offset + sum(f.shape[-1] for f in fields[:i]) for i in range(len(fields))]
        offset = offsets[-1] + fields[-1].shape[-1]
        parts += fields
        assert packed.shape[-1] == packed_bytes(head_dim, stored.nbits)
        period = 32 * (stored.group_tokens // 32) if stored.is_rotated else 0
        waiting = _WAITING if keys.group_tokens > 1 and not is_key else 0
        layout = SideLayout(
            packed_length=blocks * BLOCK_TOKENS - waiting,
            nbits=stored.nbits,
            format=FORMATS[stored.format],
            head_dim=head_dim,
            group_tokens=stored.group_tokens,
            width=width,
            metadata_bytes=2,
            interleaved=int(interleaved),
            codes_offset=offsets[0],
            scale_offset=offsets[1],
            minimum_offset=offsets[2] if len(offsets) > 2 else -1,
            period=period,
            rotary_dim=head_dim if stored.is_rotated else 0,
        )
        angles = torch.arange(period)[:, None] * 100.0 ** -torch.linspace(0, 1, head_dim // 2)
        tables = (angles.cos(), angles.sin()) if stored.is_rotated else (None, None)
        exact = torch.randn(_ROWS, _HEADS, _EXACT + waiting, head_dim, generator=generator).to(dtype)
        sides.append(Side(layout, [exact], cos=tables[0], sin=tables[1]))
    missing = -offset % 64
    parts.append(torch.zeros(_ROWS, _HEADS, blocks, missing, dtype=torch.uint8))
    return Sample(name, torch.cat(parts, dim=-1), *sides)


def _random_codes(stored: _Stored, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if stored.format in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if stored.format == "e4m3" else torch.float8_e5m2
        largest = torch.finfo(dtype).max
        numbers = torch.randn(shape, generator=generator) * largest / 4
        return numbers.clamp(-largest, largest).to(dtype).view(torch.uint8)
    low = 1 if stored.format == "symmetric" else 0
    return torch.randint(low, 2**stored.nbits, shape, dtype=torch.uint8, generator=generator)
