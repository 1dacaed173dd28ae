"""A program that recruits workers in virtual time, with the real Recruitment.

Workers start and end, belong to another program for a while, refuse for good, and are wanted,
dropped and moved to another address. A reply to an invitation takes a moment, or as long as its
server is down. After FAULTS_S nothing changes any more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random

from tests.sim.simulations.calls import promise_kept
from tests.sim.simulations.clock import SimClock
from zmqdist.errors import ALREADY_EXISTS, INVALID_ARGUMENT, OK, UNAVAILABLE
from zmqdist.limits import INVITE_PATIENCE_S
from zmqdist.training.recruitment_machine import (
    AGAIN_S,
    DropInvitation,
    InviteWorker,
    Recruitment,
    RecruitmentEffect,
)

ADDRESSES = ("a:1", "b:1", "c:1", "d:1")
INDICES = (0, 1, 2)
FAULTS_S = 20.0
END_S = FAULTS_S + INVITE_PATIENCE_S + 5.0
REPLY_S = 0.1


@dataclass
class SimServer:
    """The server at one address.

    Attributes:
      up: it runs.
      refuses: the code with which it refuses; OK: it accepts.
      works_as: the index of the worker that it is for the program; None: it has not accepted.
    """

    up: bool = True
    refuses: int = OK
    works_as: int | None = None


@dataclass
class RecruitmentSim:
    """One run, with the real machine, a table of what is in flight, and seeded faults."""

    seed: int
    faults: int = 25
    clock: SimClock = field(default_factory=SimClock)
    machine: Recruitment = field(default_factory=Recruitment)
    servers: dict[str, SimServer] = field(
        default_factory=lambda: {address: SimServer() for address in ADDRESSES}
    )
    in_flight: dict[int, InviteWorker] = field(default_factory=dict)
    wanted: dict[int, str] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    last_reply: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The code with which each wanted worker has replied last, and since when it replies with that
    one."""

    def run(self) -> None:
        self.random = Random(self.seed)
        for index in INDICES:
            self._want(index)
        for _ in range(self.faults):
            self.clock.at(self.random.uniform(0.0, FAULTS_S), self._fault)
        self.clock.at(0.0, self._look)
        self.clock.run(END_S)
        for index, address in self.wanted.items():
            server = self.servers[address]
            if server.up and server.refuses == OK:
                recruited = index not in self.machine.missing and server.works_as == index
                self._promise(recruited, f"R2: worker:{index} is not recruited")
        self._check_refusal()

    def _check_refusal(self) -> None:
        """R5: what is reported as a refusal is one, and every one that waiting cannot change is
        reported."""
        refusing = set()
        for index in self.machine.missing:
            code, since = self.last_reply[index]
            if code == INVALID_ARGUMENT or (
                code == ALREADY_EXISTS and self.clock.now - since >= INVITE_PATIENCE_S
            ):
                refusing.add(index)
        refusal = self.machine.refusal(self.clock.now)
        self._promise(
            refusal is None if not refusing else refusal is not None and refusal[0] in refusing,
            "R5: the refusal",
        )

    def _promise(self, holds: bool, what: str) -> None:
        promise_kept(holds, f"recruitment {what}", self.seed, self.trace)

    def _note(self, what: str) -> None:
        self.trace.append(f"{self.clock.now:9.4f}  {what}")

    # -- the runtime -------------------------------------------------------------------------------

    def _perform(self, effects: list[RecruitmentEffect]) -> None:
        for effect in effects:
            match effect:
                case InviteWorker(number, index, address):
                    self._note(f"invites {index} at {address}")
                    self._promise(
                        self.wanted.get(index) == address,
                        "R1: a worker is invited that is not wanted",
                    )
                    works = self.servers[address].works_as == index and index in self._present()
                    self._promise(
                        not (works and index not in self.machine.missing),
                        "R3: a worker is invited again",
                    )
                    self.in_flight[number] = effect
                    self.clock.after(self.random.random() * REPLY_S, partial(self._arrives, number))
                case DropInvitation(number):
                    self.in_flight.pop(number, None)
        flights = Counter(effect.index for effect in self.in_flight.values())
        self._promise(max(flights.values(), default=0) <= 1, "R1: two invitations of a worker")
        self._promise(
            flights.keys() <= self.wanted.keys(), "R1: an invitation of a worker that is not wanted"
        )
        if self.machine.deadline < inf:
            self.clock.at(max(self.machine.deadline, self.clock.now), self._tick)

    def _tick(self) -> None:
        if self.machine.deadline <= self.clock.now:
            self._perform(self.machine.ticked(self.clock.now))

    def _arrives(self, number: int) -> None:
        """Deliver an invitation; while its server is down it waits. Its reply may come after it was
        dropped."""
        effect = self.in_flight.get(number)
        if effect is None:
            return
        server = self.servers[effect.address]
        if not server.up:
            self.clock.after(0.05, partial(self._arrives, number))
            return
        if server.refuses == OK:
            for other in self.servers.values():
                # a dispatcher has one member of each name: the last one
                other.works_as = None if other.works_as == effect.index else other.works_as
            server.works_as = effect.index
            self.clock.after(self.random.random() * REPLY_S, self._report_members)
        message = "it refuses" if server.refuses else ""
        reply = partial(self._replied, number, server.refuses, message)
        self.clock.after(self.random.random() * REPLY_S, reply)

    def _replied(self, number: int, code: int, message: str) -> None:
        before = self.machine.missing
        known = number in self.in_flight
        if known:
            index = self.in_flight[number].index
            if self.last_reply[index][0] != code:
                self.last_reply[index] = code, self.clock.now
        self._perform(self.machine.invitation_ended(number, code, message, self.clock.now))
        if not known:
            self._promise(self.machine.missing == before, "R4: a dropped invitation has an effect")
        self._check_refusal()

    def _present(self) -> frozenset[int]:
        return frozenset(
            server.works_as
            for server in self.servers.values()
            if server.up and server.works_as is not None
        )

    def _report_members(self) -> None:
        self._perform(self.machine.members_changed(self._present(), self.clock.now))

    def _look(self) -> None:
        """R2, R3: what is missing and has no invitation is due soon; what works has none."""
        now = self.clock.now
        flights = {effect.index for effect in self.in_flight.values()}
        for index in self.wanted:
            if index in self.machine.missing:
                due = index in flights or self.machine.deadline <= now + AGAIN_S + 1e-9
                self._promise(due, f"R2: worker:{index} is not invited")
            else:
                self._promise(index not in flights, f"R3: worker:{index} works and is invited")
        self.clock.after(0.1, self._look)

    # -- faults ------------------------------------------------------------------------------------

    def _want(self, index: int) -> None:
        free = [address for address in ADDRESSES if address not in self.wanted.values()]
        self.wanted[index] = address = self.random.choice(free)
        self._note(f"wants {index} at {address}")
        self.last_reply[index] = OK, 0.0
        self._perform(self.machine.want(index, address, self.clock.now))

    def _fault(self) -> None:
        address = self.random.choice(ADDRESSES)
        server = self.servers[address]
        match self.random.choice(("down", "up", "refuse", "accept", "drop", "want")):
            case "down":
                self._note(f"{address} ends")
                server.up, server.works_as = False, None
                self._report_members()
                for number, effect in list(self.in_flight.items()):
                    if effect.address == address:  # it was in flight to a process that has ended
                        self.clock.after(
                            self.random.random() * REPLY_S,
                            partial(self._replied, number, UNAVAILABLE, "gone"),
                        )
            case "up":
                self._note(f"{address} starts")
                server.up = True
            case "refuse":
                server.refuses, server.works_as = (
                    self.random.choice((ALREADY_EXISTS, INVALID_ARGUMENT)),
                    None,
                )
                self._note(f"{address} refuses with {server.refuses}")
                self._report_members()
            case "accept":
                server.refuses = OK
            case "drop":
                index = self.random.choice(INDICES)
                self._note(f"drops {index}")
                self.wanted.pop(index, None)
                self._perform(self.machine.drop(index))
            case "want":
                self._want(self.random.choice(INDICES))


def simulate_recruitment(seed: int, faults: int = 25) -> RecruitmentSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = RecruitmentSim(seed, faults)
    world.run()
    return world
