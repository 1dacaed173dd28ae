"""Write the lists of docs/protocol.md from zmqdist/messages.py, wire/safe.py and wire/hello.py:
`python docs/generate_protocol.py`.

The page is written by hand up to the line `BEGIN`; this program writes all lines after it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zmqdist import messages
from zmqdist.messages import Call, Chunk, Credit, Replies, Reply
from zmqdist.specs import TensorSpec
from zmqdist.wire import headers, safe
from zmqdist.wire.hello import Hello, encode_hello

PAGE = Path(__file__).with_name("protocol.md")
BEGIN = "<!-- Written by docs/generate_protocol.py from zmqdist/messages.py from here on. -->\n"
COLUMNS = 100

VALUES = (
    "None",
    "True",
    "-1",
    "2**53 + 1",
    "2**64 - 1",
    "-(2**63)",
    "2**64",
    "-(2**63) - 1",
    "float('-inf')",
    "1 + 2j",
    "'é'",
    "b'\\x00\\xff'",
    "'\\ud800'",
    "[]",
    "()",
    "(1, 'a', [None])",
    "{'a': 1, 'b': [2]}",
    "{1: 2, (1, 'a'): 3}",
    "np.float32(1.5)",
    "np.int64(-1)",
    "np.str_('a')",
    "np.arange(3, dtype='<i4')",
    "np.array([2**53 + 1], '<i8')",
    "np.array([True, False])",
    "np.array(1.5)",
    "np.zeros((0, 2), '<f4')",
    "np.array([[0, 1, 2], [3, 4, 5]], '|u1')",
    "np.array([[0, 1, 2], [3, 4, 5]], '|u1', order='F')",
    "np.array([1, -2], 'bfloat16')",
    "np.array([1], '>f4')",
    "np.array(['é'], '<U2')",
    "np.array(['2024-01-02'], '<M8[D]')",
    "np.array([(1, 2)], [('a', '|u1'), ('b', '<f4')])",
    "[np.zeros(65_537, '|u1'), np.ones(65_538, '|u1')]",
    "TensorSpec([None, 2], np.float32)",
)
MESSAGES = (
    "Hello('client', 2**62 + 1)",
    "Call(1, 'add', 2**62 + 3, 0, pack((2, 3)))",
    "Call(2, 'add', 2**62 + 3, 500, pack({'x': 2, '': (3,)}))",
    "Call(3, 'echo', 2**62 + 3, 0, pack((np.zeros(600_000, '|u1'),)), ((600_000,),))",
    "Chunk(3, 0, 524_288)",
    "Credit(75_712)",
    "Reply(1, 0, '', pack(5))",
    "Reply(2, 5, 'no such thing', b'')",
    "Replies([Reply(1, 0, '', pack(5)), Reply(2, 0, '', pack(6))])",
    "Call(4, 'zmqdist.open', 2**62 + 3, 0, pack((1, 'count', (3,))))",
    "Reply(4, 0, '', encode([[pack(0), pack(1)], [], None]))",
)
"""What the page shows as bytes: expressions of Python with these names."""
NAMES: dict[str, Any] = {
    "Call": Call,
    "Chunk": Chunk,
    "Credit": Credit,
    "Hello": Hello,
    "Replies": Replies,
    "Reply": Reply,
    "TensorSpec": TensorSpec,
    "encode": headers.encode,
    "ml_dtypes": ml_dtypes,
    "np": np,
    "pack": lambda value: safe.encode(value)[0],
}


def vectors() -> str:
    """Return a list of values with their bodies, and a list of messages with their first
    frames."""
    values = [(text, safe.encode(eval(text, NAMES))[0]) for text in VALUES]
    frames = []
    for text in MESSAGES:
        message = eval(text, NAMES)
        is_hello = isinstance(message, Hello)
        frames.append((text, encode_hello(message) if is_hello else headers.encode(message)))
    parts = "The last value but one has two parts, of 65,537 bytes 00 and of 65,538 bytes 01."
    names = "`pack` returns the body of a value. A field that is missing here has its default."
    return f"{listed(values)}\n\n{parts}\n\n{listed(frames)}\n\n{names}\n"


def listed(rows: list[tuple[str, bytes]]) -> str:
    return "\n".join(wrapped(f"- `{text}`: `{body.hex()}`") for text, body in rows)


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
    messages_and_tuples = f"{every_message()}\n### Tuples in these fields\n\n{shapes()}"
    return f"{by_hand}{BEGIN}\n## Every message\n\n{messages_and_tuples}\n## Test vectors\n\n{vectors()}"


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
