"""The tiers hold what tests/tiers.py says: pure folders exist, and each capability is shown with
real processes and with a kill -9."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiers import CAPABILITIES, FULL, OUTSIDE, PURE, runs_in

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"pytest\.mark\.(processes|killed)\(([^)]*)\)")


def shown() -> dict[str, set[str]]:
    """Which capabilities the tests of the tier `test` show: with "processes", with "killed"."""
    found: dict[str, set[str]] = {"processes": set(), "killed": set()}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if runs_in(path, ROOT, "test"):
            for kind, names in MARK.findall(path.read_text()):
                found[kind].update(re.findall(r'"([^"]*)"', names))
    return found


@pytest.mark.parametrize("kind", ["processes", "killed"])
def test_capabilities_are_shown_in_make_test(kind: str) -> None:
    names = shown()[kind]
    assert sorted(set(CAPABILITIES) - names) == [], (
        f"no test is marked @pytest.mark.{kind}(...) for these"
    )
    assert sorted(names - set(CAPABILITIES)) == [], "tests/tiers.py does not know these"


def test_pure_files_exist() -> None:
    assert [name for name in PURE if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("tests/transport/test_calls_machine.py", {"pure", "test", "all"}),
        ("tests", {"pure", "test", "all"}),
        ("tests/house", {"pure", "test", "all"}),
        ("tests/house/test_pages.py", {"test", "all"}),
        ("tests/transport/test_channel.py", {"test", "all"}),
        (f"tests/sim/{FULL}/test_planted_bugs.py", {"all"}),
        (f"tests/rpc/{FULL}", {"all"}),
        *((f"tests/{outside}", set()) for outside in sorted(OUTSIDE)),
        *((f"tests/{outside}/test_hosts.py", set()) for outside in sorted(OUTSIDE)),
        ("docs/rpc.md", {"test", "all"}),
    ],
)
def test_file_runs_in_its_tiers(name: str, tiers: set[str]) -> None:
    assert {tier for tier in ("pure", "test", "all") if runs_in(ROOT / name, ROOT, tier)} == tiers
