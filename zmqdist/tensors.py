"""Tensors of torch and arrays of jax as NumPy arrays, and back, for what takes arrays (elements,
variables) and for RPC, whose codec does not pickle. Nothing here imports these packages: a program
with such a value has imported them.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import FailedPreconditionError

BEYOND_NUMPY: Final = frozenset(
    {
        "bfloat16",
        "complex32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)
"""Dtypes of torch that NumPy lacks. The package ml_dtypes has most of them."""


def described(value: Any) -> tuple[str, str, NDArray[Any]] | None:
    """Return a tensor of torch or an array of jax as (package, dtype, array); None for any other
    value. The array shows the tensor's memory, or is a copy of that of a device. The dtype is one
    of BEYOND_NUMPY, whose numbers are unsigned integers in the array, or "".

    Raises:
      ValueError: the tensor is sparse, quantized, or of a dtype that no array can show; the text
        says what to do.
    """
    if type(value).__module__.startswith("jaxlib") and hasattr(value, "devices"):
        return "jax", "", np.asarray(value)
    torch: Any = sys.modules.get("torch")
    kind: Any = getattr(torch, "Tensor", ())  # missing while another thread imports torch
    if not isinstance(value, kind):
        return None
    if value.layout is not torch.strided or value.is_quantized:
        how = "dequantize()" if value.is_quantized else "to_dense()"
        raise ValueError(f"no plain tensor: tensor.{how} makes one")
    dtype = str(value.dtype).removeprefix("torch.")
    data = value.detach().cpu().resolve_conj().resolve_neg()
    if dtype in BEYOND_NUMPY:
        return "torch", dtype, data.view(getattr(torch, f"uint{8 * data.itemsize}")).numpy()
    try:
        return "torch", "", data.numpy()
    except TypeError:
        raise ValueError(
            f"a tensor of {value.dtype}: tensor.float() makes one of numbers"
        ) from None


def as_array(value: Any) -> Any:
    """Return a tensor as an array, without a copy if it is in the memory of the processor, and any
    other value as it is. Raises ValueError as `described` does, or if the dtype needs the package
    ml_dtypes, which is not installed."""
    tensor = None if type(value) is np.ndarray else described(value)
    return value if tensor is None else _array(tensor[1], tensor[2])


def tensor_of(package: str, dtype: str, array: NDArray[Any]) -> Any:
    """Return what `described` has described: a tensor if this process has imported the package,
    otherwise an array. Raises ValueError if there is no such tensor."""
    module: Any = sys.modules.get(package) if package in ("torch", "jax") else None
    if dtype and dtype not in BEYOND_NUMPY:
        raise ValueError(f"no dtype of tensors: {dtype[:40]!r}")
    try:
        if module is None or not hasattr(module, "Tensor" if package == "torch" else "Array"):
            return _array(dtype, array)
        if package == "jax":
            return jax_array(array)
        tensor = module.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.view(getattr(module, dtype)) if dtype else tensor
    except (FailedPreconditionError, TypeError, RuntimeError) as error:
        raise ValueError(f"no tensor of {package}: {error}") from None


def jax_array(values: NDArray[Any]) -> Any:
    """Return an array of jax, which shows the memory of `values` where jax can, so that no other
    code may use them. Raises FailedPreconditionError if jax would shorten the numbers."""
    import jax

    array = jax.device_put(values, may_alias=True)
    if array.dtype != values.dtype:
        raise FailedPreconditionError(
            f"an array of {values.dtype} of jax cannot arrive here, because this process has "
            "disabled 64-bit types: set JAX_ENABLE_X64=1"
        )
    return array


def _array(dtype: str, array: NDArray[Any]) -> NDArray[Any]:
    if not dtype:
        return array
    try:
        import ml_dtypes

        return array.view(getattr(ml_dtypes, dtype))
    except (ImportError, AttributeError):
        raise ValueError(f"a tensor of {dtype}, which NumPy lacks: install ml_dtypes") from None
