"""The user's side of variables on parameter servers: one client for each ps in a process, for all requests to it.

Rules
    A started request is repeated, with the same id, as long as a caller waits for it: after its connection ended, for
    PS_PATIENCE_S, while the ps's process may still exist. An update is applied only once nevertheless (updates_machine.py).
    PSUnavailableError means that the ps is lost, or was restarted and no longer knows the variables. It is raised at once if the
    kernel refuses the connection or another incarnation replies, else after PS_PATIENCE_S. With `recovery_s` in the handle, the
    caller waits that long for the variables to be recovered.
    A value that does not fit its variable is detected here, before anything is sent: InvalidArgumentError, which names the
    variable.
    Requests to several ps are in flight at the same time: start all, then wait.

Not here: the public API (training), execution at the ps (variable_host.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqdist import task_context
from zmqdist.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PSUnavailableError,
    UnavailableError,
)
from zmqdist.indexed_slices import IndexedSlices
from zmqdist.limits import PS_FUNCTIONS_MAX, PS_LOSSES_MAX, PS_PATIENCE_S
from zmqdist.optimizers import Optimizer
from zmqdist.rpc import StatusOrResult, ZmqClient, internal_client
from zmqdist.specs import TensorSpec
from zmqdist.transport.credentials import Credentials
from zmqdist.variables.casts import cast
from zmqdist.variables.functions import PackedFunction, UpdateFunctions
from zmqdist.variables.ids import UpdateIds
from zmqdist.variables.variable_host import PREFIX
from zmqdist.wire import trusted

AGAIN_S: Final = 0.05
"""Seconds between two checks whether a lost ps is back, if the caller waits for that."""


@dataclass(frozen=True)
class Ref:
    """The location and the spec of a variable. It can be pickled, and holds no connection.

    Attributes:
      task: "ps:1", for error messages.
      address: of that task.
      session, number: identify the variable at the task.
      recovery_s: seconds to wait for the variable if the ps has lost it; 0: do not wait.
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
        """Return a value as an array of this shape and dtype.

        Python's numbers, and lists of them, take the dtype if their value survives; arrays are cast by NumPy's "same_kind" rule.

        Raises:
          InvalidArgumentError: it does not fit; the text names the variable.
        """
        array = self.cast(value)
        if array.shape != self.shape:
            raise InvalidArgumentError(f"{self} has shape {self.shape}; given one of shape {array.shape}")
        return array

    def cast(self, value: Any) -> NDArray[Any]:
        """Return a value as an array of this dtype, of any shape. Raises as `fit`."""
        return cast(value, self.dtype, str(self))


class UpdateOutcome(NamedTuple):
    """The outcome of an update for one variable.

    Attributes:
      version: the variable's version after the update.
      applied: False if nothing was changed, because a swap's expectation did not hold or the step is over.
      value: the new value, if it was requested.
    """

    version: int
    applied: bool
    value: NDArray[Any] | None = None


# -- changes, as variable_host.py takes them -----------------------------------------------------------------------------------

Change = tuple[Any, ...]


def assign(ref: Ref, value: Any) -> Change:
    """Set the value. Like all functions below, raises InvalidArgumentError for an argument that does not fit."""
    return ("assign", ref.fit(value))


def add(ref: Ref, value: Any) -> Change:
    """Add to the value."""
    return ("add", ref.fit(value))


def sub(ref: Ref, value: Any) -> Change:
    """Subtract from the value."""
    return ("sub", ref.fit(value))


def scatter(ref: Ref, op: str, slices: IndexedSlices) -> Change:
    """Update rows: `op` is "add", "sub", "mul", "div", "min", "max" or "update". A row that is named twice is updated twice."""
    return ("scatter", op, rows_of(ref, slices.indices), ref.cast(slices.values))


def swap(ref: Ref, value: Any, *, version: int | None = None, expected: Any = None) -> Change:
    """Set the value if its version is `version` and it equals `expected`. None for one of the two: do not check it."""
    expected_value = None if expected is None else ref.fit(expected)
    return ("swap", -1 if version is None else version, expected_value, ref.fit(value))


def apply(ref: Ref, rule: Optimizer | Callable[..., Any], gradient: Any) -> Change:
    """Apply a step of an optimizer, or of a function `fn(value, gradient, slots, step)` that runs at the ps.

    Args:
      rule: an Optimizer, or a function that changes `value` in place or returns the new one. `slots`, a dict of arrays by name,
        is the function's memory of the variable. A function is pickled at its first use.
      gradient: an array, or IndexedSlices.
    """
    if isinstance(rule, type) or (not callable(rule) and not isinstance(rule, Optimizer)):
        expected = "an optimizer, as SGD(0.1), or a function"
        raise InvalidArgumentError(f"{ref}: apply() takes {expected}, not {rule!r}")
    is_sparse = isinstance(gradient, IndexedSlices)
    gradient_on_wire: Any = (
        (rows_of(ref, gradient.indices), ref.cast(gradient.values)) if is_sparse else ref.fit(gradient)
    )
    if isinstance(rule, Optimizer):
        return ("apply", *rule.to_wire(), gradient_on_wire)
    return ("call", _functions.packed(rule), gradient_on_wire)


def restore(ref: Ref, value: Any, slots: dict[str, Any]) -> Change:
    """Set value and slots to the results of `PsClient.saved`."""
    return ("restore", ref.fit(value), slots)


def rows_of(ref: Ref, indices: Any) -> NDArray[Any]:
    """Return indices of rows as an array. Raises InvalidArgumentError unless they are integers in one dimension; the ps checks their
    bounds.
    """
    array = np.asarray(indices)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        text = f"{ref}: indices are whole numbers in one dimension, not {array.dtype} of shape {array.shape}"
        raise InvalidArgumentError(text)
    return array


def rows_wanted(ref: Ref, rows: Any) -> Any:
    """Return rows as they travel: a range by its bounds, since its numbers may be larger than narrow rows. Raises as `rows_of`."""
    return (rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows_of(ref, rows)


_functions: Final = UpdateFunctions()


# -- requests in flight -------------------------------------------------------------------------------------------------


class PsCall:
    """A request in flight. Waiting for it repeats it if needed. May be used from any thread, repeatedly."""

    def __init__(self, client: PsClient, request: _Request) -> None:
        self._client = client
        self._request = request
        self._lock = threading.Lock()
        self._outcome: tuple[Any, Exception | None] | None = None
        self._call: StatusOrResult | None = None
        self._unreachable: UnavailableError | None = None
        self._connect()

    def done(self) -> bool:
        """Return whether waiting would end at once, unless the request must be repeated. Never waits."""
        return (
            self._outcome is not None or self._unreachable is not None or (self._call is not None and self._call.done())
        )

    def when_done(self, fn: Callable[[], object]) -> None:
        """Call `fn()` once as soon as `done()` is true: now, or in a thread of the client, so `fn` must not block."""
        call = self._call
        if self.done() or call is None:
            fn()
        else:
            call.add_done_callback(lambda _: fn())

    def get_value(self) -> Any:
        """Wait for the reply and return its value.

        Raises:
          PSUnavailableError: the ps is lost, or has lost the variables.
          DeadlineExceededError: the ps did not reply before the request's deadline.
          InvalidArgumentError: the ps refused the request, because it does not fit the variable.
          UnknownError: an update function has raised.
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
                self._connect()
                continue
            assert self._call is not None
            try:
                return self._call.get_value()
            except FailedPreconditionError:
                if not self._request.functions or sent_again:
                    raise
                sent_again = True  # the ps has dropped an update function that was not used for long
                self._client.forget_sent(self._request.functions)
                self._connect()
            except AbortedError as error:  # the ps has lost the variable; it uses ABORTED for nothing else
                self._unreachable = UnavailableError(f"{self._request.subject} is lost: {error.message}")
            except (UnavailableError, CancelledError) as error:
                losses += 1
                self._client.reached = False
                if losses <= PS_LOSSES_MAX:
                    self._connect()
                else:
                    self._unreachable = UnavailableError(f"{self._request.subject}: {error.message}")

    def _connect(self) -> None:
        """Connect and send the request; else set `_unreachable`."""
        try:
            self._client.reach(min(self._request.due, time.monotonic() + PS_PATIENCE_S))
            self._call = self._client.call(self._request)
            self._unreachable = None
        except (UnavailableError, CancelledError) as error:
            self._unreachable = UnavailableError(f"{self._request.subject} cannot be reached: {error.message}")

    def _recover(self, until: float, lost: UnavailableError) -> float:
        """Wait a little for the recovery of the ps, or raise if the time for that is over; return when it is over."""
        now = time.monotonic()
        if now >= self._request.due:
            raise DeadlineExceededError(lost.message)
        until = min(until, now + self._request.recovery_s)
        if now >= until:
            raise PSUnavailableError(lost, self._client.address)
        time.sleep(min(AGAIN_S, until - now))
        return until

    def __del__(self) -> None:
        if "_outcome" in self.__dict__ and self._outcome is None:
            self._client.settled(self._request, self._call)


@dataclass(frozen=True)
class _Request:
    """A request as it travels, so that it can be repeated.

    Attributes:
      subject: what the request is for, as error messages name it.
      functions: update functions that the ps needs for it.
      sequence: number of an update; 0 for other requests.
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


def _as_it_is(value: Any) -> Any:
    return value


class PsClient:
    """One ps, as seen from this process. May be used from any thread. Made by `client_of`, without waiting."""

    def __init__(self, address: str, credentials: Credentials, role: str = "submit") -> None:
        self.address = address
        self.credentials = credentials
        self.reached = False
        self._rpc = ZmqClient(address, security=credentials.client(address, role))
        self._ids = UpdateIds()
        self._reaching = threading.Lock()
        self._sent: set[bytes] = set()

    # -- sessions and variables -----------------------------------------------------------------------------------------

    def open(self, program: int, session: int) -> tuple[int, str, bool]:
        """Open a session, whose variables are kept as long as this process is connected.

        Args:
          program: a random number of this process.

        Returns:
          Incarnation and task of the ps, and whether it had this session already.
        """
        incarnation, task, was_there = self._start(f"the ps at {self.address}", "open", program, session).get_value()
        return incarnation, task, was_there

    def close_session(self, session: int) -> PsCall:
        """Drop a session with its variables."""
        return self._start(f"the ps at {self.address}", "close", session)

    def watch(self, task: str, session: int, recovery_s: float) -> PsCall:
        """Return a request that ends when the session is closed, or with an error when the ps is lost or has lost the session."""
        return self._start(f"{task} ({self.address})", "watch", session, recovery_s=recovery_s)

    def create(self, ref: Ref, initial: Any, earlier: tuple[int, dict[str, Any], bytes] | None = None) -> PsCall:
        """Create a variable, unless it exists.

        Args:
          initial: an array; a TensorSpec, for zeros; or the result of `initializer`.
          earlier: of a lost variable that continues: its version, and slots and updates from `saved`.

        Returns:
          A PsCall whose value is the variable's TensorSpec.
        """
        return self._start(str(ref), "create", ref.session, ref.number, ref.name, initial, earlier)

    def drop(self, refs: Sequence[Ref]) -> PsCall:
        """Drop variables of one session."""
        return self._start(_subject(refs), "drop", refs[0].session, [ref.number for ref in refs])

    # -- values ---------------------------------------------------------------------------------------------------------

    def read(self, refs: Sequence[Ref], due: float = inf) -> PsCall:
        """Read variables of one session.

        Returns:
          A PsCall whose value is (version, array) of each. Large arrays are read-only, and are not copied on the host of the ps.
        """
        args = refs[0].session, [ref.number for ref in refs]
        return self._start(_subject(refs), "read", *args, recovery_s=refs[0].recovery_s, due=due)

    def rows(self, wanted: Sequence[tuple[Ref, Any]], due: float = inf) -> PsCall:
        """Read rows of several variables: at indices, in their order, or of an ascending range.

        Returns:
          A PsCall whose value is a list of arrays.
        """
        refs = [ref for ref, _ in wanted]
        args = refs[0].session, [(ref.number, rows_wanted(ref, rows)) for ref, rows in wanted]
        return self._start(_subject(refs), "rows", *args, recovery_s=refs[0].recovery_s, due=due)

    def saved(self, refs: Sequence[Ref], due: float = inf) -> PsCall:
        """Read the full state of variables, all of the same moment, which `create` accepts as `earlier`.

        Returns:
          A PsCall whose value is (version, array, slots, updates) of each.
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
        """Change variables of one session, all or none, each at most once.

        Args:
          want: return the new values as well.
          key: identifies this update in its session: another update with the same key, from any process, changes nothing. "": the
            key of the running scheduled function, if there is one (task_context.py).
          step: number of a synchronous step, from 0: the gradients of `workers_per_step` such updates are collected, and their
            mean is applied. -1: apply at once.
          due: when the caller stops waiting, on `time.monotonic`. The update may be applied nevertheless.
          still: promises that the arrays in `changes` do not change before the reply.

        Returns:
          A PsCall whose value is a list of UpdateOutcome.
        """
        refs = [ref for ref, _ in changes]
        functions = tuple(
            change[1] for _, change in changes if change[0] == "call"
        )  # `changes_on_wire` has their digests
        id = self._ids.next()
        changes_on_wire = [
            (ref.number, "call", change[1].digest, change[2]) if change[0] == "call" else (ref.number, *change)
            for ref, change in changes
        ]
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
        """Return a request for the figures of the ps: a dict, as variable_host.py builds it."""
        return self._start(f"the ps at {self.address}", "status", due=due)

    def close(self) -> None:
        """End the connection and all pending requests. The next `client_of` makes a new client."""
        with _lock:
            if _clients.get(self.address) is self:
                del _clients[self.address]
        self._rpc.close()

    # -- requests ---------------------------------------------------------------------------------------------------------

    def _start(
        self,
        subject: str,
        method: str,
        *args: Any,
        recovery_s: float = 0.0,
        due: float = inf,
        still: bool = False,
        read: Callable[[Any], Any] = _as_it_is,
        functions: tuple[PackedFunction, ...] = (),
        sequence: int = 0,
    ) -> PsCall:
        try:
            body, sources = internal_client.packed(self._rpc, args, still=still)
        except BaseException:
            self._ids.settled(sequence, None)
            raise
        if sources and not still:  # the request may be repeated after the caller has changed the arrays
            sources = [bytes(each) if isinstance(each, memoryview) else each for each in sources]
        request = _Request(
            subject, PREFIX + method, body, sources, due, recovery_s, read, functions=functions, sequence=sequence
        )
        return PsCall(self, request)

    def call(self, request: _Request) -> StatusOrResult:
        """Send a request over the current connection. Raises UnavailableError if that has ended."""
        for fn in request.functions:
            if fn.digest not in self._sent:
                send = internal_client.start(self._rpc, PREFIX + "function", fn.digest, fn.blob, waits_for_server=False)
                send.get_value()
                if len(self._sent) >= PS_FUNCTIONS_MAX:  # as many as the ps has
                    self._sent.clear()
                self._sent.add(fn.digest)
        return internal_client.start_packed(
            self._rpc, request.method, request.body, request.sources, due=request.due, waits_for_server=False
        )

    def reach(self, until: float) -> None:
        """Make sure that there is a connection. One thread does it; others wait for that thread.

        Raises:
          UnavailableError: no process listens there, or none replies before `until`.
        """
        began = time.monotonic()  # before the lock: waiting for another thread's attempt counts as waiting for the ps
        with self._reaching:
            if self.reached:
                return
            try:
                internal_client.reach(self._rpc, until)
            except DeadlineExceededError:
                text = f"no reply from {self.address} for {time.monotonic() - began:.1f} s"
                raise UnavailableError(text) from None
            self._sent.clear()
            self.reached = True

    def forget_sent(self, functions: Sequence[PackedFunction]) -> None:
        """Send these functions again before their next use, because the ps may have dropped them."""
        self._sent.difference_update(fn.digest for fn in functions)

    def settled(self, request: _Request, call: StatusOrResult | None) -> None:
        """As `UpdateIds.settled`."""
        self._ids.settled(request.sequence, call)


def _outcomes(reply: Any) -> list[UpdateOutcome] | None:
    return None if reply is None else list(map(UpdateOutcome, reply[::2], reply[1::2]))


def _outcomes_with_values(reply: Any) -> list[UpdateOutcome] | None:
    return None if reply is None else list(map(UpdateOutcome, reply[::3], reply[1::3], reply[2::3]))


def _subject(refs: Sequence[Ref]) -> str:
    more = f" and {len(refs) - 1} more" if len(refs) > 1 else ""
    return f"{refs[0]}{more}"


def initializer(fn: Callable[..., Any], spec: TensorSpec, **named: Any) -> tuple[Any, ...]:
    """Return an initial value that the ps computes: `fn(**named)`, which must have this shape and dtype."""
    return trusted.pack_function(fn), spec, named


# -- one for each ps of a process -------------------------------------------------------------------------------------

_clients: dict[str, PsClient] = {}
_credentials: dict[str, Credentials] = {}
"""The credentials last given for each address."""
_lock = threading.Lock()


def client_of(address: str, credentials: Credentials | None = None) -> PsClient:
    """Return this process's client for a ps.

    Args:
      credentials: where the secrets are; None: as given last for this address, or those of the environment, as in a slot process.
    """
    client = _clients.get(address)
    if client is None or (credentials is not None and credentials != client.credentials):
        with _lock:
            client = _clients.get(address)
            if client is None or (credentials is not None and credentials != client.credentials):
                known = credentials or _credentials.get(address)
                if known is None:  # a handle arrived here with a pickled function
                    role = "worker" if task_context.scheduled() else "submit"
                    client = _clients[address] = PsClient(address, Credentials.from_environment(), role)
                else:
                    client = _clients[address] = PsClient(address, known)
                    _credentials[address] = known
    return client


def release_client(address: str) -> None:
    """Close the client of a ps, if there is one. The next `client_of` makes a new one."""
    with _lock:
        client = _clients.pop(address, None)
    if client is not None:
        client.close()


def _forked() -> None:
    """Forget the clients in a forked child, which has none of its parent's connections."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forked)
