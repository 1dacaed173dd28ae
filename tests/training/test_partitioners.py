"""Into how many shards a variable is cut, and which rows each has."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pytest

from zmqdist import partitioners
from zmqdist.training import partition
from zmqdist.training.partition import Initial, ShardInfo, offsets_of, shards_of

F32 = np.float32


def test_base_partitioner_is_abstract() -> None:
    with pytest.raises(NotImplementedError):
        partitioners.Partitioner()([2, 3], F32)


@pytest.mark.parametrize(
    ("shards", "shape", "message"),
    [
        (2, [10, 3], [2, 1]),
        (10, [3, 3], [3, 1]),
        (2, [5], [2]),
        (1, (4, 4, 4), [1, 1, 1]),
        (2, [], []),
        (2, [0, 3], [1, 1]),
    ],
)
def test_fixed_shards_up_to_rows(shards: int, shape: Any, message: list[int]) -> None:
    assert partitioners.FixedShardsPartitioner(shards)(shape, F32) == message


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ([6, 1], {"min_shard_bytes": 4, "max_shards": 2}, [2, 1]),
        ([6, 1], {"min_shard_bytes": 4, "max_shards": 10}, [6, 1]),
        ([6, 1], {"min_shard_bytes": 5, "max_shards": 10}, [5, 1]),
        ([1024, 1024], {}, [1, 1]),
        ([1024, 1024], {"max_shards": 16}, [16, 1]),
        ([1024, 1024], {"max_shards": 8}, [8, 1]),
        ([], {"min_shard_bytes": 1, "max_shards": 4}, []),
        ([0, 3], {"min_shard_bytes": 1, "max_shards": 4}, [1, 1]),
    ],
)
def test_min_size_shards(shape: list[int], arguments: dict[str, int], message: list[int]) -> None:
    assert partitioners.MinSizePartitioner(**arguments)(shape, F32) == message


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ([6, 1], {"max_shard_bytes": 4}, [6, 1]),
        ([6, 1], {"max_shard_bytes": 4, "max_shards": 2}, [2, 1]),
        ([6, 1], {"max_shard_bytes": 9}, [3, 1]),
        ([6, 1], {"max_shard_bytes": 1024}, [1, 1]),
        ([6, 4], {"max_shard_bytes": 1}, [6, 1]),
        ([], {"max_shard_bytes": 1}, []),
        ([0, 4], {"max_shard_bytes": 1}, [1, 1]),
        ([4, 0], {"max_shard_bytes": 1}, [4, 1]),
    ],
)
def test_max_size_shards(shape: list[int], arguments: dict[str, int], message: list[int]) -> None:
    assert partitioners.MaxSizePartitioner(**arguments)(shape, F32) == message


def test_element_size_is_that_of_the_dtype() -> None:
    by_size = partitioners.MaxSizePartitioner(64, bytes_per_string=32)
    assert by_size([16], np.float64) == [2]
    assert by_size([16], "float16") == [1]
    assert by_size([16], np.dtype(object)) == by_size([16], str) == [8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: partitioners.FixedShardsPartitioner(0),
        lambda: partitioners.FixedShardsPartitioner(-1),
        lambda: partitioners.MinSizePartitioner(min_shard_bytes=0),
        lambda: partitioners.MinSizePartitioner(max_shards=0),
        lambda: partitioners.MinSizePartitioner(bytes_per_string=0),
        lambda: partitioners.MaxSizePartitioner(0),
        lambda: partitioners.MaxSizePartitioner(1, max_shards=0),
        lambda: partitioners.MaxSizePartitioner(1, bytes_per_string=0),
        lambda: partitioners.FixedShardsPartitioner(2)([4, 4], F32, axis=1),
    ],
)
def test_bad_numbers_and_axes_are_refused(
    make: Callable[[], object],
) -> None:
    with pytest.raises(ValueError, match=r"must be a positive whole number|along axis 0 only"):
        make()


@pytest.mark.parametrize(
    ("rows", "shards", "message"),
    [
        (13, 5, [3, 3, 3, 2, 2]),
        (10, 4, [3, 3, 2, 2]),
        (5, 2, [3, 2]),
        (6, 2, [3, 3]),
        (3, 3, [1, 1, 1]),
        (0, 1, [0]),
    ],
)
def test_first_shards_have_one_more_row(rows: int, shards: int, message: list[int]) -> None:
    offsets = offsets_of(rows, shards)
    assert [high - low for low, high in pairwise(offsets)] == message
    assert (offsets[0], offsets[-1]) == (0, rows)


def test_partitioner_is_called_by_keywords() -> None:
    requests = []

    def partitioner(*, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[int]:
        requests.append((shape, dtype))
        return [2, 1]

    assert shards_of(partitioner, [5, 2], F32) == 2
    assert requests == [((5, 2), np.dtype(F32))]


def test_shards_up_to_rows_and_scalar_is_whole() -> None:
    assert shards_of(lambda shape, dtype: [4], (3,), F32) == 3
    assert shards_of(lambda shape, dtype: [4], (0,), F32) == 1
    assert shards_of(lambda shape, dtype: pytest.fail("asked of a scalar"), (), F32) == 1
    assert shards_of(None, (3,), F32) == 1


@pytest.mark.parametrize("wrong", [None, [], [0, 1, 1], [2, 2, 1], [-1, 1, 1]])
def test_bad_partitioner_result_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="variable_partitioner"):
        shards_of(lambda shape, dtype: wrong, (4, 3, 2), F32)


def rows_made(initial: Initial, shards: int) -> list[Any]:
    """What each shard begins with, made from what travels to it."""
    offsets = offsets_of(initial.shape[0], shards)
    parts = [initial.rows(low, high) for low, high in pairwise(offsets)]
    return [
        cloudpickle.loads(cloudpickle.dumps(part))() if callable(part) else part for part in parts
    ]


class Identity:
    """An initializer that can make a part, and says which."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def __call__(self, shape: Any, dtype: Any, **part: Any) -> Any:
        self.requests.append(part)
        rows, _ = part["partition_shape"]
        first, _ = part["partition_offset"]
        return np.eye(*shape, dtype=dtype)[first : first + rows]


def test_array_is_cut_here() -> None:
    initial = Initial.of("w", np.arange(10.0).reshape(5, 2), None, F32)
    assert (initial.shape, initial.dtype) == ((5, 2), F32)
    assert [part.tolist() for part in rows_made(initial, 2)] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9]],
    ]


@pytest.mark.parametrize(
    "given",
    [{"shape": None, "dtype": F32}, {"shape": (4,), "dtype": None}, {"shape": None, "dtype": None}],
)
def test_function_without_shape_is_called_once(
    given: dict[str, Any],
) -> None:
    calls = []

    def make() -> Any:
        calls.append(1)
        return np.arange(4, dtype=F32)

    initial = Initial.of("w", make, **given)
    assert [part.tolist() for part in rows_made(initial, 2)] == [[0, 1], [2, 3]]
    assert calls == [1]
    assert initial.dtype == F32


def test_function_with_shape_is_not_called() -> None:
    initial = Initial.of("w", lambda: pytest.fail("called here"), (4, 2), F32)
    assert (initial.shape, initial.dtype) == ((4, 2), F32)
    assert callable(initial.rows(0, 2))


def test_part_initializer_never_makes_the_whole() -> None:
    identity = Identity()
    initial = Initial.of("w", functools.partial(identity, (4, 4), F32), (4, 4), F32)
    parts = [initial.rows(0, 2), initial.rows(2, 4)]
    assert np.array_equal(np.concatenate([part() for part in parts]), np.eye(4, dtype=F32))  # type: ignore[operator]
    assert identity.requests == [
        {"partition_shape": (2, 4), "partition_offset": (0, 0)},
        {"partition_shape": (2, 4), "partition_offset": (2, 0)},
    ]


def test_shard_info_initializer_gets_it() -> None:
    def make(shard_info: ShardInfo) -> Any:
        return np.full(shard_info.shape, shard_info.offset[0], F32)

    assert [part.tolist() for part in rows_made(Initial.of("w", make, (5, 1), F32), 2)] == [
        [[0]] * 3,
        [[3]] * 2,
    ]


def test_whole_initializer_keeps_its_rows() -> None:
    parts = rows_made(Initial.of("w", lambda: range(5), (5,), F32), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part.dtype == F32 for part in parts)


def test_wrong_initializer_shape_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"'w' returned shape \(7,\): wanted \(3,\) for rows 0 to 3, or \(5,\) for the whole "
        r"variable",
    ):
        rows_made(Initial.of("w", lambda: np.zeros(7), (5,), F32), 2)


@pytest.mark.parametrize(
    ("value", "shape", "message"),
    [
        (None, None, "needs an initial_value"),
        (
            np.zeros(3),
            (4,),
            r"has the argument shape=\(4,\), but its initial_value has shape \(3,\)",
        ),
        ([object()], None, "cannot hold"),
    ],
)
def test_unfit_value_is_refused(value: Any, shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"variable 'w' {message}"):
        Initial.of("w", value, shape, None)


def test_large_whole_variable_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "ELEMENTS_WHOLE_MAX", 10)
    for quiet in (
        Initial.of("small", np.zeros(10), None, None),
        Initial.of("parts", lambda shard_info: None, (20,), F32),
    ):
        quiet.warn_of_size()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        Initial.of("large", np.zeros(11), None, None).warn_of_size()
        Initial.of("whole", lambda: None, (20,), F32).warn_of_size()
    assert [record.getMessage().split(" is cut")[0] for record in caplog.records] == [
        "variable 'large'",
        "variable 'whole'",
    ]
