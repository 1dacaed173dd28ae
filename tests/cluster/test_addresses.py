"""Addresses as users write them: each host has one spelling, and nothing but loopback counts as
loopback."""

from __future__ import annotations

import pytest

from zmqdist.addresses import is_loopback, one_spelling, split_address
from zmqdist.transport import endpoint

LOOPBACK = [
    ("localhost", "localhost"),
    ("LOCALHOST", "localhost"),
    ("Localhost.", "localhost"),
    ("127.0.0.1", "127.0.0.1"),
    ("127.9.9.9", "127.9.9.9"),
    ("::1", "::1"),
    ("[::1]", "::1"),
    ("0:0:0:0:0:0:0:1", "::1"),
    ("::FFFF:127.0.0.1", "127.0.0.1"),
    ("[::ffff:7f00:1]", "127.0.0.1"),
    ("[::1%lo]", "::1"),
]

OTHERS = [
    ("10.0.0.1", "10.0.0.1"),
    ("::ffff:10.0.0.1", "10.0.0.1"),
    ("[fe80::1%eth0]", "fe80::1%eth0"),
    ("::ffff:0.0.0.0", "0.0.0.0"),
    ("0:0:0:0:0:0:0:0", "::"),
    ("::127.0.0.1", "::7f00:1"),
    ("64:ff9b::127.0.0.1", "64:ff9b::7f00:1"),
    ("ip6-localhost", "ip6-localhost"),
    ("localhost.example", "localhost.example"),
    ("localhost..", "localhost.."),
    ("xlocalhost", "xlocalhost"),
    ("*", "*"),
    ("node7", "node7"),
]

NEITHER = [
    "127.1",
    "127.0.0.1.",
    "0x7f.1",
    "2130706433",
    "127.0.0.01",
    "127.0.0.256",
    "1.2.3.4.5",
    "::1::",
    "fe80::g",
]


@pytest.mark.parametrize(("host", "spelling"), LOOPBACK)
def test_loopback_is_loopback_in_every_spelling(host: str, spelling: str) -> None:
    assert one_spelling(host) == spelling
    assert is_loopback(host)
    address = f"[{host.strip('[]')}]:1" if ":" in host else f"{host}:1"
    assert split_address(address) == (spelling, 1)
    assert endpoint.split(address) == (spelling.replace("localhost", "127.0.0.1"), 1)


@pytest.mark.parametrize(("host", "spelling"), OTHERS)
def test_loopback_addresses_only(host: str, spelling: str) -> None:
    assert one_spelling(host) == spelling
    assert not is_loopback(host)


@pytest.mark.parametrize("host", NEITHER)
def test_ambiguous_ip_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is not an IP"):
        split_address(f"[{host}]:1" if ":" in host else f"{host}:1")
    assert not is_loopback(host)
