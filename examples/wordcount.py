"""Count the words of files by map-reduce: a task for each file, and a tree of tasks that add.

    python examples/wordcount.py [file ...]      without files: the pages of docs/

A task gets the results of other tasks as arguments: the counts stay on the workers, and only those
of the last task travel to the program.
"""

import collections
import re
import sys
from pathlib import Path

import zmqdist as zd


def count(file):
    return collections.Counter(re.findall(r"[a-z]+", Path(file).read_text().lower()))


def add(one, other):
    return one + other


def main():
    docs = Path(__file__).resolve().parent.parent / "docs"
    files = sys.argv[1:] or sorted(map(str, docs.glob("*.md")))
    with zd.local_cluster(workers=2) as cluster, cluster.coordinator() as coordinator:
        counts = coordinator.options(keep=True, lineage=True).map(count, files)  # "map"
        while len(counts) > 1:  # "reduce", two by two
            first, second, *rest = counts
            counts = [*rest, coordinator.submit(add, first, second)]
        words = counts[0].result()
    print(f"{len(files)} files, {words.total()} words, {len(words)} different ones")
    for word, times in words.most_common(5):
        print(f"{times:6} {word}")


if __name__ == "__main__":
    main()
