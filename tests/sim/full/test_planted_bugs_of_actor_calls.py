"""Does the simulation of calls find bugs of the caller's side of actors, and of the queue in their
processes? One bug is planted at a time.

A row has the name of the bug, the fault that plants it, and the start of the simulation's report.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, effects, events, expect_report
from tests.sim.simulations.actor_calls import simulate_actor_calls
from zmqdist.errors import InternalError
from zmqdist.events import Heard, Send
from zmqdist.messages import ActorChanged, DropActor, Message, ResultReceived
from zmqdist.scheduling.coordinator import called_actors
from zmqdist.scheduling.coordinator.called_actors import CalledActors
from zmqdist.scheduling.coordinator.coordinator_events import ActorKilled, Resolve, SendToActor
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.scheduling.coordinator.work import ACTOR_LOST, CalledActor, MethodCall, State
from zmqdist.scheduling.worker.actor_calls_machine import ActorCallQueue

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 500


def first_complaint(seed: int) -> str | None:
    try:
        simulate_actor_calls(seed)
    except (AssertionError, InternalError, KeyError) as error:
        return str(error)
    return None


def overtaken(patch: pytest.MonkeyPatch) -> None:
    """A call that waits for an input goes to the end of the queue."""

    def schedule(former: Any, self: CalledActors, call: MethodCall) -> None:
        former(self, call)
        if call.state is State.WAITING:
            call.actor.queue.remove(call)

    def hold(former: Any, self: CalledActors, call: MethodCall) -> None:
        former(self, call)
        if call not in call.actor.queue:
            call.actor.queue.append(call)

    around(CalledActors, "schedule", schedule)(patch)
    around(CalledActors, "hold", hold)(patch)


def sent_again(former: Any, self: CalledActors, actor: CalledActor) -> None:
    for call in reversed(actor.calling.values()):
        call.state = State.HELD
        actor.queue.appendleft(call)
    actor.calling, actor.calling_bytes = {}, 0
    former(self, actor)


def lost(is_maybe_executed: bool) -> Plant:
    """Each lost call says this of its execution."""

    def alter(self: Any, event: Any, answer: list[Any]) -> list[Any]:
        return [
            replace(
                effect,
                items=[
                    (work, kind, (payload[0], is_maybe_executed) if kind == ACTOR_LOST else payload)
                    for work, kind, payload in effect.items
                ],
            )
            if isinstance(effect, Resolve)
            else effect
            for effect in answer
        ]

    return effects(CoordinatorMachine, alter)


def first_address(patch: pytest.MonkeyPatch) -> None:
    """Each actor keeps the address of its first process."""
    addresses: dict[tuple[Any, int], str] = {}

    def alter(self: CoordinatorMachine, event: Any) -> Any:
        if isinstance(event, Heard) and isinstance(event.message, ActorChanged):
            message = event.message
            if message.address:
                key = self, message.actor
                message.address = addresses.setdefault(key, message.address)
        return event

    events(CoordinatorMachine, alter)(patch)


def left_behind(former: Any, self: CalledActors, call: MethodCall, before: State) -> None:
    former(self, call, before)
    if before is State.CALLING:
        call.actor.calling[call.number] = call


def news_kept(former: Any, self: CalledActors, actor: CalledActor) -> None:
    kept = self.news_until.copy()
    former(self, actor)
    self.news_until |= kept


def not_held(former: Any, self: CalledActors, actor: CalledActor) -> None:
    former(self, actor)
    actor.holders -= actor.holders > 1


def unsent(kind: type[Message]) -> Plant:
    """Messages of this kind are sent neither to the dispatcher nor to actors."""
    return effects(
        CoordinatorMachine,
        lambda self, event, answer: [
            effect
            for effect in answer
            if not (isinstance(effect, (Send, SendToActor)) and isinstance(effect.message, kind))
        ],
    )


def killed_in_vain(self: CoordinatorMachine, event: Any) -> Any:
    return None if isinstance(event, ActorKilled) and not self.registered else event


BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    ("a call overtakes one that waits for an input", overtaken, "K1"),
    ("calls are sent again after a reconnect", around(CalledActors, "connected", sent_again), "K2"),
    ("a lost call says that it was not executed", lost(False), "K3: maybe"),
    ("a call that was not sent says that it may have run", lost(True), "K3: maybe"),
    (
        "a handle keeps the address of the dead process",
        first_address,
        "<work",  # its call ends as if another actor listened there
    ),
    (
        "a cancelled call is still on the way",
        around(CalledActors, "left", left_behind),
        "",
    ),
    (
        "calls of a new connection end with the one before",
        around(CalledActors, "connected", news_kept),
        "K3",
    ),
    ("a handle that comes back keeps nothing", around(CalledActors, "watched", not_held), ""),
    (
        "the window has no bound",
        lambda patch: patch.setattr(called_actors, "ACTOR_WINDOW_BYTES", inf),
        "K5",
    ),
    ("large results are not released", unsent(ResultReceived), "K7"),
    ("actors are not dropped", unsent(DropActor), "K6"),
    ("a kill without a dispatcher is forgotten", events(CoordinatorMachine, killed_in_vain), "K6"),
    (
        "a round ends the calls",
        lambda patch: patch.setattr(MethodCall, "is_detached", False),
        ("P10", "work"),
    ),
    (
        "the calls of an earlier connection run beside those of the next",
        around(ActorCallQueue, "former", lambda former, self, caller, program: None),
        "K1",
    ),
    (
        "calls of callers that are gone stay",
        around(ActorCallQueue, "caller_gone", lambda former, self, caller: []),
        ("a call of a connection", "C2", "K1"),
    ),
    (
        "calls run in the wrong order",
        around(ActorCallQueue, "next_calls", lambda former, self: former(self)[::-1]),
        "K1",
    ),
]


@pytest.mark.parametrize(("bug", "plant", "promise"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    bug: str, plant: Plant, promise: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    expect_report(first_complaint, SEEDS_MAX, bug, promise)
