"""What each operator does with its arguments: the facts of tf.data that programs rely on."""

from __future__ import annotations

import collections
import inspect
import random
import threading
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.data.helpers import plain
from tests.scheduling.work import until
from zmqdist import TensorSpec
from zmqdist.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    Options,
    Ragged,
)
from zmqdist.data.constants import SHARD_HINT
from zmqdist.data.structure import DatasetSpec
from zmqdist.errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
)

INF, UNKNOWN = INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


def numbers(dataset: Any) -> list[Any]:
    """Elements as lists and plain numbers."""
    return [np.asarray(x).tolist() for x in dataset]


def failing(x: Any) -> Any:
    if x > 2:
        raise KeyError("too large")
    return x


# -- general rules ---------------------------------------------------------------------------------


def test_dataset_does_nothing_until_read() -> None:
    called: list[int] = []
    dataset = Dataset.range(3).map(lambda x: called.append(int(x)) or x).batch(2)
    assert not called
    assert numbers(dataset) == [[0, 1], [2]]
    assert called == [0, 1, 2]


@pytest.mark.parametrize("parallel", [None, 2])
def test_error_costs_only_its_element(parallel: int | None) -> None:
    iterator = iter(Dataset.range(6).map(failing, num_parallel_calls=parallel))
    found: list[Any] = []
    for _ in range(8):
        try:
            found.append(int(next(iterator, -1)))
        except KeyError:
            found.append("E")
    assert found == [0, 1, 2, "E", "E", "E", -1, -1]


def test_error_below_batch_leaves_other_elements() -> None:
    iterator = iter(Dataset.range(5).map(lambda x: 6 // int(x - 2)).batch(2))
    assert numbers([next(iterator)]) == [[-3, -6]]
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    assert numbers(iterator) == [[6, 3]]


def test_error_in_zip_costs_row() -> None:
    rows = Dataset.zip(
        Dataset.range(4), Dataset.range(4).map(lambda x: 6 // int(x - 1)), Dataset.range(4)
    )
    assert [tuple(map(int, row)) for row in rows.ignore_errors()] == [
        (0, -6, 0),
        (2, 6, 2),
        (3, 3, 3),
    ]


def test_unknown_len_is_refused() -> None:
    assert len(Dataset.range(7)) == 7
    with pytest.raises(TypeError, match="infinite"):
        len(Dataset.range(7).repeat())
    with pytest.raises(TypeError, match="unknown"):
        len(Dataset.range(7).filter(bool))
    assert bool(Dataset.range(0))


def test_functions_get_tuple_parts_and_whole_dicts() -> None:
    pair = collections.namedtuple("pair", "a b")
    rows = Dataset.zip(Dataset.range(2), Dataset.range(2))
    assert numbers(rows.map(lambda a, b: a + b)) == [0, 2]
    assert numbers(rows.map(lambda a, b: {"a": a}).map(lambda row: row["a"])) == [0, 1]
    assert numbers(rows.map(lambda a, b: pair(a, b)).map(lambda row: row.b)) == [0, 1]
    assert numbers(rows.filter(lambda a, b: a > 0).map(lambda a, b: a)) == [1]


def test_list_becomes_array() -> None:
    (row,) = Dataset.range(1).map(lambda x: ([1.0, 2.0], {"n": 3}))
    assert plain(row) == (("float64", [1.0, 2.0]), {"n": ("int64", 3)})


@pytest.mark.parametrize(
    "bad",
    [None, object(), [1, "a", None], 2**70, np.array([None])],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_wrong_element_raises_at_read(bad: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        next(iter(Dataset.range(1).map(lambda x: bad)))


def test_arrays_of_as_numpy_iterator_are_read_only() -> None:
    for array in Dataset.range(4).batch(2).as_numpy_iterator():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_apply_needs_function_to_dataset() -> None:
    assert numbers(Dataset.range(3).apply(lambda dataset: dataset.skip(1))) == [1, 2]
    with pytest.raises(TypeError, match="must return a Dataset"):
        Dataset.range(3).apply(lambda dataset: 3)


def test_operators_accept_name() -> None:
    methods = [value for name, value in vars(Dataset).items() if not name.startswith("_")]
    assert len(methods) > 35
    for method in methods:
        assert "name" in inspect.signature(getattr(method, "__func__", method)).parameters
    assert numbers(Dataset.range(3, name="a").map(abs, name="b").take(1, name="c")) == [0]


def test_later_options_win() -> None:
    first, second = Options(), Options()
    first.deterministic = True
    first.threading.private_threadpool_size = 3
    second.deterministic = False
    options = Dataset.range(3).with_options(first).map(abs).with_options(second).options()
    assert options.deterministic is False
    assert options.threading.private_threadpool_size == 3
    with pytest.raises(AttributeError):
        options.determinstic = True


# -- at the call, at the read ----------------------------------------------------------------------

TEN = Dataset.range(10)
BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda: Dataset.range(), ValueError, "one to three"),
    (lambda: Dataset.range(1, 2, 3, 4), ValueError, "one to three"),
    (lambda: Dataset.range(1, 2, 0), InvalidArgumentError, "step"),
    (lambda: Dataset.from_tensor_slices(3), ValueError, "scalar"),
    (lambda: Dataset.from_tensor_slices(([1, 2], [1])), ValueError, "differ in length"),
    (lambda: Dataset.from_generator([1, 2]), TypeError, "function"),
    (lambda: Dataset.list_files("/nowhere/*.txt"), InvalidArgumentError, "no files match"),
    (lambda: TEN.map(3), TypeError, "function"),
    (lambda: TEN.map(abs, num_parallel_calls=0), ValueError, "num_parallel_calls"),
    (lambda: TEN.batch(0), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.padded_batch(-1), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.padded_batch(2, padding_values=0.5), TypeError, "padding value"),
    *(
        (call, TypeError, "whole number")
        for call in (
            lambda: TEN.batch(2.7),
            lambda: TEN.padded_batch(2, [4.7]),
            lambda: TEN.map(abs, num_parallel_calls=1.5),
            lambda: TEN.take(2.7),
            lambda: TEN.skip(2.7),
            lambda: TEN.shard(2.7, 1),
            lambda: TEN.enumerate(2.7),
            lambda: TEN.batch(2).rebatch([2.7]),
            lambda: TEN.repeat(2.7),
            lambda: TEN.shuffle(2.7),
            lambda: TEN.prefetch(2.7),
            lambda: TEN.window(2.7),
            lambda: TEN.interleave(abs, 2.7),
            lambda: TEN.group_by_window(abs, abs, 2.7),
            lambda: TEN.bucket_by_sequence_length(len, [3.5], [2, 2]),
        )
    ),
    (lambda: TEN.unbatch(), ValueError, "scalar"),
    (lambda: TEN.batch(2).rebatch([2, -1]), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.batch(2).rebatch(0), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.batch(2).rebatch([]), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.batch(2).rebatch([[2, 1]]), InvalidArgumentError, "a number or a list of numbers"),
    (lambda: TEN.rebatch(2), ValueError, "scalar"),
    (lambda: TEN.padded_batch(2, [2]), ValueError, "does not fit elements of the shape"),
    (
        lambda: TEN.batch(3, drop_remainder=True).padded_batch(2, [2]),
        ValueError,
        "does not fit elements of the shape",
    ),
    (lambda: TEN.batch(3).padded_batch(2, [-2]), ValueError, "None or -1 for the largest, not -2"),
    (lambda: TEN.padded_batch(2, padding_values=[1, 2]), ValueError, "a padding value is a scalar"),
    (lambda: Dataset.range([1, 2]), TypeError, "expected a number"),
    (
        lambda: Dataset.from_generator(
            lambda: [1], np.int64, output_signature=TensorSpec((), np.int64)
        ),
        TypeError,
        "output_signature or output_types, not both",
    ),
    (lambda: TEN.shuffle(0), InvalidArgumentError, "buffer_size"),
    (lambda: TEN.shuffle(-1), InvalidArgumentError, "buffer_size"),
    (lambda: TEN.shuffle(-3), InvalidArgumentError, "buffer_size"),
    (lambda: TEN.prefetch(-2), InvalidArgumentError, "buffer_size"),
    (lambda: TEN.shard(0, 0), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.shard(5, 5), InvalidArgumentError, "Index must be between 0 and 4"),
    (
        lambda: TEN.shard(5, SHARD_HINT),
        InvalidArgumentError,
        r"Index must be between 0 and 4 \(currently index = -1\).",
    ),
    (lambda: TEN.window(0), InvalidArgumentError, "size"),
    (lambda: TEN.window(1, shift=0), InvalidArgumentError, "shift"),
    (lambda: TEN.window(1, stride=0), InvalidArgumentError, "stride"),
    (lambda: TEN.interleave(abs, cycle_length=0), InvalidArgumentError, "cycle_length"),
    (lambda: TEN.interleave(abs, block_length=0), InvalidArgumentError, "block_length"),
    (lambda: Dataset.zip([TEN, TEN]), TypeError, "tuples"),
    (lambda: Dataset.zip(3), TypeError, "Datasets"),
    (
        lambda: TEN.concatenate(Dataset.range(3.0, output_type=np.float32)),
        TypeError,
        "different types",
    ),
    (lambda: TEN.concatenate(Dataset.zip(TEN, TEN)), TypeError, "different structures"),
    (lambda: TEN.group_by_window(abs, abs), ValueError, "exactly one"),
    (lambda: TEN.group_by_window(abs, abs, 3, abs), ValueError, "exactly one"),
    (lambda: TEN.group_by_window(abs, abs, 0), InvalidArgumentError, "greater than zero"),
    (lambda: TEN.bucket_by_sequence_length(len, [3], [2]), ValueError, "2 buckets"),
    (lambda: Dataset.sample_from_datasets([]), ValueError, "pass one dataset or more"),
    (lambda: Dataset.sample_from_datasets([TEN, TEN], [0.5]), ValueError, "weights"),
    (lambda: Dataset.sample_from_datasets([TEN, TEN], [1, 2]), TypeError, "float32 or float64"),
    (lambda: Dataset.choose_from_datasets([], TEN), ValueError, "pass one dataset or more"),
    (lambda: Dataset.choose_from_datasets([TEN], TEN.batch(2)), TypeError, "int64 scalars"),
    (lambda: TEN.with_options("fast"), TypeError, "Options"),
    (lambda: TEN.get_single_element(), InvalidArgumentError, "more than one element"),
    (lambda: TEN.take(0).get_single_element(), InvalidArgumentError, "Dataset was empty."),
    (lambda: TEN.reduce(np.int64(0), lambda state, x: 0.5), TypeError, "must keep"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS)
def test_bad_argument_raises_at_call(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


BAD_READS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: Dataset.range(1, 3).map(np.arange).batch(2),
        InvalidArgumentError,
        "cannot batch shapes",
    ),
    (lambda: TEN.map(lambda x: x if x else 0.5).batch(2), InvalidArgumentError, "cannot batch"),
    (lambda: Dataset.range(1).map(lambda x: b"a\0").batch(1), InvalidArgumentError, "NUL"),
    (
        lambda: TEN.map(lambda x: x, output_signature=TensorSpec((2,), np.int64)),
        InvalidArgumentError,
        "output_signature",
    ),
    (
        lambda: TEN.map(lambda x: x, 2, output_signature={"x": TensorSpec((), np.int64)}),
        InvalidArgumentError,
        "output_signature",
    ),
    (
        lambda: Dataset.from_source([np.ones(2)], output_signature=TensorSpec((3,), np.float64)),
        InvalidArgumentError,
        "output_signature",
    ),
    (lambda: TEN.filter(lambda x: 3), TypeError, "must return a bool"),
    (lambda: TEN.take_while(lambda x: None), TypeError, "must return a bool"),
    (lambda: TEN.flat_map(lambda x: x), TypeError, "must return a Dataset"),
    (lambda: TEN.scan(0, lambda state, x: state), TypeError, "state, output"),
    (lambda: TEN.scan(0, lambda state, x: (0.5, x)), TypeError, "must keep"),
    (lambda: TEN.shard(SHARD_HINT, SHARD_HINT), FailedPreconditionError, "ShardingPolicy.HINT"),
    (lambda: TEN.map(lambda x: np.arange(3)).padded_batch(2, [2]), DataLossError, "smaller size"),
    (lambda: TEN.group_by_window(lambda x: 0.5, lambda key, rows: rows, 2), ValueError, "int64"),
    (
        lambda: Dataset.choose_from_datasets([TEN], TEN.skip(7)),
        InvalidArgumentError,
        "Selector index out of range",
    ),
    (lambda: TEN.batch(5).unique(), TypeError, "scalars"),
    (
        lambda: Dataset.from_generator(lambda: ["a"], output_types=np.int64),
        InvalidArgumentError,
        "expected int64",
    ),
    (
        lambda: Dataset.from_generator(
            lambda: [[1, 2]], output_signature=TensorSpec((3,), np.int64)
        ),
        InvalidArgumentError,
        "expected int64 of shape",
    ),
    (
        lambda: (
            Dataset.range(9)
            .map(np.arange)
            .bucket_by_sequence_length(len, [3], [2, 2], pad_to_bucket_boundary=True)
        ),
        InvalidArgumentError,
        "last boundary",
    ),
]


@pytest.mark.parametrize(("build", "error", "text"), BAD_READS)
def test_bad_element_raises_at_read(build: Any, error: type[Exception], text: str) -> None:
    dataset = build()
    with pytest.raises(error, match=text):
        list(dataset)


# -- cardinality -----------------------------------------------------------------------------------

CARDINALITIES: list[tuple[Any, int]] = [
    (TEN, 10),
    (Dataset.range(1, 10, 4), 3),
    (Dataset.range(3, 0), 0),
    (Dataset.random(), INF),
    (Dataset.counter(), INF),
    (Dataset.from_generator(list), UNKNOWN),
    (TEN.map(abs).prefetch(1).cache().shuffle(3).enumerate(), 10),
    (TEN.scan(0, max), 10),
    (TEN.filter(bool), UNKNOWN),
    (TEN.repeat().filter(bool), UNKNOWN),
    (TEN.repeat().flat_map(Dataset.range), UNKNOWN),
    (TEN.repeat().interleave(Dataset.range), UNKNOWN),
    (TEN.repeat().take_while(bool), UNKNOWN),
    (TEN.batch(3), 4),
    (TEN.batch(3, drop_remainder=True), 3),
    (TEN.batch(3).rebatch(2), UNKNOWN),
    (TEN.batch(5, drop_remainder=True).unbatch(), 10),
    (TEN.batch(5).unbatch(), UNKNOWN),
    (TEN.take(3), 3),
    (TEN.take(-1), 10),
    (TEN.take(30), 10),
    (TEN.repeat().take(7), 7),
    (TEN.skip(3), 7),
    (TEN.skip(30), 0),
    (TEN.skip(-1), 0),
    (TEN.repeat().skip(3), INF),
    (TEN.repeat(3), 30),
    (TEN.repeat(0), 0),
    (TEN.repeat(), INF),
    (TEN.take(0).repeat(), 0),
    (TEN.filter(bool).repeat(0), 0),
    (TEN.filter(bool).repeat(2), UNKNOWN),
    (TEN.filter(bool).repeat(), INF),
    (TEN.concatenate(TEN), 20),
    (TEN.filter(bool).concatenate(TEN.repeat()), INF),
    (TEN.concatenate(TEN.filter(bool)), UNKNOWN),
    (Dataset.zip(TEN, Dataset.range(3)), 3),
    (Dataset.zip(TEN, TEN.repeat()), 10),
    (Dataset.zip(TEN.repeat(), TEN.repeat()), INF),
    (Dataset.zip(TEN, TEN.filter(bool)), UNKNOWN),
    (Dataset.zip(TEN.repeat(), TEN.filter(bool)), UNKNOWN),
    (TEN.window(3), 4),
    (TEN.window(3, 1, 2, drop_remainder=True), 6),
    (TEN.group_by_window(abs, abs, 3), UNKNOWN),
    (TEN.repeat().group_by_window(abs, abs, 3), INF),
    (Dataset.sample_from_datasets([TEN, TEN]), UNKNOWN),
    (Dataset.choose_from_datasets([TEN, TEN], TEN), UNKNOWN),
]


@pytest.mark.parametrize(
    ("dataset", "count"),
    CARDINALITIES,
    ids=lambda value: getattr(value, "op", None) and value.op.one_line(),
)
def test_cardinality_follows_from_inputs(dataset: Any, count: int) -> None:
    assert dataset.cardinality() == count


@pytest.mark.parametrize("index", range(4))
def test_shards_of_ten_by_four(index: int) -> None:
    shard = TEN.shard(4, index)
    assert numbers(shard) == list(range(10))[index::4]
    assert shard.cardinality() == [3, 3, 2, 2][index]


# -- against plain Python --------------------------------------------------------------------------


def test_range_equals_python_range() -> None:
    draw = random.Random(1)
    for _ in range(100):
        start, stop, step = (
            draw.randint(-9, 9),
            draw.randint(-9, 9),
            draw.choice([-3, -2, -1, 1, 2, 3]),
        )
        assert numbers(Dataset.range(start, stop, step)) == list(range(start, stop, step))
        items, n, k = list(range(draw.randint(0, 9))), draw.randint(1, 4), draw.randint(0, 5)
        dataset = Dataset.range(len(items))
        assert numbers(dataset.batch(n)) == [items[i : i + n] for i in range(0, len(items), n)]
        assert numbers(dataset.take(k)) == items[:k]
        assert numbers(dataset.skip(k)) == items[k:]
        assert numbers(dataset.repeat(k)) == items * k
        assert numbers(dataset.batch(n).unbatch()) == items
        assert numbers(dataset.batch(n).rebatch(k + 1)) == [
            items[i : i + k + 1] for i in range(0, len(items), k + 1)
        ]
        windows = [numbers(window) for window in dataset.window(n, k + 1, 2)]
        assert windows == [items[i : i + 2 * n - 1 : 2] for i in range(0, len(items), k + 1)]


def test_range_of_other_dtype() -> None:
    assert {type(x) for x in Dataset.range(3, output_type=np.float32)} == {np.float32}
    assert numbers(Dataset.range(0.0, 1.0, 0.25, output_type=np.float64)) == [0.0, 0.25, 0.5, 0.75]


def test_interleave_fills_free_slot_at_its_turn() -> None:
    def dataset_of(x: Any) -> Dataset:
        return Dataset.from_tensors(x).repeat(6)

    wanted = [
        1,
        1,
        1,
        1,
        2,
        2,
        2,
        2,
        1,
        1,
        2,
        2,
        3,
        3,
        3,
        3,
        4,
        4,
        4,
        4,
        3,
        3,
        4,
        4,
        5,
        5,
        5,
        5,
        5,
        5,
    ]
    assert (
        numbers(Dataset.range(1, 6).interleave(dataset_of, cycle_length=2, block_length=4))
        == wanted
    )
    assert numbers(Dataset.range(1, 6).interleave(dataset_of, 2, 4, num_parallel_calls=2)) == wanted
    loose = Dataset.range(1, 6).interleave(
        dataset_of, 2, 4, num_parallel_calls=AUTOTUNE, deterministic=False
    )
    assert sorted(numbers(loose)) == sorted(wanted)


def test_group_by_window_yields_full_windows_first() -> None:
    groups = TEN.group_by_window(
        lambda x: 2 - x % 3, lambda key, rows: rows.batch(9), window_size=3
    )
    assert numbers(groups) == [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9]]
    rest = TEN.take(5).group_by_window(
        lambda x: 2 - x % 3, lambda key, rows: rows.batch(9), window_size=3
    )
    assert numbers(rest) == [[2], [1, 4], [0, 3]]


def test_buckets_have_own_batch_sizes() -> None:
    rows = Dataset.range(1, 7).map(np.ones)
    assert [x.shape for x in rows.bucket_by_sequence_length(len, [3, 5], [2, 2, 1])] == [
        (2, 2),
        (2, 4),
        (1, 5),
        (1, 6),
    ]
    reached = rows.take(3).bucket_by_sequence_length(
        len, [3, 5], [2, 2, 1], pad_to_bucket_boundary=True
    )
    assert [x.shape for x in reached] == [(2, 2), (1, 4)]


def test_padding_fills_to_largest_or_shape() -> None:
    rows = Dataset.range(1, 4).map(lambda n: (np.full(n, n), n))
    first, second = rows.padded_batch(2, padding_values=(-1, 0))
    assert plain(first) == (("int64", [[1, -1], [2, 2]]), ("int64", [1, 2]))
    assert plain(second) == (("int64", [[3, 3, 3]]), ("int64", [3]))
    wide = rows.padded_batch(3, ([5], []))
    assert next(iter(wide))[0].shape == (3, 5)
    assert wide.element_spec == (TensorSpec((None, 5), np.int64), TensorSpec((None,), np.int64))


def test_ragged_batches_keep_rows() -> None:
    (batch,) = Dataset.range(1, 4).map(np.arange).ragged_batch(3)
    assert batch.to_list() == [[0], [0, 1], [0, 1, 2]]
    assert batch.row_splits.dtype == np.int64


def test_window_of_tuples_is_tuple_of_datasets() -> None:
    rows = Dataset.zip(TEN, TEN).window(4)
    a, b = next(iter(rows))
    assert (numbers(a), numbers(b)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert rows.element_spec == (DatasetSpec(TensorSpec((), np.int64)),) * 2


def test_choices_stop_with_first_empty_dataset() -> None:
    choices = Dataset.from_tensor_slices(np.array([0, 1, 0, 1, 1]))
    inputs = [Dataset.range(1), Dataset.range(10, 20)]
    assert numbers(Dataset.choose_from_datasets(inputs, choices)) == [0, 10]
    assert numbers(Dataset.choose_from_datasets(inputs, choices, stop_on_empty_dataset=False)) == [
        0,
        10,
        11,
        12,
    ]


def test_samples_follow_weights() -> None:
    inputs = [Dataset.from_tensors(n).repeat() for n in range(3)]
    found = collections.Counter(
        numbers(Dataset.sample_from_datasets(inputs, [0.5, 0.0, 0.5], seed=1).take(1000))
    )
    assert found[1] == 0
    assert 400 < found[0] < 600
    assert numbers(Dataset.sample_from_datasets(inputs, [0.0, 0.0, 0.0])) == []
    finite = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(3)], seed=2)
    assert sorted(numbers(finite)) == [0, 0, 1, 1, 2, 2]
    weights = Dataset.from_tensors(np.array([0.0, 1.0, 0.0])).repeat()
    assert numbers(Dataset.sample_from_datasets(inputs, weights).take(5)) == [1] * 5


def test_resampling_comes_close_to_target() -> None:
    coins = Dataset.range(4000).rejection_resample(lambda x: x % 4 == 0, [0.5, 0.5], seed=1)
    with pytest.raises(ValueError, match="int64"):
        next(iter(coins))
    for initial in (None, [0.75, 0.25]):
        coins = Dataset.range(4000).rejection_resample(
            lambda x: np.int64(x % 4 == 0), [0.5, 0.5], initial, seed=1
        )
        kinds = collections.Counter(int(kind) for kind, _ in coins)
        assert 0.45 < kinds[1] / kinds.total() < 0.55


def test_source_finds_items_by_position() -> None:
    source = Dataset.from_source([1, None, 3])
    assert len(source) == 3
    assert numbers(source.ignore_errors()) == [1, 3]


def test_reduce_scan_and_unique() -> None:
    assert TEN.reduce(np.int64(0), lambda state, x: state + x) == 45
    assert numbers(TEN.scan(np.int64(0), lambda state, x: (state + x, state + x)).take(4)) == [
        0,
        1,
        3,
        6,
    ]
    assert numbers(Dataset.from_tensor_slices([1, 2, 1, 3, 2]).unique()) == [1, 2, 3]
    assert Dataset.range(4, 5).get_single_element() == 4


def test_repeat_of_empty_dataset_ends() -> None:
    assert numbers(Dataset.range(0).repeat()) == []
    assert numbers(TEN.filter(lambda x: False).repeat()) == []


def test_zip_keeps_structure() -> None:
    pair = collections.namedtuple("pair", "a b")
    one = Dataset.range(1)
    assert list(Dataset.zip(one)) == list(one)
    assert list(Dataset.zip((one,))) == [(0,)]
    assert list(Dataset.zip(datasets=(one, (one, one)))) == [(0, (0, 0))]
    assert list(Dataset.zip({"a": one, "b": one})) == [{"a": 0, "b": 0}]
    (row,) = Dataset.zip(pair(one, one))
    assert type(row) is pair


def test_concatenate_relaxes_shapes() -> None:
    joined = Dataset.from_tensors(np.zeros(2)).concatenate(Dataset.from_tensors(np.zeros(3)))
    assert joined.element_spec == TensorSpec((None,), np.float64)


def test_specs_of_builtin_operators_need_no_run() -> None:
    batches = TEN.enumerate().batch(4, drop_remainder=True)
    assert batches.known_spec == (TensorSpec((4,), np.int64), TensorSpec((4,), np.int64))
    signature = TEN.map(failing, output_signature=TensorSpec((), np.int64)).batch(2)
    assert signature.element_spec == TensorSpec((None,), np.int64)
    with pytest.raises(FailedPreconditionError, match="output_signature"):
        _ = Dataset.range(0).map(abs).element_spec


# -- randomness ------------------------------------------------------------------------------------


def test_shuffle_emits_once_buffer_is_full() -> None:
    read: list[int] = []
    iterator = iter(TEN.map(lambda x: read.append(int(x)) or x).shuffle(4))
    next(iterator)
    assert read == [0, 1, 2, 3]


def test_epochs_differ_and_repeat_with_seed() -> None:
    dataset = Dataset.range(50).shuffle(50, seed=7)
    epochs = [numbers(dataset) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = Dataset.range(50).shuffle(50, seed=7)
    assert [numbers(again) for _ in range(3)] == epochs
    repeated = numbers(Dataset.range(50).shuffle(50, seed=7).repeat(3))
    assert repeated == [x for epoch in epochs for x in epoch]


def test_repeat_behind_shuffle_keeps_epochs_apart() -> None:
    behind = numbers(Dataset.range(20).shuffle(20, seed=1).repeat(2))
    assert sorted(behind[:20]) == list(range(20))
    before = numbers(Dataset.range(20).repeat(2).shuffle(20, seed=1))
    assert sorted(before[:20]) != list(range(20))


@pytest.mark.parametrize("seed", [None, 3])
def test_shuffle_without_reshuffle_keeps_order(seed: int | None) -> None:
    dataset = Dataset.range(30).shuffle(30, seed=seed, reshuffle_each_iteration=False)
    assert numbers(dataset) == numbers(dataset) == numbers(dataset.repeat(1))


def test_unseeded_orders_differ() -> None:
    assert numbers(Dataset.range(50).shuffle(50)) != numbers(Dataset.range(50).shuffle(50))


def test_process_seed_and_operator_order_decide() -> None:
    def run(seed: int | None) -> list[Any]:
        zd.random.set_seed(seed)
        return [numbers(Dataset.range(50).shuffle(50)) for _ in range(2)]

    try:
        first = run(5)
        assert first == run(5)
        assert first[0] != first[1]
        assert run(6) != first
    finally:
        zd.random.set_seed(None)
    assert run(None) != run(None)


def test_random_repeats_unless_rerandomized() -> None:
    same = Dataset.random(seed=4).take(5)
    assert numbers(same) == numbers(same)
    fresh = Dataset.random(seed=4, rerandomize_each_iteration=True).take(5)
    assert numbers(fresh) != numbers(fresh)
    assert all(0 <= x < 2**32 for x in numbers(same))


# -- threads ---------------------------------------------------------------------------------------


def test_parallel_map_keeps_order() -> None:
    together = threading.Barrier(3, timeout=20)
    found = Dataset.range(6).map(lambda x: together.wait() * 0 + x, num_parallel_calls=3)
    assert numbers(found) == [0, 1, 2, 3, 4, 5]


def test_unordered_map_yields_ready_element_first() -> None:
    gate = threading.Event()

    def slow_first(x: Any) -> Any:
        if x == 0:
            assert gate.wait(20)
        return x

    iterator = iter(Dataset.range(3).map(slow_first, num_parallel_calls=2, deterministic=False))
    assert [int(next(iterator)), int(next(iterator))] == [1, 2]
    gate.set()
    assert numbers(iterator) == [0]


def test_deterministic_option_is_default() -> None:
    gate = threading.Event()
    options = Options()
    options.deterministic = False
    dataset = Dataset.range(2).map(
        lambda x: x if x else x + gate.wait(20) * 0, num_parallel_calls=2
    )
    iterator = iter(dataset.with_options(options))
    assert next(iterator) == 1
    gate.set()
    assert numbers(iterator) == [0]


def test_prefetch_thread_ends_with_iterator() -> None:
    read = threading.Semaphore(0)
    iterator = iter(Dataset.range(100).map(lambda x: read.release() or x).prefetch(3))
    assert next(iterator) == 0
    for _ in range(4):  # the one that was taken, and three ahead
        assert read.acquire(timeout=20)
    assert [thread.name for thread in threading.enumerate() if "zmqdist-data" in thread.name] == [
        "zmqdist-data-ahead"
    ]
    del iterator
    until(lambda: not [thread for thread in threading.enumerate() if "zmqdist-data" in thread.name])


# -- caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True])
def test_cache_keeps_only_complete_pass(file: bool, tmp_path: Any) -> None:
    called: list[int] = []
    dataset = (
        Dataset.range(4)
        .map(lambda x: called.append(int(x)) or x)
        .cache(str(tmp_path / "kept") if file else "")
    )
    partial = iter(dataset)
    next(partial)
    partial.close()
    assert numbers(dataset) == numbers(dataset) == [0, 1, 2, 3]
    assert called == [0, 0, 1, 2, 3]


def test_cache_freezes_shuffle_order() -> None:
    dataset = Dataset.range(30).shuffle(30).cache()
    assert numbers(dataset) == numbers(dataset)


def test_cache_file_is_shared_and_has_one_writer(tmp_path: Any) -> None:
    name = str(tmp_path / "kept")
    with iter(Dataset.range(4).cache(name)) as writer:
        next(writer)
        with pytest.raises(AlreadyExistsError, match="concurrent"):
            next(iter(Dataset.range(4).cache(name)))
        list(writer)
    assert numbers(Dataset.range(100).cache(name)) == [0, 1, 2, 3]


def test_cache_file_elements_are_read_only(tmp_path: Any) -> None:
    dataset = (
        Dataset.range(6)
        .map(lambda x: {"x": np.arange(x)})
        .ragged_batch(2)
        .cache(str(tmp_path / "kept"))
    )
    first, again = list(dataset), list(dataset)
    with pytest.raises(ValueError, match="read-only"):
        first[0]["x"].values[0] = 1
    for one, other in zip(first, again, strict=True):
        assert type(one["x"]) is type(other["x"]) is Ragged
        assert one["x"].values.tolist() == other["x"].values.tolist()


def test_truncated_cache_file_is_data_loss(tmp_path: Any) -> None:
    name = str(tmp_path / "kept")
    list(Dataset.range(4).cache(name))
    data = (tmp_path / "kept.data").read_bytes()
    (tmp_path / "kept.data").write_bytes(data[:-1])
    with pytest.raises(DataLossError, match="truncated"):
        list(Dataset.range(4).cache(name))
