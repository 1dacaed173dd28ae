"""What a worker and its slot processes say to each other, over a pipe for each slot (process/pipe.py)."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from zmqdist.process.pipe import PipeCodec
from zmqdist.transport.shm_pool import Handle, Offer


class SlotWork(msgspec.Struct, array_like=True, tag=1, gc=False):
    """To a slot: functions that are new to it, (coordinator, fn, pickled), items to run, functions to forget."""

    functions: list[tuple[int, int, bytes]]
    items: list[tuple[int, int, int, bytes]]
    forget: list[tuple[int, int]]


class SlotReport(msgspec.Struct, array_like=True, tag=2, gc=False):
    """From a slot: outcomes, (position, kind, payload). A bulk outcome comes alone, with its parts.

    Each part is a handle in the slot's shared memory, or None: the next of the message's parts.
    """

    outcomes: list[tuple[int, int, bytes]]
    parts: list[Handle | None] = []


class SlotStarted(msgspec.Struct, array_like=True, tag=3, gc=False):
    """From a slot: it has started, and this is how its shared memory is found."""

    pid: int
    memory: Offer | None = None


class SlotWelcome(msgspec.Struct, array_like=True, tag=4, gc=False):
    """To a slot, first of all: the address and the public key of its worker."""

    worker: str
    key: bytes = b""


SlotMessage: TypeAlias = SlotWork | SlotReport | SlotStarted | SlotWelcome

SLOT_CODEC: Final[PipeCodec[SlotMessage]] = PipeCodec(
    msgspec.msgpack.Encoder().encode,
    msgspec.msgpack.Decoder(SlotMessage).decode,
    "the result of a function at its worker",
)
