"""What a worker or a program tells a dispatcher about itself: a value that no correct process sends
is refused, with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import zmqdist as zd
from tests.transport.helpers import Dialled
from zmqdist.errors import INVALID_ARGUMENT, InvalidArgumentError, UnknownError
from zmqdist.limits import (
    NAME_CHARS_MAX,
    NUMBER_MAX,
    QUEUE_UNBOUNDED,
    SLOTS_MAX,
    WORKER_INDEX_MAX,
    WORKER_TAGS_MAX,
)
from zmqdist.messages import (
    CancelWork,
    Done,
    EndRound,
    Leave,
    Message,
    Refused,
    Register,
    RegisterCoordinator,
    Registered,
)
from zmqdist.observe.status import checked
from zmqdist.scheduling.dispatcher import membership_and_leases
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport.security import client_security
from zmqdist_cli.main import main

WORKER = Register(1, "worker", 0, 1, [], [], 1, "elsewhere", "127.0.0.1:9", ("a tag",))
PROGRAM = RegisterCoordinator(1, 100, 1, False)
LONG = "x" * (NAME_CHARS_MAX + 1)
JOB = "job is {}, wants at most 255 of A-Z a-z 0-9 _ . -, a letter or _ first"
TEXT = "{} is {}, wants at most 255 printable characters"
NOT_ONE = "not a message of this protocol: "

REFUSED: list[tuple[Message, str, Any, str]] = [
    (WORKER, "slots", 2**62, f"slots is {2**62}, wants 1 to {SLOTS_MAX}"),
    (WORKER, "slots", 0, f"slots is 0, wants 1 to {SLOTS_MAX}"),
    (WORKER, "slots", -1, f"slots is -1, wants 1 to {SLOTS_MAX}"),
    (WORKER, "index", 2**62, f"index is {2**62}, wants -1 to {WORKER_INDEX_MAX}"),
    (WORKER, "index", -2, f"index is -2, wants -1 to {WORKER_INDEX_MAX}"),
    (WORKER, "resources", (("gpu", 500),), "resources: gpu is 0.5, wants whole devices"),
    (WORKER, "resources", (("x", 0),), "resources: x is 0, wants 0.001 to 1000000000"),
    (WORKER, "resources", (("b", 1), ("a", 1)), "resources has names that are not sorted"),
    (
        WORKER,
        "grants",
        [(1, (("gpu", 1000),), (3,))],
        "a lease has the devices (3,), wants some of",
    ),
    (WORKER, "pid", -1, f"pid is -1, wants 1 to {2**22}"),
    (WORKER, "pid", 2**40, f"pid is {2**40}, wants 1 to {2**22}"),
    (WORKER, "incarnation", -1, f"incarnation is -1, wants 0 to {NUMBER_MAX}"),
    (WORKER, "threads_per_slot", -1, f"threads_per_slot is -1, wants 0 to {SLOTS_MAX}"),
    (WORKER, "job", "../../x", JOB.format("'../../x'")),
    (WORKER, "job", "", JOB.format("''")),
    (WORKER, "job", "two\nlines", JOB.format(r"'two\nlines'")),
    (WORKER, "job", LONG, JOB.format(ascii(LONG)[:NAME_CHARS_MAX])),
    (WORKER, "host", "\x1b[31mred", TEXT.format("host", r"'\x1b[31mred'")),
    (WORKER, "host", LONG, TEXT.format("host", ascii(LONG)[:NAME_CHARS_MAX])),
    (WORKER, "address", "a\x1b[2J:5", TEXT.format("address", r"'a\x1b[2J:5'")),
    (WORKER, "address", "nowhere", "'nowhere' is not an address: no port"),
    (WORKER, "tags", ("\u202eback",), TEXT.format("a tag", r"'\u202eback'")),
    (WORKER, "tags", ("t",) * 65, f"the number of tags is 65, wants 0 to {WORKER_TAGS_MAX}"),
    (PROGRAM, "coordinator", -1, f"coordinator is -1, wants 0 to {NUMBER_MAX}"),
    (PROGRAM, "queue_max", 0, f"queue_max is 0, wants 1 to {QUEUE_UNBOUNDED}"),
    (PROGRAM, "round", -1, f"round is -1, wants 0 to {QUEUE_UNBOUNDED}"),
    (WORKER, "slots", "1", NOT_ONE),
    (WORKER, "slots", 1.5, NOT_ONE),
    (WORKER, "slots", math.nan, NOT_ONE),
    (WORKER, "slots", None, NOT_ONE),
    (WORKER, "job", 5, NOT_ONE),
    (WORKER, "job", b"\xff", NOT_ONE),
    (WORKER, "tags", "a tag", NOT_ONE),
    (WORKER, "held", 1, NOT_ONE),
    (PROGRAM, "watch_members", 1, NOT_ONE),
    (PROGRAM, "queue_max", "100", NOT_ONE),
    (EndRound(1, 0.0), "grace_s", -1.0, NOT_ONE),
    (EndRound(1, 0.0), "grace_s", math.nan, NOT_ONE),
    (CancelWork([], 0.0), "grace_s", math.nan, NOT_ONE),
    (Leave(0.0), "grace_s", -1.0, NOT_ONE),
    (Done([], []), "busy_us", -1, NOT_ONE),
    (Done([], []), "trip_us", -1, NOT_ONE),
]


@pytest.fixture(scope="module")
def dispatcher() -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer(DispatcherConfig()) as server:
        yield server


@pytest.fixture(scope="module")
def told(dispatcher: zd.DispatchServer) -> dict[int, Refused]:
    """The reply to each row of REFUSED, over a connection of its own."""
    replies = {}
    for number, (message, field, value, _) in enumerate(REFUSED):
        dialled = Dialled(
            dispatcher.address, client_security(dispatcher.address, "admin"), name="stranger"
        )
        dialled.expect("up")
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        wire[1 + message.__struct_fields__.index(field)] = value
        assert dialled.send(wire)
        replies[number] = dialled.expect("message")[1]
        dialled.loop.stop()
    return replies


@pytest.mark.parametrize(
    "number",
    range(len(REFUSED)),
    ids=[f"{type(m).__name__}-{f}-{v!a:.20}" for m, f, v, _ in REFUSED],
)
def test_invalid_registration_is_refused_with_reason(told: dict[int, Refused], number: int) -> None:
    answer, text = told[number], REFUSED[number][3]
    assert isinstance(answer, Refused)
    assert answer.code == INVALID_ARGUMENT
    assert answer.message.startswith(text)
    assert answer.message.isprintable()
    assert answer.final == (text is not NOT_ONE)


def test_refused_workers_are_in_no_table(
    dispatcher: zd.DispatchServer, told: dict[int, Refused]
) -> None:
    assert dispatcher.snapshot().workers == ()


def test_tools_print_any_registration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership_and_leases, "worker_problem", lambda register: "")
    strangers = [
        Register(2, "../../x\x1b[31m", 2**62, 2**62, [], [], 1, "a\nb", "a\x1b[2J:5", ("\x1b",)),
        Register(3, "x" * 5000, 1, 2**63, [], [], 1, "\u202e" * 5000, "a" * 70 + ".b:1"),
        Register(4, "", 2**62, 2**63, [], [], 1, "", "nowhere"),
    ]
    with zd.DispatchServer(DispatcherConfig()) as server:
        linked = []
        for register in strangers:
            dialled = Dialled(
                server.address, client_security(server.address, "worker"), name="stranger"
            )
            linked.append(dialled)
            dialled.expect("up")
            assert dialled.send(register)
            assert isinstance(dialled.expect("message")[1], Registered)
        for command in ("status", "top", "doctor"):
            main([command, server.address])
            shown = capsys.readouterr().out
            assert shown.count("\n") > 3, shown
            assert shown.replace("\n", "").isprintable(), shown
        for dialled in linked:
            dialled.loop.stop()


@pytest.mark.parametrize(
    "record", [None, [], {}, {"workers": 5}, {"workers": [], "queued": "many"}], ids=str
)
def test_invalid_status_is_one_sentence(record: Any) -> None:
    with pytest.raises(
        UnknownError, match=r"cannot be read .*: install the same zmqdist on both ends"
    ):
        checked(record)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("job", "../../x", JOB.format("'../../x'")),
        ("job", 5, "job is 5, wants str"),
        ("index", 2**62, f"index is {2**62}, wants 0 to {WORKER_INDEX_MAX}, or None"),
        ("worker_tags", ["a\x1bb"], TEXT.format("a tag", r"'a\x1bb'")),
    ],
)
def test_invalid_worker_is_refused_by_its_config(field: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        WorkerConfig("127.0.0.1:9", **{field: value})
    assert str(caught.value) == text
