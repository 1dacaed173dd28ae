"""What programs for tf.data write first: options, None, composites, dataclasses, CSV files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import read
from zmqdist.data import AUTOTUNE, INFINITE_CARDINALITY, Dataset, Options, Ragged, Sparse
from zmqdist.data import experimental as tfde
from zmqdist.data.dataset import deserialize
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
)
from zmqdist.specs import TensorSpec

ROWS = TensorSpec((None,), np.int64)


def lengths(*sizes: int) -> Dataset:
    return Dataset.from_source(list(sizes)).map(np.arange, output_signature=ROWS)


# -- options ---------------------------------------------------------------------------------------

INERT = {
    "autotune.autotune_algorithm": tfde.AutotuneAlgorithm.HILL_CLIMB,
    "autotune.initial_parallelism": 2,
    "autotune.min_parallelism": 2,
    "dataset_name": "mine",
    "experimental_distribute.auto_shard_policy": tfde.AutoShardPolicy.DATA,
    "experimental_optimization.map_fusion": True,
    "experimental_optimization.noop_elimination": True,
    "experimental_slack": True,
    "experimental_symbolic_checkpoint": True,
    "experimental_warm_start": True,
    "framework_type": ["jax"],
}


@pytest.mark.parametrize("path", INERT)
def test_option_without_effect_is_kept(path: str) -> None:
    options, (*groups, name) = Options(), path.split(".")
    group: Any = options
    for each in groups:
        group = getattr(group, each)
    setattr(group, name, INERT[path])
    dataset = deserialize(Dataset.range(3).with_options(options).serialize())
    assert read(iter(dataset)) == read(iter(Dataset.range(3)))
    assert dataset.options() == options


def test_old_names_of_options_mean_the_new_ones() -> None:
    options = Options()
    options.experimental_deterministic = False
    options.experimental_threading.private_threadpool_size = 3
    assert options.as_dict() == {
        "deterministic": False,
        "threading": {"private_threadpool_size": 3},
    }
    assert options.experimental_deterministic is False
    options.experimental_threading = tfde.ThreadingOptions()
    assert options.threading.private_threadpool_size is None


def test_merged_options_override() -> None:
    first, second = Options(), Options()
    first.deterministic, first.autotune.enabled = True, True
    second.deterministic, second.autotune.cpu_budget = False, 3
    merged = first.merge(second).as_dict()
    assert merged == {"deterministic": False, "autotune": {"enabled": True, "cpu_budget": 3}}
    assert first.as_dict() == {"deterministic": True, "autotune": {"enabled": True}}


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("determinstic", True, AttributeError, "determinstic"),
        ("autotune", True, TypeError, "autotune wants AutotuneOptions, not bool"),
        ("experimental_threading", 1, TypeError, "threading wants ThreadingOptions, not int"),
    ],
)
def test_wrong_option_is_refused(name: str, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        setattr(Options(), name, value)


# -- None ------------------------------------------------------------------------------------------

NONE: dict[str, tuple[Callable[[Dataset], Dataset], Any]] = {
    "map": (lambda d: d.map(lambda x, y: (y, x)), [(None, 0), (None, 1), (None, 2)]),
    "batch": (lambda d: d.batch(2), [([0, 1], None), ([2], None)]),
    "padded_batch": (lambda d: d.padded_batch(2), [([0, 1], None), ([2], None)]),
    "unbatch": (lambda d: d.batch(2).unbatch(), [(0, None), (1, None), (2, None)]),
    "ragged_batch": (lambda d: d.ragged_batch(3), [([0, 1, 2], None)]),
    "cache": (lambda d: d.cache(), [(0, None), (1, None), (2, None)]),
    "zip": (
        lambda d: Dataset.zip(d, d).map(lambda x, y: x[1:] + y),
        [(None, 0, None), (None, 1, None), (None, 2, None)],
    ),
    "concatenate": (lambda d: d.take(1).concatenate(d.skip(2)), [(0, None), (2, None)]),
    "scan": (
        lambda d: d.scan((None, 0), lambda s, x: ((None, s[1] + 1), (x[1], s[1]))),
        [(None, 0), (None, 1), (None, 2)],
    ),
    "window": (
        lambda d: d.window(2).flat_map(lambda x, y: Dataset.zip(x, y)),
        [(0, None), (1, None), (2, None)],
    ),
    "signature": (
        lambda d: d.map(lambda x, y: (x, y), output_signature=(TensorSpec((), np.int64), None)),
        [(0, None), (1, None), (2, None)],
    ),
}


def plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(plain, x))
    return x if x is None else np.asarray(x).tolist()


@pytest.mark.parametrize("name", NONE)
@pytest.mark.parametrize("known", [True, False])
def test_component_of_none_passes_operator(name: str, known: bool) -> None:
    dataset = (
        Dataset.from_tensor_slices((np.arange(3), None))
        if known
        else Dataset.range(3).map(lambda x: (x, None))
    )
    build, expected = NONE[name]
    result = build(dataset)
    assert [plain(x) for x in result] == expected
    assert None in result.element_spec
    assert [plain(x) for x in deserialize(result.serialize())] == expected
    with iter(result) as iterator:
        next(iterator)
        state = json.loads(json.dumps(iterator.state_dict()))
    with iter(build(dataset)) as other:
        other.load_state_dict(state)
        assert [plain(x) for x in other] == expected[1:]


def test_component_of_none_is_written_to_files(tmp_path: Path) -> None:
    dataset = Dataset.range(3).map(lambda x: {"x": x, "y": (None, str(x))})
    dataset.save(str(tmp_path / "saved"))
    loaded = Dataset.load(str(tmp_path / "saved"))
    assert list(loaded) == list(dataset.cache(str(tmp_path / "cached"))) == list(dataset)
    assert loaded.element_spec["y"][0] is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: list(Dataset.range(2).map(lambda x: None)),
        lambda: Dataset.from_tensors(None),
        lambda: list(Dataset.range(2).map(lambda x: [None])),
        lambda: list(Dataset.range(2).map(lambda x: (x, None if x else x)).batch(2)),
        lambda: list(
            Dataset.range(2).map(
                lambda x: (x, None), output_signature=(TensorSpec((), np.int64),) * 2
            )
        ),
        lambda: list(
            Dataset.range(2).map(
                lambda x: (x, x), output_signature=(TensorSpec((), np.int64), None)
            )
        ),
    ],
)
def test_missing_value_is_refused(build: Callable[[], Any]) -> None:
    with pytest.raises((InvalidArgumentError, ValueError)):
        build()


# -- Ragged and Sparse -----------------------------------------------------------------------------

RAGGED = Ragged(np.arange(6), np.array([0, 2, 2, 6]))
NESTED = [[[0, 1], [], [2, 3, 4, 5]], [[0, 1], [], [2, 3, 4, 5]]]


def test_slices_of_composites_are_their_rows() -> None:
    dense = np.arange(3000).reshape(1500, 2) % 3
    splits = np.arange(0, 3001, 2)
    ragged = Ragged(dense.reshape(-1), splits)
    dataset = Dataset.from_tensor_slices({"s": Sparse.of(dense), "r": ragged, "n": None})
    assert len(dataset) == 1500
    rows = [(x["s"].to_dense().tolist(), x["r"].tolist(), x["n"]) for x in dataset]
    assert rows == [(row, row, None) for row in dense.tolist()]
    specs = dataset.element_spec
    assert specs["s"].dense_shape.shape == (1,)
    assert (specs["r"], specs["n"]) == (TensorSpec((None,), np.int64), None)


@pytest.mark.parametrize(
    "join", [lambda d: d.batch(2), lambda d: d.ragged_batch(2), lambda d: d.batch(2, True)]
)
def test_ragged_elements_are_batched(join: Callable[[Dataset], Dataset]) -> None:
    dataset = join(Dataset.from_tensors(RAGGED).repeat(2))
    (batch,) = dataset
    assert batch.to_list() == NESTED
    assert batch.shape() == (2, None, None)
    assert [row.to_list() for row in dataset.unbatch()] == NESTED
    assert [row.tolist() for row in dataset.unbatch().unbatch()] == NESTED[0] + NESTED[1]
    (pair,) = join(dataset.repeat(2))
    assert pair.to_list() == [NESTED, NESTED]
    assert [row.to_list() for row in Dataset.from_tensor_slices(batch).skip(1)] == NESTED[1:]


def test_spec_of_ragged_batches_fits_all() -> None:
    dataset = lengths(1, 2, 0, 3).ragged_batch(2)
    batches = dataset.batch(2)
    assert batches.element_spec == Dataset.from_tensors(next(iter(batches))).batch(
        1
    ).unbatch().element_spec._replace(row_splits=batches.element_spec.row_splits)
    assert batches.unbatch().element_spec.values == dataset.element_spec.values


@pytest.mark.parametrize(
    "pair",
    [
        (RAGGED, Ragged(np.arange(6.0), RAGGED.row_splits)),
        (RAGGED, Ragged(np.ones((6, 2), np.int64), RAGGED.row_splits)),
        (RAGGED, Ragged(RAGGED, np.array([0, 1, 3]))),
        (Ragged(RAGGED, np.array([0, 1, 3])), RAGGED),
        (RAGGED, Sparse.of(np.eye(2))),
        (Sparse.of(np.eye(2)), RAGGED),
        (RAGGED, np.arange(3)),
    ],
)
def test_composites_that_differ_are_not_batched(pair: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot batch"):
        list(Dataset.range(2).map(lambda n: pair[n]).batch(2))


@pytest.mark.parametrize(
    ("row_shape", "expected"),
    [
        ([4], [[[0, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 2, 0]]]),
        ([None], [[[0, 0], [0, 1]], [[0, 1, 2]]]),
        ([-1], [[[0, 0], [0, 1]], [[0, 1, 2]]]),
    ],
)
def test_sparse_batch_holds_rows_of_all_lengths(row_shape: Any, expected: Any) -> None:
    dataset = lengths(1, 2, 3).sparse_batch(2, row_shape)
    assert [batch.to_dense().tolist() for batch in dataset] == expected
    first = next(iter(dataset))
    assert first.indices.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert dataset.element_spec.dense_shape.shape == (2,)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: list(lengths(3).sparse_batch(1, [2])), DataLossError, "larger than the row_shape"),
        (
            lambda: list(lengths(3).sparse_batch(1, [2, 2])),
            InvalidArgumentError,
            "does not fit int64 of the row_shape",
        ),
        (
            lambda: Dataset.range(2).enumerate().sparse_batch(2, []),
            TypeError,
            "sparse_batch joins elements of one array, not tuple",
        ),
        (lambda: lengths(3).sparse_batch(0, [2]), InvalidArgumentError, "batch_size"),
        (lambda: lengths(3).sparse_batch(1, "x"), TypeError, "row_shape"),
    ],
)
def test_wrong_sparse_batch_is_refused(
    build: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        build()


# -- dataclasses, states, iterators ----------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


def test_dataclass_becomes_a_namedtuple() -> None:
    dataset = Dataset.from_tensor_slices(Point(np.arange(3), np.ones(3)))
    doubled = dataset.map(lambda point: Point(point.x * 2, None)).batch(3)
    (batch,) = deserialize(doubled.serialize())
    assert (type(batch).__name__, batch._fields, batch.x.tolist()) == (
        "Point",
        ("x", "y"),
        [0, 2, 4],
    )
    assert Dataset.zip(Point(dataset, dataset)).element_spec.x.y == TensorSpec((), np.float64)
    signature = Point(TensorSpec((), np.int64), TensorSpec((), np.float64))
    assert dataset.map(lambda p: p, output_signature=signature).element_spec.x == signature.x


def test_states_may_grow() -> None:
    nothing = np.empty(0, np.int64)

    def appended(state: Any, x: Any) -> Any:
        return np.append(state, x)

    grown = Dataset.range(3).scan(nothing, lambda s, x: (appended(s, x), len(s)))
    assert list(grown) == [0, 1, 2]
    assert Dataset.range(3).reduce(nothing, appended).tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="must keep its structure and dtype"):
        list(Dataset.range(3).scan(nothing, lambda s, x: (np.append(s, 0.5), x)))


def test_prefetch_of_none_is_autotune() -> None:
    assert Dataset.range(3).prefetch(None).op == Dataset.range(3).prefetch(AUTOTUNE).op


def test_iterator_has_get_next_and_spec() -> None:
    dataset = Dataset.range(2)
    iterator = iter(dataset)
    assert iterator.element_spec == dataset.element_spec
    assert [int(iterator.get_next()), int(next(iterator))] == [0, 1]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="End of sequence"):
            iterator.get_next()


@pytest.mark.parametrize(
    ("count", "expected", "text"),
    [
        (3, 2, "has more than 2 elements"),
        (3, 4, "was expected to have 4 elements, but has 3"),
        (3, INFINITE_CARDINALITY, "was expected to have no end, but has 3"),
        (0, 1, "was expected to have 1 elements, but has 0"),
    ],
)
def test_wrong_cardinality_is_reported_once(count: int, expected: int, text: str) -> None:
    dataset = Dataset.range(count).apply(tfde.assert_cardinality(expected))
    assert dataset.cardinality() == expected
    with pytest.raises(FailedPreconditionError, match=text):
        list(dataset)
    assert len(list(dataset.ignore_errors())) == min(count, expected if expected >= 0 else count)


# -- files -----------------------------------------------------------------------------------------


def csv(folder: Path, *contents: str) -> list[str]:
    paths = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.csv"
        path.write_text(content)
        paths.append(str(path))
    return paths


CSV: list[tuple[str, list[Any], dict[str, Any], list[Any]]] = [
    ("1,2\n3,4\n", [np.int32, np.float64], {}, [(1, 2.0), (3, 4.0)]),
    ("1,2\n3,4", [0, 0.5], {}, [(1, 2.0), (3, 4.0)]),
    ("a,b\n1,\n\n", [7, ["x"]], {"header": True}, [(1, "x")]),
    ('"a,""b""",1\r\n"c\nd",2\r\n', [str, int], {}, [('a,"b"', 1), ("c\nd", 2)]),
    ('"a",1\n', [str, np.int64], {"use_quote_delim": False}, [('"a"', 1)]),
    ("a|NA\n", [str, 5], {"field_delim": "|", "na_value": "NA"}, [("a", 5)]),
    ("1,2,3\n4,5,6,7\n", [np.int64, 0], {"select_cols": [0, 2]}, [(1, 3), (4, 6)]),
    ("1,2,3\n", [np.int64], {"exclude_cols": [0, 2]}, [(2,)]),
    ("1\n", [np.array([], np.float32)], {}, [(1.0,)]),
    ("", [str], {"header": True}, []),
]


@pytest.mark.parametrize(("content", "defaults", "options", "expected"), CSV)
def test_csv_rows_become_tuples(
    tmp_path: Path, content: str, defaults: Any, options: Any, expected: Any
) -> None:
    dataset = tfde.CsvDataset(csv(tmp_path, content), defaults, **options)
    assert list(dataset) == expected
    assert list(deserialize(dataset.serialize())) == expected
    dtypes = [spec.dtype for spec in dataset.element_spec]
    assert all(
        dtype.kind == "U" if isinstance(x, str) else x.dtype == dtype
        for row in dataset
        for x, dtype in zip(row, dtypes, strict=True)
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("1,2\n3\n", "a row has 1 fields, where 2 are expected"),
        ("1,2\n3,4,5\n", "a row has 3 fields, where 2 are expected"),
        ("1,2\nx,4\n", "field 0 is no int32: 'x'"),
        ("1,2\n3000000000,4\n", "field 0 is no int32: '3000000000'"),
        ("1,2\n4,1e40\n", "field 1 is no float32: '1e40'"),
        ("1,2\n,4\n", "field 0 is missing, and has no default"),
    ],
)
def test_bad_csv_row_is_left_out(tmp_path: Path, content: str, text: str) -> None:
    dataset = tfde.CsvDataset(csv(tmp_path, content + "5,6\n"), [np.int32, 0.0])
    with pytest.raises(InvalidArgumentError, match=text):
        list(dataset)
    assert list(dataset.ignore_errors()) == [(1, 2.0), (5, 6.0)]


def test_bad_quotes_end_their_file(tmp_path: Path) -> None:
    paths = csv(tmp_path, 'a\n"b"c\nd\n', "e\n")
    dataset = tfde.CsvDataset(paths, [str])
    with pytest.raises(InvalidArgumentError, match=r"0\.csv, line 2: "):
        list(dataset)
    assert list(dataset.ignore_errors()) == [("a",), ("e",)]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"record_defaults": []}, "record_defaults is empty"),
        ({"record_defaults": [np.uint8]}, "a column cannot be uint8, but int32, int64"),
        ({"record_defaults": [[1, 2]]}, "is more than one value"),
        ({"field_delim": ",,"}, "field_delim is ',,', wants one character"),
        ({"compression_type": "SNAPPY"}, "compression_type"),
        ({"select_cols": [0, 1]}, r"leave the columns \[0, 1\] for 1 record_defaults"),
        ({"select_cols": [0], "exclude_cols": [1]}, "select_cols and exclude_cols: pass one"),
    ],
)
def test_wrong_csv_argument_is_refused(tmp_path: Path, wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tfde.CsvDataset(csv(tmp_path, "a\n"), **{"record_defaults": [str], **wrong})


HEAD = "n,big,x,t\n"


def test_csv_batches_are_dicts_of_columns(tmp_path: Path) -> None:
    csv(tmp_path, HEAD + "1,3000000000,0.5,a\n,1,,\n", HEAD + "2,2,1e300,b\n")
    dataset = tfde.make_csv_dataset(
        f"{tmp_path}/*.csv", 2, num_epochs=1, shuffle=False, label_name="t"
    )
    (first, texts), (second, _) = dataset
    dtypes = {name: column.dtype.name for name, column in first.items()}
    assert dtypes == {"n": "int32", "big": "int64", "x": "float64"}
    assert (first["n"].tolist(), texts.tolist()) == ([1, 0], ["a", ""])
    assert second["x"].tolist() == [1e300]
    assert dataset.element_spec[0]["n"].shape == (None,)


def test_csv_epochs_are_shuffled_without_end(tmp_path: Path) -> None:
    paths = csv(tmp_path, *(HEAD + f"{number},1,1,a\n" for number in range(7)))
    dataset = tfde.make_csv_dataset(
        paths, 4, select_columns=["n", 3], shuffle_seed=3, num_parallel_reads=2, sloppy=True
    )
    assert dataset.cardinality() == INFINITE_CARDINALITY
    with iter(dataset) as iterator:
        batches = [next(iterator) for _ in range(7)]
    assert dataset.element_spec["n"] == TensorSpec((4,), np.int32)
    assert {len(batch["n"]) for batch in batches} == {4}
    assert sorted(np.concatenate([batch["n"] for batch in batches])) == sorted([*range(7)] * 4)
    assert list(batches[0]) == ["n", "t"]


def test_bad_rows_may_be_ignored(tmp_path: Path) -> None:
    paths = csv(tmp_path, "n\n1\n2\nx\n3\n")
    dataset = tfde.make_csv_dataset(
        paths, 3, num_rows_for_inference=2, num_epochs=1, shuffle=False, ignore_errors=True
    )
    assert [batch["n"].tolist() for batch in dataset] == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("contents", "wrong", "text"),
    [
        ([HEAD], {"label_name": "y"}, "label_name: no column 'y'; there are n, big, x, t"),
        ([HEAD], {"header": False}, "column_names: files without a header need names"),
        ([HEAD], {"column_names": ["a", "a"]}, "column_names: a name occurs twice"),
        ([HEAD], {"select_columns": ["z"]}, r"select_columns is \['z'\], wants different names"),
        ([HEAD], {"select_columns": [4]}, r"select_columns is \[4\], wants different names"),
        ([HEAD], {"column_defaults": [0]}, "column_defaults has 1 entries for 4 columns"),
        ([HEAD, "n\n"], {}, "the first rows of .* differ, or are missing"),
        ([""], {}, "the first rows of .* differ, or are missing"),
        ([HEAD + "1,2\n"], {}, "a row has 2 fields, but there are 4 columns"),
        ([HEAD], {"batch_size": 0}, "batch_size must be greater than zero"),
    ],
)
def test_wrong_csv_files_are_refused(
    tmp_path: Path, contents: list[str], wrong: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        tfde.make_csv_dataset(csv(tmp_path, *contents), **{"batch_size": 2, **wrong})


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_written_records_are_read(tmp_path: Path, compression: str | None) -> None:
    pytest.importorskip("google_crc32c")
    from zmqdist.data import TFRecordDataset

    path = tmp_path / "records"
    writer = tfde.TFRecordWriter(path, compression)
    writer.write(Dataset.from_source([b"one", "zwei", b""]))
    assert list(TFRecordDataset(str(path), compression)) == [b"one", b"zwei", b""]
    for dataset, error in (
        (Dataset.range(2), TypeError),
        (Dataset.from_tensors(b"x").repeat(), InvalidArgumentError),
    ):
        with pytest.raises(error, match="`dataset`"):
            writer.write(dataset)


def test_snappy_snapshot_is_read_again(tmp_path: Path) -> None:
    dataset = Dataset.range(5).map(lambda x: x * 2).snapshot(str(tmp_path), "SNAPPY")
    assert list(dataset) == list(dataset) == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="Invalid `compression` argument: LZ4"):
        Dataset.range(5).snapshot(str(tmp_path), "LZ4")
