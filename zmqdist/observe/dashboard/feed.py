"""What the pages of a dashboard get: the newest facts, and the events that a page has not seen.

Promises:
  F1  The dispatcher is asked twice a second while at least one page reads, and not at all otherwise.
  F2  A page gets the newest facts whenever it has read the last ones: a slow page skips facts, and
      nothing waits for it in memory. It skips no event of the rings as long as they are kept.
  F3  The rings are bounded, so that a dashboard that stays open for days does not grow.
  F4  If the dispatcher does not answer, pages are told why, and the feed tries again. After its
      restart, pages are told to forget what they have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import islice, takewhile
from typing import Any, Final

import msgspec

from zmqdist import clock as time
from zmqdist.data.service.dispatcher.machine.records import MODES
from zmqdist.errors import OpError, UnimplementedError, describe_exit
from zmqdist.observe.wait_reasons import is_stuck, sentence

POLL_S: Final = 0.5

RINGS: Final = {"timeline": 10_000, "failures": 200, "slot_deaths": 200, "refusals": 100}
"""The lists of events in the facts, and how many events of each a new page gets."""

SENT_MAX: Final = 4_000
"""Events of the timeline in one message to a page. A browser draws these in a few ms."""

OTHER_VERSION: Final = (
    "The dispatcher is of another version of zmqdist: install the same on both ends."
)

Call = Callable[..., Any]


class Feed:
    """The stream of facts for all pages. All methods run in the server's event loop.

    Args:
      call: calls a method of the dispatcher, and blocks until it has the result, at most
        `timeout_s`, or its own time-out if that is 0.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._news = asyncio.Condition()
        self._readers = 0
        self._poller: asyncio.Task[None] | None = None
        self._closed = False
        self._version = 0
        self._run = 0
        self._next = 0
        self._facts: dict[str, Any] = {}
        self._rings = {name: deque[Any](maxlen=most) for name, most in RINGS.items()}
        self._lines: dict[tuple[int, int], bytes] = {}
        """The encoded messages of this version, by what a page has. Most pages have the same."""

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield a line of JSON for each version of the facts, until `close`."""
        self._readers += 1
        version, run, since = 0, 0, 0
        try:
            if self._poller is None or self._poller.done():
                version = self._version  # what was polled before is old
                self._poller = asyncio.create_task(self._poll())
            while True:
                async with self._news:
                    await self._news.wait_for(partial(self._newer, version))
                if self._closed:
                    return
                if run != self._run:
                    run, since = self._run, 0
                version, has, since = self._version, since, self._next
                yield self._line(run, has)
        finally:
            self._readers -= 1

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        """Call a method of the dispatcher, and return its result. Raises OpError."""
        try:
            return await asyncio.to_thread(self._call, method, *arguments, timeout_s=timeout_s)
        except AttributeError:
            raise UnimplementedError(OTHER_VERSION) from None

    async def close(self) -> None:
        """End all streams."""
        self._closed = True
        async with self._news:
            self._news.notify_all()

    def _newer(self, version: int) -> bool:
        return self._closed or self._version != version

    async def _poll(self) -> None:
        while self._readers and not self._closed:
            begin_s = time.monotonic()
            try:
                self._take(await self.ask("facts", self._next, True))
            except OpError as error:
                self._facts = {"problem": str(error)}
            except (LookupError, TypeError):
                self._facts = {"problem": OTHER_VERSION}
            self._version += 1
            self._lines.clear()
            async with self._news:
                self._news.notify_all()
            await asyncio.sleep(max(0.0, begin_s + POLL_S - time.monotonic()))

    def _take(self, record: dict[str, Any]) -> None:
        """Keep the facts, and add their events to the rings."""
        timeline = record.pop("timeline", None) or {"dropped": 0, "events": []}
        restarted = record["next"] < self._next or self._facts.get("pid", 0) != record["pid"]
        if restarted and "pid" in self._facts:
            self._run += 1
            for ring in self._rings.values():
                ring.clear()
        self._next = record["next"]
        record["dropped_events"] = timeline["dropped"]
        for row in record["waiting"]:
            row.update(sentence=sentence(row), stuck=is_stuck(row))
        for row in record["actors"]:
            # a number of 64 bits, which a page would round
            row["name"] = row["name"] or f"{row['actor'] & 0xFFFFFFFF:08x}"
        events = {name: record.pop(name, ()) for name in RINGS if name != "timeline"}
        for name, rows in {**events, "timeline": timeline["events"]}.items():
            self._rings[name].extend(rows)
        for death in (*events["slot_deaths"], *record["losses"]):
            if death["exit_code"] is not None:
                death["how"] = describe_exit(death["exit_code"])
        for row in record["data"]["jobs"]:
            row["mode"] = MODES[row["mode"]] if row["mode"] < len(MODES) else str(row["mode"])
        self._facts = record

    def _line(self, run: int, has: int) -> bytes:
        """Return the message for a page that has the events before number `has`."""
        if (line := self._lines.get((run, has))) is None:
            message = {"run": run, "facts": self._facts}
            for name, ring in self._rings.items():
                newest = takewhile(lambda row: _number(row) >= has, reversed(ring))
                message[name] = [*islice(newest, SENT_MAX)][::-1]
            line = self._lines[run, has] = msgspec.json.encode(message) + b"\n"
        return line


def _number(row: Any) -> int:
    return int(row["seq"] if isinstance(row, dict) else row[0])
