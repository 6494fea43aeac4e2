"""What tests of trainings share."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of real text, the same for every test of a module."""
    path = tmp_path_factory.mktemp("text") / "reference.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics)[:20]), encoding="utf-8")
    return path
