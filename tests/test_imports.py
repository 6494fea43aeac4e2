"""Importing the package is free of side effects beyond the dispatch, and cheap."""

from __future__ import annotations

import subprocess
import sys


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


def test_importing_after_transformers_is_loaded_adds_nothing_heavy() -> None:
    added = run(
        "import sys, transformers.generation.utils; before = set(sys.modules);"
        "import kvcache_plugins;"
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith('importlib')))"
    )
    ours = [name for name in eval(added) if name.startswith("kvcache_plugins")]  # our own print
    assert ours == [
        "kvcache_plugins",
        "kvcache_plugins.config",
        "kvcache_plugins.errors",
        "kvcache_plugins.generation_calls",
        "kvcache_plugins.integration",
        "kvcache_plugins.prompt_chunks",
        "kvcache_plugins.registry",
    ]
    assert len(eval(added)) < 12


GENERATE = (
    "from transformers import LlamaConfig, LlamaForCausalLM;"
    "import torch;"
    "model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,"
    " num_attention_heads=2, vocab_size=32)).eval();"
    "out = model.generate(torch.arange(5, 25)[None], max_new_tokens=3,"
    " cache_implementation='quantized',"
    " cache_config={'backend': 'int8'}, return_dict_in_generate=True);"
    "print(type(out.past_key_values).__name__)"
)


def test_importing_first() -> None:
    assert run(f"import kvcache_plugins, transformers; {GENERATE}") == "Int8Cache"


def test_importing_second_and_without_initialising_cuda() -> None:
    printed = run(
        "import torch; torch.cuda._lazy_init = lambda: print('touched');"
        f"import transformers, kvcache_plugins; {GENERATE};"
        "import kvcache_plugins as kvp; kvp.list_backends(); kvp.KIVICache; kvp.estimate; print('done')"
    )
    assert printed.split() == ["Int8Cache", "done"]


def test_every_submodule_imports_on_its_own() -> None:
    # one process for all, each import starting from a clean table of modules of ours
    names = run(
        "import functools, gc, importlib, pkgutil, sys, kvcache_plugins\n"
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
    assert "kvcache_plugins.backends.kivi" in names
