"""One object for each kind of cluster: what `connect` and `local_cluster` return has the same
attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.launch.helpers import FILE, UNTIL_END_FILE, Launched, eventually
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


def test_cluster_kinds_share_attributes(local: zd.local_cluster, connected: Cluster) -> None:
    public = {name for name in dir(connected) if not name.startswith("_")}
    assert public == {
        "cancel_on_interrupt",
        "close",
        "config",
        "coordinator",
        "credentials",
        "dashboard_url",
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


def test_cluster_kinds_agree_on_status(local: zd.local_cluster, connected: Cluster) -> None:
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


def test_address_with_or_without_scheme(connected: Cluster) -> None:
    with zd.connect(connected.target.removeprefix("zmq://")) as again:
        assert again.target == connected.target


def test_closed_connection_refuses_calls(local: zd.local_cluster, connected: Cluster) -> None:
    connected.close()
    connected.close()
    for call in (lambda: connected.workers, connected.status, lambda: connected.scale(3)):
        with pytest.raises(errors.FailedPreconditionError, match=r"zmq://.* has been closed"):
            call()
    assert repr(connected) == f"<Cluster at {local.target}, closed>"
    assert local.workers == 2


def test_program_has_token_of_own_local_cluster() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        address = cluster.target.replace("zmq://localhost", "127.0.0.1")
        with zd.Executor(cluster.target) as executor, zd.ClusterCoordinator(address) as coordinator:
            assert executor.submit(add, 1, 2).result() == 3
            assert coordinator.submit(add, 1, 2).result() == 3
        service = zd.data.service.distribute("distributed_epoch", cluster.target)
        assert sorted(map(int, zd.data.Dataset.range(3).apply(service))) == [0, 1, 2]


def test_closed_cluster_ends_strategy_coordinator() -> None:
    local = zd.local_cluster(workers=1, ps=1, processes=False)
    strategy = zd.ParameterServerStrategy(local)
    coordinator, executor = strategy.coordinator, zd.Executor(strategy)
    local.close()
    with pytest.raises(errors.FailedPreconditionError, match="has been closed"):
        coordinator.submit(add, 1, 2)
    with pytest.raises(RuntimeError, match="local_cluster of this executor has been closed"):
        executor.submit(add, 1, 2)
    strategy.close()


def test_scale_refused_without_launcher() -> None:
    with zd.DispatchServer() as dispatcher, zd.connect(dispatcher.target) as connected:
        with pytest.raises(errors.FailedPreconditionError, match=NO_LAUNCHER[:40]):
            connected.scale(3)
        with pytest.raises(errors.InvalidArgumentError, match="count is -1, wants a number"):
            connected.scale(-1)


def test_strategy_at_address_has_no_ps(connected: Cluster) -> None:
    with pytest.raises(ValueError, match="what connect returned for a cluster file with ps"):
        zd.ParameterServerStrategy(connected)


WRONG: list[tuple[str, type[Exception], str]] = [
    ("nowhere", ValueError, "'nowhere' is not an address.*wanted"),
    ("grpc://host:1", ValueError, "wanted"),
    ("missing.yaml", errors.ConfigError, "missing.yaml:1: .file.: cannot be read: No such file"),
]


@pytest.mark.parametrize(("target", "kind", "text"), WRONG, ids=[row[0] for row in WRONG])
def test_bad_target_error_names_valid_forms(target: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        zd.connect(target)


def test_missing_target_error_has_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZMQDIST_CONFIG", raising=False)
    with pytest.raises(ValueError, match="ZMQDIST_CONFIG names no running cluster"):
        zd.connect()


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_silent_address_error_in_time(timeout: float) -> None:
    address = free_address()
    with pytest.raises(
        errors.UnavailableError,
        match=f"no dispatcher answered at {address} within .* is it running",
    ):
        zd.connect(address, timeout=timeout)


def test_rpc_server_is_no_dispatcher() -> None:
    with zd.rpc.Server.create("zmq", "127.0.0.1:0") as server:  # noqa: SIM117
        with pytest.raises(
            errors.FailedPreconditionError, match=f"the server at {server.address} is no dispatcher"
        ):
            zd.connect(server.address)


def test_local_cluster_grows_and_shrinks() -> None:
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        cluster.scale(3)
        assert cluster.workers == 3
        eventually(
            lambda: coordinator.workers() == ["worker:0", "worker:1", "worker:2"],
            "the coordinator hears of it",
        )
        pid = cluster.pids["worker:2"]
        cluster.kill_worker(1)
        assert cluster.workers == 3  # a lost worker still counts
        cluster.scale(1)
        assert (cluster.workers, list(cluster.pids)) == (1, ["worker:0"])
        eventually(
            lambda: not Path(f"/proc/{pid}").exists(),
            "the process of a worker that has left ends",
        )
        cluster.scale(2)
        eventually(
            lambda: coordinator.workers() == ["worker:0", "worker:1"], "the index is used again"
        )
        assert coordinator.schedule(abs, (-1,), worker=1).fetch() == 1


def test_local_cluster_protects_kept_value() -> None:
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
def test_invalid_size_is_refused(local: zd.local_cluster, count: object) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=f"count is {count!r}, wants a number, 0 or more"
    ):
        local.scale(count)  # type: ignore[arg-type]


def test_launched_cluster_found_by_file(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    job = launch(
        UNTIL_END_FILE, file=FILE.replace("count: 2", "count: 1") + "security: {results: safe}\n"
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
