"""When running a graph allocates each storage and when it frees it, found without running it. Pure."""

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import sympy
from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_on_host, is_tensor, is_view, root, storage_bytes, value
from optimum_memopt.engines.compile.graph.saved_activations import layer_of, operator_name
from optimum_memopt.engines.compile.memory.workspaces import workspace
from optimum_memopt.engines.compile.torch_compat.kernels import Multiprocessors


class Operator(NamedTuple):
    """What an operator does to memory.

    Attributes:
        allocates: indices of storages, before it runs.
        workspace: index of the size of what it holds while it runs beside its results.
        frees: indices of storages, after it has run.
    """

    allocates: tuple[int, ...]
    workspace: int
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The operators of a graph in the order that they run.

    Attributes:
        names: of their nodes.
        operators: all of them, those that allocate nothing too.
        storages: for each storage the index of its size.
        roots: for each storage the name of the node that allocates it, or that is given it.
        kinds: of the operators, `gelu`.
        layers: path of the transformer layer that each operator belongs to, empty outside of all.
    """

    names: tuple[str, ...]
    operators: tuple[Operator, ...]
    storages: tuple[int, ...]
    roots: tuple[str, ...]
    kinds: tuple[str, ...]
    layers: tuple[str, ...]


class SizeTable:
    """Distinct byte expressions, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[sympy.Expr, int] = {}

    def add(self, size: sympy.Expr) -> int:
        return self._numbers.setdefault(size, len(self._numbers))

    def storage(self, node: fx.Node) -> int:
        """Of a root's storage; it takes none where it lies in the host's memory."""
        return self.add(sympy.Integer(0) if is_on_host(node) else storage_bytes(node))

    @property
    def expressions(self) -> tuple[sympy.Expr, ...]:
        return tuple(self._numbers)


def schedule(
    graph: fx.Graph, sizes: SizeTable, owned: Collection[fx.Node] = (), cuda: Multiprocessors | None = None
) -> Schedule:
    """The graph in its order, with every storage freed after its last use, as torch.fx's generated code does.

    Args:
        graph: functional but for copies back into inputs.
        sizes: gets the sizes of its storages.
        owned: placeholders that nobody else holds: freed after their last use.
        cuda: see `operator_workspace`.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    last_use = _last_uses(graph)
    owned_roots = {root(node) for node in owned}
    freed: dict[fx.Node, list[fx.Node]] = {}
    for storage, node in last_use.items():
        if is_tensor(storage) and (storage.op != "placeholder" or storage in owned_roots):
            freed.setdefault(node, []).append(storage)
    storages: dict[fx.Node, int] = {}

    def number(roots: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(storages.setdefault(node, len(storages)) for node in roots)

    operators = []
    for node in nodes:
        # Outputs that nobody reads go with the tuple that holds them, when its last output has been picked.
        is_unread = node not in last_use and node.op == "call_function" and not is_view(node) and is_tensor(node)
        frees = [*([node] if is_unread else []), *freed.get(node, ())]
        operators.append(Operator(number(_allocations(node)), sizes.add(workspace(node, cuda)), number(frees)))
    return Schedule(
        names=tuple(node.name for node in nodes),
        operators=tuple(operators),
        storages=tuple(map(sizes.storage, storages)),
        roots=tuple(node.name for node in storages),
        kinds=tuple(map(operator_name, nodes)),
        layers=tuple(map(layer_of, nodes)),
    )


def _last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last reader of each storage, by its root."""
    return {root(read): node for node in graph.nodes for read in node.all_input_nodes}


def _allocations(node: fx.Node) -> list[fx.Node]:
    """The roots that an operator allocates: itself, or the outputs of it that are picked."""
    if node.op != "call_function" or is_view(node):
        return []
    if isinstance(value(node), tuple | list):
        return [user for user in node.users if user.target is operator.getitem and is_tensor(user)]
    if node.target is operator.getitem or not is_tensor(node):
        return []
    return [node]
