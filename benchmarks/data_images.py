"""How many images a second are decoded and augmented by one worker, and by two?

JPEG files of 500 x 375 are read, decoded, made 224 x 224, flipped and turned into float32, by one function of Pillow and NumPy that is the
same for everybody. A worker of the tf.data service and of zmqdist runs it in as many threads as there are processors, the others' in one.
`TensorFlow's operations` do the same without Python.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case("1 worker", {"workers": 1}), Case("2 workers", {"workers": 2})]


QUESTION = Question(
    "data_images", "Data: images decoded and augmented", "images/s", cases=cases, count=20, longer=4, rests=True
)
