"""local_cluster: a cluster for a with-statement, in scripts, notebooks, threads and tests."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.observe.dashboard.visitor import Visitor
from tests.scheduling.work import begun, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.connection import Cluster
from zmqdist.rpc import ZmqClient, internal_client


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Check that no test leaves a folder behind, whether or not its cluster has started."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def pids(coordinator: ClusterCoordinator, count: int) -> set[int]:
    return set(coordinator.fetch([coordinator.schedule(os.getpid) for _ in range(count)]))


def test_closed_cluster_ends_work_of_coordinators(tmp_path: Path) -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        coordinator = cluster.coordinator()
        values = [coordinator.submit(waits, tmp_path) for _ in range(3)]
        eventually(lambda: bool(begun(tmp_path)), "a function has begun")
        waiting = threading.Thread(target=coordinator.wait, args=(values,))
        waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert all(isinstance(value.exception(), errors.CancelledError) for value in values)
    with pytest.raises(errors.FailedPreconditionError, match="has been closed"):
        coordinator.submit(abs, -1)


@pytest.mark.parametrize(
    "host", ["LOCALHOST.", "[::1]", "::1", "0:0:0:0:0:0:0:1", "[::ffff:127.0.0.1]", "lo"]
)
def test_host_in_any_spelling(host: str) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    with (
        zd.local_cluster(workers=1, ps=1, processes=False, host=host) as cluster,
        ClusterCoordinator(cluster) as c,
    ):
        assert c.schedule(sum, ([1, 2],)).get() == 3


@pytest.mark.parametrize("processes", [False, True])
def test_unreferenced_cluster_is_closed(processes: bool) -> None:
    """This happens when a cell of a notebook that makes a cluster is run again."""
    cluster = zd.local_cluster(workers=1, processes=processes)
    with ClusterCoordinator(cluster) as coordinator:
        del cluster  # its coordinator refers to it
        gc.collect()
        assert coordinator.schedule(int).get(20) == 0
        address = coordinator.target.removeprefix("zmq://").rpartition(":")
    del coordinator
    gc.collect()

    def refused() -> bool:
        try:
            socket.create_connection((address[0], int(address[2]))).close()
        except ConnectionRefusedError:
            return True
        return False

    eventually(refused, "the dispatcher has ended")
    eventually(
        lambda: (
            not any(item.name == "zmqdist-local-cluster-close" for item in threading.enumerate())
        ),
        "all has ended",
    )


@pytest.mark.processes("local cluster")
def test_functions_run_in_processes_of_their_own() -> None:
    with (
        zd.local_cluster(workers=1, slots=2) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        assert cluster.dispatcher.num_workers == 1
        assert os.getpid() not in pids(coordinator, 4)
        assert cluster.target == cluster.dispatcher.target
        assert cluster.spec.as_dict() == {"dispatcher": [cluster.dispatcher.address]}


def test_functions_run_in_threads_without_processes() -> None:
    with (
        zd.local_cluster(workers=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        assert cluster.dispatcher.num_workers == 2
        assert pids(coordinator, 4) == {os.getpid()}
        with pytest.raises(
            ValueError, match="has no process worker:0; the number of its worker processes is 0"
        ):
            cluster.kill_worker(0)
        with pytest.raises(
            ValueError, match="has no process ps:0; the number of its ps processes is 0"
        ):
            cluster.restart_ps(0)


def test_killed_worker_lost_and_replaceable() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        (before,) = pids(coordinator, 1)
        cluster.kill_worker(0)
        eventually(lambda: cluster.dispatcher.num_workers == 0, "the loss is noticed")
        value = coordinator.schedule(os.getpid)
        assert cluster.add_worker() == 1
        assert value.get(20) != before
        assert cluster.dispatcher.num_workers == 1


def test_restarted_ps_keeps_address() -> None:
    with zd.local_cluster(workers=1, ps=2) as cluster:
        assert cluster.spec.as_dict() == {
            "dispatcher": [cluster.dispatcher.address],
            "ps": cluster.ps,
        }

        def about(index: int) -> dict[str, Any]:
            security = cluster.credentials.client(cluster.ps[index], "submit")
            with ZmqClient(cluster.ps[index], security=security) as client:
                matches: dict[str, Any] = internal_client.start(client, "server.about").get_value()
                return matches

        before = about(1)
        assert (before["task"], about(0)["task"]) == ("ps:1", "ps:0")
        cluster.kill_ps(1)
        with (
            pytest.raises(ConnectionRefusedError),
            socket.create_connection(cluster.ps[1].split(":")),
        ):  # type: ignore[arg-type]
            pass
        cluster.restart_ps(1)
        after = about(1)
        assert (after["task"], after["address"]) == ("ps:1", before["address"])
        assert after["pid"] != before["pid"]
        with pytest.raises(
            ValueError, match="has no process ps:2; the number of its ps processes is 2"
        ):
            cluster.kill_ps(2)


def test_restarted_worker_keeps_index() -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        rows = {row.name: row.pid for row in cluster.dispatcher.snapshot().workers}
        cluster.restart_worker(0)
        again = {row.name: row.pid for row in cluster.dispatcher.snapshot().workers}
        assert (again["worker:1"], len(again)) == (rows["worker:1"], 2)
        assert again["worker:0"] != rows["worker:0"]
        assert coordinator.schedule(sum, ([1, 2],)).get(20) == 3


@pytest.mark.killed("local cluster")
def test_work_of_a_worker_that_is_killed_runs_elsewhere(tmp_path: Path) -> None:
    def run(index: int) -> int:
        """Do not return at the first start of each index, so that the function ends with its
        process."""
        try:
            (tmp_path / str(index)).touch(exist_ok=False)
        except FileExistsError:
            return index
        threading.Event().wait()
        return -1

    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        first = coordinator.schedule(run, (0,))
        eventually(lambda: (tmp_path / "0").exists(), "it has begun")
        (row,) = [row for row in cluster.dispatcher.snapshot().workers if row.leases]
        cluster.kill_worker(int(row.name.partition(":")[2]))
        assert first.get(20) == 0


def test_two_clusters_in_one_process_are_separate() -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as single,
        zd.local_cluster(workers=1, processes=False) as peer,
    ):
        with ClusterCoordinator(single) as first, ClusterCoordinator(peer) as second:
            assert first.schedule(int, ("1",)).get(20) + second.schedule(int, ("2",)).get(20) == 3
        mixed = Cluster(single.target, peer.credentials)
        with pytest.raises(errors.UnauthenticatedError), ClusterCoordinator(mixed) as stranger:
            stranger.schedule(int).get(20)


def test_cluster_in_a_thread() -> None:
    matches: list[Any] = []

    def run() -> None:
        with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
            matches.append(coordinator.schedule(sum, ([1, 2],)).get())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert matches == [3]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ps": -1}, errors.InvalidArgumentError, "ps is -1, wants a number, 0 or more"),
    ({"workers": -1}, errors.InvalidArgumentError, "workers is -1, wants a number, 0 or more"),
    ({"workers": "2"}, errors.InvalidArgumentError, "workers is '2', wants a number"),
    ({"slots": 0}, errors.InvalidArgumentError, "slots is 0, wants 1 to 4096"),
    ({"lease_s": 0}, errors.InvalidArgumentError, "lease_s is 0, wants more than 0 s"),
    ({"leases": 1}, TypeError, "leases"),
    (
        {"host": "192.0.2.1"},
        errors.UnknownError,
        r"could not bind 192\.0\.2\.1:0: Cannot assign requested address",
    ),
]


@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=[str(row[0]) for row in BAD])
def test_impossible_arguments_are_refused(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        zd.local_cluster(**options)


def test_used_port_error_says_so() -> None:
    with zd.DispatchServer() as peer:
        port = int(peer.address.rpartition(":")[2])
        with pytest.raises(
            errors.UnknownError, match=f"could not bind 127.0.0.1:{port}: Address already in use"
        ):
            zd.local_cluster(port=port)


def test_worker_dead_at_start_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    text = (
        r"worker:0 ended before it had registered \(exit code 1\); its reason is on standard error"
    )
    with pytest.raises(errors.UnavailableError, match=text):
        zd.local_cluster(workers=1)


def test_dashboard_of_the_cluster_has_a_new_link_each_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with zd.local_cluster(workers=1, processes=False, dashboard=True) as cluster:
        links = {cluster.dashboard_url, cluster.dashboard_url}
        for link in links:
            visitor = Visitor(str(link))
            with visitor.stream(visitor.token()) as messages:
                assert next(messages)["facts"]["pid"] == os.getpid()
    assert len(links) == 2
    assert capfd.readouterr().err.startswith("dashboard: http://127.0.0.1:")


def test_cluster_without_dashboard_has_no_link() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        assert cluster.dashboard_url is None


def test_closed_cluster_has_no_link() -> None:
    with zd.local_cluster(workers=0, processes=False, dashboard=True) as cluster:
        pass
    assert cluster.dashboard_url is None


def test_closed_cluster_refuses_calls() -> None:
    with zd.local_cluster(workers=0, ps=1, processes=False) as cluster:
        pass
    uses = (
        ClusterCoordinator,
        zd.ParameterServerStrategy,
        lambda single: single.kill_ps(0),
        lambda single: single.add_worker(),
    )
    for use in uses:
        with pytest.raises(
            errors.FailedPreconditionError, match="this local_cluster has been closed"
        ):
            use(cluster)


def test_close_may_be_called_twice() -> None:
    cluster = zd.local_cluster(workers=1, processes=False)
    cluster.close()
    cluster.close()
