"""Payloads that are fetched from whoever holds them: what holders and fetchers keep, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dispatch.work import until
from zmqdist import errors
from zmqdist.dispatch import bulk
from zmqdist.dispatch.bulk import CLIENTS_KEPT, BulkStore, Fetcher, Reference, decode_reference, encode_reference
from zmqdist.dispatch.credentials import Credentials
from zmqdist.limits import ARRAY_BYTES_MAX, CHUNK_BYTES
from zmqdist.net.loop import Loop
from zmqdist.net.router import Router
from zmqdist.rpc.service import RpcService
from zmqdist.wire.hello import our_hello


@pytest.fixture
def hold() -> Iterator[Callable[[], BulkStore]]:
    """hold(): a new holder on a port of its own."""
    loops: list[Loop] = []

    def make() -> BulkStore:
        loop = Loop("zmqdist-holder")
        loops.append(loop)
        router = Router(loop, Credentials().server("127.0.0.1"), our_hello("server", 1, "holder"))
        service = RpcService("holder")
        store = BulkStore(service, frozenset({"worker"}))
        service.attach(router, loop, 1)
        store.address = router.bind("127.0.0.1:0")
        loop.start()
        return store

    yield make
    for loop in loops:
        loop.stop()


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    made = Fetcher(Credentials(), "worker")
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 20 * CHUNK_BYTES + 7])
def test_parts_of_all_sizes_arrive_whole(hold: Callable[[], BulkStore], fetcher: Fetcher, size: int) -> None:
    parts = [bytes(range(256)) * (size // 256) + bytes(size % 256), b"second"]
    store = hold()
    reference = decode_reference(encode_reference(store.hold(parts)))
    for let_go in (False, True):
        assert fetcher.fetch(reference, let_go=let_go) == parts
    until(lambda: len(store) == 0)
    with pytest.raises(errors.NotFoundError, match=f"payload {reference.bulk} is not held here any more"):
        fetcher.fetch(reference, let_go=False)


def test_connections_to_holders_that_come_and_go_are_bounded(hold: Callable[[], BulkStore], fetcher: Fetcher) -> None:
    for number in range(CLIENTS_KEPT + 3):
        store = hold()
        assert fetcher.fetch(store.hold([b"%d" % number]), let_go=False) == [b"%d" % number]
    assert len(fetcher._lines) == CLIENTS_KEPT


def test_an_error_of_one_thread_does_not_end_the_connection_of_another(
    hold: Callable[[], BulkStore], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hold()
    wanted = store.hold([b"wanted"])
    missing = Reference(store.address, wanted.bulk + 1, (3,))
    fetch = bulk.fetch

    def meanwhile(client: object, reference: Reference) -> object:
        """While one is fetched, another fetch from the same holder fails."""
        if reference is wanted:
            with pytest.raises(errors.NotFoundError):
                fetcher.fetch(missing, let_go=False)
        return fetch(client, reference)  # type: ignore[arg-type]

    monkeypatch.setattr(bulk, "fetch", meanwhile)
    assert fetcher.fetch(wanted, let_go=False) == [b"wanted"]


BAD = [
    bulk.MARK,
    bulk.MARK + b"\x00",
    bulk.MARK + b"\x93\xa1a\x01\x91\xff",  # a part of -1 bytes
    encode_reference(Reference("a:1", 1, (ARRAY_BYTES_MAX, 1))),
]


@pytest.mark.parametrize("payload", BAD, ids=repr)
def test_a_damaged_reference_allocates_nothing(payload: bytes) -> None:
    with pytest.raises(errors.WireError):
        decode_reference(payload)
