"""What the tasks of a cluster agree on: barriers, a key-value store, who is there and who has failed."""

from zmqdist.coordination.client import CoordinationClient, KeyValues, TaskState

__all__ = ["CoordinationClient", "KeyValues", "TaskState"]
