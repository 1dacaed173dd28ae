"""Values as the payload of a call or a reply. The safe codec encodes them; an object with
`__array__` travels as an array.

Not here: the types that may travel (wire/safe.py), copies of arrays that may change (snapshots.py),
how large parts travel (transport/transfers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import DEPTH_MAX
from zmqdist.wire import safe


def pack(value: Any) -> tuple[bytes, list[Any]]:
    """Return the body and the large parts of a value.

    The parts may be views of the arrays in `value`, so copy or send the parts before the arrays
    change.

    Raises:
      InvalidArgumentError: `value` contains an object that cannot travel; the message names the
        place and the allowed types.
    """
    try:
        return safe.encode(value)
    except InvalidArgumentError as error:
        try:
            arrays = nest.map_structure(_as_array, value)
            same = all(
                new is old
                for new, old in zip(nest.flatten(arrays), nest.flatten(value), strict=True)
            )
        except (TypeError, RecursionError):
            # A dict has keys that cannot be sorted, the nesting is too deep, or `__array__` raises.
            # `error` names what cannot travel.
            raise error from None
        if same:
            raise
        return safe.encode(arrays)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, for a call that sends them as a flat list.

    Raises:
      InvalidArgumentError: the structure contains itself, or is nested too deeply.
    """
    try:
        return nest.flatten(value)
    except RecursionError:
        raise InvalidArgumentError(
            f"value is nested deeper than {DEPTH_MAX} levels, or contains itself"
        ) from None


def unpack(body: bytes, parts: Sequence[Any], peer: str) -> Any:
    """Return the value that a body and its large parts encode. Its arrays are either private and
    writable, or frozen.

    Raises:
      WireError: the bytes are not a value.
    """
    return safe.decode(body, parts, peer)


def _as_array(leaf: Any) -> Any:
    if hasattr(leaf, "__array__") and not isinstance(leaf, (np.ndarray, np.generic, type)):
        return np.asarray(leaf)
    return leaf
