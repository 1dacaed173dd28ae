"""The messages between a worker and its slot processes, over one pipe for each slot
(process/pipe.py)."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from zmqdist.process.pipe import PipeCodec
from zmqdist.transport.shm_pool import Handle, Offer


class SlotWork(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Worker to slot: new functions (coordinator, fn, pickled), items (position, coordinator, fn,
    payload), and functions to forget."""

    functions: list[tuple[int, int, bytes]]
    items: list[tuple[int, int, int, bytes]]
    forget: list[tuple[int, int]]


class SlotReport(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Slot to worker: outcomes (position, kind, payload). A bulk outcome is alone in its message,
    which also has the parts of the result.

    A part is a handle in the slot's shared memory, or None if its bytes follow the message in the
    pipe, in the order of `parts`.
    """

    outcomes: list[tuple[int, int, bytes]]
    parts: list[Handle | None] = []


class SlotStarted(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Slot to worker: the slot process has started. `memory` tells how to open the slot's shared
    memory; None without shared memory."""

    pid: int
    memory: Offer | None = None


class SlotWelcome(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Worker to slot, the first message: the address and the public key of the worker."""

    worker: str
    key: bytes = b""


SlotMessage: TypeAlias = SlotWork | SlotReport | SlotStarted | SlotWelcome

SLOT_CODEC: Final[PipeCodec[SlotMessage]] = PipeCodec(
    msgspec.msgpack.Encoder().encode,
    msgspec.msgpack.Decoder(SlotMessage).decode,
    "the result of a function at its worker",
)
