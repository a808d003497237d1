"""Lets a backward multiply the gradients of the chunked loss in place."""

import torch
from torch import fx

from optimum_memopt.engines.compile.analysis.graph import Modules
from optimum_memopt.engines.compile.analysis.joint import first_input, is_chunked_loss, tensor_value
from optimum_memopt.engines.compile.analysis.saved_activations import is_output
from optimum_memopt.engines.compile.loss.operators import SCALED


def scale_in_place(modules: Modules) -> None:
    """Rewrite the backward graph; for backwards that run operator by operator, since inductor reuses its inputs."""
    forward, backward = modules
    saved = {
        node.name
        for node in forward.graph.nodes
        if is_output(node) and is_chunked_loss(first_input(node)) and node.args[1] != 0
    }
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in saved and len(node.users) == 1 and is_scaling(reader := next(iter(node.users)), node):
            reader.target = SCALED
    backward.recompile()


def is_scaling(node: fx.Node, gradient: fx.Node) -> bool:
    """Whether the operator multiplies a gradient of the chunked loss: as its only reader, it may do so in place."""
    is_product = node.target is torch.ops.aten.mul.Tensor and node.args[0] is gradient
    return is_product and tensor_value(node).dtype == tensor_value(gradient).dtype
