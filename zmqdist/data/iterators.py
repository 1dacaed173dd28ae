"""Operators at work: what an open dataset is made of, and the iterator that a user holds.

Theory
    Each operator is an `OperatorNode`. Its `run` is a generator that goes on from the node's own fields, and the fields are right
    whenever it yields and whenever something it calls may raise. That one rule gives both things that generators lack: a state
    can be saved and loaded between any two elements, and after an error a new generator goes on behind the element that failed.
    Elements pass through plain generators, some 50 ns an operator.

Rules
    A child's error passes through every generator above it and ends them all; the user's iterator then makes them anew. A node that
    catches errors, or that runs its child in a thread, calls `child.restart()` itself.
    A child that has ended stays at its end, also after a restart or a load.
    `close` ends threads and waits for them; a closed node can still tell its state.

One iterator belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from zmqdist.background import in_background
from zmqdist.data.interfaces import DatasetLike, deserialize
from zmqdist.data.options import Options
from zmqdist.data.structure import from_json, invalid, is_dataset, map_items, to_json
from zmqdist.errors import (
    CancelledError,
    FailedPreconditionError,
    OpError,
    ResourceExhaustedError,
    UnimplementedError,
    UnknownError,
    from_code,
)
from zmqdist.limits import STATE_BYTES_MAX

STATE_VERSION = 1


class OperatorTimer:
    """How often and for how long elements of one operator were waited for, those below it included."""

    __slots__ = ("elements", "seconds")

    def __init__(self) -> None:
        self.elements = 0
        self.seconds = 0.0

    def wrap(self, stream: Iterator[Any]) -> Iterator[Any]:
        """The same elements, counted."""
        while True:
            began = time.perf_counter()
            try:
                x = next(stream, _END)
            finally:
                self.seconds += time.perf_counter() - began
            if x is _END:
                return
            self.elements += 1
            yield x


class OperatorStats(NamedTuple):
    """What an operator has done for one iterator.

    Attributes:
      name: of the operator.
      elements: that it gave.
      seconds: that its reader waited for it, without those that it waited itself for the operators below it.
    """

    name: str
    elements: int
    seconds: float


class Openings:
    """Nodes that wait for somebody while they are opened, in whichever thread: closing the iterator ends that.

    Attributes:
      waits: closing the iterator waits: for a thread, a process or a server.
    """

    def __init__(self) -> None:
        self.waits = False
        self._lock = threading.RLock()  # a finalizer that closes the iterator may run under it
        self._interrupts: list[Callable[[], object]] = []
        self._closed = False

    @contextlib.contextmanager
    def one(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """While this lasts, `interrupt` is called when the iterator is closed; at once where it is."""
        with self._lock:
            self._interrupts.append(interrupt)
            closed = self._closed
        try:
            if closed:
                interrupt()
            yield
        finally:
            with self._lock:
                self._interrupts.remove(interrupt)

    def close(self) -> None:
        """End all."""
        with self._lock:
            self._closed = True
            interrupts = list(self._interrupts)
        for interrupt in interrupts:
            interrupt()


class Context:
    """What the nodes of one iterator share.

    Attributes:
      options: those of the whole pipeline.
      probing: the iterator is there to look at the first element: it draws no seed, writes no cache, starts no thread.
      timed: by the id of a dataset, where the options ask for statistics.
      splits: the positions of a source in a repetition, behind those that were taken: `splits(source, repetition, taken)`; None: each
        source is whole.
      resumable: whether `splits` minds `taken`, so that a state can be told.
      openings: of the whole iterator, also of the datasets that functions return.
    """

    def __init__(
        self,
        options: Options,
        probing: bool = False,
        splits: Callable[[int, int, int], Iterator[int]] | None = None,
        resumable: bool = False,
    ) -> None:
        self.options = options
        self.probing = probing
        self.resumable = resumable
        self.timers: dict[int, OperatorTimer] | None = {} if options.stats and not probing else None
        self.openings = Openings()
        self._splits = splits
        self._sources = 0
        self._repetitions: dict[int, int] = {}

    @property
    def has_splits(self) -> bool:
        """Whether sources give what somebody deals out."""
        return self._splits is not None

    def open(self, dataset: DatasetLike) -> OperatorNode:
        """The node of a dataset, with those below it."""
        node: OperatorNode = dataset.op.open(dataset, self)
        return node

    def open_inputs(self, dataset: DatasetLike) -> list[OperatorNode]:
        """The nodes of a dataset's inputs; those that are not split have their sources whole."""
        split = None if self._splits is None else dataset.op.split_inputs(len(dataset.inputs))
        nodes: list[OperatorNode] = []
        try:
            for number, each in enumerate(dataset.inputs):
                context = self if split is None or number in split else self.inner()
                nodes.append(context.open(each))
        except BaseException:  # a reader of a data service, say, that was refused
            for node in nodes:
                node.close()
            raise
        return nodes

    def next_source(self) -> int:
        """The number of the source that is opened next."""
        return self._sources

    def reopen(self, dataset: DatasetLike, first_source: int) -> OperatorNode:
        """Open a dataset once more, as a repetition, whose first source has number `place`."""
        before, self._sources = self._sources, first_source
        try:
            return self.open(dataset)
        finally:
            self._sources = before

    def inner(self) -> Context:
        """The context of datasets whose sources are whole, as of those that a function returns."""
        context = Context(self.options, self.probing)
        context.openings = self.openings
        context.timers = None  # they belong to the operator whose function made them
        return context

    def next_splits(self) -> SplitStream | None:
        """The positions of the source that is being opened; None: all."""
        if self._splits is None:
            return None
        number, self._sources = self._sources, self._sources + 1
        repetition = self._repetitions[number] = self._repetitions.get(number, -1) + 1
        return SplitStream(self, number, repetition)

    def positions(self, source: int, repetition: int, taken: int) -> Iterator[int]:
        """The positions of a source in a repetition, behind those that were taken."""
        assert self._splits is not None
        return self._splits(source, repetition, taken)

    def set_repetition(self, source: int, repetition: int) -> None:
        """A source was put into a repetition by a state: the next that is opened is the one behind it."""
        self._repetitions[source] = repetition


class SplitStream:
    """The positions of one source in one repetition, `taken` of them so far. Each `iter` goes on behind those."""

    def __init__(self, context: Context, source: int, repetition: int) -> None:
        self._context = context
        self._source = source
        self._repetition = repetition
        self._taken = 0

    def __iter__(self) -> Iterator[int]:
        for position in self._context.positions(self._source, self._repetition, self._taken):
            self._taken += 1
            yield position

    def state(self) -> dict[str, int]:
        """JSON-able. Raises UnimplementedError where whoever deals cannot be told to go on from somewhere."""
        if not self._context.resumable:
            raise UnimplementedError("whoever deals out the splits keeps the place, not the iterator")
        return {"repetition": self._repetition, "taken": self._taken}

    def load(self, state: dict[str, int]) -> None:
        """Go on there: the next `iter` does."""
        self._repetition, self._taken = state["repetition"], state["taken"]
        self._context.set_repetition(self._source, self._repetition)


class OperatorNode:
    """One operator at work. Subclasses give `run`, and `state` and `load` where they have fields of their own.

    Attributes:
      children: the nodes of the inputs.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        self.dataset = dataset
        self.op: Any = dataset.op
        self.context = context
        self.children: list[OperatorNode] = context.open_inputs(dataset)
        self._stream: Iterator[Any] | None = None

    def run(self) -> Iterator[Any]:
        """The elements from here on; see the theory above."""
        raise NotImplementedError

    def stream(self) -> Iterator[Any]:
        """The generator in use."""
        if self._stream is None:
            self._stream = self.run()
            if self.context.timers is not None:
                self._stream = self.context.timers.setdefault(id(self.dataset), OperatorTimer()).wrap(self._stream)
        return self._stream

    def source(self) -> Iterator[Any]:
        """The elements of the only input."""
        return self.children[0].stream()

    def restart(self) -> None:
        """After an error: make new generators, from the fields."""
        self._stream = None
        for child in self.children:
            child.restart()

    def abandon(self) -> None:
        """Called by another thread than the one that reads, before it waits for that: end what it may be waiting for, if possible."""
        for child in self.children:
            child.abandon()

    def close(self) -> None:
        """End what runs in the background; harmless when nothing does. Drops the generators, which refer to this node."""
        self._stream = None
        for child in self.children:
            child.close()

    def state(self) -> dict[str, Any]:
        """The fields, JSON-able."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Set the fields. The children are loaded by `load_state_dict`, before this."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this node and those below it."""
        return {"own": self.state(), "inputs": [child.state_dict() for child in self.children]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._stream = None
        for child, child_state in zip(self.children, state["inputs"], strict=True):
            child.load_state_dict(child_state)
        self.load(state["own"])


class _IteratorCore:
    """What stands behind an iterator: the node, and one generator after the other until the end.

    It does not know the iterator, so that the iterator goes when its last user does.
    """

    def __init__(self, node: OperatorNode) -> None:
        self.node = node
        self.ended = False
        self.closed = False
        self._needs_generator = True
        self._current: Iterator[Any] | None = None

    def streams(self) -> Iterator[Iterator[Any]]:
        """The first generator, and another after each error and each load."""
        while self._needs_generator:
            self._needs_generator = False
            self._current = self._guarded()
            yield self._current
        self.ended = self.ended or not self.closed
        self.close()

    def _guarded(self) -> Iterator[Any]:
        try:
            yield from self.node.stream()
        except GeneratorExit:
            raise
        except BaseException as error:  # an interrupt, too, costs one element and not the rest
            if self.closed and isinstance(error, CancelledError):
                return  # closed by another thread while this one waited: that is the end
            self._needs_generator = True
            self.node.restart()
            raise

    def load(self, state: dict[str, Any]) -> None:
        """Set the node's fields, and leave the generator that runs on the old ones."""
        self._close_generator()
        self._needs_generator = True
        self.node.load_state_dict(state)

    def close(self) -> None:
        """Nothing comes any more, whether this is the end of the data or not."""
        self.closed = True
        self.node.context.openings.close()
        self.node.abandon()
        try:
            self._close_generator()
        except ValueError:
            pass  # another thread is in it, and on its way out
        self._needs_generator = False
        self.node.close()

    def _close_generator(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()  # type: ignore[attr-defined]


class DatasetIterator(chain[Any]):
    """The elements of a dataset, one by one; what `iter(dataset)` gives.

    After an error the next call goes on with the next element. After the end it stays at the end. Threads of the pipeline
    end with the iterator: when it is exhausted, closed, or nobody holds it any more.

    It is a chain of generators because a `__next__` in Python would cost more than most pipelines.
    """

    _core: _IteratorCore
    _dataset: DatasetLike
    _names: list[str]

    def __new__(cls, dataset: DatasetLike, context: Context) -> DatasetIterator:
        """Open a dataset."""
        core = _IteratorCore(context.open(dataset))
        self: Any = cls.from_iterable(core.streams())
        self._core = core
        self._dataset = dataset
        self._names = [each.op.name for each in dataset.walk()]
        return self  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Where this iterator is, JSON-able: another one over an equal dataset goes on there after `load_state_dict`.

        It holds the elements that lie in buffers (of shuffle, of prefetch, of windows that are not full).

        Raises:
          InvalidArgumentError: a buffer holds what has no JSON form.
          ResourceExhaustedError: the buffers hold more than STATE_BYTES_MAX (limits.py).
          UnimplementedError: an operator cannot tell its state; a buffer holds datasets with functions.
          FailedPreconditionError: the iterator was closed.
        """
        ended = self._core.ended
        if self._core.closed and not ended:
            raise FailedPreconditionError("a closed iterator does not know its place: ask before you close it")
        token = _state_budget.set([STATE_BYTES_MAX])
        try:
            tree = None if ended else self._core.node.state_dict()
        finally:
            _state_budget.reset(token)
        return {"version": STATE_VERSION, "operators": self._names, "ended": ended, "tree": tree}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
          InvalidArgumentError: the state belongs to another pipeline or another version.
          FailedPreconditionError: this iterator is at its end, or closed.
        """
        if not isinstance(state, dict) or not {"version", "operators", "ended", "tree"} <= state.keys():
            raise invalid("this is no state of an iterator: wanted what `state_dict` gave")
        if state["version"] != STATE_VERSION:
            raise invalid(f"a state of version {state['version']}, this is version {STATE_VERSION}")
        if state["operators"] != self._names:
            raise invalid(f"a state of the pipeline {state['operators']}, this one is {self._names}")
        if self._core.closed:
            raise FailedPreconditionError("an iterator at its end stays there: load the state into a new one")
        if state["ended"]:
            self._core.ended = True
            self.close()
        else:
            self._core.load(state["tree"])

    def stats(self) -> list[OperatorStats]:
        """What each operator has done so far, in the order of `explain` upside down: sources first.

        What is below a prefetch works in its thread; what a prefetch took is what was waited for it. The datasets that a function
        makes (interleave, windows) count for the operator that calls it.

        Raises:
          FailedPreconditionError: nothing was counted: set `options.stats` and attach them by `with_options` first.
        """
        timers = self._core.node.context.timers
        if timers is None:
            raise FailedPreconditionError("no statistics: options.stats = True, dataset.with_options(options)")
        rows = []
        for each in self._dataset.walk():
            own = timers.get(id(each), _NOTHING)
            inputs = () if each.op.in_background else each.inputs
            waited = sum(timers.get(id(one), _NOTHING).seconds for one in inputs)
            rows.append(OperatorStats(each.op.name, own.elements, max(0.0, own.seconds - waited)))
        return rows

    def close(self) -> None:
        """End the pipeline's threads now. Harmless when called twice; nothing comes after it.

        A thread that waits here for a data service gets the end; one that computes an element computes it first.
        """
        self._core.close()

    def __enter__(self) -> DatasetIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        core = self.__dict__.get("_core")
        if core is None or core.closed:
            return
        if core.node.context.openings.waits:
            in_background("zmqdist-iterator-close", core.close)
        else:
            core.close()


_END = object()
_NOTHING = OperatorTimer()


class BufferedError:
    """An error in a buffer, until its turn comes."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


_state_budget: ContextVar[list[int]] = ContextVar("state_budget")
"""Bytes that the elements of the state that is being made may still take."""


def _payload_bytes(value: Any) -> int:
    """Bytes of its arrays and texts; of a dataset, those that its description holds."""
    if is_dataset(value):
        return sum(_payload_bytes(getattr(each.op, one.name)) for each in value.walk() for one in fields(each.op))
    if isinstance(value, (tuple, dict)):
        return sum(map(_payload_bytes, value.values() if isinstance(value, dict) else value))
    return int(value.nbytes) if type(value) is np.ndarray else len(value) if isinstance(value, (str, bytes)) else 0


def save_elements(elements: Iterable[Any]) -> list[Any]:
    """A buffer as JSON. Runs of plain elements are encoded together; a failure keeps its code and text,
    so that an error of the user's comes back as an UnknownError.

    Raises:
      UnimplementedError: it holds datasets.
      ResourceExhaustedError: with what lies in other buffers it is too much for a state.
    """
    parts: list[Any] = []
    run: list[Any] = []
    budget = _state_budget.get(None) or [STATE_BYTES_MAX]
    for one in elements:
        budget[0] -= _payload_bytes(one)
        if budget[0] < 0:
            raise ResourceExhaustedError(TOO_LARGE)
        if isinstance(one, BufferedError):
            if run:
                parts.append({"elements": to_json(run)})
                run = []
            is_op_error = isinstance(one.error, OpError)
            text = str(one.error) if is_op_error else f"{type(one.error).__name__}: {one.error}"
            parts.append({"error": [getattr(one.error, "error_code", UnknownError.code), text]})
        else:
            run.append(_packed(one))
    if run:
        parts.append({"elements": to_json(run)})
    return parts


def load_elements(parts: Sequence[Any]) -> list[Any]:
    """The inverse of `save_elements`."""
    elements: list[Any] = []
    for part in parts:
        if "error" in part:
            elements.append(BufferedError(from_code(*part["error"])))
        else:
            elements += map(_unpacked, from_json(part["elements"]))
    return elements


TOO_LARGE = (
    f"more than {STATE_BYTES_MAX} bytes of elements lie in the buffers of this iterator, and a state holds no more: have fewer of them wait"
    " (prefetch, num_parallel_calls, the buffer of shuffle), shuffle before batch(), or cache(filename) in place of cache()"
)

_DATASET = "\0dataset"
"""Marks a dataset's description among elements: no element of a user is a dict with this key."""


def _packed(value: Any) -> Any:
    if is_dataset(value):
        description = value.serialize()
        if value.has_functions():
            raise UnimplementedError("no state while a buffer holds datasets with functions")
        return {_DATASET: description}
    return map_items(_packed, value)


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict) and _DATASET in value:
        return deserialize(value[_DATASET])
    return map_items(_unpacked, value)
