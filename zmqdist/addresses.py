"""Addresses as users write them: `host:port`, with IPv6 hosts in brackets (`[::1]:5050`).

No function of this module queries a name server, so only a connection shows whether a host exists.

Also here: the range from which the processes of a cluster choose free ports, for firewalls:
`ZMQDIST_PORTS=5000-5100`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

PORT_MAX = 65535

_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?", re.IGNORECASE)
"""A host that the system takes for an IPv4 address, if it has fewer numbers or other digits than an
address has, too."""
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\*|")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of an address: `("::1", 5050)` for `"[::1]:5050"`. The host is in
    the form of `one_spelling`, or empty. The port may be 0.

    Raises:
      ValueError: `address` is not `host:port`. The text says what is wrong, and does not repeat the
        address.
    """
    if "://" in address:
        raise ValueError("write host:port without " + address.split("://")[0] + "://")
    if address.startswith("["):
        host, closed, rest = address[1:].partition("]")
        if not closed:
            raise ValueError("the bracket is not closed")
        if ":" not in host:
            raise ValueError(f"{host!r} is not an IPv6 address")
    else:
        host, colon, rest = address.partition(":")
        rest = colon + rest
        if rest.count(":") > 1:
            raise ValueError("an IPv6 host needs brackets, like [::1]:5050")
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is not a host name")
    host = one_spelling(host)
    if not rest.startswith(":"):
        raise ValueError("no port; write host:port")
    return host, _port(rest[1:])


def one_spelling(host: str) -> str:
    """Return the host as all other code compares it: an address in its shortest form without
    brackets and without the name of an interface that it does not need (`::1%lo`), an IPv4 address
    if the host is an IPv6 address that contains one (`::ffff:127.0.0.1`), and "localhost" in lower
    case without a dot at its end.

    Raises:
      ValueError: the host looks like an IP address and is not one, such as `127.1`, which some
        systems read as 127.0.0.1.
    """
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if host.lower().removesuffix(".") == "localhost":
        return "localhost"
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        if ":" in host:
            raise ValueError(f"{host!r} is not an IPv6 address") from None
        if _NUMBERS.fullmatch(host):
            raise ValueError(
                f"{host!r} is not an IP address: write four decimal numbers, like 127.0.0.1"
            ) from None
        return host
    if not number.is_link_local:  # only those of a link need the name of an interface
        number = type(number)(int(number))  # type: ignore[arg-type,unused-ignore]
    return str(getattr(number, "ipv4_mapped", None) or number)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets: the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised_address(advertised: str, port: int | str) -> str:
    """Return the address at which other processes reach a server: `advertised`, with `port` added
    if it has none.

    An IPv6 host may lack its brackets.
    """
    host, colon, last = advertised.rpartition(":")
    has_port = colon and last.isdecimal() and (":" not in host or host.endswith("]"))
    if has_port:
        return advertised
    return (
        f"[{advertised}]:{port}"
        if ":" in advertised and not advertised.startswith("[")
        else f"{advertised}:{port}"
    )


def check_advertised(advertised: str) -> None:
    """Raise ValueError if other processes cannot connect to an advertised address. The text does
    not repeat the address."""
    host, _ = split_address(
        advertised if "://" in advertised else advertised_address(advertised, 1)
    )
    if not host or is_wildcard(host):
        raise ValueError("no process can connect to it")


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address, which only this host can reach.

    A name other than localhost is not looked up, and counts as an address that other hosts can
    reach.
    """
    try:
        host = one_spelling(host)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether the host means every interface. A server can bind to it, but no client can
    connect to it."""
    return host in ("*", "0.0.0.0", "::")


def is_name(host: str) -> bool:
    """Return whether the host is a name, which has to be looked up, and not an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_ipv6(host: str) -> bool:
    """Return whether `host` is a literal IPv6 address, for which a socket needs IPv6 switched
    on.
    """
    return ":" in host


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a port number" if text else "no port after the colon")
    if len(text) > 5 or int(text) > PORT_MAX:
        raise ValueError(f"port {text} is above {PORT_MAX}")
    return int(text)


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
