"""`zmqdist.Variable`: an array that functions on workers read and change, through handles that
refer to the same variable in each process.

Rules
    The value of a variable that is created under `strategy.scope()` is on a parameter server, which
    shard_placement.py chooses. The value of any other variable is in this process.
    The handle of a variable on a parameter server pickles as a handle, never as a value. A process
    has one handle for each variable. A variable whose value is in this process does not pickle.
    There is one exception, as in TensorFlow: if a scheduled function returns a variable of its
    worker, the result is the variable's current value.
    When the program that made a variable has no handle of it left, the parameter server drops the
    variable (sessions.py). Each assignment is one message, and is atomic at the server. It is
    applied once, even if its reply was lost. In a slot process, an update outside synchronous steps
    may still be in flight when its function returns (task_context.leave_in_flight). The function
    ends when the update has ended, and all that it does through zmqdist after an update happens
    after it. The array that a read returns does not change with
    later updates. An array of 1 MiB or more may be read-only, because several reads may share it. A
    value of a wrong shape or dtype is refused before a message is sent. The error names the
    variable, whose value is unchanged. In a replica context with several replicas, an assignment
    waits for the same assignment in the other replicas. The assignment is then made once, with the
    aggregate of the replicas' values.

How a variable is made
    `Variable(...)` calls the innermost creator, and each creator calls the next creator outwards. A
    strategy's scope adds a creator, which chooses the device and cuts a variable into shards.
    Creators outside the scope therefore see the strategy's choices, and may change these choices.
    On a worker, only functions that build per-worker resources can make variables, which stay in
    the process that makes them. A scheduled function cannot make variables, because it would make
    another variable in each run.

Not here: operators and indexing (arithmetic.py), the two kinds of storage (variable_storage.py),
where the strategy places variables (strategy.py, shard_placement.py).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zmqdist import task_context
from zmqdist.cluster.devices import Device, device_of
from zmqdist.field_types import checked, converted, safe_repr
from zmqdist.futures import Future, ReadyValue, Then
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.specs import IndexedSlices
from zmqdist.training import read_cache
from zmqdist.training.aggregation import VariableAggregation, VariableSynchronization, member
from zmqdist.training.arithmetic import ArrayLike
from zmqdist.training.constraint import constrained
from zmqdist.training.context import get_strategy, thread_state
from zmqdist.training.indexing import Rows
from zmqdist.training.partition import Initial
from zmqdist.training.replicas import once_for_all
from zmqdist.training.variable_storage import LocalStorage, RemoteStorage, VariableStorage
from zmqdist.variables import client
from zmqdist.wire.trusted import pack, unpack

Array = NDArray[Any]

_DENSE: Final = {"assign": client.assign, "add": client.add, "sub": client.sub}

CHIEF = device_of("chief", 0)
_lock = threading.Lock()
_handles: weakref.WeakValueDictionary[Any, Variable] = weakref.WeakValueDictionary()
"""The handles of this process, by the key of their storage."""
UNPICKLED_MAX: Final = 4096
_unpickled: dict[bytes, Variable] = {}
"""Handles of variables of other processes, by their pickle."""


class Variable(ArrayLike):
    """A variable. Inside `strategy.scope()` the constructor blocks until the parameter server has
    made the variable.

    >>> weights = zd.Variable(np.zeros(2))  # in `strategy.scope()`, on a parameter server
    >>> weights.assign_add([1, 2]).numpy()
    array([1., 2.])

    Args:
      initial_value: an array, a value that NumPy can convert to an array, or a function that
        returns such a value. If `shape` and `dtype` are given and the variable is not a scalar, the
        parameter server calls the function. A function with the parameters `partition_shape` and
        `partition_offset`, or `shard_info`, is called for each shard and makes that shard only.
      trainable: a flag for optimizers and user code; by default True for floats and complex
        numbers.
      validate_shape: True, because a variable's shape never changes.
      caching_device, import_scope: these arguments have no effect. `cache_variable_reads` keeps
        values that were read.
      name: the variable's name, by default "Variable". A strategy appends a number to a name that
        it has used already.
      variable_def: None, because there are no graphs.
      constraint: a function that gets the new value after each step of an optimizer, and returns
        the value to store, of the same shape. It runs at the parameter server, for each shard on
        its own. Steps then work on copies, and are slower.
      dtype, shape: dtype and shape of the value; by default those of `initial_value`.
      aggregation: how the assignments of several replicas are combined into one assignment: "none",
        "sum", "mean" or "only_first_replica".
      synchronization: this setting is stored and has no effect.
      per_worker_variable: whether each worker has a variable of its own. A scheduled function that
        returns such a variable returns the value at its worker.

    Under a strategy with a `variable_partitioner` the result may be a ShardedVariable.

    Raises:
      ValueError: `initial_value` is missing, is not an array of numbers or text, or has another
        shape than `shape`; `validate_shape` is False or `variable_def` is given; `aggregation` or
        `synchronization` is unknown; `per_worker_variable` is used outside a scope or with
        `trainable`; or a dataset function is running.
      RuntimeError: the constructor was called in a scheduled function, where variables cannot be
        made.
      UnknownError: `initial_value` is a function that has failed, or returned a wrong shape, at the
        parameter server.
      PSUnavailableError: the parameter server is lost.

    Attributes:
      name, shape, dtype: name, shape and dtype of the variable, which never change. `shape` is a
        tuple.
      trainable, aggregation, synchronization, constraint: the arguments of the same names, or their
        defaults.
      label: the variable's name in error texts.
      device: the device that holds the value, such as "/job:ps/replica:0/task:1/device:CPU:0".
      task: the parameter server that holds the value, such as "ps:1"; None for a variable of this
        process.
      storage: the place of the value. Only zmqdist itself uses this attribute.
    """

    name: str
    trainable: bool
    aggregation: VariableAggregation
    synchronization: VariableSynchronization
    constraint: Callable[..., Any] | None
    storage: VariableStorage
    device: str
    task: str | None
    _packed: Any

    @checked
    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: str | None = None,
        name: str | None = None,
        variable_def: Any = None,
        dtype: DTypeLike | None = None,
        import_scope: str | None = None,
        constraint: Callable[..., Any] | None = None,
        synchronization: Any = None,
        aggregation: Any = None,
        shape: Any = None,
        *,
        per_worker_variable: bool = False,
    ) -> Variable:
        if not validate_shape:
            raise ValueError("validate_shape=False: the shape of a variable never changes")
        if variable_def is not None:
            raise ValueError("variable_def describes a variable of a graph: pass initial_value")
        variable: Variable = _create(
            initial_value=initial_value,
            trainable=trainable,
            name=name,
            dtype=dtype,
            constraint=constraint,
            shape=shape,
            aggregation=aggregation,
            synchronization=synchronization,
            per_worker_variable=per_worker_variable,
        )
        return variable

    def is_same(self, other: object) -> bool:
        """Return whether `other` is a handle of this variable. Unlike this method, `==` compares
        values.

        >>> one, other = zd.Variable(1.0), zd.Variable(1.0)
        >>> one.is_same(one), one.is_same(other)
        (True, False)
        """
        return isinstance(other, Variable) and other.storage.key == self.storage.key

    # -- reading -----------------------------------------------------------------------------------

    def numpy(self) -> Any:
        """Return the current value as an array, or as a NumPy scalar if the variable is a scalar.
        Blocks for one message to the variable's server.

        >>> zd.Variable([1.0, 2.0]).numpy()
        array([1., 2.])

        Raises:
          PSUnavailableError: its parameter server is lost, or was restarted and no longer has the
            variable, or the strategy was closed.
        """
        return self.start_read().get_value()

    read_value = numpy
    value = numpy

    @property
    def version(self) -> int:
        """1 + the number of updates of the value. After a recovery of the variable, the version
        continues with a number that was never used before. Reading this attribute blocks for one
        message.
        """
        version: int = self.storage.read().get_value()[0]
        return version

    def read_versioned(self) -> tuple[int, Any]:
        """Return (version, value), read atomically, for `compare_and_set`.

        >>> count = zd.Variable(1)
        >>> version, value = count.assign_add(1).read_versioned()
        >>> version, int(value)
        (2, 2)
        """
        version, value = self.storage.read().get_value()
        return version, _scalar(value)

    # -- updates -----------------------------------------------------------------------------------

    def assign(
        self, value: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Set the value, and return this variable. `use_locking`, `name` and `read_value` have no
        effect, and exist because TensorFlow has them.

        In a scheduled function, the server may still be making this or another update when the
        method returns. The function's next operation of zmqdist waits for the update, and raises
        its error; if there is none, the function ends with the update.

        >>> zd.Variable([1, 2]).assign([3, 4]).numpy()
        array([3, 4])

        Raises:
          InvalidArgumentError: `value` has another shape, or cannot be cast to the dtype. Integers
            may become floats, but not the reverse.
          ValueError: there are several replicas, and the variable has no aggregation.
          PSUnavailableError: its parameter server is lost, or was restarted and no longer has the
            variable, or the strategy was closed.
        """
        task_context.leave_in_flight(self.start_update("assign", value))
        return self

    def assign_add(
        self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Add to the value, atomically. Arguments and errors as for `assign`.

        >>> zd.Variable([1, 2]).assign_add([10, 10]).numpy()
        array([11, 12])
        """
        task_context.leave_in_flight(self.start_update("add", delta))
        return self

    def assign_sub(
        self, delta: Any, use_locking: Any = None, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Subtract from the value, atomically. Arguments and errors as for `assign`.

        >>> zd.Variable([1, 2]).assign_sub([1, 1]).numpy()
        array([0, 1])
        """
        task_context.leave_in_flight(self.start_update("sub", delta))
        return self

    def compare_and_set(
        self, value: Any, *, version: int | None = None, expected: Any = None
    ) -> bool:
        """Set the value if its version is `version` and the value equals `expected`. Either
        condition may be left out. The server compares and sets the value atomically. Return whether
        the value was set.

        >>> count = zd.Variable(1)
        >>> count.compare_and_set(5, expected=1), count.compare_and_set(7, expected=1)
        (True, False)

        Raises:
          ValueError: both conditions are left out.
          Other errors as for `assign`.
        """
        if version is None and expected is None:
            raise ValueError("compare_and_set() needs a version or an expected value")
        version = None if version is None else converted("version", index, version)
        change = client.swap(self.storage.ref, value, version=version, expected=expected)
        applied: bool = self.storage.change(change).get_value().applied
        return applied

    def apply(self, fn: Any, grad: Any, *, step: int | None = None) -> None:
        """Apply a gradient at the parameter server. This takes one message, because the optimizer's
        slots are at the server. Blocks until the gradient is applied.

        >>> weights = zd.Variable(np.zeros(2))
        >>> weights.apply(zd.optimizers.SGD(0.5), np.ones(2))
        >>> weights.numpy()
        array([-0.5, -0.5])

        Args:
          fn: an optimizer of `zmqdist.optimizers`, or a function `fn(value, grad, slots, step)`
            that changes `value` in place or returns the new value. The function may put arrays into
            the dict `slots`, and finds them there in its next invocation. It runs at the parameter
            server, on copies of `value` and `slots`. The server finds slots by the function's
            module and qualified name, so two lambdas in one function share their slots. The
            function is pickled at its first use, with the values that it captures.
          grad: an array of the variable's shape, or IndexedSlices.
          step: in synchronous mode, the number of the step that the gradient belongs to. The server
            averages `workers_per_step` gradients and applies the mean once. `apply` blocks until
            the mean is applied. A gradient that comes later has no effect.

        Raises:
          InvalidArgumentError: the shape or dtype of the gradient does not fit, `fn` is neither an
            optimizer nor a function, or `fn` is an optimizer and the variable has no floats.
          UnknownError: the function has raised an error. The variable is unchanged.
          ValueError: the strategy is synchronous, and `step` is missing; `fn` is an optimizer of
            another class than those of `zmqdist.optimizers`; or there are several replicas, and the
            variable has no aggregation.
          ResourceExhaustedError: PS_STEPS_OPEN_MAX steps of the variable wait for gradients
            already.
          PSUnavailableError: the parameter server is lost, or was restarted and no longer has the
            variable, or the strategy was closed.
        """
        update = self.start_apply(fn, grad, step)
        if step is None:
            task_context.leave_in_flight(update)
        else:
            update.get_value()

    # -- requests that do not block ----------------------------------------------------------------

    def start_read(self) -> Future:
        """Request the value, and return a future of it.

        >>> zd.Variable([1, 2]).start_read().get_value()
        array([1, 2])
        """
        cache = thread_state.cache
        if cache is None or self.storage.task is None:
            return Then(self.storage.read(), lambda reply: _scalar(reply[1]))
        cached, key = cache.get(self.storage.key), self.storage.key
        if cached is not None:
            return ReadyValue(_scalar(read_cache.for_reader(cached)))

        def keep(reply: tuple[int, Array]) -> Any:
            return _scalar(read_cache.for_reader(cache.setdefault(key, reply[1])))

        return Then(self.storage.read(), keep)

    def start_rows(self, rows: Rows) -> Future:
        """Request rows of the value. Return a future of an array with these rows, in the order of
        `rows`.

        >>> zd.Variable([5, 6, 7]).start_rows([2, 0]).get_value()
        array([7, 5])
        """
        return self.storage.rows(rows)

    def start_update(self, kind: str, value: Any) -> Future:
        """Update the whole value. Return a future that is done when the server has replied. `kind`
        is "assign", "add" or "sub".

        >>> count = zd.Variable(1)
        >>> _ = count.start_update("add", 4).get_value()
        >>> int(count.numpy())
        5
        """
        change = _DENSE[kind]
        return once_for_all(
            self, value, lambda value: self.storage.change(change(self.storage.ref, value))
        )

    def start_scatter(self, kind: str, indices: Any, values: Any) -> Future:
        """Start a scatter update. Return a future that is done when the server has replied. `kind`
        is the end of a method's name, such as "add" for `scatter_add`.

        >>> count = zd.Variable([1, 2])
        >>> _ = count.start_scatter("add", [1], [5]).get_value()
        >>> count.numpy()
        array([1, 7])
        """

        def start(delta: IndexedSlices) -> Future:
            return self.storage.change(client.scatter(self.storage.ref, kind, delta))

        return once_for_all(self, IndexedSlices(values, indices), start)

    def start_apply(self, fn: Any, grad: Any, step: int | None) -> Future:
        """Send the request of `apply`. Return a future that is done when the server has replied.

        >>> weights = zd.Variable(np.zeros(2))
        >>> _ = weights.start_apply(zd.optimizers.SGD(0.5), np.ones(2), None).get_value()
        >>> weights.numpy()
        array([-0.5, -0.5])
        """
        number = None if step is None else converted("step", index, step)
        rule = constrained(fn, self.constraint)
        return once_for_all(self, grad, lambda grad: self.storage.apply(rule, grad, number))

    def _scatter(self, kind: str, sparse_delta: Any) -> Variable:
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(
                f"scatter updates take IndexedSlices as `sparse_delta`, not "
                f"{type(sparse_delta).__name__}"
            )
        task_context.leave_in_flight(
            self.start_scatter(kind, sparse_delta.indices, sparse_delta.values)
        )
        return self

    # -- copies ------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        # A variable without a task cannot leave its process. If a scheduled function returns it,
        # for example, its value is sent instead.
        if self.storage.task is None and task_context.scheduled():
            return _value, (self.numpy(),)
        described = (self.trainable, self.aggregation, self.synchronization, self.constraint)
        if self.storage.task is None or self.constraint is not None:
            return handle, (self.storage, *described)
        assert isinstance(self.storage, RemoteStorage)  # it has a task
        if self._packed is None:
            stub = RemoteStorage(self.storage.ref, self.storage.workers_per_step)
            self._packed = pack((stub, *described))
        self.storage.note_pickled()
        return _unpacked, (self._packed,)

    def __copy__(self) -> Variable:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Make another variable on the same device with the same value. Raises RuntimeError outside
        the scope of its strategy."""
        if self.task is not None:
            strategy = get_strategy()
            if strategy is None or strategy.session != self.storage.session:
                raise RuntimeError(
                    f"variable {self.name!r} can only be copied inside the scope of the strategy "
                    f"that it was made in"
                )
        copy: Variable = _make(
            initial_value=self.numpy(),
            trainable=self.trainable,
            name=self.name,
            dtype=self.dtype,
            aggregation=self.aggregation,
            synchronization=self.synchronization,
            constraint=self.constraint,
            device=self.device,
        )
        memo[id(self)] = copy
        return copy

    @safe_repr
    def __repr__(self) -> str:
        """Describe the variable without sending a message to its server."""
        return f"{self.name!r} shape={self.shape} dtype={self.dtype.name} on {self.task or 'this process'}"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        return [
            ("name", self.name),
            ("shape", self.shape),
            ("dtype", self.dtype.name),
            ("MB", f"{math.prod(self.shape) * self.dtype.itemsize / 1e6:,.3f}"),
            ("on", self.task or "this process"),
            ("trainable", "yes" if self.trainable else "no"),
        ]


def _value(value: Any) -> Any:
    """Return `value`. The pickle of a worker's own variable refers to this function by name, so the
    name is part of the protocol."""
    return value


def _unpacked(packed: bytes) -> Variable:
    """Return this process's handle of a pickled variable. Pickles call this function by name.

    A handle that the program does not own is kept, because the next function probably gets it, too.
    """
    variable = _unpickled.get(packed)
    if variable is None:
        variable = handle(*unpack(packed))
        assert isinstance(variable.storage, RemoteStorage)
        if not variable.storage.owned:
            if len(_unpickled) >= UNPICKLED_MAX:
                _unpickled.clear()
            _unpickled[packed] = variable
    return variable


def _scalar(value: Array) -> Any:
    return value if value.shape else value[()]


def handle(
    storage: VariableStorage,
    trainable: bool,
    aggregation: VariableAggregation,
    synchronization: VariableSynchronization,
    constraint: Callable[..., Any] | None,
) -> Variable:
    """Return this process's handle of the variable in `storage`. Make a handle if the process has
    none."""
    with _lock:
        variable = _handles.get(storage.key)
        if variable is None:
            variable = object.__new__(Variable)
            variable.storage = storage
            variable.name, variable.shape, variable.dtype = (
                storage.ref.name,
                storage.ref.shape,
                storage.ref.dtype,
            )
            variable.label, variable.task, variable.device = (
                str(storage.ref),
                storage.task,
                storage.device,
            )
            variable.trainable, variable.aggregation, variable.synchronization = (
                trainable,
                aggregation,
                synchronization,
            )
            variable.constraint = constraint
            variable._packed = None
            _handles[storage.key] = variable
        return variable


def _create(**kwargs: Any) -> Any:
    """Make a variable through the chain of creators. The constructor of `Variable` calls this, and
    documents the arguments."""
    being_built = task_context.resource_kind()
    if being_built == "dataset":
        raise ValueError(
            "a dataset function cannot make a Variable: make it under strategy.scope() in the "
            "program"
        )
    if being_built is not None:
        device = device_of("worker", task_context.get_current_worker_index())
        return _make(**{**kwargs, "device": device})
    if task_context.scheduled():
        raise RuntimeError(
            "a Variable cannot be made in a scheduled function, which may run again and on any "
            "worker: make it under strategy.scope() in "
            "the program and let the function use it, or make it in a per-worker resource"
        )
    next_creator: Callable[..., Any] = _make
    for creator in thread_state.creators:
        next_creator = partial(creator, next_creator)
    return next_creator(**kwargs)


def _make(
    *,
    initial_value: Any = None,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    shape: Any = None,
    aggregation: Any = None,
    synchronization: Any = None,
    constraint: Callable[..., Any] | None = None,
    per_worker_variable: bool = False,
    device: str | None = None,
) -> Any:
    """Make a variable on `device`, by default in this process. This is the function at the end of
    the chain of creators."""
    if per_worker_variable:
        raise ValueError(
            "per_worker_variable=True needs a strategy: make it inside strategy.scope()"
        )
    name = name or "Variable"
    how = (
        member(VariableAggregation, "aggregation", aggregation),
        member(VariableSynchronization, "synchronization", synchronization),
    )
    initial = Initial.of(name, initial_value, shape, dtype)
    if trainable is None:
        trainable = initial.dtype.kind in "fc"
    described = (bool(trainable), *how, constraint)
    target = None if device is None else Device.parse(device).canonical()
    if target is None or target.job != "ps":
        value = initial.value()
        array = np.array(value() if callable(value) else value, order="C")
        storage = LocalStorage(name, array, CHIEF if target is None else str(target))
        return handle(storage, *described)
    strategy = get_strategy()
    if strategy is None:
        raise ValueError(
            f"variable {name!r} is to be placed on {device}, but there is no strategy: make it "
            f"inside strategy.scope()"
        )
    ps, servers = target.task or 0, len(strategy.cluster.ps)
    if ps >= servers:
        raise ValueError(
            f"variable {name!r} is to be placed on ps:{ps}, but the cluster has {servers} ps"
        )
    storage = strategy.ps_session.create_variable(name, initial, ps)
    strategy.shard_placement.placed(name, initial.shape, initial.dtype, ps)
    return handle(storage, *described)
