"""A joint graph as numbers: what a solver and an exact simulation of its choices read. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import sympy
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, layer_boundaries
from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    is_loss_gradient,
    is_number,
    is_output,
    is_scaling,
    is_tensor,
    storage_bytes,
)
from optimum_memopt.engines.compile.graph.layouts import Layouts, layouts_of
from optimum_memopt.engines.compile.graph.saved_activations import is_statistic, layer_of, module_in_layer
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, compile_sizes
from optimum_memopt.engines.compile.torch_compat import fx_graph


@dataclass(frozen=True)
class Positions:
    """Where nodes stand among the arguments and results of the compiled graph; None: nowhere.

    Attributes:
        inputs: of the forward's inputs that are tensors and no parameters, by node.
        outputs: of each of `Problem.forward_outputs`.
        tangents: of the output that each of `Problem.tangents` belongs to.
        gradients: of the input that each of `Problem.backward_outputs` is the gradient of.
        layouts: of tangents and gradients.
    """

    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: tuple[int | None, ...] = ()
    tangents: tuple[int | None, ...] = ()
    gradients: tuple[int | None, ...] = ()
    layouts: Layouts = field(default_factory=Layouts)


class Conversion(NamedTuple):
    """The operators with which one activation is compressed; numbers of nodes, or of others that stand for them.

    Attributes:
        forward: in order, behind the last of `readers`.
        backward: in order, before the first reader there; the last takes the activation's place.
        saved: what the forward saves instead.
        readers: operators that read the activation in the forward, and itself.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved: tuple[int, ...]
    readers: frozenset[int]

    def numbered(self, number: Callable[[int], int]) -> "Conversion":
        """The same with other numbers."""
        forward, backward, saved = (tuple(map(number, nodes)) for nodes in self[:3])
        return Conversion(forward, backward, saved, frozenset(map(number, self.readers)))


@dataclass(frozen=True)
class Problem:
    """A joint graph whose nodes are numbered in its order; tuples have an entry a node.

    Attributes:
        kinds: operators, as text.
        reads: nodes that each reads.
        roots: the node that allocates the storage that each lies in.
        bytes: of the storage of a root that is a tensor, else 0.
        workspaces: bytes that an operator holds beside its results while it runs.
        layers: path of the transformer layer, "" outside of all.
        modules: path of the module in its layer, outside of layers in the model; empty for the problem of a tape.
        runs: which run of a tape's graphs it is in; 0 in one graph.
        is_input: placeholders of the joint graph, gradients among them.
        is_operator: `call_function`; a view and the pick of an output too.
        is_backward: computed from a gradient.
        is_tensor: not a number, nor a tuple.
        is_view: allocates nothing.
        picks: the operator that a pick of an output belongs to, else None.
        is_kept: must not run twice: it draws random numbers, or reads what is written to.
        is_statistic: a reduction's row, which every plan by name saves.
        tangents: gradients that the backward is given.
        activations: roots of the saved activations.
        boundaries: roots computed in one layer and read in another.
        constants: saved activations that no plan by name saves.
        writes: the forward writes to an input, as to running statistics, and must not run twice.
        conversions: of each activation that may be compressed; they stand behind the graph's own nodes.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    roots: tuple[int, ...]
    bytes: tuple[int, ...]
    workspaces: tuple[int, ...]
    seconds: tuple[float, ...]
    layers: tuple[str, ...]
    runs: tuple[int, ...]
    is_input: tuple[bool, ...]
    is_operator: tuple[bool, ...]
    is_backward: tuple[bool, ...]
    is_tensor: tuple[bool, ...]
    is_number: tuple[bool, ...]
    is_view: tuple[bool, ...]
    picks: tuple[int | None, ...]
    is_kept: tuple[bool, ...]
    is_statistic: tuple[bool, ...]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    backward_reads: tuple[int, ...]
    activations: frozenset[int]
    boundaries: frozenset[int]
    constants: frozenset[int] = frozenset()
    writes: bool = False
    modules: tuple[str, ...] = ()
    positions: Positions = field(default_factory=Positions)
    conversions: Mapping[int, Conversion] = field(default_factory=dict)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        users: list[list[int]] = [[] for _ in self.names]
        for node, reads in enumerate(self.reads):
            for read in reads:
                users[read].append(node)
        return tuple(map(tuple, users))

    @cached_property
    def allocates(self) -> tuple[tuple[int, ...], ...]:
        """Roots that each operator allocates; of those of several outputs, what is picked in the same graph counts."""
        roots: list[tuple[int, ...]] = []
        for node, users in enumerate(self.users):
            if not self.is_operator[node] or self.is_view[node]:
                roots.append(())
            elif self.is_tensor[node]:
                roots.append((node,) if self.picks[node] is None else ())
            else:
                roots.append(tuple(user for user in users if self.picks[user] == node and self.is_tensor[user]))
        return tuple(roots)

    @cached_property
    def tables(self) -> "Tables":
        return Tables(self)

    @cached_property
    def is_forward(self) -> tuple[bool, ...]:
        return tuple(not (given or own) for given, own in zip(self.is_input, self.is_backward, strict=True))

    @cached_property
    def numbers(self) -> frozenset[int]:
        """Those of the forward, which the backward is given."""
        return frozenset(node for node, is_number in enumerate(self.is_number) if is_number and self.is_forward[node])

    @cached_property
    def backward_operators(self) -> tuple[int, ...]:
        """The backward's own operators, from the first reader of a gradient on, in order."""
        needed = self.needed(self.backward_outputs)
        readers = (user for node in self.tangents for user in self.users[node] if user in needed)
        first = min(readers, default=len(self.names))
        later = (node for node in sorted(needed) if node >= first)
        return tuple(node for node in later if self.is_backward[node] and self.is_operator[node])

    def needed(self, targets: Iterable[int], available: Collection[int] = ()) -> set[int]:
        """The nodes that have to run for `targets`, without inputs and without what is `available`."""
        done = bytearray(self.is_input)
        for node in available:
            done[node] = 1
        nodes: set[int] = set()
        todo = list(targets)
        while todo:
            node = todo.pop()
            if not done[node]:
                done[node] = 1
                nodes.add(node)
                todo.extend(self.reads[node])
        return nodes

    def saving(self, nodes: Iterable[int]) -> frozenset[int]:
        """The nodes that the forward saves with the storages of `nodes`; torch's own partition saves views, too."""
        return self.closure({self.roots[node] for node in nodes})

    def closure(self, kept: Collection[int]) -> frozenset[int]:
        """The nodes that the forward saves if all roots in `kept` that the backward's reads lead to are saved; reads
        are followed as by `analyzed_graph.nodes_to_save`."""
        saved: set[int] = set()
        seen: set[int] = set()
        todo = list(self.backward_reads)
        while todo:
            node = todo.pop()
            if node in seen or self.is_input[node] or self.is_number[node]:
                continue
            seen.add(node)
            if node in kept or (self.is_kept[node] and self.is_tensor[node]):
                saved.add(node)
            else:
                todo.extend(self.reads[node])
        return frozenset(saved)


def _scaled_in_place(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """Products that scale a gradient of the chunked loss in place (`loss.operator.scale_in_place`), with it."""
    products = {}
    for gradient in filter(is_loss_gradient, joint.forward):
        readers = [user for user in gradient.users if user in joint.backward]
        if len(readers) == 1 and is_scaling(readers[0], gradient):
            products[readers[0]] = gradient
    return products


def _positions(graph: AnalyzedGraph, number: Mapping[fx.Node, int], tangents: Sequence[fx.Node]) -> Positions:
    joint, count = graph.joint, graph.joint.num_fwd_outputs
    outputs = fx_graph.output_positions(joint.module.graph)[:count]
    gradients = fx_graph.gradient_positions(joint.module.graph)[count:]
    places = {node: fx_graph.input_position(node) for node in joint.inputs if is_tensor(node)}
    inputs = {number[node]: at for node, at in places.items() if at is not None and node not in graph.static_inputs}
    returned = zip(gradients, joint.outputs[count:], strict=True)
    return Positions(
        inputs,
        tuple(at for at, node in zip(outputs, joint.outputs[:count], strict=True) if isinstance(node, fx.Node)),
        tuple(map(fx_graph.tangent_position, tangents)),
        tuple(at for at, node in zip(gradients, joint.outputs[count:], strict=True) if isinstance(node, fx.Node)),
        layouts_of(tangents, ((at, node) for at, node in returned if at in inputs.values())),
    )


def problem_of(graph: AnalyzedGraph, seconds: Sequence[float], workspaces: Sequence[int] = ()) -> Problem:
    """The numbers for the sizes of the first batch; seconds, and workspaces in bytes if measured, are of all nodes."""
    return problems_of(graph, seconds, workspaces)(graph.size_hints)


def problems_of(
    graph: AnalyzedGraph, seconds: Sequence[float], measured: Sequence[int] = ()
) -> Callable[[SymbolValues], Problem]:
    """The numbers of a joint graph for any sizes, with the same seconds; see `problem_of`."""
    joint = graph.joint
    nodes = [node for node in joint.nodes if node.op != "output"]
    number = {node: index for index, node in enumerate(nodes)}
    scaled = _scaled_in_place(joint)
    # None: nothing is held for it.
    storages = [None if (of := graph.inlined.root(node)) is None else scaled.get(of, of) for node in nodes]
    roots = [of or node for node, of in zip(nodes, storages, strict=True)]
    sizes = [
        # A constant of the graph is there from the beginning, and stays.
        storage_bytes(node) if is_tensor(node) and of is node and node.op != "get_attr" else sympy.Integer(0)
        for node, of in zip(nodes, storages, strict=True)
    ]
    workspaces = [graph.workspaces.get(node, sympy.Integer(0)) for node in nodes]
    bytes_of, workspaces_of = compile_sizes(sizes), compile_sizes(workspaces)

    def all_of(values: Iterable[object]) -> tuple[int, ...]:
        return tuple(number[node] for node in values if isinstance(node, fx.Node))

    roots_to_save = {activation.root for activation in graph.activations}
    tangents = [node for node in nodes if node.op == "placeholder" and node in joint.backward and is_tensor(node)]
    first = Problem(
        names=tuple(node.name for node in nodes),
        kinds=tuple(str(node.target) for node in nodes),
        reads=tuple(all_of(node.all_input_nodes) for node in nodes),
        roots=tuple(number[node] for node in roots),
        bytes=tuple(bytes_of(graph.size_hints)),
        workspaces=tuple(workspaces_of(graph.size_hints)),
        seconds=tuple(seconds[: len(nodes)]),
        layers=tuple(layer_of(node) if node.op == "call_function" else "" for node in nodes),
        runs=(0,) * len(nodes),
        is_input=tuple(node.op == "placeholder" for node in nodes),
        is_operator=tuple(node.op == "call_function" for node in nodes),
        is_backward=tuple(node in joint.backward for node in nodes),
        is_tensor=tuple(map(is_tensor, nodes)),
        is_number=tuple(map(is_number, nodes)),
        is_view=tuple(node in scaled or graph.inlined.is_view(node) for node in nodes),
        picks=tuple(number[node.all_input_nodes[0]] if is_output(node) else None for node in nodes),
        is_kept=tuple(node.op == "call_function" and joint.is_impure(node) for node in nodes),
        is_statistic=tuple(node.op == "call_function" and is_statistic(node) for node in nodes),
        forward_outputs=all_of(joint.forward_outputs),
        backward_outputs=all_of(joint.backward_outputs),
        tangents=all_of(tangents),
        backward_reads=all_of(joint.backward_reads()),
        activations=frozenset(all_of(roots_to_save)),
        boundaries=frozenset(all_of(layer_boundaries(graph))),
        constants=frozenset(all_of(roots_to_save & graph.constants)),
        writes=bool(joint.mutated_inputs),
        modules=tuple(module_in_layer(node) if node.op == "call_function" else "" for node in nodes),
        positions=_positions(graph, number, tangents),
    )

    def at(values: SymbolValues) -> Problem:
        bytes_now, workspaces_now = bytes_of(values), list(workspaces_of(values))
        # Nothing of the graph itself, which may be gone by then.
        for node, most in enumerate(measured[: len(workspaces_now)]):
            if most:
                # Buffers for operands are as large as these.
                operands = [first.roots[read] for read in first.reads[node]]
                before, now = (sum(sizes[root] for root in operands) for sizes in (first.bytes, bytes_now))
                workspaces_now[node] = max(workspaces_now[node], most * now // max(1, before))
        return replace(first, bytes=tuple(bytes_now), workspaces=tuple(workspaces_now))

    return at


class Tables:
    """Arrays by node, and the parts of a run's order that are the same for all choices."""

    def __init__(self, problem: Problem) -> None:
        reads, roots, own = problem.reads, problem.roots, set(problem.backward_operators)
        self.sizes = np.array(problem.bytes, dtype=np.int64)
        self.workspaces = np.array(problem.workspaces, dtype=np.int64)
        # Operators that allocate a storage of their own, whether anything reads it or not.
        self.owns = np.array([root == node and problem.is_operator[node] for node, root in enumerate(roots)], bool)
        self.roots = np.array(roots, dtype=np.intp)
        # What all nodes read, one node's after the other's; how many are each node's, and where they begin.
        self.read_nodes = np.array([read for of_node in reads for read in of_node], dtype=np.intp)
        self.reads = np.array(list(map(len, reads)), dtype=np.intp)
        self.first_read = np.cumsum(self.reads) - self.reads
        # Roots that operators allocate, and the operator of each.
        pairs = [(storage, node) for node, storages in enumerate(problem.allocates) for storage in storages]
        self.storages = np.array([storage for storage, _ in pairs], dtype=np.intp)
        self.allocators = np.array([node for _, node in pairs], dtype=np.intp)
        self.picks = np.array([-1 if source is None else source for source in problem.picks], dtype=np.intp)
        self.read_numbers = [tuple(read for read in of_node if read in problem.numbers) for of_node in reads]
        # Each of the backward's own operators, and what else it reads that is computed.
        self.backward = [
            (node, tuple(read for read in reads[node] if read not in own and not problem.is_input[read]))
            for node in problem.backward_operators
        ]
        # What the forward's outputs need.
        self.always = problem.needed(problem.forward_outputs)
