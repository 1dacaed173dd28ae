"""The dashboard in a real Chromium: every view under a real job, the questions that a user has, and
what strangers try.

Needs Debian's chromium, and pip install zmqdist[engines].
"""

from __future__ import annotations

import contextlib
import http.server
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.engines.browser import Opened, chromium, opened
from tests.observe.dashboard.made_up import NASTY, MadeUp
from zmqdist.observe.dashboard.access import USED, WRONG
from zmqdist.observe.dashboard.server import Dashboard

VIEWS = (
    "overview",
    "tasks",
    "functions",
    "workers",
    "waiting",
    "failures",
    "losses",
    "logs",
    "data",
    "variables",
    "actors",
    "rpc",
)
TASKS = 100_000
ODD = 1_000

pytestmark = pytest.mark.timeout(300)


def parse(number: int) -> int:
    if number % ODD == ODD - 1:
        raise ValueError(f"row {number} has 3 columns, not 4")
    return number


def train_step(number: int) -> int:
    begin = os.times().user
    while os.times().user - begin < 0.03:
        pass
    return number


def load_shard(number: int) -> int:
    threading.Event().wait(0.02)
    return number


def check_row(number: int) -> int:
    threading.Event().wait(0.01)
    return parse(ODD - 1) if number % 100 == 99 else number


def exhaust_memory(size: int) -> None:
    print(f"allocating {size} MB", flush=True)
    os.kill(os.getpid(), 9)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with zd.local_cluster(workers=2, slots=2, dashboard=True) as cluster:
        yield cluster


@pytest.fixture
def coordinator(cluster: Any) -> Iterator[Any]:
    with cluster.coordinator() as coordinator:
        yield coordinator
        coordinator.cancel_all()


@contextlib.contextmanager
def made_up_page(browser: Any, made_up: MadeUp, **options: Any) -> Iterator[Opened]:
    for _ in range(40):
        made_up.advance()
    made_up.add_death(1)
    with Dashboard(made_up.call) as dashboard, opened(browser, **options) as page:
        page.open(dashboard.url)
        yield page


def test_views_under_a_real_job(browser: Any, cluster: Any, coordinator: Any) -> None:
    values = [coordinator.submit(parse, number) for number in range(TASKS)]
    actor = coordinator.actor(Counter)
    calls = [actor.add() for _ in range(50)]
    with opened(browser) as page:
        page.open(cluster.dashboard_url)
        for view in VIEWS:
            page.show(view)
        page.show("functions")
        page.wait_for("parse")
        for value in [*values, *calls]:
            value.exception()
        page.wait_for(f"{TASKS // ODD}")
        page.show("failures")
        page.wait_for("ValueError")
        page.page.click("#view .opener >> nth=0")
        page.wait_for("Traceback (most recent call last)")
        for view in VIEWS:
            page.show(view)
            assert page.faults() == []
        assert page.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_views_are_accessible(width: int, scheme: str, browser: Any) -> None:
    with made_up_page(browser, MadeUp(), width=width, scheme=scheme) as page:
        for view in VIEWS:
            page.show(view)
            page.page.wait_for_timeout(50)
            if page.page.query_selector("#view .opener"):
                page.page.click("#view .opener >> nth=0")
            assert page.faults() == [], view
            assert page.widest() <= 0, view
        assert page.problems == []


def test_views_are_reached_by_keyboard(browser: Any) -> None:
    with made_up_page(browser, MadeUp()) as page:
        keyboard = page.page.keyboard
        for _ in range(4 + VIEWS.index("workers")):
            keyboard.press("Tab")
        keyboard.press("Enter")
        page.page.wait_for_selector("nav a[href='#/workers'][aria-current=page]")
        page.page.focus("#view .opener >> nth=0")
        keyboard.press("Enter")
        page.wait_for("Show Python stacks")
        page.show("tasks")
        page.page.focus("canvas")
        keyboard.press("ArrowLeft")
        page.page.wait_for_selector("#view button[aria-pressed=false]:text('Live')")
        keyboard.press("Home")
        page.page.wait_for_selector("#view button[aria-pressed=true]:text('Live')")


def test_theme_is_switched_and_kept(browser: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with made_up_page(browser, MadeUp()) as page:
        light = page.page.evaluate(ground)
        page.page.click("#theme")
        page.page.click("#theme")
        dark = page.page.evaluate(ground)
        assert light != dark
        page.page.reload()
        page.page.wait_for_selector("[data-state=live]")
        assert page.page.evaluate(ground) == dark


def test_thousand_workers_are_shown(browser: Any) -> None:
    with made_up_page(browser, MadeUp(1_000, 4)) as page:
        for view in ("tasks", "workers"):
            page.show(view)
        page.wait_for("1,000 workers")
        assert page.page.locator("tbody tr").count() <= 100
        page.page.fill("input[type=search]", "worker:777")
        page.wait_for("worker:777")
        assert page.problems == []


def test_nasty_names_are_shown_as_text(browser: Any) -> None:
    shown = NASTY.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    with made_up_page(browser, MadeUp(nasty=True)) as page:
        for view in VIEWS:
            page.show(view)
            if view in ("functions", "workers", "failures", "logs"):
                page.page.wait_for_function(
                    "text => document.getElementById('view').textContent.includes(text)",
                    arg=shown,
                )
            html = page.page.content()
            assert "\x1b" not in html
            assert "\u202e" not in html
        assert page.page.evaluate("document.scripts.length") == 1
        assert page.problems == []


def test_question_why_does_my_job_not_move(browser: Any) -> None:
    with contextlib.ExitStack() as stack:
        # a new cluster, because an old one fails such work at once
        cluster = stack.enter_context(zd.local_cluster(workers=2, slots=2, dashboard=True))
        coordinator = stack.enter_context(cluster.coordinator())
        for number in range(12):
            coordinator.options(resources={"gpu": 1}).submit(train_step, number)
        page = stack.enter_context(opened(browser))
        page.open(str(cluster.dashboard_url))
        page.wait_for("12 functions cannot start: waits for resources: each needs gpu 1")
        page.show("waiting")
        page.wait_for("no worker has so much")
        page.wait_for("Start a worker with --resource")
        page.picture("dashboard_waiting", 400)
        coordinator.cancel_all()


def test_question_which_function_takes_the_time(
    browser: Any, cluster: Any, coordinator: Any
) -> None:
    with opened(browser) as page:
        page.open(cluster.dashboard_url)
        functions = (train_step, load_shard, train_step, check_row)
        values = [coordinator.submit(functions[number % 4], number) for number in range(4_000)]
        page.show("tasks")
        for value in values[:1_500]:
            value.exception()
        page.wait_for("train_step")
        page.picture("dashboard_tasks", 560)
        page.show("functions")
        page.wait_for("train_step takes")
        page.picture("dashboard_functions", 400)


def test_question_which_worker_lost_slots_and_why(
    browser: Any, cluster: Any, coordinator: Any
) -> None:
    value = coordinator.options(worker=1).submit(exhaust_memory, 4_096)
    assert value.exception() is not None
    with opened(browser) as page:
        page.open(cluster.dashboard_url)
        page.wait_for("worker:1 lost")
        page.show("losses")
        page.wait_for("killed by SIGKILL")
        page.page.click("#view .opener >> nth=0")
        page.wait_for("allocating 4096 MB")
        page.picture("dashboard_losses", 480)
        page.show("overview")
        page.picture("dashboard_overview", 740)


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard(MadeUp().call) as dashboard:
        yield dashboard


def test_used_link_says_so(browser: Any, dashboard: Dashboard) -> None:
    link = dashboard.url
    with opened(browser) as first, opened(browser) as second:
        first.open(link)
        assert "code" not in first.page.url
        second.page.goto(link)
        second.page.wait_for_selector(f"#notice:text({USED!r})")


def test_wrong_link_says_so(browser: Any, dashboard: Dashboard) -> None:
    with opened(browser) as page:
        page.page.goto(dashboard.url + "x")
        page.page.wait_for_selector(f"#notice:text({WRONG!r})")


def test_reload_keeps_the_tab_open(browser: Any, dashboard: Dashboard) -> None:
    with opened(browser) as page:
        page.open(dashboard.url)
        page.page.reload()
        page.page.wait_for_selector("[data-state=live]")
        assert page.page.context.cookies() == []


FOREIGN = """<!doctype html><script>
async function attempt(path, options) {
  try { return (await fetch(`http://127.0.0.1:PORT${path}`, options)).status; }
  catch (error) { return "refused"; }
}
(async () => {
  const outcomes = [
    await attempt("/api/facts", { headers: { Authorization: "Bearer x" } }),
    await attempt("/api/session", { method: "POST", body: '{"code": "CODE"}' }),
    await attempt("/main.js", {}),
  ];
  document.title = outcomes.join(" ");
})();
</script><iframe src="http://127.0.0.1:PORT/"></iframe>"""


class Foreign(http.server.BaseHTTPRequestHandler):
    """A page of another site, which asks the dashboard from the browser of its reader."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def foreign_site(port: str, code: str) -> Iterator[int]:
    text = FOREIGN.replace("PORT", port).replace("CODE", code)
    handler = type("Handler", (Foreign,), {"body": text.encode()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.localhost"])
def test_page_of_another_site_gets_nothing(host: str, browser: Any, dashboard: Dashboard) -> None:
    link = dashboard.url
    place, _, code = link.partition("/#code=")
    with (
        foreign_site(place.rpartition(":")[2], code) as port,
        opened(browser) as stranger,
        opened(browser) as page,
    ):
        stranger.page.goto(f"http://{host}:{port}/")
        stranger.page.wait_for_function("document.title.split(' ').length === 3")
        assert stranger.page.title() == "refused refused refused"
        assert any("frame" in problem for problem in stranger.problems)
        page.open(link)  # its code is still unused


def test_name_that_leads_to_loopback_gets_nothing(browser: Any, dashboard: Dashboard) -> None:
    """DNS rebinding: Chromium takes every name below `localhost` for 127.0.0.1."""
    with opened(browser) as page:
        answer = page.page.goto(dashboard.url.replace("127.0.0.1", "evil.localhost"))
        assert answer.status == 403
