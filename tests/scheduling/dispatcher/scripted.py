"""The dispatcher's machine as it reads its events from the lines of a transcript.

`machine` makes a dispatcher without peers. Its options are `first_lease` and the settings of
BrokerSettings; with `watched` a peer `program` watches its members. `ready` makes a dispatcher with
these peers: coordinators, whose names begin with c and who have function 7, and workers, as `w*4`
with four slots. `at` sets the time in seconds, which begins at 0.

`c> submit 41` is a message of the peer c, and `c< results 41:value` a message to it. After `w>
register ... unwatched` the end of the connection is not noticed. `gone`, `expelled` and
`process-exited` are the ends of peers and processes, `drain` tells a worker to leave. `deadline` and
`snapshot` write what the runtime and `zmqdist status` see.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from tests.transcripts import FUNCTION, classes, line_of, thing_of
from zmqdist.events import Heard, PeerExpelled, PeerGone, ProcessExited, Send, Ticked
from zmqdist.messages import Message, Register
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings

MESSAGES: Final = classes()
SETTINGS: Final = {"lease_s": 10.0, "reconnect_grace_s": 1.0, "cancel_grace_s": 5.0}


def usual_register(index: int) -> dict[str, Any]:
    """Return the fields of a Register that a line leaves out."""
    return {
        "incarnation": index + 1,
        "job": "worker",
        "slots": 1,
        "held": [],
        "stale_leases": [],
        "pid": 100 + index,
        "host": "host",
        "nested_slots_max": 8,
    }


def message_of(text: str) -> Message:
    command, *words = shlex.split(text)
    options = dict(word.partition("=")[::2] for word in words)
    defaults = usual_register(int(options["index"])) if command == "register" else None
    message: Message = thing_of(MESSAGES[command], words, defaults)
    return message


def message_line(message: Message) -> str:
    return line_of(
        message, usual_register(message.index) if isinstance(message, Register) else None
    )


class Script:
    """The machine of one transcript, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.broker = Broker(BrokerSettings(**SETTINGS))

    def answer(self, line: str) -> Iterator[str]:
        peer, heard, text = line.partition("> ")
        if heard:
            watched = not text.endswith(" unwatched")
            event = Heard(peer, message_of(text.removesuffix(" unwatched")))
            yield from self.effects(event, watched=watched)
            return
        command, *words = shlex.split(line)
        match command:
            case "machine":
                settings = {n: float(v) for n, _, v in (w.partition("=") for w in words) if v}
                first_lease = int(settings.pop("first_lease", 1))
                self.now = 0.0
                self.broker = Broker(
                    BrokerSettings(**{**SETTINGS, **settings}),  # type: ignore[arg-type]
                    first_lease=first_lease,
                )
                if "watched" in words:
                    list(self.answer("program> register-coordinator 1 watch_members"))
            case "ready":
                list(self.answer("machine"))
                programs = [word for word in words if word[0] == "c"]
                for number, name in enumerate(programs, 1):
                    list(self.answer(f"{name}> register-coordinator {number}"))
                    list(self.answer(f"{name}> define {FUNCTION}"))
                for index, word in enumerate(word for word in words if word[0] != "c"):
                    name, _, slots = word.partition("*")
                    list(self.answer(f"{name}> register index={index} slots={slots or 1}"))
            case "at":
                self.now = float(words[0])
            case "tick":
                yield from self.effects(Ticked())
            case "gone":
                yield from self.effects(PeerGone(words[0]))
            case "expelled":
                yield from self.effects(PeerExpelled(words[0], words[1]))
            case "process-exited":
                yield from self.effects(thing_of(ProcessExited, words))
            case "drain":
                job, _, index = words[0].partition(":")
                effects = self.broker.leave(job, int(index), float(words[1]), self.now)
                yield from ["no such worker"] if effects is None else map(sent, effects)
            case "deadline":
                deadline = self.broker.deadline
                yield "deadline none" if deadline is None else f"deadline {deadline:g}"
            case "snapshot":
                yield from self.snapshot()
            case _:
                raise ValueError(f"no such input: {line}")

    def effects(self, event: Any, *, watched: bool = True) -> Iterator[str]:
        yield from map(sent, self.broker.handle(event, self.now, watched=watched))
        self.check()

    def check(self) -> None:
        """Check what must be true after each event."""
        dispatch = self.broker.dispatch
        queues = [
            len(band)
            for session in dispatch.sessions.values()
            for part in session.with_detached
            for queue in part.queues.values()
            for band in queue.bands
        ]
        assert dispatch.placement.queued == sum(queues)
        for load in dispatch.loads.values():
            assert all(load.held[number].session.held for number in load.held)
            pinned = sum(bool(x.band.session_queue.key) for x in load.leases.values())
            assert load.outstanding <= load.window.limit + pinned, (
                f"{load.name} has too many leases"
            )

    def snapshot(self) -> Iterator[str]:
        snapshot = self.broker.snapshot()
        yield f"queued={snapshot.queued} pinned={snapshot.queued_pinned} losses={snapshot.losses_count}"
        for row in (*snapshot.workers, *snapshot.coordinators):
            shown = [f for f in fields(row) if f.name in SHOWN and getattr(row, f.name)]
            first, *_ = fields(row)
            words = (f"{f.name}={getattr(row, f.name)}" for f in shown)
            yield " ".join([type(row).__name__[:-3].lower(), str(getattr(row, first.name)), *words])
        for name, reason, exit_code, _ in snapshot.losses:
            yield f"loss {name} {reason}" + f" exit_code={exit_code}" * (exit_code is not None)
        if snapshot.slot_deaths:
            yield f"slot deaths={snapshot.slot_deaths} last={snapshot.last_slot_death}"


SHOWN: Final = frozenset(
    [
        "state",
        "leases",
        "running",
        "done",
        "slot_deaths",
        "kept",
        "pinned",
        "queued",
        "out",
        "held",
        "submitted",
        "finished",
        "functions",
    ]
)
"""The columns of a snapshot that transcripts show, where they are not 0."""


def sent(effect: Send) -> str:
    return f"{effect.to}< {message_line(effect.message)}"
