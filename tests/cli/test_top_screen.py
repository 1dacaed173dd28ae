"""The screen of `zmqdist top`, driven by textual's pilot at the sizes of terminals."""

from __future__ import annotations

import asyncio
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from tests.observe.dashboard.made_up import NASTY, MadeUp
from zmqdist.errors import UnavailableError
from zmqdist.observe.views import VIEWS
from zmqdist_cli.top_screen import KEYS, TopScreen

SVG = "http://www.w3.org/2000/svg"
CELL_WIDTH = 12.2
"""The width of a character in a picture of the screen."""
SIZES = [(80, 24), (200, 50)]
Use = Callable[[TopScreen, "Pilot[None]"], Awaitable[None]]


def shown(app: TopScreen) -> list[str]:
    """The lines of the screen, from a picture of it."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for node in ElementTree.fromstring(app.export_screenshot()).iter(f"{{{SVG}}}text"):
        if "clip-path" in node.attrib:  # the title of the window has none
            place = (float(node.attrib["x"]), (node.text or "").replace("\xa0", " "))
            lines.setdefault(float(node.attrib["y"]), []).append(place)
    rows = []
    for _, parts in sorted(lines.items()):
        row = ""
        for x, text in sorted(parts):
            row = row.ljust(round(x / CELL_WIDTH)) + text
        rows.append(row.rstrip())
    return rows


def driven(call: Callable[..., Any], size: tuple[int, int], use: Use) -> None:
    """Run the screen without a terminal, and `use` it when it has shown the first facts."""

    async def run() -> None:
        app = TopScreen(call, 3600.0)
        async with app.run_test(size=size) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await use(app, pilot)

    asyncio.run(run())


@pytest.mark.parametrize("size", SIZES)
def test_first_view_has_a_line_for_each_worker(size: tuple[int, int]) -> None:
    async def use(app: TopScreen, _: Pilot[None]) -> None:
        lines = shown(app)
        assert len(lines) <= size[1]
        assert max(map(len, lines)) <= size[0]
        assert lines[0].startswith("dispatcher at 127.0.0.1:5050 (pid 4711): 4 workers")
        rows = [line for line in lines if line.lstrip().startswith("worker:")]
        assert [row.split()[0] for row in rows] == [f"worker:{index}" for index in range(4)]
        assert "13 min" in rows[1]

    driven(MadeUp().call, size, use)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(len(VIEWS)))
def test_views_show_hostile_names_as_text(size: tuple[int, int], number: int) -> None:
    made_up = MadeUp(nasty=True)
    made_up.add_failure("evaluate", 0, 1)
    made_up.add_death(0)

    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        await pilot.press("minus" if KEYS[number] == "-" else KEYS[number])
        await pilot.pause()
        name = VIEWS[number].name
        titles = [column.title.removeprefix(">") for column in VIEWS[number].columns]
        assert any(line.split()[:1] == titles[0].split()[:1] for line in shown(app))
        assert all(line.isprintable() for line in shown(app))
        if name in ("workers", "slots"):
            assert '<script>alert("x")</script>?[31mred?[0m?gpj' in "\n".join(shown(app))
        if name == "functions":  # the rest is reached by scrolling
            assert '<script>alert("x")<' in "\n".join(shown(app))

    driven(made_up.call, size, use)


LONG_NAME = "module.[bold]" + "x" * 80


def with_long_name() -> MadeUp:
    made_up = MadeUp()
    facts = made_up.facts
    made_up.facts = lambda *_: {  # type: ignore[method-assign]
        **facts(),
        "functions": [{**facts()["functions"][0], "name": LONG_NAME}],
    }
    return made_up


def test_long_name_hides_no_figures_of_functions() -> None:
    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await pilot.pause()
        (titles,) = (line.split() for line in shown(app) if line.lstrip().startswith("time"))
        assert titles == ["time", "runs", "failed", "now", "queued", "mean", "p99", "name"]

    driven(with_long_name().call, (80, 24), use)


def test_whole_name_is_reached_by_scrolling() -> None:

    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await pilot.pause()
        table = app.query_one(DataTable)
        assert LONG_NAME in map(str, table.get_row_at(0))
        await pilot.press(*["right"] * 40)
        await pilot.pause()
        assert table.scroll_x > 0

    driven(with_long_name().call, (80, 24), use)


def test_thousand_workers_scroll_sort_and_filter() -> None:
    made_up = MadeUp(workers=1_000, slots=4)
    made_up.advance = lambda *_: None  # type: ignore[method-assign]

    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        table = app.query_one(DataTable)
        assert table.row_count == 1_000
        await pilot.press("ctrl+end")
        await pilot.wait_for_scheduled_animations()
        assert any("worker:999" in line for line in shown(app))
        await pilot.press("s", "r")  # by name, the largest first
        await pilot.press("ctrl+home")
        await pilot.pause()
        assert str(table.get_row_at(0)[0]) == "worker:999"
        await pilot.press("slash", *"R:77", "enter")
        await pilot.pause()
        names = [str(table.get_row_at(row)[0]) for row in range(table.row_count)]
        assert names == [f"worker:{n}" for n in (*range(779, 769, -1), 77)]
        await pilot.press("escape")
        await pilot.pause()
        assert table.row_count == 1_000

    driven(made_up.call, (80, 24), use)


def test_update_of_thousand_workers_keeps_place_and_is_fast() -> None:
    made_up = MadeUp(workers=1_000, slots=4)
    made_up.advance = lambda *_: None  # type: ignore[method-assign]

    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        table = app.query_one(DataTable)
        await pilot.press("ctrl+end")
        await pilot.wait_for_scheduled_animations()
        before = (table.cursor_row, table.scroll_y)
        made_up.done["train_step"] = 10**9
        begin_s = time.process_time()
        await pilot.press("u")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert time.process_time() - begin_s < 4.0
        assert (table.cursor_row, table.scroll_y) == before
        assert "1,000,000" in "\n".join(shown(app))

    driven(made_up.call, (200, 50), use)


def test_row_of_failure_opens_its_traceback() -> None:
    made_up = MadeUp()
    made_up.advance = lambda *_: None  # type: ignore[method-assign]
    made_up.add_failure("[red]f[/red]", 0, 7)

    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        await pilot.press("5", "enter")
        await pilot.pause()
        text = "\n".join(shown(app))
        assert "traceback:" in text
        assert 'File "train.py", line 12, in [red]f[/red]' in text
        await pilot.press("escape")
        await pilot.pause()
        assert "traceback:" not in "\n".join(shown(app))

    driven(made_up.call, (80, 50), use)


def test_absent_dispatcher_is_named() -> None:
    def call(*_: object) -> Any:
        raise UnavailableError(f"nothing answers {NASTY}")

    async def use(app: TopScreen, _: Pilot[None]) -> None:
        text = app.query_one("#head", Static).render()
        assert "trying again; press q" in str(text)
        assert all(line.isprintable() for line in shown(app))

    driven(call, (80, 24), use)


def test_q_ends_the_screen() -> None:
    async def use(app: TopScreen, pilot: Pilot[None]) -> None:
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    driven(MadeUp().call, (80, 24), use)
