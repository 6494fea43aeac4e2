"""`torch.compile`: a compiled model generates the same, in a graph that serves all lengths and all caches."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, fx, nn
from transformers import CompileConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_plugins import KVCache, build_cache
from kvcache_plugins.attention import compiled as attention_compiled
from kvcache_plugins.attention import unpacked
from kvcache_plugins.compilation import makes_graph
from kvcache_plugins.layers.compiled import CompiledHandle, LayerUpdate
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing.models import tiny_model
from tests.models.encoders import encoder_decoder, source

EVICTING = {"budget": 64, "chunk_size": 75}
INT8 = {"backend": "int8"}
KIVI = {"backend": "kivi", "nbits": 2, "residual_length": 64}
KVQUANT = {"backend": "kvquant", "calibration": "normal_float", "residual_length": 64}
KVZIP = {"backend": "kvzip", "head_floor": 0.2, "storage": {"backend": "int8"}, **EVICTING}
SNAPKV = {"backend": "snapkv", "window_length": 32, **EVICTING}
STREAMING = {"backend": "streaming_llm", **EVICTING}

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo")


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # the time that the guards of a graph take, before which the compiler empties the processor's caches
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A compiler's backend that runs the same operators, and so gives the same numbers.

    Attributes:
        made (`list[list[tuple[str, str]]]`): Of every graph its operators, and where they are called.
    """

    def __init__(self) -> None:
        self.made: list[list[tuple[str, str]]] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        self.made.append([(str(node.target), str(node.stack_trace)) for node in calls])
        return graph.forward

    def count(self, operator: str) -> list[int]:
        """How often every graph calls an operator of the package."""
        return [sum(operator in name for name, _ in graph) for graph in self.made]


def prompt(rows: int = 2, length: int = 150) -> Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(0))


def generated(model: Any, options: dict[str, Any] | None, new: int = 45, **more: Any) -> Any:
    cache = {} if options is None else {"cache_implementation": "quantized", "cache_config": options}
    return model.generate(
        prompt(), **cache, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        return_dict_in_generate=True, **{"output_logits": True, **more},
    )  # fmt: skip


def assert_same(compiled: Any, plain: Any) -> None:
    assert torch.equal(compiled.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(compiled.logits), torch.stack(plain.logits), rtol=0, atol=1e-6)
    found, expected = cache_of(compiled).report(), cache_of(plain).report()
    assert (found.kernel, found.fallback_reads) == (expected.kernel, expected.fallback_reads)


@pytest.mark.parametrize("options", [INT8, KIVI, KVQUANT], ids=lambda o: o["backend"])
def test_prompt_and_steps_are_one_graph_each(options: dict[str, Any]) -> None:
    plain = generated(tiny_model("llama"), options)
    model, graphs = tiny_model("llama"), Graphs()
    model.compile(backend=graphs, fullgraph=True)
    assert_same(generated(model, options), plain)
    layers = model.config.num_hidden_layers
    assert len(graphs.made) == 2
    assert graphs.count("update_and_attend") == [layers] * len(graphs.made)
    # what a layer does is in none, and of what it counts the length of the mask alone
    own = [place.rsplit("File", 1)[-1] for graph in graphs.made for _, place in graph]
    own = [place for place in own if "/kvcache_plugins/" in place]
    assert own and all(re.search(r"in (update|attend_in_graph|get_mask_sizes|\w+_length)\n", p) for p in own)
    # another cache, and more tokens, need none of their own
    made, longer = len(graphs.made), generated(model, options, 70)
    assert_same(longer, generated(tiny_model("llama"), options, 70))
    assert len(graphs.made) == made
    # and a cache that is gone is not kept
    left = cache_of(longer).compiled_layers
    assert left is not None
    gone = weakref.ref(left)
    del longer, left
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("family", "options", "dynamic"),
    [
        ("llama", SNAPKV, None),  # evicts
        # whose hooks are run outside of graphs, too
        pytest.param("llama", KVZIP, True, marks=pytest.mark.in_depth),
        ("bloom", INT8, None),  # writes its attention out
        pytest.param(
            "mpt", INT8, None, marks=pytest.mark.in_depth
        ),  # so does this one, with keys that it transposes
        ("deepseek_v3", INT8, None),  # caches latents
        pytest.param(
            "gpt_oss", INT8, None, marks=pytest.mark.in_depth
        ),  # runs eager, with a window and sinks
    ],
)
def test_whatever_ends_a_graph_reads_the_same(
    family: str, options: dict[str, Any], dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a graph attends to tensors as the model does, which rounds otherwise than blocks of a prompt
    monkeypatch.setattr(unpacked, "can_attend_query_blocks", lambda *args: False)
    plain = generated(tiny_model(family), options, 3)
    model = tiny_model(family)
    model.compile(backend=Graphs(), dynamic=dynamic)
    compiled = generated(model, options, 3)
    assert_same(compiled, plain)


def test_attention_that_is_written_out_is_compiled_for_all_lengths() -> None:
    model, graphs = tiny_model("bloom"), Graphs()
    cache = build_cache(model, INT8).bind(model)
    model.compile(backend=graphs)
    read: list[int] = []
    with torch.no_grad():
        for tokens in (prompt(length=40), *prompt(length=6).split(1, dim=1)):
            model(tokens, **as_argument(cache))
            read.append(len(graphs.made))
    assert read[-1] == read[-3] > 0


def test_a_graph_that_ends_behind_an_update_knows_what_was_held_before_it() -> None:
    """T5 asks how many tokens there are, updates its layer, and then looks at the shape of the keys."""
    given = source("t5")

    def generate(model: Any) -> Any:
        return model.generate(
            **given, cache_implementation="quantized", cache_config=INT8, max_new_tokens=3, min_new_tokens=3,
            do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    plain = generate(encoder_decoder("t5"))
    model, graphs = encoder_decoder("t5"), Graphs()
    model.compile(backend=graphs)
    assert_same(generate(model), plain)
    assert sum(graphs.count("update_and_attend")) > 0


def decode(model: Any, tokens: Tensor, cache: KVCache, mask: Tensor | None = None) -> Tensor:
    """Logits of a prompt and three steps."""
    logits = []
    for _ in range(4):
        more = {} if mask is None else {"attention_mask": mask}
        logits.append(model(tokens, **as_argument(cache), logits_to_keep=1, **more).logits)
        tokens = logits[-1][:, -1:].argmax(-1)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("options", [KIVI, {**STREAMING, "evict_at_decode": True}], ids=["kivi", "streaming"])
@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.in_depth)])
def test_several_steps_are_traced_together(options: dict[str, Any], padded: bool) -> None:
    model, graphs = tiny_model("llama"), Graphs()
    if options is not KIVI:
        model = model.double()  # exact tokens are torch's to attend to, which rounds otherwise with a mask
    mask = torch.ones(2, 150, dtype=torch.long)
    mask[0, :9] = 0
    with torch.no_grad():
        call = (prompt(), mask) if padded else (prompt(), None)
        expected = decode(model, call[0], build_cache(model, options).bind(model, call[1]), call[1])
        compiled = torch.compile(decode, backend=graphs)
        for _ in range(2):
            cache = build_cache(model, options).bind(model, call[1])
            torch.testing.assert_close(compiled(model, call[0], cache, call[1]), expected, rtol=0, atol=1e-6)
            assert cache.get_seq_length() == 150 + 3
    if options is KIVI:
        assert graphs.count("update_and_attend") == [4 * model.config.num_hidden_layers]


def test_verbs_in_a_traced_function_act_on_what_is_there() -> None:
    model = tiny_model("llama")

    def again(tokens: Tensor, cache: KVCache) -> Tensor:
        first = model(tokens, **as_argument(cache)).logits
        cache.crop(-tokens.shape[1])
        second = model(tokens, **as_argument(cache)).logits
        cache.reset()
        return torch.cat([first, second, model(tokens, **as_argument(cache)).logits])

    with torch.no_grad():
        caches = [build_cache(model, INT8) for _ in range(2)]
        for cache in caches:
            model(prompt(), **as_argument(cache))
        expected = again(prompt(2, 3), caches[0])
        found = torch.compile(again, backend=Graphs())(prompt(2, 3), caches[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_an_update_is_made_though_nobody_reads_it() -> None:
    model, cache = tiny_model("llama"), None

    def read(tokens: Tensor, cache: KVCache) -> int:
        model(tokens, **as_argument(cache))
        return 0

    with torch.no_grad():
        cache, expected = build_cache(model, INT8), build_cache(model, INT8)
        torch.compile(read, backend="aot_eager")(prompt(), cache)
        read(prompt(), expected)
        step = prompt(2, 1)
        logits = [model(step, **as_argument(each)).logits for each in (cache, expected)]
    assert [layer.stored_length for layer in cache.packed_layers] == [151, 151]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)


def test_autocast_is_left_to_the_model() -> None:
    model = tiny_model("llama")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        caches = [build_cache(model, INT8) for _ in range(2)]
        compiled = torch.compile(model, backend="aot_eager")
        for tokens in (prompt(), prompt(2, 1)):
            expected, found = (
                each(tokens, **as_argument(cache)).logits
                for each, cache in zip((model, compiled), caches, strict=True)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_our_attention_function_has_windows_and_sinks_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # a graph attends to the windows of a prompt by the reference, which rounds otherwise than blocks
    monkeypatch.setattr(unpacked, "can_attend_query_blocks", lambda *args: False)
    plain = generated(tiny_model("gpt_oss", attn_implementation="kvcache_plugins"), KIVI)
    model, graphs = tiny_model("gpt_oss", attn_implementation="kvcache_plugins"), Graphs()
    model.compile(backend=graphs, fullgraph=True)
    assert_same(generated(model, KIVI), plain)
    assert graphs.count("update_and_attend") == [1] * len(graphs.made)  # its other layer is transformers' own


def test_heads_are_shown_what_a_compiled_model_projects(tmp_path: Path) -> None:
    RetainingHeads(RetainingHeadsConfig.from_model(tiny_model("llama"))).save_pretrained(tmp_path)
    options = {"backend": "locret", "heads": str(tmp_path), **EVICTING}
    plain = generated(tiny_model("llama"), options, 3)
    model, graphs = tiny_model("llama"), Graphs()
    model.compile(backend=graphs)
    assert_same(generated(model, options, 3), plain)
    assert sum(graphs.count("update_and_attend")) == 0


def test_graphs_find_the_layers_of_every_copy() -> None:
    model, graphs = tiny_model("llama"), Graphs()
    cache = build_cache(model, INT8)
    step = prompt(1, 1)
    with torch.no_grad():
        model(prompt(1), **as_argument(cache))
        expected = model(step, **as_argument(copy.deepcopy(cache))).logits
        caches: list[KVCache] = [copy.deepcopy(cache), cache, pickle.loads(pickle.dumps(cache))]
        model.compile(backend=graphs, fullgraph=True)
        for number, each in enumerate(caches):
            torch.testing.assert_close(model(step, **as_argument(each)).logits, expected, rtol=0, atol=0)
            lengths = [other.get_seq_length() for other in caches]
            assert lengths == [151] * (number + 1) + [150] * (2 - number)
    assert len(graphs.made) == 1


def test_rows_follow_the_beams_of_a_compiled_model() -> None:
    beams = {"num_beams": 3, "output_logits": False}
    plain = generated(tiny_model("llama"), KIVI, 20, **beams).sequences
    model, graphs = tiny_model("llama"), Graphs()
    model.compile(backend=graphs, fullgraph=True)
    assert torch.equal(generated(model, KIVI, 20, **beams).sequences, plain)
    assert sum(graphs.count("update_and_attend")) > 0


def test_generate_compiles_where_it_is_asked_to() -> None:
    plain = generated(tiny_model("llama"), INT8)
    graphs = Graphs()
    asked = CompileConfig(backend=lambda *given: graphs(*given), fullgraph=True, mode=None)
    asked._compile_all_devices = True  # transformers compiles on GPUs alone otherwise
    compiled = generated(tiny_model("llama"), INT8, compile_config=asked)
    assert_same(compiled, plain)
    assert graphs.count("update_and_attend") == [2] * len(graphs.made) and graphs.made
    graphs.made.clear()
    assert_same(generated(tiny_model("llama"), INT8), plain)
    assert not graphs.made


def is_symbolic(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(isinstance(size, torch.SymInt) for size in sizes)


@pytest.mark.parametrize("pads", [0, 9])
def test_nothing_else_in_a_steps_graph_depends_on_the_length(pads: int) -> None:
    """CUDA graphs, which serve one size, would be recorded anew at every step."""
    made: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    asked = CompileConfig(backend=lambda *given: keep(*given), fullgraph=True, mode=None)
    asked._compile_all_devices = True
    mask = torch.ones(2, 150, dtype=torch.long)
    mask[0, :pads] = 0
    model, quantized = tiny_model("llama"), {"cache_implementation": "quantized", "cache_config": INT8}
    model.generate(prompt(), attention_mask=mask, **quantized, compile_config=asked, max_new_tokens=5)
    # a layer's count is passed on, and added to
    nodes = [node for node in made[-1].graph.nodes if node.op not in ("placeholder", "output")]
    dependent = [node for node in nodes if any(map(is_symbolic, [node, *node.all_input_nodes]))]
    others = {str(node.target) for node in dependent if node.target is not operator.add}
    assert others == {"kvcache_plugins.update_and_attend"}


def test_gradients_are_refused_by_a_compiled_model_too() -> None:
    model = tiny_model("llama")
    cache = build_cache(model, INT8)
    with torch.no_grad():
        model(prompt(1), **as_argument(cache))
    model.compile(backend=Graphs())
    logits = model(prompt(1, 3), **as_argument(cache)).logits
    with pytest.raises(RuntimeError, match="gradient"):
        logits.sum().backward()


def prompted(rows: int = 1) -> tuple[Any, KVCache]:
    """A model whose layers have 2 heads of 16 channels, and a cache that has read 150 tokens."""
    model = tiny_model("llama")
    cache = build_cache(model, INT8)
    model(prompt(rows), **as_argument(cache))
    return model, cache


@torch.no_grad()
def test_whoever_does_not_know_a_handle_of_a_graph_is_given_what_it_stands_for() -> None:
    _, cache = prompted()
    states = torch.randn(1, 2, 1, 16)
    assert cache.compiled_layers is not None
    update = LayerUpdate(cache.compiled_layers, 0, 150, states, states)
    keys = CompiledHandle(update, 0)
    dense = cache.layers[0].stored_keys.decode(0, 150)
    assert cache.layers[0].stored_length == 150
    assert keys.shape == (1, 2, 151, 16) and len(keys) == 1
    torch.testing.assert_close(keys[:, :, :150], dense)
    torch.testing.assert_close((keys * 2.0)[:, :, 150], states[:, :, 0] * 2.0)
    torch.testing.assert_close(torch.cat([keys, states], 2)[:, :, 151:], states)
    torch.testing.assert_close(states @ keys.transpose(2, 3), states @ keys[:, :].transpose(2, 3))
    assert cache.layers[0].stored_length == 151


def test_attention_of_ones_own_may_end_graphs_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = 1

    def own(module: Any, query: Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()  # between the update and attention
        for _ in range(times):
            output = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)
        return output

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", own)
    with torch.no_grad():
        model, cache = prompted()
        expected = decode(model, prompt(1, 1), copy.deepcopy(cache))
        model.set_attn_implementation("own")
        graphs = Graphs()
        model.compile(backend=graphs)
        torch.testing.assert_close(decode(model, prompt(1, 1), cache), expected, rtol=0, atol=1e-6)
        assert sum(graphs.count("update_and_attend")) > 0
        assert [layer.stored_length for layer in cache.packed_layers] == [154, 154]
        times = 2
        with pytest.raises(RuntimeError, match="layer 0 once more"):
            model(prompt(1, 1), **as_argument(cache))


def test_a_layer_that_is_not_attended_to_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "none", lambda _, query, *args, **kwargs: (query * 0, None)
    )
    with torch.no_grad():
        model, cache = prompted()
        model.set_attn_implementation("none")
        model.compile(backend=Graphs())
        model(prompt(1, 1), **as_argument(cache))
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="holds 150 tokens where it should hold 151"):
            model(prompt(1, 1), **as_argument(cache))


@torch.no_grad()
def test_operators_go_into_graphs_that_stay_in_the_process() -> None:
    class Asking(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return states + 1 if makes_graph("cpu") else states - 1

    zero = torch.zeros(1)
    assert not makes_graph("cpu") and Asking()(zero) == -1
    assert torch.compile(Asking(), backend="eager")(zero) == 1
    for strict in (True, False):
        assert torch.export.export(Asking(), (zero,), strict=strict).module()(zero) == -1


def test_an_operator_does_what_its_module_says_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered once, and the package may be imported again, with caches of its own."""
    monkeypatch.setattr(attention_compiled, "_update_and_attend", lambda *args: 2 * args[5])
    zero, query = torch.zeros(1, dtype=torch.int64), torch.ones(1, 4, 1, 16)
    doubled = torch.ops.kvcache_plugins.update_and_attend(
        zero, 0, 0, query, query, query, "sdpa", 1, True, None, None, None, None, []
    )
    assert torch.equal(doubled, 2 * query)


def test_cuda_graphs_end_where_layers_are_updated() -> None:
    assert torch.Tag.cudagraph_unsafe in torch.ops.kvcache_plugins.update_and_attend.default.tags


@pytest.mark.in_depth
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"),
    reason="torch 2.11 writes C++ for masks that does not compile, with the dense cache as well",
)
def test_the_compiler_makes_code_that_serves_all_lengths() -> None:
    """Of a family where it reuses the memory of keys and values."""
    plain = generated(tiny_model("phi"), KIVI, 80)
    model = tiny_model("phi")
    model.compile(fullgraph=True)
    compiled = generated(model, KIVI, 80)
    assert torch.equal(compiled.sequences, plain.sequences)
    found, expected = torch.stack(compiled.logits), torch.stack(plain.logits)
    # of all together: what the compiler rounds otherwise grows a hundredfold in single steps
    assert (found - expected).norm() <= 5e-5 * expected.norm()
    assert cache_of(compiled).report().kernel == ["cpu", "cpu"]
