"""The runtime of a data service's dispatcher. The runtime serves the data service's methods on the
dispatcher's port, and carries out the machine's effects.

Rules
    The writer thread stores datasets and reads their definitions for `definition`, and the
    journal's thread writes the journal. Everything else runs in the loop thread. No thread waits
    until a reply can be sent, because the machine keeps a token for each pending call. Callers need
    the role `worker` or `submit`.

Methods. Each name has the prefix "zmqdist.data.". The argument `state` is the number of the
dispatcher's state. Where "or None" stands, a reply of None asks the caller to send the request
again.
    register(request, id, description, metadata, on_conflict)   -> (id, whether it belongs to another pipeline)
    metadata(id)                                                 -> metadata
    config()                                                     -> {"deployment_mode"}
    definition(fingerprint)                                      -> description
    open(request, job_name, repetition, terms, consumer, saved, reader, again)
                                                                 -> (client, iteration, state, cut)
    watch(state, client, version, target_s, stopped, lost)       -> (version, tasks, finished, hold, ended, failed) or None
    acknowledge(state, client, marks)                            -> None
    missed(state, client, incarnation)                           -> None
    release(state, client)                                       -> None
    work(state, incarnation, has, done, figures)                 -> (state, new tasks, tasks to drop) or None
    splits(state, task, incarnation, source, request, repetition, count)   -> (start, length)
    portions(state, task, incarnation, client, request, count)   -> portions: see data/service/dispatcher/machine/events.py
    crashed(state, task, incarnation, how)                       -> None
    hand_back(state, task, incarnation, source, request, repetition, runs) -> None
    leave(incarnation)                                           -> None
    compression(id, off)                                         -> whether AUTO is off

Not here: the decisions (machine/), the files (journal.py, store.py).
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from zmqdist.data.service.dispatcher.journal import Journal
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine, not_registered
from zmqdist.data.service.dispatcher.machine.records import Number
from zmqdist.data.service.dispatcher.machine.snapshot import (
    DataSnapshot,
    DataTaskRow,
    SnapshotStreamRow,
    data_tasks,
    iteration_rows,
    next_numbers,
)
from zmqdist.data.service.dispatcher.machine.state import decode_state
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.data.service.dispatcher.store import DatasetStore
from zmqdist.data.service.snapshots.service import SnapshotService
from zmqdist.data.service.validation import checked
from zmqdist.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.events import Ticked
from zmqdist.limits import CONSUMERS_MAX, JOURNAL_RECORDS_MAX
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.loop import Loop

if TYPE_CHECKING:
    from zmqdist.data.splits import PortionRules
    from zmqdist.data.tree import Tree

log = logging.getLogger("zmqdist.data")

Parsed = TypeVar("Parsed")

PREFIX: Final = "zmqdist.data."
ROLES: Final = frozenset({"worker", "submit"})

READ_AGAIN_S: Final = 1.0

REQUESTS: Final[dict[str, Callable[..., ev.Request]]] = {
    "watch": ev.WatchRequest,
    "release": ev.ReleaseRequest,
    "acknowledge": ev.AcknowledgeRequest,
    "missed": ev.MissedRequest,
    "work": ev.WorkRequest,
    "portions": ev.PortionsRequest,
    "splits": ev.SplitsRequest,
    "crashed": ev.CrashReport,
    "hand_back": ev.HandBackRequest,
    "leave": ev.LeaveRequest,
    "compression": ev.CompressionRequest,
}
"""The methods whose arguments are the fields of a request of the machine."""


class DataDispatcher:
    """The data service of a dispatcher. The docstring of the module lists its methods."""

    def __init__(
        self,
        service: RpcService,
        loop: Loop,
        rules: Rules,
        work_dir: str | None,
        snapshots_max: int = 3,
    ) -> None:
        """Register the methods on `service`, which must not be attached to a server yet. With fault
        tolerance, continue from the journal in `work_dir`.

        Args:
          snapshots_max: the largest number of distributed snapshots that one worker writes at the
            same time.

        Raises:
          DataLossError, FailedPreconditionError, ResourceExhaustedError: the journal cannot be
            used, for a reason that journal.py gives.
        """
        self._loop = loop
        self._rules = rules
        self._due = inf
        self._datasets = DatasetStore(work_dir)
        self._sources: dict[str, tuple[int, ...]] = {}
        self._grains: dict[str, PortionRules] = {}
        self._writer = ThreadPoolExecutor(1, "zmqdist-datasets")
        self.machine = DataDispatcherMachine(rules, secrets.randbits(62) | 1, loop.now())
        note = self._note_snapshot if rules.fault_tolerant else None
        self.snapshots = SnapshotService(service, loop, note, snapshots_max, rules.worker_timeout_s)
        self._journal: Journal | None = None
        self._journaled = 0
        self._held_events: list[ev.Event] | None = None
        """The events WorkerJoined and WorkerGone that wait until the journal can be read again;
        None while the journal works."""
        if rules.fault_tolerant:
            assert work_dir is not None
            self._journal = Journal(work_dir)
            try:
                self._recover(self._journal)
                self.snapshots.recover(self.machine.state.snapshots)
            except BaseException:
                self._journal.close()
                raise
        elif work_dir is not None:
            log.info(
                "%s holds the datasets; without fault_tolerant_mode a restart of the dispatcher "
                "does not recover jobs",
                work_dir,
            )
        methods: dict[str, Callable[..., None]] = {
            "register": self._register,
            "metadata": self._metadata,
            "config": self._config,
            "definition": self._definition,
            "open": self._open,
        }
        for name, fn in methods.items():
            service.register_later(PREFIX + name, checked(name, fn), roles=ROLES)
        for name, kind in REQUESTS.items():
            make = partial(self._make_request, kind)
            service.register_later(PREFIX + name, checked(name, make, kind), roles=ROLES)
        loop.on_stop(self._close)

    # -- the journal -------------------------------------------------------------------------------

    def _recover(self, journal: Journal) -> None:
        """Load the machine's state from the journal. If the journal is empty, write the new state
        to it, because readers recognize the state by a random number that must be the same after a
        restart.
        """
        if self._read(journal):
            log.info("recovered from %s: %d jobs", journal.path, len(self.machine.state.jobs))
            self._set_timer()
            return
        results: queue.SimpleQueue[OpError | None] = queue.SimpleQueue()
        journal.compact(r.encode(self.machine.state), results.put)
        error = results.get()
        if error is not None:
            raise error

    def _read(self, journal: Journal) -> bool:
        """Load the machine's state from the journal. Return False if the journal is empty."""
        snapshot, records = journal.load()
        self._journaled = len(records)
        try:
            state = None if snapshot is None else decode_state(snapshot)
            changes = [r.decode(record) for record in records]
        except msgspec.DecodeError as error:
            raise DataLossError(
                f"{journal.path}: corrupted record: Failed to parse journal record: {error}"
            ) from error
        try:
            self.machine.restore(state, changes, self._loop.now())
        except (LookupError, ValueError, AssertionError) as error:
            raise DataLossError(
                f"{journal.path}: corrupted record: it does not fit the records before it: "
                f"{error!r}"
            ) from error
        return state is not None

    def _reload(self) -> None:
        """Load the journal's state again after a failed commit. While the journal cannot be read
        either, refuse all requests."""
        assert self._journal is not None
        events = self._held_events or []
        try:
            self._read(self._journal)
        except OpError as error:
            log.error(
                "%s; the data service refuses requests until its journal can be read", error.message
            )
            self._held_events = events
            self._loop.set_timer((self, "journal"), self._loop.now() + READ_AGAIN_S, self._reload)
            return
        self._held_events = None
        for event in events:
            self.handle(event)
        self._set_timer()

    def _write(self, records: tuple[bytes, ...]) -> None:
        """Have the journal write a group of records. When the journal has JOURNAL_RECORDS_MAX
        records, have it write the whole state in place of them.
        """
        assert self._journal is not None
        self._journaled += len(records)
        # a longer journal would make a restart slow
        if self._journaled < JOURNAL_RECORDS_MAX:
            self._journal.append(records, self._written)
        else:
            self._journaled = 0
            self._journal.compact(r.encode(self.machine.state), self._written)

    def _written(self, error: OpError | None) -> None:
        """Report to the machine that a commit has succeeded or failed. The journal calls this in
        its own thread."""
        event = (
            ev.JournalCommitted()
            if error is None
            else ev.JournalFailed(error.error_code, error.message)
        )
        with suppress(OpError):  # the dispatcher has stopped, so no caller waits for this commit
            self._loop.call_soon(self.handle, event)

    # -- events and effects ------------------------------------------------------------------------

    def admit(self, address: str) -> None:
        """Raise an OpError if the list of the workers that may register has no room for this
        address."""
        self.machine.admit(address)

    def joined(
        self, name: str, address: str, incarnation: int, tags: tuple[str, ...], named: bool
    ) -> None:
        """Record that a worker has registered. `named` tells whether it was started with its index.
        Call this in the loop thread."""
        self.handle(ev.WorkerJoined(name, address, incarnation, tags, named))
        self.snapshots.joined(incarnation, address)

    def lost(self, incarnation: int, left: bool) -> None:
        """Record that a worker is lost. `left` tells whether the worker has stopped in good order
        and will not come back. Call this in the loop thread.
        """
        self.handle(ev.WorkerGone(incarnation, left))
        self.snapshots.lost(incarnation)
        if not left and (count := self.machine.waiting_for(incarnation)):
            log.warning(
                "a worker is lost and may come back: %d tasks wait for it for %g s "
                "(worker_timeout_ms)",
                count,
                self._rules.worker_timeout_s,
            )

    def _note_snapshot(self, token: Any, path: str) -> None:
        self.handle(ev.NoteSnapshotRequest(token, path))

    def status(self) -> dict[str, Any]:
        """Return the figures for `zmqdist status`: a row for each iteration that has not ended, and
        how many workers would be enough for all readers.
        """
        figures = self.machine.figures
        return {"jobs": figures.rows(), "workers_enough": figures.optimal()}

    def tasks_of(self, worker: str) -> tuple[DataTaskRow, ...]:
        """Return the unfinished tasks of the worker with this name ("worker:1"). Call this in the
        loop thread."""
        present = frozenset(row.name for row in self.machine.place_rows() if row.connected)
        return data_tasks(self.machine.state, worker, present)

    def streams_of(self, worker: str) -> tuple[SnapshotStreamRow, ...]:
        """Return the snapshot streams that a worker ("worker:1") writes. Call this in the loop
        thread."""
        connected = {
            row.name: row.incarnation for row in self.machine.place_rows() if row.connected
        }
        moves = bool(connected.keys() - {worker})
        written = self.snapshots.written_by(connected[worker]) if worker in connected else {}
        return tuple(SnapshotStreamRow(path, stream, moves) for path, stream in written.items())

    def task_counts(self) -> dict[str, int]:
        """Return the number of unfinished tasks and snapshot streams of each worker, by the
        worker's name. Call this in the loop thread."""
        state = self.machine.state
        open_tasks = [task.worker for task in state.tasks.values() if not task.is_over]
        counts = Counter(
            state.workers[number].name for number in open_tasks if number in state.workers
        )
        for row in self.machine.place_rows():
            counts[row.name] += len(self.snapshots.written_by(row.incarnation))
        return {name: count for name, count in counts.items() if count}

    def snapshot(self) -> DataSnapshot:
        """Return a record of jobs, iterations, readers, workers and the journal. Call this in the
        loop thread."""
        state = self.machine.state
        return DataSnapshot(
            state=state.number,
            datasets=len(state.datasets),
            jobs=tuple(job.name for job in state.jobs.values()),
            iterations=iteration_rows(state),
            tasks=len(state.tasks),
            clients=len(state.clients),
            workers=self.machine.place_rows(),
            saves=tuple(state.snapshots),
            next_numbers=next_numbers(state),
            checks_count=self.machine.checks_count,
            journal="none"
            if self._journal is None
            else "kept"
            if self._held_events is None
            else "unreadable",
            journal_records=self._journaled,
        )

    def handle(self, event: ev.Event) -> None:
        """Have the machine handle an event, and carry out the effects that the machine returns.
        Call this in the loop thread."""
        if self._held_events is not None:
            self._hold(event)
            return
        self._perform(self.machine.handle(event, self._loop.now()))

    def _hold(self, event: ev.Event) -> None:
        assert self._held_events is not None
        assert self._journal is not None
        # membership reports these once, so keep them; callers repeat their requests
        if isinstance(event, ev.WorkerJoined | ev.WorkerGone):
            self._held_events.append(event)
        elif not isinstance(event, Ticked | ev.CallerGone | ev.JournalCommitted | ev.JournalFailed):
            error = UnavailableError(f"the dispatcher cannot read its journal {self._journal.path}")
            event.token.fail(error)  # type: ignore[attr-defined]

    def _perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.ReplyToRequest(token, value):
                    token.reply(value)  # type: ignore[attr-defined]
                case ev.FailRequest(token, code, message):
                    token.fail(from_code(code, message))  # type: ignore[attr-defined]
                case ev.CommitJournal(records):
                    self._write(records)
                case ev.Reload():
                    self._reload()
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.machine.deadline
        # most events do not move the deadline
        if due != self._due:
            self._due = due
            self._loop.set_timer(self, due, self._tick)

    def _tick(self) -> None:
        self._due = inf
        self.handle(Ticked())

    def _make_request(self, kind: Callable[..., ev.Request], call: PendingCall, *args: Any) -> None:
        self._handle_request(call, kind(call, *args))

    def _handle_request(self, call: PendingCall, event: ev.Request) -> None:
        call.on_dropped(partial(self.handle, ev.CallerGone(call)))
        self.handle(event)

    # -- methods -----------------------------------------------------------------------------------

    def _config(self, call: PendingCall) -> None:
        call.reply({"deployment_mode": self._rules.deployment_mode})

    def _register(
        self,
        call: PendingCall,
        request: Number,
        id: str | None,
        description: str,
        metadata: str,
        on_conflict: Literal["keep", "error", "replace"],
    ) -> None:
        if not isinstance(json.loads(metadata), dict):
            raise ValueError(f"the metadata of a dataset is a JSON object, not {metadata[:80]!r}")
        self._writer.submit(self._store, call, request, id, description, metadata, on_conflict)

    def _store(
        self,
        call: PendingCall,
        request: int,
        id: str | None,
        description: str,
        metadata: str,
        on_conflict: str,
    ) -> None:
        """Write the description of a dataset to a file, and then register the dataset, so that no
        record of the journal names a missing file. Runs in the writer thread.
        """
        try:
            dataset = _dataset(description)
            fingerprint = dataset.fingerprint()
            self._datasets.put(fingerprint, description)
        except BaseException as error:
            call.fail(error)
            return
        event = ev.RegisterRequest(call, request, id, fingerprint, metadata, on_conflict)
        with suppress(OpError):  # the loop refuses the call if the dispatcher has ended
            self._loop.call_soon(self._handle_stored, call, event)

    def _handle_stored(self, call: PendingCall, event: ev.Request) -> None:
        """Handle the registration of a dataset whose description is stored. This runs outside of
        the RPC handler, so an error has to be sent to the caller explicitly.
        """
        try:
            self._handle_request(call, event)
        except Exception as error:
            call.fail(error)
            raise

    def _metadata(self, call: PendingCall, id: str) -> None:
        call.reply(self._dataset(id).metadata)

    def _dataset(self, id: str) -> r.DatasetEntry:
        dataset = self.machine.state.datasets.get(id)
        if dataset is None:
            raise NotFoundError(not_registered(id))
        return dataset

    def _definition(self, call: PendingCall, fingerprint: str) -> None:
        self._writer.submit(self._send_definition, call, fingerprint)

    def _send_definition(self, call: PendingCall, fingerprint: str) -> None:
        try:
            call.reply(self._datasets.get(fingerprint))
        except BaseException as error:
            call.fail(error)

    def _open(
        self,
        call: PendingCall,
        request: Number,
        job_name: str | None,
        repetition: Number,
        terms: r.Terms,
        consumer: Number,
        saved: ev.SavedRequest | None,
        reader: Number,
        again: bool,
    ) -> None:
        _check_terms(terms)
        fingerprint = self._dataset(terms.dataset).fingerprint
        sources: tuple[int, ...] = ()
        grain = None
        if terms.mode == r.DYNAMIC:
            sources = self._parsed(self._sources, fingerprint, _source_counts)
        if terms.portioned:
            from zmqdist.data.splits import portion_rules

            grain = self._parsed(self._grains, fingerprint, portion_rules)
        unnamed = f"anonymous_job_{self.machine.state.next_job}_{secrets.token_hex(4)}"
        event = ev.OpenRequest(
            call,
            request,
            job_name,
            repetition,
            terms,
            sources,
            unnamed,
            consumer,
            grain,
            saved,
            reader,
            again,
        )
        self._handle_request(call, event)

    def _parsed(
        self, results: dict[str, Parsed], fingerprint: str, read: Callable[[Tree], Parsed]
    ) -> Parsed:
        """Return what `read` returns for a dataset. The result is kept in `results`, because
        parsing a description of megabytes takes long."""
        if fingerprint not in results:
            results[fingerprint] = read(_dataset(self._datasets.get(fingerprint)))
        return results[fingerprint]

    def _close(self) -> None:
        self._writer.shutdown(wait=False)
        if self._journal is not None:
            self._journal.close()


def _dataset(description: str) -> Tree:
    # here, because it imports all operations, and most dispatchers serve no dataset
    from zmqdist.data.dataset import deserialize

    return deserialize(description)


def _source_counts(dataset: Tree) -> tuple[int, ...]:
    from zmqdist.data.splits import split_providers

    return tuple(provider.count for provider in split_providers(dataset))


def _check_terms(terms: r.Terms) -> None:
    """Raise InvalidArgumentError if no job can have these terms."""
    is_valid = (
        0 <= terms.mode < len(r.MODES)
        and 0 <= terms.num_consumers <= CONSUMERS_MAX
        and terms.delivery in (r.AT_MOST_ONCE, r.EXACTLY_ONCE)
    )
    if not is_valid:
        raise InvalidArgumentError(
            f"no job can have the terms {terms}: a mode is 0 to {len(r.MODES) - 1}, num_consumers "
            f"at most {CONSUMERS_MAX}",
        )
