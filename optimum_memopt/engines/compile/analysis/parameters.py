"""Which of a model's parameters get a gradient, by its joint graphs. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from torch import fx


def gradients_of(joint: fx.Graph, num_fwd_outputs: int, parameters: Sequence[str]) -> dict[str, bool]:
    """For each parameter that a joint graph reads, by its name, whether the backward returns its gradient.

    Args:
        joint: as AOTAutograd has traced it; empty is returned where its inputs are others than what dynamo's graph is
            given, as where a tensor subclass is several of them.
        num_fwd_outputs: how many of its outputs belong to the forward.
        parameters: the names of those inputs of dynamo's graph that are parameters, empty for the others, in order.
    """
    (output,) = joint.find_nodes(op="output")
    returned = output.args[0][num_fwd_outputs:]
    if len(returned) != len(parameters):
        return {}
    return {name: gradient is not None for name, gradient in zip(parameters, returned, strict=True) if name}


def without_gradient(graphs: Iterable[Mapping[str, bool]]) -> frozenset[str]:
    """Parameters that graphs of a forward read and none of them returns a gradient of, as of a head under `no_grad`.

    What no graph reads may be read elsewhere, and is left out.
    """
    read: dict[str, bool] = {}
    for gradients in graphs:
        for name, is_returned in gradients.items():
            read[name] = read.get(name, False) or is_returned
    return frozenset(name for name, is_returned in read.items() if not is_returned)
