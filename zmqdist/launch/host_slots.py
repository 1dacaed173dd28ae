"""Which host a role is placed on.

Rules
    A role goes to the host that has the fewest roles; of several, to the first in the order of the file.
    A host with `slots` has at most so many roles. A role keeps its slot while it is down, so that it returns to its host, until
    the slot is released.
    A host that is lost has no roles from then on; each of them is placed anew when it is started again.
"""

from __future__ import annotations

from collections.abc import Mapping


class HostSlots:
    """The places of roles on hosts.

    Args:
      slots: for each host, in the order of the file, how many roles it may have; None: no bound.

    Attributes:
      hosts: the hosts that are not lost, in that order.
    """

    def __init__(self, slots: Mapping[str, int | None]) -> None:
        self._slots = dict(slots)
        self._roles: dict[str, list[str]] = {host: [] for host in slots}

    @property
    def hosts(self) -> list[str]:
        return list(self._roles)

    def place(self, role: str) -> str | None:
        """Return the host of a role, after choosing one where it has none; None: no host has a free slot."""
        for host, roles in self._roles.items():
            if role in roles:
                return host
        free = [host for host, roles in self._roles.items() if not self._is_full(host, roles)]
        if not free:
            return None
        host = min(free, key=lambda each: len(self._roles[each]))  # of equal ones, `min` returns the first
        self._roles[host].append(role)
        return host

    def release(self, role: str) -> None:
        """Free the slot of a role that will not be started again."""
        for roles in self._roles.values():
            if role in roles:
                roles.remove(role)

    @property
    def room(self) -> int | None:
        """How many roles all hosts may have; None: no bound."""
        slots = [self._slots[host] for host in self._roles]
        return None if None in slots else sum(each or 0 for each in slots)

    def lose(self, host: str) -> list[str]:
        """Place nothing on this host any more; return the roles that had a place there."""
        return self._roles.pop(host, [])

    def _is_full(self, host: str, roles: list[str]) -> bool:
        bound = self._slots[host]
        return bound is not None and len(roles) >= bound
