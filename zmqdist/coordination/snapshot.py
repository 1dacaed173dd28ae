"""What `snapshot` returns at both ends of coordination: figures of one moment, for people who operate a cluster and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskRow:
    """What the keeper knows of one task.

    Attributes:
      state: "missing", "joining", "up", "error" or "left".
      incarnation: of its present or last life; 0 before the first.
      away: its connection has ended, and it may still come back.
      heard_at: when it gave its last sign of life, on the keeper's `time.monotonic`.
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
      barriers: name -> tasks for which it waits, of those at which a task waits.
      keys: keys that have a value.
      key_waits: callers that wait for the value of a key.
      questions: all questions of tasks that wait for an answer; a registered task always has one of them, which is its sign of life.
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
      state: "looking" (the keeper was never there), "up" (registered), "lost" (the keeper has gone), "refused" (the keeper does not take
        this task), "resetting" or "ended". Of a client that is no task: "looking" until it is closed.
      questions: calls that wait for the keeper's answer; the sign of life is not among them.
      barriers: names of barriers whose rounds this task has counted, oldest use first.
    """

    state: str
    requests: int
    barriers: tuple[str, ...]
