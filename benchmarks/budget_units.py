"""A budget's plan for separately compiled layers against its plan for the whole forward, for budget.py."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from budget_graphs import Shape, forward
from shared import to_markdown

from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.sizes import MIB

SHAPES = {
    "RoBERTa": Shape("roberta", 12, 768, 16, 512),
    "Llama": Shape("llama", 12, 768, 8, 1024),
    "DeBERTa-v2": Shape("deberta-v2", 24, 1536, 8, 512),
}
QUICK = {"RoBERTa": Shape("roberta", 4, 64, 4, 32)}
# Positions of the budgets between the lowest peak that both units reach and everything saved.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)


def solved(shape: Shape, unit: str) -> tuple[ForwardSolver, dict[str, float]]:
    """Returns the solver of a model's forward, and the CPU seconds of tracing and of the solver's preparation."""
    begin = time.process_time()
    captured = forward(shape, unit)
    traced = time.process_time()
    solver = ForwardSolver(captured.problem(captured.first))
    solver.solver.prepare()
    return solver, {"tracing": traced - begin, "preparing": time.process_time() - traced}


def compared(shape: Shape) -> dict[str, Any]:
    """Compute the extra seconds of both units' plans at the same budgets."""
    (model, of_model), (layer, of_layer) = (solved(shape, unit) for unit in (MODEL, LAYER))
    low, high = max(model.lowest, layer.lowest), model.everything
    base = model.solver.seconds
    budgets = []
    for share in SHARES:
        budget = low + int(share * (high - low))
        begin = time.process_time()
        whole = model.cheapest(budget)
        between = time.process_time()
        by_layer = layer.cheapest(budget)
        assert max(whole.peak, by_layer.peak) <= budget
        budgets.append(
            {
                "share": share,
                "budget": budget,
                "model": whole.extra_seconds,
                "layer": by_layer.extra_seconds,
                "solving": (between - begin, time.process_time() - between),
            }
        )
    return {
        "about": shape.text,
        "seconds": base,
        "lowest": (model.lowest, layer.lowest),
        "everything": (model.everything, layer.everything),
        "once": {MODEL: of_model, LAYER: of_layer},
        "budgets": budgets,
    }


def run(saved: dict[str, Any], keep: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Add the models that are missing; see budget.py."""
    for name, shape in (QUICK if arguments.quick else SHAPES).items():
        if name not in saved:
            saved[name] = compared(shape)
            keep()


def rows(saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a table row for each model and budget."""
    for name, found in saved.items():
        for at in found["budgets"]:
            more = {f"{unit}, extra ms": f"{1e3 * at[unit]:.2f}" for unit in (MODEL, LAYER)}
            yield {
                "model": name,
                "of the range": f"{at['share']:.0%}",
                "budget MiB": f"{at['budget'] / MIB:.0f}",
                **more,
                "more, of the step": f"{(at[LAYER] - at[MODEL]) / found['seconds']:+.2%}",
                "CPU-s": " / ".join(f"{seconds:.2f}" for seconds in at["solving"]),
            }


def sections(saved: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table, and a description of each model."""
    return {"units": f"{'; '.join(map(_summary, saved.items()))}.\n\n{to_markdown(list(rows(saved)), {})}"}


def _summary(item: tuple[str, Mapping[str, Any]]) -> str:
    name, found = item
    lowest, everything, once = found["lowest"], found["everything"], found["once"]
    sums = " / ".join(f"{sum(once[unit].values()):.1f}" for unit in (MODEL, LAYER))
    return (
        f"{name}: {found['about']}, {1e3 * found['seconds']:.1f} ms; lowest peaks "
        f"{' / '.join(f'{size / MIB:.0f}' for size in lowest)} MiB and with everything saved "
        f"{' / '.join(f'{size / MIB:.0f}' for size in everything)} MiB by model / by layer; traced and prepared in "
        f"{sums} CPU seconds"
    )
