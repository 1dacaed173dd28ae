"""What a notebook shows of an object: a small table of text, without a script and without an
error."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.html_repr import ROWS_MAX, TEXT_CHARS_MAX, HtmlRows, html_repr

HOSTILE = "</td><script>alert(1)</script>\x1b[31m&"


class Shown:
    def __init__(self, *rows: tuple[str, object]) -> None:
        self.rows = rows

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        return self.rows


class Parser(HTMLParser):
    """Collects the tags and the text of a table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data}|"


def test_hostile_names_are_text() -> None:
    shown = Parser(Shown((HOSTILE, HOSTILE))._repr_html_())
    assert shown.tags == {"table", "thead", "tr", "th", "td"}
    assert "<script>alert(1)</script>?[31m&" in shown.text


@pytest.mark.parametrize("text", ["javascript:alert(1)", "http://a/\n", "ftp://a"])
def test_web_addresses_alone_are_links(text: str) -> None:
    assert "a" not in Parser(Shown(("", text))._repr_html_()).tags
    html = Shown(("", "http://127.0.0.1:1/'><b>"))._repr_html_()
    assert "<a href='http://127.0.0.1:1/&#x27;&gt;&lt;b&gt;' rel='noreferrer'>" in html


def test_table_is_small() -> None:
    html = Shown(*((f"row {number}", "x" * 9_999) for number in range(1_000)))._repr_html_()
    assert len(html) < ROWS_MAX * (TEXT_CHARS_MAX + 100) + 300
    assert "and 980 more" in html


def test_half_made_object_shows_repr() -> None:
    half = object.__new__(Shown)
    assert re.fullmatch("<pre>&lt;.*&gt;</pre>", half._repr_html_())


def rows_of(value: object) -> str:
    return Parser(value._repr_html_()).text  # type: ignore[attr-defined]


def test_objects_of_program_show_themselves() -> None:
    dataset = zd.data.Dataset.range(3).batch(2)
    assert rows_of(dataset).startswith("Dataset|batch(size=2): 2 elements")
    variable = zd.Variable(np.zeros((1000, 10)), name="<w>")
    assert "Variable|name|<w>|shape|(1000, 10)|dtype|float64|MB|0.080|" in rows_of(variable)
    with zd.local_cluster(workers=1, ps=2, processes=False) as cluster:
        assert rows_of(cluster) == (
            f"local_cluster|dispatcher|{cluster.target}|workers|1|parameter servers|2|"
        )
        with zd.ParameterServerStrategy(cluster) as strategy, strategy.scope():
            assert "ParameterServerStrategy|dispatcher|" in rows_of(strategy)
            shards = zd.Variable(np.zeros((9, 2)), name="s")
            assert "on|ps:0" in rows_of(shards)
        with cluster.coordinator() as coordinator:
            assert coordinator.submit(abs, -1).result() == 1
            assert "scheduled|1|unfinished|0|" in rows_of(coordinator)
            counter = coordinator.actor(set)
            assert rows_of(counter).startswith("ActorHandle|class|set|state|pending|methods|add")
        with zd.connect(cluster.target) as connection:
            assert rows_of(connection) == f"Cluster|dispatcher|{cluster.target}|"
    assert rows_of(cluster) == "local_cluster|state|closed|"
