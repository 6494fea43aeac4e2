"""The text every CPython carries: its language reference, for evaluations that must not need a download."""

from __future__ import annotations

__all__ = ["UNSEEN_TOPICS", "read_language_reference"]

# The longest topic, tens of thousands of tokens in every release of Python that has it, comes last.
UNSEEN_TOPICS = (
    "attribute-access",
    "exprlists",
    "global",
    "nonlocal",
    "numeric-types",
    "operator-summary",
    "specialattrs",
    "subscriptions",
    "specialnames",
)
"""Topics of the Python language reference that the bundled model has never seen."""


def read_language_reference() -> str:
    """Return the topics the bundled model has never seen; all of them where a Python names them otherwise.

    Raises:
        ValueError: If this Python comes without its language reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "This Python comes without pydoc_data, the language reference that is the text here; give text "
            "files instead."
        ) from error
    found = [topics[name] for name in UNSEEN_TOPICS if name in topics]
    return "\n\n".join(found or topics.values())
