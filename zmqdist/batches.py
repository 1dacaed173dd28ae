"""Split a list of items into messages that contain neither too many items nor too many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, TypeVar

from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX

T = TypeVar("T", bound=tuple[Any, ...])


def split(items: list[T], field: int = -1) -> Iterator[list[T]]:
    """Yield parts of at most BATCH_ITEMS_MAX items and about BATCH_BYTES_MAX payload bytes, in
    order.

    The payload of an item is its field `field`, which is usually the last field. An item whose
    payload exceeds the bound is a part of its own. Short lists are split by bytes, too, because a
    few errors, pickled functions or log tails together can exceed the bound.
    """
    if len(items) == 1:
        yield items  # most messages of a program that waits for each result
        return
    payload_of = itemgetter(field)
    for start in range(0, len(items), BATCH_ITEMS_MAX):
        part = items[start : start + BATCH_ITEMS_MAX]
        if sum(map(len, map(payload_of, part))) <= BATCH_BYTES_MAX:
            yield part
        else:
            yield from _by_bytes(part, field)


def _by_bytes(items: list[T], field: int) -> Iterator[list[T]]:
    start = size = 0
    for end, item in enumerate(items):
        payload = len(item[field])
        # An item that exceeds the bound alone is a batch of its own.
        if end > start and size + payload > BATCH_BYTES_MAX:
            yield items[start:end]
            start, size = end, 0
        size += payload
    yield items[start:]
