"""Coordination as a part of a task's server: the leader of the cluster is the keeper, and every
task can be its client.

A task registers with the leader only when it first uses a barrier or a key, because a server
contacts no other task until a method needs that task.

The leader is the first ps, else the chief, else the first worker (cluster/job_roles.py). Barriers
do not wait for evaluators and dispatchers, but these can use the keys and the states of tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from zmqdist.cluster.job_roles import coordination_leader
from zmqdist.coordination.client import CoordinationClient
from zmqdist.coordination.machine import CoordinationConfig
from zmqdist.coordination.replies import task_name
from zmqdist.coordination.service import CoordinationService, KeeperSnapshot
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.tasks.node import Node
from zmqdist.tasks.options import COORDINATION

NON_MEMBER_JOBS: Final = ("evaluator", "dispatcher")
"""Jobs whose tasks do not take part in barriers."""


class TaskCoordination:
    """Barriers, keys and states of tasks for one server. Make this object before the server's node
    serves.

    Attributes:
      leads: whether this task is the leader, which keeps barriers and keys for the cluster.
    """

    def __init__(self, node: Node, config: Mapping[str, Any]) -> None:
        """Register the keeper's methods, if this task leads. Raises InvalidArgumentError if section
        "coordination" of `config` is wrong."""
        self._node = node
        self._leader = coordination_leader(node.spec) or node.me
        self._members = [task for task in node.tasks if task[0] not in NON_MEMBER_JOBS] or [node.me]
        self._lock = threading.Lock()
        self._client: CoordinationClient | None = None
        self._service: CoordinationService | None = None
        self._closed = False
        checked = config_of(config.get(COORDINATION, {}))
        self.leads = self._leader == node.me
        if self.leads:
            self._service = CoordinationService(
                node.service, node.router, node.loop, node.incarnation, self._members, checked
            )
        node.on_stop.append(self._end_waits)
        node.on_close.append(self._close)

    @property
    def client(self) -> CoordinationClient:
        """The client by which this task uses barriers and keys. It connects to the leader at its
        first use.

        Raises:
          FailedPreconditionError: the server was stopped, or has not been started.
        """
        with self._lock:
            if self._closed:
                raise FailedPreconditionError(
                    f"the server of {task_name(self._node.me)} was stopped"
                )
            if self._client is None:
                if not self._node.loop.running:
                    raise FailedPreconditionError(
                        f"the server of {task_name(self._node.me)} was not started yet"
                    )
                self._client = self._connect()
            return self._client

    def _connect(self) -> CoordinationClient:
        node = self._node
        me = node.me if node.me in self._members else None
        address = node.address if self.leads else node.spec.task_address(*self._leader)
        keeper = f"the leader {task_name(self._leader)}"
        # the leader has bound some port, which only its own process knows
        if address.endswith(":0"):
            raise FailedPreconditionError(
                f"{keeper} has port 0 in this cluster, so other tasks cannot know its "
                f"address: give it a port"
            )
        return CoordinationClient(
            address, me, node.incarnation, credentials=node.credentials, keeper=keeper
        )

    def snapshot(self) -> KeeperSnapshot | None:
        """Return the keeper's figures; None if this task is not the leader, or does not serve."""
        if self._service is None or not self._node.loop.running:
            return None
        try:
            return self._service.snapshot()
        except FailedPreconditionError:  # the loop has ended since the check above
            return None

    def _end_waits(self) -> None:
        with self._lock:
            self._closed = True
            client = self._client
        if client is not None:
            client.end_waits(self._node.stopped.message)

    def _close(self, _until: float) -> None:
        client = self._client
        if self._service is not None and self._node.loop.running:
            self._service.stop(
                f"the leader {task_name(self._leader)}, which keeps barriers and keys, stops"
            )
        if client is not None:
            client.close(notify=not self.leads)


def config_of(section: Mapping[str, Any]) -> CoordinationConfig:
    """Return the CoordinationConfig that a section of `config` describes.

    Raises:
      InvalidArgumentError: the section has an unknown key or an invalid value; the text names it.
    """
    defaults = {field.name: field.default for field in fields(CoordinationConfig)}
    if not isinstance(section, Mapping) or (section.keys() - defaults.keys()):
        raise InvalidArgumentError(
            f"config[{COORDINATION!r}] is {section!r}: it may have {', '.join(defaults)}"
        )
    for name, value in section.items():
        least = 0 if name == "shutdown_timeout_s" else 1e-3
        if name.endswith("_s") and (
            isinstance(value, bool) or not isinstance(value, int | float) or not value >= least
        ):
            raise InvalidArgumentError(
                f"config[{COORDINATION!r}][{name!r}] is {value!r}, wants seconds, at "
                f"least {least:g}"
            )
    jobs = section.get("recoverable_jobs", ())
    if not isinstance(jobs, list | tuple | set | frozenset) or not all(
        isinstance(job, str) for job in jobs
    ):
        raise InvalidArgumentError(
            f"config[{COORDINATION!r}]['recoverable_jobs'] is {jobs!r}, wants a list of "
            f"names of jobs"
        )
    return CoordinationConfig(**{**section, "recoverable_jobs": frozenset(jobs)})
