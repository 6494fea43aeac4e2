"""`KVCACHE_REQUIRE_CUDA=1`: which skips of tests marked `cuda` it forbids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest


@pytest.fixture(autouse=True)
def one_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 24 << 30))


def marked(**needs: Any) -> Any:
    """A test marked `cuda`, as far as the rules look at it."""
    mark = pytest.mark.cuda(**needs).mark
    return SimpleNamespace(get_closest_marker={"cuda": mark}.get, stash=pytest.Stash())


def outcome(item: Any) -> str:
    """What becomes of a test that was skipped while it was set up, or ran."""

    def skip() -> None:
        conftest._Machine().pytest_runtest_setup(item)
        pytest.skip("for its own reason")

    with pytest.raises(pytest.skip.Exception) as skipped:
        skip()
    reporting = conftest.pytest_runtest_makereport(item, SimpleNamespace(excinfo=skipped))
    next(reporting)
    with pytest.raises(StopIteration) as end:
        reporting.send(SimpleNamespace(skipped=True, outcome="skipped"))
    return str(end.value.value.outcome)


@pytest.mark.parametrize(
    ("needs", "lack"),
    [
        ({"devices": 2}, "needs 2 GPUs, and there is 1"),
        ({"free_gib": 40, "simulated": False}, "needs 40 GiB of the GPU's memory, of which 20 are free"),
        ({"devices": 1, "free_gib": 20}, None),
        ({"simulated": False}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_machine_that_lacks_what_a_test_says_it_needs(
    needs: dict[str, Any], lack: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conftest._lack_of(marked(**needs)) == lack
    assert outcome(marked(**needs)) == "skipped"
    monkeypatch.setattr(conftest, "_REQUIRE_CUDA", True)
    assert outcome(marked(**needs)) == ("failed" if lack is None else "skipped")


def test_no_gpu_at_all_is_no_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is told by the mark itself, and forbidden."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(conftest, "_REQUIRE_CUDA", True)
    assert outcome(marked(devices=2)) == "failed"
