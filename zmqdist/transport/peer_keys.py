"""The states of peers' keys, as a member of a cluster knows them. The member asks its dispatcher,
which vouches for keys and reports revoked keys.

Rules
    A process has one link to a dispatcher for each key folder and role, as long as a socket that
    uses that folder is open. A listening socket asks about the key of each connection before it
    accepts the connection; ZeroMQ waits for the reply. A connecting socket asks about the key that
    came with the address; if no key came, it asks which key listens at the address. A reply is
    valid until the dispatcher sends another reply about the same key or address. The reply
    "unknown" is used only once, because the dispatcher may admit the key later.
    When the link is up again after a loss, the process asks all questions again.
    If no reply arrives within VOUCHING_S, the file `authorized` of the folder decides about each
    key that it lists. For any other key the process waits until the handshake times out, and the
    peer tries again. So no member is refused because its dispatcher was slow. When a key is
    revoked, the process notifies each socket of the folder (`KeyWatcher`), which ends its
    connections with that key. The process that joined makes a new key pair when the dispatcher asks
    for one. Other processes that use the folder read the new key pair.

Not here: the decision about a key (keyring_machine.py), and what a socket does after the decision
(router.py, dealer.py).
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

from zmqdist import platforms
from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError, OpError, UnauthenticatedError
from zmqdist.limits import HANDSHAKE_S, VOUCHING_S
from zmqdist.messages import AskKey, Joined, KeyState, Message, NewKey, Refused, RenewKey
from zmqdist.transport import keys
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.keyring_machine import LISTENING_ROLES, REVOKED
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import CURVE, ClientSecurity, KeyWatcher
from zmqdist.wire.hello import our_hello

log = logging.getLogger("zmqdist.transport")

REFUSED_S: Final = 1.0
"""Seconds after which this process reconnects to a dispatcher that has refused the link."""
TICK_S: Final = 0.1
"""Seconds between two searches for questions that have waited too long."""

_vouchers: dict[tuple[str, str, str], Voucher] = {}
_lock = threading.Lock()


def voucher_for(dispatcher: str, folder: str | Path, role: str) -> Voucher:
    """Return this process's Voucher for a dispatcher ("host:port"), key folder and role. With it,
    sockets ask the dispatcher about peers' keys. The Voucher connects to the dispatcher at its
    first use.
    """
    voucher_key = dispatcher.removeprefix("zmq://"), str(folder), role
    with _lock:
        if voucher_key not in _vouchers:
            _vouchers[voucher_key] = Voucher(*voucher_key)
        return _vouchers[voucher_key]


class Voucher:
    """The states of keys, for the sockets of one key folder; the module's docstring has the rules.
    Any thread may call public methods."""

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
        """Have this process make a new key pair whenever the dispatcher asks for one. Call this
        only in the process that joined, and before the first socket uses the folder.
        """
        self._owns = True

    def attach(self, watcher: KeyWatcher) -> None:
        """Add a socket that uses the folder. The first socket opens the link to the dispatcher."""
        with self._lock:
            if watcher not in self._watchers:
                self._watchers.append(watcher)
            self._linked()

    def detach(self, watcher: KeyWatcher) -> None:
        """Remove a socket that used the folder. After the last one, the link to the dispatcher is
        closed in the background."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
            if not self._watchers and self._link is not None:
                link, self._link = self._link, None
                in_background("zmqdist-voucher-stop", link.loop.stop)

    def judge(self, key: bytes) -> KeyState:
        """Return the rights of a key, as far as this process knows them."""
        link = self._link
        state = None if link is None else link.keys.get(key)
        if state is not None and state.role:
            return state
        role = self._static.get(key, "")
        return KeyState(key, role, role, role in LISTENING_ROLES)

    def ask(self, key: bytes, answer: Callable[[], object]) -> None:
        """Call `answer` when the dispatcher has replied about a key, or has not replied in time;
        `judge` then decides. The call comes at once in this thread if a reply is known, otherwise
        later in the link's thread.
        """
        with self._lock:
            link = self._linked()
        state = link.keys.get(key)
        if state is not None and state.role:
            answer()
        else:
            wait_s = VOUCHING_S if key in self._static else 2 * HANDSHAKE_S
            link.soon(partial(link.ask, key, "", answer, wait_s))

    def expected(self, address: str, peer: bytes) -> bytes | None:
        """Return the public key (Z85) that the server at an address must show; None while the
        dispatcher has not replied.

        Args:
          peer: the key that came with the address; empty for a server.

        Raises:
          UnauthenticatedError: the owner of the key has no right to listen.
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
        if state.listens or (not state.role and self._static.get(state.key) in LISTENING_ROLES):
            return keys.encode_public(state.key).encode()
        why = (
            state.problem
            or "the dispatcher does not know it, and no file here lists it as that of a worker or "
            "a program"
        )
        raise UnauthenticatedError(
            f"no connection to {address}: its public key {keys.encode_public(state.key)}: {why}"
        )

    def _linked(self) -> _Link:
        """Return the link to the dispatcher, and open it on first use. The caller holds the
        lock.
        """
        if self._link is None:
            self._link = _Link(
                self._dispatcher, self._folder, self._role, self._owns, self._revoked
            )
        return self._link

    def _revoked(self, state: KeyState) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.key_revoked(state.key, state.problem)


class _Link:
    """The connection to the dispatcher. Only the link's own thread changes `keys` and `addresses`.

    Attributes:
      keys, addresses: the dispatcher's latest reply about each key, and its latest reply about each
        address.
    """

    def __init__(
        self,
        dispatcher: str,
        folder: str,
        role: str,
        owns: bool,
        revoked: Callable[[KeyState], None],
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
        """Questions to which the dispatcher has replied "unknown", while no caller has used that
        reply yet."""
        self._waiting: dict[bytes | str, list[tuple[float, Callable[[], object]]]] = {}
        security = ClientSecurity(
            CURVE,
            role,
            f"key of {folder}",
            folder=folder,
            server_key=keys.load_server_public(folder),
        )
        self._dealer = DealerConnection(
            self.loop,
            dispatcher,
            security,
            our_hello("client", 1, f"keys of pid {os.getpid()}"),
            on_up=self._up,
            on_message=self._handle_message,
            on_down=lambda: None,
            on_refused=self._refused,
        )
        self.loop.call_soon(self._dealer.connect)
        self.loop.start()

    def soon(self, fn: Callable[[], object]) -> None:
        with suppress(FailedPreconditionError):  # the link has been closed
            self.loop.call_soon(fn)

    def answer(self, key: bytes, address: str) -> KeyState | None:
        """Return the dispatcher's reply about a key or an address; None if no reply has arrived, or
        the reply is not valid any more. Any thread may call this.
        """
        state = self.addresses.get(address) if address else self.keys.get(key)
        if state is None:
            return None
        if not state.role and not (address and not state.key):
            question = address or key
            # "unknown" is used once, because the dispatcher may admit the key later
            if question not in self._fresh:
                return None
            self._fresh.discard(question)
        return state

    # -- in the link's thread ----------------------------------------------------------------------

    def ask(
        self, key: bytes, address: str, answer: Callable[[], object] | None, wait_s: float
    ) -> None:
        """Ask the dispatcher, and call `answer` when its reply arrives, or after `wait_s` without a
        reply."""
        question = address or key
        waiting = self._waiting.setdefault(question, [])
        first = not waiting
        waiting.append((self.loop.now() + wait_s, answer or (lambda: None)))
        if first:
            # while the link is down, `send` has no effect, and `_up` sends the question later
            self._dealer.send(AskKey(key, address))
            self.loop.set_timer(self, self.loop.now() + TICK_S, self._tick)

    def _tick(self) -> None:
        now = self.loop.now()
        for question, waiting in list(self._waiting.items()):
            late = [answer for until, answer in waiting if until <= now]
            left = [(until, answer) for until, answer in waiting if until > now]
            if left:
                self._waiting[question] = left
            else:
                del self._waiting[question]
                # If `keygen` made the folder, no reply counts as the reply "unknown", so that the
                # files of the folder decide about the key. In the folder of a process that joined,
                # the question stays open.
                if keys.load_joined(self._folder) is None:
                    if isinstance(question, str):
                        self.addresses.setdefault(question, KeyState(b"", "", address=question))
                    elif question not in self.keys:
                        self.keys[question] = KeyState(question, "")
                        self._fresh.add(question)
            for answer in late:
                answer()
        if self._waiting:
            self.loop.set_timer(self, now + TICK_S, self._tick)

    def _up(self, _hello: object) -> None:
        own = keys.decode_public(keys.load_role(self._folder, self._role).public)
        self._dealer.send(AskKey(own, renews=self._owns))
        if self._new is not None:
            self._dealer.send(NewKey(keys.decode_public(self._new.public)))
        # the dispatcher forgets the questions of a connection that ends
        for question in {*self.keys, *self.addresses, *self._waiting}:
            if question != own:
                self._dealer.send(
                    AskKey(b"", question) if isinstance(question, str) else AskKey(question)
                )

    def _handle_message(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, KeyState):
            self._learn(message)
        elif isinstance(message, RenewKey) and self._owns and self._new is None:
            self._new = keys.new_pair()
            self._dealer.send(NewKey(keys.decode_public(self._new.public)))
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
        # the port of a replaced key still shows it, and is trusted
        revoked = state.role == REVOKED and not state.listens
        if revoked and (before is None or before.role != REVOKED or before.listens):
            self._revoked(state)

    def _replace(self, pair: keys.KeyPair) -> None:
        self._new = None
        try:
            keys.write_role(Path(self._folder), self._role, pair)
        except OSError as error:
            log.error(
                "the new key of this process could not be written to %s: %s",
                self._folder,
                error.strerror,
            )
            return
        self._dealer.reconnect()

    def _refused(self, error: OpError) -> None:
        """Reconnect later. Log the refusal for debugging only: the dispatcher also refuses this
        process's other connections with these keys, and they report it to their users.
        """
        log.debug("the dispatcher refuses to vouch for keys: %s", error)
        self.loop.set_timer((self, "refused"), self.loop.now() + REFUSED_S, self._dealer.reconnect)


def _forked() -> None:
    global _lock
    _vouchers.clear()
    _lock = threading.Lock()


platforms.register_at_fork(after_in_child=_forked)
