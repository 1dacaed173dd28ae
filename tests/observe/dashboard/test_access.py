"""Who may read the dashboard: codes, tokens, and the headers of requests."""

from __future__ import annotations

import pytest

from zmqdist.observe.dashboard.access import (
    CODES_MAX,
    TOO_MANY,
    USED,
    WRONG,
    WRONG_MAX,
    WRONG_WITHIN_S,
    Access,
    refusal,
)

PORT = 8787
OWN = "127.0.0.1:8787"


def test_code_opens_once() -> None:
    access = Access()
    code = access.new_code()
    token, problem = access.exchange(code, 0.0)
    assert (bool(token), problem) == (True, "")
    assert access.exchange(code, 1.0) == ("", USED)
    assert access.may_read(f"Bearer {token}")


@pytest.mark.parametrize("code", ["", "x", "ü\ud800", "a" * 5000])
def test_wrong_code_is_refused(code: str) -> None:
    access = Access()
    access.new_code()
    assert access.exchange(code, 0.0) == ("", WRONG)


def test_right_code_waits_after_many_wrong_ones() -> None:
    access = Access()
    code = access.new_code()
    for number in range(WRONG_MAX):
        assert access.exchange(f"wrong {number}", float(number)) == ("", WRONG)
    assert access.exchange(code, WRONG_MAX + 0.0) == ("", TOO_MANY)
    token, _ = access.exchange(code, WRONG_WITHIN_S)
    assert access.may_read(f"Bearer {token}")


def test_oldest_link_ends_with_too_many() -> None:
    access = Access()
    codes = [access.new_code() for _ in range(CODES_MAX + 1)]
    assert access.exchange(codes[0], 0.0) == ("", WRONG)
    assert access.exchange(codes[1], 0.0)[0]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer x", "Basic {}", "{}"])
def test_header_without_token_is_refused(header: str) -> None:
    access = Access()
    token, _ = access.exchange(access.new_code(), 0.0)
    assert not access.may_read(header.format(token))


@pytest.mark.parametrize(
    ("path", "headers", "accepted"),
    [
        ("/", {"host": OWN}, True),
        ("/api/facts", {"host": "localhost:8787"}, True),
        ("/api/facts", {"host": OWN, "origin": f"http://{OWN}"}, True),
        ("/api/facts", {"host": OWN, "sec-fetch-site": "same-origin"}, True),
        ("/", {}, False),
        ("/", {"host": "127.0.0.1"}, False),
        ("/", {"host": "127.0.0.1:8788"}, False),
        ("/", {"host": "evil.example:8787"}, False),
        ("/", {"host": "127.0.0.1:8787.evil.example"}, False),
        ("/", {"host": OWN, "origin": "http://evil.example"}, False),
        ("/", {"host": OWN, "origin": "http://localhost:8787"}, False),
        ("/", {"host": OWN, "origin": "null"}, False),
        ("/api/facts", {"host": OWN, "sec-fetch-site": "cross-site"}, False),
        ("/api/facts", {"host": OWN, "sec-fetch-site": "same-site"}, False),
        ("/main.js", {"host": OWN, "sec-fetch-site": "cross-site"}, False),
    ],
)
def test_request_of_another_site_is_refused(
    path: str, headers: dict[str, str], accepted: bool
) -> None:
    assert (refusal(headers, path, PORT) == "") is accepted


@pytest.mark.parametrize(
    ("path", "dest", "accepted"),
    [("/", "document", True), ("/", "iframe", False), ("/api/facts", "document", False)],
)
def test_click_on_a_link_loads_only_the_page(path: str, dest: str, accepted: bool) -> None:
    headers = {
        "host": OWN,
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": dest,
    }
    assert (refusal(headers, path, PORT) == "") is accepted
