"""What a launcher is: the one interface by which roles are placed on hosts, whatever starts them there.

A *role* is a worker or a task of a cluster (`roles.py`). A launcher starts roles, says where each one is, passes its output on, reports its
end, and stops all of them. It decides neither what runs nor whether it runs again: `tasks.py` does, for every launcher alike.

Promises, which `tests/launch/conformance.py` checks for each launcher:
  R1  `start_role` returns at once; `on_exit` is called exactly once for each role that was started, also for one that never came up.
  R2  `on_line` gets each line of output once and in order, the last one before `on_exit`.
  R3  When `close` has returned, no role runs on any host that can be reached, and `on_exit` was called for each.
  R4  When the launching process ends in any way, SIGKILL included, its roles end by themselves: at once where their lifeline breaks, else
      after `orphan_limit_s`.
  R5  A role starts with exactly the environment that `start_role` was given, laid over that of its host.

`Children` is the launcher of this host. The others place roles through a `HostAgent` (agent.py, hosts.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zmqdist.launch.roles import TaskConfig
    from zmqdist.scheduling.dispatcher.config import WorkerConfig

LineHandler = Callable[[str], object]


class RunningRole(Protocol):
    """A role that a launcher has started.

    Attributes:
      ended: set when its exit code is known, before `on_exit` is called with it.
    """

    ended: threading.Event

    @property
    def name(self) -> str:
        """The task it runs, as "worker:0"."""

    @property
    def host(self) -> str:
        """The host it runs on, as its users name it; "" for the host of the launcher."""

    @property
    def pid(self) -> int:
        """Its process number on its host; 0 while that is unknown."""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, as `subprocess` gives it: -9 for SIGKILL. None while the process runs."""

    @property
    def tail(self) -> str:
        """Its last lines of output; or, where it never came up, one sentence that says why and what to do."""

    def signal(self, number: int) -> None:
        """Send it a signal; no effect once it has ended."""


class Launcher(Protocol):
    """Starts roles on hosts and watches them. Constructed with `on_exit`, called with each role that has ended."""

    @property
    def running(self) -> Sequence[RunningRole]:
        """The roles that were started and have not ended."""

    def start_role(
        self,
        config: WorkerConfig | TaskConfig,
        environment: Mapping[str, str],
        on_line: LineHandler | None = None,
    ) -> RunningRole:
        """Start a role on the host that this launcher chooses for it; a name that ran before goes to the host where it ran."""

    def release(self, name: str) -> None:
        """Forget the host of a role that has ended and will not be started again, so that another one may have its place."""

    def close(self, grace_s: float) -> None:
        """Stop all roles: SIGTERM, up to `grace_s` to drain, then SIGKILL. Idempotent."""
