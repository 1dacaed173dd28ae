"""The session of a strategy at its parameter servers. The strategy's variables belong to the
session. The session has a random number, which is the same at each server.

Rules
    A server keeps a session while the program is connected, until the program closes the session.
    The program closes it when the strategy is closed, or when the program refers neither to the
    strategy nor to any of its variables. The sessions of a restarted program have other numbers.
    When a program opens a session, the server drops the sessions of all programs that have been
    disconnected for PS_PROGRAM_GONE_S.
    A server drops a variable when no handle of the variable is left in the program, in unfinished
    work of the strategy's coordinator, or in a per-worker value. If a handle was pickled for any
    other purpose, the variable stays as long as the session.
    A forked child may use the variables of its parent, but cannot drop variables or close the
    session.
    The process has one connection to each server, and closes it with the last session that uses it.

Not here: what a message to a server looks like (variables/client.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import sys
import threading
import weakref
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zmqdist import platforms
from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError, OpError, PSUnavailableError
from zmqdist.futures import all_values
from zmqdist.rpc.client import new_incarnation
from zmqdist.specs import TensorSpec
from zmqdist.training.partition import Initial
from zmqdist.training.ps_facts import PsFacts
from zmqdist.training.variable_storage import RemoteStorage
from zmqdist.transport.credentials import Credentials
from zmqdist.variables import client
from zmqdist.variables.client import Ref

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

log = logging.getLogger("zmqdist.training")

_program = new_incarnation()
"""The number by which servers recognize this process. A forked child draws another number."""
_used: Counter[str] = Counter()
_lock = threading.Lock()


def _forked() -> None:
    global _program, _lock
    _program, _lock = new_incarnation(), threading.Lock()
    _used.clear()


platforms.register_at_fork(after_in_child=_forked)


Lost = Callable[[PSUnavailableError], object]


class StrategySession:
    """One session at several servers. Methods may be called from any thread.

    Attributes:
      number: the random number of the session, 1 or more.
      addresses: the addresses of the servers, by index.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        workers_per_step: int = 0,
        recovery_s: float = 0.0,
    ) -> None:
        """Open the session at all servers. Raises PSUnavailableError, which names the server, if a
        server does not answer."""
        self.number = secrets.randbits(62) | 1
        self.addresses = list(addresses)
        self._workers_per_step = workers_per_step
        self._recovery_s = recovery_s
        self.keeps_initial_values = recovery_s > 0
        self._numbers = itertools.count(1)
        self.incarnations = itertools.count(1)
        self._users: tuple[weakref.ref[CoordinatorRuntime], ...] = ()
        self._program = _program
        self._unused: deque[Ref] = deque()
        self._dropping = False
        self._storages: weakref.WeakValueDictionary[int, RemoteStorage] = (
            weakref.WeakValueDictionary()
        )
        self._initial: weakref.WeakKeyDictionary[RemoteStorage, Initial] = (
            weakref.WeakKeyDictionary()
        )
        with _lock:
            _used.update(self.addresses)
            clients = [client.client_of(address, credentials) for address in self.addresses]
        self._end = weakref.finalize(
            self, _close_in_background, self.number, self.addresses, _program
        )
        # Do not close the session at the exit of the program, because the servers notice the end of
        # the connection.
        self._end.atexit = False
        try:
            for ps in clients:
                ps.open(_program, self.number)
        except BaseException:
            self.close()
            raise

    @property
    def clients(self) -> list[client.PsClient]:
        """The clients of the servers, by index."""
        return [client.client_of(address) for address in self.addresses]

    def open_clients(self) -> list[client.PsClient]:
        """Return the clients of the servers by index, none after the end of the session."""
        with _lock:
            # after the end of the session, `client_of` would make a client that no code closes
            return self.clients if self._end.alive else []

    def watch(self, lost: Lost) -> None:
        """Watch the servers of the session, even if no code uses their variables. For each server
        that is lost before the session is closed, a thread calls `lost(error)` once.

        Each server gets a request that it answers only when the session is closed. If the
        connection to the server is lost, the request ends early. A thread then repeats the request
        by the rules for all requests to parameter servers (variables/client.py). If all repetitions
        fail, for `recovery_s` if the strategy has it, the server is lost.
        """
        self.check_open()
        for ps, ps_client in enumerate(self.clients):
            call = ps_client.watch(f"ps:{ps}", self.number, self._recovery_s)
            call.when_done(partial(_watch_ended, call, lost))

    def create_variable(self, name: str, initial: Initial, ps: int) -> RemoteStorage:
        """Make a variable at a server, and wait until the server has it.

        Raises:
          FailedPreconditionError: the session was closed.
          UnknownError: the user's function that makes the first value has raised an error.
          PSUnavailableError: the server is lost.
        """
        self.check_open()
        address = self.addresses[ps]
        ref = Ref(
            name,
            initial.shape,
            initial.dtype,
            f"ps:{ps}",
            address,
            self.number,
            next(self._numbers),
            self._recovery_s,
        )
        client.client_of(address).create(ref, _initial_value(initial)).get_value()
        storage = self._storages[ref.number] = RemoteStorage(ref, self._workers_per_step, self)
        if self._recovery_s:
            self._initial[storage] = initial
        return storage

    def check_open(self) -> None:
        """Raise FailedPreconditionError if the session was closed."""
        if not self._end.alive:
            raise FailedPreconditionError("this ParameterServerStrategy has been closed")

    def storages(self) -> list[RemoteStorage]:
        """Return the storages of the variables that still have a handle."""
        return list(self._storages.values())

    def open_at(self, ps: int) -> bool:
        """Open the session at a server, which may have been restarted. Return whether the server
        had the session already.

        Raises:
          FailedPreconditionError: the session was closed.
          PSUnavailableError: the server is lost.
        """
        self.check_open()
        return client.client_of(self.addresses[ps]).open(_program, self.number)[2]

    def recreate(self, storage: RemoteStorage, version: int) -> None:
        """Make a variable again with its first value, at a server that has lost it. Only strategies
        with `recovery_s` keep first values."""
        earlier: tuple[int, dict[str, Any], bytes] = (version, {}, b"")
        client.client_of(storage.ref.address).create(
            storage.ref, _initial_value(self._initial[storage]), earlier
        ).get_value()

    def add_coordinator(self, runtime: CoordinatorRuntime) -> None:
        """Register a coordinator of this strategy. If the coordinator pickles a variable's handle
        into a work item, the variable is kept until the work item has ended."""
        self._users = (*(user for user in self._users if user() is not None), weakref.ref(runtime))
        clients = weakref.WeakMethod(self.open_clients)
        facts = PsFacts(lambda: () if (of_session := clients()) is None else of_session())
        runtime.listeners.servers.others = facts.newest

    def note_pickled(self, storage: RemoteStorage) -> bool:
        """Record that a handle is being pickled. Return True if a coordinator of this strategy
        pickles the handle into a work item. The coordinator then keeps the variable until the work
        item has ended.
        """
        packing = get_ident()
        for user in self._users:
            runtime = user()
            if runtime is not None and runtime.packing.thread == packing:
                runtime.packing.uses.append(storage)
                return True
        return False

    def release(self, ref: Ref) -> None:
        """Have the server drop a variable that has no handle left. This method takes no lock of
        this module, because a finalizer calls it, and the finalizer may interrupt code that holds
        such a lock.
        """
        if self._program != _program or not self._end.alive or sys.is_finalizing():
            return
        # Garbage collection may call this in any thread and under any lock, so it must not wait:
        # a deque needs no lock.
        self._unused.append(ref)
        if not self._dropping:
            self._dropping = True
            try:
                threading.Thread(
                    target=self._drop_unused, name="zmqdist-variables-drop", daemon=True
                ).start()
            except RuntimeError:  # no thread can be started now, so the next release tries again
                self._dropping = False

    def _drop_unused(self) -> None:
        while self._unused:
            refs = []
            with contextlib.suppress(IndexError):
                while True:
                    refs.append(self._unused.popleft())
            for address in {ref.address for ref in refs}:
                try:
                    self._drop([ref for ref in refs if ref.address == address])
                except OpError:
                    pass  # drop nothing at a lost server, which has lost its variables
                except BaseException:
                    # go on, because the thread has to drop variables that are released later
                    log.exception(
                        "unused variables (%s and others) could not be dropped; they stay until "
                        "the session is closed",
                        refs[0],
                    )
            if not self._unused:
                # If `release` is called before this line, the condition of the loop sees the
                # variable. A later call starts a new thread.
                self._dropping = False

    def _drop(self, refs: list[Ref]) -> None:
        """Drop variables at one server."""
        with _lock:
            # after the end of the session, `client_of` would make a client that no code closes
            still_used = self._end.alive and _used[refs[0].address] > 0
            ps = client.client_of(refs[0].address) if still_used else None
        if ps is not None:
            ps.drop(refs).get_value()

    def close(self) -> None:
        """Close the session, so that the servers drop its variables. Does not raise. A second call,
        or a call in a forked child, does nothing.
        """
        finalizer = self._end.detach()
        if finalizer is not None:
            _close(*finalizer[2])


def _initial_value(initial: Initial) -> Any:
    """Return the first value in the form that `PsClient.create` accepts."""
    value = initial.value()
    spec = TensorSpec(initial.shape, initial.dtype)
    return client.initializer(value, spec) if callable(value) else value


def _close_in_background(number: int, addresses: list[str], program: int) -> None:
    """Close the session in a thread, because a finalizer calls this function and must not block."""
    in_background("zmqdist-session-close", _close, number, addresses, program)


def _close(number: int, addresses: list[str], program: int) -> None:
    if program != _program:
        # do nothing in a forked child, because the session belongs to the parent
        return
    try:
        with contextlib.suppress(OpError):
            all_values([client.client_of(address).close_session(number) for address in addresses])
    finally:
        with _lock:
            _used.subtract(addresses)
            unused = [address for address in addresses if _used[address] <= 0]
            for address in unused:
                del _used[address]
                # Release the client under the lock, so that a session that begins meanwhile either
                # keeps this client open, or gets a new client.
                client.release_client(address)


def _watch_ended(call: client.PsCall, lost: Lost) -> None:
    if sys.is_finalizing():
        return
    try:
        threading.Thread(
            target=_judge_loss, args=(call, lost), name="zmqdist-ps-lost", daemon=True
        ).start()
    except RuntimeError:
        # raise nothing in this thread of the client, because it serves all users of the client
        log.exception(
            "the connection to a parameter server has ended, and no thread can be started to find "
            "out why"
        )


def _judge_loss(call: client.PsCall, lost: Lost) -> None:
    try:
        call.get_value()
    except PSUnavailableError as error:
        lost(error)
    except OpError:
        pass  # any other error means that the session was closed, which is no loss
    except BaseException:
        log.exception("the connection to a parameter server has ended, and finding out why failed")
