"""What coordinators, dispatchers and workers share about actors.

The dispatcher's directory decides where an actor is (scheduling/dispatcher/actors_machine.py). Its
worker starts and ends its process (scheduling/worker/actor_host_machine.py). Callers send calls
directly to the process (scheduling/coordinator/called_actors.py).
"""

from __future__ import annotations

import enum


class ActorState(enum.IntEnum):
    """The state of an actor in the directory."""

    PENDING = enum.auto()
    """No worker has room for it, or it is not certain that its earlier process has ended."""
    STARTING = enum.auto()
    """A worker was told to start its process."""
    LIVE = enum.auto()
    """Its process serves calls."""
    AWAY = enum.auto()
    """Its worker is lost, and its process may serve yet, or come back."""
    ENDED = enum.auto()
