"""Lookups in tables: rows by their numbers, alone or put together, and nothing moves but the rows
that are named."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zmqdist import ShardedVariable, Variable
from zmqdist.data.composites import Ragged, Sparse
from zmqdist.errors import InvalidArgumentError
from zmqdist.training.embedding import (
    embedding_lookup,
    embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from zmqdist.training.partition import offsets_of
from zmqdist.training.variable_storage import LocalStorage

F32 = np.float32
VALUES = np.arange(1, 11, dtype=F32).reshape(5, 2)


def table_of(shards: int, value: Any = VALUES, name: str = "table") -> ShardedVariable:
    array = np.asarray(value)
    bounds = pairwise(offsets_of(len(array), shards))
    return ShardedVariable(
        [
            Variable(array[low:high], name=f"{name}/part_{place}")
            for place, (low, high) in enumerate(bounds)
        ],
        name,
    )


def sparse(bags: list[list[Any]], dtype: Any = np.int64) -> Sparse:
    """Bags of different sizes as a sparse matrix."""
    places = [(row, column) for row, bag in enumerate(bags) for column in range(len(bag))]
    values = np.array([value for bag in bags for value in bag], dtype)
    shape = np.array([len(bags), max(map(len, bags))])
    return Sparse(np.array(places, np.int64).reshape(-1, 2), values, shape)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Rows that variables are asked for: (name, rows); a whole read fails."""
    seen: list[Any] = []
    some = LocalStorage.rows

    def rows(self: LocalStorage, wanted: Any) -> Any:
        seen.append((self.ref.name, list(wanted)))
        return some(self, wanted)

    monkeypatch.setattr(LocalStorage, "rows", rows)
    monkeypatch.setattr(
        LocalStorage, "read", lambda self: pytest.fail(f"all of {self.ref.name} was asked for")
    )
    return seen


def test_lookup_sends_one_request_per_shard(requests: list[Any]) -> None:
    table = table_of(3)
    assert table.embedding_lookup([4, 0, 3, 4]).tolist() == [[9, 10], [1, 2], [7, 8], [9, 10]]
    assert requests == [("table/part_0", [0]), ("table/part_1", [1]), ("table/part_2", [0, 0])]


def test_ids_of_any_shape(requests: list[Any]) -> None:
    table = table_of(2)
    assert np.array_equal(embedding_lookup(table, [[0, 1], [4, 2]]), VALUES[[[0, 1], [4, 2]]])
    assert np.array_equal(embedding_lookup(table, 3), VALUES[3])
    assert embedding_lookup(table, np.empty((0, 2), np.int32)).shape == (0, 2, 2)


@pytest.mark.parametrize("kind", ["one variable", "a list", "shards"])
def test_table_of_variables_or_shards(kind: str, requests: list[Any]) -> None:
    tables = {
        "one variable": Variable(VALUES, name="table"),
        "a list": [Variable(VALUES[:3], name="v0"), Variable(VALUES[3:], name="v1")],
        "shards": table_of(4),
    }
    assert np.array_equal(embedding_lookup(tables[kind], [3, 0]), VALUES[[3, 0]])
    assert sum(len(rows) for _, rows in requests) == 2


def test_rows_of_tables_are_consecutive() -> None:
    tables = [table_of(2, VALUES[:3], "a"), Variable(VALUES[3:], name="b")]
    assert np.array_equal(embedding_lookup(tables, np.arange(5)), VALUES)


@pytest.mark.parametrize("bad", [5, -1])
def test_bad_id_is_refused_without_request(bad: int, requests: list[Any]) -> None:
    text = f"variable 'table': index {bad} is out of range: the indices are 0 to 4"
    with pytest.raises(InvalidArgumentError, match=text):
        embedding_lookup(table_of(2), [0, bad])
    with pytest.raises(InvalidArgumentError, match="'v0', 'v1'"):
        embedding_lookup([Variable(VALUES[:3], name="v0"), Variable(VALUES[3:], name="v1")], [bad])
    assert requests == []


def test_bad_table_is_refused() -> None:
    for wrong in (VALUES, [], [VALUES], None):
        with pytest.raises(
            TypeError, match="a table is a Variable, a ShardedVariable or a list of them"
        ):
            embedding_lookup(wrong, [0])
    with pytest.raises(ValueError, match="need rows of one shape and dtype"):
        embedding_lookup([Variable(VALUES), Variable(VALUES[:, :1])], [0])
    with pytest.raises(ValueError, match="need rows of one shape and dtype"):
        embedding_lookup([Variable(VALUES), Variable(VALUES.astype(np.float64))], [0])


def test_long_rows_are_shortened() -> None:
    table = table_of(2, np.array([[3, 4], [0.3, 0.4], [0, 0]], F32))
    assert np.allclose(
        embedding_lookup(table, [0, 1, 2], max_norm=1.0), [[0.6, 0.8], [0.3, 0.4], [0, 0]]
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_sparse_lookup_is_the_mean_of_bags(shards: int, requests: list[Any]) -> None:
    ids = [[0, 3], [4], [1]]
    for bags in (
        ids,
        sparse(ids),
        Ragged(np.array([0, 3, 4, 1]), np.array([0, 2, 3, 4])),
        [np.array(bag) for bag in ids],
    ):
        assert embedding_lookup_sparse(table_of(shards), bags).tolist() == [[4, 5], [9, 10], [3, 4]]


def test_shared_row_is_moved_once(requests: list[Any]) -> None:
    found = embedding_lookup_sparse(table_of(2), [[4, 4, 0], [4], [0, 4]], combiner="sum")
    assert found.tolist() == [[19, 22], [9, 10], [10, 12]]
    assert requests == [("table/part_0", [0]), ("table/part_1", [1])]


@pytest.mark.parametrize(
    ("combiner", "message"),
    [
        ("sum", [[15, 18], [4.5, 5], [0, 0]]),
        ("mean", [[5, 6], [9, 10], [0, 0]]),
        ("sqrtn", [[15 / 5**0.5, 18 / 5**0.5], [9, 10], [0, 0]]),
    ],
)
def test_weights_count_and_empty_bag_is_zero(combiner: str, message: Any) -> None:
    ids, weights = [[0, 3], [4], []], [[2, 1], [0.5], []]
    message[0] = (
        np.add(np.multiply(VALUES[0], 2), VALUES[3])
        / {"sum": 1, "mean": 3, "sqrtn": 5**0.5}[combiner]
    )
    for form in (lambda bags: bags, sparse):
        given = form(weights) if form is not sparse else sparse(weights, F32)
        assert np.allclose(
            embedding_lookup_sparse(table_of(2), form(ids), given, combiner), message
        )


def test_bags_of_several_axes() -> None:
    cube = Sparse(
        np.array([[0, 0, 0], [0, 0, 2], [1, 1, 1]]), np.array([0, 3, 4]), np.array([2, 2, 3])
    )
    assert embedding_lookup_sparse(table_of(2), cube).tolist() == [
        [[4, 5], [0, 0]],
        [[0, 0], [9, 10]],
    ]


def test_bags_in_any_order() -> None:
    mixed = Sparse(np.array([[1, 0], [0, 0], [1, 1]]), np.array([1, 4, 3]), np.array([2, 2]))
    assert embedding_lookup_sparse(table_of(2), mixed, combiner="sum").tolist() == [
        [9, 10],
        [10, 12],
    ]


def test_exact_dtype_of_sums() -> None:
    halves = table_of(2, np.full((4, 1), 1024, np.float16))
    found = embedding_lookup_sparse(halves, [[0, 1, 2, 3] * 20])
    assert (found.dtype, found.tolist()) == (np.float16, [[1024]])
    whole = table_of(2, np.array([[1], [2]]))
    assert embedding_lookup_sparse(whole, [[0, 1]]).tolist() == [[1.5]]


def test_safe_lookup_drops_invalid_ids(requests: list[Any]) -> None:
    ids, weights = [[0, -1], [4], [1]], [[1.0, 1.0], [-1.0], [1.0]]
    for shards in (1, 3):
        table = table_of(shards)
        assert safe_embedding_lookup_sparse(table, sparse(ids), sparse(weights, F32)).tolist() == [
            [1, 2],
            [0, 0],
            [3, 4],
        ]
    assert all(4 not in rows for name, rows in requests if name == "table/part_0")


def test_safe_lookup_fills_empty_bags() -> None:
    table = table_of(2)
    assert safe_embedding_lookup_sparse(table, [[], [-1], [1]], default_id=4).tolist() == [
        [9, 10],
        [9, 10],
        [3, 4],
    ]
    weights = [[], [1.0], [2.0]]
    assert safe_embedding_lookup_sparse(table, [[], [-1], [1]], weights, "sum", 0).tolist() == [
        [1, 2],
        [1, 2],
        [6, 8],
    ]
    assert safe_embedding_lookup_sparse(table, [[], []]).tolist() == [[0, 0], [0, 0]]


def test_negative_weights_count_in_sum() -> None:
    assert safe_embedding_lookup_sparse(table_of(2), [[0, 4]], [[1.0, -1.0]], "sum").tolist() == [
        [-8, -8]
    ]


@pytest.mark.parametrize(
    ("ids", "weights", "combiner", "error", "message"),
    [
        ([[0], [1]], None, "median", ValueError, "one of mean, sqrtn, sum"),
        ([[0], [1]], [[1.0, 1.0], []], "sum", ValueError, "weights must have the form"),
        ([[0], [1]], [[1.0], []], "sum", ValueError, "weights must have the form"),
        (sparse([[0], [1]]), [[1.0], [1.0]], "sum", ValueError, "weights must have the form"),
        (
            sparse([[0], [1]]),
            sparse([[1.0, 1.0], []], F32),
            "sum",
            ValueError,
            "weights must have the form",
        ),
        ([0, 1], None, "sum", TypeError, "a list of ids for each bag"),
        (
            np.array([[0, 1]]),
            None,
            "sum",
            TypeError,
            "Sparse with at least two axes, Ragged, or a list of lists",
        ),
        (
            Sparse(np.array([[0]]), np.array([0]), np.array([1])),
            None,
            "sum",
            TypeError,
            "at least two axes",
        ),
        ([[0.5]], None, "sum", InvalidArgumentError, "whole numbers"),
        ([[5]], None, "sum", InvalidArgumentError, "index 5 is out of range"),
        ([[-1]], None, "sum", InvalidArgumentError, "index -1 is out of range"),
    ],
)
def test_unfit_weights_are_refused(
    ids: Any, weights: Any, combiner: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        embedding_lookup_sparse(table_of(2), ids, weights, combiner)
