"""Command line `kvcache-plugins`: one file per sub-command, each with `add_parser` and `run`.

The parsers are built from modules that import nothing heavy; torch and transformers come in when a
sub-command runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import IncompatibleTransformersError, KernelUnavailableError, UnsupportedOperationError
from ..registry import suggest

__all__ = ["main"]

_COMMANDS = (
    "list", "estimate", "bench", "calibrate", "train_locret", "import_locret", "eval", "report", "kernels",
)  # fmt: skip

# What a user can cause and repair. Anything else is a bug of ours and keeps its traceback.
_USER_ERRORS = (
    ValueError,
    OSError,
    IncompatibleTransformersError,
    KernelUnavailableError,
    UnsupportedOperationError,
)


class _Parser(argparse.ArgumentParser):
    """One that tells which it was, so that an error shows the usage of the command that was given."""

    DESTINATION = "parser_of_command"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(**{self.DESTINATION: self})


def _refuse(parser: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """End with what a command does not know, and what may have been meant."""
    known = [name.strip("-") for action in parser._actions for name in action.option_strings]
    given = [word.split("=")[0].strip("-") for word in unknown if word.startswith("-")]
    hint = suggest(given[0], known).replace("mean '", "mean '--") if given else ""  # dashes are alike in all
    parser.error(f"unrecognized arguments: {' '.join(unknown)}.{hint} `{parser.prog} --help` shows all.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments without the program name; `sys.argv[1:]` by default.

    Returns:
        `int`: Exit status: 0, 1 where something of ours failed that was to be measured or built, 2 for an
        error of the user and 130 for an interruption, each told in one line on the standard error stream.
        Also 1, without a word, where nobody reads what is shown any more.
    """
    parser = _Parser(
        prog="kvcache-plugins", description="Packed key-value caches for Hugging Face Transformers."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    args, unknown = parser.parse_known_args(argv)
    of_command: argparse.ArgumentParser = vars(args).pop(_Parser.DESTINATION)
    if unknown:
        _refuse(of_command, unknown)
    try:
        status = int(args.run(args))
        if sys.stdout is not None:  # which it is where it was closed before the start
            sys.stdout.flush()  # what goes wrong with the rest of it is told here
        return status
    except BrokenPipeError:  # nobody reads on, as `| head` does not
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*_USER_ERRORS, ImportError) as error:
        if isinstance(error, ImportError) and error.name is not None:
            raise  # of an import statement; a library that asks for another package gives no name
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        said = getattr(args, "interrupted", "nothing is kept.")
        print(f"\ninterrupted: {said}", file=sys.stderr)  # below a bar, or the ^C of a terminal
        return 130  # as a shell tells of a process that SIGINT ended
