"""A program finds the tasks of its cluster, whoever has started them, and knows how they are."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.conftest import Cluster
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator import metrics
from zmqdist.tasks.coordinator_utils import start_server
from zmqdist.training import recruitment_machine, worker_recruiter
from zmqdist.training.cluster_connection import ClusterConnection, connect
from zmqdist.transport.credentials import Credentials

Clusters = Callable[..., Cluster]
Connect = Callable[..., ClusterConnection]


def whose(_: int = 0) -> int:
    return os.getpid()


def slow() -> int:
    threading.Event().wait(0.02)
    return os.getpid()


def run(connected: ClusterConnection, count: int = 1) -> list[Any]:
    with ClusterCoordinator(connected) as coordinator:
        values = [coordinator.schedule(whose) for _ in range(count)]
        coordinator.join(30)
        return coordinator.fetch(values)


def there(found: ClusterConnection, count: int) -> None:
    """Wait until so many tasks are there. A probe gives up after a second, which a busy machine may
    take."""
    eventually(lambda: found.task_states() == [None] * count, f"all {count} tasks are there")


@pytest.mark.parametrize("how", ["resolver", "spec", "dict"])
def test_plain_servers_run_functions(cluster: Clusters, connected: Connect, how: str) -> None:
    jobs = cluster(2, 2).spec
    spec = zd.ClusterSpec(jobs)
    source = {"resolver": zd.resolvers.SimpleClusterResolver(spec), "spec": spec, "dict": jobs}[how]
    found = connected(source)
    assert found.ps == jobs["ps"]
    assert found.workers == dict(enumerate(jobs["worker"]))
    there(found, 4)
    assert run(found, 4) == [os.getpid()] * 4


def test_server_config_sets_slots_and_processes(cluster: Clusters, connected: Connect) -> None:
    servers = cluster(2, 1)
    for index, config in enumerate(({"slots": 2}, {"worker_processes": True})):
        servers.kill("worker", index)
        servers.start("worker", index, config)
    found = connected(servers.spec, slots=3)
    with ClusterCoordinator(found) as coordinator:
        eventually(
            lambda: len(set(coordinator.fetch([coordinator.schedule(slow) for _ in range(8)]))) > 1,
            "a slot is a process",
        )
        rows = coordinator.metrics()["workers"]
    assert {name: row["slots"] for name, row in rows.items()} == {"worker:0": 2, "worker:1": 3}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"slots": 0}, r"config\['slots'\] is 0, wants 1 to 4096"),
        ({"slots": True}, r"config\['slots'\] is True"),
        ({"worker_processes": 1}, r"config\['worker_processes'\] is 1, wants True or False"),
    ],
)
def test_bad_server_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=message):
        zd.Server({"worker": ["localhost:0"]}, config=config)


def test_absent_evaluators_are_not_awaited(cluster: Clusters, connected: Connect) -> None:
    servers = cluster(1, 1)
    others = {"chief": [servers.port()], "evaluator": [servers.port()]}
    found = connected({**servers.spec, **others})
    assert (
        found.target.partition(":")[2].rpartition(":")[2] == others["chief"][0].rpartition(":")[2]
    )
    assert run(found) == [os.getpid()]


def test_invitation_time_is_measured(
    cluster: Clusters, connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "enable_metrics", True)
    before = metrics.get_metric_summary("server_def_update")["num"]
    connected(cluster(2, 1).spec)
    eventually(
        lambda: metrics.get_metric_summary("server_def_update")["num"] >= before + 2,
        "both are counted",
    )


def test_accepted_worker_is_invited_once(
    cluster: Clusters, connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one question more it would not be known to work for a quarter of a second."""
    monkeypatch.setattr(metrics, "enable_metrics", True)

    def accepted() -> int:
        return int(metrics.get_metric_summary("server_def_update")["num"])

    before = accepted()
    watch = zd.DispatchServer.watch_members

    in_order = threading.Lock()

    def late(self: zd.DispatchServer, tell: Callable[[Any], object]) -> None:
        last: list[Any] = []

        def wait_and_tell(present: Any) -> None:
            last[:] = [present]

            def then() -> None:
                eventually(lambda: accepted() > before, "the worker accepts")
                with in_order:  # what was true earlier must not be told last
                    tell(last[0])

            threading.Thread(target=then, daemon=True).start()

        watch(self, wait_and_tell)

    monkeypatch.setattr(zd.DispatchServer, "watch_members", late)
    assert run(connected(cluster(1, 1).spec)) == [os.getpid()]
    assert accepted() == before + 1


def test_address_of_chief_may_be_in_use(cluster: Clusters, connected: Connect) -> None:
    servers = cluster(1, 1)
    spec = {**servers.spec, "chief": [servers.port()]}
    with zd.Server(spec, "chief", 0):
        assert run(connected(spec)) == [os.getpid()]


def test_strategies_share_a_cluster(cluster: Clusters, connected: Connect) -> None:
    """S-5."""
    servers = cluster(1, 1)
    first, second = connected(servers.spec), connected(servers.spec)
    assert run(first) == run(second)
    first.close()
    assert run(second) == [os.getpid()]


def test_silent_tasks_are_named_with_reason(cluster: Clusters) -> None:
    """S-3."""
    servers = cluster(2, 2)
    servers.kill("worker", 1)
    servers.kill("ps", 0)
    with pytest.raises(errors.UnavailableError) as caught:
        connect(servers.spec, timeout=4.0)  # for those that are there
    message = caught.value.message
    assert message.startswith("not all tasks of the cluster answered within 4 s: ")
    absent = (("worker:1", servers.spec["worker"][1]), ("ps:0", servers.spec["ps"][0]))
    for name, address in absent:
        port = address.rpartition(":")[2]
        assert (
            f"{name} at {address}: 127.0.0.1 is up, and no process listens on port {port}"
            in message
        )
    assert "worker:0" not in message
    assert "ps:1" not in message


def test_tasks_may_start_after_the_program(cluster: Clusters, connected: Connect) -> None:
    servers = cluster(1, 1)
    servers.kill("worker", 0)
    servers.kill("ps", 0)
    found: list[ClusterConnection] = []
    waiting = threading.Thread(target=lambda: found.append(connected(servers.spec)))
    waiting.start()
    servers.start("ps", 0)
    servers.start("worker", 0)
    waiting.join(30)
    assert run(found[0]) == [os.getpid()]


def test_mixed_up_addresses_are_named(cluster: Clusters) -> None:
    servers = cluster(1, 2)
    workers, ps = servers.spec["worker"], servers.spec["ps"]
    with pytest.raises(
        errors.FailedPreconditionError, match=r"worker:0 at .*: ps:0 at .* runs no functions"
    ):
        connect({"worker": [ps[0]], "ps": [ps[1]]}, timeout=20)
    with pytest.raises(
        errors.InvalidArgumentError,
        match=f"at {ps[1]} is ps:1, but the cluster has ps:0 at this address",
    ):
        connect({"worker": workers, "ps": [ps[1]]}, timeout=20)


def test_refused_secret_ends_the_wait(
    cluster: Clusters, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster(1, 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(errors.UnauthenticatedError):
        connect(servers.spec, timeout=20)


def test_local_cluster_is_connected() -> None:
    with zd.local_cluster(workers=2, ps=2, processes=False) as local:
        found = connect(local)
        assert (found.target, found.ps, list(found.workers)) == (local.target, local.ps, [0, 1])
        there(found, 4)
        assert run(found) == [os.getpid()]
        with pytest.raises(ValueError, match="a local_cluster starts its workers itself"):
            found.add_worker("127.0.0.1:1")
        found.close()
        assert run(local) == [os.getpid()]  # type: ignore[arg-type]


OTHER = """
import json, sys
from zmqdist.training.cluster_connection import connect
connected = connect(json.loads(sys.argv[1]))
print("connected", flush=True)
sys.stdin.read()
"""


def test_second_program_is_refused_until_first_dies(
    cluster: Clusters,
    connected: Connect,
    monkeypatch: pytest.MonkeyPatch,
    child: Callable[..., subprocess.Popen[str]],
) -> None:
    """P-5: a coordinator that was started again begins clean on the same servers."""
    servers = cluster(1, 1)
    first = child(OTHER, json.dumps(servers.spec))
    assert first.stdout is not None
    assert first.stdout.readline() == "connected\n"
    with monkeypatch.context() as hasty:
        hasty.setattr(recruitment_machine, "INVITE_PATIENCE_S", 0.3)
        with pytest.raises(errors.AlreadyExistsError) as caught:
            connected(servers.spec)
    message = f"worker:0 at {servers.spec['worker'][0]} works for another program, whose dispatcher is at 127.0.0.1:"
    assert message in caught.value.message
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    found = connected(servers.spec)
    assert run(found) == [servers.pid("worker", 0)]
    there(found, 2)


def test_program_at_old_address_takes_over(
    cluster: Clusters, connected: Connect, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """The chief's address: the worker of the former program finds a dispatcher there again."""
    servers = cluster(1, 1)
    spec = {**servers.spec, "chief": [servers.port()]}
    first = child(OTHER, json.dumps(spec))
    assert first.stdout is not None
    assert first.stdout.readline() == "connected\n"
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    port = int(spec["chief"][0].rpartition(":")[2])
    with zd.DispatchServer(zd.data.service.DispatcherConfig(port=port)) as there:
        assert there.wait_for(lambda present: ("worker", 0) in present, 20), "it comes by itself"
    found, another = connected(spec), connected(spec)
    assert found.target.endswith(f":{port}")
    assert run(found) == run(another) == [servers.pid("worker", 0)]


def test_closed_program_frees_the_servers(
    cluster: Clusters, connected: Connect, child: Callable[..., subprocess.Popen[str]]
) -> None:
    servers = cluster(1, 1)
    first = child(OTHER, json.dumps(servers.spec))
    assert first.stdout is not None
    assert first.stdout.readline() == "connected\n"
    first.communicate("")  # it ends without a close of its own
    assert run(connected(servers.spec)) == [servers.pid("worker", 0)]


def test_dropped_connection_releases_the_cluster(cluster: Clusters) -> None:
    servers = cluster(1, 1)
    found = connect(servers.spec, timeout=30)
    there(found, 2)
    del found
    gc.collect()
    eventually(
        lambda: not any("inviting" in each.name for each in threading.enumerate()),
        "its thread ends",
    )


def test_shutdown_cluster_stops_servers(cluster: Clusters) -> None:
    """CC-6."""
    servers = cluster(2, 2)
    found = connect(servers.spec, timeout=60)
    found.close(shutdown_cluster=True)
    assert servers.ended()
    with pytest.raises(errors.FailedPreconditionError, match="this cluster was closed"):
        found.remove_worker(0)


def test_start_server_serves_until_stopped(cluster: Clusters) -> None:
    """X-5."""
    servers = cluster(1, 1)
    servers.kill("ps", 0)
    resolver = zd.resolvers.SimpleClusterResolver(
        zd.ClusterSpec(servers.spec), task_type="ps", task_id=0
    )
    serving = threading.Thread(target=start_server, args=(resolver, "zmq"))
    serving.start()
    found = connect(servers.spec, timeout=30)
    assert serving.is_alive()
    found.close(shutdown_cluster=True)
    serving.join(30)
    assert not serving.is_alive()


@pytest.mark.parametrize("job", ["chief", "evaluator", None])
def test_start_server_needs_worker_or_ps(job: str | None) -> None:
    spec = zd.ClusterSpec({"worker": ["w:1"], "ps": ["p:1"], "chief": ["c:1"]})
    with pytest.raises(ValueError, match=f"Unexpected task_type to start a server: {job}"):
        start_server(zd.resolvers.SimpleClusterResolver(spec, task_type=job, task_id=0), "zmq")


class ClosedMeanwhile(threading.Event):
    """A close comes when the thread has looked whether there was one, and before it begins to look
    for news."""

    owner: worker_recruiter.WorkerRecruiter | None = None

    def clear(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.close()  # in the thread of the owner, which does not wait for itself
        super().clear()


def test_early_close_is_not_lost() -> None:
    dispatcher: Any = SimpleNamespace(address="127.0.0.1:1", watch_members=lambda fn: None)
    late = ClosedMeanwhile()
    found = worker_recruiter.WorkerRecruiter(dispatcher, Credentials(insecure=True), 1, late)
    late.owner = found
    late.set()
    eventually(
        lambda: not any(each.name == "zmqdist-inviting" for each in threading.enumerate()),
        "its thread ends",
    )


def test_inviting_thread_survives_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = threading.Semaphore(0)

    def failing(*args: Any, **how: Any) -> Any:
        tries.release()
        raise MemoryError

    monkeypatch.setattr(worker_recruiter, "ZmqClient", failing)
    monkeypatch.setattr(recruitment_machine, "AGAIN_S", 0.01)
    monkeypatch.setattr(worker_recruiter, "RECOVERY_PAUSE_S", 0.01)
    dispatcher: Any = SimpleNamespace(address="127.0.0.1:1", watch_members=lambda fn: None)
    found = worker_recruiter.WorkerRecruiter(dispatcher, Credentials(insecure=True), 1)
    try:
        found.want(0, "127.0.0.1:2")
        for _ in range(3):
            assert tries.acquire(timeout=20)
    finally:
        found.close()
    assert "workers could not be invited to this program" in caplog.text


def test_gaps_in_ps_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher would call ps:1 what the program calls ps:0."""
    (tmp_path / "cluster.yaml").write_text(
        "name: gaps\njobs:\n  worker: {count: 1}\n  ps: {tasks: {1: '127.0.0.1:1'}}\nprogram: "
        "'true'\n"
        "runtime: {dispatcher: 'zmq://127.0.0.1:1'}\n"
    )
    monkeypatch.setenv("ZMQDIST_CONFIG", str(tmp_path / "cluster.yaml"))
    with pytest.raises(ValueError, match=r"numbers 0 to 0 without gaps, not \[1\]"):
        connect(None)
