"""Tests of the emulated GPU pass on the PTX that nvcc makes of the kernels; PTX that is broken is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcache_plugins.kernels.cuda_toolkit import find_toolkit
from tests.kernels import fresh_process
from tests.kernels.cuda import plugged, ptx_machine

pytestmark = [ptx_machine.needs_compilers, pytest.mark.in_depth]
TESTS = [f"tests/kernels/cuda/test_emulated_{what}.py" for what in ("attention", "levels", "magnitudes")]
TESTS += [f"tests/kernels/cuda/test_emulated_{what}.py" for what in ("append", "level_encoding", "tokens")]

START = """
from pathlib import Path
from tests.kernels.cuda import ptx_machine, test_ptx

library = ptx_machine.load(ptx_machine.build(Path({folder!r})))
ptx_machine.read(library, Path({listing!r}))
test_ptx.CHECKS[{unit!r}]()
"""


class Mutation(NamedTuple):
    """What is broken in the PTX of a unit, wherever it matches; what finds it; and what is said then."""

    unit: str
    pattern: str
    replacement: str
    said: str


WRONG = "wrong numbers"
REGISTER = r"(%[a-z]+\d+)"
MMA = r"(mma\S+ \{.*\}, \{)" + ", ".join([REGISTER] * 4) + r"(\}, \{.*\}, \{.*\};)"
# A predicate that holds in some lanes, for an instruction that all must reach.
PARTED = r"mov.u32 %r99999, %tid.x; setp.gt.u32 %p99999, %r99999, 4; @%p99999 \g<0>"
MUTATIONS = {
    "fragments of a product": Mutation("attend_8_rows", MMA, r"\1\2, \4, \3, \5\6", WRONG),
    "fragments of exact values": Mutation(
        "attend_kivi_2", MMA.replace("mma", r"mma\S+bf16"), r"\1\2, \4, \3, \5\6", WRONG
    ),
    "a choice of bytes": Mutation("attend_8_rows", r"(mov\.u32\s+%r\d+), 30258;", r"\1, 21554;", WRONG),
    "a table of bits": Mutation("attend_8_rows", r"(lop3\.b32 .*), 0xEA;", r"\1, 0xF8;", WRONG),
    "halves of a pair": Mutation(
        "attend_8_rows",
        rf"(cvt\.rn\.f16x2\.f32) {REGISTER}, {REGISTER}, {REGISTER};",
        r"\1 \2, \4, \3;",
        WRONG,
    ),
    "a copy not waited for": Mutation(
        "attend_8_rows", "cp.async.wait_group [01]", "cp.async.wait_group 2", r"to which thread \d+ copies"
    ),
    "a barrier of a warp": Mutation(
        "attend_8_rows", r"bar\.warp\.sync\s+-1;", "", "no barrier after|nobody has written"
    ),
    "a barrier of a block": Mutation(
        "append_tokens", r"bar\.sync\s+0;", "", "no barrier after|nobody has written"
    ),
    "an address of two words": Mutation(
        "attend_8_rows", r"(ld\.shared\.v2\.u32 .*, \[%r\d+)(\+\d+)?\]", r"\1+1]", "is not aligned to 8"
    ),
    "an address of two bytes": Mutation("append_tokens", r"(st\.global\.u16\s+\[%rd\d+)\]", r"\1+2]", WRONG),
    "an address of a tensor": Mutation(
        "append_tokens", r"(ld\.global\.u16\s+%rs\d+, \[%rd\d+)\]", r"\1+262144]", "outside of all tensors"
    ),
    "a parameter": Mutation(
        "attend_8_rows", r"(ld\.param\.u64\s+%rd\d+, \[%rd\d+\+)\d+\]", r"\g<1>8192]", "no parameter at"
    ),
    "a register": Mutation(
        "attend_8_rows", r"mov\.f32\s+%f\d+, 0f00000000;", "", "uses a register that has not been set"
    ),
    "who takes part": Mutation(
        "attend_8_rows", r"(shfl\.sync\.bfly.*), (%r\d+), %r\d+;", r"\1, \2, \2;", "0000001f are to take part"
    ),
    "lanes at a barrier": Mutation(
        "attend_8_rows", r"bar\.warp\.sync\s+-1;", PARTED, "missing at a barrier: ffffffe0"
    ),
    "lanes at a transpose": Mutation(
        "attend_8_rows", r"movmatrix.*;", PARTED, "missing where all must come: ffffffe0"
    ),
    "the kernel before": Mutation(
        "append_tokens", r"griddepcontrol\.wait;", "", "not to be done before the kernel before this one"
    ),
    "the kernel before attention": Mutation(
        "attend_kivi_2", r"griddepcontrol\.wait;", "", "not to be done before the kernel before this one"
    ),
    "a run that is asked for": Mutation(
        "attend_kivi_2", r"(prefetch\.L2\.global \[.*\]), .*;", r"\1, 268435456;", "outside of all tensors"
    ),
    "an instruction": Mutation(
        "attend_8_rows", r"mul\.rn\.f16x2", "mul.rz.f16x2", "an unknown instruction mul.rz.f16x2"
    ),
}


@pytest.mark.begun_first
def test_the_tests_of_the_emulated_gpu(builds: Path) -> None:
    """In a process of their own, with a few parameter sets of every test."""
    environment = {ptx_machine.FOLDER: str(builds), "KVCACHE_SIMULATION_MOST": "5"}
    printed = plugged.run(ptx_machine.__name__, TESTS, environment, least=235)
    assert f"{ptx_machine.NEVER_LAUNCHED}[]" in printed


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str, builds: Path, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    intact = ptx_machine.build(builds).listings[mutation.unit]
    text, count = re.subn(mutation.pattern, mutation.replacement, intact.read_text())
    toolkit = find_toolkit()
    if count == 0 and toolkit is not None and "release 13." not in toolkit.release:
        pytest.skip(f"{toolkit.release} writes something else")
    assert count > 0, "the PTX has changed"
    broken = tmp_path / f"{mutation.unit}.ptx"
    broken.write_text(text)
    scripts = [
        START.format(folder=str(builds), listing=str(of), unit=mutation.unit) for of in (intact, broken)
    ]
    right, wrong = fresh_process.run_together(scripts)
    assert right.returncode == 0, right.stderr
    assert wrong.returncode != 0 and re.search(mutation.said, wrong.stderr), wrong.stderr


def check_attention() -> None:
    """Attention to keys of 2 and 4 bits, which the kernel for few query rows does, against torch."""
    import torch

    from kvcache_plugins.attention.reference import AttentionOptions, attend
    from kvcache_plugins.testing.comparison import relative_rms
    from tests.kernels.cuda import emulation
    from tests.kernels.decode_cases import CASES, build_layer, step

    for name in ("kivi-2bit-block", "kivi-default"):
        torch.manual_seed(0)
        layer = build_layer(CASES[name], 600, dtype=torch.float16)  # of 128 channels another kernel would
        query, key, value = step(layer, 1, 4)
        got = emulation.attend(query, key, value, AttentionOptions())
        expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
        assert relative_rms(expected, got) <= 2.5e-3, WRONG


def check_a_format() -> None:
    """Attention to packed keys and exact values, which the kernel of a format does, against torch."""
    import torch

    from kvcache_plugins.attention.reference import AttentionOptions, attend
    from kvcache_plugins.testing.comparison import relative_rms
    from tests.kernels.cuda import emulation
    from tests.kernels.decode_cases import build_layer, step

    layer = build_layer({"backend": "kivi", "nbits": 2}, 300, dtype=torch.bfloat16, head_dim=128)
    query, key, value = step(layer, 1, 4)
    got = emulation.attend(query, key, value, AttentionOptions())
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    assert relative_rms(expected, got) <= 3e-3, WRONG


def check_a_step() -> None:
    """New tokens into the tails and a block, against the kernel for CPUs."""
    import torch

    from kvcache_plugins.kernels import loader
    from tests.kernels.append_cases import CODES, Case, due_cases

    loader.build()
    for name in ("4bit-token", "2bit-channel-g32"):
        for place in due_cases(CODES[name], 3):
            case = Case(CODES[name], 3, *place)
            _, records, _ = case.run(torch.ops.kvcache_emulated.append_tokens)
            assert torch.equal(records, case.expected(torch.ops.kvcache_plugins.encode_tokens)[1]), WRONG


# By the unit whose kernels are run.
CHECKS = {"attend_8_rows": check_attention, "attend_kivi_2": check_a_format, "append_tokens": check_a_step}
