"""The RPC servers and parameter servers of a cluster, as programs and workers report them. No I/O.

A report has the figures since its server began. So a lost report loses nothing, and the same server
may be reported by several programs that use it, or share its process: its last report counts.

Promises, checked by tests/scheduling/dispatcher/test_servers.py
    V1  a server counts once, also if several report it; it is gone with its last reporter
    V2  all lists and texts are bounded, whatever is reported
    V3  rates are never negative, also when a server of the same number begins again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from zmqdist.limits import (
    FUNCTION_NAME_CHARS_MAX,
    METHODS_SHOWN_MAX,
    RPC_ROWS_MAX,
    SERVERS_KEPT_MAX,
    VARIABLES_SHOWN_MAX,
)
from zmqdist.messages import MethodFacts, ServerFacts, VariableFacts
from zmqdist.scheduling.dispatcher.facts import percentile, smoothed_rate

DIMENSIONS_SHOWN_MAX = 32


@dataclass(slots=True)
class _Server:
    """The last report of a server.

    Attributes:
      reporters: who has reported it.
      rates: updates per second of each variable, by session and number.
    """

    facts: ServerFacts
    at: float
    reporters: set[Hashable] = field(default_factory=set)
    rates: dict[tuple[int, int], float] = field(default_factory=dict)


class Servers:
    """The servers of one cluster."""

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}

    def take(self, reporter: Hashable, facts: ServerFacts, now: float) -> None:
        """Record a report."""
        if not facts.name:
            self._unreported(facts.incarnation, reporter)
            return
        server = self._servers.get(facts.incarnation)
        if server is None:
            if len(self._servers) >= SERVERS_KEPT_MAX:
                return
            server = self._servers[facts.incarnation] = _Server(facts, now)
        before, elapsed_s = server.facts, now - server.at
        variables = facts.variables[:VARIABLES_SHOWN_MAX]
        if elapsed_s > 0:
            updates = {(row.session, row.number): row.updates for row in before.variables}
            server.rates = {
                key: smoothed_rate(
                    server.rates.get(key, 0.0), row.updates - updates.get(key, 0), elapsed_s
                )
                for row in variables
                for key in [(row.session, row.number)]
            }
        server.facts, server.at = facts, now
        server.reporters.add(reporter)

    def reporter_gone(self, reporter: Hashable) -> None:
        """Forget the servers that have no other reporter."""
        for incarnation in [*self._servers]:
            self._unreported(incarnation, reporter)

    def _unreported(self, incarnation: int, reporter: Hashable) -> None:
        server = self._servers.get(incarnation)
        if server is not None:
            server.reporters.discard(reporter)
            if not server.reporters:
                del self._servers[incarnation]

    def record(self, own: ServerFacts) -> dict[str, Any]:
        """Return the keys of the facts. `own` are the figures of the dispatcher's own methods."""
        servers = {**self._servers, own.incarnation: _Server(own, 0.0)}.values()
        variables = [
            (server, row)
            for server in servers
            for row in server.facts.variables[:VARIABLES_SHOWN_MAX]
        ]
        methods = [
            (server, row) for server in servers for row in server.facts.methods[:METHODS_SHOWN_MAX]
        ]
        variables_told = sum(server.facts.variables_more for server in servers) + len(variables)
        largest = nlargest(VARIABLES_SHOWN_MAX, variables, key=lambda pair: pair[1].bytes)
        busiest = nlargest(RPC_ROWS_MAX, methods, key=lambda pair: pair[1].sum_s)
        return {
            "variables": [_variable(server, row) for server, row in largest],
            "variables_more": variables_told - len(largest),
            "rpc": [_method(server, row) for server, row in busiest],
            "rpc_more": len(methods) - len(busiest),
        }


def _variable(server: _Server, row: VariableFacts) -> dict[str, Any]:
    return {
        "server": server.facts.name[:FUNCTION_NAME_CHARS_MAX],
        "name": row.name[:FUNCTION_NAME_CHARS_MAX],
        "shape": list(row.shape[:DIMENSIONS_SHOWN_MAX]),
        "dtype": row.dtype[:FUNCTION_NAME_CHARS_MAX],
        "bytes": row.bytes,
        "updates": row.updates,
        "updates_per_s": server.rates.get((row.session, row.number), 0.0),
        "waits_s": row.waits_s,
    }


def _method(server: _Server, row: MethodFacts) -> dict[str, Any]:
    buckets = Counter(dict(row.buckets))
    return {
        "process": server.facts.name[:FUNCTION_NAME_CHARS_MAX],
        "method": row.method[:FUNCTION_NAME_CHARS_MAX],
        "count": row.count,
        "failed": row.failed,
        "in_flight": row.in_flight,
        "mean_s": row.sum_s / row.count if row.count else 0.0,
        "p50_s": min(percentile(buckets, 0.5), row.max_s),
        "p99_s": min(percentile(buckets, 0.99), row.max_s),
        "max_s": row.max_s,
    }
