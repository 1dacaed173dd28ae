"""The pods of rendered manifests as processes of this host: each in a folder of its own that has
only the files which the pod mounts.

There is no DNS of a cluster: each name of a Service in the manifests is replaced by an address of
loopback.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.launch.launched import PATIENCE_S, eventually
from tests.ports import free_address

ADDRESS = re.compile(r"[a-z0-9.-]+\.svc:[0-9]+")
COMMAND = {"zmqdist": [sys.executable, "-m", "zmqdist_cli"], "python": [sys.executable]}
"""What the image would have on its PATH."""


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML stream."""
    return list(yaml.safe_load_all(text))


def named(text: str) -> dict[str, dict[str, Any]]:
    """The objects by "Kind/name"."""
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in documents(text)}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables in commands and environments as Kubernetes does: $(NAME) by the value of a
    known variable, $$ by a dollar."""
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
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
            volume = next(each for each in spec["volumes"] if each["name"] == mount["name"])
            self._mount(self.folder / "root" / mount["mountPath"].lstrip("/"), volume)
        self.environment: dict[str, str] = {}
        for each in self.container.get("env", ()):
            field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert field in (None, "metadata.labels['apps.kubernetes.io/pod-index']")
            value = str(index) if field else expanded(each["value"], self.environment)
            self.environment[each["name"]] = self._here(value)

    def _mount(self, folder: Path, volume: Mapping[str, Any]) -> None:
        """Write mounted files as the kubelet does: into a hidden folder with a new name for each
        version, with links to it."""
        real = folder / "..2026_11_25"
        real.mkdir(parents=True)
        folder.joinpath("..data").symlink_to(real.name)
        if "secret" in volume:
            files = {
                each["path"]: self._cluster.secret[each["key"]]
                for each in volume["secret"]["items"]
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
        text = ADDRESS.sub(lambda found: self._cluster.address_of(found[0]), text)
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
        for key, each in self.objects.items():
            kind, _, name = key.partition("/")
            if kind == "StatefulSet":
                for index in range(each["spec"]["replicas"]):
                    yield Pod(f"{name}-{index}", each["spec"]["template"]["spec"], index, self)
            elif kind == "Job":
                yield Pod(name, each["spec"]["template"]["spec"], None, self)

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
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
                except OSError:  # the process has just ended
                    pass
        return found

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
