"""The rules of CONTRIBUTING.md ("How sentences read") that a program can check, for the folders
that are written by them."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WRITTEN = (
    "cli",
    "zmqdist/cluster",
    "zmqdist/coordination",
    "zmqdist/data",
    "zmqdist/integrations",
    "zmqdist/launch",
    "zmqdist/observe",
    "zmqdist/process",
    "zmqdist/rpc",
    "zmqdist/scheduling/coordinator",
    "zmqdist/scheduling/dispatcher",
    "zmqdist/scheduling/worker",
    "zmqdist/tasks",
    "zmqdist/testing",
    "zmqdist/training",
    "zmqdist/transport",
    "zmqdist/variables",
    "zmqdist/wire",
)
"""Folders of code that are held to the rules; the others follow."""

HEADLESS = re.compile(r"\b(?:whoever|whomever|whom|somebody|nobody|anybody)\b", re.IGNORECASE)
VAGUE_NAMES = {"told", "asked"}

GERUNDS = {
    "data/sharding.py": "tf.data's term",
    "data/ops/batching.py": "a family of operators, named by what they do",
    "data/ops/caching.py": "a family of operators",
    "data/ops/combining.py": "a family of operators",
    "data/ops/saving.py": "a family of operators",
    "training/indexing.py": "NumPy's term",
    "training/embedding.py": "the field's term for a table of rows",
}
"""Files whose name ends with -ing, and why it is the noun for the thing inside."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string of a module."""
    kinds = {
        tokenize.COMMENT,
        tokenize.STRING,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def headless(text: str) -> list[str]:
    return HEADLESS.findall(text)


def vague(source: str) -> list[str]:
    """The identifiers that say that something was said, and not what."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        f"line {each.start[0]}: {each.string}"
        for each in tokens
        if each.type == tokenize.NAME and each.string in VAGUE_NAMES
    ]


def modules() -> list[Path]:
    return sorted(path for folder in WRITTEN for path in (ROOT / folder).rglob("*.py")) + sorted(
        (ROOT / "zmqdist").glob("*.py")
    )


def pages() -> list[Path]:
    """Those by hand: the generated ones are written by the docstrings of the code."""
    own = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
    return sorted(page for page in own if page.name not in ("machines.md", "protocol.md"))


def test_sentence_names_its_actor() -> None:
    assert headless("Whoever asks is told; nobody waits.") == ["Whoever", "nobody"]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in modules()
        for line, text in texts(path)
        for word in headless(text)
    ]
    assert not found
    prose = (
        (page, re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)) for page in pages()
    )
    assert not [
        f"{page.relative_to(ROOT)}: {word}" for page, text in prose for word in headless(text)
    ]


def test_variable_names_are_nouns() -> None:
    assert vague("told = f(asked)\nuntold = 1\n") == ["line 1: told", "line 1: asked"]
    assert not {
        str(path.relative_to(ROOT)): found
        for path in modules()
        if (found := vague(path.read_text()))
    }


def test_file_names_are_nouns() -> None:
    files = [
        path.relative_to(ROOT / "zmqdist").as_posix() for path in (ROOT / "zmqdist").rglob("*.py")
    ]
    gerunds = {name for name in files if name.endswith("ing.py")}
    assert gerunds == set(GERUNDS), "give the file a noun, or the list a reason"
