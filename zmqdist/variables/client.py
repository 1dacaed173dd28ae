"""The client of a parameter server. A process has one PsClient for each ps, which sends all
requests of the process to that ps.

Rules
    If the connection ends while a caller waits for a request, the client repeats the request with
    the same id for PS_PATIENCE_S, because the process of the ps may still run. An update is applied
    only once nevertheless (updates_machine.py). PSUnavailableError means that the ps is lost, or
    was restarted and no longer knows the variables. It is raised at once if the kernel refuses the
    connection or another incarnation replies, otherwise after PS_PATIENCE_S. If the Ref has a
    `recovery_s`, the caller first waits that long for the variables to be recovered.
    A value that does not fit its variable is refused before a message is sent, with an
    InvalidArgumentError that names the variable. Requests to several ps can be in flight at the
    same time: a caller starts all of them, and then waits for each.

Not here: the public API (training), execution at the ps (variable_host.py).

A ps recognizes a repeated update by the sequence numbers of a client's updates (UpdateIds,
updates_machine.py).

Users' update functions: a function is pickled once for all parameter servers, which identify it
by the digest of the pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqdist import clock as time
from zmqdist import platforms, task_context
from zmqdist.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PSUnavailableError,
    UnavailableError,
)
from zmqdist.limits import PS_FUNCTIONS_MAX, PS_GONE_POLL_S, PS_LOSSES_MAX, PS_PATIENCE_S
from zmqdist.rpc import StatusOrResult, ZmqClient, internal_client
from zmqdist.rpc.client import new_incarnation
from zmqdist.specs import IndexedSlices, TensorSpec, plain_array
from zmqdist.transport.credentials import Credentials
from zmqdist.update_rules import UpdateRule
from zmqdist.variables.hosted_variable import cast
from zmqdist.variables.variable_host import PREFIX
from zmqdist.wire import trusted


@dataclass(frozen=True)
class PackedFunction:
    """A pickled function and its digest."""

    digest: bytes
    blob: bytes = field(repr=False)


_packed: Final[weakref.WeakKeyDictionary[Any, PackedFunction]] = weakref.WeakKeyDictionary()


def packed_function(fn: Callable[..., Any]) -> PackedFunction:
    """Return the pickle of a function with its digest. A function is pickled at its first use, so
    its pickle has the values that the function captured then. Raises InvalidArgumentError if `fn`
    cannot be pickled.
    """
    # a function that cannot be hashed or weakly referenced is pickled each time
    with contextlib.suppress(TypeError):
        if (cached := _packed.get(fn)) is not None:
            return cached
    blob = trusted.pack_function(fn)
    packed = PackedFunction(hashlib.blake2b(blob, digest_size=16).digest(), blob)
    with contextlib.suppress(TypeError):
        _packed[fn] = packed
    return packed


class UpdateIds:
    """The sequence numbers of one client. This class also computes the number up to which all
    updates are settled, which means that the client will not send them again.
    """

    def __init__(self) -> None:
        self.client = new_incarnation()
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        self._loose: dict[int, StatusOrResult] = {}
        self._settled: deque[tuple[int, StatusOrResult | None]] = deque()
        """Calls of `settled` that `next` has not processed yet. A finalizer may append at any
        moment."""

    def next(self) -> tuple[int, int, int]:
        """Return (client, sequence number, settled) for a new update. All updates with numbers up
        to `settled` are settled."""
        with self._lock:
            self._last += 1
            while self._settled:
                number, call = self._settled.popleft()
                if call is None:
                    self._open.pop(number, None)
                else:
                    self._loose[number] = call
            # a call whose owner has dropped it is settled when it ends, not before: it may be repeated
            for number in [number for number, call in self._loose.items() if call.done()]:
                del self._loose[number]
                self._open.pop(number, None)
            self._open[self._last] = None
            return self.client, self._last, next(iter(self._open)) - 1

    def settled(self, number: int, call: StatusOrResult | None) -> None:
        """Record that no caller waits for the result of this update any more. If the update's RPC
        call is still in flight, pass the call as `call`. The update is then settled when the call
        ends.

        This method takes no lock, because finalizers call it.
        """
        if number:
            self._settled.append((number, call))


FLAT_BYTES_MAX: Final = 4096
"""Bytes of the largest value that is sent as bytes, in a flat list of arguments, which is encoded and
decoded faster than an array."""

AGAIN_S: Final = 0.05
"""Seconds between two attempts to reach a lost ps, while the caller waits for its recovery."""


@dataclass(frozen=True)
class Ref:
    """The location and the spec of a variable. A Ref can be pickled, and holds no connection.

    Attributes:
      task: the ps that holds the variable, such as "ps:1"; for error texts.
      address: address of the task.
      session, number: the numbers that identify the variable at the task.
      recovery_s: seconds for which a caller waits for the variable if the ps has lost it; 0 means
        that the caller does not wait.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    task: str
    address: str
    session: int
    number: int
    recovery_s: float = 0.0

    def __str__(self) -> str:
        return f"variable {self.name!r} on {self.task} ({self.address})"

    def fit(self, value: Any) -> NDArray[Any]:
        """Return a value as an array of the variable's shape and dtype.

        Python numbers, and lists of them, are converted if the dtype can represent them; arrays are
        cast by NumPy's "same_kind" rule.

        Raises:
          InvalidArgumentError: the shape or dtype of the value does not fit; the text names the
            variable.
        """
        array = self.cast(value)
        if array.shape != self.shape:
            raise InvalidArgumentError(
                f"{self} has shape {self.shape}: a value of shape {array.shape} does not fit"
            )
        return array

    def cast(self, value: Any) -> NDArray[Any]:
        """Return a value as an array of the variable's dtype and of any shape. Raises
        InvalidArgumentError as `fit` does."""
        return cast(value, self.dtype, str(self))


class UpdateOutcome(NamedTuple):
    """The outcome of an update for one variable.

    Attributes:
      version: the variable's version after the update.
      applied: whether the value was changed. It is False if the condition of a swap was false, or
        if the step had ended already.
      value: the new value, if it was requested.
    """

    version: int
    applied: bool
    value: NDArray[Any] | None = None


# -- changes, in the form that variable_host.py accepts --------------------------------------------

Change = tuple[Any, ...]


def assign(ref: Ref, value: Any) -> Change:
    """Return the change that sets the value of a variable. Raises InvalidArgumentError if `value`
    does not fit the variable."""
    return ("assign", ref.fit(value))


def add(ref: Ref, value: Any) -> Change:
    """Return the change that adds an array to the value of a variable."""
    return ("add", ref.fit(value))


def sub(ref: Ref, value: Any) -> Change:
    """Return the change that subtracts an array from the value of a variable."""
    return ("sub", ref.fit(value))


def scatter(ref: Ref, op: str, slices: IndexedSlices) -> Change:
    """Return the change that updates rows of a variable by `op`, a key of storage.SCATTERS. A row
    that is named twice is updated twice."""
    return ("scatter", op, rows_of(ref, slices.indices), ref.cast(slices.values))


def swap(ref: Ref, value: Any, *, version: int | None = None, expected: Any = None) -> Change:
    """Return the change that sets the value if the old value equals `expected` and has this
    version. A condition that is None is not checked."""
    expected_value = None if expected is None else ref.fit(expected)
    return ("swap", -1 if version is None else version, expected_value, ref.fit(value))


def apply(ref: Ref, rule: UpdateRule | Callable[..., Any], gradient: Any) -> Change:
    """Return the change that makes a step of an optimizer, or of a function `fn(value, gradient,
    slots, step)` that runs at the ps.

    Args:
      rule: an UpdateRule, or a function that changes `value` in place or returns the new value.
        `slots` is a dict of arrays by name, in which the function can store arrays for its next
        run. A function is pickled at its first use.
      gradient: an array, or IndexedSlices.
    """
    if isinstance(rule, type) or (not callable(rule) and not isinstance(rule, UpdateRule)):
        expected = "an optimizer, such as SGD(0.1), or a function"
        raise InvalidArgumentError(f"{ref}: fn: apply() takes {expected}, not {rule!r}")
    is_sparse = isinstance(gradient, IndexedSlices)
    gradient_on_wire: Any = (
        (rows_of(ref, gradient.indices), ref.cast(gradient.values))
        if is_sparse
        else ref.fit(gradient)
    )
    if isinstance(rule, UpdateRule):
        return ("apply", *rule.to_wire(), gradient_on_wire)
    return ("call", packed_function(rule), gradient_on_wire)


def restore(ref: Ref, value: Any, slots: dict[str, Any]) -> Change:
    """Return the change that sets value and slots of a variable to a state that `PsClient.saved`
    has returned."""
    return ("restore", ref.fit(value), slots)


def rows_of(ref: Ref, indices: Any) -> NDArray[Any]:
    """Return indices of rows as an array. Raises InvalidArgumentError unless they are integers in
    one dimension."""
    array = plain_array(indices, str(ref))
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{ref}: indices are whole numbers in one dimension, not {array.dtype} of shape "
            f"{array.shape}"
        )
    return array


def rows_on_wire(ref: Ref, rows: Any) -> Any:
    """Return row numbers in the form in which the client sends them. A range is sent as its bounds,
    to save bytes. Raises as `rows_of` does."""
    return (rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows_of(ref, rows)


# -- requests in flight ----------------------------------------------------------------------------


class PsCall:
    """A request in flight to a ps. `get_value` waits for the reply, and repeats the request if
    necessary. Threads may share a PsCall."""

    def __init__(self, client: PsClient, request: _Request) -> None:
        self._client = client
        self._request = request
        self._lock = threading.Lock()
        self._outcome: tuple[Any, Exception | None] | None = None
        self._call: StatusOrResult | None = None
        self._unreachable: UnavailableError | None = None
        self._connect()

    def done(self) -> bool:
        """Return whether a reply or an error has arrived. Then `get_value` ends at once, unless it
        has to repeat the request."""
        return (
            self._outcome is not None
            or self._unreachable is not None
            or (self._call is not None and self._call.done())
        )

    def when_done(self, fn: Callable[[], object]) -> None:
        """Call `fn()` once as soon as `done()` is true: at once in this thread, or later in a
        thread of the client. `fn` must not block."""
        call = self._call
        if self.done() or call is None:
            fn()
        else:
            call.add_done_callback(lambda _: fn())

    def get_value(self) -> Any:
        """Wait for the reply, repeat the request if necessary, and return the value.

        Raises:
          PSUnavailableError: the ps is lost, or was restarted and no longer has the variables.
          DeadlineExceededError: the ps did not reply before the request's deadline.
          InvalidArgumentError: the ps refused the request, because it does not fit the variable.
          UnknownError: a user's update function has raised an error.
        """
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = self._request.read(self._wait()), None
                except Exception as error:
                    self._outcome = None, error
                self._client.settled(self._request, None)
        value, raised = self._outcome
        if raised is not None:
            raise raised
        return value

    def _wait(self) -> Any:
        recovery, losses, sent_again = inf, 0, False
        while True:
            if self._unreachable is not None:
                recovery = self._recover(recovery, self._unreachable)
                self._connect(PS_GONE_POLL_S)
                continue
            assert self._call is not None
            try:
                return self._call.get_value()
            except FailedPreconditionError:
                if not self._request.functions or sent_again:
                    raise
                # Send the functions again: the ps has dropped one of them, because it stores only
                # PS_FUNCTIONS_MAX functions.
                sent_again = True
                self._client.forget_sent(self._request.functions)
                self._connect()
            except AbortedError as error:
                # ABORTED always means that the ps has lost the variable or the session
                self._unreachable = UnavailableError(
                    f"{self._request.subject} is lost: {error.message}"
                )
            except (UnavailableError, CancelledError) as error:
                losses += 1
                self._client.reached = False
                if losses <= PS_LOSSES_MAX:
                    self._connect()
                else:
                    self._unreachable = UnavailableError(
                        f"{self._request.subject}: {error.message}"
                    )

    def _connect(self, patience_s: float = PS_PATIENCE_S) -> None:
        """Connect and send the request. If that fails, set `_unreachable`."""
        try:
            if not self._client.reached:
                self._client.reach(min(self._request.due, time.monotonic() + patience_s))
            self._call = self._client.call(self._request)
            self._unreachable = None
        except (UnavailableError, CancelledError) as error:
            self._unreachable = UnavailableError(
                f"{self._request.subject} cannot be reached: {error.message}"
            )

    def _recover(self, until: float, lost: UnavailableError) -> float:
        """Wait AGAIN_S, because the ps may be recovered meanwhile. Return the time at which the
        caller stops waiting for this recovery. The caller passes this time as `until` to the next
        call, and inf to the first call. Raise PSUnavailableError if the time has passed.
        """
        now = time.monotonic()
        if now >= self._request.due:
            raise DeadlineExceededError(lost.message)
        until = min(until, now + self._request.recovery_s)
        if now >= until:
            raise PSUnavailableError(lost, self._client.address)
        if why := self._client.gone():
            raise PSUnavailableError(
                UnavailableError(f"{lost.message}: {why}"), self._client.address
            )
        time.sleep(min(AGAIN_S, until - now))
        return until

    def __del__(self) -> None:
        if "_outcome" in self.__dict__ and self._outcome is None:
            self._client.settled(self._request, self._call)


@dataclass(slots=True)
class _Request:
    """The contents of a request. The client keeps them, so that it can repeat the request.

    Attributes:
      subject: name of the variables or the ps of the request, for error texts.
      functions: update functions that the ps needs to execute the request.
      sequence: sequence number if the request is an update; 0 for other requests.
    """

    subject: str
    method: str
    body: bytes
    sources: Sequence[Any]
    due: float
    recovery_s: float
    read: Callable[[Any], Any]
    functions: tuple[PackedFunction, ...]
    sequence: int


class PsClient:
    """This process's client of one ps. Threads may share it. `client_of` makes it, without waiting
    for the ps."""

    def __init__(self, address: str, credentials: Credentials, role: str = "submit") -> None:
        self.address = address
        self.credentials = credentials
        self.reached = False
        self.ask_when_lost(lambda: "")
        self._rpc = ZmqClient(address, security=credentials.client(address, role))
        self._ids = UpdateIds()
        self._reaching = threading.Lock()
        self._sent: set[bytes] = set()

    # -- sessions and variables --------------------------------------------------------------------

    def open(self, program: int, session: int) -> tuple[int, str, bool]:
        """Open a session. The ps keeps its variables until the session is closed, or until this
        process has had no connection for PS_PROGRAM_GONE_S and another program opens a session.

        Args:
          program: a random number of this process.

        Returns:
          Incarnation and task name of the ps, and whether the ps had this session already.
        """
        incarnation, task, was_there = self._start(
            f"the ps at {self.address}", "open", program, session
        ).get_value()
        return incarnation, task, was_there

    def close_session(self, session: int) -> PsCall:
        """Have the ps drop a session with its variables. Return the PsCall."""
        return self._start(f"the ps at {self.address}", "close", session)

    def watch(self, task: str, session: int, recovery_s: float) -> PsCall:
        """Send a request to which the ps replies when the session is closed. The request ends with
        an error when the ps is lost or has lost the session. Return the PsCall.
        """
        return self._start(f"{task} ({self.address})", "watch", session, recovery_s=recovery_s)

    def create(
        self, ref: Ref, initial: Any, earlier: tuple[int, dict[str, Any], bytes] | None = None
    ) -> PsCall:
        """Create a variable, unless it exists.

        Args:
          initial: the first value, which is an array, a TensorSpec for zeros, or the result of
            `initializer`.
          earlier: the state of a lost variable that the new variable continues: its version, and
            its slots and updates from `saved`.

        Returns:
          A PsCall whose value is the variable's TensorSpec.
        """
        return self._start(str(ref), "create", ref.session, ref.number, ref.name, initial, earlier)

    def drop(self, refs: Sequence[Ref]) -> PsCall:
        """Have the ps drop variables of one session. Return the PsCall."""
        return self._start(_subject(refs), "drop", refs[0].session, [ref.number for ref in refs])

    # -- values ------------------------------------------------------------------------------------

    def read(self, refs: Sequence[Ref], due: float = inf) -> PsCall:
        """Read variables of one session.

        Returns:
          A PsCall whose value is a list with (version, array) of each variable. An array of 1 MiB
          or more may be read-only. A program on the host of the ps gets large arrays in shared
          memory, without a copy.
        """
        args = refs[0].session, [ref.number for ref in refs]
        return self._start(_subject(refs), "read", *args, recovery_s=refs[0].recovery_s, due=due)

    def rows(self, wanted: Sequence[tuple[Ref, Any]], due: float = inf) -> PsCall:
        """Read rows of several variables.

        Args:
          wanted: for each variable its row numbers, in any order, or an ascending range.

        Returns:
          A PsCall whose value is a list of arrays, one for each variable.
        """
        refs = [ref for ref, _ in wanted]
        args = refs[0].session, [(ref.number, rows_on_wire(ref, rows)) for ref, rows in wanted]
        return self._start(_subject(refs), "rows", *args, recovery_s=refs[0].recovery_s, due=due)

    def saved(self, refs: Sequence[Ref], due: float = inf) -> PsCall:
        """Read the full state of variables atomically. `create` accepts parts of this state as
        `earlier`.

        Returns:
          A PsCall whose value is a list with (version, array, slots, updates) of each variable.
        """
        args = refs[0].session, [ref.number for ref in refs]
        return self._start(_subject(refs), "saved", *args, recovery_s=refs[0].recovery_s, due=due)

    def update(
        self,
        changes: Sequence[tuple[Ref, Change]],
        *,
        want: bool = False,
        key: str = "",
        step: int = -1,
        workers_per_step: int = 0,
        due: float = inf,
        still: bool = False,
    ) -> PsCall:
        """Change variables of one session. Either all variables change, or an error is raised and
        no variable changes.

        Args:
          changes: one change for each variable.
          want: whether the outcomes have the new values.
          key: identifies this update in its session: another update with the same key, from any
            process, changes nothing. "" means the key of the running scheduled function, if a
            scheduled function runs (task_context.py).
          step: number of a synchronous step, 0 or more. The ps collects the gradients of
            `workers_per_step` updates for this step, and applies their mean. With -1 the ps applies
            the update at once.
          due: when the caller stops waiting, on the clock of `time.monotonic`. The update may be
            applied nevertheless.
          still: whether the caller promises not to change the arrays in `changes` before the reply.

        Returns:
          A PsCall whose value is a list with an UpdateOutcome for each variable.
        """
        refs = [ref for ref, _ in changes]
        # The request itself contains only the digests of these functions, so the client keeps the
        # functions and sends them first.
        functions = tuple(change[1] for _, change in changes if change[0] == "call")
        id = self._ids.next()
        changes_on_wire: list[Any] = [
            (ref.number, "call", change[1].digest, change[2])
            if change[0] == "call"
            else (ref.number, *change)
            for ref, change in changes
        ]
        if (
            len(changes) == 1
            and len(changes[0][1]) == 2
            and changes[0][1][1].nbytes <= FLAT_BYTES_MAX
        ):
            kind, value = changes[0][1]
            changes_on_wire = [refs[0].number, kind, value.tobytes()]
        key = key or task_context.key_of(refs[0].number)
        args = refs[0].session, *id, want, key, step, workers_per_step, *changes_on_wire
        return self._start(
            _subject(refs),
            "update",
            *args,
            recovery_s=refs[0].recovery_s,
            due=due,
            still=still,
            read=_outcomes_with_values if want else _outcomes,
            functions=functions,
            sequence=id[1],
        )

    def status(self, due: float = inf) -> PsCall:
        """Request the figures of the ps. Return a PsCall whose value is the dict that
        variable_host.py builds."""
        return self._start(f"the ps at {self.address}", "status", due=due)

    def facts(self, due: float) -> StatusOrResult:
        """Request the figures of the ps for the facts of a dispatcher, an encoded ServerFacts. The
        request is not repeated."""
        return internal_client.start(self._rpc, PREFIX + "facts", due=due, waits_for_server=False)

    def close(self) -> None:
        """End the connection and all requests in flight. The next `client_of` makes a new
        client.
        """
        with _lock:
            if _clients.get(self.address) is self:
                del _clients[self.address]
        self._rpc.close()

    # -- requests ----------------------------------------------------------------------------------

    def _start(
        self,
        subject: str,
        method: str,
        *args: Any,
        recovery_s: float = 0.0,
        due: float = inf,
        still: bool = False,
        read: Callable[[Any], Any] = lambda reply: reply,
        functions: tuple[PackedFunction, ...] = (),
        sequence: int = 0,
    ) -> PsCall:
        try:
            body, sources = internal_client.packed(self._rpc, args, still=still)
        except BaseException:
            self._ids.settled(sequence, None)
            raise
        # Copy the arrays, because the request may be repeated after the caller has changed them.
        # A repeated request must send the same bytes, so later changes by the caller must not reach
        # them.
        if sources and not still:
            sources = [
                bytes(source) if isinstance(source, memoryview) else source for source in sources
            ]
        request = _Request(
            subject,
            PREFIX + method,
            body,
            sources,
            due,
            recovery_s,
            read,
            functions=functions,
            sequence=sequence,
        )
        return PsCall(self, request)

    def call(self, request: _Request) -> StatusOrResult:
        """Send the update functions that the request needs, and then the request. Raises
        UnavailableError if the connection has ended."""
        for fn in request.functions:
            if fn.digest not in self._sent:
                send = internal_client.start(
                    self._rpc, PREFIX + "function", fn.digest, fn.blob, waits_for_server=False
                )
                send.get_value()
                # the ps keeps no more functions than that, and forgets the oldest
                if len(self._sent) >= PS_FUNCTIONS_MAX:
                    # The ps stores at most PS_FUNCTIONS_MAX functions, so it may have dropped any
                    # function that was sent before.
                    self._sent.clear()
                self._sent.add(fn.digest)
        return internal_client.start_packed(
            self._rpc,
            request.method,
            request.body,
            request.sources,
            due=request.due,
            waits_for_server=False,
            later=bool(request.sequence) and task_context.may_send_later(),
        )

    def reach(self, until: float) -> None:
        """Make sure that the ps is connected. If several threads call this, one thread connects and
        the others wait for that thread.

        Raises:
          UnavailableError: no process listens at the address, or no reply arrives before `until`.
        """
        # Take the time before the lock, because the error text must count the wait for another
        # thread's attempt, too.
        began = time.monotonic()
        with self._reaching:
            if self.reached:
                return
            try:
                internal_client.reach(self._rpc, until)
            except DeadlineExceededError:
                raise UnavailableError(
                    f"no reply from {self.address} for {time.monotonic() - began:.1f} s"
                ) from None
            # the ps may have been restarted, and then it has none of the functions
            self._sent.clear()
            self.reached = True

    def ask_when_lost(self, why_gone: Callable[[], str]) -> None:
        """Set the function that returns why the ps does not start again, or "" if it may. Requests
        that wait for a lost ps call it."""
        self._ask_reason = why_gone
        self._loss_reason = ""
        self._asked_at = -inf

    def gone(self) -> str:
        """Return why the ps does not start again, or "" if it may. Asks at most once in
        PS_GONE_POLL_S."""
        now = time.monotonic()
        if not self._loss_reason and now >= self._asked_at + PS_GONE_POLL_S:
            self._asked_at = now
            self._loss_reason = self._ask_reason()
        return self._loss_reason

    def forget_sent(self, functions: Sequence[PackedFunction]) -> None:
        """Record that the ps may have dropped these functions, so that they are sent again before
        their next use."""
        self._sent.difference_update(fn.digest for fn in functions)

    def settled(self, request: _Request, call: StatusOrResult | None) -> None:
        """Record that no caller waits for the request any more. `UpdateIds.settled` describes
        `call`."""
        self._ids.settled(request.sequence, call)


def _outcomes(reply: Any) -> list[UpdateOutcome] | None:
    return None if reply is None else list(map(UpdateOutcome, reply[::2], reply[1::2]))


def _outcomes_with_values(reply: Any) -> list[UpdateOutcome] | None:
    return None if reply is None else list(map(UpdateOutcome, reply[::3], reply[1::3], reply[2::3]))


def _subject(refs: Sequence[Ref]) -> str:
    more = f" and {len(refs) - 1} more" if len(refs) > 1 else ""
    return f"{refs[0]}{more}"


def initializer(fn: Callable[..., Any], spec: TensorSpec, **named: Any) -> tuple[Any, ...]:
    """Return an initial value for `PsClient.create`. The ps computes `fn(**named)`, whose result
    must have `spec`'s shape and dtype."""
    return trusted.pack_function(fn), spec, named


# -- the clients of this process -------------------------------------------------------------------

_clients: dict[str, PsClient] = {}
_credentials: dict[str, Credentials] = {}
"""The credentials that were last passed for each address."""
_lock = threading.Lock()


def client_of(address: str, credentials: Credentials | None = None) -> PsClient:
    """Return this process's client for a ps.

    Args:
      credentials: the places of the secrets. `None` means the credentials that were last passed for
        this address, or else the credentials in the environment, as in a slot process.
    """
    client = _clients.get(address)
    if client is None or (credentials is not None and credentials != client.credentials):
        with _lock:
            client = _clients.get(address)
            if client is None or (credentials is not None and credentials != client.credentials):
                keys = credentials or _credentials.get(address)
                if keys is None:
                    # this process has unpickled a Ref, and has opened no session at this ps
                    role = "worker" if task_context.scheduled() else "submit"
                    client = _clients[address] = PsClient(
                        address, Credentials.from_environment(), role
                    )
                else:
                    client = _clients[address] = PsClient(address, keys)
                    _credentials[address] = keys
    return client


def release_client(address: str) -> None:
    """Close this process's client of a ps, if there is such a client. The next `client_of` makes a
    new client."""
    with _lock:
        client = _clients.pop(address, None)
    if client is not None:
        client.close()


def _forked() -> None:
    """Forget the clients in a forked child, because the child cannot use its parent's
    connections.
    """
    global _lock
    _lock = threading.Lock()
    _clients.clear()


platforms.register_at_fork(after_in_child=_forked)
