"""Joint graphs of real models as the engine's backend receives them, and the engine's analysis of them."""

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
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, by_row
from optimum_memopt.engines.compile.graph.joint import JointGraph, value
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.graph.saved_activations import SavedActivation, operator_name
from optimum_memopt.engines.compile.graph.symbols import symbol_names
from optimum_memopt.engines.compile.partition import partitioned_graph
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.torch_compat import dynamo, fx_graph, traced_sizes
from optimum_memopt.engines.torch_compat.traced_sizes import symbolic
from tests.compiled import selection


@dataclass(frozen=True)
class Parts:
    """The forward and backward graphs of a joint graph under a selection."""

    graph: PartitionedGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int

    @cached_property
    def order(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.backward.graph.nodes)}

    @property
    def saved_for_backward(self) -> list[fx.Node]:
        """Returns the nodes that the forward saves in addition to its inputs, in order."""
        (output,) = self.forward.graph.find_nodes(op="output")
        rest = output.args[0][self.num_fwd_outputs :]
        return [node for node in rest if isinstance(node, fx.Node) and node.op != "placeholder"]

    @property
    def operators_of_backward(self) -> list[str]:
        return [operator_name(node) for node in self.backward.graph.nodes if node.op == "call_function"]

    def recomputed(self, joint: JointGraph) -> list[str]:
        """Returns the names of the forward operators that the backward recomputes, in backward order."""
        forward = {node.name for node in joint.forward}
        nodes = self.backward.graph.nodes
        return [node.name for node in nodes if node.op == "call_function" and node.name in forward]


class Executed(fx.Interpreter):
    """Runs a joint graph on real tensors of ones and keeps the result of every node.

    Attributes:
        made: the results by node; nothing is freed, so no two results share an address by accident.
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
    """Returns a real value for a traced one: a tensor of ones, a generator state or a number."""
    if not isinstance(given, torch.Tensor):
        return int(symbolic(given).subs(sizes))
    if given.dtype == torch.uint8:
        return torch.get_rng_state()
    shape, strides = ([int(symbolic(one).subs(sizes)) for one in many] for many in (given.shape, given.stride()))
    return torch.empty_strided(shape, strides, dtype=given.dtype).fill_(1)


@dataclass(frozen=True)
class Captured:
    """A joint graph before any transformation."""

    module: fx.GraphModule
    inputs: Any
    num_fwd_outputs: int
    others: dict[str, Any]
    names: Mapping[sympy.Symbol, str]

    @cached_property
    def graph(self) -> AnalyzedGraph:
        """Returns the engine's analysis of the graph, which must not be changed."""
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
        """Returns how often each row occurs."""
        return {row: len(candidates) for row, candidates in self.rows.items()}

    def choose(self, asked: str, *earlier: Choice) -> Choice:
        """Returns the choice under a config or `level 1`."""
        return producer_for(selection(asked)).choose(self.graph, earlier)

    def split(self, asked: str = "") -> Parts:
        """Returns the graphs under a config, `level 1` or nothing; cached, and must not be changed."""
        if asked not in self._splits:
            graph, modules = self.partitioned(producer_for(selection(asked)))
            # The names come from the tracing context, which no longer exists.
            named = dataclasses.replace(graph, names=self.names)
            self._splits[asked] = Parts(named, *modules, self.num_fwd_outputs)
        return self._splits[asked]

    def partitioned(self, producer: Producer, target: Device | None = None) -> tuple[PartitionedGraph, Modules]:
        """Partition a copy of the graph with the producer's choice, planned for a device."""
        cuda = target.cuda if target is not None else None
        graph = partitioned_graph.analyze(self.copied(), self.inputs, self.num_fwd_outputs, self.others, cuda=cuda)
        return partitioned_graph.partitioned(graph, producer.choose(graph), target=target)

    @cached_property
    def _splits(self) -> dict[str, Parts]:
        return {}

    def copied(self) -> fx.GraphModule:
        return fx.GraphModule(self.module, copy.deepcopy(self.module.graph))


def capture(function: Callable[..., Any], *args: Any, dynamic: bool = True, **kwargs: Any) -> Captured:
    """Returns the joint graph of one call; fails if the function has several graphs."""
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
        return compile_graph("aot_eager", module, inputs, record, lambda backward: backward, on_graph=None, log=print)

    compiled = torch.compile(dynamo.with_own_code(function), backend=backend, dynamic=dynamic)
    with dynamo.configured(has_regions=False):
        compiled(*args, **kwargs)
    (one,) = found
    return one


def by_bytes(graph: AnalyzedGraph) -> Costs:
    """Returns costs proportional to the allocated bytes: without a device, that orders most operators correctly."""
    problem = problem_of(graph, [0.0] * len(graph.joint.nodes))
    seconds = (sum(problem.bytes[node] for node in nodes) / 1e12 for nodes in problem.allocates)
    return Costs((*seconds, 0.0), "no")
