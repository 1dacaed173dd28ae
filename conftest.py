"""What every test needs: the tiers, the options of tests/sim, a state folder of its own, the code
blocks of README.md and docs/ as tests.

pytest --tier all           runs everything; pure: what needs no socket and no process; the default is `test` (tests/tiers.py)
pytest --seeds 5000         runs each test that takes a `seed` with 5,000 seeds (without the option 60, and 200 in the tier `all`)
pytest --first-seed 1000    begins with seed 1000; without it with 0, in the tier `all` with one that no run had before: see the header
pytest --seed 1234          runs it with seed 1234 only: a simulation that failed is replayed exactly

One item runs a block of seeds, because an item costs more than most seeds do. Its failure names the
seed.
"""

from __future__ import annotations

import inspect
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import SkipParser

from tests import tiers
from tests.printed_output import code_blocks

pytest_plugins = ["pytester"]  # tests/house tries the checks themselves

SEEDS, SEEDS_OF_TIER_ALL = 60, 200
SEEDS_OF_AN_ITEM = 20

pytest_collect_file = Sybil(
    parsers=[code_blocks(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/internals/*.md"],
).pytest()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--tier", choices=tiers.TIERS, default="test", help="which tests to run (default test)"
    )
    group = parser.getgroup("simulation")
    group.addoption(
        "--seeds",
        type=int,
        default=None,
        metavar="N",
        help="seeds per simulated test (default 60, tier all: 200)",
    )
    group.addoption(
        "--first-seed",
        type=int,
        default=None,
        metavar="N",
        help="the first of them (default 0, tier all: a new one)",
    )
    group.addoption("--seed", type=int, default=None, metavar="N", help="this seed only")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """pytest does not ask about a file that the command line names; a folder that stands in no such
    tier, and that it names, is let in."""
    root = config.rootpath
    if not collection_path.is_relative_to(root) or tiers.runs_in(
        collection_path, root, config.getoption("--tier")
    ):
        return None  # other rules may still leave it out
    named = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    let_in = [arg for arg in named if {tiers.FULL, *tiers.OUTSIDE} & set(arg.parts)]
    return None if any(collection_path.is_relative_to(arg) for arg in let_in) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order that `--no-loadscope-reorder` keeps: pytest-xdist's own, by the number of tests,
    begins the longest files last."""
    ranks = {path: tiers.rank(path, config.rootpath) for path in {item.path for item in items}}
    items.sort(key=lambda item: ranks[item.path])


def _seeds(config: pytest.Config) -> range:
    only, first, count = (config.getoption(name) for name in ("--seed", "--first-seed", "--seeds"))
    if count is None:
        count = SEEDS_OF_TIER_ALL if config.getoption("--tier") == "all" else SEEDS
    first = first or 0
    return range(first, first + count) if only is None else range(only, only + 1)


def pytest_report_header(config: pytest.Config) -> str:
    seeds = _seeds(config)
    return f"seeds of simulated tests: {seeds.start} to {seeds.stop - 1} (--first-seed {seeds.start} --seeds {len(seeds)})"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument named `seed`, and no values of its own for it, runs for each seed, a
    block of them in one item."""
    own = any("seed" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "seed" in metafunc.fixturenames and not own:
        seeds = _seeds(metafunc.config)
        blocks = [
            seeds[at : at + SEEDS_OF_AN_ITEM] for at in range(0, len(seeds), SEEDS_OF_AN_ITEM)
        ]
        metafunc.parametrize(
            "seed", blocks, ids=[f"seeds {block.start} to {block.stop - 1}" for block in blocks]
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call the test with each seed of the block that `pytest_generate_tests` gave it."""
    block = pyfuncitem.funcargs.get("seed")
    if not isinstance(block, range):
        return None
    given = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    for seed in block:
        try:
            pyfuncitem.obj(**{**given, "seed": seed})
        except Exception as error:
            raise AssertionError(f"with --seed {seed}: {type(error).__name__}: {error}") from error
    return True


def pytest_configure(config: pytest.Config) -> None:
    """No test may meet the user's token, keys or cluster: not those that start processes,
    either.
    """
    for name in [name for name in os.environ if name.startswith("ZMQDIST_") or name == "TF_CONFIG"]:
        del os.environ[name]
    if config.getoption("--first-seed") is None and config.getoption("--tier") == "all":
        # Minutes since 1970 by seeds of a run; pytest-xdist hands the options on, so its processes
        # have the same.
        config.option.first_seed = int(time.time()) // 60 * SEEDS_OF_TIER_ALL
    state = tempfile.TemporaryDirectory(prefix="zmqdist-tests-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # This process runs no test. Ended by a time-out of its caller it would leave its folder
        # behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
