"""What a program or a worker tells its dispatcher of servers: those of its process, and those that
it asks (ServerFacts). Only what has changed is sent."""

from __future__ import annotations

from collections.abc import Iterable

from zmqdist.messages import ServerFacts
from zmqdist.rpc.service import servers_here


class ServerReports:
    """The last report of each server."""

    def __init__(self) -> None:
        self._last: dict[int, ServerFacts] = {}

    def forget(self) -> None:
        """Report all servers again, because the dispatcher may be another one."""
        self._last.clear()

    def changes(self, others: Iterable[ServerFacts] = ()) -> list[ServerFacts]:
        """Return the reports to send. `others` are the servers that this process asks."""
        last = self._last
        servers = {facts.incarnation: facts for facts in (*servers_here(), *others)}
        ended = [ServerFacts(incarnation) for incarnation in last.keys() - servers.keys()]
        self._last = servers
        return ended + [
            facts for incarnation, facts in servers.items() if facts != last.get(incarnation)
        ]
