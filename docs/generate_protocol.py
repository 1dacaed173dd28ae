"""Write the table of docs/protocol.md from zmqdist/messages.py: `python docs/generate_protocol.py`.

The page is written by hand up to the line `BEGIN`; this program writes all lines after it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from zmqdist import messages

PAGE = Path(__file__).with_name("protocol.md")
BEGIN = "<!-- From here on written by docs/generate_protocol.py from zmqdist/messages.py: change it there. -->\n"


def table() -> str:
    """Return a table with a row for each message, in the order of `messages.ALL`."""
    rows = ["| tag | message | from | to | fields | meaning |", "|---:|---|---|---|---|---|"]
    for cls in messages.ALL:
        pairs = [pair.split(" -> ") for pair in cls.SENT.split(", ")]
        senders, receivers = ("<br>".join(ends) for ends in zip(*pairs, strict=True))
        fields = ", ".join(f"`{name}`" for name in cls.__struct_fields__)
        meaning = _cell(cls.__doc__ or "")
        cells = [str(cls.__struct_config__.tag), f"`{cls.__name__}`", senders, receivers, fields, meaning]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def shapes() -> str:
    """Return a list of the tuples that fields of messages contain: each type alias of messages.py with the docstring below it."""
    source = Path(messages.__file__).read_text()
    found = re.findall(r'^(\w+): TypeAlias = .*\n"""(?s:(.*?))"""', source, re.MULTILINE)
    return "\n".join(f"- `{name}`: {_cell(text)}" for name, text in found) + "\n"


def page(current: str) -> str:
    """Return the new text of the page: its part that is written by hand, unchanged, and after it the generated part."""
    by_hand, mark, _ = current.partition(BEGIN)
    if not mark:
        raise SystemExit(f"{PAGE.name} has lost the line that says where its generated part begins:\n{BEGIN}")
    return f"{by_hand}{BEGIN}\n## Every message\n\n{table()}\nThe tuples in those fields:\n\n{shapes()}"


def _cell(docstring: str) -> str:
    """Return the first paragraph of a docstring as one line, for a cell of a table."""
    paragraph, _, _ = docstring.strip().partition("\n\n")
    return " ".join(paragraph.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE.name}: {len(messages.ALL)} messages\n")
