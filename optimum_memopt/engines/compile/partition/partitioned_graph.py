"""Splits a joint graph so that the forward saves exactly the nodes of a choice. The backward recomputes the rest."""

import functools
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.costs.costs import roofline
from optimum_memopt.engines.compile.costs.inlining import inlined
from optimum_memopt.engines.compile.graph.analyzed_graph import (
    AnalyzedGraph,
    Modules,
    digest_of,
    find_constants,
    fused_attention,
    is_data_dependent,
    layer_boundaries,
    node_paths,
    places_of,
    signature_of,
)
from optimum_memopt.engines.compile.graph.candidates import Candidate, compressions, offloads
from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    is_number,
    is_output,
    is_state_copy,
    is_tensor,
    is_view,
    root,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.graph.saved_activations import find_saved_activations, note_layers, operator_name
from optimum_memopt.engines.compile.graph.state_copies import (
    StateArguments,
    copy_state,
    remove_unsaved_copies,
    save_apart_from_inputs,
)
from optimum_memopt.engines.compile.graph.symbols import bound_symbols, compile_sizes, symbol_names
from optimum_memopt.engines.compile.loss.decide import LossDecision
from optimum_memopt.engines.compile.loss.operator import scale_in_place
from optimum_memopt.engines.compile.memory.graph_events import Prediction
from optimum_memopt.engines.compile.memory.inductor_programs import InductorPrograms
from optimum_memopt.engines.compile.memory.schedule import Schedule, schedule, workspace
from optimum_memopt.engines.compile.partition import dropout, strategies
from optimum_memopt.engines.compile.partition.accumulation import InPlaceAccumulation
from optimum_memopt.engines.compile.partition.choice import Choice, graph_plan
from optimum_memopt.engines.compile.partition.output_gradients import OutputGradients
from optimum_memopt.engines.compile.partition.strategies.compress import IN_FP8, with_conversions
from optimum_memopt.engines.compile.partition.strategies.offload import place_copies
from optimum_memopt.engines.simulator.devices import Device, device_at
from optimum_memopt.engines.simulator.work import MATRIX_PRODUCTS
from optimum_memopt.engines.torch_compat import fx_graph, kernels, traced_sizes
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors, multiprocessors_of
from optimum_memopt.logs import best_effort
from optimum_memopt.plans.plan_file import GraphEntry
from optimum_memopt.plans.table import canonical_symbols


def partition(joint: JointGraph, nodes_to_save: Collection[fx.Node]) -> Modules:
    """Returns the forward and backward graphs; the backward also gets the parameters and inputs that it reads."""
    inputs = [node for node in joint.inputs if is_tensor(node)]
    numbers = [node for node in joint.nodes if is_number(node) and node not in joint.backward]
    unread = [node for node in joint.forward if not node.users and node.is_impure()]
    return fx_graph.extract(joint.module, [*inputs, *nodes_to_save], numbers, joint.num_fwd_outputs, unread)


@dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """One compiled training graph.

    Attributes:
        names: names of the symbols, such as `input_ids_dim0`.
        timeline: memory of its forward and backward, for any values of the symbols; None if it cannot be predicted.
        has_convolutions: it has convolutions, whose kernels use workspaces that are not tensors of the graph.
        has_half_products: it has half-precision matrix products on a CPU, for which oneDNN keeps memory for each
            shape.
        has_fused_head: it has TRL's head on CUDA, which computes only tokens with a label.
        attention: names of its fused attention kernels, see `fused_attention`.
        is_all_of_forward: nothing of the model's forward runs outside of the graph.
        is_for_cuda: it trains on a CUDA device, or is planned for one.
        digest: the digest of its joint graph.
        gradients: see `gradients_of`.
        sources: see `sources_of`.
        recomputed_from: positions of state arguments from which its backward recomputes; the value is true if the
            backward reads the argument for nothing else.
        copied: see `AnalyzedGraph`.
        takes_none: see `OutputGradients.are_left_out`.
    """

    candidates: tuple[Candidate, ...]
    choice: Choice
    sizes: Mapping[sympy.Symbol, int]
    names: Mapping[sympy.Symbol, str]
    timeline: Schedule | None
    prediction: Prediction[str] | None
    plan: GraphEntry
    has_convolutions: bool = False
    has_half_products: bool = False
    has_fused_head: bool = False
    attention: tuple[str, ...] = ()
    programs: InductorPrograms = field(default_factory=InductorPrograms)
    is_all_of_forward: bool = True
    losses: tuple[LossDecision, ...] = ()
    is_for_cuda: bool = False
    bound: frozenset[sympy.Symbol] = frozenset()
    digest: str = ""
    gradients: Mapping[str, bool] = field(default_factory=dict)
    sources: Mapping[int, frozenset[int]] = field(default_factory=dict)
    recomputed_from: Mapping[int, bool] = field(default_factory=dict)
    copied: tuple[int, ...] = ()
    takes_none: bool = False

    def with_sizes(self, sizes: Mapping[sympy.Symbol, int]) -> "PartitionedGraph":
        """Returns the graph with the sizes of another first batch."""
        prediction = self.timeline.predict(sizes) if self.timeline is not None and self.prediction else None
        return replace(self, sizes=sizes, prediction=prediction)

    @property
    def offloaded_bytes(self) -> list[int]:
        """Returns the sizes in bytes of the offloaded activations in the first batch."""
        return compile_sizes(candidate.saving for candidate in offloads(self.choice.candidates))(self.sizes)

    @property
    def chunks_loss(self) -> bool:
        return any(loss.is_chunked for loss in self.losses)


@dataclass(frozen=True)
class SymbolNames:
    """The names of symbols in all graphs of one forward.

    Attributes:
        canonical: displayed name by a graph's own name: `inputs_input_ids_dim0` for `attention_mask_dim0`.
        first: value of each displayed name in the first batch.
    """

    canonical: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graphs: Iterable[PartitionedGraph], is_encoder_decoder: bool) -> "SymbolNames":
        """Collects the names in all graphs of a forward; see `canonical_symbols` on encoder-decoders."""
        named = ((graph.sizes, *item) for graph in graphs for item in graph.names.items())
        values = {name: sizes[symbol] for sizes, symbol, name in named if symbol in sizes}
        canonical = canonical_symbols(values, is_encoder_decoder)
        return cls(canonical, {canonical.get(name, name): value for name, value in values.items()})

    def of_symbols(self, graph: PartitionedGraph) -> dict[sympy.Symbol, str]:
        """Returns the canonical names of a graph's symbols."""
        return {symbol: self.canonical.get(name, name) for symbol, name in graph.names.items()}


def analyze(
    module: fx.GraphModule,
    inputs: Any,
    num_fwd_outputs: int,
    options: Mapping[str, Any],
    *,
    cuda: Multiprocessors | None = None,
    batch: Mapping[str, int] | None = None,
    layer: str = "",
    state: StateArguments | None = None,
    fuses: bool = False,
    gradients: OutputGradients | None = None,
    accumulation: InPlaceAccumulation | None = None,
) -> AnalyzedGraph:
    """Clean up a joint graph and find its candidates.

    Args:
        cuda: the CUDA device to plan for, see `operator_workspace`; None: the device of the graph's tensors.
        layer: the path of the layer whose forward the graph is; empty: the graph is not that of a single layer.
        state: the arguments that may change before the backward; None: none does.
        fuses: the graph will be compiled, so that some operators are inlined.
        gradients: removes the gradients of outputs other than the loss from the graph; None: they stay.
        accumulation: accumulates the gradients of parameters in the backward; None: autograd accumulates them.
    """
    state = state or StateArguments()
    joint = _cleaned(module, num_fwd_outputs, state, gradients, accumulation)
    note_layers(module.graph, layer)
    activations = find_saved_activations(joint)
    sizes = size_hints(joint)
    names: dict[sympy.Symbol, str] = {}
    with best_effort("the names of sizes"):
        names = symbol_names(traced_sizes.symbol_sources(), sizes, batch or {})
    # Parameters and buffers, whose addresses stay the same from step to step.
    parameters = tuple(joint.inputs[index] for index in options.get("static_lifetime_input_indices") or ())
    constants = find_constants(joint, parameters)
    candidates = strategies.find_candidates(joint, activations, sizes, constants)
    if cuda is not None:
        candidates = tuple(replace(candidate, planned_for="cuda") for candidate in candidates)

    paths = node_paths(joint)
    signature = signature_of(paths, parameters)
    cuda = cuda or multiprocessors_of(_device(joint))
    workspaces = {node: size for node in joint.nodes if node.op != "output" and (size := workspace(node, cuda))}
    graph = AnalyzedGraph(
        joint=joint,
        activations=activations,
        candidates=candidates,
        size_hints=sizes,
        names=names,
        static_inputs=parameters,
        constants=constants,
        paths=paths,
        signature=signature,
        workspaces=workspaces,
        partition_by_torch=functools.partial(_partitioned_by_torch, joint, inputs, options),
        cuda=cuda,
        digest=digest_of(joint, signature),
        state=tuple(state.nodes(joint, state.parameters | state.buffers) - joint.mutated_inputs),
    )
    if not fuses:
        return graph
    saved = {activation.root for activation in activations} | layer_boundaries(graph)
    return replace(graph, inlined=inlined(joint, sizes, saved))


def _cleaned(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    state: StateArguments,
    gradients: OutputGradients | None,
    accumulation: InPlaceAccumulation | None,
) -> JointGraph:
    """Returns the joint graph after all changes that do not depend on a plan; arguments as of `analyze`."""
    fx_graph.reveal_snapshots(module.graph)
    fx_graph.remove_dead_code(module.graph, lambda node: True)
    copy_state(JointGraph(module, num_fwd_outputs), state)
    joint = JointGraph(module, num_fwd_outputs)
    fx_graph.remove_copies(module.graph, [*map(root, joint.forward_outputs), *filter(is_state_copy, joint.forward)])
    eliminate_duplicates(JointGraph(module, num_fwd_outputs))
    separate_gradients(JointGraph(module, num_fwd_outputs))
    if gradients is not None:
        gradients.leave_out(module.graph)
    if accumulation is not None:
        accumulation.add_to(JointGraph(module, num_fwd_outputs))
    return JointGraph(module, num_fwd_outputs)


def _partitioned_by_torch(joint: JointGraph, inputs: Any, options: Mapping[str, Any]) -> Modules:
    """Returns forward and backward by torch's own partitioner; arguments as of `analyze`."""
    module, before = joint.module, joint.module.graph
    # An operator that reads an input before the forward writes to it would compute another value in the backward.
    # torch's partitioner does not account for that (2.13; nor does `torch.compile` of the model).
    kept = [node for node in joint.forward if is_tensor(node) and not is_view(node) and joint.reads_former_state(node)]
    try:
        return fx_graph.default_partition(module, inputs, kept, num_fwd_outputs=joint.num_fwd_outputs, **options)
    finally:
        # torch's partitioner replaces the joint graph by one of its own (CSE).
        module.graph = before


def separate_gradients(joint: JointGraph) -> None:
    """Copy each gradient that shares memory with an earlier gradient, as the gradients of two summed biases do.
    Invalidates everything that was read from the graph before.

    Autograd takes over a gradient that nothing else refers to: two views of one tensor would become the gradients of
    two parameters, and clipping them in place would scale both twice, as it does with inductor (torch 2.13). One
    tensor that is returned twice is copied by autograd.
    """
    outputs, first = list(joint.outputs), joint.num_fwd_outputs
    returned: set[fx.Node] = set()
    roots: set[fx.Node] = set()
    for place, node in enumerate(outputs[first:], first):
        if not isinstance(node, fx.Node) or not is_tensor(node):
            continue
        if root(node) in roots and (node not in returned or is_view(node)):
            with joint.module.graph.inserting_before(joint.module.graph.output_node()):
                outputs[place] = joint.module.graph.call_function(torch.ops.aten.clone.default, (node,))
            outputs[place].meta = {**node.meta, "val": tensor_value(node).clone()}
        returned.add(node)
        roots.add(root(node))
    joint.module.graph.output_node().args = (tuple(outputs),)


def eliminate_duplicates(joint: JointGraph) -> None:
    """Replace each operator of the joint graph by an equal, earlier one of the same pass. Invalidates everything that
    was read from the graph before.

    Under autocast a query, a key and a value projection each save their cast of the same tensor. torch's min-cut
    partitioner removes such duplicates too (`torch/_functorch/compile_utils.py`, `fx_graph_cse`), but after the
    analysis, and it makes the backward read a duplicate of the forward, which would be one more saved activation.

    Not replaced are operators that draw random numbers or read a tensor that is written to; results of the graph,
    since the caller may write to them; and operators that read no tensor (zeros, ranges): they cost next to nothing,
    and a shared result would be held from the first read to the last.
    """
    returned = {root(node) for node in joint.outputs if isinstance(node, fx.Node)}
    computed: dict[Hashable, fx.Node] = {}
    for node in joint.nodes:
        if not _is_replaceable(joint, node) or root(node) in returned:
            continue
        first = computed.setdefault((node in joint.backward, node.target, _key((node.args, node.kwargs))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            joint.module.graph.erase_node(node)


def _is_replaceable(joint: JointGraph, node: fx.Node) -> bool:
    # Data-dependent sizes are new symbols at each call.
    if node.op != "call_function" or is_data_dependent(node) or joint.is_impure(node):
        return False
    if is_number(node) or is_output(node):
        return True
    # Operators without a schema run subgraphs.
    is_pure = (schema := getattr(node.target, "_schema", None)) is not None and not schema.is_mutable
    return is_pure and not all(map(is_number, node.all_input_nodes))


def _key(argument: Any) -> Hashable:
    """Returns a key that is equal for arguments of the same type and value: 1 is not 1.0, and 0.0 is not -0.0."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, tuple | list):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    if isinstance(argument, slice):
        return (slice, _key((argument.start, argument.stop, argument.step)))
    return (type(argument), repr(argument))


def partitioned(
    graph: AnalyzedGraph, choice: Choice, runs_operators: bool = True, target: Device | None = None
) -> tuple[PartitionedGraph, Modules]:
    """Partitions a graph into the forward and backward of a choice.

    Args:
        runs_operators: the two run operator by operator, without a compiler.
        target: the device that the graph is planned for; None: the device of its tensors.

    Raises:
        MemOptError: the choice compresses, and the device has no kernels for fp8.
    """
    if not runs_operators and target is None and compressions(choice.candidates):
        kernels.check_fp8(_device(graph.joint))
    modules = choice.torchs_graphs
    if modules is None:
        modules = partition(graph.joint, choice.nodes_to_save)
        strategies.rewrite(modules, choice.candidates)
    remove_unsaved_copies(modules[0], {node.name for node in graph.joint.forward if is_state_copy(node)})
    _remove_dead_code(graph.joint, modules)
    if runs_operators:
        scale_in_place(modules)
        dropout.take_drawn_masks(modules[0])
    else:
        save_apart_from_inputs(modules[0], graph.joint.num_fwd_outputs)
    if choice.torchs_graphs is None and graph.cuda is not None and offloads(choice.candidates):
        _place_copies(graph, modules, target or device_at(_device(graph.joint)), fused=not runs_operators)
    forward, sizes = graph.joint.forward, graph.size_hints
    timeline, prediction, bound = None, None, frozenset[sympy.Symbol]()
    with best_effort("the predicted peak"):
        timeline = timeline_of(graph, modules)
        prediction = timeline.predict(sizes)
    with best_effort("the sizes that a graph is bound to"):
        bound = bound_symbols(traced_sizes.size_guards(), sizes)
    halves = any(operator_name(node) in MATRIX_PRODUCTS and _is_half_on_cpu(node) for node in forward)
    partitioned_graph = PartitionedGraph(
        graph.candidates,
        choice,
        sizes,
        graph.names,
        timeline,
        prediction,
        graph_plan(graph, choice),
        has_convolutions=any(operator_name(node).startswith("convolution") for node in forward),
        has_half_products=halves and graph.cuda is None,
        has_fused_head=graph.cuda is not None and any(operator_name(node) == "label_log_probs" for node in forward),
        attention=fused_attention(forward),
        is_for_cuda=graph.cuda is not None,
        bound=bound,
        digest=graph.digest,
        recomputed_from=_recomputed_from(graph, modules[1]),
        copied=graph.copied,
    )
    return partitioned_graph, modules


def _recomputed_from(graph: AnalyzedGraph, backward: fx.GraphModule) -> dict[int, bool]:
    """Returns `PartitionedGraph.recomputed_from`."""
    own = {node.name for node in graph.joint.backward}
    inputs = backward.graph.find_nodes(op="placeholder")
    readers = {node.name: {user.name in own for user in node.users} for node in inputs}
    found = [node for node in graph.state if False in readers.get(node.name, ())]
    return {place: True not in readers[node.name] for node in found for place in places_of([node])}


def _remove_dead_code(joint: JointGraph, modules: Modules) -> None:
    """Removes dead code but keeps random operators, so that the generator advances as in eager mode."""
    in_backward = {node.name for node in joint.backward}
    forward, backward = modules
    fx_graph.remove_dead_code(forward.graph, lambda node: node.name not in in_backward)
    fx_graph.remove_dead_code(backward.graph, lambda node: node.name in in_backward)
    for module in modules:
        module.recompile()


def _place_copies(graph: AnalyzedGraph, modules: Modules, device: Device, fused: bool) -> None:
    with best_effort("where copies to the host are placed"):
        prediction = timeline_of(graph, modules).predict(graph.size_hints)
        nodes = (node.name for node in graph.joint.nodes)
        seconds = dict(zip(nodes, roofline(graph.joint, graph.size_hints, device, fused).seconds, strict=True))
        place_copies(modules, prediction, seconds, graph.size_hints, device.copy_rate)


def timeline_of(graph: AnalyzedGraph, modules: Modules) -> Schedule:
    """Returns the memory of a graph's forward and backward over time, for any values of the symbols."""
    parameters = frozenset(node.name for node in graph.static_inputs)
    rows = {candidate.activation.root.name: candidate.cluster_id for candidate in graph.candidates}
    rows |= {IN_FP8.format(name): cluster_id for name, cluster_id in rows.items()}
    inlined = with_conversions(graph.inlined, graph.candidates)
    return schedule(*modules, graph.joint.num_fwd_outputs, parameters, graph.cuda, rows, inlined)


def _device(joint: JointGraph) -> torch.device:
    """Returns the device of the graph's tensors; scalars on the CPU do not count."""
    devices = [tensor_value(node).device for node in joint.inputs if is_tensor(node)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _is_half_on_cpu(node: fx.Node) -> bool:
    tensor = tensor_value(node)
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)


def size_hints(joint: JointGraph) -> dict[sympy.Symbol, int]:
    """Returns each symbol's value in the batch that the graph was traced with."""
    numbers = [value(node) for node in joint.inputs if is_number(node)]
    shapes = [size for node in joint.inputs if is_tensor(node) for size in tensor_value(node).shape]
    symbolic = (number.node for number in (*numbers, *shapes) if isinstance(number, torch.SymInt))
    return {node.expr: int(node.hint) for node in symbolic if node.expr.is_Symbol}
