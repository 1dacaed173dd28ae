"""The records that `snapshot` returns at the keeper and at a task, for operators of a cluster and
for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task, as the keeper knows it.

    Attributes:
      state: "missing", "joining", "up", "error" or "left".
      incarnation: the incarnation of the task's current or last process; 0 before the first
        process.
      away: whether the task's connection has ended, and the task may still reconnect within its
        grace.
      heard_at: when the task's last sign of life arrived, by the keeper's clock (`time.monotonic`).
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
      barriers: the barriers at which tasks wait, by name, each with the tasks that have not called
        the barrier yet.
      keys: the number of keys that have a value.
      key_waits: the number of requests that wait for the value of a key.
      requests: the number of requests that wait for a reply, including the poll for errors of each
        registered task.
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
      state: "looking" (the keeper has never replied), "up" (registered), "lost" (the keeper has
        gone), "refused" (the keeper refuses this task), "resetting" or "ended". A client that is
        not a task is in state "looking" until it is closed.
      requests: the number of requests that wait for the keeper's reply, not counting the poll for
        errors.
      barriers: the names of barriers for which this task has counted rounds, the least recently
        used name first.
    """

    state: str
    requests: int
    barriers: tuple[str, ...]
