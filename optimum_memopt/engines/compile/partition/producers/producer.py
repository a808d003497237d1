"""The base of producers, and the producer without a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.graph.joint import is_tensor, root
from optimum_memopt.engines.compile.graph.problem import SiblingGraphs
from optimum_memopt.engines.compile.memory.events import Prediction, schedule
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.solver.solver import Solver
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.matching import Matched
from optimum_memopt.sizes import Budget

# What a user may do without a plan.
INSTEAD = "it trains as plain PyTorch, and --gradient_checkpointing recomputes its layers"


@dataclass(frozen=True)
class Solvable:
    """A graph in its step, for a producer with a bound.

    Attributes:
        captured: the graph with the sizes of the run's largest batch.
        solver: of those sizes, with the other graphs of the forward around it.
        siblings_at: the other graphs of the forward with an n-th of the batch's rows.
    """

    captured: CapturedGraph
    solver: Solver
    siblings_at: Callable[[int], SiblingGraphs]
    step: StepContext
    with_curve: bool = False
    with_lengths: bool = False


class Producer:
    """Makes a choice for each joint graph of a training forward. Pure."""

    @property
    def bound(self) -> Budget | None:
        """The budget of a step; None for a producer that is not told what operators cost and what the step holds."""
        return None

    @classmethod
    def of(cls, selection: Selection) -> "Producer | None":
        """The producer of what the user asked for; None where that is another one's."""
        raise NotImplementedError

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """The rows that are asked for by name."""
        return Matched()

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = (), solvable: Solvable | None = None) -> Choice:
        """The choice for a graph, which is read and not changed.

        Args:
            earlier: choices of the graphs of the same forward before this one.
            solvable: None for a producer without a bound.
        """
        raise NotImplementedError

    def refusal(self, why: str) -> MemOptError | None:
        """The error where nothing can be planned, since `why`; None where plain PyTorch may train instead."""
        return None


class TorchDefault(Producer):
    """No plan: torch's own partition, and what it recomputes by itself."""

    @classmethod
    def of(cls, selection: Selection) -> "TorchDefault":
        return cls()

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = (), solvable: Solvable | None = None) -> Choice:
        forward, backward = graph.partition_by_torch()
        (output,) = forward.graph.find_nodes(op="output")
        saved = [node for node in output.args[0][graph.joint.num_fwd_outputs :] if isinstance(node, fx.Node)]
        # By name: torch's partitioner has copied the graph.
        names, roots = {node.name for node in saved}, {root(node).name for node in saved}
        nodes = (node for node in graph.joint.nodes if node.op == "call_function" and is_tensor(node))
        return Choice(
            nodes_to_save=tuple(node for node in nodes if node.name in names),
            why="no plan: torch's own partition",
            auto_recomputed=frozenset(c for c in graph.candidates if c.activation.root.name not in roots),
            torchs_graphs=(forward, backward),
        )


def torchs_own(graph: AnalyzedGraph) -> tuple[Choice, Prediction]:
    """torch's own partition, and what its two graphs hold with the first batch."""
    choice = TorchDefault().choose(graph)
    assert choice.torchs_graphs is not None
    events = schedule(*choice.torchs_graphs, graph.joint.num_fwd_outputs, cuda=graph.cuda)
    return choice, events.predict(graph.size_hints)
