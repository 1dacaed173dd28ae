"""What a dispatcher's machine knows of RPC and parameter servers (servers.py), without sockets."""

from __future__ import annotations

from typing import Any

from tests.scheduling.dispatcher.helpers import coordinator, hear, worker
from zmqdist.errors import FAILED_PRECONDITION
from zmqdist.events import PeerGone
from zmqdist.limits import (
    FUNCTION_NAME_CHARS_MAX,
    METHODS_SHOWN_MAX,
    SERVERS_KEPT_MAX,
    VARIABLES_SHOWN_MAX,
)
from zmqdist.messages import Goodbye, MethodFacts, Refused, ServerFacts, VariableFacts
from zmqdist.scheduling.dispatcher.machine import Broker

OWN = ServerFacts(2**40, "dispatcher", [MethodFacts("facts", 5, 0, 1, 0.5, 0.2, [(60, 5)])])


def record(broker: Broker) -> dict[str, Any]:
    return broker.servers.record(OWN)


def method(name: str = "double", count: int = 4, **changes: Any) -> MethodFacts:
    fields = {"method": name, "count": count, "failed": 1, "in_flight": 2, "sum_s": 0.4}
    return MethodFacts(**{**fields, "max_s": 0.3, "buckets": [(60, count)], **changes})


def variable(number: int = 1, updates: int = 10, **changes: Any) -> VariableFacts:
    fields = {"session": 7, "number": number, "name": "w", "shape": (2, 3), "dtype": "float64"}
    fields |= {"bytes": 48, "updates": updates, "waits_s": 0.5}
    return VariableFacts(**{**fields, **changes})


def server(incarnation: int = 1, name: str = "ps:0", **lists: Any) -> ServerFacts:
    return ServerFacts(incarnation, name, lists.pop("methods", [method()]), **lists)


def processes(broker: Broker) -> list[str]:
    return sorted({row["process"] for row in record(broker)["rpc"]})


def test_rows_have_the_figures_of_methods(broker: Broker) -> None:
    coordinator(broker)
    hear(broker, "c", server())
    (row,) = [row for row in record(broker)["rpc"] if row["process"] == "ps:0"]
    assert (row["method"], row["count"], row["failed"], row["in_flight"]) == ("double", 4, 1, 2)
    assert (row["mean_s"], row["max_s"]) == (0.1, 0.3)
    assert 0 < row["p50_s"] <= row["p99_s"] <= 0.3


def test_own_methods_of_dispatcher_are_rows(broker: Broker) -> None:
    (row,) = record(broker)["rpc"]
    assert (row["process"], row["method"], row["count"]) == ("dispatcher", "facts", 5)


def test_rows_have_variables_with_rates(broker: Broker) -> None:
    coordinator(broker)
    hear(broker, "c", server(variables=[variable(updates=0)]), 10.0)
    hear(broker, "c", server(variables=[variable(updates=500)]), 15.0)
    (row,) = record(broker)["variables"]
    assert (row["server"], row["name"], row["shape"], row["bytes"]) == ("ps:0", "w", [2, 3], 48)
    assert (row["updates"], row["updates_per_s"], row["waits_s"]) == (500, 100.0, 0.5)


def test_server_of_two_reporters_counts_once(broker: Broker) -> None:
    coordinator(broker, "c", 1)
    coordinator(broker, "d", 2)
    worker(broker)
    for peer in ("c", "d", "w"):
        hear(broker, peer, server(variables=[variable()]))
    assert processes(broker) == ["dispatcher", "ps:0"]
    assert len(record(broker)["variables"]) == 1
    assert sum(row["count"] for row in record(broker)["rpc"]) == 5 + 4


def test_server_is_gone_with_its_last_reporter(broker: Broker) -> None:
    coordinator(broker, "c", 1)
    coordinator(broker, "d", 2)
    worker(broker)
    for peer in ("c", "d", "w"):
        hear(broker, peer, server())
    broker.handle(PeerGone("c"), 1.0)
    hear(broker, "d", Goodbye())
    assert processes(broker) == ["dispatcher", "ps:0"]
    hear(broker, "w", Goodbye())
    assert processes(broker) == ["dispatcher"]


def test_server_that_has_ended_is_gone(broker: Broker) -> None:
    coordinator(broker)
    hear(broker, "c", server())
    hear(broker, "c", ServerFacts(1))
    hear(broker, "c", ServerFacts(1))  # of one that is not known
    assert processes(broker) == ["dispatcher"]


def test_rate_is_never_negative(broker: Broker) -> None:
    coordinator(broker)
    hear(broker, "c", server(variables=[variable(updates=500)]), 1.0)
    hear(broker, "c", server(variables=[variable(updates=3)]), 2.0)
    assert record(broker)["variables"][0]["updates_per_s"] == 0.0


def test_rows_and_texts_of_servers_are_bounded(broker: Broker) -> None:
    coordinator(broker)
    methods = [method(f"m{number}") for number in range(METHODS_SHOWN_MAX + 9)]
    variables = [
        variable(number, name="n" * 999, dtype="d" * 999, shape=(1,) * 999)
        for number in range(VARIABLES_SHOWN_MAX + 9)
    ]
    for number in range(SERVERS_KEPT_MAX + 9):
        hear(broker, "c", server(number, "s" * 999, methods=methods[:1]))
    hear(broker, "c", server(0, "s" * 999, methods=methods, variables=variables, variables_more=5))
    rows = record(broker)
    assert len(rows["rpc"]) + rows["rpc_more"] == 1 + METHODS_SHOWN_MAX + SERVERS_KEPT_MAX - 1
    assert len(rows["variables"]) == VARIABLES_SHOWN_MAX
    assert rows["variables_more"] == 5
    row = rows["variables"][0]
    texts = (row["server"], row["name"], row["dtype"])
    assert {len(text) for text in texts} == {FUNCTION_NAME_CHARS_MAX}
    assert len(row["shape"]) == 32


def test_report_of_stranger_is_refused(broker: Broker) -> None:
    (refusal,) = hear(broker, "x", server())
    assert isinstance(refusal.message, Refused)
    assert refusal.message.code == FAILED_PRECONDITION
    assert processes(broker) == ["dispatcher"]
