"""The fixed list of workers: which place in `worker_addresses` a worker has.

Rules
    An entry is `host`, `host:1234`, `host:%port%`, `host:%port_name%` or `host:name`, with `proto://` before it or not; an IPv6 host
    stands in brackets, and what is behind the last colon is the port. Without a port, or with `%port%`, it is for any port of its
    host; otherwise for exactly that one, a name being a port like another.

    Each entry has one worker. A worker gets, of those that fit it, the first of
        1. the entry that it has had before
        2. the entry with exactly its port
        3. an entry for any port of its host that is free. Those of workers that have left come before those that nobody has had, because
           the list is filled from its beginning: so one that is started again with another port takes its old place
    A worker that comes back after another has got its entry is one too many.

The state is what was told by `join` and `leave`, and nothing else: the same calls give the same places. Not here: when a worker has left
(membership, lease).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zmqdist.errors import FailedPreconditionError, NotFoundError

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ADDRESS = re.compile(r"(.*):(\w+|%port(?:_\w+)?%)", re.ASCII)


def host_and_port(address: str) -> tuple[str, str]:
    """The two parts of an entry or an address, without the protocol; the port is "" where there is none or any will do."""
    plain = _PROTOCOL.sub("", address, count=1) if _PROTOCOL.match(address) else address
    found = _ADDRESS.fullmatch(plain)
    host, port = found.groups() if found else (plain, "")
    return host, "" if port.startswith("%") else port


@dataclass(slots=True)
class _Place:
    host: str
    port: str
    """"" for any."""
    holder: str = ""
    """The address of the worker that has it, or had it last."""
    present: bool = False


class WorkerList:
    """Who has which place in the list. An empty list knows nobody and refuses nobody.

    Args:
      entries: `worker_addresses` of the dispatcher's configuration.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        self._places = [_Place(*host_and_port(entry)) for entry in self.entries]

    def join(self, worker: str) -> None:
        """A worker with this address has come, or come back.

        Raises:
          FailedPreconditionError: no entry is for it, or those that are have other workers.
        """
        place = self._place_for(worker)
        if place is not None:
            place.holder, place.present = worker, True

    def admit(self, worker: str) -> None:
        """Whether it could `join`; nothing is changed. Raises as `join`."""
        self._place_for(worker)

    def _place_for(self, worker: str) -> _Place | None:
        host, port = host_and_port(worker)
        wishes: list[Callable[[_Place], bool]] = [
            lambda place: place.holder == worker,
            lambda place: (place.host, place.port) == (host, port) and port != "",
            lambda place: place.host == host and not place.port and not place.present,
        ]
        for wish in wishes:
            for place in self._places:
                if wish(place):
                    return place
        if self.entries:
            raise FailedPreconditionError(
                f"Failed to assign an index for worker {worker}. Configured workers list: [{', '.join(self.entries)}]."
                " The worker's address is not configured, or other workers are already running at the configured host."
                " If your worker has restarted, make sure it runs at the same address and port.",
            )
        return None

    def leave(self, worker: str) -> None:
        """It is gone: its entry waits for it, and may go to another of its host. Nothing where it has none."""
        for place in self._places:
            if place.holder == worker:
                place.present = False

    def index_of(self, worker: str) -> int:
        """The place of a worker that has joined, counted from 0: its shard.

        Raises:
          NotFoundError: it has none; nobody has one in an empty list.
        """
        for index, place in enumerate(self._places):
            if place.holder == worker:
                return index
        raise NotFoundError(not_in_list(worker, self.entries))

    def snapshot(self) -> tuple[tuple[str, bool], ...]:
        """The state: of each entry the address of its worker ("" for nobody yet), and whether it is there."""
        return tuple((place.holder, place.present) for place in self._places)

    def restore(self, snapshot: Sequence[Sequence[object]]) -> None:
        """Go on from what `snapshot` gave, perhaps by another process. Of a changed list, what still fits its entry stays."""
        for place, (holder, present) in zip(self._places, snapshot, strict=False):
            host, port = host_and_port(str(holder))
            if host == place.host and place.port in ("", port):
                place.holder, place.present = str(holder), bool(present)


def not_in_list(worker: str, entries: Sequence[str]) -> str:
    """That a worker has no share."""
    return (
        f"Worker {worker} is not in the workers list. Static sharding needs `worker_addresses` in the dispatcher's"
        f" configuration; it is [{', '.join(entries)}]."
    )
