"""The processes of a run do every item once, and keep one record of it."""

from __future__ import annotations

import pytest

from kvcache_plugins.runs.sharding import Shard


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_processes_share_the_items_between_them(count: int) -> None:
    shards = [Shard(process=index, index=index, count=count, processes=count) for index in range(count)]
    taken = [shard.take("abcde") for shard in shards]
    assert sorted(item for items in taken for item in items) == list("abcde")
    assert all(items == sorted(items) for items in taken)
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
    assert all(shard.keeps_records for shard in shards)
    assert [shard.is_main for shard in shards] == [True] + [False] * (count - 1)
    assert shards[-1].total(5) == 5, "a model of its own"


def test_processes_that_hold_one_model_do_all_items_and_keep_them_once() -> None:
    shards = [Shard(process=process, processes=2) for process in range(2)]
    assert [shard.take("abc") for shard in shards] == [["a", "b", "c"]] * 2
    assert [shard.keeps_records for shard in shards] == [True, False]
