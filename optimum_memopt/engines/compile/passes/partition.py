"""Splits a joint graph so that the forward hands over exactly what a plan keeps. The backward recomputes the rest."""

from collections.abc import Collection, Sequence

from torch import fx

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_number, is_tensor
from optimum_memopt.engines.compile.analysis.saved_activations import SavedActivation


def kept(
    joint: JointGraph,
    stashes: Sequence[SavedActivation],
    dropped: Collection[fx.Node],
    borders: Collection[fx.Node] = (),
) -> tuple[fx.Node, ...]:
    """The nodes to save when the stashes with the roots `dropped` are made again, in graph order.

    Every read of the backward is followed back until it reaches an input, a stash that stays, or what must not run
    twice (random draws). So nothing is saved that no read leads to, and nothing is drawn twice.

    Args:
        borders: roots that are no stashes and are saved too when a read leads to them.
    """
    stay = ({stash.root for stash in stashes} | set(borders)) - set(dropped)
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [node for stash in stashes for node in stash.reads]
    while todo:
        node = todo.pop()
        if node in seen or node.op == "placeholder" or is_number(node):
            continue
        seen.add(node)
        if node in stay or (is_tensor(node) and joint.is_impure(node)):
            saved.add(node)
        else:
            todo.extend(node.all_input_nodes)
    return tuple(sorted(saved, key=joint.order.__getitem__))


def partition(joint: JointGraph, saved: Collection[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward graphs; parameters and inputs that the backward reads are handed over too."""
    inputs = [node for node in joint.inputs if is_tensor(node)]
    numbers = [node for node in joint.nodes if is_number(node) and node not in joint.backward]
    return compat.extract(joint.module, [*inputs, *saved], numbers, joint.num_fwd_outputs)
