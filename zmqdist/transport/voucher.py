"""What a process knows of its peers' keys: it asks its dispatcher, which vouches for them and withdraws them live.

Rules
    There is one link to the dispatcher for each (dispatcher, key folder) of a process, while a socket of that folder is open.
    A listening socket asks about the key of each connection before it lets it in; ZeroMQ waits for the answer. A connecting socket asks
    about the key that it was told, or, without one, about the key that listens at its address.
    An answer stays true until the dispatcher sends another one. "Not known" is not kept: a key that was admitted a moment ago would be
    refused because of an older question. After the link was down everything is asked anew.
    Without an answer for VOUCHING_S a key is judged by the static `authorized` file of the folder. A key that is not in it waits on: its
    handshake ends by time and is tried again, so a member is never refused because its dispatcher was slow.
    When a key was revoked, each socket of the folder hears of it (`KeyWatcher`), and ends what it has with that key.
    The process that joined makes a new key pair when the dispatcher wants one. Other processes of the folder read its file again.

Not here: which key is good (keyring_machine.py), and what a socket does about it (router.py, connector.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError, OpError, UnauthenticatedError
from zmqdist.limits import HANDSHAKE_S, VOUCHING_S
from zmqdist.messages import AskKey, Joined, KeyState, Message, NewKey, Refused, RenewKey
from zmqdist.transport import keys
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.keyring_machine import LISTENERS, REVOKED, KeyVerdict
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import CURVE, ClientSecurity, KeyWatcher
from zmqdist.wire.hello import our_hello

log = logging.getLogger("zmqdist.transport")

REFUSED_S: Final = 1.0
"""A dispatcher that refuses the link is asked again after this."""
TICK_S: Final = 0.1

_vouchers: dict[tuple[str, str, str], Voucher] = {}
_lock = threading.Lock()


def voucher_for(dispatcher: str, folder: str | Path, role: str) -> Voucher:
    """The voucher of this process for a dispatcher ("host:port") and a key folder. Nothing is opened before a socket watches."""
    place = dispatcher.removeprefix("zmq://"), str(folder), role
    with _lock:
        if place not in _vouchers:
            _vouchers[place] = Voucher(*place)
        return _vouchers[place]


class Voucher:
    """See the module's docstring. All public methods may be called from any thread."""

    def __init__(self, dispatcher: str, folder: str, role: str) -> None:
        self._dispatcher = dispatcher
        self._folder = folder
        self._role = role
        self._lock = threading.RLock()
        self._static = keys.load_authorized(folder)
        self._watchers: list[KeyWatcher] = []
        self._link: _Link | None = None
        self._owns = False

    def own(self) -> None:
        """Make the new key pairs of this folder: called by the process that joined."""
        self._owns = True

    def attach(self, watcher: KeyWatcher) -> None:
        """A socket of the folder opens; the first one opens the link."""
        with self._lock:
            if watcher not in self._watchers:
                self._watchers.append(watcher)
            self._linked()

    def detach(self, watcher: KeyWatcher) -> None:
        """A socket of the folder has closed; after the last one the link is ended in the background."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
            if not self._watchers and self._link is not None:
                link, self._link = self._link, None
                in_background("zmqdist-voucher-stop", link.loop.stop)

    def judge(self, key: bytes) -> KeyVerdict:
        """What a key may do, as far as this process knows."""
        link = self._link
        state = None if link is None else link.keys.get(key)
        if state is not None and state.role:
            return KeyVerdict(state.role, state.name, state.listens, state.problem)
        role = self._static.get(key, "")
        return KeyVerdict(role, role, role in LISTENERS)

    def ask(self, key: bytes, answer: Callable[[], object]) -> None:
        """Call `answer` once `judge` is worth asking about a key: at once, or in the link's thread."""
        with self._lock:
            link = self._linked()
        state = link.keys.get(key)
        if state is not None and state.role:
            answer()
        else:
            wait_s = VOUCHING_S if key in self._static else 2 * HANDSHAKE_S
            link.soon(partial(link.ask, key, "", answer, wait_s))

    def expected(self, address: str, peer: bytes) -> bytes | None:
        """The public key (Z85) that the server at an address has to show; None while the dispatcher has not answered.

        Args:
          peer: the key that was told with the address; empty for a server.

        Raises:
          UnauthenticatedError: that key may not listen.
        """
        if not peer and address == self._dispatcher:
            return keys.load_server_public(self._folder)
        with self._lock:
            link = self._linked()
        state = link.answer(peer, "" if peer else address)
        if state is None:
            link.soon(partial(link.ask, peer, "" if peer else address, None, VOUCHING_S))
            return None
        if not peer and not state.key:
            return keys.load_server_public(self._folder)
        if state.listens or (not state.role and self._static.get(state.key) in LISTENERS):
            return keys.text(state.key).encode()
        why = state.problem or "its dispatcher does not know it, and no file here lists it as worker, submit or admin"
        raise UnauthenticatedError(f"{address} is not connected to: its public key {keys.text(state.key)}: {why}")

    def _linked(self) -> _Link:
        """The link; called with the lock."""
        if self._link is None:
            self._link = _Link(self._dispatcher, self._folder, self._role, self._owns, self._revoked)
            self._link.open()
        return self._link

    def _revoked(self, state: KeyState) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.key_revoked(state.key, state.problem)


class _Link:
    """The connection to the dispatcher. Its maps are written in its thread only.

    Attributes:
      keys, addresses: the latest answers.
    """

    def __init__(
        self, dispatcher: str, folder: str, role: str, owns: bool, revoked: Callable[[KeyState], None]
    ) -> None:
        self.keys: dict[bytes, KeyState] = {}
        self.addresses: dict[str, KeyState] = {}
        self.loop = Loop("zmqdist-voucher")
        self._folder = folder
        self._role = role
        self._owns = owns
        self._revoked = revoked
        self._new: keys.KeyPair | None = None
        self._fresh: set[bytes | str] = set()
        """Questions whose answer "not known" has come and was not used yet."""
        self._waiting: dict[bytes | str, list[tuple[float, Callable[[], object]]]] = {}
        security = ClientSecurity(
            CURVE, role, f"key of {folder}", folder=folder, server_key=keys.load_server_public(folder)
        )
        self._dealer = DealerConnection(
            self.loop,
            dispatcher,
            security,
            our_hello("client", 1, f"keys of pid {os.getpid()}"),
            on_up=self._up,
            on_message=self._heard,
            on_down=lambda: None,
            on_refused=self._refused,
        )

    def open(self) -> None:
        self.loop.call_soon(self._dealer.connect)
        self.loop.start()

    def soon(self, fn: Callable[[], object]) -> None:
        with suppress(FailedPreconditionError):  # it ends
            self.loop.call_soon(fn)

    def answer(self, key: bytes, address: str) -> KeyState | None:
        """The answer to a question, if it is still worth something. From any thread."""
        state = self.addresses.get(address) if address else self.keys.get(key)
        if state is None:
            return None
        if not state.role and not (address and not state.key):
            question = address or key
            if question not in self._fresh:
                return None
            self._fresh.discard(question)
        return state

    # -- in the link's thread ---------------------------------------------------------------------------------------

    def ask(self, key: bytes, address: str, answer: Callable[[], object] | None, wait_s: float) -> None:
        """Ask, and call `answer` after the reply, or after `wait_s`."""
        question = address or key
        waiting = self._waiting.setdefault(question, [])
        first = not waiting
        waiting.append((self.loop.now() + wait_s, answer or (lambda: None)))
        if first:
            self._dealer.send(AskKey(key, address))  # while down: `_up` asks
            self.loop.set_timer(self, self.loop.now() + TICK_S, self._tick)

    def _tick(self) -> None:
        now = self.loop.now()
        for question, waiting in list(self._waiting.items()):
            late = [answer for until, answer in waiting if until <= now]
            left = [each for each in waiting if each[0] > now]
            if left:
                self._waiting[question] = left
            else:
                del self._waiting[question]
                self._unanswered(question)
            for answer in late:
                answer()
        if self._waiting:
            self.loop.set_timer(self, now + TICK_S, self._tick)

    def _unanswered(self, question: bytes | str) -> None:
        """No answer in time: a folder of `keygen` judges by its files, as without a dispatcher."""
        if keys.load_joined(self._folder) is None:
            if isinstance(question, str):
                self.addresses.setdefault(question, KeyState(b"", "", address=question))
            elif question not in self.keys:
                self.keys[question] = KeyState(question, "")
                self._fresh.add(question)

    def _up(self, _hello: object) -> None:
        own = keys.raw(keys.load_role(self._folder, self._role).public)
        self._dealer.send(AskKey(own, renews=self._owns))
        if self._new is not None:
            self._dealer.send(NewKey(keys.raw(self._new.public)))
        for question in {*self.keys, *self.addresses, *self._waiting}:
            if question != own:
                self._dealer.send(AskKey(b"", question) if isinstance(question, str) else AskKey(question))

    def _heard(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, KeyState):
            self._learn(message)
        elif isinstance(message, RenewKey) and self._owns and self._new is None:
            self._new = keys.new_pair()
            self._dealer.send(NewKey(keys.raw(self._new.public)))
        elif isinstance(message, Joined) and self._new is not None:
            self._replace(self._new)
        elif isinstance(message, Refused):
            self._new = None
            log.warning("the dispatcher at %s: %s", self._dealer.address, message.message)

    def _learn(self, state: KeyState) -> None:
        before = self.keys.get(state.key)
        if state.address:
            self.addresses[state.address] = state
        if state.key:
            self.keys[state.key] = state
        question: bytes | str = state.address or state.key
        if not state.role:
            self._fresh.add(question)
        for _, answer in self._waiting.pop(question, ()):
            answer()
        revoked = state.role == REVOKED and not state.listens
        if revoked and (before is None or before.role != REVOKED or before.listens):
            self._revoked(state)

    def _replace(self, pair: keys.KeyPair) -> None:
        self._new = None
        try:
            keys.write_role(Path(self._folder), self._role, pair)
        except OSError as error:
            log.error("the new key of this process could not be written to %s: %s", self._folder, error.strerror)
            return
        self._dealer.reconnect()

    def _refused(self, error: OpError) -> None:
        """The socket that matters to the user is refused as well, and says so."""
        log.debug("the dispatcher refuses to vouch for keys: %s", error)
        self.loop.set_timer((self, "refused"), self.loop.now() + REFUSED_S, self._dealer.reconnect)


def _forked() -> None:
    global _lock
    _vouchers.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
