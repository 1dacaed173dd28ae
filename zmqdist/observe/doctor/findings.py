"""The findings of the doctor: each is one line with a level, a subject, its state, and advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

OK: Final = "ok"
WARNING: Final = "warning"
PROBLEM: Final = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      level: OK; WARNING if something works, but badly or not yet; PROBLEM if something will fail.
      subject: what was checked: "token", "127.0.0.1:5050".
      message: the state that was found.
      advice: what to do; "" if nothing needs doing.
    """

    level: str
    subject: str
    message: str
    advice: str = ""

    def line(self) -> str:
        """Return one line of text. It may quote other processes, so unprintable characters are replaced."""
        text = f"{self.subject}: {self.message}" + (f": {self.advice}" if self.advice else "")
        text = " ".join(text.split())
        return f"{self.level:<8} " + "".join(char if char.isprintable() else "?" for char in text)

    def record(self) -> dict[str, Any]:
        """Return a dictionary, for `--json`."""
        return asdict(self)


def ok(subject: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(OK, subject, message)


def warning(subject: str, message: str, advice: str) -> Finding:
    """Return a finding that something works, but badly or not yet."""
    return Finding(WARNING, subject, message, advice)


def problem(subject: str, message: str, advice: str) -> Finding:
    """Return a finding that something will fail."""
    return Finding(PROBLEM, subject, message, advice)


def healthy(findings: list[Finding]) -> bool:
    """Return whether none of the findings is a problem."""
    return all(finding.level != PROBLEM for finding in findings)
