"""The base of producers, and the producer without a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optimum_memopt.engines.api.predictions import Frontier
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.partition.choice import Choice, SavedNodes, torchs_choice
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.solver.segments import Link
from optimum_memopt.engines.compile.solver.solver import ExtraByLength
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.matching import Matched
from optimum_memopt.sizes import Budget

# What a user may do without a plan.
INSTEAD = "it trains as plain PyTorch, and --gradient_checkpointing recomputes its layers"


@dataclass(frozen=True)
class SolvedForward:
    """The choices of a budget's solver for all graphs of a forward.

    Attributes:
        why: as `Choice` has it.
        saved: by the graph's digest, its layer, and its call index (see `tape.Call`).
        unused: bytes that the plan leaves of what the graphs may hold.
        segments: arguments of runs that the runs before them compute again.
        frontier: what other budgets would cost; None where nobody asked.
        by_length: what plans for shorter batches would cost; None where nobody asked.
    """

    why: str
    saved: Mapping[tuple[str, str, int], SavedNodes]
    unused: int = 0
    segments: tuple[Link, ...] = ()
    frontier: Frontier | None = None
    by_length: ExtraByLength | None = None

    def choice(self, graph: AnalyzedGraph) -> Choice | None:
        """The choice for a graph; None for one that was not solved."""
        saved = self.saved.get((graph.digest, graph.layer, graph.call_index))
        return None if saved is None else saved.choice(graph, self.why)


class Producer:
    """Makes a choice for each joint graph of a training forward. Pure.

    Attributes:
        bound: the budget of a step; None for producers that ignore costs and memory.
        compresses: a plan within the bound may compress activations.
    """

    bound: Budget | None = None
    compresses: bool = False

    def match(self, candidates: Sequence[Candidate], are_layers_frozen: bool = False) -> Matched:
        """The rows that are asked for by name.

        Args:
            are_layers_frozen: the model has layers, of which none trains.
        """
        return Matched()

    def knowing(self, candidates: Sequence[Candidate]) -> "Producer":
        """The same where the candidates of all graphs of a forward are known, which may change what names mean."""
        return self

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        """The choice for a graph, which is read and not changed.

        A producer with a bound does not know yet what other graphs there are, and lets this one hold little.

        Args:
            earlier: choices of the runs of the same forward before this one.
        """
        raise NotImplementedError

    def solve(self, step: StepModel, with_curve: bool = False, with_lengths: bool = False) -> SolvedForward:
        """The choices for all graphs; for a producer with a bound.

        Args:
            step: with the run's largest batch.

        Raises:
            DoesNotFitError: nothing fits; it names the lowest peak and what holds it.
        """
        raise NotImplementedError

    def refusal(self, why: str) -> MemOptError | None:
        """The error where nothing can be planned, since `why`; None where plain PyTorch may train instead."""
        return None


class TorchDefault(Producer):
    """No plan: torch's own partition, and what it recomputes by itself."""

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        return replace(torchs_choice(graph), is_for_all_runs=True)
