"""How long from a new iterator to its first element, where dispatcher and workers are running and know the pipeline?

The processes of a DataLoader are kept, too (`persistent_workers`).
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("data_first", "Data: a new iterator's first element", "ms", 1e3, count=5, each=True, rests=True)
