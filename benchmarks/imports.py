"""How long does the import of zmqdist take, in addition to the import of NumPy?

The figure counts all modules that a program imports to schedule a function or to make a call;
`import zmqdist` alone loads almost no module.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question(
    "imports",
    "Import of all that a program uses to schedule or call, without NumPy",
    "s",
    fresh=True,
)
