"""Where a class comes from: what a model of one's own has from the one it derives from, in whatever file.

Families are told apart by the files they are written in, and by the names of their classes and
configurations. A class derived from one of theirs does what they do, unless it says otherwise.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from torch import nn

__all__ = ["class_names", "forward_names", "is_of_family", "modeling_files", "modeling_module"]

_OF_NO_FAMILY = "transformers.configuration_utils"


def modeling_files(model: nn.Module) -> Iterator[ModuleType]:
    """The modules that a model's class and those it derives from are written in, the nearest first.

    Without those of what all models of transformers derive from.
    """
    from transformers import PreTrainedModel

    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, nn.Module))
    names = dict.fromkeys(kind.__module__ for kind in kinds if not issubclass(PreTrainedModel, kind))
    return (sys.modules[name] for name in names if name in sys.modules)


def class_names(module: nn.Module) -> list[str]:
    """The names of a module's class and of those it derives from."""
    return [kind.__name__ for kind in type(module).__mro__]


def is_of_family(config: Any, families: Collection[str]) -> bool:
    """Whether a configuration is, or derives from, that of one of some families (`model_type`)."""
    types = (getattr(kind, "model_type", None) for kind in type(config).__mro__)
    return getattr(config, "model_type", None) in families or any(found in families for found in types)


def forward_names(module: nn.Module) -> dict[str, Any]:
    """The global names that a module's `forward` is written with; of what it derives from, if it asks that.

    What is wrapped by a decorator is looked at as it was written.
    """
    names: dict[str, Any] = {}
    for kind in type(module).__mro__:
        written = vars(kind).get("forward")
        if written is None or kind is nn.Module:
            continue
        function = inspect.unwrap(written)
        own = getattr(function, "__globals__", {})
        beside = vars(sys.modules.get(kind.__module__, object))  # of a decorator that hides what it wraps
        names = {**beside, **own, **names}
        if "super" not in getattr(getattr(function, "__code__", None), "co_names", ()):
            break
    return names


def modeling_module(config: Any) -> ModuleType | None:
    """Import the modelling file that belongs to a configuration class, or return `None`.

    A class derived from one of transformers', in a file of another kind, has what belongs to that.
    """
    names = (kind.__module__ for kind in type(config).__mro__)
    name = next((name for name in names if ".configuration_" in name and name != _OF_NO_FAMILY), None)
    if name is None:
        return None
    try:
        return importlib.import_module(name.replace(".configuration_", ".modeling_"))
    except ImportError:  # InternLM3 is a Llama with a configuration of its own
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        return sys.modules.get(getattr(model_class, "__module__", ""))
