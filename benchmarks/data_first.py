"""How long does a new iterator take to its first element, if the dispatcher and the workers already
run and know the pipeline?

The processes of PyTorch's DataLoader already run, too (`persistent_workers`).
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question(
    "data_first", "Data: a new iterator's first element", "ms", 1e3, count=5, each=True, rests=True
)
