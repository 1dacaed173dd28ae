"""The figures of a strategy's parameter servers, which its program tells the dispatcher, because
only the program knows both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from zmqdist import clock as time
from zmqdist.messages import ServerFacts
from zmqdist.rpc import StatusOrResult
from zmqdist.variables.client import PsClient

ANSWER_S: Final = 10.0
"""Seconds after which a parameter server that does not answer is shown no more."""


class PsFacts:
    """Asks parameter servers, and never waits for them.

    Args:
      clients: returns the clients of the servers, none after the end of the session.
    """

    def __init__(self, clients: Callable[[], Iterable[PsClient]]) -> None:
        self._clients = clients
        self._calls: dict[str, StatusOrResult] = {}
        self._facts: dict[str, ServerFacts] = {}

    def newest(self) -> list[ServerFacts]:
        """Return the last figures of each server that answers, and ask again."""
        calls = self._calls
        open_calls = {}
        for ps in self._clients():
            call = calls.get(ps.address)
            if call is not None and call.done():
                self._take(ps.address, call)
                call = None
            open_calls[ps.address] = call or ps.facts(time.monotonic() + ANSWER_S)
        self._calls = open_calls
        return [facts for address, facts in self._facts.items() if address in open_calls]

    def _take(self, address: str, call: StatusOrResult) -> None:
        self._facts.pop(address, None)
        if call.is_ok():
            try:
                facts = msgspec.msgpack.decode(call.get_value(), type=ServerFacts)
            except (msgspec.MsgspecError, TypeError):
                return  # it is of another version
            self._facts[address] = facts
