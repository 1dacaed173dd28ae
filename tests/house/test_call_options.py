"""An option that does not exist is an error that names the call that the user wrote, and the
nearest option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.data.service import DispatcherConfig, WorkerConfig
from zmqdist.launch.connection import Cluster
from zmqdist.transport.credentials import Credentials

WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("local_cluster()", lambda: zd.local_cluster(n_workers=2), "did you mean 'workers'?"),
    ("local_cluster()", lambda: zd.local_cluster(token_file="x"), "there are workers, slots, "),
    ("Executor()", lambda: zd.Executor("h:1", max_worker=2), "did you mean 'max_workers'?"),
    ("Executor()", lambda: zd.Executor("h:1", queue_maximum=2), "did you mean 'queue_max'?"),
    (
        "ClusterCoordinator()",
        lambda: zd.ClusterCoordinator("h:1", result="safe"),
        "did you mean 'results'?",
    ),
    (
        "coordinator()",
        lambda: Cluster("zmq://h:1", Credentials()).coordinator(result="safe"),
        "did you mean 'results'?",
    ),
    (
        "coordinator()",
        lambda: Cluster("zmq://h:1", Credentials()).coordinator(target="h:2"),
        "there are queue_max, ",
    ),
    (
        "ParameterServerStrategy()",
        lambda: zd.ParameterServerStrategy({}, place="x"),
        "did you mean 'placement'?",
    ),
    ("DispatcherConfig()", lambda: DispatcherConfig(lease=1), "did you mean 'lease_s'?"),
    ("WorkerConfig()", lambda: WorkerConfig("h:1", slot=1), "did you mean 'slots'?"),
    ("DispatchServer()", lambda: zd.DispatchServer(prt=0), "did you mean 'port'?"),
    (
        "WorkerServer()",
        lambda: zd.WorkerServer(dispatcher="h:1"),
        "did you mean 'dispatcher_address'?",
    ),
]


@pytest.mark.parametrize(
    ("call", "wrong", "hint"), WRONG, ids=[f"{row[0]} {row[2][-14:]}" for row in WRONG]
)
def test_wrong_option_names_nearest_option(call: str, wrong: Callable[[], Any], hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        wrong()
    assert str(caught.value).startswith(f"{call} has no option ")
    assert hint in str(caught.value)


def test_shown_signatures_are_those_of_functions() -> None:
    assert list(inspect.signature(zd.local_cluster).parameters) == [
        "workers",
        "slots",
        "ps",
        "processes",
        "resources",
        "memory_max_gb",
        "actors_max",
        "nested_slots_max",
        "dashboard",
        "logs",
        "cancel_on_interrupt",
        "options",
    ]
    assert next(iter(inspect.signature(DispatcherConfig).parameters)) == "port"


def test_config_is_accepted_by_name() -> None:
    with zd.DispatchServer(config=DispatcherConfig(port=0)) as dispatcher:
        assert dispatcher.num_workers == 0
