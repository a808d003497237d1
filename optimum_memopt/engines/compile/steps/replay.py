"""Seconds of a whole joint graph that is run on this machine, operator by operator.

An operator takes longer in a graph than by itself: it is called from Python, and finds its operands in no cache. How
much longer depends on its size, so on the rows of the batch.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import arguments_of_ones, eager, timed
from optimum_memopt.engines.compile.memory.symbolic_sizes import SymbolValues

# Times that each batch is run.
_ROUNDS = 3


def replayed(graph: AnalyzedGraph, batches: Sequence[SymbolValues]) -> list[float] | None:
    """Seconds of a forward and its backward with everything saved; None where it cannot be run on tensors of ones.

    Batches are run in turns: a machine is not always as fast.

    Args:
        graph: whose operators are run where its tensors are; read, not changed.
        batches: values of the symbols.
    """
    run = _as_function(graph.joint.module)
    with eager(graph.joint):
        # As where single operators are measured: any may refuse ones, and memory may run out.
        try:
            # The first round warms up.
            rounds = [
                [_seconds(run, arguments_of_ones(graph.joint, sizes)) for sizes in batches] for _ in range(1 + _ROUNDS)
            ][1:]
        except Exception:
            return None
    return [statistics.median(found) for found in zip(*rounds, strict=True)]


def _as_function(module: fx.GraphModule) -> fx.GraphModule:
    """Of its placeholders one by one: the tracer's module takes lists of them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _seconds(run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    return timed(lambda: run(*inputs), any(one.is_cuda for one in inputs if isinstance(one, torch.Tensor)))
