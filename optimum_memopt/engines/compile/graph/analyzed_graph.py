"""A joint graph with its saved activations, candidates and sizes, and with operator names that are the same in every
process. Pure."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from optimum_memopt.compat.torch import dtype_name
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.graph.joint import (
    Inlined,
    JointGraph,
    first_input,
    is_number,
    is_output,
    is_state_copy,
    is_tensor,
    is_view,
    root,
    tensor_value,
)
from optimum_memopt.engines.compile.graph.saved_activations import (
    ATTENTION_KERNELS,
    SavedActivation,
    is_statistic,
    layer_of,
    module_path,
    operator_name,
)
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.plans.plan_file import GraphSignature

_Node = TypeVar("_Node")

# The layer, "" outside of all layers, and the path within it.
Path = tuple[str, str]


def node_paths(joint: JointGraph) -> dict[fx.Node, Path]:
    """Returns the path of each allocating operator, in graph order: `encoder.layer.0`, `output.dense/addmm`.

    An operator that a module calls several times gets `#2` and so on, an output of a multi-output operator its index:
    `norm/native_layer_norm[0]`. Views and sizes have no path, since they come and go with symbolic sizes.
    """
    seen: Counter[Path] = Counter()
    paths: dict[fx.Node, Path] = {}
    for node in joint.forward:
        if node.op != "call_function" or is_view(node) or not is_tensor(node) or is_state_copy(node):
            continue
        layer = layer_of(node)
        # The path of a layer that is called again ends in the number of the call.
        module = module_path(node).removeprefix(layer.partition("@")[0]).lstrip(".")
        output = f"[{node.args[1]}]" if is_output(node) else ""
        path = layer, f"{module}/{operator_name(node)}{output}"
        seen[path] += 1
        paths[node] = path if seen[path] == 1 else (layer, f"{path[1]}#{seen[path]}")
    return paths


def signature_of(paths: Mapping[fx.Node, Path], parameters: Iterable[fx.Node]) -> GraphSignature:
    """Returns a signature that identifies a graph, whatever the sizes of the batch; `parameters` include buffers."""
    numbers: dict[str, tuple[int, int]] = {}
    for node in parameters:
        tensor = tensor_value(node)
        # Buffers may grow with the batch.
        if all(isinstance(size, int) for size in tensor.shape):
            dtype = dtype_name(tensor.dtype)
            count, sum_of_numbers = numbers.get(dtype, (0, 0))
            numbers[dtype] = count + 1, sum_of_numbers + tensor.numel()
    text = "\n".join(f"{layer} {path}" for layer, path in paths.values())
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return GraphSignature(numbers, dict(Counter(map(operator_name, paths))), digest)


def digest_of(joint: JointGraph, signature: GraphSignature) -> str:
    """Returns a hash of a joint graph's nodes and parameter counts, which differ between stages of layers.

    The digest of a signature covers only the forward's operators.
    """
    # Sizes are read from any tensor that has them, so that another trace may number these operators differently.
    nodes = (f"{'' if is_number(node) else node.name} {operator_name(node)}" for node in joint.nodes)
    text = "\n".join((*nodes, *(f"{dtype} {numbers}" for dtype, numbers in sorted(signature.parameters.items()))))
    return hashlib.sha256(text.encode()).hexdigest()


def gradients_of(joint: fx.Graph, num_fwd_outputs: int, parameters: Sequence[str]) -> dict[str, bool]:
    """Returns, for each parameter that a joint graph reads, whether the backward returns its gradient, by name; empty
    if the inputs differ from those of dynamo's graph, as with tensor subclasses that become several inputs.

    Args:
        parameters: for each input of dynamo's graph, in order, the name of the parameter; empty for other inputs.
    """
    (output,) = joint.find_nodes(op="output")
    returned = output.args[0][num_fwd_outputs:]
    if len(returned) != len(parameters):
        return {}
    return {name: gradient is not None for name, gradient in zip(parameters, returned, strict=True) if name}


def sources_of(joint: fx.Graph, num_fwd_outputs: int) -> dict[int, frozenset[int]]:
    """Returns, for each argument whose gradient the backward returns, the graph's results whose gradients it depends
    on, all by position; arguments for which they are not known are left out."""
    sources: dict[fx.Node, frozenset[int | None]] = {}
    for node in joint.nodes:
        if fx_graph.is_tangent(node):
            sources[node] = frozenset((fx_graph.tangent_position(node),))
        else:
            sources[node] = frozenset().union(*(sources[given] for given in node.all_input_nodes))
    (output,) = joint.find_nodes(op="output")
    places = fx_graph.gradient_positions(joint)[num_fwd_outputs:]
    pairs = zip(places, output.args[0][num_fwd_outputs:], strict=True)
    found = {at: sources[gradient] for at, gradient in pairs if at is not None and gradient is not None}
    return {
        at: frozenset(result for result in read if result is not None)
        for at, read in found.items()
        if read and None not in read
    }


def without_gradient(graphs: Iterable[Mapping[str, bool]]) -> frozenset[str]:
    """Returns the parameters that graphs of a forward read without returning a gradient, as for a head in `no_grad`.

    Parameters that no graph reads are left out, since they may be read elsewhere.
    """
    read = {item for gradients in graphs for item in gradients.items()}
    return frozenset(name for name, _ in read if (name, True) not in read)


def with_gradient(graphs: Iterable[Mapping[str, bool]]) -> frozenset[str]:
    """Returns the parameters for which a graph of a forward returns a gradient."""
    return frozenset(name for gradients in graphs for name, is_trained in gradients.items() if is_trained)


def find_constants(joint: JointGraph, static_inputs: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Returns the operators of the forward that depend only on frozen parameters, buffers, constants and sizes.

    Examples are a cast of a frozen weight, a dequantized weight, a mask of positions: saving them takes memory that is
    worth more than the time to recompute them. Left out are matrix products, convolutions and attention with
    everything that depends on them, random draws, and statistics, which hardly take memory.
    """
    frozen = {node for node, gradient in joint.gradients.items() if gradient is None and node in static_inputs}
    copies = {node for node in joint.forward if is_state_copy(node) and first_input(node) not in joint.mutated_inputs}
    constants = set(copies)
    for node in joint.forward:
        is_product = getattr(node.target, "overloadpacket", None) in flop_registry
        if node.op == "call_function" and (is_product or joint.is_impure(node)):
            continue
        if all(read in constants or read in frozen or is_number(read) for read in node.all_input_nodes):
            constants.add(node)
    constants.difference_update(copies)
    return frozenset(node for node in constants if node.op == "call_function" and not is_statistic(node))


Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, eq=False)
class AnalyzedGraph:
    """A joint graph, the activations that it saves, and the candidates to take them out of memory.

    Attributes:
        joint: the joint graph, without dead code, copies and duplicates.
        size_hints: value of each symbol in the first batch.
        names: names of the symbols that are sizes of the forward's inputs, such as `input_ids_dim0`.
        static_inputs: inputs whose addresses stay the same from step to step: parameters and buffers.
        workspaces: bytes that operators hold in addition to their results while they run, if any.
        partition_by_torch: returns torch's own forward and backward graphs.
        cuda: the CUDA device that the graph is for; None: it is for another device.
        digest: hash of all operators, node names except sizes, and parameter counts; graphs with equal digests number
            their nodes alike.
        layer: the layer that runs the graph; its paths name the first of several equal layers, for which it was
            traced.
        call_index: see `tape.Call`.
        state: inputs that may change before the backward, without those that the graph itself writes to.
        layers_at_once: number of layers of the forward that hold their saved activations while one of them runs.
        inlined: operators that the graph's compiler inlines; empty without a compiler.
    """

    joint: JointGraph
    activations: tuple[SavedActivation, ...]
    candidates: tuple[Candidate, ...]
    size_hints: Mapping[sympy.Symbol, int]
    names: Mapping[sympy.Symbol, str]
    static_inputs: tuple[fx.Node, ...]
    constants: frozenset[fx.Node]
    paths: Mapping[fx.Node, Path]
    signature: GraphSignature
    workspaces: Mapping[fx.Node, sympy.Expr]
    partition_by_torch: Callable[[], Modules]
    cuda: Multiprocessors | None = None
    digest: str = ""
    layer: str = ""
    call_index: int = 0
    state: tuple[fx.Node, ...] = ()
    layers_at_once: int = 1
    inlined: Inlined = field(default_factory=Inlined)

    @property
    def places(self) -> tuple[int, ...]:
        """Returns the positions of arguments that are tensors of the batch, in order."""
        return tuple(sorted(self.argument_kinds))

    def places_like(self, other: "AnalyzedGraph", places: Collection[int]) -> frozenset[int]:
        """Returns the positions of arguments with the same kinds as those at `places` of another graph of the layer,
        which may have other masks and batch sizes."""
        kinds = {other.argument_kinds[place] for place in places}
        return frozenset(place for place, kind in self.argument_kinds.items() if kind in kinds)

    @property
    def argument_kinds(self) -> dict[int, tuple[object, ...]]:
        """Returns the dtype, number of dimensions and features of arguments that are tensors of the batch, by
        position."""
        kinds: dict[int, tuple[object, ...]] = {}
        for node in self.joint.inputs:
            place = fx_graph.input_position(node)
            if place is not None and is_tensor(node) and node not in self.static_inputs:
                tensor = tensor_value(node)
                # Comparing a symbol would add a guard.
                features = tuple(size for size in tensor.shape[-1:] if isinstance(size, int))
                kinds[place] = tensor.dtype, tensor.dim(), features
        return kinds

    @property
    def copied(self) -> tuple[int, ...]:
        """Returns the positions of state arguments of which the forward reads a copy."""
        return places_of(first_input(node) for node in self.joint.forward if is_state_copy(node))


def places_of(inputs: Iterable[fx.Node]) -> tuple[int, ...]:
    """Returns the positions of inputs among the arguments of the graph that dynamo has traced."""
    return tuple(sorted(place for node in inputs if (place := fx_graph.input_position(node)) is not None))


def nodes_to_save(
    graph: AnalyzedGraph, recomputed: Collection[fx.Node], also_saved: Collection[fx.Node] = ()
) -> tuple[fx.Node, ...]:
    """Returns the nodes that the forward saves if these activations are recomputed, in graph order.

    Every read of the backward is followed back until it reaches an input, an activation that stays saved, or a node
    that must not run twice (random draws). So only nodes that a read leads to are saved, and nothing is drawn twice.
    Constants are not saved: they would be held for the whole step, and take a moment to recompute.

    Args:
        recomputed: roots of the activations that are recomputed.
        also_saved: roots that are no saved activations, or constants, and are saved if a read leads to them.
    """
    activations = {activation.root for activation in graph.activations}
    saved_roots = ((activations - graph.constants) | set(also_saved)) - set(recomputed)
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [node for activation in graph.activations for node in activation.reads]
    while todo:
        node = todo.pop()
        if node in seen or node.op == "placeholder" or is_number(node):
            continue
        seen.add(node)
        if node in saved_roots or (is_tensor(node) and graph.joint.is_impure(node)):
            saved.add(node)
        else:
            todo.extend(node.all_input_nodes)
    return tuple(sorted(saved, key=graph.joint.order.__getitem__))


_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def decided_from(graph: AnalyzedGraph, saved: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Returns the saved nodes from which the backward recomputes integers or sizes, such as a router's choice of
    experts: if they were inexact, the backward could take another path than the forward.

    Args:
        saved: the saved nodes, as returned by `nodes_to_save`.
    """
    recomputed: set[fx.Node] = set()
    todo = [node for activation in graph.activations for node in activation.reads]
    while todo:
        node = todo.pop()
        if node in recomputed or node in saved or node.op == "placeholder" or is_number(node):
            continue
        recomputed.add(node)
        todo.extend(node.all_input_nodes)
    operands = (read for node in recomputed if decides(node) for read in node.all_input_nodes)
    return frozenset(map(root, saved_sources(operands, saved, recomputed, lambda node: node.all_input_nodes)))


def saved_sources(
    nodes: Iterable[_Node],
    saved: Collection[_Node],
    recomputed: Collection[_Node],
    reads: Callable[[_Node], Iterable[_Node]],
) -> set[_Node]:
    """Returns the saved nodes from which these are recomputed, themselves included; `reads` returns a node's
    operands."""
    found: set[_Node] = set()
    seen: set[_Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in saved:
            found.add(node)
        elif node in recomputed and node not in seen:
            seen.add(node)
            todo.extend(reads(node))
    return found


def is_data_dependent(node: fx.Node) -> bool:
    """True for an operator whose output sizes or scalar values depend on data."""
    return bool(_DATA_DEPENDENT & set(getattr(node.target, "tags", ())))


def decides(node: fx.Node) -> bool:
    """True for an operator that computes integers from floating-point tensors, or is data-dependent."""
    operator = first_input(node) if is_output(node) else node
    if is_data_dependent(operator):
        return True
    # The integer outputs of attention kernels are seeds, lengths and offsets.
    if operator_name(operator) in ATTENTION_KERNELS or not is_tensor(node):
        return False
    dtype = tensor_value(node).dtype
    reads = (tensor_value(read) for read in operator.all_input_nodes if is_tensor(read))
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return is_integer and any(tensor.is_floating_point() for tensor in reads)


def layer_boundaries(graph: AnalyzedGraph) -> frozenset[fx.Node]:
    """Returns the storages computed in one layer and read in another, except constants, which depend on no layer.

    If they were not saved, a layer whose input is not saved (a norm that saves only its output) would be recomputed
    from the layer before, and so on back to the first, with all of them held at once.
    """
    boundaries = set()
    for node in graph.joint.forward:
        for read in () if is_view(node) else node.all_input_nodes:
            storage = root(read)
            is_computed = is_tensor(read) and storage.op == "call_function"
            if is_computed and layer_of(storage) not in ("", layer_of(node)):
                boundaries.add(storage)
    return frozenset(boundaries) - graph.constants


def fused_attention(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Returns the fused attention kernels among the operators, by their names in PyTorch's documentation."""
    names = {dynamo.operator_name(node.target) for node in nodes}
    return tuple(dict.fromkeys(kernel for operator, kernel in ATTENTION_KERNELS.items() if operator in names))
