"""Files of options, whose errors name the file."""

from __future__ import annotations

from typing import Any

import yaml

from .text_files import read_text_file

__all__ = ["read_option_file"]


def read_option_file(name: str) -> dict[str, Any]:
    """Return the options of `--config`, a YAML file that holds them by name.

    Raises:
        ValueError: If it cannot be read, is no YAML, has a key twice, or holds itself or something else.
    """
    text = read_text_file(name, "--config")
    try:
        options = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:  # of what is nested a thousand times
        raise ValueError(f"--config must be a YAML file, got {name!r} ({error}).") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config must hold options by name, got {options!r} in {name!r}.")
    return options


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses a key that stands twice, of which YAML's own loader takes the last, and what holds itself."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=True)  # at once: what holds itself is found only so
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # what `int` raises of abc, say
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r:.80} is no {tag}", node.start_mark
            ) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in names:
                raise yaml.YAMLError(
                    f"{key.value!r} stands there twice, again in line {key.start_mark.line + 1}"
                )
            names.add(str(key.value))
        return super().construct_mapping(node, deep)
