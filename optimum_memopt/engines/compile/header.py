"""The lines above the plan table."""

from collections.abc import Sequence

import torch

from optimum_memopt.compat import attention_implementation
from optimum_memopt.engines.compile.budget.devices import Device
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.passes.pinned_pool import pinned_bytes
from optimum_memopt.engines.run import Run
from optimum_memopt.memory.optimizers import PlannedOptimizer
from optimum_memopt.memory.peak_monitor import MIB


def plan_line(
    model: torch.nn.Module, compiler: str, graphs: Sequence[PartitionedGraph], target: Device | None = None
) -> str:
    """What trains the model, where and under which plan."""
    device = next(model.parameters()).device.type if target is None else target.name
    attention = f", attention: {_attention(model, graphs)}" if any(graph.is_for_cuda for graph in graphs) else ""
    pieces = f", in {len(graphs)} graphs" if len(graphs) > 1 else ""
    loss = ", loss in chunks" if any(graph.chunks_loss for graph in graphs) else ""
    return f"{type(model).__name__} on {device} by {compiler}, {_why(graphs)}{pieces}{loss}{attention}"


def _why(graphs: Sequence[PartitionedGraph]) -> str:
    """Of the graphs' choices; each of several may have one of its own."""
    reasons = [graph.choice.why for graph in graphs]
    if len(set(reasons)) == 1:
        return reasons[0]
    return "; ".join(f"graph {number}: {why}" for number, why in enumerate(reasons, 1))


def host_line(graphs: Sequence[PartitionedGraph]) -> tuple[str, ...]:
    """What is offloaded takes of the host; nothing where that is the device, too."""
    sizes = [size for graph in graphs if graph.is_for_cuda for size in graph.offloaded_bytes]
    if not sizes:
        return ()
    return (
        f"Predicted for the host: {sum(sizes) / MIB:.1f} MiB offloaded, in {sum(map(pinned_bytes, sizes)) / MIB:.1f} "
        "MiB of pinned memory",
    )


def _attention(model: torch.nn.Module, graphs: Sequence[PartitionedGraph]) -> str:
    """The kernels that torch has chosen: they decide what a layer saves for its backward."""
    fused = dict.fromkeys(kernel for graph in graphs for kernel in graph.attention)
    implementation = attention_implementation(getattr(model, "config", None)) or "eager"
    # torch's own composition of products and a softmax has no operator that tells.
    return " and ".join(fused) or ("math" if implementation == "sdpa" else implementation)


def prediction_lines(predictor: StepMemoryPredictor) -> tuple[str, ...]:
    """What a step with the first batch is predicted to hold."""
    footprint = predictor.footprint()
    caveat = predictor.caveat and f" ({predictor.caveat})"
    return (
        f"Predicted for the first batch: {predictor.stashed / MIB:.1f} MiB saved for backward, peak of "
        f"activations and gradients {footprint.activations / MIB:.1f} MiB{caveat}",
        f"Predicted peak of a step with {_optimizer(predictor.run)}: {footprint.peak / MIB:.1f} MiB = {footprint}",
        *_allocator_line(predictor, footprint.peak),
    )


def _optimizer(run: Run) -> str:
    accumulation = " and gradient accumulation" if run.gradient_accumulation else ""
    return f"{run.optimizer if isinstance(run.optimizer, PlannedOptimizer) else PlannedOptimizer()}{accumulation}"


def _allocator_line(predictor: StepMemoryPredictor, requested: int) -> tuple[str, ...]:
    peak = predictor.allocator_peak()
    if peak is None:
        return ()
    allocated, reserved = (f"{size / MIB:.1f} MiB" for size in (peak.allocated, peak.reserved))
    return (
        f"Predicted for torch's allocator: {allocated} allocated ({peak.allocated / requested - 1:+.1%}), {reserved} "
        f"reserved ({peak.reserved / requested - 1:+.1%})",
    )
