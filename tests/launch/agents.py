"""Hosts for tests: each is an agent as a process of this host, whose byte stream goes over pipes
instead of ssh."""

from __future__ import annotations

import sys
from pathlib import Path

from zmqdist.errors import describe_exit
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import AgentHost, AgentStream, NoteHandler, ProcessStream
from zmqdist.process.zygote import NAME


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
from tests.launch.agents import pipe_hosts
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
