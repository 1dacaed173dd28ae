"""Results of `snapshot` at both ends of coordination: figures of one moment, for operators of a cluster and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task, as the keeper knows it.

    Attributes:
      state: "missing", "joining", "up", "error" or "left".
      incarnation: of its process, or of the last one; 0 before the first.
      away: its connection has ended, and it may still reconnect within its grace.
      heard_at: when its last sign of life arrived, on the keeper's `time.monotonic`.
    """

    state: str
    incarnation: int
    away: bool
    heard_at: float


@dataclass(frozen=True, slots=True)
class KeeperSnapshot:
    """The keeper's end.

    Attributes:
      tasks: by name, in the order of the cluster.
      barriers: for each barrier at which a task waits: its name, and the tasks that are missing there.
      keys: keys that have a value.
      key_waits: callers that wait for the value of a key.
      requests: requests of tasks that wait for a reply. A registered task always has one, the poll that is its sign of life.
    """

    tasks: Mapping[str, TaskRow]
    barriers: Mapping[str, tuple[str, ...]]
    keys: int
    key_waits: int
    requests: int


@dataclass(frozen=True, slots=True)
class CoordinationSnapshot:
    """A task's end.

    Attributes:
      state: "looking" (the keeper never replied), "up" (registered), "lost" (the keeper has gone), "refused" (the keeper refuses this
        task), "resetting" or "ended". For a client that is no task: "looking" until it is closed.
      requests: requests that wait for the keeper's reply, without the poll that is the sign of life.
      barriers: names of barriers whose rounds this task has counted, least recently used first.
    """

    state: str
    requests: int
    barriers: tuple[str, ...]
