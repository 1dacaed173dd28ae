"""A launcher in a child process, as a terminal would start it: its lines as it prints them, its
processes, the files that it leaves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_address
from zmqdist.errors import describe_exit
from zmqdist.launch.agent import MEMORY_FOLDER, agent_command
from zmqdist.launch.agent_stream import AgentHost, AgentStream, NoteHandler, ProcessStream
from zmqdist.launch.folders import OWNER
from zmqdist.process.zygote import NAME

PATIENCE_S = 40.0

LAUNCH = """
import sys
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.launcher import launch
sys.exit(launch(ClusterConfig.load(sys.argv[1]), sys.argv[3:], grace_s=float(sys.argv[2])))
"""

FILE = """
name: test
jobs:
  dispatcher: {address: 127.0.0.1:0}
  worker: {count: 2}
program: python program.py
"""

BUSY = """
    import time
    from zmqdist.coordinator import ClusterCoordinator

    def endless():
        print("a function runs")
        while True:
            time.sleep(0.05)

    with ClusterCoordinator() as coordinator:
        values = [coordinator.schedule(endless) for _ in range(4)]
        coordinator.join()
"""

WITH_PS = FILE.replace("worker: {count: 2}", "worker: {count: 1}\n  ps: {count: 2}")

UNTIL_END_FILE = """
    import pathlib, signal, threading
    print("it runs", flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.02)
"""


def eventually(matches: Callable[[], bool], subject: str, within_s: float = PATIENCE_S) -> None:
    """Poll a condition until it is true; the text of a failure names the condition."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not matches():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {subject}"
        pause.wait(0.01)


def stop(pid: int) -> None:
    """Send SIGSTOP to a process, and wait until none of its threads runs. `waitpid` cannot do this
    for a child of the zygote."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _states(pid) == {"T"}, f"process {pid} stops")


def _states(pid: int) -> set[str]:
    """Return the states of the threads of a process, as in /proc."""
    threads = Path("/proc", str(pid), "task").iterdir()
    return {read(thread / "stat").rpartition(")")[2].strip()[:1] for thread in threads}


class Launched:
    """A child process in `folder`, with a folder for temporary files of its own.

    Args:
      program: text of program.py, which the cluster file `FILE` runs; None: no program.
      file: text of the cluster file, or its path.
      run: Python text of the launcher.
      terminal: the descriptor of the controlling terminal; None: without a terminal.
      grace_s: the time that program and workers have to end. The default is longer than a test
        needs, even on a busy host.
      start: the function that starts the process: subprocess.Popen, or `Host.run` of a host of a
        test.
    """

    def __init__(
        self,
        folder: Path,
        program: str | None = None,
        file: str | Path = FILE,
        arguments: tuple[str, ...] = (),
        run: str = LAUNCH,
        grace_s: float = PATIENCE_S,
        terminal: int | None = None,
        start: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    ) -> None:
        self.process_folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        if program is not None:
            (folder / "program.py").write_text(textwrap.dedent(program))
        if isinstance(file, str):
            (folder / "cluster.yaml").write_text(file)
            file = folder / "cluster.yaml"
        self._mark = f"ZMQDIST_LAUNCHED={uuid.uuid4()}"
        name, value = self._mark.split("=")
        environment = {
            **os.environ,
            name: value,
            "TMPDIR": str(self.temporary),
            "PYTHONWARNINGS": "error",
        }
        # Under this variable `print` writes a line in several pieces, and a line of another process
        # may come between them.
        environment.pop("PYTHONUNBUFFERED", None)
        self.process = start(
            [sys.executable, "-c", run, str(file), str(grace_s), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=None
            if terminal is None
            else lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def saw(self, text: str, within_s: float = PATIENCE_S) -> str:
        """Wait for a line that contains this text, and return the line."""
        with contextlib.suppress(AssertionError):  # the text of the one below has the output
            eventually(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
                repr(text),
                within_s,
            )
        matches = [line for line in self.lines if text in line]
        assert matches, (
            f"it ended without {text!r}, or did not print it within {within_s:g} s:\n{self.text}"
        )
        return matches[0]

    def ends(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the end of the launcher, and return its exit code."""
        code = self.process.wait(within_s)
        self._reader.join(within_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def worker(self, index: int) -> int:
        """The pid of a worker."""
        return self.task("worker", index)

    def task(self, job: str, index: int) -> int:
        """The pid of a worker or ps."""
        matches: list[int] = []

        def look() -> bool:
            for folder in self._processes():
                if read(folder / "comm") == f"{job}:{index}\n":
                    # the name of the process in `ps`, `top` and `pgrep`
                    matches.append(int(folder.name))
            return bool(matches)

        eventually(look, f"{job} {index} runs")
        return matches[0]

    def agents(self) -> dict[int, Path]:
        """Return the folder of each agent that runs for the launcher, by the pid of the agent."""
        matches = {}
        for folder in self._processes():
            for descriptor in links(folder / "fd"):
                if descriptor.name == OWNER and descriptor.is_relative_to(MEMORY_FOLDER):
                    matches[int(folder.name)] = descriptor.parent
        return matches

    def interrupt(self) -> None:
        """Send SIGINT to the launcher's process group, as Ctrl-C at a terminal does. Without a
        terminal the program is in another group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left_nothing(self, folders: bool = True) -> None:
        """Check that the launcher, which has ended, has left no process and no file."""
        eventually(
            lambda: not list(self._processes()), f"all processes end; the output was\n{self.text}"
        )
        left = [str(path) for path in self.temporary.rglob("*")]
        assert not (folders and left)

    def kill(self) -> None:
        """Kill all processes that the launcher has left."""
        for folder in self._processes():
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.ends()

    def _processes(self) -> Iterator[Path]:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._mark in read(folder / "environ").split("\0"):
                yield folder

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def links(folder: Path) -> list[Path]:
    """Return the files of the descriptors of a process; an empty list if the process has ended."""
    try:
        return [item.readlink() for item in folder.iterdir()]
    except OSError:
        return []


def read(path: Path) -> str:
    """Return the text of a file of /proc; "" if the process has ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # the process has just ended
        return ""


# -- hosts: each is an agent as a process of this host, over pipes instead of ssh ------------------


def pipe_host(
    name: str, slots: int | None = None, python: str = sys.executable, silence_limit_s: float = 60.0
) -> AgentHost:
    """A host of a test: this process starts its agent by command."""

    def open_stream(on_note: NoteHandler) -> AgentStream:
        command = agent_command(python, silence_limit_s)
        return ProcessStream(
            command,
            lambda code, notes: f"its agent ended ({describe_exit(code)}) {notes}".strip(),
            on_note,
        )

    return AgentHost(name, slots, open_stream)


def pipe_hosts(*names: str, slots: int | None = None) -> list[AgentHost]:
    return [pipe_host(name, slots) for name in names]


ROOT = Path(__file__).resolve().parents[2]

ON_PIPES = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.launch.helpers import pipe_hosts
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import launcher
launcher.agent_hosts = lambda config: pipe_hosts("a", "b", "c")
sys.exit(launcher.launch(ClusterConfig.load(sys.argv[1]), sys.argv[3:], grace_s=float(sys.argv[2])))
"""
"""A launcher as for a file with `launcher: ssh` and three hosts."""


def agent_of(role: int) -> int:
    """Return the agent that started a role: the parent of the zygote from which the role was
    forked."""
    zygote = parent(role)
    assert Path("/proc", str(zygote), "comm").read_text() == f"{NAME}\n"
    return parent(zygote)


def parent(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


# -- the pods of rendered manifests as processes of this host ---------------------------------------
# Each is in a folder of its own that has only the files which the pod mounts. There is no DNS of a
# cluster: each name of a Service in the manifests is replaced by an address of loopback.

ADDRESS = re.compile(r"[a-z0-9.-]+\.svc:[0-9]+")
COMMAND = {"zmqdist": [sys.executable, "-m", "zmqdist_cli"], "python": [sys.executable]}
"""What the image would have on its PATH."""


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML stream."""
    return list(yaml.safe_load_all(text))


def named(text: str) -> dict[str, dict[str, Any]]:
    """The objects by "Kind/name"."""
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in documents(text)}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables in commands and environments as Kubernetes does: $(NAME) by the value of a
    known variable, $$ by a dollar."""
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda matches: "$" if matches[0] == "$$" else variables.get(matches[1], matches[0]),
        text,
    )


class Pod:
    """One pod: its folder with its mounts, its environment, its process."""

    def __init__(
        self, name: str, spec: Mapping[str, Any], index: int | None, cluster: Pods
    ) -> None:
        self.name = name
        self.folder = cluster.folder / name
        self.container = spec["containers"][0]
        self.process: subprocess.Popen[str] | None = None
        self.output = self.folder / "output.txt"
        self.folder.mkdir()
        self._cluster = cluster
        for mount in self.container.get("volumeMounts", ()):
            volume = next(item for item in spec["volumes"] if item["name"] == mount["name"])
            self._mount(self.folder / "root" / mount["mountPath"].lstrip("/"), volume)
        self.environment: dict[str, str] = {}
        for item in self.container.get("env", ()):
            field = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert field in (None, "metadata.labels['apps.kubernetes.io/pod-index']")
            value = str(index) if field else expanded(item["value"], self.environment)
            self.environment[item["name"]] = self._here(value)

    def _mount(self, folder: Path, volume: Mapping[str, Any]) -> None:
        """Write mounted files as the kubelet does: into a hidden folder with a new name for each
        version, with links to it."""
        real = folder / "..2026_11_25"
        real.mkdir(parents=True)
        folder.joinpath("..data").symlink_to(real.name)
        if "secret" in volume:
            files = {
                item["path"]: self._cluster.secret[item["key"]]
                for item in volume["secret"]["items"]
            }
            mode = volume["secret"]["defaultMode"]
        else:
            data = self._cluster.objects[f"ConfigMap/{volume['configMap']['name']}"]["data"]
            files, mode = {name: self._here(text) for name, text in data.items()}, 0o644
        for name, text in files.items():
            (real / name).write_text(text)
            (real / name).chmod(mode)
            folder.joinpath(name).symlink_to(Path("..data", name))

    def _here(self, text: str) -> str:
        """Replace addresses and mounted folders of the cluster by those of this host."""
        text = ADDRESS.sub(lambda matches: self._cluster.address_of(matches[0]), text)
        return text.replace("/etc/zmqdist", str(self.folder / "root/etc/zmqdist"))

    def command(self, words: list[str]) -> list[str]:
        """Return the command of a manifest as a command of this host."""
        own = self._cluster.own_addresses.get(self.name, "")
        words = [self._here(expanded(word, self.environment)) for word in words]
        words = [
            own.rpartition(":")[2] if words[at - 1] == "--port" else word
            for at, word in enumerate(words)
        ]
        words = [own if word.startswith("127.0.0.1:") else word for word in words]
        words = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]
        return [*COMMAND.get(words[0], [words[0]]), *words[1:]]

    def start(self) -> None:
        environment = {**os.environ, **self.environment, "ZMQDIST_PODS": str(self._cluster.folder)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                self.command(self.container["command"]),
                cwd=self._cluster.working_directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def probe(self, kind: str) -> int:
        """Run an exec probe of the container, and return its exit code."""
        words = self.command(self.container[kind]["exec"]["command"])
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            words, env=environment, capture_output=True, timeout=PATIENCE_S, check=False
        ).returncode

    def ended(self, within_s: float = PATIENCE_S) -> int:
        assert self.process is not None
        return self.process.wait(within_s)


class Pods:
    """All pods of rendered manifests; a with-statement ends them.

    Args:
      text: the manifests.
      secret: the data of the Secret that the manifests name.
      folder: contains the folders of the pods.
      working_directory: stands for the working directory of the image.
    """

    def __init__(
        self, text: str, secret: Mapping[str, str], folder: Path, working_directory: Path
    ) -> None:
        self.objects = named(text)
        self.secret = secret
        self.folder = folder
        self.working_directory = working_directory
        self.own_addresses: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        for host_and_port in sorted(set(ADDRESS.findall(text))):
            self.address_of(host_and_port)
        self.pods = {pod.name: pod for pod in self._pods()}

    def address_of(self, address: str) -> str:
        """Return the loopback address that replaces the name of a pod or Service; a pod listens at
        the address of its own name."""
        if address not in self._addresses:
            self._addresses[address] = free_address()
            pod = address.partition(".")[0]
            name = f"{pod}-0" if f"StatefulSet/{pod}" in self.objects else pod
            self.own_addresses[name] = self._addresses[address]
        return self._addresses[address]

    def _pods(self) -> Iterator[Pod]:
        for key, item in self.objects.items():
            kind, _, name = key.partition("/")
            if kind == "StatefulSet":
                for index in range(item["spec"]["replicas"]):
                    yield Pod(f"{name}-{index}", item["spec"]["template"]["spec"], index, self)
            elif kind == "Job":
                yield Pod(name, item["spec"]["template"]["spec"], None, self)

    def __enter__(self) -> Pods:
        for pod in self.pods.values():
            pod.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the pods as the deletion of the manifests does: by SIGTERM. Check that no process is
        left after the grace."""
        running = [pod.process for pod in self.pods.values() if pod.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        try:
            for process in running:
                process.wait(PATIENCE_S)
            eventually(lambda: not self.processes(), "all processes of the pods end")
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the pids of all running processes of the pods."""
        mark = f"ZMQDIST_PODS={self.folder}".encode()
        matches = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        matches.append(int(folder.name))
                except OSError:  # the process has just ended
                    pass
        return matches

    def text(self) -> str:
        """Return the output of all pods, for the text of a failure."""
        return "\n".join(
            f"== {pod.name}\n{pod.output.read_text()}" for pod in self.pods.values() if pod.process
        )

    def wait_until_alive(self, *names: str) -> None:
        """Poll the exec probes of pods until they succeed."""
        for name in names:
            pause, looks = threading.Event(), 0
            while self.pods[name].probe("livenessProbe"):
                looks += 1
                assert looks < 50, f"{name} does not answer its probe\n{self.text()}"
                pause.wait(0.1)
