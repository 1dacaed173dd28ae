"""Methods: what may be registered, what arguments they get, and who may call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqdist import errors
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.rpc.service import RpcService
from zmqdist.specs import TensorSpec, function
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import server_security
from zmqdist.wire.hello import our_hello

INT = TensorSpec((), np.int32)
Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


@pytest.mark.parametrize(
    ("name", "fn", "signature", "error", "told"),
    [
        (5, print, None, TypeError, "name is a str, not int"),
        (None, print, None, TypeError, "name is a str, not NoneType"),
        ("", print, None, errors.InvalidArgumentError, "cannot name a method"),
        ("two words", print, None, errors.InvalidArgumentError, "'two words' cannot name a method"),
        ("a..b", print, None, errors.InvalidArgumentError, "cannot name a method"),
        ("zmqdist.mine", print, None, errors.InvalidArgumentError, "reserved"),
        ("m", 5, None, TypeError, "a method is a callable, not int"),
        ("m", function(lambda a: a), None, ValueError, "Input signature not specified for m"),
        ("m", function(lambda *a: a), None, ValueError, "Input signature not specified for m"),
        (
            "m",
            lambda a: a,
            [INT, INT],
            ValueError,
            "does not fit the function: it expected 1 arguments, given 2",
        ),
        ("m", lambda a: a, [5], TypeError, "TensorSpecs only"),
    ],
)
def test_invalid_registration_is_refused(
    name: Any, fn: Any, signature: Any, error: Any, told: str
) -> None:
    with pytest.raises(error, match=told):
        RpcService().register(name, fn, signature)


def test_reserved_method_name_is_reached_by_call(serve: Serve, connect: Connect) -> None:
    client = connect(
        serve(
            call=lambda: "mine", close=lambda: "mine", m_blocking=lambda: "itself", m=lambda: "m"
        ).address
    )
    assert client.call("call").get_value() == ["mine"]
    assert client.call("close").get_value() == ["mine"]
    assert client.m_blocking().get_value() == "itself"
    assert client.m().get_value() == "m"
    assert not hasattr(client, "unknown")


def test_listing_has_names_and_signatures(serve: Serve, connect: Connect) -> None:
    server = serve(plain=lambda a, b=1: a, typed=(lambda a: a, [{"x": INT}], INT))
    methods = connect(server.address, listing=False).methods()
    assert list(methods) == ["plain", "typed"]
    assert str(methods["plain"].signature) == "(a, b=1)"
    assert (methods["plain"].input_signature, methods["plain"].output_signature) == (None, None)
    assert (methods["typed"].input_signature, methods["typed"].output_signature) == (
        [{"x": INT}],
        INT,
    )


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "m: expected 2 values, given 0"),
        ([1], "m: expected 2 values, given 1"),
        ([1, [2.0], 3], "m: expected 2 values, given 3"),
        ([np.int64(1), np.zeros(3, np.float32)], "argument 0: expected int32.*given int64"),
        ([1.5, np.zeros(3, np.float32)], "argument 0: expected int32"),
        ([2**40, np.zeros(3, np.float32)], "argument 0: expected int32"),
        (
            [1, np.zeros(4, np.float32)],
            r"argument 1: expected float32 of shape \(3,\), given float32 of shape \(4,\)",
        ),
        ([1, np.zeros(3)], r"argument 1: expected float32.*given float64"),
        ([1, "text"], "argument 1: expected float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_the_server(
    serve: Serve, connect: Connect, args: Any, told: str
) -> None:
    signature = [INT, TensorSpec((3,), np.float32)]
    client = connect(serve(m=(lambda a, b: None, signature)).address)
    outcome = client.call("m", args)
    with pytest.raises(errors.InvalidArgumentError, match=told):
        outcome.get_value()


@pytest.mark.parametrize(
    ("args", "told"),
    [([], "expected 1 to 2 arguments, given 0"), ([1, 2, 3], "expected 1 to 2 arguments, given 3")],
)
def test_plain_function_checks_argument_count(
    serve: Serve, connect: Connect, args: Any, told: str
) -> None:
    client = connect(serve(m=lambda a, b=2: a + b).address)
    with pytest.raises(errors.InvalidArgumentError, match=told):
        client.m_blocking(*args)
    assert client.m_blocking(1) == 3
    assert client.m_blocking(1, 5) == 6


def test_missing_method_is_an_invalid_argument(serve: Serve, connect: Connect) -> None:
    client = connect(serve().address)
    assert client.call("absent").get_error() == (
        errors.INVALID_ARGUMENT,
        "absent is not registered.",
    )
    with pytest.raises(TypeError, match="name is a str"):
        client.call(5)  # type: ignore[arg-type]


def test_declared_result_comes_as_arrays(serve: Serve, connect: Connect) -> None:
    client = connect(
        serve(
            declared=(
                lambda: {"n": 1, "ok": True},
                None,
                {"n": INT, "ok": TensorSpec((), np.bool_)},
            ),
            plain=lambda: {"n": 1, "ok": True, "t": (1.5, "x")},
            wrong=(lambda: 1.5, None, INT),
        ).address
    )
    declared = client.declared_blocking()
    assert (declared["n"].dtype, declared["n"].shape, declared["ok"].dtype) == (
        np.int32,
        (),
        np.bool_,
    )
    plain = client.plain_blocking()
    assert plain == {"n": 1, "ok": True, "t": (1.5, "x")}
    assert [type(value) for value in plain.values()] == [int, bool, tuple]
    with pytest.raises(
        errors.UnknownError, match="wrong returned a value that does not fit its output_signature"
    ):
        client.wrong_blocking()


def test_signature_of_register_overrides_function(serve: Serve, connect: Connect) -> None:
    doubled = function(lambda a: a * 2, input_signature=[INT])
    client = connect(serve(m=(doubled, [TensorSpec((), np.float64)]), own=doubled).address)
    assert client.m_blocking(1.5) == 3.0
    assert client.own_blocking(2).dtype == np.int32


def test_roles_decide_who_may_call_a_method(connect: Connect) -> None:
    """One service on a router that others use too: what a dispatcher does with it."""
    loop = Loop("zmqdist-roles")
    router = Router(loop, server_security("127.0.0.1"), our_hello("server", 99))
    service = RpcService()
    service.register("open", lambda: "open", inline=True)
    service.register("shut", lambda: "shut", inline=True, roles=frozenset({"submit"}))
    service.attach(router, loop, 99)
    address = router.bind("127.0.0.1:0")
    loop.start()
    try:
        client = connect(address)
        assert client.open_blocking() == "open"
        with pytest.raises(
            errors.PermissionDeniedError,
            match=r"role client may not call shut \(allowed: admin, submit\)",
        ):
            client.shut_blocking()
        with pytest.raises(errors.FailedPreconditionError, match="before starting the server"):
            service.register("late", print)
    finally:
        client.close()
        service.stop(1)
        loop.stop()
    assert loop.faults == 0
