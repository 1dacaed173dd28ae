"""The promises of a launcher (zmqdist/launch/launcher_interface.py) as checks that each launcher
passes.

    for check in CHECKS:
        with Rig(config) as rig:
            check(rig)

`Rig` makes the launcher that a cluster file names. Without pytest, on a host of a test or inside a
job, `python -m tests.launch.conformance FILE` runs all checks with this launcher. With the second
argument KILLED it starts roles, prints their pids, and waits until a test kills it (R4).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from tests.launch.helpers import eventually
from zmqdist import DispatchServer
from zmqdist.cluster import ClusterConfig
from zmqdist.cluster.file_sections import RuntimeConfig
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.agent_stream import AgentHost
from zmqdist.launch.children import Children
from zmqdist.launch.hosts import AgentPool, Hosts, agent_hosts
from zmqdist.launch.role_files import RoleFiles
from zmqdist.launch.tasks import Launcher, RunningRole
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import keys
from zmqdist.transport.credentials import Credentials

PATIENCE_S = 30.0
LINES = 500
NOWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737): a worker that should bind it never comes up."""


class Rig:
    """A dispatcher, and a launcher of workers for it; in a `with` statement.

    Args:
      config: its key `launcher` selects the launcher.
      hosts: used instead of the hosts of the config.

    Attributes:
      exits: the arguments of the calls of `on_exit`.
      said: the lines of the launcher itself, without the lines of roles.
    """

    def __init__(self, config: ClusterConfig, hosts: list[AgentHost] | None = None) -> None:
        self._config = config
        self._given_hosts = hosts
        self._closing = contextlib.ExitStack()
        self.exits: list[RunningRole] = []
        self.said: list[str] = []

    def __enter__(self) -> Rig:
        with contextlib.ExitStack() as closing:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            keys.keygen(folder / "keys")
            self.credentials = Credentials(keys_dir=str(folder / "keys"))
            hosts = self._given_hosts or agent_hosts(self._config)
            self.pool = None if hosts is None else AgentPool(hosts, self.said.append)
            host = "127.0.0.1" if self.pool is None else self.pool.own_address()
            if self.pool is not None:
                closing.callback(self.pool.close)
            # Only now, because the agents, which have started, must not inherit it.
            variables = self.credentials.variables()
            closing.enter_context(mock.patch.dict(os.environ, variables))
            dispatcher = DispatcherConfig(host=host, keys_dir=self.credentials.keys_dir)
            self.dispatcher = closing.enter_context(DispatchServer(dispatcher))
            self.launcher = self._launcher()
            closing.callback(self.launcher.close, 0.0)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _launcher(self) -> Launcher:
        if self.pool is None:
            return Children(self.exits.append)
        runtime = RuntimeConfig(
            dispatcher=self.dispatcher.target, keys_dir=self.credentials.keys_dir
        )
        cluster = msgspec.structs.replace(self._config, runtime=runtime)
        files = RoleFiles(
            cluster, lambda name, address: self.dispatcher.open_join(name, address=address)
        )
        return Hosts(self.pool, self.exits.append, self.said.append, files)

    def start(
        self,
        index: int = 0,
        on_line: Callable[[str], object] = print,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> RunningRole:
        """Start a worker."""
        config = WorkerConfig(
            self.dispatcher.address,
            index=index,
            host=host,
            processes=True,
            orphan_limit_s=5.0,
            keys_dir=self.credentials.keys_dir,
        )
        return self.launcher.start_role(config, environment or {}, on_line)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a worker."""
        with ClusterCoordinator(self.dispatcher.target) as coordinator:
            return coordinator.schedule(function, args).get(PATIENCE_S)

    def exited(self, role: RunningRole) -> None:
        """Wait for the call of `on_exit`."""
        eventually(lambda: role in self.exits, f"on_exit is called with {role.name}", PATIENCE_S)
        assert role.ended.is_set()


def r1_the_end_of_a_role_is_reported_once(rig: Rig) -> None:
    role = rig.start()
    assert (role.name, role.exit_code, role.ended.is_set()) == ("worker:0", None, False)
    assert list(rig.launcher.running) == [role]
    assert rig.call(sum, [1, 2]) == 3
    role.signal(signal.SIGTERM)
    rig.exited(role)
    assert role.exit_code == 0
    assert list(rig.launcher.running) == []
    role.signal(signal.SIGKILL)  # this call has no effect
    rig.launcher.close(0.0)
    assert rig.exits == [role]


def r1_a_role_that_never_came_up_is_reported_once_with_its_reason(rig: Rig) -> None:
    lines: list[str] = []
    role = rig.start(on_line=lines.append, host=NOWHERE)
    rig.exited(role)
    assert role.exit_code not in (0, None)
    assert NOWHERE in role.tail, role.tail
    assert lines == role.tail.splitlines()
    rig.launcher.close(0.0)
    assert rig.exits == [role]


def r1_a_killed_role_has_the_exit_code_of_its_signal(rig: Rig) -> None:
    role = rig.start()
    role.signal(signal.SIGKILL)
    rig.exited(role)
    assert role.exit_code == -signal.SIGKILL
    again = rig.start()
    assert again.host == role.host
    assert rig.call(sum, [1, 2]) == 3
    assert rig.exits == [role]


def r2_lines_come_once_in_order_and_before_the_end(rig: Rig) -> None:
    lines: list[str] = []
    ends_after: list[int] = []

    def write(count: int) -> None:
        for number in range(count):
            print(f"line {number}: é", flush=True)

    role = rig.start(on_line=lines.append)
    rig.call(write, LINES)
    role.signal(signal.SIGTERM)
    rig.exited(role)
    ends_after.append(len(lines))
    assert [line for line in lines if line.startswith("line ")] == [
        f"line {number}: é" for number in range(LINES)
    ]
    assert role.tail.splitlines() == lines[-len(role.tail.splitlines()) :]
    assert len(lines) == ends_after[0]


def r3_after_close_no_role_runs_and_each_end_was_reported(rig: Rig) -> None:
    roles = [rig.start(index) for index in range(4)]
    rig.launcher.close(10.0)
    assert sorted(rig.exits, key=lambda role: role.name) == roles
    assert {role.exit_code for role in roles} <= {0, -signal.SIGTERM}, (
        "the roles that had started have ended in good order"
    )
    assert not rig.launcher.running
    rig.launcher.close(10.0)
    assert len(rig.exits) == len(roles)


def r3_close_kills_a_role_that_does_not_end_within_the_grace(rig: Rig) -> None:
    start_event = threading.Event()

    def endless() -> None:
        print("begun", flush=True)
        while True:
            time.sleep(0.05)

    def on_line(line: str) -> None:
        if line == "begun":
            start_event.set()

    role = rig.start(on_line=on_line)
    with ClusterCoordinator(rig.dispatcher.target) as coordinator:
        coordinator.schedule(endless)
        assert start_event.wait(PATIENCE_S)
        role.signal(signal.SIGSTOP)
        rig.launcher.close(0.5)
        assert rig.exits == [role]
        assert role.exit_code == -signal.SIGKILL


def r5_a_role_has_the_given_variables_over_those_of_its_host(rig: Rig) -> None:
    def seen() -> tuple[str | None, bool, str]:
        return os.environ.get("OF_THE_ROLE"), bool(os.environ.get("PATH")), socket.gethostname()

    role = rig.start(environment={"OF_THE_ROLE": "é\n'\"$x", "LC_ALL": "C.UTF-8"})
    value, path, host = rig.call(seen)
    assert (value, path) == ("é\n'\"$x", True)
    assert role.host in ("", host) or rig.pool is not None
    assert role.pid > 0


CHECKS = [
    check
    for name, check in list(globals().items())
    if name.startswith(("r1_", "r2_", "r3_", "r5_"))
]


def main() -> None:
    config = ClusterConfig.load(sys.argv[1])
    if sys.argv[2:] == ["KILLED"]:
        with Rig(config) as rig:
            roles = [rig.start(index) for index in range(2)]
            assert rig.call(sum, [1, 2]) == 3
            eventually(lambda: all(role.pid for role in roles), "both run")
            print("pids", *(role.pid for role in roles), flush=True)
            signal.pause()
    for check in CHECKS:
        with Rig(config) as rig:
            check(rig)
        print(f"passed {check.__name__}", flush=True)


if __name__ == "__main__":
    main()
