"""`Work`: the record of one work item of a coordinator, with the states that it passes through.

The program's thread makes the record. The machine (machine.py) alone changes `state`, `attempt` and
the fields of `Extra` that say so. The runtime sets `kind` and `outcome` when the machine reports the
end, with the coordinator's lock held. The payload, the outcome and the held data are opaque to the
machine.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from zmqdist.errors import LostStart
from zmqdist.messages import SUBMISSION_SHIFT, ActorSpec
from zmqdist.scheduling.coordinator.options import PLAIN, Retries, WorkOptions
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.transitions import enter

LOST: Final = 10
"""A way in which work ends: each of its starts was lost, and the dispatcher allows no further
start."""
UNAVAILABLE: Final = 11
"""A way in which work ends: there was no dispatcher or no worker for too long, or its result cannot
be reached."""
INPUT_FAILED: Final = 12
"""A way in which work ends: an input has failed."""
TIMED_OUT: Final = 13
"""A way in which work ends: its `until` has passed."""
ACTOR_LOST: Final = 14
"""A way in which a call of an actor ends: the actor, or its process, has ended."""


class State(enum.IntEnum):
    """The state of a work item of a coordinator."""

    NEW = enum.auto()
    """The program has made it, and the machine has not got it yet."""
    WAITING = enum.auto()
    """It waits for inputs, or for the end of the round."""
    QUEUED = enum.auto()
    """It is to be submitted to the dispatcher."""
    SUBMITTED = enum.auto()
    """The dispatcher has it."""
    TAKING_BACK = enum.auto()
    """The dispatcher was asked to cancel it unless it has begun."""
    CANCELLING = enum.auto()
    """The dispatcher was asked to cancel it."""
    FETCHING = enum.auto()
    """Its large result is on the way to this process."""
    HELD = enum.auto()
    """A call of an actor that waits for its turn, or until the actor can be called."""
    CALLING = enum.auto()
    """The call was sent to the actor."""
    RECEIVING = enum.auto()
    """The large result of the call is on the way to this process."""
    KEPT = enum.auto()
    """A worker keeps its value."""
    DECIDING = enum.auto()
    """Its function raised, and the program decides whether it runs again."""
    DELAYED = enum.auto()
    """Its function raised, and runs again later."""
    VALUE_LOST = enum.auto()
    """Its kept value is lost, and can be recomputed."""
    SUCCEEDED = enum.auto()
    """It has ended with a value, and no worker needs to keep the value."""
    FAILED = enum.auto()
    """It has ended without a value, or its value is lost for good."""
    ABANDONED = enum.auto()
    """It has ended, and the dispatcher has yet to confirm that it does not run any more."""


ENDED: Final = frozenset({State.SUCCEEDED, State.FAILED})
_RESULTS: Final = ENDED | {
    State.WAITING,  # a retry, or an input was lost
    State.DECIDING,
    State.QUEUED,  # submitted anew, to another dispatcher
    State.FETCHING,
    State.KEPT,
    State.VALUE_LOST,  # the round ends while the value is recomputed
}

TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.NEW: frozenset({State.WAITING, State.QUEUED, State.HELD, State.FAILED}),
    State.WAITING: ENDED | {State.QUEUED, State.HELD, State.VALUE_LOST},
    State.HELD: frozenset({State.CALLING, State.FAILED}),
    State.CALLING: ENDED | {State.RECEIVING},
    State.RECEIVING: ENDED,
    State.QUEUED: ENDED | {State.SUBMITTED, State.WAITING, State.VALUE_LOST},
    State.SUBMITTED: _RESULTS | {State.TAKING_BACK, State.CANCELLING, State.ABANDONED},
    State.TAKING_BACK: _RESULTS | {State.SUBMITTED, State.CANCELLING, State.ABANDONED},
    State.CANCELLING: _RESULTS | {State.ABANDONED},
    State.FETCHING: _RESULTS,
    State.KEPT: ENDED | {State.VALUE_LOST},
    State.DECIDING: ENDED | {State.DELAYED, State.VALUE_LOST},
    State.DELAYED: ENDED | {State.WAITING, State.VALUE_LOST},
    State.VALUE_LOST: ENDED | {State.WAITING},
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: ENDED,
}

AT_DISPATCHER: Final = frozenset({State.SUBMITTED, State.TAKING_BACK, State.CANCELLING})
"""The dispatcher has the work and owes its result."""
AWAITING_RESULT: Final = AT_DISPATCHER | {State.FETCHING}
ATTEMPTED: Final = AWAITING_RESULT | {State.QUEUED}
RETRYING: Final = frozenset({State.DECIDING, State.DELAYED})
IN_PROGRAM: Final = RETRYING | {State.WAITING}
"""It waits in this process."""
UNFINISHED: Final = ATTEMPTED | IN_PROGRAM | {State.HELD, State.CALLING, State.RECEIVING}


NO_WORKS: Final[set[Any]] = frozenset()  # type: ignore[assignment]
NO_DEPENDENTS: Final[dict[Any, None]] = {}
NO_USED: Final[dict[Any, int]] = {}
NO_INPUTS: Final[dict[int, Any]] = {}
NO_PACKED: Final[dict[int, bytes]] = {}
NO_BULKS: Final[list[int]] = []
"""Stand for what a work item does not have, and are never changed: new empty containers for each
work item would take most of the memory of an Extra."""


class KeptAt(NamedTuple):
    """Where the value of an attempt is, which its worker keeps. `lineage` says whether the value is
    recomputed when it is lost."""

    attempt: int
    reference: bytes
    lineage: bool


class Work:
    """One work item. A million may be unfinished, so the record is small: fields that few work items
    need are in `extra`.

    Attributes:
      number, function: the number of the work item in its coordinator, and of its function.
      payload: the packed arguments.
      name: the name of the function, or the `name` of its options.
      state: where the work item is.
      attempt: the first attempt of the present submission. The attempt that has computed the value,
        while the value is fetched or kept.
      kind, outcome: how it has ended, once `kind` is not None.
      waiters: what is released at the end: locks of waiting threads, and callbacks.
      alive: what keeps the coordinator open while the program holds the RemoteValue of this pending
        work; None once the program has dropped it, or the work has ended in this process.
      extra: the rare fields, or None.
    """

    __slots__ = (
        "alive",
        "attempt",
        "extra",
        "function",
        "kind",
        "name",
        "number",
        "outcome",
        "payload",
        "state",
        "waiters",
    )

    def __init__(
        self, number: int, function: int, name: str, payload: bytes, alive: object = True
    ) -> None:
        self.number = number
        self.function = function
        self.name = name
        self.payload = payload
        self.alive = alive
        self.state = State.NEW
        self.attempt = 0
        self.kind: int | None = None
        self.outcome: Any = None
        self.waiters: list[Any] | None = None
        self.extra: Extra | None = None

    def __repr__(self) -> str:
        return f"<work {self.number} {self.state.name} {self.attempt}>"

    def move(self, state: State) -> None:
        """Change the state. Raises InternalError if TRANSITIONS has no such transition."""
        self.state = enter(TRANSITIONS, self.state, state, "work", self.number)

    def begin_attempts(self) -> None:
        """Begin a new range of attempt numbers, so that no late message about an earlier submission
        is taken for one about the next."""
        self.attempt = ((self.attempt >> SUBMISSION_SHIFT) + 1) << SUBMISSION_SHIFT

    def is_of_present(self, attempt: int) -> bool:
        """Return whether this attempt belongs to the present submission."""
        return not (self.attempt ^ attempt) >> SUBMISSION_SHIFT

    def with_extra(self) -> Extra:
        """Return `extra`, which is made if it is missing."""
        extra = self.extra
        if extra is None:
            extra = self.extra = Extra()
        return extra

    @property
    def is_detached(self) -> bool:
        """Whether it belongs to no round."""
        return self.extra is not None and self.extra.options.detached

    def drop_extra(self) -> None:
        """Drop `extra`, because the work has ended, and no message about an attempt counts any
        more. `attempts` stays what it is."""
        self.attempt += len(self.lost_starts) << SUBMISSION_SHIFT
        self.extra = None

    @property
    def attempts(self) -> int:
        """How often it has begun, or was submitted again, for error texts."""
        return (self.attempt >> SUBMISSION_SHIFT) + len(self.lost_starts) + 1

    @property
    def lost_starts(self) -> tuple[LostStart, ...]:
        """The lost starts of the present attempt."""
        return () if self.extra is None else self.extra.lost_starts


class CalledActor:
    """An actor that this program calls.

    Attributes:
      spec: what the actor is, if this coordinator owns it or has made it; None otherwise.
      state, incarnation, restarts_left, worker, reason: as the dispatcher has last said.
      address, key: where the present incarnation is called.
      is_connected: whether there is a connection to it.
      problem: why there will be none to the present incarnation; "" if there may be one.
      queue: the calls that were not sent, in order; among them may be some that have ended.
      calling: the calls that were sent and have not ended, by number.
      receiving: the number of large results that are on the way.
      uses: the handles among the arguments of `__init__`, which live as long as this record.
      holders: how many objects of the program keep the actor.
      end_reason: why the program ends the actor; "" if it does not.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "calling",
        "calling_bytes",
        "cls",
        "end_reason",
        "error",
        "holders",
        "incarnation",
        "is_connected",
        "key",
        "number",
        "problem",
        "queue",
        "reason",
        "receiving",
        "restarts_left",
        "spec",
        "state",
        "uses",
        "was_created",
        "worker",
    )

    def __init__(self, number: int, cls: str, spec: ActorSpec | None = None) -> None:
        self.number, self.cls, self.spec = number, cls, spec
        self.state = ActorState.PENDING
        self.incarnation, self.restarts_left = 0, -1
        self.address = self.worker = self.reason = self.end_reason = self.problem = ""
        self.key = self.error = b""
        self.is_connected = self.was_created = False
        self.queue: deque[MethodCall] = deque()
        self.calling: dict[int, MethodCall] = {}
        self.calling_bytes = self.receiving = self.holders = 0
        self.uses: Sequence[Any] = ()

    def __repr__(self) -> str:
        return f"<actor {self.cls} {self.state.name} {self.incarnation}>"


class _NoItems:
    """The queue of a call that is no stream."""

    def put(self, item: bytes | None) -> None:
        """Drop the value."""


NO_ITEMS: Final = _NoItems()


class MethodCall(Work):
    """A call of an actor's method. It belongs to no round. `items` are the packed values of a
    generator that have arrived; None ends them."""

    __slots__ = ("actor", "items", "method")

    def __init__(
        self,
        number: int,
        actor: CalledActor,
        method: str,
        name: str,
        payload: bytes,
        alive: object = True,
    ) -> None:
        super().__init__(number, 0, name, payload, alive)
        self.actor, self.method = actor, method
        self.items: Any = NO_ITEMS

    @property
    def is_detached(self) -> bool:
        return True


class Extra:
    """The fields of a work item that few work items need.

    Attributes (of the program):
      options, keep, retries, policy, until, timeout, lineage: as in options.py. `retries` falls
        with each attempt that ends with an error of the function.
      inputs: the work items whose values the function needs.
      parts: the number of parts of the result; 0 if the result is one value.

    Attributes (of the machine):
      missing: the inputs for which the work item waits.
      dependents: the work items that wait for this one, in order of arrival.
      waits_since: the time since which it waits for inputs, until it is submitted; or 0.
      again_at: the time at which the work item runs again, if it is DELAYED.
      used: the attempt that had computed each kept input, for the latest attempt of this work item.
      lost_starts: the lost starts since the last retry.
      value_attempt: the attempt that computed the kept value; -1 before the first success.
      recomputations: how often the lost value was recomputed.
      is_requested: whether the program has requested the lost value, so that the value must be
        recomputed when the round is over.
      is_dropped: whether the program has dropped the value while it was recomputed.

    Attributes (of the runtime):
      input_values: the RemoteValues of the inputs, by work number, which keep the values alive.
      packed_inputs: the packed values of inputs that are in this process, by work number.
      bulks: the numbers under which the store holds large arguments.
      uses: objects that must stay alive until the work has ended.
      counted: what the bound of the queue counts: packed bytes and numbers in the store.
      scheduled_at: the time at which it was scheduled, if metrics are recorded.
    """

    __slots__ = (
        "again_at",
        "bulks",
        "counted",
        "dependents",
        "input_values",
        "inputs",
        "is_dropped",
        "is_requested",
        "keep",
        "lineage",
        "lost_starts",
        "missing",
        "options",
        "packed_inputs",
        "parts",
        "policy",
        "recomputations",
        "retries",
        "scheduled_at",
        "timeout",
        "until",
        "used",
        "uses",
        "value_attempt",
        "waits_since",
    )

    def __init__(
        self,
        options: WorkOptions = PLAIN,
        *,
        keep: bool = False,
        retries: int = 0,
        until: float | None = None,
        lineage: bool = False,
        inputs: Sequence[Work] = (),
    ) -> None:
        self.options, self.keep, self.retries = options, keep, retries
        self.until, self.lineage, self.inputs = until, lineage, inputs
        self.timeout: float | None = None
        self.policy: Retries | None = None
        self.parts = 0
        self.missing: set[Work] = NO_WORKS
        self.dependents: dict[Work, None] = NO_DEPENDENTS
        self.used: dict[Work, int] = NO_USED
        self.lost_starts: tuple[LostStart, ...] = ()
        self.value_attempt = -1
        self.again_at = self.waits_since = 0.0
        self.recomputations = 0
        self.is_requested = self.is_dropped = False
        self.input_values: Mapping[int, Any] = NO_INPUTS
        self.packed_inputs: dict[int, bytes] = NO_PACKED
        self.bulks: list[int] = NO_BULKS
        self.uses: Sequence[Any] = ()
        self.counted: tuple[int, tuple[int, ...]] | None = None
        self.scheduled_at = 0.0
