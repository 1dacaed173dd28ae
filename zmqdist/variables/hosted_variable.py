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
    ("assign" | "add" | "sub", value) `value` has the variable's shape and dtype
    ("scatter", op, indices, rows)              op is one of storage.SCATTERS
    ("swap", version, expected, value)          assign if the version is `version` (-1 means any version) and the value equals `expected`
                                                (None means any value)
    ("apply", name, fields, gradient)           a step of an optimizer (optimizers.py)
    ("call", digest, gradient)                  a step of a user's update function, which the client has sent before
    ("restore", value, slots)                   set the value, and the slots to the result of `saved`; () removes the existing slots

A gradient is an array, or a tuple of indices and rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError, OpError, UnknownError
from zmqdist.indexed_slices import IndexedSlices
from zmqdist.limits import PS_STEPS_OPEN_MAX
from zmqdist.optimizers import Optimizer, summed_rows
from zmqdist.variables.casts import cast
from zmqdist.variables.storage import SCATTERS, Storage, mean_of
from zmqdist.variables.updates_machine import Steps

Array: TypeAlias = NDArray[Any]
Gradient: TypeAlias = "Array | tuple[Array, Array]"
Commit: TypeAlias = Callable[[], bool]
"""A function that makes a prepared change, and returns whether the value has changed."""

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

    @property
    def nbytes(self) -> int:
        """Number of bytes of the value, the slots, and the gradients of incomplete steps."""
        slots = sum(slot.nbytes for slots in list(self.slots.values()) for slot in slots.values())
        return self.storage.nbytes + slots + sum(each.nbytes for each in list(self.sums.values()))

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
        if isinstance(indices, (tuple, list)):
            found = self.storage.run(self._range(*indices))
        else:
            found = self.storage.gather(self._indices(indices))
        self.bytes_out += found.nbytes
        return found

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
        changed = commit()
        if changed:
            self.version += 1
            self.updates += 1
        return changed

    def _assign(self, value: Any) -> Commit:
        array = self._value(value)

        def commit() -> bool:
            self.storage.assign(array)
            return True

        return commit

    def _add(self, value: Any) -> Commit:
        return self._dense(np.add, value)

    def _sub(self, value: Any) -> Commit:
        return self._dense(np.subtract, value)

    def _dense(self, ufunc: Any, value: Any) -> Commit:
        self._check_numbers()
        array = self._value(value)

        def commit() -> bool:
            ufunc(self.storage.value, array, out=self.storage.value)
            self.storage.changed()
            return True

        return commit

    def _scatter(self, op: Any, indices: Any, rows: Any) -> Commit:
        if op not in SCATTERS:
            raise self.wrong(f"there is no sparse update {op!r}; there are {', '.join(SCATTERS)}")
        if op != "update":
            self._check_numbers()
        checked = self._rows(indices, rows)
        if op == "div" and self.storage.dtype.kind in "iu" and not checked[1].all():
            raise self.wrong("whole numbers cannot be divided by 0")

        def commit() -> bool:
            self.storage.scatter(op, *checked)
            return True

        return commit

    def _swap(self, version: Any, expected: Any, value: Any) -> Commit:
        array = self._value(value)
        wanted = None if expected is None else self._value(expected)
        fits = version in (-1, self.version) and (
            wanted is None or np.array_equal(wanted, self.storage.value)
        )
        return self._assign(array) if fits else _nothing

    def _apply(self, name: Any, fields: Any, gradient: Any) -> Commit:
        optimizer = Optimizer.from_wire(name, fields)
        self._check_floats(name)
        checked = self.gradient(gradient)
        slots = self.slots.get(name)
        if slots is None:
            slots = optimizer.slots(self.storage.value)

        def commit() -> bool:
            self.slots[name] = slots
            step = self.step_counts[name] = self.step_counts.get(name, 0) + 1
            self.storage.changed()
            if isinstance(checked, tuple):
                indices, rows = self.storage.summed(*checked)
                optimizer.update_rows(self.storage.value, indices, rows, slots, step)
            else:
                optimizer.update(self.storage.value, checked, slots, step)
            return True

        return commit

    def _call(self, name: str, fn: Any, gradient: Any) -> Commit:
        checked = self.gradient(gradient)
        gradient_given = (
            IndexedSlices(checked[1], checked[0], self.storage.shape)
            if isinstance(checked, tuple)
            else checked
        )
        value = self.storage.value.copy()
        slots = {slot: array.copy() for slot, array in self.slots.get(name, {}).items()}
        step = self.step_counts.get(name, 0) + 1
        try:
            returned = fn(value, gradient_given, slots, step)
        except Exception as error:
            text = f"{self.label}: update function {name} raised {type(error).__name__}: {error}"
            raise UnknownError(text) from error
        new_value = value if returned is None else self._checked_result(name, returned)
        new_slots = {str(slot): np.array(array) for slot, array in slots.items()}
        if any(array.dtype.hasobject for array in new_slots.values()):
            raise self.wrong(
                f"update function {name} put a value into `slots` that is not an array of numbers "
                f"or text"
            )

        def commit() -> bool:
            self.storage.value = new_value
            self.storage.changed()
            self.slots[name], self.step_counts[name] = new_slots, step
            return True

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

        def commit() -> bool:
            self.storage.assign(array)
            self.slots, self.step_counts = slots, step_counts
            return True

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
        wanted = (len(checked), *self.storage.shape[1:])
        if array.dtype != self.storage.dtype or array.shape not in (wanted, wanted[1:], ()):
            text = f"{len(checked)} rows are {self.storage.dtype} of shape {wanted}, not {array.dtype} of {array.shape}"
            raise self.wrong(text)
        self.bytes_in += array.nbytes + checked.nbytes
        return checked, np.broadcast_to(array, wanted)

    def _check_numbers(self) -> None:
        if self.storage.dtype.kind in "USbmM" or self.storage.dtype.names is not None:
            raise self.wrong(f"{self.storage.dtype} has no arithmetic: assign a value instead")

    def _check_floats(self, name: str) -> None:
        if self.storage.dtype.kind not in "fV" or self.storage.dtype.names is not None:
            # "V" is the kind of bfloat16 and similar dtypes.
            raise self.wrong(
                f"{name} needs a variable of floats, and this one is {self.storage.dtype}"
            )


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


def _nothing() -> bool:
    return False


_PREPARE: Final[dict[str, Callable[..., Commit]]] = {
    "assign": HostedVariable._assign,
    "add": HostedVariable._add,
    "sub": HostedVariable._sub,
    "scatter": HostedVariable._scatter,
    "swap": HostedVariable._swap,
    "apply": HostedVariable._apply,
    "call": HostedVariable._call,
    "restore": HostedVariable._restore,
}


class Sum:
    """The gradients that have arrived for one synchronous step. In their mean, rows that a sparse
    gradient lacks count as zeros."""

    def __init__(self) -> None:
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
