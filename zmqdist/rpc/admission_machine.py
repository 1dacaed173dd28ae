"""Decides which call a server begins next, and which large arguments it requests. It is fair among
clients, and bounds the bytes that wait.

Rule: the owner reports events by calling a method, under a lock of its own. No method waits or
  reads a clock.

Theory of operation
    The arguments of a call are in the server's memory from their arrival until the call ends. The
    number of threads bounds the arguments of running calls; this machine bounds the arguments of
    calls that have not begun. Arguments arrive in one of two ways:
        unasked   the client sent the arguments with the call, which it does up to a window (transport/calls_machine.py)
        pulled    the client sent the call without its large parts, and keeps these parts until this machine lets the call in, which means
                  that the server requests them
    So a client that sends faster than the server works has to keep its arguments, and no other
    client suffers. Unasked and pulled arguments have separate bounds, so that the arguments pulled
    from one client never block small calls of another client.

Promises, checked by tests/rpc/test_admission_machine.py and in simulation (tests/sim/test_rpc.py)
    P1  a call begins at most once, when all its arguments have arrived, and never after it was
        dropped
    P2  between two calls of a client, one call of every other client with ready calls begins; the
        calls of one client begin in the order in which they became ready
    P3  calls that have not begun hold at most `client_bytes_max` pulled bytes of one client and
        `all_bytes_max` of all clients; a larger call is let in when no other call counts against
        the same bound
    P4  clients take turns to have a call let in; of the calls of one client, the one that was
        announced first is let in first; calls are let in as long as they fit
    P5  calls that have not begun hold at most `client_unasked_max` unasked bytes of one client and
        `all_unasked_max` of all clients, unless they are a single call; a call that exceeds a bound
        is refused, and the refusal names the bound
    P6  no state is kept of a call that has begun or was dropped, or of a client that has
        disconnected

Not here: threads and locks (handler_pool.py), what a call is and how its parts arrive (service.py,
transport/transfers.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any, Final

SHORT_S: Final = 100e-6
"""Seconds of a call below which a hand-over to another thread takes longer than the call."""
CREDIT_S: Final = 0.05
LONG_SHARE: Final = 0.01
BAR_S: Final = 1.0
BAR_S_MAX: Final = 64.0
STALL_S: Final = 10.0
"""Seconds after which a warning is logged if all threads are busy, calls wait, and no call ends."""


class _Backlog:
    """The calls of one client that have not begun.

    Attributes:
      unasked, pulled: bytes of the arguments of these calls, by the way in which they arrive.
      held_bytes: the counted bytes of each call, as a negative number if they are pulled.
      outside: calls whose arguments are still with the client, each as (bytes, item).
      ready: calls that wait only for a thread, each with its item.
    """

    __slots__ = ("held_bytes", "outside", "pulled", "ready", "unasked")

    def __init__(self) -> None:
        self.unasked = 0
        self.pulled = 0
        self.held_bytes: dict[Hashable, int] = {}
        self.outside: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self.ready: OrderedDict[Hashable, Any] = OrderedDict()


class FairAdmission:
    """The calls of all clients that have not begun; the module's docstring has the rules.

    A call is identified by its client and a key. Its `item` is an object that the owner passes in,
    and that the methods return. A client is known from its first call until the client disconnects.

    Attributes:
      count: number of calls that are ready.
      unasked, pulled: bytes of the arguments of all calls that have not begun, by the way in which
        they arrive.
      outside: the clients that still keep arguments of calls, in the order of their turns; it is
        empty most of the time.
    """

    def __init__(
        self,
        all_bytes_max: int,
        all_unasked_max: int,
        client_bytes_max: int,
        client_unasked_max: int,
    ) -> None:
        self.count = 0
        self.unasked = 0
        self.pulled = 0
        self.outside: OrderedDict[Hashable, _Backlog] = OrderedDict()
        self._all_bytes_max = all_bytes_max
        self._all_unasked_max = all_unasked_max
        self._client_bytes_max = client_bytes_max
        self._client_unasked_max = client_unasked_max
        self._clients: dict[Hashable, _Backlog] = {}
        self._in_turn: OrderedDict[Hashable, _Backlog] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of calls that have not begun, wherever their arguments are."""
        return sum(
            len({*backlog.held_bytes, *backlog.outside, *backlog.ready})
            for backlog in self._clients.values()
        )

    # -- how arguments come ------------------------------------------------------------------------

    def arrived(self, client: Hashable, key: Hashable, nbytes: int) -> str:
        """Count a call whose client has sent the arguments with the call. Return why a bound
        refuses the call (P5), or "" if no bound does.

        Args:
          nbytes: size of the arguments, which have arrived or are about to arrive.
        """
        backlog = self._clients.get(client)
        # P5: a call that is alone is accepted, however large it is.
        if backlog is None:
            backlog = self._clients[client] = _Backlog()
        elif backlog.unasked + nbytes > self._client_unasked_max and backlog.unasked:
            return f"calls of this client that have not begun hold {backlog.unasked} bytes here, of at most {self._client_unasked_max}"
        if self.unasked + nbytes > self._all_unasked_max and self.unasked:
            return f"calls of all clients that have not begun hold {self.unasked} bytes here, of at most {self._all_unasked_max}"
        backlog.held_bytes[key] = nbytes
        backlog.unasked += nbytes
        self.unasked += nbytes
        return ""

    def announced(self, client: Hashable, key: Hashable, nbytes: int, item: Any) -> None:
        """Record a call whose client keeps the large arguments until the server requests them.
        `item` stands for the call: `let_in` returns it when the server may request the arguments.
        """
        backlog = self._clients.setdefault(client, _Backlog())
        backlog.outside[key] = (nbytes, item)
        self.outside.setdefault(client, backlog)

    def let_in(self) -> Any | None:
        """Return the item of the next call whose arguments the server may request, and count these
        arguments. Return None if the bounds on the arguments that the server requests (P3) let no
        call in now.
        """
        for client, backlog in self.outside.items():
            key, (nbytes, item) = next(iter(backlog.outside.items()))
            if backlog.pulled and backlog.pulled + nbytes > self._client_bytes_max:
                continue
            if self.pulled and self.pulled + nbytes > self._all_bytes_max:
                # if smaller calls of other clients were let in, they could overtake this call for
                # ever
                return None
            del backlog.outside[key]
            backlog.held_bytes[key] = -nbytes
            backlog.pulled += nbytes
            self.pulled += nbytes
            # P4: the client's next call waits until the other clients had their turns.
            self.outside.move_to_end(client)
            if not backlog.outside:
                del self.outside[client]
            return item
        return None

    # -- how calls begin ---------------------------------------------------------------------------

    def ready(self, client: Hashable, key: Hashable, item: Any) -> None:
        """Queue a call for a thread, because all its arguments have arrived."""
        backlog = self._clients.get(client)
        if backlog is None:
            backlog = self._clients[client] = _Backlog()
        if not backlog.ready:
            self._in_turn[client] = backlog
        backlog.ready[key] = item
        self.count += 1

    def next(self) -> Any | None:
        """Return the item of the call that begins now. Clients take turns (P2). None means that no
        call is ready."""
        if not self._in_turn:
            return None
        # P2: the client that has waited longest, and behind the others if it has more calls.
        client, backlog = next(iter(self._in_turn.items()))
        key, item = backlog.ready.popitem(last=False)
        self.count -= 1
        if not backlog.ready:
            del self._in_turn[client]
        elif len(self._in_turn) > 1:
            self._in_turn.move_to_end(client)
        if backlog.held_bytes:
            self._uncount(backlog, key)
        return item

    # -- how calls are dropped ---------------------------------------------------------------------

    def dropped(self, client: Hashable, key: Hashable) -> bool:
        """Remove a call that `next` must not return any more, because its reply is not wanted or
        because it has begun in a batch. Return whether the call waited for a thread or to be let
        in.
        """
        backlog = self._clients.get(client)
        if backlog is None:
            return False
        was_outside = backlog.outside.pop(key, None) is not None
        if was_outside and not backlog.outside:
            del self.outside[client]
        was_ready = key in backlog.ready
        if was_ready:
            del backlog.ready[key]
            self.count -= 1
            if not backlog.ready:
                del self._in_turn[client]
        self._uncount(backlog, key)
        return was_ready or was_outside

    def client_lost(self, client: Hashable) -> None:
        """Remove all calls of a client whose connection has ended."""
        backlog = self._clients.pop(client, None)
        if backlog is not None:
            self._in_turn.pop(client, None)
            self.outside.pop(client, None)
            self.count -= len(backlog.ready)
            self.unasked -= backlog.unasked
            self.pulled -= backlog.pulled

    def cut_off(self, ready: bool) -> list[tuple[Any, Any, Any]]:
        """Drop every call whose arguments have not all arrived; with `ready`, also drop the calls
        that wait for a thread.

        Returns:
          Each dropped call as (client, key, item). The item is None for a call whose arguments are
          just arriving.
        """
        calls: list[tuple[Any, Any, Any]] = []
        for client, backlog in self._clients.items():
            calls += [(client, key, item) for key, (_, item) in backlog.outside.items()]
            calls += [(client, key, None) for key in backlog.held_bytes if key not in backlog.ready]
            if ready:
                calls += [(client, key, item) for key, item in backlog.ready.items()]
        for client, key, _ in calls:
            self.dropped(client, key)
        return calls

    def waiting(self, client: Hashable) -> list[Any]:
        """Return the items of a client's calls that wait only for a thread."""
        backlog = self._clients.get(client)
        return [] if backlog is None else list(backlog.ready.values())

    def _uncount(self, backlog: _Backlog, key: Hashable) -> None:
        nbytes = backlog.held_bytes.pop(key, 0)
        if nbytes > 0:
            backlog.unasked -= nbytes
            self.unasked -= nbytes
        elif nbytes:
            backlog.pulled += nbytes
            self.pulled += nbytes


class ShortMethod:
    """Judges whether the calls of one method are so short that the loop's thread should run them.

    What a call takes longer than SHORT_S is taken from a credit, which grows by LONG_SHARE of the
    time and never exceeds CREDIT_S. Without credit the method does not count as short for `_bar_s`
    seconds, which double while that repeats soon. So the loop's thread loses a small share of its
    time to long calls, and a pause of the whole process counts for little.
    """

    __slots__ = ("_bar_s", "_barred_until", "_credit_s", "_ran_at")

    def __init__(self) -> None:
        self._credit_s = CREDIT_S
        self._ran_at = self._barred_until = -inf
        self._bar_s = BAR_S

    def holds(self, now: float) -> bool:
        """Return whether the method counts as short now."""
        return now >= self._barred_until

    def ran(self, took_s: float, now: float) -> None:
        """Take the time of a call in the loop's thread."""
        if took_s <= SHORT_S:
            return
        earned_s = LONG_SHARE * (now - self._ran_at)
        self._ran_at = now
        self._credit_s = min(CREDIT_S, self._credit_s + earned_s) - (took_s - SHORT_S)
        if self._credit_s < 0.0:
            good_s = now - self._barred_until
            self._bar_s = BAR_S if good_s > self._bar_s else min(2 * self._bar_s, BAR_S_MAX)
            self._barred_until = now + self._bar_s
            self._credit_s = CREDIT_S / 2


class StallDetector:
    """Recognises a stall: all threads are busy, calls wait, and no call has ended for `limit_s`.
    Each stall is reported once.

    Attributes:
      deadline: when to call `look` again. None means that a thread is free or no call waits.
    """

    def __init__(self, limit_s: float = STALL_S) -> None:
        self.deadline: float | None = None
        self._limit_s = limit_s
        self._ended_count = -1
        self._since = 0.0
        self._reported = False

    def look(self, stuck: bool, ended_count: int, now: float) -> bool:
        """Take the current figures, and return whether to log a warning about a stall now.

        Args:
          stuck: whether every thread is busy and calls wait.
          ended: number of calls that have ended so far.
        """
        if not stuck:
            self.deadline, self._ended_count, self._reported = None, -1, False
            return False
        if ended_count != self._ended_count:
            self._ended_count, self._since, self._reported = ended_count, now, False
        due_now = not self._reported and now - self._since >= self._limit_s
        self._reported = self._reported or due_now
        self.deadline = (now if self._reported else self._since) + self._limit_s
        return due_now
