"""The cache of a worker: the parts of arguments that it has fetched for its slots, so that each
part is sent to the worker only once.

A slot maps a part that is in shared memory of its host. It requests any other part from its worker.
The worker fetches the part once into its own store, and replies with a reference to this copy. The
worker keeps fetched parts while it has work, at most about WORKER_CACHE_BYTES_MAX bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zmqdist import errors
from zmqdist.limits import WORKER_CACHE_BYTES_MAX
from zmqdist.scheduling.shared.references import Held, Reference, decode_reference, encode_reference
from zmqdist.scheduling.shared.store import (
    BulkStore,
    Fetcher,
    HolderClients,
    LocalMemories,
    read_parts,
)
from zmqdist.transport.shm_pool import this_pool

FETCH_FOR_SLOT = "zmqdist_bulk_pull"
"""Each worker's RPC method for its slots: (encoded reference to a payload) -> reference to a copy
of the payload in the worker's store."""

TRIES = 3
"""How often a slot tries to map a part. The worker may drop the part, to make room for other parts,
before the slot has mapped it."""


class WorkerCache:
    """The parts that one worker has fetched. Any thread may call the methods.

    Attributes:
      fetches: the number of parts that were fetched so far.
      nbytes: the bytes of the parts that are in the cache or being fetched.
    """

    def __init__(self, store: BulkStore, fetcher: Fetcher) -> None:
        self.fetches = 0
        self.nbytes = 0
        self._store = store
        self._fetcher = fetcher
        self.clients = fetcher.clients
        self._parts: OrderedDict[tuple[int, int], Future[Held]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of parts that are in the cache or being fetched."""
        return len(self._parts)

    def fetch_for_slot(self, payload: bytes) -> bytes:
        """Serve the RPC method FETCH_FOR_SLOT. Blocks until all parts have arrived. Raises the
        errors of `Fetcher.fetch`."""
        reference = decode_reference(payload)
        parts = tuple(
            self._part(reference, part) if isinstance(part, Held) else part
            for part in reference.parts
        )
        return encode_reference(
            Reference(  # this reference names the copies in this worker's store
                self._store.number,
                self._store.address,
                self._store.memory,
                parts,
                key=self._store.key,
            )
        )

    def fetch(self, reference: Reference) -> list[Any]:
        """Return the parts of a payload to a slot that is a thread of this process. Raises the
        errors of `Fetcher.fetch`."""
        parts = self._fetcher.memories.attach(reference)
        for index, part in enumerate(parts):
            if isinstance(part, Held):
                parts[index] = self._copy_of(reference, part)
        return parts

    def _copy_of(self, reference: Reference, part: Held) -> NDArray[np.uint8]:
        for _ in range(TRIES):
            copy = self._part(reference, part)
            try:
                whole: NDArray[np.uint8] = self._store.view(copy.bulk).copy()
                return whole
            except errors.NotFoundError:
                # the cache has dropped the part meanwhile, to make room for other parts
                continue
        buffer = np.empty(part.size, np.uint8)
        self._fetcher.read(reference, [part], [buffer])
        return buffer

    def drop(self) -> None:
        """Drop all parts, because the worker has no work. Slots that have mapped a part keep their
        mapping."""
        with self._lock:
            futures, self._parts = list(self._parts.values()), OrderedDict()
            self.nbytes = 0
        for future in futures:
            future.add_done_callback(self._free)

    def _part(self, reference: Reference, part: Held) -> Held:
        if reference.store == self._store.number:
            # the part belongs to a value that this worker keeps, so it need not be fetched
            return part
        key = (reference.store, part.bulk)
        with self._lock:
            future = self._parts.get(key)
            mine = future is None
            if future is None:
                future = self._parts[key] = Future()
                self.nbytes += part.size
            self._parts.move_to_end(key)
        if mine:
            self._fetch(reference, part, future, key)
            self._trim()
        # no time limit is needed, because a fetch fails when nothing arrives for STALLED_S
        return future.result()

    def _fetch(
        self, reference: Reference, part: Held, future: Future[Held], key: tuple[int, int]
    ) -> None:
        try:  # other threads wait for `future`, so every path must settle it
            pool = this_pool()
            block = None if pool is None else pool.allocate(part.size)
            buffer = np.empty(part.size, np.uint8) if block is None else block.array()
            self._fetcher.read(reference, [part], [buffer])
            copy = self._store.keep(buffer if block is None else block)
        except BaseException as error:
            with self._lock:
                if self._parts.get(key) is future:
                    del self._parts[key]
                    self.nbytes -= part.size
            future.set_exception(error)
            return
        self.fetches += 1
        future.set_result(copy)

    def _trim(self) -> None:
        old: list[Future[Held]] = []
        with self._lock:
            while self.nbytes > WORKER_CACHE_BYTES_MAX and len(self._parts) > 1:
                key = next((key for key, future in self._parts.items() if future.done()), None)
                if key is None:
                    break
                future = self._parts.pop(key)
                self.nbytes -= future.result().size
                old.append(future)
        for future in old:
            self._free(future)

    def _free(self, future: Future[Held]) -> None:
        if future.exception() is None:
            self._store.free([future.result().bulk])


class SlotFetcher:
    """Fetches payloads in a slot process, from shared memory if possible, otherwise through the
    worker.

    Args:
      worker: the address of the worker.
      key: the worker's public key; empty without CURVE.
    """

    def __init__(self, clients: HolderClients, worker: str, key: bytes = b"") -> None:
        self._memories = LocalMemories()
        self.clients = clients
        self._worker = worker, key

    def fetch(self, reference: Reference) -> list[Any]:
        """Return the parts of a payload. Blocks as `Fetcher.fetch` does, and raises its errors."""
        parts = self._memories.attach(reference)
        for attempt in range(TRIES):
            if not any(isinstance(part, Held) for part in parts):
                return parts
            try:
                parts = self._by_worker(reference, parts)
            except errors.NotFoundError:
                if attempt == TRIES - 1:
                    raise
        return parts

    def _by_worker(self, reference: Reference, parts: list[Any]) -> list[Any]:
        far = [index for index, part in enumerate(parts) if isinstance(part, Held)]
        missing = msgspec.structs.replace(
            reference, parts=tuple(reference.parts[index] for index in far)
        )
        parts = list(parts)
        with self.clients.use(*self._worker) as holder:
            (reply,) = holder.client.call(FETCH_FOR_SLOT, (encode_reference(missing),)).get_value()
            for index, part in zip(
                far, self._memories.attach(decode_reference(reply)), strict=True
            ):
                parts[index] = part
                if isinstance(part, Held):
                    parts[index] = np.empty(part.size, np.uint8)
                    read_parts(holder.client, [part], [parts[index]])
        return parts
