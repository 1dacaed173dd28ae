"""The interface to the launcher that starts and ends a dispatcher's workers, for users who ask the
dispatcher for more or fewer workers."""

from __future__ import annotations

from typing import Any, Protocol

NO_LAUNCHER = (
    "no launcher holds the workers of this dispatcher, so it cannot start or end any: start more "
    "with `zmqdist worker`, end one with "
    "`zmqdist drain`, or use what started them (kubectl scale, for instance)"
)


class Scaler(Protocol):
    """A launcher of workers in the process of the dispatcher."""

    def scale(self, job: str, count: int, grace_s: float, force: bool) -> dict[str, Any]:
        """Set the wanted size of a job, and return the launcher's decision. May wait for a moment.

        If values or work would be lost with the workers that would have to leave, and `force` is
        False, nothing changes. Then `refused` of the decision has the names of these workers.

        Raises:
          OpError: the launcher refuses the size, and nothing has changed.
        """

    def figures(self) -> dict[str, Any]:
        """Return the wanted size and its bounds, for the RPC method `status`. Does not wait."""

    def close(self) -> None:
        """Tell the launcher to start and end no more workers, because the cluster shuts down. Does
        not wait."""
