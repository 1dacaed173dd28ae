"""The encoding of header frames."""

from __future__ import annotations

import tracemalloc
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqdist import messages
from zmqdist.errors import WireError
from zmqdist.limits import HEADER_BYTES_MAX
from zmqdist.wire import headers
from zmqdist.wire.hello import is_hello


def is_within(struct: msgspec.Struct) -> bool:
    """Return whether the numbers of a struct, of its dicts and of the structs in its lists are in the
    bounds of their types, and none is NaN."""
    for name, hint in get_type_hints(type(struct), include_extras=True).items():
        value = getattr(struct, name)
        is_dict = isinstance(value, dict)
        numbers, kind = (value.values(), get_args(hint)[1]) if is_dict else ([value], hint)
        for constraint in getattr(kind, "__metadata__", ()):
            low, high = constraint.ge, constraint.le
            if not all(low is None or number >= low for number in numbers):
                return False
            if not all(high is None or number <= high for number in numbers):
                return False
        if isinstance(value, list):
            parts = [item for item in value if isinstance(item, msgspec.Struct)]
            if not all(map(is_within, parts)):
                return False
    return True


def fits(message: messages.Message) -> bool:
    """Return whether all ints fit into 64 bits, as a header requires, and all are in bounds."""
    try:
        return bool(headers.encode(message)) and is_within(message)
    except OverflowError:
        return False


def built(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Structs of any content. Hypothesis takes the factory of a default for the default."""
    fields = [
        field
        for field in msgspec.structs.fields(struct)
        if field.default_factory is not msgspec.NODEFAULT
    ]
    return st.builds(struct, **{field.name: st.from_type(field.type) for field in fields})


for _part in (messages.ActorSpec, messages.HostedActor):
    st.register_type_strategy(_part, built(_part))
some_messages = st.one_of([built(message) for message in messages.ALL]).filter(fits)


def decoded(header: bytes) -> None:
    """Check that these bytes give a message or a WireError, in memory that is bounded by the length
    of the header."""
    tracemalloc.start()
    try:
        assert isinstance(headers.decode(header, "the peer"), messages.Message)
    except WireError as error:
        assert error.peer == "the peer"  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**16 + 100 * len(header)


few = settings(max_examples=50, deadline=None)


@few
@given(some_messages)
def test_message_round_trip(message: messages.Message) -> None:
    header = headers.encode(message)
    for back in (headers.decode(header, "peer"), headers.decode(memoryview(header), "peer")):
        assert type(back) is type(message)
        assert headers.encode(back) == header  # not ==, because of NaN
    assert not is_hello(header)


@few
@given(st.binary(max_size=64))
def test_random_bytes_are_message_or_error(header: bytes) -> None:
    decoded(header)


@few
@given(some_messages, st.integers(0, 80), st.integers(0, 2), st.binary(max_size=3))
def test_damaged_bytes_are_message_or_error(
    message: messages.Message, place: int, cut: int, put: bytes
) -> None:
    header = headers.encode(message)
    decoded(header[:place] + put + header[place + cut :])


SIDES = [
    0,
    2**31,
    2**63,
    2**64 - 1,
    -1,
    -(2**63),
    1.5,
    None,
    "",
    b"",
    [],
    {},
    [[]],
    [[1]],
    [[1, 2, 3, 4, b""]],
]


@few
@given(st.integers(-1, 70), st.lists(st.sampled_from(SIDES), max_size=9))
def test_random_fields_are_message_or_error(tag: int, fields: list[Any]) -> None:
    decoded(msgspec.msgpack.encode([tag, *fields]))


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "not a message"),
        (b"\x90", "not a message"),
        (msgspec.msgpack.encode([9999]), "not a message"),
        (msgspec.msgpack.encode([3, "no number"]), "Expected `int`"),
        (msgspec.msgpack.encode([3]), "not a message"),
        (b"\x92\x16\xdd\xff\xff\xff\xff", "truncated"),
        (b"\xdd\xff\xff\xff\xff\x03", "truncated"),
        (b"\x93\x05" + b"\x91" * 100_000, "not a message"),
        (b"\x92\x05\xa1\xff", "not a message"),
        (bytes(HEADER_BYTES_MAX + 1), "at most"),
    ],
    ids=lambda value: "",
)
def test_invalid_message_error_names_peer(header: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=f"peer the peer: .*{problem}"):
        headers.decode(header, "the peer")


def test_extra_field_of_newer_peer_is_ignored() -> None:
    assert headers.decode(msgspec.msgpack.encode([3, 7, "new"]), "peer") == messages.CancelCall(7)
