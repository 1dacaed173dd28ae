"""The sessions of a task: the functions that the task runs for clients, the variables that it holds
for them, and resets.

Rules
    A session is identified by a random number of its client. A task learns of a session when the
    client first uses that task. The session's master is the task that the client has as its target.
    A session sees the variables that all sessions share. An isolated session sees only its own
    variables, which are freed when the session is closed or lost.
    A container is a named group of variables. A client requests a reset from one task. That task
    clears the containers of its shared variables, and requests the same from all other visible
    tasks that are up. It also ends every session of which it is the master. Then running and later
    requests of such a session fail with ABORTED, even at a task that the session has not used
    before. Functions run in threads of a pool, many at the same time, because one function may wait
    for the effect of another function. Python cannot stop a thread from outside, so
    `zmqdist.cancelled()` becomes true in a function whose caller has gone. The methods accept
    pickles only from peers whose role may send code.

Only the loop uses the tables of sessions; threads of the pool do the work that may take time.

Not here: the client's side (session.py), the variables themselves (named_variables.py).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from zmqdist import clock as time
from zmqdist import task_context
from zmqdist.cluster.defs import ServerDef
from zmqdist.cluster.devices import device_of
from zmqdist.coordination.replies import task_name
from zmqdist.errors import (
    AbortedError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from zmqdist.limits import (
    FUNCTIONS_KEPT_MAX,
    GRACE_S,
    INLINE_BYTES_MAX,
    SESSION_LOST_S,
    SESSION_THREADS_MAX,
    SESSIONS_MAX,
)
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.service import PendingCall
from zmqdist.tasks.definition import merged
from zmqdist.tasks.named_variables import Variables
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.options import ISOLATE
from zmqdist.transport.router import Peer
from zmqdist.wire import trusted

VALUE, RAISED = 0, 1
"""The first item of the reply to "session.run". VALUE is followed by the parts of a packed value,
and RAISED by a packed error."""

_of_thread = threading.local()


def current_server() -> Any:
    """Return the server that runs the calling function for a session; None if no session runs the
    function."""
    sessions: Sessions | None = getattr(_of_thread, "sessions", None)
    return None if sessions is None else sessions.server()


def current_variables(of: Sessions) -> Variables:
    """Return the variables of a server that the calling function sees. If this server does not run
    the function, return the variables that all sessions share.
    """
    return _of_thread.variables if getattr(_of_thread, "sessions", None) is of else of.shared


class _Session:
    """One session at this task.

    Attributes:
      ended: the reason why the session has ended, with which its requests fail; "" while it has not
        ended.
      peer: the connection through which the session was used last.
      running: RPC calls of the session that have no reply yet.
    """

    def __init__(self, variables: Variables, is_master: bool) -> None:
        self.variables = variables
        self.is_master = is_master
        self.end_reason = ""
        self.peer: Peer | None = None
        self.running: set[PendingCall] = set()


class Sessions:
    """The sessions of one server. `server` is a weak reference to this server.

    Attributes:
      shared: the variables of all sessions that are not isolated.
    """

    def __init__(
        self, node: Node, definition: ServerDef, server: weakref.ReferenceType[Any]
    ) -> None:
        self.server = server
        self._node = node
        self._definition = definition
        self._name = task_name(node.me)
        self.shared = Variables(self._name, node.me[0])
        self._sessions: dict[int, _Session] = {}
        self._used_by: dict[Peer, set[int]] = {}
        self._end_reasons: OrderedDict[int, str] = OrderedDict()
        """The reason for the end of each session that a reset has ended before the session used
        this task. The dict has the last SESSIONS_MAX of them.
        """
        self._load_constant = lru_cache(FUNCTIONS_KEPT_MAX)(trusted.unpack)
        self._pool = HandlerPool(f"zmqdist-session-{self._name}", SESSION_THREADS_MAX)
        self._stopping = False
        self._over = False
        for method in ("open", "close", "reset", "clear", "run", "assign", "read", "variables"):
            node.service.register_later(
                f"session.{method}", getattr(self, f"_{method}"), roles=TASKS
            )
        node.router.on_gone.append(self._peer_lost)
        node.on_close.append(self.stop)

    def stop(self, until: float) -> None:
        """Refuse new requests, and wait for the running requests until `until` (on
        `time.monotonic`). Then fail them, and ask their functions to end.
        """
        self._stopping = True
        self._pool.wait_idle(max(0.0, until - time.monotonic()))
        try:
            self._node.loop.run(self._give_up)
        finally:
            self._over = True

    def _give_up(self) -> None:
        """Fail the running calls, and then ask their functions to end. A function that was asked to
        end may return anything, so its value must not become the reply.
        """
        text = f"{self._name} was stopped, and this operation had not ended within the grace; it may continue there"
        for session in self._sessions.values():
            for call in tuple(session.running):
                call.fail(UnavailableError(text))
        # First fail the calls, and then set the flag by which functions end, because a function
        # that sees the flag may return at once, and its value would become the reply.
        self._over = True
        self._pool.stop()

    def figures(self) -> tuple[int, int, int, int]:
        """Return four counts: sessions, sessions that a reset ended before they used this task,
        cached functions, and running calls."""
        return (
            len(self._sessions),
            len(self._end_reasons),
            self._load_constant.cache_info().currsize,
            self._pool.unfinished,
        )

    # -- sessions, in the loop ---------------------------------------------------------------------

    def _open(
        self, call: PendingCall, session: int, is_master: bool, config: dict[str, Any]
    ) -> None:
        config = merged(self._definition.default_session_config, config)
        # a client that repeats `open` after a lost reply finds its session
        if session not in self._sessions:
            if session in self._end_reasons:  # a reset ended the session before it used this task
                raise AbortedError(self._end_reasons[session])
            if len(self._sessions) >= SESSIONS_MAX:
                raise ResourceExhaustedError(
                    f"{self._name} has its {SESSIONS_MAX} sessions already: close one first"
                )
            isolated = bool(config.get(ISOLATE))
            variables = Variables(self._name, self._node.me[0]) if isolated else self.shared
            self._sessions[session] = _Session(variables, is_master)
        self._use(session, call.peer)
        call.reply([list(self._node.me), self._addresses(), self._filters(), config])

    def _addresses(self) -> dict[str, dict[int, str]]:
        """Return the addresses of the cluster's tasks. The address of this task has the port that
        was bound."""
        spec = self._node.spec
        addresses = {
            job: {index: spec.task_address(job, index) for index in spec.task_indices(job)}
            for job in spec.jobs
        }
        addresses[self._node.me[0]][self._node.me[1]] = self._node.address
        return addresses

    def _filters(self) -> list[str]:
        job, index = self._node.me
        return self._definition.cluster_device_filters.jobs.get(job, {}).get(index, [])

    def _use(self, session: int, peer: Peer) -> _Session:
        self._check_serving()
        record = self._sessions.get(session)
        if record is None:
            raise AbortedError(
                f"{self._name} does not know this session: it was closed or lost, or the "
                f"task was restarted: make a new one"
            )
        if record.end_reason:
            raise AbortedError(record.end_reason)
        if record.peer is not peer:
            # the session has reconnected: cancel the timer that would end the session as lost
            record.peer = peer
            self._used_by.setdefault(peer, set()).add(session)
            # None cancels the timer
            self._node.loop.set_timer(("session", session), None, self._check_serving)
        return record

    def _check_serving(self) -> None:
        if self._stopping:
            raise self._is_stopping("nothing was done")

    def _is_stopping(self, outcome: str) -> UnavailableError:
        return UnavailableError(f"{self._name} is stopping; {outcome}")

    def _peer_lost(self, peer: Peer) -> None:
        loop = self._node.loop
        # The client may reconnect, so its sessions stay for SESSION_LOST_S. A session that another
        # connection has used since is not affected.
        for number in self._used_by.pop(peer, ()):
            session = self._sessions.get(number)
            if session is not None and session.peer is peer:
                loop.set_timer(
                    ("session", number),
                    loop.now() + SESSION_LOST_S,
                    partial(self._sessions.pop, number, None),
                )

    def _close(self, call: PendingCall, session: int) -> None:
        self._sessions.pop(session, None)
        self._used_by.get(call.peer, set()).discard(session)
        call.reply(None)

    def _end(self, session: _Session, reason: str) -> None:
        session.end_reason = reason
        if session.variables is not self.shared:
            session.variables.clear()
        for call in tuple(session.running):
            call.fail(AbortedError(reason))

    # -- resets ------------------------------------------------------------------------------------

    def _reset(self, call: PendingCall, containers: list[str]) -> None:
        """Clear containers on all tasks that are up, and end the sessions whose master is this
        task."""
        self._check_serving()
        mine = [number for number, session in self._sessions.items() if session.is_master]
        reason = (
            f"Session.reset was called at {self._name} since this session began: make a new one"
        )
        self._clear_here(containers, mine, reason)
        self._pool.submit(self._clear_elsewhere, call, containers, mine, reason)

    def _clear_elsewhere(
        self, call: PendingCall, containers: list[str], sessions: list[int], reason: str
    ) -> None:
        """Have the other tasks clear the containers, and then reply to the client that has
        requested the reset. This runs in a thread of the pool.
        """
        try:
            due = min(call.due, time.monotonic() + GRACE_S)
            filters = self._definition.cluster_device_filters
            tasks = [
                task
                for task in self._node.other_tasks
                if filters.is_visible(*self._node.me, device_of(*task))
            ]
            _, failed = self._node.call_tasks(
                tasks, "session.clear", containers, sessions, reason, due=due
            )
            # The stop of this task has ended the calls, so their errors show nothing about the
            # other tasks.
            if failed and self._node.closed:
                raise self._is_stopping(
                    "it is not known which other tasks have cleared their containers"
                )
            if failed:
                raise UnavailableError(f"the reset did not reach {'; '.join(failed)}")
            call.reply(None)
        except FailedPreconditionError as error:  # the stop of this task has closed its connections
            stopping = self._is_stopping("not all other tasks have received the request to clear")
            call.fail(stopping if self._node.closed else error)
        except BaseException as error:
            call.fail(error)

    def _clear(
        self, call: PendingCall, containers: list[str], sessions: list[int], reason: str
    ) -> None:
        self._clear_here(containers, sessions, reason)
        call.reply(None)

    def _clear_here(self, containers: list[str], sessions: list[int], reason: str) -> None:
        self.shared.clear(containers)
        for number in sessions:
            if number in self._sessions:
                self._end(self._sessions[number], reason)
            else:
                # the session has not used this task yet, and must be refused when it does
                self._end_reasons[number] = reason
                if len(self._end_reasons) > SESSIONS_MAX:
                    self._end_reasons.popitem(last=False)

    # -- variables ---------------------------------------------------------------------------------

    def _assign(
        self, call: PendingCall, session: int, name: str, value: Any, container: str
    ) -> None:
        record = self._use(session, call.peer)

        def act() -> None:
            record.variables.assign(name, value, container)
            call.reply(None)

        self._copy(record, call, value, act)

    def _read(self, call: PendingCall, session: int, name: str, container: str) -> None:
        record = self._use(session, call.peer)
        array = record.variables.stored(name, container)
        self._copy(record, call, array, lambda: call.reply(array))

    def _variables(self, call: PendingCall, session: int, container: str) -> None:
        call.reply(self._use(session, call.peer).variables.specs(container))

    def _copy(
        self, session: _Session, call: PendingCall, array: Any, act: Callable[[], None]
    ) -> None:
        """Call `act`, which copies an array. For a small array, call it in the loop, because
        copying takes no longer than waking a thread. For a large array, call it in the pool.
        """
        if getattr(array, "nbytes", 0) <= INLINE_BYTES_MAX:
            act()
        else:
            self._begin(session, call, act)

    # -- functions ---------------------------------------------------------------------------------

    def _run(
        self, call: PendingCall, session: int, function: list[Any], is_constant: bool, *parts: Any
    ) -> None:
        record = self._use(session, call.peer)
        # `_call` empties this list, so that no stack frame keeps a large argument alive while the
        # function runs.
        box = list(parts)
        self._begin(record, call, lambda: self._call(record, call, function, is_constant, box))

    def _begin(self, session: _Session, call: PendingCall, act: Callable[[], None]) -> None:
        session.running.add(call)
        call.on_dropped(lambda: session.running.discard(call))
        self._pool.submit(self._work, session, call, act)

    # -- in a thread of the pool -------------------------------------------------------------------

    def _work(self, session: _Session, call: PendingCall, act: Callable[[], None]) -> None:
        try:
            if call.wanted():
                act()
        except BaseException as error:
            call.fail(error)
        finally:
            session.running.discard(call)

    def _call(
        self,
        session: _Session,
        call: PendingCall,
        function: list[Any],
        is_constant: bool,
        parts: list[Any],
    ) -> None:
        _of_thread.sessions, _of_thread.variables = self, session.variables
        task_context.enter(lambda: self._over or bool(session.end_reason) or not call.wanted())
        try:
            fn = self._load(function, is_constant)
            args, _ = unpacked(parts)
            parts.clear()
            packed = trusted.pack(fn(*args))
            reply = [VALUE, *sendable(packed)]
        except BaseException as error:
            reply = [RAISED, trusted.pack_error(trusted.as_ordinary_error(error))]
        finally:
            task_context.leave()
            _of_thread.sessions = _of_thread.variables = None
        call.reply(reply)

    def _load(self, function: list[Any], is_constant: bool) -> Callable[..., Any]:
        """Return the unpickled function, with the large arrays that it captures. A function that
        captures no mutable objects is unpickled once and then cached.
        """
        pickled = function[0]
        # A function that captures what can change must be unpickled for each run; a large pickle
        # is not worth its place in the cache.
        if not is_constant or len(pickled) > INLINE_BYTES_MAX:
            return unpacked(function)  # type: ignore[no-any-return]
        fn: Callable[..., Any] = self._load_constant(pickled)
        return fn


def sendable(packed: trusted.Packed) -> list[Any]:
    """Return the result of `trusted.pack` in a form that the safe codec accepts: the pickle, and
    each large buffer as an array of bytes."""
    if isinstance(packed, bytes):
        return [packed]
    return [packed[0], *(np.frombuffer(part, np.uint8) for part in packed[1:])]


def unpacked(parts: list[Any]) -> Any:
    """Return the object that the peer has packed with `sendable`. The object's arrays use the
    memory in which they arrived."""
    return trusted.unpack(parts[0]) if len(parts) == 1 else trusted.unpack_parts(parts)
