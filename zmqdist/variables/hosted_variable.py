"""One variable at its ps: the value, its version, the slots of optimizers, and the gradients of
incomplete steps.

Rules
    A change has two parts: `prepare` makes all checks and runs all code that may raise, and
    `commit` cannot fail. So a refused change has changed nothing, and an update of several
    variables changes either all these variables or none.
    Each commit that changes the value adds 1 to the version, which starts at 1.
    A user's update function works on copies, which replace the value and the slots only after the
    function has returned. The caller of a method holds the variable's lock. Only the figures for
    `status` are read without the lock.

Changes, in the form in which they are sent: (kind, ...)
    ("assign" | "add" | "sub", value) `value` has the variable's shape and dtype; or its bytes
    ("scatter", op, indices, rows)              op is one of SCATTERS
    ("swap", version, expected, value)          assign if the version is `version` (-1 means any version) and the value equals `expected`
                                                (None means any value)
    ("apply", name, fields, gradient)           a step of an optimizer (update_rules.py)
    ("call", digest, gradient)                  a step of a user's update function, which the client has sent before
    ("restore", value, slots)                   set the value, and the slots to the result of `saved`; () removes the existing slots

A gradient is an array, or a tuple of indices and rows.

Storage, the memory of a hosted variable's value
    The value is changed in place, because its pages are mapped already and the update of a large
    value then needs no second array. Only a user's update function replaces the array. So a reader
    of the whole value sends or copies it before the reader releases the lock. When a large value is
    read repeatedly without a change, the Storage makes a frozen copy, which readers share without
    copying it again. A Storage has no lock. Its owner makes sure that only one thread at a time
    uses it.

Not here: versions, the meaning of updates, checks of their arguments (hosted_variable.py).

`cast` converts users' values to arrays of the dtype of a variable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError, OpError, UnknownError
from zmqdist.limits import PS_STEPS_OPEN_MAX, SHM_DESCRIPTOR_BYTES_MIN
from zmqdist.specs import IndexedSlices, TensorSpec, convert, what_is_lost
from zmqdist.tensors import as_array
from zmqdist.transport.arrays import freeze
from zmqdist.update_rules import UpdateRule, summed_rows
from zmqdist.variables.updates_machine import Steps
from zmqdist.wire.arrays import is_frozen


def cast(value: Any, dtype: np.dtype[Any], subject: str) -> NDArray[Any]:
    """Return a user's value as an array of this dtype. The array may have any shape.

    Python numbers, and lists of them, are converted if the dtype can represent them. Arrays are
    cast by NumPy's "same_kind" rule, except that whole numbers do not wrap round, text is never
    truncated, and times keep their units: only floats are rounded.

    Args:
      subject: the variable that the value is for, as error texts name it: "variable 'w'".

    Raises:
      InvalidArgumentError: the value cannot be converted to this dtype.
    """
    loss = what_is_lost(value)
    if loss:
        raise InvalidArgumentError(f"{subject}: {loss}")
    try:
        value = as_array(value)
        if not hasattr(value, "dtype"):
            return convert(
                value if not hasattr(value, "__array__") else np.asarray(value),
                TensorSpec(None, dtype),
            )
        array = np.asarray(value)
        if dtype.kind in "SUV" and array.dtype.kind not in ("V" if dtype.kind == "V" else "SU"):
            raise TypeError  # NumPy would write the numbers as text or raw bytes
        converted: NDArray[Any] = array.astype(dtype, casting="same_kind", copy=False)
    except (TypeError, ValueError, OverflowError, InvalidArgumentError):
        try:
            source = np.asarray(value)
            shown = f"{source.dtype} of shape {source.shape}"
        except ValueError:
            shown = "lists of unequal lengths"
        raise InvalidArgumentError(f"{subject} is of {dtype}, which cannot hold {shown}") from None
    # "same_kind" lets integers wrap round and texts be cut off
    if converted is not array and dtype.kind in "iuSUmM":
        changed = (converted if dtype.kind in "iu" else converted.astype(array.dtype)) != array
        lost = array[changed & (array == array)].tolist()  # NaT differs from itself
        if lost:
            text = f"{subject} is of {dtype}, which cannot hold {lost[0]!r:.60}: convert the array yourself"
            raise InvalidArgumentError(text)
    return converted


Array: TypeAlias = NDArray[Any]

SCATTERS: Final = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "update": None,
}
"""Sparse updates by name. A row that is named twice is updated twice, in order, so that "update"
sets it to the last value."""


FROZEN_FROM: Final = 3
"""Number of reads without a change after which a large value is frozen. It is above 1, because a
frozen copy needs new memory, which costs as much as a few copies into mapped memory.
"""


class Storage:
    """The value of one variable: an array in memory of its own.

    Attributes:
      value: the array. The Storage's owner may write to it, and then calls `changed`.
      shape, dtype, nbytes: attributes of the array, which never change.
      row_bytes: number of bytes of one row; a scalar is one row.
    """

    __slots__ = ("_frozen", "_marks", "_reads", "dtype", "nbytes", "row_bytes", "shape", "value")

    def __init__(self, value: Array) -> None:
        """Take ownership of `value`, which must be writable and contiguous, and to which no other
        code may refer."""
        self.shape = value.shape
        self.dtype = value.dtype
        self.nbytes = value.nbytes
        self.row_bytes = value.nbytes // max(1, value.shape[0]) if value.shape else value.nbytes
        self.value = value
        self._reads = 0
        self._frozen: Array | None = None
        self._marks: NDArray[np.int32] | None = None

    def read(self) -> Array:
        """Return the current value, or a frozen copy of it. The caller sends or copies the array
        before the next change. Sending a frozen copy needs no further copy.
        """
        if self._frozen is None and self.nbytes >= SHM_DESCRIPTOR_BYTES_MIN:
            self._reads += 1
            # a copy that several readers share is worth its price only for a value that stays
            if self._reads >= FROZEN_FROM:
                self._frozen = freeze(self.value)
        return self.value if self._frozen is None else self._frozen

    def changed(self) -> None:
        """Record that the value is about to change or has changed, so the frozen copy is no longer
        valid."""
        self._reads = 0
        self._frozen = None

    def assign(self, value: Array) -> None:
        """Copy another array into the value. If that array is frozen, readers get it as the frozen
        copy."""
        np.copyto(self.value, value)
        self.changed()
        if (
            self.nbytes >= SHM_DESCRIPTOR_BYTES_MIN
            and is_frozen(value)
            and value.flags.c_contiguous
        ):
            self._frozen = value

    def gather(self, indices: Array) -> Array:
        """Return the rows of the value at `indices` as a new array."""
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        # With mode "clip" NumPy needs no buffer. No index is clipped, because all indices are in
        # bounds.
        np.take(self.value, indices, axis=0, out=out, mode="clip")
        return out

    def run(self, rows: range) -> Array:
        """Return an ascending range of rows of the value as a new array."""
        return np.array(self.value[rows.start : rows.stop : rows.step])

    def scatter(self, op: str, indices: Array, rows: Array) -> None:
        """Apply a sparse update. `indices` are in bounds, and `rows` has the dtype of the value and
        the shape of its rows at `indices`."""
        self.changed()
        target = self.value
        ufunc = SCATTERS[op]
        if ufunc is None:
            target[indices] = rows
            return
        owners, unique = self._owned(indices)
        if not unique and op not in ("add", "sub"):
            _by_rows(ufunc, target, indices, rows)
            return
        touched = target[indices]
        _into(ufunc, touched, rows)
        target[indices] = touched
        if not unique:
            # NumPy has applied the operation once for each index, to its last row
            earlier = owners != np.arange(len(indices), dtype=np.int32)
            ufunc.at(target, indices[earlier], rows[earlier])

    def summed(self, indices: Array, rows: Array) -> tuple[Array, Array]:
        """Return indices and rows for an equivalent "add" update with unique indices: the rows of a
        repeated index are added up."""
        owners, unique = self._owned(indices)
        if unique:
            return indices, rows
        is_owner = owners == np.arange(len(indices), dtype=np.int32)
        total = rows.copy()
        np.add.at(total, owners[~is_owner], rows[~is_owner])
        return indices[is_owner], total[is_owner]

    def _owned(self, indices: Array) -> tuple[Array, bool]:
        """Return, for each entry of `indices`, the position of the last entry with the same index,
        and whether all indices are unique.

        The method writes each position into a mark for the row, and reads the marks back. Old marks
        need not be cleared, because only marks that were just written are read.
        """
        if self._marks is None:
            self._marks = np.empty(self.shape[0], np.int32)
        positions = np.arange(len(indices), dtype=np.int32)
        self._marks[indices] = positions
        owners = self._marks[indices]
        return owners, bool((owners == positions).all())


def mean_of(total: Array, count: int, out: Array | None = None) -> Array:
    """Return `total` divided by `count`, in the dtype of `total`. Quotients of integers are rounded
    towards zero, as in TensorFlow."""
    out = total.copy() if out is None else out
    if out is not total:
        np.copyto(out, total)
    _into(np.divide, out, np.asarray(count, total.dtype))
    return out


def _into(ufunc: Any, target: Array, rows: Array) -> None:
    """Compute target = ufunc(target, rows) in place. Quotients of integers are rounded towards
    zero, as in TensorFlow."""
    if ufunc is np.divide and target.dtype.kind in "iu":
        # divide as integers, because floats cannot hold all 64-bit integers
        quotient = np.floor_divide(target, rows)
        quotient += ((target < 0) != (rows < 0)) & (quotient * rows != target)
        np.copyto(target, quotient)
    else:
        ufunc(target, rows, out=target)


def _by_rows(ufunc: Any, target: Array, indices: Array, rows: Array) -> None:
    if ufunc is np.divide and target.dtype.kind in "iu":
        for index, row in zip(indices, rows, strict=True):
            _into(ufunc, target[index : index + 1], row)
    else:
        ufunc.at(target, indices, rows)


Gradient: TypeAlias = "Array | tuple[Array, Array]"
Commit: TypeAlias = Callable[[], object] | None
"""The function that makes a prepared change; None if the change changes nothing."""

STEP: Final = "step"
"""The name under which an optimizer's number of steps is saved beside its slots."""


class HostedVariable:
    """One variable at its ps; the module's docstring has the rules.

    Attributes:
      label: name of the variable in error texts, such as "variable 'w/part_1' on ps:1".
      lock: protects all state of the variable.
      version: version of the value.
      slots: the optimizers' arrays, by optimizer and then by name.
      step_counts: number of steps that each optimizer has made, by optimizer.
      steps: the synchronous steps.
      sums: the gradients of each incomplete synchronous step, by number of the step.
      drop_reason: why the variable was dropped; "" while it exists.
      updates, bytes_in, bytes_out: number of updates, bytes received and bytes sent, for `status`.
      waits_s: seconds that updates have waited for each other: for a thread and the locks, or for
        the other gradients of a synchronous step.
    """

    def __init__(self, label: str, name: str, value: Array) -> None:
        """Take ownership of `value`, which must be writable and contiguous, and to which no other
        code may refer."""
        self.label = label
        self.name = name
        self.lock = threading.Lock()
        self.storage = Storage(value)
        self.version = 1
        self.slots: dict[str, dict[str, Array]] = {}
        self.step_counts: dict[str, int] = {}
        self.steps = Steps(PS_STEPS_OPEN_MAX)
        self.sums: dict[int, Sum] = {}
        self.drop_reason = ""
        self.updates = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.waits_s = 0.0

    @property
    def nbytes(self) -> int:
        """Number of bytes of the value, the slots, and the gradients of incomplete steps."""
        slots = sum(slot.nbytes for slots in list(self.slots.values()) for slot in slots.values())
        return self.storage.nbytes + slots + sum(total.nbytes for total in list(self.sums.values()))

    # -- reading -----------------------------------------------------------------------------------

    def read(self) -> Array:
        """Return the value of the variable without a copy. The caller sends or copies the array
        before it releases the lock."""
        self.bytes_out += self.storage.nbytes
        return self.storage.read()

    def rows(self, indices: Any) -> Array:
        """Return the rows at some indices, or of a range (start, stop, step), as a new array.
        Raises InvalidArgumentError if there are no such rows.
        """
        array = (
            self.storage.run(self._range(*indices))
            if isinstance(indices, (tuple, list))
            else self.storage.gather(self._indices(indices))
        )
        self.bytes_out += array.nbytes
        return array

    def saved(self) -> dict[str, Array]:
        """Return slots and numbers of steps, under names such as "Adam/m" and "Adam/step". The
        caller sends or copies the arrays before it releases the lock.
        """
        arrays = {}
        for kind, slots in self.slots.items():
            arrays.update({f"{kind}/{name}": slot for name, slot in slots.items()})
            arrays[f"{kind}/{STEP}"] = np.array(self.step_counts.get(kind, 0), np.int64)
        return arrays

    def resume(self, version: int, saved: dict[str, Array]) -> None:
        """Set the version, slots and numbers of steps of a new variable to those of an earlier
        incarnation of the variable.

        Args:
          saved: the result of `saved` of the earlier incarnation.
        """
        self.slots, self.step_counts = _read_saved(saved)
        self.version = int(version)

    # -- changing ----------------------------------------------------------------------------------

    def prepare(
        self, change: tuple[Any, ...], function: Callable[[bytes], tuple[str, Any]]
    ) -> Commit:
        """Check a change, and execute the part of it that may fail. Return a function that executes
        the rest of the change.

        Args:
          function: a function that takes a digest, and returns (name, function) of the user's
            update function with this digest.

        Raises:
          InvalidArgumentError: the change does not fit; the text names the variable.
          UnknownError: the user's update function has raised an error.
        """
        kind, *arguments = change
        prepare_kind = _PREPARE.get(kind)
        if prepare_kind is None:
            raise self.wrong(f"there is no update {kind!r}")
        try:
            if kind == "call":
                digest, gradient = arguments
                arguments = [*function(digest), gradient]
            return prepare_kind(self, *arguments)
        except OpError:
            raise
        except (TypeError, ValueError) as error:
            raise self.wrong(f"update {kind!r}: {error}") from None

    def commit(self, commit: Commit) -> bool:
        """Make a prepared change, and count it. Return whether the value has changed."""
        if commit is None:
            return False
        commit()
        self.version += 1
        self.updates += 1
        return True

    def _assign(self, value: Any) -> Commit:
        array = self._value(value)

        def commit() -> None:
            self.storage.assign(array)

        return commit

    def _dense(self, ufunc: Any, value: Any) -> Commit:
        self._check_numbers()
        array = self._value(value)

        def commit() -> None:
            ufunc(self.storage.value, array, out=self.storage.value)
            self.storage.changed()

        return commit

    def _scatter(self, op: Any, indices: Any, rows: Any) -> Commit:
        if op not in SCATTERS:
            raise self.wrong(f"there is no sparse update {op!r}; there are {', '.join(SCATTERS)}")
        if op != "update":
            self._check_numbers()
        checked = self._rows(indices, rows)
        # NumPy would give 0, with a warning that stays at the ps
        if op == "div" and self.storage.dtype.kind in "iu" and not checked[1].all():
            raise self.wrong("whole numbers cannot be divided by 0")

        def commit() -> None:
            self.storage.scatter(op, *checked)

        return commit

    def _swap(self, version: Any, expected: Any, value: Any) -> Commit:
        array = self._value(value)
        expected_value = None if expected is None else self._value(expected)
        fits = version in (-1, self.version) and (
            expected_value is None or np.array_equal(expected_value, self.storage.value)
        )
        return self._assign(array) if fits else None

    def _apply(self, name: Any, fields: Any, gradient: Any) -> Commit:
        optimizer = UpdateRule.from_wire(name, fields)
        if self.storage.dtype.kind not in "fV" or self.storage.dtype.names is not None:
            # "V" is the kind of bfloat16 and similar dtypes.
            raise self.wrong(
                f"{name} needs a variable of floats, and this one is {self.storage.dtype}"
            )
        checked = self.gradient(gradient)
        slots = self.slots.get(name)
        # an optimizer with a momentum has other slots than one without
        if slots is None or slots.keys() != optimizer.slot_values.keys():
            slots = optimizer.slots(self.storage.value)

        def commit() -> None:
            self.slots[name] = slots
            step = self.step_counts[name] = self.step_counts.get(name, 0) + 1
            self.storage.changed()
            if isinstance(checked, tuple):
                indices, rows = self.storage.summed(*checked)
                optimizer.update_rows(self.storage.value, indices, rows, slots, step)
            else:
                optimizer.update(self.storage.value, checked, slots, step)

        return commit

    def _call(self, name: str, fn: Any, gradient: Any) -> Commit:
        checked = self.gradient(gradient)
        gradient_argument = (
            IndexedSlices(checked[1], checked[0], self.storage.shape)
            if isinstance(checked, tuple)
            else checked
        )
        # the function may change its arguments and then fail
        value = self.storage.value.copy()
        slots = {slot: array.copy() for slot, array in self.slots.get(name, {}).items()}
        step = self.step_counts.get(name, 0) + 1
        try:
            returned = fn(value, gradient_argument, slots, step)
        except Exception as error:
            raise UnknownError(
                f"{self.label}: update function {name} raised {type(error).__name__}: {error}"
            ) from error
        new_value = value if returned is None else self._checked_result(name, returned)
        new_slots = {str(slot): np.array(array) for slot, array in slots.items()}
        if any(array.dtype.hasobject for array in new_slots.values()):
            raise self.wrong(
                f"update function {name} put a value into `slots` that is not an array of numbers "
                f"or text"
            )

        def commit() -> None:
            self.storage.value = new_value
            self.storage.changed()
            self.slots[name], self.step_counts[name] = new_slots, step

        return commit

    def _checked_result(self, name: str, returned: Any) -> Array:
        array = cast(
            returned, self.storage.dtype, f"{self.label}: what update function {name} returned"
        )
        if array.shape != self.storage.shape:
            text = f"update function {name} returned {array.dtype} of shape {array.shape}, wanted {self._spec()}"
            raise self.wrong(text)
        # Copy the array, because the user's function may have kept a reference to `returned`, and
        # change it later.
        return np.array(array, order="C")

    def _restore(self, value: Any, saved: Any) -> Commit:
        array = self._value(value)
        slots, step_counts = _read_saved(saved)

        def commit() -> None:
            self.storage.assign(array)
            self.slots, self.step_counts = slots, step_counts

        return commit

    # -- checks ------------------------------------------------------------------------------------

    def wrong(self, problem: str) -> InvalidArgumentError:
        """Return an InvalidArgumentError with this problem, whose text names the variable."""
        return InvalidArgumentError(f"{self.label}: {problem}")

    def gradient(self, value: Any) -> Gradient:
        """Return `value` as a gradient for this variable. Raises InvalidArgumentError if it does
        not fit."""
        if isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise self.wrong("a sparse gradient must be a pair (indices, rows)")
            return self._rows(*value)
        return self._value(value)

    def _spec(self) -> str:
        return f"{self.storage.dtype} of shape {self.storage.shape}"

    def _value(self, value: Any) -> Array:
        if type(value) is bytes and len(value) == self.storage.nbytes:
            self.bytes_in += len(value)
            sent: Array = np.ndarray(self.storage.shape, self.storage.dtype, value)
            return sent
        array = np.asarray(value)
        if array.shape != self.storage.shape or array.dtype != self.storage.dtype:
            raise self.wrong(f"wanted {self._spec()}, given {array.dtype} of shape {array.shape}")
        self.bytes_in += array.nbytes
        return array

    def _indices(self, value: Any) -> Array:
        indices = np.asarray(value)
        if not self.storage.shape:
            raise self.wrong("the variable is a scalar and has no rows")
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise self.wrong(
                f"indices are whole numbers in one dimension, not {indices.dtype} of "
                f"{indices.shape}"
            )
        if indices.size:
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= self.storage.shape[0]:
                bad = low if low < 0 else high
                raise self.wrong(
                    f"index {bad} is out of range: the variable has rows 0 to "
                    f"{self.storage.shape[0] - 1}"
                )
        return indices.astype(np.intp, copy=False)

    def _range(self, *bounds: Any) -> range:
        if not self.storage.shape:
            raise self.wrong("the variable is a scalar and has no rows")
        start, stop, step = (
            bounds
            if all(type(bound) is int for bound in bounds) and len(bounds) == 3
            else (0, 0, 0)
        )
        if not 0 <= start <= stop <= self.storage.shape[0] or step < 1:
            raise self.wrong(
                f"there is no range {bounds} of rows: the variable has rows 0 to "
                f"{self.storage.shape[0] - 1}"
            )
        return range(start, stop, step)

    def _rows(self, indices: Any, rows: Any) -> tuple[Array, Array]:
        checked, array = self._indices(indices), np.asarray(rows)
        shape = (len(checked), *self.storage.shape[1:])
        if array.dtype != self.storage.dtype or array.shape not in (shape, shape[1:], ()):
            text = f"{len(checked)} rows are {self.storage.dtype} of shape {shape}, not {array.dtype} of {array.shape}"
            raise self.wrong(text)
        self.bytes_in += array.nbytes + checked.nbytes
        return checked, np.broadcast_to(array, shape)

    def _check_numbers(self) -> None:
        if self.storage.dtype.kind in "USbmM" or self.storage.dtype.names is not None:
            raise self.wrong(f"{self.storage.dtype} has no arithmetic: assign a value instead")


def _read_saved(saved: Any) -> tuple[dict[str, dict[str, Array]], dict[str, int]]:
    """Return copies of the slots, and the numbers of steps, from the result of
    `HostedVariable.saved`."""
    slots: dict[str, dict[str, Array]] = {}
    step_counts: dict[str, int] = {}
    for path, slot in dict(saved).items():
        kind, _, name = path.rpartition("/")
        if name == STEP:
            step_counts[kind] = int(slot)
            slots.setdefault(kind, {})
        else:
            slots.setdefault(kind, {})[name] = np.array(slot, order="C")
    return slots, step_counts


_PREPARE: Final[dict[str, Callable[..., Commit]]] = {
    "assign": HostedVariable._assign,
    "add": lambda variable, value: variable._dense(np.add, value),
    "sub": lambda variable, value: variable._dense(np.subtract, value),
    "scatter": HostedVariable._scatter,
    "swap": HostedVariable._swap,
    "apply": HostedVariable._apply,
    "call": HostedVariable._call,
    "restore": HostedVariable._restore,
}


class Sum:
    """The gradients that have arrived for one synchronous step. In their mean, rows that a sparse
    gradient lacks count as zeros. `since_s` is the sum of the times since when their updates wait.
    """

    def __init__(self) -> None:
        self.since_s = 0.0
        self._dense: Array | None = None
        self._ours = False
        self._sparse: list[tuple[Array, Array]] = []

    @property
    def nbytes(self) -> int:
        dense = 0 if self._dense is None else self._dense.nbytes
        return dense + sum(indices.nbytes + rows.nbytes for indices, rows in self._sparse)

    def fits(self, gradient: Gradient) -> bool:
        """Return whether `gradient` is of the same kind, dense or sparse, as the earlier
        gradients.
        """
        return self._dense is None if isinstance(gradient, tuple) else not self._sparse

    def add(self, gradient: Gradient) -> None:
        """Add a gradient. This object refers to the gradient's array and never changes the array,
        because the sender may need it to repeat the request.
        """
        if isinstance(gradient, tuple):
            self._sparse.append(gradient)
        elif self._dense is None:
            self._dense = gradient
        else:
            self._dense = np.add(self._dense, gradient, out=self._room(self._dense))
            self._ours = True

    def mean(self, count: int) -> Gradient:
        """Return the mean over `count` gradients. The mean may reuse the memory of the sum, so call
        this only once."""
        if self._dense is not None:
            return mean_of(self._dense, count, self._room(self._dense))
        indices = np.concatenate([indices for indices, _ in self._sparse])
        rows = np.concatenate([rows for _, rows in self._sparse])
        indices, rows = summed_rows(indices, rows)
        return indices, mean_of(rows, count)

    def _room(self, dense: Array) -> Array:
        return dense if self._ours else np.empty(dense.shape, dense.dtype)
