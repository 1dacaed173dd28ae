"""The thread that invites the tasks of a cluster to work for the program's dispatcher, as long as
the program wants them.

The program names the wanted workers, by index and address, with `want` and `drop`.
`recruitment_machine.py` decides which wanted workers are invited, and when. The thread here sends
the invitations, which are calls to the tasks (tasks/worker_role.py), and reports the end of each
invitation to the machine. A restarted task is invited again at once. The invitation of a task does
not wait for another task.

Not here: which tasks must be present before a program begins (cluster_connection.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.conditions import Condition
from zmqdist.limits import INVITED_ORPHAN_LIMIT_S
from zmqdist.rpc import StatusOrResult, ZmqClient, internal_client
from zmqdist.scheduling.coordinator import metrics
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.tasks.worker_role import INVITE
from zmqdist.training.recruitment_machine import (
    DropInvitation,
    InviteWorker,
    LogFailure,
    RecordAcceptance,
    Recruitment,
    RecruitmentEffect,
)
from zmqdist.transport.credentials import Credentials

log = logging.getLogger("zmqdist.training")

RECOVERY_PAUSE_S: Final = 0.25
"""Pause in seconds after an invitation that could not be sent, because the process has no
descriptor or thread left."""

_own: tuple[int, int] = (0, 0)


def program() -> int:
    """Return the random number of this program, which stays the same until its process ends. A
    forked child has another number."""
    global _own
    if _own[0] != os.getpid():
        _own = os.getpid(), secrets.randbits(62) | 1
    return _own[1]


class WorkerRecruiter:
    """Invites the wanted workers until it is closed. Any thread may call the methods."""

    def __init__(
        self,
        dispatcher: DispatchServer,
        credentials: Credentials,
        slots: int,
        wake: threading.Event | None = None,
    ) -> None:
        """Create a recruiter that wants no worker yet.

        Args:
          slots: number of functions that a worker runs at a time. A server that has a number of its
            own ignores this number.
          wake: the event for which the recruiter's thread waits, by default a new one. A test
            passes an event that shows when it waits.
        """
        self._dispatcher = dispatcher.address
        self._credentials = credentials
        self._slots = slots
        self._changed = Condition()
        # The event is not part of `_changed`, because a client's thread sets it and must not wait
        # for the lock of `_changed`.
        self._wake = wake or threading.Event()
        self._machine = Recruitment()
        self._effects: deque[RecruitmentEffect] = deque()
        """Effects of the machine that the thread has not carried out yet."""
        self._calls: dict[int, tuple[ZmqClient, StatusOrResult]] = {}
        """The invitations in flight, by number. Only the thread uses them."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zmqdist-inviting", daemon=True)
        self._thread.start()
        dispatcher.watch_members(self._members)

    def want(self, index: int, address: str) -> None:
        """Invite the task at `address` as worker:`index`, in place of any task that was wanted for
        this index before."""
        self._apply(self._machine.want, index, address, time.monotonic())

    def drop(self, index: int) -> None:
        """Stop inviting worker:`index`."""
        self._apply(self._machine.drop, index)

    @property
    def wanted(self) -> dict[int, str]:
        """The addresses of the wanted workers, sorted by index."""
        with self._changed:
            return self._machine.addresses

    def wait(self, until: float) -> list[int]:
        """Wait until all wanted workers work for the dispatcher.

        Args:
          until: the time at which to stop waiting, on the clock of `time.monotonic`.

        Returns:
          The indices of the wanted workers that do not work for the dispatcher yet.

        Raises:
          OpError: a worker has refused for a reason that waiting cannot change.
        """
        with self._changed:
            while missing := self._machine.missing:
                now = time.monotonic()
                if (refusal := self._machine.refusal(now)) is not None:
                    index, address, code, message = refusal
                    raise errors.from_code(code, f"worker:{index} at {address}: {message}")
                if now >= until or self._closed:
                    break
                self._changed.wait(until - now)
            return missing

    def close(self) -> None:
        """Stop inviting. Workers that are present go on working. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _members(self, present: frozenset[tuple[str, int]]) -> None:
        """Tell the machine which workers are registered with the dispatcher. The dispatcher's loop
        thread calls this."""
        indices = frozenset(index for job, index in present if job == "worker")
        self._apply(self._machine.members_changed, indices, time.monotonic())

    def _apply(self, event: Callable[..., list[RecruitmentEffect]], *args: Any) -> None:
        """Pass an event to the machine, and have the thread carry out its effects."""
        with self._changed:
            self._effects += event(*args)
            self._changed.notify_all()
        self._wake.set()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._closed:
                # read `_closed` after `clear`: a `close` between the two would otherwise wake no
                # thread
                break
            try:
                due = self._step()
            except BaseException:
                # Continue after every error, such as a lack of file descriptors, because without
                # this thread no worker would rejoin.
                log.exception(
                    "workers could not be invited to this program; the next attempt follows in %s "
                    "s",
                    RECOVERY_PAUSE_S,
                )
                due = time.monotonic() + RECOVERY_PAUSE_S
            self._wake.wait(None if due == inf else max(0.0, due - time.monotonic()))
        for client, _ in self._calls.values():
            client.close()

    def _step(self) -> float:
        """Tell the machine which invitations have ended, and carry out its effects. Return the time
        at which to call this method again."""
        for number, (_, call) in list(self._calls.items()):
            if call.done():
                self._ended(number, *call.get_error())
        with self._changed:
            self._effects += self._machine.ticked(time.monotonic())
        while self._effects:
            effect = self._effects.popleft()
            match effect:
                case InviteWorker():
                    self._invite(effect)
                case DropInvitation(number):
                    if number in self._calls:
                        self._calls.pop(number)[0].close()
                case LogFailure(index, address, message, passes):
                    log.log(
                        logging.INFO if passes else logging.WARNING,
                        "worker:%d at %s has not accepted the invitation to this program, which "
                        "is repeated: %s",
                        index,
                        address,
                        message,
                    )
                case RecordAcceptance(took_s):
                    metrics.record("server_def_update", took_s)
        with self._changed:
            return self._machine.deadline

    def _invite(self, effect: InviteWorker) -> None:
        try:
            security = self._credentials.client(effect.address, "submit")
            client = ZmqClient(effect.address, f"invites worker:{effect.index}", security=security)
        except errors.OpError as error:
            # no request can be sent, because the address is malformed or keys are missing
            self._ended(effect.invitation, error.error_code, error.message)
            return
        except BaseException:
            # have the machine repeat the invitation, because a lack of descriptors or threads
            # passes
            self._ended(
                effect.invitation, errors.UNAVAILABLE, "this process could not make a connection"
            )
            raise
        call = internal_client.start(
            client,
            INVITE,
            self._dispatcher,
            effect.index,
            self._slots,
            program(),
            INVITED_ORPHAN_LIMIT_S,
        )
        self._calls[effect.invitation] = client, call
        call.add_done_callback(lambda _: self._wake.set())

    def _ended(self, number: int, code: int, message: str) -> None:
        self._apply(self._machine.invitation_ended, number, code, message, time.monotonic())
