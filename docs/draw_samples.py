"""Draw thirty docstrings, thirty comments or error texts, and thirty commit subjects at random, for a reader who has not seen them before.

    python docs/draw_samples.py               the seed is the first 8 hex digits of the last commit
    python docs/draw_samples.py --since REV   subjects of the commits after REV only
    python docs/draw_samples.py --seed N      another draw

If the reader has to read more than two of the thirty twice, these texts need work (docs/contributing/voice.md).
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("zmqdist", "cli")
SIZE = 30
COMMENT_WORDS_MIN = 4
"""A comment of fewer words is a heading or a pragma."""

Sample = tuple[str, str]
"""(place, text): the file of the text, with the name or the line in it, or the hash of the commit; and the text itself."""


def docstrings(path: Path) -> Iterator[Sample]:
    """Yield the docstrings of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = "" if isinstance(node, ast.Module) else f" {node.name}"
                yield f"{path.relative_to(ROOT)}{name}", text


def comments(path: Path) -> Iterator[Sample]:
    """Yield the comments of a module. Consecutive lines that have only a comment are one comment."""
    found: dict[int, str] = {}
    begun = last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("# --"):
            continue
        row, text = token.start[0], token.string.lstrip("# ")
        is_alone = token.line.lstrip().startswith("#")
        if is_alone and last == row - 1:
            found[begun] += f" {text}"
        else:
            begun, found[row] = row, text
        last = row if is_alone else 0
    for row, text in found.items():
        if len(text.split()) >= COMMENT_WORDS_MIN:
            yield f"{path.relative_to(ROOT)}:{row}", text


def error_texts(path: Path) -> Iterator[Sample]:
    """Yield the texts that a module raises, as they stand in the source."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = ast.get_source_segment(source, node.exc.args[0])
            if text and text.lstrip("(f").startswith(('"', "'")):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def subjects(since: str | None) -> list[Sample]:
    """Return the hash and subject of each commit that is no merge; with `since`, only of the commits after that revision."""
    revisions = [f"{since}..HEAD"] if since else ["HEAD"]
    return [
        (line.partition(" ")[0], line.partition(" ")[2])
        for line in _git("log", "--no-merges", "--format=%h %s", *revisions)
    ]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="REV", help="draw subjects of the commits after this one")
    parser.add_argument("--seed", type=int, help="default: the first 8 hex digits of the last commit")
    arguments = parser.parse_args()
    seed = int(_git("rev-parse", "HEAD")[0][:8], 16) if arguments.seed is None else arguments.seed
    draw = random.Random(seed)
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    pools = {
        "docstrings": [each for path in paths for each in docstrings(path)],
        "comments and error texts": [each for path in paths for each in (*comments(path), *error_texts(path))],
        "commit subjects": subjects(arguments.since),
    }
    print(f"seed {seed}")
    for name, pool in pools.items():
        print(f"\n== {min(SIZE, len(pool))} of {len(pool)} {name}")
        for number, (place, text) in enumerate(draw.sample(pool, min(SIZE, len(pool))), 1):
            print(f"\n{number}. {place}\n{text}")


if __name__ == "__main__":
    main()
