"""The answers as tables for a terminal and for a page, and as JSON.

A document has the answers to one question and the facts that a reader needs to judge them: the
command, the date, the host, the versions, and the systems that were left out. `rewrite` replaces
the part of docs/performance.md between two marks by the documents of a folder.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.measuring import Answers
from zmqdist.observe.bench import machine, shown
from zmqdist.observe.status import Table

BEGIN = "<!-- figures: written by python -m benchmarks -->"
END = "<!-- end of figures -->"
COLUMNS = 100

Document = dict[str, Any]


def document(answers: Answers, versions: dict[str, str], command: str) -> Document:
    """Return the document of one question. JSON can represent it."""
    question = answers.question
    systems = {figure.system for figure in answers.figures}
    return {
        "question": question.name,
        "title": question.title,
        "curve": question.curve,
        "command": command,
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {title: version for title, version in versions.items() if title in systems},
        "figures": [asdict(figure) for figure in answers.figures],
        "skipped": answers.skipped,
    }


def written(documents: Iterable[Document]) -> str:
    """Return the documents as JSON text."""
    return json.dumps(list(documents), indent=1) + "\n"


def table(found: Document) -> Table:
    """Return a document as a table for a terminal."""
    rows = tuple(
        (
            figure["system"],
            " ".join(filter(None, [figure["case"], _axis(figure) if not found["curve"] else ""])),
            shown(figure["median"]),
            shown(figure["p99"]),
            figure["unit"],
            _ratio(figure["ratio"], figure.get("quartiles")),
        )
        for figure in found["figures"]
    )
    columns = ("system", "case", ">median", ">p99", "unit", ">zmqdist is better by")
    return Table(f"{found['question']}: {found['title']} ({found['machine']})", columns, rows)


def _axis(figure: Document) -> str:
    return "" if figure["at"] is None else f"at {figure['at']:,.0f}"


def _ratio(ratio: float | None, quartiles: list[float] | None) -> str:
    """Return a ratio, and the quartiles of its pairs."""
    if ratio is None:
        return "-"
    return f"{shown(ratio)} x" + (" ({} to {})".format(*map(shown, quartiles)) if quartiles else "")


def note_history(file: Path, documents: Iterable[Document], version: str) -> None:
    """Write the ratios of all documents into the line of this version, which is the last line of
    the history, or a new one."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    ratios: dict[str, float] = {}
    if lines and json.loads(lines[-1])["version"] == version:
        ratios = json.loads(lines.pop())["ratios"]
    for found in documents:
        for figure in found["figures"]:
            if figure["ratio"] is not None:
                words = found["question"], figure["case"], figure["system"]
                ratios[" ".join(filter(None, words))] = round(figure["ratio"], 3)
    line = {"version": version, "date": date.today().isoformat(), "ratios": ratios}
    file.write_text("".join([*lines, json.dumps(line) + "\n"]))


# -- a page ----------------------------------------------------------------------------------------


def rewrite(page: Path, folder: Path, order: Iterable[str]) -> None:
    """Write the sections of all documents in a folder into a page, between the lines BEGIN and END.
    `order` has the names of questions.

    Raises:
      ValueError: the page does not have the marks.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page.name} has no place for figures: the lines {BEGIN!r} and {END!r}")
    found = {path.stem: json.loads(path.read_text())[0] for path in folder.glob("*.json")}
    where = folder.resolve().relative_to(page.resolve().parent)
    sections = [section(found[name], where) for name in order if name in found]
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n" + "".join(sections) + f"\n{END}{after}")


def section(found: Document, where: Path) -> str:
    """Return the item of a page about one question: links to its plot and its figures, and for each
    case in which zmqdist was compared with another system, the median of zmqdist and the ratios."""
    name = found["question"]
    lines = [f"- **{found['title']}** ([plot]({where}/{name}.png), [figures]({where}/{name}.json))"]
    for case in dict.fromkeys(figure["case"] for figure in found["figures"]):
        of_case = [figure for figure in found["figures"] if figure["case"] == case]
        cells = [
            f"{figure['system']} {shown(figure['ratio'])}x"
            for figure in of_case
            if figure["ratio"] is not None
        ]
        if cells:
            own = f"{shown(of_case[0]['median'])} {of_case[0]['unit']}"
            lines.append("; ".join([f"  - {case}: {own}" if case else f"  - {own}", *cells]))
    wrapped = (
        textwrap.wrap(line, COLUMNS, subsequent_indent=" " * (line.index("-") + 2))
        for line in lines
    )
    return "\n".join("\n".join(part) for part in wrapped) + "\n"
