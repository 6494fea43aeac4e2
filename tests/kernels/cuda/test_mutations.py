"""The emulated tests can fail: kernels broken on purpose give wrong answers, or end the emulation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels import fresh_process
from tests.kernels.cuda import emulation

pytestmark = pytest.mark.in_depth

WEIGHTS = "0x7632)};\n    }"
WAIT = "      copy_wait<0>();\n    } else"
BARRIER = "    warp_barrier();  // every lane's copies"
KEYS, VALUES = "16 * (first + k) + 2 * g + i", "16 * k + 4 * t + i"
# What is broken: file, text, replacement.
MUTATIONS = {
    "a tile of the keys": ("fast_lanes.cuh", "bits = word >> (k / 2 * 8);", "bits = word;"),
    "the tokens of the weights": ("warp_state.cuh", WEIGHTS, WEIGHTS.replace("7632", "5410")),
    "a unit used before it is there": ("unit_ring.cuh", WAIT, WAIT.replace("0", "1")),
    "a missing barrier": ("unit_ring.cuh", BARRIER, BARRIER.replace("warp", "if (used_ > 0) warp")),
    "the slot of an exact key": ("exact_tokens.cuh", KEYS, KEYS.replace("+ i", "+ 1 - i")),
    "the slot of an exact value": ("exact_tokens.cuh", VALUES, VALUES.replace("+ i", "")),
    "sums put aside": ("exact_attention.cuh", "take_back<kTiles>(aside)", "take_back<kTiles>(aside + 1)"),
    "a half of a pair of weights": (
        "exact_tokens.cuh",
        "const float even = half_low(pair)",
        "const float even = 0",
    ),
    "sums of smaller logits": ("warp_state.cuh", "total[n][column] *= decay[column];", ""),
    "a pair of channels": ("scaled_keys.cuh", "first(row + 8 * t)", "first(row + 8 * (t ^ 1))"),
    "a scale per channel": ("key_units.cuh", "0x7654u : 0x7632u", "0x7654u : 0x5410u"),
    "the order of rotations": ("rotated_keys.cuh", "unit.phase + 16 * k", "unit.phase"),
    "the upper levels": ("level_codes.cuh", "and_or(word >> 1, 0x44444444u, 0x32103210u)", "0x32103210u"),
    "the turn of an odd distance": ("level_attention.cuh", "(2 * distance + 1)", "(2 * (distance & ~1) + 1)"),
    "the mirrored rows": ("level_keys.cuh", "return tile < 2 ? 1 : 0;", "return 0;"),
    "the sign of a mirrored sine": (
        "level_keys.cuh",
        "tile < 2 ? half2_negate(high_twice(turn))",
        "tile < 2 ? high_twice(turn)",
    ),
    "sinks in their block": (
        "level_attention.cuh",
        "hide_sinks(HiddenSinks(a, rows.batch, block), products);",
        ";",
    ),
    "what a patch of keys leaves": ("level_keys.cuh", "entry.patch >> 1 == which", "false"),
    "the place of an outlying value": ("level_values.cuh", "(token << 1 & 2)", "0"),
    "the first new token": ("encoding.cuh", "slot >= a.newer_start", "slot > a.newer_start"),
    "the words of an odd token": ("encode_words.cuh", "thin_out(2, low % 2)", "thin_out(2, 0)"),
    "the lanes of a key": ("encode_words.cuh", "first_ = 2 * low, wrap_ = 31", "first_ = 0, wrap_ = 31"),
    "a list that is too short": ("largest.cuh", "bisect(wanted + 1, [&]", "bisect(wanted / 2, [&]"),
    "the last of equal numbers": (
        "level_encoding.cuh",
        "kPlaceBits) - 1 - i)",
        "kPlaceBits) - 1 - (i ^ 31))",
    ),
    "the least numbers of a token": ("level_encoding.cuh", "ordered(x) ^ flip", "ordered(x)"),
    "a boundary": ("level_encoding.cuh", "u <= boundaries", "u < boundaries"),
    "a head's first outlier": ("encode_levels.cu", "lane < warp ? found : 0", "lane <= warp ? found : 0"),
    "a place of the codes": ("decode_words.cuh", "16 * upper + low * k", "16 * upper"),
}
START = """
import torch
from pathlib import Path
from tests.kernels.cuda import emulation

emulation.load(Path({library!r}))
unit = {unit!r}  # the only one that is broken, if any is
"""
ATTENTION = """
from tests.kernels.decode_cases import CASES, build_layer, step
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.testing.comparison import relative_rms

worst = 0.0
known = {"backend": "kivi", "nbits": 2}
levels = {"backend": "kvquant", "nbits": 4, "calibration": "normal_float", "sink_length": 5}
levels["outlier_fraction"] = 0.05
cases = ["kivi-default", "kivi-2bit-block", "kivi-4bit-block-g128", "kvquant-k4v2", known, levels]
cases.sort(key=lambda case: case is not {"attend_kivi_2": known, "attend_kvquant_4": levels}.get(unit))
others = [torch.float32 if isinstance(case, str) else torch.bfloat16 for case in cases]
halves = [torch.float16] * len(cases)
for case, dtype in [pair for pairs in zip(zip(cases, halves), zip(cases, others)) for pair in pairs]:
    torch.manual_seed(0)
    options = CASES[case] if isinstance(case, str) else case
    length = 1500 if case is known else 600  # of which warps that read exact tokens have read others, too
    layer = build_layer(options, length, dtype=dtype, head_dim=128)
    query, key, value = step(layer, 1, 4)
    got = emulation.attend(query, key, value, AttentionOptions())
    expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
    error = float(relative_rms(expected, got))
    worst = max(worst, error if error == error else 1e9)
    if worst > 1e-2:
        break  # one wrong answer is enough
print(worst)
"""
STEPS = """
from kvcache_plugins.kernels import loader
from tests.kernels.append_cases import CODES, Case, due_cases

loader.build()
emulated, native = torch.ops.kvcache_emulated, torch.ops.kvcache_plugins
wrong = 0
for name in ("4bit-token", "2bit-channel-g32"):
    for place in due_cases(CODES[name], 3):
        case = Case(CODES[name], 3, *place)
        _, records, _ = case.run(emulated.append_tokens)
        wrong += not torch.equal(records, case.expected(native.encode_tokens)[1])
print(wrong)
"""


LEVELS = """
from tests.kernels.cuda import test_emulated_level_encoding as levels
from kvcache_plugins.kernels import loader

loader.build()
wrong = 0
for is_key in (True, False):
    # few different numbers, some of them boundaries
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(-3, 4, (2, 2, 128, 32), generator=generator) / 2
    boundaries = torch.tensor([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5])
    for changed in ({}, {"states": numbers, "boundaries": boundaries, "cos": None, "sin": None}):
        try:
            levels.compare(is_key, 2, 32, 3, **changed)
        except AssertionError:
            wrong += 1
print(wrong)
"""
SCRIPTS = {"append_tokens": STEPS, "encode_levels": LEVELS}


def unit_of(file: str) -> str:
    """The only unit that is compiled with a broken header: one whose kernels use it."""
    units = dict.fromkeys(("encode_levels", "level_encoding", "largest"), "encode_levels")
    units |= {
        "exact": "attend_kivi_2",
        "enc": "append_tokens",
        "level": "attend_kvquant_4",
        "decode": "attend_general",
    }
    return next((unit for start, unit in units.items() if file.startswith(start)), "attend_8_rows")


@pytest.mark.usefixtures("emulated")
def test_kernels_that_are_not_broken(tmp_path: Path, builds: Path) -> None:
    """Compiled as the broken ones are, they give the right answers."""
    units = {unit_of(file) for file, *_ in MUTATIONS.values()}
    library = emulation.build_changed(emulation.SOURCES, units, tmp_path, builds)
    start = START.format(library=str(library), unit=None)
    for done in fresh_process.run_together([start + script for script in (ATTENTION, STEPS, LEVELS)]):
        assert done.returncode == 0 and float(done.stdout) <= 1e-2, done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.usefixtures("emulated")
def test_a_broken_kernel_is_caught(name: str, tmp_path: Path, builds: Path) -> None:
    file, text, replacement = MUTATIONS[name]
    sources = Path(shutil.copytree(emulation.SOURCES, tmp_path / "sources"))
    content = (sources / file).read_text()
    assert content.count(text) == 1, f"{file} has changed"
    (sources / file).write_text(content.replace(text, replacement))
    unit = unit_of(file)
    library = emulation.build_changed(sources, [unit], tmp_path, builds)
    script = SCRIPTS.get(unit, ATTENTION)
    done = fresh_process.run(START.format(library=str(library), unit=unit) + script)
    assert done.returncode != 0 or float(done.stdout) > 1e-2
