"""How the CUDA kernels use memory, counted on the PTX machine: bank conflicts, sectors, instructions.

A case says what its kernel may cost at most: without a word, no conflict and no byte that is not asked for.
Numbers above that are what was counted, rounded up, and not what must be: kernels that get better lower them.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvcache_plugins.attention.description import describe
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.kernels.cuda_toolkit import find_toolkit
from tests.kernels import fresh_process
from tests.kernels.append_cases import CODES, Case, Codes
from tests.kernels.cuda import access_counts, emulation, ptx_machine
from tests.kernels.cuda.access_counts import Kernel
from tests.kernels.decode_cases import build_layer, step
from tests.kernels.test_encode_levels import arguments
from tests.kernels.test_gather_tokens import CASES as GATHERABLE
from tests.kernels.test_gather_tokens import blank, layouts, packed, some_slots

pytestmark = [ptx_machine.needs_compilers, pytest.mark.in_depth]

START = """
import os
from pathlib import Path
from tests.kernels.cuda import ptx_machine, test_memory_accesses

os.environ["KVCACHE_EMULATED_MULTIPROCESSORS"] = "1"
library = ptx_machine.load(ptx_machine.build(Path({folder!r})))
test_memory_accesses.measure(library, {part}, Path({results!r}))
"""
PARTS = 2
"""Processes that measure, side by side."""


@pytest.fixture(scope="module")
def measured(builds: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of `MEASUREMENTS`, by name."""
    toolkit = find_toolkit()
    assert toolkit is not None
    if "release 13." not in toolkit.release:
        pytest.skip(f"{toolkit.release} makes other PTX than was counted")
    ptx_machine.build(builds)  # here, where it may take its time
    files = [tmp_path_factory.mktemp("counts") / f"{part}.pickle" for part in range(PARTS)]
    scripts = [
        START.format(folder=str(builds), part=part, results=str(file)) for part, file in enumerate(files)
    ]
    for done in fresh_process.run_together(scripts):
        assert done.returncode == 0, done.stderr
    return {name: result for file in files for name, result in pickle.loads(file.read_bytes()).items()}


def measure(library: ctypes.CDLL, part: int, results: Path) -> None:
    """Take every `PARTS`-th of the measurements."""
    names = list(MEASUREMENTS)[part::PARTS]
    results.write_bytes(pickle.dumps({name: MEASUREMENTS[name](library) for name in names}))


# -- attention, by the packed block of 64 tokens of a head


class Attention(NamedTuple):
    """One query of 4 heads per head of the cache, in bf16."""

    instructions: float
    """Per code, of the PTX that nvcc 13 makes."""
    options: dict[str, Any]
    head_dim: int = 128
    conflicts: float = 0
    """Of a block. What they are where outliers are laid down depends on the outliers."""
    list_sectors: float = 0
    """Of lists of outliers, or of a mask, beside the record."""
    is_masked: bool = False
    """Whether there is one, of which nothing is known on a GPU."""


class Blocks(NamedTuple):
    """What attention to more blocks has done more."""

    kernel: Kernel
    blocks: int
    record_bytes: int


def kivi(nbits: int, group: int, **others: Any) -> dict[str, Any]:
    return {"backend": "kivi", "nbits": nbits, "q_group_size": group, **others}


def kvquant(nbits: int, fraction: float = 0.01) -> dict[str, Any]:
    return {"backend": "kvquant", "nbits": nbits, "outlier_fraction": fraction, "calibration": NORMAL_FLOAT}


HEADS = 10
"""So many that a GPU of one multiprocessor does not divide a head's tokens among thread blocks."""
LENGTHS = (400, 1424)
"""Sixteen blocks apart, four of a warp, after which what is done every few blocks has been done once more."""
INT8, INT4 = {"backend": "int8"}, {"backend": "int4"}
ATTENTION = {
    "int8": Attention(1.85, INT8),
    "int8 D64": Attention(4.2, INT8, 64),
    "int8 D256": Attention(2.1, INT8, 256),
    "int8 g32": Attention(6.3, {**INT8, "granularity": "group", "q_group_size": 32}),
    "int4": Attention(1.85, INT4),
    "int4 D64": Attention(4.35, INT4, 64),
    "int4 D256": Attention(2.05, INT4, 256),
    "e4m3": Attention(3.3, {"backend": "float8"}),
    "e5m2": Attention(2.65, {"backend": "float8", "format": "e5m2"}),
    "kivi 2bit g16": Attention(3.4, kivi(2, 16), conflicts=128),
    "kivi 2bit g32": Attention(2.05, kivi(2, 32), conflicts=16),
    "kivi 3bit g32": Attention(3.95, kivi(3, 32), conflicts=16),
    "kivi 4bit g32": Attention(2.15, kivi(4, 32), conflicts=16),
    "kivi 2bit g64": Attention(2.75, kivi(2, 64)),
    "kivi 3bit g64": Attention(3.75, kivi(3, 64)),
    "kivi 4bit g64": Attention(1.95, kivi(4, 64)),
    "kivi 2bit g32 D64": Attention(4.35, kivi(2, 32), 64, conflicts=8),
    "kivi 3bit g32 D64": Attention(5.65, kivi(3, 32), 64, conflicts=8),
    "kivi 4bit g64 D64": Attention(4.2, kivi(4, 64), 64),
    "kivi 2bit g32 D256": Attention(2.3, kivi(2, 32), 256, conflicts=112),
    "kivi 4bit g32 rotated": Attention(4.15, kivi(4, 32, rope_mode="block")),
    "kvquant 2bit": Attention(7.5, kvquant(2), conflicts=46, list_sectors=33),
    "kvquant 3bit": Attention(8.3, kvquant(3), conflicts=46, list_sectors=33),
    "kvquant 4bit": Attention(8.95, kvquant(4), conflicts=46, list_sectors=33),
    "kvquant 3bit D64": Attention(12.7, kvquant(3), 64, conflicts=26, list_sectors=20),
    "kvquant 3bit D256": Attention(9.1, kvquant(3), 256, conflicts=112, list_sectors=63),
    "kvquant 3bit without outliers": Attention(6.85, kvquant(3, 0.0)),
    "int8 masked": Attention(2.7, INT8, list_sectors=32, is_masked=True),
    "kivi 2bit g32 masked": Attention(2.95, kivi(2, 32), conflicts=16, list_sectors=32, is_masked=True),
}


def attend(library: ctypes.CDLL, name: str) -> Blocks:
    case = ATTENTION[name]
    found: list[Kernel] = []
    for length in LENGTHS:
        torch.manual_seed(0)
        layer = build_layer(
            case.options, length, batch_size=1, kv_heads=HEADS, head_dim=case.head_dim, dtype=torch.bfloat16
        )
        query, key, value = step(layer, 1, 4)
        mask = (torch.arange(key.shape[2]) > 0)[None, None, None] if case.is_masked else None
        kernels = access_counts.count(
            library, partial(emulation.attend, query, key, value, AttentionOptions(mask=mask))
        )
        del kernels["merge_kernel"]
        found += kernels.values()
    short, long = found
    return Blocks(long - short, HEADS * (LENGTHS[1] - LENGTHS[0]) // 64, layer.records.data.shape[3])


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, measured: dict[str, Any]) -> None:
    case, (kernel, blocks, record_bytes) = ATTENTION[name], measured[f"attention {name}"]
    assert kernel.warps == 0, "other thread blocks"
    copies, lists = kernel.total("cp.async.cg"), kernel.total("ld.global")
    assert copies.bytes == 32 * copies.sectors == record_bytes * blocks
    assert lists.sectors <= case.list_sectors * blocks
    assert kernel.total("st.global").sectors == 0
    everything = kernel.total()
    assert everything.conflicts <= case.conflicts * blocks, kernel.culprits(lambda access: access.conflicts)
    codes = 64 * 2 * case.head_dim * blocks
    assert 32 * everything.times <= case.instructions * codes, kernel.culprits(lambda access: access.times)


# -- other kernels: bytes moved for one that an instruction asks for, and wavefronts for one that is needed


def encode(codes: Codes, is_key: bool) -> Callable[[], object]:
    """256 tokens of a head."""
    layout, end = codes.layout(128, 0, 2)
    records, states = torch.zeros(1, 1, 4, end, dtype=torch.uint8), torch.randn(1, 1, 256, 128).bfloat16()
    return partial(torch.ops.kvcache_emulated.encode_tokens, records, states, is_key, layout, 0)


def encode_levels(is_key: bool) -> Callable[[], object]:
    """128 tokens of eight heads, one number in a hundred an outlier."""
    heads, dim, side = 8, 128, 5
    given = arguments(is_key, heads, dim) | {"states": torch.randn(1, heads, 128, dim).bfloat16(), "start": 0}
    records = given["records"][:1, :, :2].contiguous()
    lists = torch.zeros(1, 2, 128 * side, dtype=torch.int32), torch.zeros(1, 2, heads + 1, dtype=torch.int16)
    names = ("states", "is_key", "layout", "boundaries", "levels")
    extras = ("scale", "offset", "first_plain", "cos", "sin")
    return partial(
        torch.ops.kvcache_emulated.encode_levels,
        records, *lists, *map(given.get, names), side, 0, *map(given.get, extras),
    )  # fmt: skip


def append(codes: Codes) -> Callable[[], object]:
    """A token of six heads, with which a group is complete."""
    due = codes.group_tokens
    case = Case(codes, 1, due, due - 1, 0, 0, head_dim=128)
    return partial(case.run, torch.ops.kvcache_emulated.append_tokens)


def gather(name: str) -> Callable[[], object]:
    layer = packed(GATHERABLE[name], 128)
    sides = [layout.integers() for layout in layouts(layer)]
    slots = some_slots(256).sort().values
    return partial(
        torch.ops.kvcache_emulated.gather_tokens, layer.records.data, blank(layer, 256), slots, *sides
    )


def decode(options: dict[str, Any], is_key: bool) -> Callable[[], object]:
    """256 tokens of a head."""
    layer = build_layer(options, 400, batch_size=1, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    _, key, value = step(layer, 1, 1)
    tokens = key.tokens if is_key else value.tokens
    side = describe(tokens)
    assert side is not None
    given = (tokens.stream.records.data, side.contiguous_rows(), side.extras, None, side.layout.integers())
    return partial(torch.ops.kvcache_emulated.decode_tokens, *given, is_key, 0, 256, torch.bfloat16)


class Moving(NamedTuple):
    """What a kernel may take, as multiples of what it would if nothing were in its way."""

    kernel: str
    prepare: Callable[[], Callable[[], object]]
    reads: float = 1
    writes: float = 1
    shared: float = 1


KEYS, VALUES = True, False
VALUE_GROUPS = Codes(2, channels=32)
# Lanes of a warp take tokens of keys, as their codes lie, so that the numbers they read lie in many rows.
MOVING = {
    "encode int8 keys": Moving("encode_kernel", partial(encode, CODES["int8"], KEYS), reads=2.25),
    "encode 4bit keys": Moving("encode_kernel", partial(encode, CODES["4bit-token"], KEYS), reads=7.7),
    "encode 3bit keys": Moving("encode_kernel", partial(encode, CODES["3bit-token"], KEYS), reads=10.5),
    "encode 2bit g32 keys": Moving(
        "encode_kernel", partial(encode, CODES["2bit-channel-g32"], KEYS), reads=8.1, shared=1.95
    ),
    "encode 4bit g64 keys": Moving(
        "encode_kernel", partial(encode, CODES["4bit-channel-g64"], KEYS), reads=7.7, shared=2
    ),
    "encode int8 values": Moving("encode_kernel", partial(encode, CODES["int8"], VALUES), reads=1.4),
    "encode 4bit values": Moving("encode_kernel", partial(encode, CODES["4bit-token"], VALUES)),
    "encode 3bit values": Moving("encode_kernel", partial(encode, CODES["3bit-token"], VALUES)),
    "encode 2bit g32 values": Moving("encode_kernel", partial(encode, VALUE_GROUPS, VALUES)),
    "encode levels of keys": Moving("level_kernel", partial(encode_levels, KEYS), reads=1.01),
    "encode levels of values": Moving("level_kernel", partial(encode_levels, VALUES), reads=1.25, shared=1.3),
    # metadata of a token go into the records of all heads; entries of a list are few
    "ranges of values": Moving("range_kernel", partial(encode_levels, VALUES), writes=12),
    "outliers of keys": Moving("key_list_kernel", partial(encode_levels, KEYS), reads=1.05, writes=7.5),
    "outliers of values": Moving("value_list_kernel", partial(encode_levels, VALUES), reads=1.6, writes=7.5),
    "search": Moving("search_kernel", partial(encode, CODES["int8"], KEYS)),
    # one token's codes lie in many sectors
    # numbers are read once, without a word too many; words that are completed lie apart
    "append int8": Moving("append_kernel", partial(append, CODES["int8"]), reads=2.05, writes=2.75),
    "append 4bit": Moving("append_kernel", partial(append, CODES["4bit-token"]), reads=2.4, writes=3.4),
    "append 2bit g32": Moving(
        "append_kernel", partial(append, CODES["2bit-channel-g32"]), reads=4.4, shared=1.5
    ),
    "gather int8": Moving("gather_kernel", partial(gather, "int8"), reads=1.6),
    "gather int4": Moving("gather_kernel", partial(gather, "int4"), reads=1.45),
    # numbers of 16 tokens, in rows of an odd length; metadata are loaded once per code
    "decode int8 keys": Moving("decode_kernel", partial(decode, INT8, KEYS)),
    "decode int8 values": Moving("decode_kernel", partial(decode, INT8, VALUES), reads=1.9),
    "decode int4 keys": Moving("decode_kernel", partial(decode, INT4, KEYS), shared=1.5),
    "decode 2bit g32 keys": Moving(
        "decode_kernel", partial(decode, kivi(2, 32), KEYS), reads=4.5, shared=1.5
    ),
}


def move(library: ctypes.CDLL, name: str) -> Kernel:
    torch.manual_seed(0)
    return access_counts.count(library, MOVING[name].prepare())[MOVING[name].kernel]


@pytest.mark.parametrize("name", MOVING)
def test_moving(name: str, measured: dict[str, Any]) -> None:
    case, kernel = MOVING[name], measured[name]
    reads, writes, everything = kernel.total("ld.global"), kernel.total("st.global"), kernel.total()
    wasted = kernel.culprits(lambda access: 32 * access.sectors - access.bytes)
    assert 32 * reads.sectors <= case.reads * reads.bytes, wasted
    assert 32 * writes.sectors <= case.writes * writes.bytes, wasted
    conflicts = kernel.culprits(lambda access: access.conflicts)
    assert everything.wavefronts <= case.shared * everything.least, conflicts


MEASUREMENTS: dict[str, Callable[[ctypes.CDLL], Any]] = {
    **{f"attention {name}": partial(attend, name=name) for name in ATTENTION},
    **{name: partial(move, name=name) for name in MOVING},
}
"""By name; every one is its own, so that they may be taken in any order."""
