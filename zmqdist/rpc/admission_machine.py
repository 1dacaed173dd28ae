"""Which call a server begins next, and which large arguments it lets come: clients in turn, within bounds in bytes.

Rule: the owner calls a method when something has happened, under a lock of its own; nothing here waits or reads a clock.

Theory of operation
    The arguments of a call are in the server's memory from their arrival to the end of the call. Those of calls that run are
    bounded by the number of threads; here are those of calls that have not begun. There are two ways for them to come:
        unasked   the client has sent them with the call. Clients do so up to a window (transport/calls_machine.py).
        pulled    the call came without its large parts, which its client keeps until they are let in here.
    So a client that sends more than the server works off is held back at its own end, and nobody else is. Each way has bounds of its
    own: what one client has pulled never stands in the way of another one's small calls.

Promises, checked by tests/machines/test_admission.py and in simulation (tests/sim/test_rpc.py)
    P1  a call begins at most once, when all its arguments are here, and never after it was dropped
    P2  between two calls of a client every other client whose calls are ready has its turn; those of one client begin in their order
    P3  calls that have not begun hold at most `client_bytes_max` pulled bytes of a client and `all_bytes_max` of all clients; a larger
        call is let in when it is the only one that counts
    P4  clients are let in by turns, the calls of one in their order, and as many as fit
    P5  unasked bytes of calls that have not begun are at most `client_unasked_max` of a client, or one call, and `all_unasked_max` of
        all clients; the next call is refused with the bound that it would break
    P6  nothing is left of a call that has begun or was dropped, or of a client that has gone

Not here: threads and locks (handler_pool.py), what a call is and how its parts come (service.py, transport/transfers.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final

STALL_S: Final = 10.0
"""Threads that are all busy for so long without one of them ending a call, while others wait, are worth a line in the log."""


class _Backlog:
    """The calls of one client that have not begun.

    Attributes:
      unasked, pulled: their bytes, by the way they came.
      held: bytes of each call that holds some; those of pulled ones are negative.
      outside: calls that are to be pulled, as (bytes, item).
      ready: calls that only wait for a thread, each with its item.
    """

    __slots__ = ("held", "outside", "pulled", "ready", "unasked")

    def __init__(self) -> None:
        self.unasked = 0
        self.pulled = 0
        self.held: dict[Hashable, int] = {}
        self.outside: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self.ready: OrderedDict[Hashable, Any] = OrderedDict()


class Turns:
    """See the module's docstring. A call is told by its client and a key; `item` is whatever its owner wants back. A client is known
    from its first call to its end.

    Attributes:
      count: calls that are ready.
      unasked, pulled: bytes of the calls of all clients that have not begun.
      outside: clients that have calls which are to be pulled, in the order of their turns; empty most of the time.
    """

    def __init__(
        self, all_bytes_max: int, all_unasked_max: int, client_bytes_max: int, client_unasked_max: int
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
        self._turns: OrderedDict[Hashable, _Backlog] = OrderedDict()

    def __len__(self) -> int:
        """Calls that have not begun, wherever their arguments are."""
        return sum(len({*backlog.held, *backlog.outside, *backlog.ready}) for backlog in self._clients.values())

    # -- how arguments come -----------------------------------------------------------------------------------------------

    def arrived(self, client: Hashable, key: Hashable, nbytes: int) -> str:
        """A call whose arguments its client has sent unasked. Why it is refused (P5); empty when it was taken.

        Args:
          nbytes: of its arguments, which are here, or about to be.
        """
        backlog = self._clients.get(client)
        if backlog is None:
            backlog = self._clients[client] = _Backlog()
        elif backlog.unasked + nbytes > self._client_unasked_max and backlog.unasked:
            return f"calls of this client that have not begun hold {backlog.unasked} bytes here, of at most {self._client_unasked_max}"
        if self.unasked + nbytes > self._all_unasked_max and self.unasked:
            return f"calls of all clients that have not begun hold {self.unasked} bytes here, of at most {self._all_unasked_max}"
        backlog.held[key] = nbytes
        backlog.unasked += nbytes
        self.unasked += nbytes
        return ""

    def announced(self, client: Hashable, key: Hashable, nbytes: int, item: Any) -> None:
        """A call whose client keeps its arguments until they are let in."""
        backlog = self._clients.setdefault(client, _Backlog())
        backlog.outside[key] = (nbytes, item)
        self.outside.setdefault(client, backlog)

    def let_in(self) -> Any | None:
        """The item of the next call whose arguments may come, which count from now on; None: nobody's may (P3, P4)."""
        for client, backlog in self.outside.items():
            key, (nbytes, item) = next(iter(backlog.outside.items()))
            if backlog.pulled and backlog.pulled + nbytes > self._client_bytes_max:
                continue
            if self.pulled and self.pulled + nbytes > self._all_bytes_max:
                return None  # smaller ones of others would be let in before it for ever
            del backlog.outside[key]
            backlog.held[key] = -nbytes
            backlog.pulled += nbytes
            self.pulled += nbytes
            self.outside.move_to_end(client)
            if not backlog.outside:
                del self.outside[client]
            return item
        return None

    # -- how calls begin ----------------------------------------------------------------------------------------------------

    def ready(self, client: Hashable, key: Hashable, item: Any) -> None:
        """All arguments of a call are here, it waits for a thread. One that has next to none need not have been told of before."""
        backlog = self._clients.get(client)
        if backlog is None:
            backlog = self._clients[client] = _Backlog()
        if not backlog.ready:
            self._turns[client] = backlog
        backlog.ready[key] = item
        self.count += 1

    def next(self) -> Any | None:
        """The item of the call that begins now; None when none is ready (P2)."""
        if not self._turns:
            return None
        client, backlog = self._turns.popitem(last=False)
        key, item = backlog.ready.popitem(last=False)
        self.count -= 1
        if backlog.ready:
            self._turns[client] = backlog
        if backlog.held:
            self._let_go(backlog, key)
        return item

    # -- how they end otherwise -----------------------------------------------------------------------------------------------

    def dropped(self, client: Hashable, key: Hashable) -> bool:
        """A call will not begin here, or has begun elsewhere (in a batch); whether it has waited for a thread, or to be let in."""
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
                del self._turns[client]
        self._let_go(backlog, key)
        return was_ready or was_outside

    def gone(self, client: Hashable) -> None:
        """The connection of a client has ended."""
        backlog = self._clients.pop(client, None)
        if backlog is not None:
            self._turns.pop(client, None)
            self.outside.pop(client, None)
            self.count -= len(backlog.ready)
            self.unasked -= backlog.unasked
            self.pulled -= backlog.pulled

    def cut_off(self, ready: bool) -> list[tuple[Any, Any, Any]]:
        """No call whose arguments are not all here will begin, nor, if so, one that is ready: they are dropped, each as (client, key,
        item), without an item while its arguments come."""
        calls: list[tuple[Any, Any, Any]] = []
        for client, backlog in self._clients.items():
            calls += [(client, key, item) for key, (_, item) in backlog.outside.items()]
            calls += [(client, key, None) for key in backlog.held if key not in backlog.ready]
            if ready:
                calls += [(client, key, item) for key, item in backlog.ready.items()]
        for client, key, _ in calls:
            self.dropped(client, key)
        return calls

    def waiting(self, client: Hashable) -> list[Any]:
        """The items of a client's calls that are ready."""
        backlog = self._clients.get(client)
        return [] if backlog is None else list(backlog.ready.values())

    def _let_go(self, backlog: _Backlog, key: Hashable) -> None:
        nbytes = backlog.held.pop(key, 0)
        if nbytes > 0:
            backlog.unasked -= nbytes
            self.unasked -= nbytes
        elif nbytes:
            backlog.pulled += nbytes
            self.pulled += nbytes


class StallDetector:
    """Tells once each time that all threads are busy and nothing moves, while calls wait.

    Attributes:
      deadline: when to `look` again; None: there is no need.
    """

    def __init__(self, limit_s: float = STALL_S) -> None:
        self.deadline: float | None = None
        self._limit_s = limit_s
        self._ended = -1
        self._since = 0.0
        self._reported = False

    def look(self, stuck: bool, ended: int, now: float) -> bool:
        """Whether to say so now.

        Args:
          stuck: every thread is busy, and calls wait.
          ended: calls that have ended since the beginning.
        """
        if not stuck:
            self.deadline, self._ended, self._reported = None, -1, False
            return False
        if ended != self._ended:
            self._ended, self._since, self._reported = ended, now, False
        due_now = not self._reported and now - self._since >= self._limit_s
        self._reported = self._reported or due_now
        self.deadline = (now if self._reported else self._since) + self._limit_s
        return due_now
