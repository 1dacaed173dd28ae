"""Values from task to task, matched by a key: what is kept, who gets what, and in which order. No I/O.

Rule 1: a method is an event (past tense) or a question; what it returns are the waits that have ended and whose waiters must be told.
Rule 2: a mailbox belongs to one shell, which calls it under its lock.
Rule 3: what a letter is nobody here looks into: what lies beside the value arrives with it.

Theory of operation
    A key names one channel: sender, life of the sender, receiver, tag. Of each sender one life counts at a time: when another one is
    heard of, what the old one has left is dropped and whoever waits for it is told. While nobody has heard of a new one it stays, so
    that a task may send and end.

    Letters of one channel may overtake each other on the way (a large one travels in pieces). Each has a number, counted by its sender
    for each receiver. While another one of its channel is on the way it names the one that was sent right before it (`after`), and is
    held until that one had its turn; a letter that was given up has its turn, too. `low` says that everything below has arrived or was
    given up: so nothing is ever waited for that cannot come.
    For the sender a letter is on the way until it is known to have had its turn. One that was given up, or that is held while the one
    before it has ended (at a former life of the receiver), needs a word of the sender for that: it has the missing one skipped, but
    only when nothing before that is on the way. So what is sent next under this tag never comes before them.

Promises, checked by tests/machines/test_mailbox.py and tests/sim/test_tasks.py
    P1  a letter is given to one waiter, once; letters of a channel in the order of sending, waiters in the order of asking
    P2  nothing of one life of a sender reaches a wait for another one
    P3  a wait ends once: letter, cancelled, its deadline, the end of its sender, or the abort
    P4  after an abort every send and every wait ends with its status; nothing that ran before is waited for
    P5  no more than `items_max` letters and `bytes_max` bytes lie here; the next is refused, and its sender knows
    P6  what has ended leaves nothing behind but a few numbers for each sender

Not here: the way of a letter (mail.py), who is alive (liveness.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

from zmqdist.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    UNAVAILABLE,
    InvalidArgumentError,
    OpError,
    ResourceExhaustedError,
    UnavailableError,
    from_code,
)

_Place: TypeAlias = tuple[str, str, str]

PAST_LIVES_MAX = 16
"""Former lives of one sender that are remembered, to refuse what comes from them late."""


@dataclass(frozen=True, slots=True)
class Key:
    """The name of one channel. As text its parts stand with a semicolon between, the life as 16 hexadecimal digits.

    Attributes:
      source, target: tasks.
      life: incarnation of the source; 0, in a wait, for whichever is the present one.
      tag: any text without a semicolon.
      frame: "frame:iteration" of a loop in TensorFlow; here always 0:0.
    """

    source: str
    life: int
    target: str
    tag: str
    frame: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.source};{self.life:016x};{self.target};{self.tag};{self.frame[0]}:{self.frame[1]}"

    @staticmethod
    def parse(text: str) -> Key:
        """The inverse of `str`. Raises InvalidArgumentError: not a key."""
        parts = text.split(";")
        frame = parts[-1].split(":")
        try:
            if len(parts) != 5 or len(frame) != 2 or len(parts[1]) != 16 or not all(parts):
                raise ValueError
            return Key(parts[0], int(parts[1], 16), parts[2], parts[3], (int(frame[0]), int(frame[1])))
        except ValueError:
            message = f"not a key: {text!r}; wanted source;16 hexadecimal digits;target;tag;frame:iteration"
            raise InvalidArgumentError(message) from None


class Wait:
    """Somebody waits for a letter.

    Attributes:
      key: of the channel.
      life: of the sender that it is bound to; 0 while none is known.
      due: when it stops waiting, in seconds on the shell's clock.
      ended: whether it has; then `letter`, or `code` (not 0) and `message`.
      wake: the shell's own.
    """

    __slots__ = ("code", "due", "ended", "key", "letter", "life", "message", "nbytes", "wake")

    def __init__(self, key: Key, due: float) -> None:
        self.key = key
        self.life = key.life
        self.due = due
        self.ended = False
        self.code = 0
        self.message = ""
        self.letter: Any = None
        self.nbytes = 0
        self.wake: Callable[[], object] | None = None

    def end(self, code: int, message: str) -> Wait:
        self.ended = True
        self.code = code
        self.message = message
        return self


class _Source:
    """What is known of one sender.

    Attributes:
      life: the present one, 0 for none.
      low, seen: numbers that were delivered or given up: all below `low`, and those of `seen`.
      held: letters that wait for another one, by the number of that.
    """

    __slots__ = ("held", "life", "low", "past", "seen")

    def __init__(self) -> None:
        self.life = 0
        self.past: deque[int] = deque(maxlen=PAST_LIVES_MAX)
        self.begin()

    def begin(self) -> None:
        self.low = 0
        self.seen: set[int] = set()
        self.held: dict[int, tuple[int, Key, Any, int]] = {}

    def has(self, number: int) -> bool:
        return number < self.low or number in self.seen


class Mailbox:
    """The letters for one task.

    Attributes:
      deadline: when `ticked` must be called at the latest; `inf` when no wait has one.
      items, nbytes: how much lies here.
    """

    def __init__(self, items_max: float = inf, bytes_max: float = inf) -> None:
        self.items = 0
        self.nbytes = 0
        self.deadline = inf
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._letters: dict[_Place, deque[tuple[Any, int]]] = {}
        self._waits: dict[_Place, deque[Wait]] = {}
        self._sources: dict[str, _Source] = {}
        self._status: tuple[int, str] | None = None

    # -- letters ----------------------------------------------------------------------------------------------------------

    def sent(
        self, key: Key, letter: Any, nbytes: int = 0, number: int = 0, low: int = 0, after: int = 0
    ) -> tuple[list[Wait], OpError | None]:
        """A letter has arrived.

        Args:
          number: counted by its sender, from 1; 0 where letters cannot overtake each other.
          low: everything below was delivered or given up.
          after: the letter of this channel that has its turn right before this one; 0 for none that was on the way.

        Returns:
          The waits that have ended, and why the letter was not taken: the status of the abort, RESOURCE_EXHAUSTED (P5), or UNAVAILABLE
          for one of an earlier life of its sender.
        """
        if self._status is not None:
            return [], from_code(*self._status)
        source = self._source(key.source)
        if key.life in source.past:
            return [], UnavailableError(f"{key.source} has begun another life since this was sent")
        ended = self.heard(key.source, key.life)
        ended += self._given_up(source, low)
        if number and source.has(number):
            return ended, None
        held = number and after and not source.has(after)
        if (held or not self._waits.get(_place(key))) and self._is_full(nbytes):
            text = f"{key.target} has {self.items} messages of {self.nbytes} bytes that nobody has received: receive some first"
            refusal = ResourceExhaustedError(text)
            return ended, refusal
        if held:
            self._count(1, nbytes)
            source.held[after] = number, key, letter, nbytes
            return ended, None
        ended += self._deliver(key, letter, nbytes)
        return [*ended, *self._settled(source, number)], None

    def holds(self, source: str, number: int, after: int) -> bool:
        """Whether this letter lies here until the one before it had its turn."""
        held = self._source(source).held.get(after)
        return held is not None and held[0] == number

    def skipped(self, source: str, life: int, number: int) -> list[Wait]:
        """A letter never comes, and none before it does: those behind it need not wait."""
        known = self._source(source)
        ended = [] if life in known.past else self.heard(source, life)
        if known.life != life or known.has(number):
            return ended
        return [*ended, *self._settled(known, number)]

    def returned(self, wait: Wait) -> list[Wait]:
        """Whoever got this letter could not take it: it is the first of its channel again."""
        place = _place(wait.key)
        if self._status is not None or self._source(wait.key.source).life != wait.life:
            return []
        if self._waits.get(place):
            return [self._give(place, wait.letter, wait.nbytes)]
        self._letters.setdefault(place, deque()).appendleft((wait.letter, wait.nbytes))
        self._count(1, wait.nbytes)
        return []

    # -- waits ------------------------------------------------------------------------------------------------------------

    def wanted(self, key: Key, due: float = inf) -> Wait:
        """Somebody wants the next letter of a channel. The wait may have ended already."""
        wait = Wait(key, due)
        if self._status is not None:
            return wait.end(*self._status)
        source = self._source(key.source)
        if wait.life and not source.life:
            source.life = wait.life
        if wait.life and wait.life != source.life:
            return wait.end(UNAVAILABLE, f"{key.source} has begun another life: what its former one sent is gone")
        wait.life = source.life
        place = _place(key)
        letters = self._letters.get(place)
        if letters:
            wait.letter, wait.nbytes = letters.popleft()
            self._count(-1, -wait.nbytes)
            if not letters:
                del self._letters[place]
            return wait.end(0, "")
        self._waits.setdefault(place, deque()).append(wait)
        self.deadline = min(self.deadline, due)
        return wait

    def cancelled(self, wait: Wait, code: int = CANCELLED, message: str = "the wait was cancelled") -> bool:
        """Nobody wants it any more; False: it had ended before, and may have a letter."""
        if wait.ended:
            return False
        place = _place(wait.key)
        waits = self._waits[place]
        waits.remove(wait)
        if not waits:
            del self._waits[place]
        wait.end(code, message)
        return True

    def ticked(self, now: float) -> list[Wait]:
        """The waits whose time has passed."""
        if now < self.deadline:
            return []
        waits = [wait for waits in self._waits.values() for wait in waits]
        late = [wait for wait in waits if wait.due <= now]
        for wait in late:
            text = f"nothing came from {wait.key.source} under {wait.key.tag!r} within the time"
            self.cancelled(wait, DEADLINE_EXCEEDED, text)
        self.deadline = min((wait.due for wait in waits if not wait.ended), default=inf)
        return late

    # -- senders ----------------------------------------------------------------------------------------------------------

    def heard(self, name: str, life: int) -> list[Wait]:
        """This is the present life of a sender, as far as anybody knows."""
        source = self._source(name)
        if source.life == life or life in source.past:
            return []
        former, source.life = source.life, life
        if not former:
            for wait in self._waits_for(name):
                wait.life = life
            return []
        source.past.append(former)
        for _, _, _, nbytes in source.held.values():
            self._count(-1, -nbytes)
        source.begin()
        for place in [place for place in self._letters if place[0] == name]:
            for _, nbytes in self._letters.pop(place):
                self._count(-1, -nbytes)
        return self._ended(name, UNAVAILABLE, f"{name} has ended, and begun another life")

    def gone(self, name: str, message: str) -> list[Wait]:
        """A sender has ended: nothing more comes from it. What it has left stays until its next life is heard of."""
        return self._ended(name, UNAVAILABLE, message)

    def aborted(self, code: int, message: str) -> list[Wait]:
        """The end of everything here, for good (P4). A second one changes nothing."""
        if self._status is not None:
            return []
        self._status = code, message
        self._letters.clear()
        self._sources.clear()
        self.items = self.nbytes = 0
        waits = [wait.end(code, message) for waits in self._waits.values() for wait in waits]
        self._waits.clear()
        return waits

    @property
    def waiting(self) -> int:
        """Waits that have not ended."""
        return sum(map(len, self._waits.values()))

    @property
    def places(self) -> int:
        """Places for which something is remembered: letters that wait for a receiver, or receivers that wait."""
        return len(self._letters.keys() | self._waits.keys())

    def check(self) -> None:
        """Raises OpError: the status of the abort, if there was one."""
        if self._status is not None:
            raise from_code(*self._status)

    # -- within -----------------------------------------------------------------------------------------------------------

    def _source(self, name: str) -> _Source:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
        return source

    def _is_full(self, nbytes: int) -> bool:
        """P5; an empty mailbox takes anything."""
        return self.items > 0 and (self.items >= self._items_max or self.nbytes + nbytes > self._bytes_max)

    def _count(self, items: int, nbytes: int) -> None:
        self.items += items
        self.nbytes += nbytes

    def _deliver(self, key: Key, letter: Any, nbytes: int) -> list[Wait]:
        place = _place(key)
        if self._waits.get(place):
            return [self._give(place, letter, nbytes)]
        self._letters.setdefault(place, deque()).append((letter, nbytes))
        self._count(1, nbytes)
        return []

    def _give(self, place: _Place, letter: Any, nbytes: int) -> Wait:
        waits = self._waits[place]
        wait = waits.popleft()
        if not waits:
            del self._waits[place]
        wait.letter, wait.nbytes = letter, nbytes
        return wait.end(0, "")

    def _given_up(self, source: _Source, low: int) -> list[Wait]:
        ended: list[Wait] = []
        if low > source.low:
            source.low = low
            source.seen = {number for number in source.seen if number >= low}
            for number in sorted(number for number in source.held if number < low):
                ended += self._settled(source, number)
        return ended

    def _settled(self, source: _Source, number: int) -> list[Wait]:
        """A letter has had its turn: the one that waited for it has its own."""
        ended: list[Wait] = []
        settled = [number] if number else []
        while settled:
            number = settled.pop()
            if number >= source.low:
                source.seen.add(number)
            if number in source.held:
                held, key, letter, nbytes = source.held.pop(number)
                self._count(-1, -nbytes)
                ended += self._deliver(key, letter, nbytes)
                settled.append(held)
        return ended

    def _waits_for(self, name: str) -> list[Wait]:
        return [wait for place, waits in self._waits.items() if place[0] == name for wait in waits]

    def _ended(self, name: str, code: int, message: str) -> list[Wait]:
        waits = self._waits_for(name)
        for wait in waits:
            self.cancelled(wait, code, message)
        return waits


def _place(key: Key) -> _Place:
    """Of all lives of its source one counts at a time."""
    return key.source, key.target, key.tag


# -- the sender's side ------------------------------------------------------------------------------------------------


class Outbox:
    """The letters of one task that are on their way to one other task: the numbers that Mailbox.sent needs.

    Attributes:
      unconfirmed: letters of which it is not known yet whether they have arrived.
    """

    def __init__(self) -> None:
        self._number = 0
        self._on_the_way: dict[int, tuple[str, int]] = {}
        """By number: the tag, and the letter of this tag that was sent right before it while that was on the way."""
        self._last: dict[str, tuple[int, int]] = {}
        """By tag: how many are on the way, and the one that was sent last."""
        self._behind: dict[int, tuple[int, bool, int]] = {}
        """Letters that are answered (number, failed, held), by the number of the one before them, which is on the way."""

    @property
    def unconfirmed(self) -> int:
        return len(self._on_the_way)

    def numbers(self, tag: str) -> tuple[int, int, int]:
        """`number`, `low` and `after` of the next letter; it counts once `sent` is called with them."""
        number = self._number + 1
        return number, next(iter(self._on_the_way), number), self._last.get(tag, (0, 0))[1]

    def sent(self, tag: str, number: int, after: int) -> None:
        """The letter with these numbers has left."""
        self._number = number
        self._on_the_way[number] = tag, after
        self._last[tag] = self._last.get(tag, (0, 0))[0] + 1, number

    def ended(self, number: int, failed: bool, held: int = 0) -> tuple[int, int] | None:
        """The receiver has answered, or never will.

        Args:
          held: the life of the receiver in which the letter lies until the one before it had its turn; 0: it had its own.

        Returns:
          None; or (number, skip): have the receiver skip the letter `skip`, and call `skipped(number)` then.
        """
        _, after = self._on_the_way[number]
        if (failed or held) and after in self._on_the_way:
            self._behind[after] = number, failed, held
            return None
        return (number, after) if held else self._end(number, failed, 0)

    def skipped(self, number: int) -> tuple[int, int] | None:
        """The receiver has done what was asked because of this letter. Returns as `ended`."""
        return self._end(number, False, 0)

    def _end(self, number: int, failed: bool, held: int) -> tuple[int, int] | None:
        """This letter had its turn, and so have those that have waited for nothing else."""
        while True:
            tag, _ = self._on_the_way[number]
            count, last = self._last[tag]
            if failed and last != number:
                return number, number
            del self._on_the_way[number]
            if count > 1:
                self._last[tag] = count - 1, last
            else:
                del self._last[tag]
            if number not in self._behind:
                return None
            before, life = number, held
            number, failed, held = self._behind.pop(before)
            if held and life and held != life:  # where it lies nothing has ended the one before it
                return number, before
