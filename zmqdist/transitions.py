"""Checked changes of state. The module of a record has the enum of its states, and beside it the
table of their transitions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from zmqdist.errors import InternalError

State = TypeVar("State", bound=enum.Enum)


def enter(
    transitions: Mapping[State, frozenset[State]], before: State, after: State, *subject: object
) -> State:
    """Return `after`, the new state of `subject`, which the error's text names.

    Raises:
      InternalError: the table has no transition from `before` to `after`.
    """
    if after not in transitions[before]:
        name = " ".join(map(str, subject))
        raise InternalError(f"{name} cannot go from {before.name} to {after.name}")
    return after
