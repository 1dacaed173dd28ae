"""Operations that a group of tasks does together: one piece of one operation at a time, from the announcement to the result.

Theory of operation
    Each member announces to the leader what it is about to do (collective_leader.py), with the value where that is small: then the answer
    is the result. Else the answer is that all have come, and the members exchange pieces by themselves, as collectives_machine.py says: a
    piece is a call to the next member, large ones by shared memory on one host. What has been folded lies in shared memory already, and
    what has arrived goes on without a copy.

Rules
    A member that fails in the middle tells all others: none waits for pieces that will not come. Whoever dies is noticed by those that
    wait for its pieces, send to it, or announce to it: a call to a task that has gone does not wait for its next life.
    Operations of one group are done one after the other, in the order of the calls on each member; those of different groups are
    independent.

Not here: what users call, structures and packing (collective_api.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

from numpy.typing import NDArray

from zmqdist.coordination.answers import Task, named
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
from zmqdist.transport.shm_peer import lendable

Array: TypeAlias = NDArray[Any]

GRACE_S = 5.0
"""The leader says when the time of an announcement has passed, and who is absent; so long after that it is not waited for any more."""
ON_THE_WAY_MAX = 2 * COLLECTIVE_WIDTH + 2
"""Pieces that a member has sent and the others have not taken note of. Less than twice the width could be a deadlock."""


class GroupMembers:
    """A group as one of its members sees it.

    Attributes:
      name: known to all members; operations of different names never meet.
      tasks: the members; their order is that of the ranks.
      rank: the own one.
      counter: the round that the next operation belongs to: 0 for the first; None: the one that is on then, since nobody knows its number.
      unnumbered: the announcement of a failure while the counter was None: its answer says the number.
      aborted: (code, message), if the present one was aborted from elsewhere.
      lock: held by whoever does one.
    """

    def __init__(self, name: str, tasks: Sequence[Task], me: Task) -> None:
        self.name = name
        self.tasks = tuple(tasks)
        if not tasks or len(set(tasks)) < len(tasks):
            raise InvalidArgumentError(f"a group needs different tasks, not {[*map(named, tasks)]}")
        if me not in self.tasks:
            members = ", ".join(map(named, tasks))
            raise InvalidArgumentError(f"{named(me)} is not a member of the group {members}")
        self.rank = self.tasks.index(me)
        self.counter: int | None = 0
        self.unnumbered: _LocalReply | StatusOrResult | None = None
        self.aborted: tuple[int, str] | None = None
        self.lock = threading.Lock()

    @property
    def size(self) -> int:
        return len(self.tasks)


class _LocalReply:
    """What the leader's own member is answered, as a call of any other would be."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def answer(self, value: Any) -> None:
        self._value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def get_value(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        pass


class Collectives:
    """The collectives of one task."""

    def __init__(self, node: Node, watches: Watches) -> None:
        self._node = node
        self.own_wait = node.own_wait
        self._watches = watches
        self._leader = Leader(node, watches)
        self._lock = threading.Lock()
        self._boxes: dict[str, dict[str, LockedMailbox]] = {}
        self._running: dict[str, tuple[GroupMembers, str]] = {}
        self._calls: dict[StatusOrResult, tuple[str, Task]] = {}
        node.service.register("collective.piece", self._arrived, inline=True, roles=TASKS)
        node.service.register("collective.fail", self._failed, inline=True, roles=TASKS)
        node.service.register("collective.stop", self._aborted, inline=True, roles=TASKS)
        node.on_stop.append(self._stopped)
        watches.listen(lambda task, life: None, self._task_gone)

    @property
    def unanswered(self) -> int:
        """Announcements and pieces of this task that other members have not answered yet."""
        return len(self._calls)

    def led(self) -> tuple[GroupRow, ...]:
        """The groups that this task leads, while some of their members wait for the others."""
        return self._leader.rows()

    # -- the announcement -------------------------------------------------------------------------------------------------

    def agree(
        self,
        group: GroupMembers,
        signature: str,
        contribution: tuple[Any, ...],
        timeout_s: float,
        failure: OpError | None = None,
    ) -> tuple[Any, ...]:
        """Announce the next operation of a group, whose lock the caller holds, and wait for the verdict.

        Returns:
          (RESULT, value), or (GO, the round to go on with, name of the exchange, what each member has told).
        """
        with self._lock:  # nobody can be ahead of us: what is left is of operations that failed
            self._boxes.pop(group.name, None)
            group.aborted = None
            self._running[group.name] = group, ""
        counter, group.counter = self._counter(group), None
        status = None if failure is None else (failure.error_code, failure.message)
        args = (
            group.name,
            list(group.tasks),
            group.rank,
            self._node.incarnation,
            counter,
            signature,
            timeout_s,
            status,
            contribution,
        )
        leader = group.tasks[0]
        reply: _LocalReply | StatusOrResult
        if leader == self._node.me:
            reply = _LocalReply()
            self._leader.announce(*args, token=reply)
        else:
            due = monotonic() + (timeout_s if failure is None else 0.0) + GRACE_S
            reply = self._call("", leader, "collective.announce", *args, due=due)
        if failure is not None:  # it takes the place of the operation
            if counter is None:
                group.unnumbered = reply
            else:
                group.counter = counter + 1
            if not isinstance(reply, _LocalReply):
                reply.add_done_callback(lambda call: self._calls.pop(call, None))
            return ()
        try:
            ended, kind, value, *more = reply.get_value() if isinstance(reply, _LocalReply) else self._outcome(reply)
            if kind != GO:
                group.counter = ended + 1
            if kind == RESULT:
                return kind, value
            if kind == FAILED:
                raise from_code(value, *more)
            details, incarnations = more
            for task, incarnation in zip(group.tasks, incarnations, strict=True):
                self._watches.heard_from(task, incarnation)  # our own watch may be behind
            return kind, ended + 1, value, details
        except UnavailableError as error:
            raise UnavailableError(f"{signature} with leader {named(leader)}: {error.message}") from None
        except BaseException:  # also Ctrl-C: the others are told
            if isinstance(reply, _LocalReply):
                self._leader.withdrew(group.name, reply)
            else:
                reply.cancel()
            raise

    @staticmethod
    def _counter(group: GroupMembers) -> int | None:
        """The round that the next operation belongs to. Waits for the leader's word on a failure that had no number, else two failures
        after an error could be taken for one that comes late, and end an operation that belongs to neither."""
        reply, group.unnumbered = group.unnumbered, None
        if reply is None:
            return group.counter
        try:
            return int(reply.get_value()[0]) + 1
        except OpError:  # no round is on, or the leader has gone
            return None

    def abort(self, group: GroupMembers, code: int, message: str) -> None:
        """Everything of this group fails at every member, now and until the reset."""
        tasks = list(group.tasks)
        calls = []
        for task in tasks:
            if task == self._node.me:
                self._aborted(group.name, code, message)
            else:
                due = monotonic() + GRACE_S
                calls.append(self._node.start(task, "collective.stop", group.name, code, message, due=due))
        if tasks[0] == self._node.me:
            self._leader.abort(group.name, tasks, code, message)
        else:
            self._node.start(tasks[0], "collective.abort", group.name, tasks, code, message).get_value()
        for call in calls:
            call.is_ok()  # who cannot be told has no part in it any more

    def reset(self, group: GroupMembers) -> None:
        """The end of an abort."""
        if group.tasks[0] == self._node.me:
            self._leader.reset(group.name)
        else:
            self._node.start(group.tasks[0], "collective.reset", group.name).get_value()

    # -- the exchange -----------------------------------------------------------------------------------------------------

    def exchange(
        self,
        group: GroupMembers,
        counter: int,
        name: str,
        begin: Callable[[], tuple[Iterator[Schedule], Any]],
        timeout_s: float,
    ) -> Any:
        """Send and receive pieces until all schedules have ended; what they have made. When anything fails, all members are told.

        Args:
          counter: the round to go on with when all is well.
          begin: gives the schedules, and where their result will be: it may fail, too, where there is no memory.
        """
        box = self._box(group.name, name)
        with self._lock:
            self._running[group.name] = group, name
        try:
            if self._node.closed:  # it may have ended before it knew of this one
                raise self._node.stopped
            if group.aborted is not None:
                raise from_code(*group.aborted)
            schedules, result = begin()
            self._run(group, name, box, schedules, timeout_s)
            group.counter = counter
            return result
        except BaseException as error:
            self._report_failure(group, name, error)
            raise
        finally:
            with self._lock:
                self._boxes.get(group.name, {}).pop(name, None)

    def _report_failure(self, group: GroupMembers, name: str, error: BaseException) -> None:
        message = f"{named(self._node.me)}: {str(error) or type(error).__name__}"
        code = error.error_code if isinstance(error, OpError) else UNKNOWN
        code = CANCELLED if isinstance(error, KeyboardInterrupt) else code
        for task in group.tasks:
            if task != self._node.me and not self._node.closed:  # whose stop the others see for themselves
                due = monotonic() + GRACE_S
                self._node.start(task, "collective.fail", group.name, name, code, message, due=due)

    def _run(
        self, group: GroupMembers, name: str, box: LockedMailbox, schedules: Iterator[Schedule], timeout_s: float
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
                    sent.append(self._send(group, name, step.to, sent_to[step.to], step.piece, timeout_s))
                    sent_to[step.to] += 1
                    while len(sent) > ON_THE_WAY_MAX:
                        self._outcome(sent.popleft(), box)
                else:
                    assert step.source is not None
                    arrived = self._receive(group, box, step.source, received[step.source], timeout_s)
                    received[step.source] += 1
        except StopIteration:
            pass
        except BaseException:
            for call in sent:
                call.cancel()
                self._calls.pop(call, None)
            raise
        while sent:  # who gets them may need us no more, but we may end now
            self._outcome(sent.popleft(), box)

    def _send(
        self, group: GroupMembers, name: str, to: int, index: int, piece: Array, timeout_s: float
    ) -> StatusOrResult:
        block = lendable(piece) if piece.nbytes > CHUNK_BYTES else None
        args = (group.name, name, group.rank, index, piece)
        due = monotonic() + timeout_s
        return self._call(name, group.tasks[to], "collective.piece", *args, due=due, still=True, block=block)

    def _call(self, exchange: str, task: Task, method: str, *args: Any, **how: Any) -> StatusOrResult:
        """Call a member; it ends with that member, and with the exchange that it belongs to. For `_outcome`."""
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
            gone = self._watches.gone_message(task)
            if not gone and isinstance(error, CancelledError):
                raise
            raise UnavailableError(gone or (f"{named(task)}: " if box else "") + error.message) from None
        finally:
            self._calls.pop(call, None)

    def _end_calls(self, matches: Callable[[str, Task], bool]) -> None:
        for call, (exchange, task) in list(self._calls.items()):
            if (
                matches(exchange, task) and not call.done()
            ):  # an answer that has come was given before whatever ends it now
                call.cancel()

    def _receive(self, group: GroupMembers, box: LockedMailbox, source: int, index: int, timeout_s: float) -> Array:
        task = group.tasks[source]
        self._watches.watch(task)
        key, due = Key(str(source), 1, "", str(index)), monotonic() + timeout_s
        try:
            piece: Array = box.receive(key, due, partial(self._watches.gone_message, task)).letter
        except DeadlineExceededError:
            if monotonic() < due:  # another member's, who has told us
                raise
            text = f"no piece came from {named(task)} within {timeout_s} s, during the execution: all members had come"
            raise DeadlineExceededError(text) from None
        return piece

    # -- from the others --------------------------------------------------------------------------------------------------

    def _box(self, group: str, name: str) -> LockedMailbox:
        with self._lock:
            return self._boxes.setdefault(group, {}).setdefault(name, LockedMailbox(Mailbox()))

    def _arrived(self, group: str, name: str, source: int, index: int, piece: Array) -> None:
        if self._node.closed:  # for the sender that is the end of its receiver; and nothing may stay here
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
                running.aborted = code, message
        if name:
            self._failed(group, name, code, message)

    def _task_gone(self, task: Task, message: str) -> None:
        with self._lock:
            running = list(self._running.values())
        for group, name in running:
            if task in group.tasks:
                box = self._box(group.name, name)
                box.apply(box.box.gone, str(group.tasks.index(task)), message)
        self._end_calls(lambda exchange, to: to == task)

    def _stopped(self) -> None:
        with self._lock:
            running = list(self._running.values())
            boxes = [box for group in self._boxes.values() for box in group.values()]
        for group, name in running:
            self._failed(group.name, name, CANCELLED, self._node.stopped.message)
        for box in boxes:  # also of an exchange that has not begun here: its pieces may be another task's memory
            box.apply(box.box.aborted, CANCELLED, self._node.stopped.message)
        self._end_calls(lambda exchange, task: True)  # announcements, too
        self._leader.stopped()
