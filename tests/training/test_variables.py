"""Variables: what they are, how they are read and changed, from the program and in scheduled
functions; what does not fit."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.scheduling.work import begun, go, until, waits
from tests.training.conftest import Cluster
from zmqdist import errors, optimizers
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.training import sessions
from zmqdist.variables import client
from zmqdist.wire import trusted

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them


@pytest.fixture(params=["here", "at a server"])
def make(request: pytest.FixtureRequest, strategy: zd.ParameterServerStrategy) -> Any:
    """make(initial_value, ...): a variable of this process, and one of a parameter server."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if request.param == "here":
            return zd.Variable(*args, **kwargs)
        with strategy.scope():
            return zd.Variable(*args, **kwargs)

    return make


# -- what a variable cannot hold -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (np.array([1, 300]), np.int8, "is of int8, which cannot hold 300"),
        (lambda: np.array([1, 300]), np.int8, "is of int8, which cannot hold 300"),
        (np.array([1.5]), np.int8, "is of int8, which cannot hold float64"),
        ([1, 300], np.int8, "is of int8, which cannot hold int64"),
        (np.array([True]), "U2", "is of <U2, which cannot hold bool"),
        (np.array([np.nan]), "S3", "is of .S3, which cannot hold float64"),
        (np.array([7]), "V8", "is of .V8, which cannot hold int64"),
        (np.ma.masked_array([1.0]), None, "MaskedArray is more than a plain array"),
        (np.ma.masked_array([1.0]), np.float32, "MaskedArray is more than a plain array"),
    ],
)
def test_lossy_first_value_is_refused(make: Any, value: Any, dtype: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"variable 'w'.*{problem}"):
        make(value, dtype=dtype, name="w")


@pytest.mark.parametrize(
    ("value", "problem"),
    [(300, "int64"), (np.array([300]), "300"), (1.5, "float64"), (np.ma.masked, "Masked")],
)
def test_lossy_rows_are_refused(make: Any, value: Any, problem: str) -> None:
    variable = make(np.array([1, 2], np.int8), name="w")
    with pytest.raises(errors.InvalidArgumentError, match=f"variable 'w'.*{problem}"):
        variable[0] = value
    assert variable.numpy().tolist() == [1, 2]


# -- how long it lives -----------------------------------------------------------------------------


@pytest.fixture
def there(
    threads: zd.local_cluster, strategy: zd.ParameterServerStrategy
) -> Callable[[], list[str]]:
    """there(): the names of the strategy's variables at the parameter servers."""

    def there() -> list[str]:
        message = [
            client.client_of(address).status().get_value()["variables"] for address in threads.ps
        ]
        return sorted(
            each["name"]
            for about in message
            for each in about
            if each["session"] == strategy.session
        )

    return there


def test_variable_ends_with_its_last_handle(
    strategy: zd.ParameterServerStrategy, there: Callable[[], list[str]]
) -> None:
    with strategy.scope():
        kept = [zd.Variable(np.zeros(4), name="kept")]
        for _ in range(20):
            zd.Variable(np.zeros(4), name="dropped").assign_add(np.ones(4))
    gc.collect()
    eventually(lambda: there() == ["kept"], "the others are dropped")
    assert kept[0].numpy().tolist() == [0] * 4


def test_variable_outlives_pending_work(
    strategy: zd.ParameterServerStrategy,
    coordinator: ClusterCoordinator,
    there: Callable[[], list[str]],
    tmp_path: Any,
) -> None:
    def schedule() -> Any:
        with strategy.scope():
            captured, given = zd.Variable(1, name="captured"), zd.Variable(2, name="given")

        def total(other: Any) -> int:
            waits(tmp_path)
            return int(captured.numpy() + other.numpy())

        return coordinator.schedule(total, (given,))

    value = schedule()
    gc.collect()
    until(lambda: begun(tmp_path))
    assert there() == ["captured", "given"]
    go(tmp_path)
    assert value.fetch(20) == 3
    eventually(lambda: not there(), "they are dropped")


def test_per_worker_value_keeps_variable(
    strategy: zd.ParameterServerStrategy,
    coordinator: ClusterCoordinator,
    there: Callable[[], list[str]],
) -> None:
    with strategy.scope():
        table = zd.Variable(7, name="table")
    resource = coordinator.create_per_worker_resource(lambda table: [table], (table,))
    del table
    gc.collect()
    assert coordinator.schedule(lambda held: int(held[0].numpy()), (resource,)).fetch(20) == 7
    del resource
    gc.collect()
    eventually(lambda: not there(), "it is dropped")


def test_pickled_handle_keeps_variable(
    strategy: zd.ParameterServerStrategy, there: Callable[[], list[str]]
) -> None:
    with strategy.scope():
        sent, dropped = zd.Variable(1, name="sent"), zd.Variable(1, name="dropped")
    trusted.pack(sent)
    del sent, dropped
    gc.collect()
    eventually(lambda: there() == ["sent"], "only the other is dropped")


# -- what it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "wanted"),
    [
        (1.5, None, None, np.float64(1.5)),
        (3, None, None, np.int64(3)),
        (3, "f4", (), np.float32(3)),
        ([[1, 2], [3, 4]], np.float32, None, np.array([[1, 2], [3, 4]], "f4")),
        (lambda: np.ones(3, "f4"), None, None, np.ones(3, "f4")),
        (lambda: [1.0, 2.0], "f4", (2,), np.array([1, 2], "f4")),
        (lambda: 5.0, "f4", (), np.float32(5)),
        (True, None, None, np.bool_(True)),
        (np.zeros((0, 3)), None, None, np.zeros((0, 3))),
        ("abc", None, None, np.str_("abc")),
    ],
)
def test_initial_values_of_a_variable(
    make: Any, value: Any, dtype: Any, shape: Any, wanted: Any
) -> None:
    variable = make(value, dtype=dtype, shape=shape)
    found = variable.numpy()
    assert type(found) is type(wanted)
    assert np.array_equal(found, wanted)
    assert (variable.dtype, variable.shape) == (wanted.dtype, wanted.shape)
    assert variable.version == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs an initial_value"),
        ({"initial_value": object()}, "no array"),
        ({"initial_value": [1, 2], "shape": (3,)}, r"shape=\(3,\)"),
        ({"initial_value": 1.0, "aggregation": "most"}, "aggregation"),
        ({"initial_value": 1.0, "synchronization": "never"}, "synchronization"),
    ],
)
def test_bad_variable_is_refused(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**given)


def test_failed_initializer_names_variable(
    strategy: zd.ParameterServerStrategy,
) -> None:
    def failing() -> Any:
        raise LookupError("no such file")

    with (
        strategy.scope(),
        pytest.raises(errors.UnknownError, match=r"'w' on ps:0.*LookupError: no such file"),
    ):
        zd.Variable(failing, shape=(2,), dtype="f4", name="w")


def test_attributes_of_a_variable(make: Any) -> None:
    variable = make(np.zeros((2, 3), "f4"), name="w", aggregation="SUM", trainable=False)
    assert variable.name == "w"
    assert variable.aggregation == "sum"
    assert variable.synchronization == "auto"
    assert variable.trainable is False
    assert make(0.0).trainable is True
    assert make(0).trainable is False
    assert len(variable) == 2
    assert (variable.ndim, variable.size) == (2, 6)
    assert "'w'" in repr(variable)
    assert "(2, 3)" in repr(variable)


# -- reading ---------------------------------------------------------------------------------------


def test_variable_computes_as_its_value(make: Any) -> None:
    v, w = make(np.array([1.0, 2.0, 3.0])), make(2.0)
    assert np.array_equal(v + w, [3.0, 4.0, 5.0])
    assert np.array_equal(1 - v, [0.0, -1.0, -2.0])
    assert np.array_equal(v == [1.0, 0.0, 3.0], [True, False, True])
    assert np.array_equal(v > w, [False, False, True])
    assert np.array_equal(-v / w, [-0.5, -1.0, -1.5])
    assert np.array_equal(v @ v, 14.0)
    assert np.array_equal(np.asarray(v), [1.0, 2.0, 3.0])
    assert (int(w), float(w), bool(w)) == (2, 2.0, True)
    assert np.array_equal(v[1:], [2.0, 3.0])
    assert v.read_value().tolist() == v.value().tolist() == [1.0, 2.0, 3.0]


def test_read_value_is_independent(make: Any) -> None:
    for size in (3, 1 << 18):  # one that travels in the message, and one in shared memory
        v = make(np.zeros(size))
        before = v.numpy()
        v.assign_add(np.ones(size))
        middle = v.numpy()
        v.scatter_add(zd.IndexedSlices(np.array([5.0]), np.array([1])))
        assert before[:3].tolist() == [0.0, 0.0, 0.0]
        assert middle[:3].tolist() == [1.0, 1.0, 1.0]
        if middle.flags.writeable:
            middle[:] = 9.0
        assert v.numpy()[:3].tolist() == [1.0, 6.0, 1.0]


def test_assigned_value_is_independent(make: Any) -> None:
    value = np.zeros(4)
    v = make(value)
    value[:] = 1.0
    v.assign(value)
    value[:] = 2.0
    assert v.numpy().tolist() == [1.0] * 4


def test_sparse_read_keeps_order(make: Any) -> None:
    table = np.arange(20.0).reshape(10, 2)
    v = make(table)
    assert np.array_equal(v.sparse_read([7, 0, 4, 7]), table[[7, 0, 4, 7]])
    assert np.array_equal(v.sparse_read(np.array([[1, 2], [3, 4]])), table[[[1, 2], [3, 4]]])
    assert v.sparse_read([]).shape == (0, 2)


def test_gather_nd_gives_items(make: Any) -> None:
    table = np.arange(24.0).reshape(4, 3, 2)
    v = make(table)
    assert np.array_equal(v.gather_nd([[2], [0]]), table[[2, 0]])
    assert np.array_equal(v.gather_nd([[2, 1], [0, 2]]), table[[2, 0], [1, 2]])
    assert np.array_equal(
        v.gather_nd([[[2, 1, 1]], [[0, 0, 0]]]), [[table[2, 1, 1]], [table[0, 0, 0]]]
    )
    assert np.array_equal(v.gather_nd([3, 2]), table[3, 2])
    for bad in ([[0, 3]], [[4]], [[-1]], [[0, 0, 0, 0]], 3, [[0.5]]):
        with pytest.raises(errors.InvalidArgumentError):
            v.gather_nd(bad)


# -- changing --------------------------------------------------------------------------------------


def test_assignments_return_variable(make: Any) -> None:
    v = make(np.zeros(2, "f4"))
    assert v.assign([1, 2]) is v
    assert v.assign_add([1.0, 1.0], use_locking=True, name="n", read_value=False) is v
    assert v.assign_sub(np.array([0.5, 0.5])) is v
    assert v.numpy().tolist() == [1.5, 2.5]
    assert v.version == 4
    assert v.assign(v) is v
    assert v.numpy().dtype == np.float32


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("add", [[2, 3], [3, 4], [8, 10]]),
        ("sub", [[0, 1], [3, 4], [2, 2]]),
        ("mul", [[1, 2], [3, 4], [10, 24]]),
        ("div", [[1, 2], [3, 4], [2.5, 1.5]]),
        ("min", [[1, 1], [3, 4], [1, 2]]),
        ("max", [[1, 2], [3, 4], [5, 6]]),
        ("update", [[1, 1], [3, 4], [1, 2]]),
    ],
)
def test_scatter_updates_change_rows(make: Any, op: str, wanted: Any) -> None:
    v = make(np.array([[1, 2], [3, 4], [5, 6]], "f8"))
    rows = zd.IndexedSlices(np.array([[1, 1], [2, 2], [1, 2]], "f8"), np.array([0, 2, 2]))
    assert getattr(v, f"scatter_{op}")(rows) is v
    assert v.numpy().tolist() == wanted


def test_batch_scatter_update_sets_rows(make: Any) -> None:
    v = make(np.zeros(3))
    assert v.batch_scatter_update(zd.IndexedSlices(np.array([5.0]), np.array([1]))) is v
    assert v.numpy().tolist() == [0.0, 5.0, 0.0]


def test_compare_and_set_by_version_and_value(make: Any) -> None:
    v = make([1.0, 2.0])
    version, value = v.read_versioned()
    assert v.compare_and_set([3.0, 4.0], version=version) is True
    assert v.compare_and_set([5.0, 6.0], version=version) is False
    assert v.compare_and_set([5.0, 6.0], expected=value) is False
    assert v.compare_and_set([5.0, 6.0], expected=[3.0, 4.0]) is True
    assert v.numpy().tolist() == [5.0, 6.0]
    with pytest.raises(ValueError, match="version or an expected"):
        v.compare_and_set([0.0, 0.0])


def test_apply_takes_optimizer_or_function(make: Any) -> None:
    v = make([1.0, 2.0])
    v.apply(optimizers.SGD(0.5), [1.0, 1.0])
    assert v.numpy().tolist() == [0.5, 1.5]
    v.apply(optimizers.SGD(0.5), zd.IndexedSlices(np.array([1.0]), np.array([1])))
    assert v.numpy().tolist() == [0.5, 1.0]

    def clipped(value: Any, grad: Any, slots: dict[str, Any], step: int) -> Any:
        slots["sum"] = slots.get("sum", 0.0) + grad
        return np.minimum(value + slots["sum"], 2.0) * step

    v.apply(clipped, [1.0, 0.5])
    v.apply(clipped, [0.0, 0.0])
    assert v.numpy().tolist() == [2 * 2.0, 2 * 2.0]


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("assign", ([1.0, 2.0, 3.0],)),
        ("assign", (1.0,)),
        ("assign", (["a", "b"],)),
        ("assign", (np.array([1j, 2j]),)),
        ("assign_add", ([[1.0, 2.0]],)),
        ("assign_sub", (None,)),
        ("apply", (optimizers.SGD(0.1), [1.0])),
        ("apply", (3, [1.0, 2.0])),
        ("compare_and_set", ([1.0], 3)),
        ("scatter_add", (zd.IndexedSlices(np.array([1.0]), np.array([2])),)),
        ("scatter_add", (zd.IndexedSlices(np.array([1.0]), np.array([-1])),)),
        ("scatter_update", (zd.IndexedSlices(np.array([[1.0]]), np.array([0])),)),
        ("scatter_add", (3,)),
        ("sparse_read", ([2],)),
        ("sparse_read", ([0.5],)),
    ],
)
def test_unfit_value_changes_nothing(make: Any, method: str, args: Any) -> None:
    v = make([1.0, 2.0], name="w")
    if method == "compare_and_set":
        with pytest.raises(errors.InvalidArgumentError, match="'w'"):
            v.compare_and_set(args[0], version=args[1])
    else:
        wanted = TypeError if method == "scatter_add" and args == (3,) else ValueError
        with pytest.raises(wanted) as caught:
            getattr(v, method)(*args)
        if method != "apply" and wanted is ValueError:
            assert "'w'" in str(caught.value)
    assert v.numpy().tolist() == [1.0, 2.0]
    assert v.version == 1


def test_integers_take_no_fractions(make: Any) -> None:
    v = make(np.zeros(2, "i4"))
    with pytest.raises(errors.InvalidArgumentError, match="int32"):
        v.assign(np.array([0.5, 1.5]))
    with pytest.raises(errors.InvalidArgumentError):
        v.assign([0.5, 1.5])
    assert v.assign([7, -7]).numpy().tolist() == [7, -7]


# -- handles ---------------------------------------------------------------------------------------


def test_variable_pickles_as_a_handle(
    strategy: zd.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        v = zd.Variable(np.zeros(100_000), name="w")
    packed = trusted.pack(v)
    assert isinstance(packed, bytes)
    assert len(packed) < 1000
    assert trusted.unpack(packed) is v
    one, two = trusted.unpack(trusted.pack((v, v)))
    assert one is two
    assert v.is_same(one)


def test_variables_work_in_scheduled_functions(anywhere: zd.ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(anywhere)
    with anywhere.scope():
        v = zd.Variable(np.arange(6.0).reshape(3, 2))

    def step() -> Any:
        v.scatter_add(zd.IndexedSlices(np.ones((1, 2)), np.array([2])))
        v.apply(optimizers.SGD(1.0), np.full((3, 2), 0.5))
        rows = v.sparse_read([2, 0])
        swapped = v.compare_and_set(np.zeros((3, 2)), version=v.version)
        return (
            rows,
            v.gather_nd([[0, 0]]),
            (v + 1).sum(),
            float(v[1, 1]),
            swapped,
            v.name,
            v.shape,
            v.trainable,
        )

    rows, places, total, one, swapped, *message = coordinator.schedule(step).fetch()
    assert rows.tolist() == [[4.5, 5.5], [-0.5, 0.5]]
    assert (places.tolist(), total, one, swapped) == ([0.0], 6.0, 0.0, True)
    assert message == ["Variable", (3, 2), True]


def test_local_variable_stays_in_its_process(coordinator: ClusterCoordinator) -> None:
    v = zd.Variable(0.0, name="mine")
    with pytest.raises((TypeError, ValueError), match=r"'mine' lives in this process"):
        coordinator.schedule(lambda: v.numpy())


def test_deep_copy_is_another_variable(made: Any) -> None:
    one, two = made(), made()
    with one.scope():
        zd.Variable(0.0)
        v = zd.Variable([1.0], name="w", aggregation="sum")
        copied = copy.deepcopy(v)
        assert zd.Variable(0.0).task == "ps:2"  # a copy does not count when servers take turns
    assert copied is not v
    assert (copied.device, copied.aggregation) == (v.device, v.aggregation)
    v.assign([2.0])
    assert copied.numpy().tolist() == [1.0]
    with pytest.raises(RuntimeError, match="scope of the strategy"):
        copy.deepcopy(v)
    with two.scope(), pytest.raises(RuntimeError, match="scope of the strategy"):
        copy.deepcopy(v)
    local = zd.Variable([1.0])
    assert copy.deepcopy(local).assign([3.0]).numpy().tolist() == [3.0]
    assert local.numpy().tolist() == [1.0]


def test_variable_keeps_session_of_lost_strategy(threads: zd.local_cluster) -> None:
    strategy = zd.ParameterServerStrategy(threads)
    with strategy.scope():
        v = zd.Variable(1.0)
    gone, session = weakref.ref(strategy), strategy.session
    # that of the process ends with its last session
    own = client.PsClient(threads.ps[0], threads.credentials)

    def variables() -> int:
        message = own.status().get_value()["variables"]
        return [each["session"] for each in message].count(session)

    del strategy
    gc.collect()
    eventually(lambda: gone() is None, "the strategy is collected")
    assert v.assign_add(1.0).numpy() == 2.0
    assert variables() == 1
    del v
    gc.collect()
    eventually(lambda: variables() == 0, "the session ends with its last variable")
    own.close()


def test_strategy_is_collected_under_locks(made: Any, threads: zd.local_cluster) -> None:
    """The garbage collector runs where it likes: also where a thread is about to ask a server, or
    to begin a session."""
    made()  # whose clients of the servers are there for all
    servers = [client.client_of(address) for address in threads.ps]

    def open_sessions() -> list[int]:
        return [each.status().get_value()["sessions"] for each in servers]

    eventually(lambda: open_sessions() == [1, 1, 1], "sessions of tests before this one have ended")
    strategy = zd.ParameterServerStrategy(threads)
    assert open_sessions() == [2, 2, 2]
    locks = [
        sessions._lock,
        client._lock,
        *(each._rpc._channel._lock for each in servers),
    ]  # reach: held by design
    collected = threading.Event()

    def collect() -> None:
        nonlocal strategy
        with contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            del strategy
            gc.collect()
        collected.set()

    threading.Thread(target=collect, daemon=True).start()
    assert collected.wait(30.0)
    eventually(lambda: open_sessions() == [1, 1, 1], "it is closed all the same")


# -- servers that go -------------------------------------------------------------------------------


def test_dead_ps_is_named(cluster: Callable[..., Cluster]) -> None:
    servers = cluster(1, 2)
    with zd.ParameterServerStrategy(servers.spec) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            kept, lost = zd.Variable(1.0, name="kept"), zd.Variable(2.0, name="lost")
        servers.kill("ps", 1)
        with pytest.raises(errors.PSUnavailableError, match=r"'lost' on ps:1"):
            lost.assign(3.0)
        with pytest.raises(errors.PSUnavailableError, match=r"'lost' on ps:1"):
            coordinator.schedule(lambda: lost.numpy()).fetch()
        with pytest.raises(errors.UnavailableError):
            coordinator.join()
        assert coordinator.schedule(lambda: kept.numpy()).fetch() == 1.0
        servers.start("ps", 1)
        with pytest.raises(errors.PSUnavailableError, match=r"'lost' on ps:1"):
            lost.numpy()
        with zd.ParameterServerStrategy(servers.spec) as again:
            with again.scope():
                anew = [zd.Variable(float(number)) for number in range(2)]
            assert [float(each) for each in anew] == [0.0, 1.0]
            assert ClusterCoordinator(again).schedule(lambda: anew[1].numpy()).fetch() == 1.0
