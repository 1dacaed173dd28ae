"""`zmqdist.Variable`: an array that functions on workers change, with a handle that is the same everywhere.

Rules
    Under `strategy.scope()` the value lives at a parameter server (shard_placement.py says at which), outside it in this process. A handle
    pickles as a handle, never as a value; in one process there is one for each variable. A variable of this process does not pickle, but
    for one of a worker that a function returns: that is its value of this moment, as in TensorFlow.
    A variable at a parameter server goes with the last handle of it in the program that made it (sessions.py).
    Each assignment is one message and is atomic where the value lives; it is applied once, also where its answer was lost. What was read
    never changes any more; large values are read-only.
    What does not fit is refused here, before anything is sent, with the variable's name, and nothing has changed.
    In a replica context with several replicas an assignment waits for that of the others, and is made once, with their aggregate.

Not here: operators and indexing (arithmetic.py), where the value lives (variable_storage.py), creation (creators.py).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zmqdist import task_context
from zmqdist.futures import Future, ReadyValue, Then
from zmqdist.indexed_slices import IndexedSlices
from zmqdist.training import read_cache
from zmqdist.training.aggregation import VariableAggregation, VariableSynchronization
from zmqdist.training.arithmetic import ArrayLike
from zmqdist.training.context import get_strategy
from zmqdist.training.creators import create, make
from zmqdist.training.indexing import Rows
from zmqdist.training.replicas import once_for_all
from zmqdist.training.variable_storage import VariableStorage
from zmqdist.variables import client

Array = NDArray[Any]

_DENSE: Final = {"assign": client.assign, "add": client.add, "sub": client.sub}

_lock = threading.Lock()
_handles: weakref.WeakValueDictionary[Any, Variable] = weakref.WeakValueDictionary()
"""Those of this process, by the key of their home."""


class Variable(ArrayLike):
    """A variable.

    Args:
      initial_value: an array, whatever lends itself to one, or a function that makes it. Where `shape` and `dtype` are given, such a
        function is called at the parameter server, with the part it is to make if it takes `partition_shape` and `partition_offset`, or
        `shard_info`.
      trainable: for whoever looks; by default True for floats.
      name: by default "Variable"; under a strategy, made unique with a number.
      dtype, shape: of the value, by default as it comes.
      aggregation: "none", "sum", "mean" or "only_first_replica": what the assignments of several replicas become.
      synchronization: kept, and without an effect.
      per_worker_variable: each worker has one of its own. A function that returns it returns its value of that moment.

    Under a strategy with a `variable_partitioner` this may give a ShardedVariable.

    Raises:
      ValueError: no initial_value, or it is no array of numbers or text, or has another shape; an aggregation that does not exist.
      RuntimeError: in a scheduled function, where variables cannot be made.
      UnavailableError: the parameter server is gone.

    Attributes:
      name, shape, dtype: they never change; `shape` is a tuple.
      trainable, aggregation, synchronization: as given.
      home: where the value lives; for the rest of the package.
    """

    name: str
    trainable: bool
    aggregation: VariableAggregation
    synchronization: VariableSynchronization
    storage: VariableStorage

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        shape: Any = None,
        aggregation: Any = None,
        synchronization: Any = None,
        per_worker_variable: bool = False,
    ) -> Any:
        return create(
            handle,
            initial_value=initial_value,
            trainable=trainable,
            name=name,
            dtype=dtype,
            shape=shape,
            aggregation=aggregation,
            synchronization=synchronization,
            per_worker_variable=per_worker_variable,
        )

    @property
    def label(self) -> str:
        """What errors call it."""
        return str(self.storage.ref)

    @property
    def device(self) -> str:
        """ "/job:ps/replica:0/task:1/device:CPU:0" and the like."""
        return self.storage.device

    @property
    def task(self) -> str | None:
        """ "ps:1"; None for a variable of this process."""
        return self.storage.task

    def is_same(self, other: object) -> bool:
        """Whether that is a handle of this variable: `==` compares values."""
        return isinstance(other, Variable) and other.storage.key == self.storage.key

    # -- reading --------------------------------------------------------------------------------------------------------

    def numpy(self) -> Any:
        """The value of this moment: an array, of a scalar variable a NumPy scalar.

        Raises:
          PSUnavailableError: its parameter server is gone, or was started again without it.
        """
        return self.start_read().get_value()

    read_value = numpy
    value = numpy

    @property
    def version(self) -> int:
        """How often the value was changed, and 1. A variable that was recovered goes on from a number that no value had before."""
        version: int = self.storage.read().get_value()[0]
        return version

    def read_versioned(self) -> tuple[int, Any]:
        """Version and value of one moment, for `compare_and_set`."""
        version, value = self.storage.read().get_value()
        return version, _scalar(value)

    # -- changing -------------------------------------------------------------------------------------------------------

    def assign(self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True) -> Variable:
        """Set the value; gives this variable. `use_locking`, `name` and `read_value` are there for TensorFlow's sake.

        Raises:
          InvalidArgumentError: another shape, or a dtype of another kind.
          ValueError: in a context of several replicas, for a variable without aggregation.
          PSUnavailableError: its parameter server is gone, or was started again without it.
        """
        self.start_update("assign", value).get_value()
        return self

    def assign_add(
        self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Add to the value, atomically. As `assign`."""
        self.start_update("add", delta).get_value()
        return self

    def assign_sub(
        self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Subtract from the value, atomically. As `assign`."""
        self.start_update("sub", delta).get_value()
        return self

    def compare_and_set(self, value: Any, *, version: int | None = None, expected: Any = None) -> bool:
        """Set the value if it has this version, or equals `expected`, or both; whether it did.

        Raises:
          ValueError: neither is given; and as `assign`.
        """
        if version is None and expected is None:
            raise ValueError("compare_and_set() needs a version or an expected value")
        change = client.swap(self.storage.ref, value, version=version, expected=expected)
        applied: bool = self.storage.change(change).get_value().applied
        return applied

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Add rows; one that is named twice is added twice. As `assign`, and InvalidArgumentError for an index out of range."""
        return self._scatter("add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Subtract rows."""
        return self._scatter("sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Multiply rows."""
        return self._scatter("mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Divide rows."""
        return self._scatter("div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """The smaller of both, elementwise."""
        return self._scatter("min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """The greater of both, elementwise."""
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set rows; of one that is named twice the last one counts."""
        return self._scatter("update", sparse_delta)

    batch_scatter_update = scatter_update

    def apply(self, fn: Any, grad: Any, *, step: int | None = None) -> None:
        """Have the parameter server make a step with a gradient: one message, whatever the optimizer keeps.

        Args:
          fn: an optimizer of `zmqdist.optimizers`, or a function `fn(value, grad, slots, step)` that changes `value` in place or returns
            the new one; what it puts into the dict `slots` it finds there again. It runs at the parameter server, on copies of these two.
            Slots belong to its module and qualified name: two lambdas of one function share them.
          grad: an array of the variable's shape, or IndexedSlices.
          step: in synchronous mode, to which step the gradient belongs: `workers_per_step` of them are averaged and applied once, and
            this waits until they are.

        Raises:
          InvalidArgumentError: the gradient does not fit.
          UnknownError: the function has raised; nothing has changed.
          ValueError: synchronous mode without a step.
        """
        self.start_apply(fn, grad, step).get_value()

    # -- asking, without waiting -------------------------------------------------------------------------------------------

    def start_read(self) -> Future:
        """Ask for the value."""
        cache = read_cache.current_cache()
        if cache is None or self.storage.task is None:
            return Then(self.storage.read(), lambda reply: _scalar(reply[1]))
        found, key = cache.get(self.storage.key), self.storage.key
        if found is not None:
            return ReadyValue(_scalar(read_cache.for_reader(found)))

        def keep(reply: tuple[int, Array]) -> Any:
            return _scalar(read_cache.for_reader(cache.setdefault(key, reply[1])))

        return Then(self.storage.read(), keep)

    def start_rows(self, rows: Rows) -> Future:
        """Ask for rows, in their order."""
        return self.storage.rows(rows)

    def start_update(self, kind: str, value: Any) -> Future:
        """`kind` is "assign", "add" or "sub"."""
        change = _DENSE[kind]
        return once_for_all(self, value, lambda value: self.storage.change(change(self.storage.ref, value)))

    def start_scatter(self, kind: str, indices: Any, values: Any) -> Future:
        """`kind` is what comes behind "scatter_"."""

        def start(delta: IndexedSlices) -> Future:
            return self.storage.change(client.scatter(self.storage.ref, kind, delta))

        return once_for_all(self, IndexedSlices(values, np.asarray(indices)), start)

    def start_apply(self, fn: Any, grad: Any, step: int | None) -> Future:
        """Begin what `apply` does."""
        return once_for_all(self, grad, lambda grad: self.storage.apply(fn, grad, step))

    def _scatter(self, kind: str, delta: Any) -> Variable:
        if not isinstance(delta, IndexedSlices):
            raise TypeError(f"scatter updates take IndexedSlices, not {type(delta).__name__}")
        self.start_scatter(kind, delta.indices, delta.values).get_value()
        return self

    # -- copies -------------------------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        if (
            self.storage.task is None and task_context.scheduled()
        ):  # returned by a function, say: a worker's own stays there
            return _value, (self.numpy(),)
        return handle, (self.storage, self.trainable, self.aggregation, self.synchronization)

    def __copy__(self) -> Variable:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Another variable in the same place, with the same value. Raises RuntimeError outside the scope of this one's strategy."""
        if self.task is not None:
            strategy = get_strategy()
            if strategy is None or strategy.session != self.storage.session:
                raise RuntimeError(
                    f"variable {self.name!r} can only be copied inside the scope of the strategy that it was made in"
                )
        copy: Variable = make(
            handle,
            initial_value=self.numpy(),
            trainable=self.trainable,
            name=self.name,
            dtype=self.dtype,
            aggregation=self.aggregation,
            synchronization=self.synchronization,
            device=self.device,
        )
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:
        """Does not ask for the value."""
        where = self.task or "this process"
        return f"<zmqdist.Variable {self.name!r} shape={self.shape} dtype={self.dtype.name} on {where}>"


def _value(value: Any) -> Any:
    """What the pickle of a worker's own variable calls; the name is part of the protocol."""
    return value


def _scalar(value: Array) -> Any:
    return value if value.shape else value[()]


def handle(
    storage: VariableStorage,
    trainable: bool,
    aggregation: VariableAggregation,
    synchronization: VariableSynchronization,
) -> Variable:
    """The variable at that home; the one that this process has already, if it has one."""
    with _lock:
        known = _handles.get(storage.key)
        if known is None:
            known = object.__new__(Variable)
            known.storage = storage
            known.name, known.shape, known.dtype = storage.ref.name, storage.ref.shape, storage.ref.dtype
            known.trainable, known.aggregation, known.synchronization = trainable, aggregation, synchronization
            _handles[storage.key] = known
        return known
