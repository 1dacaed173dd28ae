"""A dataset as a tree of operators: what every pipeline can be asked, whatever is in it.

Rules
    A tree never changes; operators make new ones that share what they have in common. It is read without being run: cardinality, spec
    where it is known, description, fingerprint, sources, readers. `rewrite` makes a changed copy.

    A description is JSON: a list of nodes, inputs first, so that a dataset that is used twice stays one. Only functions in it are
    opaque (ops/base.py).

Not here: the operators (ops/), the methods that users chain (dataset.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import FORMAT_VERSION, Memory
from zmqdist.data.iterators import Context, DatasetIterator
from zmqdist.data.ops.base import Op
from zmqdist.data.options import Options
from zmqdist.data.structure import UNKNOWN_SPEC, NoElements, read_only
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError

T = TypeVar("T", bound="Tree")


class Tree:
    """An operator with its inputs. Users meet it as `Dataset`.

    Attributes:
      op: the operator.
      inputs: the datasets that it reads.
      memory: what its iterators leave for those to come: see `Memory`.
    """

    __slots__ = ("__weakref__", "_spec", "inputs", "memory", "op")

    def __init__(self, op: Op, inputs: Sequence[Tree] = ()) -> None:
        self.op = op
        self.inputs = tuple(inputs)
        self.memory = Memory()
        self._spec: Any = None

    def __repr__(self) -> str:
        known = self.known_spec
        return f"<{type(self).__name__} {self.op.one_line()}, element_spec={known!r}>"

    # -- reading it --

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self, Context(self.options()))

    def as_numpy_iterator(self) -> Iterator[Any]:
        """The elements with arrays that cannot be written."""
        return map(read_only, self)

    def __bool__(self) -> bool:
        return True  # not len(), which is an error for most

    def __len__(self) -> int:
        """The number of elements. Raises TypeError where it is infinite or unknown."""
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("the dataset is infinite")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("the dataset has an unknown length: only reading it would tell")
        return count

    def cardinality(self) -> int:
        """The number of elements; INFINITE_CARDINALITY, or UNKNOWN_CARDINALITY where only reading would tell."""
        return int(_fold(self, lambda dataset, counts: dataset.op.cardinality(counts)))

    @property
    def element_spec(self) -> Any:
        """The form of the elements: structure of TensorSpec (DatasetSpec for a window).

        Known beforehand except behind functions that were given no `output_signature`: there the first element is computed, once, and
        its shape taken for that of all. A function that is to run in another process is thus called here, too.

        Raises:
          FailedPreconditionError: there is no first element.
        """
        if self._spec is None:
            known = self.op.element_spec(tuple(each.element_spec for each in self.inputs))
            self._spec = self._infer() if known is UNKNOWN_SPEC else known
        return self._spec

    @property
    def known_spec(self) -> Any:
        """As `element_spec`, or UNKNOWN_SPEC where an element would have to be computed."""
        if self._spec is not None:
            return self._spec
        inputs = tuple(each.known_spec for each in self.inputs)
        return UNKNOWN_SPEC if any(one is UNKNOWN_SPEC for one in inputs) else self.op.element_spec(inputs)

    def _infer(self) -> Any:
        spec = self.op.infer(self)
        if spec is UNKNOWN_SPEC:
            raise NoElements(f"the element_spec of an empty {self.op.name}() is unknown: give output_signature")
        return spec

    def probe(self) -> Iterator[Any]:
        """The elements for somebody who only looks: draws no seed, writes no cache, starts no thread."""
        with DatasetIterator(self, Context(self.options(), probing=True)) as iterator:
            yield from iterator

    def options(self) -> Options:
        """What `with_options` said, in this dataset and those below it; defaults for the rest."""
        options = Options()
        for each in self.walk():
            if each.op.name == "options":
                options.update(each.op.options)  # type: ignore[attr-defined]
        return options

    # -- the tree --

    def walk(self) -> list[Tree]:
        """Every dataset in the tree once, inputs first, this one last."""
        found: dict[int, Tree] = {}

        def visit(dataset: Tree) -> None:
            if id(dataset) not in found:
                for each in dataset.inputs:
                    visit(each)
                found[id(dataset)] = dataset

        visit(self)
        return list(found.values())

    def rewrite(self: T, change: Callable[[Any], Any]) -> T:
        """A copy in which each dataset is what `change` makes of it, inputs first; itself where nothing changed.

        `change` gets a dataset whose inputs are rewritten already, and returns it or another.
        """
        done: dict[int, Any] = {}
        for each in self.walk():
            inputs = tuple(done[id(one)] for one in each.inputs)
            same = all(one is other for one, other in zip(inputs, each.inputs, strict=True))
            done[id(each)] = change(each if same else type(self)(each.op, inputs))
        return done[id(self)]  # type: ignore[no-any-return]

    def has_functions(self) -> bool:
        """Whether its description holds opaque pickles."""
        return '"pickle"' in self.serialize()

    def serialize(self) -> str:
        """The tree as JSON, for `deserialize`.

        Raises:
          FailedPreconditionError: a function captures something that cannot be pickled; the cause says what.
        """
        nodes = self.walk()
        numbers = {id(each): number for number, each in enumerate(nodes)}
        try:
            described = [
                {"op": each.op.name, "args": each.op.describe(), "inputs": [numbers[id(one)] for one in each.inputs]}
                for each in nodes
            ]
        except InvalidArgumentError as error:
            raise FailedPreconditionError(f"the dataset cannot be serialized: {error}") from error
        return json.dumps({"version": FORMAT_VERSION, "nodes": described}, sort_keys=True, separators=(",", ":"))

    def fingerprint(self) -> str:
        """A hash of everything that decides what the pipeline computes: equal only for equal descriptions."""
        return hashlib.sha256(self.serialize().encode()).hexdigest()

    def explain(self) -> str:
        """The pipeline as text, a line for each operator, sources last; with cardinality and spec."""
        lines: list[str] = []

        def visit(dataset: Tree, depth: int) -> None:
            count = {INFINITE_CARDINALITY: "infinite", UNKNOWN_CARDINALITY: "unknown"}.get(
                number := dataset.cardinality(), str(number)
            )
            spec = dataset.known_spec
            form = "known at the first element" if spec is UNKNOWN_SPEC else repr(spec)
            lines.append(f"{'  ' * depth}{dataset.op.one_line()}: {count} elements, {form}")
            for each in dataset.inputs:
                visit(each, depth + 1)

        visit(self, 0)
        return "\n".join(lines)


def _fold(dataset: Tree, combine: Callable[[Tree, tuple[Any, ...]], Any]) -> Any:
    done: dict[int, Any] = {}
    for each in dataset.walk():
        done[id(each)] = combine(each, tuple(done[id(one)] for one in each.inputs))
    return done[id(dataset)]
