"""Run every test that waits many times beside two busy processes, in pieces, and keep a log: `make endurance RUNS=100 MINUTES=10`.

A test waits where it has sockets, threads or processes, so every test outside the tier `pure` counts, but for those of the house, which
read sources. Such a test may depend on which thread is first, and shows it once in a hundred runs. A piece runs the files with the fewest
runs until its minutes are over; the next piece goes on from the log. A failure stays in the log with its last error. When its cause is
mended, `--forget FILE` drops the file's lines, so that its count begins anew.

The log has one line for each file: its runs, its tests and their seconds, the failures by test with the last error, the first and the last
commit that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import runs_in

ROOT = Path(__file__).resolve().parents[1]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000):\n        pass"
BUSY_PROCESSES = 2
SIDE_BY_SIDE = 6
FILES_AT_ONCE = 120
ERROR_CHARS_MAX = 2000
CRASH_CHARS_MAX = 20_000
OUTCOMES = "ENDURANCE_OUTCOMES"


class Outcomes:
    """The plugin that writes the outcome of each test to a file: runs in pytest's main process."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 - open for as long as pytest runs

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_outcome = report.when == "call" or report.outcome == "failed"
        error = shortened(report.longreprtext) if report.outcome == "failed" else ""
        row = [report.nodeid, report.outcome if is_outcome else report.when, error, report.duration]
        self._file.write(json.dumps(row) + "\n")


def shortened(report: str) -> str:
    """Of what pytest says of a failure: where it was, and the lines of the error itself."""
    lines = report.strip().splitlines()
    error = " | ".join(line[1:].strip() for line in lines if line.startswith("E "))
    return f"{lines[-1] if lines else ''} {error[:ERROR_CHARS_MAX]}".strip()


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(path))


def waiting_files(tier: str) -> list[str]:
    """The test files of a tier that wait."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if not runs_in(path, ROOT, "pure")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found if runs_in(path, ROOT, tier))
    return [name for name in names if not name.startswith("tests/house/")]


Row = tuple[str, str, str, float]
"""The id of a test, the outcome of its call or else the phase (setup, teardown), the error or "", and the seconds of the phase."""


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
            if outcome == "failed":  # twice, where a test leaves behind what its own failure did not let it end
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
    rows = [kind(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    return {getattr(row, fields(kind)[0].name): row for row in rows}


def write_log(path: Path, records: dict[str, Any]) -> None:
    """In one step: a log that is cut off in the middle would lose hours."""
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(asdict(records[name])) + "\n" for name in sorted(records)))
    new.replace(path)


def current_commit() -> str:
    """Its short name."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


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


def run(files: list[str], tier: str, side_by_side: int) -> list[Row]:
    """Run each file once, and return a row for each phase of each test."""
    with tempfile.NamedTemporaryFile() as outcomes:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.endurance", "--tier", tier, *files]
        command += [
            "-n",
            str(side_by_side),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "--max-worker-restart",
            "0",
        ]
        environment = {**os.environ, OUTCOMES: outcomes.name}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in Path(outcomes.name).read_text().splitlines()]
    if any("crashed while running" in row[2] for row in rows):
        # The stacks of the process that crashed, or an assertion of ZeroMQ.
        print(done.stderr[-CRASH_CHARS_MAX:], flush=True)
    if done.returncode not in (0, 1) or not rows:  # 1: some tests failed, which the rows say
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return rows


def table(records: dict[str, Record]) -> str:
    """Runs, tests and failures of each file, and what has the fewest runs."""
    rows = ["runs\ttests\tfailures\tfile"]
    for record in sorted(records.values(), key=lambda record: record.file):
        failures = "; ".join(f"{test} x{count}: {error}" for test, (count, error) in record.failed.items())
        rows.append(f"{record.runs}\t{record.tests}\t{failures or '-'}\t{record.file}")
    return "\n".join([*rows, f"fewest runs of a file: {min((record.runs for record in records.values()), default=0)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="only these test files")
    parser.add_argument("--runs", type=int, default=100, help="until each file has had so many runs")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin nothing more after so many minutes")
    parser.add_argument("--log", type=Path, default=ROOT / "tests/endurance.jsonl")
    parser.add_argument("--tier", default="test", choices=("test", "all"))
    parser.add_argument("--side-by-side", type=int, default=SIDE_BY_SIDE, help="test files that run at a time")
    parser.add_argument("--busy", type=int, default=BUSY_PROCESSES, help="processes beside it that take a core each")
    parser.add_argument(
        "--forget", action="append", default=[], metavar="FILE", help="drop what the log has of this file"
    )
    parser.add_argument("--table", action="store_true", help="print the sum of the log and run nothing")
    arguments = parser.parse_args()

    records = {name: record for name, record in read_log(arguments.log).items() if name not in arguments.forget}
    files = arguments.files or waiting_files(arguments.tier)
    deadline = time.monotonic() + 60 * arguments.minutes
    commit = current_commit()
    with busy(0 if arguments.table else arguments.busy):
        while not arguments.table and time.monotonic() < deadline:
            records |= {name: Record(name) for name in files if name not in records}
            wanted = sorted((records[name] for name in files), key=lambda record: record.runs)
            wanted = [record for record in wanted if record.runs < arguments.runs][:FILES_AT_ONCE]
            if not wanted:
                break
            wanted.sort(key=lambda record: -record.seconds)  # else the longest file may begin last, and run alone
            outcomes = run([record.file for record in wanted], arguments.tier, arguments.side_by_side)
            for record in wanted:
                for test, error in record.add(outcomes, commit).items():
                    print(f"{record.file}::{test}: {error}", flush=True)
            write_log(arguments.log, records)
    write_log(arguments.log, records)
    print(table(records))


if __name__ == "__main__":
    main()
