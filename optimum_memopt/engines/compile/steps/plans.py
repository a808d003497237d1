"""What a joint graph saves under the plans that the advice compares. Pure."""

from dataclasses import replace

from optimum_memopt.engines.compile.budget.problem import Problem
from optimum_memopt.engines.compile.budget.simulation import Simulation, simulate


def checkpointed(problem: Problem, every: int) -> Simulation:
    """transformers' activation checkpointing of every so many layers, in the order of this engine's recompute.

    Of a layer that is checkpointed its input is saved; everything in it runs again, random draws too, whose state is
    restored (`torch.utils.checkpoint`). The last layer is no exception. Which layers: `every_n_layers` of
    `PreTrainedModel.activation_checkpointing_enable` (transformers 5.23).

    Args:
        problem: a joint graph with layers.
        every: checkpoints the first layer, and every so many after it.
    """
    chosen = set(layers_of(problem)[::every])
    runs_again = replace(
        problem,
        is_kept=tuple(
            kept and layer not in chosen for kept, layer in zip(problem.is_kept, problem.layers, strict=True)
        ),
    )
    kept = {node for node in problem.activations if problem.layers[node] not in chosen}
    return simulate(runs_again, runs_again.closure(kept | problem.boundaries))


def layers_of(problem: Problem) -> tuple[str, ...]:
    """Paths of the layers in the order in which the forward runs them."""
    in_forward = (
        layer for layer, is_forward in zip(problem.layers, problem.is_forward, strict=True) if layer and is_forward
    )
    return tuple(dict.fromkeys(in_forward))


def without_gradients(problem: Problem) -> int:
    """The peak of a forward that saves nothing, bytes over parameters and inputs, its outputs among them."""
    return simulate(replace(problem, backward_outputs=(), backward_reads=()), frozenset()).forward.peak
