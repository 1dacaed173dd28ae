"""A cluster whose roles run under agents, with pipes to plain processes in place of ssh, Slurm or
Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.launch.helpers import (
    BUSY,
    FILE,
    ON_PIPES,
    ROOT,
    UNTIL_END_FILE,
    Launched,
    agent_of,
    eventually,
    pipe_host,
    pipe_hosts,
)
from zmqdist import errors
from zmqdist._version import __version__
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_protocol import (
    CloseAgent,
    ReservePort,
    RoleEnded,
    StartRole,
    decode_event,
    encode,
)
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.launch.folders import remove_left_behind
from zmqdist.launch.hosts import AgentPool, Hosts
from zmqdist.launch.roles import TaskConfig
from zmqdist.launch.tasks import RunningRole

Launcher = Callable[..., Launched]

WHERE = """
    import socket
    from zmqdist.coordinator import ClusterCoordinator
    from zmqdist.cluster import ClusterConfig

    def where():
        import os
        print("it runs")
        path = os.environ["ZMQDIST_CONFIG"]
        keys = sorted(os.listdir(os.environ["ZMQDIST_KEYS_DIR"]))
        return path.startswith("/dev/shm/"), keys, oct(os.stat(os.path.dirname(path)).st_mode)[-3:]

    with ClusterCoordinator() as coordinator:
        print(coordinator.schedule(where).get())
"""

WITH_PS = FILE.replace("{count: 2}", "{count: 2}\n  ps: {count: 1}")


@pytest.mark.processes("hosts")
def test_roles_on_hosts_have_only_the_keys_of_a_worker(launch: Launcher) -> None:
    job = launch(WHERE, run=ON_PIPES)
    assert job.ends() == 0, job.text
    assert "(True, ['joined', 'server.pub', 'worker.key'], '700')" in job.lines, job.text
    assert {"[worker-0@a] it runs", "[worker-1@b] it runs"} & set(job.lines), job.text
    job.left_nothing()


def gone(folders: Iterable[Path]) -> bool:
    return not any(folder.exists() for folder in folders)


@pytest.mark.killed("hosts")
def test_killed_worker_returns_to_its_host(launch: Launcher) -> None:
    job = launch(UNTIL_END_FILE, run=ON_PIPES)
    job.saw("it runs")
    before = job.worker(1)
    os.kill(before, signal.SIGKILL)
    job.saw("[worker-1@b] ended (killed by SIGKILL); it is started again (1 of 3)")
    eventually(lambda: job.worker(1) != before, "another is there")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_worker_of_killed_agent_moves_to_other_host(launch: Launcher) -> None:
    job = launch(UNTIL_END_FILE, run=ON_PIPES)
    job.saw("it runs")
    before = job.worker(1)
    agents = job.agents()
    agent = agent_of(before)
    os.kill(agent, signal.SIGKILL)
    why = "its agent ended (killed by SIGKILL)"
    job.saw(f"[b] is lost: {why}")
    line = job.saw("it is started again (1 of 3)")
    # The agent may have been killed before it told the launcher that the worker had started.
    assert line in [
        f"[worker-1@b] ended ({how}); it is started again (1 of 3)"
        for how in ("killed by SIGKILL", f"b: {why}")
    ]
    eventually(lambda: not Path("/proc", str(before)).exists(), "the old one ends by its lifeline")
    eventually(lambda: job.worker(1) != before, "another is there")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()
    folder = agents.pop(agent)
    assert gone(agents.values())
    # As the next agent on that host does. Another test may be removing the folder just now.
    remove_left_behind(folder.parent)
    eventually(lambda: not folder.exists(), "the folder of the killed agent goes")


def three_agents(job: Launched) -> dict[int, Path]:
    """Return the agents of three hosts. A worker may run functions before the host of a ps has its
    agent."""
    eventually(lambda: len(job.agents()) == 3, "each host has an agent")
    return job.agents()


def test_killed_launcher_leaves_nothing_on_hosts(launch: Launcher) -> None:
    job = launch(BUSY, run=ON_PIPES, file=WITH_PS)
    job.saw("a function runs")
    agents = three_agents(job)
    job.process.kill()
    assert job.ends() == -signal.SIGKILL
    job.left_nothing(folders=False)
    assert gone(agents.values())


def test_ctrl_c_ends_everything_and_leaves_nothing(launch: Launcher) -> None:
    job = launch(BUSY, run=ON_PIPES, file=WITH_PS)
    job.saw("a function runs")
    agents = three_agents(job)
    job.interrupt()
    assert job.ends() == 128 + signal.SIGINT, job.text
    job.left_nothing()
    assert gone(agents.values())


class Pool:
    """Yield a pool of agents with a launcher of tasks that need no dispatcher."""

    def __init__(self, pool: AgentPool, output: list[str]) -> None:
        self.pool = pool
        self.exits: list[RunningRole] = []
        self.hosts = Hosts(pool, self.exits.append, output.append)

    def start(self, index: int, address: str) -> RunningRole:
        return self.hosts.start_role(
            TaskConfig({"ps": {index: address}}, "ps", index), {}, lambda line: None
        )

    def ends(self, role: RunningRole) -> str:
        eventually(lambda: role in self.exits, f"{role.name} ends")
        return role.tail


def test_ps_keeps_port_and_ends_with_host() -> None:
    output: list[str] = []
    pool = AgentPool(pipe_hosts("a", "b"), output.append)
    try:
        cluster = Pool(pool, output)
        address = pool.reserve("ps:0")
        role = cluster.start(0, address)
        assert role.host == "a"
        role.signal(signal.SIGKILL)
        cluster.ends(role)
        again = cluster.start(0, address)
        assert (again.host, again.exit_code) == ("a", None)
        os.kill(pool.hello("a").pid, signal.SIGKILL)
        assert cluster.ends(again) == "a: its agent ended (killed by SIGKILL)"
        never = cluster.start(0, address)
        assert cluster.ends(never) == (
            "its address is on a, which is lost, and programs know no other address of it: start "
            "`zmqdist launch` again without that host; "
            "a program that restores its last checkpoint continues from it"
        )
        assert (never.exit_code, never.host) == (ExitCode.REFUSED, "")
        assert output == ["[a] is lost: its agent ended (killed by SIGKILL)"]
        cluster.hosts.close(0.0)
        remove_left_behind(Path(pool.hello("a").folder).parent)
    finally:
        pool.close()


def test_ps_of_lost_host_reported_once_with_remedy(
    launch: Launcher,
) -> None:
    job = launch(UNTIL_END_FILE, run=ON_PIPES, file=WITH_PS)
    job.saw("it runs")
    os.kill(agent_of(job.task("ps", 0)), signal.SIGKILL)
    line = job.saw("[ps-0@")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    host = line[len("[ps-0@")]
    assert line == (
        f"[ps-0@{host}] ended (its address is on {host}, which is lost, and programs know no "
        f"other address of it: start "
        "`zmqdist launch` again without that host; a program that restores its last checkpoint "
        "continues from it); its variables are lost; it is not started again"
    )
    assert [item for item in job.lines if "ps-0" in item] == [line]


def test_role_without_free_slot_ends_with_reason() -> None:
    with_one_slot = pipe_host("a", slots=1)
    pool = AgentPool([with_one_slot], lambda line: None)
    try:
        cluster = Pool(pool, [])
        first = cluster.start(0, pool.reserve("ps:0"))
        with pytest.raises(errors.UnavailableError, match="no host has a free slot for ps:1"):
            pool.reserve("ps:1")
        assert cluster.ends(cluster.start(1, "127.0.0.1:1")) == "no host has a free slot for it"
        assert first.exit_code is None
        cluster.hosts.close(0.0)
        assert len(cluster.exits) == 2
    finally:
        pool.close()


def test_unbindable_port_error_names_host() -> None:
    pool = AgentPool(pipe_hosts("a"), lambda line: None)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(
                errors.UnknownError,
                match=f"a: could not bind 127.0.0.1:{port}: Address already in use",
            ):
                pool.reserve("ps:0", port)
    finally:
        pool.close()


# -- the agent alone -------------------------------------------------------------------------------


def agent(silence_limit_s: float = 60.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        agent_command(sys.executable, silence_limit_s),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def worker(order_id: int) -> StartRole:
    fields = {
        "dispatcher_address": "127.0.0.1:1",
        "job": "worker",
        "index": order_id,
        "processes": True,
    }
    return StartRole(
        order_id,
        f"worker:{order_id}",
        "WorkerConfig",
        json.dumps(fields),
        {},
        {"keys/secret": "text"},
    )


def events(process: subprocess.Popen[bytes], count: int) -> list[dict[str, object]]:
    assert process.stdout is not None
    return [json.loads(process.stdout.readline()) for _ in range(count)]


def test_agent_ends_after_silence_limit() -> None:
    with agent(silence_limit_s=0.5) as process:
        assert process.stdin is not None
        (hello,) = events(process, 1)
        assert Path(str(hello["folder"])).is_dir()
        assert process.wait(20) == 0
        assert not Path(str(hello["folder"])).exists()


def test_agent_obeys_launcher_that_does_not_read() -> None:
    """When a link is cut, lines fill the pipe. The agent must not wait for the pipe before it
    handles the end of its input."""
    with agent() as process:
        assert process.stdin is not None
        (hello,) = events(process, 1)
        for order_id in range(2, 2000):
            # the agent refuses each with a sentence
            process.stdin.write(encode(ReservePort(order_id, "192.0.2.1")))
        process.stdin.close()
        assert process.wait(20) == 0
        assert not Path(str(hello["folder"])).exists()


@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGHUP", "close"])
def test_agent_ends_with_roles_and_folder(how: str) -> None:
    with agent() as process:
        assert process.stdin is not None
        (hello,) = events(process, 1)
        process.stdin.write(encode(worker(1)))
        process.stdin.flush()
        while (event := events(process, 1)[0])["is"] != "RoleStarted":
            pass
        assert Path(str(hello["folder"]), "keys/secret").stat().st_mode & 0o777 == 0o600
        pid = int(str(event["pid"]))
        if how == "end of input":
            process.stdin.close()
        elif how == "close":
            process.stdin.write(encode(CloseAgent(5.0)))
            process.stdin.flush()
        else:
            process.send_signal(signal.Signals[how])
        assert process.stdout is not None
        last = [decode_event(line) for line in process.stdout][-1]
        assert isinstance(last, RoleEnded)
        assert (last.order_id, last.pid) == (1, pid)
        assert process.wait(20) == 0
        eventually(lambda: not Path("/proc", str(pid)).exists(), "its zygote has reaped it")
        assert not Path(str(hello["folder"])).exists()


# -- hosts that cannot run roles -------------------------------------------------------------------

PYTHON = sys.version.split()[0]
HELLO = {
    "is": "AgentHello",
    "python": PYTHON,
    "version": __version__,
    "path": "/there/zmqdist",
    "cores": 1,
    "clock_s": 0.0,
    "host": "there",
    "pid": 1,
    "folder": "/nowhere",
}
UNFIT = {
    "is": "AgentUnfit",
    "python": PYTHON,
    "executable": "/there/python",
    "reason": "No module named 'zmqdist'",
}
OTHER_PYTHON = (
    f"a: Python 3.9.2 there and {PYTHON} here cannot exchange functions: name a Python "
    f"{PYTHON.rpartition('.')[0]} of "
    "that host as `python` in the file"
)
OTHER_VERSION = f"a: zmqdist 99.1 there (/there/zmqdist) and {__version__} here ({ROOT / 'zmqdist'}): install the same version on both"
MISSING = (
    f"a: /there/python: No module named 'zmqdist': install zmqdist {__version__} there, or name "
    f"the Python that has it "
    "as `python`"
)
READ_ONLY = UNFIT | {"reason": "no folder can be written", "remedy": "set TMPDIR there"}
BAD: list[tuple[dict[str, object], str]] = [
    (HELLO | {"python": "3.9.2"}, OTHER_PYTHON),
    (UNFIT | {"python": "3.9.2", "reason": "invalid syntax (agent.py, line 101)"}, OTHER_PYTHON),
    (HELLO | {"version": "99.1"}, OTHER_VERSION),
    (UNFIT, MISSING),
    (READ_ONLY, "a: /there/python: no folder can be written: set TMPDIR there"),
    ({}, "a: its agent ended (exit code 0)"),
]


def speaking(tmp_path: Path, *lines: str) -> str:
    """Return a command that prints these lines in place of an agent, and runs until its input
    ends.
    """
    script = tmp_path / "python"
    text = "\n".join(lines)
    ends = "cat > /dev/null" if lines else ""
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n{ends}\n")
    script.chmod(0o700)
    return str(script)


@pytest.mark.parametrize(("event", "message"), BAD, ids=[row[1][3:30] for row in BAD])
def test_unfit_host_error_is_one_sentence(
    tmp_path: Path, event: dict[str, object], message: str
) -> None:
    python = speaking(tmp_path, json.dumps(event)) if event else speaking(tmp_path)
    with pytest.raises((errors.FailedPreconditionError, errors.UnavailableError)) as caught:
        AgentPool([pipe_host("a", python=python)], lambda line: None)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("ahead_s", "message"), [(601, "10.0 minutes ahead of"), (-601, "10.0 minutes behind")]
)
def test_clock_minutes_off_is_a_warning(tmp_path: Path, ahead_s: float, message: str) -> None:
    output: list[str] = []
    python = speaking(tmp_path, json.dumps(HELLO | {"clock_s": time.time() + ahead_s}))
    AgentPool([pipe_host("a", python=python)], output.append).close()
    (warning,) = output
    assert warning.startswith(f"[a] warning: its clock is {message} this host's"), warning


def test_login_shell_output_before_hello_is_harmless(tmp_path: Path) -> None:
    python = speaking(tmp_path, "Welcome!", "{", json.dumps(HELLO | {"clock_s": time.time()}))
    pool = AgentPool([pipe_host("a", python=python)], lambda line: None)
    assert pool.hello("a").host == "there"
    pool.close()


def test_two_own_addresses_need_one_in_file(tmp_path: Path) -> None:
    hosts = []
    for name, records in (("a", "127.0.0.1"), ("b", "127.0.0.2")):
        (tmp_path / name).mkdir()
        hello = HELLO | {"clock_s": time.time(), "reached_from": records}
        hosts.append(pipe_host(name, python=speaking(tmp_path / name, json.dumps(hello))))
    pool = AgentPool(hosts, lambda line: None)
    try:
        with pytest.raises(errors.FailedPreconditionError) as caught:
            pool.own_address()
        message = "a reaches this host at 127.0.0.1 and b at 127.0.0.2: write an address that all hosts reach as"
        assert str(caught.value).startswith(message)
    finally:
        pool.close()


def test_stopped_launcher_leaves_silent_host(tmp_path: Path) -> None:
    python = speaking(tmp_path, "")
    with pytest.raises(errors.CancelledError):
        AgentPool([pipe_host("a", python=python)], lambda line: None, cancelled=lambda: True)
