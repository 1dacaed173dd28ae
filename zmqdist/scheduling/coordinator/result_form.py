"""The form in which a program accepts results: any form, or only the safe form
(wire/results.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zmqdist.errors import InvalidArgumentError
from zmqdist.wire import results, trusted


@dataclass(frozen=True, slots=True)
class ResultForm:
    """The form of results that a program accepts. With `safe_only`, it accepts a closed set of
    types and refuses pickles."""

    safe_only: bool

    @classmethod
    def named(cls, name: str | None, by_file: bool) -> ResultForm:
        """Return the form with this name, or the safe form if the cluster file requires it
        (`by_file`).

        Raises InvalidArgumentError if no form has this name.
        """
        if name not in (None, "any", "safe"):
            raise InvalidArgumentError(f"results is {name!r}, wants 'any' or 'safe'")
        return cls(by_file or name == "safe")

    @property
    def mark(self) -> bytes:
        """The bytes before the payload of a work item. They tell the worker in which form the
        program accepts the result."""
        return results.SAFE if self.safe_only else b""

    def pack_error(self, error: BaseException) -> bytes:
        """Pack an error of this process as a worker packs its errors, so that the same code unpacks
        both."""
        return results.pack_error(error) if self.safe_only else trusted.pack_error(error)


ANY: Final = ResultForm(safe_only=False)
