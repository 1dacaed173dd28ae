"""The web server of the dashboard, by requests that a browser, a script or a stranger makes."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.launch.helpers import eventually
from tests.observe.dashboard.made_up import MadeUp
from tests.observe.dashboard.visitor import Visitor
from zmqdist import errors
from zmqdist.observe.dashboard import feed, server
from zmqdist.observe.dashboard.access import NO_TOKEN, USED, WRONG
from zmqdist.observe.dashboard.feed import SENT_MAX
from zmqdist.observe.dashboard.server import HEADERS, Dashboard


@pytest.fixture
def made_up() -> MadeUp:
    return MadeUp()


@pytest.fixture
def visitor(made_up: MadeUp) -> Iterator[Visitor]:
    with Dashboard(made_up.call) as dashboard:
        yield Visitor(dashboard.url)


def test_page_reads_facts_with_its_token(visitor: Visitor) -> None:
    with visitor.stream(visitor.token()) as messages:
        first, second = next(messages), next(messages)
    assert first["facts"]["workers"][0]["name"] == "worker:0"
    assert second["facts"]["at"] > first["facts"]["at"]
    numbers = [[row[0] for row in message["timeline"]] for message in (first, second)]
    assert numbers[1]
    assert numbers[0][-1] < numbers[1][0]


def test_used_link_is_refused_with_a_sentence(visitor: Visitor) -> None:
    visitor.token()
    assert visitor.exchange(visitor.code) == (403, {"problem": USED})


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"code": 1}', '{"code": "x"}', "x" * 5000])
def test_wrong_link_is_refused_with_a_sentence(body: str, visitor: Visitor) -> None:
    status, _, text = visitor.request("/api/session", "POST", body)
    assert (status, json.loads(text)) == (403, {"problem": WRONG})


@pytest.mark.parametrize("path", ["/api/facts", "/api/ask/logs", "/api/ask/shutdown"])
def test_request_without_token_reads_nothing(path: str, visitor: Visitor, made_up: MadeUp) -> None:
    status, _, body = visitor.request(path, Cookie="token=x")
    assert (status, json.loads(body)) == (401, {"problem": NO_TOKEN})
    assert made_up.calls == []


@pytest.mark.parametrize("method", ["shutdown", "drain", "scale", "status", "__class__"])
def test_page_can_call_nothing_that_changes(method: str, visitor: Visitor, made_up: MadeUp) -> None:
    headers = {"Authorization": f"Bearer {visitor.token()}"}
    assert visitor.request(f"/api/ask/{method}", **headers)[0] == 404
    assert made_up.calls == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/main.js", "/api/facts", "/api/ask/logs"])
def test_method_that_writes_is_refused(method: str, path: str, visitor: Visitor) -> None:
    assert visitor.request(path, method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/..%2fserver.py",
        "/%2e%2e/server.py",
        "/uplot/../../server.py",
        "/uplot/../main.js",
        "//etc/passwd",
        "/uplot",
        "/uplot/LICENSE",
        "/main.js%00",
        "/\\..\\server.py",
        "/page/main.js",
    ],
)
def test_path_outside_of_the_table_is_not_found(path: str, visitor: Visitor) -> None:
    status, _, body = visitor.request(path)
    assert (status, body) == (404, b"Not Found")


def test_name_that_leads_to_loopback_is_refused(visitor: Visitor) -> None:
    """DNS rebinding: a stranger's name points to 127.0.0.1, and the browser takes the dashboard for
    the stranger's."""
    token = visitor.token()
    for path in ("/", "/api/facts"):
        headers = {"Host": f"evil.example:{visitor.port}", "Authorization": f"Bearer {token}"}
        status, _, body = visitor.request(path, **headers)
        assert (status, b"answers only to" in body) == (403, True)


def test_page_of_another_site_is_refused(visitor: Visitor) -> None:
    headers = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site"}
    body = json.dumps({"code": visitor.code})
    assert visitor.request("/api/session", "POST", body, **headers)[0] == 403
    assert visitor.exchange(visitor.code)[0] == 200, "the refused request has not used the code"


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/facts", "/nowhere"])
def test_response_has_the_headers(path: str, visitor: Visitor) -> None:
    _, headers, _ = visitor.request(path)
    assert {name: headers.get(name.lower()) for name in HEADERS} == HEADERS
    assert not {"server", "set-cookie", "access-control-allow-origin"} & set(headers)


def test_page_has_no_inline_script_or_style(visitor: Visitor) -> None:
    _, _, body = visitor.request("/")
    assert not re.search(rb"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|https?:", body)


def test_table_has_every_file_of_the_page() -> None:
    names = {
        path.relative_to(server.PAGE).as_posix()
        for path in server.PAGE.rglob("*")
        if path.is_file()
    }
    assert names - {name.removeprefix("/") for name in server.files()} == {"uplot/LICENSE"}


def test_dispatcher_has_rest_while_no_page_reads(visitor: Visitor, made_up: MadeUp) -> None:
    token = visitor.token()
    assert made_up.calls == []
    with visitor.stream(token) as messages:
        next(messages)
    assert set(made_up.calls) == {"facts"}


def test_page_hears_that_the_dispatcher_is_gone() -> None:
    def call(method: str, *_: Any, timeout_s: float) -> Any:
        raise errors.UnavailableError("no dispatcher answered")

    with Dashboard(call) as dashboard:
        visitor = Visitor(dashboard.url)
        with visitor.stream(visitor.token()) as messages:
            assert next(messages)["facts"] == {"problem": "no dispatcher answered"}


def test_restarted_dispatcher_begins_a_new_run(visitor: Visitor, made_up: MadeUp) -> None:
    with visitor.stream(visitor.token()) as messages:
        first = next(messages)
        made_up.__init__(seed=8)  # type: ignore[misc]  # numbers begin again
        made_up.pid += 1
        later = next(message for message in messages if message["run"] != first["run"])
    assert later["timeline"][0][0] < 100


def test_new_page_gets_a_bounded_number_of_events(visitor: Visitor, made_up: MadeUp) -> None:
    token = visitor.token()
    with visitor.stream(token) as messages:
        next(messages)
        for _ in range(3):
            for _ in range(2_000):
                made_up.add_event("evaluate", 0, 0, made_up.at, 0.001, False)
            next(messages)
        with visitor.stream(token) as others:
            events = next(others)["timeline"]
    assert len(events) == SENT_MAX


def test_slow_page_skips_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "POLL_S", 0.0)
    listen = socket.socket.listen

    def listen_with_small_buffers(listener: socket.socket, backlog: int) -> None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listen(listener, backlog)

    monkeypatch.setattr(socket.socket, "listen", listen_with_small_buffers)
    made_up = MadeUp(workers=200)
    with Dashboard(made_up.call) as dashboard:
        visitor = Visitor(dashboard.url)
        with visitor.stream(visitor.token(), buffer_bytes=4096) as messages:
            before = next(messages)["facts"]["at"]
            eventually(lambda: len(made_up.calls) > 100, "facts that the page does not read")
            # of the 100 facts, which are 50 s apart, the sockets hold two or three
            times = [before, *(next(messages)["facts"]["at"] for _ in range(5))]
    assert max(later - earlier for earlier, later in pairwise(times)) > 10.0


def test_questions_go_to_the_worker(visitor: Visitor) -> None:
    headers = {"Authorization": f"Bearer {visitor.token()}"}
    status, _, body = visitor.request("/api/ask/logs?worker=worker:1&since=4", **headers)
    rows = json.loads(body)["answer"]["rows"]
    assert (status, {worker for _, worker, *_ in rows}) == (200, {"worker:1"})
    assert min(number for number, *_ in rows) > 4


def test_port_in_use_is_named(visitor: Visitor) -> None:
    with pytest.raises(errors.UnavailableError, match=f"cannot use port {visitor.port}"):
        Dashboard(MadeUp().call, visitor.port)


def test_dashboard_listens_on_loopback_only(visitor: Visitor) -> None:
    for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}:
        if str(address).startswith("127.") or ":" in str(address):
            continue
        with pytest.raises(OSError):
            socket.create_connection((address, visitor.port), timeout=5).close()


def test_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(errors.FailedPreconditionError) as failure:
        Dashboard(MadeUp().call)
    assert failure.value.message == (
        "the dashboard needs 'zmqdist[dashboard]': pip install 'zmqdist[dashboard]'"
    )


def test_used_link_is_followed_by_a_new_one() -> None:
    said: list[str] = []
    with Dashboard(MadeUp().call, say=said.append) as dashboard:
        visitor = Visitor(dashboard.url)
        Visitor(said[0].removeprefix("dashboard: ")).token()
        assert visitor.exchange(said[1].rpartition("=")[2])[0] == 200


def test_end_of_the_dashboard_ends_streams(made_up: MadeUp) -> None:
    with Dashboard(made_up.call) as dashboard:
        visitor = Visitor(dashboard.url)
        with visitor.stream(visitor.token()) as messages:
            next(messages)
            dashboard.close()
            assert len(list(messages)) < 10
