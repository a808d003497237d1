"""What running a training graph holds in memory, operator by operator, for any sizes of its batch. Pure.

A `GraphTimeline` is built once from the forward and backward graphs. A simulation is a loop over integers, about 1 ms
for a thousand operators, so that the table, the prediction of a step and a search over plans can all afford it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_tensor, root
from optimum_memopt.engines.compile.graph.symbols import CompiledSizes, SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.liveness import Schedule, SizeTable, schedule
from optimum_memopt.engines.compile.memory.requests import Request, requests_of
from optimum_memopt.engines.compile.torch_compat.kernels import Multiprocessors


class Moment(NamedTuple):
    """What is held while an operator runs, in bytes."""

    node: str
    held: int


@dataclass(frozen=True)
class Timeline:
    """A graph's run.

    Attributes:
        nodes: names of its operators.
        held: bytes while each of them runs.
        end: bytes after the last.
    """

    nodes: tuple[str, ...]
    held: tuple[int, ...]
    end: int

    @property
    def peak(self) -> Moment:
        """The first operator at which most is held."""
        # A backward that returns the gradient it is given has no operator.
        if not self.held:
            return Moment("", self.end)
        held = max(self.held)
        return Moment(self.nodes[self.held.index(held)], held)


@dataclass(frozen=True)
class Prediction:
    """What one forward and backward hold, in bytes over parameters, inputs and gradients that were there before.

    Attributes:
        forward: the forward's run.
        backward: the backward's, which begins with what the forward has saved for it.
        stashed: held between the two.
        tangents: gradients that the backward is given.
        returned: outputs of the forward that nobody but its caller may hold.
        saved_inputs: inputs of the forward, beside parameters, that the backward reads.
        requests: of both, where the programs of a compiler are known; see `GraphTimeline.requests`.
    """

    forward: Timeline
    backward: Timeline
    stashed: int
    tangents: int = 0
    returned: int = 0
    saved_inputs: int = 0
    requests: tuple[Request, ...] = ()

    @property
    def peak(self) -> int:
        return max(self.forward.peak.held, self.backward.peak.held)


class SavedStorage(NamedTuple):
    """The storage of a value that is saved for backward.

    Attributes:
        root: name of the node that allocates it.
        bytes: its size.
    """

    root: str
    bytes: int


# Of each tensor that is saved for backward, by the name of its node; None for an input of the forward.
SavedForBackward = Mapping[str, SavedStorage | None]


@dataclass(frozen=True)
class GraphTimeline:
    """The forward and backward graphs of one training graph as AOTAutograd runs them; all sizes are indices.

    Attributes:
        sizes: byte expressions of all storages in both graphs.
        forward: its operators.
        backward: its operators.
        returned: outputs that the forward's caller drops before the backward.
        tangents: gradients that the backward is given.
        saved_inputs: inputs of the forward, beside parameters, that the backward reads.
        saved: root and size of each tensor that is saved for backward, None for an input of the forward.
        returned_roots: names of `returned`.
        tangent_roots: names of `tangents`.
    """

    sizes: CompiledSizes
    forward: Schedule
    backward: Schedule
    returned: tuple[int, ...]
    tangents: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    saved: Mapping[str, tuple[str, int] | None]
    returned_roots: tuple[str, ...]
    tangent_roots: tuple[str, ...]

    def predict(self, values: SymbolValues) -> Prediction:
        """Simulate both graphs.

        Args:
            values: of every symbol.

        Raises:
            KeyError: a symbol without a value, as where a size depends on data.
        """
        sizes = self.sizes(values)
        returned, tangents, saved_inputs = (
            sum(sizes[index] for index in indices) for indices in (self.returned, self.tangents, self.saved_inputs)
        )
        forward = simulate(self.forward, sizes)
        stashed = forward.end - returned
        backward = simulate(self.backward, sizes, stashed + tangents)
        return Prediction(forward, backward, stashed, tangents, returned, saved_inputs)

    def requests(self, values: SymbolValues) -> tuple[Request, ...]:
        """What both graphs ask of an allocator, in order; what is left are the gradients that the backward returns."""
        sizes = self.sizes(values)
        tangents = zip(self.tangent_roots, self.tangents, strict=True)
        known = {name: saved[0] for name, saved in self.saved.items() if saved is not None}
        return (
            *requests_of(self.forward, sizes, ""),
            *(Request(root, 0) for root in self.returned_roots),
            *(Request(root, sizes[index]) for root, index in tangents),
            *requests_of(self.backward, sizes, "backward ", {**known, **{root: root for root in self.tangent_roots}}),
        )

    def saved_for_backward(self, values: SymbolValues) -> SavedForBackward:
        """What the forward saves for the backward, for these values of the symbols."""
        sizes = self.sizes(values)
        return {name: saved and SavedStorage(saved[0], sizes[saved[1]]) for name, saved in self.saved.items()}

    def saved_bytes(self, values: SymbolValues) -> int:
        """Bytes of the storages that are saved for backward, each counted once, inputs left out."""
        return sum(dict(filter(None, self.saved_for_backward(values).values())).values())


def simulate(graph: Schedule, sizes: list[int], start: int = 0) -> Timeline:
    """Run a graph in its order.

    Args:
        graph: what each operator allocates and frees.
        sizes: bytes by the indices of `graph`.
        start: bytes held before the first operator, storages of owned placeholders among them.

    Returns:
        Bytes over what the placeholders that are not owned hold.
    """
    storages = [sizes[index] for index in graph.storages]
    held = start
    during = []
    for allocates, workspace, frees in graph.operators:
        for storage in allocates:
            held += storages[storage]
        during.append(held + sizes[workspace])
        for storage in frees:
            held -= storages[storage]
    return Timeline(graph.names, tuple(during), held)


def graph_timeline(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    holds_outputs: bool = False,
    static_inputs: Collection[str] = (),
    cuda: Multiprocessors | None = None,
) -> GraphTimeline:
    """Read both graphs, which may be changed afterwards.

    Args:
        forward: the partitioned forward graph.
        backward: the partitioned backward graph.
        num_fwd_outputs: outputs of the forward that its caller gets; the others are saved for backward.
        holds_outputs: the caller keeps those outputs until after the backward; Trainer drops all but the loss.
        static_inputs: names of parameters and buffers.
        cuda: see `operator_workspace`.
    """
    sizes = SizeTable()
    (output,) = forward.graph.find_nodes(op="output")
    outputs = cast("Sequence[object]", output.args[0])
    returned = {root(node) for node in outputs[:num_fwd_outputs] if isinstance(node, fx.Node)}
    saved = {node.name: node for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node)}
    saved_roots = {root(node) for node in saved.values()}
    dropped = set() if holds_outputs else {node for node in returned - saved_roots if node.op == "call_function"}
    inputs = {node for node in saved_roots if node.op == "placeholder" and node.name not in static_inputs}
    tangents, owned = _owned_inputs(backward.graph, saved, returned if holds_outputs else ())
    numbered = {
        name: None if root(node).op == "placeholder" else (root(node).name, sizes.storage(root(node)))
        for name, node in saved.items()
        if is_tensor(node)
    }
    of_dropped, of_tangents, of_inputs = (
        tuple(sizes.storage(node) for node in nodes if is_tensor(node)) for nodes in (dropped, tangents, inputs)
    )
    schedules = (
        schedule(forward.graph, sizes, cuda=cuda),
        schedule(backward.graph, sizes, [*tangents, *owned], cuda),
    )
    roots = [tuple(node.name for node in nodes if is_tensor(node)) for nodes in (dropped, tangents)]
    return GraphTimeline(
        compile_sizes(sizes.expressions), *schedules, of_dropped, of_tangents, of_inputs, numbered, *roots
    )


def _owned_inputs(
    backward: fx.Graph, saved: Mapping[str, fx.Node], held: Collection[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Tensors that the backward frees after their last use: its tangents, and one for each storage saved for it.

    Args:
        backward: the partitioned backward graph.
        saved: what is saved for backward, by name.
        held: roots that the forward's caller keeps.
    """
    tangents: list[fx.Node] = []
    owned: list[fx.Node] = []
    seen = set(held)
    for node in backward.find_nodes(op="placeholder"):
        if not is_tensor(node):
            continue
        if node.name not in saved:
            tangents.append(node)
        elif (storage := root(saved[node.name])).op != "placeholder" and storage not in seen:
            seen.add(storage)
            owned.append(node)
    return tangents, owned
