"""A real Slurm on this machine: a controller and several nodes, each a host with its own network,
processes and /dev/shm.

    with SlurmCluster("n1", "n2") as slurm:
        job = slurm.run(["sbatch", "--wrap", "hostname"]).stdout
        assert slurm.left_on("n1") == []

The controller (slurmctld) and munged run on the host `login`, where users type their commands; a
slurmd runs on each node. Configuration, state and logs are in a folder of their own, and nothing of
the machine's own Slurm is touched. Everything ends with the hosts, also after a kill -9 of the
test. The `with` statement skips the test, with the reason, where the machine has no Slurm or makes
no hosts.

    apt-get install slurm-wlm munge
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.campaigns.hosts import Host, Network

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
LOGIN: Final = "login"
READY_S: Final = 60.0
CPUS: Final = 4
"""Of each node, whatever the machine has: the tests wait more than they compute."""

_CONFIG: Final = """
ClusterName=zmqdist
SlurmctldHost={login}({login_ip})
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait={kill_wait_s}
MinJobAge=300
SchedulerParameters=sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmctldParameters=preempt_send_user_signal
"""


def missing() -> str | None:
    """Why there can be no Slurm on this machine; None when there can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"Slurm needs {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else None


class SlurmCluster:
    """A controller and nodes, in a `with` statement.

    Args:
      nodes: their names.
      kill_wait_s: seconds between SIGTERM and SIGKILL of a cancelled job.

    Attributes:
      login, nodes: the hosts.
      environment: of commands that talk to this Slurm.
    """

    def __init__(self, *nodes: str, kill_wait_s: int = 15) -> None:
        self._names = nodes
        self._kill_wait_s = kill_wait_s
        self._closing = contextlib.ExitStack()
        self._daemons: dict[str, subprocess.Popen[Any]] = {}

    def __enter__(self) -> SlurmCluster:
        why = missing()
        if why is not None:
            pytest.skip(why)
        with contextlib.ExitStack() as closing:
            folder = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
            self.folder = Path(closing.enter_context(folder))
            self._network = closing.enter_context(Network(LOGIN, *self._names))
            self.login = self._network[LOGIN]
            self.nodes = {name: self._network[name] for name in self._names}
            self.environment = {
                **{
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith(("SLURM", "SBATCH"))
                },
                "SLURM_CONF": str(self.folder / "slurm.conf"),
                "PATH": _path(),
            }
            self._write_config()
            self._start_daemons()
            closing.callback(self._stop_daemons)
            self._wait_until_idle()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the login host, as `Host.run`. `environment` is laid over that of this
        cluster."""
        environment = {**self.environment, **options.pop("environment", {})}
        return self.login.run(command, env=environment, **options)

    def run(self, *command: str, timeout_s: float = READY_S) -> str:
        """Run a command on the login host and return its output; it fails the test where it
        fails.
        """
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, error = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"{' '.join(command)}: {error.strip()}"
        return str(out)

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def find(self, name: str, text: str) -> list[int]:
        """Return the numbers of the processes of a host whose command lines have this text."""
        return [pid for pid, command in self._processes(name).items() if text in command]

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node and all its other processes with SIGKILL."""
        self._daemons.pop(name).kill()
        for pid in self._processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def memory(self, name: str) -> Path:
        """Return the path by which this process sees /dev/shm of a host."""
        return Path("/proc", str(self._host(name).first_process), "root", "dev", "shm")

    def left_on(self, name: str) -> list[str]:
        """Return what is on a host beside Slurm's own: command lines of processes, and files in
        /dev/shm."""
        files = [f"/dev/shm/{path.name}" for path in self.memory(name).iterdir()]
        return [*self._processes(name).values(), *files]

    def _host(self, name: str) -> Host:
        return self.login if name == LOGIN else self.nodes[name]

    def _processes(self, name: str) -> dict[int, str]:
        """Return the command lines of processes by number, without the host's first process and
        Slurm's daemons."""
        host = self._host(name)
        space = os.readlink(f"/proc/{host.first_process}/ns/pid")
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if not folder.name.isdigit() or os.readlink(folder / "ns" / "pid") != space:
                    continue
                command = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                kind = (folder / "comm").read_text().strip()
            except OSError:  # it has just ended
                continue
            if int(folder.name) != host.first_process and kind not in (
                "slurmd",
                "slurmctld",
                "slurmscriptd",
                "munged",
            ):
                found[int(folder.name)] = command or f"[{kind}]"
        return found

    # -- start and end -----------------------------------------------------------------------------

    def _write_config(self) -> None:
        lines = [
            _CONFIG.format(
                login=LOGIN,
                login_ip=self.login.ip,
                folder=self.folder,
                kill_wait_s=self._kill_wait_s,
            )
        ]
        for name, host in self.nodes.items():
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr={host.ip} CPUs={CPUS} "
                f"RealMemory=4000"
            )
        everywhere = ",".join(self.nodes)
        lines.append(
            f"PartitionName=short Nodes={everywhere} Default=YES MaxTime=60 PriorityTier=1 "
            f"GraceTime=30"
        )
        lines.append(
            f"PartitionName=urgent Nodes={everywhere} MaxTime=60 PriorityTier=9 PreemptMode=OFF"
        )
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # Without a plugin for control groups slurmd of 22.05 does not start; none is used, so none
        # is made.
        plugin = "cgroup/v1" if _version(self.environment) < (23, 2) else "disabled"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        for part in ("state", *(f"spool-{name}" for name in self.nodes)):
            (self.folder / part).mkdir()
        self.folder.chmod(0o755)

    def _start_daemons(self) -> None:
        folder = self.folder
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munged += [f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid"]
        munged += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
        self._start_daemon(LOGIN, "munged", munged)
        _eventually((folder / "munge.socket").exists, "munged has made its socket")
        self._start_daemon(LOGIN, "slurmctld", ["slurmctld", "-D", "-c"])
        for name in self.nodes:
            self._start_daemon(name, name, ["slurmd", "-D", "-N", name])

    def _start_daemon(self, host: str, name: str, command: Sequence[str]) -> None:
        # Outside of the test's own marks: what a daemon starts must not look like a process that a
        # test has left.
        environment = {
            key: value for key, value in self.environment.items() if not key.startswith("ZMQDIST_")
        }
        with (self.folder / f"{name}.out").open("w") as out:
            self._daemons[name] = self._host(host).run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.folder,
            )

    def _stop_daemons(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait(READY_S)

    def _wait_until_idle(self) -> None:
        def idle() -> bool:
            assert all(daemon.poll() is None for daemon in self._daemons.values()), (
                "a daemon has ended"
            )
            done = self.start(
                ["sinfo", "--noheader", "--format=%T"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, _ = done.communicate(timeout=READY_S)
            return set(out.split()) == {b"idle"}

        try:
            _eventually(idle, "all nodes are idle")
        except AssertionError as error:
            logs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out"))]
            raise AssertionError(f"{error}:\n" + "\n".join(logs)) from None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin"


def _version(environment: dict[str, str]) -> tuple[int, int]:
    """Return the version of Slurm: (22, 5)."""
    done = subprocess.run(
        ["slurmctld", "-V"], env=environment, capture_output=True, text=True, check=True
    )
    major, minor = done.stdout.split()[-1].split(".")[:2]  # "slurm-wlm 22.05.8"
    return int(major), int(minor)


def _eventually(found: Any, what: str) -> None:
    deadline = time.monotonic() + READY_S
    pause = threading.Event()
    while not found():
        assert time.monotonic() < deadline, f"not within {READY_S:g} s: {what}"
        pause.wait(0.05)
