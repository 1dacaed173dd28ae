"""The worker in a task's server: when a coordinator invites the task, the task starts a
WorkerServer in its process.

A coordinator (training/worker_recruiter.py) has its own dispatcher, and recruits tasks whose
servers were started without any knowledge of that dispatcher. It sends each task an invitation: the
dispatcher's address, and the index under which the worker must register.

Rules
    A task works for one program at a time. The program may have several dispatchers, because it may
    have several strategies. While a dispatcher of the current program is in contact, the task
    refuses an invitation of another program, with an error that has the address of the current
    dispatcher. If no dispatcher of the current program is in contact, or if the invitation names
    the current dispatcher, the new program takes over. Its workers start without any state of
    earlier workers, so that a restarted coordinator begins clean.
    An invitation that was accepted before has no further effect, so a coordinator that is in doubt
    can repeat the invitation. The worker ends when its dispatcher has been away for the orphan
    limit in the invitation, or when the task's server stops.

Not here: the worker itself (servers/worker_server.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zmqdist import clock as time
from zmqdist.coordination.replies import task_name
from zmqdist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from zmqdist.limits import SLOTS_MAX
from zmqdist.rpc.service import PendingCall
from zmqdist.tasks.node import Node
from zmqdist.tasks.options import PROCESSES, SLOTS

if TYPE_CHECKING:
    from zmqdist.servers.worker_server import WorkerServer

INVITE: Final = "zmqdist.worker.invite"
"""The method for invitations. Arguments: address of the dispatcher, index of the worker, slots,
number of the program, orphan limit in seconds.
"""

STARTED, ALREADY = "started", "already"
"""Replies to an invitation: the worker has started, or an earlier invitation of the same dispatcher
had started it."""

IDLE_JOBS: Final = ("ps", "evaluator")
"""Jobs whose tasks run no functions for a coordinator. An invitation that reaches such a task was
sent to a wrong address."""


@dataclass(frozen=True)
class _Invited:
    """One dispatcher that has invited this task, its program, and the worker that this task runs
    for this dispatcher."""

    dispatcher: str
    program: int
    worker: WorkerServer


class WorkerRole:
    """The workers that programs have invited one task's server to run. Make this object before the
    server's node serves."""

    def __init__(self, node: Node, config: Mapping[str, Any]) -> None:
        """Register the method for invitations.

        Args:
          config: the config of the server. "slots" is the number of functions that run at the same
            time, by default the number in the invitation. If "worker_processes" is False, slots are
            threads of this process, which cannot be ended from outside.

        Raises:
          InvalidArgumentError: one of these options has an invalid value.
        """
        self._node = node
        self._slots = config.get(SLOTS)
        self._processes = config.get(PROCESSES, True)
        if self._slots is not None and (
            type(self._slots) is not int or not 1 <= self._slots <= SLOTS_MAX
        ):
            raise InvalidArgumentError(
                f"config['slots'] is {self._slots!r}, wants 1 to {SLOTS_MAX}"
            )
        if not isinstance(self._processes, bool):
            raise InvalidArgumentError(
                f"config['worker_processes'] is {self._processes!r}, wants True or False"
            )
        self._lock = threading.Lock()
        self._invited: list[_Invited] = []
        self._closed = False
        node.service.register_later(INVITE, self._invite, roles=frozenset({"submit"}))
        node.on_close.append(self._close)

    def _invite(
        self,
        call: PendingCall,
        dispatcher: str,
        index: int,
        slots: int,
        program: int,
        orphan_limit_s: float,
    ) -> None:
        """Check an invitation, in the loop. Then have a thread start the worker, because the start
        waits for the dispatcher."""
        # Import here, because most tasks are never invited, and then do not need the module.
        from zmqdist.scheduling.shared.config import WorkerConfig

        if self._node.me[0] in IDLE_JOBS:
            raise FailedPreconditionError(
                f"{task_name(self._node.me)} at {self._node.address} runs no functions: "
                f"it is not worker:{index}"
            )
        credentials = self._node.credentials
        config = WorkerConfig(
            dispatcher,
            index=index,
            slots=self._slots or slots,
            processes=self._processes,
            orphan_limit_s=orphan_limit_s,
            token_file=credentials.token_file,
            keys_dir=credentials.keys_dir,
            insecure=credentials.insecure,
        )

        def accept() -> None:
            try:
                call.reply(self._accept(config, program))
            except BaseException as error:
                call.fail(error)

        threading.Thread(target=accept, name="zmqdist-server-invited", daemon=True).start()

    def _accept(self, config: Any, program: int) -> str:
        """Start the worker, unless an earlier invitation has started it. Return when the dispatcher
        has registered the worker."""
        from zmqdist.servers.worker_server import WorkerServer

        with self._lock:
            if self._closed:
                raise UnavailableError(f"{task_name(self._node.me)} is stopping")
            # a worker that has ended by itself is no reason to refuse
            self._invited = [entry for entry in self._invited if not entry.worker.join(0)]
            if any(
                (entry.dispatcher, entry.program) == (config.dispatcher_address, program)
                for entry in self._invited
            ):
                return ALREADY
            previous = [entry for entry in self._invited if entry.program != program]
            for entry in previous:
                if entry.worker.in_contact and entry.dispatcher != config.dispatcher_address:
                    raise AlreadyExistsError(self._refusal(entry))
            invited = _Invited(
                config.dispatcher_address, program, WorkerServer(config, start=False)
            )
            self._invited = [entry for entry in self._invited if entry.program == program] + [
                invited
            ]
        # outside the lock, because a stop takes as long as running functions
        for entry in previous:
            entry.worker.stop()
        try:
            invited.worker.start()
        except BaseException:
            with self._lock, contextlib.suppress(ValueError):
                self._invited.remove(invited)
            if self._closed:
                # the stop of this server has ended the worker's start, which shows nothing about
                # the dispatcher
                raise UnavailableError(f"{task_name(self._node.me)} is stopping") from None
            raise
        return STARTED

    def _refusal(self, invited: _Invited) -> str:
        me = f"{task_name(self._node.me)} at {self._node.address}"
        return f"{me} works for another program, whose dispatcher is at {invited.dispatcher}: end that program first"

    def _close(self, until: float) -> None:
        with self._lock:
            self._closed = True
            invited, self._invited = self._invited, []
        for entry in invited:
            entry.worker.stop(max(0.0, until - time.monotonic()))
