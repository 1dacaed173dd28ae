"""Several datasets as one, and one several times: zip, concatenate, repeat, flat_map, interleave, choose and sample."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from zmqdist import nest
from zmqdist.data import seeds
from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.iterators import Context, Node, load_elements, save_elements
from zmqdist.data.ops.background import AHEAD_MAX, Ahead, in_order, threads_for
from zmqdist.data.ops.base import Function, Op, all_of, finite, operator
from zmqdist.data.structure import UNKNOWN_SPEC, common_spec, invalid, is_dataset

if TYPE_CHECKING:
    from zmqdist.data.tree import Tree


class _ZipNode(Node):
    def run(self) -> Iterator[Any]:
        pulls = [child.stream().__next__ for child in self.children]
        pack = self._packing()
        while True:
            row: list[Any] = []
            try:
                for pull in pulls:
                    row.append(pull())
            except StopIteration:
                return
            except Exception:
                self._skip_row(len(row))
                raise
            yield pack(row)

    def _packing(self) -> Any:
        form = self.op.form
        if type(form) is tuple and not any(isinstance(one, (tuple, dict)) for one in form):
            return tuple
        return lambda row: nest.pack_sequence_as(form, row)

    def _skip_row(self, failed: int) -> None:
        """Where one input failed, the others go on, too: rows stay together."""
        for child in self.children[failed + 1 :]:
            try:
                next(child.stream(), None)
            except Exception:
                child.restart()


@operator("zip", _ZipNode)
@dataclass(frozen=True)
class Zip(Op):
    """Rows of one element of each input; ends with the shortest."""

    form: Any
    """The structure of a row, with anything as leaves."""

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return all_of(inputs, min)

    def per_split(self) -> Fraction | None:
        return Fraction(1)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return nest.pack_sequence_as(self.form, list(inputs))


class _ConcatenateNode(Node):
    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        self.turn = 0

    def run(self) -> Iterator[Any]:
        while self.turn < len(self.children):
            yield from self.children[self.turn].stream()
            self.turn += 1

    def state(self) -> dict[str, Any]:
        return {"turn": self.turn}

    def load(self, state: dict[str, Any]) -> None:
        self.turn = state["turn"]


@operator("concatenate", _ConcatenateNode)
@dataclass(frozen=True)
class Concatenate(Op):
    """One input after the other."""

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if INFINITE_CARDINALITY in inputs:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in inputs else sum(inputs)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return common_spec(*inputs)


class _RepeatNode(Node):
    """`epoch` passes are done; `empty`: nothing came in this one yet."""

    def __init__(self, dataset: Tree, context: Context) -> None:
        self.place = context.place()
        super().__init__(dataset, context)
        self.epoch = 0
        self.empty = True

    def run(self) -> Iterator[Any]:
        count = self.op.count
        while count < 0 or self.epoch < count:
            for x in self.source():
                self.empty = False
                yield x
            if self.empty and not self._others_read():
                return  # it would be for ever
            self.epoch += 1
            if self.epoch != count:
                self.children[0].close()
                self.children[0] = self.context.reopen(self.dataset.inputs[0], self.place)
            self.empty = True

    def _others_read(self) -> bool:
        """Whether others may have had all of this pass."""
        below = self.dataset.inputs[0]
        return below.cardinality() != 0 and (self.context.dealt or any(each.op.is_shared for each in below.walk()))

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "empty": self.empty}

    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.empty = state["epoch"], state["empty"]


@operator("repeat", _RepeatNode)
@dataclass(frozen=True)
class Repeat(Op):
    """The input `count` times, each time opened anew; for ever where the count is negative."""

    count: int

    @property
    def repetitions(self) -> int:
        return max(self.count, INFINITE_CARDINALITY)

    def per_split(self) -> Fraction | None:
        return Fraction(1)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.count == 0 or inputs[0] == 0:
            return 0
        if self.count < 0 or inputs[0] == INFINITE_CARDINALITY:
            return INFINITE_CARDINALITY
        return inputs[0] * self.count if finite(inputs[0]) else UNKNOWN_CARDINALITY


# -- datasets of a function ---------------------------------------------------------------------------------------


def returned_dataset(value: Any, what: str) -> Tree:
    """Raises TypeError for anything but a dataset."""
    if not is_dataset(value):
        raise TypeError(f"the function of {what} returns a Dataset, not {type(value).__name__}")
    return value  # type: ignore[no-any-return]


class InterleaveNode(Node):
    """`slots` hold (input element, its dataset's node) or None; `turn` is the slot in use, `taken` how much of its block is gone.

    A slot whose dataset has ended is filled with the next input when its turn comes again.
    """

    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        self.slots: list[tuple[Any, Node] | None] = [None] * self.op.cycle_length
        self.turn = 0
        self.taken = 0
        self.ended = False
        self.threads = 0
        if self.op.parallel and not context.probing:
            self.threads = len(self.slots) if self.op.parallel == AUTOTUNE else threads_for(self.op.parallel, context)
        self.ordered = in_order(self.op.deterministic, context)

    def open_inner(self, x: Any) -> Node:
        """The node of the dataset that the function makes of an input element."""
        node = self.context.inner().open(self.op.made(x))
        if self.turn < self.threads:
            return Ahead(node, self.op.block_length, AHEAD_MAX)  # type: ignore[return-value]
        return node

    def run(self) -> Iterator[Any]:
        slots, block = self.slots, self.op.block_length
        while True:
            if slots[self.turn] is None and not self._fill():
                if all(slot is None for slot in slots):
                    return
                self._advance()
                continue
            if self.threads and not self.ordered:
                self._turn_to_ready()
            slot = slots[self.turn]
            assert slot is not None
            for x in slot[1].stream():
                self.taken += 1
                if self.taken < block:
                    yield x
                else:
                    self._advance()
                    yield x
                    break
            else:
                slot[1].close()
                slots[self.turn] = None
                if len(slots) > 1:
                    self._advance()

    def _turn_to_ready(self) -> None:
        """To the next slot that has something to give; stays where none has."""
        for step in range(len(self.slots)):
            slot = self.slots[(self.turn + step) % len(self.slots)]
            if slot is not None and (not isinstance(slot[1], Ahead) or slot[1].ready()):
                if step:
                    self.turn, self.taken = (self.turn + step) % len(self.slots), 0
                return

    def _fill(self) -> bool:
        if not self.ended:
            for x in self.source():
                self.slots[self.turn] = (x, self.open_inner(x))
                return True
            self.ended = True
        return False

    def _advance(self) -> None:
        self.turn, self.taken = (self.turn + 1) % len(self.slots), 0

    def restart(self) -> None:
        super().restart()
        for slot in self.slots:
            if slot is not None:
                slot[1].restart()

    def abandon(self) -> None:
        super().abandon()
        for slot in list(self.slots):
            if slot is not None:
                slot[1].abandon()

    def close(self) -> None:
        super().close()
        for slot in self.slots:
            if slot is not None:
                slot[1].close()

    def state(self) -> dict[str, Any]:
        inner = [slot and [save_elements([slot[0]]), slot[1].state_dict()] for slot in self.slots]
        return {"slots": inner, "turn": self.turn, "taken": self.taken, "ended": self.ended}

    def load(self, state: dict[str, Any]) -> None:
        for number, kept in enumerate(state["slots"]):
            slot, self.slots[number] = self.slots[number], None
            if slot is not None:
                slot[1].close()
            if kept is not None:
                (x,) = load_elements(kept[0])
                self.turn = number
                node = self.open_inner(x)
                node.load_state_dict(kept[1])
                self.slots[number] = (x, node)
        self.turn, self.taken, self.ended = state["turn"], state["taken"], state["ended"]


def default_cycle_length(parallel: int | None) -> int:
    """How many datasets interleave keeps open where nobody says."""
    cpus = os.cpu_count() or 1
    if parallel is None:
        return cpus
    return (cpus + 2) // 3 if parallel == AUTOTUNE else min(parallel, cpus)


@operator("interleave", InterleaveNode)
@dataclass(frozen=True)
class Interleave(Op):
    """Blocks of the datasets that a function makes of the elements, in turn; flat_map with one dataset at a time."""

    function: Function
    cycle_length: int = 1
    block_length: int = 1
    parallel: int = 0
    deterministic: bool | None = None
    instead: ClassVar[str] = ", or give it cycle_length=1"

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return UNKNOWN_SPEC

    def per_split(self) -> Fraction | None:
        return None if self.cycle_length == 1 else super().per_split()

    def infer(self, dataset: Tree) -> Any:
        for x in dataset.inputs[0].probe():
            return self.made(x).element_spec
        return UNKNOWN_SPEC

    def made(self, x: Any) -> Tree:
        """The dataset of an element. Raises TypeError where the function gives none."""
        fn = self.function.value
        return returned_dataset(fn(*x) if type(x) is tuple else fn(x), self.name)


# -- one of several at a time ---------------------------------------------------------------------------------------


class _ChooseNode(Node):
    """The first child selects, the others are selected from; `ended` are those that have no more."""

    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        self.ended: list[int] = []
        self.stopped = False

    def run(self) -> Iterator[Any]:
        inputs = self.children[1:]
        while not self.stopped:
            chosen = self.choose(len(inputs))
            if chosen is None:
                return
            if chosen in self.ended:
                continue
            for x in inputs[chosen].stream():
                yield x
                break
            else:
                self.ended.append(chosen)
                self.stopped = self.op.stop_on_empty_dataset or len(self.ended) == len(inputs)

    def choose(self, count: int) -> int | None:
        """The next input; None: there is no choice any more."""
        for choice in self.children[0].stream():
            if not 0 <= choice < count:
                raise invalid(f"Selector index out of range: {choice} >= {count}")
            return int(choice)
        return None

    def state(self) -> dict[str, Any]:
        return {"ended": self.ended, "stopped": self.stopped}

    def load(self, state: dict[str, Any]) -> None:
        self.ended, self.stopped = list(state["ended"]), state["stopped"]


@dataclass(frozen=True)
class _Selecting(Op):
    stop_on_empty_dataset: bool = True

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if not self.stop_on_empty_dataset and INFINITE_CARDINALITY in inputs[1:]:
            return INFINITE_CARDINALITY if inputs[0] == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        everything = set(inputs) == {INFINITE_CARDINALITY}
        return INFINITE_CARDINALITY if everything else UNKNOWN_CARDINALITY

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        spec = inputs[1]
        for other in inputs[2:]:
            spec = common_spec(spec, other)
        return spec

    def split_inputs(self, count: int) -> tuple[int, ...]:
        return tuple(range(1, count))  # the selector is each worker's own


@operator("choose_from_datasets", _ChooseNode)
@dataclass(frozen=True)
class Choose(_Selecting):
    """Elements of the inputs behind the first, which says whose turn it is."""


class _SelectorNode(Node):
    """Numbers of inputs, by weight. Weights come from the input where there is one."""

    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        number = 0 if context.probing else dataset.memory.number()
        self.draws = seeds.Draws(seeds.epoch_seed(dataset, number, self.op.seed, self.op.rerandomize))

    def run(self) -> Iterator[Any]:
        if not self.children:
            while True:
                yield self._draw(self.op.weights)
        for weights in self.source():
            yield self._draw(weights)

    def _draw(self, weights: Any) -> Any:
        bounds = np.cumsum(np.asarray(weights, dtype=np.float64))
        chosen = np.searchsorted(bounds, self.draws.uniform() * bounds[-1], side="right")
        return np.int64(min(chosen, len(bounds) - 1))

    def state(self) -> dict[str, Any]:
        return self.draws.state()

    def load(self, state: dict[str, Any]) -> None:
        self.draws.load(state)


@operator("selector", _SelectorNode)
@dataclass(frozen=True)
class Selector(Op):
    """Whose turn it is, by weight: the first input of `choose_from_datasets` in `sample_from_datasets`."""

    weights: tuple[float, ...] | None
    seed: tuple[int, int] | None
    rerandomize: bool

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return inputs[0] if inputs else INFINITE_CARDINALITY

    def stateful(self) -> bool:
        return self.seed is None

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        from zmqdist.specs import TensorSpec

        return TensorSpec((), np.int64)
