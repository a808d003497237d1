"""Joint graphs of real models as the engine's backend gets them, and what the engine makes of them."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.capture.backend import compile_graph
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, by_row
from optimum_memopt.engines.compile.graph.joint import JointGraph, symbolic, value
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.graph.saved_activations import SavedActivation, operator_name
from optimum_memopt.engines.compile.graph.symbols import symbol_names
from optimum_memopt.engines.compile.partition import partitioned_graph
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.torch_compat import dynamo, fx_graph, traced_sizes
from tests.compiled import selection


@dataclass(frozen=True)
class Parts:
    """Forward and backward of a graph under a selection."""

    graph: PartitionedGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int

    @cached_property
    def order(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.backward.graph.nodes)}

    @property
    def saved_for_backward(self) -> list[fx.Node]:
        """Nodes that the forward saves beside its inputs, in order."""
        (output,) = self.forward.graph.find_nodes(op="output")
        rest = output.args[0][self.num_fwd_outputs :]
        return [node for node in rest if isinstance(node, fx.Node) and node.op != "placeholder"]

    @property
    def operators_of_backward(self) -> list[str]:
        return [operator_name(node) for node in self.backward.graph.nodes if node.op == "call_function"]

    def recomputed(self, joint: JointGraph) -> list[str]:
        """Names of the forward's operators that the backward runs again, in its order."""
        forward = {node.name for node in joint.forward}
        nodes = self.backward.graph.nodes
        return [node.name for node in nodes if node.op == "call_function" and node.name in forward]


class Executed(fx.Interpreter):
    """Runs a joint graph on real tensors of ones, and keeps what every node computed.

    Attributes:
        made: by node; nothing is freed, so that no two share an address by accident.
    """

    def __init__(self, joint: JointGraph, sizes: Mapping[sympy.Symbol, int]) -> None:
        super().__init__(joint.module, garbage_collect_values=False)
        self.made: dict[fx.Node, Any] = {}
        given = [value(node) for node in joint.nodes if node.op == "placeholder"]
        with torch.no_grad():
            self.run(*(real(one, sizes) for one in given), enable_io_processing=False)

    def run_node(self, node: fx.Node) -> Any:
        self.made[node] = super().run_node(node)
        return self.made[node]


def real(given: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """A tensor of ones, a generator's state, or a number, for what a tracer put in its place."""
    if not isinstance(given, torch.Tensor):
        return int(symbolic(given).subs(sizes))
    if given.dtype == torch.uint8:
        return torch.get_rng_state()
    shape, strides = ([int(symbolic(one).subs(sizes)) for one in many] for many in (given.shape, given.stride()))
    return torch.empty_strided(shape, strides, dtype=given.dtype).fill_(1)


@dataclass(frozen=True)
class Captured:
    """A joint graph before anything was done to it."""

    module: fx.GraphModule
    inputs: Any
    num_fwd_outputs: int
    others: dict[str, Any]
    names: Mapping[sympy.Symbol, str]

    @cached_property
    def graph(self) -> AnalyzedGraph:
        """As the engine looks at it; not to be changed."""
        return partitioned_graph.analyze(self.copied(), self.inputs, self.num_fwd_outputs, self.others)

    @property
    def joint(self) -> JointGraph:
        return self.graph.joint

    @property
    def activations(self) -> tuple[SavedActivation, ...]:
        return self.graph.activations

    @property
    def sizes(self) -> Mapping[sympy.Symbol, int]:
        return self.graph.size_hints

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.graph.candidates

    @property
    def rows(self) -> dict[str, list[Candidate]]:
        return by_row(self.candidates)

    @property
    def configs(self) -> dict[str, int]:
        """Each row and how often it occurs."""
        return {row: len(candidates) for row, candidates in self.rows.items()}

    def choose(self, asked: str, *earlier: Choice) -> Choice:
        """Under a config or `level 1`."""
        return producer_for(selection(asked)).choose(self.graph, earlier)

    def split(self, asked: str = "") -> Parts:
        """Under a config, `level 1` or nothing; made once, and not to be changed."""
        if asked not in self._splits:
            graph, modules = self.partitioned(producer_for(selection(asked)))
            # Names come from the tracer, which is gone.
            named = dataclasses.replace(graph, names=self.names)
            self._splits[asked] = Parts(named, *modules, self.num_fwd_outputs)
        return self._splits[asked]

    def partitioned(self, producer: Producer, target: Device | None = None) -> tuple[PartitionedGraph, Modules]:
        """A copy of the graph as a producer chooses for it, planned for a device."""
        cuda = target.cuda if target is not None else None
        graph = partitioned_graph.analyze(self.copied(), self.inputs, self.num_fwd_outputs, self.others, cuda)
        return partitioned_graph.partitioned(graph, producer.choose(graph), target=target)

    @cached_property
    def _splits(self) -> dict[str, Parts]:
        return {}

    def copied(self) -> fx.GraphModule:
        return fx.GraphModule(self.module, copy.deepcopy(self.module.graph))


def capture(function: Callable[..., Any], *args: Any, dynamic: bool = True, **kwargs: Any) -> Captured:
    """The joint graph of one call; a function with several graphs is an error."""
    found = []

    def record(
        module: fx.GraphModule, inputs: Any, num_fwd_outputs: int, others: dict[str, Any]
    ) -> tuple[Choice, Modules]:
        names = symbol_names(traced_sizes.symbol_sources(), {}, {})
        untouched = fx.GraphModule(module, copy.deepcopy(module.graph))
        found.append(Captured(untouched, inputs, num_fwd_outputs, others, names))
        modules = fx_graph.default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        return Choice((), "torch's own partition", torchs_graphs=modules), modules

    torch._dynamo.reset()

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return compile_graph("aot_eager", module, inputs, record, lambda backward: backward, saw=None, say=print)

    compiled = torch.compile(dynamo.with_own_code(function), backend=backend, dynamic=dynamic)
    with dynamo.configured(has_regions=False):
        compiled(*args, **kwargs)
    (one,) = found
    return one


def by_bytes(graph: AnalyzedGraph) -> Costs:
    """Each operator as long as what it allocates is large: without a device, the order of most of them."""
    problem = problem_of(graph, [0.0] * len(graph.joint.nodes))
    seconds = (sum(problem.bytes[node] for node in nodes) / 1e12 for nodes in problem.allocates)
    return Costs((*seconds, 0.0), "no")
