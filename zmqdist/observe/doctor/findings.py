"""The findings of the doctor. Each is one line with a level, a subject, the state of the subject, and advice."""

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
      level: OK; WARNING if the subject works, but badly or not yet; PROBLEM if it will fail.
      subject: name of the checked part or address, such as "token" or "127.0.0.1:5050".
      message: the state of the subject.
      advice: what the user should do; "" for OK.
    """

    level: str
    subject: str
    message: str
    advice: str = ""

    def line(self) -> str:
        """Return the finding as one line of text. Unprintable characters are replaced, because it may quote other processes."""
        text = f"{self.subject}: {self.message}" + (f": {self.advice}" if self.advice else "")
        text = " ".join(text.split())
        return f"{self.level:<8} " + "".join(char if char.isprintable() else "?" for char in text)

    def record(self) -> dict[str, Any]:
        """Return the finding as a dictionary, for `--json`."""
        return asdict(self)


def ok(subject: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(OK, subject, message)


def warning(subject: str, message: str, advice: str) -> Finding:
    """Return a finding that the subject works, but badly or not yet."""
    return Finding(WARNING, subject, message, advice)


def problem(subject: str, message: str, advice: str) -> Finding:
    """Return a finding that the subject will fail."""
    return Finding(PROBLEM, subject, message, advice)


def healthy(findings: list[Finding]) -> bool:
    """Return whether none of the findings is a problem."""
    return all(finding.level != PROBLEM for finding in findings)
