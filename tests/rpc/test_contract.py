"""TensorFlow's own tests of its RPC package, one by one, in this project's terms; a Cell stands for
a tf.Variable."""

from __future__ import annotations

import gc
import math
import os
import queue
import threading
import time
import weakref
from collections import namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import until
from zmqdist import errors
from zmqdist.rpc import Client, Server, StatusOrResult, ZmqClient, ZmqServer
from zmqdist.rpc.client import due_after
from zmqdist.specs import TensorSpec, function
from zmqdist.transport.security import client_security

INT = TensorSpec((), np.int32)
Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


class Cell:
    """State that lives with the server and is changed by many threads; it lends itself to an
    array.
    """

    def __init__(self, value: int) -> None:
        self.value = np.asarray(value, np.int32)
        self._lock = threading.Lock()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.value, dtype)

    def add(self, more: Any) -> None:
        with self._lock:
            self.value = self.value + more

    def read(self) -> Any:
        return self.value


@function(input_signature=[INT, INT])
def multiply(a: Any, b: Any) -> Any:
    return np.multiply(a, b)


@function(input_signature=[INT, INT])
def add(a: Any, b: Any) -> Any:
    return np.add(a, b)


def adder(cell: Cell) -> tuple[Any, Any]:
    return cell.add, [INT]


def test_generated_rpc_ops() -> None:
    server = ZmqServer("127.0.0.1:0")
    server.register("multiply", multiply)
    server.start()
    client = ZmqClient(server.address, "client", False, 5000)
    outcome = client.call("multiply", [Cell(2), Cell(3)])
    assert outcome.get_error() == (errors.OK, "")
    assert outcome.get_value() == [6]
    gone = [weakref.ref(client), weakref.ref(server)]
    del outcome, client, server
    gc.collect()
    until(lambda: [ref() for ref in gone] == [None, None])


def test_exported_rpc_api_static_factory(serve: Serve) -> None:
    server = serve(multiply=multiply)
    client = Client.create("zmq", server.address, "", 5000)
    outcome = client.call("multiply", [2, 3], output_specs=INT)
    assert outcome.is_ok()
    assert outcome.get_value() == 6
    assert outcome.get_value().dtype == np.int32
    second = Client.create("zmq", server.address, "", 5000)
    assert second.multiply(Cell(2), 3).get_value() == 6
    assert second.multiply.__doc__ == f"RPC Call for multiply method to server {server.address}"
    assert (
        second.multiply_blocking.__doc__
        == f"RPC Call for multiply method to server {server.address}"
    )
    assert client.multiply_blocking(2, 3) == 6


@pytest.mark.parametrize("create", [Server.create, Client.create])
def test_layer_other_than_zmq_is_refused(create: Any) -> None:
    with pytest.raises(ValueError, match=r"zmq.*supported"):
        create("grpc", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (5, "name is 5, wants a str"),
        (b"x", "name is b'x', wants a str"),
        ("x" * 5000, f"name wants at most 255 printable characters: {'x' * 40!r}"),
        ("two\nlines", r"name wants at most 255 printable characters: 'two\nlines'"),
        ("\udc80", r"name wants at most 255 printable characters: '\udc80'"),
    ],
    ids=["int", "bytes", "long", "lines", "surrogate"],
)
def test_invalid_method_name_is_not_sent(name: Any, text: str) -> None:
    with pytest.raises((TypeError, errors.InvalidArgumentError)) as caught:
        Client.create("zmq", "127.0.0.1:9", name)
    assert str(caught.value) == text


def test_rpc_ops_wrapper(serve: Serve, connect: Connect) -> None:
    server = serve(multiply=multiply, add=(lambda a, b: np.add(a, b), [INT, INT]))
    plain = connect(server.address, listing=False)
    assert plain.call("multiply", [2, 3], output_specs=INT).get_value() == 6
    assert plain.call("add", [2, 3], output_specs=INT).get_value() == 5
    assert not hasattr(plain, "multiply")
    listing = connect(server.address, name="listing")
    assert listing.multiply(2, 3).get_value() == 6
    assert listing.add_blocking(2, 3) == 5


def test_output_specs(serve: Serve, connect: Connect) -> None:
    value = np.asarray(7, np.int32)
    server = serve(
        keyed=lambda a: {"key": a},
        truth=lambda a: True,
        nested=lambda a: {"test": (a, [a, a]), "test1": (a,)},
        nothing=list,
        none=lambda: None,
    )
    client = connect(server.address)
    assert client.keyed(value).get_value() == {"key": 7}
    assert client.truth_blocking(value) is True
    nested = client.nested_blocking(value)
    assert nested == {"test": (7, [7, 7]), "test1": (7,)}
    assert (type(nested["test"]), type(nested["test"][1]), type(nested["test1"])) == (
        tuple,
        list,
        tuple,
    )
    assert client.nothing_blocking() == []
    assert client.none_blocking() is None
    assert client.call("keyed", [value], {"key": INT}).get_value() == {"key": 7}
    assert client.call("truth", value, TensorSpec((), np.bool_)).get_value().dtype == np.bool_
    packed = client.call("nested", [value], [INT, [INT, INT, INT]]).get_value()
    assert packed == [7, [7, 7, 7]]
    assert client.call("nested", [value]).get_value() == [7, 7, 7, 7]
    assert client.call("nothing").get_value() == []
    assert client.call("nothing", output_specs=[]).get_value() == []
    assert client.call("none").get_value() is None


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([INT], "returned 2 values, the output_specs have 1"),
        ([INT, INT, INT], "returned 2 values, the output_specs have 3"),
        ([INT, TensorSpec((), np.int64)], "value 1 .* expected int64"),
        ([INT, TensorSpec((2,), np.int32)], r"value 1 .* expected int32 of shape \(2,\)"),
    ],
)
def test_value_against_output_specs_is_invalid(
    serve: Serve, connect: Connect, specs: Any, told: str
) -> None:
    outcome = connect(serve(pair=lambda: (np.int32(1), np.int32(2))).address).call(
        "pair", output_specs=specs
    )
    assert outcome.is_ok()
    for _ in range(2):
        with pytest.raises(errors.InvalidArgumentError, match=told):
            outcome.get_value()


def test_input_specs(serve: Serve, connect: Connect) -> None:
    signature = [{"a": INT, "b": INT}]
    client = connect(serve(add=(lambda given: given["a"] + given["b"], signature)).address)
    assert client.add_blocking({"a": 2, "b": 3}) == 5
    assert client.call("add", [{"b": 3, "a": 2}]).get_value() == [5]
    with pytest.raises(TypeError, match="argument 0: expected a dict, given a list"):
        client.add([2, 3])


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("signature", "args", "error", "told"),
    [
        ([(INT, INT)], ([1, 2],), TypeError, "argument 0: expected a tuple, given a list"),
        ([[INT, INT]], ((1, 2),), TypeError, "argument 0: expected a list, given a tuple"),
        ([[INT, INT]], ([1],), ValueError, "argument 0: expected 2 items, given 1"),
        (
            [[INT, [INT]]],
            ([1, (2,)],),
            TypeError,
            r"argument 0\[1\]: expected a list, given a tuple",
        ),
        (
            [{"a": INT}],
            ({"b": 1},),
            ValueError,
            r"argument 0: expected the keys \['a'\], given \['b'\]",
        ),
        ([Pair(INT, INT)], ((1, 2),), TypeError, "argument 0: expected a Pair, given a tuple"),
        ([INT], (), ValueError, "expected 1 arguments, given 0"),
        ([INT], (1, 2), ValueError, "expected 1 arguments, given 2"),
    ],
)
def test_wrong_structure_is_not_sent(
    serve: Serve, connect: Connect, signature: Any, args: Any, error: type[Exception], told: str
) -> None:
    client = connect(serve(m=(lambda a: None, signature)).address)
    with pytest.raises(error, match=told):
        client.m(*args)
    assert client.snapshot().calls == 0


def test_structures_of_signature_reach_function(serve: Serve, connect: Connect) -> None:
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    signature = [Pair(INT, [INT]), TensorSpec((None,), np.float32)]
    client = connect(serve(m=(lambda *args: seen.put(args), signature)).address)
    client.m_blocking(Pair(1, [2]), [1, 2.5])
    (pair, vector) = seen.get(timeout=30)
    assert (pair.x, pair.y, vector.tolist(), vector.dtype) == (1, [2], [1.0, 2.5], np.float32)
    with pytest.raises(TypeError, match="unexpected keyword"):
        client.m(a=1)


def test_call_register_ordering(connect: Connect) -> None:
    cell = Cell(0)
    unstarted = ZmqServer("127.0.0.1:0")
    unstarted.start()
    address = unstarted.address
    unstarted.stop()
    early = connect(address, listing=False, timeout_in_ms=20_000)
    with pytest.raises(errors.DeadlineExceededError):
        Client.create("zmq", address, "client", 1)
    server = ZmqServer(address)
    fn, signature = adder(cell)
    server.register("assign_add", fn, signature)
    server.register("read_var", cell.read)
    starter = threading.Timer(0.3, server.start)
    starter.start()
    try:
        waiting = connect(address, name="client", timeout_in_ms=20_000)
        starter.join()
        assert waiting.assign_add(2).is_ok()
        for _ in range(2):
            assert early.call("assign_add", [2]).is_ok()
        assert waiting.read_var_blocking() == 6
        with pytest.raises(
            errors.FailedPreconditionError, match="All methods must be registered before starting"
        ):
            server.register("late", cell.read)
    finally:
        starter.join()
        server.stop()


def test_client_timeout(serve: Serve, connect: Connect) -> None:
    cell = Cell(0)
    release = threading.Event()

    def slow(value: Any) -> None:
        release.wait(30)
        cell.add(value)

    server = serve(add=(slow, [INT]), read_var=cell.read)
    client = connect(server.address, timeout_in_ms=500)  # to connect is part of it
    outcome = client.call("add", [2])
    assert not outcome.is_ok()
    assert outcome.get_error()[0] == errors.DEADLINE_EXCEEDED
    release.set()
    assert client.add(2, timeout_in_ms=5000).is_ok()
    address = server.address
    server.stop()
    # A call that the client sends before it has noticed the stop fails with UNAVAILABLE. Each later
    # call waits for the next server.
    until(lambda: client.add(2, timeout_in_ms=1).get_error()[0] == errors.DEADLINE_EXCEEDED)
    assert client.add(2, timeout_in_ms=1).get_error()[0] == errors.DEADLINE_EXCEEDED
    late = client.add(2, timeout_in_ms=20_000)
    serve(address, add=(slow, [INT]), read_var=cell.read)
    assert late.is_ok()
    assert client.read_var_blocking(timeout_in_ms=5000) == 6


def test_async_call_op_wrapper(serve: Serve, connect: Connect) -> None:
    cell = Cell(0)
    client = connect(serve(add=adder(cell), read_var=cell.read).address)
    outcomes = [client.call("add", [2]) for _ in range(10)]
    assert all(outcome.is_ok() for outcome in outcomes)
    assert client.call("read_var", output_specs=[INT]).get_value() == [20]


def test_rpc_call_op_in_tf_function(serve: Serve, connect: Connect) -> None:
    inner = connect(serve(multiply=multiply).address)

    def outer(a: Any, b: Any) -> Any:
        value = inner.call("multiply", [a, b], output_specs=[INT]).get_value()
        assert (type(value), len(value)) == (list, 1)
        return value

    assert connect(serve(outer=(outer, [INT, INT])).address).outer_blocking(2, 3) == [6]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_resource_deletion(serve: Serve) -> None:
    server = serve(m=lambda: 1)
    with Client.create("zmq", server.address, "", 5000):
        pass  # what all clients of a process share is there now
    before = _descriptors()
    client = Client.create("zmq", server.address, "", 5000)
    read, unread = client.m(), client.m()
    assert read.get_value() == 1
    gone = [weakref.ref(future) for future in (read, unread)]
    del read, unread
    assert client.m_blocking() == 1
    assert client.snapshot().calls == 0
    assert [ref() for ref in gone] == [None, None]
    gone = [weakref.ref(client)]
    del client
    assert [ref() for ref in gone] == [None]
    until(lambda: _descriptors() <= before)


def test_rpc_error(serve: Serve, connect: Connect) -> None:
    cell = Cell(0)
    client = connect(serve(add=adder(cell), read_var=cell.read).address)
    assert client.call("add", [2]).is_ok()
    assert client.read_var_blocking() == 2
    assert client.add(2).is_ok()
    assert client.read_var_blocking() == 4
    outcome = client.call("add")
    assert not outcome.is_ok()
    assert outcome.get_error()[0] == errors.INVALID_ARGUMENT
    with pytest.raises(errors.InvalidArgumentError, match="add: expected 1 values, given 0"):
        outcome.get_value()


def test_captured_inputs(serve: Serve, connect: Connect) -> None:
    cell = Cell(0)
    client = connect(serve(add_two=lambda: cell.add(2), read_var=cell.read).address)
    for _ in range(2):
        client.add_two_blocking()
    assert client.call("read_var").get_value() == [4]
    assert cell.value == 4


def test_register_method_twice() -> None:
    server = ZmqServer("127.0.0.1:0")
    server.register("assign", lambda: 1)
    with pytest.raises(errors.InvalidArgumentError, match=r"^assign is already registered\.$"):
        server.register("assign", lambda: 2)


def test_tf_function_register_without_input_signature() -> None:
    server = ZmqServer("127.0.0.1:0")
    with pytest.raises(ValueError, match="Input signature not specified"):
        server.register("one", function(lambda a: a))
    server.register("none", function(lambda: 1))


def _filled_here_drained_there(serve: Serve, connect: Connect, inline: frozenset[str]) -> None:
    items: queue.Queue[int] = queue.Queue(maxsize=200)

    def fill() -> None:
        for number in range(200):
            items.put(number)

    client = connect(serve(inline=inline, fill=fill, take=items.get_nowait).address)
    client.fill_blocking()
    assert [client.take_blocking() for _ in range(200)] == list(range(200))


def test_multi_device_resource(serve: Serve, connect: Connect) -> None:
    """There are no devices here: another thread than the one that answers, instead."""
    _filled_here_drained_there(serve, connect, frozenset())


def test_queue_resource(serve: Serve, connect: Connect) -> None:
    _filled_here_drained_there(serve, connect, frozenset({"fill"}))


def test_multi_device_resource_cpu(serve: Serve, connect: Connect) -> None:
    cell = Cell(1)
    outcome = connect(serve(add=adder(cell)).address).add(1)
    assert outcome.is_ok()
    assert isinstance(outcome, StatusOrResult)
    assert outcome
    assert cell.value == 2


# -- rules that TensorFlow documents, or breaks, without a test ------------------------------------


def test_second_server_of_address_cannot_start(serve: Serve, connect: Connect) -> None:
    first = serve(m=lambda: "first")
    second = Server.create("zmq", first.address)  # opens no port
    second.register("m", lambda: "second")
    with pytest.raises(errors.UnknownError, match="could not bind"):
        second.start()
    assert connect(first.address).m_blocking() == "first"
    first.stop()
    second.start()
    assert connect(second.address).m_blocking() == "second"
    second.stop()


def test_dropped_server_replies_and_frees_port(connect: Connect) -> None:
    running, release = threading.Event(), threading.Event()

    def slow() -> str:
        running.set()
        release.wait(30)
        return "answered"

    server = Server.create("zmq", "127.0.0.1:0")
    server.register("slow", slow)
    server.start()
    address = server.address
    client = connect(address)
    outcome = client.slow()
    assert running.wait(30)
    del server
    release.set()
    assert outcome.get_value() == "answered"
    with Server.create("zmq", address) as other:  # waits for the one that was dropped
        assert other.address == address


def test_client_waits_for_server_after_stopping_one(serve: Serve) -> None:
    running, release = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        release.wait(20)

    first = serve(slow=slow)
    stopping = threading.Thread(target=first.stop, args=(20.0,))
    made: queue.Queue[Any] = queue.Queue()
    coming = threading.Thread(
        target=lambda: made.put(Client.create("zmq", first.address, "", 20_000))
    )
    with ZmqClient(first.address) as client:
        outcome = client.call("slow")
        assert running.wait(20)
        stopping.start()
        # it has read the goodbye
        until(lambda: not outcome.done() and not client.snapshot().connected)
        messages = first.snapshot().messages_received
        coming.start()
        until(lambda: first.snapshot().messages_received > messages)  # its hello
        release.set()
        outcome.get_value()
    stopping.join()
    second = Server.create("zmq", first.address)
    second.register("m", lambda: "second")
    second.start()
    client = made.get(timeout=20)
    assert client.m_blocking() == "second"
    client.close()
    coming.join()
    second.stop()


def test_unknown_host_is_not_up_yet() -> None:
    address = "no-such-host.invalid:4711"
    with pytest.raises(errors.DeadlineExceededError):
        ZmqClient(address, "", True, 50, security=client_security(address, "client", insecure=True))


def test_clients_may_share_a_name(serve: Serve, connect: Connect) -> None:
    server = serve(m=lambda: 1)
    address = server.address
    first, second = connect(address, name="same"), connect(address, name="same")
    assert (first.m_blocking(), second.m_blocking()) == (1, 1)
    server.stop()
    with pytest.raises(errors.DeadlineExceededError):
        Client.create("zmq", address, "same", 20)
    serve(address, m=lambda: 2)
    assert (first.m_blocking(), connect(address, name="same").m_blocking()) == (2, 2)


def test_timeout_of_0_is_the_clients_default(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    # to connect is part of it
    client = connect(serve(slow=lambda: release.wait(30)).address, timeout_in_ms=500)
    for timeout_in_ms in (0, -1):
        assert (
            client.call("slow", timeout_in_ms=timeout_in_ms).get_error()[0]
            == errors.DEADLINE_EXCEEDED
        )
    kept = client.call("slow", timeout_in_ms=20_000)
    release.set()
    assert kept.is_ok()


@pytest.mark.parametrize("time", [1e15, 1e300, 2**2000, math.inf])
def test_huge_timeout_is_no_timeout(serve: Serve, connect: Connect, time: float) -> None:
    client = connect(serve(m=lambda: 1).address)
    assert client.m(timeout_in_ms=time).get_value() == 1
    assert client.m_blocking(timeout_in_ms=time) == 1
    assert connect(client.address, timeout_in_ms=time).call("m").is_ok()


@pytest.mark.parametrize(
    "kind", [np.float16, np.float32, np.float64, np.int8, np.int64, np.uint16, Fraction, Decimal]
)
def test_timeout_may_be_any_number(serve: Serve, connect: Connect, kind: Any) -> None:
    client = connect(serve(m=lambda: 1).address)
    assert client.m_blocking(timeout_in_ms=kind(0)) == 1
    now = time.monotonic()
    for given in (due_after(kind(50), 0), due_after(0, kind(50))):
        assert type(given) is float
        assert now + 0.05 <= given <= time.monotonic() + 0.05


@pytest.mark.parametrize(
    "time", [None, "5", b"5", [5], np.arange(3), math.nan, True, np.bool_(True)]
)
def test_timeout_without_number_is_refused(serve: Serve, connect: Connect, time: Any) -> None:
    client = connect(serve(m=lambda: 1).address)
    for ask in (
        client.m,
        client.m_blocking,
        partial(client.call, "m"),
        partial(client.stream, "m"),
    ):
        with pytest.raises(
            (TypeError, ValueError),
            match="timeout_in_ms is a number of milliseconds, 0 for the default, not ",
        ):
            ask(timeout_in_ms=time)
    assert client.snapshot().calls == 0
    with pytest.raises((TypeError, ValueError), match="timeout_in_ms is a number of milliseconds"):
        ZmqClient(client.address, timeout_in_ms=time)


@pytest.mark.parametrize("name", ["\ud800", "m\udcff"])
def test_unencodable_name_harms_no_call(serve: Serve, connect: Connect, name: str) -> None:
    release = threading.Event()
    client = connect(serve(hold=lambda: release.wait(30), m=lambda: 1).address)
    held, gathering = client.hold(), client.m()
    for ask in (client.call, client.stream):
        with pytest.raises(
            errors.InvalidArgumentError, match="is no method's name: it is no text in UTF-8"
        ):
            ask(name)
    release.set()
    assert held.is_ok()
    assert gathering.get_value() == 1
    assert client.call("é").get_error() == (errors.INVALID_ARGUMENT, "é is not registered.")


@pytest.mark.parametrize("address", [None, 5, b"127.0.0.1:1"])
def test_address_is_a_text(address: Any) -> None:
    for make in (Server.create, Client.create):
        with pytest.raises(TypeError, match=r"address is .*, wants a str"):
            make("zmq", address)


def test_long_error_message_arrives_whole(serve: Serve, connect: Connect) -> None:
    def fail() -> None:
        raise ValueError("x" * 100_000)

    _, message = connect(serve(fail=fail).address).fail().get_error()
    assert type(message) is str
    assert "x" * 100_000 in message


def test_code_does_not_travel(serve: Serve, connect: Connect) -> None:
    client = connect(serve(m=lambda value: None).address)
    for value in (print, lambda: 1, Cell, object()):
        with pytest.raises(errors.InvalidArgumentError, match="only None, bool, int"):
            client.m(value)
