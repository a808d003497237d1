"""The conversions of a graph's activations to fp8 and back, as operators with bytes and seconds: for the solver and
its simulation, before the graph is partitioned."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
from torch import fx

from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, decides
from optimum_memopt.engines.compile.graph.candidates import compressions
from optimum_memopt.engines.compile.graph.joint import JointGraph, is_view, storage_bytes, tensor_value
from optimum_memopt.engines.compile.graph.problem import Conversion, Problem
from optimum_memopt.engines.compile.graph.symbols import CompiledSizes, SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.schedule import workspace
from optimum_memopt.engines.compile.partition.strategies.compress import (
    from_fp8,
    placeholder,
    to_fp8,
    with_conversions,
)


class _Operator(NamedTuple):
    """An operator of a conversion.

    Attributes:
        reads: indices of its operands among the operators of the kind; -1 for the activation.
        root: the index of the operator that allocates its storage; -1 for the activation.
        size: the index of its bytes in `Conversions.bytes_of`.
        workspace: the index of its workspace's bytes in `Conversions.bytes_of`.
        cost: the index of its seconds in `Conversions.seconds`.
    """

    name: str
    kind: str
    reads: tuple[int, ...]
    root: int
    size: int
    workspace: int
    cost: int


class _Kind(NamedTuple):
    """The operators for activations of one dtype, shape and strides, the forward's before the backward's.

    Attributes:
        to_fp8: number of operators in the forward.
        saved: indices of the operators that compute the fp8 tensor and the scales.
    """

    operators: tuple[_Operator, ...]
    to_fp8: int
    saved: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Conversions:
    """The conversions of one joint graph's activations that may be compressed.

    Attributes:
        kinds: the conversion's kind, by the activation's number in the graph.
        readers: the activation itself and its readers in the forward, by its number in the graph.
        deciding: operators of the forward that compute integers from their operands, see `decided_from`.
        bytes_of: evaluates the sizes to which `_Operator` has indices.
        graphs: a graph for the forward and one for the backward, with the operators of all kinds.
        seconds: seconds of the nodes of both graphs, in order.
    """

    kinds: Mapping[int, _Kind]
    readers: Mapping[int, frozenset[int]]
    deciding: frozenset[int]
    bytes_of: CompiledSizes
    graphs: tuple[AnalyzedGraph, ...]
    seconds: tuple[float, ...]

    def priced(self, seconds: Iterable[float]) -> "Conversions":
        """Returns the conversions with other seconds."""
        return replace(self, seconds=tuple(seconds))

    def added_to(self, problem: Problem, values: SymbolValues) -> Problem:
        """Appends all conversions to the nodes of a graph's problem; one runs only if its activation is compressed."""
        bytes_of = self.bytes_of(values)
        columns: dict[str, list[object]] = {name: list(getattr(problem, name)) for name in _COLUMNS}
        added: dict[int, Conversion] = {}
        for activation, kind in self.kinds.items():
            first = len(columns["names"])

            def number(place: int, activation: int = activation, first: int = first) -> int:
                return activation if place < 0 else first + place

            for place, operator in enumerate(kind.operators):
                is_own = operator.root == place
                row = {
                    **_NO,
                    "names": f"{problem.names[activation]}{operator.name}",
                    "kinds": operator.kind,
                    "reads": tuple(map(number, operator.reads)),
                    "roots": number(operator.root),
                    "bytes": bytes_of[operator.size] if is_own else 0,
                    "workspaces": bytes_of[operator.workspace],
                    "seconds": self.seconds[operator.cost],
                    "layers": problem.layers[activation],
                    "modules": problem.modules[activation],
                    "runs": problem.runs[activation],
                    "is_backward": place >= kind.to_fp8,
                    "is_view": not is_own,
                }
                for name, column in columns.items():
                    column.append(row[name])
            end = len(columns["names"])
            added[activation] = Conversion(
                tuple(range(first, first + kind.to_fp8)),
                tuple(range(first + kind.to_fp8, end)),
                tuple(map(number, kind.saved)),
                self.readers[activation],
            )
        extended: dict[str, Any] = {name: tuple(column) for name, column in columns.items()}
        return replace(problem, **extended, conversions=added)


_NO = {
    "picks": None,
    **dict.fromkeys(("is_operator", "is_tensor"), True),
    **dict.fromkeys(("is_input", "is_number", "is_kept", "is_statistic"), False),
}
_COLUMNS = (
    *_NO, "names", "kinds", "reads", "roots", "bytes", "workspaces", "seconds", "layers", "modules", "runs",
    "is_backward", "is_view",
)  # fmt: skip


def conversions_of(graph: AnalyzedGraph, costs_of: Callable[[AnalyzedGraph], Costs]) -> Conversions:
    """Returns the conversions of a graph's candidates.

    Args:
        costs_of: prices the operators of a graph, see `Costs`.
    """
    candidates = compressions(graph.candidates)
    graphs = forward, backward = fx.Graph(), fx.Graph()
    # The first activation of a kind represents all others.
    found: dict[object, _Nodes] = {}
    kind_of: dict[fx.Node, object] = {}
    for activation in (candidate.activation.root for candidate in candidates):
        tensor = tensor_value(activation)
        kind_of[activation] = kind = (tensor.dtype, *map(str, (*tensor.shape, *tensor.stride())))
        if kind not in found:
            found[kind] = _nodes(forward, backward, activation)
    forward.output([node for nodes in found.values() for node in nodes.saved])
    backward.output([nodes.restored for nodes in found.values()])
    inlined = with_conversions(graph.inlined, candidates)
    analyzed = tuple(replace(graph, joint=JointGraph(fx.GraphModule({}, each), 0)) for each in graphs)
    seconds = [costs_of(each).seconds if found else (0.0,) * len(each.joint.nodes) for each in analyzed]
    costs = {node: place for place, node in enumerate(node for each in analyzed for node in each.joint.nodes)}
    sizes: dict[sympy.Expr, int] = {}

    def place_of(size: sympy.Expr) -> int:
        return sizes.setdefault(size, len(sizes))

    def kind_with(nodes: _Nodes) -> _Kind:
        operators = (*nodes.to_fp8, *nodes.from_fp8)
        places = {nodes.activation.name: -1, **{node.name: place for place, node in enumerate(operators)}}
        made = []
        for node in operators:
            storage = inlined.root(node)
            assert storage is not None
            made.append(
                _Operator(
                    node.name.removeprefix(nodes.activation.name),
                    str(node.target),
                    tuple(places[read.name] for read in node.all_input_nodes),
                    places[storage.name],
                    place_of(storage_bytes(node)),
                    place_of(workspace(node, graph.cuda)),
                    costs[node],
                )
            )
        in_fp8, scale = nodes.saved
        return _Kind(tuple(made), len(nodes.to_fp8), (places[in_fp8.name], places[scale.name]))

    kinds = {name: kind_with(nodes) for name, nodes in found.items()}
    order = graph.joint.order
    return Conversions(
        {order[activation]: kinds[name] for activation, name in kind_of.items()},
        {order[node]: frozenset(order[each] for each in _reading(node) if each in order) for node in kind_of},
        frozenset(order[node] for node in graph.joint.forward if decides(node)),
        compile_sizes(sizes),
        analyzed,
        tuple(itertools.chain(*seconds)),
    )


class _Nodes(NamedTuple):
    """The nodes that convert one activation, in a forward and a backward graph."""

    activation: fx.Node
    to_fp8: list[fx.Node]
    from_fp8: list[fx.Node]
    saved: tuple[fx.Node, fx.Node]
    restored: fx.Node


def _nodes(forward: fx.Graph, backward: fx.Graph, activation: fx.Node) -> _Nodes:
    before = [len(graph.nodes) for graph in (forward, backward)]
    saved = to_fp8(forward, placeholder(forward, activation))
    given = [placeholder(backward, node) for node in (activation, *saved)]
    restored = from_fp8(backward, *given)
    first, second = (
        [node for node in list(graph.nodes)[count:] if node.op == "call_function"]
        for graph, count in zip((forward, backward), before, strict=True)
    )
    return _Nodes(activation, first, second, saved, restored)


def _reading(node: fx.Node) -> list[fx.Node]:
    """Returns the node, its views, and the operators that read them."""
    found = [node]
    for user in node.users:
        found += _reading(user) if is_view(user) else [user]
    return found
