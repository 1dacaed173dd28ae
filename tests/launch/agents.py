"""Hosts for tests: each is an agent as a process of this host, whose byte stream goes over pipes instead of ssh."""

from __future__ import annotations

import sys

from zmqdist.errors import describe_exit
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import AgentStream, NoteHandler, ProcessStream
from zmqdist.launch.hosts import AgentHost


def pipe_host(
    name: str, slots: int | None = None, python: str = sys.executable, silence_limit_s: float = 60.0
) -> AgentHost:
    """A host of a test: this process starts its agent by command."""

    def open_stream(on_note: NoteHandler) -> AgentStream:
        command = agent_command(python, silence_limit_s)
        return ProcessStream(
            command, lambda code, notes: f"its agent ended ({describe_exit(code)}) {notes}".strip(), on_note
        )

    return AgentHost(name, slots, open_stream)


def pipe_hosts(*names: str) -> list[AgentHost]:
    return [pipe_host(name) for name in names]
