"""The expected shape and dtype of an array, and functions that declare the specs of their arguments
and results.

Rules
    A `TensorSpec` never changes. `function` only attaches specs to a callable. It neither traces
    the callable nor checks its calls. The code that sends or receives the arguments checks them
    (`convert`, `TensorSpec.problem`).

    Python's numbers are weak, which means that they have no dtype of their own. They get the dtype
    of the spec if this dtype can represent their value. A value that has a dtype is never cast.

The rule for values that become arrays: all that an array is arrives, or the array is refused by
name. `np.asarray` makes an array of nearly every value, and strips in silence what a plain array
does not have: a mask, the rules of a matrix, the unit of a quantity. Therefore subclasses of
ndarray are refused, with what to do instead. Only np.memmap becomes an array, because it is one
whose memory is a file. An object of another class becomes the array that its `__array__` makes.

Not here: the dtypes that can be sent (wire/arrays.py), and values that do not fit a dtype
(variables/hosted_variable.py).
"""

from __future__ import annotations

import functools
import operator
import reprlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zmqdist import nest
from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import ArgumentTypeError, converted
from zmqdist.tensors import as_array

P = ParamSpec("P")
T = TypeVar("T")


def plain_array(value: Any, subject: str) -> NDArray[Any]:
    """Return a value as an array, without a copy if it is one. The elements of the array may be
    Python objects.

    Args:
      subject: what the value is for, as error texts name it: "variable 'w'".

    Raises:
      InvalidArgumentError: the value is of a subclass of ndarray, or a list that contains one or
        makes no array.
    """
    if type(value) is np.ndarray:
        return value
    try:
        array = np.asarray(as_array(value))
    except ValueError as error:  # for instance, lists of unequal lengths
        raise InvalidArgumentError(f"{subject}: not an array: {error}") from error
    loss = "" if array is value else what_is_lost(value)
    if loss:
        raise InvalidArgumentError(f"{subject}: {loss}")
    return array


def joined(arrays: Sequence[NDArray[Any]], axis: int = 0) -> NDArray[Any]:
    """Return arrays concatenated along an axis. If their dtypes are equal, the result has this
    dtype: NumPy alone would convert it to the byte order of this host, and drop the gaps between
    fields.
    """
    dtype = arrays[0].dtype
    is_uniform = all(array.dtype == dtype for array in arrays)
    result: NDArray[Any] = np.concatenate(arrays, axis, dtype=dtype if is_uniform else None)
    return result


def what_is_lost(value: Any) -> str:
    """Return what `np.asarray(value)` would strip, with what to do instead; "" if it strips
    nothing."""
    cls = type(value)
    if isinstance(value, np.ndarray) and cls not in (np.ndarray, np.memmap):
        return f"a {cls.__module__}.{cls.__qualname__} is more than a plain array: {how_to_make_plain(value)}"
    if cls in (list, tuple) and any(
        issubclass(kind, (np.ndarray, list, tuple)) for kind in set(map(type, value))
    ):
        return next(filter(None, map(what_is_lost, value)), "")
    return ""


def how_to_make_plain(array: NDArray[Any]) -> str:
    """Return what a user can write in place of an array of a subclass of ndarray."""
    if isinstance(array, np.ma.MaskedArray):
        return "array.filled(value) makes a plain array of it, or use array.data and array.mask as two arrays"
    return "np.asarray makes a plain array of it"


@dataclass(frozen=True, slots=True, init=False)
class TensorSpec:
    """The shape and dtype that an array must have, and a name.

    >>> spec = zd.TensorSpec((None, 2), np.float32)
    >>> spec.is_compatible_with(np.zeros((5, 2), np.float32))
    True

    Attributes:
      shape: a tuple of sizes, in which None means any size. If `shape` itself is None, the array
        may have any shape.
      dtype: a numpy dtype. `str` and `bytes` mean strings of any length.
      name: a name for error messages, or None.
    """

    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]
    name: str | None

    def __init__(self, shape: Any, dtype: DTypeLike = np.float32, name: str | None = None) -> None:
        """Raises ValueError if a size is negative or the dtype holds Python objects, and TypeError
        if an argument is no shape or dtype."""
        try:
            np_dtype, sizes = np.dtype(dtype), _shape(shape)
        except TypeError as error:
            raise ArgumentTypeError(
                f"TensorSpec(shape={shape!r}, dtype={dtype!r}): {error}"
            ) from None
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError(f"name is {name!r}, wants a str or None")
        if np_dtype.hasobject:
            raise ValueError(
                f"dtype {np_dtype} holds Python objects, which cannot be sent as arrays"
            )
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", np_dtype)
        object.__setattr__(self, "name", name)

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype}, name={self.name!r})"

    def is_compatible_with(self, array: NDArray[Any] | np.generic) -> bool:
        """Return whether `array` has this dtype, and a shape that fits.

        >>> zd.TensorSpec((2,), np.int64).is_compatible_with(np.zeros(3, np.int64))
        False
        """
        return self.problem(array) is None

    def problem(self, array: NDArray[Any] | np.generic) -> str | None:
        """Return a text that says why `array` does not fit, such as "expected int32 of shape (2,
        None), given ...". None means that it fits.

        >>> zd.TensorSpec((2,), np.int64).problem(np.zeros(3, np.int64))
        'expected int64 of shape (2,), given int64 of shape (3,)'
        """
        if self._fits_dtype(array.dtype) and self._fits_shape(array.shape):
            return None
        where = "" if self.shape is None else f" of shape {self.shape}"
        name = f"{self.name}: " if self.name else ""
        return f"{name}expected {self.dtype}{where}, given {array.dtype} of shape {array.shape}"

    def _fits_dtype(self, dtype: np.dtype[Any]) -> bool:
        if self.dtype == dtype:
            return True
        return self.dtype.itemsize == 0 and self.dtype.kind == dtype.kind and dtype.kind in "SU"

    def _fits_shape(self, shape: tuple[int, ...]) -> bool:
        if self.shape is None:
            return True
        if len(self.shape) != len(shape):
            return False
        return all(
            bound is None or bound == size for bound, size in zip(self.shape, shape, strict=True)
        )


def _shape(shape: Any) -> tuple[int | None, ...] | None:
    if shape is None:
        return None
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    counts = tuple(None if size is None else operator.index(size) for size in sizes)
    if any(size is not None and size < 0 for size in counts):
        raise ValueError(f"a shape has no negative sizes (None for any size), given {counts}")
    return counts


class Function(Generic[P, T]):
    """A callable with the specs of its arguments and of its result, as `function` makes it.

    Attributes:
      input_signature: a structure of `TensorSpec` with one item for each argument. None means that
        it was not declared.
      output_signature: a structure of `TensorSpec` in the form of the result. None means that it
        was not declared.

    The signatures are copies of the arguments of `function`. A Function is pickled by its name if
    this name in its module refers to the Function, unless the module is the main module. Otherwise
    it is pickled together with the callable.
    """

    __name__: str
    __wrapped__: Callable[P, T]

    def __init__(self, func: Callable[P, T], input_signature: Any, output_signature: Any) -> None:
        functools.update_wrapper(self, func)
        self.input_signature = checked_signature("input_signature", input_signature)
        self.output_signature = checked_signature("output_signature", output_signature)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<zmqdist.function {getattr(self, '__qualname__', self.__wrapped__)}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # Pickle by name only if the name refers to this object. The name may refer to the wrapped
        # function, from which `wraps` copied it.
        module = getattr(self, "__module__", None)
        name = getattr(self, "__qualname__", None)
        if name is not None and module not in (None, "__main__", "__mp_main__"):
            value: Any = sys.modules.get(module)
            for part in name.split("."):
                value = getattr(value, part, None)
            if value is self:
                return str(name)
        return super().__reduce_ex__(protocol)


@overload
def function(
    func: Callable[P, T], input_signature: Any = None, output_signature: Any = None
) -> Function[P, T]: ...


@overload
def function(
    func: None = None, input_signature: Any = None, output_signature: Any = None
) -> Callable[[Callable[P, T]], Function[P, T]]: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    output_signature: Any = None,
) -> Any:  # returns a Function, or a decorator that makes a Function
    """Declare the specs of the arguments and of the result of a function:
    `@function(input_signature=[TensorSpec((), np.int32)])`.

    >>> @zd.function(input_signature=[zd.TensorSpec((None,), np.float64)])
    ... def mean(x):
    ...     return x.mean()
    >>> float(mean(np.array([1.0, 3.0])))
    2.0

    Args:
      func: the function. If it is None, `function` returns a decorator.
      input_signature: a list or tuple with a structure of `TensorSpec` for each argument.
      output_signature: a structure of `TensorSpec` in the form of the result.

    Returns:
      A Function that calls `func`. Its calls are not checked against the declaration.

    Raises:
      TypeError: a signature holds a value that is not a TensorSpec, `input_signature` is neither a
        list nor a tuple, or `func` is not callable.
    """
    if input_signature is not None and not isinstance(input_signature, (list, tuple)):
        raise TypeError(
            f"input_signature is a list or tuple with one item for each argument, not "
            f"{type(input_signature).__name__}"
        )
    if func is None:
        checked_signature("input_signature", input_signature)
        checked_signature("output_signature", output_signature)
        return lambda func: function(func, input_signature, output_signature)
    if not callable(func):
        raise TypeError(
            f"function() wraps a callable, not {type(func).__name__}; pass signatures by keyword"
        )
    return Function(func, input_signature, output_signature)


def checked_signature(name: str, signature: Any) -> Any:
    """Return a copy of a signature, or None. Raises TypeError, which names the argument, if a leaf
    is no TensorSpec."""
    if signature is None:
        return None
    for spec in nest.flatten(signature):
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{name} holds TensorSpecs only, not {spec!r}")
    return nest.map_structure(lambda spec: spec, signature)


def convert(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """Return `value` as the array that `spec` describes.

    Python's bool, int, float, complex, str and bytes, alone or in nested lists and tuples, are
    converted to the spec's dtype if this dtype can represent their value. An int must fit. A float
    is rounded, but must not overflow, and is never converted to an integer dtype. All other values
    keep the dtype that `np.asarray` finds.

    Returns:
      An array that may share memory with `value`.

    Raises:
      InvalidArgumentError: `value` does not fit `spec`, or is no array. The message says what does
        not fit.
    """
    array: NDArray[Any] | None
    if type(value) in (int, float) and (spec.shape is None or spec.shape == ()):
        # a shortcut for the usual argument of small calls, ten times as fast
        array = _weak_number(value, spec)
        if array is not None:
            return array
    if not isinstance(value, (np.ndarray, np.generic)) and _is_weak(value):
        array = _weak_array(value, spec)
    else:
        array = plain_array(value, spec.name or "value")
    problem = spec.problem(array)
    if problem is not None:
        raise InvalidArgumentError(problem)
    return array


_WEAK_RANKS = {bool: 0, int: 1, float: 2, complex: 3}
_DTYPE_RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


def _weak_number(value: float, spec: TensorSpec) -> NDArray[Any] | None:
    """Convert an int to an integer dtype that can hold it, or a float between -3e38 and 3e38 to
    float32 or a larger float dtype. Return None in all other cases."""
    dtype = spec.dtype
    if type(value) is int:
        low, high = _int_bounds(dtype)
        return np.array(value, dtype) if low <= value <= high else None
    if dtype.kind == "f" and dtype.itemsize >= 4 and -3e38 < value < 3e38:
        return np.array(value, dtype)
    return None


@functools.lru_cache(maxsize=64)
def _int_bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and the largest int of an integer dtype. For other dtypes, return an
    empty range."""
    if dtype.kind not in "iu":
        return 1, 0
    bounds = np.iinfo(dtype)
    return int(bounds.min), int(bounds.max)


def _is_weak(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_weak, value))
    return type(value) in _WEAK_RANKS or type(value) in (str, bytes)


def _weak_array(value: Any, spec: TensorSpec) -> NDArray[Any]:
    """Convert Python's values to an array. Compare each value with the element of the array,
    because NumPy wraps and truncates silently."""
    name = f"{spec.name}: " if spec.name else ""
    low, high = _int_bounds(spec.dtype)
    for leaf in _leaves(value):
        if not _keeps_kind(leaf, spec.dtype):
            raise InvalidArgumentError(f"{name}expected {spec.dtype}, given {_show(leaf)}")
        if spec.dtype.kind in "iu" and not low <= leaf <= high:
            # NumPy 1 would not raise, but wrap the int around
            raise InvalidArgumentError(
                f"{name}expected {spec.dtype}, which cannot hold {_show(leaf)}"
            )
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            array = np.array(value, dtype=spec.dtype)
    except (OverflowError, ValueError, TypeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(f"{name}expected {spec.dtype}, but {error}") from None
    for original, stored in zip(_leaves(value), array.reshape(-1), strict=True):
        if not _survived(original, stored):
            raise InvalidArgumentError(
                f"{name}expected {spec.dtype}, which cannot hold {_show(original)}"
            )
    return array


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for child in value for leaf in _leaves(child)]
    return [value]


def _show(leaf: Any) -> str:
    try:
        return f"{type(leaf).__name__} {reprlib.repr(leaf)}"
    except ValueError:  # the leaf is an int of more digits than Python converts to text
        return f"{type(leaf).__name__} of {leaf.bit_length()} bits"


def _keeps_kind(leaf: Any, dtype: np.dtype[Any]) -> bool:
    if isinstance(leaf, (str, bytes)):
        return dtype.kind == ("U" if isinstance(leaf, str) else "S")
    rank = _DTYPE_RANKS.get(dtype.kind)
    if rank is None and dtype.isbuiltin == 2:
        # a dtype of another package: find out whether it has fractions
        rank = 2 if dtype.type(0.5) == 0.5 else 1
    return rank is not None and _WEAK_RANKS[type(leaf)] <= rank


def _survived(original: Any, stored: Any) -> bool:
    if isinstance(original, (float, complex)):
        return bool(np.isfinite(stored)) or not np.isfinite(original)
    if isinstance(original, int):
        # compare Python's ints, because NumPy would round `original` before it compares
        part = stored.real if isinstance(stored, np.complexfloating) else stored
        try:
            return int(part) == original
        except OverflowError:  # infinity cannot be converted to an int
            return False
    return bool(original == stored)


@dataclass(frozen=True, slots=True, eq=False)
class IndexedSlices:
    """Some rows of a larger array: `values[i]` belongs to row `indices[i]`. If an index occurs
    several times, its rows are added up.

    >>> slices = zd.IndexedSlices(np.ones((2, 2)), np.array([1, 1]), dense_shape=(3, 2))
    >>> slices.to_dense().tolist()
    [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]

    Attributes:
      values: the rows, shape (n, ...).
      indices: n integers.
      dense_shape: the shape of the larger array. None means that it is not known.
    """

    values: NDArray[Any]
    indices: NDArray[Any]
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the number of indices differs from the number of rows, an index is
        not an integer, or an array is of a subclass of ndarray."""
        values, indices = plain_array(self.values, "values"), plain_array(self.indices, "indices")
        if (
            values.ndim < 1
            or indices.shape != values.shape[:1]
            or (indices.dtype.kind not in "iu" and indices.size)
        ):
            raise ValueError(
                f"values of shape {values.shape} need indices of shape {values.shape[:1]}, whole "
                f"numbers, not {indices!r}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if self.dense_shape is not None:
            object.__setattr__(
                self,
                "dense_shape",
                converted("dense_shape", lambda shape: tuple(map(int, shape)), self.dense_shape),
            )

    def to_dense(self) -> NDArray[Any]:
        """Return a new array of the shape `dense_shape`, with the rows of each index added up.
        Raises ValueError if `dense_shape` is None.

        >>> zd.IndexedSlices(np.array([5]), np.array([1]), dense_shape=(3,)).to_dense().tolist()
        [0, 5, 0]
        """
        if self.dense_shape is None:
            raise ValueError("a dense_shape is needed to make the whole array")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense
