"""Update functions of users, pickled once for all parameter servers, which know them by a digest."""

from __future__ import annotations

import hashlib
import threading
import weakref
from typing import Any

from zmqdist.errors import InvalidArgumentError
from zmqdist.wire import trusted


class UpdateFunctions:
    """Functions of users, pickled once: what one captures is as it was when it was used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()
        self._blobs: dict[bytes, bytes] = {}

    def digest(self, fn: Any) -> bytes:
        """Raises InvalidArgumentError: it cannot be pickled, or called."""
        if not callable(fn):
            raise InvalidArgumentError(None, None, f"an update is an optimizer or a function, not {fn!r}")
        try:
            known = self._digests.get(fn)
        except TypeError:  # it cannot be hashed, or referred to weakly
            return self._pickled(fn)
        if known is None:
            known = self._digests[fn] = self._pickled(fn)
        return known

    def _pickled(self, fn: Any) -> bytes:
        blob = trusted.pack_function(fn)
        digest = hashlib.blake2b(blob, digest_size=16).digest()
        with self._lock:
            self._blobs[digest] = blob
        return digest

    def blob(self, digest: bytes) -> bytes:
        return self._blobs[digest]
