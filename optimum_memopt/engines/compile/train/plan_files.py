"""What was compiled for a model, as a plan file."""

from collections.abc import Mapping, Sequence

import torch

from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.options import CHUNKED, PLAIN
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.errors import MemOptError
from optimum_memopt.installed import installed_version
from optimum_memopt.plans.plan_file import PlanFile

_SOFTWARE = ("optimum-memopt", "torch", "transformers")


def mismatch_line(choice: Choice, refuses: bool) -> str:
    """A line about a graph that a plan file was not made for; empty where it was.

    Args:
        choice: for the graph.
        refuses: it is an error.

    Raises:
        MemOptError: `refuses`, and there is a difference.
    """
    if not choice.mismatch:
        return ""
    line = f"--memory_opt_plan: the file was made for another graph: {choice.mismatch}"
    if refuses:
        raise MemOptError(f"{line}; make one for this model with --memory_opt_budget")
    return f"{line}; applied where it fits"


def plan_file_of(
    model: torch.nn.Module,
    compiler: str,
    graphs: Sequence[PartitionedGraph],
    sizes: Mapping[str, int],
    predicted: Footprint | None,
) -> PlanFile:
    """The plan of a forward's graphs.

    Args:
        model: that was compiled.
        compiler: one of `options.COMPILERS`.
        graphs: of its training forward, in their order.
        sizes: of the first batch.
        predicted: of a step with that batch; None: it is not known.
    """
    versions = (installed_version((distribution,)) for distribution in _SOFTWARE)
    return PlanFile(
        why=graphs[0].choice.why,
        loss=CHUNKED if any(graph.chunks_loss for graph in graphs) else PLAIN,
        solved_for={
            "model": type(model).__name__,
            "device": next(model.parameters()).device.type,
            "compiler": compiler,
            "sizes": dict(sizes),
            "predicted_bytes": {}
            if predicted is None
            else {"peak": predicted.peak, "activations": predicted.activations},
            "versions": dict(filter(None, versions)),
        },
        graphs=tuple(graph.plan for graph in graphs),
    )
