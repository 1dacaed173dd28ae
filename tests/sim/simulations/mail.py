"""Messages from one task to another in virtual time: the real Outbox of the sender and the real
Mailbox of the receiver.

Small messages overtake large ones. Faults: sender and receiver die and come back in another
incarnation, connections end with messages in flight, receivers cancel, time out too early, or put a
message back. In the end every confirmed message has been received.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.sim.simulations.calls import SimCall, SimHost, SimWorld
from zmqdist.errors import OK
from zmqdist.tasks.mailbox_machine import Key, Mailbox, Outbox, Wait

FAULTS_S = 4.0
SENDING_S = 5.0
END_S = 12.0
TAGS = ("a", "b", "c")
SLOW_S = 0.05
DOWN_S = 0.3
ITEMS_MAX = 30


@dataclass(eq=False)
class Letter:
    """One message as its sender knows it. `number` counts the messages of this incarnation under
    this tag."""

    life: int
    tag: str
    number: int
    at_life: int = 0
    """The incarnation of the receiver that has confirmed the message."""
    code: int | None = None


class SimSender:
    """A model of Mail.send, for one incarnation of a task."""

    def __init__(self, world: MailSim) -> None:
        self.world = world
        self.host = SimHost(world.network, "worker:0", world.new_life())
        self.out = Outbox()
        self.letters: dict[str, list[Letter]] = {tag: [] for tag in TAGS}
        world.network.start(self.host)
        self._send()

    def _send(self) -> None:
        world = self.world
        if world.clock.now < SENDING_S:
            for _ in range(world.random.randint(1, 4)):
                self._one(world.random.choice(TAGS))
            world.clock.after(world.random.random() * 0.05, lambda: self.host.post(self._send))

    def _one(self, tag: str) -> None:
        world = self.world
        letter = Letter(self.host.life, tag, len(self.letters[tag]))
        self.letters[tag].append(letter)
        world.letters[letter.life, tag, letter.number] = letter
        number, low, after = self.out.numbers(tag)
        self.out.sent(tag, number, after)
        key = Key("worker:0", self.host.life, "worker:1", tag)
        args = key, number, low, after, (letter.life, tag, letter.number)
        then = partial(self._ended, letter, number)
        slow_s = world.random.random() * SLOW_S if world.random.random() < 0.3 else 0.0
        call = partial(world.network.call, self.host, "worker:1", "put", *args, then=then)
        world.clock.after(slow_s, lambda: self.host.post(call))

    def _ended(self, letter: Letter, number: int, value: Any, code: int, message: str) -> None:
        letter.code = code
        letter.at_life, held = value or (0, 0)
        self._have_skipped(self.out.ended(number, code != OK, held))

    def _have_skipped(self, wanted: tuple[int, int] | None) -> None:
        if wanted is not None:
            args = "worker:0", self.host.life, wanted[1]
            self.world.network.call(
                self.host, "worker:1", "skip", *args, then=partial(self._skipped, wanted)
            )

    def _skipped(self, wanted: tuple[int, int], value: Any, code: int, message: str) -> None:
        self._have_skipped(wanted if code else self.out.skipped(wanted[0]))


class SimReceiver:
    """A model of Mail.recv, for one incarnation of a task."""

    def __init__(self, world: MailSim) -> None:
        self.world = world
        self.host = SimHost(world.network, "worker:1", world.new_life())
        self.host.methods |= {"put": self._put, "skip": self._skip, "hello": self._hello}
        self.box = Mailbox(ITEMS_MAX)
        self.got: dict[tuple[int, str], list[int]] = {}
        self.ended: set[int] = set()
        world.network.start(self.host)
        for tag in TAGS:
            self._receive(tag)

    def _put(self, call: SimCall, key: Key, number: int, low: int, after: int, value: Any) -> None:
        ended, refusal = self.box.sent(key, value, 1, number, low, after)
        most = ITEMS_MAX + len(TAGS)  # each receiver may put one message back
        self.world.promise(self.box.items <= most, "mailbox P5: more letters than allowed")
        if refusal is None:
            call.answer(
                (self.host.life, self.host.life if self.box.holds("worker:0", number, after) else 0)
            )
        else:
            call.fail(refusal.error_code, refusal.message)
        self._wake(ended)

    def _skip(self, call: SimCall, source: str, life: int, number: int) -> None:
        self._wake(self.box.skipped(source, life, number))
        call.answer(None)

    def _hello(self, call: SimCall, life: int) -> None:
        self._wake(self.box.incarnation_seen("worker:0", life))

    def gone(self) -> None:
        self._wake(self.box.sender_gone("worker:0", "worker:0 has gone"))

    # -- one reader for each tag -------------------------------------------------------------------

    def _receive(self, tag: str) -> None:
        world = self.world
        due = world.clock.now + world.random.choice((0.01, 0.2, 1.0))
        wait = self.box.wanted(Key("worker:0", 0, "worker:1", tag), due)
        if wait.ended:
            self._end(wait)
            return
        wait.wake = lambda: self._end(wait)
        if world.random.random() < 0.1 and world.faulty:
            world.clock.after(
                world.random.random() * 0.1, lambda: self.host.post(lambda: self._cancel(wait))
            )
        world.wake(self.box, self.host, lambda: self._wake(self.box.ticked(world.clock.now)))

    def _cancel(self, wait: Wait) -> None:
        if self.box.cancelled(wait):
            self._end(wait)

    def _wake(self, ended: list[Wait]) -> None:
        for wait in ended:
            if wait.wake is not None:
                wait.wake()

    def _end(self, wait: Wait) -> None:
        world = self.world
        world.promise(id(wait) not in self.ended and wait.ended, "mailbox P3: a wait ends twice")
        world.kept.append(wait)
        self.ended.add(id(wait))
        tag = wait.key.tag
        if not wait.code:
            life, sent_under, number = wait.letter
            world.promise(wait.incarnation in (0, life), "mailbox P2: a letter of another life")
            world.promise(sent_under == tag, "mailbox P1: a letter of another tag")
            if world.random.random() < 0.05:  # the message did not fit into the receiver's array
                self._wake(self.box.returned(wait))
            else:
                self._got(life, tag, number)
        pause_s = 0.01 if wait.code else world.random.random() * 0.05
        world.clock.after(pause_s, lambda: self.host.post(lambda: self._receive(tag)))

    def _got(self, life: int, tag: str, number: int) -> None:
        world = self.world
        world.note(f"{self.host} got {life} {tag} {number}")
        got = self.got.setdefault((life, tag), [])
        world.promise(
            not got or number > got[-1], "mailbox P1: not in the order of sending, or twice"
        )
        got.append(number)


class MailSim(SimWorld):
    """One run of sender and receiver with seeded faults."""

    def __init__(self, seed: int, faults: int = 10) -> None:
        super().__init__(seed)
        self.faulty = faults > 0
        self.letters: dict[tuple[int, str, int], Letter] = {}
        self.kept: list[Wait] = []
        """Keep all messages, so that no message gets the id() of another one."""
        self.receiver = SimReceiver(self)
        self.sender = SimSender(self)
        self.received = 0
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)

    def run(self) -> None:
        self.clock.run(END_S)
        self.promise(not self.sender.out.unconfirmed, "outbox: a letter stays on the way")
        self.promise(
            self.receiver.box.items == 0, "mailbox P6: letters are left that somebody waits for"
        )
        here, life = self.receiver.host.life, self.sender.host.life
        for tag in TAGS:
            confirmed = [
                letter.number
                for letter in self.sender.letters[tag]
                if letter.code == OK and letter.at_life == here
            ]
            got = set(self.receiver.got.get((life, tag), []))
            self.promise(got >= set(confirmed), "mailbox P1: a confirmed letter was not received")
            self.received += len(got)

    def _fault(self) -> None:
        kind = self.random.choice(("sender", "receiver", "cut"))
        self.note(kind)
        if kind == "cut":
            self.network.cut("worker:0", "worker:1")
        elif kind == "sender" and self.sender.host.alive:
            self.network.kill("worker:0")
            self.receiver.gone()
            self.clock.after(self.random.random() * DOWN_S, self._sender_starts)
        elif kind == "receiver" and self.receiver.host.alive:
            self.network.kill("worker:1")
            self.clock.after(self.random.random() * DOWN_S, self._receiver_starts)

    def _sender_starts(self) -> None:
        self.sender = SimSender(self)
        self.network.call(self.sender.host, "worker:1", "hello", self.sender.host.life)

    def _receiver_starts(self) -> None:
        self.receiver = SimReceiver(self)


def simulate_mail(seed: int, faults: int = 10) -> MailSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = MailSim(seed, faults)
    world.run()
    return world
