"""The messages of the protocol, as a set."""

from __future__ import annotations

import re

import msgspec
import pytest

from zmqdist import messages

PARTIES = {
    "any",
    "client",
    "server",
    "coordinator",
    "dispatcher",
    "worker",
    "puller",
    "holder",
    "actor",
}
classes = pytest.mark.parametrize("message", messages.ALL, ids=lambda message: message.__name__)


def test_messages_are_listed_with_unique_tags() -> None:
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type)
        and issubclass(value, messages.Message)
        and value is not messages.Message
    }
    assert set(messages.ALL) == declared
    tags = [message.__struct_config__.tag for message in messages.ALL]
    assert tags == sorted(set(tags))


@classes
def test_message_has_sender_and_meaning(message: type[messages.Message]) -> None:
    assert message.__doc__
    assert message.__doc__.strip()
    ways = [way.split(" -> ") for way in message.SENT.split(", ")]
    assert all(len(way) == 2 and set(way) <= PARTIES for way in ways), message.SENT


@classes
def test_message_fields_are_typed_optional_last(message: type[messages.Message]) -> None:
    fields = msgspec.structs.fields(message)
    assert all(field.type is not None for field in fields)
    required = [field.required for field in fields]
    assert required == sorted(required, reverse=True)
    assert message.__struct_config__.array_like


@classes
def test_field_names_carry_units(message: type[messages.Message]) -> None:
    for field in msgspec.structs.fields(message):
        if field.type is float:
            assert re.search(r"_(s|ms)$", field.name), field.name


def test_outcome_kinds_differ() -> None:
    kinds = [messages.VALUE, messages.ERROR, messages.BULK, messages.CANCELLED]
    assert len(set(kinds)) == 4
