"""A coordinator whose loop is kept busy, so that what a test hands in meanwhile arrives there at
once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zmqdist.coordinator import ClusterCoordinator
from zmqdist.messages import Message, Submit
from zmqdist.transport.dealer import DealerConnection


def sent_by_coordinators(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Grows by each message that a coordinator of this process sends to its dispatcher."""
    sent: list[Message] = []
    send = DealerConnection.send

    def noting(self: DealerConnection, message: Message, *rest: Any) -> bool:
        if threading.current_thread().name == "zmqdist-coordinator":
            # workers that are threads have dealers, too
            sent.append(message)
        return send(self, message, *rest)

    monkeypatch.setattr(DealerConnection, "send", noting)
    return sent


@contextmanager
def stalled(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Message]]:
    """While the body runs, the coordinator's loop stands in the middle of sending a function of its
    own; gives what it sends afterwards."""
    assert coordinator.schedule(abs, (-1,)).get(20) == 1  # the dispatcher is there
    sent = sent_by_coordinators(monkeypatch)
    send = DealerConnection.send
    reached, gate = threading.Event(), threading.Event()

    def stalling(self: DealerConnection, message: Message, *rest: Any) -> bool:
        done = send(self, message, *rest)
        if (
            isinstance(message, Submit)
            and threading.current_thread().name == "zmqdist-coordinator"
            and not reached.is_set()
        ):
            reached.set()
            assert gate.wait(30)
            sent.clear()
        return done

    monkeypatch.setattr(DealerConnection, "send", stalling)
    coordinator.schedule(int)
    assert reached.wait(20)
    try:
        yield sent
    finally:
        gate.set()
