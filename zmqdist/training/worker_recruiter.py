"""The thread that has the tasks of a cluster work for a dispatcher, as long as the program wants them to.

Theory of operation
    What is wanted is a table of indices and addresses; what is there the dispatcher tells, whenever a worker has joined or was lost.
    Whoever is wanted and not there is invited (tasks/worker_role.py): one question to each, which waits for the task to appear, so that a
    task that died and came back works again at once, and none waits for another. When the answer is an error, the next question comes
    a little later. Each is invited once in any case: one that has come by itself was perhaps invited by a program of before, which had the
    same address.
    Nothing here ends by itself: a task that never comes costs one connection that tries again, with back-off.

Not here: who must be there before a program begins (cluster_connection.py).
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
"""Between an answer that did not bring the worker here and the next question."""

PASSING: Final = (errors.UNAVAILABLE, errors.ABORTED, errors.CANCELLED, errors.DEADLINE_EXCEEDED)
"""What the next question may mend; ALREADY_EXISTS, too, for a while."""

_own: tuple[int, int] = (0, 0)


def program() -> int:
    """The number of this program, the same as long as its process lives: another one in a child that was forked."""
    global _own
    if _own[0] != os.getpid():
        _own = os.getpid(), secrets.randbits(62) | 1
    return _own[1]


@dataclass(eq=False)
class _Wanted:
    """One worker.

    Attributes:
      client, asked, asked_at: the question that is on its way, and since when.
      trouble: what the last one ended with.
      since: when the present trouble began, on `time.monotonic`.
      accepted: it has said that it works for us; until it is asked again. The dispatcher may tell of it a little later.
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
    """See the module's docstring. It has to be closed."""

    def __init__(
        self, dispatcher: DispatchServer, credentials: Credentials, slots: int, wake: threading.Event | None = None
    ) -> None:
        """Args:
        slots: functions at a time, of a worker whose server does not say it itself.
        wake: what the thread waits for; None: an event of its own. A test passes one that shows when the thread looks.
        """
        self._dispatcher = dispatcher.address
        self._credentials = credentials
        self._slots = slots
        self._changed = threading.Condition()
        self._wake = wake or threading.Event()  # a client's thread must not wait for a lock of ours
        self._wanted: dict[int, _Wanted] = {}
        self._dropped: list[_Wanted] = []
        self._present: frozenset[tuple[str, int]] = frozenset()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zmqdist-inviting", daemon=True)
        self._thread.start()
        dispatcher.watch_members(self._members)

    def want(self, index: int, address: str) -> None:
        """From now on a task is to be worker:`index`, in place of whoever was."""
        with self._changed:
            self._remove(index)
            self._wanted[index] = _Wanted(address)
        self._wake.set()

    def drop(self, index: int) -> None:
        """Invite it no more."""
        with self._changed:
            self._remove(index)
        self._wake.set()

    @property
    def wanted(self) -> dict[int, str]:
        """Addresses by index, sorted."""
        with self._changed:
            return {index: task.address for index, task in sorted(self._wanted.items())}

    def wait(self, until: float) -> list[int]:
        """Wait until all that are wanted work for the dispatcher.

        Returns:
          Those that do not at that time (`time.monotonic`).

        Raises:
          OpError: one of them has refused, for a reason that waiting cannot mend.
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
        """End; idempotent. Whoever works goes on."""
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
        """In the dispatcher's loop."""
        with self._changed:
            self._present = present
            self._changed.notify_all()
        self._wake.set()

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._closed:  # looked at after that: a close in between must not lose its wake
                break
            now = time.monotonic()
            try:
                with self._changed:
                    due, ended = self._step(now)
                for client in ended:
                    client.close()
            except BaseException:  # no descriptor for a client, say: without this thread no worker would come back
                log.exception("workers could not be invited, it is tried again")
                due = now + AGAIN_S
            self._wake.wait(None if due is None else max(0.0, due - time.monotonic()))
        with self._changed:
            tasks = [*self._dropped, *self._wanted.values()]
        for client in [task.client for task in tasks if task.client is not None]:
            client.close()

    def _step(self, now: float) -> tuple[float | None, list[ZmqClient]]:
        """Ask whom there is to ask. Returns when there is more to do (None: when something changes), and what is to be closed."""
        ended = [task.client for task in self._dropped if task.client is not None]
        self._dropped.clear()
        due = None
        for index, task in self._wanted.items():
            if task.invitation is not None and task.client is not None and task.invitation.done():
                ended.append(task.client)
                self._note_reply(index, task, now)
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
        except errors.OpError as error:  # an address that is none, no keys
            self._failed(index, task, error, now)
            return
        task.invited_at = now
        task.invitation = internal_client.start(
            task.client, INVITE, self._dispatcher, index, self._slots, program(), INVITED_ORPHAN_LIMIT_S
        )
        task.invitation.add_done_callback(lambda _: self._wake.set())

    def _note_reply(self, index: int, task: _Wanted, now: float) -> None:
        """The answer is here."""
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
                "worker:%d at %s does not work for this program, it is asked again: %s",
                index,
                task.address,
                error.message,
            )
        task.last_error = error
        self._changed.notify_all()
