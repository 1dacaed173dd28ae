"""Transcripts of machines: scenarios as text, with the effects that each input has.

A file is blocks of lines: inputs, `----`, the lines that follow from them, and a blank line. A line that
begins with # is a comment; the comment before the first input of a scenario says what the scenario
shows. `play` writes the effects anew, and `check` compares them with the file.

An event, an effect or a message is one line: its class in lower case, then its fields. The main
field stands first without its name, and fields with their default are left out. Work is written as
    41, 41/1, 41/2:0    a work item; its attempt 1; the first attempt of its submission 2
    3=41/1              lease or position 3 is attempt 1 of work 41
    gpu:1000            one unit of the resource gpu
    3/gpu:1000/0        lease 3 has one GPU, which is device 0
    3:value, 3:error:x  an outcome of lease or position 3; a payload other than "r" follows
    7, 7@2              a function of coordinator 1; of coordinator 2
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, get_args, get_origin, get_type_hints

import msgspec

from zmqdist import messages
from zmqdist.messages import (
    BULK,
    CANCELLED,
    ERROR,
    INPUT_LOST,
    KEPT,
    OUT_OF_MEMORY,
    SUBMISSION_SHIFT,
    VALUE,
)

KINDS: Final = {
    "not-run": -1,
    "value": VALUE,
    "error": ERROR,
    "bulk": BULK,
    "cancelled": CANCELLED,
    "kept": KEPT,
    "input-lost": INPUT_LOST,
    "out-of-memory": OUT_OF_MEMORY,
}
KIND_NAMES: Final = {kind: name for name, kind in KINDS.items()}
FUNCTION: Final = 7
"""The function of work that names none."""


class Script(Protocol):
    """A machine that reads its events from lines."""

    def answer(self, line: str) -> Iterable[str]:
        """Return the lines that follow from one line of input."""


def play(text: str, script: Script) -> str:
    """Return the transcript with the lines that follow from its inputs now."""
    blocks = []
    for block in text.strip().split("\n\n"):
        inputs, separator, _ = (block + "\n").partition("----\n")
        if separator:
            lines = [line for line in inputs.splitlines() if not line.startswith("#")]
            try:
                effects = [effect for line in lines for effect in script.answer(line)]
            except Exception as error:
                raise AssertionError(f"{error!r} in the block\n{inputs}") from error
            block = "\n".join([f"{inputs}----", *effects])
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def check(path: Path, script: Script) -> None:
    """Compare a transcript with what the machine does now, or write it anew."""
    text = path.read_text()
    present = play(text, script)
    if os.environ.get("TRANSCRIPTS") == "write":
        path.write_text(present)
    else:
        assert present == text, "make transcripts writes it anew"


def promises_of(module_doc: str | None, letter: str = "P") -> set[str]:
    """Return the numbers of the promises in the docstring of a machine."""
    return {*re.findall(rf"^    ({letter}\d+) ", module_doc or "", re.MULTILINE)}


def promises_shown(paths: Iterable[Path]) -> set[str]:
    """Return the numbers of the promises that the comments of transcripts name."""
    comments = (
        line for path in paths for line in path.read_text().splitlines() if line[:2] == "# "
    )
    return {name for line in comments for name in re.findall(r"P\d+", line.partition(": ")[0])}


# -- parts of lines --------------------------------------------------------------------------------


def attempt_text(number: int, attempt: int) -> str:
    submission, start = divmod(attempt, 1 << SUBMISSION_SHIFT)
    if submission:
        return f"{number}/{submission}:{start}"
    return f"{number}/{start}" if start else f"{number}"


def number_and_attempt(text: str) -> tuple[int, int]:
    number, _, attempt = text.partition("/")
    submission, _, start = attempt.rpartition(":")
    return int(number), (int(submission or 0) << SUBMISSION_SHIFT) + int(start or 0)


def item_text(item: tuple[int, int, int, int, bytes]) -> str:
    work, attempt, lost, fn, payload = item
    assert payload == b"%d" % work, "the payload of work is its number"
    text = attempt_text(work, attempt)
    return text + f"*{fn}" * (fn != FUNCTION) + f"~{lost}" * bool(lost)


def item_of(text: str) -> tuple[int, int, int, int, bytes]:
    text, _, lost = text.partition("~")
    text, _, fn = text.partition("*")
    work, attempt = number_and_attempt(text)
    return work, attempt, int(lost or 0), int(fn or FUNCTION), b"%d" % work


def leased_text(item: tuple[int, int, int, int, bytes]) -> str:
    lease, coordinator, attempt, fn, payload = item
    text = f"{lease}={attempt_text(int(payload), attempt)}"
    return text + f"*{fn}" * (fn != FUNCTION) + f"@{coordinator}" * (coordinator != 1)


def leased_of(text: str) -> tuple[int, int, int, int, bytes]:
    text, _, coordinator = text.partition("@")
    text, _, fn = text.partition("*")
    lease, _, work = text.partition("=")
    number, attempt = number_and_attempt(work)
    return int(lease), int(coordinator or 1), attempt, int(fn or FUNCTION), b"%d" % number


def placed_text(item: tuple[int, int, int, bytes]) -> str:
    position, coordinator, fn, payload = item
    return leased_text((position, coordinator, 0, fn, payload))


def outcome_text(outcome: tuple[int, int, bytes]) -> str:
    number, kind, payload = outcome
    usual = b"" if kind in (CANCELLED, KINDS["not-run"]) else b"r"
    return f"{number}:{KIND_NAMES[kind]}" + f":{payload.decode()}" * (payload != usual)


def outcome_of(text: str) -> tuple[int, int, bytes]:
    number, kind, *payload = text.split(":")
    usual = "" if kind in ("cancelled", "not-run") else "r"
    return int(number), KINDS[kind], (payload[0] if payload else usual).encode()


def result_text(result: tuple[int, int, int, bytes]) -> str:
    work, attempt, kind, payload = result
    return attempt_text(work, attempt) + outcome_text((0, kind, payload))[1:]


def function_text(function: tuple[Any, ...]) -> str:
    *coordinator, fn, _ = function
    return f"{fn}" if coordinator in ([], [1]) else f"{fn}@{coordinator[0]}"


def function_of(text: str) -> tuple[int, int, bytes]:
    fn, _, coordinator = text.partition("@")
    return int(coordinator or 1), int(fn), b"f"


def key_text(key: tuple[int, int]) -> str:
    return f"{key[1]}" + f"@{key[0]}" * (key[0] != 1)


def lost_start_text(start: tuple[int, int, str, int | None, str, bool]) -> str:
    work, attempt, worker, exit_code, log, final = start
    return f"{attempt_text(work, attempt)}({worker},{exit_code},{log})" + "FINAL" * final


def joined_text(member: tuple[str, int, int, str, int]) -> str:
    return f"{member[0]}#{member[1]}"


def left_text(member: tuple[str, int, str]) -> str:
    return f"{member[0]}#{member[1]}({member[2]})"


def slot_loss_text(loss: tuple[int, int | None, str]) -> str:
    return ":".join(map(str, loss))


def slot_loss_of(text: str) -> tuple[int, int | None, str]:
    lease, exit_code, log = text.split(":")
    return int(lease), None if exit_code == "None" else int(exit_code), log


def stale_text(lease: tuple[int, int]) -> str:
    return f"{lease[0]}@{lease[1]}"


def stale_of(text: str) -> tuple[int, int]:
    lease, _, coordinator = text.partition("@")
    return int(lease), int(coordinator)


def quantity_text(quantity: tuple[str, int]) -> str:
    return f"{quantity[0]}:{quantity[1]}"


def quantity_of(text: str) -> tuple[str, int]:
    name, _, thousandths = text.partition(":")
    return name, int(thousandths)


def grant_text(grant: tuple[int, tuple[tuple[str, int], ...], tuple[int, ...]]) -> str:
    lease, quantities, devices = grant
    amounts = "+".join(map(quantity_text, quantities))
    return f"{lease}/{amounts}" + f"/{'+'.join(map(str, devices))}" * bool(devices)


def grant_of(text: str) -> tuple[int, tuple[tuple[str, int], ...], tuple[int, ...]]:
    lease, amounts, *devices = text.split("/")
    numbers = tuple(map(int, devices[0].split("+"))) if devices else ()
    return int(lease), tuple(map(quantity_of, amounts.split("+"))), numbers


PARTS: Final[dict[tuple[str, str], tuple[Callable[[Any], str], Callable[[str], Any] | None]]] = {
    ("Submit", "items"): (item_text, item_of),
    ("Assign", "items"): (leased_text, leased_of),
    ("Give", "items"): (placed_text, None),
    ("Done", "outcomes"): (outcome_text, outcome_of),
    ("SlotFinished", "outcomes"): (outcome_text, outcome_of),
    ("Results", "items"): (result_text, None),
    ("Define", "functions"): (function_text, lambda text: (int(text), b"f")),
    ("Assign", "functions"): (function_text, function_of),
    ("Give", "functions"): (function_text, None),
    ("ForgetFunctions", "functions"): (key_text, None),
    ("StartsLost", "items"): (lost_start_text, None),
    ("Members", "joined"): (joined_text, None),
    ("Members", "left"): (left_text, None),
    ("SlotsLost", "items"): (slot_loss_text, slot_loss_of),
    ("Register", "stale_leases"): (stale_text, stale_of),
    ("CancelWork", "works"): (lambda key: attempt_text(*key), number_and_attempt),
    ("ResultReceived", "items"): (lambda key: attempt_text(*key), number_and_attempt),
    ("Submit", "resources"): (quantity_text, quantity_of),
    ("Register", "resources"): (quantity_text, quantity_of),
    ("Register", "grants"): (grant_text, grant_of),
    ("Assign", "grants"): (grant_text, grant_of),
    ("Unsatisfied", "works"): (lambda key: attempt_text(*key), number_and_attempt),
    ("Begun", "works"): (lambda key: attempt_text(*key), None),
}
"""The fields that are lists of tuples, with the functions that write and read one tuple."""


# -- lines -----------------------------------------------------------------------------------------


def kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


POSITIONAL: Final = {
    "Submit": ("items",),
    "Assign": ("items",),
    "Give": ("slot", "items"),
    "SlotFinished": ("slot", "outcomes"),
    "SlotReclaimed": ("slot", "position"),
    "SlotSeen": ("slot", "position"),
    "SlotWaits": ("slot", "position"),
    "SlotResumed": ("slot", "position"),
    "Interrupt": ("slot", "position"),
    "ForgetFunctions": ("slot", "functions"),
}
"""The fields that stand in a line without their names, where this is not the first field alone."""


def fields_of(kind: type) -> dict[str, Any]:
    """Return the names of the fields of a message, event or effect, with their defaults; the
    positional fields first."""
    fields: Any = (
        dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    )
    defaults = {field.name: field.default for field in fields}
    return {name: defaults[name] for name in (*POSITIONAL.get(kind.__name__, ()), *defaults)}


def positional(kind: type) -> tuple[str, ...]:
    return POSITIONAL.get(kind.__name__) or tuple(fields_of(kind))[:1]


def text_of(kind: type, name: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        write = PARTS[kind.__name__, name][0] if (kind.__name__, name) in PARTS else str
        return ",".join(ranges([*map(write, value)]))
    return f"{value:g}" if isinstance(value, float) else str(value)


def successor(text: str, distance: int) -> str:
    """Return the text of the item that stands `distance` after an item, such as 5=6 two after
    3=4."""
    numbers = re.compile(r"^\d+(=\d+)?")
    return numbers.sub(
        lambda match: "=".join(str(int(n) + distance) for n in match[0].split("=")), text
    )


def ranges(texts: list[str]) -> Iterator[str]:
    """Write four or more items in a row as the first and the last, as 1..9 or 1=1..9=9."""
    while texts:
        count = 1
        while count < len(texts) and texts[count] == successor(texts[0], count):
            count += 1
        yield from [f"{texts[0]}..{texts[count - 1]}"] if count > 3 else texts[:count]
        del texts[:count]


def unranged(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("..")
        yield first
        distance = 0
        while last and successor(first, distance) != last:
            distance += 1
            yield successor(first, distance)


DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "CancelWork": {"grace_s": 2.0},
    "Done": {"outcomes": [], "started": []},
    "EndRound": {"grace_s": 2.0},
    "SlotsWaiting": {"waiting": [], "resumed": []},
    "RegisterCoordinator": {"queue_max": 1000, "round": 1, "previous_dispatcher": False},
    "Registered": {"beat_s": 1.0, "lease_s": 10.0, "grace_s": 5.0},
    "Submit": {"round": 1},
}
"""Fields that a line leaves out with these values, beside the defaults of the classes."""


def line_of(thing: Any, defaults: dict[str, Any] | None = None) -> str:
    """Return a message, event or effect as a line, without empty fields and those that equal
    `defaults`."""
    kind = type(thing)
    usual = {**fields_of(kind), **DEFAULTS.get(kind.__name__, {}), **(defaults or {})}
    words = [kebab(kind.__name__)]
    for name in fields_of(kind):
        value = getattr(thing, name)
        if value == usual[name] or value in ([], "", b""):
            continue
        text = name if value is True else text_of(kind, name, value)
        named = name not in positional(kind) and value is not True
        words.append(f"{name}={shlex.quote(text)}" if named else shlex.quote(text))
    return " ".join(words)


def classes(*namespaces: Any) -> dict[str, type]:
    """Return the messages, and the classes of these modules, by their names in lines."""
    found = {name: kind for space in (messages, *namespaces) for name, kind in vars(space).items()}
    return {kebab(name): kind for name, kind in found.items() if isinstance(kind, type)}


def thing_of(kind: type, words: Iterable[str], defaults: dict[str, Any] | None = None) -> Any:
    """Return the message or event of this kind with the fields that the words name, and `defaults`
    for others."""
    hints = get_type_hints(kind)
    empty = {n: [] if get_origin(hint) is list else "" for n, hint in hints.items()}
    values = {
        name: empty[name]
        for name, default in fields_of(kind).items()
        if default in (dataclasses.MISSING, msgspec.NODEFAULT) and hints[name] is not int
    }
    values |= {**DEFAULTS.get(kind.__name__, {}), **(defaults or {})}
    unnamed = iter(positional(kind))
    for word in words:
        name, equals, text = word.partition("=")
        if name not in hints or not (equals or hints[name] is bool):
            name, text = next(unnamed), word
        values[name] = value_of(kind, name, hints[name], text)
    return kind(**values)


def value_of(kind: type, name: str, hint: Any, text: str) -> Any:
    if get_origin(hint) in (list, tuple):
        read = PARTS.get((kind.__name__, name), (None, get_args(hint)[0]))[1]
        assert read is not None, f"{kind.__name__}.{name} is only written"
        return get_origin(hint)(map(read, unranged(text)))
    if text == "None":
        return None
    while get_args(hint):  # Annotated, or a union with None
        hint = get_args(hint)[0]
    return True if hint is bool else hint(text) if hint in (int, float) else text
