"""A sentence for each reason why work waits, as the rows `waiting` of the facts name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

REASONS: Final[Mapping[str, str]] = {
    "no_worker": "no worker can take work",
    "all_busy": "every worker is busy, and has as much work ahead as it may",
    "window": "handed out; their workers run other functions first",
    "away": "handed out to a worker that is away",
    "pinned": "waits for one worker",
    "resources": "waits for resources",
    "inputs_elsewhere": "waits for a worker on the host that has the inputs",
    "input": "waits in its program for results of other functions, or for its next attempt",
    "nested_bound": "so many functions wait for others that only deeper work may begin",
    "ending_round": "an error has ended the round; functions that run are being ended",
}
"""The sentences by reason."""


ENDLESS: Final = ("no_worker", "away")
"""Reasons that last until a worker comes."""

ABSENT: Final = ("no worker has", "which is not there", "which is away", "which leaves", "is away")
"""Parts of details that say the same."""


def is_stuck(row: Mapping[str, Any]) -> bool:
    """Return whether the work of a row waits for what the cluster lacks, so that it does not begin
    when running functions end.

    >>> is_stuck({"reason": "pinned", "detail": "worker:3, which is busy"})
    False
    """
    return row["reason"] in ENDLESS or any(part in row["detail"] for part in ABSENT)


def sentence(row: Mapping[str, Any]) -> str:
    """Return why the work of a row waits, with its detail.

    >>> sentence({"reason": "pinned", "detail": "worker:3, which is away"})
    'waits for one worker: worker:3, which is away'
    """
    text = REASONS.get(row["reason"], str(row["reason"]))
    return f"{text}: {row['detail']}" if row["detail"] else text
