"""How many images a second does one worker decode and augment, and how many do two workers?

All systems run one function of Pillow and NumPy: it reads a JPEG file of 500 x 375, decodes it,
resizes it to 224 x 224, flips it and converts it to float32. A worker of the tf.data service or of
zmqdist runs it in as many threads as there are cores; a worker of the other systems runs it in one
thread. The system "TensorFlow's operations" does the same work without Python.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case("1 worker", {"workers": 1}), Case("2 workers", {"workers": 2})]


QUESTION = Question(
    "data_images",
    "Data: images decoded and augmented",
    "images/s",
    cases=cases,
    count=20,
    longer=4,
    rests=True,
)
