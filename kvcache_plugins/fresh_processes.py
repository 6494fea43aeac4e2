"""Fresh Python processes with the code of this one, wherever they are started from."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["python_command"]

_ROOT = str(Path(__file__).resolve().parents[1])


def python_command(module: str, function: str, *arguments: str) -> list[str]:
    """Return a command that calls a function of a module with a list of arguments, and ends with its status.

    It imports from where this process does. `python -m` would look into the current directory first: there
    may be another checkout of this package, or a file with the name of a module of Python.

    Args:
        module (`str`): Its full name.
        function (`str`): Takes a `list[str]` and returns the exit status.
        arguments (`str`): What the list holds.
    """
    # an empty entry is the current directory, of a session at the keyboard
    path = [entry for entry in sys.path if entry]
    if _ROOT not in path:
        path.insert(0, _ROOT)
    # the path is set before anything is imported that a file could be mistaken for
    code = f"import sys; sys.path[:] = {path!a}; from {module} import {function} as run"
    return [sys.executable, "-c", f"{code}; sys.exit(run(sys.argv[1:]))", *arguments]
