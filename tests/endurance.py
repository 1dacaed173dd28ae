"""Run every test that waits many times beside two busy processes, in pieces, and keep a log: `make
endurance RUNS=100 MINUTES=10`.

A test waits where it has sockets, threads or processes, so every test outside the tier `pure`
counts, but for those of the house, which read sources. Of the tier `pure` the tests of datasets
count, because datasets read ahead in threads. Such a test may depend on which thread is first, and
shows it once in a hundred runs. A piece runs the files with the fewest runs until its minutes are
over; the next piece goes on from the log. A failure stays in the log with its last error. When its
cause is mended, `--forget FILE` drops the file's lines, so that its count begins anew.

Each file runs in a process of its own, so that the next one begins as soon as one has ended. The
process is forked from this one, which has imported the packages that the tests need, but nothing of
zmqdist.

The log, `.runs/endurance.jsonl`, which git ignores, has one line for each file: its runs, its tests
and their seconds, the failures by test with the last error, the first and the last commit that ran.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import click
import cloudpickle
import msgspec
import numpy as np
import pytest
import rich
import yaml
import zmq

from tests.tiers import runs_in

PRELOADED = (click, cloudpickle, msgspec, np, rich, yaml, zmq)
ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".runs"
DATASETS = ROOT / "tests" / "data"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000):\n        pass"
BUSY_PROCESSES = 2
SIDE_BY_SIDE = 12
SAME_FILE_AT_ONCE = 3
RUNS_OF_A_PROCESS = 4
SHORT_S = 20.0
"""Seconds of a file's tests in its last run, below which a process begins several runs of the
file.
"""
RUN_S_MAX = 1200.0
ERROR_CHARS_MAX = 2000
OUTPUT_CHARS_MAX = 20_000
BEGUN = "begun"


class Outcomes:
    """The plugin of pytest that writes each test's start, and the outcome of each of its phases, to
    a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(json.dumps([nodeid, BEGUN, "", 0.0]) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # the whole file, because a package is not installed
            self._file.write(json.dumps([report.nodeid, "skipped", "", 0.0]) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_outcome = report.when == "call" or report.outcome == "failed"
        error = shortened(report.longreprtext) if report.outcome == "failed" else ""
        row = [report.nodeid, report.outcome if is_outcome else report.when, error, report.duration]
        self._file.write(json.dumps(row) + "\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()


def shortened(report: str) -> str:
    """Of what pytest says of a failure: where it was, and the lines of the error itself."""
    lines = report.strip().splitlines()
    error = " | ".join(line[1:].strip() for line in lines if line.startswith("E "))
    return f"{lines[-1] if lines else ''} {error[:ERROR_CHARS_MAX]}".strip()


def waiting_files(tier: str) -> list[str]:
    """The test files of a tier that wait."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if runs_in(path, ROOT, tier)]
    waiting = [
        path for path in found if not runs_in(path, ROOT, "pure") or path.is_relative_to(DATASETS)
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in waiting)
    return [name for name in names if not name.startswith("tests/house/")]


Row = tuple[str, str, str, float]
"""The id of a test, the outcome of its call or else the phase (begun, setup, teardown), the error
or "", and the seconds of the phase."""


@dataclass
class Record:
    """What the log has of one test file.

    Attributes:
      runs: of the whole file.
      tests: in its last run.
      seconds: that the tests of its last run took, with their setup.
      failed: by test, how often and the last error.
      since, until: the commits of its first and its last run.
    """

    file: str
    runs: int = 0
    tests: int = 0
    seconds: float = 0.0
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)
    since: str = ""
    until: str = ""

    def add(self, outcomes: list[Row], commit: str) -> dict[str, str]:
        """Add one run of this file. Return the errors by test."""
        own = [row for row in outcomes if row[0].partition("::")[0] == self.file]
        new: dict[str, str] = {}
        for name, outcome, error, _ in own:
            if outcome == "failed":
                # twice, where a test leaves behind what its own failure did not let it end
                test = name.partition("::")[2]
                new[test] = " ; then ".join(filter(None, [new.get(test), error]))
        self.runs += 1
        self.tests = len({row[0] for row in own if row[1] in ("passed", "failed", "skipped")})
        self.seconds = round(sum(row[3] for row in own), 1)
        self.since, self.until = self.since or commit, commit
        for test, error in new.items():
            self.failed[test] = (self.failed.get(test, (0, ""))[0] + 1, error)
        return new


def read_log(path: Path, kind: type[Any] = Record) -> dict[str, Any]:
    """The rows of a log, each of a dataclass, by their first field."""
    rows = (
        [kind(**json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
    return {getattr(row, fields(kind)[0].name): row for row in rows}


def write_log(path: Path, records: dict[str, Any]) -> None:
    """In one step: a log that is cut off in the middle would lose hours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(asdict(records[name])) + "\n" for name in sorted(records)))
    new.replace(path)


def current_commit() -> str:
    """Its short name."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that take a core each; they end with this one, however it ends."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Runs:
    """One or more runs of a test file in a process of its own. `folder` has the outcomes of each
    run and the output of all."""

    def __init__(self, file: str, count: int, tier: str, folder: Path) -> None:
        self.file = file
        self.count = count
        self.deadline = time.monotonic() + count * RUN_S_MAX
        self._folder = folder
        self._output = folder / "output"
        self.process: ForkProcess = multiprocessing.get_context("fork").Process(
            target=self._main, args=(tier,)
        )
        self.process.start()

    def _main(self, tier: str) -> None:
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        arguments = ["-q", "--tier", tier, f"--basetemp={self._folder / 'tests'}", self.file]
        for number in range(self.count):
            code = pytest.main(arguments, plugins=[Outcomes(self._folder / f"outcomes-{number}")])
            if code != pytest.ExitCode.OK:
                sys.exit(code)

    def rows(self) -> list[list[Row]]:
        """Return the rows of each run. The process has ended; unless it has ended as pytest ends,
        its last test has failed."""
        paths = sorted(self._folder.glob("outcomes-*"))
        runs: list[list[Row]] = [
            [tuple(json.loads(line)) for line in path.read_text().splitlines()] for path in paths
        ]
        runs = runs or [[]]
        outcomes = {row[1] for row in runs[-1]}
        expected = pytest.ExitCode.TESTS_FAILED if "failed" in outcomes else pytest.ExitCode.OK
        code = self.process.exitcode
        if outcomes == {"skipped"}:
            expected = pytest.ExitCode.NO_TESTS_COLLECTED
        if code != expected or not outcomes:
            test = next(
                (row[0] for row in reversed(runs[-1]) if row[1] == BEGUN), f"{self.file}::no test"
            )
            runs[-1].append(
                (test, "failed", f"the process ended with {code} while this test ran", 0.0)
            )
        if code != pytest.ExitCode.OK and outcomes != {"skipped"}:
            # What the log has no room for: the tracebacks, the stacks of a process that crashed, or
            # an assertion of ZeroMQ.
            print(self._output.read_text(errors="replace")[-OUTPUT_CHARS_MAX:], flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        return runs


def next_runs(
    records: dict[str, Record], files: list[str], running: list[Runs], runs: int
) -> tuple[str, int] | None:
    """Return the file with the fewest runs, of those the one that takes longest, and how many runs
    to begin; None if none is left.

    A process begins several runs of a short file, because imports take as long as the tests of such
    a file.
    """
    begun = {
        name: records[name].runs + sum(each.count for each in running if each.file == name)
        for name in files
    }
    at_once = {name: sum(each.file == name for each in running) for name in files}
    wanted = [name for name in files if at_once[name] < SAME_FILE_AT_ONCE and begun[name] < runs]
    if not wanted:
        return None
    name = min(wanted, key=lambda name: (begun[name], -records[name].seconds))
    return name, min(
        RUNS_OF_A_PROCESS if records[name].seconds < SHORT_S else 1, runs - begun[name]
    )


def run_piece(records: dict[str, Record], files: list[str], arguments: argparse.Namespace) -> None:
    """Run the files until each has had all its runs, or the minutes are over and what runs has
    ended. Update the log after each process."""
    begin_until = time.monotonic() + 60 * arguments.minutes
    commit = current_commit()
    running: list[Runs] = []
    with busy(arguments.busy), tempfile.TemporaryDirectory(prefix="endurance-") as temporary:
        number = 0
        while True:
            while len(running) < arguments.side_by_side and time.monotonic() < begin_until:
                chosen = next_runs(records, files, running, arguments.runs)
                if chosen is None:
                    break
                number += 1
                folder = Path(temporary, str(number))
                folder.mkdir()
                running.append(Runs(*chosen, arguments.tier, folder))
            if not running:
                return
            wait([each.process.sentinel for each in running], timeout=1.0)
            for each in running:
                if time.monotonic() > each.deadline:
                    each.process.kill()
            for each in [each for each in running if each.process.exitcode is not None]:
                running.remove(each)
                for rows in each.rows():
                    for test, error in records[each.file].add(rows, commit).items():
                        print(f"{each.file}::{test}: {error}", flush=True)
                write_log(arguments.log, records)


def table(records: dict[str, Record]) -> str:
    """Runs, tests and failures of each file, and what has the fewest runs."""
    rows = ["runs\ttests\tfailures\tfile"]
    for record in sorted(records.values(), key=lambda record: record.file):
        failures = "; ".join(
            f"{test} x{count}: {error}" for test, (count, error) in record.failed.items()
        )
        rows.append(f"{record.runs}\t{record.tests}\t{failures or '-'}\t{record.file}")
    return "\n".join(
        [
            *rows,
            (
                f"fewest runs of a file: "
                f"{min((record.runs for record in records.values()), default=0)}"
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="only these test files")
    parser.add_argument(
        "--runs", type=int, default=100, help="until each file has had so many runs"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="begin nothing more after so many minutes"
    )
    parser.add_argument("--log", type=Path, default=LOGS / "endurance.jsonl")
    parser.add_argument("--tier", default="test", choices=("test", "all"))
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=SIDE_BY_SIDE,
        help="test files that run at the same time",
    )
    parser.add_argument(
        "--busy", type=int, default=BUSY_PROCESSES, help="processes beside it that take a core each"
    )
    parser.add_argument(
        "--forget",
        action="append",
        default=[],
        metavar="FILE",
        help="drop what the log has of this file",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the sum of the log and run nothing"
    )
    arguments = parser.parse_args()

    records = {
        name: record
        for name, record in read_log(arguments.log).items()
        if name not in arguments.forget
    }
    files = arguments.files or waiting_files(arguments.tier)
    records |= {name: Record(name) for name in files if name not in records}
    if not arguments.table:
        run_piece(records, files, arguments)
    write_log(arguments.log, records)
    print(table(records))


if __name__ == "__main__":
    main()
