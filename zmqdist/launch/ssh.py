"""The launcher `ssh`: it starts the agent of each host through the system's ssh. This module makes
the ssh command, and explains why the command failed.

ssh reads the user's own config, so that names, keys, ssh agents, jump hosts and known_hosts are
those of `ssh HOST` in a shell. ssh asks no question (BatchMode), because there may be no user who
could answer.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from zmqdist import errors
from zmqdist.cluster.launcher_sections import SshConfig, SshHost
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import AgentHost, ProcessStream

SSH: Final = "ssh"
CONNECT_S: Final = 10
ALIVE_S: Final = 10
ALIVE_COUNT: Final = 3
"""ssh closes a connection when the host has not replied for ALIVE_S * ALIVE_COUNT seconds. Most
network disturbances are shorter."""


def ssh_hosts(config: SshConfig, silence_limit_s: float) -> list[AgentHost]:
    """Return the hosts that a cluster file lists for ssh. This function starts no agent.

    Raises:
      NotFoundError: this host has no ssh.
    """
    if shutil.which(SSH) is None:
        raise errors.NotFoundError(
            "launcher: ssh needs the program `ssh`, which is not found: install OpenSSH's client"
        )
    return [_host(entry, config, silence_limit_s) for entry in config.hosts]


def _host(entry: str | SshHost, config: SshConfig, silence_limit_s: float) -> AgentHost:
    host = SshHost(host=entry) if isinstance(entry, str) else entry
    python = config.python or sys.executable
    command = ssh_command(host.host, config.options, agent_command(python, silence_limit_s))

    because = partial(explain, host.host, python)
    return AgentHost(host.host, host.slots, partial(ProcessStream, command, because))


def ssh_command(host: str, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the ssh command that runs `command` on a host. ssh uses the first value of an option.
    The options of the user therefore precede those of this module, except BatchMode, which the user
    cannot change.
    """
    return [
        *(SSH, "-T", "-o", "BatchMode=yes", *options, "-o", f"ConnectTimeout={CONNECT_S}"),
        *("-o", f"ServerAliveInterval={ALIVE_S}", "-o", f"ServerAliveCountMax={ALIVE_COUNT}"),
        # a master process that outlives ssh would keep the pipes to this process open
        *("-o", "ControlMaster=no"),
        *("--", host, shlex.join(command)),
    ]


def explain(host: str, python: str, exit_code: int, notes: str) -> str:
    """Return a phrase that says why ssh ended and what the user can do.

    Args:
      notes: the last lines of ssh's standard error.
    """
    for pattern, cause, remedy in _CAUSES:
        match = re.search(pattern, notes, re.IGNORECASE)
        if match:
            words = {"host": host, "python": python, "found": " ".join(match[0].split())}
            return f"{cause}: {remedy.format(**words)}"
    if exit_code == 127:
        return _PYTHON_MISSING.format(python=python)
    last = notes.splitlines()[-1].strip() if notes.strip() else "it said nothing"
    return f"ssh ended ({errors.describe_exit(exit_code)}): {last}"


_PYTHON_MISSING: Final = (
    "there is no {python} there: name the Python of that host as `ssh.python` in the file"
)
_CAUSES: Final = (
    (
        r"Could not resolve hostname.*",
        "its name is not known",
        "check the name, or add `Host {host}` to ~/.ssh/config ({found})",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        (
            "if the host was installed anew, run `ssh-keygen -R {host}` and connect once by `ssh "
            "{host}`; else another host answers"
        ),
    ),
    (
        r"Host key verification failed|host key is known for",
        "its host key is not known",
        "connect once by `ssh {host}` and compare the key that is shown",
    ),
    (
        r"Permission denied \(.*\)",
        "it refused your key",
        "run `ssh-copy-id {host}`, or load the right key with `ssh-add` ({found})",
    ),
    (
        r"Connection refused",
        "no sshd answers there",
        "start sshd, or name its port: options: [-p, PORT]",
    ),
    (
        r"Connection timed out|No route to host|Network is unreachable|Operation timed out",
        "it cannot be reached",
        "is it up, and does `ssh {host}` work from here? ({found})",
    ),
    (
        r"Timeout, server .* not responding",
        "its connection was silent for too long",
        "its roles end by themselves; see whether the host and the network are up",
    ),
    (
        r"Connection (to .* )?(closed|reset)( by .*)?",
        "its connection has ended",
        "see whether the host is up ({found})",
    ),
)
