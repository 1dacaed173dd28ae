"""A data service's dispatcher machine that reads its events from the lines of a transcript, and
writes its effects as lines.

`dispatcher` makes a machine with a journal; the words after it are its Rules. `restart` makes another
one from the journal. `journal full` makes each commit fail until `journal works`. `at` and `tick` set the
time in seconds, which begins at 0. `show` writes the rows of the state that it names. A line after a
dot is carried out, and its effects are left out.

Any other line is an event: its name, and its fields as name=value. A request's token is its name and
how many requests of this name there were. A request is for the state of the present dispatcher
unless it says otherwise. `+` is a record that was written to the journal.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState, decode_state
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.errors import RESOURCE_EXHAUSTED, from_code
from zmqdist.events import Ticked

STATE: Final = 77

EVENTS: Final[dict[str, Any]] = {
    "worker-joined": ev.WorkerJoined,
    "worker-gone": ev.WorkerGone,
    "caller-gone": ev.CallerGone,
    "register": ev.RegisterRequest,
    "open": ev.OpenRequest,
    "watch": ev.WatchRequest,
    "release": ev.ReleaseRequest,
    "acknowledge": ev.AcknowledgeRequest,
    "missed": ev.MissedRequest,
    "work": ev.WorkRequest,
    "splits": ev.SplitsRequest,
    "portions": ev.PortionsRequest,
    "crash": ev.CrashReport,
    "hand-back": ev.HandBackRequest,
    "leave": ev.LeaveRequest,
    "compression": ev.CompressionRequest,
    "note-snapshot": ev.NoteSnapshotRequest,
}
BARE: Final = re.compile(r"[A-Za-z][\w:./-]*")
TERMS: Final = frozenset(r.Terms.__struct_fields__)
TEXTS: Final = frozenset({"dataset", "id", "fingerprint", "metadata", "how", "name", "address"})


DEFAULTS: Final = {
    "state": STATE,
    "id": None,
    "metadata": "{}",
    "has": {},
    "finished": (),
    "repetition": 0,
    "source": 0,
}


class Script:
    """The machine of one transcript, its journal and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.journal: list[bytes] = []
        self.journal_full = False
        self.counts: Counter[str] = Counter()
        self.rules = Rules(fault_tolerant=True)
        self.machine = DataDispatcherMachine(self.rules, STATE, 0.0)

    def answer(self, line: str) -> Iterator[str]:
        """Yield the lines that follow from one line of input."""
        command, *words = shlex.split(line)
        match command:
            case ".":
                list(self.answer(line[2:]))
            case "dispatcher":
                self.__init__()  # type: ignore[misc]
                rules = {name: value_of(text) for name, text in pairs(words)}
                self.rules = msgspec.structs.replace(self.rules, **rules)
                self.machine = DataDispatcherMachine(self.rules, STATE, 0.0)
            case "restart":
                self.machine = DataDispatcherMachine(self.rules, STATE + 1, self.now)
                self.restore()
            case "journal":
                self.journal_full = words == ["full"]
            case "at":
                self.now = float(words[0])
            case "tick":
                self.now = float(words[0]) if words else self.now
                yield from self.effect_lines(self.machine.handle(Ticked(), self.now))
            case "show":
                for name in words:
                    yield from self.rows(name)
            case _:
                event = self.event(command, dict(pairs(words)))
                yield from self.effect_lines(self.machine.handle(event, self.now))
                self.check()

    def check(self) -> None:
        """Check that the journal restores the present state."""
        state = DurableState(number=STATE)
        for record in self.journal:
            state.apply(r.decode(record))
        assert r.encode(state) == r.encode(self.machine.state)

    def event(self, command: str, texts: dict[str, str]) -> ev.Event:
        kind = EVENTS[command]
        fields = {name: field_of(name, text) for name, text in texts.items()}
        if "token" in kind.__struct_fields__ and "token" not in fields:
            self.counts[command] += 1
            fields["token"] = f"{command}.{self.counts[command]}"
        defaults = {
            name: value for name, value in DEFAULTS.items() if name in kind.__struct_fields__
        }
        fields = {**defaults, **fields}
        if kind is ev.OpenRequest:
            terms = {name: fields.pop(name) for name in TERMS & fields.keys()}
            terms["mode"] = r.MODES.index(terms.get("mode", "OFF"))
            fields["terms"] = r.Terms(terms.pop("dataset", "1000"), **terms)
            if "saved" in fields:
                fields["saved"] = msgspec.convert(fields["saved"], ev.SavedRequest)
        return kind(**fields)  # type: ignore[no-any-return]

    def restore(self) -> None:
        first = decode_state(r.encode(DurableState(number=STATE)))
        self.machine.restore(first, [r.decode(record) for record in self.journal], self.now)

    def effect_lines(self, effects: Iterable[ev.Effect]) -> Iterator[str]:
        for effect in effects:
            match effect:
                case ev.CommitJournal(records) if not self.journal_full:
                    self.journal += records
                    yield from (f"+ {shown(r.decode(record))}" for record in records)
                    yield from self.effect_lines(
                        self.machine.handle(ev.JournalCommitted(), self.now)
                    )
                case ev.CommitJournal():
                    failed = ev.JournalFailed(RESOURCE_EXHAUSTED, "disk full")
                    yield from self.effect_lines(self.machine.handle(failed, self.now))
                case ev.Reload():
                    self.restore()
                    yield "reload"
                case ev.ReplyToRequest(token, value):
                    yield f"{token} -> {shown(value)}"
                case ev.FailRequest(token, code, message):
                    yield f"{token} FAILS {type(from_code(code, '')).__name__}: {message}"

    def rows(self, name: str) -> Iterator[str]:
        state = self.machine.state
        match name:
            case "deadline":
                yield f"deadline {self.machine.deadline:g}"
            case "places":
                yield from (shown(row) for row in self.machine.place_rows())
            case "portions":
                for iteration in state.iterations.values():
                    if iteration.portions is not None:
                        rows = iteration.portions.open.items()
                        yield from (
                            f"{number} {row.state.name} {shown(row)}" for number, row in rows
                        )
            case "numbers":
                yield " ".join(f"{n}={v}" for n, v in vars_of(state) if n.startswith("next_"))
            case _:
                yield from (shown(row) for row in getattr(state, name).values())


def pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, _, text = word.partition("=")
        yield name, text


def field_of(name: str, text: str) -> Any:
    if name in ("has", "lost"):
        items = (item.partition(":") for item in text.split(","))
        return {int(key): value if name == "has" else int(value) for key, _, value in items}
    return text if name in TEXTS else value_of(text)


def value_of(text: str) -> Any:
    return (
        text
        if BARE.fullmatch(text) and text not in ("True", "False", "None")
        else (ast.literal_eval(text))
    )


def vars_of(row: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(row, name)) for name in row.__struct_fields__]


def shown(value: Any) -> str:
    """Return a value as text: of a row, the fields that differ from their defaults."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(type(value))
        texts = []
        for field in fields:
            item = getattr(value, field.name)
            factory = field.default_factory
            default = field.default if factory is msgspec.NODEFAULT else factory()
            if item != default:
                texts.append(f"{field.name}={shown(item)}")
        return f"{type(value).__name__}({', '.join(texts)})"
    if hasattr(value, "__dataclass_fields__"):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        text = ", ".join(map(shown, value)) + ("," if value and len(value) == 1 else "")
        return f"[{text.rstrip(',')}]" if isinstance(value, list) else f"({text})"
    return value.name if hasattr(value, "name") else repr(value)
