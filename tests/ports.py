"""Free ports of loopback, which nobody else of this machine is given before the test has ended.

Without that, another test of the same run, or either end of a connection, may have the port before
the server that was to have it.
"""

from __future__ import annotations

from zmqdist.launch.ports import Reserved

_reserved: list[Reserved] = []


def free_address() -> str:
    """ "127.0.0.1:port"; nobody listens there, and whoever binds it says SO_REUSEADDR, as ZeroMQ
    does."""
    _reserved.append(Reserved())
    return _reserved[-1].address


def free_port() -> int:
    """The port of a `free_address`."""
    return int(free_address().rpartition(":")[2])


def free_addresses(count: int) -> list[str]:
    """Several."""
    return [free_address() for _ in range(count)]


def release() -> None:
    """After each test (conftest.py)."""
    while _reserved:
        _reserved.pop().close()
