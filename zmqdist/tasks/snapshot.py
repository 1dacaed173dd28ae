"""What `Server.snapshot` and `Session.snapshot` return: figures of one moment, for people who operate a cluster and for tests.

Cheap, and from any thread. Parts are read one after the other, so figures of different parts may be a few microseconds apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zmqdist.coordination.snapshot import KeeperSnapshot


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of which this task is the leader, while some of its members wait for the others.

    Attributes:
      name: of the group.
      come: members that have announced the next operation, by rank.
      missing: those that have not.
    """

    name: str
    arrived: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WatchRow:
    """Another task that this one watches, since it has waited for it.

    Attributes:
      task: its name.
      state: "unseen" (it was never there, as far as is known here), "up" or "gone".
      incarnation: of the life that was seen last; 0 for none.
      message: what is known of its end; "" while it is up.
    """

    task: str
    state: str
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """One task at one moment.

    Attributes:
      task, address: its name, and "host:port" with the real port.
      incarnation: of this life, as other tasks know it.
      mail_items, mail_bytes: messages that lie here and were not received yet.
      mail_waits: calls of `recv` that wait.
      mail_unconfirmed: messages that this task has sent, and of which it is not known yet whether they have arrived.
      groups: of those that this task leads, the ones whose members wait for each other.
      collective_calls: announcements and pieces that this task has sent to others and that were not answered yet.
      watched: the tasks that it watches, by name.
      connections: tasks to which it has opened a connection, by name.
      calls: how many calls over those connections were not answered yet; each watch is one.
      keeper: what it keeps for all tasks, if it leads the coordination; else None.
      sessions: sessions that have used this task, and are neither closed nor lost.
      sessions_refused: sessions that a reset has ended before they came here, as far as they are remembered.
      functions_cached: functions of sessions that are kept for their next run.
      functions_running: functions and copies of variables that sessions wait for.
      faults: callbacks of its loop that raised: a bug of zmqdist, which the log has. 0.
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
      connections: tasks that it has connected to, by name; by address while the name is not known.
      functions_pickled: how often a function was pickled. One that captures nothing mutable is pickled once.
    """

    pending: int
    connections: tuple[str, ...]
    functions_pickled: int
