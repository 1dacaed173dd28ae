"""`python -m benchmarks regress NAME ... --against REV`: is this checkout slower than a revision?

Both take turns in pairs of blocks, as two systems do (measuring.py): the checkout as it stands, and
a copy of the revision with its own benchmarks. The exit code is 1 if any median ratio is below
RATIO_MIN, so that no change loses more unseen.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks import results
from benchmarks.measuring import FULL, QUICK, Question, measure, to_stderr
from benchmarks.systems import OURS, ROOT

PAIRS: Final = 20
RATIO_MIN: Final = 0.85
USUAL: Final = ("latency", "calls", "actors", "tasks", "roundtrip", "ps_tasks", "data_elements")


def main(arguments: list[str], questions: Mapping[str, Question]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks regress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", default=USUAL, help=f"default: {' '.join(USUAL)}"
    )
    parser.add_argument("--against", required=True, metavar="REV", help="a revision of git")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller blocks")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in questions]
    if unknown:
        parser.error(f"no question {unknown[0]!r}; there are: {', '.join(questions)}")
    plan = QUICK if given.quick else replace(FULL, blocks=PAIRS, starts=PAIRS)
    with tempfile.TemporaryDirectory(prefix="zmqdist-bench-") as folder:
        try:
            _check_out(given.against, Path(folder))
        except subprocess.CalledProcessError as error:
            parser.error(error.stderr.decode(errors="replace").strip())
        earlier = replace(OURS, title=f"zmqdist at {given.against}", root=Path(folder))
        answers, versions = measure(
            [questions[name] for name in given.names], [earlier], plan, {}, to_stderr
        )
    slower = []
    for found in answers.values():
        document = results.document(found, versions, "")
        print("\n".join([*results.table(document).lines(), *found.skipped, ""]))
        slower += [
            f"{figure.question} {figure.case}".strip()
            for figure in found.figures
            if figure.ratio is not None and figure.ratio < RATIO_MIN
        ]
    if slower:
        print(f"slower than {RATIO_MIN} x {given.against}: {', '.join(slower)}")
    return 1 if slower else 0


def _check_out(revision: str, folder: Path) -> None:
    """Write the files of a revision into a folder. Raises CalledProcessError if there is none."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "--extract", "--directory", folder], input=archive.stdout, check=True)
