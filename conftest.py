"""What every test needs: the options of tests/sim, a state folder of its own, the code blocks of README.md and docs/ as tests.

pytest --seeds 5000     runs each test that takes a `seed` with seeds 0 to 4999 (200 without the option)
pytest --seed 1234      runs it with seed 1234 only: a simulation that failed is replayed exactly
"""

from __future__ import annotations

import os
import tempfile

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_plugins = ["pytester"]  # tests/house tries the checks themselves

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=200, metavar="N", help="seeds per simulated test (default 200)")
    group.addoption("--seed", type=int, default=None, metavar="N", help="this seed only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument named `seed`, and no values of its own for it, runs once for each seed."""
    own = any("seed" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "seed" in metafunc.fixturenames and not own:
        only = metafunc.config.getoption("--seed")
        seeds = range(metafunc.config.getoption("--seeds")) if only is None else [only]
        metafunc.parametrize("seed", seeds)


def pytest_configure(config: pytest.Config) -> None:
    """No test may meet the user's token, keys or cluster: not those that start processes, either."""
    for name in [name for name in os.environ if name.startswith("ZMQDIST_") or name == "TF_CONFIG"]:
        del os.environ[name]
    state = tempfile.TemporaryDirectory(prefix="zmqdist-tests-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
