"""Event streams of the storages that a graph's forward and backward allocate and free, and folds over them. Pure.

Four sources write a stream: the graphs that a joint graph was partitioned into (here), a problem with a set of saved
nodes (`simulation.py`), the programs that inductor wrote (`inductor_programs.py`), and a module that runs on fake
tensors (`live.py`). `composition.py` merges the streams of a step's graphs into one.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeGuard, TypeVar, cast

import sympy
import torch
from torch import fx

from optimum_memopt.engines.api.predictions import CATEGORIES, GRADIENTS, RECOMPUTED, SAVED, TEMPORARY
from optimum_memopt.engines.compile.graph.joint import (
    Inlined,
    has_parts,
    is_added_gradient,
    is_on_host,
    is_output,
    is_tensor,
    root,
    storage_bytes,
    symbolic,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.graph.layouts import Layouts, layouts_of
from optimum_memopt.engines.compile.graph.saved_activations import layer_of, module_in_layer, operator_name
from optimum_memopt.engines.compile.graph.symbols import CompiledSizes, SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.workspaces import workspace
from optimum_memopt.engines.compile.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.compile.torch_compat.kernels import Multiprocessors

# Prefix of the names of storages that a backward allocates: recomputed operators are named as in the forward.
BACKWARD = "backward "


class Storage(NamedTuple):
    """The memory behind one or more tensors.

    Attributes:
        name: unique among the storages held at the same time.
        category: one of `predictions.CATEGORIES`.
        kind: cluster id of a saved activation that has one, else the operator that allocates it, `gelu`.
        layer: path of the transformer layer; empty outside of all layers.
        module: path of the allocating module, relative to its layer, or to the model outside of layers.
    """

    name: str
    bytes: int
    category: str = TEMPORARY
    kind: str = ""
    layer: str = ""
    module: str = ""


class Event(NamedTuple):
    """The allocations and frees of an operator, or of a moment between two of them.

    Attributes:
        operator: the name of its node, or of the storage that a compiled program allocates; empty between operators.
        kind: the operator's name, `gelu`.
        layer: path of the transformer layer; empty outside of all layers.
        allocates: storages allocated before the operator runs.
        workspace: bytes that the operator holds while it runs, beside its results.
        frees: names of the storages freed after the operator has run.
    """

    operator: str
    kind: str = ""
    layer: str = ""
    allocates: tuple[Storage, ...] = ()
    workspace: int = 0
    frees: tuple[str, ...] = ()


def held_before(events: Iterable[Event]) -> dict[str, Storage]:
    """Returns the storages held after these events, before the next one allocates, by name."""
    held: dict[str, Storage] = {}
    for event in events:
        held.update((storage.name, storage) for storage in event.allocates)
        for name in event.frees:
            held.pop(name, None)
    return held


def held_during(events: Sequence[Event], index: int) -> tuple[Storage, ...]:
    """Returns the storages held during an event, its workspace as a storage of its own."""
    event = events[index]
    module = event.allocates[0].module if event.allocates else ""
    workspace = Storage("", event.workspace, TEMPORARY, f"{event.kind} workspace", event.layer, module)
    held = held_before(events[:index])
    held.update((storage.name, storage) for storage in event.allocates)
    return (*held.values(), *([workspace] if event.workspace else []))


def bytes_during(events: Iterable[Event]) -> tuple[list[int], int]:
    """Returns the bytes held during each event, and those held after the last."""
    sizes: dict[str, int] = {}
    held, during = 0, []
    for event in events:
        for storage in event.allocates:
            sizes[storage.name] = storage.bytes
            held += storage.bytes
        during.append(held + event.workspace)
        for name in event.frees:
            held -= sizes.pop(name, 0)
    return during, held


def bytes_by_category(events: Iterable[Event]) -> Iterator[dict[str, int]]:
    """Yields the bytes held during each event, by category; a workspace counts as temporary."""
    now = dict.fromkeys(CATEGORIES, 0)
    sizes: dict[str, tuple[str, int]] = {}
    for event in events:
        for storage in event.allocates:
            sizes[storage.name] = storage.category, storage.bytes
            now[storage.category] += storage.bytes
        yield {**now, TEMPORARY: now[TEMPORARY] + event.workspace}
        for category, size in (sizes.pop(name) for name in event.frees if name in sizes):
            now[category] -= size


@dataclass(frozen=True)
class GraphEvents:
    """The events of one graph's forward and backward. Positions index the compiled graph's arguments or results.

    Attributes:
        forward: events of the forward, in order.
        backward: events of the backward, in order; they also free saved inputs, which the inputs' owner may ignore.
        inputs: storages of the forward's tensor arguments, without parameters, by position.
        outputs: position and storage name of each returned tensor that is not saved; the position is None if the
            caller does not get the tensor, the name empty if it has no storage of its own.
        saved: storages that the forward saves for the backward, each once, without inputs.
        saved_inputs: names of `inputs` that the backward reads.
        saved_values: pairs of a saved tensor's name as an input of the backward, and its storage's name; the latter is
            empty for an input of the forward.
        tangents: incoming gradients of the backward, with the position of the output that each belongs to.
        gradients: input position and storage name of each gradient that the backward returns, in its order.
        layouts: memory layouts of tangents and gradients.
        added: input positions of the gradients that the backward itself adds to earlier ones.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    inputs: Mapping[int, Storage]
    outputs: tuple[tuple[int | None, str], ...]
    saved: tuple[Storage, ...]
    saved_inputs: frozenset[str]
    tangents: tuple[tuple[int | None, Storage], ...]
    gradients: tuple[tuple[int | None, str], ...]
    saved_values: tuple[tuple[str, str], ...] = ()
    layouts: Layouts = field(default_factory=Layouts)
    added: frozenset[int] = frozenset()

    def with_earlier_gradients(self) -> "GraphEvents":
        """Returns the events of a run to whose `added` gradients there are earlier ones: the sums take no memory."""
        sums = {name for position, name in self.gradients if position in self.added}
        if not sums:
            return self
        return replace(
            self,
            backward=tuple(
                event._replace(
                    allocates=tuple(each._replace(bytes=0) if each.name in sums else each for each in event.allocates)
                )
                for event in self.backward
            ),
        )

    def as_run(self) -> "GraphEvents":
        """Returns the events as torch runs the graph: some versions hold tangents until the backward ends."""
        tangents = {storage.name for _, storage in self.tangents}
        freed = tuple(name for event in self.backward for name in event.frees if name in tangents)
        if not freed or not dynamo.holds_tangents():
            return self
        kept = [tuple(name for name in event.frees if name not in tangents) for event in self.backward]
        kept[-1] += freed
        backward = (event._replace(frees=frees) for event, frees in zip(self.backward, kept, strict=True))
        return replace(self, backward=tuple(backward))

    def without_backward(self) -> "GraphEvents":
        """Returns the events of the forward alone, after which what it saves is still held."""
        return GraphEvents(
            self.forward,
            backward=(),
            inputs=self.inputs,
            outputs=self.outputs,
            saved=(),
            saved_inputs=frozenset(),
            tangents=(),
            gradients=(),
        )

    @property
    def returned(self) -> tuple[str, ...]:
        """Returns the names of the outputs' storages that are not saved: only the forward's caller holds them."""
        saved = {storage.name for storage in self.saved}
        return tuple(dict.fromkeys(name for _, name in self.outputs if name and name not in saved))


Node = TypeVar("Node", int, str)


@dataclass(frozen=True)
class RunMemory(Generic[Node]):
    """The memory of one run of a graph.

    Attributes:
        order: its operators in order, by name or number.
        held: bytes held while each operator runs.
        end: bytes held after the last operator.
    """

    order: tuple[Node, ...]
    held: tuple[int, ...]
    end: int

    @cached_property
    def peak(self) -> int:
        # A backward that returns its incoming gradient unchanged has no operators.
        return max(self.held, default=self.end)


@dataclass(frozen=True)
class Prediction(Generic[Node]):
    """The memory of one graph's forward and backward, in bytes above existing parameters, inputs and gradients.

    Attributes:
        saved_bytes: bytes held between forward and backward.
    """

    forward: RunMemory[Node]
    backward: RunMemory[Node]
    saved_bytes: int

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.backward.peak)


def prediction_of(graph: GraphEvents) -> Prediction[str]:
    """Returns the prediction for a graph that is the whole forward."""
    before = Event("", frees=graph.returned)
    given = Event("", allocates=tuple(storage for _, storage in graph.tangents))
    during, end = bytes_during((*graph.forward, before, given, *graph.backward))
    count = len(graph.forward)
    _, left = bytes_during(graph.forward)
    _, saved = bytes_during((*graph.forward, before))
    forward, backward = (tuple(event.operator for event in events) for events in (graph.forward, graph.backward))
    return Prediction(
        RunMemory(forward, tuple(during[:count]), left), RunMemory(backward, tuple(during[count + 2 :]), end), saved
    )


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

        def run(events: Iterable[Event]) -> tuple[Event, ...]:
            return tuple(
                event._replace(allocates=tuple(map(sized, event.allocates)), workspace=sizes[event.workspace])
                for event in events
            )

        return replace(
            graph,
            forward=run(graph.forward),
            backward=run(graph.backward),
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
    sizes, rows = _Sizes(forward.graph.find_nodes(op="placeholder")), rows or {}
    outputs = _results(forward.graph)
    inlined = (inlined or Inlined()).without(root(node) for node in outputs if _is_tensor(node))
    returned, saved = outputs[:num_fwd_outputs], {node.name: node for node in outputs[num_fwd_outputs:] if node}
    kept = [root(node) for node in saved.values() if is_tensor(node)]
    saved_roots = {node for node in kept if node.op != "placeholder"}
    saved_inputs = {node.name for node in kept if node.op == "placeholder" and node.name not in static_inputs}
    tangents, owned = _owned_inputs(backward.graph, saved)
    roots = {node.name: root(saved[node.name]).name for node in owned}
    of_forward = {allocated.name for node in forward.graph.nodes for allocated in _allocations(node, inlined)}

    def in_forward(node: fx.Node, kind: str, layer: str) -> Storage:
        category, kind = (SAVED, rows.get(node.name, kind)) if node in saved_roots else (TEMPORARY, kind)
        return Storage(node.name, sizes.storage(node), category, kind, layer, module_in_layer(node))

    last_uses = _last_uses(backward.graph, inlined)

    def in_backward(node: fx.Node, kind: str, layer: str) -> Storage:
        is_returned = node in last_uses and last_uses[node].op == "output"
        category = RECOMPUTED if node.name in of_forward else GRADIENTS if is_returned else TEMPORARY
        return Storage(f"{BACKWARD}{node.name}", sizes.storage(node), category, kind, layer, module_in_layer(node))

    def name_in_backward(node: fx.Node) -> str:
        if node.op != "placeholder":
            return f"{BACKWARD}{node.name}"
        return roots.get(node.name, root(saved[node.name]).name if node.name in saved else node.name)

    placeholders = backward.graph.find_nodes(op="placeholder")
    freed = [*tangents, *owned, *(node for node in placeholders if name_in_backward(node) in saved_inputs)]
    given = {fx_graph.input_position(node): node for node in forward.graph.find_nodes(op="placeholder")}
    arguments = {position: node for position, node in given.items() if position is not None}
    tensors = {position: node for position, node in arguments.items() if is_tensor(node)}
    results = list(zip(fx_graph.output_positions(forward.graph), returned, strict=False))
    gradients = list(zip(fx_graph.gradient_positions(backward.graph), _results(backward.graph), strict=True))
    inputs = {
        position: Storage(node.name, sizes.storage(node), SAVED if node.name in saved_inputs else TEMPORARY, "input")
        for position, node in tensors.items()
        if node.name not in static_inputs
    }
    events = GraphEvents(
        tuple(_events(forward.graph, sizes, (), in_forward, lambda node: node.name, cuda, inlined)),
        tuple(_events(backward.graph, sizes, freed, in_backward, name_in_backward, cuda, inlined)),
        inputs,
        tuple((position, root(node).name if _is_tensor(node) else "") for position, node in results),
        tuple(in_forward(n, operator_name(n), layer_of(n)) for n in dict.fromkeys(kept) if n in saved_roots),
        frozenset(saved_inputs),
        tuple(
            (fx_graph.tangent_position(node), Storage(node.name, sizes.storage(node), TEMPORARY, "tangent"))
            for node in tangents
        ),
        tuple((position, name_in_backward(root(node)) if _is_tensor(node) else "") for position, node in gradients),
        tuple(
            (name, root(node).name if root(node) in saved_roots else "")
            for name, node in saved.items()
            if is_tensor(node)
        ),
        layouts_of(tangents, ((position, node) for position, node in gradients if position in inputs)),
        frozenset(
            position for position, node in gradients if position is not None and node and is_added_gradient(node)
        ),
    )
    return Schedule(
        sizes.compiled(),
        events.as_run(),
        {position: _shape(node) for position, node in tensors.items()},
        {position: _shape(node) for position, node in results if position is not None and _is_tensor(node)},
        {
            position: symbolic(cast(torch.SymInt, value(node)))
            for position, node in arguments.items()
            if isinstance(value(node), torch.SymInt)
        },
    )


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


def _owned_inputs(backward: fx.Graph, saved: Mapping[str, fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the placeholders that the backward frees after their last use: tangents, and one per saved storage."""
    tangents: list[fx.Node] = []
    owned: dict[fx.Node, fx.Node] = {}
    for node in backward.find_nodes(op="placeholder"):
        if is_tensor(node) and node.name not in saved:
            tangents.append(node)
        elif is_tensor(node) and (storage := root(saved[node.name])).op != "placeholder":
            owned.setdefault(storage, node)
    return tangents, list(owned.values())


def _events(
    graph: fx.Graph,
    sizes: _Sizes,
    owned: Collection[fx.Node],
    storage_of: Callable[[fx.Node, str, str], Storage],
    name_of: Callable[[fx.Node], str],
    cuda: Multiprocessors | None,
    inlined: Inlined,
) -> Iterator[Event]:
    """Yields the events of a graph in its order; storages are freed after their last use, as in torch.fx's code.

    Args:
        graph: functional except for copies back into inputs.
        owned: placeholders that are freed after their last use, since only the graph holds them.
        storage_of: returns the storage for a root, the kind of its operator and its layer.
        name_of: returns the name of a root's storage.
    """
    last_use = _last_uses(graph, inlined)
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


def _last_uses(graph: fx.Graph, inlined: Inlined) -> dict[fx.Node, fx.Node]:
    """Returns the last reader of each storage, by root."""
    reads = ((inlined.root(read), node) for node in graph.nodes for read in node.all_input_nodes)
    return {storage: node for storage, node in reads if storage is not None}


def _allocations(node: fx.Node, inlined: Inlined) -> list[fx.Node]:
    """Returns the roots that an operator allocates: itself, or those of its outputs that are picked."""
    if node.op != "call_function" or inlined.is_view(node):
        return []
    if has_parts(node):
        return [user for user in node.users if is_output(user) and is_tensor(user)]
    if is_output(node) or not is_tensor(node):
        return []
    return [node]
