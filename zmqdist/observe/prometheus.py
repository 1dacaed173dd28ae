"""The facts of a dispatcher as metrics for Prometheus: `ClusterCollector` is a custom collector of
prometheus-client (extra `metrics`), which metrics_server.py serves.

Names follow the conventions of Prometheus: base units (seconds, bytes), `_total` for what only
grows. Functions, workers and other things have their metrics by label.

Promises, checked by tests/observe/test_prometheus.py
    M1  a label has at most LABELS_MAX values as long as the exporter runs, whatever names the
        cluster sends. Functions beyond them count together as OTHERS; of other things they are left
        out, and the totals of the cluster still count them
    M2  no two samples of a scrape have the same labels; a value is text without control characters
    M3  the dispatcher is asked at most once each `interval_s`, however many scrape
    M4  without a dispatcher the scrape succeeds, and has only `zmqdist_up 0`
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zmqdist import clock as time
from zmqdist.errors import OpError
from zmqdist.observe.status import printable
from zmqdist.observe.wait_reasons import REASONS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LABELS_MAX: Final = {"function": 200, "worker": 2_000}
"""The most values of a label. Others have LABEL_VALUES_MAX."""

LABEL_VALUES_MAX: Final = 100

OTHERS: Final = "other functions"
"""The label of functions beyond LABELS_MAX, as of those that the dispatcher does not tell apart."""

NO_EVENTS: Final = 2**62
"""A number that no event has, so that the facts come without failures and their tracebacks."""

Facts = Mapping[str, Any]
Labels = tuple[str, ...]


class MetricRow(NamedTuple):
    """A metric: its name without `zmqdist_`, its help, and the key of a row that has its value. A
    name that ends with `_total` is a counter, others are gauges. `scale` makes base units."""

    name: str
    text: str
    key: str
    scale: float = 1.0


CLUSTER: Final = (
    MetricRow("dispatcher_uptime_seconds", "Time since the dispatcher began.", "uptime_s"),
    MetricRow("dispatcher_resident_memory_bytes", "Memory of the dispatcher.", "rss_bytes"),
    MetricRow("work_queued", "Functions in the dispatcher's queues.", "queued"),
    MetricRow("relayed_pieces_total", "Pieces that passed through the dispatcher.", "relayed"),
    MetricRow("refused_handshakes_total", "Connections that were refused.", "refused_handshakes"),
    MetricRow("worker_losses_total", "Workers that were lost.", "losses_count"),
    MetricRow("slot_deaths_total", "Slot processes that died in a function.", "slot_deaths_count"),
)
TOTALS: Final = (
    MetricRow("work_submitted_total", "Functions that programs have submitted.", "submitted"),
    MetricRow("work_done_total", "Functions that have ended with an outcome.", "done"),
    MetricRow("work_failed_total", "Functions and calls of actors that have failed.", "failed"),
    MetricRow("work_cancelled_total", "Functions that were cancelled.", "cancelled"),
    MetricRow("work_lost_starts_total", "Starts that were lost with a process.", "lost_starts"),
    MetricRow("work_retried_total", "Retries of functions that had failed.", "retried"),
)
WORKERS: Final = (
    MetricRow("worker_slots", "Slots of the worker.", "slots"),
    MetricRow("worker_running", "Functions that run at the worker.", "running"),
    MetricRow("worker_leases", "Functions that the worker has, those that run included.", "leases"),
    MetricRow("worker_done_total", "Functions that have ended at the worker.", "done"),
    MetricRow("worker_failed_total", "Functions that have failed at the worker.", "failed"),
    MetricRow("worker_slot_deaths_total", "Slot processes of it that died.", "slot_deaths"),
    MetricRow("worker_silent_seconds", "Time since the last message of the worker.", "idle_s"),
    MetricRow("worker_cpu_cores", "Processors that it uses, with its slots.", "cpu_percent", 0.01),
    MetricRow("worker_resident_memory_bytes", "Memory of it, slots and actors.", "rss_bytes"),
    MetricRow("worker_host_memory_bytes", "Memory of its host.", "host_memory_bytes"),
    MetricRow("worker_host_memory_free_bytes", "Free memory there.", "host_memory_free_bytes"),
    MetricRow("worker_kept_bytes", "Results that it holds.", "kept_bytes"),
    MetricRow("worker_shared_memory_bytes", "Shared memory that it holds.", "shm_bytes"),
    MetricRow("worker_received_bytes_total", "Arguments that have arrived.", "bytes_in"),
    MetricRow("worker_sent_bytes_total", "Results that have left.", "bytes_out"),
    MetricRow("worker_longest_run_seconds", "Age of the oldest run in its slots.", "longest_s"),
)
FUNCTIONS: Final = (
    MetricRow("function_running", "Runs of the function now.", "running"),
    MetricRow("function_queued", "Queued items of the function.", "queued"),
    MetricRow("function_failed_total", "Runs of the function that have failed.", "failed"),
    MetricRow("function_cpu_seconds_total", "Processor time of the function.", "cpu_s"),
    MetricRow("function_received_bytes_total", "Bytes of its arguments.", "bytes_in"),
    MetricRow("function_sent_bytes_total", "Bytes of its results.", "bytes_out"),
)
ACTORS: Final = (
    MetricRow("actors", "Actors by class and state.", "one"),
    MetricRow("actor_calls_per_second", "Calls that actors of the class end.", "calls_per_s"),
    MetricRow("actor_calls_waiting", "Calls that wait for actors of the class.", "waiting"),
    MetricRow("actor_resident_memory_bytes", "Memory of actors of the class.", "rss_bytes"),
)
JOBS: Final = (
    MetricRow("data_elements_per_second", "Elements that the job makes.", "elements_per_s"),
    MetricRow("data_bytes_per_second", "Bytes that the job makes.", "bytes_per_s"),
    MetricRow("data_buffered_elements", "Elements that wait for readers.", "buffered"),
    MetricRow("data_buffer_room_elements", "Elements that may wait for readers.", "room"),
    MetricRow("data_readers_wait_ratio", "Share of time that readers wait.", "readers_wait"),
    MetricRow("data_workers_wait_ratio", "Share of time that workers wait.", "workers_wait"),
    MetricRow("data_readers", "Readers of the job.", "clients"),
    MetricRow("data_tasks", "Tasks of the job that run.", "tasks"),
)
VARIABLES: Final = (
    MetricRow("variables", "Variables of the server.", "one"),
    MetricRow("variable_bytes", "Bytes of its variables.", "bytes"),
    MetricRow("variable_updates_total", "Updates of its variables.", "updates"),
    MetricRow("variable_updates_per_second", "Updates a second.", "updates_per_s"),
    MetricRow("variable_wait_seconds_total", "Time that updates have waited.", "waits_s"),
)

METHODS: Final = (
    MetricRow("rpc_failed_total", "Calls of RPC methods that have failed.", "failed"),
    MetricRow("rpc_in_flight", "Calls that wait or run.", "in_flight"),
)


class ClusterCollector:
    """A collector of prometheus-client that asks a dispatcher when it is scraped; the module's
    docstring has the rules.

    Args:
      call: calls a method of the dispatcher by name, and blocks until it has the result. It may
        raise OpError.
      interval_s: the shortest time between two calls.
    """

    def __init__(self, call: Callable[..., Any], interval_s: float) -> None:
        self._call = call
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._facts: Facts | None = None
        self._took_s = 0.0
        self._values: dict[str, set[str]] = {}

    def describe(self) -> Iterable[Metric]:
        """Return no metric, so that a registry does not scrape at its registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a scrape."""
        # one at a time: the others then have the same facts
        with self._lock:
            if time.monotonic() >= self._due_s:
                begin_s = time.monotonic()
                try:
                    self._facts = self._call("facts", NO_EVENTS)
                except OpError:
                    self._facts = None
                self._took_s = time.monotonic() - begin_s
                self._due_s = time.monotonic() + self._interval_s
            metrics = list(self._metrics(self._facts))
        yield from metrics

    def _metrics(self, facts: Facts | None) -> Iterator[Metric]:
        yield _family("up", "Whether the dispatcher answers.", (), {(): float(facts is not None)})
        if facts is None:
            return
        text = "Time that the dispatcher took to answer."
        yield _family("facts_duration_seconds", text, (), {(): self._took_s})
        workers = [_with_longest(row) for row in facts["workers"]]
        for figures, row in ((CLUSTER, facts), (TOTALS, facts["totals"])):
            yield from self._families(figures, (), [((), row)])
        yield from self._families(WORKERS, ("worker",), self._labelled(workers, worker="name"))
        yield from self._functions(facts["functions"])
        actors = self._labelled(facts["actors"], **{"class": "cls", "state": "state"})
        yield from self._families(ACTORS, ("class", "state"), actors)
        jobs = self._labelled((facts["data"] or {}).get("jobs", ()), job_name="job")
        yield from self._families(JOBS, ("job_name",), jobs)
        servers = self._labelled(facts["variables"], server="server")
        yield from self._families(VARIABLES, ("server",), servers)
        yield from self._methods(facts["rpc"])
        waiting: Counter[Labels] = Counter({(reason,): 0 for reason in REASONS})
        for row in facts["waiting"]:
            waiting[row["reason"] if row["reason"] in REASONS else "other",] += row["count"]
        yield _family("work_waiting", "Waiting functions by reason.", ("reason",), waiting)
        states: Counter[Labels] = Counter((printable(row["state"]),) for row in workers)
        yield _family("workers", "Workers by state.", ("state",), states)
        if facts["scaling"] is not None:
            count = facts["scaling"]["wanted"]
            yield _family("workers_wanted", "Workers that the launcher wants.", (), {(): count})

    def _functions(self, rows: Iterable[Facts]) -> Iterator[Metric]:
        labelled = [((self._label("function", row["name"]) or OTHERS,), row) for row in rows]
        yield from self._families(FUNCTIONS, ("function",), labelled)
        yield _summary("function_duration_seconds", "Runs.", ("function",), labelled)

    def _methods(self, rows: Iterable[Facts]) -> Iterator[Metric]:
        names = {"process": "process", "method": "method"}
        labelled = list(self._labelled(rows, **names))
        yield from self._families(METHODS, tuple(names), labelled)
        yield _summary("rpc_duration_seconds", "Calls of RPC methods.", tuple(names), labelled)

    def _families(
        self, figures: Iterable[MetricRow], names: Labels, rows: Iterable[tuple[Labels, Facts]]
    ) -> Iterator[Metric]:
        rows = list(rows)
        for figure in figures:
            values: defaultdict[Labels, float] = defaultdict(float)
            for labels, row in rows:
                values[labels] += (
                    1 if figure.key == "one" else (row.get(figure.key) or 0) * figure.scale
                )
            yield _family(figure.name, figure.text, names, values)

    def _labelled(self, rows: Iterable[Facts], **keys: str) -> Iterator[tuple[Labels, Facts]]:
        """Yield the rows whose labels are among those that have room, with their labels."""
        for row in rows:
            labels = [self._label(name, row[key]) for name, key in keys.items()]
            if None not in labels:
                yield tuple(filter(None, labels)), row

    def _label(self, name: str, text: str) -> str | None:
        """Return a text as the value of a label, or None if the label has too many values."""
        values, value = self._values.setdefault(name, set()), printable(str(text)) or "-"
        if value not in values:
            if len(values) >= LABELS_MAX.get(name, LABEL_VALUES_MAX):
                return None
            values.add(value)
        return value


def _with_longest(worker: Facts) -> Facts:
    ages = [slot["since_s"] for slot in worker["slots_now"] if slot["state"] != "idle"]
    return {**worker, "longest_s": max(ages, default=0.0)}


def _family(name: str, text: str, labels: Labels, values: Mapping[Labels, float]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = make(f"zmqdist_{name}", text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _summary(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, Facts]]) -> Metric:
    """Return durations as a summary, with quantiles that the cluster has computed."""
    from prometheus_client.core import SummaryMetricFamily

    counts: Counter[Labels] = Counter()
    sums: defaultdict[Labels, float] = defaultdict(float)
    quantiles: dict[tuple[Labels, str], float] = {}
    for values, row in rows:
        counts[values] += row["count"]
        sums[values] += row["count"] * row["mean_s"]
        for quantile, key in (("0.5", "p50_s"), ("0.99", "p99_s"), ("1", "max_s")):
            if key in row:
                # of functions that count together the slowest: durations cannot be merged
                slowest = max(row[key], quantiles.get((values, quantile), 0.0))
                quantiles[values, quantile] = slowest
    family = SummaryMetricFamily(f"zmqdist_{name}", text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count, sums[values])
    for (values, quantile), seconds in quantiles.items():
        names = {**dict(zip(labels, values, strict=True)), "quantile": quantile}
        family.add_sample(family.name, names, seconds)
    return family
