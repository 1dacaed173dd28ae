"""How values of other packages are pickled with their memory beside the pickle, as NumPy arrays are:
torch tensors, jax arrays, polars frames, PIL images. pandas and pyarrow do so by themselves.

A package that the program has not imported costs nothing and is not imported. A value that a rule
does not fit (sparse, on another device that cannot be read, a subclass) is pickled by the rule of
its own package. What arrives is of the same type, private and writable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

from zmqdist.errors import FailedPreconditionError

Rule: TypeAlias = "Callable[[Any], tuple[Any, ...]]"

_rules: dict[type, Rule] = {}
"""The rules of the packages that were found to be imported."""


def rules(buffer: Callable[[Any], Any]) -> dict[type, Rule]:
    """Return the rules by type, of the packages that the program has imported. The caller must not
    change them. `buffer` is what makes memory a part beside the pickle."""
    for name in _unseen:
        module = sys.modules.get(name)
        # while another thread still imports it, it lacks names
        if module is not None and hasattr(module, "__version__"):
            _add(name, module, buffer)
    return _rules


def _add(name: str, module: ModuleType, buffer: Callable[[Any], Any]) -> None:
    global _unseen
    try:
        rule_by_type = _PACKAGES[name](module, buffer)
    except (AttributeError, KeyError):  # it is being imported, or a version that is unknown here
        return
    _unseen = tuple(other for other in _unseen if other != name)
    _rules.update(rule_by_type)


# -- torch -----------------------------------------------------------------------------------------


def _torch(torch: Any, buffer: Any) -> dict[type, Rule]:
    def reduce_tensor(tensor: Any) -> tuple[Any, ...]:
        if (
            tensor.layout is not torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or tensor.__dict__
        ):
            return tensor.__reduce_ex__(5)  # type: ignore[no-any-return]
        data = tensor.detach().resolve_conj().resolve_neg()
        if data.device.type == "cuda":
            # the copy to pinned memory is several times as fast
            data = torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)
        last = (
            data.dim() == 4
            and not data.is_contiguous()
            and data.is_contiguous(memory_format=torch.channels_last)
        )
        if last:
            data = data.permute(0, 2, 3, 1)
        memory = data.contiguous().reshape(-1).view(torch.uint8).numpy()
        device = "" if tensor.device.type == "cpu" else str(tensor.device)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _tensor, (
            dtype,
            tuple(data.shape),
            last,
            tensor.requires_grad,
            device,
            buffer(memory),
        )

    return {torch.Tensor: reduce_tensor}


def _tensor(
    dtype: str, shape: tuple[int, ...], last: bool, requires_grad: bool, device: str, buffer: Any
) -> Any:
    """Rebuild a tensor. Pickles refer to this function by its name, so the name is part of the
    protocol."""
    import torch

    memory = np.frombuffer(buffer, np.uint8)
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(memory, dtype=kind) if len(memory) else torch.empty(0, dtype=kind)
    tensor = flat.reshape(shape)
    if last:
        tensor = tensor.permute(0, 3, 1, 2)
    if device:
        if not torch.cuda.is_available() or torch.device(device).index >= torch.cuda.device_count():
            raise FailedPreconditionError(
                f"a tensor of {device} cannot arrive here, because this process has "
                f"{torch.cuda.device_count()} CUDA devices: send tensor.cpu()"
            )
        tensor = tensor.to(device)
    return tensor.requires_grad_(requires_grad)


# -- jax -------------------------------------------------------------------------------------------


def _jax(_jax: Any, _: Any) -> dict[type, Rule]:
    def reduce_array(array: Any) -> tuple[Any, ...]:
        if len(array.devices()) > 1:
            return array.__reduce_ex__(5)  # type: ignore[no-any-return]
        return _jax_array, (np.asarray(array),)

    return {sys.modules["jax._src.array"].ArrayImpl: reduce_array}  # `jax.Array` is its ABC


def _jax_array(values: Any) -> Any:
    """Rebuild an array of jax. Pickles refer to this function by its name."""
    import jax

    return jax.numpy.asarray(values)


# -- polars and PIL --------------------------------------------------------------------------------


def _polars(polars: Any, _: Any) -> dict[type, Rule]:
    def reduce_frame(frame: Any) -> tuple[Any, ...]:
        try:
            return _frame, (type(frame).__name__, frame.to_arrow())
        except ImportError:  # pyarrow is missing
            return frame.__reduce_ex__(5)  # type: ignore[no-any-return]

    return {polars.DataFrame: reduce_frame, polars.Series: reduce_frame}


def _frame(cls: str, table: Any) -> Any:
    """Rebuild a frame or a series of polars. Pickles refer to this function by its name."""
    import polars

    return polars.from_arrow(table)


def _pil(pil: Any, buffer: Any) -> dict[type, Rule]:
    def reduce_image(image: Any) -> tuple[Any, ...]:
        *state, data = image.__getstate__()
        return _image, (state, buffer(data))

    return {pil.Image: reduce_image}


def _image(state: list[Any], buffer: Any) -> Any:
    """Rebuild an image of PIL. Pickles refer to this function by its name."""
    from PIL.Image import Image

    image = Image()
    image.__setstate__([*state, buffer])
    return image


_PACKAGES: Final[dict[str, Callable[[Any, Any], dict[type, Rule]]]] = {
    "torch": _torch,
    "jax": _jax,
    "polars": _polars,
    "PIL.Image": _pil,
}
_unseen: tuple[str, ...] = tuple(_PACKAGES)
