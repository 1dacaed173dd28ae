"""What the doctor says: one line, with a level, what was looked at, what is there, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

OK: Final = "ok"
WARNING: Final = "warning"
PROBLEM: Final = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      level: OK; WARNING where things work, but not well, or not yet; PROBLEM where something will fail.
      subject: what was looked at: "token", "127.0.0.1:5050".
      told: what is there.
      advice: what to do; "" where nothing needs doing.
    """

    level: str
    subject: str
    message: str
    advice: str = ""

    def line(self) -> str:
        """For people. What other processes say of themselves may be in it, so nothing moves a cursor."""
        text = f"{self.subject}: {self.message}" + (f": {self.advice}" if self.advice else "")
        text = " ".join(text.split())
        return f"{self.level:<8} " + "".join(char if char.isprintable() else "?" for char in text)

    def record(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def ok(subject: str, message: str) -> Finding:
    """Nothing to do."""
    return Finding(OK, subject, message)


def warning(subject: str, message: str, advice: str) -> Finding:
    """It works, but not well, or not yet."""
    return Finding(WARNING, subject, message, advice)


def problem(subject: str, message: str, advice: str) -> Finding:
    """Something will fail."""
    return Finding(PROBLEM, subject, message, advice)


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing is a problem."""
    return all(finding.level != PROBLEM for finding in findings)
