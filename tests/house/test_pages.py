"""The pages are short, and what they say is there: links, files, commands and their options,
cluster files, the texts of errors.

That their Python blocks run is seen to by conftest.py of the root.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from zmqdist.cluster import ClusterConfig
from zmqdist.launch.exit_codes import ExitCode
from zmqdist_cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "examples/README.md",
    )
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
README_LINES_MAX = 90
DOCS_WORDS_MAX = 63_000
COLUMNS_MAX = 100


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each line that starts with one of our commands in a bash or an indented
    block."""
    for page in PAGES:
        text = page.read_text()
        joined = [block.replace("\\\n", " ") for block in blocks(text, "bash")]
        lines = [line for block in joined for line in block.splitlines()]
        lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
        for line in lines:
            if line.startswith(("zmqdist ", "make ")):
                yield name_of(page), shlex.split(line, comments=True)


def strings() -> list[str]:
    """The texts in our sources; what an f-string fills in is `...`."""
    found: list[str] = []
    for path in [*(ROOT / "zmqdist").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "..."
                    for part in node.values
                ]
                found.append("".join(parts))
    return found


def error_texts(page: Path) -> list[str]:
    """The texts of errors that a page's entries begin with: what is bold in its lists. A text in
    italics is not one of ours."""
    entries = re.findall(r"^- (.*\n(?:  .*\n)*)", page.read_text(), re.MULTILINE)
    return [
        " ".join(text.split())
        for entry in entries
        for text in re.findall(r"\*\*(.+?)\*\*", entry, re.DOTALL)
    ]


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES_MAX


def anchors(page: Path) -> set[str]:
    """The names by which links lead to the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.DOTALL)
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            target = page.parent / link if link else page
            assert "://" in link or target.exists(), f"{name_of(page)}: {link}"
            assert not anchor or "://" in link or anchor in anchors(target), (
                f"{name_of(page)}: {link}#{anchor}"
            )


def test_pages_are_short() -> None:
    """Before a page grows, it says the rule and the example, and leaves out what is said
    elsewhere.
    """
    words = {name_of(page): len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")}
    assert sum(words.values()) <= DOCS_WORDS_MAX, words


def test_page_lines_fit_screen() -> None:
    """A line with an address of the web may be longer."""
    rows = [(name_of(page), line) for page in PAGES for line in page.read_text().splitlines()]
    assert not [row for row in rows if len(row[1]) > COLUMNS_MAX and "://" not in row[1]]


def test_named_files_exist() -> None:
    places = (ROOT, ROOT / "zmqdist")
    for page in PAGES:
        names = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", page.read_text())
        # What a user has, not we: anything that is neither of a folder of ours nor a Python file.
        ours = [
            name
            for name in names
            if name.endswith((".py", "/")) or (ROOT / name.split("/")[0]).is_dir()
        ]
        assert not [
            name for name in ours if not any((place / name).exists() for place in places)
        ], name_of(page)


def test_commands_and_options_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = list(commands())
    assert len(rows) > 20
    for page, words in rows:
        row = f"{page}: {' '.join(words)}"
        if words[0] == "make":
            assert set(words[1:2]) <= set(targets), row
            continue
        assert words[1] in COMMANDS, row
        command = cli.get_command(click.Context(cli), words[1])
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words[2])
        assert command is not None, row
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--") and word != "--"} <= options, row
        assert not [
            word for word in words if word.endswith(".yaml") and not (ROOT / word).exists()
        ], row


def test_commands_named_in_passing_exist() -> None:
    for page in PAGES:
        assert set(re.findall(r"`zmqdist ([a-z]+)", page.read_text())) <= set(COMMANDS), name_of(
            page
        )


def test_cluster_files_in_pages_are_valid(tmp_path: Path) -> None:
    found = [(page, text) for page in PAGES for text in blocks(page.read_text(), "yaml")]
    assert found
    for number, (_, text) in enumerate(found):
        file = tmp_path / f"cluster-{number}.yaml"
        file.write_text(text)
        ClusterConfig.load(str(file))  # whose errors quote the line


def test_command_page_is_complete() -> None:
    page = (ROOT / "docs" / "command.md").read_text()
    sections = dict(
        re.findall(r"^### zmqdist (\w+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    )
    assert sorted(sections) == sorted(COMMANDS)
    assert not [
        name
        for name, text in sections.items()
        if f"\nzmqdist {name}" not in "\n" + "\n".join(blocks(text, "bash"))
    ]
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(int(code)) for code in ExitCode]


def test_error_texts_are_those_of_code() -> None:
    texts = "\n\0\n".join(strings())
    quoted = error_texts(ROOT / "docs" / "troubleshooting.md")
    assert len(quoted) > 150
    pieces = {piece.strip(" ,:") for text in quoted for piece in text.split("...")} - {""}
    assert not sorted(piece for piece in pieces if piece not in texts)
