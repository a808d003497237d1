"""What an operator holds while it runs beside its results, in bytes."""

from collections.abc import Sequence
from typing import Any

import sympy
from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_chunked_loss_operator, value
from optimum_memopt.engines.compile.loss.chunks import loss_shape
from optimum_memopt.engines.compile.memory import cpu_workspaces, cuda_workspaces
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.kernels import Multiprocessors


def workspace(node: fx.Node, cuda: Multiprocessors | None) -> sympy.Expr:
    """Of a graph's node; see `operator_workspace`."""
    arguments = [value(argument) if isinstance(argument, fx.Node) else argument for argument in node.args]
    return operator_workspace(node.target, arguments, value(node), cuda)


def operator_workspace(target: Any, arguments: Sequence[Any], result: Any, cuda: Multiprocessors | None) -> sympy.Expr:
    """Of a call.

    Args:
        target: the operator.
        arguments: positional ones; tensors may be fake.
        result: of the call.
        cuda: the CUDA device that runs it, wherever the tensors are; None: the tensors' own device.
    """
    if is_chunked_loss_operator(target):
        return sympy.sympify(loss_shape(arguments).workspace)
    name = dynamo.operator_name(target)
    if cuda is not None:
        return cuda_workspaces.workspace(name, arguments, result, cuda)
    return cpu_workspaces.workspace(name, arguments, result)
