"""Simulated processes that call methods of each other over connections that end, as tasks and
parameter servers do, in virtual time.

The calls of one process to another arrive in the order of sending, each once or not at all. When a
connection ends, the messages on the way are lost in both directions. Each side notices the end at
its own time. The caller gets UNAVAILABLE for its pending calls, which may have been carried out;
the callee learns that its caller waits no longer (`SimCall.on_dropped`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any, TypeAlias

from tests.sim.simulations.clock import SimClock
from tests.sim.simulations.network import SimConnection, SimProcess
from zmqdist.errors import UNAVAILABLE

NOTICE_S = 0.05
"""The longest time until a side notices the end of a connection, in seconds."""

Then: TypeAlias = Callable[[Any, int, str], object]
"""Gets (value, 0, "") or (None, code, message)."""


class SimCall:
    """One call as its callee sees it. The callee replies once, or the caller is gone."""

    def __init__(self, connection: SimConnection, number: int) -> None:
        self.connection = connection
        self._number = number
        self._over = False
        self.on_dropped: Callable[[], object] = lambda: None

    def answer(self, value: Any) -> None:
        self._end((self._number, value, 0, ""))

    def fail(self, code: int, message: str) -> None:
        self._end((self._number, None, code, message))

    def drop(self) -> None:
        """Note that the callee has noticed the end of the connection."""
        if not self._over:
            self._over = True
            self.on_dropped()

    def _end(self, reply: tuple[Any, ...]) -> None:
        assert not self._over or not self.connection.open, "a call is answered twice"
        self._over = True
        if self.connection.open:
            self.connection.send_down(reply)


class SimHost(SimProcess):
    """One incarnation of a process with methods that other processes call.

    Attributes:
      name: of the process; its next incarnation has the same name.
      life: its incarnation.
      methods: name -> fn(call, *args).
    """

    def __init__(self, network: SimCalls, name: str, life: int) -> None:
        super().__init__()
        self.network = network
        self.name = name
        self.life = life
        self.methods: dict[str, Callable[..., object]] = {}
        self.on_left: Callable[[SimHost], object] = lambda peer: None
        """Called with a process whose connection to this one, or from it, has ended."""

    def __repr__(self) -> str:
        return f"{self.name}({self.life})"


def _copied(message: Any) -> tuple[Any, int]:
    return deepcopy(message), 0


class _Channel:
    """A connection, and the pending calls over it."""

    def __init__(self, network: SimCalls, caller: SimHost, callee: SimHost) -> None:
        self.ends = caller, callee
        self._network = network
        self._asked: dict[int, Then] = {}
        self._running: list[SimCall] = []
        self._numbers = 0
        self.connection = SimConnection(
            network.clock,
            network.random,
            f"{caller} to {callee}",
            self._arrived,
            self._answered,
            wire=_copied,
        )

    def call(self, method: str, args: tuple[Any, ...], then: Then) -> None:
        self._numbers += 1
        self._asked[self._numbers] = then
        self.connection.send_up((self._numbers, method, args))

    def _arrived(self, connection: SimConnection, message: Any) -> None:
        number, method, args = message
        call = SimCall(connection, number)
        self._running.append(call)
        callee = self.ends[1]
        callee.post(lambda: callee.methods[method](call, *args))

    def _answered(self, reply: tuple[Any, ...]) -> None:
        number, *outcome = reply
        then = self._asked.pop(number)
        self.ends[0].post(lambda: then(*outcome))

    def end(self) -> None:
        """End the connection. Each side notices it at its own time."""
        self.connection.end()
        caller, callee = self.ends
        clock, random = self._network.clock, self._network.random
        clock.after(random.random() * NOTICE_S, lambda: caller.post(self._caller_notices))
        clock.after(random.random() * NOTICE_S, lambda: callee.post(self._callee_notices))

    def _caller_notices(self) -> None:
        asked, self._asked = self._asked, {}
        self.ends[0].on_left(self.ends[1])
        for then in asked.values():
            then(None, UNAVAILABLE, f"the connection to {self.ends[1]} has ended")

    def _callee_notices(self) -> None:
        for call in self._running:
            call.drop()
        self.ends[1].on_left(self.ends[0])


class SimCalls:
    """The processes by name, and the connections between them. A call to a process that does not
    run fails after a moment."""

    def __init__(self, clock: SimClock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.hosts: dict[str, SimHost] = {}
        self._channels: dict[tuple[SimHost, SimHost], _Channel] = {}

    def start(self, host: SimHost) -> None:
        """Add an incarnation of a process, which can be called now."""
        self.hosts[host.name] = host

    def kill(self, name: str) -> None:
        """End the current incarnation of a process, with all its connections."""
        host = self.hosts.pop(name)
        host.kill()
        for ends in [ends for ends in self._channels if host in ends]:
            self._channels.pop(ends).end()

    def cut(self, caller: str, callee: str) -> None:
        """End a connection, if there is one; the next call makes another."""
        ends = next(
            (ends for ends in self._channels if (ends[0].name, ends[1].name) == (caller, callee)),
            None,
        )
        if ends is not None:
            self._channels.pop(ends).end()

    def is_connected(self, caller: SimHost, callee: SimHost) -> bool:
        """Return whether the caller has a connection of its own to this incarnation of the
        callee.
        """
        return (caller, callee) in self._channels

    def call(
        self, caller: SimHost, callee: str, method: str, *args: Any, then: Then = lambda *_: None
    ) -> None:
        """Call a method of the current incarnation of a process. `then` gets the outcome, unless
        the caller has died."""
        host = self.hosts.get(callee)
        if host is None:
            moment_s = self.random.random() * NOTICE_S
            self.clock.after(
                moment_s,
                lambda: caller.post(lambda: then(None, UNAVAILABLE, f"{callee} is not there")),
            )
            return
        channel = self._channels.get((caller, host))
        if channel is None:
            channel = self._channels[caller, host] = _Channel(self, caller, host)
        channel.call(method, args, then)


def promise_kept(holds: bool, name: str, seed: int, trace: list[str]) -> None:
    """Raise AssertionError, with the seed and the end of the trace, if a promise is broken."""
    if not holds:
        happened = "\n".join(trace[-60:])
        raise AssertionError(f"{name} is broken; pytest tests/sim --seed {seed}\n{happened}")


class SimWorld:
    """The base of a simulation of such processes: a seed, a clock, a network, and a trace of the
    events.

    Attributes:
      lives: the incarnations that were given out.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.clock = SimClock()
        self.network = SimCalls(self.clock, self.random)
        self.trace: list[str] = []
        self.lives = 0

    def new_life(self) -> int:
        self.lives += 1
        return self.lives

    def note(self, what: str) -> None:
        """Add an event to the trace, which is in the text of a broken promise."""
        self.trace.append(f"{self.clock.now:9.4f}  {what}")

    def promise(self, holds: bool, name: str) -> None:
        """Raise AssertionError, with the seed and the trace, if a promise is broken."""
        promise_kept(holds, name, self.seed, self.trace)

    def wake(self, machine: Any, host: SimHost, tick: Callable[[], object]) -> None:
        """Have `tick` called at a machine's deadline. Call this after each event."""
        if machine.deadline < float("inf"):
            due = machine.deadline
            self.clock.at(
                due, lambda: host.post(tick) if machine.deadline <= self.clock.now else None
            )
