"""Helpers that send a worker's machine the messages of its dispatcher and its slots.

A lease's payload is its number, and all work is of coordinator 1, for function 7.
"""

from __future__ import annotations

from zmqdist.events import Heard, Send
from zmqdist.messages import (
    CANCELLED,
    VALUE,
    Assign,
    Done,
    Message,
    Register,
    Registered,
)
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    Effect,
    Event,
    SlotFinished,
    SlotReady,
)

LIFE, BEAT_S, LEASE_S, ORPHAN_S = 77, 1.0, 10.0, 60.0
WELCOME = Registered(3, BEAT_S, LEASE_S, 5.0, 1)


def welcome(serial: int) -> Registered:
    """Return the reply to the registration with this number; WELCOME is the reply to the first
    registration of a connection."""
    return Registered(3, BEAT_S, LEASE_S, 5.0, serial)


def new_machine(
    slots: int = 1,
    *,
    threads: bool = False,
    start_delay: tuple[float, float] = (0.0, 0.0),
    index: int = -1,
) -> WorkerMachine:
    return WorkerMachine(
        incarnation=9,
        job="worker",
        index=index,
        slots=slots,
        pid=100,
        host="host",
        orphan_limit_s=ORPHAN_S,
        can_kill=not threads,
        now=0.0,
        start_delay=start_delay,
    )


def ready(
    slots: int = 1, *, threads: bool = False, start_delay: tuple[float, float] = (0.0, 0.0)
) -> WorkerMachine:
    """A registered worker with index 3, whose slots have started."""
    worker = new_machine(slots, threads=threads, start_delay=start_delay)
    handle(
        worker, *map(SlotReady, range(slots)), DispatcherConnected(LIFE), Heard(DISPATCHER, WELCOME)
    )
    return worker


def handle(worker: WorkerMachine, *events: Event, now: float = 0.0) -> list[Effect]:
    """Return the effects of an event without the times in its reports, which few tests need."""
    return [_timeless(effect) for event in events for effect in worker.handle(event, now)]


def _timeless(effect: Effect) -> Effect:
    if isinstance(effect, Send) and isinstance(effect.message, Done):
        return say(Done(effect.message.outcomes, effect.message.started))
    return effect


def hear(worker: WorkerMachine, message: Message, now: float = 0.0) -> list[Effect]:
    return handle(worker, Heard(DISPATCHER, message), now=now)


def assign(
    worker: WorkerMachine,
    *leases: int,
    careful: bool = False,
    first: bool = False,
    now: float = 0.0,
) -> list[Effect]:
    items = [(n, 1, 0, 7, b"%d" % n) for n in leases]
    return hear(worker, Assign([(1, 7, b"f")], items, careful, 0, first), now)


def finish(
    worker: WorkerMachine, *positions: int, slot: int = 0, kind: int = VALUE, now: float = 0.0
) -> list[Effect]:
    return handle(
        worker, SlotFinished(slot, [(position, kind, b"r") for position in positions]), now=now
    )


def say(message: Message) -> Send:
    return Send(DISPATCHER, message)


def outcome(*leases: int, kind: int = VALUE, then: tuple[int, ...] = ()) -> Send:
    return say(
        Done([(lease, kind, b"" if kind == CANCELLED else b"r") for lease in leases], list(then))
    )


def registration(
    *held: int,
    leftover: list[tuple[int, int]] | None = None,
    index: int = 3,
    slots: int = 1,
    named: bool = False,
    serial: int = 1,
) -> Send:
    given = index >= 0 and not named
    return say(
        Register(
            9,
            "worker",
            index,
            slots,
            list(held),
            leftover or [],
            100,
            "host",
            index_given=given,
            serial=serial,
        )
    )
