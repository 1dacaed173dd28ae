"""`serve` and `connect`: a service in two lines, with and without a with-statement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import pytest

import zmqdist as zd
from tests.ports import free_address
from zmqdist import errors


def double(x: Any) -> Any:
    return 2 * x


@zd.function(input_signature=[zd.TensorSpec([2], "float32")])
def typed(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    "methods",
    [{"double": double}, [double], (each for each in [double])],
    ids=["dict", "list", "iterator"],
)
def test_functions_are_served_by_name(methods: Any) -> None:
    with zd.rpc.serve(methods=methods) as server, zd.rpc.connect(server.address) as client:
        assert client.double_blocking(np.arange(3)).tolist() == [0, 2, 4]
        assert client.double(4).get_value() == 8
        assert (type(server), type(client)) == (zd.rpc.ZmqServer, zd.rpc.ZmqClient)


def test_server_needs_no_with_statement() -> None:
    server = zd.rpc.serve("127.0.0.1:0", {"double": double})
    client = zd.rpc.connect(f"zmq://{server.address}", name="reader")
    assert client.double_blocking(2) == 4
    client.close()
    server.stop()


def test_signatures_of_functions_hold() -> None:
    with zd.rpc.serve(methods=[typed]) as server, zd.rpc.connect(server.address) as client:
        assert str(client.methods()["typed"].input_signature[0].shape) == "(2,)"


def test_server_closes_after_with_statement() -> None:
    with zd.rpc.serve(methods=[double]) as server:
        pass
    with pytest.raises(errors.DeadlineExceededError, match=server.address):
        zd.rpc.connect(server.address, timeout=0.1)


@pytest.mark.parametrize("timeout", [0, 0.1])
def test_connect_waits_at_most_its_timeout(timeout: float) -> None:
    address = free_address()
    with pytest.raises(errors.DeadlineExceededError, match=address):
        zd.rpc.connect(address, timeout=timeout)


def test_connect_timeout_is_no_call_timeout() -> None:
    with (
        zd.rpc.serve(methods=[double]) as server,
        zd.rpc.connect(server.address, timeout=1.5) as client,
    ):
        assert client.stubs(client.methods()["double"])
        assert client.call("double", [1]).get_value() == [2]


def test_closed_client_says_so() -> None:
    with zd.rpc.serve(methods=[double]) as server, zd.rpc.connect(server.address) as client:
        assert repr(client) == f"<ZmqClient of {server.address}>"
    assert repr(client) == f"<ZmqClient of {server.address}, closed>"


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: zd.rpc.serve("nowhere"), errors.InvalidArgumentError, "nowhere"),
    (
        lambda: zd.rpc.serve(methods=[lambda: 1]),
        errors.InvalidArgumentError,
        "'<lambda>' cannot name a method",
    ),
    (lambda: zd.rpc.serve(methods={"": double}), errors.InvalidArgumentError, "name"),
    (lambda: zd.rpc.serve(methods=double), TypeError, "not iterable"),  # type: ignore[arg-type]
    (
        lambda: zd.rpc.serve(methods=[double, double]),
        errors.InvalidArgumentError,
        "two methods .* double, double",
    ),
    (
        lambda: zd.rpc.serve(methods=[partial(double, 1)]),
        TypeError,
        "functools.partial.* has no name: give a dict",
    ),
    (lambda: zd.rpc.serve(methods=[5]), TypeError, "methods has 5, which has no name"),  # type: ignore[list-item]
    (
        lambda: zd.rpc.serve(methds=[double]),
        TypeError,
        r"serve\(\) has no option 'methds': did you mean 'methods'?",
    ),  # type: ignore[call-arg]
    (
        lambda: zd.rpc.connect("h:1", timout=1),
        TypeError,
        r"connect\(\) has no option 'timout': did you mean 'timeout'?",
    ),  # type: ignore[call-arg]
    (
        lambda: zd.rpc.connect("127.0.0.1:1", timeout="x"),
        errors.InvalidArgumentError,
        "a time-out is a number",
    ),  # type: ignore[arg-type]
    (
        lambda: zd.connect("h:1", time=1),
        TypeError,
        r"connect\(\) has no option 'time': did you mean 'timeout'?",
    ),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(("wrong", "kind", "told"), WRONG, ids=[row[2] for row in WRONG])
def test_wrong_arguments_are_refused(
    wrong: Callable[[], Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        wrong()


class Doubling(zd.rpc.Interface, Protocol):
    triple_blocking: Callable[[int], int]

    def double_blocking(self, x: int) -> int: ...


class Plain:
    def double(self, x: int) -> Any: ...


def test_client_has_methods_of_interface_only() -> None:
    methods = {"double": double, "triple": lambda x: 3 * x}
    with (
        zd.rpc.serve(methods=methods) as server,
        zd.rpc.connect(server.address, interface=Doubling) as client,
        zd.rpc.connect(server.address, interface=Plain) as plain,
    ):
        assert (client.double_blocking(2), client.triple_blocking(2)) == (4, 6)
        assert plain.double(2).get_value() == 4
        with pytest.raises(AttributeError, match="'double': its interface has double_blocking, tr"):
            client.double(2)  # type: ignore[attr-defined]
        client.refresh()  # type: ignore[attr-defined]
        assert not hasattr(client, "double")
        assert hasattr(client, "double_blocking")


def test_interface_with_unknown_method_is_refused() -> None:
    with (
        zd.rpc.serve(methods=[double]) as server,
        pytest.raises(errors.UnimplementedError, match="no method triple_blocking, which Doubling"),
    ):
        zd.rpc.connect(server.address, interface=Doubling)


def test_interface_that_is_no_class_is_refused() -> None:
    with pytest.raises(TypeError, match="interface is 3, wants a class, such as a Protocol"):
        zd.rpc.connect(free_address(), interface=3)  # type: ignore[call-overload]
