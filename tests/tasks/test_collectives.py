"""Collectives of real servers. TensorFlow's tests of collective_ops_test.py and
cross_device_ops_test.py have their names here.

What differs. A group is a list of tasks, or has a name, and its operations are counted: that takes
the place of group and instance keys, so keys that are no numbers (testInvalidGroupKey,
testInvalidInstanceKey) cannot be given, and a kind that does not fit is told to all members instead
of being an InternalError at one. There are no devices, graphs and XLA: what is about them is void
(testReduceSameGraph, testInputsAreFunctionArgs, testChooseAlgorithm), and so are bfloat16, which
NumPy does not have, and inputs of tf.data.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import until
from tests.tasks.helpers import LARGE, Side, cluster, errors, same, together, until_announced, works
from zmqdist.collectives import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    ReduceOp,
)
from zmqdist.errors import (
    UNAVAILABLE,
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from zmqdist.specs import IndexedSlices
from zmqdist.tasks.server import Server

Made = Callable[..., Server]
Child = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pair(made: Made) -> list[Server]:
    return cluster(made, 2)


@pytest.fixture
def four(made: Made) -> list[Server]:
    return cluster(made, 4)


# -- collective_ops_test.py ------------------------------------------------------------------------


def test_reduce(made: Made, pair: list[Server]) -> None:
    same(together(cluster(made, 1), lambda server, rank: server.all_reduce([1.0])), np.array([1.0]))
    same(together(pair, lambda server, rank: server.all_reduce([1.0])), np.array([2.0]))


@pytest.mark.parametrize("count", [1, 2, 16])
def test_gather(made: Made, count: int) -> None:
    servers = cluster(made, count)
    same(
        together(servers, lambda server, rank: server.all_gather(np.array([rank]))),
        np.arange(count),
    )


def test_broadcast(pair: list[Server]) -> None:
    got = together(
        pair,
        lambda server, rank: server.broadcast(np.array([1.0, 2.0, 3.0]) if rank == 0 else None),
    )
    same(got, np.array([1.0, 2.0, 3.0]))
    got = together(
        pair,
        lambda server, rank: server.broadcast(
            {"a": [np.arange(LARGE)], "b": "text"} if rank else 7, root=1
        ),
    )
    same([each["a"][0] for each in got], np.arange(LARGE))
    assert [each["b"] for each in got] == ["text", "text"]


@pytest.mark.parametrize("count", [2, 20_000])
def test_gather_keeps_byte_order_and_fields(count: int, pair: list[Server]) -> None:
    for dtype in (
        np.dtype(">i4"),
        np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [0, 0]}),
    ):
        array = np.ones((2, count), dtype)
        for got in together(
            pair, lambda server, rank, x=array: (server.all_gather(x), server.all_to_all(x))
        ):
            assert [repr(one.dtype) for one in got] == [repr(dtype)] * 2
            assert np.array_equal(got[0], np.ones((4, count), dtype))


def test_masked_array_is_refused_everywhere(pair: list[Server]) -> None:
    masked = np.ma.masked_array([1.0], [True])
    for act in ("all_gather", "all_reduce", "broadcast"):
        for error in errors(pair, lambda server, rank, act=act: getattr(server, act)(masked)):
            assert "MaskedArray is more than a plain array" in str(error)
    works(pair)


def test_all_to_all(made: Made, pair: list[Server]) -> None:
    same(together(cluster(made, 1), lambda server, rank: server.all_to_all([7])), np.array([7]))
    same(together(pair, lambda server, rank: server.all_to_all([rank, rank])), np.array([0, 1]))
    bad = errors(pair, lambda server, rank: server.all_to_all([1, 2, 3]))
    assert all("one item for each of the 2 members" in str(error) for error in bad)
    works(pair)


def test_instance_key_scoped_under_group_key(four: list[Server]) -> None:
    """The first operation of each group is numbered alike, and they do not meet."""
    halves = [["worker:0", "worker:1"], ["worker:2", "worker:3"]]
    got = together(four, lambda server, rank: server.all_reduce(rank + 1, group=halves[rank // 2]))
    assert [int(each) for each in got] == [3, 3, 7, 7]


def test_collective_group_size_one(made: Made) -> None:
    (server,) = cluster(made, 1)
    for count in (3, LARGE):
        mine = np.arange(count)
        for got in (
            server.all_reduce(mine),
            server.all_gather(mine),
            server.reduce_scatter(mine),
            server.broadcast(mine),
        ):
            same([got], mine)


def test_collective_invalid_key(pair: list[Server]) -> None:
    """A gather where the other reduces: both are told what the other one brought."""
    got = errors(
        pair,
        lambda server, rank: (
            server.all_gather(np.array([1])) if rank else server.all_reduce(np.array([1]))
        ),
    )
    assert all(isinstance(error, InvalidArgumentError) for error in got)
    assert all(
        "worker:0: all_reduce sum of int64 (1); worker:1: all_gather" in str(error) for error in got
    )
    works(pair)


def test_multiple_groups(four: list[Server]) -> None:
    def fn(server: Server, rank: int) -> list[float]:
        got = (
            [server.all_reduce(3.0, group=["worker:0", "worker:1", "worker:2"])] if rank < 3 else []
        )
        return got + ([server.all_reduce(2.0, group=["worker:2", "worker:3"])] if rank > 1 else [])

    assert together(four, fn) == [[9.0], [9.0], [9.0, 4.0], [4.0]]


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 16])
def test_reduce_with_subdivisions(pair: list[Server], bytes_per_pack: int) -> None:
    """AllReduceWithSubdivisions.testReduce: how values are packed does not change them."""
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    given = [np.array([1.0, 2.0]), np.float32(3), np.arange(10.0), {"x": np.array([[1]])}]
    got = together(pair, lambda server, rank: server.all_reduce(given, options=options))
    for each in got:
        assert [each[1].dtype, each[3]["x"].shape] == [np.float32, (1, 1)]
        np.testing.assert_array_equal(each[0], [2.0, 4.0])
        np.testing.assert_array_equal(each[2], np.arange(10.0) * 2)
        assert (float(each[1]), int(each[3]["x"][0, 0])) == (6.0, 2)


def test_reduce_xla(pair: list[Server]) -> None:
    """XlaTest.testReduce without XLA: two threads, one of each task."""
    sides = [Side(server.all_reduce, [1.0]) for server in pair]
    same([side.get() for side in sides], np.array([2.0]))


def test_group_assignment_before_all_reduce(pair: list[Server]) -> None:
    assert together(pair, lambda server, rank: server.all_reduce(1.0, group=[server.task])) == [
        1.0,
        1.0,
    ]


def test_two_group_assignment_before_all_reduce(pair: list[Server]) -> None:
    def fn(server: Server, rank: int) -> list[float]:
        return [
            float(server.all_reduce(1.0, group=[server.task])),
            float(server.all_reduce(1.0, group=["worker:0", "worker:1"])),
        ]

    assert together(pair, fn) == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_abort_group_params_resolution(pair: list[Server], rank: int) -> None:
    """The leader waits, or the other one does; the abort comes from either."""
    waiting = Side(pair[rank].all_reduce, 1)
    until_announced(pair[0])
    pair[1 - rank].group().abort(UNAVAILABLE, "peer down")
    assert_down(waiting.wait().error)
    for server in pair:
        assert_down(Side(server.all_reduce, 1).wait().error)
    pair[rank].group().reset()
    works(pair)


def test_abort_instance_params_resolution(pair: list[Server]) -> None:
    works(pair)
    waiting = Side(pair[1].all_reduce, 1)
    until_announced(pair[0])
    pair[1].group().abort(UNAVAILABLE, "peer down")
    assert_down(waiting.wait().error)
    assert_down(Side(pair[1].all_reduce, 1).wait().error)
    pair[0].group().reset()
    works(pair)


def test_op_error_not_abort_if_no_collective(pair: list[Server]) -> None:
    works(pair)
    with pytest.raises(StopIteration):
        next(iter([]))
    works(pair)


def test_op_error_abort_with_collective(pair: list[Server]) -> None:
    """A member whose own work fails cancels its part; the error surfaces there, the others get
    CancelledError. The group goes on, which is the new kind (NotAbortWithCollectiveV2); for the old
    one there is `abort`."""

    def fn(server: Server, rank: int) -> Any:
        if rank == 0:
            return server.all_reduce(1)
        try:
            raise ValueError("end of data")
        except ValueError as error:
            server.group().cancel(str(error))
            raise

    got = errors(pair, fn)
    assert isinstance(got[0], CancelledError)
    assert str(got[0]) == "worker:1: end of data"
    assert isinstance(got[1], ValueError)


def test_op_error_not_abort_with_collective_v2(pair: list[Server]) -> None:
    test_op_error_abort_with_collective(pair)
    works(pair)


def test_cancel_during_param_resolution_v2(pair: list[Server]) -> None:
    waiting = Side(pair[0].all_reduce, 1)
    until_announced(pair[0])
    pair[1].group().cancel()
    assert isinstance(waiting.wait().error, CancelledError)
    works(pair)


def test_timeout(pair: list[Server]) -> None:
    side = Side(pair[0].all_reduce, 1, "sum", None, 0.2)
    error = side.wait().error
    assert isinstance(error, DeadlineExceededError)
    expected = "all_reduce sum of int64 () timed out: 1/2 tasks came, the first was worker:0; missing: worker:1"
    assert str(error) == expected


@pytest.mark.parametrize("late", [0, 1])
def test_param_resolution_after_timeout(pair: list[Server], late: int) -> None:
    first = Side(pair[1 - late].all_reduce, 1, "sum", None, 0.1).wait().error
    second = Side(pair[late].all_reduce, 1).wait().error
    assert isinstance(second, DeadlineExceededError)
    assert str(second) == str(first)
    works(pair)


def test_nccl_fallback_on_cpu(pair: list[Server]) -> None:
    options = CommunicationOptions(implementation=CommunicationImplementation.NCCL)
    same(
        together(pair, lambda server, rank: server.all_reduce([1.0], options=options)),
        np.array([2.0]),
    )


def test_ordering(pair: list[Server]) -> None:
    """Operations of one group are done in the order of the calls, those of another one are not
    waited for."""

    def fn(server: Server, rank: int) -> list[int]:
        other = server.group(["worker:0", "worker:1"], name="other")
        # A cycle, if they waited for each other: each member is first in one group while the other
        # one is first in the other.
        side = Side(server.all_reduce, 100, "sum", other if rank else None)
        mine = server.all_reduce(100, group=None if rank else other)
        return [
            int(mine),
            int(side.get()),
            *(int(server.all_reduce(number)) for number in range(5)),
        ]

    assert together(pair, fn) == [[200, 200, 0, 2, 4, 6, 8]] * 2


def test_map(pair: list[Server]) -> None:
    """InputPipelineTest.testMap: inside whatever produces values."""
    got = together(
        pair, lambda server, rank: [float(each) for each in map(server.all_reduce, [1.0 + rank])]
    )
    assert got == [[3.0], [3.0]]


def test_invalid_group_size(pair: list[Server]) -> None:
    for tasks, expected in (
        ([], "different tasks"),
        (["worker:0"] * 2, "different tasks"),
        (["worker:1"], "not a member"),
    ):
        with pytest.raises(InvalidArgumentError, match=expected):
            pair[0].group(tasks)
    with pytest.raises(InvalidArgumentError, match="a list of tasks, not the text 'worker:0'"):
        pair[0].all_reduce(1, group="worker:0")
    with pytest.raises(InvalidArgumentError, match="no task 'worker:5'"):
        pair[0].group(["worker:5"])
    pair[0].group(["worker:0", "worker:1"], name="mine")
    with pytest.raises(
        InvalidArgumentError, match="group 'mine' has the members worker:0, worker:1"
    ):
        pair[0].group(["worker:1", "worker:0"], name="mine")


def test_group_initialization(pair: list[Server]) -> None:
    swapped = ["worker:1", "worker:0"]
    groups = [server.group(swapped, name="100") for server in pair]
    assert [(group.rank, group.size, group.tasks) for group in groups] == [
        (1, 2, swapped),
        (0, 2, swapped),
    ]
    assert pair[0].group(swapped, name="100") is groups[0]
    # The same name for other ranks: each has another leader, so each is told by itself.
    got = errors(
        pair,
        lambda server, rank: server.all_reduce(
            1, group=server.group(swapped[:: 1 - 2 * rank], "odd"), timeout=0.2
        ),
    )
    assert all(isinstance(error, (InvalidArgumentError, DeadlineExceededError)) for error in got)


def test_all_reduce_v3(pair: list[Server]) -> None:
    for op, wanted in (("sum", 3), ("min", 1), ("max", 2), ("prod", 2)):
        same(
            together(pair, lambda server, rank: server.all_reduce([rank + 1], op)),  # noqa: B023
            np.array([wanted]),
        )


def test_all_to_all_v3(pair: list[Server]) -> None:
    got = together(pair, lambda server, rank: server.all_to_all([[1, 3], [2, 4]][rank]))
    assert [each.tolist() for each in got] == [[1, 2], [3, 4]]


def test_all_to_all_v3_different_user_rank(pair: list[Server]) -> None:
    swapped = ["worker:1", "worker:0"]
    got = together(
        pair, lambda server, rank: server.all_to_all([[2, 4], [1, 3]][rank], group=swapped)
    )
    assert [each.tolist() for each in got] == [[3, 4], [1, 2]]


def test_all_to_all_v3_with_tensor_input(four: list[Server]) -> None:
    rows = np.arange(16 * LARGE).reshape(4, 4, LARGE)
    got = together(four, lambda server, rank: server.all_to_all(rows[rank]))
    for rank in range(4):
        np.testing.assert_array_equal(got[rank], rows[:, rank])


# -- cross_device_ops_test.py ----------------------------------------------------------------------


def per_replica(
    servers: list[Server],
    fn: Callable[[CrossDeviceOps, int], Any],
    options: CommunicationOptions | None = None,
) -> list[Any]:
    return together(servers, lambda server, rank: fn(CrossDeviceOps(server, options=options), rank))


@pytest.mark.parametrize(("op", "two", "many"), [("SUM", 3.0, 10.0), (ReduceOp.MEAN, 1.5, 2.5)])
def test_reduce_dense(
    pair: list[Server], four: list[Server], op: Any, two: float, many: float
) -> None:
    same(per_replica(pair, lambda ops, rank: ops.reduce(op, 1.0 + rank, "all")), np.asarray(two))
    same(
        per_replica(four, lambda ops, rank: ops.reduce(op, [1.0 + rank], ["all"])), np.asarray(many)
    )
    same(
        per_replica(pair, lambda ops, rank: ops.reduce(op, int(1 + rank), "all")),
        np.asarray(two if op is ReduceOp.MEAN else 3),
    )


def slices(rank: int, rows: int = 1) -> IndexedSlices:
    return IndexedSlices(np.full((rows, 2), 1.0 + rank), np.arange(rows), (5, 2))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_sparse(pair: list[Server], op: str) -> None:
    for got in per_replica(pair, lambda ops, rank: ops.reduce(op, slices(rank), "all")):
        np.testing.assert_array_equal(
            got.values, np.array([[1.0, 1.0], [2.0, 2.0]]) / (2 if op == "MEAN" else 1)
        )
        np.testing.assert_array_equal(got.indices, [0, 0])
        assert got.dense_shape == (5, 2)
        np.testing.assert_array_equal(got.to_dense()[0], [3.0, 3.0] if op == "SUM" else [1.5, 1.5])


def test_reduce_sparse_variable_length(pair: list[Server]) -> None:
    for got in per_replica(
        pair, lambda ops, rank: ops.reduce("SUM", slices(rank, 1 + 2 * rank), "all")
    ):
        np.testing.assert_array_equal(got.indices, [0, 0, 1, 2])
        np.testing.assert_array_equal(got.values[:, 0], [1.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("op", "two", "many"), [("SUM", [4, 6], [16, 20]), ("MEAN", [2.0, 3.0], [4.0, 5.0])]
)
def test_batch_reduce_dense(
    pair: list[Server], four: list[Server], op: str, two: list[Any], many: list[Any]
) -> None:
    got = per_replica(
        pair, lambda ops, rank: ops.batch_reduce(op, [(1 + 2 * rank, "a"), (2 + 2 * rank, "b")])
    )
    assert [[each.tolist() for each in one] for one in got] == [two] * 2
    got = per_replica(
        four, lambda ops, rank: ops.batch_reduce(op, [(1 + 2 * rank, "a"), (2 + 2 * rank, "b")])
    )
    assert [[each.tolist() for each in one] for one in got] == [many] * 4


def test_batch_reduce_sparse(pair: list[Server]) -> None:
    def fn(ops: CrossDeviceOps, rank: int) -> Any:
        other = IndexedSlices(np.full((2, 1), rank), np.array([3, 4]), (9, 1))
        return ops.batch_reduce("sum", [(slices(rank), "a"), (other, "b")])

    for one, two in per_replica(pair, fn):
        assert (one.dense_shape, two.dense_shape, two.values.ravel().tolist()) == (
            (5, 2),
            (9, 1),
            [0, 0, 1, 1],
        )


def test_batch_reduce_mixed_dense_and_sparse(pair: list[Server]) -> None:
    def fn(ops: CrossDeviceOps, rank: int) -> Any:
        return ops.batch_reduce(
            "sum",
            [(slices(rank), "a"), (1.0, "b"), (slices(rank, 2), "c"), (np.array([rank]), "d")],
        )

    for got in per_replica(pair, fn):
        assert [type(each) for each in got] == [
            IndexedSlices,
            np.ndarray,
            IndexedSlices,
            np.ndarray,
        ]
        assert (float(got[1]), got[2].indices.tolist(), got[3].tolist()) == (2.0, [0, 1, 0, 1], [1])


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_dense(pair: list[Server], op: str) -> None:
    times = 2 if op == "sum" else 1
    same(together(pair, lambda server, rank: server.all_reduce(1.0, op)), np.asarray(1.0 * times))
    for got in together(
        pair, lambda server, rank: server.all_reduce((1.0, np.array([[2.0, 3.0]])), op)
    ):
        assert type(got) is tuple
        np.testing.assert_array_equal(got[1], np.array([[2.0, 3.0]]) * times)


def test_all_reduce_sparse(pair: list[Server]) -> None:
    for op, times in (("sum", 2), ("mean", 1)):
        for got in together(pair, lambda server, rank: server.all_reduce(slices(0), op)):  # noqa: B023
            np.testing.assert_array_equal(got.to_dense(), slices(0).to_dense() * times)


def test_all_reduce_mixed_dense_and_sparse(pair: list[Server]) -> None:
    for got in together(
        pair, lambda server, rank: server.all_reduce((1.0, slices(0), 2.0, slices(1)))
    ):
        assert (float(got[0]), float(got[2])) == (2.0, 4.0)
        assert (got[1].values[0, 0], got[3].values[0, 0]) == (1.0, 2.0)
    bad = errors(pair, lambda server, rank: server.all_reduce(slices(0) if rank else 1.0))
    assert all(
        "worker:1: all_reduce sum of rows float64 (*, 2) of an array (5, 2)" in str(error)
        for error in bad
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_all_gather_same_shape(pair: list[Server], axis: int) -> None:
    value = np.array([[[1, 2], [3, 4]]])
    same(
        per_replica(pair, lambda ops, rank: ops.gather(value, "all", axis)),
        np.concatenate([value, value], axis),
    )


def test_collective_v2_control_flow(pair: list[Server]) -> None:
    for branch in (True, False):
        got = together(
            pair,
            lambda server, rank: server.all_reduce(1.0) if branch else server.all_reduce(2.0),  # noqa: B023
        )
        assert got == [2.0, 2.0] if branch else [4.0, 4.0]


def test_multi_threaded_collective_launch_no_interleave(pair: list[Server]) -> None:
    """Two threads of each task in groups of their own, in opposite orders."""
    done = [[threading.Event(), threading.Event()] for _ in pair]

    def fn(server: Server, rank: int) -> list[float]:
        def go(which: int) -> float:
            if which != rank:
                done[rank][rank].wait(0.05)
            done[rank][which].set()
            return float(server.all_reduce(1.0 + which, group=server.group(name=f"thread {which}")))

        return [side.get() for side in [Side(go, which) for which in (0, 1)]]

    assert together(pair, fn) == [[2.0, 4.0]] * 2


@pytest.mark.parametrize(
    "value",
    [1.0, [(1.0, "a"), (2.0, "b")], slices(0), [(slices(0), "a"), (slices(1), "b")]],
    ids=["reduce dense", "batch reduce dense", "reduce sparse", "batch reduce sparse"],
)
def test_timeout_reduce_dense_and_sparse(pair: list[Server], value: Any) -> None:
    ops = CrossDeviceOps(pair[0], options=CommunicationOptions(timeout_seconds=0.1))
    with pytest.raises(DeadlineExceededError, match="worker:1"):
        ops.batch_reduce("sum", value) if isinstance(value, list) else ops.reduce(
            "sum", value, "all"
        )


def test_nccl_ordering(pair: list[Server]) -> None:
    """The order of issue through functions, branches and loops is that of Python."""

    def fn(server: Server, rank: int) -> list[float]:
        def nested(value: float) -> list[float]:
            return [float(server.all_reduce(value)) for _ in range(3)] if value else nested(1.0)

        return nested(0.0) + nested(2.0)

    assert together(pair, fn) == [[2.0] * 3 + [4.0] * 3] * 2


def test_reduction_and_broadcast(pair: list[Server]) -> None:
    """Where results are to be says nothing here: they are at every member, whatever the
    destinations."""
    for destinations in ("all", ["worker:0"], "/device:CPU:0"):
        same(
            per_replica(pair, lambda ops, rank: ops.reduce("mean", 1.0 + rank, destinations)),  # noqa: B023
            np.asarray(1.5),
        )
        same(
            per_replica(pair, lambda ops, rank: ops.broadcast(1.0 + rank, destinations)),  # noqa: B023
            np.asarray(1.0),
        )


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 4])
def test_reduction_distributed(made: Made, bytes_per_pack: int) -> None:
    servers = cluster(made, 3)
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    pairs = [(np.array([number, 1.0]), "all") for number in range(4)]
    for got in per_replica(servers, lambda ops, rank: ops.batch_reduce("sum", pairs), options):
        assert [each.tolist() for each in got] == [[3.0 * number, 3.0] for number in range(4)]


def test_reduce_distributed_variable(pair: list[Server]) -> None:
    class Variable:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([1.0, 2.0])

    same(
        per_replica(pair, lambda ops, rank: ops.reduce("sum", Variable(), "all")),
        np.array([2.0, 4.0]),
    )


def test_create_options_via_exported_api() -> None:
    assert CommunicationOptions(bytes_per_pack=1).bytes_per_pack == 1
    with pytest.raises(ValueError, match="must not be negative"):
        CommunicationOptions(bytes_per_pack=-1)
    assert (
        CommunicationOptions(implementation="ring").implementation is CollectiveCommunication.RING
    )
    for bad in ("gloo", 3):
        with pytest.raises(ValueError, match="implementation"):
            CommunicationOptions(implementation=bad)  # type: ignore[arg-type]
    merged = CommunicationOptions(5, 1.0).merge(
        CommunicationOptions(timeout_seconds=2.0, implementation="NCCL")
    )
    assert merged == CommunicationOptions(5, 2.0, CollectiveCommunication.NCCL)
    assert merged.merge(None) is merged


def test_create_options_via_hints(caplog: pytest.LogCaptureFixture) -> None:
    made = CollectiveHints(50, 1)
    assert (made.bytes_per_pack, made.timeout_seconds, type(made)) == (50, 1, CommunicationOptions)
    assert "CollectiveHints is deprecated" in caplog.text


def test_mistake_of_one_member_reaches_others(pair: list[Server]) -> None:
    ops = CrossDeviceOps(pair[0])
    for call in (
        lambda: ops.reduce("sum", [], "all"),
        lambda: ops.reduce("sum", 1.0, None),
        lambda: ops.reduce("median", 1.0, "all"),
        lambda: ops.batch_reduce("sum", [(1.0,)]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
    got = errors(
        pair,
        lambda server, rank: server.all_gather(5) if rank else server.all_gather(np.array([5])),
    )
    assert isinstance(got[0], InvalidArgumentError)
    assert (
        "worker:1 could not take part: ValueError: an array of shape () cannot be gathered on "
        "axis 0" in str(got[0])
    )
    assert isinstance(got[1], ValueError)
    got = errors(pair, lambda server, rank: server.all_reduce(["text"]))
    assert all(isinstance(error, TypeError) for error in got)
    got = errors(pair, lambda server, rank: server.all_gather(slices(0)))
    assert all(isinstance(error, NotImplementedError) for error in got)
    works(pair)


def test_contract_of_two_processes(pair: list[Server]) -> None:
    same(
        together(pair, lambda server, rank: server.all_reduce(np.arange(3) + rank)),
        np.array([1, 3, 5]),
    )
    rows = [np.array([[1, 2]]), np.array([[3, 4], [5, 6]])]
    same(together(pair, lambda server, rank: server.all_gather(rows[rank])), np.concatenate(rows))
    same(
        together(pair, lambda server, rank: server.all_gather(np.array([[rank]]), axis=1)),
        np.array([[0, 1]]),
    )
    got = together(
        pair, lambda server, rank: server.all_gather({"a": [np.array([rank])], "b": np.array([2])})
    )
    assert got[1]["a"][0].tolist() == [0, 1]


# -- beyond ----------------------------------------------------------------------------------------


def test_different_shape_fails_only_one_operation(four: list[Server]) -> None:
    for count in (1, LARGE):
        got = errors(four, lambda server, rank: server.all_reduce(np.ones(count + (rank == 2))))  # noqa: B023
        expected = f"worker:0, worker:1, worker:3: all_reduce sum of float64 ({count}); worker:2: all_reduce sum of float64 ({count + 1})"
        assert all(
            isinstance(error, InvalidArgumentError) and expected in str(error) for error in got
        )
        works(four)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "complex64", "float16", ">f4"])
def test_dtypes_large_and_small(pair: list[Server], dtype: str) -> None:
    for count in (3, LARGE + 1):
        values = [(np.arange(count) % 3 + rank).astype(dtype) for rank in (0, 1)]
        wanted = (values[0] + values[1]).astype(dtype)
        same(together(pair, lambda server, rank: server.all_reduce(values[rank])), wanted)  # noqa: B023
        same(
            together(pair, lambda server, rank: server.all_gather(values[rank])),  # noqa: B023
            np.concatenate(values, dtype=dtype),
        )


def test_large_arrays_of_all_kinds(four: list[Server]) -> None:
    values = [np.random.default_rng(rank).standard_normal((LARGE + rank, 2)) for rank in range(4)]
    equal = [value[:LARGE] for value in values]
    total = sum(equal)
    got = together(four, lambda server, rank: server.all_reduce(equal[rank]))
    np.testing.assert_allclose(got[0], total)
    same(got, got[0])
    mean = together(four, lambda server, rank: server.all_reduce(equal[rank], "mean"))
    np.testing.assert_allclose(mean[2], got[0] / 4)
    parts = together(four, lambda server, rank: server.reduce_scatter(equal[rank]))
    np.testing.assert_allclose(np.concatenate(parts), total)
    assert [len(part) for part in parts] == [LARGE // 4] * 4
    same(
        together(four, lambda server, rank: server.all_gather(values[rank])), np.concatenate(values)
    )
    same(
        together(four, lambda server, rank: server.all_gather(equal[rank].T, axis=1)),
        np.concatenate(equal).T,
    )
    gathered = together(four, lambda server, rank: server.gather(values[rank], root=3))
    assert [each is None for each in gathered] == [True, True, True, False]
    np.testing.assert_array_equal(gathered[3], np.concatenate(values))
    same(together(four, lambda server, rank: server.broadcast(values[rank], root=2)), values[2])


def test_objects(four: list[Server]) -> None:
    big = np.arange(LARGE)
    got = together(
        four,
        lambda server, rank: server.all_gather_object(
            {"rank": rank, "set": {rank}, "big": big[: rank * 1000]}
        ),
    )
    assert all([each["set"] for each in one] == [{0}, {1}, {2}, {3}] for one in got)
    got = together(
        four,
        lambda server, rank: server.broadcast_object(
            (frozenset({1}), big) if rank == 1 else None, root=1
        ),
    )
    assert all(one[0] == frozenset({1}) for one in got)
    same([one[1] for one in got], big)
    got[0][1][0] = 5  # private and writable
    assert big[0] == 0


def test_results_belong_to_the_caller(pair: list[Server]) -> None:
    for count in (3, LARGE):
        mine = np.ones(count)
        got = together(pair, lambda server, rank: server.all_reduce(mine))  # noqa: B023
        got[0][:] = 7
        assert (got[1] == 2).all()
        assert (mine == 1).all()


def test_pieces_are_copied_once_to_shared_memory(
    four: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each member copies a chunk of its own; what is folded lies there already, and what has
    arrived goes on as it is."""
    from zmqdist.transport.shm_pool import ShmPool

    # they know each other's memory from here on
    together(four, lambda server, rank: server.all_reduce(np.ones(2**20)))
    copies: list[int] = []
    kept = ShmPool.copy_in
    monkeypatch.setattr(
        ShmPool,
        "copy_in",
        lambda pool, view: copies.append(memoryview(view).nbytes) or kept(pool, view),
    )
    monkeypatch.setattr(
        "zmqdist.transport.transfers.memory_for",
        lambda nbytes: pytest.fail("it was received by the socket"),
    )
    together(four, lambda server, rank: server.all_reduce(np.ones(2**20)))
    assert copies == [2**21] * 4


def test_collectives_without_shared_memory(
    four: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zmqdist.transport.transfers.BulkChannel.shares_memory",
        property(lambda self: False, lambda self, value: None),
        raising=False,
    )
    monkeypatch.setattr("zmqdist.tasks.ring_schedules.this_pool", lambda: None)
    values = [np.arange(LARGE) * rank for rank in range(4)]
    same(together(four, lambda server, rank: server.all_reduce(values[rank])), np.arange(LARGE) * 6)
    same(together(four, lambda server, rank: server.broadcast(values[rank], root=3)), values[3])


def test_bad_arguments_fail_at_all_members(
    pair: list[Server],
) -> None:
    row = np.ones(3)
    for call in (
        lambda server, rank: server.all_reduce(1, timeout=float("nan") if rank else None),
        lambda server, rank: server.all_reduce(1, timeout="3" if rank else None),
        lambda server, rank: server.all_gather(row, axis=0.0 if rank else 0),
    ):
        expected, own = errors(pair, call)
        assert isinstance(own, (InvalidArgumentError, TypeError))
        assert isinstance(expected, InvalidArgumentError)
        works(pair)
    same(together(pair, lambda server, rank: server.all_reduce([1], timeout=1e300)), np.array([2]))
    until(lambda: not any(server.snapshot().collective_calls for server in pair))


def test_different_pack_sizes_disagree(pair: list[Server]) -> None:
    """Else a pack of one number would be added to each of another one's."""
    given = [np.ones(1), np.ones(3)]
    sizes = [CommunicationOptions(bytes_per_pack=count) for count in (1, 1000)]
    got = errors(pair, lambda server, rank: server.all_reduce(given, options=sizes[rank]))
    assert all("in packs of 1 bytes; worker:1" in str(error) for error in got)
    works(pair)


def assert_down(error: BaseException | None) -> None:
    assert isinstance(error, UnavailableError)
    assert "peer down" in str(error)
