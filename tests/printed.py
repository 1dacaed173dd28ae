"""What a page says that a program prints, compared with what it has printed.

A number after `~` stands for any number, and a line `...` for any lines; the rest is the same, but
for the number of spaces.
"""

from __future__ import annotations

import re

NUMBER = r"[-+]?\d[\d.,]*"


def is_shown(shown: str, printed: str) -> bool:
    """Whether a program that has printed the one text prints what a page shows, the other one."""
    pattern = ""
    for line in shown.strip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*"
            continue
        words = [
            NUMBER.join(re.escape(part) for part in re.split(rf"~{NUMBER}", word))
            for word in line.split()
        ]
        pattern += r"[^\S\n]+".join(words) + r"[^\S\n]*\n"
    text = "".join(line.strip() + "\n" for line in printed.strip().splitlines())
    return re.fullmatch(pattern, text) is not None
