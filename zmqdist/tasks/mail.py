"""Values from one task to another: `Server.send` and `Server.recv`.

Rules
    `send` takes a snapshot of the value, and does not block. Each value is received once. Values
    that one sender sends under one tag are received in the order of sending, whatever their sizes.
    A value that has arrived stays in the receiver's mailbox until `recv` takes it. A sender may end
    once it knows of the arrival. When a sender ends, each `recv` that waits for it ends with
    UNAVAILABLE. A `recv` that waits for one incarnation of a sender never gets a value of another
    incarnation.

Not here: which waiting `recv` gets which message (mailbox_machine.py), and which tasks are up
(watches_machine.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.clock import deadline, monotonic
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import (
    CANCELLED,
    UNAVAILABLE,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    from_code,
)
from zmqdist.limits import MAIL_BYTES_MAX, MAIL_ITEMS_MAX, WAIT_LOG_S
from zmqdist.rpc import StatusOrResult, payload
from zmqdist.rpc.client import outcome_of, read_as
from zmqdist.rpc.internal_client import start
from zmqdist.rpc.payload import pack_result
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.mailbox_machine import Key, Mailbox, Outbox, Wait
from zmqdist.tasks.node import TASKS, Node
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.shm_pool import Block

log = logging.getLogger("zmqdist.tasks")


class LockedMailbox:
    """A mailbox with a lock, for threads that wait for messages."""

    def __init__(self, box: Mailbox) -> None:
        self.box = box
        self.lock = threading.Lock()

    def apply(self, event: Callable[..., list[Wait]], *args: Any) -> None:
        """Pass an event to the mailbox, and wake the threads whose waits it ends."""
        with self.lock:
            wake(event(*args))

    def check(self) -> None:
        """Raise the OpError with which the mailbox was aborted, if it was aborted."""
        with self.lock:
            self.box.check()

    def receive(self, key: Key, due: float, gone_message: Callable[[], str]) -> Wait:
        """Wait for the next message under a key. Return the Wait, whose `letter` is the message.

        Args:
          due: when to stop waiting, on the clock of `time.monotonic`; `inf` waits without a limit,
            and logs the sender's name at intervals.
          gone_message: function that returns an error text if this task has noticed that the sender
            has gone, else "".

        Raises:
          OpError: the error with which the wait ended.
        """
        arrived = threading.Event()
        with self.lock:
            wait = self.box.wanted(key, due)
            if not wait.ended and (message := gone_message()):
                self.box.cancelled(wait, UNAVAILABLE, message)
            wait.wake = arrived.set
        try:
            while not wait.ended:
                arrived.wait(max(0.0, min(WAIT_LOG_S, due - monotonic())))
                if not wait.ended and monotonic() >= due:
                    self.apply(self.box.ticked, monotonic())
                elif not wait.ended:
                    log.info("still waiting for %s to send %r", key.source, key.tag)
        except BaseException:
            # after Ctrl-C, put back a message that has arrived, so that the next wait gets it
            with self.lock:
                if not self.box.cancelled(wait) and not wait.code:
                    wake(self.box.returned(wait))
            raise
        if wait.code:
            raise from_code(wait.code, wait.message)
        return wait


def wake(waits: Sequence[Wait]) -> None:
    """Wake the threads whose waits have ended."""
    for wait in waits:
        if wait.wake is not None:
            wait.wake()


class Mail:
    """The mailbox of one task, and the messages of this task to other tasks."""

    def __init__(self, node: Node, watches: Watches) -> None:
        self._node = node
        self._watches = watches
        self._me = task_name(node.me)
        self._in = LockedMailbox(Mailbox(MAIL_ITEMS_MAX, MAIL_BYTES_MAX))
        self._out: dict[Task, tuple[Outbox, threading.Lock]] = {}
        self._lock = threading.Lock()
        node.service.register("mail.put", self._put, inline=True, roles=TASKS)
        node.service.register("mail.skip", self._skip, inline=True, roles=TASKS)
        node.on_stop.append(self._stop)
        watches.listen(self._note_incarnation, self._note_loss)

    @property
    def unconfirmed(self) -> int:
        """The number of messages sent by this task that may still be on their way, as far as the
        task knows."""
        with self._lock:
            outgoing = list(self._out.values())
        return sum(box.unconfirmed for box, _ in outgoing)

    def counts(self) -> tuple[int, int, int]:
        """Return the number of messages that were not received yet, their size in bytes, and the
        number of waits."""
        with self._in.lock:
            return self._in.box.items, self._in.box.nbytes, self._in.box.waiting

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self, value: Any, dst: str | Task, tag: str, timeout: float | None = None
    ) -> StatusOrResult:
        task, address = self._node.task(dst), _checked(tag)
        until = deadline(timeout)
        key = Key(self._me, self._node.incarnation, task_name(task), address)
        if task == self._node.me:
            return self._to_self(key, value)
        client = self._node.client(task)
        out, lock = self._out_to(task)
        with lock:
            number, low, after = out.numbers(tag)
            due = inf if until is None else until
            result = start(client, "mail.put", key, number, low, after, value, due=due)
            out.sent(tag, number, after)
        result.add_done_callback(partial(self._arrived, task, number))
        # the caller gets None, because the receiver's reply is for Mail only
        return read_as(result, _no_value)

    def _out_to(self, task: Task) -> tuple[Outbox, threading.Lock]:
        with self._lock:
            return self._out.setdefault(task, (Outbox(), threading.Lock()))

    def _arrived(self, task: Task, number: int, result: StatusOrResult) -> None:
        """Process the receiver's reply to a message that this task has sent, or the error of the
        call. After an error, have the receiver skip the message, so that later messages do not wait
        for it.
        """
        out, lock = self._out_to(task)
        incarnation, error = outcome_of(result)
        with lock:
            skip = out.ended(number, error is not None, incarnation or 0)
        if skip is not None:
            self._have_skipped(task, *skip)

    def _have_skipped(self, task: Task, number: int, skip: int) -> None:
        # FailedPreconditionError means that this server was stopped and sends no more messages.
        with suppress(FailedPreconditionError):
            result = self._node.start(task, "mail.skip", self._me, self._node.incarnation, skip)
            result.add_done_callback(partial(self._skipped, task, number, skip))

    def _skipped(self, task: Task, number: int, skip: int, result: StatusOrResult) -> None:
        code, _ = result.get_error()
        out, lock = self._out_to(task)
        if code == UNAVAILABLE and not self._node.closed:
            # try again, because the receiver may reconnect
            self._have_skipped(task, number, skip)
            return
        with lock:
            more = out.skipped(number)
        if more is not None:
            self._have_skipped(task, *more)

    def _to_self(self, key: Key, value: Any) -> StatusOrResult:
        box = [value]
        del value
        body, sources = pack_result(box, lends=False)
        parts = [source.array() if isinstance(source, Block) else source for source in sources]
        letter = payload.unpack(body, parts, self._me)
        call = ClientCall("send", b"")
        with self._in.lock:
            waits, refusal = self._in.box.sent(key, letter, nbytes_of(letter))
            wake(waits)
        if refusal is None:
            call.end(0, "")
        else:
            call.end(refusal.error_code, refusal.message)
        return StatusOrResult(_LocalChannel(), call, _no_value)  # type: ignore[arg-type]

    # -- receiving ---------------------------------------------------------------------------------

    def recv(
        self,
        src: str | Task,
        tag: str,
        timeout: float | None = None,
        out: NDArray[Any] | None = None,
    ) -> Any:
        task = self._node.task(src)
        key = Key(task_name(task), 0, self._me, _checked(tag))
        check_out(out)
        until = deadline(timeout)
        due = inf if until is None else until
        with self._node.own_wait:
            self._watches.watch(task)
            wait = self._in.receive(key, due, partial(self._watches.gone_message, task))
        # without `out` the caller owns the value, which is never copied again
        if out is None:
            return wait.letter
        problem = misfit(wait.letter, out)
        if problem:
            # the next `recv`, with a fitting array, gets the message
            self._in.apply(self._in.box.returned, wait)
            raise InvalidArgumentError(
                f"{problem}; the message from {key.source} stays in the mailbox"
            )
        np.copyto(out, wait.letter)
        return out

    def _put(self, fields: list[Any], number: int, low: int, after: int, value: Any) -> int | None:
        """Store a message. If the mailbox must hold it behind an earlier message, return this
        task's incarnation, else None."""
        key = Key(*fields)
        if key.target != self._me:
            raise InvalidArgumentError(
                f"this is {self._me}, not {key.target}: the address has another task now"
            )
        with self._in.lock:
            waits, refusal = self._in.box.sent(key, value, nbytes_of(value), number, low, after)
            is_held = after != 0 and self._in.box.holds(key.source, number, after)
            wake(waits)
        if refusal is not None and refusal.error_code == CANCELLED:
            # This task is stopping, so senders must get UnavailableError, as from a task that has
            # ended.
            raise UnavailableError(refusal.message)
        if refusal is not None:
            raise refusal
        return self._node.incarnation if is_held else None

    def _skip(self, source: str, incarnation: int, number: int) -> None:
        self._in.apply(self._in.box.skipped, source, incarnation, number)

    # -- other tasks, and the stop of this one -----------------------------------------------------

    def _note_incarnation(self, task: Task, incarnation: int) -> None:
        self._in.apply(self._in.box.incarnation_seen, task_name(task), incarnation)

    def _note_loss(self, task: Task, message: str) -> None:
        self._in.apply(self._in.box.sender_gone, task_name(task), message)

    def _stop(self) -> None:
        self._in.apply(self._in.box.aborted, CANCELLED, self._node.stopped.message)


class _LocalChannel:
    """The channel of the StatusOrResult for a message that a task sends to itself. The call has
    ended already."""

    address = "this task"

    def wait(self, call: ClientCall) -> None:
        pass

    def poll(self, call: ClientCall) -> bool:
        return True

    def cancel(self, call: ClientCall) -> bool:
        return False


def _no_value(call: ClientCall, address: str) -> None:
    """Return None, the value of a call that has delivered a message."""


def _checked(tag: str) -> str:
    if not isinstance(tag, str) or not tag or ";" in tag:
        raise InvalidArgumentError(
            f"a tag is a text of one character or more, without semicolons, not {tag!r}"
        )
    return tag


def check_out(out: Any) -> None:
    """Check that `out` is None or an array into which a value can be received. Raises
    InvalidArgumentError."""
    if out is not None and not (
        isinstance(out, np.ndarray) and out.flags.writeable and not out.dtype.hasobject
    ):
        raise InvalidArgumentError("out: wanted a writable NumPy array without Python objects")
    if isinstance(out, np.ma.MaskedArray):
        raise InvalidArgumentError(
            "out: the mask of a masked array would hide what is received: pass out.data"
        )


def misfit(value: Any, out: NDArray[Any]) -> str:
    """Return why a value cannot be received into the array `out`; "" if it can be."""
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__} was sent, not one array, as `out` needs"
    if (value.dtype, value.shape) != (out.dtype, out.shape):
        return f"an array of {value.dtype} and shape {value.shape} was sent, `out` has {out.dtype} and {out.shape}"
    return ""


def nbytes_of(value: Any) -> int:
    """Return about how many bytes a value occupies in the mailbox."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(nbytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes_of, value))
    return 8
