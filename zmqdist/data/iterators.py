"""Open datasets: the nodes that run the operators, and the iterator that a user gets from
`iter(dataset)`.

Theory
    Each operator runs as an `OperatorNode`. The node's method `run` is a generator that starts at
    the position that is stored in the node's fields.
    *Invariant*: the fields are correct whenever `run` yields, and whenever it calls code that may
      raise.
    A generator cannot be saved, and cannot continue after an error. Because of the invariant, a
    node can do what its generator cannot. Its state can be saved and loaded between any two
    elements. After an error, the node creates a new generator, which continues with the element
    after the failed element. Elements pass through plain generators, which costs about 50 ns per
    operator.

Rules
    An error in a node ends the generators of all nodes above it, and the user's iterator then
    starts new generators. A node that catches errors of its child, or that runs its child in a
    thread, must call `child.restart()` after each error of the child. A child that has reached its
    end stays at its end, also after a restart or a load.
    `close` stops the threads of a node and waits for them. A closed node can still return its
    state.

Only one thread at a time may use an iterator.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from zmqdist import clock as time
from zmqdist.background import in_background
from zmqdist.data.interfaces import DatasetLike, Memory, deserialize
from zmqdist.data.options import Options
from zmqdist.data.structure import from_json, invalid, is_dataset, map_items, to_json
from zmqdist.errors import (
    CancelledError,
    FailedPreconditionError,
    OpError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnimplementedError,
    UnknownError,
    from_code,
)
from zmqdist.limits import STATE_BYTES_MAX
from zmqdist.random import iterator_entropy
from zmqdist.type_variables import T_any

STATE_VERSION = 2


class OperatorTimer:
    """Counts the elements that one operator yields, and the seconds for which the operator above
    it, or the user, waited for them. The seconds include the work of the operators below.
    """

    __slots__ = ("elements", "seconds")

    def __init__(self) -> None:
        self.elements = 0
        self.seconds = 0.0

    def wrap(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield the elements of `stream`, counting and timing them."""
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
    """The work of one operator for one iterator.

    Attributes:
      name: the name of the operator.
      elements: the number of elements that it has yielded.
      seconds: the time for which the operator above it, or the user, waited for elements, without
        the time for which the operator itself waited for the operators below it.
    """

    name: str
    elements: int
    seconds: float


class CloseInterrupts:
    """The blocking calls of one iterator in any thread, for example calls to a server. Closing the
    iterator interrupts them.

    Attributes:
      close_blocks: whether closing the iterator may block, because it waits for a thread, a process
        or a server.
    """

    def __init__(self) -> None:
        self.close_blocks = False
        # The lock is reentrant, because a finalizer may close the iterator in a thread that holds
        # the lock.
        self._lock = threading.RLock()
        self._interrupts: list[Callable[[], object]] = []
        self._closed = False

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Have `close` call `interrupt` if another thread closes the iterator while this context is
        open. If the iterator is closed already, call `interrupt` at once.
        """
        with self._lock:
            self._interrupts.append(interrupt)
            closed = self._closed
        try:
            if closed:
                # interrupt the call here, because `close` ran before this method had registered it
                interrupt()
            yield
        finally:
            with self._lock:
                self._interrupts.remove(interrupt)

    def close(self) -> None:
        """Interrupt all registered calls, and every call that is registered later."""
        with self._lock:
            self._closed = True
            interrupts = list(self._interrupts)
        # Interrupt without the lock, because the interrupted calls need the lock to unregister.
        for interrupt in interrupts:
            interrupt()


@dataclass(slots=True)
class StateRefusal:
    """`reason`: why an iterator has no state; empty if it has one. `loaded`: whether it continues
    from a state, so that a reason comes too late to refuse to save that state.
    """

    reason: str = ""
    loaded: bool = False


class Context:
    """The state that the nodes of one iterator share.

    Attributes:
      options: the options of the whole pipeline.
      probing: whether the iterator only reads elements to learn the spec. It then changes no random
        numbers of later iterators, writes no caches and starts no threads.
      timers: a timer for each dataset, by its id; None unless `options.stats` is set.
      resumable: whether `splits` honours its argument `start`, so that a source can save its
        position.
      interrupts: the blocking calls of the whole iterator, including those in datasets that user
        functions return.
      entropy: random numbers, from which the operators without a seed derive theirs. A state has
        them. Operators that draw the same numbers in each pass leave out the second one.
      ordered: whether parallel operators yield their elements in order, whatever the options are.
    """

    def __init__(
        self,
        options: Options,
        probing: bool = False,
        splits: Callable[[int, int, int], Iterator[int]] | None = None,
        resumable: bool = False,
        entropy: Sequence[int] = (),
        inner: bool = False,
        ordered: bool = False,
    ) -> None:
        """Create the context of a new iterator. No node is open yet.

        Args:
          splits: `splits(source, repetition, start)` iterates over the positions that a source gets
            in a repetition, without the first `start` of them. None means that each source reads
            all of its positions.
          entropy: see the attribute. By default, new random numbers.
          inner: whether the passes of each dataset are counted from 0, as for a dataset that a user
            function returns.
          ordered: see the attribute.
        """
        self.options = options
        self.probing = probing
        self.resumable = resumable
        self.timers: dict[int, OperatorTimer] | None = {} if options.stats and not probing else None
        self.interrupts = CloseInterrupts()
        self.entropy = list(entropy) or ([0, 0] if probing else iterator_entropy())
        self.ordered = ordered
        self._refusal = StateRefusal()
        self._splits = splits
        self._twin: Callable[[], SplitStream] | None = None
        self._sources = 0
        self._repetitions: dict[int, int] = {}
        self._inner = inner or probing
        self._passes: dict[Memory, list[int]] = {}
        """Maps the memory of a dataset to [its place in the order of first opening, its next pass].
        The next pass is -1 if the dataset object decides it."""

    @property
    def has_splits(self) -> bool:
        """Whether sources read only the positions that `splits` returns, because other processes
        read the other positions."""
        return self._splits is not None

    @property
    def in_step(self) -> bool:
        """Whether all sources read the same positions."""
        return self._twin is not None

    def open(self, dataset: DatasetLike) -> OperatorNode:
        """Open a dataset. Return its node, which has the nodes of its inputs."""
        node: OperatorNode = dataset.op.open(dataset, self)
        return node

    def open_inputs(self, dataset: DatasetLike) -> list[OperatorNode]:
        """Open the inputs of a dataset, and return their nodes. If an input is not split, its
        sources read all of their positions."""
        split = None if self._splits is None else dataset.op.split_inputs(len(dataset.inputs))
        nodes: list[OperatorNode] = []
        try:
            for number, node_input in enumerate(dataset.inputs):
                context = self if split is None or number in split else self.unsplit()
                nodes.append(context.open(node_input))
        except BaseException:  # the caller gets no list, so close the inputs that are open already
            for node in nodes:
                node.close()
            raise
        return nodes

    def next_source(self) -> int:
        """Return the number of the source that is opened next. `splits` gets this number as its
        argument `source`."""
        return self._sources

    def reopen(self, dataset: DatasetLike, first_source: int) -> OperatorNode:
        """Open a dataset again, for its next repetition. Its sources are numbered from
        `first_source` on, so that each keeps its number."""
        before, self._sources = self._sources, first_source
        try:
            return self.open(dataset)
        finally:
            self._sources = before

    def unsplit(self) -> Context:
        """Return this context for inputs whose sources read all of their positions."""
        context = copy.copy(self)
        context._splits = None
        return context

    def in_order(self, entropy: Sequence[int] = ()) -> Context:
        """Return this context for inputs whose elements, and their order, are the same in every
        process that passes the same `entropy`. By default, it is that of this context.
        """
        context = copy.copy(self)
        context.ordered, context.entropy = True, list(entropy) or self.entropy
        return context

    def inner(self, *origin: int) -> Context:
        """Return a context for a dataset that a user function returns. Its sources read all of
        their positions. `origin` differs between the datasets of one iterator, and is the same
        after a load.
        """
        entropy = [*self.entropy, *origin]
        context = Context(
            self.options, self.probing, entropy=entropy, inner=True, ordered=self.ordered
        )
        context.interrupts, context._refusal = self.interrupts, self._refusal
        # the time of these datasets counts for the operator whose function returned them
        context.timers = None
        return context

    def begin_pass(self, memory: Memory, shared: bool = False) -> tuple[int, int]:
        """Return the place of a dataset in the order in which this iterator has first opened its
        datasets, and the number of the pass that begins.

        The first pass of an iterator takes the next number of the dataset object. From there on the
        iterator counts by itself, so that other iterators do not change its later passes. A dataset
        that a user function returns is always counted from 0, because only then the function's
        result depends on its argument alone, in each process that calls it. With `shared`, no two
        passes of a dataset object have one number, because a service gives each number one pass.
        """
        entry = self._passes.setdefault(memory, [len(self._passes), 0 if self._inner else -1])
        number = (
            entry[1]
            if self._inner and not shared
            else memory.begin_pass(-1 if shared else entry[1])
        )
        entry[1] = number + 1
        return entry[0], number

    def refuse_state_in_functions(self, reason: str) -> None:
        """If a user function has returned the dataset that is being opened, have the whole iterator
        refuse to save a state from now on.

        Raises:
          UnimplementedError: the iterator continues from a state that was saved before this was
            known.
        """
        if self._inner:
            self._refusal.reason = reason
            if self._refusal.loaded:
                raise UnimplementedError(reason)

    def state(self, datasets: Sequence[DatasetLike]) -> dict[str, Any]:
        """Return what later passes over these datasets, which are all of the pipeline, depend on.

        Raises:
          UnimplementedError: see `refuse_state_in_functions`.
        """
        if self._refusal.reason:
            raise UnimplementedError(self._refusal.reason)
        passes = [
            [number, self._passes[dataset.memory][1], dataset.memory.values.get("reader")]
            for number, dataset in enumerate(datasets)
            if dataset.memory in self._passes
        ]
        return {"entropy": list(self.entropy), "passes": passes}

    def load(self, state: dict[str, Any], datasets: Sequence[DatasetLike]) -> None:
        """Continue after the passes in a state, also with later iterators over these datasets."""
        self._refusal.loaded = True
        self.entropy[:] = state["entropy"]
        for number, next_pass, reader in state["passes"]:
            memory = datasets[number].memory
            memory.continue_at(next_pass)
            if reader is not None:
                # later passes get again what the saved reader got of them (service/source.py)
                memory.values.update(reader=reader, resumed=True)
            self._passes[memory][1] = next_pass

    def load_pass(self, memory: Memory, number: int) -> None:
        """Note that a node has continued in the pass `number` of a dataset."""
        entry = self._passes[memory]
        if number >= entry[1]:
            entry[1] = number + 1
            if not self._inner:
                memory.continue_at(number + 1)

    def next_splits(self) -> SplitStream | None:
        """Return the positions for the source that is being opened, or None if it reads all of its
        positions. Each source calls this once, when it is opened, because the call counts the
        sources and the repetitions of each source.
        """
        if self._splits is None:
            return None
        if self._twin is not None:
            return self._twin()
        number, self._sources = self._sources, self._sources + 1
        repetition = self._repetitions[number] = self._repetitions.get(number, -1) + 1
        return SplitStream(self, number, repetition)

    def read_in_step(self) -> Context:
        """Return a context whose sources all read the positions that the next source of this
        context would read."""
        stream = self.next_splits()
        assert stream is not None
        context = self.in_order()
        context._twin = stream.twins()
        return context

    def positions(self, source: int, repetition: int, start: int) -> Iterator[int]:
        """Return the positions of a source in a repetition, without the first `start` of them."""
        assert self._splits is not None
        return self._splits(source, repetition, start)

    def set_repetition(self, source: int, repetition: int) -> None:
        """Record the repetition in which a source continues from a loaded state, so that the source
        begins the following repetition when it is opened again.
        """
        self._repetitions[source] = repetition


class SplitStream:
    """The positions of one source in one repetition. Each call of `iter` continues after the
    positions that were taken."""

    def __init__(
        self, context: Context, source: int, repetition: int, shared: Iterator[int] | None = None
    ) -> None:
        self._context = context
        self._source = source
        self._repetition = repetition
        self._position = 0
        self._shared = shared

    def __iter__(self) -> Iterator[int]:
        for position in self._shared or self._context.positions(
            self._source, self._repetition, self._position
        ):
            self._position += 1
            yield position

    def twins(self) -> Callable[[], SplitStream]:
        """Return a function that returns another stream of the same positions at each call. Each
        stream gets all positions."""
        twin = partial(SplitStream, self._context, self._source, self._repetition)
        # Positions that can be requested again need no buffer: each stream requests them.
        if self._context.resumable:
            return twin
        shared = _SharedPositions(self._context.positions(self._source, self._repetition, 0))
        return lambda: twin(shared.reader())

    def state(self) -> dict[str, int]:
        """Return the repetition and the number of positions that were taken, as JSON types.

        Raises:
          UnimplementedError: the positions come from a function that cannot return them again.
        """
        if not self._context.resumable:
            raise UnimplementedError(
                "this iterator cannot save its position: the process that gives out the positions "
                "keeps it"
            )
        return {"repetition": self._repetition, "taken": self._position}

    def load(self, state: dict[str, int]) -> None:
        """Continue from a state that `state` returned, at the next call of `iter`."""
        self._repetition, self._position = state["repetition"], state["taken"]
        self._context.set_repetition(self._source, self._repetition)


class _SharedPositions:
    """Positions that several sources read, perhaps in several threads, each source at its own pace.
    If an error comes in place of a position, each source gets the error at this place, so that the
    sources stay in step.
    """

    def __init__(self, positions: Iterator[int]) -> None:
        self._positions = positions
        self._lock = threading.Lock()
        self._waiting: list[deque[Any]] = []

    def reader(self) -> Iterator[int]:
        """Return an iterator for another source. Call this before any source takes a position."""
        waiting: deque[Any] = deque()
        self._waiting.append(waiting)
        return iter(partial(self._next, waiting), _END)

    def _next(self, waiting: deque[Any]) -> Any:
        with self._lock:
            if not waiting:
                try:
                    entry = next(self._positions, _END)
                except Exception as error:
                    entry = BufferedError(error)
                for queue in self._waiting:
                    queue.append(entry)
            entry = waiting.popleft()
        if type(entry) is BufferedError:
            raise entry.error
        return entry


class OperatorNode:
    """One operator of an open dataset. Subclasses implement `run`, and name the fields that a state
    contains. They extend `state` and `load` if a state contains more.

    Attributes:
      plain_fields: the fields of JSON types. The class has their values at the beginning.
      element_fields: the fields that are lists of elements. They are empty at the beginning.
      state_keys: the keys of a state that differ from the name of their field.
      children: the nodes of the inputs.
      splits: the positions that this node gets from a dispatcher, if it gets any.
    """

    plain_fields: ClassVar[tuple[str, ...]] = ()
    element_fields: ClassVar[tuple[str, ...]] = ()
    state_keys: ClassVar[dict[str, str]] = {}
    splits: SplitStream | None = None

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        self.dataset = dataset
        self.op: Any = dataset.op
        self.context = context
        self.children: list[OperatorNode] = context.open_inputs(dataset)
        self._stream: Iterator[Any] | None = None
        for name in self.element_fields:
            setattr(self, name, [])

    def run(self) -> Iterator[Any]:
        """Yield the elements after the position that is stored in the fields. The module says when
        the fields must be correct. By default, yield the elements of the input."""
        return self.source()

    def stream(self) -> Iterator[Any]:
        """Return the current generator. Create it if the node has no generator."""
        if self._stream is None:
            self._stream = self.run()
            if self.context.timers is not None:
                self._stream = self.context.timers.setdefault(
                    id(self.dataset), OperatorTimer()
                ).wrap(self._stream)
        return self._stream

    def source(self) -> Iterator[Any]:
        """Return an iterator over the elements of the node's only input."""
        return self.children[0].stream()

    def inner_nodes(self) -> list[Any]:
        """Return the open nodes of the datasets that a function of the operator has returned."""
        return []

    def restart(self) -> None:
        """Discard the generators of this node and its children after an error. New generators will
        start from the fields."""
        self._stream = None
        for node in (*self.children, *self.inner_nodes()):
            node.restart()

    def abandon(self) -> None:
        """Interrupt a blocking call of this node or of a child, as far as possible. The thread that
        closes the iterator calls this, so that another thread that reads the node returns soon.
        """
        for node in (*self.children, *self.inner_nodes()):
            node.abandon()

    def close(self) -> None:
        """Stop the threads of this node and of its children, if any, and drop their generators,
        which refer to the nodes."""
        self._stream = None
        for node in (*self.children, *self.inner_nodes()):
            node.close()

    def state(self) -> dict[str, Any]:
        """Return the node's own fields as JSON types."""
        keys = self.state_keys
        state = {keys.get(name, name): getattr(self, name) for name in self.plain_fields}
        for name in self.element_fields:
            state[keys.get(name, name)] = save_elements(getattr(self, name))
        if self.splits is not None:
            state["dealt"] = self.splits.state()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Set the node's own fields to values that `state` returned. `load_state_dict` has already
        loaded the children."""
        keys = self.state_keys
        for name in self.plain_fields:
            setattr(self, name, state[keys.get(name, name)])
        for name in self.element_fields:
            setattr(self, name, load_elements(state[keys.get(name, name)]))
        if self.splits is not None:
            self.splits.load(state["dealt"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this node and of the nodes below it."""
        return {"own": self.state(), "inputs": [child.state_dict() for child in self.children]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._stream = None
        for child, child_state in zip(self.children, state["inputs"], strict=True):
            child.load_state_dict(child_state)
        self.load(state["own"])


class NumberedNode(OperatorNode):
    """A node whose random numbers, or those of the datasets that its function returns, differ
    between the passes over its dataset.

    Attributes:
      dataset_index, number: the place of the dataset in its iterator, and the number of the pass
        (`Context.begin_pass`).
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.dataset_index, self.number = context.begin_pass(dataset.memory)

    def inner_context(self, number: int) -> Context:
        """Return the context for the dataset that the operator opens as its dataset `number`."""
        return self.context.inner(self.dataset_index, self.number, number)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"pass": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["pass"]
        self.context.load_pass(self.dataset.memory, self.number)
        super().load_state_dict(state)


def failing_operator(error: BaseException) -> str:
    """Return the operator that was running when the error was raised, as `explain` prints it; "" if
    no operator was running."""
    node: Any = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if issubclass(type(owner), OperatorNode):
            node = owner  # go on, because the innermost node comes last in the traceback
        trace = trace.tb_next
    if node is None:
        return ""
    try:
        return str(node.op.one_line())
    except Exception:
        # the `repr` of a user's object among the operator's arguments may raise any error
        return str(node.op.name)


def stopped_error(operator: str) -> RuntimeError:
    """Return the error in place of a StopIteration of a user function, which would end a loop."""
    return RuntimeError(
        f"a function of {operator} raised StopIteration, which is for iterators only: let it "
        f"return a value or raise another"
        " error; to leave out elements use filter() or take_while()"
    )


class _IteratorCore:
    """The part of an iterator that has the root node, and that creates a new generator after each
    error and each load.

    It has no reference to the iterator, so that the iterator is freed when its user drops it.

    Attributes:
      closed, released: whether `close` has begun, and has ended: Ctrl-C may come between.
    """

    def __init__(self, node: OperatorNode) -> None:
        self.node = node
        self.at_end = False
        self.closed = False
        self.released = False
        self._needs_generator = True
        self._current: Iterator[Any] | None = None

    def streams(self) -> Iterator[Iterator[Any]]:
        """Yield a generator of elements at first, and a new generator after each error and each
        load."""
        while self._needs_generator:
            self._needs_generator = False
            self._current = self._guarded()
            yield self._current
        # The loop ends at the end of the data, or because of `close`. After `close` leave `at_end`
        # as it is, because data may be left.
        self.at_end = self.at_end or not self.closed
        self.close()

    def _guarded(self) -> Iterator[Any]:
        try:
            yield from self.node.stream()
        except GeneratorExit:
            raise
        except BaseException as error:
            # even after a KeyboardInterrupt the next call continues with the next element
            if self.closed and isinstance(error, CancelledError):
                return  # end without an error, because another thread closed the iterator
            self._needs_generator = True
            self.node.restart()
            if isinstance(cause := error.__cause__, StopIteration):
                raise stopped_error(failing_operator(cause) or failing_operator(error)) from cause
            raise

    def load(self, state: dict[str, Any]) -> None:
        """Load the state into the root node, and discard the generator, which still uses the old
        fields."""
        self._close_generator()
        self._needs_generator = True
        self.node.load_state_dict(state)

    def close(self) -> None:
        """End the iteration, at the end of the data or earlier."""
        self.closed = True
        self.node.context.interrupts.close()
        self.node.abandon()
        try:
            self._close_generator()
        except ValueError:
            # another thread runs the generator, so it cannot be closed here; `abandon` has
            # interrupted that thread
            pass
        self._needs_generator = False
        self.node.close()
        self.released = True

    def _close_generator(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()  # type: ignore[attr-defined]


class DatasetIterator(chain[T_any]):
    """The elements of a dataset, in order: the result of `iter(dataset)`.

    If computing an element raises, the next call continues with the next element. A user's
    generator ends when it raises, and yields no further item. After the end, the iterator stays
    ended. The threads of the pipeline stop when the iterator is exhausted, closed or
    garbage-collected.

    The class is an `itertools.chain` of generators, because a `__next__` written in Python would
    take more time than most pipelines.
    """

    _core: _IteratorCore
    _dataset: DatasetLike
    _names: list[str]

    def __new__(cls, dataset: DatasetLike, context: Context) -> DatasetIterator[T_any]:
        """Open a dataset, and return an iterator over its elements."""
        core = _IteratorCore(context.open(dataset))
        self: Any = cls.from_iterable(core.streams())
        self._core = core
        self._dataset = dataset
        self._names = [tree.op.name for tree in dataset.walk()]
        return self  # type: ignore[no-any-return]

    def get_next(self) -> Any:
        """Return the next element.

        >>> iterator = iter(Dataset.range(3))
        >>> int(iterator.get_next()), int(next(iterator))
        (0, 1)

        Raises:
          OutOfRangeError: there is none, where `next` raises StopIteration.
        """
        for x in self:
            return x
        raise OutOfRangeError("End of sequence")

    @property
    def element_spec(self) -> Any:
        """The spec of the elements, that of the dataset."""
        return self._dataset.element_spec

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this iterator as JSON types. An iterator over an equal dataset
        continues from this position after `load_state_dict`.

        The state contains the elements that are in the buffers of operators, for example of
        shuffle, prefetch and window.

        Raises:
          InvalidArgumentError: a buffer holds a value that has no JSON form.
          ResourceExhaustedError: the buffers hold more than STATE_BYTES_MAX bytes (limits.py).
          UnimplementedError: an operator has no state, or a buffer holds datasets with user
            functions.
          FailedPreconditionError: the iterator was closed before its end.
        """
        at_end = self._core.at_end
        if self._core.closed and not at_end:
            raise FailedPreconditionError(
                "a closed iterator has no position: call state_dict() before you close it"
            )
        # Before the tree: meanwhile a thread that reads ahead may begin a pass, which a load then
        # learns from the tree.
        passes = self._core.node.context.state(self._dataset.walk())
        token = _state_budget.set([STATE_BYTES_MAX])
        try:
            tree = None if at_end else self._core.node.state_dict()
        finally:
            _state_budget.reset(token)
        return {
            "version": STATE_VERSION,
            "operators": self._names,
            "ended": at_end,
            "tree": tree,
            **passes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
          InvalidArgumentError: the state belongs to another version or to other operators. The
            arguments of operators are not compared.
          FailedPreconditionError: this iterator is exhausted or closed.
        """
        if (
            not isinstance(state, dict)
            or not {"version", "operators", "ended", "tree"} <= state.keys()
        ):
            raise invalid(
                "this is no state of an iterator: pass the dict that `state_dict` returned"
            )
        if state["version"] != STATE_VERSION:
            raise invalid(
                f"the state has version {state['version']}, but this zmqdist reads "
                f"{STATE_VERSION}: load it with the"
                " version of zmqdist that saved it, or begin the epoch again"
            )
        if state["operators"] != self._names:
            raise invalid(
                f"this is a state of the pipeline {state['operators']}, but the iterator's is "
                f"{self._names}"
            )
        if self._core.closed:
            raise FailedPreconditionError(
                "an iterator that has ended stays ended: load the state into a new one"
            )
        self._core.node.context.load(state, self._dataset.walk())
        if state["ended"]:
            self._core.at_end = True
            self.close()
        else:
            self._core.load(state["tree"])

    def stats(self) -> list[OperatorStats]:
        """Return the number of elements and the seconds of each operator so far, sources first,
        which is the reverse of the order of `explain`.

        The operators below a prefetch run in the thread of the prefetch. The seconds of the
        prefetch are the time for which the operator above it, or the user, waited. The time of
        datasets that a user function returns, as for interleave, counts for the operator that calls
        the function.

        Raises:
          FailedPreconditionError: statistics are off: set `options.stats` and attach the options by
            `with_options`.
        """
        timers = self._core.node.context.timers
        if timers is None:
            raise FailedPreconditionError(
                "statistics are off: set options.stats = True and use dataset.with_options(options)"
            )
        rows = []
        for node in self._dataset.walk():
            own = timers.get(id(node), _NOTHING)
            # Subtract no time for the inputs of a prefetch: its thread has waited for the inputs,
            # and `own.seconds` leaves out that wait.
            inputs = () if node.op.in_background else node.inputs
            waited_s = sum(timers.get(id(node_input), _NOTHING).seconds for node_input in inputs)
            rows.append(OperatorStats(node.op.name, own.elements, max(0.0, own.seconds - waited_s)))
        return rows

    def close(self) -> None:
        """Stop the pipeline's threads, and wait until they have ended. The iterator yields no
        further element. A second call does nothing.

        A thread that waits in this iterator for a data service returns at once. A thread that is
        computing an element finishes the element first.
        """
        self._core.close()

    def __enter__(self) -> DatasetIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        core = self.__dict__.get("_core")
        if core is None or core.released:
            return
        if core.node.context.interrupts.close_blocks:
            # Close in another thread, because `close` would block the thread in which the garbage
            # collector happens to run.
            in_background("zmqdist-iterator-close", core.close)
        else:
            core.close()


_END = object()
_NOTHING = OperatorTimer()


class BufferedError:
    """An error in a buffer, in the place of the element whose computation raised it."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


_state_budget: ContextVar[list[int]] = ContextVar("state_budget")
"""The number of bytes that buffers may still add to the state that is being saved."""


def _payload_bytes(value: Any) -> int:
    """Return the number of bytes of the arrays and strings in an element. A dataset in it counts
    with the arguments of its operators."""
    if is_dataset(value):
        return sum(
            _payload_bytes(getattr(tree.op, field.name))
            for tree in value.walk()
            for field in fields(tree.op)
        )
    if isinstance(value, (tuple, dict)):
        return sum(map(_payload_bytes, value.values() if isinstance(value, dict) else value))
    return (
        int(value.nbytes)
        if type(value) is np.ndarray
        else len(value)
        if isinstance(value, (str, bytes))
        else 0
    )


def save_elements(elements: Iterable[Any]) -> list[Any]:
    """Return the elements of a buffer as JSON types. Runs of consecutive elements are encoded
    together.

    Only the error code and the text of an error are saved. An error that is no OpError has no error
    code, and is loaded as an UnknownError.

    Raises:
      UnimplementedError: the buffer holds datasets with user functions.
      ResourceExhaustedError: the buffers that were saved for this state have more bytes than a
        state may have.
    """
    parts: list[Any] = []
    run: list[Any] = []
    budget = _state_budget.get(None) or [STATE_BYTES_MAX]
    for x in elements:
        budget[0] -= _payload_bytes(x)
        if budget[0] < 0:
            raise ResourceExhaustedError(TOO_LARGE)
        if isinstance(x, BufferedError):
            if run:
                parts.append({"elements": to_json(run)})
                run = []
            is_op_error = isinstance(x.error, OpError)
            text = str(x.error) if is_op_error else f"{type(x.error).__name__}: {x.error}"
            parts.append({"error": [getattr(x.error, "error_code", UnknownError.code), text]})
        else:
            run.append(_packed(x))
    if run:
        parts.append({"elements": to_json(run)})
    return parts


def load_elements(parts: Sequence[Any]) -> list[Any]:
    """Return the elements from the result of `save_elements`."""
    elements: list[Any] = []
    for part in parts:
        if "error" in part:
            elements.append(BufferedError(from_code(*part["error"])))
        else:
            elements += map(_unpacked, from_json(part["elements"]))
    return elements


TOO_LARGE = (
    f"more than {STATE_BYTES_MAX} bytes of elements lie in the buffers of this iterator, and a "
    f"state holds no more: buffer fewer of them"
    " (prefetch, num_parallel_calls, the buffer of shuffle), shuffle before batch(), or use "
    "cache(filename) instead of cache()"
)

_DATASET = "\0dataset"
"""The key of a dict that holds the description of a dataset among saved elements. No dict in a
user's element has this key."""


def _packed(value: Any) -> Any:
    if is_dataset(value):
        description = value.serialize()
        if value.has_functions():
            raise UnimplementedError(
                "this iterator cannot be saved now: a buffer (of shuffle, prefetch or a parallel "
                "operator) holds datasets with user "
                "functions, and a state cannot contain functions. Apply flat_map() to these "
                "datasets before the operator that buffers them"
            )
        return {_DATASET: description}
    return map_items(_packed, value)


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict) and _DATASET in value:
        return deserialize(value[_DATASET])
    return map_items(_unpacked, value)
