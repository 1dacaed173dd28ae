"""The status of a dispatcher as tables of text, for `zmqdist status`, `zmqdist top` and the tests.

Rule: the result of each function depends only on the record, which is the dictionary that the
dispatcher's RPC method `facts` returns. No function sends a request, prints, or adds colours.
Names, hosts and reasons are texts of other processes. The functions therefore replace unprintable
characters in these texts, and shorten long texts.

docs/facts.md has the keys of the record. All durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zmqdist.data.service.dispatcher.machine.records import MODES
from zmqdist.errors import UnknownError, describe_exit
from zmqdist.observe.wait_reasons import sentence

TEXT_CHARS_MAX: Final = 100
"""The most characters that one cell of a table shows of another process's text."""

WHY_CHARS_MAX: Final = 300
"""The most characters of a sentence that says why work waits."""

ROWS_SHOWN_MAX: Final = 20
"""The most rows of functions, slots, failures and reasons that a table shows."""

LOSSES_SHOWN_MAX: Final = 10
"""The most lost workers that a table shows. The headline has the number of all lost workers."""

STALLS: Final = {"producer": "workers wait", "consumer": "readers wait", "": ""}
"""What is shown of `waits` of a data job."""

Status = Mapping[str, Any]
Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows of text under a title.

    Attributes:
      title: the subject of the rows.
      columns: the names of the columns. If a name begins with ">", the texts of the column are
        aligned to the right.
      rows: the rows. A row has one text for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def lines(self) -> list[str]:
        """Return the title, a line with the names of the columns, and a line for each row. The
        columns are aligned."""
        names = [name.removeprefix(">") for name in self.columns]
        grid = [names, *map(list, self.rows)]
        widths = [max(len(row[at]) for row in grid) for at in range(len(names))]
        right = [name.startswith(">") for name in self.columns]
        text_lines = [self.title]
        for row in grid:
            cells = [
                text.rjust(width) if to_right else text.ljust(width)
                for text, width, to_right in zip(row, widths, right, strict=True)
            ]
            text_lines.append(("  " + "  ".join(cells)).rstrip())
        return text_lines


def checked(status: Any) -> Status:
    """Return a record that every function of this module accepts. Raises UnknownError if it is
    none, for example of another version."""
    try:
        lines(status)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnknownError(
            f"the dispatcher's status cannot be read ({error!r}): install the same "
            f"zmqdist on both ends"
        ) from None
    return status  # type: ignore[no-any-return]


def headline(status: Status) -> str:
    """Return a summary of the record in one line."""
    rows = status["workers"]
    parts = [
        (
            f"dispatcher at {printable(status['address'])} (pid {status['pid']}): "
            f"{plural(len(rows), 'worker')}"
        ),
        plural(sum(row["slots"] for row in rows), "slot"),
        f"{status['queued']:,} queued",
        f"{sum(map(_waiting, rows)):,} given out",
        f"{sum(row['running'] for row in rows):,} running",
        f"{sum(row['done'] for row in rows):,} done",
        f"{sum(map(_rate, rows)):,.0f}/s",
    ]
    if status["losses_count"]:
        parts.append(plural(status["losses_count"], "loss", "losses"))
    return ", ".join(parts)


def size(status: Status) -> list[str]:
    """Return a line about the number of workers that the launcher wants, or no line if no launcher
    has started the cluster."""
    scaling = status.get("scaling")
    if scaling is None:
        return []
    parts = [f"{scaling['wanted']} wanted"]
    if scaling["min"] is not None:
        parts.append(
            f"min {scaling['min']}, max {scaling['max']}, idle after {duration(scaling['idle_s'])}"
        )
    for state in ("starting", "leaving", "failed"):
        if scaling[state]:
            parts.append(f"{state}: {', '.join(map(printable, scaling[state][:LOSSES_SHOWN_MAX]))}")
    return [f"workers: {'; '.join(parts)}"]


def tables(status: Status) -> list[Table]:
    """Return those tables of a record that have rows: workers, what their slots run, functions, why
    work waits, resources, coordinators, actors, waiting requests for resources, jobs of the data
    service, variables, RPC methods, failures, lost slots and lost workers."""
    candidates = (
        workers(status),
        slots(status),
        functions(status),
        waiting(status),
        resources(status),
        coordinators(status),
        actors(status),
        demands(status),
        jobs(status),
        variables(status),
        methods(status),
        failures(status),
        slot_losses(status),
        losses(status),
    )
    return [table for table in candidates if table.rows]


def lines(status: Status) -> list[str]:
    """Return the whole record as lines of plain text."""
    text_lines = [headline(status), *size(status), *troubles(status)]
    if not status["workers"]:
        text_lines.append(
            f"no worker has registered: zmqdist worker --dispatcher {printable(status['address'])}"
        )
    for table in tables(status):
        text_lines += ["", *table.lines()]
    return text_lines


def jobs(status: Status) -> Table:
    """Return a table with a row for each running iteration of the data service.

    `left` is the number of positions of the sources that no task has been given yet; empty in the
    modes that give out no positions.
    """
    data = status.get("data") or {"jobs": [], "workers_enough": None}
    enough = data["workers_enough"]
    title = (
        "data jobs" if enough is None else f"data jobs ({plural(enough, 'worker')} would be enough)"
    )
    return Table(
        title,
        (
            "job",
            "mode",
            ">iteration",
            ">tasks",
            ">readers",
            ">elements/s",
            ">MB/s",
            ">buffered",
            "who waits",
            ">left",
        ),
        tuple(
            (
                printable(row["job"]),
                MODES[row["mode"]] if row["mode"] < len(MODES) else str(row["mode"]),
                str(row["iteration"]),
                f"{row['tasks']}/{row['tasks_count']}",
                str(row["clients"]),
                f"{row['elements_per_s']:,.0f}",
                f"{row['bytes_per_s'] / 1e6:,.1f}",
                f"{row['buffered'] / row['room']:.0%}" if row["room"] else "",
                STALLS[row["waits"]],
                ", ".join(
                    "endless" if left is None else f"{left:,}" for left in row["positions_left"]
                ),
            )
            for row in data["jobs"]
        ),
    )


def workers(status: Status) -> Table:
    """Return a table with a row for each worker.

    `threads` is the number of threads of BLAS and OpenMP in each slot. `waiting` is the number of
    functions that the worker has and has not begun. `heard` is the time since the last message from
    the worker arrived.
    """
    return Table(
        "workers",
        (
            "name",
            "state",
            ">slots",
            ">threads",
            ">running",
            ">waiting",
            ">done",
            ">per s",
            ">failed",
            ">memory",
            ">CPU",
            ">heard",
            "host",
            ">pid",
        ),
        tuple(
            (
                printable(row["name"]),
                row["state"],
                str(row["slots"]),
                str(row["threads_per_slot"] or ""),
                f"{row['running']:,}",
                f"{_waiting(row):,}",
                f"{row['done']:,}",
                f"{_rate(row):,.0f}",
                f"{row.get('failed', 0):,}",
                size_of(row.get("rss_bytes", 0)),
                f"{row.get('cpu_percent', 0.0):.0f} %",
                f"{duration(row['idle_s'])} ago",
                printable(row["host"]),
                str(row["pid"]),
            )
            for row in status["workers"]
        ),
    )


def slots(status: Status) -> Table:
    """Return a table with a row for each function that runs, the longest first."""
    rows = [
        (row["name"], slot)
        for row in status["workers"]
        for slot in row.get("slots_now", ())
        if slot["function"]
    ]
    rows.sort(key=lambda row: -row[1]["since_s"])
    return Table(
        f"running ({_shown(rows)})",
        ("worker", ">slot", ">pid", "function", ">work", ">since", ">memory", ">CPU"),
        tuple(
            (
                printable(worker),
                str(slot["slot"]),
                str(slot["pid"]),
                printable(slot["function"]),
                str(slot["work"]),
                duration(slot["since_s"]),
                size_of(slot["rss_bytes"]),
                f"{slot['cpu_percent']:.0f} %",
            )
            for worker, slot in rows[:ROWS_SHOWN_MAX]
        ),
    )


def functions(status: Status) -> Table:
    """Return a table with a row for each function, those that took the most time first."""
    rows = status.get("functions", ())
    return Table(
        f"functions ({_shown(rows)})",
        (
            "name",
            ">ended",
            ">failed",
            ">running",
            ">queued",
            ">mean",
            ">p50",
            ">p99",
            ">CPU",
            ">in",
            ">out",
        ),
        tuple(
            (
                printable(row["name"]),
                *(f"{row[name]:,}" for name in ("count", "failed", "running", "queued")),
                *(time_of(row[name]) for name in ("mean_s", "p50_s", "p99_s")),
                duration(row["cpu_s"]),
                size_of(row["bytes_in"]),
                size_of(row["bytes_out"]),
            )
            for row in rows[:ROWS_SHOWN_MAX]
        ),
    )


def waiting(status: Status) -> Table:
    """Return a table with a row for each reason why work waits."""
    rows = status.get("waiting", ())
    return Table(
        f"waiting ({_shown(rows)})",
        ("coordinator", ">count", "why"),
        tuple(
            (
                f"{row['coordinator'] & 0xFFFFFFFF:08x}",
                f"{row['count']:,}",
                printable(sentence(row), WHY_CHARS_MAX),
            )
            for row in rows[:ROWS_SHOWN_MAX]
        ),
    )


def failures(status: Status) -> Table:
    """Return a table with a row for each of the last failures, the latest first."""
    rows = [*status.get("failures", ())][::-1]
    return Table(
        f"failures ({_shown(rows)})",
        ("function", "when", "worker", ">pid", ">work", "error"),
        tuple(
            (
                printable(row["function"]),
                f"{duration(status['at'] - row['at'])} ago",
                printable(row["worker"]),
                str(row["pid"] or ""),
                str(row["work"]),
                printable(f"{row['error']}: {row['message']}"),
            )
            for row in rows[:ROWS_SHOWN_MAX]
        ),
    )


def slot_losses(status: Status) -> Table:
    """Return a table with a row for each of the last slot processes that have died, the latest
    first."""
    rows = [*status.get("slot_deaths", ())][::-1]
    return Table(
        f"slot processes that died ({_shown(rows)})",
        ("worker", "when", ">pid", "function", "how", "it last wrote"),
        tuple(
            (
                printable(row["worker"]),
                f"{duration(status['at'] - row['at'])} ago",
                str(row["pid"] or ""),
                printable(row["function"]),
                "-" if row["exit_code"] is None else describe_exit(row["exit_code"]),
                printable(row["last_lines"].strip().rpartition("\n")[2]),
            )
            for row in rows[:ROWS_SHOWN_MAX]
        ),
    )


def coordinators(status: Status) -> Table:
    """Return a table with a row for each coordinator.

    `out` is the number of the coordinator's functions that workers have. `held` is the number of
    results that workers hold for the coordinator.
    """
    return Table(
        "coordinators",
        ("id", ">queued", ">out", ">held", ">submitted", ">finished", ">functions"),
        tuple(
            (
                f"{row['coordinator'] & 0xFFFFFFFF:08x}",
                *(
                    f"{row[name]:,}"
                    for name in ("queued", "out", "held", "submitted", "finished", "functions")
                ),
            )
            for row in status["coordinators"]
        ),
    )


def actors(status: Status) -> Table:
    """Return a table with a row for each actor.

    `restarts` is how often it has begun again, of how often it may. `why` says why it waits, is
    away, or has begun again.
    """
    most = sum(row.get("actors_max", 0) for row in status["workers"])
    rows = status.get("actors", ())
    return Table(
        f"actors ({len(rows):,}; the workers may have {most:,})",
        (
            "name",
            "class",
            "state",
            "worker",
            ">calls",
            ">failed",
            ">waiting",
            ">p50",
            ">p99",
            ">memory",
            ">restarts",
            "why",
        ),
        tuple(
            (
                printable(row["name"]) or f"{row['actor'] & 0xFFFFFFFF:08x}",
                printable(row["cls"]),
                row["state"],
                printable(row["worker"]),
                *(f"{row.get(name, 0):,}" for name in ("calls", "failed", "waiting")),
                *(time_of(row.get(name, 0.0)) for name in ("p50_s", "p99_s")),
                size_of(row.get("rss_bytes", 0)),
                f"{row['restarts'] - row['restarts_left']:,}/{row['restarts']:,}",
                printable(row["reason"]),
            )
            for row in rows
        ),
    )


def variables(status: Status) -> Table:
    """Return a table with a row for each variable of parameter servers, the largest first. `waited`
    is the time that updates have waited for each other."""
    rows = status.get("variables", ())
    return Table(
        f"variables ({_shown(rows)})",
        ("name", "server", ">size", ">updates", ">per s", ">waited", "shape", "dtype"),
        tuple(
            (
                printable(row["name"]),
                printable(row["server"]),
                size_of(row["bytes"]),
                f"{row['updates']:,}",
                f"{row['updates_per_s']:,.0f}",
                duration(row["waits_s"]),
                printable(str(row["shape"])),
                printable(row["dtype"]),
            )
            for row in rows[:ROWS_SHOWN_MAX]
        ),
    )


def methods(status: Status) -> Table:
    """Return a table with a row for each RPC method of programs and tasks that was called, the most
    time first."""
    rows = [row for row in status.get("rpc", ()) if not row["method"].startswith("zmqdist.")]
    return Table(
        f"RPC methods ({_shown(rows)})",
        ("method", "process", ">calls", ">failed", ">now", ">mean", ">p50", ">p99"),
        tuple(
            (
                printable(row["method"]),
                printable(row["process"]),
                *(f"{row[name]:,}" for name in ("count", "failed", "in_flight")),
                *(time_of(row[name]) for name in ("mean_s", "p50_s", "p99_s")),
            )
            for row in rows[:ROWS_SHOWN_MAX]
        ),
    )


def resources(status: Status) -> Table:
    """Return a table with a row for each worker that has resources: what is in use of what."""
    return Table(
        "resources in use",
        ("name", "in use"),
        tuple(
            (
                printable(row["name"]),
                printable(
                    ", ".join(
                        f"{name} {used:g} of {total:g}"
                        for name, (used, total) in row["resources"].items()
                    )
                ),
            )
            for row in status["workers"]
            if row.get("resources")
        ),
    )


def demands(status: Status) -> Table:
    """Return a table with a row for each request for resources for which functions wait."""
    return Table(
        "functions that wait for resources",
        (">waiting", "each needs", "pinned to", "why"),
        tuple(
            (
                f"{row['waiting']:,}",
                printable(row["request"]),
                printable(row["worker"]),
                printable(row["why"]),
            )
            for row in status.get("demands", ())
        ),
    )


def losses(status: Status) -> Table:
    """Return a table with a row for each of the workers that were lost last, with the latest loss
    first."""
    latest = sorted(status["losses"], key=lambda row: row["ago_s"])[:LOSSES_SHOWN_MAX]
    return Table(
        f"lost workers (last {len(latest)} of {status['losses_count']})",
        ("name", "when", "how", "why"),
        tuple(
            (
                printable(row["name"]),
                f"{duration(row['ago_s'])} ago",
                "-" if row["exit_code"] is None else describe_exit(row["exit_code"]),
                printable(row["reason"]),
            )
            for row in latest
        ),
    )


def troubles(status: Status) -> list[str]:
    """Return a line for each kind of failure in the record: crashed slots, relayed payloads,
    refused connections, dropped messages."""
    notes = []
    if status.get("slot_deaths_count"):
        notes.append(slot_deaths(status))
    if status.get("relayed"):
        pieces = plural(status["relayed"], "piece")
        notes.append(
            f"{pieces} of large payloads passed through the dispatcher, because a data port could "
            f"not be reached"
        )
    if status["refused_handshakes"]:
        notes.append(
            f"{status['refused_handshakes']:,} connections refused: a wrong token or key, or no "
            f"zmqdist"
        )
    dropped = {printable(str(kind)): count for kind, count in status["dropped"].items() if count}
    if dropped:
        notes.append(
            "messages dropped: "
            + ", ".join(f"{kind} {count:,}" for kind, count in sorted(dropped.items()))
        )
    return notes


def slot_deaths(status: Status) -> str:
    """Return a line with the number of crashed slot processes of each worker, and how the last of
    these processes ended."""
    last = status["last_slot_death"]
    how = "its end was not seen" if last["exit_code"] is None else describe_exit(last["exit_code"])
    by_worker = [
        f"{printable(row['name'])} {row['slot_deaths']:,}"
        for row in status["workers"]
        if row["slot_deaths"]
    ]
    here = f" ({', '.join(by_worker[:LOSSES_SHOWN_MAX])})" if by_worker else ""
    died = plural(status["slot_deaths_count"], "slot process", "slot processes")
    latest = f"the last {duration(last['ago_s'])} ago at {printable(last['name'])}, {how}"
    return f"{died} died while running a function{here}: {latest}"


def duration(seconds: float) -> str:
    """Return a time span in one unit: "0.3 s", "12 s", "5 min", "3 h", "2 d"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def time_of(seconds: float) -> str:
    """Return a short time span with three digits: "12.3 us", "4.56 ms", or as `duration`."""
    if seconds >= 1.0 or seconds <= 0.0:
        return duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def size_of(count: int) -> str:
    """Return a number of bytes in one unit: "", "512 B", "4 kB", "38 MB", "1.2 GB"."""
    if not count:
        return ""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} GB"
            )
    return f"{count} B"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Return a count with its noun: "1 worker", "2,000 workers"."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


def printable(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Return a text of another process with unprintable characters replaced, shortened to
    `chars_max`."""
    shown = "".join(char if char.isprintable() else "?" for char in text[: chars_max + 1])
    return shown if len(shown) <= chars_max else shown[: chars_max - 3] + "..."


def _shown(rows: Sequence[Any]) -> str:
    """Return how many rows there are, and how many of them a table shows."""
    more = f"; {ROWS_SHOWN_MAX} are shown" if len(rows) > ROWS_SHOWN_MAX else ""
    return f"{len(rows):,}{more}"


def _waiting(worker: Mapping[str, Any]) -> int:
    return int(worker["leases"] - worker["running"])


def _rate(worker: Mapping[str, Any]) -> float:
    """Return how many functions per second a worker finishes. This is 0 for a worker without work:
    the dispatcher updates the rate only while the worker has work.
    """
    return float(worker["rate"]) if worker["leases"] else 0.0
