"""The fixed list of workers. It assigns each worker an entry of `worker_addresses`. The index of
the entry is the worker's static shard.

Rules
    An entry is `host`, `host:1234`, `host:%port%`, `host:%port_name%` or `host:name`, with or
    without `proto://` before it. An IPv6 host is written in brackets. The text after the last colon
    is the port. An entry without a port, or with `%port%`, fits any port of its host. Every other
    entry fits exactly its port, and a name counts as a port.

    Each entry has at most one worker. A worker gets the first entry in this order that fits it:
        1. the entry that it has had before
        2. the entry with exactly its port
        3. a free entry for any port of its host. The entries of workers that have left come before
           unused entries, because the list is filled from its beginning. A worker that was started
           again with another port therefore gets its old entry.
    If a worker returns after another worker has got its entry, the returning worker gets another
    entry that fits. If no entry fits, the worker is refused.

The assignment depends only on the calls of `join` and `leave` and their order.
Not here: the decision that a worker has gone (membership, lease).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from zmqdist.errors import FailedPreconditionError, NotFoundError

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ADDRESS = re.compile(r"(.*):(\w+|%port(?:_\w+)?%)", re.ASCII)


def host_and_port(address: str) -> tuple[str, str]:
    """Return (host, port) of an entry or an address, without the protocol. The port is "" if the
    entry has no port or fits any port."""
    plain = _PROTOCOL.sub("", address, count=1) if _PROTOCOL.match(address) else address
    match = _ADDRESS.fullmatch(plain)
    host, port = match.groups() if match else (plain, "")
    return host, "" if port.startswith("%") else port


class _Place(msgspec.Struct):
    host: str
    port: str
    """The port of the entry. The empty string fits any port."""
    holder: str = ""
    """The address of the worker that has the entry, or had it last."""
    present: bool = False


class WorkerList:
    """The entries of the fixed list, and the worker of each entry. A list without entries refuses
    no worker, and gives no worker an index.

    Args:
      entries: `worker_addresses` of the dispatcher's configuration.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        self._holders = [_Place(*host_and_port(entry)) for entry in self.entries]

    def join(self, worker: str) -> None:
        """Give the worker with this address an entry. Call it when the worker registers, for the
        first time or again.

        Raises:
          FailedPreconditionError: no entry fits the worker, or other workers have all entries that
            would fit.
        """
        entry = self._place_for(worker)
        if entry is not None:
            entry.holder, entry.present = worker, True

    def admit(self, worker: str) -> None:
        """Check that a worker could `join`, and change nothing. Raises as `join` does."""
        self._place_for(worker)

    def _place_for(self, worker: str) -> _Place | None:
        host, port = host_and_port(worker)
        wishes: list[Callable[[_Place], bool]] = [
            lambda entry: entry.holder == worker,
            lambda entry: (entry.host, entry.port) == (host, port) and port != "",
            lambda entry: entry.host == host and not entry.port and not entry.present,
        ]
        for wish in wishes:
            for entry in self._holders:
                if wish(entry):
                    return entry
        if self.entries:
            raise FailedPreconditionError(
                f"Failed to assign an index for worker {worker}. Configured workers list: "
                f"[{', '.join(self.entries)}]."
                " The worker's address is not configured, or other workers are already running at "
                "the configured host."
                " If your worker has restarted, make sure it runs at the same address and port.",
            )
        return None

    def leave(self, worker: str) -> None:
        """Record that a worker has gone. When the worker joins again it gets its entry back, unless
        another worker of its host has taken the entry. Does nothing for a worker without an entry.
        """
        for entry in self._holders:
            if entry.holder == worker:
                entry.present = False

    def index_of(self, worker: str) -> int:
        """Return the index of a worker's entry, counted from 0.

        Raises:
          NotFoundError: the worker has no entry. In an empty list no worker has an entry.
        """
        for index, entry in enumerate(self._holders):
            if entry.holder == worker:
                return index
        raise NotFoundError(not_in_list(worker, self.entries))

    def snapshot(self) -> tuple[tuple[str, bool], ...]:
        """Return the state for `restore`: for each entry, the address of its worker or "", and
        whether that worker is present."""
        return tuple((entry.holder, entry.present) for entry in self._holders)

    def restore(self, snapshot: Sequence[Sequence[object]]) -> None:
        """Continue from a state that `snapshot` returned, perhaps in another process. If the list
        has changed meanwhile, a worker keeps its index only if the entry that now has this index
        fits the worker.
        """
        for entry, (holder, present) in zip(self._holders, snapshot, strict=False):
            host, port = host_and_port(str(holder))
            if host == entry.host and entry.port in ("", port):
                entry.holder, entry.present = str(holder), bool(present)


def not_in_list(worker: str, entries: Sequence[str]) -> str:
    """Return the error text for a worker without an entry, which has no static shard."""
    return (
        f"Worker {worker} is not in the workers list. Static sharding needs `worker_addresses` in "
        f"the dispatcher's"
        f" configuration; it is [{', '.join(entries)}]."
    )
