"""Arguments by name, default values, and what a client knows of its server's methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from math import hypot
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import Hosted, channel_to, unchecked
from zmqdist import errors
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.rpc.methods import decode_methods
from zmqdist.specs import TensorSpec, function

INT = TensorSpec((), np.int32)
Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


def everything(a: Any, b: Any = 2, *rest: Any, c: Any, d: Any = 4, **others: Any) -> Any:
    """Takes all there is.

    And more.
    """
    return [a, b, list(rest), c, d, others]


def three(a: Any, b: Any = 2, c: Any = 3) -> Any:
    return [a, b, c]


# -- by name ---------------------------------------------------------------------------------------


def test_arguments_by_name_reach_the_function(serve: Serve, connect: Connect) -> None:
    client = connect(serve(everything=everything, three=three).address)
    assert client.everything_blocking(1, c=3) == [1, 2, [], 3, 4, {}]
    assert client.everything(1, 5, 6, 7, c=3, d=8, e=9).get_value() == [
        1,
        5,
        [6, 7],
        3,
        8,
        {"e": 9},
    ]
    assert client.everything_blocking(b=1, a=2, c={"x": (3,)}) == [2, 1, [], {"x": (3,)}, 4, {}]
    assert client.three_blocking(1, c=5) == [1, 2, 5]
    large = client.three_blocking(1, b=np.ones(10**6), c=7)
    assert (large[1].sum(), large[2]) == (10**6, 7)


def test_default_values_and_names_also_with_a_signature(serve: Serve, connect: Connect) -> None:
    client = connect(serve(three=(three, [INT, INT, {"x": INT}])).address)
    assert client.three_blocking(1) == [1, 2, 3]
    assert client.three_blocking(1, 5) == [1, 5, 3]
    got = client.three_blocking(1, c={"x": 7})
    assert (got[:2], got[2]["x"].dtype, got[2]["x"]) == ([1, 2], np.int32, 7)
    assert client.three_blocking(b=6, a=5)[:2] == [5, 6]
    assert client.call("three", [1, 2, 3]).get_value() == [1, 2, 3]


@pytest.mark.parametrize(
    ("args", "named", "error", "told"),
    [
        ((1,), {"e": 1}, TypeError, "got an unexpected keyword argument 'e'"),
        ((1,), {"a": 1}, TypeError, "got multiple values for argument 'a'"),
        ((), {}, ValueError, "expected 1 to 3 arguments, given 0"),
        ((), {"b": 1}, ValueError, "argument 0 is missing"),
        ((1, 2, {"x": 3}, 4), {}, ValueError, "expected 1 to 3 arguments, given 4"),
        ((1,), {"c": [1]}, TypeError, "argument 2: expected a dict, given a list"),
        ((1,), {"c": {"y": 1}}, ValueError, "argument 2: expected the keys"),
    ],
)
def test_arguments_against_signature_are_not_sent(
    serve: Serve, connect: Connect, args: Any, named: Any, error: type[Exception], told: str
) -> None:
    server = serve(three=(three, [INT, INT, {"x": INT}]))
    client = connect(server.address)
    with pytest.raises(error, match=told):
        client.three(*args, **named)
    assert client.snapshot().calls == 0
    code, text = error_of_raw(client, "three", args, named)  # the server has the last word
    assert code == errors.INVALID_ARGUMENT
    assert re.search(told, text)


def error_of_raw(client: ZmqClient, method: str, args: Any, named: Any) -> tuple[int, str]:
    """How a call ends without the checks of a client that knows the method."""
    with channel_to(client.address) as channel:
        return unchecked(channel, method, {**named, "": args} if named else args).get_error()


def test_unknown_keyword_is_error_at_both_ends(serve: Serve, connect: Connect) -> None:
    client = connect(serve(three=three, hypot=hypot, position_only=lambda a, /: a).address)
    for named, told in (
        ({"d": 1}, "unexpected keyword argument 'd'"),
        ({"a": 1}, "multiple values for argument 'a'"),
    ):
        with pytest.raises(TypeError, match=told):
            client.three(1, **named)
        assert client.snapshot().calls == 0
        code, text = error_of_raw(client, "three", (1,), named)
        assert code == errors.INVALID_ARGUMENT
        assert re.search(f"three: .*{told}", text)
    with pytest.raises(TypeError, match="unexpected keyword argument 'a'"):
        client.position_only(a=1)
    with pytest.raises(errors.InvalidArgumentError, match="missing a required argument: 'a'"):
        client.three_blocking(b=1)


def test_function_of_unknown_parameters_gets_all(serve: Serve, connect: Connect) -> None:
    class Untold:
        __signature__ = 5  # as some functions written in C

        def __call__(self, *args: Any, **named: Any) -> Any:
            return [list(args), named]

    client = connect(serve(m=Untold()).address)
    assert client.methods()["m"].signature is None
    assert str(client.methods()["m"]) == "m(...)"
    assert client.m_blocking(1, x=2) == [[1], {"x": 2}]


def test_client_keywords_reach_parameters_by_position(serve: Serve, connect: Connect) -> None:
    client = connect(serve(m=lambda timeout_in_ms, out=0: [timeout_in_ms, out]).address)
    assert client.m_blocking(1, 2, timeout_in_ms=5000) == [1, 2]


@pytest.mark.parametrize(
    "body", [{}, {"": [1]}, {"": 1}, {"": (1,), 5: 2}, {"b": 2}, 5, None, "text"]
)
def test_wrong_arguments_cost_only_their_peer(serve: Serve, connect: Connect, body: Any) -> None:
    client = connect(serve(three=three, typed=(three, [INT, INT, INT])).address)
    for method in ("three", "typed"):
        with channel_to(client.address) as channel:
            assert unchecked(channel, method, body).get_error()[0] == errors.INVALID_ARGUMENT
    assert client.three_blocking(1, c=2) == [1, 2, 2]


# -- what a client knows ---------------------------------------------------------------------------


@function(input_signature=[TensorSpec((None, 3), np.float32), INT], output_signature={"sum": INT})
def typed(rows: Any, scale: Any = 2) -> Any:
    """Scales rows."""
    return {"sum": scale}


def numbers(count: Any, *, step: Any = 1) -> Iterator[int]:
    """Counts."""
    yield from range(0, count, step)


def test_listing_describes_methods(serve: Serve, connect: Connect) -> None:
    server = ZmqServer("127.0.0.1:0")
    server.register("everything", everything)
    server.register("typed", typed)
    server.register("numbers", numbers)
    server.register("joined", lambda a, b=object(): a, batch=True)  # noqa: B008
    server.register("printed", print)
    server.start()
    try:
        methods = connect(server.address, listing=False).methods()
    finally:
        server.stop()
    assert [str(info) for info in methods.values()][:4] == [
        "everything(a, b=2, *rest, c, d=4, **others)",
        "typed(rows: float32[?, 3], scale: int32[]=2) -> {'sum': int32[]}",
        "numbers(count, step=1) -> stream",
        "joined(a, b=...)",
    ]
    assert [info.doc for info in methods.values()][:4] == [
        "Takes all there is.",
        "Scales rows.",
        "Counts.",
        "",
    ]
    assert [name for name, info in methods.items() if info.streaming] == ["numbers"]
    assert [name for name, info in methods.items() if info.batch] == ["joined"]
    kinds = [
        parameter.kind.name for parameter in methods["everything"].signature.parameters.values()
    ]
    assert kinds == [
        parameter.kind.name for parameter in inspect.signature(everything).parameters.values()
    ]
    assert methods["typed"].input_signature[0] == TensorSpec((None, 3), np.float32)
    assert hash(methods["everything"].name)
    with pytest.raises(AttributeError):
        methods["typed"].doc = "another"  # type: ignore[misc]


@pytest.mark.parametrize(
    "listing",
    [
        5,
        [5],
        [[]],
        [["m"]],
        [[5, None, None, None, False, False, ""]],
        [["\ud800", None, None, None, False, False, ""]],
        [["", None, None, None, False, False, ""]],
        [["m", 5, None, None, False, False, ""]],
        [["m", [5], None, None, False, False, ""]],
        [["m", INT, None, None, False, False, ""]],
        [["m", None, None, 5, False, False, ""]],
        [["m", None, None, [["not a name", 1, None]], False, False, ""]],
        [["m", None, None, [["a", 9, None]], False, False, ""]],
        [["m", None, None, [["a", 1, None], ["a", 1, None]], False, False, ""]],
        [["m", None, None, [["a", 2, None], ["b", 0, None]], False, False, ""]],
        [["m", None, None, None, False, False, 5]],
    ],
)
def test_wrong_listing_is_a_wire_error(connect: Connect, listing: Any) -> None:
    liar = Hosted()
    liar.service.register_later("zmqdist.methods", lambda call: call.reply(listing))
    with liar, pytest.raises(errors.WireError, match="its list of methods cannot be read"):
        connect(liar.address)
    assert decode_methods([], "server") == {}


def test_refresh_learns_methods_of_next_server(serve: Serve, connect: Connect) -> None:
    server = serve(old=lambda: "old", kept=lambda: 1)
    client, address = connect(server.address), server.address
    assert (client.old_blocking(), client.kept_blocking()) == ("old", 1)
    server.stop()
    serve(address, new=lambda a=5: a, kept=numbers, close=lambda: 1)
    assert client.call("new", 7).get_value() == [7]
    assert client.old().get_error() == (errors.INVALID_ARGUMENT, "old is not registered.")
    assert not hasattr(client, "new")
    client.refresh()
    assert client.new_blocking(a=6) == 6
    assert list(client.kept(3)) == [0, 1, 2]
    assert not hasattr(client, "old")
    assert not hasattr(client, "old_blocking")
    assert not hasattr(client, "kept_blocking")
    client.close()


def test_refresh_removes_attributes_of_lost_methods(serve: Serve) -> None:
    """Other threads call the rest meanwhile."""
    taken: list[str] = []

    class Watched(ZmqClient):
        def __delattr__(self, name: str) -> None:
            taken.append(name)
            super().__delattr__(name)

    server = serve(m=lambda: 1, n=lambda: 2)
    with Watched(server.address, "", True, 5000) as client:
        client.refresh()
        assert taken == []
        server.stop()
        serve(server.address, m=lambda: 1)
        client.refresh()
        assert sorted(taken) == ["n", "n_blocking"]
        assert client.m_blocking() == 1


def test_flat_call_may_leave_out_defaults(serve: Serve, connect: Connect) -> None:
    pair = {"x": INT, "y": INT}
    client = connect(
        serve(
            add=(lambda a, b={"x": 0, "y": 0}, c=5: a + b["x"] + b["y"] + c, [INT, pair, INT])
        ).address
    )
    assert [
        int(client.call("add", args).get_value()[0]) for args in ([1], [1, 2, 3], [1, 2, 3, 4])
    ] == [6, 11, 10]
    for args in ([], [1, 2], [1, 2, 3, 4, 5]):
        assert client.call("add", args).get_error()[0] == errors.INVALID_ARGUMENT


def test_empty_name_is_no_keyword(serve: Serve, connect: Connect) -> None:
    """It would stand where the positional ones travel."""
    client = connect(serve(m=lambda *args, **named: [list(args), named]).address)
    with pytest.raises(TypeError, match="unexpected keyword argument ''"):
        client.m(1, **{"": 2})
    assert client.m_blocking(1, **{"any thing": 2}) == [[1], {"any thing": 2}]


def test_client_without_list_refreshes(serve: Serve, connect: Connect) -> None:
    client = connect(serve(m=lambda: 1).address, listing=False)
    assert not hasattr(client, "m")
    client.refresh()
    assert client.m_blocking() == 1


class Model:
    """Functions with signatures as methods of an object."""

    factor = 3

    @function(input_signature=[INT])
    def times(self, value: Any) -> Any:
        return value * self.factor

    @function(input_signature=[INT])
    def upto(self, count: Any) -> Iterator[int]:
        yield from range(count * self.factor)

    @function
    def unsigned(self, value: Any) -> Any:
        return value


def test_bound_method_keeps_its_signature(serve: Serve, connect: Connect) -> None:
    model = Model()
    client = connect(serve(times=model.times, upto=model.upto).address)
    assert [str(info) for info in client.methods().values()] == [
        "times(value: int32[])",
        "upto(count: int32[]) -> stream",
    ]
    assert (client.times_blocking(5), client.times_blocking(5).dtype) == (15, np.int32)
    assert list(client.upto(1)) == [0, 1, 2]
    with pytest.raises(errors.InvalidArgumentError, match="expected int32"):
        client.times_blocking(1.5)
    with pytest.raises(ValueError, match="Input signature not specified for m"):
        ZmqServer("127.0.0.1:0").register("m", model.unsigned)


@pytest.mark.parametrize("kind", ["coroutine", "generator", "object"])
def test_async_function_is_refused(kind: str) -> None:
    async def coroutine() -> int:
        return 1

    async def generator() -> Any:
        yield 1

    class Callable:
        __call__ = coroutine

    functions = {"coroutine": coroutine, "generator": generator, "object": Callable()}
    with pytest.raises(TypeError, match="m: an async function has no event loop here"):
        ZmqServer("127.0.0.1:0").register("m", functions[kind])


def test_generator_function_cannot_be_inline() -> None:
    with pytest.raises(ValueError, match="m: a generator function has a thread of its own"):
        ZmqServer("127.0.0.1:0").register("m", numbers, inline=True)


def test_output_specs_that_are_no_specs_are_refused(serve: Serve, connect: Connect) -> None:
    client = connect(serve(three=three).address)
    with pytest.raises(TypeError, match="output_specs holds TensorSpecs only, not 5"):
        client.call("three", [1], output_specs=5)
