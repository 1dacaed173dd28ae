"""300 pipelines, drawn by seed, against tf.data: the same elements, element_spec and
cardinality.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.data import Dataset
from zmqdist.data.structure import NoElements

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip(
    "tensorflow", reason="needs tensorflow-cpu: pip install -e '.[engines]'", exc_type=ImportError
)

PIPELINES = 300
STEPS_MAX = 5
ELEMENTS_MAX = 200

Step = Callable[[Any], Any]
"""Adds an operator to a dataset of either library."""


class Draw:
    """One pipeline, for both libraries at once.

    Attributes:
      pair: the dataset of tf.data and ours.
      shown: the steps so far.
      inferred: whether our spec comes from a first element, so that padded_batch does not rely on
        it.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shown: list[str] = []
        self.pair: list[Any] = []
        self.inferred = False
        self._source()
        for _ in range(self.random.randint(1, STEPS_MAX)):
            self._step()

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    @property
    def spec(self) -> Any:
        return self.pair[0].element_spec

    def _add(self, name: str, *steps: Step) -> None:
        self.shown.append(name)
        self.inferred |= any(word in name for word in ("flat_map", "interleave", "group_by_window"))
        self.pair = [
            step(each) for step, each in zip(steps * (2 // len(steps)), self.pair, strict=True)
        ]

    def _map(self, name: str, in_tf: Any, in_numpy: Any) -> None:
        """Our map learns its spec from a signature, as tf.data learns it from tracing."""
        mapped = self.pair[0].map(in_tf)
        signature = tf.nest.map_structure(plain_spec, mapped.element_spec)
        self.shown.append(name)
        self.pair = [mapped, self.pair[1].map(in_numpy, output_signature=signature)]

    def _source(self) -> None:
        length = self.number(0, 12)
        rows = np.arange(length * 2).reshape(length, 2)
        value = self.random.choice(
            [
                np.arange(length),
                rows,
                (np.arange(length), rows.astype(np.float32)),
                {"a": np.arange(length), "b": (rows, np.arange(length) % 2 == 0)},
                (np.arange(length), ()),
                np.array([b"%d" % number for number in range(length)], dtype="S2"),
            ]
        )
        self.shown.append(f"slices({length}, {value!r:.40})")
        self.pair = [tf.data.Dataset.from_tensor_slices(value), Dataset.from_tensor_slices(value)]
        if self.random.random() < 0.3:
            start, step = self.number(-3, 3), self.random.choice([-2, 1, 3])
            self.shown = [f"range({start}, {length}, {step})"]
            self.pair = [kind.range(start, length, step) for kind in (tf.data.Dataset, Dataset)]

    def _step(self) -> None:
        scalar = (
            isinstance(self.spec, tf.TensorSpec)
            and self.spec.shape == ()
            and self.spec.dtype == tf.int64
        )
        leaves = tf.nest.flatten(self.spec)
        can_split = all(leaf.shape.rank for leaf in leaves)
        steps = [self._cut, self._join, self._combine]
        if scalar:
            steps += [self._compute] * 3
        if can_split:
            steps += [self._split] * 2
        self.random.choice(steps)()

    def _cut(self) -> None:
        count, shards = self.number(-1, 8), self.number(1, 4)
        step: Step
        name, step = self.random.choice(
            [
                (f"take({count})", lambda one: one.take(count)),
                (f"skip({count})", lambda one: one.skip(count)),
                (f"shard({shards}, 0)", lambda one: one.shard(shards, 0)),
                (f"shard({shards}, {shards - 1})", lambda one: one.shard(shards, shards - 1)),
                (f"repeat({max(0, count) % 4})", lambda one: one.repeat(max(0, count) % 4)),
                ("repeat().take(15)", lambda one: one.repeat().take(15)),
                ("prefetch(2)", lambda one: one.prefetch(2)),
                ("cache()", lambda one: one.cache()),
                ("enumerate(3)", lambda one: one.enumerate(3)),
                ("ignore_errors()", lambda one: one.ignore_errors()),
            ]
        )
        self._add(name, step)

    def _join(self) -> None:
        size, drop = self.number(1, 4), self.random.random() < 0.5
        shift, stride = self.number(1, 3), self.number(1, 2)
        step: Step
        name, step = self.random.choice(
            [
                (f"batch({size}, {drop})", lambda one: one.batch(size, drop)),
                (
                    f"padded_batch({size}, {drop})",
                    lambda one: one.padded_batch(size, drop_remainder=drop),
                ),
                (
                    f"window({size}, {shift}, {stride}, {drop}).flat_map",
                    lambda one: windows(one, size, shift, stride, drop),
                ),
            ]
        )
        if "window" in name and not isinstance(self.spec, tf.TensorSpec):
            return
        if "padded" in name and self.inferred:
            return
        if "batch" in name and varies(self.spec) and "padded" not in name:
            return
        self._add(name, step)

    def _split(self) -> None:
        size, other = self.number(1, 4), self.number(0, 3)
        name, step = self.random.choice(
            [
                ("unbatch()", lambda one: one.unbatch()),
                (f"rebatch({size})", lambda one: one.rebatch(size)),
                (f"rebatch({size}, True)", lambda one: one.rebatch(size, drop_remainder=True)),
                (f"rebatch([{size}, {other}])", lambda one: one.rebatch([size, other])),
            ]
        )
        if "rebatch" in name and any(None in leaf.shape[1:] for leaf in tf.nest.flatten(self.spec)):
            return
        self._add(name, step)

    def _combine(self) -> None:
        length = self.number(0, 6)
        spec = self.spec
        step: Step
        name, step = self.random.choice(
            [
                (
                    f"zip(range({length}))",
                    lambda one: kind_of(one).zip((one, kind_of(one).range(length))),
                ),
                ("zip(itself.skip)", lambda one: kind_of(one).zip({"x": one, "y": one.skip(1)})),
                ("concatenate(itself)", lambda one: one.concatenate(one.take(2))),
                (f"choose({length})", lambda one: choose(one, length)),
            ]
        )
        if isinstance(spec, tf.TensorSpec) and spec.shape == (2,) and self.random.random() < 0.5:
            name, step = (
                "concatenate(longer)",
                lambda one: one.concatenate(
                    kind_of(one).from_tensors(np.arange(3).astype(spec.dtype.as_numpy_dtype))
                ),
            )
        self._add(name, step)

    def _compute(self) -> None:
        modulus = self.number(2, 4)
        kind = self.random.randrange(8)
        if kind == 0:
            self._map("map(x * 2)", lambda x: x * 2, lambda x: x * 2)
        elif kind == 1:
            self._map("map(row)", lambda x: tf.fill([x % 4], x), lambda x: np.full(x % 4, x))
        elif kind == 2:
            self._map("map(pair)", lambda x: (x, {"y": x + 1}), lambda x: (x, {"y": x + 1}))
        elif kind == 3:
            self._add(f"filter(% {modulus})", lambda one: one.filter(lambda x: x % modulus == 0))
        elif kind == 4:
            self._add("flat_map", lambda one: one.flat_map(lambda x: kind_of(one).range(x % 4)))
        elif kind == 5:
            cycle, block = self.number(1, 3), self.number(1, 3)
            self._add(
                f"interleave({cycle}, {block})",
                lambda one: one.interleave(
                    lambda x: kind_of(one).range(x, x + x % 4), cycle, block
                ),
            )
        elif kind == 6:
            self._add("take_while", lambda one: one.take_while(lambda x: x < 2 * modulus))
        else:
            self._add(
                "group_by_window",
                lambda one: one.group_by_window(
                    lambda x: x % modulus, lambda key, rows: rows.batch(3), window_size=3
                ),
            )


def kind_of(dataset: Any) -> Any:
    return Dataset if isinstance(dataset, Dataset) else tf.data.Dataset


def windows(dataset: Any, size: int, shift: int, stride: int, drop: bool) -> Any:
    """The windows as datasets of one element, joined again."""
    windowed = dataset.window(size, shift, stride, drop)
    return windowed.flat_map(lambda window: window)


def choose(dataset: Any, length: int) -> Any:
    kind = kind_of(dataset)
    choices = kind.from_tensor_slices(np.arange(length) % 2)
    return kind.choose_from_datasets([dataset, dataset.take(2)], choices)


def varies(spec: Any) -> bool:
    """Whether elements of this spec differ in shape."""
    return any(None in leaf.shape for leaf in tf.nest.flatten(spec))


def plain_spec(spec: Any) -> zd.TensorSpec:
    shape = None if spec.shape.rank is None else tuple(spec.shape)
    return zd.TensorSpec(shape, np.bytes_ if spec.dtype == tf.string else spec.dtype.as_numpy_dtype)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items())}
    return tuple(map(plain, value)) if isinstance(value, tuple) else np.asarray(value).tolist()


def read_theirs(dataset: Any) -> list[Any] | None:
    """The elements, or None if tf.data refuses a dataset that it has made itself."""
    try:
        return [plain(x) for x in dataset.take(ELEMENTS_MAX).as_numpy_iterator()]
    except tf.errors.InvalidArgumentError as error:
        if "Incompatible shapes at component 0" in error.message:
            return None
        raise


@pytest.mark.parametrize("part", range(10))
def test_pipelines_equal_tf_data(part: int) -> None:
    share = PIPELINES // 10
    for seed in range(part * share, (part + 1) * share):
        draw = Draw(seed)
        theirs, ours = draw.pair
        about = f"seed {seed}: {' | '.join(draw.shown)}"
        # Without an element our flat_map cannot know what its function would have returned.
        with contextlib.suppress(NoElements):
            assert ours.element_spec == tf.nest.map_structure(plain_spec, theirs.element_spec), (
                about
            )
        assert ours.cardinality() == int(theirs.cardinality()), about
        elements = read_theirs(theirs)
        if elements is None:
            continue
        assert [plain(x) for x in ours.take(ELEMENTS_MAX)] == elements, about
