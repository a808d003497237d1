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

# Advice for users: what happens without a plan.
INSTEAD = "it trains as plain PyTorch, and --gradient_checkpointing recomputes its layers"


@dataclass(frozen=True)
class SolvedForward:
    """The choices of a budget's solver for all graphs of a forward.

    Attributes:
        why: see `Choice`.
        saved: the saved nodes, by the graph's digest, its layer and its call index (see `tape.Call`).
        unused: bytes of the graphs' limit that the plan does not use.
        segments: arguments of runs that are recomputed by the runs before them.
        frontier: what other budgets would cost; None if not requested.
        by_length: what plans for shorter batches would cost; None if not requested.
    """

    why: str
    saved: Mapping[tuple[str, str, int], SavedNodes]
    unused: int = 0
    segments: tuple[Link, ...] = ()
    frontier: Frontier | None = None
    by_length: ExtraByLength | None = None

    def choice(self, graph: AnalyzedGraph) -> Choice | None:
        """Returns the choice for a graph; None if the graph was not solved."""
        saved = self.saved.get((graph.digest, graph.layer, graph.call_index))
        return None if saved is None else saved.choice(graph, self.why)


class Producer:
    """Makes a choice for each joint graph of a training forward. Pure.

    Attributes:
        bound: the budget of a step; None for producers that ignore costs and memory.
        compresses: plans within the bound may compress activations.
    """

    bound: Budget | None = None
    compresses: bool = False

    def match(self, candidates: Sequence[Candidate], are_layers_frozen: bool = False) -> Matched:
        """Returns the rows that are requested by name.

        Args:
            are_layers_frozen: the model has layers, and none of them trains.
        """
        return Matched()

    def knowing(self, candidates: Sequence[Candidate]) -> "Producer":
        """Returns the producer with the candidates of all graphs of a forward, which may change what names mean."""
        return self

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        """Returns the choice for a graph, without changing the graph.

        A producer with a bound does not know the forward's other graphs yet, and chooses a plan that holds little.

        Args:
            earlier: choices of the earlier runs of the same forward.
        """
        raise NotImplementedError

    def solve(self, step: StepModel, with_curve: bool = False, with_lengths: bool = False) -> SolvedForward:
        """Returns the choices for all graphs of a forward; only for producers with a bound.

        Args:
            step: the step with the run's largest batch.
            with_curve: also solve other budgets, see `SolvedForward.frontier`.
            with_lengths: also solve shorter batches, see `SolvedForward.by_length`.

        Raises:
            DoesNotFitError: no plan fits; the error names the lowest peak and what holds it.
        """
        raise NotImplementedError

    def refusal(self, why: str) -> MemOptError | None:
        """Returns the error if nothing can be planned because of `why`; None: plain PyTorch may train instead."""
        return None


class TorchDefault(Producer):
    """The producer without a plan: torch's own partition, with what it recomputes by default."""

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        return replace(torchs_choice(graph), is_for_all_runs=True)
