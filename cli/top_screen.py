"""The screen of `zmqdist top`: views of the facts as tables that scroll, sort and filter. It needs
textual, the extra `top`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, ClassVar, Final

from rich.cells import cell_len
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from zmqdist.errors import OpError
from zmqdist.limits import FAILURES_SHOWN_MAX
from zmqdist.observe import status
from zmqdist.observe.views import VIEWS, Facts, Recent, details, plain

KEYS: Final = "1234567890-"
"""The keys of the views."""

SUSPENDED: Final = "trying again; press q to end this command"


class Details(ModalScreen[None]):
    """A whole row as text, such as a failure with its traceback."""

    BINDINGS: ClassVar = [Binding("escape,enter,q", "dismiss", "back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(self._text))
        yield Footer(show_command_palette=False)


class TopScreen(App[None]):
    """The application.

    Args:
      call: calls a method of the dispatcher by name, and blocks until it has the result.
      interval_s: seconds between two updates.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #views { height: auto; max-height: 4; }
    #head { text-style: bold; }
    #filter { display: none; height: 1; border: none; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "end"),
        Binding("ctrl+c,ctrl+q", "quit", show=False),
        Binding("v", "view(1)", "view"),
        Binding("V", "view(-1)", show=False),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "unfilter", show=False),
        Binding("u", "ask", show=False),
        *(Binding(key, f"show({at})", show=False) for at, key in enumerate(KEYS[: len(VIEWS)])),
    ]

    def __init__(self, call: Callable[..., Any], interval_s: float) -> None:
        super().__init__()
        self._call = call
        self._interval_s = interval_s
        self._recent = Recent(FAILURES_SHOWN_MAX)
        self._facts: Facts | None = None
        self._view = 0
        self._sort: int | None = None
        self._reverse = False
        self._rows: list[Facts] = []
        self._drawn: list[tuple[str, ...]] = []

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="views")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="show rows with this text", id="filter", select_on_focus=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        # Ctrl-C of a terminal is a key here; another process may send the signal
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.query_one(DataTable).focus()
        self._begin_view()
        self.action_ask()
        self.set_interval(self._interval_s, self.action_ask)

    @work(thread=True, exclusive=True)
    def action_ask(self) -> None:
        """Ask the dispatcher, which may be restarted meanwhile."""
        try:
            facts = self._recent.take(status.checked(self._call("facts", self._recent.since)))
        except OpError as error:
            self.call_from_thread(self._show_problem, f"{plain(str(error))}\n{SUSPENDED}")
        else:
            self.call_from_thread(self._show_facts, facts)

    def _show_problem(self, problem: str) -> None:
        self.query_one("#head", Static).update(Text(problem, style="red"))

    def _show_facts(self, facts: Facts) -> None:
        self._facts = facts
        lines = [status.headline(facts), *status.size(facts), *status.troubles(facts)]
        self.query_one("#head", Static).update(Text("\n".join(lines)))
        self._draw()

    # -- the table ---------------------------------------------------------------------------------

    def _begin_view(self) -> None:
        """Show the columns of the view, and where the user is."""
        view, table = VIEWS[self._view], self.query_one(DataTable)
        table.clear(columns=True)
        self._drawn = []
        for number, column in enumerate(view.columns):
            arrow = ("", "↑", "↓")[(number == self._sort) * (1 + self._reverse)]
            title = column.title.removeprefix(">") + arrow
            table.add_column(Text(title), width=len(title))
        names = Text(" ").join(
            Text(f"{key} {other.name}", style="reverse" if other is view else "dim")
            for key, other in zip(KEYS, VIEWS, strict=False)
        )
        self.query_one("#views", Static).update(names)
        self._draw()

    def _draw(self) -> None:
        """Show the rows of the view, at the same place."""
        if self._facts is None:
            return
        view, table = VIEWS[self._view], self.query_one(DataTable)
        pattern = self.query_one("#filter", Input).value
        lines = view.lines(self._facts, pattern=pattern, sort=self._sort, reverse=self._reverse)
        self._rows = [row for row, _ in lines]
        drawn = [texts for _, texts in lines]
        before, self._drawn = self._drawn, drawn
        right = [column.title.startswith(">") for column in view.columns]
        widths = [
            max(column.width, *map(cell_len, texts))  # they only grow, so that nothing jumps
            for column, texts in zip(table.ordered_columns, zip(*drawn, strict=True), strict=False)
        ]
        columns = table.ordered_columns
        if len(before) == len(drawn) and widths == [
            column.width for column in columns[: len(widths)]
        ]:
            # a new table of 1,000 rows would take half a second
            for row, (old, new) in enumerate(zip(before, drawn, strict=True)):
                for number, text in enumerate(new):
                    if text != old[number]:
                        cell = _cell(text, right[number])
                        table.update_cell_at(Coordinate(row, number), cell)
            return
        for column, width in zip(columns, widths, strict=False):
            # not by textual, which measures all cells in a later turn of its loop
            column.width = width
        cursor, x, y = table.cursor_row, table.scroll_x, table.scroll_y
        with self.batch_update():
            table.clear()
            table.add_rows(map(_cell, texts, right) for texts in drawn)
            table.move_cursor(row=cursor, scroll=False)
            table.scroll_to(x, y, animate=False, immediate=True)

    # -- keys --------------------------------------------------------------------------------------

    def action_show(self, number: int) -> None:
        self._view, self._sort, self._reverse = number, None, False
        self._begin_view()

    def action_view(self, step: int) -> None:
        self.action_show((self._view + step) % len(VIEWS))

    def action_sort(self) -> None:
        """Sort by the next column; after the last one, in the order of the facts."""
        after = 0 if self._sort is None else self._sort + 1
        self._sort = after if after < len(VIEWS[self._view].columns) else None
        self._begin_view()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._begin_view()

    def action_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.display = True
        line.focus()

    def action_unfilter(self) -> None:
        line = self.query_one("#filter", Input)
        line.value, line.display = "", False
        self.query_one(DataTable).focus()

    def on_input_changed(self, _: Input.Changed) -> None:
        self._draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self.query_one(DataTable).focus()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self._reverse = event.column_index == self._sort and not self._reverse
        self._sort = event.column_index
        self._begin_view()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.cursor_row < len(self._rows):
            self.push_screen(Details(details(self._rows[event.cursor_row])))


def _cell(text: str, to_right: bool) -> Text:
    # Text, because textual takes a str for markup, and the str is from another process
    return Text(text, justify="right" if to_right else "left", no_wrap=True)
