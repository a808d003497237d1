"""Other ways to a lower peak, each against the solver at the same peak, on graphs of large models, for budget.py.

Each way is a set of nodes to save in the same joint graph; costs and simulation are the same for all.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budget_graphs import DEVICE, Shape, estimated, roots_of, saved_by_choice, saved_by_torch, trace
from shared import pyplot, to_markdown

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import by_row
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, simulate
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.solver.solver import Infeasible, Solver
from optimum_memopt.plans.grammar import parse
from optimum_memopt.sizes import MIB

SHAPES = {
    "RoBERTa-base": Shape("roberta", 12, 768, 16, 512),
    "Llama-1B": Shape("llama", 16, 2048, 4, 2048),
    "DeBERTa-v2": Shape("deberta-v2", 24, 1536, 8, 512),
}
QUICK = {"RoBERTa-base": Shape("roberta", 2, 128, 4, 64)}
TORCHS = (0.1, 0.3, 0.5, 0.7, 0.9)
EVERY = (1, 2, 3, 4)
_FAMILIES = {"torch's budget": "s", "checkpointing": "^", "level": "D", "row": "o"}
_CURVE = 24
_DECIMALS = {"extra ms": 2, "solver, extra ms": 2, "ratio": 2}


@dataclass(frozen=True)
class Compared:
    """A baseline and the solver at its peak.

    Attributes:
        name: name of the baseline; begins with its family.
        peak: the graph's peak under the baseline, in bytes.
        seconds: recompute time of the baseline.
        solver_peak: the graph's peak under the solver's plan, in bytes.
        solver_seconds: recompute time of the solver's plan.
    """

    name: str
    peak: int
    seconds: float
    solver_peak: int
    solver_seconds: float

    @property
    def ratio(self) -> float:
        """Returns the solver's recompute time relative to the baseline's; 1 if neither takes any."""
        if self.seconds < 1e-9:
            return 1.0 if self.solver_seconds < 1e-9 else float("inf")
        return self.solver_seconds / self.seconds


def checkpointed(problem: Problem, every: int) -> frozenset[int]:
    """Returns the roots that checkpointing every n-th layer saves: all outside these layers, and their inputs."""
    layers = list(dict.fromkeys(layer for layer in problem.layers if layer))
    chosen = set(layers[::every])

    def is_saved(node: int) -> bool:
        layer = problem.layers[node]
        return layer not in chosen and (not layer or node in problem.activations)

    roots = (
        node
        for node, root in enumerate(problem.roots)
        if root == node and problem.is_operator[node] and problem.is_forward[node] and problem.is_tensor[node]
    )
    return problem.boundaries.union(filter(is_saved, roots))


def baselines(graph: AnalyzedGraph, problem: Problem) -> Iterator[tuple[str, frozenset[int]]]:
    """Yields each baseline's name, and the roots that it saves."""
    for budget in TORCHS:
        yield f"torch's budget {budget}", roots_of(problem, saved_by_torch(graph, budget))
    for every in EVERY:
        yield f"checkpointing, {'all layers' if every == 1 else f'1 of {every} layers'}", checkpointed(problem, every)
    level = producer_for(Selection(level=1)).choose(graph)
    yield "level 1", roots_of(problem, saved_by_choice(level))
    for candidates in by_row(graph.candidates).values():
        if int(candidates[0].strategy) == 1:
            config = f"{candidates[0].cluster_id}:1:-1"
            row = producer_for(Selection(config=parse(config))).choose(graph)
            yield f"row {config}", roots_of(problem, saved_by_choice(row))


def compare(solver: Solver, name: str, roots: frozenset[int]) -> Compared:
    """Compare a baseline with the plan that the solver finds within its peak."""
    problem = solver.problem
    found: GraphSimulation = simulate(problem, problem.closure(roots))
    own = found.extra_seconds(problem)
    try:
        plan = solver.solve(found.peak)
    except Infeasible as error:
        return Compared(name, found.peak, own, error.peak, float("inf"))
    return Compared(name, found.peak, own, plan.peak, plan.extra_seconds + solver.everything.extra_seconds(problem))


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add the models that are missing; see budget.py."""
    for name, shape in (QUICK if arguments.quick else SHAPES).items():
        if name in saved:
            continue
        problem, sets = trace(shape, _traced)
        begin = time.process_time()
        solver = Solver(problem)
        low, high = solver.lowest.peak, solver.everything.peak
        count = 4 if arguments.quick else _CURVE
        plans = [solver.solve(low + (high - low) * number // count) for number in range(count + 1)]
        saved[name] = {
            "about": shape.text,
            "seconds": sum(problem.seconds[node] for node in _ran(solver.everything)),
            "everything": high,
            "lowest": low,
            "curve": [(plan.peak, plan.extra_seconds) for plan in plans],
            "compared": [vars(compare(solver, *baseline)) for baseline in sets.items()],
            "solving": time.process_time() - begin,
        }
        keep()


def _traced(graph: AnalyzedGraph) -> tuple[Problem, dict[str, frozenset[int]]]:
    problem = estimated(graph)
    return problem, dict(baselines(graph, problem))


def _ran(found: GraphSimulation) -> tuple[int, ...]:
    return (*found.forward.order, *found.backward.order)


def rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of one model's table, from the highest peak to the lowest."""
    for one in sorted((Compared(**saved) for saved in found["compared"]), key=lambda one: -one.peak):
        yield {
            "baseline": one.name.replace("row ", "", 1),
            "peak MiB": one.peak / MIB,
            "extra ms": 1e3 * one.seconds,
            "of the step": f"{one.seconds / found['seconds']:.1%}",
            "solver, peak MiB": one.solver_peak / MIB,
            "solver, extra ms": 1e3 * one.solver_seconds,
            "ratio": one.ratio,
        }


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns a table for each model."""
    return {name: f"{_summary(found)}\n\n{to_markdown(list(rows(found)), _DECIMALS)}" for name, found in saved.items()}


def _summary(found: Mapping[str, Any]) -> str:
    compared = [Compared(**one) for one in found["compared"]]
    worst = max(one.ratio for one in compared)
    return (
        f"{found['about']}: {1e3 * found['seconds']:.1f} ms and {found['everything'] / MIB:.0f} MiB with everything "
        f"saved, lowest peak {found['lowest'] / MIB:.0f} MiB. Highest ratio of {len(compared)}: {worst:.2f}. "
        f"{len(found['curve']) + len(compared)} budgets were solved in {found['solving']:.1f} CPU seconds."
    )


def plot(saved: Mapping[str, Any], path: Path) -> None:
    """Plot peak against time of all baselines, and the solver's curve."""
    figure, axes = (plt := pyplot("budget")).subplots(1, len(saved), figsize=(4.2 * len(saved), 3.6), squeeze=False)
    for axis, (name, found) in zip(axes[0], saved.items(), strict=True):
        curve = sorted(found["curve"])
        axis.plot(*zip(*((peak / 2**30, 100 * extra / found["seconds"]) for peak, extra in curve), strict=True), "k-")
        for family, marker in _FAMILIES.items():
            points = [
                (one["peak"] / 2**30, 100 * one["seconds"] / found["seconds"])
                for one in found["compared"]
                if one["name"].startswith(family)
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker, label=family, markersize=4, alpha=0.8)
        axis.set(title=name, xlabel="peak of activations and gradients, GiB", ylim=(0, None))
    axes[0][0].plot([], [], "k-", label="the solver")
    axes[0][0].set_ylabel(f"recompute, % of the step ({DEVICE.name}, estimated)")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
