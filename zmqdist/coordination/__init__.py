"""Coordination of the tasks of a cluster: barriers, a key-value store, the states of tasks and
their errors."""

from zmqdist.coordination.client import CoordinationClient, KeyValues, TaskState

__all__ = ["CoordinationClient", "KeyValues", "TaskState"]
