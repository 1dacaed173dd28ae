"""Progress bars, and the names of tf.data.experimental."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

import zmqdist as zd
from zmqdist.data import Dataset, experimental


def test_a_progress_bar_gives_the_elements_and_knows_the_end() -> None:
    pytest.importorskip("tqdm")
    out = io.StringIO()
    assert [int(x) for x in zd.data.progress(Dataset.range(3), "reading", file=out)] == [0, 1, 2]
    assert "reading: 100%" in out.getvalue()
    assert "3/3" in out.getvalue()


@pytest.mark.parametrize("dataset", [Dataset.range(3).filter(lambda x: x >= 0), Dataset.range(3).repeat().take(3)])
def test_a_progress_bar_over_what_has_no_known_end_counts(dataset: Dataset) -> None:
    pytest.importorskip("tqdm")
    out = io.StringIO()
    assert len(list(zd.data.progress(dataset, file=out))) == 3
    assert "3" in out.getvalue()


def test_without_tqdm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "zmqdist\[progress\]"'):
        zd.data.progress(Dataset.range(3))


def test_the_names_of_experimental_are_those_of_data() -> None:
    assert experimental.SHARD_HINT == -1
    assert experimental.AUTOTUNE == zd.data.AUTOTUNE == -1
    assert experimental.INFINITE_CARDINALITY == -1
    assert experimental.UNKNOWN_CARDINALITY == -2
    service: Any = experimental.service
    for name in service.__all__:
        assert getattr(service, name) is getattr(zd.data.service, name)
    assert set(service.__all__) <= set(dir(service))


def test_a_name_that_experimental_does_not_have() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        experimental.nothing_such  # noqa: B018
