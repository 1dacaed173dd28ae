"""Portions: which pipelines can be cut, by which grain, and that the pieces are the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.examples import EXAMPLES, choices
from tests.data.helpers import plain, read
from zmqdist.data import INFINITE_CARDINALITY, Dataset, Options, TextLineDataset
from zmqdist.data.dataset import deserialize
from zmqdist.data.splits import open_split, portion_pipeline, portion_rules
from zmqdist.data.tree import Tree
from zmqdist.errors import UnimplementedError
from zmqdist.specs import TensorSpec

ENDLESS = INFINITE_CARDINALITY

CUT = {
    "batch",
    "chunk_files",
    "chunks",
    "counter",
    "csv_rows",
    "elements",
    "enumerate",
    "filter",
    "fixed_length_records",
    "from_source",
    "from_tensor_slices",
    "from_tensors",
    "ignore_errors",
    "interleave",
    "map",
    "options",
    "padded_batch",
    "parquet",
    "prefetch",
    "ragged_batch",
    "range",
    "repeat",
    "saved",
    "sparse_batch",
    "text_lines",
    "tf_records",
    "unbatch",
    "zip",
}
"""Operators that run on portions, at least with some arguments. A new one that does belongs here
and to what is tried below."""


def over(pipeline: Tree, start: int, stop: int) -> list[Any]:
    """The elements that come of the positions start, ..., stop - 1; an error stands in the place of
    its element."""
    positions = iter(range(start, stop))
    return read(open_split(pipeline, lambda source, repetition: next(positions, None)), 10_000)


def pieces(pipeline: Tree, cuts: Sequence[int]) -> list[Any]:
    return [x for start, stop in pairwise(cuts) for x in over(pipeline, start, stop)]


def lines(folder: Path) -> Dataset:
    names = [folder / f"file-{number}" for number in range(5)]
    for number, name in enumerate(names):
        name.write_text("\n".join(f"{number}-{line}" for line in range(number)))
    return TextLineDataset(list(map(str, names)))


RANGE = Dataset.range(24)


# -- the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (RANGE, (24, 1, 1)),
        (Dataset.counter(), (ENDLESS, 1, 1)),
        (
            Dataset.from_tensors(1).map(abs).prefetch(2).ignore_errors().with_options(Options()),
            (1, 1, 1),
        ),
        (RANGE.batch(4), (24, 1, 4)),
        (RANGE.batch(5), (24, 1, 5)),
        (RANGE.batch(4).batch(3), (24, 1, 12)),
        (RANGE.batch(4, drop_remainder=True).unbatch(), (24, 1, 4)),
        (RANGE.batch(4, drop_remainder=True).unbatch().batch(6), (24, 1, 12)),
        (RANGE.batch(4).unbatch(), (24, 1, 4)),
        (Dataset.from_tensor_slices(np.zeros((6, 4))).unbatch().batch(2), (6, 1, 1)),
        (Dataset.from_tensor_slices(np.zeros((6, 4))).unbatch().batch(6), (6, 1, 3)),
        (RANGE.batch(6).filter(lambda x: True), (24, 1, 6)),
        (RANGE.flat_map(Dataset.range), (24, 1, 1)),
        (RANGE.repeat(3), (24, 3, 1)),
        (RANGE.repeat(3).repeat(2).map(abs), (24, 6, 1)),
        (RANGE.repeat(), (24, ENDLESS, 1)),
        (RANGE.repeat(-7), (24, ENDLESS, 1)),
        (RANGE.repeat(0), (24, 0, 1)),
        (RANGE.batch(5).repeat(2), (24, 2, 5)),
        (RANGE.repeat(2).batch(6), (24, 2, 6)),
        (Dataset.counter().repeat(2).batch(6), (ENDLESS, 2, 6)),
        (RANGE.repeat(1).batch(5), (24, 1, 5)),
        (Dataset.zip({"x": RANGE}).batch(2), (24, 1, 2)),
        (Dataset.zip(RANGE, Dataset.range(20).enumerate()).batch(2), (20, 1, 2)),
        (RANGE.map(abs).enumerate().repeat(3), (24, 3, 1)),
    ],
    ids=lambda value: value.op.one_line() if isinstance(value, Dataset) else None,
)
def test_portion_rules_of_pipelines(dataset: Dataset, wanted: tuple[int, int, int]) -> None:
    assert portion_rules(dataset) == wanted


BEHIND = r".*put it behind distribute\(\)"


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            RANGE.shuffle(3).map(abs),
            r"^shuffle\(\)" + BEHIND + ", or shuffle the file names or indices beforehand",
        ),
        (RANGE.take(3), r"^take\(\)" + BEHIND),
        (RANGE.filter(lambda x: True).enumerate(), r"^enumerate\(\)" + BEHIND),
        (RANGE.cache(), r"^cache\(\)" + BEHIND),
        (
            RANGE.interleave(Dataset.range, 2),
            r"^interleave\(\)" + BEHIND + ", or give it cycle_length=1",
        ),
        (RANGE.window(2), r"^window\(\)" + BEHIND),
        (Dataset.random(), r"^random\(\)" + BEHIND),
        (RANGE.concatenate(RANGE), r"^concatenate\(\)" + BEHIND),
        (Dataset.zip(RANGE, RANGE.batch(2)), r"^zip\(\) has several sources" + BEHIND),
        (Dataset.choose_from_datasets([RANGE], choices(0)), r"^choose_from_datasets\(\)" + BEHIND),
        (
            RANGE.filter(lambda x: True).batch(2),
            r"^batch\(\) joins elements, but not every position" + BEHIND,
        ),
        (
            RANGE.repeat(2).batch(5),
            r"^batch\(\) joins the end of a repetition.*apply it before repeat\(\)" + BEHIND,
        ),
        (
            RANGE.repeat().padded_batch(7),
            r"^padded_batch\(\) joins the end of a repetition" + BEHIND,
        ),
        (RANGE.batch(3).repeat(2).batch(3), r"^batch\(\) joins the end of a repetition" + BEHIND),
        (
            Dataset.from_generator(lambda: [1]).shuffle(2),
            r"Splitting is not implemented for from_generator",
        ),
    ],
    ids=lambda value: value.op.one_line() if isinstance(value, Dataset) else None,
)
def test_indivisible_operator_is_named_with_hint(dataset: Dataset, message: str) -> None:
    for ask in (portion_rules, portion_pipeline):
        with pytest.raises(UnimplementedError, match=message):
            ask(dataset)


def test_portion_rules_unpickle_nothing() -> None:
    text = RANGE.map(lambda x: x + 1).batch(2).serialize()
    blob = text.split('"pickle":"')[1].split('"')[0]
    assert portion_rules(deserialize(text.replace(blob, "AAAA"))) == (24, 1, 2)


# -- the pieces are the whole ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_divisible_example_is_sum_of_portions(name: str, tmp_path: Path) -> None:
    tried = 0
    for number, example in enumerate(EXAMPLES[name]):
        dataset = example.build(tmp_path / str(number))
        try:
            rules = portion_rules(dataset)
        except UnimplementedError:
            continue
        tried += 1
        end = rules.positions if rules.positions >= 0 else 4
        pipeline = portion_pipeline(dataset)
        whole = over(pipeline, 0, end)
        if rules.repetitions == 1 and rules.positions >= 0:
            read_at_once = getattr(
                dataset.op, "parallel", 0
            )  # several files in turn: a portion has them one after the other
            order: Callable[[Any], Any] = (
                (lambda found: sorted(found, key=repr)) if read_at_once else list
            )
            assert order(whole) == order(read(iter(dataset), 10_000))
        for length in {rules.grain, 2 * rules.grain}:
            assert pieces(pipeline, [*range(0, end, length), end]) == whole
    assert bool(tried) is (name in CUT)


def test_reader_is_sum_of_portions(tmp_path: Path) -> None:
    dataset = lines(tmp_path)
    pipeline = portion_pipeline(dataset)
    assert pieces(pipeline, [0, 2, 3, 3, 5]) == [plain(x) for x in dataset]


STEPS: list[Callable[[Dataset], Dataset]] = [
    lambda below: below.map(lambda x: x * 2),
    lambda below: below.map(lambda x: x + 1, num_parallel_calls=2, deterministic=False),
    lambda below: below.filter(lambda x: np.sum(x) % 3 != 1),
    lambda below: below.flat_map(lambda x: Dataset.from_tensor_slices([x, x])),
    lambda below: below.batch(2),
    lambda below: below.batch(3, drop_remainder=True),
    lambda below: below.padded_batch(2),
    lambda below: below.unbatch(),
    lambda below: below.prefetch(1),
    lambda below: below.repeat(2),
    lambda below: below.map(lambda x: 12 // (x - 4)).ignore_errors(),
    lambda below: below.with_options(Options()),
]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 40),
    st.lists(st.sampled_from(STEPS), max_size=5),
    st.lists(st.integers(0, 9), max_size=8),
)
def test_random_pipeline_is_sum_of_portions(
    count: int, steps: list[Callable[[Dataset], Dataset]], lengths: list[int]
) -> None:
    dataset = Dataset.range(count)
    try:
        for step in steps:
            dataset = step(dataset)
        rules = portion_rules(dataset)
    except (UnimplementedError, ValueError):  # it cannot be cut; or a scalar was to be taken apart
        return
    cuts = [0]
    for length in lengths:
        cuts.append(min(count, cuts[-1] + length * rules.grain))
    pipeline = portion_pipeline(dataset)
    assert pieces(pipeline, [*cuts, count]) == over(pipeline, 0, count)
    found, whole = over(pipeline, 0, count), read(iter(dataset), 10_000)
    if "an error" not in found:  # a repetition of nothing but errors is the last one
        assert found * rules.repetitions == whole


def test_portions_keep_order_despite_options() -> None:
    second_is_done = threading.Event()

    def late(x: Any) -> Any:
        if x == 0:
            assert second_is_done.wait(60)
        else:
            second_is_done.set()
        return x

    options = Options()
    options.deterministic = False
    pipeline = portion_pipeline(
        Dataset.range(4).map(late, num_parallel_calls=2).with_options(options)
    )
    assert [x for _, x in over(pipeline, 0, 4)] == [0, 1, 2, 3]


def test_declared_row_count_is_believed() -> None:
    rows = (
        RANGE.map(lambda x: np.repeat(x, 3), output_signature=TensorSpec((3,), np.int64))
        .unbatch()
        .batch(6)
    )
    assert portion_rules(rows) == (24, 1, 2)
