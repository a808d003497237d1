"""Operators whose results a compiler never stores, since it computes them within the kernels that read them. Pure.

After `torch/_inductor/lowering.py` (2.13), far simpler: elementwise operators are inlined into the elementwise
operators and sums that read them. Here this is assumed only if a single storage that is no larger is held instead, so
that no prediction rises.
"""

from collections.abc import Collection

import torch
from torch import fx

from optimum_memopt.engines.compile.costs.fusion import is_fused, readers
from optimum_memopt.engines.compile.graph.joint import Inlined, JointGraph, is_tensor, is_view, root, storage_bytes
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, compile_sizes
from optimum_memopt.engines.torch_compat import dynamo

# Elementwise operators without torch's tag `pointwise`.
_BY_ELEMENT = frozenset(("convert_element_type", "full", "scalar_tensor", "where"))
# Operands up to this fraction of the result's bytes are rows or numbers, and are ignored.
_SMALL = 1 / 8


def inlined(joint: JointGraph, sizes: SymbolValues, saved: Collection[fx.Node]) -> Inlined:
    """Returns the operators that are inlined.

    Args:
        saved: roots that a plan may save, which are not inlined.
    """
    returned = {root(node) for node in joint.outputs if isinstance(node, fx.Node)}
    candidates = [
        node for node in joint.nodes if node not in returned and node not in saved and _is_inlined(joint, node)
    ]
    operands = {node: [read for read in node.all_input_nodes if is_tensor(read)] for node in candidates}
    measured = list(dict.fromkeys((*candidates, *(root(read) for reads in operands.values() for read in reads))))
    bytes_of = dict(zip(measured, compile_sizes(map(storage_bytes, measured))(sizes), strict=True))
    found = Inlined()
    for node, reads in operands.items():
        held = [(bytes_of[storage], read) for read in reads if (storage := found.root(read)) is not None]
        large = {found.root(read) for size, read in held if size > _SMALL * bytes_of[node]}
        size, operand = max(held, key=lambda each: each[0], default=(0, None))
        if len(large) <= 1 and size <= bytes_of[node]:
            found.operands[node.name] = None if operand is None else node.all_input_nodes.index(operand)
    return found


def _is_inlined(joint: JointGraph, node: fx.Node) -> bool:
    """True for an elementwise operator whose readers can all be fused with it and are in the same pass."""
    if node.op != "call_function" or is_view(node) or not is_tensor(node) or joint.is_impure(node):
        return False
    is_by_element = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not is_by_element and dynamo.operator_name(node.target) not in _BY_ELEMENT:
        return False
    users = list(readers(node))
    passes = {user in joint.backward for user in (node, *users)}
    return bool(users) and len(passes) == 1 and all(map(is_fused, users))
