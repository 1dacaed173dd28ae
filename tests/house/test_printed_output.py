"""The evaluator of the pages' blocks compares what they print with what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from sybil import Sybil

from tests.printed_output import code_blocks


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("print(1 + 1)  # 2", None),
        ("print('a#b', end='')  # a#b", None),
        ("print('ended after 3 s')  # ended after ... s", None),
        ("print('a\\nb')\n# a\n# b", None),
        ("print(1 + 1)", None),
        ("for word in 'ab':\n    print(word)  # ...", None),
        ("for number in (2, 2):\n    print(number)  # 2", None),
        ("def f():\n    print(2)  # 2\n\n\nf()", None),
        ("print(1 + 1)  # 3", "page.md:4 says that this prints '3': '2\\\\n'"),
        ("print('a\\nb')\n# a\n# c", "page.md:4 says that this prints 'a\\\\nc': 'a\\\\nb\\\\n'"),
    ],
)
def test_block_output_is_compared_with_comment(tmp_path: Path, line: str, said: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n```python\n{line}\n```\n")
    (example,) = Sybil(parsers=[code_blocks()]).parse(page).examples()
    if said is None:
        example.evaluate()
    else:
        with pytest.raises(AssertionError, match=said):
            example.evaluate()
