"""The results of `snapshot` at the keeper and at a task: figures of one moment, for operators of a cluster and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task, as the keeper knows it.

    Attributes:
      state: "missing", "joining", "up", "error" or "left".
      incarnation: incarnation of its current process, or of its last one; 0 before the first.
      away: whether its connection has ended and it may still reconnect within its grace.
      heard_at: when its last sign of life arrived, on the keeper's clock (`time.monotonic`).
    """

    state: str
    incarnation: int
    away: bool
    heard_at: float


@dataclass(frozen=True, slots=True)
class KeeperSnapshot:
    """The keeper's side of coordination.

    Attributes:
      tasks: the tasks by name, in the order of the cluster.
      barriers: for the name of each barrier at which a task waits, the tasks that have not called it yet.
      keys: number of keys that have a value.
      key_waits: number of requests that wait for the value of a key.
      requests: number of requests that wait for a reply. A registered task always has one, the poll that is its sign of life.
    """

    tasks: Mapping[str, TaskRow]
    barriers: Mapping[str, tuple[str, ...]]
    keys: int
    key_waits: int
    requests: int


@dataclass(frozen=True, slots=True)
class CoordinationSnapshot:
    """A task's side of coordination.

    Attributes:
      state: "looking" (the keeper has never replied), "up" (registered), "lost" (the keeper has gone), "refused" (the keeper refuses this
        task), "resetting" or "ended". A client that is not a task stays "looking" until it is closed.
      requests: number of requests that wait for the keeper's reply, without the poll that is the sign of life.
      barriers: names of barriers for which this task has counted rounds, the least recently used first.
    """

    state: str
    requests: int
    barriers: tuple[str, ...]
