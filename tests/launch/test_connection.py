"""One object for each kind of cluster: what `connect` and `local_cluster` return has the same
attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.launch.launched import FILE, UNTIL_TOLD, Launched, eventually
from tests.ports import free_address
from zmqdist import errors
from zmqdist.launch.connection import Cluster
from zmqdist.scheduling.dispatcher.runtime import NO_LAUNCHER

Launcher = Callable[..., Launched]


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(scope="module")
def local() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2, processes=False) as cluster:
        cluster.status()  # the connection that this makes stays until the end
        yield cluster


@pytest.fixture
def connected(local: zd.local_cluster) -> Iterator[Cluster]:
    with zd.connect(local.target) as cluster:
        yield cluster


def test_both_kinds_have_the_same_attributes(local: zd.local_cluster, connected: Cluster) -> None:
    public = {name for name in dir(connected) if not name.startswith("_")}
    assert public == {
        "close",
        "config",
        "coordinator",
        "credentials",
        "scale",
        "status",
        "target",
        "workers",
    }
    assert public <= set(dir(local))
    for name in ("scale", "coordinator", "status", "close"):
        assert list(inspect.signature(getattr(local, name)).parameters) == list(
            inspect.signature(getattr(connected, name)).parameters
        ), name


def test_both_say_the_same_of_one_cluster(local: zd.local_cluster, connected: Cluster) -> None:
    assert connected.workers == local.workers == 2
    assert connected.status().keys() == local.status().keys()
    names = [[row["name"] for row in cluster.status()["workers"]] for cluster in (local, connected)]
    assert names == [["worker:0", "worker:1"]] * 2


def test_coordinators_and_executors_take_a_connection(connected: Cluster) -> None:
    with (
        connected.coordinator(cancel_grace_s=1.0) as coordinator,
        zd.Executor(connected) as executor,
    ):
        assert coordinator.schedule(add, (1, 2)).fetch() == 3
        assert executor.submit(add, 3, 4).result() == 7


def test_a_connection_may_be_an_address_with_or_without_scheme(connected: Cluster) -> None:
    with zd.connect(connected.target.removeprefix("zmq://")) as again:
        assert again.target == connected.target


def test_a_closed_connection_leaves_the_cluster_and_refuses_calls(
    local: zd.local_cluster, connected: Cluster
) -> None:
    connected.close()
    connected.close()
    for call in (lambda: connected.workers, connected.status, lambda: connected.scale(3)):
        with pytest.raises(errors.FailedPreconditionError, match=r"zmq://.* has been closed"):
            call()
    assert repr(connected) == f"<Cluster at {local.target}, closed>"
    assert local.workers == 2


def test_a_program_has_the_token_of_its_own_local_cluster() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        address = cluster.target.replace("zmq://localhost", "127.0.0.1")
        with zd.Executor(cluster.target) as executor, zd.ClusterCoordinator(address) as coordinator:
            assert executor.submit(add, 1, 2).result() == 3
            assert coordinator.submit(add, 1, 2).result() == 3
        service = zd.data.service.distribute("distributed_epoch", cluster.target)
        assert sorted(map(int, zd.data.Dataset.range(3).apply(service))) == [0, 1, 2]


def test_a_local_cluster_that_closes_ends_the_coordinator_and_executors_of_its_strategy() -> None:
    local = zd.local_cluster(workers=1, ps=1, processes=False)
    strategy = zd.ParameterServerStrategy(local)
    coordinator, executor = strategy.coordinator, zd.Executor(strategy)
    local.close()
    with pytest.raises(errors.FailedPreconditionError, match="has been closed"):
        coordinator.submit(add, 1, 2)
    with pytest.raises(RuntimeError, match="local_cluster of this executor has been closed"):
        executor.submit(add, 1, 2)
    strategy.close()


def test_a_dispatcher_without_launcher_refuses_to_scale() -> None:
    with zd.DispatchServer() as dispatcher, zd.connect(dispatcher.target) as connected:
        with pytest.raises(errors.FailedPreconditionError, match=NO_LAUNCHER[:40]):
            connected.scale(3)
        with pytest.raises(errors.InvalidArgumentError, match="count is -1, wants a number"):
            connected.scale(-1)


def test_a_strategy_says_that_an_address_alone_names_no_ps(connected: Cluster) -> None:
    with pytest.raises(ValueError, match="what connect returned for a cluster file with ps"):
        zd.ParameterServerStrategy(connected)


WRONG: list[tuple[str, type[Exception], str]] = [
    ("nowhere", ValueError, "'nowhere' is not an address.*wanted"),
    ("grpc://host:1", ValueError, "wanted"),
    ("missing.yaml", errors.ConfigError, "missing.yaml:1: .file.: cannot be read: No such file"),
]


@pytest.mark.parametrize(("place", "kind", "told"), WRONG, ids=[row[0] for row in WRONG])
def test_what_is_no_place_is_an_error_that_says_what_is(
    place: str, kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        zd.connect(place)


def test_without_argument_and_environment_the_error_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZMQDIST_CONFIG", raising=False)
    with pytest.raises(ValueError, match="ZMQDIST_CONFIG names no running cluster"):
        zd.connect()


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_nothing_that_listens_is_an_error_in_time(timeout: float) -> None:
    address = free_address()
    with pytest.raises(
        errors.UnavailableError,
        match=f"no dispatcher answered at {address} within .* is it running",
    ):
        zd.connect(address, timeout=timeout)


def test_another_server_is_not_taken_for_a_dispatcher() -> None:
    with zd.rpc.Server.create("zmq", "127.0.0.1:0") as server:  # noqa: SIM117
        with pytest.raises(
            errors.FailedPreconditionError, match=f"the server at {server.address} is no dispatcher"
        ):
            zd.connect(server.address)


def test_a_local_cluster_of_processes_grows_shrinks_and_counts_what_it_is_to_have() -> None:
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        cluster.scale(3)
        assert cluster.workers == 3
        eventually(
            lambda: coordinator.workers() == ["worker:0", "worker:1", "worker:2"],
            "the coordinator hears of it",
        )
        gone = cluster.pids["worker:2"]
        cluster.kill_worker(1)
        assert cluster.workers == 3  # a lost worker still counts
        cluster.scale(1)
        assert (cluster.workers, list(cluster.pids)) == (1, ["worker:0"])
        eventually(
            lambda: not Path(f"/proc/{gone}").exists(), "the process of a worker that has left ends"
        )
        cluster.scale(2)
        eventually(
            lambda: coordinator.workers() == ["worker:0", "worker:1"], "the index is used again"
        )
        assert coordinator.schedule(abs, (-1,), worker=1).fetch() == 1


def test_a_local_cluster_refuses_to_lose_a_kept_value() -> None:
    with (
        zd.local_cluster(workers=2, processes=False) as cluster,
        cluster.coordinator() as coordinator,
    ):
        _kept = coordinator.schedule(bytes, (100_000,), worker=1, keep=True)
        coordinator.join()
        with pytest.raises(errors.DrainRefusedError, match="worker:1"):
            cluster.scale(1)
        assert cluster.workers == 2
        cluster.scale(1, force=True)
        assert cluster.workers == 1


@pytest.mark.parametrize("count", [-1, 1.5, "2"])
def test_a_size_that_is_none_is_refused(local: zd.local_cluster, count: object) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=f"count is {count!r}, wants a number, 0 or more"
    ):
        local.scale(count)  # type: ignore[arg-type]


def test_a_launched_cluster_is_found_by_its_file_and_can_be_scaled(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launch(
        UNTIL_TOLD, file=FILE.replace("count: 2", "count: 1") + "security: {results: safe}\n"
    )
    job.saw("it runs")
    monkeypatch.setenv("TMPDIR", str(job.temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    with zd.connect(job.process_folder / "cluster.yaml") as cluster:
        assert getattr(cluster.config, "name", None) == "test"
        cluster.scale(2)
        assert (cluster.workers, len(cluster.status()["workers"])) == (2, 2)
        cluster.scale(1)
        assert (cluster.workers, len(cluster.status()["workers"])) == (1, 1)
        with cluster.coordinator() as coordinator:
            assert coordinator.schedule(abs, (-3,)).fetch() == 3
            with pytest.raises(errors.OpError, match="results"):
                # the file's `results: safe` prevails
                coordinator.schedule(range, (3,)).fetch()
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    with pytest.raises(
        errors.NotFoundError, match=r"no cluster 'test' of .* runs on this host: start it with"
    ):
        zd.connect(job.process_folder / "cluster.yaml")
