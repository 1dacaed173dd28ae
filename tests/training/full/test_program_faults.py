"""One program after another on the same servers, and workers that are added to one."""

from __future__ import annotations

import gc
import json
import subprocess
import threading
from collections.abc import Callable

import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.conftest import Cluster
from tests.training.helpers import PAUSE_S, WITHIN_S, Program
from zmqdist.variables.client import client_of

pytestmark = pytest.mark.shares_cluster


def test_cluster_coordinator_destroyed(program: Program) -> None:
    cluster = program.cluster
    program.strategy.close()
    before = set(threading.enumerate())
    strategy = zd.ParameterServerStrategy(cluster)
    with strategy.scope():
        variable = zd.Variable(0)
    assert strategy.coordinator.schedule(variable.numpy).fetch(WITHIN_S) == 0
    assert set(threading.enumerate()) - before
    del strategy, variable
    gc.collect()
    eventually(
        lambda: not [each for each in set(threading.enumerate()) - before if each.is_alive()],
        "its threads end",
    )


def test_added_worker_has_resources_first() -> None:
    """10.6 on a local cluster."""
    with zd.local_cluster(workers=1, ps=1) as cluster:
        program = Program(cluster)
        coordinator, iterations, go = program.coordinator, program.iterations, program.go
        own = coordinator.create_per_worker_resource(zd.coordinator.get_current_worker_index)

        def step(own: int) -> bool:
            iterations.assign_add(1)
            while go.numpy() == 0:
                threading.Event().wait(PAUSE_S)
            return own == zd.coordinator.get_current_worker_index()

        results = [coordinator.schedule(step, (own,)) for _ in range(4)]
        program.begun(1)
        assert not coordinator.done()
        assert cluster.add_worker() == 1
        program.begun(2)
        go.assign(1)
        coordinator.join(WITHIN_S)
        assert iterations.numpy() == 4
        assert cluster.add_worker() == 2
        results.append(coordinator.schedule(step, (own,), worker=2))
        coordinator.join(WITHIN_S)
        assert iterations.numpy() == 5
        assert all(coordinator.fetch(results))
        eventually(lambda: program.strategy.task_states() == [None] * 4, "all tasks are there")
        program.strategy.close()


PROGRAM = """
import json, sys, threading
import zmqdist as zd

strategy = zd.ParameterServerStrategy(json.loads(sys.argv[1]))
with strategy.scope():
    count = zd.Variable(7, name="count")

def endless():
    count.assign_add(1)
    threading.Event().wait()

strategy.coordinator.schedule(endless)
while count.numpy() == 7:
    threading.Event().wait(0.01)
print("it runs", flush=True)
sys.stdin.read()
"""


def test_restarted_program_begins_clean(
    cluster: Callable[..., Cluster],
    child: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P-5: what ran for it is ended, and its variables are dropped."""
    monkeypatch.setattr("zmqdist.variables.variable_host.PS_PROGRAM_GONE_S", 0.0)
    servers = cluster(1, 1)
    servers.kill("worker", 0)
    servers.threads = False
    servers.start("worker", 0, {"worker_processes": True})
    first = child(PROGRAM, json.dumps(servers.spec))
    assert first.stdout is not None
    assert first.stdout.readline() == "it runs\n"
    first.kill()
    first.wait(WITHIN_S)
    with zd.ParameterServerStrategy(servers.spec, timeout=WITHIN_S) as strategy:
        with strategy.scope():
            count = zd.Variable(0, name="count")

        def variables() -> list[str]:
            with zd.ParameterServerStrategy(servers.spec):
                # What a program has left is dropped when one opens a session.
                message = client_of(servers.spec["ps"][0]).status().get_value()["variables"]
            return [each["name"] for each in message if each["session"] != strategy.session]

        eventually(lambda: not variables(), "the ps drops what the first one had", WITHIN_S)
        for _ in range(4):
            strategy.coordinator.schedule(lambda: count.assign_add(1) and None)
        strategy.coordinator.join(WITHIN_S)
        assert count.numpy() == 4
