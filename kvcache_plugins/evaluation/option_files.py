"""Files of options, whose errors name the file."""

from __future__ import annotations

from typing import Any

import yaml

from .text_files import read_text_file

__all__ = ["read_option_file"]


def read_option_file(name: str) -> dict[str, Any]:
    """Return the options of `--config`, a YAML file that holds them by name.

    Raises:
        ValueError: If it cannot be read, is no YAML, has a key twice, or holds something else.
    """
    text = read_text_file(name, "--config")
    try:
        options = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"--config must be a YAML file, got {name!r} ({error}).") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config must hold options by name, got {options!r} in {name!r}.")
    return options


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses a key that stands twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.YAMLError(
                    f"{key.value!r} stands there twice, again in line {key.start_mark.line + 1}"
                )
            names.add(str(key.value))
        return super().construct_mapping(node, deep)
