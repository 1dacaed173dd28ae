"""A variable in shards is one variable: the same values, the same errors, and only what is needed
is asked for."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zmqdist import IndexedSlices, ShardedVariable, Variable, nest
from zmqdist.errors import InvalidArgumentError, UnimplementedError
from zmqdist.training.partition import offsets_of
from zmqdist.training.variable_storage import LocalStorage

F32 = np.float32


def sharded(
    value: Any, shards: int | Sequence[int], name: str = "table", dtype: Any = F32
) -> ShardedVariable:
    """A value in so many shards, or with shards of so many rows."""
    array = np.asarray(value, dtype)
    offsets = (
        offsets_of(len(array), shards)
        if isinstance(shards, int)
        else np.cumsum([0, *shards]).tolist()
    )
    parts = [
        Variable(array[low:high], name=f"{name}/part_{place}")
        for place, (low, high) in enumerate(pairwise(offsets))
    ]
    return ShardedVariable(parts, name)


def rows(values: Any, indices: Any, dtype: Any = F32) -> IndexedSlices:
    return IndexedSlices(np.asarray(values, dtype), np.asarray(indices))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What variables are asked for: (name, "all" or the rows)."""
    seen: list[Any] = []
    read, some = LocalStorage.read, LocalStorage.rows

    def read_all(self: LocalStorage) -> Any:
        seen.append((self.ref.name, "all"))
        return read(self)

    def read_rows(self: LocalStorage, wanted: Any) -> Any:
        seen.append((self.ref.name, list(wanted)))
        return some(self, wanted)

    monkeypatch.setattr(LocalStorage, "read", read_all)
    monkeypatch.setattr(LocalStorage, "rows", read_rows)
    return seen


# -- what it is ------------------------------------------------------------------------------------


def test_shape_and_dtype_of_shards() -> None:
    shards = [Variable(np.zeros((count, 2), F32)) for count in (3, 2)]
    whole = ShardedVariable(shards)
    assert (whole.name, whole.shape, whole.dtype, whole.ndim, whole.size) == (
        "ShardedVariable",
        (5, 2),
        F32,
        2,
        10,
    )
    assert len(whole) == 5
    assert whole.offsets == (0, 3, 5)
    assert all(one is other for one, other in zip(whole.variables, shards, strict=True))
    assert [one is other for one, other in zip(whole, shards, strict=True)] == [True, True]
    assert whole.trainable is shards[0].trainable
    assert whole.aggregation == shards[0].aggregation
    assert whole.synchronization == shards[0].synchronization


def test_value_by_every_way_to_read() -> None:
    table = sharded([[1, 2], [3, 4], [5, 6]], 2)
    for value in (
        table.numpy(),
        table.read_value(),
        table.value(),
        np.asarray(table),
        np.array(table),
    ):
        assert isinstance(value, np.ndarray)
        assert value.dtype == F32
        assert value.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_array_of_another_dtype_of_same_kind() -> None:
    table = sharded([1.5, 2.5], 2)
    assert np.asarray(table, np.float64).dtype == np.float64
    with pytest.raises(
        ValueError, match="'table' holds float32, which is not of the kind of int32"
    ):
        np.asarray(table, np.int32)


@pytest.mark.parametrize("wrong", [None, [], [1], "ab", [np.zeros(2)]])
def test_bad_list_of_variables_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="should be a non-empty list of"):
        ShardedVariable(wrong)


def test_nested_sharded_variable_is_refused() -> None:
    for other in (sharded([1, 2], 2), None):
        with pytest.raises(TypeError, match="should be a non-empty list of"):
            ShardedVariable([Variable(np.zeros(2, F32)), other])  # type: ignore[list-item]


def test_unfit_shards_are_refused() -> None:
    first = Variable(np.zeros((2, 2), F32), name="first")
    with pytest.raises(ValueError, match="must have the same dtype, but 'first' and 'second'"):
        ShardedVariable([first, Variable(np.zeros((2, 2), np.int64), name="second")])
    for shape in ((2, 3), (2,), (2, 2, 1)):
        with pytest.raises(
            ValueError, match="the same shapes except for the first axis, but 'first' and 'second'"
        ):
            ShardedVariable([first, Variable(np.zeros(shape, F32), name="second")])
    with pytest.raises(ValueError, match="the same shapes except"):
        ShardedVariable([Variable(F32(1.0))])


def test_shard_knows_its_container() -> None:
    table = sharded([1, 2], 2)
    shard = table.variables[0]
    container = shard._sharded_container  # reach: TensorFlow's own name, which this test is about
    assert container() is table
    with pytest.raises(ValueError, match="'table/part_0' is a shard of 'table' already"):
        ShardedVariable([shard])
    del table
    gc.collect()
    assert container() is None


def test_leaf_unless_composites_expand() -> None:
    table = sharded([1, 2], 2)
    structure = {"b": [table], "a": 1}
    leaves = nest.flatten(structure)
    assert leaves[0] == 1
    assert leaves[1] is table
    assert len(leaves) == 2
    expanded = nest.flatten(structure, expand_composites=True)
    assert [leaf is other for leaf, other in zip(expanded[1:], table.variables, strict=True)] == [
        True,
        True,
    ]


def test_handles_compare_by_value() -> None:
    one, other = sharded([1, 2], 2), sharded([1, 3], 2)
    assert (one == other).tolist() == [True, False]
    assert (one != other).tolist() == [False, True]
    assert len({one, other, one}) == 2


# -- whole updates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ("assign", [[4], [3], [2], [1]]),
        ("assign_add", [[4], [4], [4], [4]]),
        ("assign_sub", [[-4], [-2], [0], [2]]),
    ],
)
def test_shards_are_updated_by_rows(update: str, message: Any) -> None:
    table = sharded([[0], [1], [2], [3]], (1, 2, 1))
    assert getattr(table, update)(np.array([[4], [3], [2], [1]])) is table
    assert table.numpy().tolist() == message
    assert [shard.numpy().tolist() for shard in table] == [message[:1], message[1:3], message[3:]]


def test_tensorflow_arguments_are_accepted() -> None:
    table = sharded([1, 2], 2)
    assert table.assign([3, 4], use_locking=False, name="set", read_value=False) is table
    assert table.numpy().tolist() == [3, 4]


@pytest.mark.parametrize(
    "value", [[1.0], [1.0, 2.0, 3.0, 4.0], 1.0, [[1.0], [2.0], [3.0]], [[1.0, 2.0, 3.0]]]
)
def test_value_of_other_shape_is_refused(value: Any) -> None:
    table = sharded([1, 2, 3], 2)
    for update in (table.assign, table.assign_add, table.assign_sub):
        with pytest.raises(
            InvalidArgumentError,
            match=r"'table' has shape \(3,\): a value of shape .* does not fit",
        ):
            update(value)
    with pytest.raises(ValueError, match="table"):
        # the same error, as those who know NumPy expect it
        table.assign(value)
    assert table.numpy().tolist() == [1, 2, 3]
    assert table.version == tuple(shard.version for shard in sharded([1, 2, 3], 2))


def test_value_of_other_kind_is_refused() -> None:
    table = sharded([1, 2, 3], 2, dtype=np.int32)
    with pytest.raises(
        InvalidArgumentError, match=r"'table' is of int32, which cannot hold float64 of shape"
    ):
        table.assign([1.5, 2.5, 3.5])
    with pytest.raises(
        InvalidArgumentError, match=r"'table' is of int32, which cannot hold float32 of shape"
    ):
        table.scatter_add(rows([1.5], [0]))
    small = sharded([1, 2, 3], 2, dtype=np.uint8)
    assert small.assign([4, 5, 6]).numpy().tolist() == [4, 5, 6]
    assert table.assign(np.array([4, 5, 6], np.int64)).numpy().tolist() == [4, 5, 6]


def test_value_may_be_a_variable() -> None:
    table, other = sharded([1, 2, 3], 2), sharded([4, 5, 6], 3)
    assert table.assign(other).numpy().tolist() == [4, 5, 6]
    assert table.assign_add(Variable(np.ones(3, F32))).numpy().tolist() == [5, 6, 7]


def test_versions_without_compare_and_set() -> None:
    table = sharded([1, 2, 3], 2)
    before = table.version
    table.scatter_add(rows([1], [2]))
    assert [new - old for new, old in zip(table.version, before, strict=True)] == [0, 1]
    with pytest.raises(UnimplementedError, match="'table' has 2 shards"):
        table.compare_and_set([1, 2, 3], version=before)


# -- rows ------------------------------------------------------------------------------------------

SCATTERS: dict[str, Callable[[Any, Any, Any], object]] = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
    "scatter_update": operator.setitem,
    "batch_scatter_update": operator.setitem,
}


@pytest.mark.parametrize("name", SCATTERS)
def test_rows_change_like_one_array(name: str) -> None:
    start = np.arange(1, 17, dtype=F32).reshape(8, 2)
    for shards in (1, 2, 3, 5):
        table, expected = sharded(start, shards), start.copy()
        indices, values = np.array([7, 0, 3, 0, 4]), np.arange(2, 12, dtype=F32).reshape(5, 2)
        SCATTERS[name](expected, indices, values)
        assert getattr(table, name)(IndexedSlices(values, indices)) is table
        assert np.allclose(table.numpy(), expected), f"in {shards} shards"
        assert (
            getattr(table, name)(
                IndexedSlices(values[:0], indices[:0]), use_locking=False, name="none"
            )
            is table
        )
        assert np.allclose(table.numpy(), expected), f"in {shards} shards, after no rows"


def test_uneven_shards_add_rows() -> None:
    table = sharded(np.zeros((32, 1)), (11, 11, 10))
    indices = [0, 10, 11, 12, 30, 31]
    table.scatter_add(rows([[1]] * 6, indices))
    assert np.flatnonzero(table.numpy()).tolist() == indices


def test_repeated_row_is_added_twice() -> None:
    table = sharded([0, 0, 0, 0], 2)
    assert table.scatter_add(rows([1, 5, 2], [3, 0, 3])).numpy().tolist() == [5, 0, 0, 3]
    assert table.scatter_update(rows([1, 2, 3], [3, 3, 0])).numpy().tolist() == [3, 0, 0, 2]


@pytest.mark.parametrize("name", SCATTERS)
def test_unknown_row_changes_no_shard(name: str) -> None:
    table = sharded([1, 2, 3, 4], 2)
    for bad in (-1, 4, 2**40):
        with pytest.raises(InvalidArgumentError, match=f"'table': index {bad} is out of range"):
            getattr(table, name)(rows([1, 1], [0, bad]))
        assert table.numpy().tolist() == [1, 2, 3, 4], f"index {bad}"


def test_rows_need_indices_and_shape() -> None:
    table = sharded([[1, 2], [3, 4]], 2)
    with pytest.raises(ValueError, match="whole numbers"):
        table.scatter_add(rows(np.ones((1, 1, 2)), [[0]]))
    with pytest.raises(
        InvalidArgumentError, match=r"'table' has rows of shape \(2,\): rows of shape \(3,\)"
    ):
        table.scatter_add(rows([[1, 2, 3]], [0]))
    with pytest.raises(TypeError, match="'table' are changed by IndexedSlices, not by list"):
        table.scatter_add([1, 2])  # type: ignore[arg-type]


def test_sparse_read_keeps_order() -> None:
    table = sharded(np.arange(8), 3)
    assert table.sparse_read([7, 0, 4]).tolist() == [7, 0, 4]
    assert table.sparse_read([3, 3]).tolist() == [3, 3]
    assert table.sparse_read(np.empty(0, np.int64)).shape == (0,)
    assert table.sparse_read([[1, 2], [7, 0]]).tolist() == [[1, 2], [7, 0]]
    for bad in ([8], [-1]):
        with pytest.raises(InvalidArgumentError, match=r"'table': index .* is out of range"):
            table.sparse_read(bad)
    with pytest.raises(InvalidArgumentError, match="whole numbers, not float64"):
        table.sparse_read([0.5])


def test_gather_nd_is_like_one_array(requests: list[Any]) -> None:
    value = np.arange(24).reshape(4, 3, 2)
    table = sharded(value, 2)
    assert table.gather_nd([[3, 2, 1], [0, 0, 0]]).tolist() == [23, 0]
    assert table.gather_nd([[[3, 2]], [[0, 1]]]).tolist() == [[[22, 23]], [[2, 3]]]
    assert requests == [("table/part_0", [0]), ("table/part_1", [1])] * 2
    assert np.array_equal(table.gather_nd([2]), value[2])
    for bad in ([[0, 3]], [[4]], [[-1]], [[0, 0, 0, 0]], 0):
        with pytest.raises(InvalidArgumentError, match="'table'"):
            table.gather_nd(bad)


def test_requests_go_only_to_needed_shards(requests: list[Any]) -> None:
    table = sharded(np.arange(9).reshape(9, 1), 3)
    for read, message in (
        (lambda: table.sparse_read([8, 0, 7]), [("table/part_0", [0]), ("table/part_2", [2, 1])]),
        (lambda: table[4], [("table/part_1", [1])]),
        (lambda: table[2:4], [("table/part_0", [2]), ("table/part_1", [0])]),
        (
            lambda: table[1:9:3],
            [("table/part_0", [1]), ("table/part_1", [1]), ("table/part_2", [1])],
        ),
        (lambda: table[7:4:-2], [("table/part_1", [2]), ("table/part_2", [1])]),
        (lambda: table[3:6], [("table/part_1", "all")]),
        (
            lambda: table[1:7],
            [("table/part_0", [1, 2]), ("table/part_1", "all"), ("table/part_2", [0])],
        ),
        (lambda: table[5:5], []),
        (lambda: table[[8, 2]], [("table/part_0", [2]), ("table/part_2", [2])]),
        (lambda: table[:, 0], [(f"table/part_{place}", "all") for place in range(3)]),
    ):
        requests.clear()
        read()
        assert requests == message


def test_requests_start_before_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Later:
        def __init__(self, pending: Any) -> None:
            seen.append("requests")
            self._pending = pending

        def get_value(self) -> Any:
            seen.append("waited")
            return self._pending.get_value()

    for name in ("read", "rows", "change"):
        start = getattr(LocalStorage, name)
        monkeypatch.setattr(
            LocalStorage, name, lambda self, *given, start=start: Later(start(self, *given))
        )
    table = sharded([1, 2, 3], 3)
    for ask in (
        lambda: table.numpy(),
        lambda: table.sparse_read([2, 1, 0]),
        lambda: table.assign([1, 2, 3]),
        lambda: table.scatter_add(rows([1, 1, 1], [0, 1, 2])),
    ):
        seen.clear()
        ask()
        assert seen == ["requests"] * 3 + ["waited"] * 3


def test_error_is_raised_after_all_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    class Answer:
        def __init__(self, name: str) -> None:
            self._name = name

        def get_value(self) -> Any:
            ended.append(self._name)
            if self._name == "table/part_0":
                raise InvalidArgumentError(None, None, f"{self._name} failed")

    table = sharded([1, 2, 3], 3)
    monkeypatch.setattr(LocalStorage, "change", lambda self, change: Answer(self.ref.name))
    with pytest.raises(InvalidArgumentError, match="table/part_0 failed"):
        table.assign([1, 2, 3])
    assert ended == ["table/part_0", "table/part_1", "table/part_2"]


def test_failed_request_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    class Answer:
        def get_value(self) -> None:
            ended.append("one")

    def start(self: LocalStorage, change: Any) -> Answer:
        if self.ref.name == "table/part_1":
            raise InvalidArgumentError(None, None, "not this one")
        return Answer()

    table = sharded([1, 2, 3], 3)
    monkeypatch.setattr(LocalStorage, "change", start)
    with pytest.raises(InvalidArgumentError, match="not this one"):
        table.assign([1, 2, 3])
    assert ended == ["one"]


# -- functions that change it ----------------------------------------------------------------------


def descend(value: Any, grad: Any, slots: Any, step: Any) -> None:
    if isinstance(grad, IndexedSlices):
        np.subtract.at(value, grad.indices, grad.values)
    else:
        value -= grad


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_apply_splits_the_gradient(shards: int) -> None:
    table = sharded([[4, 4], [5, 5], [6, 6]], shards)
    table.apply(descend, [[1, 0], [2, 0], [3, 0]])
    assert table.numpy().tolist() == [[3, 4], [3, 5], [3, 6]]
    table.apply(descend, rows([[1, 1], [2, 2], [1, 1]], [2, 0, 2]))
    assert table.numpy().tolist() == [[1, 2], [3, 5], [1, 4]]
    with pytest.raises(InvalidArgumentError, match="'table'"):
        table.apply(descend, [[1, 0], [2, 0]])
    with pytest.raises(InvalidArgumentError, match="'table'"):
        table.apply(descend, rows([[1, 1]], [3]))
    assert table.numpy().tolist() == [[1, 2], [3, 5], [1, 4]]


# -- slices ----------------------------------------------------------------------------------------

VECTOR = np.arange(1, 8)
MATRIX = np.arange(24).reshape(8, 3)
CUBE = np.arange(60).reshape(5, 4, 3)

KEYS: dict[str, tuple[np.ndarray[Any, Any], list[Any]]] = {
    "vector": (
        VECTOR,
        [
            *(slice(*bounds) for bounds in ((None,), (1, 4), (2, None), (None, -2), (-3, None), (0, 0), (4, 2), (3, 100))),
            *(slice(*bounds) for bounds in ((-100, 3), (-100, 100), (100, 200), (None, None, 2), (1, None, 3))),
            *(slice(*bounds) for bounds in ((None, None, -1), (5, 1, -2), (100, None, -3), (-1, -100, -1), (1, 5, -1))),
            *(slice(*bounds) for bounds in ((None, None, 100), (np.int64(1), np.array(4)), (6, None, -4))),
            0, 3, 6, -1, -7, np.int64(2), np.array(2), ..., None, (...,), (), (0,), (..., 0), (0, ...), (0, None),
            (None, slice(1, 3)), (None, 2), (slice(2, 5), None), (slice(2, 5), ...), (..., slice(None, None, -2)),
            [0], [6, 0, 3], [-1, -7, 2], [], [[0, 1], [2, 6]], np.array([5, 5]), np.array([[1]]), VECTOR > 3, VECTOR > 100,
        ],
    ),
    "matrix": (
        MATRIX,
        [
            slice(None, 0), (slice(None, 0), 0), (slice(None), 0), (slice(2, 7), slice(1, None)), (slice(6, 1, -2), -1),
            (3, 1), (3, slice(None, None, -1)), (-1, ...), (..., 1), (..., slice(0, 2)), (..., 3, slice(None)),
            (slice(None), None, 1), (None, slice(1, 4), None), (slice(5, 5), slice(5, 5)), (7, None, 2), (slice(1, 8, 5), [2, 0]),
            [4, 4, 0], ([1, 7], [2, 0]), (np.array([[7], [0]]), [1, 2]), ([True] * 4 + [False] * 4,), (MATRIX > 11,),
            (MATRIX[:, 0] > 11, 1), (slice(2, 6), np.array([True, False, True])), ([1, 2], slice(None), None),
        ],
    ),
    "cube": (
        CUBE,
        [
            (1, 2, 0), (slice(None, None, -2), slice(1, 3), 2), (..., 0), (2, ..., 0), (slice(3), None, ..., 1),
            ([4, 0], slice(None), [0, 2]), (3, slice(None), [0, 2]), (CUBE[:, :, 0] > 20,), ([0, 3], [1, 1], [2, 0]),
            (None, None, -1), (slice(1, 4), [[0, 1], [2, 3]]), (..., [1, 2], 0),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KEYS)
def test_index_is_like_one_array(kind: str, shards: int) -> None:
    array, keys = KEYS[kind][0].astype(F32), KEYS[kind][1]
    table = sharded(array, shards)
    for key in keys:
        expected, found = array[key], table[key]
        assert (type(found), found.dtype) == (type(expected), expected.dtype), f"{kind}[{key!r}]"
        # shapes, too
        assert np.array_equal(found, expected), f"{kind}[{key!r}] is {found!r}, not {expected!r}"


def test_random_slices_are_like_one_array() -> None:
    random = np.random.default_rng(20)
    tables = {count: sharded(MATRIX, count) for count in (1, 3, 5, 8)}
    for _ in range(300):
        low, high = (None if number > 10 else int(number) for number in random.integers(-11, 13, 2))
        step = int(random.integers(1, 5)) * int(random.choice([-1, 1]))
        for count, table in tables.items():
            key = slice(low, high, step)
            assert np.array_equal(table[key], MATRIX[key]), (count, key)


def test_bad_index_is_refused_first(requests: list[Any]) -> None:
    table = sharded(MATRIX, 3)
    cases: list[tuple[Any, type[Exception], str]] = [
        (8, IndexError, "out of bounds"),
        (-9, IndexError, "out of bounds"),
        ([0, 8], IndexError, "out of bounds"),
        ((0, 3), IndexError, "out of bounds"),
        ((0, 0, 0), IndexError, "too many indices"),
        ((..., ...), IndexError, "single ellipsis"),
        (1.0, IndexError, "whole numbers"),
        ("a", IndexError, "whole numbers"),
        ([0.5], IndexError, "whole numbers"),
        (np.array([True, False]), IndexError, "does not fit"),
        (True, IndexError, "use a mask"),
        (np.array(True), IndexError, "use a mask"),
        (slice(None, None, 0), ValueError, "step cannot be zero"),
        (slice(0.5, None), TypeError, "integers"),
        (Variable(np.array(1)), TypeError, "not allowed"),
        (slice(Variable(np.array(1)), None), TypeError, "not allowed"),
        ((0, Variable(np.array(1))), TypeError, "not allowed"),
    ]
    for key, error, message in cases:
        with pytest.raises(error, match=message):
            table[key]
        assert [what for what in requests if what[1] == "all"] == [], (
            f"something has moved for {key!r}"
        )


def test_whole_rows_can_be_set() -> None:
    cases: list[tuple[Any, Any]] = [
        (2, [7, 8, 9]), (-1, 5), (slice(1, 6, 2), 4), (slice(6, 1, -2), [[1], [2], [3]]), ([7, 0, 7], [[1], [2], [3]]),
        (MATRIX[:, 0] > 11, -1), (..., MATRIX[::-1]), (slice(None), 0), ((slice(2), slice(None)), 3), (slice(3, 3), 1),
    ]  # fmt: skip
    for key, value in cases:
        table, expected = sharded(MATRIX, 3), MATRIX.astype(F32)
        table[key] = value
        expected[key] = value
        assert np.array_equal(table.numpy(), expected), f"[{key!r}] = {value!r}"


def test_parts_of_rows_cannot_be_set() -> None:
    table = sharded(MATRIX, 3)
    for key in ((0, 1), (slice(None), 0), (None, 0), MATRIX > 3):
        with pytest.raises(TypeError, match="only whole rows of variable 'table'"):
            table[key] = 1
    assert np.array_equal(table.numpy(), MATRIX)


# -- operators -------------------------------------------------------------------------------------

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
]
BINARY += [
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
    operator.matmul,
    divmod,
]


@pytest.mark.parametrize("operation", BINARY, ids=lambda operation: operation.__name__)
def test_operators_give_arrays(operation: Callable[[Any, Any], Any]) -> None:
    left, right = np.array([1, 2, 3], F32), np.array([3, 2, 2], F32)
    table, other = sharded(left, 2), sharded(right, 3)
    for found in (operation(table, other), operation(table, right), operation(left, other)):
        assert np.array_equal(found, operation(left, right))
        assert not isinstance(found, ShardedVariable)
    if operation is not operator.matmul:
        assert np.array_equal(operation(table, 2), operation(left, F32(2)))
        assert np.array_equal(operation(2, table), operation(F32(2), left))


def test_operators_of_integers() -> None:
    table, bits = sharded([-1, 2], 2), sharded([1, 6], 2, dtype=np.int32)
    assert (-table).tolist() == [1, -2]
    assert (+table).tolist() == [-1, 2]
    assert abs(table).tolist() == [1, 2]
    assert (~bits).tolist() == [-2, -7]
    assert (bits & 3).tolist() == [1, 2]
    assert (1 | bits).tolist() == [1, 7]
    assert (bits ^ bits).tolist() == [0, 0]
    assert (bits << 1).tolist() == [2, 12]
    assert (bits >> 1).tolist() == [0, 3]


def test_numpy_functions_take_it() -> None:
    table = sharded([[1, 2], [3, 4]], 2)
    assert np.sum(table) == 10
    assert np.concatenate([table, table]).shape == (4, 2)
    assert np.add.reduce(table).tolist() == [4, 6]
    target = np.zeros((2, 2), F32)
    target += table
    assert target.tolist() == [[1, 2], [3, 4]]
    assert 4 in table


def test_operator_never_changes_a_variable(requests: list[Any]) -> None:
    table = sharded([1, 2], 2)
    with pytest.raises(
        TypeError, match=r"'table' is not changed by an operator such as \+=: use assign_add"
    ):
        table += 1
    assert table.numpy().tolist() == [1, 2]


def test_single_element_is_a_number() -> None:
    one = sharded([[2.5]], 1)
    assert (bool(one), repr(one)) == (
        True,
        "<ShardedVariable 'table' shape=(1, 1) dtype=float32 in shards of 1 rows>",
    )
    assert (float(one[0, 0]), int(one[0, 0])) == (2.5, 2)
    for convert in (bool, int, float, complex):
        with pytest.raises((TypeError, ValueError)):
            convert(sharded([1, 2], 2))


# -- handles ---------------------------------------------------------------------------------------


def test_names_of_variable_and_shards() -> None:
    table = sharded(np.zeros((4, 2)), 2, name="w")
    assert (table.name, [shard.name for shard in table]) == ("w", ["w/part_0", "w/part_1"])
