"""The findings of the doctor. A finding is one line with a level, a subject, the state of the
subject, and advice."""

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
      level: OK, WARNING or PROBLEM. WARNING means that the subject works badly or does not work
        yet. PROBLEM means that it will fail.
      subject: name of the checked part, such as "token", or a checked address, such as
        "127.0.0.1:5050".
      message: the state of the subject.
      advice: what the user should do. It is "" if the level is OK.
    """

    level: str
    subject: str
    message: str
    advice: str = ""

    def line(self) -> str:
        """Return the finding as one line of text. Unprintable characters are replaced, because the
        message may quote other processes."""
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
    """Return a finding that says that the subject works badly or does not work yet."""
    return Finding(WARNING, subject, message, advice)


def problem(subject: str, message: str, advice: str) -> Finding:
    """Return a finding that says that the subject will fail."""
    return Finding(PROBLEM, subject, message, advice)


def healthy(findings: list[Finding]) -> bool:
    """Return whether none of the findings is a problem."""
    return all(finding.level != PROBLEM for finding in findings)
