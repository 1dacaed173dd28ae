"""A strategy's variables at the parameter servers: one session, a number that it draws, at each of them.

Rules
    The servers keep a session as long as this program is connected and has not closed it. It is closed with the strategy, or when neither
    the strategy nor a variable of it is left. A program that was started again draws other numbers: what it had is dropped.
    A variable is dropped when the program has no handle of it any more, and no unfinished work of the strategy's coordinator, and no
    per-worker value, was given one. Where a handle was pickled for anything else, the variable stays as long as the session.
    A child that was forked may use the variables, and cannot end what is its parent's.
    Connections are the process's, one for each server, and end with the last session that uses them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import sys
import threading
import weakref
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError, OpError
from zmqdist.futures import all_values
from zmqdist.rpc.client import new_incarnation
from zmqdist.specs import TensorSpec
from zmqdist.training.partition import Initial
from zmqdist.training.variable_storage import RemoteStorage
from zmqdist.transport.credentials import Credentials
from zmqdist.variables import client
from zmqdist.variables.client import Ref

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

log = logging.getLogger("zmqdist.training")

_program = new_incarnation()
"""Of this process; another one in a child that was forked off."""
_used: Counter[str] = Counter()
_lock = threading.Lock()


def _forked() -> None:
    global _program, _lock
    _program, _lock = new_incarnation(), threading.Lock()
    _used.clear()


os.register_at_fork(after_in_child=_forked)


class StrategySession:
    """One session at several servers. From any thread.

    Attributes:
      number: random, from 1 on.
      addresses: of the servers, by index.
    """

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, workers_per_step: int = 0, recovery_s: float = 0.0
    ) -> None:
        """Opens it at all of them. Raises PSUnavailableError, with the server that is not there."""
        self.number = secrets.randbits(62) | 1
        self.addresses = list(addresses)
        self._workers_per_step = workers_per_step
        self._recovery_s = recovery_s
        self._numbers = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._users: tuple[weakref.ref[CoordinatorRuntime], ...] = ()
        self._program = _program
        self._unused: deque[Ref] = deque()
        self._dropping = False
        self._storages: weakref.WeakValueDictionary[int, RemoteStorage] = weakref.WeakValueDictionary()
        self._initial: weakref.WeakKeyDictionary[RemoteStorage, Initial] = weakref.WeakKeyDictionary()
        with _lock:
            _used.update(self.addresses)
            clients = [client.client_of(address, credentials) for address in self.addresses]
        self._end = weakref.finalize(self, _close_in_background, self.number, self.addresses, _program)
        self._end.atexit = False  # the servers see that the program has gone
        try:
            for each in clients:
                each.open(_program, self.number)
        except BaseException:
            self.close()
            raise

    @property
    def clients(self) -> list[client.PsClient]:
        """Of the servers, by index."""
        return [client.client_of(address) for address in self.addresses]

    def start_watches(self) -> list[client.Started]:
        """For each server a question that ends with it, or with the session."""
        self.check_open()
        return [each.watch(f"ps:{ps}", self.number, self._recovery_s) for ps, each in enumerate(self.clients)]

    def create_variable(self, name: str, initial: Initial, ps: int) -> RemoteStorage:
        """Make a variable at a server, and wait until it is there.

        Raises:
          FailedPreconditionError: the session was closed.
          UnknownError: the function that makes the first value has raised.
          PSUnavailableError: the server is gone.
        """
        self.check_open()
        address = self.addresses[ps]
        ref = Ref(
            name, initial.shape, initial.dtype, f"ps:{ps}", address, self.number, next(self._numbers), self._recovery_s
        )
        client.client_of(address).create(ref, _initial_value(initial)).get_value()
        storage = self._storages[ref.number] = RemoteStorage(ref, self._workers_per_step, self)
        if self._recovery_s:
            self._initial[storage] = initial
        return storage

    def check_open(self) -> None:
        """Raises FailedPreconditionError: it was closed."""
        if not self._end.alive:
            raise FailedPreconditionError("this ParameterServerStrategy has been closed")

    def storages(self) -> list[RemoteStorage]:
        """Of the variables that somebody still has a handle of."""
        return list(self._storages.values())

    def open_at(self, ps: int) -> bool:
        """Have the session at a server, also at one that was started again; whether it was there.

        Raises:
          FailedPreconditionError: it was closed.
          PSUnavailableError: the server is gone.
        """
        self.check_open()
        return client.client_of(self.addresses[ps]).open(_program, self.number)[2]

    def next_incarnation(self) -> int:
        """A number for the variables that are about to be made anew: it never comes again, and so no version of theirs does."""
        return next(self._incarnations)

    def recreate(self, storage: RemoteStorage, version: int) -> None:
        """Make a variable anew, with its first value, at a server that has lost it; for strategies with `recovery_s`."""
        earlier: tuple[int, dict[str, Any], bytes] = (version, {}, b"")
        client.client_of(storage.ref.address).create(
            storage.ref, _initial_value(self._initial[storage]), earlier
        ).get_value()

    def add_coordinator(self, runtime: CoordinatorRuntime) -> None:
        """A coordinator of ours has this connection: the variables in what it packs stay until that work has ended."""
        self._users = (*(user for user in self._users if user() is not None), weakref.ref(runtime))

    def note_pickled(self, storage: RemoteStorage) -> bool:
        """A handle is pickled; whether it is for a coordinator of ours, which keeps it for as long as it is needed there."""
        packing = get_ident()
        for user in self._users:
            runtime = user()
            if runtime is not None and runtime.packing == packing:
                runtime.given.append(storage)
                return True
        return False

    def release(self, ref: Ref) -> None:
        """The program has no handle of this variable any more. In a finalizer: takes no lock of ours."""
        if self._program != _program or not self._end.alive or sys.is_finalizing():
            return
        self._unused.append(ref)
        if not self._dropping:
            self._dropping = True
            try:
                threading.Thread(target=self._drop_unused, name="zmqdist-variables-drop", daemon=True).start()
            except RuntimeError:  # no thread now: the next one takes it along
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
                    pass  # a server that is gone has dropped them
                except BaseException:  # they stay until the session ends; those that come later need this thread
                    log.exception("%s and others that are not used any more could not be dropped", refs[0])
            if not self._unused:
                self._dropping = False  # who comes after this starts a thread; who came before it is seen now

    def _drop(self, refs: list[Ref]) -> None:
        """At one server."""
        with _lock:  # else it has ended, and a client that is made now would stay
            still_used = self._end.alive and _used[refs[0].address] > 0
            each = client.client_of(refs[0].address) if still_used else None
        if each is not None:
            each.drop(refs).get_value()

    def close(self) -> None:
        """Have the servers drop the variables. Idempotent; does not raise. Does nothing in a child that was forked."""
        ended = self._end.detach()
        if ended is not None:
            _close(*ended[2])


def _initial_value(initial: Initial) -> Any:
    """The first value as `PsClient.create` takes it."""
    if isinstance(initial.source, np.ndarray):
        return initial.source
    if not initial.shape:
        return np.asarray(initial.source(), initial.dtype)
    rows = initial.rows(0, initial.shape[0])
    return client.initializer(rows, TensorSpec(initial.shape, initial.dtype)) if callable(rows) else rows


def _close_in_background(number: int, addresses: list[str], program: int) -> None:
    """Where the interpreter ends, the servers see that."""
    in_background("zmqdist-session-close", _close, number, addresses, program)


def _close(number: int, addresses: list[str], program: int) -> None:
    if program != _program:  # of the parent
        return
    try:
        with contextlib.suppress(OpError):
            all_values([client.client_of(address).close_session(number) for address in addresses])
    finally:
        with _lock:
            _used.subtract(addresses)
            ended = [address for address in addresses if _used[address] <= 0]
            for address in ended:
                del _used[address]
                client.let_go(address)  # under the lock: a session that begins now has it, or a new one
