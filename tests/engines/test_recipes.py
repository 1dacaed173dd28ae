"""Each page of docs/integrations runs as it stands, and prints what it says.

Needs the packages of the page: pip install zmqdist[engines].
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sybil import Sybil

from tests.printed_output import code_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "joblib": ("joblib", "sklearn", "threadpoolctl"),
    "dask": ("dask.array",),
    "torch": ("torch",),
    "tensors": ("torch", "polars", "pyarrow"),
    "scipy": ("scipy", "emcee", "optuna", "tqdm"),
}


@pytest.mark.parametrize("page", PAGES)
def test_page_prints_what_it_says(page: str) -> None:
    for package in PAGES[page]:
        pytest.importorskip(package, reason="needs pip install zmqdist[engines]")
    path = ROOT / f"docs/integrations/{page}.md"
    for example in Sybil(parsers=[code_blocks()]).parse(path).examples():
        example.evaluate()


def test_pages_are_all_run() -> None:
    assert {path.stem for path in (ROOT / "docs/integrations").glob("*.md")} == {*PAGES}
