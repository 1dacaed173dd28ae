"""How values of other packages are pickled with their memory beside the pickle, as NumPy arrays are:
torch tensors, jax arrays, polars frames, PIL images. pandas and pyarrow do so by themselves.

A package that the program has not imported costs nothing and is not imported. A value that a rule
does not fit (sparse, on another device that cannot be read, a subclass) is pickled by the rule of
its own package, whose parts (indices, storages) follow the rules here. What arrives is of the same
type, private and writable.

Not here: tensors as arrays, and back, for what does not pickle (tensors.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from zmqdist import tensors
from zmqdist.errors import FailedPreconditionError

Rule: TypeAlias = "Callable[[Any], tuple[Any, ...]]"

_rules: dict[type, Rule] = {}
"""The rules of the packages that were found to be imported."""
_modules_seen = 0
"""The number of imported modules when all packages were last looked for."""


def rules(buffer: Callable[[Any], Any]) -> dict[type, Rule]:
    """Return the rules by type, of the packages that the program has imported. The caller must not
    change them. `buffer` is what makes memory a part beside the pickle."""
    if len(sys.modules) != _modules_seen:
        _look(buffer)
    return _rules


def _look(buffer: Callable[[Any], Any]) -> None:
    global _unseen, _modules_seen
    count = len(sys.modules)
    for name in _unseen:
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            _rules.update(_PACKAGES[name](module, buffer))
        except (AttributeError, KeyError):  # another thread imports it, or its version is unknown
            count = 0
        else:
            _unseen = tuple(other for other in _unseen if other != name)
    _modules_seen = count


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

    def reduce_storage(storage: Any) -> tuple[Any, ...]:
        untyped = storage._untyped_storage  # its public name warns
        if untyped.device.type != "cpu":
            return storage.__reduce__()  # type: ignore[no-any-return]
        data = torch.empty(0, dtype=torch.uint8).set_(untyped)
        return _storage, (str(storage.dtype).removeprefix("torch."), buffer(data.numpy()))

    # a tensor of a subclass is pickled with its storage
    return {torch.Tensor: reduce_tensor, torch.TypedStorage: reduce_storage}


def _storage(dtype: str, buffer: Any) -> Any:
    """Rebuild the storage of tensors. Pickles refer to this function by its name."""
    import torch

    memory = _tensor("uint8", (memoryview(buffer).nbytes,), False, False, "", buffer)
    return torch.TypedStorage(  # type: ignore[no-untyped-call, unused-ignore]
        wrap_storage=memory.untyped_storage(), dtype=getattr(torch, dtype), _internal=True
    )


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
        # NumPy's arrays have no weak types
        if len(array.devices()) > 1 or array.weak_type:
            return array.__reduce_ex__(5)  # type: ignore[no-any-return]
        return _jax_array, (np.asarray(array),)

    return {sys.modules["jax._src.array"].ArrayImpl: reduce_array}  # `jax.Array` is its ABC


def _jax_array(values: Any) -> Any:
    """Rebuild an array of jax. Pickles refer to this function by its name."""
    return tensors.jax_array(values)


# -- polars and PIL --------------------------------------------------------------------------------


def _polars(polars: Any, _: Any) -> dict[type, Rule]:
    def reduce_frame(frame: Any) -> tuple[Any, ...]:
        is_series = isinstance(frame, polars.Series)
        columns = frame.to_frame() if is_series else frame
        try:
            if polars.Object not in columns.dtypes:  # its memory has addresses of objects
                return _frame, (is_series, columns.to_arrow())
        except ImportError:  # pyarrow is missing
            pass
        return frame.__reduce_ex__(5)  # type: ignore[no-any-return]

    return {polars.DataFrame: reduce_frame, polars.Series: reduce_frame}


def _frame(is_series: bool, table: Any) -> Any:
    """Rebuild a frame or a series of polars. Pickles refer to this function by its name."""
    import polars

    frame: Any = polars.from_arrow(table)
    return frame.to_series(0) if is_series else frame


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
