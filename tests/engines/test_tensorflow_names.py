"""What programs for TensorFlow write first, side by side with TensorFlow: the same elements, the
same class of error, the same rates and steps of optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.data import Dataset, Options, Ragged, Sparse, experimental

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip(
    "tensorflow", reason="needs tensorflow-cpu: pip install -e '.[engines]'", exc_type=ImportError
)

CSV = "a,b,c\n1,2.5,x\n,3.5,y\n7,,z\n"


def libraries(folder: Path) -> list[Any]:
    """The names that the cases use, of TensorFlow and of this package."""
    path = folder / "rows.csv"
    path.write_text(CSV)
    common = {"path": str(path), "folder": str(folder)}
    splits, dense = np.array([0, 2, 2, 6]), np.array([[0, 1], [2, 0], [3, 4]])
    return [
        SimpleNamespace(
            **common,
            D=tf.data.Dataset,
            E=tf.data.experimental,
            O=tf.data.Options,
            ragged=tf.RaggedTensor.from_row_splits(np.arange(6), splits),
            sparse=tf.sparse.from_dense(dense),
            rows=tf.TensorSpec((None,), tf.int64),
            append=lambda state, x: tf.concat([state, [x]], 0),
            int32=tf.int32,
        ),
        SimpleNamespace(
            **common,
            D=Dataset,
            E=experimental,
            O=Options,
            ragged=Ragged(np.arange(6), splits),
            sparse=Sparse.of(dense),
            rows=zd.TensorSpec((None,), np.int64),
            append=np.append,
            int32=np.int32,
        ),
    ]


def plain(x: Any) -> Any:
    """An element of either library, as Python values."""
    if isinstance(x, (tf.RaggedTensor, Ragged)):
        return ["ragged", x.to_list()]
    if isinstance(x, tf.SparseTensor):
        return ["sparse", tf.sparse.to_dense(x).numpy().tolist(), x.indices.numpy().tolist()]
    if isinstance(x, Sparse):
        return ["sparse", x.to_dense().tolist(), x.indices.tolist()]
    if isinstance(x, tuple):
        return tuple(map(plain, x))
    if isinstance(x, dict):
        return {key: plain(item) for key, item in x.items()}
    if x is None:
        return None
    values = np.asarray(x).tolist()
    return texts(values)


def texts(values: Any) -> Any:
    if isinstance(values, list):
        return list(map(texts, values))
    return values.decode() if isinstance(values, bytes) else values


def lengths(t: Any, *sizes: int) -> Any:
    return t.D.from_generator(
        lambda: iter([np.arange(size) for size in sizes]), output_signature=t.rows
    )


def options(t: Any, path: str, value: Any) -> Any:
    result = group = t.O()
    *groups, name = path.split(".")
    for each in groups:
        group = getattr(group, each)
    setattr(group, name, value)
    return result


def pairs(t: Any) -> Any:
    return t.D.from_tensor_slices(([1, 2, 3], None))


def csv(t: Any, defaults: Any, **how: Any) -> Any:
    return t.E.CsvDataset(t.path, defaults, header=True, **how)


def batches(t: Any, size: int, **how: Any) -> Any:
    return t.E.make_csv_dataset(t.path, size, **{"num_epochs": 1, "shuffle": False, **how})


DATASETS: dict[str, Callable[[Any], Any]] = {
    "None: from_tensors": lambda t: t.D.from_tensors((1, None)),
    "None: slices": pairs,
    "None: map": lambda t: t.D.range(2).map(lambda x: (x, None)),
    "None: batch": lambda t: pairs(t).batch(2),
    "None: dict": lambda t: t.D.from_tensor_slices({"a": [1, 2], "b": None}),
    "None: filter": lambda t: pairs(t).filter(lambda a, b: a > 1),
    "None: cache": lambda t: pairs(t).cache(),
    "None: repeat": lambda t: pairs(t).repeat(2),
    "None: zip": lambda t: t.D.zip((pairs(t), t.D.range(3))),
    "None: prefetch": lambda t: pairs(t).prefetch(1),
    "None: unbatch": lambda t: pairs(t).batch(2).unbatch(),
    "None: interleave": lambda t: t.D.range(2).interleave(
        lambda x: t.D.from_tensors((x, None)), cycle_length=2
    ),
    "None: concatenate": lambda t: pairs(t).concatenate(pairs(t)),
    "slices of ragged": lambda t: t.D.from_tensor_slices(t.ragged),
    "slices of sparse": lambda t: t.D.from_tensor_slices(t.sparse),
    "slices of both": lambda t: t.D.from_tensor_slices((np.arange(3), t.ragged, t.sparse)),
    "batch of ragged": lambda t: t.D.from_tensors(t.ragged).repeat(3).batch(2),
    "full batch of ragged": lambda t: t.D.from_tensors(t.ragged).repeat(3).batch(2, True),
    "unbatch of ragged": lambda t: t.D.from_tensors(t.ragged).repeat(3).batch(2).unbatch(),
    "batch of sparse": lambda t: t.D.from_tensors(t.sparse).repeat(3).batch(2),
    "ragged_batch": lambda t: lengths(t, 1, 2, 3).ragged_batch(2),
    "full ragged_batch": lambda t: lengths(t, 1, 2, 3).ragged_batch(2, drop_remainder=True),
    "ragged_batch of ragged": lambda t: t.D.from_tensors(t.ragged).repeat(2).ragged_batch(2),
    "ragged_batch of rows": lambda t: t.D.from_tensor_slices(t.ragged).ragged_batch(2),
    "sparse_batch": lambda t: lengths(t, 1, 2, 3).sparse_batch(2, [4]),
    "sparse_batch of largest": lambda t: lengths(t, 1, 2, 3).sparse_batch(2, [None]),
    "sparse_batch of matrices": lambda t: t.D.from_tensors(np.ones((2, 2))).sparse_batch(1, [3, 2]),
    "sparse_batch too small": lambda t: lengths(t, 3).sparse_batch(1, [2]),
    "sparse_batch of wrong rank": lambda t: lengths(t, 3).sparse_batch(1, [2, 2]),
    "sparse_batch of tuples": lambda t: t.D.range(2).enumerate().sparse_batch(1, []),
    "assert_cardinality": lambda t: t.D.range(3).apply(t.E.assert_cardinality(3)),
    "assert_cardinality: more": lambda t: t.D.range(3).apply(t.E.assert_cardinality(2)),
    "assert_cardinality: less": lambda t: t.D.range(3).apply(t.E.assert_cardinality(4)),
    "CsvDataset": lambda t: csv(t, [0, 0.0, ""]),
    "CsvDataset: select": lambda t: csv(t, [0, ""], select_cols=[0, 2]),
    "CsvDataset: exclude": lambda t: csv(t, [0, ""], exclude_cols=[1]),
    "CsvDataset: na_value": lambda t: csv(t, [0, 0.0, "d"], na_value="x"),
    "CsvDataset: missing": lambda t: csv(t, [t.int32, 0.0, ""]),
    "CsvDataset: ignore_errors": lambda t: csv(t, [t.int32, 0.0, ""]).ignore_errors(),
    "CsvDataset: not a number": lambda t: csv(t, [0, 0.0, 0]),
    "CsvDataset: more columns": lambda t: csv(t, [0, 0.0]),
    "make_csv_dataset": lambda t: batches(t, 2),
    "make_csv_dataset: label": lambda t: batches(t, 2, label_name="c"),
    "make_csv_dataset: select": lambda t: batches(t, 2, select_columns=["c", "a"]),
    "make_csv_dataset: defaults": lambda t: batches(t, 3, column_defaults=[5, 0.5, "q"]),
    "make_csv_dataset: epochs": lambda t: batches(t, 2, num_epochs=2),
    "make_csv_dataset: wrong label": lambda t: batches(t, 2, label_name="d"),
    "prefetch(None)": lambda t: t.D.range(3).prefetch(None),
    "scan: growing state": lambda t: t.D.range(3).scan(
        np.empty(0, np.int64), lambda state, x: (t.append(state, x), x)
    ),
    "snapshot: SNAPPY": lambda t: t.D.range(3).snapshot(
        f"{t.folder}/{t.D.__module__}", compression="SNAPPY"
    ),
    **{
        f"options: {path}": lambda t, path=path, value=value: t.D.range(2).with_options(
            options(t, path, value)
        )
        for path, value in {
            "autotune.initial_parallelism": 2,
            "autotune.min_parallelism": 1,
            "dataset_name": "x",
            "experimental_deterministic": False,
            "experimental_optimization.map_fusion": True,
            "experimental_slack": False,
            "experimental_symbolic_checkpoint": False,
            "experimental_threading.private_threadpool_size": 1,
            "experimental_warm_start": False,
            "nonsense": 1,
        }.items()
    },
}


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_equals_that_of_tensorflow(name: str, tmp_path: Path) -> None:
    outcomes = []
    for t in libraries(tmp_path):
        try:
            dataset = DATASETS[name](t)
            outcomes.append(([plain(x) for x in dataset], int(dataset.cardinality())))
        except Exception as error:
            outcomes.append(type(error).__name__)
    assert outcomes[0] == outcomes[1]


def test_groups_of_options_have_the_names_of_tensorflow() -> None:
    theirs, ours = tf.data.Options(), Options()
    names = {name for name in dir(theirs) if not name.startswith("_")}
    assert [name for name in names if not hasattr(ours, name)] == []
    for group in ("autotune", "experimental_optimization", "experimental_service", "threading"):
        inner = {name for name in dir(getattr(theirs, group)) if not name.startswith("_")}
        assert [name for name in inner if not hasattr(getattr(ours, group), name)] == []


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda s: s.ExponentialDecay(0.1, 3, 0.5),
    "staircase": lambda s: s.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    "inverse time": lambda s: s.InverseTimeDecay(0.1, 3, 0.5),
    "polynomial": lambda s: s.PolynomialDecay(0.1, 4, 0.01, 2.0),
    "cycles": lambda s: s.PolynomialDecay(0.1, 4, 0.01, 2.0, cycle=True),
    "piecewise": lambda s: s.PiecewiseConstantDecay([1, 3], [0.1, 0.01, 0.001]),
    "cosine": lambda s: s.CosineDecay(0.1, 4, 0.1),
    "warm-up": lambda s: s.CosineDecay(0.01, 4, 0.1, warmup_target=0.2, warmup_steps=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_equal_those_of_keras(name: str) -> None:
    make = SCHEDULES[name]
    theirs, ours = make(tf.keras.optimizers.schedules), make(zd.optimizers.schedules)
    steps = range(14)
    np.testing.assert_allclose([ours(step) for step in steps], [theirs(s) for s in steps], 1e-5)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: o.SGD(0.1),
    "momentum": lambda o: o.SGD(0.1, momentum=0.9),
    "Nesterov": lambda o: o.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda o: o.RMSprop(0.1),
    "centered": lambda o: o.RMSprop(0.1, momentum=0.5, centered=True),
    "Adam": lambda o: o.Adam(0.1),
    "Adagrad": lambda o: o.Adagrad(0.1),
    "schedule": lambda o: o.SGD(o.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_keras(name: str) -> None:
    start, grads = np.float32([1.0, -2.0]), [np.float32([0.5, -0.1 * n]) for n in range(6)]
    theirs, ours = tf.Variable(start), zd.Variable(start)
    one, other = OPTIMIZERS[name](tf.keras.optimizers), OPTIMIZERS[name](zd.optimizers)
    assert int(other.iterations) == 0
    for grad in grads:
        one.apply_gradients([(tf.constant(grad), theirs)])
        other.apply_gradients([(grad, ours)])
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4)
    assert int(one.iterations) == int(other.iterations) == 6
