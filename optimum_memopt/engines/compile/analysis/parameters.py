"""Which of a model's parameters get a gradient, and what depends on the others alone. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx
from torch.utils.flop_counter import flop_registry

from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_number
from optimum_memopt.engines.compile.analysis.saved_activations import is_statistic


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


def frozen_inputs(joint: JointGraph, static_inputs: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Parameters and buffers without a gradient.

    Args:
        joint: read, not changed.
        static_inputs: parameters and buffers.
    """
    return frozenset(node for node, gradient in joint.gradients.items() if gradient is None and node in static_inputs)


def find_constants(joint: JointGraph, static_inputs: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Operators of the forward that depend on frozen parameters, buffers, constants and sizes alone.

    A cast of a frozen weight, a dequantized one, a mask of positions: its memory is worth more than the pass over it.
    Left out are matrix products, convolutions and attention with what depends on them, random draws, and statistics,
    which hardly take memory.

    Args:
        joint: read, not changed.
        static_inputs: parameters and buffers.
    """
    frozen = frozen_inputs(joint, static_inputs)
    found: set[fx.Node] = set()
    for node in joint.forward:
        is_product = getattr(node.target, "overloadpacket", None) in flop_registry
        if node.op == "call_function" and (is_product or joint.is_impure(node)):
            continue
        if all(read in found or read in frozen or is_number(read) for read in node.all_input_nodes):
            found.add(node)
    return frozenset(node for node in found if node.op == "call_function" and not is_statistic(node))
