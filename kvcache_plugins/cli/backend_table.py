"""The registry as rows of a table: for `kvcache-plugins list` and for the README."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from dataclasses import dataclass, field
from typing import Any

from ..eviction.cache import EvictingCache
from ..eviction.options import EvictingConfig
from ..registry import get_backend, list_backends

__all__ = ["SECTIONS", "BackendRow", "backend_rows", "docstring_sections", "in_one_line", "markdown_table"]

SECTIONS = ("Paper", "Deviates", "Cost", "Limits")
"""Sections every backend's docstring has, besides its first paragraph."""

_OF_STORAGE = ("its storage's",)
# Options of every backend; they are listed once, and in a row only where its default differs.
_COMMON_DEFAULTS: dict[str, Any] = {
    "kernel": "auto",
    "sink_length": 0,
    "skip_layers": (),
    "layer_overrides": {},
    "offload": False,
}
_HEADER = re.compile(r"^(?P<name>[A-Z][A-Za-z ]*):(?P<rest>\s.*)?$")


@dataclass(frozen=True)
class BackendRow:
    """What the table says about one backend.

    Args:
        name (`str`): Registry name.
        summary (`str`): First paragraph of its docstring, or why it could not be loaded.
        sections (`dict[str, str]`): The docstring's `SECTIONS`, each joined into one line.
        options (`dict[str, str]`): Its options and their defaults, as JSON-like text, less those that every
            backend has with the same default.
        shared (`dict[str, str]`): Options of all backends of its kind, with the defaults they have there.
        evicts (`bool`): Whether it drops tokens.
        native_kernels (`tuple[str, ...]`): Devices on which a native kernel reads its packed codes; empty if
            attention runs in plain torch.
        module (`str`): Module of its class; empty if it could not be loaded.
    """

    name: str
    summary: str
    sections: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    evicts: bool = False
    native_kernels: tuple[str, ...] = ()
    module: str = ""

    @property
    def paper(self) -> str:
        """Where the method was published, in one line."""
        return self.sections.get("Paper", "")

    @property
    def defaults(self) -> str:
        """The options in one line."""
        return in_one_line(self.options)

    @property
    def own_defaults(self) -> str:
        """Those in one line that others of its kind lack, or have with another default."""
        return in_one_line({n: value for n, value in self.options.items() if self.shared.get(n) != value})

    @property
    def native(self) -> str:
        """The native kernels in one word."""
        return ", ".join(self.native_kernels) or "no"


def backend_rows() -> list[BackendRow]:
    """Return one row per registered backend, by name; one that cannot be imported says so in its row."""
    return [_row(name) for name in list_backends()]


def docstring_sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring.

    Args:
        docstring (`str`): Text with the indentation removed, as `inspect.getdoc` returns it.

    Returns:
        `tuple[str, dict[str, str]]`: The first paragraph and each section, as one line each.
    """
    first, _, body = docstring.strip().partition("\n\n")
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in body.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            current = sections.setdefault(header["name"], [])
            line = header["rest"] or ""
        current.append(line.strip())
    return " ".join(first.split()), {name: " ".join(filter(None, lines)) for name, lines in sections.items()}


def in_one_line(options: dict[str, str]) -> str:
    """Render options and their defaults in one line."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def markdown_table(rows: list[BackendRow]) -> str:
    """Render the rows for the README, in GitHub's Markdown."""
    cells = [["backend", "what it does", "paper", "own options and defaults", "native kernel"], ["---"] * 5]
    for row in rows:
        own = f"`{row.own_defaults}`" if row.own_defaults else ""
        cells.append([f"`{row.name}`", row.summary, row.paper, own, row.native])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def _row(name: str) -> BackendRow:
    try:
        cls = get_backend(name)
    except Exception as error:  # a third party's module may fail in any way and must not hide the others
        reason = error.__cause__ or error  # without the name, which stands beside it
        return BackendRow(name, f"cannot be loaded: {' '.join(str(reason).split()) or type(reason).__name__}")
    summary, sections = docstring_sections(inspect.getdoc(cls) or "")
    evicts = issubclass(cls, EvictingCache)
    return BackendRow(
        name=name,
        summary=summary,
        sections={key: sections[key] for key in SECTIONS if key in sections},
        options=_own_options(cls.config_class),
        shared=_own_options(EvictingConfig) if evicts else {},
        evicts=evicts,
        native_kernels=_OF_STORAGE if evicts else cls.native_kernels,
        module=cls.__module__,
    )


def _own_options(config_class: type[Any]) -> dict[str, str]:
    options = {}
    for option in dataclasses.fields(config_class):
        factory, default = option.default_factory, option.default
        default = default if factory is dataclasses.MISSING else factory()
        if option.name in _COMMON_DEFAULTS and _COMMON_DEFAULTS[option.name] == default:
            continue
        if "shown" in option.metadata or default is dataclasses.MISSING:
            options[option.name] = f"({option.metadata.get('shown', 'required')})"
        else:
            # as one would write it in JSON, because that is how options are given on the command line
            options[option.name] = json.dumps(default, default=str).strip('"')
    return options
