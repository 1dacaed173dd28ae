"""Long lists become messages that are neither too many nor too large."""

from __future__ import annotations

import pytest

from zmqdist.batches import split
from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, ERROR_BYTES_MAX, INLINE_BYTES_MAX

THIRD = BATCH_BYTES_MAX // 3


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([0], [1]),
        ([0] * BATCH_ITEMS_MAX, [BATCH_ITEMS_MAX]),
        ([0] * (BATCH_ITEMS_MAX + 1), [BATCH_ITEMS_MAX, 1]),
        ([0] * (3 * BATCH_ITEMS_MAX), [BATCH_ITEMS_MAX] * 3),
        ([1024] * 64, [64]),
        ([1024] * 65, [64, 1]),
        ([INLINE_BYTES_MAX] * 3, [1, 1, 1]),
        ([THIRD] * 7, [3, 3, 1]),
        ([BATCH_BYTES_MAX], [1]),
        ([BATCH_BYTES_MAX, 0, 1], [2, 1]),
        ([1, BATCH_BYTES_MAX + 1, 1], [1, 1, 1]),
        ([ERROR_BYTES_MAX] * 3, [1, 1, 1]),
    ],
    ids=[
        "one",
        "as many as fit",
        "one more",
        "three full ones",
        "as many bytes as fit",
        "one payload more",
        "the largest payloads",
        "few large ones",
        "one that fills a message",
        "then an empty one still fits",
        "one that is larger than a message is one alone",
        "a few errors",
    ],
)
def test_batches_are_split_by_count_and_bytes(sizes: list[int], parts: list[int]) -> None:
    zeros = bytes(max(sizes))
    items = [(number, zeros[:size]) for number, size in enumerate(sizes)]
    found = list(split(items))
    assert [len(part) for part in found] == parts
    assert [item[0] for part in found for item in part] == list(range(len(items))), (
        "all of them, in order"
    )


def test_empty_list_makes_no_batch() -> None:
    assert list(split([])) == []


def test_payload_may_be_another_field() -> None:
    items = [(number, bytes(BATCH_BYTES_MAX), True) for number in range(3)]
    assert [len(part) for part in split(items, 1)] == [1, 1, 1]
