"""What holds for every operator of the table, tried on its examples."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.examples import EXAMPLES, Example
from tests.data.helpers import COUNT, read
from tests.scheduling.work import until
from zmqdist.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.dataset import deserialize
from zmqdist.data.interfaces import OPERATOR_MODULES, OPERATORS
from zmqdist.data.iterators import save_elements
from zmqdist.data.structure import is_dataset, problem_of

Rule = Callable[[str, Example, Path], None]
RULES: list[Rule] = []
"""What holds for each example, given the operator's name, the example and an empty folder."""


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def spoil(value: Any) -> None:
    """What a careless reader does to an element: writes wherever it can."""
    if is_dataset(value):
        for one in value:
            spoil(one)
    elif isinstance(value, (tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            spoil(one)
        if isinstance(value, dict):
            value.clear()
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = np.zeros((), value.dtype)


def spoiled(elements: Iterator[Any]) -> Iterator[Any]:
    """The elements, each spoiled when the next is asked for."""
    while True:
        try:
            x = next(elements)
        except StopIteration:
            return
        yield x
        spoil(x)


def test_operators_and_examples_match() -> None:
    assert EXAMPLES.keys() == (OPERATORS.keys() | OPERATOR_MODULES.keys()) - {"distribute"}


@rule
def example_ends_in_operator(name: str, example: Example, folder: Path) -> None:
    assert example.build(folder).op.name == name


@rule
def dataset_is_rereadable(name: str, example: Example, folder: Path) -> None:
    dataset = example.build(folder)
    first, second = read(iter(dataset)), read(iter(dataset))
    assert (first == second) is example.repeats


@rule
def spoiled_elements_stay_private(name: str, example: Example, folder: Path) -> None:
    dataset = example.build(folder)
    wanted = read(iter(example.build(folder / "untouched").ignore_errors()))
    for one in (dataset, deserialize(dataset.serialize())):
        before = read(spoiled(iter(one.ignore_errors())))
        after = read(spoiled(iter(one.ignore_errors())))
        assert wanted == before == after or not example.repeats


@rule
def operator_is_immutable(name: str, example: Example, folder: Path) -> None:
    dataset = example.build(folder)
    before = dataset.serialize()
    for field in dataclasses.fields(dataset.op):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(dataset.op, field.name, None)
    read(iter(dataset.map(lambda *_: 0).batch(2)))
    assert dataset.serialize() == before


@rule
def description_restores_dataset(name: str, example: Example, folder: Path) -> None:
    dataset = example.build(folder)
    back = deserialize(json.dumps(json.loads(dataset.serialize())))
    assert back.op.name == name
    assert back.cardinality() == dataset.cardinality()
    assert back.fingerprint() == dataset.fingerprint()
    assert read(iter(back)) == read(iter(dataset))
    assert back.serialize() == dataset.serialize()


@rule
def state_continues_exactly(name: str, example: Example, folder: Path) -> None:
    length = len(read(iter(example.build(folder / "length"))))
    for place in range(length + 1):
        for ended in (False, True)[: 1 + (place == length)]:
            iterator = iter(example.build(folder / f"{place}{ended}"))
            read(iterator, place + ended)
            state = json.loads(json.dumps(iterator.state_dict()))
            wanted = read(iterator)
            other = iter(example.build(folder / f"{place}{ended}"))
            read(other, min(1, length))  # a state replaces whatever the iterator has done
            other.load_state_dict(state)
            assert read(other) == wanted, f"behind {place} elements"
            other.close()
            iterator.close()


@rule
def cardinality_matches_elements(name: str, example: Example, folder: Path) -> None:
    dataset = example.build(folder)
    found = len(read(iter(dataset), 100))
    count = dataset.cardinality()
    assert (
        count == (INFINITE_CARDINALITY if found == 100 else found) or count == UNKNOWN_CARDINALITY
    )


@rule
def spec_fits_elements(name: str, example: Example, folder: Path) -> None:
    dataset = example.build(folder)
    before = read(iter(example.build(folder / "other")))
    spec = dataset.element_spec
    assert read(iter(dataset)) == before, "looking at the spec changes nothing"
    for element in islice(dataset.ignore_errors(), COUNT):
        assert problem_of(element, spec) is None
    assert dataset.known_spec == spec


@rule
def iterator_stays_at_end(name: str, example: Example, folder: Path) -> None:
    iterator = iter(example.build(folder))
    if len(read(iterator, 100)) < 100:
        assert [next(iterator, None) for _ in range(3)] == [None] * 3


@rule
def threads_end_with_iterator(name: str, example: Example, folder: Path) -> None:
    before = set(threading.enumerate())
    dataset = example.build(folder)
    dropped = iter(dataset)
    next(dropped, None)
    del dropped
    closed = iter(dataset)
    next(closed, None)
    closed.close()
    closed.close()
    assert next(closed, None) is None
    # the dropped one is closed in the background
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("name", EXAMPLES)
def test_operator_example_keeps_rules(name: str, tmp_path: Path) -> None:
    for number, example in enumerate(EXAMPLES[name]):
        for rule in RULES:
            folder = tmp_path / f"{number}-{rule.__name__}"
            folder.mkdir()
            try:
                rule(name, example, folder)
            except Exception as error:
                raise AssertionError(
                    f"{name}, example {number}: {rule.__name__} does not hold: {error}"
                ) from error


def test_elements_in_state_keep_types() -> None:
    json.dumps(save_elements([(np.float32(1), {"a": np.zeros((0, 2))}), "text", b"\0"]))
