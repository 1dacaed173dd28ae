"""What a page says that a block prints is what it prints: the evaluator of the code blocks in
conftest.py of the root."""

from __future__ import annotations

import collections
import inspect
import itertools
import re
import sys
from typing import Any
from unittest import mock

from sybil import Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser


class PrintedOutput(PythonEvaluator):
    """Runs a block, and compares what each line prints with the comment behind the line, or with
    the lines of comment below it.

    `...` in a comment stands for any text. A line that runs more than once prints its comment each
    time.
    """

    def __call__(self, example: Example) -> None:
        output = _OutputByLine(example.path, sys.stdout)
        with mock.patch.object(sys, "stdout", output):
            super().__call__(example)
        lines = example.document.text.splitlines()
        for number, text in sorted(output.texts.items()):
            comment = comment_of(lines, number)
            pattern = ".*".join(re.escape(piece) for piece in comment.split("..."))
            assert not comment or re.fullmatch(rf"(?:{pattern}\s*)+", text, re.DOTALL), (
                f"{example.path}:{number} says that this prints {comment!r}: {text!r}"
            )


class _OutputByLine:
    """Standard output that keeps what each line of one file writes."""

    def __init__(self, path: str, stream: Any) -> None:
        self.texts: collections.defaultdict[int, str] = collections.defaultdict(str)
        self._path = path
        self._stream = stream

    def write(self, text: str) -> int:
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        if caller and caller.f_code.co_filename == self._path:
            self.texts[caller.f_lineno] += text
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def comment_of(lines: list[str], number: int) -> str:
    """Return the comment of a line, which is counted from 1, or the lines of comment below it, or
    ""."""
    line, *below = lines[number - 1 :]
    if "  # " in line:
        return line.rpartition("  # ")[2].strip()
    comment = itertools.takewhile(lambda text: text.lstrip().startswith("# "), below)
    return "\n".join(text.lstrip().removeprefix("# ") for text in comment).strip()


def code_blocks() -> PythonCodeBlockParser:
    """Return a parser of the Python blocks of a page in Markdown."""
    parser = PythonCodeBlockParser()
    parser.codeblock_parser = CodeBlockParser("python", PrintedOutput())
    return parser
