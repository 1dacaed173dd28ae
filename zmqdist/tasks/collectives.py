"""The operations of a group of tasks, from the announcement to the result.

Theory of operation
    Each member announces its part to the leader (collective_leader.py). A small value travels with
    the announcement, and the leader's reply has the result. If a value is large, the reply says
    that all members have announced. The members then exchange pieces with each other, as
    collectives_machine.py schedules them. A piece is an argument of a call to another member; on
    one host large pieces travel through shared memory. A reduction writes a large piece into shared
    memory if there is room (ring_schedules.py). A member passes an arrived piece on unchanged.
    Therefore no piece is copied again for the next member.

Rules
    A member that fails during an exchange reports the error to all other members, so that no member
    waits for pieces that will not arrive. A member notices the end of each process to which it
    sends or announces, or from which it awaits pieces. A call to a task that has gone fails, and
    does not wait for the task's next incarnation.
    Operations of one group run one after another, in the order of the calls at each member. Groups
    are independent of each other.

Not here: the public methods, and the handling of structures and packs (collective_api.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, TypeAlias

from numpy.typing import NDArray

from zmqdist.clock import monotonic
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import (
    CANCELLED,
    UNKNOWN,
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.limits import CHUNK_BYTES, COLLECTIVE_WIDTH
from zmqdist.rpc import StatusOrResult
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks.collective_leader import FAILED, GO, RESULT, Leader
from zmqdist.tasks.collectives_machine import Schedule
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.mail import LockedMailbox
from zmqdist.tasks.mailbox_machine import Key, Mailbox
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.snapshot import GroupRow
from zmqdist.transport.shm_pool import lendable_block

Array: TypeAlias = NDArray[Any]

GRACE_S = 5.0
"""Seconds that a member waits beyond the deadline of its announcement, because at the deadline the
leader replies with the names of absent members.
"""
IN_FLIGHT_MAX = 2 * COLLECTIVE_WIDTH + 2
"""Number of pieces that a member may have sent without a reply. With fewer than 2 *
COLLECTIVE_WIDTH pieces, members could deadlock."""


NOTHING = ("cancel", "", 0, None, None)
"""The contribution of a member that takes no part in an operation."""


class Group:
    """A group of tasks that do collectives together, as one of its members sees it. `Server.group`
    makes it.

    Attributes:
      name: name of the group. Operations of groups with different names are independent, even if
        the groups have the same tasks.
      tasks: the names of the members by rank, such as "worker:0". The first member is the leader,
        which compares the members' parts.
      rank: rank of this task.
      lock: a caller holds it during an operation. Only zmqdist itself uses this attribute.
    """

    def __init__(
        self, name: str, members: Sequence[Task], me: Task, collectives: Collectives
    ) -> None:
        self._members = tuple(members)
        if not members or len(set(members)) < len(members):
            raise InvalidArgumentError(
                f"a group needs one or more different tasks, not {[*map(task_name, members)]}"
            )
        if me not in self._members:
            names = ", ".join(map(task_name, members))
            raise InvalidArgumentError(f"{task_name(me)} is not a member of the group {names}")
        self.name = name
        self.tasks = [*map(task_name, members)]
        self.rank = self._members.index(me)
        self._collectives = collectives
        self.lock = threading.Lock()
        # The number of the next operation's round; 0 for the first operation. None means the
        # current round, whose number this member does not know.
        self._counter: int | None = 0
        # The leader's reply to a failure that this member announced while `counter` was None. The
        # reply has the number of the round.
        self._unnumbered: _LocalReply | StatusOrResult | None = None
        # (code, message) if a member has aborted the current operation
        self._aborted: tuple[int, str] | None = None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.tasks)

    def cancel(self, message: str = "cancelled by a member") -> None:
        """Cancel the group's next operation, which ends with CancelledError at all other members.
        The operation after that works again.

        A member that cannot take part calls this in place of the operation, so that the other
        members do not wait for it. This does not block.
        """
        with self._collectives.own_wait, self.lock:
            error = CancelledError(f"{self.tasks[self.rank]}: {message}")
            self._collectives.refuse(self, "cancel", error)

    def abort(self, code: int, message: str) -> None:
        """End the current operation at every member with this error, and end each later operation
        at once, until `reset`.

        Args:
          code: one of zmqdist.errors, such as UNAVAILABLE.

        Raises:
          UnavailableError: the group's leader cannot be reached.
        """
        with self._collectives.own_wait:
            self._collectives.abort(self, code, message)

    def reset(self) -> None:
        """End an abort, so that the next operation of every member works again. Only one member
        calls this, and only once. Raises the errors of `abort`.
        """
        with self._collectives.own_wait:
            self._collectives.reset(self)

    def __repr__(self) -> str:
        return f"<Group {self.name}, rank {self.rank} of {self.size}>"


class _LocalReply(Future[Any]):
    """The reply to the leader's own announcement. It has the methods of PendingCall and of
    StatusOrResult that the leader and Collectives use."""

    reply = Future.set_result
    fail = Future.set_exception
    get_value = Future.result


class Collectives:
    """The collectives of one task: its announcements, the pieces that it sends, and the pieces that
    arrive for it."""

    def __init__(self, node: Node, watches: Watches) -> None:
        self._node = node
        self.own_wait = node.own_wait
        self._watches = watches
        self._leader = Leader(node, watches)
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._boxes: dict[str, dict[str, LockedMailbox]] = {}
        self._running: dict[str, tuple[Group, str]] = {}
        self._calls: dict[StatusOrResult, tuple[str, Task]] = {}
        node.service.register("collective.piece", self._arrived, inline=True, roles=TASKS)
        node.service.register("collective.fail", self._failed, inline=True, roles=TASKS)
        node.service.register("collective.stop", self._aborted, inline=True, roles=TASKS)
        node.on_stop.append(self._stop)
        watches.listen(lambda task, incarnation: None, self._task_lost)

    @property
    def unanswered(self) -> int:
        """The number of announcements and pieces that this task has sent and that have no reply
        yet."""
        return len(self._calls)

    def led(self) -> tuple[GroupRow, ...]:
        """Return the groups whose leader is this task and in which some members wait for the
        others."""
        return self._leader.rows()

    # -- the announcement --------------------------------------------------------------------------

    def group(self, members: Sequence[Task], name: str) -> Group:
        """Return this member's view of a group; make it on first use."""
        name = name or ",".join(map(task_name, members))
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = Group(name, members, self._node.me, self)
        if list(group._members) != members:
            raise InvalidArgumentError(f"group {name!r} has the members {', '.join(group.tasks)}")
        return group

    def agree(
        self, group: Group, signature: str, contribution: tuple[Any, ...], timeout_s: float
    ) -> tuple[Any, ...]:
        """Announce the next operation of a group, whose lock the caller holds, and wait for the
        verdict.

        Args:
          contribution: kind, op, root, detail and inline value, the fields of
            collective_leader.Contribution.

        Returns:
          (RESULT, value), or (GO, number of the next round, name of the exchange, details of all
          members by rank).
        """
        _, reply = self._announce(group, signature, contribution, timeout_s, None)
        try:
            counter, kind, value, *more = (
                reply.get_value() if isinstance(reply, _LocalReply) else self._outcome(reply)
            )
            if kind != GO:
                group._counter = counter + 1
            if kind == RESULT:
                return kind, value
            if kind == FAILED:
                raise from_code(value, *more)
            details, incarnations = more
            for task, incarnation in zip(group._members, incarnations, strict=True):
                # the watch of `task` may not have noticed a restart yet
                self._watches.heard_from(task, incarnation)
            return kind, counter + 1, value, details
        except UnavailableError as error:
            raise UnavailableError(
                f"{signature} with leader {group.tasks[0]}: {error.message}"
            ) from None
        except BaseException:
            # even after Ctrl-C, withdraw, so that the leader ends the round for all members
            if isinstance(reply, _LocalReply):
                self._leader.announcement_withdrawn(group.name, reply)
            else:
                reply.cancel()
            raise

    def refuse(self, group: Group, signature: str, failure: OpError) -> None:
        """Announce that this member cannot take part in the next operation of a group, whose lock
        the caller holds. This does not wait for the verdict, because the caller raises the failure
        anyway."""
        counter, reply = self._announce(group, signature, NOTHING, inf, failure)
        if counter is None:
            group._unnumbered = reply
        else:
            group._counter = counter + 1
        reply.add_done_callback(lambda call: self._calls.pop(call, None))

    def _announce(
        self,
        group: Group,
        signature: str,
        contribution: tuple[Any, ...],
        timeout_s: float,
        failure: OpError | None,
    ) -> tuple[int | None, Any]:
        """Announce this member's part to the leader. Return the number of the round, if it is
        known, and the future reply."""
        with self._lock:
            # stored pieces are of failed operations: no member sends any before this member
            # announces
            self._boxes.pop(group.name, None)
            group._aborted = None
            self._running[group.name] = group, ""
        counter, group._counter = self._counter(group), None
        status = None if failure is None else (failure.error_code, failure.message)
        args: tuple[Any, ...] = (group.name, list(group._members), group.rank)
        args += (self._node.incarnation, counter, signature, timeout_s, status, contribution)
        leader = group._members[0]
        if leader == self._node.me:
            reply = _LocalReply()
            self._leader.announce(*args, token=reply)
            return counter, reply
        due = monotonic() + (timeout_s if failure is None else 0.0) + GRACE_S
        return counter, self._call("", leader, "collective.announce", *args, due=due)

    @staticmethod
    def _counter(group: Group) -> int | None:
        """Return the number of the round of the next operation; None if this member does not know
        the number.

        If this member has announced a failure without a number, wait for the leader's reply, which
        has the number. Without the number, the leader could mistake a second failure for a late
        report of the first, and end an operation to which neither failure belongs.
        """
        reply, group._unnumbered = group._unnumbered, None
        if reply is None:
            return group._counter
        try:
            return int(reply.get_value()[0]) + 1
        except OpError:  # the group has no current round, or the leader has gone
            return None

    def abort(self, group: Group, code: int, message: str) -> None:
        """Fail all operations of this group at every member, now and until `reset`."""
        tasks, args = list(group._members), (group.name, code, message)
        self._aborted(*args)
        due = monotonic() + GRACE_S
        calls = [
            self._node.start(task, "collective.stop", *args, due=due)
            for task in tasks
            if task != self._node.me
        ]
        if tasks[0] == self._node.me:
            self._leader.abort(group.name, tasks, code, message)
        else:
            self._node.start(
                tasks[0], "collective.abort", group.name, tasks, code, message
            ).get_value()
        for call in calls:
            # Wait for the reply, and ignore an error, because a member that cannot be reached takes
            # part in no operation.
            call.is_ok()

    def reset(self, group: Group) -> None:
        """End an abort, so that the group's operations work again."""
        if group._members[0] == self._node.me:
            self._leader.reset(group.name)
        else:
            self._node.start(group._members[0], "collective.reset", group.name).get_value()

    # -- the exchange ------------------------------------------------------------------------------

    def exchange(
        self,
        group: Group,
        counter: int,
        name: str,
        begin: Callable[[], tuple[Iterator[Schedule], Any]],
        timeout_s: float,
    ) -> Any:
        """Send and receive pieces until all schedules have ended, and return the result. If this
        fails, report the error to all members.

        Args:
          counter: the number of the group's next round. It takes effect if the exchange succeeds.
          begin: function that makes the schedules and the arrays for their result. It may raise,
            for instance MemoryError.
        """
        box = self._box(group.name, name)
        with self._lock:
            self._running[group.name] = group, name
        try:
            if self._node.closed:
                # `_stop` may have run before this exchange was added to `_running`
                raise self._node.stopped
            if group._aborted is not None:
                raise from_code(*group._aborted)
            schedules, result = begin()
            self._run(group, name, box, schedules, timeout_s)
            group._counter = counter
            return result
        except BaseException as error:
            self._report_failure(group, name, error)
            raise
        finally:
            with self._lock:
                self._boxes.get(group.name, {}).pop(name, None)

    def _report_failure(self, group: Group, name: str, error: BaseException) -> None:
        message = f"{task_name(self._node.me)}: {str(error) or type(error).__name__}"
        code = error.error_code if isinstance(error, OpError) else UNKNOWN
        code = CANCELLED if isinstance(error, KeyboardInterrupt) else code
        for task in group._members:
            # A node that is closed sends nothing, because the other members notice by themselves
            # that this task has stopped.
            if task != self._node.me and not self._node.closed:
                due = monotonic() + GRACE_S
                self._node.start(task, "collective.fail", group.name, name, code, message, due=due)

    def _run(
        self,
        group: Group,
        name: str,
        box: LockedMailbox,
        schedules: Iterator[Schedule],
        timeout_s: float,
    ) -> None:
        sent: deque[StatusOrResult] = deque()
        sent_to, received = [0] * group.size, [0] * group.size
        steps = core.pipelined(schedules, COLLECTIVE_WIDTH)
        arrived = None
        try:
            while True:
                step = steps.send(arrived)
                arrived = None
                if step.to is not None:
                    box.check()
                    sent.append(
                        self._send(group, name, step.to, sent_to[step.to], step.piece, timeout_s)
                    )
                    sent_to[step.to] += 1
                    while len(sent) > IN_FLIGHT_MAX:
                        self._outcome(sent.popleft(), box)
                else:
                    assert step.source is not None
                    arrived = self._receive(
                        group, box, step.source, received[step.source], timeout_s
                    )
                    received[step.source] += 1
        except StopIteration:
            pass
        except BaseException:
            for call in sent:
                # cancel the calls, because `_report_failure` sends the error to their receivers
                call.cancel()
                self._calls.pop(call, None)
            raise
        while sent:
            # wait until all pieces have arrived, because the program may end this task after the
            # operation
            self._outcome(sent.popleft(), box)

    def _send(
        self, group: Group, name: str, to: int, index: int, piece: Array, timeout_s: float
    ) -> StatusOrResult:
        block = lendable_block(piece) if piece.nbytes > CHUNK_BYTES else None
        args = (group.name, name, group.rank, index, piece)
        due = monotonic() + timeout_s
        return self._call(
            name, group._members[to], "collective.piece", *args, due=due, still=True, block=block
        )

    def _call(
        self, exchange: str, task: Task, method: str, *args: Any, **how: Any
    ) -> StatusOrResult:
        """Call a method of a member, without waiting. The call is cancelled when that member has
        gone or the exchange has failed. `_outcome` waits for the reply.
        """
        self._watches.watch(task)
        call = self._node.start(task, method, *args, **how)
        self._calls[call] = exchange, task
        if (self._watches.gone_message(task) or self._node.closed) and not call.done():
            call.cancel()
        return call

    def _outcome(self, call: StatusOrResult, box: LockedMailbox | None = None) -> Any:
        task = self._calls[call][1]
        try:
            return call.get_value()
        except (CancelledError, UnavailableError) as error:
            if box is not None:
                box.check()
            gone_message = self._watches.gone_message(task)
            if not gone_message and isinstance(error, CancelledError):
                raise
            raise UnavailableError(
                gone_message or (f"{task_name(task)}: " if box else "") + error.message
            ) from None
        finally:
            self._calls.pop(call, None)

    def _end_calls(self, matches: Callable[[str, Task], bool]) -> None:
        for call, (exchange, task) in list(self._calls.items()):
            if matches(exchange, task) and not call.done():  # a reply that has arrived stays valid
                call.cancel()

    def _receive(
        self, group: Group, box: LockedMailbox, source: int, index: int, timeout_s: float
    ) -> Array:
        task = group._members[source]
        self._watches.watch(task)
        key, due = Key(str(source), 1, "", str(index)), monotonic() + timeout_s
        try:
            piece: Array = box.receive(key, due, partial(self._watches.gone_message, task)).letter
        except DeadlineExceededError:
            if monotonic() < due:
                # before this member's time-out, the error is one that another member has reported
                raise
            raise DeadlineExceededError(
                f"no piece came from {task_name(task)} within {timeout_s} s, during the "
                f"execution: all members had announced"
            ) from None
        return piece

    # -- calls from other members ------------------------------------------------------------------

    def _box(self, group: str, name: str) -> LockedMailbox:
        with self._lock:
            return self._boxes.setdefault(group, {}).setdefault(name, LockedMailbox(Mailbox()))

    def _arrived(self, group: str, name: str, source: int, index: int, piece: Array) -> None:
        if self._node.closed:
            # the sender must see that this member has ended, and no piece may be stored any more
            raise UnavailableError(self._node.stopped.message)
        box = self._box(group, name)
        box.apply(lambda: box.box.sent(Key(str(source), 1, "", str(index)), piece)[0])

    def _failed(self, group: str, name: str, code: int, message: str) -> None:
        box = self._box(group, name)
        box.apply(box.box.aborted, code, message)
        self._end_calls(lambda exchange, task: exchange == name)

    def _aborted(self, group: str, code: int, message: str) -> None:
        with self._lock:
            running, name = self._running.get(group, (None, ""))
            if running is not None:
                running._aborted = code, message
        if name:
            self._failed(group, name, code, message)

    def _task_lost(self, task: Task, message: str) -> None:
        with self._lock:
            running = list(self._running.values())
        for group, name in running:
            if task in group._members:
                box = self._box(group.name, name)
                box.apply(box.box.sender_gone, str(group._members.index(task)), message)
        self._end_calls(lambda exchange, to: to == task)

    def _stop(self) -> None:
        with self._lock:
            running = list(self._running.values())
            boxes = [box for group in self._boxes.values() for box in group.values()]
        for group, name in running:
            self._failed(group.name, name, CANCELLED, self._node.stopped.message)
        # Also drop the pieces of exchanges that this member has not begun, because they may be
        # borrowed from another task's memory.
        for box in boxes:
            box.apply(box.box.aborted, CANCELLED, self._node.stopped.message)
        self._end_calls(lambda exchange, task: True)  # including announcements
        self._leader.stop()
