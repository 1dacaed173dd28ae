"""What peers of another version, or with a grudge, may send to a dispatcher: it answers, goes on,
and can be started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zmqdist.data import Dataset, service
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.data.service.dispatcher.runtime import PREFIX, DataDispatcher
from zmqdist.errors import ABORTED, INVALID_ARGUMENT, OpError
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.servers.worker_server import WorkerServer
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop

PARKED = {"watch", "work", "portions", "streams", "snapshot_wait"}
"""These may be answered later, when there is something to tell."""

NONSENSE: list[Any] = [
    None,
    -5,
    2**40,
    2**63,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "\ud800",
    b"1000",
    (),
    (1, 2),
    ((1, 2, 3),),
    [{}],
    {1: 2},
    {4000: (1, "x")},
    True,
]


class Stranger:
    """A dispatcher with a reader and a worker, and somebody who asks what he likes."""

    def __init__(self, work_dir: str) -> None:
        self.config = DispatcherConfig(work_dir=work_dir, fault_tolerant_mode=True)
        self.server = DispatchServer(self.config)
        self.worker = WorkerServer(WorkerConfig(dispatcher_address=self.server.address))
        self.dataset = Dataset.range(10_000)
        self.readers: list[Any] = []
        for name, delivery in (("plain", "at_most_once"), ("exact", "exactly_once")):
            read = service.distribute(
                "distributed_epoch", self.server.target, job_name=name, delivery=delivery
            )
            self.readers.append(iter(self.dataset.apply(read)))
            next(self.readers[-1])
        security = Credentials(None, None, False).client(self.server.address, "submit")
        self.client = ZmqClient(self.server.address, "stranger", security=security)

    def ask(self, method: str, *args: Any) -> Any:
        return internal_client.start(self.client, PREFIX + method, *args)

    def sensible(self) -> dict[str, tuple[Any, ...]]:
        """Arguments of each method with which it does something."""
        kept = self.server.data_snapshot()
        number, incarnation, text = (
            kept.state,
            kept.workers[0].incarnation,
            self.dataset.serialize(),
        )
        saved = (number, 2001, 3001, (10_000, 1, 39), 1, ((0, 1),), ((2, 1),))
        return {
            "register": (7, "mine", text, "{}", "keep"),
            "metadata": ("1000",),
            "config": (),
            "definition": ("print",),
            "open": (
                9,
                "exact",
                0,
                ("1001", 1, 0, "AUTO", False, "exactly_once", False),
                -1,
                saved,
                7,
                False,
            ),
            "watch": (number, 3000, 0, 0.1, -1, {}),
            "release": (number, 2999),
            "acknowledge": (number, 3001, ((0, 1, False),)),
            "missed": (number, 3001, incarnation),
            "portions": (number, 4001, incarnation, 3001, 5, 1),
            "work": (number, incarnation, {4000: "a:1"}, (), {4000: (1, 2, 3, 4, 0.5)}),
            "splits": (number, 4000, incarnation, 0, 8, 0, 1),
            "hand_back": (number, 4000, incarnation, 0, 8, 0, ((0, 1),)),
            "leave": (99,),
            "crashed": (number, 4000, incarnation, "killed"),
            "compression": ("1000", True),
            "save": ("wish", f"{self.config.work_dir}/saved", text, "scalar", None),
            "streams": (incarnation, {}),
            "positions": (incarnation, "saved", 0, 0, 0, 0, 1),
            "stream_ended": (incarnation, "saved", 9, 0, ""),
            "snapshot_wait": ("saved",),
            "snapshot_progress": ("saved",),
            "snapshot_streams": ("saved",),
            "snapshot_cancel": ("saved",),
        }

    def stop(self) -> None:
        self.client.close()
        for reader in self.readers:
            reader.close()
        self.worker.stop()
        self.server.stop()


def methods() -> set[str]:
    """The names of all methods that a dispatcher registers for the data service."""

    class Names:
        def __init__(self) -> None:
            self.found: set[str] = set()

        def register_later(self, name: str, fn: object, **options: object) -> None:
            self.found.add(name.removeprefix(PREFIX))

    names, loop = Names(), Loop("test")
    DataDispatcher(names, loop, Rules(), None)  # type: ignore[arg-type]
    loop.stop()
    return names.found


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    made = Stranger(str(tmp_path / "work"))
    yield made
    made.stop()


def test_nonsense_in_any_field_is_answered(
    stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    sensible = stranger.sensible()
    assert methods() == sensible.keys()
    for method, args in sensible.items():
        wrong = [args[:-1], (*args, 1)]
        wrong += [
            (*args[:place], value, *args[place + 1 :])
            for place in range(len(args))
            for value in NONSENSE
        ]
        if method == "open":
            terms, saved = args[3], args[5]
            for value in [*NONSENSE, 3002]:
                wrong += [
                    (*args[:3], (*terms[:n], value, *terms[n + 1 :]), *args[4:])
                    for n in range(len(terms))
                ]
                wrong += [
                    (*args[:5], (*saved[:n], value, *saved[n + 1 :])) for n in range(len(saved))
                ]
        asked += [(method, stranger.ask(method, *each)) for each in wrong]
    stranger.ask("metadata", "1000").get_value()
    for method, answer in asked:
        if method not in PARKED:
            answer.get_error()
    assert not [
        each.getMessage() for each in caplog.records if "the loop goes on" in each.getMessage()
    ]
    stranger.stop()
    DispatchServer(stranger.config).stop()


def test_state_of_impossible_reader_is_refused(
    stranger: Stranger,
) -> None:
    args = stranger.sensible()["open"]
    for client in (3000, 3002, 3003):
        saved = (*args[5][:2], client, *args[5][3:])
        assert (
            stranger.ask("open", client, *args[1:5], saved, *args[6:]).get_error()[0]
            == INVALID_ARGUMENT
        )
    assert stranger.ask("open", 1, *args[1:]).get_value()[0] == 3002
    assert stranger.ask("acknowledge", args[5][0], 3001, ()).get_error()[0] == ABORTED


def test_more_consumers_than_anybody_has_are_refused(stranger: Stranger) -> None:
    terms = ("1001", 1, 2**40, "AUTO", False, "exactly_once", False)
    with pytest.raises(OpError, match="num_consumers at most"):
        stranger.ask("open", 1, "many", 0, terms, 0, None, 7, False).get_value()


def test_error_text_with_any_bytes_is_sent() -> None:
    code_and_message(FileNotFoundError(2, "no such file", "caf\udce9"))[1].encode()
    code_and_message(OpError(None, None, "caf\udce9", INVALID_ARGUMENT))[1].encode()
