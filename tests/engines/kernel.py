"""Runs the cells of a notebook in a real kernel, in a process of its own, because the packages of
Jupyter leave sockets open: `python -m tests.engines.kernel`, with a question as JSON on its standard
input."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERRUPT = "interrupt me"
"""What a cell prints that is to be interrupted."""

CELL_S = 60


@dataclass
class Shown:
    """What is below a cell: what was printed, the names of errors, and HTML."""

    text: str
    errors: list[str]
    html: list[str]


def run(cells: list[str], seen: str, file: str) -> list[Shown]:
    """Run the cells, interrupt those that ask for it, and make `file` when `seen` is below a
    cell."""
    import nbclient
    import nbformat

    class Client(nbclient.NotebookClient):  # type: ignore[misc]
        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            output = super().process_message(message, cell, index)
            text = message["content"].get("text", "")
            if text.startswith(INTERRUPT):
                os.kill(self.km.provisioner.pid, signal.SIGINT)
            if file and seen in _text(cell):
                Path(file).touch()
            return output

    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=made)
    Client(notebook, timeout=CELL_S, kernel_name="python3", allow_errors=True).execute()
    return [
        Shown(
            _text(cell),
            [row.ename for row in cell.outputs if row.output_type == "error"],
            [row.data["text/html"] for row in cell.outputs if "text/html" in row.get("data", ())],
        )
        for cell in notebook.cells
    ]


def _text(cell: Any) -> str:
    return "".join(row.text for row in cell.outputs if row.output_type == "stream")


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(shown) for shown in run(**json.load(sys.stdin))]))
