"""The end of whoever uses variables of parameter servers: one client for each ps in a process, whatever it asks for.

Rules
    What is started is asked again, with the same id, as long as somebody waits for it: after a connection that went, for
    PS_PATIENCE_S, if the process may still be there. An update is applied once all the same (updates_machine.py).
    A ps that is gone, or that was started again and knows the variables no more, is PSUnavailableError: at once where the kernel
    refuses the connection or another life of it answers, else after that time. With `recovery_s` in the handle, it is
    waited for that long until the variables are there again.
    What fits a variable is seen here, before anything is sent: InvalidArgumentError, which names the variable.
    Started calls to several ps are on their way at the same time: start all, then wait.

Not here: what users have (parameter_server), what happens at the ps (variable_host.py).
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
"""Between two looks whether a lost ps is back; where that is waited for at all."""


@dataclass(frozen=True)
class Ref:
    """Where a variable is, and what it is. It may be pickled, and holds no connection.

    Attributes:
      task: "ps:1", for errors.
      address: of that one.
      session, number: under which it is known there.
      recovery_s: seconds to wait for it where the ps has lost it; 0: none.
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
        """A value as an array of this shape and dtype.

        Python's numbers, and lists of them, take the dtype if they survive; arrays are cast as NumPy's "same_kind" says.

        Raises:
          InvalidArgumentError: it does not fit; the text names the variable.
        """
        array = self.cast(value)
        if array.shape != self.shape:
            raise InvalidArgumentError(f"{self} has shape {self.shape}; given one of shape {array.shape}")
        return array

    def cast(self, value: Any) -> NDArray[Any]:
        """A value as an array of this dtype, of any shape. Raises as `fit`."""
        return cast(value, self.dtype, str(self))


class UpdateOutcome(NamedTuple):
    """What came of an update for one variable.

    Attributes:
      version: the variable's, after it.
      applied: False: nothing was changed, because it was not what a swap expected, or because the step is over.
      value: the new one, where that was wanted.
    """

    version: int
    applied: bool
    value: NDArray[Any] | None = None


# -- changes, as variable_host.py takes them -----------------------------------------------------------------------------------

Change = tuple[Any, ...]


def assign(ref: Ref, value: Any) -> Change:
    """The value. All of these raise InvalidArgumentError for what does not fit."""
    return ("assign", ref.fit(value))


def add(ref: Ref, value: Any) -> Change:
    """Add to the value."""
    return ("add", ref.fit(value))


def sub(ref: Ref, value: Any) -> Change:
    """Subtract from the value."""
    return ("sub", ref.fit(value))


def scatter(ref: Ref, op: str, slices: IndexedSlices) -> Change:
    """Update rows: `op` is "add", "sub", "mul", "div", "min", "max" or "update"; each row counts, also one that is named twice."""
    return ("scatter", op, rows_of(ref, slices.indices), ref.cast(slices.values))


def swap(ref: Ref, value: Any, *, version: int | None = None, expected: Any = None) -> Change:
    """The value, if its version is this one, and it equals `expected`. None: whatever it is."""
    expected_value = None if expected is None else ref.fit(expected)
    return ("swap", -1 if version is None else version, expected_value, ref.fit(value))


def apply(ref: Ref, rule: Optimizer | Callable[..., Any], gradient: Any) -> Change:
    """A step of an optimizer, or of a function `fn(value, gradient, slots, step)` that runs at the ps.

    Args:
      how: a function changes `value` in place, or returns the new one; `slots`, a dict of arrays by name, is what it remembers of the
        variable. It is pickled when it is used for the first time.
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
    """Value and slots that `PsClient.saved` gave."""
    return ("restore", ref.fit(value), slots)


def rows_of(ref: Ref, indices: Any) -> NDArray[Any]:
    """Indices of rows. Raises InvalidArgumentError for what is not one dimension of whole numbers; the ps knows their bounds, too."""
    array = np.asarray(indices)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        text = f"{ref}: indices are whole numbers in one dimension, not {array.dtype} of shape {array.shape}"
        raise InvalidArgumentError(text)
    return array


def rows_wanted(ref: Ref, rows: Any) -> Any:
    """Rows as they travel, a range by its bounds: its numbers would weigh more than narrow rows do. Raises as `rows_of`."""
    return (rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows_of(ref, rows)


_functions: Final = UpdateFunctions()


# -- what was started -------------------------------------------------------------------------------------------------


class Started:
    """A question that is on its way. Waiting for it asks again where that is needed; from any thread, as often as one likes."""

    def __init__(self, client: PsClient, request: _Request) -> None:
        self._client = client
        self._request = request
        self._lock = threading.Lock()
        self._outcome: tuple[Any, Exception | None] | None = None
        self._call: StatusOrResult | None = None
        self._unreachable: UnavailableError | None = None
        self._connect()

    def done(self) -> bool:
        """Whether waiting would be over at once, unless it must be asked again. Never waits."""
        return (
            self._outcome is not None or self._unreachable is not None or (self._call is not None and self._call.done())
        )

    def when_done(self, fn: Callable[[], object]) -> None:
        """Call `fn()` once as soon as `done()`: now, or in a thread that must not wait."""
        call = self._call
        if self.done() or call is None:
            fn()
        else:
            call.add_done_callback(lambda _: fn())

    def get_value(self) -> Any:
        """Wait for the answer.

        Raises:
          PSUnavailableError: the ps is gone, or has lost the variables.
          DeadlineExceededError: it did not answer in the time that the question has.
          InvalidArgumentError: the ps refuses it: it does not fit the variable.
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
                sent_again = True  # the ps has forgotten a function that was not used for long
                self._client.forget_sent(self._request.functions)
                self._connect()
            except AbortedError as error:  # it has lost the variable: nothing else is ABORTED
                self._unreachable = UnavailableError(f"{self._request.subject} is lost: {error.message}")
            except (UnavailableError, CancelledError) as error:
                losses += 1
                self._client.reached = False
                if losses <= PS_LOSSES_MAX:
                    self._connect()
                else:
                    self._unreachable = UnavailableError(f"{self._request.subject}: {error.message}")

    def _connect(self) -> None:
        """Have a connection and ask over it; else there is `_trouble`."""
        try:
            self._client.reach(min(self._request.due, time.monotonic() + PS_PATIENCE_S))
            self._call = self._client.ask(self._request)
            self._unreachable = None
        except (UnavailableError, CancelledError) as error:
            self._unreachable = UnavailableError(f"{self._request.subject} cannot be reached: {error.message}")

    def _recover(self, until: float, lost: UnavailableError) -> float:
        """Wait a little, if there is to be recovery; else raise. Up to when it is waited for."""
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
    """What is asked, as it travels, so that it can be asked again.

    Attributes:
      what: it is about, for errors.
      functions: those that it needs at the ps.
      sequence: of an update, else 0.
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
    """One ps, from this process. From any thread. Made by `client_of`; waits for nothing."""

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
        """Have a session, whose variables are kept as long as this process is connected.

        Args:
          program: a random number of this process.

        Returns:
          Incarnation and task of the ps, and whether it had this session already.
        """
        incarnation, task, was_there = self._start(f"the ps at {self.address}", "open", program, session).get_value()
        return incarnation, task, was_there

    def close_session(self, session: int) -> Started:
        """Drop its variables."""
        return self._start(f"the ps at {self.address}", "close", session)

    def watch(self, task: str, session: int, recovery_s: float) -> Started:
        """Its value comes when the session is closed; that the ps has lost it, or is gone, is its error."""
        return self._start(f"{task} ({self.address})", "watch", session, recovery_s=recovery_s)

    def create(self, ref: Ref, initial: Any, earlier: tuple[int, dict[str, Any], bytes] | None = None) -> Started:
        """Make a variable, unless it is there.

        Args:
          initial: an array; a TensorSpec, for zeros; or what `initializer` gave.
          earlier: a version, and slots and updates as `saved` gave them, of one that was lost and is to go on from there.

        Returns:
          What its value is the TensorSpec of.
        """
        return self._start(str(ref), "create", ref.session, ref.number, ref.name, initial, earlier)

    def drop(self, refs: Sequence[Ref]) -> Started:
        """Forget variables of one session."""
        return self._start(_subject(refs), "drop", refs[0].session, [ref.number for ref in refs])

    # -- values ---------------------------------------------------------------------------------------------------------

    def read(self, refs: Sequence[Ref], due: float = inf) -> Started:
        """Value: (version, array) of each. Large arrays are read-only, and cost nothing on the host of the ps."""
        args = refs[0].session, [ref.number for ref in refs]
        return self._start(_subject(refs), "read", *args, recovery_s=refs[0].recovery_s, due=due)

    def rows(self, wanted: Sequence[tuple[Ref, Any]], due: float = inf) -> Started:
        """Rows at indices, in their order, or of a range that ascends, of several variables. Value: a list of arrays."""
        refs = [ref for ref, _ in wanted]
        args = refs[0].session, [(ref.number, rows_wanted(ref, rows)) for ref, rows in wanted]
        return self._start(_subject(refs), "rows", *args, recovery_s=refs[0].recovery_s, due=due)

    def saved(self, refs: Sequence[Ref], due: float = inf) -> Started:
        """Value: (version, array, slots, updates) of each, all of one moment: what `create` needs to make it anew."""
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
    ) -> Started:
        """Change variables of one session, all or none, each at most once.

        Args:
          want: give the new values, too.
          key: of this update in its session: a second one with the same key, of any process, changes nothing. "": as the running function
            was scheduled (task_context.py).
          step: of synchronous training, from 0: gradients wait for those of `workers_per_step` such updates, and their mean is applied.
          due: when the caller stops waiting, on `time.monotonic`. The update may be made all the same.
          still: nobody changes the arrays in `changes` before the answer is here.

        Returns:
          Whose value is a list of UpdateOutcome.
        """
        refs = [ref for ref, _ in changes]
        functions = tuple(change[1] for _, change in changes if change[0] == "call")  # the ps is told their digests
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

    def about(self) -> Started:
        """Value: what the ps has: a dict, as variable_host.py makes it."""
        return self._start(f"the ps at {self.address}", "about")

    def close(self) -> None:
        """End the connection, and whatever waits for something. The next `client_of` makes a new one."""
        with _lock:
            if _clients.get(self.address) is self:
                del _clients[self.address]
        self._rpc.close()

    # -- asking ---------------------------------------------------------------------------------------------------------

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
    ) -> Started:
        try:
            body, sources = internal_client.packed(self._rpc, args, still=still)
        except BaseException:
            self._ids.settled(sequence, None)
            raise
        if sources and not still:  # it may be asked again when the caller has changed them
            sources = [bytes(each) if isinstance(each, memoryview) else each for each in sources]
        request = _Request(
            subject, PREFIX + method, body, sources, due, recovery_s, read, functions=functions, sequence=sequence
        )
        return Started(self, request)

    def ask(self, request: _Request) -> StatusOrResult:
        """Ask over the present connection. Raises UnavailableError where that has gone."""
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
        """Have a connection; by one thread at a time, the others wait for it.

        Raises:
          UnavailableError: nobody listens there, or nobody answers up to `until`.
        """
        began = time.monotonic()  # the time that others wait for the same answer counts
        with self._reaching:
            if self.reached:
                return
            try:
                internal_client.reach(self._rpc, until)
            except DeadlineExceededError:
                text = f"no answer from {self.address} for {time.monotonic() - began:.1f} s"
                raise UnavailableError(text) from None
            self._sent.clear()
            self.reached = True

    def forget_sent(self, functions: Sequence[PackedFunction]) -> None:
        """The ps may not have these any more."""
        self._sent.difference_update(fn.digest for fn in functions)

    def settled(self, request: _Request, call: StatusOrResult | None) -> None:
        """As `Ids.settled`."""
        self._ids.settled(request.sequence, call)


def _outcomes(reply: Any) -> list[UpdateOutcome] | None:
    return None if reply is None else list(map(UpdateOutcome, reply[::2], reply[1::2]))


def _outcomes_with_values(reply: Any) -> list[UpdateOutcome] | None:
    return None if reply is None else list(map(UpdateOutcome, reply[::3], reply[1::3], reply[2::3]))


def _subject(refs: Sequence[Ref]) -> str:
    more = f" and {len(refs) - 1} more" if len(refs) > 1 else ""
    return f"{refs[0]}{more}"


def initializer(fn: Callable[..., Any], spec: TensorSpec, **named: Any) -> tuple[Any, ...]:
    """A first value that is made at the ps: what `fn(**named)` returns, of this shape and dtype."""
    return trusted.pack_function(fn), spec, named


# -- one for each ps of a process -------------------------------------------------------------------------------------

_clients: dict[str, PsClient] = {}
_credentials: dict[str, Credentials] = {}
"""As they were given last."""
_lock = threading.Lock()


def client_of(address: str, credentials: Credentials | None = None) -> PsClient:
    """The client of this process for a ps.

    Args:
      credentials: where the secrets are; None: as they were given before, or those of the environment, as in a slot's process.
    """
    client = _clients.get(address)
    if client is None or (credentials is not None and credentials != client.credentials):
        with _lock:
            client = _clients.get(address)
            if client is None or (credentials is not None and credentials != client.credentials):
                known = credentials or _credentials.get(address)
                if known is None:  # a handle has come here with a function
                    role = "worker" if task_context.scheduled() else "submit"
                    client = _clients[address] = PsClient(address, Credentials.of_environment(), role)
                else:
                    client = _clients[address] = PsClient(address, known)
                    _credentials[address] = known
    return client


def let_go(address: str) -> None:
    """Close the client of a ps, if there is one; who asks for it later gets a new one."""
    with _lock:
        client = _clients.pop(address, None)
    if client is not None:
        client.close()


def _forked() -> None:
    """A child has none of its parent's connections."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_forked)
