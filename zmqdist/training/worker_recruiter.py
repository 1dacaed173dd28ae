"""The recruiter: a thread that invites tasks of a cluster to work for a dispatcher, again and again as long as the program wants them.

Theory of operation
    The program maintains a table of wanted workers, by index and address. After each registration and loss, the dispatcher reports the
    workers that are present. The thread invites each wanted worker that is not present (tasks/worker_role.py). An invitation is one call,
    which waits until the task appears. So a restarted task works again at once, and no task waits for another task. When an invitation ends
    in an error, the thread sends another one after AGAIN_S.
    Each worker is invited once even if it is present, because an earlier program with the same dispatcher address may have invited it.
    The thread gives up no invitation: a task that never appears costs one connection that is tried again and again, with back-off.

Not here: which tasks must be present before a program begins (cluster_connection.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Final

from zmqdist import errors
from zmqdist.limits import INVITE_PATIENCE_S, INVITED_ORPHAN_LIMIT_S
from zmqdist.rpc import StatusOrResult, ZmqClient, internal_client
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.dispatcher.runtime import DispatchServer
from zmqdist.tasks.worker_role import INVITE
from zmqdist.transport.credentials import Credentials

log = logging.getLogger("zmqdist.training")

AGAIN_S: Final = 0.25
"""Pause between two invitations of a worker that has not accepted, in seconds."""

PASSING: Final = (errors.UNAVAILABLE, errors.ABORTED, errors.CANCELLED, errors.DEADLINE_EXCEEDED)
"""Errors after which another invitation may succeed. So it may after ALREADY_EXISTS, until that has lasted for INVITE_PATIENCE_S."""

_own: tuple[int, int] = (0, 0)


def program() -> int:
    """Return the random number of this process, drawn at the first call. A forked child draws another number."""
    global _own
    if _own[0] != os.getpid():
        _own = os.getpid(), secrets.randbits(62) | 1
    return _own[1]


@dataclass(eq=False)
class _Wanted:
    """One wanted worker.

    Attributes:
      client, invitation, invited_at: the client and the call of the invitation in flight, and the time when it was sent.
      retry_at: no invitation is sent before this time.
      last_error: the error of the last invitation; None after a success.
      failing_since: the time since which all invitations have ended with the code of `last_error`.
      accepted: whether the worker has accepted the last invitation. The dispatcher may list the worker a little later.

    Times are on the clock of `time.monotonic`.
    """

    address: str
    client: ZmqClient | None = None
    invitation: StatusOrResult | None = None
    retry_at: float = 0.0
    last_error: errors.OpError | None = None
    failing_since: float = 0.0
    invited_at: float = 0.0
    accepted: bool = False


class WorkerRecruiter:
    """Invites wanted workers, in a thread of its own, until it is closed; see the module's docstring."""

    def __init__(
        self, dispatcher: DispatchServer, credentials: Credentials, slots: int, wake: threading.Event | None = None
    ) -> None:
        """Args:
        slots: number of functions that a worker runs at a time, unless its server has a number of its own.
        wake: event that the thread waits for; None: a new event. A test passes an event that shows when the thread waits.
        """
        self._dispatcher = dispatcher.address
        self._credentials = credentials
        self._slots = slots
        self._changed = threading.Condition()
        self._wake = (
            wake or threading.Event()
        )  # a client's thread sets it; that thread must not wait for the lock of `_changed`
        self._wanted: dict[int, _Wanted] = {}
        self._dropped: list[_Wanted] = []
        self._present: frozenset[tuple[str, int]] = frozenset()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zmqdist-inviting", daemon=True)
        self._thread.start()
        dispatcher.watch_members(self._members)

    def want(self, index: int, address: str) -> None:
        """Begin to invite the task at `address` as worker:`index`. It replaces the task that had this index before."""
        with self._changed:
            self._remove(index)
            self._wanted[index] = _Wanted(address)
        self._wake.set()

    def drop(self, index: int) -> None:
        """Stop inviting worker:`index`."""
        with self._changed:
            self._remove(index)
        self._wake.set()

    @property
    def wanted(self) -> dict[int, str]:
        """The addresses of the wanted workers by index, in ascending order."""
        with self._changed:
            return {index: task.address for index, task in sorted(self._wanted.items())}

    def wait(self, until: float) -> list[int]:
        """Wait until all wanted workers have accepted their invitations and are present at the dispatcher.

        Args:
          until: when to stop waiting; on the clock of `time.monotonic`.

        Returns:
          The indices of the workers that have not, ascending; empty if all have.

        Raises:
          OpError: a worker has refused an invitation with an error that does not pass by waiting.
        """
        with self._changed:
            while missing := [index for index, task in sorted(self._wanted.items()) if not self._works(index, task)]:
                now = time.monotonic()
                for index in missing:
                    self._check(index, self._wanted[index], now)
                if now >= until or self._closed:
                    break
                self._changed.wait(until - now)
            return missing

    def close(self) -> None:
        """Stop inviting. Workers that are present continue to work. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _works(self, index: int, task: _Wanted) -> bool:
        return task.accepted and ("worker", index) in self._present

    def _remove(self, index: int) -> None:
        before = self._wanted.pop(index, None)
        if before is not None:
            self._dropped.append(before)

    def _check(self, index: int, task: _Wanted, now: float) -> None:
        error = task.last_error
        if error is None or error.error_code in PASSING:
            return
        if error.error_code == errors.ALREADY_EXISTS and now - task.failing_since < INVITE_PATIENCE_S:
            return
        raise errors.from_code(error.error_code, f"worker:{index} at {task.address}: {error.message}")

    def _members(self, present: frozenset[tuple[str, int]]) -> None:
        """Note the workers that are present. The dispatcher's loop calls this."""
        with self._changed:
            self._present = present
            self._changed.notify_all()
        self._wake.set()

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if (
                self._closed
            ):  # checked after `clear`: a `close` between the check and a later `clear` would go unnoticed
                break
            now = time.monotonic()
            try:
                with self._changed:
                    due, ended = self._step(now)
                for client in ended:
                    client.close()
            except (
                BaseException
            ):  # for example no file descriptor is left; the thread goes on, or no restarted worker would be invited
                log.exception("workers could not be invited to this program; the next attempt follows in %s s", AGAIN_S)
                due = now + AGAIN_S
            self._wake.wait(None if due is None else max(0.0, due - time.monotonic()))
        with self._changed:
            tasks = [*self._dropped, *self._wanted.values()]
        for client in [task.client for task in tasks if task.client is not None]:
            client.close()

    def _step(self, now: float) -> tuple[float | None, list[ZmqClient]]:
        """Invite every worker that is due. Return the time when the next worker is due (None: after the next change), and the clients to
        close.
        """
        ended = [task.client for task in self._dropped if task.client is not None]
        self._dropped.clear()
        due = None
        for index, task in self._wanted.items():
            if task.invitation is not None and task.client is not None and task.invitation.done():
                ended.append(task.client)
                self._note_reply(index, task, now)
            # A worker that is present but has not accepted is invited, too, because an earlier program may have invited it.
            if self._works(index, task):
                continue
            if task.invitation is None:
                if task.retry_at <= now:
                    self._invite(index, task, now)
                if task.invitation is None:
                    due = task.retry_at if due is None else min(due, task.retry_at)
        return due, ended

    def _invite(self, index: int, task: _Wanted, now: float) -> None:
        task.accepted = False
        try:
            security = self._credentials.client(task.address, "submit")
            task.client = ZmqClient(task.address, f"invites worker:{index}", security=security)
        except errors.OpError as error:  # the address is malformed, or keys are missing
            self._failed(index, task, error, now)
            return
        task.invited_at = now
        task.invitation = internal_client.start(
            task.client, INVITE, self._dispatcher, index, self._slots, program(), INVITED_ORPHAN_LIMIT_S
        )
        task.invitation.add_done_callback(lambda _: self._wake.set())

    def _note_reply(self, index: int, task: _Wanted, now: float) -> None:
        """Note the reply to an invitation."""
        assert task.invitation is not None
        code, text = task.invitation.get_error()
        task.client = task.invitation = None
        task.retry_at = now + AGAIN_S
        if code:
            self._failed(index, task, errors.from_code(code, text), now)
        else:
            task.last_error, task.accepted = None, True
            metrics.record("server_def_update", now - task.invited_at)
            self._changed.notify_all()

    def _failed(self, index: int, task: _Wanted, error: errors.OpError, now: float) -> None:
        task.retry_at = now + AGAIN_S
        if task.last_error is None or task.last_error.error_code != error.error_code:
            task.failing_since = now
            log.log(
                logging.INFO if error.error_code in PASSING else logging.WARNING,
                "worker:%d at %s has not accepted the invitation to this program, which will be repeated: %s",
                index,
                task.address,
                error.message,
            )
        task.last_error = error
        self._changed.notify_all()
