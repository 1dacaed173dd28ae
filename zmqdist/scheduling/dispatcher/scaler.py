"""What a dispatcher needs of the launcher that holds its workers, so that a user can ask the dispatcher for more or fewer of them."""

from __future__ import annotations

from typing import Any, Protocol

NO_LAUNCHER = (
    "no launcher holds the workers of this dispatcher, so it cannot start or end any: start more with `zmqdist worker`, end one with "
    "`zmqdist drain`, or use what started them (kubectl scale, for instance)"
)


class Scaler(Protocol):
    """A launcher in the process of the dispatcher."""

    def scale(self, job: str, count: int, grace_s: float, force: bool) -> dict[str, Any]:
        """Set how many workers there are, and return the decision. May wait for a moment.

        If workers that would have to leave would lose something, and `force` is False, nothing changes, and `refused` of the decision has
        their names.

        Raises:
          OpError: there cannot be so many workers, and nothing has changed.
        """

    def figures(self) -> dict[str, Any]:
        """Return the wanted size and its bounds for `status`. Does not wait."""

    def close(self) -> None:
        """Start and end nothing from now on: the cluster shuts down. Does not wait."""
