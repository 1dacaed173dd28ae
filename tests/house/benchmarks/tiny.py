"""The benchmarks in a form so small that their figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import __main__ as command
from benchmarks import results
from benchmarks.measuring import Plan

TINY = Plan(
    blocks=2,
    starts=1,
    block_s=0.01,
    count_max=8,
    windows=(4, 8),
    sizes=(2**10, 2**20),
    fanout_bytes=2**17,
    ring_bytes=2**21,
    element_bytes=2**12,
    model_bytes=2**20,
    greedy_bytes=2**25,
    queued=50,
    queued_each=40,
    workers=(2, 5, 10),
    tasks=(10, 50, 200),
)
TALKING = ["latency", "calls", "tasks", "roundtrip", "bandwidth", "fanout", "captured"]
FIELDS = {
    "question",
    "title",
    "curve",
    "command",
    "date",
    "machine",
    "versions",
    "figures",
    "skipped",
}


def run_questions(folder: Path, *arguments: str) -> dict[str, results.Document]:
    """The documents of one run of the command, by question."""
    file = folder / "figures.json"
    assert command.main([*arguments, "--quick", "--json", str(file)]) == 0
    return {found["question"]: found for found in json.loads(file.read_text())}


def systems_of(found: results.Document) -> list[str]:
    return list(dict.fromkeys(figure["system"] for figure in found["figures"]))
