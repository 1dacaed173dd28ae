"""Helpers that send a dispatcher's machine the messages of its peers.

The payload of a work item is its number, and every work item is for function 7.
"""

from __future__ import annotations

from zmqdist.events import Heard, ProcessExited, Send
from zmqdist.messages import (
    VALUE,
    Assign,
    Define,
    Done,
    Message,
    Register,
    RegisterCoordinator,
    Submit,
)
from zmqdist.scheduling.dispatcher.machine import Broker

LEASE_S, BACK_S, CUT_S = 10.0, 1.0, 5.0
SEEN = ProcessExited(100, -9, "log", job="worker", index=0)
"""Worker 0 was seen to end, by its parent."""


def hear(broker: Broker, peer: str, message: Message, now: float = 0.0) -> list[Send]:
    return broker.handle(Heard(peer, message), now)


def coordinator(
    broker: Broker,
    peer: str = "c",
    number: int = 1,
    *,
    queue_max: int = 1000,
    former: bool = False,
    now: float = 0.0,
) -> list[Send]:
    effects = hear(broker, peer, RegisterCoordinator(number, queue_max, 1, former), now)
    return effects + hear(broker, peer, Define([(7, b"f")]), now)


def worker(
    broker: Broker,
    peer: str = "w",
    index: int = 0,
    *,
    slots: int = 1,
    held: list[int] | None = None,
    leftover: list[tuple[int, int]] | None = None,
    life: int | None = None,
    now: float = 0.0,
) -> list[Send]:
    register = Register(
        life or index + 1, "worker", index, slots, held or [], leftover or [], 100 + index, "host"
    )
    return hear(broker, peer, register, now)


def submit(
    broker: Broker, *works: int, peer: str = "c", lost: int = 0, now: float = 0.0
) -> list[Send]:
    return hear(broker, peer, Submit(1, [(work, 0, lost, 7, b"%d" % work) for work in works]), now)


def finish(
    broker: Broker,
    *leases: int,
    peer: str = "w",
    kind: int = VALUE,
    now: float = 0.0,
    busy_s: float = 0.0,
) -> list[Send]:
    return hear(
        broker, peer, Done([(lease, kind, b"r") for lease in leases], [], round(busy_s * 1e6)), now
    )


def begin(broker: Broker, *leases: int, peer: str = "w", now: float = 0.0) -> None:
    assert hear(broker, peer, Done([], list(leases)), now) == []


def assigned_work(effects: list[Send], *, careful: bool = False) -> list[tuple[str, int, int, int]]:
    """Return the assigned work: (peer, lease, work, attempt)."""
    return [
        (str(effect.to), lease, int(payload), attempt)
        for effect in effects
        if isinstance(effect.message, Assign) and effect.message.report_before_start == careful
        for lease, _, attempt, _, payload in effect.message.items
    ]


def leases_of(effects: list[Send]) -> list[int]:
    return [lease for _, lease, _, _ in assigned_work(effects)]
