"""Splits a joint graph so that the forward saves exactly what a choice says. The backward recomputes the rest."""

from collections.abc import Collection

from torch import fx

from optimum_memopt.engines.compile import compat_graph
from optimum_memopt.engines.compile.analysis.graph import Modules
from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_number, is_tensor


def partition(joint: JointGraph, nodes_to_save: Collection[fx.Node]) -> Modules:
    """The forward and backward graphs; parameters and inputs that the backward reads are passed on to it too."""
    inputs = [node for node in joint.inputs if is_tensor(node)]
    numbers = [node for node in joint.nodes if is_number(node) and node not in joint.backward]
    return compat_graph.extract(joint.module, [*inputs, *nodes_to_save], numbers, joint.num_fwd_outputs)
