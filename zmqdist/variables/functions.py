"""Users' update functions. A function is pickled once for all parameter servers, which identify it
by the digest of the pickle."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from typing import Any

from zmqdist.errors import InvalidArgumentError
from zmqdist.wire import trusted


@dataclass(frozen=True)
class PackedFunction:
    """A pickled function and its digest."""

    digest: bytes
    blob: bytes = field(repr=False)


class UpdateFunctions:
    """A cache of pickled functions. A function is pickled at its first use, so its pickle has the
    values that the function captured then. The cache drops a pickle when its function is
    garbage-collected.
    """

    def __init__(self) -> None:
        self._packed: weakref.WeakKeyDictionary[Any, PackedFunction] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._packed)

    def packed(self, fn: Any) -> PackedFunction:
        """Return the pickle of a function with its digest. Raises InvalidArgumentError if `fn` is
        not callable or cannot be pickled."""
        if not callable(fn):
            raise InvalidArgumentError(f"an update is an optimizer or a function, not {fn!r}")
        try:
            known = self._packed.get(fn)
        except TypeError:  # `fn` cannot be hashed or weakly referenced, so it cannot be cached
            return _packed(fn)
        if known is None:
            known = self._packed[fn] = _packed(fn)
        return known


def _packed(fn: Any) -> PackedFunction:
    blob = trusted.pack_function(fn)
    return PackedFunction(hashlib.blake2b(blob, digest_size=16).digest(), blob)
