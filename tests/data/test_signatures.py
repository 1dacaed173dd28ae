"""What functions, generators and sources give is what their signature says."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from zmqdist import TensorSpec
from zmqdist.data import Dataset, Ragged
from zmqdist.data.structure import DatasetSpec, problem_of
from zmqdist.errors import InvalidArgumentError

Point = namedtuple("Point", "x y")
NUMBER, TEXT, ROW = (
    TensorSpec((), np.int32),
    TensorSpec((), np.str_),
    TensorSpec((None, 2), np.float32),
)

FITTING: list[tuple[Any, Any]] = [
    (NUMBER, 3),
    (NUMBER, np.int32(3)),
    (TEXT, "a"),
    (ROW, np.ones((3, 2), np.float32)),
    (ROW, [[1, 2], [3, 4]]),
    ((NUMBER, {"t": TEXT}), (3, {"t": "a"})),
    ((NUMBER, NUMBER), [3, 4]),
    (Point(NUMBER, TEXT), Point(3, "a")),
    (
        Ragged(TensorSpec((None,), np.int64), TensorSpec((None,), np.int64)),
        Ragged(np.arange(3), np.array([0, 3])),
    ),
    (DatasetSpec(NUMBER), Dataset.range(3, output_type=np.int32)),
    (TensorSpec((2,), np.str_), ["a", "bcd"]),
]
UNFIT: list[tuple[Any, Any]] = [
    (NUMBER, 0.5),
    (NUMBER, np.int64(3)),
    (NUMBER, 2**40),
    (NUMBER, "a"),
    (NUMBER, {"x": 3}),
    (NUMBER, Dataset.range(3)),
    (TEXT, b"a"),
    (TEXT, ["a"]),
    (ROW, np.ones((3, 2))),
    (ROW, np.ones((3, 3), np.float32)),
    ((NUMBER, NUMBER), (3,)),
    ({"t": TEXT}, {"u": "a"}),
    (DatasetSpec(NUMBER), 3),
]


def sources(spec: Any, value: Any) -> list[Dataset]:
    """The value as each of them gives it."""
    return [
        Dataset.range(2).map(lambda _: value, output_signature=spec),
        Dataset.range(2).map(lambda _: value, num_parallel_calls=2, output_signature=spec),
        Dataset.from_generator(lambda: [value, value], output_signature=spec),
        Dataset.from_source([value, value], output_signature=spec),
    ]


@pytest.mark.parametrize(("spec", "value"), FITTING)
def test_fitting_value_becomes_element(spec: Any, value: Any) -> None:
    for dataset in sources(spec, value):
        found = list(dataset)
        assert [problem_of(x, spec) for x in found] == [None, None]


@pytest.mark.parametrize(("spec", "value"), UNFIT)
def test_unfitting_value_raises_at_read(spec: Any, value: Any) -> None:
    for dataset in sources(spec, value):
        with pytest.raises(InvalidArgumentError, match="does not fit its output_signature"):
            next(iter(dataset))


def test_unfitting_element_costs_only_itself() -> None:
    dataset = Dataset.range(4).map(
        lambda x: x if x != 2 else 0.5, output_signature=TensorSpec((), np.int64)
    )
    assert [int(x) for x in dataset.ignore_errors()] == [0, 1, 3]
