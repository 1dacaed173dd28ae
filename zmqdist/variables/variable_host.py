"""The variable host: the part of every task's server that holds the variables of programs.

Rules
    A program opens a *session* under a random number that it draws, and numbers its variables
    itself. So every request can be repeated: a second `create` finds the variable that the first
    `create` has made, and an update has an id (updates_machine.py). The reply to a request for an
    unknown session or variable is ABORTED, because this process was restarted, or has dropped the
    session or variable. The variable host uses ABORTED for no other error.
    Only the loop uses the tables. The loop executes requests up to PS_LOOP_BYTES_MAX, and threads
    execute larger requests. The thread or loop that executes a request holds the locks of the
    request's variables. An update of several variables holds all their locks, and changes all
    variables or none.
    The variable host replies to an update of a synchronous step when the step is applied. No thread
    waits for this. Pickles are accepted only from roles that may send code.

Not here: the effect of a change (hosted_variable.py), which update is applied (updates_machine.py),
when requests are repeated (client.py).

AppliedUpdates: the record of the updates with a key that are part of the value of each variable in
a session. A restarted parameter server needs this record, so that it applies no update twice.
    An update is recorded under the locks of the variables that it changes, so that the record
    agrees with the value that is saved at the same time. A variable is restored from a checkpoint
    together with the record of the updates that its value contains. A repeated update skips the
    variables that contain it already, and changes the other variables.
    The record has at most PS_UPDATE_KEYS_MAX updates.

Not here: replies to requests while an update is being executed (variable_host.py,
updates_machine.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from zmqdist import clock as time
from zmqdist.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnknownError,
)
from zmqdist.limits import (
    PS_CLIENTS_MAX,
    PS_FUNCTIONS_MAX,
    PS_LOOP_BYTES_MAX,
    PS_PROGRAM_GONE_S,
    PS_UPDATE_KEYS_MAX,
    VARIABLES_SHOWN_MAX,
)
from zmqdist.messages import ServerFacts, VariableFacts
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.specs import TensorSpec
from zmqdist.transport.router import Peer, Router
from zmqdist.variables.hosted_variable import HostedVariable, Sum, cast
from zmqdist.variables.updates_machine import (
    APPLIED,
    LATE,
    KeptSessions,
    Repeated,
    Update,
    Updates,
)
from zmqdist.wire import trusted

AppliedUpdate: TypeAlias = "tuple[int, bool]"
"""The outcome of an update for one variable: the variable's version, and whether the update changed
it."""


class _Saved(msgspec.Struct):
    """The saved updates of one variable.

    Attributes:
      step: the last synchronous step that was applied; -1 if no step was applied.
      updates: (key, version, changed) of each update.
    """

    step: int
    updates: list[tuple[str, int, bool]]


class AppliedUpdates:
    """The updates of one session that have a key. Threads may share this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updates: OrderedDict[str, tuple[tuple[int, int, bool], ...]] = OrderedDict()

    def of(self, key: str) -> dict[int, AppliedUpdate]:
        """Return the variables that contain the update with this key, as a dict: number of the
        variable -> outcome for this variable."""
        with self._lock:
            return {
                number: (version, changed)
                for number, version, changed in self._updates.get(key, ())
            }

    def note(self, key: str, outcomes: Iterable[tuple[int, int, bool]]) -> None:
        """Record that variables contain the update with this key. `outcomes` has (number, version,
        changed) of each variable. The caller holds the variables' locks.
        """
        with self._lock:
            self._updates[key] = (*self._updates.get(key, ()), *outcomes)
            if len(self._updates) > PS_UPDATE_KEYS_MAX:
                self._updates.popitem(last=False)

    def saved(self, number: int, step: int) -> bytes:
        """Return the encoded updates of a variable for `restore`; b"" if there are no updates and
        no steps. The caller holds the variable's lock.

        Args:
          step: the last synchronous step that was applied to the variable; -1 if no step was
            applied.
        """
        with self._lock:
            updates = [
                (key, version, changed)
                for key, outcomes in self._updates.items()
                for variable, version, changed in outcomes
                if variable == number
            ]
        return msgspec.json.encode(_Saved(step, updates)) if updates or step >= 0 else b""

    def restore(self, number: int, saved: bytes) -> int:
        """Restore the updates of a variable from the result of `saved`. Return the variable's last
        synchronous step. Raises InvalidArgumentError if `saved` is damaged.
        """
        if not saved:
            return -1
        try:
            record = msgspec.json.decode(saved, type=_Saved)
        except msgspec.DecodeError as error:
            raise InvalidArgumentError(
                f"the saved list of a variable's updates is damaged: {error}"
            ) from None
        for key, version, changed in record.updates:
            self.note(key, [(number, version, changed)])
        return record.step


Changes = Sequence[tuple[Any, ...]]


def is_small(variables: Sequence[HostedVariable], changes: Changes) -> bool:
    """Return whether the loop may execute an update, which is not large."""
    nbytes = 0
    for variable, change in zip(variables, changes, strict=True):
        nbytes += _touched_bytes(variable, change)
        if nbytes > PS_LOOP_BYTES_MAX or change[1] == "call":
            return False
    return True


def _touched_bytes(variable: HostedVariable, change: tuple[Any, ...]) -> int:
    """Return about how many bytes a change writes: those of the rows of a sparse one. The first
    step of an optimizer makes slots of the variable's size.
    """
    indices: Any = None
    if change[1] == "scatter":
        indices = change[-2]
    elif change[1] == "apply" and change[2] in variable.slots and type(change[-1]) is tuple:
        indices = change[-1][0] if change[-1] else None
    if isinstance(indices, np.ndarray) and indices.ndim:
        return len(indices) * variable.storage.row_bytes
    return variable.storage.nbytes


def apply_changes(
    variables: Sequence[HostedVariable],
    changes: Changes,
    function: Callable[[bytes], tuple[str, Any]],
) -> tuple[Any, ...]:
    """Execute one change of each variable. The caller holds all locks. If this raises an error of
    `HostedVariable.prepare`, no variable has changed.

    Returns:
      The version of each variable, and whether it was changed: (version, changed, version, changed,
      ...).
    """
    commits = [
        variable.prepare(change[1:], function)
        for variable, change in zip(variables, changes, strict=True)
    ]
    outcomes: list[Any] = []
    for variable, commit in zip(variables, commits, strict=True):
        changed = variable.commit(commit)
        outcomes += (variable.version, changed)
    return tuple(outcomes)


def apply_missing(
    applied: Mapping[int, AppliedUpdate],
    variables: Sequence[HostedVariable],
    changes: Changes,
    function: Callable[[bytes], tuple[str, Any]],
) -> tuple[Any, ...]:
    """Execute changes as `apply_changes` does, but skip the variables in `applied`, which contain
    the update already. For these variables, return the earlier outcomes.
    """
    missing = [index for index, change in enumerate(changes) if change[0] not in applied]
    outcomes = iter(
        apply_changes(
            [variables[index] for index in missing], [changes[index] for index in missing], function
        )
    )
    return tuple(
        item
        for change in changes
        for item in applied.get(change[0]) or (next(outcomes), next(outcomes))
    )


def with_values(results: Sequence[Any], variables: Sequence[HostedVariable]) -> tuple[Any, ...]:
    """Return a result of `apply_changes` with the values of the variables added: (version, changed,
    value, version, ...). The caller holds all locks.
    """
    outcomes = zip(results[::2], results[1::2], variables, strict=True)
    return tuple(
        item
        for version, changed, variable in outcomes
        for item in (version, changed, variable.read())
    )


def initial_value(label: str, initial: Any) -> Any:
    """Return the initial value of a variable as a new array. Raises UnknownError if the user's
    function raises, and InvalidArgumentError if the function's result has the wrong shape or dtype.
    """
    if isinstance(initial, TensorSpec):
        return np.zeros(initial.shape, initial.dtype)
    if not isinstance(initial, tuple):
        return np.array(initial, order="C")
    blob, spec, named = initial
    fn = trusted.unpack(blob)
    try:
        array = cast(fn(**named), spec.dtype, label)
    except OpError as error:
        raise UnknownError(f"the initializer of {label} raised: {error.message}") from error
    except Exception as error:
        raise UnknownError(
            f"the initializer of {label} raised {type(error).__name__}: {error}"
        ) from error
    if array.shape != tuple(spec.shape):
        text = f"the initializer of {label} made {array.dtype} of {array.shape}, wanted {spec.dtype} of {spec.shape}"
        raise InvalidArgumentError(text)
    return np.array(array, order="C")


PREFIX: Final = "zmqdist.ps."
ROLES: Final = frozenset({"worker", "submit"})
"""The roles that may use variables. Peers with these roles may also send code."""

_BY_STEP: Final = frozenset({"add", "sub", "apply", "call"})
"""Kinds of changes that a synchronous step can make. Their last item is a gradient, in place of
which the step uses the mean of its gradients.
"""

_Effect = Callable[[], None]


class _Session:
    def __init__(self) -> None:
        self.variables: dict[int, HostedVariable] = {}
        self.applied_updates = AppliedUpdates()
        self.watching: set[PendingCall] = set()


@dataclass(frozen=True, slots=True)
class _Request:
    """One request for an update. Several requests may wait for the same update, because a client or
    another process may repeat it.

    Attributes:
      want: whether the reply includes the new values.
    """

    call: PendingCall
    variables: list[HostedVariable]
    changes: Changes
    want: bool


class VariableHost:
    """The variables that one server holds for programs. The server makes this object before it
    serves requests."""

    def __init__(self, service: RpcService, router: Router, incarnation: int, name: str) -> None:
        """Register the methods at `service`; `name` is the task, such as "ps:1"."""
        self._service = service
        self._router = router
        self._incarnation = incarnation
        self._name = name
        self._kept_sessions = KeptSessions(PS_PROGRAM_GONE_S)
        self._sessions: dict[int, _Session] = {}
        self._updates = Updates(PS_CLIENTS_MAX)
        self._functions: OrderedDict[bytes, tuple[str, Callable[..., Any]]] = OrderedDict()
        for method in (
            "open",
            "close",
            "watch",
            "create",
            "function",
            "read",
            "rows",
            "saved",
            "update",
            "drop",
            "status",
            "facts",
        ):
            service.register_later(PREFIX + method, getattr(self, f"_{method}"), roles=ROLES)
        service.with_details = self._with_variables
        router.on_gone.append(self._peer_lost)

    # -- sessions ----------------------------------------------------------------------------------

    def _open(self, call: PendingCall, program: int, session: int) -> None:
        """Open a session, and drop the sessions of programs that have been disconnected for
        PS_PROGRAM_GONE_S.

        The reply is (incarnation of this ps, name of this ps, whether this ps had the session
        already).
        """
        present = [_holder(peer) for peer in self._router.peers]
        was_there = session in self._kept_sessions
        holder = _holder(call.peer)
        for dropped in self._kept_sessions.open(
            program, session, holder, present, time.monotonic()
        ):
            self._end(dropped, "was dropped: its program had gone")
        self._sessions.setdefault(session, _Session())
        call.reply((self._incarnation, self._name, was_there))

    def _watch(self, call: PendingCall, session: int) -> None:
        """Reply when the session is closed. If this process ends first, the client's call ends with
        an error, so the client notices both cases."""
        watching = self._session(session).watching
        watching.add(call)
        call.on_dropped(lambda: watching.discard(call))

    def _close(self, call: PendingCall, session: int) -> None:
        self._kept_sessions.close(session)
        # reply first: the watchers of a session that was closed must see no loss
        for watcher in self._sessions[session].watching if session in self._sessions else ():
            watcher.reply(None)
        self._end(session, "was closed")
        call.reply(None)

    def _peer_lost(self, peer: Peer) -> None:
        self._kept_sessions.disconnected(_holder(peer), time.monotonic())

    def _end(self, session: int, why: str) -> None:
        record = self._sessions.pop(session, None)
        if record is None:
            return
        for watcher in record.watching:  # a watcher to which `_close` has replied ignores the error
            watcher.fail(AbortedError(f"{self._name}: session {session} {why}"))
        for variable in record.variables.values():
            self._service.submit(self._abandon, variable, why)

    def _abandon(self, variable: HostedVariable, why: str) -> None:
        """Mark a variable as dropped, and fail the updates that wait in its steps. This runs in a
        thread of the pool."""
        with variable.lock:
            variable.drop_reason = why
            waiting: list[Any] = variable.steps.waiting()
        # the loop alone may touch `_updates`
        for update, _ in waiting:
            self._service.soon(self._fail, update, AbortedError(f"{variable.label} {why}"))

    def _session(self, session: int) -> _Session:
        record = self._sessions.get(session)
        if record is None:
            raise AbortedError(
                f"{self._name} does not know session {session}: {self._name} was restarted, or the "
                f"strategy was closed"
            )
        return record

    def _variables(self, session: int, numbers: Sequence[int]) -> list[HostedVariable]:
        variables = self._session(session).variables
        try:
            return [variables[number] for number in numbers]
        except KeyError as error:
            raise AbortedError(
                f"{self._name} has no variable {error.args[0]} in this session: it was dropped, or "
                f"not made"
            ) from None

    # -- variables ---------------------------------------------------------------------------------

    def _create(
        self,
        call: PendingCall,
        session: int,
        number: int,
        name: str,
        initial: Any,
        earlier: Any = None,
    ) -> None:
        """Create a variable, unless it exists; reply with its spec.

        `initial` is the first value: an array, a TensorSpec for zeros, or a pickled function with
        the spec of its result and its keyword arguments. `earlier` is the state of a lost variable
        that the new variable continues: its version, and the slots and updates from `saved`.
        """
        record = self._session(session)
        # `create` is repeated after a lost reply
        if number in record.variables:
            self._note_created(call, record, number, record.variables[number])
        else:
            self._service.submit(
                self._make, call, record, number, name, initial, earlier, refuse=call.fail
            )

    def _make(
        self,
        call: PendingCall,
        session: _Session,
        number: int,
        name: str,
        initial: Any,
        earlier: Any,
    ) -> None:
        label = f"variable {name!r} on {self._name}"
        try:
            variable = HostedVariable(label, name, initial_value(label, initial))
            if earlier is not None:
                version, slots, updates = earlier
                variable.resume(version, slots)
                variable.steps.applied = session.applied_updates.restore(number, updates)
        except BaseException as error:
            call.fail(error)
        else:
            self._service.soon(self._note_created, call, session, number, variable)

    def _note_created(
        self, call: PendingCall, session: _Session, number: int, variable: HostedVariable
    ) -> None:
        value = session.variables.setdefault(number, variable).storage
        call.reply(TensorSpec(value.shape, value.dtype))

    def _drop(self, call: PendingCall, session: int, numbers: list[int]) -> None:
        variables = self._session(session).variables
        for number in numbers:
            dropped = variables.pop(number, None)
            if dropped is not None:
                self._service.submit(self._abandon, dropped, "was dropped")
        call.reply(None)

    def _function(self, call: PendingCall, digest: bytes, blob: bytes) -> None:
        """Store a user's update function, to which updates refer by its digest."""
        if digest not in self._functions:
            fn = trusted.unpack(blob)
            self._functions[digest] = trusted.describe(fn), fn
            if len(self._functions) > PS_FUNCTIONS_MAX:
                self._functions.popitem(last=False)
        call.reply(None)

    def _function_of(self, digest: bytes) -> tuple[str, Callable[..., Any]]:
        entry = self._functions.get(digest)
        if entry is None:
            raise FailedPreconditionError(
                f"{self._name} does not have this update function: send it"
            )
        return entry

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, call: PendingCall, session: int, numbers: list[int]) -> None:
        """Reply with version and value of each variable."""
        variables = self._variables(session, numbers)
        self._under_locks(
            call,
            variables,
            0,
            lambda: [(variable.version, variable.read()) for variable in variables],
        )

    def _rows(self, call: PendingCall, session: int, requests: list[Any]) -> None:
        """Reply with rows of several variables as a list of arrays. `wanted` has (number, indices
        or a range) of each variable."""
        variables = self._variables(session, [number for number, _ in requests])
        nbytes = sum(
            variable.storage.row_bytes
            * (len(indices) if isinstance(indices, np.ndarray) else variable.storage.shape[0])
            for variable, (_, indices) in zip(variables, requests, strict=True)
            if variable.storage.shape
        )
        self._under_locks(
            call,
            variables,
            nbytes,
            lambda: [
                variable.rows(indices)
                for variable, (_, indices) in zip(variables, requests, strict=True)
            ],
            sizes=False,
        )

    def _saved(self, call: PendingCall, session: int, numbers: list[int]) -> None:
        """Reply with version, value, slots and applied updates (variable_host.py) of each variable,
        read under all locks."""
        variables = self._variables(session, numbers)
        applied_updates = self._sessions[session].applied_updates
        self._under_locks(
            call,
            variables,
            0,
            lambda: [
                (
                    variable.version,
                    variable.read(),
                    variable.saved(),
                    applied_updates.saved(number, variable.steps.applied),
                )
                for number, variable in zip(numbers, variables, strict=True)
            ],
            here=False,
        )

    def _status(self, call: PendingCall) -> None:
        """Reply with the figures of this ps that `zmqdist status` shows."""
        variables = []
        for session, record in self._sessions.items():
            for number, variable in record.variables.items():
                variables.append(
                    {
                        "session": session,
                        "number": number,
                        "name": variable.name,
                        "shape": variable.storage.shape,
                        "dtype": str(variable.storage.dtype),
                        "bytes": variable.nbytes,
                        "version": variable.version,
                        "updates": variable.updates,
                        "bytes_in": variable.bytes_in,
                        "bytes_out": variable.bytes_out,
                    }
                )
        call.reply(
            {
                "task": self._name,
                "sessions": len(self._sessions),
                # The number of results that the ps keeps until their clients have received them.
                "answers": len(self._updates),
                "variables": variables,
            }
        )

    def _facts(self, call: PendingCall) -> None:
        """Reply with the encoded ServerFacts of this ps."""
        call.reply(msgspec.msgpack.encode(self._service.facts()))

    def _with_variables(self, facts: ServerFacts) -> ServerFacts:
        """Return the figures of this server with its variables. Any thread may call this."""
        variables = [
            (session, number, variable)
            for session, record in list(self._sessions.items())
            for number, variable in list(record.variables.items())
        ]
        largest = nlargest(
            VARIABLES_SHOWN_MAX, variables, key=lambda entry: entry[2].storage.nbytes
        )
        rows = [
            VariableFacts(
                session,
                number,
                variable.name,
                variable.storage.shape,
                str(variable.storage.dtype),
                variable.nbytes,
                variable.updates,
                variable.waits_s,
            )
            for session, number, variable in largest
        ]
        more = len(variables) - len(rows)
        return msgspec.structs.replace(facts, variables=rows, variables_more=more)

    def _under_locks(
        self,
        call: PendingCall,
        variables: Sequence[HostedVariable],
        nbytes: int,
        fn: Callable[[], Any],
        *,
        sizes: bool = True,
        here: bool = True,
    ) -> None:
        """Reply with the result of `fn()`, which is called under the locks of the variables. The
        loop calls `fn` if it reads few bytes and every lock is free; otherwise a thread of the pool
        calls it.

        Args:
          nbytes: number of bytes that `fn` reads.
          sizes: whether `fn` also reads the variables' values, whose bytes are then added to
            `nbytes`.
          here: whether the loop may call `fn`.
        """
        if sizes:
            nbytes += sum(variable.storage.nbytes for variable in variables)
        if here and nbytes <= PS_LOOP_BYTES_MAX and _lock_now(variables):
            try:
                call.reply(fn())
            finally:
                _unlock(variables)
            return
        self._service.submit(self._reply_under_locks, call, variables, fn, refuse=call.fail)

    def _reply_under_locks(
        self, call: PendingCall, variables: Sequence[HostedVariable], fn: Callable[[], Any]
    ) -> None:
        try:
            with ExitStack() as stack:
                for variable in sorted(set(variables), key=id):
                    stack.enter_context(variable.lock)
                # `reply` copies or freezes the arrays while the locks are held, because other
                # threads may change them later.
                call.reply(fn())
        except BaseException as error:
            call.fail(error)

    # -- updates -----------------------------------------------------------------------------------

    def _update(
        self,
        call: PendingCall,
        session: int,
        client: int,
        sequence: int,
        settled: int,
        want: bool,
        key: str,
        step: int,
        step_size: int,
        *changes: Any,
    ) -> None:
        """Execute an update of variables, or find the outcome of its earlier execution.

        Args:
          client, sequence, settled: the update's id, and the number up to which its client has all
            replies.
          want: whether the reply includes the new values.
          key: the key of the update in its session; "" if the update has no key.
          step, wanted: number of a synchronous step, and the number of updates that the step waits
            for; -1 and 0 outside steps.
          changes: (number, kind, ...) of each variable. No variable occurs twice. For one variable
            also number, kind, bytes of the value.

        The reply is a flat list with the fields of an UpdateOutcome for each variable. The reply is
        None if the client can no longer be waiting for it.
        """
        if type(changes[0]) is int:
            changes = (changes,)
        variables = self._variables(session, [change[0] for change in changes])
        if len(changes) > 1 and len(set(variables)) < len(changes):
            raise InvalidArgumentError(
                "the update names a variable twice: an update changes each variable at most once"
            )
        request = _Request(call, variables, changes, want)
        update = self._updates.begin(
            request, client, sequence, settled, key, self._sessions[session]
        )
        if isinstance(update, Repeated):
            self._reply_again(request, update.result)
        elif update is not None:
            self._begin(update, request, step, step_size)

    def _begin(self, update: Update, request: _Request, step: int, step_size: int) -> None:
        """Execute an update in the loop if it is small and every lock is free, otherwise in a
        thread of the pool."""
        variables = request.variables
        # A thread costs more than a small update; the loop must not wait for a lock that a
        # thread holds.
        if is_small(variables, request.changes) and _lock_now(variables):
            try:
                effects = self._carry_out(update, step, step_size)
            finally:
                _unlock(variables)
            for effect in effects:
                effect()
        else:
            self._service.submit(
                self._carry_out_in_thread,
                update,
                step,
                step_size,
                time.monotonic(),
                refuse=partial(self._fail, update),
            )

    def _carry_out_in_thread(self, update: Update, step: int, step_size: int, since: float) -> None:
        with ExitStack() as stack:
            for variable in sorted(_request_of(update).variables, key=id):
                stack.enter_context(variable.lock)
            waited_s = time.monotonic() - since
            for variable in _request_of(update).variables:
                variable.waits_s += waited_s
            effects = self._carry_out(update, step, step_size)
        for effect in effects:
            self._service.soon(effect)

    def _carry_out(self, update: Update, step: int, step_size: int) -> list[_Effect]:
        """Execute an update. The caller is the loop or a thread of the pool, and holds the locks.
        Return the functions that the loop must call next.
        """
        request = _request_of(update)
        try:
            if step >= 0:
                return self._push(update, step, step_size)
            outcome = self._carry_out_once(update)
        except BaseException as error:
            return [partial(self._fail, update, error)]
        request.call.reply(with_values(outcome, request.variables) if request.want else outcome)
        return [partial(self._finish, update, outcome, 1)]

    def _carry_out_once(self, update: Update) -> tuple[Any, ...]:
        """Execute an update outside synchronous steps. Skip each variable to which an update with
        the same key was applied before. The caller holds the locks.
        """
        request, key = _request_of(update), update.key
        if not key:
            return apply_changes(request.variables, request.changes, self._function_of)
        applied_updates = update.session.applied_updates
        applied = applied_updates.of(key)
        results = apply_missing(applied, request.variables, request.changes, self._function_of)
        outcomes = zip(request.changes, results[::2], results[1::2], strict=True)
        applied_updates.note(
            key,
            [(change[0], *outcome) for change, *outcome in outcomes if change[0] not in applied],
        )
        return results

    def _finish(self, update: Update, outcome: tuple[Any, ...], answered: int = 0) -> None:
        """Record that an update was executed, and reply to its requests, except the first
        `answered` requests. This runs in the loop."""
        self._updates.ended(update, outcome)
        for request in update.tickets[answered:]:
            self._reply_again(request, outcome)

    def _fail(self, update: Update, error: BaseException) -> None:
        if self._updates.failed(update):
            for request in update.tickets:
                request.call.fail(error)

    def _reply_again(self, request: _Request, outcome: Any) -> None:
        """Reply with the outcome of an earlier execution. If the request wants values, it gets the
        current values."""
        if outcome is None or not request.want:
            request.call.reply(outcome)
        else:
            self._under_locks(
                request.call, request.variables, 0, lambda: with_values(outcome, request.variables)
            )

    # -- synchronous steps -------------------------------------------------------------------------

    def _push(self, update: Update, step: int, step_size: int) -> list[_Effect]:
        """Add the gradients of an update to the sums of a synchronous step. The caller holds the
        locks. All gradients are checked before the first gradient is added, so that a refused
        update changes no sum.
        """
        request, gradients = _request_of(update), []
        for variable, change in zip(request.variables, request.changes, strict=True):
            gradient = variable.gradient(change[-1])
            # Only check here that the ps has the function, because the function runs later, with
            # the mean of the gradients.
            if change[1] == "call":
                self._function_of(change[2])
            elif change[1] in _BY_STEP:
                variable.prepare(change[1:], self._function_of)
            else:
                raise variable.wrong(
                    f"update {change[1]!r} has no gradient, so it cannot be part of a synchronous "
                    f"step"
                )
            if variable.drop_reason:
                raise AbortedError(f"{variable.label} {variable.drop_reason}")
            variable.steps.check(step, step_size)
            if step in variable.sums and not variable.sums[step].fits(gradient):
                raise variable.wrong(
                    f"step {step} has dense gradients and sparse gradients: they must be of one "
                    f"kind"
                )
            gradients.append(gradient)
        effects: list[_Effect] = []
        for index, gradient in enumerate(gradients):
            effects += self._push_gradient(update, index, gradient, step, step_size)
        return effects

    def _push_gradient(
        self, update: Update, index: int, gradient: Any, step: int, step_size: int
    ) -> list[_Effect]:
        request, key = _request_of(update), update.key
        variable, change = request.variables[index], request.changes[index]
        # another process repeats an update that the value contains already
        if key and (applied := update.session.applied_updates.of(key).get(change[0])) is not None:
            return [partial(self._settle, [(update, index)], applied, None)]
        pushed = variable.steps.push(step, (update, index), step_size)
        if pushed.verdict == LATE:
            return [partial(self._settle, [(update, index)], (variable.version, False), None)]
        total = variable.sums.setdefault(step, Sum())
        total.add(gradient)
        now = time.monotonic()
        total.since_s += now
        if pushed.verdict != APPLIED:
            return []
        variable.waits_s += len(pushed.applied) * now - total.since_s
        # no gradient can reach these sums any more
        for number in (step, *pushed.dropped):
            variable.sums.pop(number, None)
        error: BaseException | None = None
        try:
            variable.commit(
                variable.prepare((*change[1:-1], total.mean(step_size)), self._function_of)
            )
        except BaseException as failed:
            error = failed
        else:
            taking_part: Any = pushed.applied
            for member, _ in taking_part:
                if member.key:
                    member.session.applied_updates.note(
                        member.key, [(change[0], variable.version, True)]
                    )
        return [
            partial(self._settle, pushed.applied, (variable.version, True), error),
            partial(self._settle, pushed.late, (variable.version, False), None),
        ]

    def _settle(
        self, tickets: Sequence[Any], outcome: tuple[int, bool], error: BaseException | None
    ) -> None:
        """Record that a step has ended for one variable of each of these updates. Reply to an
        update when the step has ended for all variables of the update. This runs in the loop.
        """
        for update, index in tickets:
            if error is not None:
                self._fail(update, error)
                continue
            outcomes = update.outcomes
            outcomes[index] = outcome
            if len(outcomes) == len(_request_of(update).variables) and not update.over:
                ordered = [outcomes[position] for position in range(len(outcomes))]
                self._finish(update, tuple(chain.from_iterable(ordered)))


def _request_of(update: Update) -> _Request:
    """Return the first request for an update; those that repeat it name the same changes."""
    request: _Request = update.tickets[0]
    return request


def _lock_now(variables: Sequence[HostedVariable]) -> bool:
    """Lock all variables if no lock is held now, and return whether they are locked."""
    for index, variable in enumerate(variables):
        if not variable.lock.acquire(blocking=False):
            _unlock(variables[:index])
            return False
    return True


def _unlock(variables: Sequence[HostedVariable]) -> None:
    for variable in variables:
        variable.lock.release()


def _holder(peer: Peer) -> int:
    """Return the incarnation of the client at the other end of a connection, which stays the same
    when the client reconnects."""
    return 0 if peer.hello is None else peer.hello.incarnation
