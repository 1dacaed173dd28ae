"""A strategy's variables at the parameter servers: one session, a number that it draws, at each of them.

Rules
    The servers keep a session as long as this program is connected and has not closed it. It is closed with the strategy, or when neither
    the strategy nor a variable of it is left. A program that was started again draws other numbers: what it had is dropped.
    A child that was forked may use the variables, and cannot end what is its parent's.
    Connections are the process's, one for each server, and end with the last session that uses them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist.errors import FailedPreconditionError, OpError
from zmqdist.net.credentials import Credentials
from zmqdist.parameter_server.homes import RemoteHome
from zmqdist.parameter_server.partition import Initial
from zmqdist.parameter_server.pending import all_values
from zmqdist.rpc.client import new_incarnation
from zmqdist.specs import TensorSpec
from zmqdist.variables import client
from zmqdist.variables.client import Ref

_program = new_incarnation()
"""Of this process; another one in a child that was forked off."""
_used: Counter[str] = Counter()
_lock = threading.Lock()


def _forked() -> None:
    global _program, _lock
    _program, _lock = new_incarnation(), threading.Lock()
    _used.clear()


os.register_at_fork(after_in_child=_forked)


class Session:
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
        self._homes: weakref.WeakValueDictionary[int, RemoteHome] = weakref.WeakValueDictionary()
        self._initial: weakref.WeakKeyDictionary[RemoteHome, Initial] = weakref.WeakKeyDictionary()
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

    def watched(self) -> list[client.Started]:
        """For each server a question that ends with it, or with the session."""
        self.check_open()
        return [each.watch(f"ps:{ps}", self.number, self._recovery_s) for ps, each in enumerate(self.clients)]

    def make(self, name: str, initial: Initial, ps: int) -> RemoteHome:
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
        client.client_of(address).create(ref, _told(initial)).get_value()
        home = self._homes[ref.number] = RemoteHome(ref, self._workers_per_step, self)
        if self._recovery_s:
            self._initial[home] = initial
        return home

    def check_open(self) -> None:
        """Raises FailedPreconditionError: it was closed."""
        if not self._end.alive:
            raise FailedPreconditionError(None, None, "this ParameterServerStrategy has been closed")

    def homes(self) -> list[RemoteHome]:
        """Of the variables that somebody still has a handle of."""
        return list(self._homes.values())

    def open_at(self, ps: int) -> bool:
        """Have the session at a server, also at one that was started again; whether it was there.

        Raises:
          FailedPreconditionError: it was closed.
          PSUnavailableError: the server is gone.
        """
        self.check_open()
        return client.client_of(self.addresses[ps]).open(_program, self.number)[2]

    def make_again(self, home: RemoteHome) -> None:
        """Make a variable anew, with its first value, at a server that has lost it; for strategies with `recovery_s`."""
        client.client_of(home.ref.address).create(home.ref, _told(self._initial[home])).get_value()

    def close(self) -> None:
        """Have the servers drop the variables. Idempotent; does not raise. Does nothing in a child that was forked."""
        ended = self._end.detach()
        if ended is not None:
            _close(*ended[2])


def _told(initial: Initial) -> Any:
    """The first value as `PsClient.create` takes it."""
    if isinstance(initial.source, np.ndarray):
        return initial.source
    if not initial.shape:
        return np.asarray(initial.source(), initial.dtype)
    made = initial.rows(0, initial.shape[0])
    return client.initializer(made, TensorSpec(initial.shape, initial.dtype)) if callable(made) else made


def _close_in_background(number: int, addresses: list[str], program: int) -> None:
    """The garbage collector may have borrowed a thread that holds any lock, also one that is needed to ask a server."""
    with contextlib.suppress(RuntimeError):  # the interpreter ends: the servers see that
        threading.Thread(
            target=_close, args=(number, addresses, program), name="zmqdist-session-close", daemon=True
        ).start()


def _close(number: int, addresses: list[str], program: int) -> None:
    if program != _program:  # of the parent
        return
    with contextlib.suppress(OpError):
        all_values([client.client_of(address).close_session(number) for address in addresses])
    with _lock:
        _used.subtract(addresses)
        ended = [address for address in addresses if _used[address] <= 0]
        for address in ended:
            del _used[address]
            client.let_go(address)  # under the lock: a session that begins now has it, or a new one
