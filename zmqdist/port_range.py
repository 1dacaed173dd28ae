"""The range from which the processes of a cluster choose free ports, for firewalls:
`ZMQDIST_PORTS=5000-5100`."""

from __future__ import annotations

from typing import Final

VARIABLE: Final = "ZMQDIST_PORTS"

_PORT_MAX: Final = 65535


def parse_ports(text: str) -> range:
    """Return the ports of a range `FIRST-LAST`, including LAST. If the text is not a range, raise
    ValueError with a text that says why."""
    first, dash, last = text.strip().partition("-")
    if not dash or not all(
        part.isascii() and part.isdecimal() and len(part) <= 5 for part in (first, last)
    ):
        raise ValueError(f"{text[:40]!r} is not a range of ports: write it as 5000-5100")
    if not 1 <= int(first) <= int(last) <= _PORT_MAX:
        raise ValueError(
            f"{text[:40]!r} is not a range of ports: from 1 to {_PORT_MAX}, the lower one first"
        )
    return range(int(first), int(last) + 1)
