"""The views of `zmqdist top`: rows of values out of the facts, each with its text for a terminal.

Every text of another process passes through `printable`, so that it has no control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from zmqdist.errors import describe_exit
from zmqdist.observe.status import (
    STALLS,
    WHY_CHARS_MAX,
    duration,
    printable,
    size_of,
    time_of,
)
from zmqdist.observe.wait_reasons import sentence

Facts = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a view.

    Attributes:
      title: the title. A column whose title begins with ">" is aligned to the right.
      value: the key of a row, or what computes the value, which sorts the rows.
      text: makes the text of a value.
    """

    title: str
    value: str | Callable[[Facts], Any]
    text: Callable[[Any], str]

    def of(self, row: Facts) -> Any:
        return row.get(self.value) if isinstance(self.value, str) else self.value(row)


class View(NamedTuple):
    """A view: the columns, and the rows that the facts have for it."""

    name: str
    rows: Callable[[Facts], Iterable[Facts]]
    columns: tuple[Column, ...]

    def lines(
        self, facts: Facts, *, pattern: str = "", sort: int | None = None, reverse: bool = False
    ) -> list[tuple[Facts, tuple[str, ...]]]:
        """Return the rows with a text for each column.

        Args:
          pattern: only rows in which a text contains it, in upper or lower case.
          sort: the column by whose values the rows are sorted; None for the order of the facts.
          reverse: whether the largest value comes first, or the order of the facts is turned round.
        """
        rows = list(self.rows(facts))
        if sort is not None:
            column = self.columns[sort]
            rows.sort(key=lambda row: _order(column.of(row)))
        if reverse:
            rows.reverse()
        lines = [
            (row, tuple(column.text(column.of(row)) for column in self.columns)) for row in rows
        ]
        pattern = pattern.casefold()
        return [line for line in lines if any(pattern in text.casefold() for text in line[1])]


def details(row: Facts) -> str:
    """Return a whole row as lines of text, with a traceback or last lines at the end."""
    lines, long = [], []
    for name, value in row.items():
        text = str(value)
        if "\n" in text or len(text) > 200:
            long += ["", f"{name}:", *(plain(line) for line in text.splitlines())]
        else:
            lines.append(f"{name}: {plain(text)}")
    return "\n".join([*lines, *long])


def plain(text: str) -> str:
    """Return a line of text of another process with unprintable characters replaced."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _order(value: Any) -> tuple[int, Any]:
    return (1, str(value)) if isinstance(value, str) else (0, value or 0)


def _text(value: Any) -> str:
    return printable("" if value is None else str(value))


def _count(value: Any) -> str:
    return f"{value or 0:,.0f}"


def _age(value: Any) -> str:
    return "" if value is None else duration(value)


def _size(value: Any) -> str:
    return size_of(value or 0)


def _took(value: Any) -> str:
    return time_of(value) if value else ""


def _share(value: Any) -> str:
    return f"{value or 0:.0%}"


def _end(exit_code: int | None) -> str:
    return "-" if exit_code is None else describe_exit(exit_code)


def _slots(facts: Facts) -> list[Facts]:
    return [
        {"worker": worker["name"], "host": worker["host"], **slot}
        for worker in facts["workers"]
        for slot in worker.get("slots_now", ())
    ]


def _oldest(worker: Facts) -> Facts | None:
    running = [slot for slot in worker.get("slots_now", ()) if slot["state"] != "idle"]
    return max(running, key=lambda slot: float(slot["since_s"]), default=None)


def _oldest_age(worker: Facts) -> float | None:
    slot = _oldest(worker)
    return None if slot is None else float(slot["since_s"])


def _oldest_name(worker: Facts) -> str:
    slot = _oldest(worker)
    return "" if slot is None else str(slot["function"])


def _rate(worker: Facts) -> float:
    return float(worker["rate"]) if worker["leases"] else 0.0


VIEWS: Final = (
    View(
        "workers",
        lambda facts: facts["workers"],
        (
            Column("name", "name", _text),
            Column("state", "state", _text),
            Column(">slots", "slots", _count),
            Column(">run", "running", _count),
            Column(">wait", lambda row: row["leases"] - row["running"], _count),
            Column(">done", "done", _count),
            Column(">fail", "failed", _count),
            Column(">per s", _rate, _count),
            Column(">cpu %", "cpu_percent", _count),
            Column(">memory", "rss_bytes", _size),
            Column(">oldest", _oldest_age, _age),
            Column("function", _oldest_name, _text),
            Column(">kept", "kept_bytes", _size),
            Column(">deaths", "slot_deaths", _count),
            Column("host", "host", _text),
            Column(">pid", "pid", str),
            Column(">heard", "idle_s", _age),
        ),
    ),
    View(
        "slots",
        _slots,
        (
            Column("worker", "worker", _text),
            Column(">slot", "slot", _count),
            Column("state", "state", _text),
            Column("function", "function", _text),
            Column(">since", lambda row: row["since_s"] if row["function"] else None, _age),
            Column(">cpu %", "cpu_percent", _count),
            Column(">memory", "rss_bytes", _size),
            Column(">attempt", "attempt", _count),
            Column("host", "host", _text),
            Column(">pid", "pid", str),
        ),
    ),
    View(
        "functions",
        lambda facts: facts["functions"],
        (
            Column(">time", lambda row: row["count"] * row["mean_s"], _age),
            Column(">runs", "count", _count),
            Column(">failed", "failed", _count),
            Column(">now", "running", _count),
            Column(">queued", "queued", _count),
            Column(">mean", "mean_s", _took),
            Column(">p99", "p99_s", _took),
            Column("name", "name", _text),  # a long one hides no figure that is asked for often
            Column(">max", "max_s", _took),
            Column(">cpu", "cpu_s", _age),
            Column(">in", "bytes_in", _size),
            Column(">out", "bytes_out", _size),
        ),
    ),
    View(
        "waiting",
        lambda facts: facts["waiting"],
        (
            Column(">count", "count", _count),
            Column("why", sentence, lambda text: printable(text, WHY_CHARS_MAX)),
            Column("program", lambda row: f"{row['coordinator'] & 0xFFFFFFFF:08x}", _text),
        ),
    ),
    View(
        "failures",
        lambda facts: facts["failures"][::-1],
        (
            Column(">ago", lambda row: row["ago_s"], _age),
            Column("function", "function", _text),
            Column("worker", "worker", _text),
            Column("error", "error", _text),
            Column("message", "message", _text),
            Column(">attempt", "attempt", _count),
            Column("host", "host", _text),
            Column(">pid", "pid", str),
        ),
    ),
    View(
        "losses",
        lambda facts: facts["losses"],
        (
            Column(">ago", "ago_s", _age),
            Column("name", "name", _text),
            Column("function", "function", _text),
            Column("how", "exit_code", _end),
            Column("why", "reason", _text),
            Column("last lines", "last_lines", _text),
        ),
    ),
    View(
        "actors",
        lambda facts: facts["actors"],
        (
            Column("name", "name", _text),
            Column("class", "cls", _text),
            Column("state", "state", _text),
            Column("worker", "worker", _text),
            Column(">calls", "calls", _count),
            Column(">per s", "calls_per_s", _count),
            Column(">wait", "waiting", _count),
            Column(">fail", "failed", _count),
            Column(">p99", "p99_s", _took),
            Column(">memory", "rss_bytes", _size),
            Column("why", "reason", _text),
        ),
    ),
    View(
        "programs",
        lambda facts: facts["coordinators"],
        (
            Column("id", lambda row: f"{row['coordinator'] & 0xFFFFFFFF:08x}", _text),
            Column("host", "host", _text),
            Column(">pid", "pid", str),
            Column(">queued", "queued", _count),
            Column(">out", "out", _count),
            Column(">held", "held", _count),
            Column(">submitted", "submitted", _count),
            Column(">finished", "finished", _count),
        ),
    ),
    View(
        "data",
        lambda facts: (facts["data"] or {}).get("jobs", ()),
        (
            Column("job", "job", _text),
            Column(">per s", "elements_per_s", _count),
            Column(">bytes/s", "bytes_per_s", _size),
            Column(">buffered", "buffered", _count),
            Column(">room", "room", _count),
            Column("who waits", lambda row: STALLS[row["waits"]], _text),
            Column(">readers wait", "readers_wait", _share),
            Column(">workers wait", "workers_wait", _share),
            Column(">readers", "clients", _count),
            Column(">tasks", "tasks", _count),
        ),
    ),
    View(
        "variables",
        lambda facts: facts["variables"],
        (
            Column("name", "name", _text),
            Column("server", "server", _text),
            Column(">size", "bytes", _size),
            Column(">updates", "updates", _count),
            Column(">per s", "updates_per_s", _count),
            Column(">waited", "waits_s", _age),
            Column("shape", "shape", _text),
            Column("dtype", "dtype", _text),
        ),
    ),
    View(
        "rpc",
        lambda facts: facts["rpc"],
        (
            Column("method", "method", _text),
            Column("process", "process", _text),
            Column(">calls", "count", _count),
            Column(">failed", "failed", _count),
            Column(">now", "in_flight", _count),
            Column(">mean", "mean_s", _took),
            Column(">p50", "p50_s", _took),
            Column(">p99", "p99_s", _took),
            Column(">max", "max_s", _took),
        ),
    ),
)
"""The views in the order of their keys."""


class Recent:
    """Facts with the last failures and deaths of slots, of which a dispatcher sends each once."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._pid = self.since = 0
        self._failures: list[Facts] = []
        self._deaths: list[Facts] = []

    def take(self, facts: Facts) -> Facts:
        """Return the facts with what earlier ones had. The dispatcher is to be asked for entries
        from `since` on."""
        if facts["pid"] != self._pid or facts["next"] < self.since:  # another dispatcher
            self._failures, self._deaths = [], []
        self._pid, self.since = facts["pid"], facts["next"]
        most = self._entries_max
        self._failures = [*self._failures, *facts["failures"]][-most:]
        self._deaths = [*self._deaths, *facts["slot_deaths"]][-most:]
        deaths = [
            {"name": death["worker"], "reason": "a slot process died", **death}
            for death in self._deaths
        ]
        return {
            **facts,
            "failures": [_with_age(row, facts["at"]) for row in self._failures],
            "losses": sorted(
                [*facts["losses"], *(_with_age(row, facts["at"]) for row in deaths)],
                key=lambda row: float(row["ago_s"]),
            ),
        }


def _with_age(row: Facts, now: float) -> Facts:
    return {"ago_s": max(0.0, now - row["at"]), **row}
