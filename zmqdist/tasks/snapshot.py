"""The results of `Server.snapshot` and `Session.snapshot`: figures of one moment, for people who
run a cluster and for tests.

A snapshot is cheap, and any thread can take one. Its parts are read one after another, so they may
be some microseconds apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zmqdist.coordination.service import KeeperSnapshot


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of which this task is the leader and in which some members wait for the others.

    Attributes:
      name: name of the group.
      arrived: members that have announced the next operation, by rank.
      missing: members that have not announced the next operation, by rank.
    """

    name: str
    arrived: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WatchRow:
    """A watched task: another task for which this task has waited at least once.

    Attributes:
      task: name of the watched task.
      state: "unseen" (this task has never heard from the watched task), "up" or "gone".
      incarnation: the last incarnation of the watched task that this task has seen; 0 if it has
        seen no incarnation.
      message: how the watched task ended; "" unless the state is "gone".
    """

    task: str
    state: str
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """One task at one moment.

    Attributes:
      task, address: name of the task, and its "host:port" with the port that was bound.
      incarnation: incarnation of this process, as other tasks know it.
      mail_items, mail_bytes: messages that have arrived in this task's mailbox and were not
        received yet.
      mail_waits: number of calls of `recv` that wait now.
      mail_unconfirmed: messages sent by this task that may still be on their way, as far as the
        task knows.
      groups: the groups of which this task is the leader and in which some members wait for the
        others.
      collective_calls: announcements and pieces of arrays that this task has sent to other tasks
        and that have no reply yet.
      watched: the tasks that this task watches, by name.
      connections: tasks to which this task has opened a connection, by name.
      calls: number of calls in flight over these connections; each watch of a task is one call.
      keeper: the barriers, keys and states of all tasks if this task is the leader of the cluster;
        else None.
      sessions: number of sessions that have used this task, and that are neither closed nor lost.
      sessions_refused: number of sessions that a reset has ended before they used this task. The
        task remembers them, to refuse them.
      functions_cached: number of unpickled functions of sessions that are cached for their next
        run.
      functions_running: number of functions and copies of variables for which sessions wait.
      faults: number of exceptions that callbacks of the loop have raised. Each exception is a bug
        of zmqdist, and its traceback is logged.
    """

    task: str
    address: str
    incarnation: int
    mail_items: int
    mail_bytes: int
    mail_waits: int
    mail_unconfirmed: int
    groups: tuple[GroupRow, ...]
    collective_calls: int
    watched: Mapping[str, WatchRow]
    connections: tuple[str, ...]
    calls: int
    keeper: KeeperSnapshot | None
    sessions: int
    sessions_refused: int
    functions_cached: int
    functions_running: int
    faults: int


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """The client's side of a session at one moment.

    Attributes:
      pending: number of operations that wait for a task.
      connections: tasks that the session has used, by name, or by address while the name is not
        known.
      functions_pickled: number of times that a function was pickled. A function that captures no
        mutable objects is pickled once.
    """

    pending: int
    connections: tuple[str, ...]
    functions_pickled: int
