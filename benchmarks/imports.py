"""What does the import cost beyond that of NumPy?

All that a program imports to schedule something or to make a call; `import zmqdist` alone loads next to nothing.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("imports", "Import, NumPy's not counted", "s", fresh=True)
