"""zip, concatenate, repeat, flat_map, interleave, choose and sample: operators that join several
datasets, or that read a dataset several times.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

from zmqdist import nest
from zmqdist.conditions import Condition
from zmqdist.data.constants import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import (
    BufferedError,
    Context,
    NumberedNode,
    OperatorNode,
    load_elements,
    save_elements,
)
from zmqdist.data.ops.background import AHEAD_MAX, DeferredNode, ReadAhead, in_order, threads_for
from zmqdist.data.ops.base import Op, PickledFunction, all_of, finite
from zmqdist.data.ops.in_step import InStepOp
from zmqdist.data.structure import (
    UNKNOWN_SPEC,
    NoElements,
    checked_int,
    common_spec,
    invalid,
    is_dataset,
    read_only,
)
from zmqdist.random import in_function


class _ZipNode(OperatorNode):
    """Runs `zip`. `at_end` says whether an input has ended. If so, the node reads no further row,
    not even after a load."""

    plain_fields = ("at_end",)
    state_keys = {"at_end": "ended"}
    at_end = False

    def run(self) -> Iterator[Any]:
        if self.at_end:
            return
        pulls = [child.stream().__next__ for child in self.children]
        pack = self._packing()
        while True:
            row: list[Any] = []
            try:
                for pull in pulls:
                    row.append(pull())
            except StopIteration:
                self.at_end = True
                # One input has ended. Read this row from the inputs after it, too. If one of them
                # also ends here, a cache in it has then reached its end, and keeps its record.
                self._skip_row(len(row))
                return
            except Exception:
                self._skip_row(len(row))
                raise
            yield pack(row)

    def _packing(self) -> Any:
        form = self.op.form
        if type(form) is tuple and not any(isinstance(part, (tuple, dict)) for part in form):
            return tuple
        return lambda row: nest.pack_sequence_as(form, row)

    def _skip_row(self, failed: int) -> None:
        """Read one element from each input after number `failed`, which has ended or raised an
        error. All inputs are then at the next row, so that the elements of a later row belong
        together.
        """
        for child in self.children[failed + 1 :]:
            try:
                next(child.stream(), None)
            except Exception:
                child.restart()


@operator("zip", _ZipNode)
class Zip(InStepOp):
    """Yields rows, each with one element of each input. The rows end with the shortest input."""

    ratio = Fraction(1)

    form: Any
    """The structure of a row, with any values as leaves."""

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return all_of(inputs, min)

    def in_step(self, dataset: DatasetLike) -> bool:
        return len(dataset.inputs) > 1

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return nest.pack_sequence_as(self.form, list(inputs))


class _ConcatenateNode(OperatorNode):
    plain_fields = ("turn",)
    turn = 0

    def run(self) -> Iterator[Any]:
        while self.turn < len(self.children):
            yield from self.children[self.turn].stream()
            self.turn += 1


@operator("concatenate", _ConcatenateNode)
class Concatenate(Op):
    """Yields the elements of one input after another."""

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if INFINITE_CARDINALITY in inputs:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in inputs else sum(inputs)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return common_spec(*inputs)


class _RepeatNode(OperatorNode):
    """Runs `repeat`.

    Attributes:
      epoch: the number of completed passes.
      empty: whether the current pass has yielded no element yet.
      first_source: the number of the first source of the input.
    """

    plain_fields = ("epoch", "empty")
    epoch = 0
    empty = True

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        self.first_source = context.next_source()
        super().__init__(dataset, context)

    def run(self) -> Iterator[Any]:
        count = self.op.count
        while count < 0 or self.epoch < count:
            for x in self.source():
                self.empty = False
                yield x
            if self.empty and self._stays_empty():
                return
            self.epoch += 1
            if self.epoch != count:
                # Open a new node for each pass, so that a shuffle draws its next order, and a cache
                # reads the record of the first pass.
                self.children[0].close()
                self.children[0] = self.context.reopen(self.dataset.inputs[0], self.first_source)
            self.empty = True

    def _stays_empty(self) -> bool:
        """Return whether the node must end after an empty pass. It must end if every later pass
        would be empty, or if empty passes might follow without end.

        Empty passes do not follow without end if other processes take elements too. These may have
        taken all elements of this pass, and a later pass may have elements.
        """
        below = self.dataset.inputs[0]
        if below.cardinality() == 0:
            return True
        shared = self.context.has_splits or any(node.op.is_shared for node in below.walk())
        return self.op.count < 0 and not shared


@operator("repeat", _RepeatNode)
class Repeat(Op):
    """Yields the elements of the input `count` times, or without end if `count` is negative. The
    input is opened again each time."""

    ratio = Fraction(1)

    count: int

    @property
    def repetitions(self) -> int:
        return max(self.count, INFINITE_CARDINALITY)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.count == 0 or inputs[0] == 0:
            return 0
        if self.count < 0 or inputs[0] == INFINITE_CARDINALITY:
            return INFINITE_CARDINALITY
        return inputs[0] * self.count if finite(inputs[0]) else UNKNOWN_CARDINALITY


# -- datasets of a function ------------------------------------------------------------------------


def returned_dataset(value: Any, operator_name: str) -> DatasetLike:
    """Return `value`, the result of a user function of the operator. Raises TypeError if `value` is
    not a dataset."""
    if not is_dataset(value):
        raise TypeError(
            f"the function of {operator_name} must return a Dataset, not {type(value).__name__}"
        )
    return value  # type: ignore[no-any-return]


class InterleaveNode(NumberedNode):
    """Runs `interleave`, `flat_map`, and readers of several files at once. A slot is the place of
    one open dataset in the cycle.

    Without threads, a slot whose dataset has ended gets the dataset of the next input element when
    it is the slot's turn again. With threads, the slot is filled at once, so that a thread can read
    the dataset ahead. If the input raises an error at this moment, (BufferedError, None) is in the
    slot until the slot's turn. If the order of the elements is kept, it is the same with and
    without threads, because a slot becomes free in its own turn, so that slots get new datasets in
    the order of their turns.

    Attributes:
      slots: for each slot (input element, node of its dataset, number of the input element), or
        None if the slot is empty.
      opened: the number of input elements so far.
      turn: the number of the current slot.
      block_position: the number of elements of the current block that were yielded.
      at_end: whether the input has ended.
      threads: the number of slots that threads read.
    """

    plain_fields = ("opened", "turn", "block_position", "at_end")
    state_keys = {"block_position": "taken", "at_end": "ended"}
    opened = turn = block_position = threads = 0
    at_end = False

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.slots: list[tuple[Any, Any, int] | None] = [None] * self.op.cycle_length
        if self.op.parallel and not context.probing:
            self.threads = (
                len(self.slots)
                if self.op.parallel == AUTOTUNE
                else threads_for(self.op.parallel, context)
            )
            context.interrupts.close_blocks = True
        self.ordered = in_order(self.op.deterministic, context)
        self.changed = None if self.ordered else Condition()
        self.abandoned = False

    def run(self) -> Iterator[Any]:
        slots, block = self.slots, self.op.block_length
        if self.threads:
            self._fill_slots()
        while True:
            if slots[self.turn] is None and not self._fill(self.turn):
                if all(slot is None for slot in slots):
                    return
                self._advance()
                continue
            if self.threads and not self.ordered:
                self._turn_to_ready()
            slot = slots[self.turn]
            assert slot is not None
            if slot[1] is None:
                slots[self.turn] = None
                raise slot[0].error
            for x in slot[1].stream():
                self.block_position += 1
                if self.block_position < block:
                    yield x
                else:
                    # advance before the yield, because a state that is saved during the yield
                    # contains these fields
                    self._advance()
                    yield x
                    break
            else:
                slot[1].close()
                slots[self.turn] = None
                if len(slots) > 1:
                    self._advance()
                if self.threads:
                    self._fill_slots()

    def _turn_to_ready(self) -> None:
        """Move `turn` to the next slot with an element that is ready. If there is no such slot,
        wait for one."""
        while True:
            for step in range(len(self.slots)):
                slot = self.slots[(self.turn + step) % len(self.slots)]
                if slot is not None and (not isinstance(slot[1], ReadAhead) or slot[1].ready()):
                    if step:
                        self.turn, self.block_position = (self.turn + step) % len(self.slots), 0
                    return
            # No node is ready, so all nodes are ReadAheads, because a node of any other class
            # counts as ready.
            ReadAhead.wait_for_ready(self.inner_nodes())

    def _fill_slots(self) -> None:
        """Fill the empty slots, in the order of their turns."""
        for step in range(len(self.slots)):
            number = (self.turn + step) % len(self.slots)
            if self.slots[number] is None and not self._fill(number):
                return

    def _fill(self, number: int) -> bool:
        """Open the dataset of the next input element in slot `number`. Return False if the input
        has no more elements, or if another thread is closing the iterator.
        """
        if self.at_end or self.abandoned:
            return False
        try:
            for x in self.source():
                self.opened += 1
                node = self._open_inner(number, x, self.opened)
                self._set_slot(number, x, node, self.opened)
                # If another thread is closing the iterator, close the node here, because that
                # thread has not seen this slot.
                if self.abandoned:
                    node.abandon()  # type: ignore[unreachable]
                    node.close()
                return True
        except Exception as error:
            if not self.threads:
                raise
            # With threads, a slot is filled before its turn, so keep the error in the slot until
            # the turn comes.
            self.slots[number] = (BufferedError(error), None, self.opened)
            self.children[0].restart()
            return True
        self.at_end = True
        return False

    def _open_inner(self, number: int, x: Any, opened: int, state: Any = None) -> Any:
        """Open the dataset that the function returns for `x`, the input element number `opened`,
        and return its node. With `state`, load this state.

        The function gets `x` read-only, because a state contains `x`, and a load calls the function
        on it again.
        """
        if self.threads:
            return self._open_ahead(number, x, self.inner_context(opened), state)
        node = self.inner_context(opened).open(self.op.dataset_of(read_only(x)))
        if state is not None:
            node.load_state_dict(state)
        return node

    def _open_ahead(self, number: int, x: Any, context: Context, state: Any) -> Any:
        opening = DeferredNode(partial(self.op.dataset_of, read_only(x)), context)
        node: Any = opening
        if number < self.threads:
            node = ReadAhead(opening, self.op.block_length, AHEAD_MAX, self.changed)  # type: ignore[arg-type]
        if state is not None:
            node.load_state_dict(state)
        elif node is opening:
            opening.open()
        return node

    def _set_slot(self, number: int, x: Any, node: Any, opened: int) -> None:
        self.slots[number] = (x, node, opened)
        # Start the thread last, because Ctrl-C meanwhile must not lose the node, which `close` ends.
        if isinstance(node, ReadAhead):
            node.begin()

    def _advance(self) -> None:
        self.turn, self.block_position = (self.turn + 1) % len(self.slots), 0

    def inner_nodes(self) -> list[Any]:
        return [slot[1] for slot in list(self.slots) if slot is not None and slot[1] is not None]

    def abandon(self) -> None:
        self.abandoned = True
        super().abandon()

    def close(self) -> None:
        self._close_slots()
        super().close()

    def _close_slots(self) -> None:
        for node in self.inner_nodes():
            node.abandon()
        for node in self.inner_nodes():
            node.close()

    def state(self) -> dict[str, Any]:
        inner = [
            slot and [save_elements([slot[0]]), slot[1] and slot[1].state_dict(), slot[2]]
            for slot in self.slots
        ]
        return super().state() | {"slots": inner}

    def load(self, state: dict[str, Any]) -> None:
        self._close_slots()
        self.slots[:] = [None] * len(self.slots)
        super().load(state)
        for step in range(len(self.slots)):
            number = (self.turn + step) % len(self.slots)
            slot_state = state["slots"][number]
            if slot_state is not None:
                elements, inner_state, opened = slot_state
                (x,) = load_elements(elements)
                node = (
                    None
                    if type(x) is BufferedError
                    else self._open_inner(number, x, opened, inner_state)
                )
                self._set_slot(number, x, node, opened)


def default_cycle_length(parallel: int | None) -> int:
    """Return how many datasets `interleave` has open by default, if it makes `parallel` calls at
    the same time."""
    cpus = os.cpu_count() or 1
    if parallel is None:
        return cpus
    return (cpus + 2) // 3 if parallel == AUTOTUNE else min(parallel, cpus)


@operator("interleave", InterleaveNode)
class Interleave(Op):
    """Yields blocks of elements from several datasets in turn. A function returns the dataset for
    each input element. flat_map is interleave with one dataset at a time.
    """

    result_spec = UNKNOWN_SPEC
    result_count = UNKNOWN_CARDINALITY

    function: PickledFunction
    cycle_length: int = 1
    block_length: int = 1
    parallel: int = 0
    deterministic: bool | None = None
    instead: ClassVar[str] = ", or give it cycle_length=1"

    def per_split(self) -> Fraction | None:
        return None if self.cycle_length == 1 else super().per_split()

    def infer(self, dataset: DatasetLike) -> Any:
        for x in dataset.inputs[0].probe():
            # After an empty dataset try the next input element, whose dataset may have elements.
            with contextlib.suppress(NoElements):
                return self.dataset_of(read_only(x)).element_spec
        return UNKNOWN_SPEC

    def dataset_of(self, x: Any) -> DatasetLike:
        """Return the dataset that the function returns for an element. Raises TypeError if the
        function returns no dataset."""
        fn = self.function.value
        called = (
            "flat_map"
            if (self.cycle_length, self.block_length, self.parallel) == (1, 1, 0)
            else self.name
        )
        with in_function():
            return returned_dataset(fn(*x) if type(x) is tuple else fn(x), called)


# -- one of several at a time ----------------------------------------------------------------------


class _ChooseNode(OperatorNode):
    """Runs `choose_from_datasets`.

    Attributes:
      empty_inputs: the inputs that have ended.
      at_end: whether no more elements will be chosen.
    """

    plain_fields = ("empty_inputs", "at_end")
    state_keys = {"empty_inputs": "ended", "at_end": "stopped"}
    empty_inputs: Sequence[int] = ()
    at_end = False

    def run(self) -> Iterator[Any]:
        inputs = self.children[1:]
        while not self.at_end:
            number = self.choose(len(inputs))
            if number is None:
                return
            if number in self.empty_inputs:
                continue
            for x in inputs[number].stream():
                yield x
                break
            else:
                self.empty_inputs = (*self.empty_inputs, number)
                all_empty = len(self.empty_inputs) == len(inputs)
                self.at_end = self.op.stop_on_empty_dataset or all_empty

    def choose(self, count: int) -> int | None:
        """Return the index of the next input to read, or None after the last choice."""
        for choice in self.children[0].stream():
            number = checked_int(choice, "choice_dataset")
            if not 0 <= number < count:
                raise invalid(f"Selector index out of range: {choice} is not in [0, {count})")
            return number
        return None


@operator("choose_from_datasets", _ChooseNode)
class Choose(InStepOp):
    """Yields, for each index that the first input yields, the next element of another input. Index
    0 means the second input, index 1 the third, and so on.
    """

    stop_on_empty_dataset: bool = True

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if not self.stop_on_empty_dataset and INFINITE_CARDINALITY in inputs[1:]:
            return (
                INFINITE_CARDINALITY if inputs[0] == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
            )
        all_infinite = set(inputs) == {INFINITE_CARDINALITY}
        return INFINITE_CARDINALITY if all_infinite else UNKNOWN_CARDINALITY

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        spec = inputs[1]
        for input_spec in inputs[2:]:
            spec = common_spec(spec, input_spec)
        return spec

    def in_step(self, dataset: DatasetLike) -> bool:
        # If all choices come and no input ends them, every element is chosen, in whichever process.
        # If no input ends, no process takes elements from another: as in tf.data, each process
        # makes all choices.
        choices, *inputs = (dataset_input.cardinality() for dataset_input in dataset.inputs)
        some_left_out = self.stop_on_empty_dataset or choices != INFINITE_CARDINALITY
        return some_left_out and set(inputs) != {INFINITE_CARDINALITY}

    def split_inputs(self, count: int) -> tuple[int, ...]:
        # split all inputs except the selector, which each worker reads whole
        return tuple(range(1, count))
