"""Importing the package is free of side effects beyond the dispatch, and cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_neither_torch_nor_backends() -> None:
    loaded = run(
        "import sys, kvcache_plugins;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'numpy')"
        " or m.startswith('kvcache_plugins.backends')])"
    )
    assert loaded == "[]"


GENERATE = (
    "from transformers import LlamaConfig, LlamaForCausalLM;"
    "import torch;"
    "model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,"
    " num_attention_heads=2, vocab_size=32)).eval();"
    "out = model.generate(torch.arange(5, 25)[None], max_new_tokens=3,"
    " cache_implementation='quantized',"
    " cache_config={'backend': 'int8'}, return_dict_in_generate=True);"
    "print(type(out['cache' if 'cache' in out else 'past_key_values']).__name__)"
)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", marks=pytest.mark.in_depth),
        pytest.param("import transformers.generation.utils; ", marks=pytest.mark.in_depth),
        f"{GENERATE}; ",
    ],
)
def test_a_second_copy_of_the_package_replaces_the_first(before: str) -> None:
    """As where a test runner or a notebook removes modules to have them imported anew."""
    printed = run(
        f"import sys, kvcache_plugins; {before}\n"
        "for name in [name for name in sys.modules if name.startswith('kvcache_plugins')]:\n"
        "    del sys.modules[name]\n"
        f"import kvcache_plugins; {GENERATE}\n"
        "print(isinstance(out['cache' if 'cache' in out else 'past_key_values'], kvcache_plugins.KVCache))\n"
        "kvcache_plugins.uninstall()\n"
        "from transformers.cache_utils import QuantizedCache\n"
        "print(hasattr(QuantizedCache.__init__, '__wrapped__'))"
    )
    assert printed.splitlines()[-3:] == ["Int8Cache", "True", "False"]


def test_importing_second_adds_nothing_heavy_and_does_not_initialize_cuda() -> None:
    printed = run(
        "import torch; torch.cuda._lazy_init = lambda: print('touched');"
        "import sys, transformers.generation.utils; before = set(sys.modules);"
        "import kvcache_plugins;"
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith('importlib')));"
        f"{GENERATE};"
        "import kvcache_plugins as kvp; kvp.list_backends(); kvp.KIVICache; kvp.estimate; print('done')"
    )
    first, *rest = printed.splitlines()
    added = eval(first)  # our own print
    assert [name for name in added if name.startswith("kvcache_plugins")] == [
        "kvcache_plugins",
        "kvcache_plugins.assistant_calls",
        "kvcache_plugins.cache_requests",
        "kvcache_plugins.config",
        "kvcache_plugins.encoder_calls",
        "kvcache_plugins.errors",
        "kvcache_plugins.generation_calls",
        "kvcache_plugins.integration",
        "kvcache_plugins.models",
        "kvcache_plugins.models.cache_argument",
        "kvcache_plugins.prompt_chunks",
        "kvcache_plugins.registry",
        "kvcache_plugins.undoing",
    ]
    assert len(added) < 14
    assert rest == ["Int8Cache", "done"]


def test_importing_first_and_every_submodule_on_its_own() -> None:
    # one process for all, each import starting from a clean table of modules of ours
    first, *names = run(
        f"import kvcache_plugins, transformers; {GENERATE}\n"
        "import functools, gc, importlib, pkgutil, sys\n"
        "from importlib.machinery import SourceFileLoader\n"
        "found = pkgutil.walk_packages(kvcache_plugins.__path__, 'kvcache_plugins.')\n"
        "names = [module.name for module in found]\n"
        # their code is read once; the modules that are left are few beside torch's, and wait for the end
        "SourceFileLoader.get_code = functools.cache(SourceFileLoader.get_code)\n"
        "gc.disable()\n"
        "for name in names:\n"
        "    for key in [k for k in sys.modules if k.startswith('kvcache_plugins')]: del sys.modules[key]\n"
        "    importlib.import_module(name)\n"
        "    print(name)\n"
    ).split()
    assert first == "Int8Cache"
    assert "kvcache_plugins.backends.kivi" in names
