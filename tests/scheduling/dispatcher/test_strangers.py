"""Admitted peers that claim to be another process: the victim gets an error, no result is wrong,
and no call waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from tests.transport.helpers import Dialled
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.messages import (
    VALUE,
    Beat,
    CancelWork,
    Define,
    Done,
    EndRound,
    Forget,
    Goodbye,
    LeasesReturned,
    Leave,
    Message,
    Refused,
    Register,
    RegisterCoordinator,
    ResultReceived,
    SlotsLost,
    Submit,
)
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport.security import client_security

WITHIN_S = 20.0
Claims = Callable[..., Dialled]


@pytest.fixture
def dispatcher(own_secrets: None) -> Iterator[zd.DispatchServer]:
    with zd.DispatchServer(DispatcherConfig(lease_s=4.0)) as made:
        yield made


@pytest.fixture
def claims(dispatcher: zd.DispatchServer) -> Iterator[Claims]:
    """Return `claims(role)`, which makes a connection with the user's token in a role; the test
    sends any messages over it."""
    made: list[Dialled] = []

    def claims(role: str) -> Dialled:
        made.append(
            Dialled(dispatcher.address, client_security(dispatcher.address, role), name="stranger")
        )
        made[-1].expect("up")
        return made[-1]

    yield claims
    for each in made:
        each.loop.stop()


def number_of(dispatcher: zd.DispatchServer) -> int:
    """Return the number of the only coordinator, which every process that may call `status` can
    see."""
    return until(lambda: dispatcher.snapshot().coordinators)[0].coordinator


def enlist(number: int) -> RegisterCoordinator:
    return RegisterCoordinator(number, 100, 1, False)


def register(incarnation: int, index: int, *, held: list[int] | None = None) -> Register:
    return Register(incarnation, "worker", index, 1, held or [], [], 1, "elsewhere")


def test_displaced_coordinator_gets_an_error(
    dispatcher: zd.DispatchServer, claims: Claims, tmp_path: Path
) -> None:
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        value = coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path), "it runs")
        thief = claims("submit")
        thief.send(enlist(number_of(dispatcher)))
        with pytest.raises(
            errors.AbortedError, match="another connection has registered as this coordinator"
        ):
            value.get(WITHIN_S)
        with pytest.raises(errors.OpError):
            coordinator.schedule(abs, (-1,)).get(WITHIN_S)
        go(tmp_path)


def goes_on(folder: Path) -> None:
    """A function that does not check whether it should end; in a thread it cannot be killed."""
    (folder / "begun-it-0").touch()
    until(lambda: (folder / "go").exists())


def test_join_of_displaced_coordinator_raises(
    dispatcher: zd.DispatchServer, claims: Claims, tmp_path: Path
) -> None:
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address, slots=2)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        coordinator.schedule(goes_on, (tmp_path,))
        coordinator.schedule(int, ("it failed",)).exception(WITHIN_S)
        until(lambda: begun(tmp_path), "it runs")
        raised: list[Exception] = []

        def joins() -> None:
            try:
                coordinator.join()
            except Exception as error:
                raised.append(error)

        joining = threading.Thread(target=joins)
        joining.start()
        until(lambda: coordinator.snapshot().waiting_for_end)
        claims("submit").send(enlist(number_of(dispatcher)))
        joining.join(WITHIN_S)
        go(tmp_path)
        assert isinstance(raised[0], errors.AbortedError)


def made_once(folder: Path) -> bytes:
    """Wait when the value is recomputed."""
    if (folder / "made").exists():
        waits(folder)
    (folder / "made").touch()
    return bytes(2**20)


def test_result_of_displaced_coordinator_raises(
    dispatcher: zd.DispatchServer, claims: Claims, tmp_path: Path, no_shared_memory: None
) -> None:
    """With shared memory the value outlives a worker that is a thread of this process."""
    with ClusterCoordinator(dispatcher) as coordinator:
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            value = coordinator.schedule(made_once, (tmp_path,), lineage=True)
            assert value.exception(WITHIN_S) is None
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            raised: list[Exception] = []

            def asks() -> None:
                try:
                    value.get()
                except Exception as error:
                    raised.append(error)

            asking = threading.Thread(target=asks)
            asking.start()
            until(lambda: begun(tmp_path), "it is made again")
            claims("submit").send(enlist(number_of(dispatcher)))
            asking.join(WITHIN_S)
            go(tmp_path)
            assert isinstance(raised[0], errors.OpError)


def test_worker_with_foreign_name_gets_no_work(
    dispatcher: zd.DispatchServer, claims: Claims
) -> None:
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        thief = claims("worker")
        thief.send(register(77, 0))
        refused = thief.expect("message")[1]
        assert isinstance(refused, Refused)
        assert refused.code == errors.ALREADY_EXISTS
        assert coordinator.fetch(coordinator.map(abs, range(-50, 0))) == list(range(50, 0, -1))


def test_stolen_incarnation_loses_no_work(dispatcher: zd.DispatchServer, claims: Claims) -> None:
    """A peer that knows the incarnation can disturb that worker. The worker registers again, as it
    does after a broken connection."""
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        looks = claims("submit")
        looks.send(RegisterCoordinator(5, 100, 1, False, watch_members=True))
        looks.expect("message")
        ((_, incarnation, *_),) = looks.expect("message")[1].joined
        values = coordinator.map(abs, range(-200, 0))
        thief = claims("worker")
        thief.send(register(incarnation, 0))
        thief.loop.stop()
        assert [value.get(WITHIN_S) for value in values] == list(range(200, 0, -1))


def test_outcomes_of_foreign_leases_are_dropped(
    dispatcher: zd.DispatchServer, claims: Claims, tmp_path: Path
) -> None:
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        value = coordinator.schedule(waits, (tmp_path, "right"), worker="worker:0")
        until(lambda: begun(tmp_path), "it runs")
        thief = claims("worker")
        thief.send(register(78, 5))
        assert thief.expect("message")[1].index == 5
        thief.send(Done([(lease, VALUE, b"wrong") for lease in range(1, 1000)], []))
        thief.send(LeasesReturned(list(range(1, 1000))))
        thief.send(Beat())
        thief.expect("message")
        go(tmp_path)
        assert value.get(WITHIN_S) == "right"
        assert len(begun(tmp_path)) == 1


OF_COORDINATORS: list[Message] = [
    enlist(5),
    Define([(1, b"x")]),
    Submit(1, [(1, 1, 0, 1, b"")]),
    CancelWork([(1, 1)], 0.0),
    EndRound(1, 0.0),
    ResultReceived([(1, 1)]),
]
OF_WORKERS: list[Message] = [
    register(9, 9),
    Done([(1, VALUE, b"")], []),
    LeasesReturned([1]),
    SlotsLost([]),
]
WRONG = [
    *(("client", message) for message in (*OF_COORDINATORS, *OF_WORKERS)),
    *(("worker", message) for message in OF_COORDINATORS),
    *(("submit", message) for message in OF_WORKERS),
]


def refusal(dispatcher: zd.DispatchServer, stranger: Dialled, message: Message) -> Refused:
    """Return the dispatcher's reply to this message, which must change nothing in the
    dispatcher.
    """
    before = dispatcher.snapshot()
    stranger.send(message)
    refused = stranger.expect("message")[1]
    assert isinstance(refused, Refused)
    assert dispatcher.snapshot() == before
    return refused


def named(given: Any) -> str:
    return given if isinstance(given, str) else type(given).__name__


@pytest.mark.parametrize(("role", "message"), WRONG, ids=named)
def test_message_against_role_changes_nothing(
    dispatcher: zd.DispatchServer, claims: Claims, role: str, message: Message
) -> None:
    assert refusal(dispatcher, claims(role), message).code == errors.PERMISSION_DENIED


UNSAID: list[tuple[str, Any]] = [
    *(("submit", message) for message in OF_COORDINATORS[1:]),
    ("submit", Forget(1, [1], True)),
    *(("worker", message) for message in OF_WORKERS[1:]),
    ("worker", Beat()),
    ("worker", Leave(0.0)),
]


@pytest.mark.parametrize(("role", "message"), UNSAID, ids=named)
def test_replayed_messages_have_no_effect(
    dispatcher: zd.DispatchServer, claims: Claims, role: str, message: Message
) -> None:
    assert "a peer that has not registered" in refusal(dispatcher, claims(role), message).message


def test_goodbye_of_stranger_affects_no_peer(dispatcher: zd.DispatchServer, claims: Claims) -> None:
    with (
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        for role in ("worker", "submit", "client"):
            claims(role).send(Goodbye("worker:0"))
        assert coordinator.fetch(coordinator.map(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert dispatcher.num_workers == 1
