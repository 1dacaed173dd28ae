"""What does the import cost beyond that of NumPy?

All that a program imports to schedule something or to make a call; `import zmqdist` alone loads next to nothing.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("imports", "Import of all that a program uses to schedule or call, without NumPy", "s", fresh=True)
