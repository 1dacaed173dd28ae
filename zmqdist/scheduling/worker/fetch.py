"""Fetching the parts of a payload from whoever holds them.

Rules
    A part in shared memory of this host is mapped: no byte moves, and the holder is not asked.
    Else it is the answer to one call of the holder, received into memory that was allocated once; or,
    where that cannot be reached from here (a laptop behind a router), it is read piece by piece by the dispatcher over the holder's own
    connection, as much at a time as the link carries soon (transport/pace.py).
    What moves is waited for, on any link. A holder from which nothing has come for STALLED_S is taken for gone.
    What comes back is the caller's own: writable, but for the memory of frozen arrays.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist import errors
from zmqdist.limits import BULK_WINDOW_BYTES, CHUNK_BYTES
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.future import StatusOrResult
from zmqdist.scheduling.worker.references import Held, Reference
from zmqdist.scheduling.worker.store import READ
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.pace import Pace
from zmqdist.transport.shm_peer import PeerPool, open_peer

log = logging.getLogger("zmqdist.scheduling")

RELAY = "zmqdist_bulk_relay"
"""Method of the dispatcher: (store, bulk, offset, length) -> the bytes, read from the holder."""

STALLED_S = 20.0
"""A holder that sends nothing for so long is taken for gone."""

LOOK_S = 1.0
"""Between two looks whether something has come, and is still wanted."""

REACH_S = 3.0
"""A holder that does not answer a first small question for so long cannot be reached from here."""

UNREACHABLE_S = 60.0
"""So long it is not tried again."""

CLIENTS_KEPT = 8
"""Connections that a process keeps to those it fetched from: four descriptors each."""

PEER_POOLS_KEPT = 64
"""Processes whose shared memory is kept open: a descriptor and a page table each."""


class Near:
    """Shared memory of the holders on this host, kept open. Any thread may use it."""

    def __init__(self) -> None:
        self._peer_pools: OrderedDict[int, PeerPool | None] = OrderedDict()

    def __len__(self) -> int:
        """How many holders' memory is open."""
        return sum(peer_pool is not None for peer_pool in list(self._peer_pools.values()))

    def attach(self, reference: Reference) -> list[Any]:
        """The parts; those that are not to be had here are still `Held`."""
        return [self._part(reference, part) if isinstance(part, Held) else part for part in reference.parts]

    def _part(self, reference: Reference, part: Held) -> Any:
        peer_pool = self._peer_pool(reference) if part.handle is not None else None
        if peer_pool is None or part.handle is None:
            return part
        try:
            return peer_pool.attach(part.handle)
        except errors.OpError as error:  # the holder has freed it, or has ended: asking it tells
            log.debug("part %d of %s: %s", part.bulk, reference.address, error)
            return part

    def _peer_pool(self, reference: Reference) -> PeerPool | None:
        if reference.store not in self._peer_pools:
            for store, peer_pool in list(self._peer_pools.items()):
                if peer_pool is not None and not peer_pool.alive:
                    self._peer_pools.pop(store, None)  # its memory goes with what we still have of it
            self._peer_pools[reference.store] = self._open(reference)
            if len(self._peer_pools) > PEER_POOLS_KEPT:
                self._peer_pools.popitem(last=False)
        return self._peer_pools.get(reference.store)

    def _open(self, reference: Reference) -> PeerPool | None:
        """Process and descriptor numbers mean something else on another host: the nonce tells."""
        if reference.memory is None:
            return None
        *offer, nonce = reference.memory
        peer_pool = open_peer((offer[0], offer[1], offer[2]))
        return peer_pool if peer_pool is not None and peer_pool.nonce == nonce else None


class HolderClients:
    """Connections to holders, one for each address. Any thread may use them.

    Those that nobody uses are kept for the next payload, but not many: coordinators and workers come and go.

    Args:
      role: what this process is to the holders: "worker" or "submit".
    """

    def __init__(self, credentials: Credentials, role: str) -> None:
        self._credentials = credentials
        self._role = role
        self._lines: dict[tuple[str, bytes], Holder] = {}
        self._unreachable: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        """How many connections are kept."""
        return len(self._lines)

    @property
    def unreachable(self) -> list[str]:
        """Addresses at which no holder answered lately: they are not tried again for a while."""
        now = time.monotonic()
        with self._lock:
            return [address for address, until in self._unreachable.items() if until > now]

    def close(self) -> None:
        """End all clients; who uses one gets an error, and so does who comes later."""
        with self._lock:
            self._closed = True
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.client.close()

    @contextmanager
    def use(self, address: str, key: bytes = b"") -> Iterator[Holder]:
        """A connection for the time of the with-statement. After an error the next one begins with a new connection.

        Args:
          key: the public key that the holder told with its address; empty for a server.

        Raises:
          Unreachable: nobody answers at that address.
          UnauthenticatedError: `key` is not of this cluster, or what listens there has another.
        """
        place = address, key
        with self._lock:
            if self._closed:
                raise errors.UnavailableError("this process has closed its connections")
            if self._unreachable.get(address, 0.0) > time.monotonic():
                raise Unreachable(f"nobody answers at {address}")
            line = self._lines.pop(place, None)
            if line is None:
                security = self._credentials.client(address, self._role, key)
                line = Holder(ZmqClient(address, security=security))
            self._lines[place] = line  # the longest unused are at the front
            line.users += 1
        try:
            self._reach(line, address)
            yield line
        except BaseException:
            with self._lock:
                if self._lines.get(place) is line:
                    del self._lines[place]
            raise
        finally:
            with self._lock:
                line.users -= 1
                ended = [] if self._lines.get(place) is line or line.users else [line]
                idle = [name for name, other in self._lines.items() if not other.users]
                ended += [self._lines.pop(name) for name in idle[: max(0, len(self._lines) - CLIENTS_KEPT)]]
            for each in ended:
                each.client.close()

    def _reach(self, line: Holder, address: str) -> None:
        if line.reached:
            return
        try:
            internal_client.reach(line.client, time.monotonic() + REACH_S)
        except internal_client.NotListeningError:  # a holder listens before anybody hears of it: this one has ended
            raise Unreachable(f"nobody answers at {address}: the connection was refused") from None
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            raise self._missed(address, error.message) from None
        line.reached = True

    def _missed(self, address: str, why: str) -> Unreachable:
        """Nobody answers, and for a while nobody is asked."""
        with self._lock:
            self._unreachable[address] = time.monotonic() + UNREACHABLE_S
        log.warning(
            "the data port %s cannot be reached from %s (%s): for the next %g s large payloads of its process come by the dispatcher, "
            "which is slower; open that port between the two hosts",
            address,
            socket.gethostname(),
            why,
            UNREACHABLE_S,
        )
        return Unreachable(f"nobody answers at {address}: {why}")


class Unreachable(errors.UnavailableError):
    """The holder cannot be reached from here; perhaps from elsewhere."""


class Holder:
    """A connection to one holder, or to the dispatcher.

    Attributes:
      users: threads that use it at present.
      reached: it was there once.
    """

    def __init__(self, client: ZmqClient) -> None:
        self.client = client
        self.users = 0
        self.reached = False


class Fetcher:
    """Fetches for one process. Any thread may use it.

    Args:
      role: what this process is to the holders: "worker" or "submit".
      dispatcher: its address, for what cannot be reached from here.
    """

    def __init__(self, credentials: Credentials, role: str, dispatcher: str) -> None:
        self.near = Near()
        self.clients = HolderClients(credentials, role)
        self._dispatcher = dispatcher

    def close(self) -> None:
        self.clients.close()

    def fetch(self, reference: Reference, wanted: Callable[[], bool] = lambda: True) -> list[Any]:
        """The parts of a payload; they stay with their holder until that frees them.

        Args:
          wanted: whether somebody still waits for them; called now and then.

        Raises:
          CancelledError: `wanted` has said no.
          NotFoundError: the holder has freed it.
          UnavailableError: the holder has gone, or cannot be reached, not even by the dispatcher.
          DeadlineExceededError: it does not answer any more.
        """
        parts = self.near.attach(reference)
        far = [index for index, part in enumerate(parts) if isinstance(part, Held)]
        if far:
            places = [np.empty(parts[index].size, np.uint8) for index in far]
            self.read(reference, [parts[index] for index in far], places, wanted)
            for index, place in zip(far, places, strict=True):
                parts[index] = place
        return parts

    def read(
        self,
        reference: Reference,
        held: Sequence[Held],
        into: Sequence[NDArray[np.uint8]],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read these parts into arrays of their sizes. Raises as `fetch`."""
        try:
            with self.clients.use(reference.address, reference.key) as holder:
                read_parts(holder.client, held, into, wanted)
                return
        except Unreachable as error:
            unreachable = error
        try:
            with self.clients.use(self._dispatcher) as holder:
                _read_by_relay(holder.client, reference.store, held, into)
        except errors.NotFoundError:
            raise
        except errors.OpError as error:
            problem = f"{unreachable.message}; and by the dispatcher: {error.message}"
            raise errors.UnavailableError(problem) from None


def read_parts(
    client: ZmqClient,
    held: Sequence[Held],
    into: Sequence[NDArray[np.uint8]],
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Read parts from their holder, each by one call whose answer is received where it belongs.

    Raises:
      OpError: what a call ended with.
      DeadlineExceededError: nothing has come for STALLED_S.
      CancelledError: `wanted` has said no.
    """
    calls = [
        internal_client.start(client, READ, part.bulk, out=place, waits_for_server=False)
        for part, place in zip(held, into, strict=True)
    ]
    try:
        for call in calls:
            _wait(client, call, wanted)
            call.get_value()
    finally:
        for call in calls:
            call.cancel()


def _wait(client: ZmqClient, call: StatusOrResult, wanted: Callable[[], bool]) -> None:
    """Wait until the call has ended. The time is reckoned in looks: while this process is stopped it does not count."""
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    received, silent_s = -1, 0.0
    while not ended.wait(LOOK_S):
        if not wanted():
            raise errors.CancelledError("nobody waits for this payload any more")
        received, before = client.snapshot().messages_received, received
        silent_s = 0.0 if received != before else silent_s + LOOK_S
        if silent_s >= STALLED_S:
            raise errors.DeadlineExceededError(f"nothing has come from {client.address} for {STALLED_S:g} s")


def _read_by_relay(client: ZmqClient, store: int, held: Sequence[Held], into: Sequence[NDArray[np.uint8]]) -> None:
    """Have the dispatcher read parts piece by piece. Raises what a call ended with."""
    pace = Pace(BULK_WINDOW_BYTES, CHUNK_BYTES)
    on_the_way: deque[tuple[int, StatusOrResult]] = deque()
    for part, whole in zip(held, into, strict=True):
        offset = 0
        while offset < part.size:
            place = whole[offset : offset + pace.chunk_bytes]
            if not pace.fits(place.nbytes):
                nbytes, call = on_the_way.popleft()
                call.get_value()
                pace.acknowledged(nbytes, time.monotonic())
                continue
            pace.sent(place.nbytes, time.monotonic())
            due = time.monotonic() + STALLED_S
            call = internal_client.start(client, RELAY, store, part.bulk, offset, place.nbytes, due=due, out=place)
            on_the_way.append((place.nbytes, call))
            offset += place.nbytes
    for _, call in on_the_way:
        call.get_value()
