"""The solver against all subsets of a layer's saved activations, and solving times for deep models, for budget.py."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from budget_graphs import Shape, estimated, trace
from shared import to_markdown

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.solver.blocks import blocks_of
from optimum_memopt.engines.compile.solver.solver import Solver

LAYERS = {
    "RoBERTa": Shape("roberta", 1, 768, 16, 512),
    "DeBERTa-v2": Shape("deberta-v2", 1, 1536, 8, 512),
    "Llama": Shape("llama", 1, 2048, 4, 2048),
}
DEEP = {
    "RoBERTa, 48 layers": Shape("roberta", 48, 1024, 8, 512),
    "DeBERTa-v2, 24 layers": Shape("deberta-v2", 24, 1536, 8, 512),
}
QUICK = {"RoBERTa": Shape("roberta", 1, 128, 4, 64)}
QUICK_DEEP = {"RoBERTa, 3 layers": Shape("roberta", 3, 128, 4, 64)}
# Number of activations whose subsets are all simulated; number of budgets between the lowest peak and everything
# saved.
_MOST, _BUDGETS = 14, 12
_SHARES = (0.0, 0.25, 0.5, 0.75)


def gaps(problem: Problem, most: int) -> dict[str, Any]:
    """Compute for each budget how much longer the solver's plan takes than the best subset, as a share.

    Args:
        problem: the problem of a model with one layer.
        most: how many of the layer's largest activations are tried in all subsets; the others stay saved.
    """
    blocks = blocks_of(problem)
    free = [node for node in problem.activations - blocks.leaving if problem.layers[node]]
    tried = sorted(free, key=lambda node: (-problem.bytes[node], node))[:most]
    fixed = blocks.leaving | problem.activations.difference(tried)
    subsets = itertools.chain.from_iterable(itertools.combinations(tried, count) for count in range(len(tried) + 1))
    plans = [simulate(problem, saved) for saved in {problem.closure(fixed.union(subset)) for subset in subsets}]
    times = [(plan.peak, plan.extra_seconds(problem)) for plan in plans]
    solver = Solver(problem)
    base = solver.everything.extra_seconds(problem)
    low, high = solver.lowest.peak, solver.everything.peak
    found = []
    for number in range(_BUDGETS + 1):
        budget = low + (high - low) * number // _BUDGETS
        plan = solver.solve(budget)
        fitting = [seconds for peak, seconds in times if peak <= budget]
        if fitting:
            found.append(gap(plan.extra_seconds + base, min(fitting)))
        else:
            found.append(None)
    return {"activations": len(free), "tried": len(tried), "plans": len(plans), "gaps": found}


def gap(seconds: float, best: float) -> float:
    """Returns how much longer `seconds` is than `best`, as a share; 0 if both are zero."""
    return seconds / best - 1 if best > 1e-12 else (0.0 if seconds < 1e-12 else float("inf"))


def solving(problem: Problem) -> list[float]:
    """Returns the CPU seconds to solve each budget with a new solver."""
    known = Solver(problem)
    low, high = known.lowest.peak, known.everything.peak
    found = []
    for share in _SHARES:
        begin = time.process_time()
        Solver(problem).solve(low + int(share * (high - low)))
        found.append(time.process_time() - begin)
    return found


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add the models that are missing; see budget.py."""
    layers, deep = (QUICK, QUICK_DEEP) if arguments.quick else (LAYERS, DEEP)
    for name, shape in layers.items():
        if name not in saved.setdefault("layers", {}):
            saved["layers"][name] = gaps(trace(shape, estimated, dtype=torch.float32), 6 if arguments.quick else _MOST)
            keep()
    for name, shape in deep.items():
        if name not in saved.setdefault("deep", {}):
            problem = trace(shape, estimated)
            saved["deep"][name] = {"nodes": len(problem.names), "seconds": solving(problem)}
            keep()


def gap_rows(saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, found in saved.items():
        at_floor, *others = found["gaps"]
        known = [one for one in others if one is not None]
        yield {
            "layer of": name,
            "activations": found["activations"],
            "of which all subsets": found["tried"],
            "different plans": found["plans"],
            "budgets": len(known),
            "largest gap": f"{max(known):+.2%}",
            "median gap": f"{statistics.median(known):+.2%}",
            "at the lowest peak": "no subset fits" if at_floor is None else f"{at_floor:+.2%}",
        }


def time_rows(saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, found in saved.items():
        times = {f"{share:.0%}": f"{seconds:.2f}" for share, seconds in zip(_SHARES, found["seconds"], strict=True)}
        yield {"model": name, "nodes of the graph": found["nodes"], **times}


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns both tables."""
    return {
        "gaps": to_markdown(list(gap_rows(saved["layers"])), {}),
        "solving": to_markdown(list(time_rows(saved["deep"])), {}),
    }
