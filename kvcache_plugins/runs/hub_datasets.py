"""The package that reads data sets of the hub, which need not be installed."""

from __future__ import annotations

from typing import Any

__all__ = ["import_datasets"]


def import_datasets(extra: str, instead: str) -> Any:
    """Import the package datasets.

    Args:
        extra (`str`): Of this package, which installs it.
        instead (`str`): What can be done without it, for the message.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "--dataset needs the package datasets, which is not installed: "
            f"pip install 'kvcache-plugins[{extra}]', or {instead}."
        ) from error
    return datasets
