"""A joint graph as numbers: the input of the solver and of the exact simulation of its choices. Pure."""

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
    is_accumulation,
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
from optimum_memopt.engines.torch_compat import fx_graph


@dataclass(frozen=True)
class Positions:
    """Positions of nodes among the arguments and results of the compiled graph; None: it has no position.

    Attributes:
        inputs: positions of the forward's inputs that are tensors and no parameters, by node.
        outputs: the position of each of `Problem.forward_outputs`.
        tangents: for each of `Problem.tangents`, the position of its output.
        gradients: for each of `Problem.backward_outputs`, the position of the input that it is the gradient of.
        layouts: memory layouts of tangents and gradients.
    """

    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: tuple[int | None, ...] = ()
    tangents: tuple[int | None, ...] = ()
    gradients: tuple[int | None, ...] = ()
    layouts: Layouts = field(default_factory=Layouts)


class Conversion(NamedTuple):
    """The operators that compress one activation and restore it, as node numbers of some problem.

    Attributes:
        forward: operators of the forward, in order; they run after the last of `readers`.
        backward: operators of the backward, in order; they run before its first reader, and the last one replaces the
            activation.
        saved: nodes that the forward saves instead.
        readers: operators that read the activation in the forward, and the activation itself.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved: tuple[int, ...]
    readers: frozenset[int]

    def numbered(self, number: Callable[[int], int]) -> "Conversion":
        """Returns the conversion with renumbered nodes."""
        forward, backward, saved = (tuple(map(number, nodes)) for nodes in self[:3])
        return Conversion(forward, backward, saved, frozenset(map(number, self.readers)))


@dataclass(frozen=True)
class Problem:
    """A joint graph with numbered nodes, in its order; most tuples have one entry per node.

    Attributes:
        kinds: operators, as text.
        reads: the nodes that each node reads.
        roots: the node that allocates each node's storage.
        bytes: bytes of the storage of a root that is a tensor, else 0.
        workspaces: bytes that an operator holds in addition to its results while it runs.
        layers: path of the transformer layer, "" outside of all layers.
        modules: path of the module within its layer, or in the model outside of layers; empty for a tape's problem.
        runs: index of the node's run in a tape; 0 in a single graph.
        is_input: the node is a placeholder of the joint graph, gradients included.
        is_operator: the node is a `call_function`, views and picks of an output included.
        is_backward: the node is computed from a gradient.
        is_tensor: the node is not a number, nor a tuple.
        is_view: the node allocates nothing.
        picks: the operator whose output a node picks, else None.
        is_kept: the node must not run twice: it draws random numbers, or reads an input that is written to.
        is_statistic: the node is a reduction's row, which every plan by name saves.
        tangents: gradients that are passed to the backward.
        activations: roots of the saved activations.
        boundaries: roots computed in one layer and read in another.
        constants: saved activations that no plan by name saves.
        writes: the forward writes to an input, such as running statistics, and must not run twice.
        conversions: the conversion of each activation that may be compressed; its nodes follow the graph's own.
        accumulations: nodes that accumulate a gradient in place.
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
    accumulations: frozenset[int] = frozenset()

    def with_earlier_gradients(self) -> "Problem":
        """Returns the problem of a later micro-batch, whose `accumulations` take no memory."""
        if not self.accumulations:
            return self
        sizes = (0 if node in self.accumulations else size for node, size in enumerate(self.bytes))
        return replace(self, bytes=tuple(sizes))

    def without_earlier_gradients(self) -> "Problem":
        """Returns the problem of a step of one micro-batch, whose backward returns the gradients themselves."""
        if not self.accumulations:
            return self
        roots, is_view = list(self.roots), list(self.is_view)
        for node in self.accumulations:
            (gradient,) = self.reads[node]
            roots[node], is_view[node] = roots[gradient], True
        return replace(self.with_earlier_gradients(), roots=tuple(roots), is_view=tuple(is_view))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        users: list[list[int]] = [[] for _ in self.names]
        for node, reads in enumerate(self.reads):
            for read in reads:
                users[read].append(node)
        return tuple(map(tuple, users))

    @cached_property
    def allocates(self) -> tuple[tuple[int, ...], ...]:
        """Returns the roots that each operator allocates; for a multi-output operator, the outputs that are picked."""
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
        """Returns the forward's numbers, which are passed to the backward."""
        return frozenset(node for node, is_number in enumerate(self.is_number) if is_number and self.is_forward[node])

    @cached_property
    def backward_operators(self) -> tuple[int, ...]:
        """Returns the backward's own operators in order, starting with the first reader of a gradient."""
        needed = self.needed(self.backward_outputs)
        readers = (user for node in self.tangents for user in self.users[node] if user in needed)
        first = min(readers, default=len(self.names))
        later = (node for node in sorted(needed) if node >= first)
        return tuple(node for node in later if self.is_backward[node] and self.is_operator[node])

    def needed(self, targets: Iterable[int], available: Collection[int] = ()) -> set[int]:
        """Returns the nodes that must run to compute `targets`, without inputs and `available` nodes."""
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
        """Returns the nodes that the forward saves for the storages of `nodes`, which may be views, since torch's own
        partition saves views."""
        return self.closure({self.roots[node] for node in nodes})

    def closure(self, kept: Collection[int]) -> frozenset[int]:
        """Returns the nodes that the forward saves if it saves every root in `kept` that the backward's reads lead to;
        reads are followed as in `analyzed_graph.nodes_to_save`."""
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
    """Returns the gradient of the chunked loss for each product that scales it in place, see
    `loss.operator.scale_in_place`."""
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
    """Returns a graph's problem for the sizes of the first batch.

    Args:
        seconds: seconds of all nodes.
        workspaces: measured bytes of all nodes' workspaces; empty: not measured.
    """
    return problems_of(graph, seconds, workspaces)(graph.size_hints)


def problems_of(
    graph: AnalyzedGraph, seconds: Sequence[float], measured: Sequence[int] = ()
) -> Callable[[SymbolValues], Problem]:
    """Returns a function that makes a graph's problem for any sizes, with the same seconds; see `problem_of`."""
    joint = graph.joint
    nodes = [node for node in joint.nodes if node.op != "output"]
    number = {node: index for index, node in enumerate(nodes)}
    scaled = _scaled_in_place(joint)
    # None: no storage is held for the node.
    storages = [None if (of := graph.inlined.root(node)) is None else scaled.get(of, of) for node in nodes]
    roots = [of or node for node, of in zip(nodes, storages, strict=True)]
    sizes = [
        # A constant of the graph is held from the beginning to the end.
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
        accumulations=frozenset(number[node] for node in joint.backward_outputs if is_accumulation(node)),
    )

    def at(values: SymbolValues) -> Problem:
        bytes_now, workspaces_now = bytes_of(values), list(workspaces_of(values))
        # This closure must not use the graph, which may be gone by then.
        for node, most in enumerate(measured[: len(workspaces_now)]):
            if most:
                # Workspaces hold copies of operands, and grow like these.
                operands = [first.roots[read] for read in first.reads[node]]
                before, now = (sum(sizes[root] for root in operands) for sizes in (first.bytes, bytes_now))
                workspaces_now[node] = max(workspaces_now[node], most * now // max(1, before))
        return replace(first, bytes=tuple(bytes_now), workspaces=tuple(workspaces_now))

    return at


class Tables:
    """Arrays indexed by node, and the parts of a run's order that are the same for all choices."""

    def __init__(self, problem: Problem) -> None:
        reads, roots, own = problem.reads, problem.roots, set(problem.backward_operators)
        self.sizes = np.array(problem.bytes, dtype=np.int64)
        self.workspaces = np.array(problem.workspaces, dtype=np.int64)
        # Operators that allocate their own storage, whether or not anything reads it.
        self.owns = np.array([root == node and problem.is_operator[node] for node, root in enumerate(roots)], bool)
        self.roots = np.array(roots, dtype=np.intp)
        # The nodes that all nodes read, concatenated; their count for each node, and the index of its first one.
        self.read_nodes = np.array([read for of_node in reads for read in of_node], dtype=np.intp)
        self.reads = np.array(list(map(len, reads)), dtype=np.intp)
        self.first_read = np.cumsum(self.reads) - self.reads
        # Roots that operators allocate, and their allocating operators.
        pairs = [(storage, node) for node, storages in enumerate(problem.allocates) for storage in storages]
        self.storages = np.array([storage for storage, _ in pairs], dtype=np.intp)
        self.allocators = np.array([node for _, node in pairs], dtype=np.intp)
        self.picks = np.array([-1 if source is None else source for source in problem.picks], dtype=np.intp)
        self.read_numbers = [tuple(read for read in of_node if read in problem.numbers) for of_node in reads]
        # The backward's own operators, each with the nodes that it reads which are neither inputs nor such operators.
        self.backward = [
            (node, tuple(read for read in reads[node] if read not in own and not problem.is_input[read]))
            for node in problem.backward_operators
        ]
        # Nodes that the forward's outputs need.
        self.always = problem.needed(problem.forward_outputs)
