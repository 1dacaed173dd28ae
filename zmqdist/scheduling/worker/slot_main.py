"""A slot process: it runs functions one after the other, in the order in which it received them.

The slot shares a page of six numbers with its worker, and a table behind it (run_figures.py):
    POSITION    the position of the item that the slot has begun last; the slot writes this number before the item begins
    GIVEN_UP    the start of a range: the worker has taken back the items after this position, up to the position in GIVEN_UP_TO
    GIVEN_UP_TO the end of that range
    CANCEL      the position of the item that should end early; zmqdist.cancelled() compares this number with POSITION
    INDEX       the index of the worker; the worker writes this number before it sends items
    WORKERS     the number of workers; the worker writes this number together with INDEX

To claim an item the slot reads the range, writes POSITION, and reads the range again. To take items
back the worker writes the range and then reads POSITION. In whatever order these steps happen, at
least one of the two processes sees what the other process has written. An item that the slot does
not begin because of the range is reported as NOT_RUN.

Outcomes are reported when the batch ends, or after FLUSH_S. If a function runs for longer than
FLUSH_S, a second thread reports them.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from bisect import bisect_left
from collections import deque
from typing import Any, Final, TypeAlias

import msgspec

from zmqdist import clock as time
from zmqdist import task_context
from zmqdist.futures import Future
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.messages import BULK, ERROR, KEPT
from zmqdist.platforms import register_at_fork
from zmqdist.scheduling.shared import own_cluster, remote_results, resources
from zmqdist.scheduling.shared.store import HolderClients
from zmqdist.scheduling.worker.function_call import Functions, failure, last_failure, run
from zmqdist.scheduling.worker.run_figures import BEGAN, TABLE_BYTES, Failure, Run, RunTable
from zmqdist.scheduling.worker.worker_cache import SlotFetcher
from zmqdist.scheduling.worker.worker_events import NOT_RUN
from zmqdist.transport.channel import send_gathered
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.pipe import BlockingPipe, PipeCodec
from zmqdist.transport.shm_pool import Handle, Offer, this_pool
from zmqdist.wire import results

log = logging.getLogger("zmqdist.scheduling")

POSITION, GIVEN_UP, GIVEN_UP_TO, CANCEL, INDEX, WORKERS = range(6)
PAGE_BYTES = 4096

_forked: list[bool] = []
"""Not empty in a process that a function has forked from a slot process."""

FLUSH_S = 0.002
"""Seconds after which an outcome is reported although its batch has not ended."""
FLUSH_ITEMS = 256
"""When this many outcomes are collected, they are reported at once, even if their batch has not
ended."""


class _Reporter:
    """Collects outcomes and sends them to the worker, from the main thread or, while a function
    runs there, from a helper thread.

    Attributes:
      outcomes: the outcomes that are not reported yet, by position. Only the main thread appends outcomes,
        without a lock. `flush` removes reported outcomes from the front, with the lock held.
      updates: the updates that functions have left in flight, with their positions, and whether
        errors are packed safely. If an update fails, the function does. The main thread appends one
        before the outcome of its function.
    """

    def __init__(self, pipe: BlockingPipe[SlotMessage], table: RunTable) -> None:
        self._table = table
        self.outcomes: list[tuple[int, int, bytes]] = []
        self.updates: deque[tuple[int, Future, bool]] = deque()
        self._pipe = pipe
        self.pool = this_pool()
        self._lock = threading.Lock()
        self._in_batch = False
        self._busy = threading.Event()
        self._helper: threading.Thread | None = None

    def flush(self, newest: int = 0) -> None:
        """Report the outcomes so far, when the updates that their functions left in flight have
        ended; but no outcome from the position `newest` on, if its function has left an update:
        the request leaves with those of the next function."""
        with self._lock:
            count, table = len(self.outcomes), self._table
            while count and self.updates and self.updates[0][0] <= self.outcomes[count - 1][0]:
                if self.updates[0][0] == newest:
                    count = bisect_left(self.outcomes, (newest,))
                    break
                self._settle(*self.updates[0])
                self.updates.popleft()
            outcomes = self.outcomes[:count]
            if table.failures or table.runs:
                self._pipe.send(SlotReport(outcomes, [], *table.take_reports()))
                del self.outcomes[: len(outcomes)]
            elif outcomes:
                self._pipe.send(SlotReport(outcomes))
                # Drop the outcomes only after `send`. If `send` fails for lack of memory, they must
                # be sent later.
                del self.outcomes[: len(outcomes)]

    def _settle(self, position: int, update: Future, safely: bool) -> None:
        try:
            update.get_value()
        except Exception as error:
            index = bisect_left(self.outcomes, (position,))
            if self.outcomes[index][1] != ERROR:
                self.outcomes[index] = position, *failure(error, safely, unpickling=False)
                self._table.note_failure(position, last_failure.take())

    def send_bulk(self, position: int, kind: int, parts: list[Any]) -> None:
        """Report a large or kept result. Large parts are copied once into shared memory, where
        readers map them. The pipe carries all other parts.
        """
        self.flush()
        handles = [self._lend(part) for part in parts]
        piped = [part for part, handle in zip(parts, handles, strict=True) if handle is None]
        self._pipe.send(SlotReport([(position, kind, b"")], handles), piped)

    def _lend(self, part: Any) -> Handle | None:
        if self.pool is None or memoryview(part).nbytes <= INLINE_BYTES_MAX:
            return None
        block = self.pool.find_frozen(part) or self.pool.copy_in(part)
        return None if block is None else block.lend()

    def begin(self) -> None:
        """Record that a batch of several items begins, so that the helper reports outcomes while a
        later function of the batch runs."""
        if self._helper is None:
            self._helper = threading.Thread(
                target=self._help, name="zmqdist-slot-flush", daemon=True
            )
            self._helper.start()
        self._in_batch = True
        task_context.leave_updates_in_flight(threading.get_ident(), in_batch=True)
        if not self._busy.is_set():
            self._busy.set()

    def end(self) -> None:
        self._in_batch = False
        task_context.leave_updates_in_flight(threading.get_ident())
        self.flush()

    def _help(self) -> None:
        """Report outcomes, and send the requests of updates that are in flight, every FLUSH_S while
        batches run. If several batches begin in quick
        succession, only the first wakes this thread."""
        newest = 0
        while self._busy.wait():
            time.sleep(FLUSH_S)
            self._busy.clear()
            if self._in_batch:
                # read this after `clear`: else a batch that begins in between would be missed
                self._busy.set()
            try:
                send_gathered()
                # an update that was the newest already has been on its way for FLUSH_S
                before, newest = newest, max((each[0] for each in list(self.updates)), default=0)
                self.flush(newest if newest != before else 0)
            except OSError:
                return
            except BaseException:
                # such as MemoryError: the outcomes stay here, and the next flush sends them
                log.exception("outcomes could not be reported to the worker; trying again")


class _WorkerLink:
    """The slot's questions to its worker about the item that runs (`own_cluster.ItemLink`). Between
    two batches only the main thread reads the pipe; during a batch the thread that asks does.
    """

    def __init__(
        self, pipe: BlockingPipe[SlotMessage], reporter: _Reporter, cells: memoryview
    ) -> None:
        self._pipe = pipe
        self._reporter = reporter
        self._cells = cells
        self._asking = threading.Lock()
        self._in_batch = False
        self._unread: deque[SlotMessage] = deque()
        """The messages that arrived before the answer to a question."""

    def next_message(self) -> SlotMessage:
        """Wait for the next message that is no answer. Only the main thread calls this."""
        with self._asking:
            self._in_batch = False
        message = self._unread.popleft() if self._unread else self._pipe.receive()[0]
        self._in_batch = True
        return message

    def position(self) -> int:
        return self._cells[POSITION] if self._in_batch and not _forked else 0

    def lease(self, position: int) -> int:
        return self._ask(SlotAsks(position, waits=False)).lease

    def wait(self, position: int) -> str:
        return self._ask(SlotAsks(position, waits=True)).refusal

    def resume(self, position: int) -> None:
        self._pipe.send(SlotGoesOn(position))

    def _ask(self, question: SlotAsks) -> SlotAnswer:
        with self._asking:
            if not self._in_batch:
                return SlotAnswer(0)  # the function of a thread that is left has ended
            self._reporter.flush()  # the worker must know that the items before have ended
            self._pipe.send(question)
            while not isinstance(message := self._pipe.receive()[0], SlotAnswer):
                self._unread.append(message)
            return message


def main(pipe_fd: int, page_fd: int) -> None:
    """Run items until the worker has closed the pipe. Does not return."""
    register_at_fork(after_in_child=_after_fork)
    page = mmap.mmap(page_fd, PAGE_BYTES + TABLE_BYTES)
    cells = memoryview(page)[:PAGE_BYTES].cast("Q")
    table = RunTable(page, PAGE_BYTES)
    pipe = BlockingPipe(pipe_fd, SLOT_CODEC)
    reporter = _Reporter(pipe, table)
    task_context.leave_updates_in_flight(threading.get_ident())
    task_context.enter_process(
        lambda: cells[CANCEL] == cells[POSITION] != 0, lambda: (cells[INDEX], cells[WORKERS])
    )
    try:
        pipe.send(SlotStarted(os.getpid(), None if reporter.pool is None else reporter.pool.offer))
        welcome, _ = pipe.receive()
        assert isinstance(welcome, SlotWelcome)
        credentials = Credentials.from_environment()
        fetcher = SlotFetcher(HolderClients(credentials, "worker"), welcome.worker, welcome.key)
        link = _WorkerLink(pipe, reporter, cells)
        own = own_cluster.of_slot(welcome.dispatcher, credentials, link)
        own_cluster.enter(own, whole_process=True)
        remote_results.of_thread.fetcher = fetcher
        functions = Functions(fetcher)
        resources.use_resources(functions.resources)
        while not isinstance(message := link.next_message(), SlotEnd):
            assert isinstance(message, SlotWork)
            functions.define(message.functions)
            _run_batch(message.items, cells, functions, reporter, table)
            functions.forget(message.forget)
            table.forget(message.forget)
    except (EOFError, OSError):
        pass
    finally:
        _flush_output()
        os._exit(0)


def _after_fork() -> None:
    _forked.append(True)
    task_context.leave_updates_in_flight(0)


def _run_batch(
    items: list[tuple[int, int, int, bytes]],
    cells: memoryview,
    functions: Functions,
    reporter: _Reporter,
    table: RunTable,
) -> None:
    if len(items) > 1:
        reporter.begin()
    outcomes = reporter.outcomes
    seconds, watches_runs = table.seconds, table.watches_runs
    of_coordinator = of_fn = failed = bytes_in = bytes_out = 0
    fetched_bytes = functions.fetched_bytes
    durations: list[float] = []
    now = time.monotonic()
    flush_at = now + FLUSH_S
    for position, coordinator, fn, payload in items:
        if not _claim(position, cells):
            outcomes.append((position, NOT_RUN, b""))
            continue
        if fn != of_fn or coordinator != of_coordinator:
            if durations:
                table.add(of_coordinator, of_fn, durations, failed, bytes_in, bytes_out, now)
                durations = []
                failed = bytes_in = bytes_out = 0
            of_coordinator, of_fn = coordinator, fn
        seconds[BEGAN] = began = now
        kind, result = run(functions, coordinator, fn, payload)
        if (update := task_context.take_update()) is not None:
            reporter.updates.append((position, update, payload[:1] == results.SAFE))
        if _forked:
            os._exit(0)  # the function forked this child, which must not use its parent's pipe
        now = time.monotonic()
        durations.append(now - began)
        bytes_in += len(payload)
        if watches_runs and (watches_runs := table.may_report_run(now, items[-1][0] - position)):
            table.runs.append((position, began, now, kind))
        if kind in (BULK, KEPT):
            bytes_out += sum(memoryview(part).nbytes for part in result)
            reporter.send_bulk(position, kind, result)
            now = time.monotonic()
            continue
        bytes_out += len(result)
        if kind == ERROR:
            failed += 1
            table.note_failure(position, last_failure.take())
        outcomes.append((position, kind, result))
        if len(outcomes) >= FLUSH_ITEMS or now > flush_at:
            reporter.flush(newest=position)
            now = time.monotonic()
            flush_at = now + FLUSH_S
    if durations:
        bytes_in += functions.fetched_bytes - fetched_bytes
        table.add(of_coordinator, of_fn, durations, failed, bytes_in, bytes_out, now)
    reporter.end()


def _claim(position: int, cells: memoryview) -> bool:
    if cells[GIVEN_UP] < position <= cells[GIVEN_UP_TO]:
        return False
    before = cells[POSITION]
    cells[POSITION] = position
    if cells[GIVEN_UP] < position <= cells[GIVEN_UP_TO]:
        cells[POSITION] = before
        return False
    return True


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


class SlotWork(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Worker to slot: new functions (coordinator, fn, pickled), items (position, coordinator, fn,
    payload), and functions to forget."""

    functions: list[tuple[int, int, bytes]]
    items: list[tuple[int, int, int, bytes]]
    forget: list[tuple[int, int]]


class SlotReport(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Slot to worker: outcomes (position, kind, payload). A bulk outcome is alone in its message,
    which also has the parts of the result.

    `failures` and `runs` are for the facts (run_figures.py). A part is a handle in the slot's shared
    memory, or None if its bytes follow the message in the
    pipe, in the order of `parts`.
    """

    outcomes: list[tuple[int, int, bytes]]
    parts: list[Handle | None] = []
    failures: list[Failure] = []
    runs: list[Run] = []


class SlotStarted(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Slot to worker: the slot process has started. `memory` tells how to open the slot's shared
    memory; None without shared memory."""

    pid: int
    memory: Offer | None = None


class SlotWelcome(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Worker to slot, the first message: the address and the public key of the worker, and the
    address of its dispatcher.
    """

    worker: str
    key: bytes = b""
    dispatcher: str = ""


class SlotAsks(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Slot to worker: the function at `position` asks for its lease and, with `waits`, whether it
    may wait for results of other work. The worker replies with a SlotAnswer."""

    position: int
    waits: bool


class SlotAnswer(msgspec.Struct, array_like=True, tag=6, gc=False):
    """Worker to slot: the lease of the item; 0 if the worker has dropped it. `refusal` says why the
    function may not wait."""

    lease: int
    refusal: str = ""


class SlotGoesOn(msgspec.Struct, array_like=True, tag=7, gc=False):
    """Slot to worker: the function at `position` does not wait any more."""

    position: int


class SlotEnd(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Worker to slot: end, because this extra slot is not needed."""


SlotMessage: TypeAlias = (
    SlotWork | SlotReport | SlotStarted | SlotWelcome | SlotAsks | SlotAnswer | SlotGoesOn | SlotEnd
)

SLOT_CODEC: Final[PipeCodec[SlotMessage]] = PipeCodec(
    msgspec.msgpack.Encoder().encode,
    msgspec.msgpack.Decoder(SlotMessage).decode,
    "the result of a function at its worker",
)
