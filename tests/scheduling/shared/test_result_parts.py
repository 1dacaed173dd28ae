"""Results in parts: packing, splitting, references to a part."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest

from zmqdist import errors
from zmqdist.scheduling.shared import result_parts
from zmqdist.scheduling.shared.references import (
    Held,
    Reference,
    decode_reference,
    encode_reference,
)
from zmqdist.scheduling.shared.result_parts import pack_parts, part_reference, split_parts
from zmqdist.wire import results, trusted

ITEMS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: b"x" * 70_000,
    lambda: np.arange(100),
    lambda: np.ones(2**15),
    lambda: {"a": np.ones(2**14), "b": [np.zeros(2**15), "text"]},
]


def items_of(seed: int) -> list[Any]:
    draw = random.Random(seed)
    return [draw.choice(ITEMS)() for _ in range(draw.randrange(1, 6))]


def check_round_trip(items: list[Any], pack: Callable[[Any], trusted.Packed]) -> None:
    """Check that each part is what its item was packed into, however large the whole is."""
    packed = pack_parts(pack, len(items), items)
    for item, part in zip(items, split_parts(packed, len(items)), strict=True):
        assert str(results.unpack(part, safe_only=False)) == str(item)


@pytest.mark.parametrize("pack", [trusted.pack, results.pack], ids=["pickled", "safe"])
def test_parts_are_the_items(pack: Callable[[Any], trusted.Packed]) -> None:
    for seed in range(100):
        check_round_trip(items_of(seed), pack)


def test_round_trip_finds_a_shifted_part(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = lambda sizes, initial: accumulate(sizes, initial=initial - 1)
    monkeypatch.setattr(result_parts, "accumulate", shifted)
    with pytest.raises((AssertionError, UnpicklingError)):
        check_round_trip([np.ones(2**15), np.zeros(2**15)], trusted.pack)


def held(packed: trusted.Packed) -> bytes:
    """Return the reference to a kept result whose large buffers its worker holds."""
    parts: list[bytes | Held] = []
    for number, part in enumerate([packed] if isinstance(packed, bytes) else packed):
        size = memoryview(part).nbytes
        parts.append(bytes(part) if size < 1000 else Held(number, size))
    return encode_reference(Reference(7, "host:1", None, tuple(parts), "worker:0"))


def test_reference_to_a_part_has_only_its_buffers() -> None:
    packed = pack_parts(trusted.pack, 3, (np.ones(2**15), 5, np.zeros(2**16)))
    references = [decode_reference(part_reference(held(packed), part, 3)) for part in range(3)]
    assert [
        [part.size for part in reference.parts if isinstance(part, Held)]
        for reference in references
    ] == [[2**18], [], [2**19]]
    assert trusted.unpack_parts(references[1].parts) == 5
    assert {reference.holder for reference in references} == {"worker:0"}


def test_reference_to_a_small_part_contains_it() -> None:
    packed = pack_parts(trusted.pack, 2, (1, [2]))
    (part,) = decode_reference(part_reference(held(packed), 1, 2)).parts
    assert isinstance(part, bytes)
    assert trusted.unpack(part) == [2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1,), "the function returned a tuple of 1, but its option num_returns=2 wants a tuple"),
        ([1, 2, 3], "the function returned a list of 3, but its option num_returns=2"),
        (5, "the function returned a int, but its option num_returns=2"),
        ("ab", "the function returned a str, but its option num_returns=2"),
    ],
)
def test_result_of_another_number_of_items_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_parts(trusted.pack, 2, value)


def test_more_buffers_than_a_message_has_are_refused() -> None:
    arrays = [[np.ones(10_000), np.ones(10_000)]] * 600
    with pytest.raises(errors.ResourceExhaustedError, match=r"600 items .* have 1800 buffers"):
        pack_parts(trusted.pack, 600, arrays)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff",
        b"\x91\x90",
        [b"\x91\x01", b"a"],
        [b"\x92\x01\x00", b"a"],
        [b"\xc1", b"a", b"b"],
    ],
)
def test_damaged_parts_are_refused(damaged: Any) -> None:
    with pytest.raises(errors.WireError):
        split_parts(damaged, 2)


def test_damaged_references_are_refused() -> None:
    lost_head = encode_reference(Reference(7, "h:1", None, (Held(1, 10), Held(2, 10))))
    for damaged in (lost_head, held([b"\x91\x01", b"a"]), held(b"\x90")):
        with pytest.raises(errors.WireError):
            part_reference(damaged, 0, 2)
