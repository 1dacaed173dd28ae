"""The facts as metrics: names by Prometheus' conventions, bounded labels, and a scrape that works
without a dispatcher."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.observe.dashboard.made_up import NASTY, MadeUp
from zmqdist.errors import UnavailableError
from zmqdist.observe.prometheus import OTHERS, ClusterCollector
from zmqdist.observe.wait_reasons import REASONS

BOARD = Path(__file__).parents[2] / "deploy/grafana.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(collector: ClusterCollector) -> Samples:
    """The samples of a scrape by name and labels, as a parser reads them."""
    registry = CollectorRegistry()
    registry.register(collector)
    samples: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, "two samples with the same labels"
            samples[key] = sample.value
    return samples


class Record:
    """A dispatcher that answers with one record."""

    def __init__(self, **changes: Any) -> None:
        self.record = {**MadeUp().facts(), **changes}
        self.calls = 0
        self.is_away = False

    def call(self, method: str, since: int) -> Any:
        self.calls += 1
        if self.is_away:
            raise UnavailableError("away")
        return self.record


def test_figures_have_base_units_and_labels() -> None:
    record = Record(scaling={"wanted": 5})
    samples = scrape(ClusterCollector(record.call, 1.0))
    row = record.record["functions"][0]
    named = (("function", row["name"]),)
    assert samples["zmqdist_up", ()] == 1
    assert samples["zmqdist_work_submitted_total", ()] == record.record["totals"]["submitted"]
    assert samples["zmqdist_function_duration_seconds_count", named] == row["count"]
    assert samples[
        "zmqdist_function_duration_seconds", (*named, ("quantile", "0.99"))
    ] == pytest.approx(row["p99_s"])
    assert samples["zmqdist_worker_cpu_cores", (("worker", "worker:2"),)] == pytest.approx(1.58)
    assert samples["zmqdist_worker_longest_run_seconds", (("worker", "worker:1"),)] == 754.0
    assert samples["zmqdist_work_waiting", (("reason", "resources"),)] == 12
    assert samples["zmqdist_actors", (("class", "Counter"), ("state", "alive"))] == 3
    assert samples["zmqdist_variable_bytes", (("server", "ps:0"),)] == 25_600_000
    assert samples["zmqdist_workers_wanted", ()] == 5


def test_reasons_without_work_have_a_series() -> None:
    samples = scrape(ClusterCollector(Record(waiting=[]).call, 1.0))
    shown = {dict(labels)["reason"] for name, labels in samples if name == "zmqdist_work_waiting"}
    assert shown == set(REASONS)


def test_names_from_elsewhere_make_no_endless_series() -> None:
    record = Record()
    collector = ClusterCollector(record.call, 0.0)
    function, worker = record.record["functions"][0], record.record["workers"][0]
    job = record.record["data"]["jobs"][0]
    for batch in range(4):
        record.record["functions"] = [
            {**function, "name": f"f{batch}_{number}", "count": 1} for number in range(100)
        ]
        record.record["workers"] = [
            {**worker, "name": f"w{batch}_{number}"} for number in range(1_000)
        ]
        record.record["data"]["jobs"] = [
            {**job, "job": f"j{batch}_{number}"} for number in range(100)
        ]
        samples = scrape(collector)
    assert samples["zmqdist_function_duration_seconds_count", (("function", OTHERS),)] == 100
    assert samples["zmqdist_workers", (("state", "alive"),)] == 1_000
    # the first two batches of workers, and the first of jobs, have all the room
    assert not [labels for _, labels in samples if {"worker", "job_name"} & {*dict(labels)}]


def test_hostile_names_are_one_line_of_text() -> None:
    record = Record()
    rows = record.record["functions"]
    for row, name in zip(rows, (NASTY, 'a"} 1\n\x00', "a\n", "a\r", "\ud800"), strict=True):
        row["name"] = name
    samples = scrape(ClusterCollector(record.call, 0.0))
    names = {dict(labels).get("function", "") for _, labels in samples}
    assert {"a?", 'a"} 1??', "?"} <= names
    assert all(name.isprintable() for name in names)
    both = rows[2]["count"] + rows[3]["count"]
    assert samples["zmqdist_function_duration_seconds_count", (("function", "a?"),)] == both


def test_dispatcher_that_is_away_is_a_figure() -> None:
    record = Record()
    record.is_away = True
    collector = ClusterCollector(record.call, 0.0)
    assert scrape(collector) == {("zmqdist_up", ()): 0.0}
    record.is_away = False
    assert scrape(collector)["zmqdist_up", ()] == 1


def test_scrapes_of_an_interval_share_one_call() -> None:
    record = Record()
    collector = ClusterCollector(record.call, 3600.0)
    assert scrape(collector) == scrape(collector)
    assert record.calls == 1


def test_board_names_exported_metrics() -> None:
    exported = {name for name, _ in scrape(ClusterCollector(Record(scaling={"wanted": 1}).call, 1))}
    board = json.loads(BOARD.read_text())
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    ]
    used = {name for text in expressions for name in re.findall(r"zmqdist_\w+", text)}
    assert len(expressions) > 15
    assert used - exported == set()


def test_panels_of_board_do_not_overlap() -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
