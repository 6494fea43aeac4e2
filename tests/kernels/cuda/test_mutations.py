"""The emulated tests can fail: kernels broken on purpose give wrong answers, or end the emulation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda import emulation

WEIGHTS = "0x7632)};\n    }"
BARRIER = "    warp_barrier();  // every"
# What is broken: file, text, replacement.
MUTATIONS = {
    "a tile of the keys": ("fast_lanes.cuh", "bits = word >> (k / 2 * 8);", "bits = word;"),
    "the tokens of the weights": ("fast_attention.cuh", WEIGHTS, WEIGHTS.replace("7632", "5410")),
    "a unit used before it is there": ("fast_attention.cuh", "copy_wait<1>();", "copy_wait<2>();"),
    "a missing barrier": ("fast_attention.cuh", BARRIER, "    if (unit > 0) warp_barrier();  // every"),
    "a scale per channel": ("fast_keys.cuh", "low, high, 0x7632)};", "low, high, 0x5410)};"),
    "the order of rotations": ("fast_keys.cuh", "unit.phase + 16 * k", "unit.phase"),
    "a place of the codes": ("code_places.h", "(4 * (pair % parts) + token / 16)", "(4 * (pair % parts))"),
}
SCRIPT = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {root!r})
from tests.kernels.cuda import emulation
from tests.kernels.test_decode_attention import CASES, build_layer, step
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.testing.comparison import relative_rms

emulation.load(Path({library!r}))
worst = 0.0
for name in ("kivi-default", "kivi-2bit-block", "kivi-4bit-block-g128"):
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        layer = build_layer(CASES[name], 600, dtype=dtype, head_dim=128)
        query, key, value = step(layer, 1, 4)
        got = emulation.attend(query, key, value, AttentionOptions())
        expected = attend(query.double(), key.tokens, value.tokens, AttentionOptions())
        error = float(relative_rms(expected, got))
        worst = max(worst, error if error == error else 1e9)
print(worst)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.usefixtures("emulated")
def test_a_broken_kernel_is_caught(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file, text, replacement = MUTATIONS[name]
    sources = Path(shutil.copytree(emulation.SOURCES, tmp_path / "sources"))
    content = (sources / file).read_text()
    assert content.count(text) == 1, f"{file} has changed"
    (sources / file).write_text(content.replace(text, replacement))
    for path in request.config.cache.mkdir("emulated_cuda").glob("*_binding-*.o"):  # the slow half of a build
        shutil.copy(path, tmp_path)
    library = emulation.build(sources, tmp_path)
    code = SCRIPT.format(root=str(Path(__file__).parents[3]), library=str(library))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 or float(done.stdout) > 1e-2
