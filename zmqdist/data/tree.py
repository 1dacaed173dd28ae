"""The class `Tree`: a dataset as a tree of operators, with the facts about the pipeline that are
known without running it.

Rules
    A tree is immutable. Operators return new trees, which share their common parts, and `rewrite`
    returns a changed copy. The cardinality, the options, the known spec, the description and the
    fingerprint are computed without running an operator.

    A description is JSON. It is a list of nodes, inputs first, so that a dataset that is used twice
    is only one node. Everything in it is readable except functions, which are pickles
    (ops/base.py).

Not here: the operators (ops/), the methods that users chain (dataset.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import FORMAT_VERSION, Memory
from zmqdist.data.iterators import Context, DatasetIterator
from zmqdist.data.ops.base import Op
from zmqdist.data.options import Options
from zmqdist.data.structure import UNKNOWN_SPEC, NoElements, read_only
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.type_variables import T_co

T = TypeVar("T", bound="Tree")


class Tree(Generic[T_co]):
    """An operator with its inputs. This is the base class of `Dataset`, which is the class that
    users see.

    Attributes:
      op: the operator.
      inputs: the datasets that the operator reads.
      memory: the state that the iterators of this object share (interfaces.py).
    """

    __slots__ = ("__weakref__", "_spec", "inputs", "memory", "op")

    def __init__(self, op: Op, inputs: Sequence[Tree] = ()) -> None:
        self.op = op
        self.inputs = tuple(inputs)
        self.memory = Memory()
        self._spec: Any = None

    def __repr__(self) -> str:
        spec = self.known_spec
        return f"<{type(self).__name__} {self.op.one_line()}, element_spec={spec!r}>"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        return [("", line.replace("  ", "\u2007\u2007")) for line in self.explain().splitlines()]

    # -- iterating --

    def __iter__(self) -> DatasetIterator[T_co]:
        return DatasetIterator(self, Context(self.options()))

    def as_numpy_iterator(self) -> Iterator[T_co]:
        """Return an iterator over the elements, whose arrays are read-only.

        >>> [array.flags.writeable for array in Dataset.range(4).batch(2).as_numpy_iterator()]
        [False, False]
        """
        return map(read_only, self)

    def __bool__(self) -> bool:
        return True  # without `__bool__`, bool() would call len(), which raises for most datasets

    def __len__(self) -> int:
        """Return the number of elements. Raises TypeError if the number is infinite or unknown."""
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("the dataset is infinite")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("the length of the dataset is unknown: only reading it would show it")
        return count

    def cardinality(self) -> int:
        """Return the number of elements, INFINITE_CARDINALITY, or UNKNOWN_CARDINALITY if only
        reading the dataset would show the number.

        >>> Dataset.range(10).batch(4).cardinality()
        3
        """
        return int(_fold(self, lambda dataset, counts: dataset.op.cardinality(counts)))

    @property
    def element_spec(self) -> Any:
        """The spec of the elements: their structure, with a TensorSpec for each leaf, or a
        DatasetSpec for a leaf that is a dataset.

        The spec is known without computing elements, unless the elements come from a function or
        source without `output_signature`. Then the first use of this property computes the first
        element, once, and assumes that all elements have the shapes of the first. The function runs
        in this process for that, even if the pipeline is meant to run elsewhere.

        Raises:
          FailedPreconditionError: the dataset is empty, and so has no first element; or it is from
            `from_dataset_id`, and the service does not know its spec.
        """
        if self._spec is None:
            field = self.op.spec_field
            is_declared = bool(field) and getattr(self.op, field) is not None
            # the inputs may have to compute an element for theirs
            specs = [] if is_declared else [dataset.element_spec for dataset in self.inputs]
            spec = self.op.element_spec(tuple(specs))
            self._spec = self._infer() if spec is UNKNOWN_SPEC else spec
        return self._spec

    @property
    def known_spec(self) -> Any:
        """The `element_spec`, or UNKNOWN_SPEC if an element would have to be computed to learn
        it.
        """
        if self._spec is not None:
            return self._spec
        inputs = tuple(dataset.known_spec for dataset in self.inputs)
        return (
            UNKNOWN_SPEC
            if any(spec is UNKNOWN_SPEC for spec in inputs)
            else self.op.element_spec(inputs)
        )

    @property
    def declared_spec(self) -> Any:
        """The `element_spec` without what a first element has shown: UNKNOWN_SPEC if an element
        would have to be computed, or was computed, to learn it. The shapes of later elements may
        differ from those of the first one, but not from declared ones.
        """

        def declared(dataset: Tree, specs: tuple[Any, ...]) -> Any:
            is_unknown = dataset.op.name == "elements" or any(
                spec is UNKNOWN_SPEC for spec in specs
            )
            return UNKNOWN_SPEC if is_unknown else dataset.op.element_spec(specs)

        return _fold(self, declared)

    def _infer(self) -> Any:
        spec = self.op.infer(self)
        if spec is UNKNOWN_SPEC:
            raise NoElements(
                f"the element_spec of an empty {self.op.name}() is unknown: give output_signature"
            )
        return spec

    def probe(self) -> Iterator[Any]:
        """Yield the elements without side effects: change no random numbers of later iterators,
        write no caches and start no threads.

        >>> print(*Dataset.range(3).probe())
        0 1 2
        """
        with DatasetIterator(self, Context(self.options(), probing=True)) as iterator:
            yield from iterator

    def options(self) -> Options:
        """Return the options that `with_options` has set in this dataset and in the datasets below
        it. All other options are None.

        >>> options = zd.data.Options()
        >>> options.deterministic = False
        >>> Dataset.range(3).with_options(options).batch(2).options().deterministic
        False
        """
        options = Options()
        for node in self.walk():
            if node.op.name == "options":
                options.update(node.op.options)  # type: ignore[attr-defined]
        return options

    # -- the tree --

    def walk(self) -> list[Tree]:
        """Return every dataset in the tree once, inputs first and this dataset last.

        >>> [dataset.op.name for dataset in Dataset.range(3).batch(2).walk()]
        ['range', 'batch']
        """
        nodes: dict[int, Tree] = {}
        # A stack, because a function that calls itself is in a cycle of references, which would
        # keep the datasets until the garbage collector runs.
        stack: list[Tree] = [self]
        while stack:
            dataset = stack[-1]
            if waiting := [node for node in dataset.inputs if id(node) not in nodes]:
                stack += reversed(waiting)
            else:
                nodes[id(dataset)] = stack.pop()
        return list(nodes.values())

    def rewrite(self: T, change: Callable[[Any], Any]) -> T:
        """Return a copy in which each dataset is replaced by the result of `change`, inputs first.
        Return `self` if no dataset was changed.

        >>> dataset = Dataset.range(3).batch(2)
        >>> dataset.rewrite(lambda part: part) is dataset
        True

        Args:
          change: a function that gets a dataset whose inputs are already rewritten, and returns
            this dataset or a replacement.
        """
        rewritten: dict[int, Any] = {}
        for node in self.walk():
            inputs = tuple(rewritten[id(new)] for new in node.inputs)
            unchanged = all(new is old for new, old in zip(inputs, node.inputs, strict=True))
            rewritten[id(node)] = change(node if unchanged else type(self)(node.op, inputs))
        return rewritten[id(self)]  # type: ignore[no-any-return]

    def has_functions(self) -> bool:
        """Return whether the description contains functions, which are pickles.

        >>> Dataset.range(3).has_functions(), Dataset.range(3).map(lambda x: -x).has_functions()
        (False, True)
        """
        return '"pickle"' in self.serialize()

    def serialize(self) -> str:
        """Return the tree as JSON, for `deserialize`.

        >>> from zmqdist.data.dataset import deserialize
        >>> print(*deserialize(Dataset.range(3).serialize()))
        0 1 2

        Raises:
          FailedPreconditionError: a function captures an object that cannot be pickled. The error
            text names the object.
        """
        nodes = self.walk()
        numbers = {id(node): number for number, node in enumerate(nodes)}
        try:
            described = [
                {
                    "op": node.op.name,
                    "args": node.op.describe(),
                    "inputs": [numbers[id(node_input)] for node_input in node.inputs],
                }
                for node in nodes
            ]
        except InvalidArgumentError as error:
            raise FailedPreconditionError(f"the dataset cannot be serialized: {error}") from error
        return json.dumps(
            {"version": FORMAT_VERSION, "nodes": described}, sort_keys=True, separators=(",", ":")
        )

    def fingerprint(self) -> str:
        """Return a hash of the description. Datasets with equal hashes have the same operators with
        the same arguments.

        >>> Dataset.range(3).fingerprint() == Dataset.range(3).fingerprint()
        True
        """
        return hashlib.sha256(self.serialize().encode()).hexdigest()

    def explain(self) -> str:
        """Return the pipeline as text: one line for each operator, with its cardinality and spec,
        sources last.

        >>> print(Dataset.range(3).batch(2).explain())
        batch(size=2): 2 elements, TensorSpec(shape=(None,), ...)
          range(...): 3 elements, TensorSpec(shape=(), ...)
        """
        lines: list[str] = []

        def visit(dataset: Tree, depth: int) -> None:
            count = {INFINITE_CARDINALITY: "infinite", UNKNOWN_CARDINALITY: "unknown"}.get(
                number := dataset.cardinality(), str(number)
            )
            spec = dataset.known_spec
            form = "spec known at the first element" if spec is UNKNOWN_SPEC else repr(spec)
            lines.append(f"{'  ' * depth}{dataset.op.one_line()}: {count} elements, {form}")
            for dataset_input in dataset.inputs:
                visit(dataset_input, depth + 1)

        visit(self, 0)
        return "\n".join(lines)


def _fold(dataset: Tree, combine: Callable[[Tree, tuple[Any, ...]], Any]) -> Any:
    results: dict[int, Any] = {}
    for node in dataset.walk():
        results[id(node)] = combine(
            node, tuple(results[id(node_input)] for node_input in node.inputs)
        )
    return results[id(dataset)]
