"""The method by which `zmqdist doctor` finds out which other tasks a task can reach, because only
the task itself can test its connections.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from zmqdist import clock as time
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import DEADLINE_EXCEEDED, InvalidArgumentError, OpError, UnavailableError
from zmqdist.rpc.methods import SERVER_INFO
from zmqdist.tasks.node import TASKS, Node
from zmqdist.transport import port_probe

REACH: Final = "server.reach"
REACH_S_MAX: Final = 30.0
"""Seconds. The longest time-out that a caller may set, because the method occupies a thread of the
task meanwhile."""

AT_A_TIME: Final = 16


class ReachabilityProbe:
    """The method `server.reach` of one task."""

    def __init__(self, node: Node) -> None:
        self._node = node
        node.service.register(REACH, self.try_all, roles=TASKS)

    def try_all(self, timeout_s: float) -> list[str]:
        """Connect to every other task, and request the report of that task about itself.

        Returns:
          One flat list with three items for each task: its name, its address, and the problem,
          which is "" if the task was reached.

        Raises:
          InvalidArgumentError: `timeout_s` is not a number of seconds up to REACH_S_MAX.
          UnavailableError: this task was stopped meanwhile.
        """
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= REACH_S_MAX:
            raise InvalidArgumentError(f"timeout_s is {timeout_s!r}, wants up to {REACH_S_MAX:g} s")
        tasks = self._node.other_tasks
        with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="zmqdist-reach") as pool:
            troubles = pool.map(lambda task: self._trouble(task, timeout_s), tasks)
            return [
                text
                for task, trouble in zip(tasks, troubles, strict=True)
                for text in (task_name(task), self._node.spec.task_address(*task), trouble)
            ]

    def _trouble(self, task: Task, timeout_s: float) -> str:
        address = self._node.spec.task_address(*task)
        try:
            code, message = self._node.start(
                task, SERVER_INFO, due=time.monotonic() + timeout_s
            ).get_error()
            if code and self._node.closed:
                # this task's stop has ended the call, which shows nothing about the other task
                raise self._node.stopped
            if code != DEADLINE_EXCEEDED:
                return message
            seen = port_probe.probe(address, timeout_s)
        except OpError as error:
            if self._node.closed:
                raise UnavailableError(
                    f"{task_name(self._node.me)} is stopping, so it cannot test its connections"
                ) from None
            return error.message
        if seen.failure is None:
            return f"it takes connections, and does not reply within {timeout_s:g} s"
        return port_probe.explain_failure(address, seen, timeout_s)[0]
