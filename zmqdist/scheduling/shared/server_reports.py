"""What a program or a worker tells its dispatcher of servers: those of its process, and those that
it asks (ServerFacts). Only what has changed is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zmqdist.messages import ServerFacts
from zmqdist.rpc.service import servers_here


class ServerReports:
    """The last report of each server.

    Attributes:
      others: returns the figures of servers that this process asks.
    """

    def __init__(self) -> None:
        self.others: Callable[[], Iterable[ServerFacts]] = list
        self._last: dict[int, ServerFacts] = {}

    def forget(self) -> None:
        """Report all servers again, because the dispatcher may be another one."""
        self._last.clear()

    def changes(self) -> list[ServerFacts]:
        """Return the reports to send."""
        last = self._last
        servers = {facts.incarnation: facts for facts in (*servers_here(), *self.others())}
        ended = [ServerFacts(incarnation) for incarnation in last.keys() - servers.keys()]
        self._last = servers
        return ended + [
            facts for incarnation, facts in servers.items() if facts != last.get(incarnation)
        ]
