"""Which peers are admitted: any bytes, and the table of keys and roles."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqdist.transport.security import (
    DOMAIN,
    ROLES,
    Policy,
    ZapRequest,
    decide,
    parse,
    role_and_key,
)

TOKEN = b"t" * 43
KEY = bytes(range(32))
POLICY = Policy(token=TOKEN, roles={KEY: "worker"})


def request(
    mechanism: bytes, *credentials: bytes, version: bytes = b"1.0", domain: bytes = DOMAIN
) -> ZapRequest:
    return parse([version, b"7", domain, b"127.0.0.1", b"", mechanism, *credentials])


@pytest.mark.parametrize("role", ROLES)
def test_token_admits_as_role_of_user_name(role: str) -> None:
    reply = decide(request(b"PLAIN", role.encode(), TOKEN), POLICY)
    assert (reply.status, reply.user_id, reply.request_id) == (200, role, b"7")


def test_known_key_admits_as_its_role() -> None:
    reply = decide(request(b"CURVE", KEY), POLICY)
    assert (reply.status, role_and_key(reply.user_id)) == (200, ("worker", KEY))


@pytest.mark.parametrize(
    ("ask", "policy", "status"),
    [
        (request(b"PLAIN", b"client", b"x" * 43), POLICY, 400),
        (request(b"PLAIN", b"client", TOKEN[:-1]), POLICY, 400),
        (request(b"PLAIN", b"client", b""), Policy(), 400),
        (request(b"PLAIN", b"root", TOKEN), POLICY, 400),
        (request(b"PLAIN", b"", TOKEN), POLICY, 400),
        (request(b"PLAIN", b"\xff\xfe", TOKEN), POLICY, 400),
        (request(b"PLAIN", b"client"), POLICY, 400),
        (request(b"PLAIN", b"client", TOKEN, b""), POLICY, 400),
        (request(b"CURVE", bytes(32)), POLICY, 400),
        (request(b"CURVE", KEY[:31]), POLICY, 400),
        (request(b"CURVE"), POLICY, 400),
        (request(b"CURVE", KEY), Policy(roles={KEY: "king"}), 400),
        (request(b"NULL"), POLICY, 400),
        (request(b"GSSAPI", b"principal"), POLICY, 400),
        (request(b"PLAIN", b"client", TOKEN, domain=b"other"), POLICY, 400),
        (request(b"PLAIN", b"client", TOKEN, version=b"2.0"), POLICY, 500),
        (parse([]), POLICY, 500),
    ],
)
def test_unknown_peers_are_refused(ask: ZapRequest, policy: Policy, status: int) -> None:
    reply = decide(ask, policy)
    assert (reply.status, reply.user_id) == (status, "")


frames = st.lists(
    st.one_of(
        st.binary(max_size=64),
        st.sampled_from(
            [b"1.0", DOMAIN, b"PLAIN", b"CURVE", b"NULL", b"client", b"admin", TOKEN, KEY]
        ),
    ),
    max_size=10,
)


@given(frames, st.sampled_from([POLICY, Policy()]))
def test_random_frames_get_replies(parts: list[bytes], policy: Policy) -> None:
    reply = decide(parse(parts), policy)
    assert reply.status in (200, 400, 500)
    assert all(isinstance(frame, bytes) for frame in reply.frames())
    if reply.status == 200:
        assert policy is POLICY
        assert parts[-1] in (TOKEN, KEY)
        assert role_and_key(reply.user_id)[0] in ROLES
    else:
        assert reply.user_id == ""


def test_repr_and_reply_have_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask = request(b"PLAIN", b"client", TOKEN)
    assert TOKEN.decode() not in f"{ask!r} {POLICY!r} {decide(ask, POLICY)!r} {caplog.text}"
    assert TOKEN not in b"".join(decide(ask, POLICY).frames())
