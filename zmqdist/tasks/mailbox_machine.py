"""Messages from task to task: which messages a mailbox stores, which wait gets which message, and
in which order. No I/O.

In names, a `letter` is a message: a value that was sent, with the data that the runtime adds. This
module never looks into a message.

Rule 1: a method is an event (past tense) or a query. An event returns the waits that have ended,
whose threads the runtime must wake.
Rule 2: a mailbox belongs to one runtime, which calls it under a lock.

Theory of operation
    A key names one channel: sender, incarnation of the sender, receiver, tag. One incarnation of
    each sender is current. When the mailbox learns of a new incarnation of a sender, it drops the
    messages of the old incarnation and ends the waits for that incarnation. Until then the messages
    stay, so that a task may send a message and end.

    Messages of one channel may overtake each other on the way, because a large message travels in
    pieces. So the sender numbers its messages to each receiver. A message has its turn when the
    mailbox adds it to its channel, in the order of sending. While an earlier message of the channel
    is in flight, a new message also carries the number of the message right before it (`after`).
    The mailbox holds the new message until the message `after` has had its turn. A message that its
    sender has given up counts as having had its turn. With each message the sender sends the number
    `low`: every message with a lower number has had its turn or was given up. So the mailbox never
    waits for a message that cannot arrive.
    For the sender, a message is in flight until the sender knows that the message has had its turn.
    The message that a held message waits for may have been given up, or may have had its turn at an
    earlier incarnation of the receiver. Then the sender has the mailbox skip the missing message,
    but only when no earlier message of the channel is in flight. So the next message of this
    channel never overtakes earlier messages.

Promises, checked by tests/tasks/test_mailbox_machine.py and tests/sim/test_tasks.py
    P1  each message ends at most one wait, unless a receiver puts it back; in each channel, the
        messages come in the order of sending, and each message ends the wait that began first
    P2  no message of one incarnation of a sender ends a wait for another incarnation
    P3  a wait ends once: with a message, by cancellation, at its deadline, at the end of its
        sender, or by an abort
    P4  after an abort every send and every wait ends with the abort's code and message, and no
        earlier wait is left
    P5  the mailbox refuses a message beyond `items_max` messages or `bytes_max` bytes, and its
        sender gets an error; a message that a receiver puts back is never refused
    P6  about messages and waits that have ended, the mailbox keeps only a few numbers for each
        sender

Not here: how a message travels (mail.py), and which tasks are up (watches_machine.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeAlias

from zmqdist.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    UNAVAILABLE,
    OpError,
    ResourceExhaustedError,
    UnavailableError,
    from_code,
)

_Channel: TypeAlias = tuple[str, str, str]

PAST_INCARNATIONS_MAX = 16
"""Number of earlier incarnations of a sender that a mailbox remembers, so that it refuses their
late messages."""


class Key(NamedTuple):
    """The name of one channel.

    Attributes:
      source, target: names of the sending and the receiving task.
      incarnation: incarnation of the sending task; in a wait, 0 means the current incarnation.
      tag: any text.
    """

    source: str
    incarnation: int
    target: str
    tag: str


@dataclass(slots=True, eq=False)
class Wait:
    """A wait of a receiver for one message.

    Attributes:
      key: key of the channel.
      due: when the wait ends at the latest, in seconds on the runtime's clock.
      incarnation: the incarnation of the sender that the receiver waits for; 0 while no incarnation
        is known.
      ended: whether the wait has ended. Then `letter` is the message if `code` is 0, otherwise
        `code` and `message` are the error.
      wake: a function that wakes the waiting thread. Only the runtime sets and calls it.
    """

    key: Key
    due: float
    incarnation: int
    ended: bool = False
    code: int = 0
    message: str = ""
    letter: Any = None
    nbytes: int = 0
    wake: Callable[[], object] | None = None

    def end(self, code: int, message: str) -> Wait:
        self.ended = True
        self.code = code
        self.message = message
        return self


class _Source:
    """The mailbox's knowledge of one sender.

    *Invariant*: no number in `passed` is below `low`.

    Attributes:
      incarnation: the sender's current incarnation; 0 if no incarnation is known.
      low, passed: all messages with numbers below `low`, and with the numbers in `passed`, have had
        their turn.
      held: messages that wait for the turn of another message, by the number of that other message.
    """

    __slots__ = ("held", "incarnation", "low", "passed", "past")

    def __init__(self) -> None:
        self.incarnation = 0
        self.past: deque[int] = deque(maxlen=PAST_INCARNATIONS_MAX)
        self.begin()

    def begin(self) -> None:
        self.low = 0
        self.passed: set[int] = set()
        self.held: dict[int, tuple[int, Key, Any, int]] = {}

    def has(self, number: int) -> bool:
        return number < self.low or number in self.passed


class Mailbox:
    """The messages that have arrived for one task, and the waits for them.

    *Invariant*: a channel has messages or waits, never both.

    Attributes:
      deadline: the latest time for the next `ticked`; `inf` if no wait has a deadline.
      items, nbytes: number and size of the messages in the mailbox, including held messages.
    """

    def __init__(self, items_max: float = inf, bytes_max: float = inf) -> None:
        self.items = 0
        self.nbytes = 0
        self.deadline = inf
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._letters: dict[_Channel, deque[tuple[Any, int]]] = {}
        self._waits: dict[_Channel, deque[Wait]] = {}
        self._sources: dict[str, _Source] = {}
        self._status: tuple[int, str] | None = None

    # -- letters -----------------------------------------------------------------------------------

    def sent(
        self, key: Key, letter: Any, nbytes: int = 0, number: int = 0, low: int = 0, after: int = 0
    ) -> tuple[list[Wait], OpError | None]:
        """Record that a message has arrived.

        Args:
          number: the sender's number for the message, from 1; 0 if messages cannot overtake each
            other.
          low: every message with a lower number has had its turn or was given up.
          after: the number of the message right before this message in the channel; 0 if that
            message was not in flight.

        Returns:
          The waits that have ended, and the error if the mailbox refuses the message: the error of
          the abort, RESOURCE_EXHAUSTED (P5), or UNAVAILABLE for a message of an earlier incarnation
          of its sender.
        """
        if self._status is not None:
            return [], from_code(*self._status)
        source = self._source(key.source)
        if key.incarnation in source.past:  # a late message of an earlier incarnation (P2)
            return [], UnavailableError(
                f"{key.source} was restarted after it had sent this message"
            )
        waits = self.incarnation_seen(key.source, key.incarnation)
        waits += self._given_up(source, low)
        if number and source.has(number):  # a duplicate, or a message that its sender has given up
            return waits, None
        must_wait = number and after and not source.has(after)
        # P5: a message that a wait takes at once needs no room
        if (must_wait or not self._waits.get(_channel(key))) and self._is_full(nbytes):
            text = f"the mailbox of {key.target} is full: {self.items} messages of {self.nbytes} bytes; receive some first"
            refusal = ResourceExhaustedError(text)
            return waits, refusal
        if must_wait:
            self._count(1, nbytes)
            # P1: the message `after` travels still, and must have its turn first
            source.held[after] = number, key, letter, nbytes
            return waits, None
        waits += self._deliver(key, letter, nbytes)
        return [*waits, *self._settled(source, number)], None

    def holds(self, source: str, number: int, after: int) -> bool:
        """Return whether the mailbox holds this message back, behind the message `after`."""
        entry = self._source(source).held.get(after)
        return entry is not None and entry[0] == number

    def skipped(self, source: str, incarnation: int, number: int) -> list[Wait]:
        """Record that neither this message nor an earlier one of its channel will arrive, and
        deliver the messages held behind it."""
        sender = self._source(source)
        waits = [] if incarnation in sender.past else self.incarnation_seen(source, incarnation)
        if sender.incarnation != incarnation or sender.has(number):
            return waits
        # The mailbox may hold the skipped message itself, if the mailbox's reply to the sender was
        # lost. Then deliver the skipped message, too, before the messages that are held behind it.
        behind = {entry[0]: after for after, entry in sender.held.items()}
        while number in behind:
            number = behind[number]
        return [*waits, *self._settled(sender, number)]

    def returned(self, wait: Wait) -> list[Wait]:
        """Put the message of an ended wait back as the first message of its channel, because its
        receiver could not take it."""
        channel = _channel(wait.key)
        # P2: after a restart of the sender, the message has no receiver any more
        if (
            self._status is not None
            or self._source(wait.key.source).incarnation != wait.incarnation
        ):
            return []
        if self._waits.get(channel):
            return [self._give(channel, wait.letter, wait.nbytes)]
        # in front, so that the order of sending stays (P1)
        self._letters.setdefault(channel, deque()).appendleft((wait.letter, wait.nbytes))
        self._count(1, wait.nbytes)
        return []

    # -- waits -------------------------------------------------------------------------------------

    def wanted(self, key: Key, due: float = inf) -> Wait:
        """Record that a receiver waits for the next message of a channel. Return the wait, which
        may have ended already."""
        wait = Wait(key, due, key.incarnation)
        if self._status is not None:
            return wait.end(*self._status)
        source = self._source(key.source)
        # a receiver may name an incarnation before any message of it has arrived
        if wait.incarnation and not source.incarnation:
            source.incarnation = wait.incarnation
        if wait.incarnation and wait.incarnation != source.incarnation:
            return wait.end(
                UNAVAILABLE,
                f"{key.source} was restarted: the messages of its earlier incarnation are lost",
            )
        wait.incarnation = source.incarnation
        channel = _channel(key)
        letters = self._letters.get(channel)
        if letters:
            wait.letter, wait.nbytes = letters.popleft()
            self._count(-1, -wait.nbytes)
            if not letters:
                del self._letters[channel]
            return wait.end(0, "")
        self._waits.setdefault(channel, deque()).append(wait)
        self.deadline = min(self.deadline, due)
        return wait

    def cancelled(
        self, wait: Wait, code: int = CANCELLED, message: str = "the wait was cancelled"
    ) -> bool:
        """End a wait, because its receiver does not wait any more. Return False if the wait had
        ended before, perhaps with a message."""
        if wait.ended:
            return False
        channel = _channel(wait.key)
        waits = self._waits[channel]
        waits.remove(wait)
        if not waits:
            del self._waits[channel]
        wait.end(code, message)
        return True

    def ticked(self, now: float) -> list[Wait]:
        """End the waits whose deadline has passed."""
        if now < self.deadline:
            return []
        waits = [wait for waits in self._waits.values() for wait in waits]
        late = [wait for wait in waits if wait.due <= now]
        for wait in late:
            text = f"no message from {wait.key.source} under {wait.key.tag!r} arrived in time"
            self.cancelled(wait, DEADLINE_EXCEEDED, text)
        self.deadline = min((wait.due for wait in waits if not wait.ended), default=inf)
        return late

    # -- senders -----------------------------------------------------------------------------------

    def incarnation_seen(self, name: str, incarnation: int) -> list[Wait]:
        """Record that the runtime has learned of an incarnation of a sender. The incarnation
        becomes the current one, unless the mailbox knows it as a past incarnation.
        """
        source = self._source(name)
        if source.incarnation == incarnation or incarnation in source.past:
            return []
        previous, source.incarnation = source.incarnation, incarnation
        # waits that began before any incarnation was known are for the first one
        if not previous:
            for wait in self._waits_for(name):
                wait.incarnation = incarnation
            return []
        # P2: what the earlier incarnation has sent reaches no wait for this one
        source.past.append(previous)
        for _, _, _, nbytes in source.held.values():
            self._count(-1, -nbytes)
        source.begin()
        for channel in [channel for channel in self._letters if channel[0] == name]:
            for _, nbytes in self._letters.pop(channel):
                self._count(-1, -nbytes)
        return self._ended(name, UNAVAILABLE, f"{name} has ended, and was restarted")

    def sender_gone(self, name: str, message: str) -> list[Wait]:
        """End the waits for a sender that has ended. Its messages stay until the mailbox learns of
        the sender's next incarnation."""
        return self._ended(name, UNAVAILABLE, message)

    def aborted(self, code: int, message: str) -> list[Wait]:
        """End all waits and drop all messages, for good (P4). A second abort changes nothing."""
        if self._status is not None:
            return []
        # P4: all that the mailbox holds is dropped, and no wait is left
        self._status = code, message
        self._letters.clear()
        self._sources.clear()
        self.items = self.nbytes = 0
        waits = [wait.end(code, message) for waits in self._waits.values() for wait in waits]
        self._waits.clear()
        return waits

    @property
    def waiting(self) -> int:
        """The number of waits that have not ended."""
        return sum(map(len, self._waits.values()))

    @property
    def channels(self) -> int:
        """The number of channels that have messages or waits."""
        return len(self._letters.keys() | self._waits.keys())

    def check(self) -> None:
        """Raise the error of the abort, if the mailbox was aborted."""
        if self._status is not None:
            raise from_code(*self._status)

    # -- within ------------------------------------------------------------------------------------

    def _source(self, name: str) -> _Source:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
        return source

    def _is_full(self, nbytes: int) -> bool:
        """Return whether the mailbox is too full for a message of this size (P5). An empty mailbox
        accepts any message."""
        return self.items > 0 and (
            self.items >= self._items_max or self.nbytes + nbytes > self._bytes_max
        )

    def _count(self, items: int, nbytes: int) -> None:
        self.items += items
        self.nbytes += nbytes

    def _deliver(self, key: Key, letter: Any, nbytes: int) -> list[Wait]:
        channel = _channel(key)
        if self._waits.get(channel):
            return [self._give(channel, letter, nbytes)]
        self._letters.setdefault(channel, deque()).append((letter, nbytes))
        self._count(1, nbytes)
        return []

    def _give(self, channel: _Channel, letter: Any, nbytes: int) -> Wait:
        waits = self._waits[channel]
        wait = waits.popleft()
        if not waits:
            del self._waits[channel]
        wait.letter, wait.nbytes = letter, nbytes
        return wait.end(0, "")

    def _given_up(self, source: _Source, low: int) -> list[Wait]:
        waits: list[Wait] = []
        if low > source.low:
            source.low = low
            source.passed = {number for number in source.passed if number >= low}
            # the message that these wait for was given up by its sender
            for number in sorted(number for number in source.held if number < low):
                waits += self._settled(source, number)
        return waits

    def _settled(self, source: _Source, number: int) -> list[Wait]:
        """Record that a message has had its turn, and deliver all messages that were held behind
        it."""
        waits: list[Wait] = []
        settled = [number] if number else []
        while settled:
            number = settled.pop()
            if number >= source.low:
                source.passed.add(number)
            if number in source.held:
                next_number, key, letter, nbytes = source.held.pop(number)
                self._count(-1, -nbytes)
                waits += self._deliver(key, letter, nbytes)
                # the delivered message may free the next one of its channel
                settled.append(next_number)
        return waits

    def _waits_for(self, name: str) -> list[Wait]:
        return [
            wait for channel, waits in self._waits.items() if channel[0] == name for wait in waits
        ]

    def _ended(self, name: str, code: int, message: str) -> list[Wait]:
        waits = self._waits_for(name)
        for wait in waits:
            self.cancelled(wait, code, message)
        return waits


def _channel(key: Key) -> _Channel:
    """Return the channel of a key without the sender's incarnation, because only one incarnation is
    current at a time."""
    return key.source, key.target, key.tag


# -- the sender's side -----------------------------------------------------------------------------


class Outbox:
    """The sender's side of a mailbox: the messages in flight from one task to another, and the
    numbers that Mailbox.sent needs.

    Attributes:
      unconfirmed: number of sent messages that may still be on their way, as far as the sender
        knows.
    """

    def __init__(self) -> None:
        self._number = 0
        self._in_flight: dict[int, tuple[str, int]] = {}
        """By number of a message: its tag, and the number of the message right before it in the
        channel, 0 if that message was not in flight.
        """
        self._last: dict[str, tuple[int, int]] = {}
        """For each tag: how many messages are in flight, and the number of the last of them."""
        self._behind: dict[int, tuple[int, bool, int]] = {}
        """By number of a message in flight: (number, failed, incarnation) of the channel's next
        message, if the send of that message has ended."""
        self._held_at: dict[int, int] = {}
        """For each number of a message whose predecessor is being skipped: the incarnation of the
        receiver that holds the message."""

    @property
    def unconfirmed(self) -> int:
        return len(self._in_flight)

    def numbers(self, tag: str) -> tuple[int, int, int]:
        """Return `number`, `low` and `after` of the next message. Call `sent` when the message was
        sent with these numbers."""
        number = self._number + 1
        return number, next(iter(self._in_flight), number), self._last.get(tag, (0, 0))[1]

    def sent(self, tag: str, number: int, after: int) -> None:
        """Record that the message with these numbers was sent."""
        self._number = number
        self._in_flight[number] = tag, after
        self._last[tag] = self._last.get(tag, (0, 0))[0] + 1, number

    def ended(self, number: int, failed: bool, incarnation: int = 0) -> tuple[int, int] | None:
        """Record that the receiver has replied to this message, or will not reply any more.

        Args:
          failed: whether the send ended with an error.
          incarnation: 0 if the message has had its turn. Otherwise the receiver holds the message
            back, and this is the receiver's incarnation.

        Returns:
          (number, skip) if the runtime must ask the receiver to skip the message `skip`, and then
          call `skipped(number)`; else None.
        """
        _, after = self._in_flight[number]
        # The message before this one may still arrive at the receiver, so a skip must wait for the
        # end of that message.
        if (failed or incarnation) and after in self._in_flight:
            self._behind[after] = number, failed, incarnation
            return None
        return (
            self._skip_before(number, after, incarnation)
            if incarnation
            else self._end(number, failed, 0)
        )

    def skipped(self, number: int) -> tuple[int, int] | None:
        """Record that the receiver has skipped the message `skip` that `ended` returned with
        `number`. Return a result as `ended` does."""
        return self._end(number, False, self._held_at.pop(number, 0))

    def _skip_before(self, number: int, before: int, incarnation: int) -> tuple[int, int]:
        """Return (number, before), so that this incarnation of the receiver skips message `before`
        and then delivers message `number`."""
        self._held_at[number] = incarnation
        return number, before

    def _end(self, number: int, failed: bool, holder: int) -> tuple[int, int] | None:
        """Record that a message has had its turn, and with it the messages that waited only for
        this message. Return a result as `ended` does.
        """
        while True:
            tag, _ = self._in_flight[number]
            count, last = self._last[tag]
            if failed and last != number:
                # the receiver may hold the next message until this failed message is skipped
                return number, number
            del self._in_flight[number]
            if count > 1:
                self._last[tag] = count - 1, last
            else:
                del self._last[tag]
            if number not in self._behind:
                return None
            before, earlier_holder = number, holder
            number, failed, holder = self._behind.pop(before)
            # The receiver's incarnation `holder` holds message `number` until it gets message
            # `before`, which had its turn at another incarnation. Therefore have the receiver skip
            # `before`.
            if holder and earlier_holder and holder != earlier_holder:
                return self._skip_before(number, before, holder)
