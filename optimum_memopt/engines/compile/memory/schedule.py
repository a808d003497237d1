"""The memory of a partitioned graph over time, for any sizes of the batch. Pure."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeGuard, cast

import sympy
import torch
from torch import fx

from optimum_memopt.engines.api.predictions import GRADIENTS, RECOMPUTED, SAVED, TEMPORARY
from optimum_memopt.engines.compile.graph.joint import (
    Inlined,
    has_parts,
    is_accumulation,
    is_on_host,
    is_output,
    is_tensor,
    root,
    storage_bytes,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.graph.layouts import layouts_of
from optimum_memopt.engines.compile.graph.saved_activations import layer_of, module_in_layer, operator_name
from optimum_memopt.engines.compile.graph.symbols import CompiledSizes, SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.graph_events import BACKWARD, GraphEvents, Prediction, prediction_of
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.engines.torch_compat.traced_sizes import symbolic


def workspace(node: fx.Node, cuda: Multiprocessors | None) -> sympy.Expr:
    """Returns the workspace of a graph's node; `cuda` as in `operator_workspace`."""
    arguments = [value(argument) if isinstance(argument, fx.Node) else argument for argument in node.args]
    return operator_workspace(node.target, arguments, value(node), cuda)


class _Sizes:
    """Numbers distinct byte expressions.

    Args:
        inputs: the forward's placeholders; symbols in their shapes are sizes of the batch.
    """

    def __init__(self, inputs: Iterable[fx.Node] = ()) -> None:
        self._numbers: dict[sympy.Expr, int] = {}
        self._of_batch = {symbol for node in inputs for size in _sizes(node) for symbol in symbolic(size).free_symbols}

    def add(self, size: sympy.Expr) -> int:
        return self._numbers.setdefault(size, len(self._numbers))

    def storage(self, node: fx.Node) -> int:
        """Returns the number of a root's byte expression; 0 bytes if the root is in host memory."""
        if is_on_host(node):
            return self.add(sympy.Integer(0))
        # torch also makes the size of a generator's state symbolic, which a checkpointed region saves (2.13).
        sizes = (size.node for size in _sizes(node) if size.node.has_hint())
        fixed = {each.expr: each.hint for each in sizes if each.expr.is_Symbol and each.expr not in self._of_batch}
        return self.add(storage_bytes(node).subs(fixed) if fixed else storage_bytes(node))

    def compiled(self) -> CompiledSizes:
        return compile_sizes(self._numbers)


@dataclass(frozen=True)
class Schedule:
    """The events of a graph for any batch size.

    Attributes:
        sizes: byte expressions.
        events: the graph's events, with indices into `sizes` in place of bytes.
        inputs: shapes of the compiled graph's tensor arguments, by position.
        outputs: shapes of its results, by position.
        numbers: arguments that are symbolic sizes, by position.
    """

    sizes: CompiledSizes
    events: GraphEvents
    inputs: Mapping[int, tuple[sympy.Expr, ...]]
    outputs: Mapping[int, tuple[sympy.Expr, ...]]
    numbers: Mapping[int, sympy.Expr] = field(default_factory=dict)

    @cached_property
    def _shapes(self) -> CompiledSizes:
        return compile_sizes(itertools.chain(*self.inputs.values(), *self.outputs.values()))

    def shapes(self, values: SymbolValues) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Returns `inputs` and `outputs` for these values of the symbols."""
        sizes = iter(self._shapes(values))
        inputs, outputs = (
            {position: tuple(itertools.islice(sizes, len(shape))) for position, shape in shapes.items()}
            for shapes in (self.inputs, self.outputs)
        )
        return inputs, outputs

    def at(self, values: SymbolValues) -> GraphEvents:
        """Returns the events for these values of the symbols.

        Raises:
            KeyError: a symbol has no value, for example because a size depends on data.
        """
        sizes, graph = self.sizes(values), self.events

        def sized(storage: Storage) -> Storage:
            return storage._replace(bytes=sizes[storage.bytes])

        return replace(
            graph,
            forward=tuple(event.resized(sizes.__getitem__) for event in graph.forward),
            backward=tuple(event.resized(sizes.__getitem__) for event in graph.backward),
            inputs={position: sized(storage) for position, storage in graph.inputs.items()},
            saved=tuple(map(sized, graph.saved)),
            tangents=tuple((position, sized(storage)) for position, storage in graph.tangents),
        )

    def values(self, sizes: Mapping[int, tuple[int, ...]]) -> dict[sympy.Symbol, int]:
        """Returns the symbols' values for argument shapes, by position; a number is a shape of one size."""
        symbols = {**self.inputs, **{position: (number,) for position, number in self.numbers.items()}}
        return {
            symbol: size
            for position, shape in symbols.items()
            if len(shape) == len(sizes.get(position, ()))
            for symbol, size in zip(shape, sizes.get(position, ()), strict=True)
            if symbol.is_Symbol
        }

    def predict(self, values: SymbolValues) -> Prediction[str]:
        """Returns the prediction for this graph alone; raises as `at`."""
        return prediction_of(self.at(values))


def schedule(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Collection[str] = (),
    cuda: Multiprocessors | None = None,
    rows: Mapping[str, str] | None = None,
    inlined: Inlined | None = None,
) -> Schedule:
    """Build the schedule of a partitioned graph, which may be changed afterwards.

    Args:
        num_fwd_outputs: number of outputs that the forward's caller gets; the others are saved for the backward.
        static_inputs: names of placeholders that are not counted, such as parameters.
        rows: cluster ids of saved activations, by the names of their roots.
        inlined: operators whose results are not materialized, unless the forward returns or saves them.
    """
    outputs = _results(forward.graph)
    inlined = (inlined or Inlined()).without(root(node) for node in outputs if _is_tensor(node))
    graphs = _Graphs(forward.graph, backward.graph, num_fwd_outputs, static_inputs, inlined)
    sizes = _Sizes(forward.graph.find_nodes(op="placeholder"))
    storages = _Storages(graphs, sizes, rows or {})
    inputs = {
        at: Storage(node.name, sizes.storage(node), SAVED if node.name in graphs.saved_inputs else TEMPORARY, "input")
        for at, node in graphs.inputs.items()
        if node.name not in static_inputs
    }
    events = GraphEvents(
        forward=tuple(_events(forward.graph, sizes, (), storages.in_forward, lambda node: node.name, cuda, inlined)),
        backward=tuple(
            _events(
                backward.graph,
                sizes,
                graphs.freed,
                storages.in_backward,
                graphs.name_in_backward,
                cuda,
                inlined,
                graphs.aliases,
            )
        ),
        inputs=inputs,
        outputs=tuple((at, root(node).name if _is_tensor(node) else "") for at, node in graphs.returned),
        saved=tuple(storages.in_forward(node, operator_name(node), layer_of(node)) for node in graphs.saved_roots),
        saved_inputs=graphs.saved_inputs,
        saved_values=tuple(
            (name, root(node).name if root(node) in graphs.saved_roots else "")
            for name, node in graphs.saved.items()
            if is_tensor(node)
        ),
        tangents=tuple(
            (fx_graph.tangent_position(node), Storage(node.name, sizes.storage(node), TEMPORARY, "tangent"))
            for node in graphs.tangents
        ),
        gradients=tuple(
            (at, graphs.name_in_backward(root(node)) if _is_tensor(node) else "") for at, node in graphs.gradients
        ),
        layouts=layouts_of(graphs.tangents, ((at, node) for at, node in graphs.gradients if at in inputs)),
        accumulations=frozenset(
            at for at, node in graphs.gradients if at is not None and node is not None and is_accumulation(node)
        ),
    )
    numbers = ((at, value(node)) for at, node in graphs.arguments.items())
    return Schedule(
        sizes.compiled(),
        events.as_run(),
        inputs={at: _shape(node) for at, node in graphs.inputs.items()},
        outputs={at: _shape(node) for at, node in graphs.returned if at is not None and _is_tensor(node)},
        numbers={at: symbolic(number) for at, number in numbers if isinstance(number, torch.SymInt)},
    )


@dataclass(frozen=True)
class _Graphs:
    """The graphs that a joint graph was partitioned into, with the nodes that pass between them and their caller."""

    forward: fx.Graph
    backward: fx.Graph
    num_fwd_outputs: int
    static_inputs: Collection[str]
    inlined: Inlined

    @cached_property
    def arguments(self) -> dict[int, fx.Node]:
        """Returns the forward's placeholders by the positions of the arguments that they are."""
        given = ((fx_graph.input_position(node), node) for node in self.forward.find_nodes(op="placeholder"))
        return {position: node for position, node in given if position is not None}

    @cached_property
    def inputs(self) -> dict[int, fx.Node]:
        """Returns the tensors among `arguments`."""
        return {position: node for position, node in self.arguments.items() if is_tensor(node)}

    @cached_property
    def returned(self) -> list[tuple[int | None, fx.Node | None]]:
        """Returns the forward's results that its caller gets, with their positions."""
        results = _results(self.forward)[: self.num_fwd_outputs]
        return list(zip(fx_graph.output_positions(self.forward), results, strict=False))

    @cached_property
    def saved(self) -> dict[str, fx.Node]:
        """Returns the forward's results that the backward gets, by name."""
        return {node.name: node for node in _results(self.forward)[self.num_fwd_outputs :] if node}

    @cached_property
    def saved_roots(self) -> dict[fx.Node, None]:
        """Returns the saved storages that the forward allocates, in order."""
        return {node: None for node in self._kept if node.op != "placeholder"}

    @cached_property
    def saved_inputs(self) -> frozenset[str]:
        """Returns the names of the forward's inputs that the backward reads."""
        return frozenset(node.name for node in self._kept if node.op == "placeholder").difference(self.static_inputs)

    @cached_property
    def tangents(self) -> list[fx.Node]:
        """Returns the backward's placeholders that are gradients of the forward's results."""
        return [node for node in self._backward_inputs if is_tensor(node) and node.name not in self.saved]

    @cached_property
    def owned(self) -> dict[fx.Node, fx.Node]:
        """Returns one of the backward's placeholders for each saved storage that the forward allocates."""
        owned: dict[fx.Node, fx.Node] = {}
        for node in self._backward_inputs:
            if is_tensor(node) and node.name in self.saved and root(self.saved[node.name]).op != "placeholder":
                owned.setdefault(root(self.saved[node.name]), node)
        return owned

    @cached_property
    def freed(self) -> list[fx.Node]:
        """Returns the backward's placeholders that it frees after their last use: tangents, saved storages, and inputs
        of the forward."""
        inputs = (node for node in self._backward_inputs if self.name_in_backward(node) in self.saved_inputs)
        return [*self.tangents, *self.owned.values(), *inputs]

    @cached_property
    def aliases(self) -> dict[fx.Node, fx.Node]:
        """Returns for each saved tensor among the backward's placeholders the first one with the same storage."""
        first: dict[str, fx.Node] = {}
        saved = (node for node in self._backward_inputs if is_tensor(node) and node.name in self.saved)
        return {node: first.setdefault(self.name_in_backward(node), node) for node in saved}

    @cached_property
    def gradients(self) -> list[tuple[int | None, fx.Node | None]]:
        """Returns the backward's results, with the positions of the arguments that they are the gradients of."""
        return list(zip(fx_graph.gradient_positions(self.backward), _results(self.backward), strict=True))

    @property
    def _kept(self) -> Iterator[fx.Node]:
        """Yields the roots of the saved tensors."""
        return (root(node) for node in self.saved.values() if is_tensor(node))

    @cached_property
    def _backward_inputs(self) -> list[fx.Node]:
        return list(self.backward.find_nodes(op="placeholder"))

    @cached_property
    def _names(self) -> dict[str, str]:
        """Returns the names of the storages of `owned`, by the names of the placeholders."""
        return {node.name: storage.name for storage, node in self.owned.items()}

    def name_in_backward(self, node: fx.Node) -> str:
        """Returns the name of the storage of a root in the backward's graph."""
        if node.op != "placeholder":
            return f"{BACKWARD}{node.name}"
        saved = self.saved.get(node.name)
        return self._names.get(node.name, node.name if saved is None else root(saved).name)


class _Storages:
    """Makes the storages of a schedule, whose bytes are indices of expressions."""

    def __init__(self, graphs: _Graphs, sizes: _Sizes, rows: Mapping[str, str]) -> None:
        self._saved, self._sizes, self._rows = graphs.saved_roots, sizes, rows
        self._last_uses = _last_uses(graphs.backward, graphs.inlined, {})
        allocated = (_allocations(node, graphs.inlined) for node in graphs.forward.nodes)
        self._of_forward = {node.name for nodes in allocated for node in nodes}

    def in_forward(self, node: fx.Node, kind: str, layer: str) -> Storage:
        is_saved = node in self._saved
        kind = self._rows.get(node.name, kind) if is_saved else kind
        return self._storage(node, node.name, SAVED if is_saved else TEMPORARY, kind, layer)

    def in_backward(self, node: fx.Node, kind: str, layer: str) -> Storage:
        last = self._last_uses.get(node)
        category = GRADIENTS if last is not None and last.op == "output" else TEMPORARY
        category = RECOMPUTED if node.name in self._of_forward else category
        return self._storage(node, f"{BACKWARD}{node.name}", category, kind, layer)

    def _storage(self, node: fx.Node, name: str, category: str, kind: str, layer: str) -> Storage:
        return Storage(name, self._sizes.storage(node), category, kind, layer, module_in_layer(node))


def _is_tensor(node: fx.Node | None) -> TypeGuard[fx.Node]:
    return node is not None and is_tensor(node)


def _sizes(node: fx.Node) -> list[torch.SymInt]:
    """Returns the symbolic sizes of a tensor, or the symbolic size that the node is."""
    sizes = tensor_value(node).shape if is_tensor(node) else [value(node)]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _shape(node: fx.Node) -> tuple[sympy.Expr, ...]:
    return tuple(map(symbolic, tensor_value(node).shape))


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    """Returns the nodes that a graph returns, None for results that are not nodes."""
    (output,) = graph.find_nodes(op="output")
    return [node if isinstance(node, fx.Node) else None for node in cast("Sequence[object]", output.args[0])]


def _events(
    graph: fx.Graph,
    sizes: _Sizes,
    owned: Collection[fx.Node],
    storage_of: Callable[[fx.Node, str, str], Storage],
    name_of: Callable[[fx.Node], str],
    cuda: Multiprocessors | None,
    inlined: Inlined,
    aliases: Mapping[fx.Node, fx.Node] | None = None,
) -> Iterator[Event]:
    """Yields the events of a graph in its order; storages are freed after their last use, as in torch.fx's code.

    Args:
        graph: functional except for copies back into inputs.
        owned: placeholders that are freed after their last use, since only the graph holds them.
        storage_of: returns the storage for a root, the kind of its operator and its layer.
        name_of: returns the name of a root's storage.
        aliases: the first placeholder with the same storage, for each placeholder of a saved tensor.
    """
    last_use = _last_uses(graph, inlined, aliases or {})
    freed: dict[fx.Node, list[fx.Node]] = {}
    for storage, node in last_use.items():
        if is_tensor(storage) and (storage.op != "placeholder" or storage in owned):
            freed.setdefault(node, []).append(storage)
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        kind, layer = operator_name(node), layer_of(node)
        # Unread outputs are freed with the tuple that holds them, once its last output has been picked.
        is_unread = (
            node not in last_use and node.op == "call_function" and not inlined.is_view(node) and is_tensor(node)
        )
        yield Event(
            node.name,
            kind,
            layer,
            tuple(storage_of(allocated, kind, layer) for allocated in _allocations(node, inlined)),
            sizes.add(workspace(node, cuda)),
            tuple(map(name_of, [*([node] if is_unread else []), *freed.get(node, ())])),
        )


def _last_uses(graph: fx.Graph, inlined: Inlined, aliases: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns the last reader of each storage, by root; of placeholders that share a storage by the first one."""
    reads = ((inlined.root(read), node) for node in graph.nodes for read in node.all_input_nodes)
    return {aliases.get(storage, storage): node for storage, node in reads if storage is not None}


def _allocations(node: fx.Node, inlined: Inlined) -> list[fx.Node]:
    """Returns the roots that an operator allocates: the operator itself, or the picks of its outputs."""
    if node.op != "call_function" or inlined.is_view(node):
        return []
    if has_parts(node):
        return [user for user in node.users if is_output(user) and is_tensor(user)]
    if is_output(node) or not is_tensor(node):
        return []
    return [node]
