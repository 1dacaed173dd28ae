"""Hosts of a test (tests/campaigns/hosts.py) that ssh reaches: each has an sshd of its own, and a
key that was made on the spot.

    with SshNetwork(tmp_path, "a", "b") as net:
        net.head.run([sys.executable, "-m", "zmqdist_cli", "launch", ...])   # on the host that has no sshd
        net["b"].cut()

Nothing of the user's ssh is read or written: the client's config, its known hosts and its key stand
in a temporary folder, and `net.options` names them (`ssh.options` of a cluster file).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.campaigns.hosts import READY_S, Host, Network
from tests.launch.helpers import eventually

SSHD = "/usr/sbin/sshd"
HEAD = "head"

SSHD_CONFIG = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""

SSH_CONFIG = """
Host *
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


class SshNetwork(Network):
    """A host called "head", and hosts with an sshd; in a `with` statement. Skips the test where
    there can be none.

    Args:
      folder: for keys and configs; every host sees it.

    Attributes:
      options: the words by which ssh finds its config.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__(HEAD, *names)
        self.folder = folder
        self.names_with_sshd = names
        self.options = ["-F", str(folder / "ssh_config")]

    @property
    def head(self) -> Host:
        return self[HEAD]

    def __enter__(self) -> SshNetwork:
        if shutil.which(SSHD) is None:
            pytest.skip("there is no sshd on this machine: apt-get install openssh-server")
        super().__enter__()
        try:
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks its unprivileged process in
            self.make_key("user_key")
            self.make_key("host_key")
            (self.folder / "authorized_keys").write_text((self.folder / "user_key.pub").read_text())
            (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder))
            (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
            self.know_hosts("host_key")
            for name in self.names_with_sshd:
                self.serve(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def make_key(self, name: str) -> None:
        """Make a key pair in the folder."""
        path = self.folder / name
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=READY_S
        )

    def know_hosts(self, key: str) -> None:
        """Have ssh expect this key from each host."""
        kind, text, *_ = (self.folder / f"{key}.pub").read_text().split()
        hosts = ",".join(self.names_with_sshd)
        (self.folder / "known_hosts").write_text(f"{hosts} {kind} {text}\n" if hosts else "")

    def serve(self, name: str) -> None:
        """Start the sshd of a host, and return when it listens."""
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        log = (self.folder / f"sshd-{name}.log").open("ab")
        with log:
            self[name].run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(
            lambda: b"Server listening" in Path(log.name).read_bytes(), f"sshd of {name} listens"
        )


def left_on(host: Host) -> list[str]:
    """What a run has left on a host: processes beside sshd, and files in shared memory."""
    found = [text for text in host.processes().values() if "sshd" not in text]
    done = host.run(["ls", "/dev/shm"], stdout=subprocess.PIPE, text=True)
    files, _ = done.communicate(timeout=READY_S)
    return found + files.split()
