"""The actors that a program calls: a part of the coordinator's machine (machine.py); no I/O.

Theory of operation
    A call is a work item of the coordinator that goes to the process of an actor instead of to the
    dispatcher's queue. Its inputs, its deadline, its cancelling and its end are those of any work
    item. The calls of one actor wait in one queue, in the order in which the program made them.
    The dispatcher says where an actor is. The coordinator that has made an actor owns it: on each
    new connection to a dispatcher it asks for its actors again, with the latest incarnation that it
    knows. Other coordinators watch the actor.

Promises
    K1  the calls of an actor are sent in the order in which they were made, so a call that waits
        for an input holds back later calls
    K2  a call is sent once at most, to one incarnation of the actor
    K3  a call ends with ACTOR_LOST if the incarnation to which it was sent ends first, or the
        connection to it; the end says that the call may have been executed
    K4  a call that was not sent waits for the next incarnation, and ends with ACTOR_LOST, or the
        error of `__init__`, if there will be none; the end says that it was not executed
    K5  at most ACTOR_WINDOW_CALLS calls, and about ACTOR_WINDOW_BYTES of arguments, are on the way
    K6  an actor that is not detached is dropped once its program holds no handle and all its calls
        have ended; another program's handles do not keep it
    K7  a large result is released at the actor once it has arrived, or is not needed
    K8  while the process refuses this program, or nothing listens at its address, calls that were
        not sent wait NEWS_S for the dispatcher's news of another incarnation, and then end with
        ACTOR_LOST; the end says that they were not executed
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from zmqdist.limits import ACTOR_WINDOW_BYTES, ACTOR_WINDOW_CALLS
from zmqdist.messages import (
    BULK,
    ERROR,
    INPUT_LOST,
    ITEM,
    VALUE,
    ActorChanged,
    ActorFound,
    ActorKnown,
    ActorsOwned,
    CancelActorCalls,
    CreateActor,
    DropActor,
    FindActor,
    Result,
    ResultReceived,
    StreamCredit,
    WatchActor,
)
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorReported,
    ActorSearched,
    ConnectActor,
    DisconnectActor,
    Fetch,
    SendCalls,
    SendToActor,
)
from zmqdist.scheduling.coordinator.work import (
    ACTOR_LOST,
    UNAVAILABLE,
    CalledActor,
    MethodCall,
    State,
    Work,
)
from zmqdist.scheduling.shared.actors import ActorState

NEWS_S: Final = 2.0
"""Seconds for which calls wait, after the connection to an actor was lost, for the dispatcher's
news of how its process has ended."""


_UNPLACED: Final = frozenset({ActorState.PENDING, ActorState.STARTING})


class CallMachine(Protocol):
    """What this part uses of the coordinator's machine."""

    works: dict[int, Work]
    registered: bool
    unfinished: int
    _effects: list[Any]
    _cancel_grace_s: float

    def _send(self, message: Any) -> None: ...

    def _move(self, work: Work, state: State) -> None: ...

    def _begin(self, work: Work) -> None: ...

    def _report(self, work: Work, kind: int, payload: Any) -> None: ...

    def _finish(self, work: Work, kind: int, payload: Any = b"") -> None: ...


class CalledActors:
    """The actors of one coordinator, by number."""

    def __init__(self, machine: CallMachine) -> None:
        self._machine = machine
        self.actors: dict[int, CalledActor] = {}
        self._searches: dict[int, str] = {}
        self._has_created = False
        self.news_until: dict[CalledActor, float] = {}
        """The actors whose connection was lost, and when their sent calls end, earliest first."""
        self.touched: dict[CalledActor, None] = {}
        """The actors that may have calls to send."""
        self._receiving: dict[int, CalledActor] = {}
        """Where each large result comes from, by the number of its call."""

    # -- from the program --------------------------------------------------------------------------

    def made(self, actor: CalledActor) -> None:
        """The program has made an actor."""
        self.actors[actor.number] = actor
        actor.holders += 1
        if self._machine.registered:
            self._create(actor)

    def watched(self, actor: CalledActor) -> None:
        """The program has a handle of an actor that it had not, or not any more."""
        actor.holders += 1
        is_new = actor.number not in self.actors
        self.actors[actor.number] = actor
        if is_new and self._machine.registered and actor.state is not ActorState.ENDED:
            self._machine._send(WatchActor(actor.number))

    def handles_dropped(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            actor = self.actors[number]
            actor.holders -= 1
            self.touched[actor] = None

    def killed(self, number: int, reason: str) -> None:
        """The program ends an actor."""
        actor = self.actors[number]
        actor.end_reason = reason
        self._repeat_kill(actor)

    def _repeat_kill(self, actor: CalledActor) -> None:
        """Send the order to end an actor, which a dispatcher that was lost may not have got, or
        that did not know the actor yet."""
        is_killed = actor.end_reason and actor.state is not ActorState.ENDED
        if is_killed and self._machine.registered:
            grace_s = self._machine._cancel_grace_s
            self._machine._send(DropActor(actor.number, actor.end_reason, grace_s))

    def find(self, request: int, name: str) -> None:
        """The program looks for an actor; with "" it does not wait any more."""
        if not name:
            self._searches.pop(request, None)
            return
        self._searches[request] = name
        if self._machine.registered:
            self._machine._send(FindActor(request, name))

    def refused(self) -> None:
        """End all searches, because the dispatcher has refused the coordinator for good."""
        for request in list(self._searches):
            self.found(ActorFound(request, 0))

    def schedule(self, call: MethodCall) -> None:
        """Take a new call."""
        actor = call.actor
        actor.queue.append(call)
        self.touched[actor] = None
        if call.extra is None:
            call.state = State.HELD  # from NEW
            self._machine.unfinished += 1
        else:
            self._machine._move(call, State.WAITING)
            self._machine._begin(call)

    def hold(self, call: MethodCall) -> None:
        """All inputs of a call are available."""
        self._machine._move(call, State.HELD)
        self.touched[call.actor] = None

    # -- calls -------------------------------------------------------------------------------------

    def left(self, call: MethodCall, before: State) -> None:
        """A call has ended, in this state."""
        actor = call.actor
        self.touched[actor] = None
        if before is State.CALLING and actor.calling.pop(call.number, None) is not None:
            actor.calling_bytes -= len(call.payload)
            if actor.is_connected:
                cancelled = CancelActorCalls([(call.number, call.attempt)])
                self._machine._effects.append(SendToActor(actor, cancelled))

    def results(self, actor: CalledActor, items: list[Result]) -> None:
        """Results of calls have arrived over the connection to this actor."""
        machine = self._machine
        self.touched[actor] = None
        for number, attempt, kind, payload in items:
            if kind == ITEM:
                if number in actor.calling:
                    actor.calling[number].items.put(payload)
                continue
            call = actor.calling.pop(number, None)
            if call is None:
                if kind == BULK:  # it was cancelled meanwhile
                    self._release(actor, number, attempt)
                continue
            actor.calling_bytes -= len(call.payload)
            if kind == BULK:
                machine._move(call, State.RECEIVING)
                self._receiving[number] = actor
                actor.receiving += 1
                machine._effects.append(Fetch(call, attempt, payload))
            elif kind == INPUT_LOST:
                reason = "the value of an input was lost with the process that had it"
                machine._finish(call, ACTOR_LOST, (reason, False))
            elif call.extra is None and kind in (VALUE, ERROR):
                machine._report(call, kind, payload)
                call.state = State.SUCCEEDED if kind == VALUE else State.FAILED
                del machine.works[number]
                machine.unfinished -= 1
            else:
                machine._finish(call, kind, payload)

    def taken(self, call: MethodCall, count: int) -> None:
        """The program has taken values of a generator."""
        if call.actor.is_connected:
            credit = StreamCredit(call.number, count)
            self._machine._effects.append(SendToActor(call.actor, credit))

    def received(self, number: int) -> bool:
        """The large result of a work item has arrived, is not needed, or cannot be reached (K7).
        Return whether the work item is a call."""
        actor = self._receiving.pop(number, None)
        if actor is None:
            return False
        actor.receiving -= 1
        self.touched[actor] = None
        self._release(actor, number, 0)
        return True

    def _release(self, actor: CalledActor, number: int, attempt: int) -> None:
        if actor.is_connected:
            self._machine._effects.append(SendToActor(actor, ResultReceived([(number, attempt)])))

    def send_calls(self) -> None:
        """Send the calls that may be sent (K1, K5), and drop the actors that are not needed (K6)."""
        touched, self.touched = self.touched, {}
        for actor in touched:
            if actor.queue:
                self._send_calls_of(actor)
            if actor.number in self.actors and not self._is_needed(actor):
                self._drop(actor)

    def _is_needed(self, actor: CalledActor) -> bool:
        if actor.holders or actor.queue or actor.calling or actor.receiving:
            return True
        if actor.state is ActorState.ENDED:
            return False
        # the next dispatcher must hear of it first
        is_unmade = actor.spec is not None and not actor.spec.owner and not actor.was_created
        return bool(actor.end_reason) or (is_unmade and not self._machine.registered)

    def _send_calls_of(self, actor: CalledActor) -> None:
        queue, calling = actor.queue, actor.calling
        if actor.state is ActorState.ENDED or self._is_hopeless(actor):
            while queue:
                self._refuse(queue.popleft())
            return
        calls: list[MethodCall] = []
        while queue and len(calling) < ACTOR_WINDOW_CALLS:
            call = queue[0]
            if call.state is State.HELD:
                if not actor.is_connected or actor.calling_bytes > ACTOR_WINDOW_BYTES:
                    break
                call.state = State.CALLING
                calling[call.number] = call
                actor.calling_bytes += len(call.payload)
                calls.append(call)
            elif call.state is State.WAITING:
                break
            queue.popleft()
        if calls:
            self._machine._effects.append(SendCalls(actor, calls))

    def _is_hopeless(self, actor: CalledActor) -> bool:
        """Return whether no call can be sent to the present incarnation, and no other is on the way
        (K8)."""
        if not actor.problem or actor in self.news_until:
            return False
        return actor.state is ActorState.LIVE or not actor.restarts_left

    def _refuse(self, call: MethodCall) -> None:
        """End a call that was not sent (K4)."""
        if call.state not in (State.HELD, State.WAITING):
            return
        actor = call.actor
        if actor.error:
            self._machine._finish(call, ERROR, actor.error)
        else:
            self._machine._finish(call, ACTOR_LOST, (actor.problem or actor.reason, False))

    def _end_sent_calls(self, actor: CalledActor, reason: str) -> None:
        """End the calls that were sent to an incarnation that has ended (K3)."""
        calls, actor.calling, actor.calling_bytes = list(actor.calling.values()), {}, 0
        self.news_until.pop(actor, None)
        for call in calls:
            self._machine._finish(call, ACTOR_LOST, (reason, True))

    def _end_incarnation(self, actor: CalledActor, reason: str) -> None:
        self._end_sent_calls(actor, reason)
        if actor.address:
            actor.address, actor.problem, actor.is_connected = "", "", False
            self._machine._effects.append(DisconnectActor(actor))

    # -- connections to actors ---------------------------------------------------------------------

    def connected(self, actor: CalledActor) -> None:
        if actor.calling:
            # the actor has dropped them, because their connection was lost
            self._end_sent_calls(actor, "the connection to its process was lost")
        actor.is_connected, actor.problem = True, ""
        self.news_until.pop(actor, None)
        self.touched[actor] = None

    def disconnected(self, actor: CalledActor, problem: str, now: float) -> None:
        actor.is_connected = False
        if actor.state in _UNPLACED:
            self._end_incarnation(actor, problem or actor.reason)
        elif problem:  # it refuses this program, or has ended: another incarnation may follow
            self._end_sent_calls(actor, problem)
            actor.problem = problem
            self.news_until[actor] = now + NEWS_S
        elif actor.calling:
            self.news_until[actor] = now + NEWS_S

    def tick(self, now: float) -> None:
        for actor, news_until in list(self.news_until.items()):
            if news_until <= now:
                self._end_sent_calls(
                    actor, actor.reason or "the connection to its process was lost"
                )
                self.touched[actor] = None

    # -- the dispatcher ----------------------------------------------------------------------------

    def dispatcher_registered(self) -> None:
        """A dispatcher has registered the coordinator, perhaps a new one."""
        owned = [
            actor
            for actor in self.actors.values()
            if actor.spec is not None and actor.state is not ActorState.ENDED
        ]
        if self._has_created:
            self._machine._send(ActorsOwned([actor.number for actor in owned]))
        for actor in self.actors.values():
            if actor.spec is None and actor.state is not ActorState.ENDED:
                self._machine._send(WatchActor(actor.number))
        for actor in owned:
            self._create(actor)
        for actor in self.actors.values():
            self.touched[actor] = None
            self._repeat_kill(actor)
        for request, name in self._searches.items():
            self._machine._send(FindActor(request, name))

    def _create(self, actor: CalledActor) -> None:
        assert actor.spec is not None
        self._machine._send(
            CreateActor(actor.spec, actor.incarnation, actor.restarts_left, actor.was_created)
        )
        actor.was_created = self._has_created = True

    def found(self, message: ActorFound) -> None:
        if self._searches.pop(message.request, None) is not None:
            self._machine._effects.append(ActorSearched(message))

    def changed(self, message: ActorChanged) -> None:
        """The dispatcher says where an actor is, or how it has ended."""
        actor = self.actors.get(message.actor)
        if actor is None or actor.state is ActorState.ENDED:
            return
        if message.incarnation < actor.incarnation and message.state != ActorState.ENDED:
            return
        state = ActorState(message.state)
        # A dispatcher that does not know yet that the process lives must not end its calls: while
        # there is a connection, it says more than the dispatcher.
        is_ended = state is ActorState.ENDED or (state in _UNPLACED and not actor.is_connected)
        is_new = message.incarnation > actor.incarnation
        # before the ends of calls, so that a group has begun again when its program sees these
        self._machine._effects.append(ActorReported(actor, state, message.reason))
        if is_ended or is_new:
            self._end_incarnation(actor, message.reason or "its process has ended")
        actor.state, actor.worker, actor.reason = state, message.worker, message.reason
        actor.incarnation = max(actor.incarnation, message.incarnation)
        actor.restarts_left, actor.error = message.restarts_left, message.error
        # a process that is to stop has no address
        if state is ActorState.LIVE and message.address and not actor.address:
            actor.address, actor.key = message.address, message.key
            self._machine._effects.append(ConnectActor(actor))
        if state is ActorState.LIVE:
            self._repeat_kill(actor)
        if state is ActorState.LIVE and actor.spec is not None:
            self._machine._send(ActorKnown(actor.number, actor.incarnation))
        self.touched[actor] = None

    def give_up(self, problem: bytes) -> None:
        """End the calls that wait for an actor, because the cluster is lost."""
        for actor in self.actors.values():
            if not actor.is_connected:
                for call in list(actor.queue):
                    if call.state is State.HELD:
                        self._machine._finish(call, UNAVAILABLE, problem)

    def _drop(self, actor: CalledActor) -> None:
        del self.actors[actor.number]
        if actor.address:
            actor.address, actor.is_connected = "", False
            self._machine._effects.append(DisconnectActor(actor))
        # a handle that comes back from elsewhere does not make the actor again
        spec, actor.spec = actor.spec, None
        if not self._machine.registered or actor.state is ActorState.ENDED:
            return  # the next registration does not name it
        if spec is None or not spec.owner:
            self._machine._send(WatchActor(actor.number, stop=True))
        else:
            self._machine._send(DropActor(actor.number, "its program holds no handle any more"))
