"""Update functions of users, pickled once for all parameter servers, which know them by a digest."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from typing import Any

from zmqdist.errors import InvalidArgumentError
from zmqdist.wire import trusted


@dataclass(frozen=True)
class PackedFunction:
    """A function as it travels."""

    digest: bytes
    blob: bytes = field(repr=False)


class UpdateFunctions:
    """Functions of users, pickled once: what one captures is as it was when it was used first. A pickle lives as long as its function."""

    def __init__(self) -> None:
        self._packed: weakref.WeakKeyDictionary[Any, PackedFunction] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._packed)

    def packed(self, fn: Any) -> PackedFunction:
        """Raises InvalidArgumentError: it cannot be pickled, or called."""
        if not callable(fn):
            raise InvalidArgumentError(f"an update is an optimizer or a function, not {fn!r}")
        try:
            known = self._packed.get(fn)
        except TypeError:  # it cannot be hashed, or referred to weakly
            return _packed(fn)
        if known is None:
            known = self._packed[fn] = _packed(fn)
        return known


def _packed(fn: Any) -> PackedFunction:
    blob = trusted.pack_function(fn)
    return PackedFunction(hashlib.blake2b(blob, digest_size=16).digest(), blob)
