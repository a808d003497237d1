"""Why a prediction is not exact, in words. Pure."""

from collections.abc import Mapping, Sequence

from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph


def caveat_of(graphs: Sequence[PartitionedGraph], runs: int, bound: Mapping[str, int], programs: str = "") -> str:
    """Empty where it is exact.

    Args:
        graphs: of one forward.
        runs: of all graphs together.
        bound: sizes by name, which the graphs may not be for where they are others.
        programs: what is wrong with inductor's.
    """
    kernels = []
    if any(graph.has_convolutions for graph in graphs):
        kernels.append("convolutions")
    if any("cuDNN" in graph.attention for graph in graphs):
        kernels.append("cuDNN's attention")
    shown = ", ".join(f"{name}={size}" for name, size in bound.items())
    reasons = (
        programs,
        _outside_of(graphs, runs),
        f"only for {shown}, since others may be traced again" if shown else "",
        f"without the workspaces of {' and '.join(kernels)}" if kernels else "",
        "without what oneDNN keeps for each shape in half precision"
        if any(graph.has_half_products for graph in graphs)
        else "",
        "as if every token had a label" if any(graph.chunks_loss for graph in graphs) else "",
    )
    return "; ".join(filter(None, reasons))


def _outside_of(graphs: Sequence[PartitionedGraph], runs: int) -> str:
    if runs == 1 and graphs[0].is_all_of_forward:
        return ""
    count = len(graphs)
    in_runs = f" in {runs} runs" if runs > count else ""
    several, them = ("s", "them") if count > 1 else ("", "it")
    return f"not exact: {count} graph{several}{in_runs}, and what runs outside of {them} is not counted"
