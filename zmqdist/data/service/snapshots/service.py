"""The distributed snapshots of a dispatcher: the RPC methods, and the replies to pending requests.

Rules
    Threads of this service read and write the folders, so that a slow disk does not delay the loop
    thread. The loop thread never takes the lock of a snapshot, because another thread may hold this
    lock while it writes a change. Only the loop thread uses the tables of workers and of pending
    requests.

    Each worker always has one request "streams" pending, which lists the streams that the worker
    writes. The service replies when the worker should write other streams. At most one stream in
    the reply is new to the worker.

    The dispatcher records a snapshot in its journal after the folder was created, and assigns the
    snapshot's streams after the record was written.

Methods (each name has the prefix "zmqdist.data."; `incarnation` is the incarnation of the calling worker)
    save(request, path, description, spec, compression)                      -> None
    streams(incarnation, has)                                                -> {path: stream}, or None to have the request sent again
    positions(incarnation, path, stream, source, repetition, taken, count)   -> (start, length)
    stream_ended(incarnation, path, stream, code, message)                   -> None
    snapshot_wait(path)                                                      -> (code, message) at the end; code 0 means complete
    snapshot_progress(path)                                                  -> figures, see machine.py
    snapshot_streams(path)                                                   -> [(index, owner, state)]
    snapshot_cancel(path)                                                    -> None

Not here: the decisions (machine.py), the folder (manager.py), the writing (worker.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

from zmqdist.data import snapshot_layout, storage
from zmqdist.data.service.dispatcher.machine.records import Number
from zmqdist.data.service.snapshots.machine import SnapshotMode, StreamAssignment
from zmqdist.data.service.snapshots.manager import SnapshotFolder, SnapshotManager
from zmqdist.data.service.validation import checked
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.data.snapshots")

PREFIX: Final = "zmqdist.data."
ROLES: Final = frozenset({"worker", "submit"})

THREADS: Final = 4
"""Number of threads that write files. There are several, because each waits for the disk."""

NOT_TOLERANT: Final = (
    "tf.data distributed snapshot requires running tf.data service in the fault tolerant mode."
)


class SnapshotService:
    """Serves the snapshots of a data service's dispatcher. The docstring of the module lists the
    methods.

    Args:
      note: `note(token, path)` records a snapshot in the journal, and then calls `token.reply` or
        `token.fail`. None means that there is no journal, so that the service refuses snapshots.
      concurrent_max: the largest number of streams that one worker writes at the same time.
      owner_return_s: seconds within which the owner of a stream has to register after a restart of
        the dispatcher, to keep the stream.
    """

    def __init__(
        self,
        service: RpcService,
        loop: Loop,
        note: Callable[[Any, str], None] | None,
        concurrent_max: int,
        owner_return_s: float,
    ) -> None:
        """Register the methods on `service`, which must not be attached to a server yet."""
        self._loop = loop
        self._note = note
        self._owner_return_s = owner_return_s
        self._snapshots = SnapshotManager(concurrent_max)
        self._addresses: dict[int, str] = {}
        self._pending: dict[int, tuple[PendingCall, dict[str, int]]] = {}
        self._written: dict[int, dict[str, int]] = {}
        """Maps the incarnation of a worker to the streams that the worker should write, by the path
        of their snapshot."""
        self._waiting: dict[str, list[PendingCall]] = {}
        self._version = 0
        self._pool = ThreadPoolExecutor(THREADS, "zmqdist-snapshots")
        self._maker = ThreadPoolExecutor(1, "zmqdist-snapshot-maker")
        for name, fn in self._methods().items():
            service.register_later(PREFIX + name, checked(name, fn), roles=ROLES)
        loop.on_stop(self._close)

    def _methods(self) -> dict[str, Callable[..., None]]:
        return {
            "save": self._save,
            "streams": self._streams,
            "positions": self._positions,
            "stream_ended": self._end_stream,
            "snapshot_wait": self._wait,
            "snapshot_progress": self._progress,
            "snapshot_streams": self._list_streams,
            "snapshot_cancel": self._cancel,
        }

    def recover(self, paths: Iterable[str]) -> None:
        """Continue the snapshots that the journal lists. Call this before the server starts.

        If a folder no longer has a snapshot, leave the snapshot out with a warning, because a
        folder that a user has moved or removed must not prevent the start of the dispatcher.

        Raises:
          InvalidArgumentError, InternalError, DataLossError: the content of a folder is invalid
            (see `SnapshotFolder.recover`).
        """
        there: list[str] = []
        for path in paths:
            if storage.exists(storage.join(path, snapshot_layout.METADATA)):
                there.append(path)
            else:
                log.warning(
                    "%s: the folder has no snapshot, although the journal lists one; the "
                    "dispatcher leaves it out",
                    path,
                )
        for snapshot in self._pool.map(SnapshotFolder.recover, there):
            self._snapshots.add(snapshot)
            log.info("recovered the snapshot %s: %s", snapshot.path, snapshot.machine.mode.value)
        if there:
            self._loop.set_timer(
                (self, "owners"),
                self._loop.now() + self._owner_return_s,
                self._forget_missing_owners,
            )

    def streams(self, path: str) -> list[StreamAssignment]:
        """Return the streams of a snapshot. Do not call it in the loop thread, because it waits
        while a change of the snapshot is written.

        Raises:
          NotFoundError: the dispatcher has no snapshot at this path.
        """
        return self._snapshots[path].streams()

    def written_by(self, incarnation: int) -> dict[str, int]:
        """Return the streams that a worker writes, by the path of their snapshot. Call this in the
        loop thread."""
        return self._written.get(incarnation, {})

    # -- workers -----------------------------------------------------------------------------------

    def joined(self, incarnation: int, address: str) -> None:
        """Record that a worker has registered."""
        self._addresses[incarnation] = address

    def lost(self, incarnation: int) -> None:
        """Record that a worker is lost. Its streams go to the workers that request streams first,
        which may be the lost worker after it has registered again.
        """
        address = self._addresses.pop(incarnation, None)
        self._pending.pop(incarnation, None)
        self._written.pop(incarnation, None)
        if address is not None and address not in self._addresses.values():
            self._forget_owners(lambda: {address})

    def _forget_missing_owners(self) -> None:
        """Mark as orphans the streams whose owners have not registered since the restart of the
        dispatcher."""
        present = set(self._addresses.values())
        self._forget_owners(
            lambda: (
                {owner for snapshot in self._snapshots.all() for owner in snapshot.owners()}
                - present
            )
        )

    def _forget_owners(self, owners: Callable[[], set[str]]) -> None:
        """Have a thread mark the streams of these workers as orphans. Then call `_changed` in the
        loop thread."""
        if not self._snapshots.all():
            return  # without snapshots no worker has a stream, and no thread is needed

        def run() -> None:
            try:
                for address in owners():
                    self._snapshots.worker_lost(address)
            except BaseException:
                log.exception("the dispatcher could not update its snapshots")
            self._soon(self._changed)

        self._submit(run)

    def _streams(self, call: PendingCall, incarnation: Number, has: dict[str, Number]) -> None:
        address = self._address(incarnation)
        earlier = self._pending.pop(incarnation, None)
        if earlier is not None:
            earlier[0].reply(None)
        call.on_dropped(partial(self._drop_worker, call, incarnation))
        self._assign(call, incarnation, address, dict(has))

    def _drop_worker(self, call: PendingCall, incarnation: int) -> None:
        pending = self._pending.get(incarnation)
        if pending is not None and pending[0] is call:
            del self._pending[incarnation]

    def _assign(
        self, call: PendingCall, incarnation: int, address: str, has: dict[str, int]
    ) -> None:
        version = self._version
        # Every worker sends this request, so do not use a thread for it while there are no
        # snapshots.
        if not self._snapshots.all():
            self._assigned(call, incarnation, has, {}, version)
            return

        def assign() -> None:
            try:
                streams = self._snapshots.assign(address)
            except BaseException as error:
                call.fail(_as_op_error(error))
            else:
                self._soon(self._assigned, call, incarnation, has, streams, version)

        self._submit(assign)

    def _assigned(
        self,
        call: PendingCall,
        incarnation: int,
        has: dict[str, int],
        streams: dict[str, int],
        version: int,
    ) -> None:
        if not call.wanted() or incarnation not in self._addresses:
            return
        self._written[incarnation] = streams
        if streams != has:
            call.reply(streams)
        # a change came while the thread worked, so its result may be out of date
        elif version != self._version:
            self._assign(call, incarnation, self._addresses[incarnation], has)
        else:
            self._pending[incarnation] = (call, has)

    def _changed(self) -> None:
        """Reply to each worker whose streams are no longer those that it writes, and to the users
        who wait for a snapshot that is over."""
        self._version += 1
        pending, self._pending = self._pending, {}
        for incarnation, (call, has) in pending.items():
            self._assign(call, incarnation, self._addresses[incarnation], has)
        for path in list(self._waiting):
            if (over := _over(self._snapshots[path])) is not None:
                for call in self._waiting.pop(path):
                    call.reply(over)

    def _positions(
        self,
        call: PendingCall,
        incarnation: Number,
        path: str,
        stream: Number,
        source: Number,
        repetition: Number,
        offset: Number,
        count: Number,
    ) -> None:
        snapshot, address = self._snapshots[path], self._address(incarnation)
        self._work(
            call, lambda: snapshot.hand_out(address, stream, source, repetition, offset, count)
        )

    def _end_stream(
        self,
        call: PendingCall,
        incarnation: Number,
        path: str,
        stream: Number,
        code: Number,
        message: str,
    ) -> None:
        snapshot, address = self._snapshots[path], self._address(incarnation)

        def end() -> None:
            if code:
                snapshot.failed(address, stream, from_code(code, message))
            else:
                snapshot.finished(address, stream)

        self._work(call, end, changes=True)

    def _address(self, incarnation: int) -> str:
        if incarnation not in self._addresses:
            raise UnavailableError("this worker is not registered with the dispatcher yet")
        return self._addresses[incarnation]

    # -- users -------------------------------------------------------------------------------------

    def _save(
        self,
        call: PendingCall,
        request: str,
        path: str,
        description: str,
        spec: Any,
        compression: str | None,
    ) -> None:
        if self._note is None:
            raise InvalidArgumentError(NOT_TOLERANT)
        self._maker.submit(self._make, call, request, path, description, spec, compression)

    def _make(
        self,
        call: PendingCall,
        request: str,
        path: str,
        description: str,
        spec: Any,
        compression: Any,
    ) -> None:
        try:
            snapshot = self._snapshots.create(path, description, spec, compression, request)
        except BaseException as error:
            call.fail(_as_op_error(error))
            return
        assert self._note is not None
        self._soon(self._note, _PendingSave(self, call, snapshot), path)

    def begin(self, snapshot: SnapshotFolder) -> None:
        """Let workers get the streams of a snapshot that the journal has recorded."""
        self._snapshots.add(snapshot)
        self._changed()

    def _wait(self, call: PendingCall, path: str) -> None:
        over = _over(self._snapshots[path])
        if over is not None:
            call.reply(over)
            return
        self._waiting.setdefault(path, []).append(call)
        call.on_dropped(partial(self._drop_caller, call, path))

    def _drop_caller(self, call: PendingCall, path: str) -> None:
        waiting = self._waiting.get(path, [])
        if call in waiting:
            waiting.remove(call)

    def _progress(self, call: PendingCall, path: str) -> None:
        self._work(call, self._snapshots[path].progress)

    def _list_streams(self, call: PendingCall, path: str) -> None:
        self._work(
            call,
            lambda: [
                (stream.index, stream.owner, stream.state.name) for stream in self.streams(path)
            ],
        )

    def _cancel(self, call: PendingCall, path: str) -> None:
        self._work(call, self._snapshots[path].cancel, changes=True)

    # -- threads -----------------------------------------------------------------------------------

    def _work(self, call: PendingCall, fn: Callable[[], Any], changes: bool = False) -> None:
        """Call `fn` in a thread, and reply to `call` with its result or error. If `fn` changes
        snapshots (`changes`), then call `_changed` in the loop thread.
        """

        def run() -> None:
            try:
                value = fn()
            except BaseException as error:
                call.fail(_as_op_error(error))
            else:
                call.reply(value)
            if changes:
                self._soon(self._changed)

        self._submit(run)

    def _submit(self, run: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the pool is closed because the dispatcher stops
            self._pool.submit(run)

    def _soon(self, fn: Callable[..., object], *args: Any) -> None:
        with suppress(FailedPreconditionError):  # the dispatcher has ended
            self._loop.call_soon(fn, *args)

    def _close(self) -> None:
        """Wait until the threads have written their files, so that another dispatcher does not read
        incomplete files."""
        for pool in (self._maker, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)


class _PendingSave:
    """A pending RPC call of `save`, whose snapshot the journal is recording. It is the token that
    `SnapshotService` passes to `note`."""

    def __init__(
        self, service: SnapshotService, call: PendingCall, snapshot: SnapshotFolder
    ) -> None:
        self._service = service
        self._call = call
        self._snapshot = snapshot

    def reply(self, value: Any) -> None:
        self._service.begin(self._snapshot)
        self._call.reply(value)

    def fail(self, error: BaseException) -> None:
        self._call.fail(error)


def _over(snapshot: SnapshotFolder) -> tuple[int, str] | None:
    if snapshot.machine.mode is SnapshotMode.DONE:
        return 0, ""
    error = snapshot.machine.error
    if error is not None:
        return error.error_code, str(error)
    return None


def _as_op_error(error: BaseException) -> BaseException:
    """Return an error of the disk as an OpError. Return any other error unchanged."""
    if isinstance(error, OSError) and not isinstance(error, OpError):
        return storage.error_of(error, str(error.filename or ""))
    return error
