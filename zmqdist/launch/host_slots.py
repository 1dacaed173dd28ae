"""Decides on which host a role is placed.

Rules
    A new role is placed on the host that has the fewest roles. If several hosts have the fewest,
    the role is placed on the one that the cluster file lists first.
    A host with `slots` has at most this number of roles. A crashed role keeps its place, so that it
    is restarted on its host. `release` frees the place of a role that is not restarted.
    The roles of a lost host lose their places. Each of these roles gets a place on another host
    when it is restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping


class HostSlots:
    """The places of roles on hosts. Any thread may call the methods.

    Args:
      slots: the largest number of roles of each host, in the order of the cluster file. None means
        no bound.

    Attributes:
      hosts: the hosts that are not lost, in the order of the file.
    """

    def __init__(self, slots: Mapping[str, int | None]) -> None:
        self._slots = dict(slots)
        self._roles: dict[str, list[str]] = {host: [] for host in slots}
        self._lock = threading.Lock()

    @property
    def hosts(self) -> list[str]:
        return list(self._roles)

    def place(self, role: str) -> str | None:
        """Return the host of a role. If the role has no place yet, choose one for it. Return None
        if no host has a free slot."""
        with self._lock:
            for host, roles in self._roles.items():
                if role in roles:
                    return host
            free = [host for host, roles in self._roles.items() if not self._is_full(host, roles)]
            if not free:
                return None
            # If several hosts have the fewest roles, `min` returns the first of them.
            host = min(free, key=lambda each: len(self._roles[each]))
            self._roles[host].append(role)
            return host

    def release(self, role: str) -> None:
        """Free the place of a role that is not restarted."""
        with self._lock:
            for roles in self._roles.values():
                if role in roles:
                    roles.remove(role)

    @property
    def room(self) -> int | None:
        """How many roles all hosts that are not lost may have together. None means no bound."""
        slots = [self._slots[host] for host in self.hosts]
        return None if None in slots else sum(each or 0 for each in slots)

    def lose(self, host: str) -> list[str]:
        """Record that a host is lost, so that no more roles are placed on the host. Return the
        roles that had a place on it."""
        return self._roles.pop(host, [])

    def _is_full(self, host: str, roles: list[str]) -> bool:
        bound = self._slots[host]
        return bound is not None and len(roles) >= bound
