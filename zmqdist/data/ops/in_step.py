"""Operators that join elements by their places, such as zip, in a pipeline whose elements are
divided among processes by positions.

Theory
    The first element of one input belongs to the first element of the other, the second to the
    second, and so on. If each process got positions of one input independently of its positions of
    the other, the elements that it joins would not belong together. Therefore such an operator
    counts as one source, and its inputs get no positions of their own:

    Places are positions  if every position of each source below the operator gives exactly one
                          element: then all these sources read the positions that the operator gets.
    Places are counted    otherwise, for example below a filter: then each process computes all
                          elements of the operator, in the same order as all other processes, and
                          yields the elements whose places it gets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zmqdist.data.interfaces import DatasetLike
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.base import Op, all_of
from zmqdist.errors import UnimplementedError

_END = object()


class _PlacesNode(OperatorNode):
    """Computes all elements of an operator, and yields those whose places this process gets.

    Attributes:
      position: the place of the element that is computed next. An element whose computation
        raises an error has a place too.
    """

    plain_fields = ("position",)
    state_keys = {"position": "place"}
    position = 0

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        self.dataset, self.op, self.context = dataset, dataset.op, context
        self._stream = None
        self.splits = context.next_splits()
        self.children = [dataset.op.node(dataset, context.unsplit().in_order())]
        self._start = self.children[0].state_dict()

    def run(self) -> Iterator[Any]:
        assert self.splits is not None
        for target in self.splits:
            # The place is one that another process has returned, so begin again.
            if target < self.position:
                self.children[0].load_state_dict(self._start)
                self.position = 0
            while self.position <= target:
                self.position += 1
                try:
                    x = next(self.children[0].stream(), _END)
                except Exception:
                    if self.position > target:
                        raise
                    self.children[0].restart()  # the process that gets this place raises the error
                    continue
                if x is _END:
                    return
            yield x


@dataclass(frozen=True)
class InStepOp(Op):
    """Base class of the operators that join elements by their places."""

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        if not context.has_splits or context.in_step or not self.in_step(dataset):
            return self.node(dataset, context)
        if aligned_positions(dataset) is None:
            return _PlacesNode(dataset, context)
        return self.node(dataset, context.read_in_step())

    def in_step(self, dataset: DatasetLike) -> bool:
        """Return whether `dataset`, whose last operator this is, counts as one source where
        positions are given out."""
        raise NotImplementedError


def reads_in_step(dataset: DatasetLike) -> bool:
    """Return whether the last operator of `dataset` counts as one source where positions are given
    out."""
    return isinstance(dataset.op, InStepOp) and dataset.op.in_step(dataset)


def aligned_positions(dataset: DatasetLike) -> int | None:
    """Return the number of positions of a pipeline in which each position of every source gives
    exactly one element. Return None for any other pipeline.
    """
    op = dataset.op
    with contextlib.suppress(UnimplementedError):
        if op.repetitions == 1 and (op.name == "enumerate" or op.per_split() == 1):
            counts = tuple(
                aligned_positions(dataset_input) for dataset_input in dataset.inputs
            ) or (op.split_count(),)
            return None if None in counts else all_of(counts, min)  # type: ignore[arg-type]
    return None
