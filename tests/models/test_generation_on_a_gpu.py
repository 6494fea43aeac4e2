"""`generate()` on a GPU: the tokens of the CPU, by the CUDA kernels alone, however it drives a cache.

In fp32, where codes and logits agree to about 1e-6, and with a trained model: other tokens would take a tie,
which random weights have many of. So do key norms, of tokens that come twice; `keydiff` judges keys by where
they are too.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcache_plugins.building import build_cache
from kvcache_plugins.cache import KVCache
from kvcache_plugins.errors import KernelUnavailableError, UnsupportedOperationError
from kvcache_plugins.estimation import estimate
from kvcache_plugins.kernels import cuda_loader, loader
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.generation import SCENARIOS, padded_prompt, run_scenario
from kvcache_plugins.testing.models import tiny_model
from tests.models.encoders import decoded, encoder_decoder, source, target
from tests.models.families import small_model

pytestmark = pytest.mark.cuda

CACHES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "int4-k8": {"backend": "int4", "key_bits": 8},
    "float8": {"backend": "float8"},
    "kivi-4bit": {"backend": "kivi", "q_group_size": 32, "residual_length": 32},
    "kivi-2bit-block": {
        "backend": "kivi",
        "nbits": 2,
        "q_group_size": 32,
        "residual_length": 32,
        "rope_mode": "block",
    },
    "kvquant": {"backend": "kvquant", "nbits": 3, "calibration": "normal_float"},
    "keydiff-int8": {
        "backend": "keydiff",
        "budget": 96,
        "storage": {"backend": "int8"},
        "residual_length": 16,
    },
    "keydiff-dense": {"backend": "keydiff", "budget": 96},
    "streaming-int4": {"backend": "streaming_llm", "budget": 96, "storage": {"backend": "int4"}},
    "streaming-kvquant": {
        "backend": "streaming_llm",
        "budget": 160,
        "positions": "compact",
        "storage": {"backend": "kvquant", "calibration": "normal_float"},
        "residual_length": 16,
        "evict_at_decode": True,
    },
}
LENGTHS = (180, 140)
"""Several packed blocks, and some left over."""


@pytest.fixture(scope="module", autouse=True)
def kernels(cuda_kernels: None) -> None:
    pass


BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two layers of the bundled model on the CPU and on the GPU."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model, copy.deepcopy(model).cuda()


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "sample" not in name])
@pytest.mark.parametrize("name", CACHES)
def test_tokens_are_those_of_the_cpu(
    name: str, scenario: str, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    expected = run_scenario(models[0], scenario, cache_config=CACHES[name], lengths=LENGTHS)
    got = run_scenario(models[1], scenario, cache_config=CACHES[name], lengths=LENGTHS)
    assert got.is_cuda
    assert torch.equal(got.cpu(), expected)


def _generated(model: PreTrainedModel, cache_config: dict[str, Any]) -> tuple[torch.Tensor, KVCache]:
    cache = build_cache(model, cache_config)
    return _continued(model, cache), cache


def _continued(model: PreTrainedModel, cache: KVCache) -> torch.Tensor:
    inputs = {name: tensor.to(model.device) for name, tensor in padded_prompt(LENGTHS).items()}
    return model.generate(**inputs, **as_argument(cache), do_sample=False, max_new_tokens=40)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("name", CACHES)
def test_nothing_is_read_but_by_the_kernels(
    name: str, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    tokens, cache = _generated(models[1], CACHES[name])
    report = cache.report()
    assert tokens.is_cuda
    assert report.fallback_reads == 0
    assert set(report.kernel) == ({"dense"} if name.endswith("dense") else {"cuda"}), report.kernel_reasons


@pytest.mark.parametrize("name", ["int8", "kivi-2bit-block", "kvquant"])
def test_attention_weights_are_those_of_the_cpu(
    name: str, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    """Which the model's `eager` function computes: it multiplies with keys and values itself."""
    found = []
    for model in models:
        own = copy.deepcopy(model)
        own.set_attn_implementation("eager")
        cache = build_cache(own, CACHES[name])
        text = padded_prompt((240,))["input_ids"].to(own.device)
        with torch.no_grad():
            own(text, **as_argument(cache))
            step = own(text[:, :1], **as_argument(cache), output_attentions=True)
        report = cache.report()
        assert set(report.kernel) == {own.device.type}, report.kernel_reasons
        assert report.fallback_reads == 0
        found.append([step.logits.cpu(), *(weights.cpu() for weights in step.attentions)])
    # one code moves a weight by more than sums in another order do
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["int8", "kivi-2bit-block", "kvquant", "keydiff-int8"])
def test_latents_are_decoded_by_the_kernels(name: str) -> None:
    model = small_model("minicpm3")
    tokens, cache = _generated(copy.deepcopy(model).cuda(), CACHES[name])
    report = cache.report()
    assert (set(report.kernel), report.fallback_reads) == ({"cuda"}, 0)
    assert torch.equal(tokens.cpu(), _generated(model, CACHES[name])[0])


@pytest.mark.parametrize("architecture", ["bart", "t5", "t5gemma2"])
@pytest.mark.parametrize("name", ["int8", "kivi-2bit-block", "kvquant"])
def test_both_halves_are_read_by_the_kernels(
    name: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps over 150 tokens of an encoder and 78 of text, whose logits are those of the CPU.

    Over the same records: of numbers that differ by 1e-6 a few are encoded as the next code, and one code
    moves logits of these models by up to 6e-3.
    """
    model, given, tokens = encoder_decoder(architecture), source(architecture), target(78)
    logits, written, differing = [], [], []
    update = PackedLayer.update

    def update_alike(layer: PackedLayer, *args: Any, **kwargs: Any) -> Any:
        read, own = update(layer, *args, **kwargs), layer.tensors()
        if layer.device.type == "cpu":
            written.append({part: tensor.clone() for part, tensor in own.items()})
            return read
        expected = written.pop(0)
        differing.append((own["records"].cpu() != expected["records"]).float().mean())
        for part, tensor in own.items():
            tensor.copy_(expected[part])
        return read

    monkeypatch.setattr(PackedLayer, "update", update_alike)
    for device in ("cpu", "cuda"):
        placed = {key: tensor.to(device) for key, tensor in given.items()}
        own = copy.deepcopy(model).to(device)
        cache = build_cache(own, CACHES[name]).bind(own, encoder_attention_mask=placed["attention_mask"])
        logits.append(decoded(own, placed, cache, tokens.to(device), [70, 1, 1, 5, 1]).cpu())
        report = cache.report()
        assert report.fallback_reads == 0
        assert set(report.cross_attention.kernel) == {device}
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
    # 1 % of the bytes where states differ by 1e-6, and 5 % where they differ by 2e-3
    assert not written and torch.stack(differing).nan_to_num().max() < 0.02


@pytest.fixture
def no_cpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no C++ compiler that the CPU kernels could be built with."""
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", "no C++ compiler was found.")


@pytest.mark.usefixtures("no_cpu_library")
@pytest.mark.parametrize("is_known", [True, False], ids=["model", "configuration"])
def test_native_kernels_are_those_of_the_gpu(
    is_known: bool, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    on_cpu, on_gpu = models
    options = CACHES["int8"] | {"kernel": "native"}
    cache = build_cache(on_gpu if is_known else on_gpu.config, options)
    assert set(cache.report().kernel) == {"cuda" if is_known else "torch"}, "before anything was read"
    tokens, _ = _generated(on_gpu, CACHES["int8"])
    assert torch.equal(_continued(on_gpu, cache), tokens)
    assert set(cache.report().kernel) == {"cuda"}
    with pytest.raises(KernelUnavailableError, match=r"kernel='native' was given.*no C\+\+ compiler"):
        build_cache(on_cpu, options)


def test_no_native_kernels_on_the_gpu(
    models: tuple[PreTrainedModel, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is read; the CPU has its own."""
    monkeypatch.setattr(cuda_loader, "_checked", set())
    monkeypatch.setattr(cuda_loader, "_faults", {0: "the kernels failed their check on cuda:0: 2 bit"})
    options = CACHES["int8"] | {"kernel": "native"}
    said = "kernel='native' was given.*'int8'.*kernel='auto' and kernel='torch'.*failed their check on cuda:0"
    for given in (models[1], models[1].config):
        with pytest.raises(KernelUnavailableError, match=said):
            build_cache(given, options).bind(models[1])
    _, cache = _generated(models[0], options)
    assert set(cache.report().kernel) == {"cpu"}


OFFLOADED = ("int8", "kivi-2bit-block", "kvquant")


@pytest.fixture(scope="module")
def deeper() -> PreTrainedModel:
    """On the GPU, with more layers than lie there at once."""
    return tiny_model("llama", num_hidden_layers=5).cuda()


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "sample" not in name])
@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_tokens_are_those_of_a_cache_that_stays(
    name: str, scenario: str, deeper: PreTrainedModel
) -> None:
    expected = run_scenario(deeper, scenario, cache_config=CACHES[name], lengths=LENGTHS)
    offloaded = CACHES[name] | {"offload": True}
    assert torch.equal(run_scenario(deeper, scenario, cache_config=offloaded, lengths=LENGTHS), expected)


@pytest.mark.parametrize("name", OFFLOADED)
def test_an_offloaded_cache_is_copied_saved_and_continued(
    name: str, deeper: PreTrainedModel, tmp_path: Path
) -> None:
    tokens, cache = _generated(deeper, CACHES[name] | {"offload": True})
    plain, plain_cache = _generated(deeper, CACHES[name])
    assert torch.equal(tokens, plain)
    cache.save_pretrained(tmp_path)
    loaded = KVCache.from_pretrained(tmp_path, deeper)
    expected = _next_turn(deeper, plain_cache, plain)
    for other in (copy.deepcopy(cache), loaded, cache):
        assert torch.equal(_next_turn(deeper, other, tokens), expected)
        assert set(other.report().kernel) == {"cuda"}
        assert other.report().fallback_reads == 0


def _next_turn(model: PreTrainedModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    inputs = {name: tensor.to(model.device) for name, tensor in padded_prompt(LENGTHS).items()}
    rows = torch.cat([tokens, tokens[:, :7]], dim=1)
    mask = torch.ones_like(rows)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    return model.generate(  # type: ignore[operator, no-any-return]
        rows, attention_mask=mask, **as_argument(cache), do_sample=False, max_new_tokens=12
    )


def _warm_up(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """See to it that the workspaces of the libraries, which stay, are there before anything is counted."""
    model.generate(ids, **as_argument(build_cache(model, CACHES["int8"])), max_new_tokens=2)
    gc.collect()


def test_what_an_offloaded_cache_has_on_the_gpu_is_counted_and_given_back(deeper: PreTrainedModel) -> None:
    ids = torch.randint(5, 100, (4, 700), generator=torch.Generator().manual_seed(0), device="cpu").cuda()
    _warm_up(deeper, ids)
    cache = build_cache(deeper, CACHES["int8"] | {"offload": True})
    before = torch.cuda.memory_allocated()

    def on_gpu() -> int:
        report = cache.report()
        on_gpu = report.kv_bytes - (report.host_bytes or 0)
        storages = [tensor.untyped_storage() for tensor in cache._tensors() if tensor.is_cuda]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}.values()
        assert sum(sizes) == on_gpu
        # torch's allocator takes whole units of 512 bytes; the newest key of one row, in both heads, has 128
        assert torch.cuda.memory_allocated() - before == sum(-(-size // 512) * 512 for size in sizes)
        return on_gpu

    with torch.no_grad():
        deeper(ids, **as_argument(cache), logits_to_keep=1)
        deeper(ids[:, :1], **as_argument(cache))
        of_four = on_gpu()
        cache.reorder_cache(torch.tensor([3, 2, 1, 0], device="cuda"))
        on_gpu()
        cache.batch_select_indices(torch.tensor([2], device="cuda"))
        on_gpu()
        for _ in range(2):
            deeper(ids[:1, :1], **as_argument(cache))
    assert on_gpu() == pytest.approx(of_four / 4, rel=0.1)
    for layer in cache.layers:
        layer.offload()
    assert on_gpu() == 0 and torch.cuda.memory_allocated() == before
    cache.reset()
    assert torch.cuda.memory_allocated() == before
    assert cache.kv_bytes() == 0


def test_an_offloaded_cache_leaves_the_gpu(deeper: PreTrainedModel) -> None:
    ids = torch.randint(5, 100, (2, 2500), generator=torch.Generator().manual_seed(0), device="cpu").cuda()
    taken, tokens, reports = [], [], []
    _warm_up(deeper, ids)
    for offload in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        cache = build_cache(deeper, {"backend": "int8", "offload": offload})
        tokens.append(deeper.generate(ids, **as_argument(cache), do_sample=False, max_new_tokens=4))
        gc.collect()
        taken.append(torch.cuda.memory_allocated() - before - tokens[-1].nbytes)
        reports.append(cache.report())
        del cache
    assert torch.equal(*tokens)
    assert reports[0].host_bytes is None
    assert reports[1].host_bytes == pytest.approx(reports[0].kv_bytes, rel=0.01)
    # two of five layers, and the few blocks that the host lacks
    assert taken[0] == pytest.approx(reports[0].kv_bytes, rel=0.05)
    assert taken[1] == pytest.approx(0.4 * taken[0], rel=0.1)
    assert reports[1].kv_bytes - reports[1].host_bytes == pytest.approx(taken[1], rel=0.05)
    for offload in (False, True):
        expected = estimate(deeper, {"backend": "int8", "offload": offload}, 2503, 2, max_cache_length=2504)
        assert reports[offload].kv_bytes == pytest.approx(expected, rel=0.02)


def test_a_layer_that_is_packed_alone_stays_and_is_estimated_so() -> None:
    model = tiny_model("llama", num_hidden_layers=1).cuda()
    cache_config = {"backend": "int8", "offload": True}
    _, cache = _generated(model, cache_config)
    report = cache.report()
    assert report.host_bytes == 0
    held = LENGTHS[0] + 39  # the last token is never fed back
    expected = estimate(model, cache_config, held, len(LENGTHS), max_cache_length=held + 1)
    assert report.kv_bytes == pytest.approx(expected, rel=0.02)


def test_layers_that_take_turns_are_not_recorded(deeper: PreTrainedModel) -> None:
    tokens, cache = _generated(deeper, CACHES["int8"] | {"offload": True})
    _, plain = _generated(deeper, CACHES["int8"])
    first, said = (
        cache.packed_layers[0],
        r"offload=True: a CUDA graph cannot record.* Allowed is offload=False",
    )
    with pytest.raises(UnsupportedOperationError, match=said), torch.cuda.graph(torch.cuda.CUDAGraph()):
        _ = first.records.data
    assert torch.equal(_next_turn(deeper, cache, tokens), _next_turn(deeper, plain, tokens))
