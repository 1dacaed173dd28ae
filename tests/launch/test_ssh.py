"""The texts that explain the end of ssh, and the command that starts it. tests/engines/test_ssh.py
has real hosts."""

from __future__ import annotations

import shlex
import shutil

import pytest

from zmqdist import errors
from zmqdist.cluster.launcher_sections import SshConfig, SshHost
from zmqdist.launch import ssh

ENDS = [
    (
        255,
        "ssh: Could not resolve hostname b: Name or service not known",
        "its name is not known: check the name, or add ",
    ),
    (
        255,
        "root@b: Permission denied (publickey,password).",
        "it refused your key: run `ssh-copy-id b`, or load ",
    ),
    (
        255,
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
        "its host key has changed: if the host was installed anew, run `ssh-keygen -R b` and ",
    ),
    (
        255,
        (
            "No ED25519 host key is known for b and you have requested strict checking.\nHost key "
            "verification failed."
        ),
        "its host key is not known: connect once by `ssh b` and compare the key",
    ),
    (
        255,
        "ssh: connect to host b port 22: Connection refused",
        "no sshd answers there: start sshd, or name its port",
    ),
    (
        255,
        "ssh: connect to host b port 22: Connection timed out",
        "it cannot be reached: is it up, and does `ssh b` work ",
    ),
    (
        255,
        "ssh: connect to host b port 22: No route to host",
        "it cannot be reached: is it up, and does `ssh b` work ",
    ),
    (255, "Timeout, server b not responding.", "its connection was silent for too long: "),
    (
        255,
        "Connection to b closed by remote host.",
        "its connection has ended: see whether the host is up ",
    ),
    (
        255,
        "kex_exchange_identification: read: Connection reset by peer",
        "its connection has ended: see ",
    ),
    (
        127,
        "sh: 1: /opt/python: not found",
        "there is no /opt/python there: name the Python of that host as `ssh.python`",
    ),
    (
        126,
        "bash: /opt/python: Permission denied",
        "ssh ended (exit code 126): bash: /opt/python: Permission denied",
    ),
    (-9, "", "ssh ended (killed by SIGKILL): it said nothing"),
]


@pytest.mark.parametrize(("code", "notes", "text"), ENDS, ids=[row[1][-40:] for row in ENDS])
def test_ssh_end_has_remedy(code: int, notes: str, text: str) -> None:
    matches = ssh.explain("b", "/opt/python", code, notes)
    assert matches.startswith(text)
    assert "\n" not in matches


def test_host_name_with_braces_is_explained() -> None:
    assert ssh.explain("{b}", "{python}", 255, "Permission denied (a{b}).").startswith(
        "it refused your key: "
    )


def test_options_of_file_override_ours() -> None:
    command = ssh.ssh_command("me@b", ["-o", "ConnectTimeout=1"], ["python", "-c", "a 'b'\nc"])
    assert command.index("ConnectTimeout=1") < command.index("ConnectTimeout=10")
    assert command[-3:-1] == ["--", "me@b"]
    assert shlex.split(command[-1]) == ["python", "-c", "a 'b'\nc"]
    assert "BatchMode=yes" in command


def test_hosts_have_the_names_and_slots_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    hosts = ssh.ssh_hosts(SshConfig(hosts=["a", SshHost(host="b", slots=2)]), 60.0)
    assert [(host.name, host.slots) for host in hosts] == [("a", None), ("b", 2)]


def test_missing_ssh_error_has_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        errors.NotFoundError,
        match="needs the program `ssh`, which is not found: install OpenSSH's client",
    ):
        ssh.ssh_hosts(SshConfig(hosts=["a"]), 60.0)
