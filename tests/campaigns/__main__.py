"""Run the campaigns in pieces, and keep a log: `make campaign MINUTES=10`.

A campaign is a function of a seed. It starts a cluster, harms it, and raises AssertionError if a
result was lost, doubled or wrong. Each run is a process of its own; one that takes longer than
`LIMIT_S` is killed, and counts as a hang.

A piece runs the campaign with the fewest runs so far, again and again, until its minutes are over.
The next piece continues from the log, `.runs/campaigns.jsonl`, which git ignores, with new seeds. A
failure stays in the log with its seed; `python -m tests.campaigns NAME --seed N` repeats it. When
its cause is fixed, `--forget NAME` resets the campaign's counts.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.campaigns import addresses, cuts, messages, replaying
from tests.endurance import LOGS, ROOT, current_commit, read_log, write_log

LIMIT_S: Final = 240.0
LOG: Final = LOGS / "campaigns.jsonl"
CAMPAIGNS: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "messages lost with their connection": messages.campaign_of("lost"),
    "messages doubled": messages.campaign_of("doubled"),
    "messages swapped": messages.campaign_of("swapped"),
    "messages replayed": replaying.replaying,
    "training across cuts": cuts.training,
    "reading across cuts": cuts.reading,
    "a cluster's line forgets or moves": addresses.cluster,
    "a client's line forgets or moves": addresses.calls,
}
SUMMED: Final = (
    "faults",
    "tasks",
    "lost",
    "doubled",
    "run again",
    "ended by a lost ps",
    "rounds refused",
)
"""The figures of which the log keeps the sum; of all others it keeps the largest."""


@dataclass
class Record:
    """The log's entry for one campaign.

    Attributes:
      runs: the number of runs that have ended.
      seeds: the last seed that was used; the next run has `seeds` + 1.
      figures: of all runs without a failure.
      failed: seed -> the last line of its error.
    """

    name: str
    runs: int = 0
    seeds: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    since: str = ""
    until: str = ""

    def add(self, seed: int, figures: dict[str, float] | None, error: str, commit: str) -> None:
        self.runs += 1
        self.since, self.until = self.since or commit, commit
        if figures is None:
            self.failed[str(seed)] = error
            return
        for key, value in figures.items():
            before = self.figures.get(key, 0)
            self.figures[key] = before + value if key in SUMMED else max(before, value)


def run(name: str, seed: int) -> tuple[dict[str, float] | None, str]:
    """Run a campaign once in a process of its own. Return (its figures, ""), or (None, the last
    line of its error)."""
    command = [sys.executable, "-m", "tests.campaigns", name, "--seed", str(seed)]
    with tempfile.TemporaryDirectory(prefix="zmqdist-campaign-") as state:
        environment = {"PATH": "/usr/bin:/bin", "HOME": state, "XDG_STATE_HOME": state}
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"not ended after {LIMIT_S:g} s"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures, ""


def table(records: dict[str, Record]) -> str:
    """Return a line of text for each campaign."""
    rows = []
    for record in records.values():
        figures = ", ".join(f"{key} {value:.4g}" for key, value in record.figures.items())
        failures = "".join(f"\n    seed {seed}: {error}" for seed, error in record.failed.items())
        rows.append(
            f"{record.name}: {record.runs} runs, {len(record.failed)} failed; {figures}{failures}"
        )
    return "\n".join(rows)


def piece(minutes: float, log: Path, records: dict[str, Record], side_by_side: int) -> None:
    """Run the campaign with the fewest runs, again and again, until the minutes are over."""
    deadline, commit, turn = time.monotonic() + 60 * minutes, current_commit(), threading.Lock()

    def runs() -> None:
        while time.monotonic() < deadline:
            with turn:
                record = min((records[name] for name in CAMPAIGNS), key=lambda record: record.seeds)
                record.seeds = seed = record.seeds + 1
            figures, error = run(record.name, seed)
            with turn:
                record.add(seed, figures, error, commit)
                write_log(log, records)
                print(f"{record.name}, seed {seed}: {error or figures}", flush=True)

    with ThreadPoolExecutor(side_by_side) as threads:
        for each in [threads.submit(runs) for _ in range(side_by_side)]:
            each.result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name",
        nargs="?",
        choices=CAMPAIGNS,
        help="one run of this one, in this process, with --seed",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="begin nothing more after so many minutes"
    )
    parser.add_argument(
        "--side-by-side", type=int, default=3, help="runs at a time: most of the time they wait"
    )
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--forget", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--table", action="store_true", help="print the sum of the log and run nothing"
    )
    arguments = parser.parse_args()
    if arguments.name:
        faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True)
        print(json.dumps(CAMPAIGNS[arguments.name](arguments.seed)))
        faulthandler.cancel_dump_traceback_later()
        return
    records = {
        name: row
        for name, row in read_log(arguments.log, Record).items()
        if name not in arguments.forget
    }
    records = {name: records.get(name, Record(name)) for name in CAMPAIGNS}
    if not arguments.table:
        piece(arguments.minutes, arguments.log, records, arguments.side_by_side)
    write_log(arguments.log, records)
    print(table(records))
    if any(record.failed for record in records.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
