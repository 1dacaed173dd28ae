"""`Recovery`, with parameter servers that are killed for real, and checkpoints of variables that
live there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.helpers import shards_of
from zmqdist.checkpoint import Checkpoint, CheckpointManager, Recovery
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.errors import PSUnavailableError
from zmqdist.training.sessions import StrategySession
from zmqdist.variables.client import PsCall, PsClient, client_of

pytestmark = pytest.mark.shares_cluster

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
HALVES = zd.partitioners.FixedShardsPartitioner(2)
ADAM = zd.optimizers.Adam(0.1)
PATIENCE_S = 60.0

Make = Callable[..., zd.ParameterServerStrategy]


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    """One worker and two parameter servers, each a process."""
    with zd.local_cluster(workers=1, ps=2) as cluster:
        yield cluster


@pytest.fixture
def make(cluster: zd.local_cluster) -> Iterator[Make]:
    """make(partitioner, **options): a strategy; closed at the end."""
    made: list[zd.ParameterServerStrategy] = []

    def make(
        partitioner: Any = None, recovery_s: float = PATIENCE_S, **options: Any
    ) -> zd.ParameterServerStrategy:
        made.append(
            zd.ParameterServerStrategy(cluster, partitioner, recovery_s=recovery_s, **options)
        )
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


def restarted(cluster: zd.local_cluster, ps: int) -> None:
    cluster.kill_ps(ps)
    cluster.restart_ps(ps)


def states(variable: Any) -> list[dict[str, Any]]:
    """Value, version and slots of each shard."""
    parts = [shard.read() for shard in shards_of(variable)]
    return [
        {
            "value": part.value.tolist(),
            "version": part.version,
            **{k: v.tolist() for k, v in part.slots.items()},
        }
        for part in parts
    ]


# -- saved from parameter servers and restored there: testCheckpoint, direct and delayed, into other


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("delayed", [False, True])
def test_checkpoint_of_variables_at_ps(
    make: Make, tmp_path: Path, before: int, after: int, delayed: bool
) -> None:
    fixed = zd.partitioners.FixedShardsPartitioner
    with make(fixed(before)).scope():
        source = zd.Variable(ROWS, name="table")
    source.apply(ADAM, np.ones_like(ROWS))
    path = Checkpoint(table=source).save(str(tmp_path / "c"))
    with make(fixed(after)).scope():
        target = zd.Variable(np.zeros_like(ROWS), name="other")
    assert len(shards_of(target)) == after
    if delayed:
        checkpoint = Checkpoint().restore(path)
        checkpoint.table = target
    else:
        checkpoint = Checkpoint(table=target).restore(path)
    checkpoint.assert_consumed()
    for each in (source, target):
        each.apply(ADAM, np.full_like(ROWS, 0.5))  # the slots are there, too
    assert target.numpy().tolist() == source.numpy().tolist()


# -- recovery --------------------------------------------------------------------------------------


@pytest.mark.processes("checkpoint and recovery")
@pytest.mark.killed("checkpoint and recovery")
def test_killed_ps_gets_saved_values_back(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make(HALVES)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        # ps:0 and ps:1, ps:0
        table, bias = zd.Variable(ROWS, name="table"), zd.Variable(np.float32(1), name="bias")
    manager = CheckpointManager(Checkpoint(model={"table": table}, bias=bias), str(tmp_path))
    with Recovery(strategy, manager):
        for _ in range(3):
            table.apply(ADAM, np.ones_like(ROWS))
        saved = states(table) + states(bias)
        path = manager.save()
        for _ in range(2):
            table.apply(ADAM, np.ones_like(ROWS))
            bias.assign_add(10)
        later = states(table)
        restarted(cluster, 0)
        found = states(table) + states(bias)
        for each, before in ((found[0], saved[0]), (found[2], saved[2])):  # those of ps:0
            assert each.pop("version") >= before.pop("version")
            assert each == before
        assert found[1] == later[1]  # ps:1 was not touched

        def step(table: Any, bias: Any) -> float:
            table.apply(ADAM, np.ones_like(ROWS))
            return float(bias.assign_add(1).numpy())

        assert coordinator.schedule(step, args=(table, bias)).fetch(timeout=PATIENCE_S) == 2.0
    [recovered] = strategy.recoveries
    assert (recovered.task, recovered.path, recovered.lost) == ("ps:0", path, ())
    assert sorted(recovered.restored) == ["bias", "table/part_0"]
    assert recovered.updates_lost <= 4
    assert str(recovered).startswith(f"ps:0 came back; restored 2 variables from {path}, ")
    assert str(recovered).endswith(" lost")


def test_functions_wait_for_lost_variables(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = zd.Variable(np.int64(40), name="count")
    manager = CheckpointManager({"count": count}, str(tmp_path))
    manager.save()
    count.assign_add(5)
    with Recovery(strategy, manager):
        cluster.kill_ps(0)
        values = [coordinator.schedule(lambda: count.assign_add(1) and None) for _ in range(10)]
        cluster.restart_ps(0)
        coordinator.join(timeout=PATIENCE_S)
        assert count.numpy() == 50
        assert [value.fetch() for value in values] == [None] * 10


def _counter(
    strategy: zd.ParameterServerStrategy, folder: Path
) -> tuple[zd.Variable, CheckpointManager]:
    with strategy.scope():
        count = zd.Variable(np.int64(0), name="count")
    return count, CheckpointManager({"count": count}, str(folder))


@pytest.mark.parametrize("saved_by", ["this program", "another program"])
def test_lost_updates_are_counted(
    cluster: zd.local_cluster, make: Make, tmp_path: Path, saved_by: str
) -> None:
    """The versions of a checkpoint that another program saved say nothing of those here, also where
    they are higher."""
    strategy = make()
    if saved_by == "this program":
        count, manager = _counter(strategy, tmp_path)
        saved = 0
    else:
        count, manager = _counter(make(), tmp_path)
        saved = 50
        for _ in range(saved):
            count.assign_add(1)
    manager.save()
    if saved:
        count, manager = _counter(strategy, tmp_path)
    for _ in range(7):
        count.assign_add(1)
    with Recovery(strategy, manager):
        restarted(cluster, 0)  # before any look: the program knows what it has done itself
        assert count.numpy() == saved
    assert strategy.recoveries[0].updates_lost == 7
    assert str(strategy.recoveries[0]).endswith("; at least 7 later updates are lost")


@pytest.mark.parametrize("failures", [0, 1])
def test_lost_updates_are_counted_despite_reads(
    cluster: zd.local_cluster,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
) -> None:
    """Also if an attempt to recover fails after the program has read the variable."""
    left = [OSError("a planted failure")] * failures
    strategy = make()
    count, manager = _counter(strategy, tmp_path)
    manager.save()
    for _ in range(7):
        count.assign_add(1)
    create = PsClient.create

    def create_and_read(client: PsClient, *args: Any) -> PsCall:
        created = create(client, *args)
        created.get_value()
        assert count.numpy() == 0
        if left:
            raise left.pop()
        return created

    monkeypatch.setattr(PsClient, "create", create_and_read)
    with Recovery(strategy, manager):
        restarted(cluster, 0)
        assert count.numpy() == 0
        eventually(lambda: bool(strategy.recoveries), "the recovery is reported")
    assert strategy.recoveries[0].updates_lost == 7


def test_lost_updates_of_workers_are_counted(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make()
    count, manager = _counter(strategy, tmp_path)
    manager.save()
    coordinator = ClusterCoordinator(strategy)
    for _ in range(7):
        coordinator.schedule(lambda: count.assign_add(1) and None)
    coordinator.join(PATIENCE_S)
    with Recovery(strategy, manager) as recovery:
        eventually(
            lambda: recovery.snapshot().versions == {"count": 8},
            "the last version is seen",
            PATIENCE_S,
        )
        restarted(cluster, 0)
        assert count.numpy() == 0
    assert strategy.recoveries[0].updates_lost == 7


def test_version_never_comes_again(cluster: zd.local_cluster, make: Make, tmp_path: Path) -> None:
    """Neither those up to the last look, nor those that the server had counted after it, nor one of
    the first value."""
    strategy = make()
    with strategy.scope():
        # ps:0, ps:1
        saved, anew = zd.Variable(np.int64(0), name="saved"), zd.Variable(np.int64(0), name="anew")
    manager = CheckpointManager({"saved": saved}, str(tmp_path))
    manager.save()
    seen = [set[int](), set[int]()]
    with Recovery(strategy, manager, from_initial=True):
        for _ in range(2):
            for variable, versions in zip((saved, anew), seen, strict=True):
                for _ in range(3):
                    variable.assign_add(1)
                    versions.add(variable.version)
            restarted(cluster, 0)
            restarted(cluster, 1)
            for variable, versions in zip((saved, anew), seen, strict=True):
                assert variable.numpy() == 0
                assert variable.version > max(versions)
                assert not any(
                    variable.compare_and_set(77, version=version) for version in versions
                )


def test_once_counts_once_across_a_recovery(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    """The function is tried again when the server has its variable back from a checkpoint which has
    the first try."""
    strategy = make()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = zd.Variable(np.int64(0), name="count")
        lost = zd.Variable(np.int64(0), name="lost")  # at ps:1
    begun, again = tmp_path / "begun", tmp_path / "again"

    def step() -> None:
        count.assign_add(1)
        count.numpy()  # the update has arrived
        if not begun.exists():
            begun.touch()
            while not again.exists() and not zd.cancelled():
                threading.Event().wait(0.01)
            raise OSError("the first time")

    manager = CheckpointManager({"count": count, "lost": lost}, str(tmp_path / "checkpoints"))
    with Recovery(strategy, manager):
        coordinator.schedule(step, once=True, retries=1)
        eventually(begun.exists, "the first try has counted", PATIENCE_S)
        manager.save()
        restarted(cluster, 0)
        assert count.numpy() == 1
        again.touch()
        coordinator.join(PATIENCE_S)
        assert count.numpy() == 1


class Recoveries(list[Any]):
    """Of a strategy; `told` is set when there is one."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def append(self, recovered: Any) -> None:
        super().append(recovered)
        self.told.set()


def test_unsaved_variable_is_lost_or_begins_anew(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make(recovery_s=1.0)
    recoveries = strategy.recoveries = Recoveries()
    with strategy.scope():
        v = zd.Variable(np.float32(3), name="v")
        other = zd.Variable(np.float32(4), name="other")  # at ps:1
    manager = CheckpointManager({"v": v}, str(tmp_path))
    with Recovery(strategy, manager):
        restarted(cluster, 0)
        assert recoveries.told.wait(PATIENCE_S)
        with pytest.raises(PSUnavailableError, match="'v' on ps:0"):
            v.numpy()
    assert other.numpy() == 4
    assert str(recoveries[0]).startswith(
        "ps:0 came back; lost, because the newest usable checkpoint does not hold them: v; "
    )


def test_initial_values_need_recovery_s(make: Make, tmp_path: Path) -> None:
    strategy = make(recovery_s=0.0)
    with pytest.raises(ValueError, match="from_initial=True needs a strategy with recovery_s"):
        Recovery(strategy, CheckpointManager({"n": 1}, str(tmp_path)), from_initial=True)


def test_variable_begins_with_first_value(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make()
    with strategy.scope():
        v = zd.Variable(np.float32(3), name="v")
        made = zd.Variable(
            lambda: np.full(2, 7, np.float32), shape=(2,), dtype=np.float32, name="made"
        )
        late = zd.Variable(np.float32(5), name="late")
    v.assign_add(1)
    manager = CheckpointManager({"v": v}, str(tmp_path))
    manager.save()
    v.assign_add(1)
    late.assign_add(1)
    with Recovery(strategy, manager, from_initial=True):
        restarted(cluster, 0)
        assert v.numpy() == 4
        assert late.numpy() == 5
        restarted(cluster, 1)
        assert made.numpy().tolist() == [7, 7]
    assert [(each.task, each.restored, each.began_anew) for each in strategy.recoveries] == [
        ("ps:0", ("v",), ("late",)),
        ("ps:1", (), ("made",)),
    ]


def test_failed_save_leaves_former_checkpoint(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make(HALVES, recovery_s=0.0)
    with strategy.scope():
        table = zd.Variable(ROWS, name="table")
    manager = CheckpointManager({"table": table}, str(tmp_path))
    manager.save()
    cluster.kill_ps(1)
    with pytest.raises(PSUnavailableError, match="'table/part_1' on ps:1"):
        manager.save()
    cluster.restart_ps(1)
    assert [each.name for each in tmp_path.iterdir()] == ["ckpt-1"]
    again = make(HALVES)  # as a program that is started again does
    with again.scope():
        table = zd.Variable(0 * ROWS, name="table")
    assert CheckpointManager({"table": table}, str(tmp_path)).restore_or_initialize() == str(
        tmp_path / "ckpt-1"
    )
    assert table.numpy().tolist() == ROWS.tolist()


def test_synchronous_steps_go_on_after_recovery(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make(aggregate="sync", workers_per_step=2)
    with strategy.scope():
        v = zd.Variable(np.zeros(2, np.float32), name="v")

    def step(number: int) -> None:
        with ThreadPoolExecutor(2) as workers:
            list(
                workers.map(
                    lambda grad: v.apply(
                        zd.optimizers.SGD(1.0), np.float32([grad, grad]), step=number
                    ),
                    [1, 3],
                )
            )

    manager = CheckpointManager({"v": v}, str(tmp_path))
    with Recovery(strategy, manager):
        step(0)
        step(1)
        manager.save()
        step(2)
        restarted(cluster, 0)
        step(3)
        assert v.numpy().tolist() == [-6, -6]


def test_closed_strategy_is_not_watched(
    cluster: zd.local_cluster, make: Make, tmp_path: Path
) -> None:
    strategy = make()
    with strategy.scope():
        v = zd.Variable(np.float32(1), name="v")
    recovery = Recovery(strategy, CheckpointManager({"v": v}, str(tmp_path)))
    strategy.close()
    eventually(lambda: not recovery.snapshot().watching, "the threads end", PATIENCE_S)
    with zd.ParameterServerStrategy(cluster):
        about = client_of(cluster.ps[0]).status().get_value()
    assert strategy.session not in {each["session"] for each in about["variables"]}
    recovery.close()


def test_damaged_checkpoint_is_skipped(
    cluster: zd.local_cluster, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = make()
    with strategy.scope():
        v = zd.Variable(np.float32(1), name="v")
    manager = CheckpointManager({"v": v}, str(tmp_path))
    manager.save()
    v.assign(2)
    newest = Path(manager.save())
    [file] = newest.glob("*.npz")
    file.write_bytes(b"")
    with Recovery(strategy, manager):
        restarted(cluster, 0)
        assert v.numpy() == 1
    assert "an older one is tried: " in caplog.text
    assert strategy.recoveries[0].path == str(tmp_path / "ckpt-1")


def test_checkpoints_of_other_models_are_skipped(
    cluster: zd.local_cluster, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose rows would fit: of a larger table, or of another dtype."""
    strategy = make()
    with strategy.scope():
        table = zd.Variable(ROWS, name="table")
    manager = CheckpointManager({"table": table}, str(tmp_path), max_to_keep=None)
    path = manager.save()
    others = [np.zeros((9, 2), np.float32), np.zeros((6, 2)), np.zeros(12, np.float32)]
    for other in others:
        CheckpointManager({"table": other}, str(tmp_path), max_to_keep=None).save()
    with Recovery(strategy, manager):
        restarted(cluster, 0)
        assert table.numpy().tolist() == ROWS.tolist()
    [recovered] = strategy.recoveries
    assert recovered.path == path
    assert caplog.text.count("an older one is tried: 'table' has shape (6, 2)") == len(others)


def test_repeated_failure_is_logged_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = make()
    looks = threading.Semaphore(0)

    def fails(_session: StrategySession, ps: int) -> bool:
        looks.release()
        raise RuntimeError(f"no luck with ps:{ps}")

    monkeypatch.setattr(StrategySession, "open_at", fails)
    with Recovery(strategy, CheckpointManager({"n": 1}, str(tmp_path))):
        for _ in range(6):
            assert looks.acquire(timeout=PATIENCE_S)
    logged = [
        record.message for record in caplog.records if "could not be restored" in record.message
    ]
    assert len(logged) == 2  # of ps:0, and of ps:1
