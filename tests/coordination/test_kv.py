"""Keys over real sockets; what they promise as such is in tests/coordination/test_keys_machine.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import Caller, Keeper, until
from tests.ports import free_address
from zmqdist import errors
from zmqdist.coordination import client as coordination_client
from zmqdist.coordination.client import CoordinationClient
from zmqdist.rpc import ZmqClient, internal_client
from zmqdist.transport.credentials import Credentials

Keep = Callable[..., Keeper]
Join = Callable[..., CoordinationClient]


@pytest.fixture
def pair(keep: Keep, join: Join) -> tuple[CoordinationClient, CoordinationClient]:
    """Two tasks of one cluster."""
    keeper = keep(2)
    return join(keeper, "worker:0"), join(keeper, "worker:1")


def test_value_travels_with_its_type(pair: tuple[CoordinationClient, CoordinationClient]) -> None:
    values: list[Any] = [
        "text",
        b"bytes",
        7,
        1.5,
        None,
        True,
        ("a", [1, {"b": 2}]),
        {"x": {"y": ()}},
    ]
    for number, value in enumerate(values):
        pair[0].kv.set(f"k/{number}", value)
        got = pair[1].kv.get(f"k/{number}")
        assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("size", [10, 2**20])
def test_array_is_private_snapshot(
    pair: tuple[CoordinationClient, CoordinationClient], size: int
) -> None:
    mine = np.arange(size, dtype=np.float32)
    pair[0].kv.set("array", mine)
    mine[:] = -1
    first = pair[1].kv.get("array")
    first[:] = -2
    second = pair[1].kv.get("array")
    np.testing.assert_array_equal(second, np.arange(size, dtype=np.float32))


def test_set_get_try_get_delete_list_increment(
    pair: tuple[CoordinationClient, CoordinationClient],
) -> None:
    kv, other = pair[0].kv, pair[1].kv
    kv.set("dir/a", 1)
    with pytest.raises(errors.AlreadyExistsError, match="overwrite=True"):
        other.set("/dir//a/", 2)
    other.set("dir/a", 3, overwrite=True)
    kv.set("dir/b/c", 4)
    assert kv.list("dir") == {"dir/a": 3, "dir/b/c": 4}
    assert kv.list() == kv.list("dir")
    assert kv.delete("dir") == 2
    with pytest.raises(errors.NotFoundError, match="there is no key 'dir/a'"):
        kv.try_get("dir/a")
    assert [kv.increment("n"), other.increment("n", 5), kv.increment("n", -1)] == [1, 6, 5]
    with pytest.raises(errors.DeadlineExceededError, match="no task set key 'never' in time"):
        kv.get("never", 0.05)


def test_increments_of_many_tasks_differ(
    pair: tuple[CoordinationClient, CoordinationClient],
) -> None:
    seen: list[int] = []
    callers = [
        Caller(lambda kv=task.kv: seen.extend(kv.increment("n") for _ in range(50)))
        for task in pair * 2
    ]
    assert [caller.ended() for caller in callers] == [None] * 4
    assert sorted(seen) == list(range(1, 201))


def test_thousand_waits_need_no_thread(keep: Keep, join: Join) -> None:
    keeper = keep(1)
    by_hand = ZmqClient(keeper.address, security=Credentials().client(keeper.address, "worker"))
    client = join(keeper, "worker:0")
    client.register(30)
    threads = threading.active_count()
    waiting = [
        internal_client.start(by_hand, "coordination.kv_get", f"key/{number}", None)
        for number in range(1000)
    ]
    assert not waiting[0].done()
    until(lambda: keeper.service.snapshot().key_waits == 1000)
    assert threading.active_count() <= threads + 1  # the reader of this client
    for number in range(0, 1000, 2):
        client.kv.set(f"key/{number}", number)
    assert [call.get_value() for call in waiting[::2]] == list(range(0, 1000, 2))
    assert keeper.service.snapshot().key_waits == 500
    by_hand.close()
    until(lambda: keeper.service.snapshot().key_waits == 0)


def test_client_without_task_has_keys_only(keep: Keep, join: Join) -> None:
    keeper = keep(1)
    visitor = join(keeper)
    visitor.kv.set("k", 1)
    assert visitor.kv.try_get("k") == 1
    assert list(visitor.task_states()) == ["worker:0"]
    with pytest.raises(
        errors.FailedPreconditionError, match="this client is no task of the cluster"
    ):
        visitor.barrier("b")
    alone = join(free_address())
    with pytest.raises(errors.DeadlineExceededError):
        alone.kv.get("k", 0.1)


def test_endless_wait_without_task_is_logged(
    keep: Keep, join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordination_client, "WAIT_LOG_S", 0.02)
    visitor = join(keep(1))
    with caplog.at_level(logging.WARNING, "zmqdist.coordination"):
        waiting = Caller(visitor.kv.get, "k")
        until(lambda: "this client has waited 0 s for key 'k'" in caplog.text)
    visitor.kv.set("k", 1)
    assert (waiting.ended(), waiting.value) == (None, 1)
