"""Results of `Server.snapshot` and `Session.snapshot`: figures of one moment, for operators of a cluster and for tests.

A snapshot is cheap and can be taken from any thread. Its parts are read one after another, so they may be a few microseconds apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zmqdist.coordination.snapshot import KeeperSnapshot


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group that this task leads, while some of its members wait for the others.

    Attributes:
      name: of the group.
      arrived: members that have announced the next operation, by rank.
      missing: members that have not.
    """

    name: str
    arrived: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WatchRow:
    """Another task that this one watches, since it has waited for it.

    Attributes:
      task: its name.
      state: "unseen" (this task has never heard from it), "up" or "gone".
      incarnation: the last one that was seen; 0 for none.
      message: how it ended; "" while it is up.
    """

    task: str
    state: str
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """One task at one moment.

    Attributes:
      task, address: its name, and "host:port" with the port that was bound.
      incarnation: of this process, as other tasks know it.
      mail_items, mail_bytes: messages that have arrived here and were not received yet.
      mail_waits: calls of `recv` that wait.
      mail_unconfirmed: messages that this task has sent and of which it does not know yet whether they have arrived.
      groups: the groups that this task leads and whose members wait for each other.
      collective_calls: announcements and pieces that this task has sent to others, without a reply yet.
      watched: the tasks that it watches, by name.
      connections: tasks to which it has opened a connection, by name.
      calls: calls in flight over those connections; each watch is one.
      keeper: the barriers, keys and states of all tasks, if this task leads the coordination; else None.
      sessions: sessions that have used this task, and are neither closed nor lost.
      sessions_refused: remembered sessions that a reset has ended before they used this task.
      functions_cached: functions of sessions that are kept for their next run.
      functions_running: functions and copies of variables for which sessions wait.
      faults: callbacks of its loop that raised; each is a bug of zmqdist, and the log has its traceback. Normally 0.
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
    """A client's end of a session at one moment.

    Attributes:
      pending: operations that wait for a task.
      connections: tasks that the session has used, by name; by address while the name is not known.
      functions_pickled: how often a function was pickled. A function that captures nothing mutable is pickled once.
    """

    pending: int
    connections: tuple[str, ...]
    functions_pickled: int
