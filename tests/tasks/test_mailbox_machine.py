"""The mailbox, with no network: TensorFlow's rendezvous tests on the machine, and its promises one
by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zmqdist.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    OpError,
)
from zmqdist.tasks.mailbox_machine import Key, Mailbox, Outbox, Wait

LIFE = 7890


def key(tag: str = "foo", source: str = "worker:1", life: int = LIFE) -> Key:
    return Key(source, life, "worker:0", tag)


def put(box: Mailbox, letter: Any, where: Key | None = None, **kwargs: int) -> list[Wait]:
    ended, refusal = box.sent(where or key(), letter, **kwargs)
    assert refusal is None
    return ended


def refusal(box: Mailbox, where: Key | None = None, **kwargs: int) -> OpError:
    _, error = box.sent(where or key(), "refused", **kwargs)
    assert error is not None
    return error


def letters(box: Mailbox, tag: str = "foo") -> list[Any]:
    """Return all values that can be received under a tag now."""
    found = []
    while (wait := box.wanted(key(tag, life=0))).ended and not wait.code:
        found.append(wait.letter)
    box.cancelled(wait)
    return found


# -- rendezvous_test.cc ----------------------------------------------------------------------------


def test_send_recv() -> None:
    box = Mailbox()
    assert put(box, "hello") == []
    assert box.wanted(key()).letter == "hello"


def test_recv_send() -> None:
    box = Mailbox()
    wait = box.wanted(key())
    assert not wait.ended
    assert put(box, "hello") == [wait]
    assert (wait.ended, wait.code, wait.letter) == (True, 0, "hello")


def test_ping_pong() -> None:
    there, back = Mailbox(), Mailbox()
    waiting = back.wanted(key("back"))
    put(there, "hello", key("there"))
    put(back, there.wanted(key("there")).letter, key("back"))
    assert waiting.letter == "hello"


def test_cancel_before_recv() -> None:
    box = Mailbox()
    wait = box.wanted(key())
    box.cancelled(wait)
    assert wait.code == CANCELLED
    put(box, "for the next")
    assert letters(box) == ["for the next"]


def test_cancel_after_recv() -> None:
    box = Mailbox()
    wait = box.wanted(key())
    assert box.cancelled(wait)
    assert (wait.ended, wait.code) == (True, CANCELLED)
    assert not box.cancelled(wait)


def test_cancel_empty_queue() -> None:
    box = Mailbox()
    put(box, "hello")
    wait = box.wanted(key())
    assert not box.cancelled(wait)
    assert wait.letter == "hello"


def test_cancel_multiple() -> None:
    box = Mailbox()
    waits = [box.wanted(key()) for _ in range(4)]
    box.cancelled(waits[1])
    box.cancelled(waits[3])
    put(box, "one")
    put(box, "two")
    assert [wait.letter for wait in waits] == ["one", None, "two", None]
    assert [wait.code for wait in waits] == [0, CANCELLED, 0, CANCELLED]


def test_random_send_recv() -> None:
    box, chance = Mailbox(), random.Random(1)
    events = [(kind, number) for kind in ("send", "recv") for number in range(100)]
    chance.shuffle(events)
    waits = {}
    for kind, number in events:
        if kind == "send":
            put(box, f"value of {number}", key(str(number)))
        else:
            waits[number] = box.wanted(key(str(number)))
    assert [waits[number].letter for number in range(100)] == [
        f"value of {number}" for number in range(100)
    ]
    assert (box.items, box.waiting, box.channels) == (0, 0, 0)


def test_multi_sends() -> None:
    box = Mailbox()
    early = [box.wanted(key()) for _ in range(50)]
    for number in range(100):
        put(box, number)
    assert [wait.letter for wait in early] == list(range(50))
    assert letters(box) == list(range(50, 100))


def test_recv_abort() -> None:
    box = Mailbox()
    wait = box.wanted(key())
    assert box.aborted(ABORTED, "the end") == [wait]
    assert (wait.code, wait.message) == (ABORTED, "the end")


def test_recv_sleep_abort() -> None:
    box = Mailbox()
    wait = box.wanted(key(), due=100.0)
    assert box.ticked(99.0) == []
    box.aborted(ABORTED, "the end")
    assert box.ticked(101.0) == []
    assert wait.code == ABORTED


def test_abort_then_recv_or_send() -> None:
    box = Mailbox()
    put(box, "lost")
    box.aborted(ABORTED, "the end")
    assert refusal(box).error_code == ABORTED
    assert box.wanted(key()).code == ABORTED
    assert box.aborted(CANCELLED, "again") == []
    assert box.wanted(key()).code == ABORTED
    assert (box.items, box.nbytes) == (0, 0)


def test_transfer_dummy_device_context() -> None:
    """A message is opaque to the machine: data that the sender puts beside the value arrive with
    it."""
    box = Mailbox()
    context = object()
    put(box, ("value", context))
    assert box.wanted(key()).letter[1] is context


# -- time, incarnations, bounds, order -------------------------------------------------------------


def test_wait_ends_at_its_deadline() -> None:
    box = Mailbox()
    early, late = box.wanted(key(), due=1.0), box.wanted(key(), due=2.0)
    assert box.deadline == 1.0
    assert box.ticked(1.0) == [early]
    assert (early.code, box.deadline) == (DEADLINE_EXCEEDED, 2.0)
    put(box, "x")
    assert late.letter == "x"


def test_new_incarnation_satisfies_no_old_wait() -> None:
    box = Mailbox()
    put(box, "old, in another channel", key("other"))
    wait = box.wanted(key())
    assert put(box, "of the new one", key(life=2)) == [wait]
    assert wait.code == UNAVAILABLE
    assert box.wanted(key()).code == UNAVAILABLE
    assert letters(box) == ["of the new one"]
    assert letters(box, "other") == []
    assert refusal(box).error_code == UNAVAILABLE  # a late message of the old incarnation
    assert (box.items, box.nbytes) == (0, 0)


def test_messages_outlive_their_sender() -> None:
    box = Mailbox()
    put(box, "one")
    put(box, "two")
    assert box.sender_gone("worker:1", "it has ended") == []
    assert box.wanted(key(life=0)).letter == "one"
    box.incarnation_seen("worker:1", 2)
    assert letters(box) == []


def test_end_of_sender_ends_only_its_waits() -> None:
    box = Mailbox()
    mine, other = box.wanted(key(life=0)), box.wanted(key(source="worker:2", life=0))
    assert box.sender_gone("worker:1", "it has ended") == [mine]
    assert (mine.code, mine.message, other.ended) == (UNAVAILABLE, "it has ended", False)


def test_wait_is_bound_to_first_incarnation() -> None:
    box = Mailbox()
    wait = box.wanted(key(life=0))
    box.incarnation_seen("worker:1", LIFE)
    assert not wait.ended
    box.incarnation_seen("worker:1", 2)
    assert wait.code == UNAVAILABLE


def test_full_mailbox_refuses_messages() -> None:
    box = Mailbox(items_max=2, bytes_max=100)
    put(box, "a", nbytes=1000, number=1, low=1)  # an empty mailbox takes anything
    assert refusal(box, nbytes=1, number=2, low=1).error_code == RESOURCE_EXHAUSTED
    assert letters(box) == ["a"]
    put(box, "c", number=3, low=1, after=2)
    put(box, "d", number=4, low=1, after=3)
    assert refusal(box, number=5, low=1).error_code == RESOURCE_EXHAUSTED
    wait = box.wanted(key("waited for"))
    put(box, "e", key("waited for"), number=6, low=1)  # no message stays in the mailbox
    assert wait.letter == "e"
    box.skipped("worker:1", LIFE, 2)  # as the sender requests, which knows of the refusal
    assert letters(box) == ["c", "d"]


def test_returned_message_is_next() -> None:
    box = Mailbox()
    put(box, "first")
    put(box, "second")
    wait = box.wanted(key(life=0))
    box.returned(wait)
    assert letters(box) == ["first", "second"]
    put(box, "third")
    wait = box.wanted(key(life=0))
    waiting = box.wanted(key(life=0))
    assert box.returned(wait) == [waiting]
    assert waiting.letter == "third"


def test_overtaking_messages_keep_their_order() -> None:
    box = Mailbox()
    wait = box.wanted(key(life=0))
    assert put(box, "third", number=3, low=1, after=2) == []
    assert put(box, "second", number=2, low=1, after=1) == []
    put(box, "of another tag", key("other"), number=4, low=1)
    assert letters(box, "other") == ["of another tag"]
    assert put(box, "first", number=1, low=1) == [wait]
    assert [wait.letter, *letters(box)] == ["first", "second", "third"]


@pytest.mark.parametrize("how", ["skipped", "low"])
def test_abandoned_message_delays_nobody(how: str) -> None:
    box = Mailbox()
    put(box, "second", number=2, low=1, after=1)
    assert letters(box) == []
    if how == "skipped":
        box.skipped("worker:1", LIFE, 1)
    else:
        put(box, "of another tag", key("other"), number=3, low=2)
    assert letters(box) == ["second"]


def test_skipped_held_message_keeps_its_place() -> None:
    """The reply that confirms the message was lost, so its sender has it skipped."""
    box = Mailbox()
    put(box, "second", number=2, low=1, after=1)
    put(box, "third", number=3, low=1, after=2)
    put(box, "fourth", number=4, low=1, after=3)
    assert not letters(box)
    box.skipped("worker:1", LIFE, 3)
    assert letters(box) == ["second", "third", "fourth"]


def test_message_is_received_once() -> None:
    box = Mailbox()
    for _ in range(2):
        put(box, "once", number=1, low=1)
    assert letters(box) == ["once"]


def test_skip_waits_for_earlier_messages() -> None:
    out = Outbox()
    for number, after in ((1, 0), (2, 1), (3, 2)):
        assert out.numbers("t") == (number, 1, after)
        out.sent("t", number, after)
    assert out.ended(2, failed=True) is None, "the first may still arrive"
    assert out.ended(1, failed=False) == (2, 2)
    assert out.numbers("t") == (4, 2, 3)
    assert out.skipped(2) is None
    assert out.ended(3, failed=False) is None
    assert (out.numbers("t"), out.unconfirmed) == ((4, 4, 0), 0)


def test_message_held_elsewhere_is_freed() -> None:
    """The first was received by the earlier incarnation, of which the next one knows nothing."""
    out, box = Outbox(), Mailbox()
    out.sent("t", 1, 0)
    out.sent("t", 2, 1)
    assert out.ended(1, failed=False) is None
    put(box, "second", number=2, low=1, after=1)
    assert box.holds("worker:1", 2, 1)
    assert out.ended(2, failed=False, incarnation=7) == (2, 1)
    assert out.numbers("t")[2] == 2, "messages that are sent meanwhile come after it"
    box.skipped("worker:1", LIFE, 1)
    assert letters(box) == ["second"]
    assert out.skipped(2) is None


def test_message_behind_held_message_is_freed() -> None:
    """The third is lost with incarnation 7 of the receiver, which held it; incarnation 8 holds the
    fourth, and never gets the third."""
    out, box = Outbox(), Mailbox()
    for number in (1, 2, 3, 4):
        out.sent("t", number, number - 1)
    assert out.ended(3, failed=False, incarnation=7) is None
    put(box, "fourth", number=4, low=1, after=3)
    assert out.ended(4, failed=False, incarnation=8) is None
    put(box, "second", number=2, low=1, after=1)
    assert out.ended(2, failed=False, incarnation=8) is None
    assert out.ended(1, failed=True) == (1, 1)
    box.skipped("worker:1", LIFE, 1)
    assert out.skipped(1) == (3, 2)
    box.skipped("worker:1", LIFE, 2)
    assert out.skipped(3) == (4, 3), (
        "incarnation 8 does not know that the third had its turn at incarnation 7"
    )
    box.skipped("worker:1", LIFE, 3)
    assert out.skipped(4) is None
    put(box, "fifth", number=5, low=5)
    assert letters(box) == ["second", "fourth", "fifth"]


def test_last_failed_message_needs_no_skip() -> None:
    out = Outbox()
    out.sent("t", 1, 0)
    assert out.ended(1, failed=True) is None
    assert out.unconfirmed == 0
