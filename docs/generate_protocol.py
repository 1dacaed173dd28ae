"""Write the list of docs/protocol.md from zmqdist/messages.py: `python docs/generate_protocol.py`.

The page is written by hand up to the line `BEGIN`; this program writes all lines after it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from zmqdist import messages

PAGE = Path(__file__).with_name("protocol.md")
BEGIN = "<!-- Written by docs/generate_protocol.py from zmqdist/messages.py from here on. -->\n"
COLUMNS = 100


def every_message() -> str:
    """Return a section for each pair of sender and receiver, with an item for each message, in the
    order of `messages.ALL`."""
    sections: dict[str, list[str]] = {}
    for cls in messages.ALL:
        fields = ", ".join(f"`{name}`" for name in cls.__struct_fields__)
        text = f"- {cls.__struct_config__.tag} `{cls.__name__}`({fields}): {first_paragraph(cls.__doc__ or '')}"
        sections.setdefault(cls.SENT, []).append(wrapped(text))
    return (
        "\n\n".join(f"### {ends}\n\n" + "\n".join(items) for ends, items in sections.items()) + "\n"
    )


def shapes() -> str:
    """Return a list of the tuples that fields of messages contain: each type alias of messages.py
    with the docstring below it."""
    source = Path(messages.__file__).read_text()
    found = re.findall(r'^(\w+): TypeAlias = .*\n"""(?s:(.*?))"""', source, re.MULTILINE)
    return "\n".join(wrapped(f"- `{name}`: {first_paragraph(text)}") for name, text in found) + "\n"


def page(current: str) -> str:
    """Return the new text of the page: its part that is written by hand, unchanged, and after it
    the generated part."""
    by_hand, mark, _ = current.partition(BEGIN)
    if not mark:
        raise SystemExit(
            f"{PAGE.name} has lost the line that says where its generated part begins:\n{BEGIN}"
        )
    return f"{by_hand}{BEGIN}\n## Every message\n\n{every_message()}\n### Tuples in these fields\n\n{shapes()}"


def first_paragraph(docstring: str) -> str:
    return " ".join(docstring.strip().partition("\n\n")[0].split())


def wrapped(text: str) -> str:
    lines = textwrap.wrap(
        text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE.name}: {len(messages.ALL)} messages\n")
