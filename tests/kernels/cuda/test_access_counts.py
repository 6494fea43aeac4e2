"""The counters of memory accesses, by programs of one access that is counted by hand."""

from __future__ import annotations

import ctypes
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.kernels import fresh_process
from tests.kernels.cuda import access_counts, ptx_machine
from tests.kernels.cuda.access_counts import Access, Kernel

pytestmark = [ptx_machine.needs_compilers, pytest.mark.in_depth]

START = """
from pathlib import Path
from tests.kernels.cuda import ptx_machine, test_access_counts

library = ptx_machine.load(ptx_machine.build(Path({builds!r})))
test_access_counts.run(library, Path({folder!r}))
"""


class Program(NamedTuple):
    """An access of one warp to 4 KB: of the lanes of a set, lane n at `(n & mask) * stride + offset`."""

    statement: str
    expected: Access
    stride: int = 4
    mask: int = 31
    offset: int = 0
    lanes: int = 0xFFFFFFFF

    def text(self, name: str) -> str:
        """The program, which fills shared memory first."""
        filling = "\n".join(f"st.shared.v4.u32 [%r1+{512 * k}], {{%r0, %r0, %r0, %r0}};" for k in range(8))
        return f"""
            .entry {name}(.param .align 8 .b8 {name}_param_0[8]) .maxntid 32, 1, 1
            {{
            .reg .pred %p<1>;
            .reg .b16 %rs<1>;
            .reg .b32 %r<8>;
            .reg .b64 %rd<3>;
            mov.u32 %r0, %tid.x;
            mul.lo.s32 %r1, %r0, 16;
            add.s32 %r1, %r1, shared;
            {filling}
            bar.warp.sync -1;
            and.b32 %r2, %r0, {self.mask};
            mul.lo.s32 %r2, %r2, {self.stride};
            add.s32 %r2, %r2, {self.offset};
            add.s32 %r3, %r2, shared;
            cvt.u64.u32 %rd0, %r2;
            ld.param.u64 %rd1, [{name}_param_0];
            add.s64 %rd2, %rd0, %rd1;
            mov.u32 %r4, {self.lanes};
            shr.u32 %r4, %r4, %r0;
            and.b32 %r4, %r4, 1;
            setp.ne.u32 %p0, %r4, 0;
            @%p0 {self.statement};
            cp.async.commit_group;
            cp.async.wait_group 0;
            ret;
            }}
            """


STATEMENTS = 3 + 8 + 1 + 7 + 4 + 1 + 3
"""Instructions of a program."""
LOAD, STORE = "ld.shared.u32 %r4, [%r3]", "st.shared.u32 [%r3], %r0"
LOAD_2, LOAD_4 = "ld.shared.v2.u32 {%r4, %r5}, [%r3]", "ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3]"
STORE_2 = "st.shared.v2.u32 [%r3], {%r0, %r0}"
READ, READ_4 = "ld.global.u32 %r4, [%rd2]", "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd2]"
COPY = "cp.async.cg.shared.global [%r3], [%rd2], 16"


def shared(wavefronts: int, least: int) -> Access:
    return Access(1, wavefronts, least)


def sectors(count: int, size: int) -> Access:
    return Access(1, sectors=count, bytes=size)


PROGRAMS = {
    # 4 bytes: a warp at once
    "a word per lane": Program(LOAD, shared(1, 1)),
    "every second word": Program(LOAD, shared(2, 1), stride=8),
    "every third word": Program(LOAD, shared(1, 1), stride=12),
    "one bank": Program(LOAD, shared(32, 1), stride=128),
    "one bank of words from the second on": Program(
        STORE, shared(31, 1), stride=128, offset=128, lanes=0x7FFFFFFF
    ),
    "a padded column": Program(LOAD, shared(1, 1), stride=124),
    "one word for all": Program(LOAD, shared(1, 1), mask=0),
    "one word for four lanes": Program("ld.shared.u8 %rs0, [%r3]", shared(1, 1), stride=1),
    "a bank for four words": Program(STORE, shared(4, 1), stride=16),
    # 8 bytes: half a warp
    "two words per lane": Program(LOAD_2, shared(2, 2), stride=8),
    "every second pair": Program(LOAD_2, shared(4, 2), stride=16),
    "every second pair of half a warp": Program(LOAD_2, shared(2, 1), stride=16, lanes=0xFFFF),
    "pairs shared by lanes that are far": Program(LOAD_2, shared(2, 2), stride=8, mask=15),
    "pairs shared by neighbours": Program(LOAD_2, shared(1, 1), stride=4, mask=30),
    "pairs shared by neighbours but one": Program(LOAD_2, shared(2, 1), stride=8, mask=29),
    "pairs of lanes without neighbours": Program(LOAD_2, shared(1, 1), lanes=0x55555555),
    "one pair for all": Program(LOAD_2, shared(1, 1), mask=0),
    "pairs that are stored": Program(STORE_2, shared(2, 2), stride=8),
    "pairs that neighbours store": Program(
        "st.shared.v2.u32 [%r3], {%r2, %r2}", shared(2, 2), stride=4, mask=30
    ),
    "every fourth pair that is stored": Program(STORE_2, shared(8, 2), stride=32),
    # 16 bytes: a quarter
    "four words per lane": Program(LOAD_4, shared(4, 4), stride=16),
    "every second four": Program(LOAD_4, shared(8, 4), stride=32),
    "four words of a quarter": Program(LOAD_4, shared(1, 1), stride=16, lanes=0xFF),
    "one four for all": Program(LOAD_4, shared(2, 2), mask=0),
    # sectors
    "a row": Program(READ, sectors(4, 128)),
    "a row that is not aligned": Program(READ, sectors(5, 128), offset=4),
    "a row from its second word on": Program("ld.global.u32 %r4, [%rd2+4]", sectors(5, 128)),
    "a word of every sector": Program(READ, sectors(32, 128), stride=32),
    "one number for all": Program(READ, sectors(1, 4), mask=0),
    "bytes": Program("ld.global.u8 %rs0, [%rd2]", sectors(1, 32), stride=1),
    "bytes across an edge": Program("ld.global.u8 %rs0, [%rd2]", sectors(2, 32), stride=1, offset=31),
    "a few lanes": Program(READ, sectors(1, 12), lanes=0b111),
    "rows of 16 bytes": Program(READ_4, sectors(16, 512), stride=16),
    "halves of sectors": Program(READ_4, sectors(32, 512), stride=32),
    "what is written": Program("st.global.u32 [%rd2], %r0", sectors(8, 128), stride=8),
    # from global to shared memory
    "a copy": Program(COPY, Access(1, 4, 4, 16, 512), stride=16),
    "a copy of halves": Program(COPY, Access(1, 8, 4, 32, 512), stride=32),
    "a copy of a few": Program(COPY, Access(1, 1, 1, 3, 80), stride=16, offset=16, lanes=0b11111),
}


def run(library: ctypes.CDLL, folder: Path) -> None:
    """Run all programs; leave what they did in the folder."""
    listing = folder / "programs.ptx"
    texts = [program.text(f"program{i}") for i, program in enumerate(PROGRAMS.values())]
    listing.write_text("\n".join([".extern .shared .align 128 .b8 shared[];", *texts]))
    ptx_machine.read(library, listing)
    memory = torch.zeros(4096, dtype=torch.uint8)

    def launch() -> None:
        for i in range(len(PROGRAMS)):
            ptx_machine.launch(library, f"program{i}", memory)

    counted = access_counts.count(library, launch)
    kernels = {name: counted[f"program{i}"] for i, name in enumerate(PROGRAMS)}
    (folder / "counts").write_bytes(pickle.dumps(kernels))


@pytest.fixture(scope="module")
def kernels(builds: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """What the programs did, by name."""
    ptx_machine.build(builds)  # here, where it may take its time
    folder = tmp_path_factory.mktemp("programs")
    done = fresh_process.run(START.format(builds=str(builds), folder=str(folder)))
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "counts").read_bytes())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, kernels: dict[str, Kernel]) -> None:
    program, kernel = PROGRAMS[name], kernels[name]
    assert kernel.warps == 1 and kernel.total().times == STATEMENTS
    assert kernel.total("st.shared.v4") == Access(8, 32, 32)
    (got,) = (
        access for place, access in kernel.instructions.items() if f"@%p0 {program.statement}`" in place
    )
    assert got == program.expected


def test_what_two_kernels_differ_by() -> None:
    long = Kernel(3, {"`ret`": Access(5), "`bra`": Access(2, 1)})
    assert (long - Kernel(1, {"`ret`": Access(4)})) == Kernel(2, {"`ret`": Access(1), "`bra`": Access(2, 1)})
