"""Values as the payload of a call or an answer: the safe codec, for anything that lends itself to an array as well.

What lends itself to an array (has `__array__`) travels as one.

Not here: which types travel (wire/safe.py), copies of what may change (snapshots.py), the way of large parts (transport/transfers.py).
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
    """A value as body and large parts. The parts may be views of the arrays in `value`: copy or send them before it changes.

    Raises:
      InvalidArgumentError: something in it does not travel; the message names the place and what is allowed.
    """
    try:
        return safe.encode(value)
    except InvalidArgumentError as error:
        try:
            arrays = nest.map_structure(_as_array, value)
            same = all(new is old for new, old in zip(nest.flatten(arrays), nest.flatten(value), strict=True))
        except (TypeError, RecursionError):
            raise error from None  # keys that cannot be sorted, or nested far too deeply, which `error` says
        if same:
            raise
        return safe.encode(arrays)


def leaves(value: Any) -> list[Any]:
    """The leaves of a structure that is to travel as these.

    Raises:
      InvalidArgumentError: it contains itself, or is nested too deeply to be walked.
    """
    try:
        return nest.flatten(value)
    except RecursionError:
        raise InvalidArgumentError(f"value is nested deeper than {DEPTH_MAX} containers, or contains itself") from None


def unpack(body: bytes, parts: Sequence[Any], peer: str) -> Any:
    """The value in a body and the large parts that came with it. Its arrays are private and writable, or frozen.

    Raises:
      WireError: the bytes are no value.
    """
    return safe.decode(body, parts, peer)


def _as_array(leaf: Any) -> Any:
    if hasattr(leaf, "__array__") and not isinstance(leaf, (np.ndarray, np.generic, type)):
        return np.asarray(leaf)
    return leaf
