"""Methods that answer when they like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import Hosted
from zmqdist.errors import CANCELLED, INVALID_ARGUMENT, UNIMPLEMENTED, InvalidArgumentError
from zmqdist.rpc import ZmqClient
from zmqdist.rpc.service import PendingCall


class Desk:
    """A server with a method `ask` that hands its calls to the test."""

    def __init__(self) -> None:
        self.asked: Queue[PendingCall] = Queue()
        self.dropped: Queue[PendingCall] = Queue()
        self.server = Hosted()
        self.server.service.register_later("ask", self._ask)
        self.server.start()

    def _ask(self, asked: PendingCall, wanted: Any) -> None:
        if wanted == "raise":
            raise NotImplementedError("not today")
        asked.on_dropped(lambda: self.dropped.put(asked))
        self.asked.put(asked)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    assert desk.server.service.snapshot().calls == 0
    desk.server.stop()


def test_first_reply_of_any_thread_counts(desk: Desk, connect: Callable[..., ZmqClient]) -> None:
    client = connect(desk.server.address)
    later = client.call("ask", [1])
    asked = desk.asked.get(timeout=30)
    assert asked.wanted()
    asked.reply(np.arange(3))
    asked.reply("too late")
    asked.fail(ValueError("too late"))
    np.testing.assert_array_equal(later.get_value()[0], [0, 1, 2])
    assert not asked.wanted()


def test_failures_of_later_method_end_its_call(
    desk: Desk, connect: Callable[..., ZmqClient]
) -> None:
    client = connect(desk.server.address)
    assert client.call("ask", ["raise"]).get_error()[0] == UNIMPLEMENTED
    assert client.call("ask", []).get_error()[0] == INVALID_ARGUMENT
    assert client.call("ask", [1, 2]).get_error()[0] == INVALID_ARGUMENT
    first, second = client.call("ask", [1]), client.call("ask", [2])
    desk.asked.get(timeout=30).reply(object())
    desk.asked.get(timeout=30).fail(InvalidArgumentError(None, None, "no"))
    assert first.get_error()[0] == INVALID_ARGUMENT
    assert second.get_error() == (INVALID_ARGUMENT, "no")


def test_lost_caller_is_reported_once(desk: Desk, connect: Callable[..., ZmqClient]) -> None:
    client = connect(desk.server.address)
    cancelled = client.call("ask", [1])
    asked = desk.asked.get(timeout=30)
    cancelled.cancel()
    assert cancelled.get_error()[0] == CANCELLED
    assert desk.dropped.get(timeout=30) is asked
    assert not asked.wanted()
    pending = client.call("ask", [2])
    asked = desk.asked.get(timeout=30)
    client.close()
    assert pending.get_error()[0] == CANCELLED
    assert desk.dropped.get(timeout=30) is asked
    assert desk.dropped.empty()
