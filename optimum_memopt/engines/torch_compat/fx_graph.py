"""Reads, partitions and runs joint graphs, by torch's private names."""

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from packaging.version import Version
from torch import fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.amp import autocast_mode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from optimum_memopt.compat.torch import current_autocast, without_modes

LIBRARY = "optimum_memopt"
# The operator of an `autograd.Function` in a graph that dynamo has traced.
_FUNCTION = torch.ops.higher_order.autograd_function_apply


def is_tangent(node: fx.Node) -> bool:
    """True for the gradient of a forward output, an input of the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_tagged_backward(node: fx.Node) -> bool:
    """True for a node traced while autograd ran the backward, even if it reads no gradient (a transposed weight)."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_tagged_forward(node: fx.Node) -> bool:
    """True for a node traced before autograd ran the backward (`create_joint` in `torch/_functorch/_aot_autograd/
    graph_capture_wrappers.py`)."""
    return node.meta.get("partitioner_tag") == "is_forward"


def is_untagged(node: fx.Node) -> bool:
    """True for a node traced after the forward, but not by an operator that autograd ran itself.

    Dynamo replays the backward of a `torch.autograd.Function` from a separate graph, whose nodes have no tag
    (`AutogradFunctionApply` in `torch/_functorch/autograd_function.py`).
    """
    return node.meta.get("partitioner_tag") is None


def is_random(node: fx.Node) -> bool:
    """True if a node draws random numbers, so that a recompute would draw others.

    Attention has the tag even if its dropout probability is 0 and it draws nothing. inductor draws the seeds of all
    dropouts at once (`torch/_inductor/inductor_prims.py`); looking up one counts too, so that each mask's seed is
    saved by itself. A higher-order operator (`torch.cond`) has no tag, and draws if one of its graphs does.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return any(is_random(inner) for graph in _graphs_of(node) for inner in graph.nodes)
    is_tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return getattr(node.target, "_opname", "") == "inductor_lookup_seed" or (is_tagged and not _drops_nothing(node))


def _graphs_of(node: fx.Node) -> Iterator[fx.Graph]:
    """Yields the graphs among the arguments of a higher-order operator."""
    owner = node.graph.owning_module
    for read in node.all_input_nodes:
        if read.op == "get_attr" and owner is not None:
            module = getattr(owner, str(read.target), None)
            if isinstance(module, fx.GraphModule):
                yield module.graph


def remove_dead_code(graph: fx.Graph, draws: Callable[[fx.Node], bool]) -> None:
    """Remove unread operators, except those that draw random numbers and for which `draws` is true.

    Without a compiler these stay, as in plain PyTorch: later operators would draw other numbers. torch's own partition
    removes none of them (`Graph.eliminate_dead_code`), or all, see `dynamo.compile_without_compiler`.
    """

    def has_effect(node: fx.Node) -> bool:
        is_tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        return is_random(node) and draws(node) if is_tagged else node.is_impure()

    graph.eliminate_dead_code(has_effect)


def reads_seed(node: fx.Node) -> bool:
    """True if a node draws another operator's random numbers again, from a seed among its arguments.

    The backward of CUDA's attention reads the seed in host memory, whatever device the trace says
    (`aten/src/ATen/native/transformers/cuda/attention_backward.cu`).
    """
    names = _arguments(node)
    return any(part in name for name in names for part in ("philox", "rng_state")) and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    return "dropout_p" in (arguments := _arguments(node)) and bool(arguments["dropout_p"] == 0)


def _arguments(node: fx.Node) -> dict[str, Any]:
    return arguments_by_name(node.target, node.args, node.kwargs)


def arguments_by_name(operator: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operator's call by name, with defaults for omitted ones; empty without a schema."""
    schema = getattr(operator, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    given = dict(zip((argument.name for argument in arguments), positional, strict=False)) | dict(named)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def is_float32_statistic(node: fx.Node) -> bool:
    """True for a norm's mean or deviation that is traced in half precision but computed in float32 on a CPU.

    It is if the norm's input is in half precision and its weight is not, as under autocast
    (`aten/src/ATen/native/layer_norm.cpp`, `group_norm.cpp`; the traced dtype is that of `torch/_refs/__init__.py`).
    """
    if node.target is not operator.getitem or node.args[1] == 0:
        return False
    (norm,) = node.all_input_nodes
    if getattr(norm.target, "_opname", "") not in ("native_layer_norm", "native_group_norm"):
        return False
    given, *parameters = [
        read.meta["val"].dtype for read in norm.all_input_nodes if isinstance(read.meta.get("val"), torch.Tensor)
    ]
    return node.meta["val"].device.type == "cpu" and given.itemsize == 2 and torch.float32 in parameters


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions of `torch.empty_like(tensor)`, from the outermost in memory to the innermost.

    Symbolic sizes have the values of the first batch, since comparing symbols would add a guard. Sizes that depend on
    data count as 2.
    """
    shape, stride = (
        [int(number.node.hint or 2) if isinstance(number, torch.SymInt) else number for number in numbers]
        for numbers in (tensor.shape, tensor.stride())
    )
    with without_modes():
        strides = torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def mutated_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the inputs that the forward writes to, such as running statistics; the backward cannot read their former
    values.

    Without a compiler AOTAutograd writes the new values back outside of the graph; the descriptors of the outputs name
    these inputs (`torch/_functorch/_aot_autograd/descriptors.py`). For inductor the writes are operators of the graph,
    `copy_` of the new value to the input (`keep_inference_input_mutations`).
    """
    (output,) = graph.find_nodes(op="output")
    # A nested region (`torch.compiler.nested_compile_region`) has no descriptors.
    given = output.meta.get("desc") or ()
    descriptors = {desc.mutated_input for desc in given if isinstance(desc, InputMutationAOTOutput)}
    by_caller = {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in descriptors}
    in_graph = {node for operator in graph.nodes for node in written_by(operator) if node.op == "placeholder"}
    return frozenset(by_caller | in_graph)


def written_by(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that an operator writes to, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    written = [value for name, value in _arguments(node).items() if name in names]
    return [value for value in tree_leaves(written) if isinstance(value, fx.Node)]


# Functions of Python's `operator` module that write to their first argument, and those whose names only look like it.
_IN_PLACE = frozenset(
    (
        "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
        "itruediv", "ixor", "setitem",
    )
)  # fmt: skip
_NOT_IN_PLACE = frozenset({operator.and_, operator.is_, operator.not_, operator.or_})
_REPLACES_DATA = frozenset({"set_", torch.Tensor.set_})


def written_in_trace(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a call in a dynamo graph writes to: the mutable ones of its schema, `out`,
    and the first argument of in-place calls (Python's operators, names ending in an underscore, `inplace=True`)."""
    written = [*written_by(node), node.kwargs.get("out")]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    has_name = name.endswith("_") and not name.endswith("__") and node.target not in _NOT_IN_PLACE
    if node.op in ("call_function", "call_method") and (name in _IN_PLACE or has_name or _is_inplace(node)):
        written += node.args[:1] or tuple(node.kwargs.values())[:1]
    return [value for value in tree_leaves(written) if isinstance(value, fx.Node)]


def writes_without_gradients(graph: fx.Graph) -> bool:
    """True if a dynamo graph writes to a tensor while gradients are off (`with torch.no_grad(): x.clamp_(-1, 1)`).

    Data that is replaced (`x.data = y`, in a graph `set_`) does not count.
    """
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    # A part of a graph may begin within such a block.
    is_on = not (switches and switches[0].args[0])
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            is_on = bool(node.args[0])
        elif not is_on and node.target not in _REPLACES_DATA and any(written_in_trace(node)):
            return True
    return False


def _is_inplace(node: fx.Node) -> bool:
    """True for a call with `inplace=True`, such as of `torch.nn.functional.relu`."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return False
    return given.get("inplace") is True


def written_in_place(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs that a graph of dynamo writes to."""
    written: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for target in written_in_trace(node):
            base: object = target
            # The first argument of a view is its base.
            while isinstance(base, fx.Node) and base.op != "placeholder":
                base = base.args[0] if base.args else None
            if isinstance(base, fx.Node):
                written[base] = None
    return list(written)


def remove_unread_writes(graph: fx.Graph) -> None:
    """Remove in-place operators with unused results, so that rerunning the graph leaves the model's state as it is."""
    for node in reversed(graph.nodes):
        if written_by(node) and not node.users:
            graph.erase_node(node)


def input_position(node: fx.Node) -> int | None:
    """Returns the position of a placeholder among the arguments of the compiled graph."""
    return _position(node.meta.get("desc"), PlainAOTInput)


def output_positions(graph: fx.Graph) -> list[int | None]:
    """Returns each forward output's position among the results of the compiled graph; None if its caller does not get
    it."""
    (output,) = graph.find_nodes(op="output")
    return [_position(desc, PlainAOTOutput) for desc in _descriptors(output)]


def tangent_position(node: fx.Node) -> int | None:
    """Returns the position of the result of the compiled graph that a tangent is the gradient of."""
    desc = node.meta.get("desc")
    return _position(desc.output, PlainAOTOutput) if isinstance(desc, TangentAOTInput) else None


def gradient_positions(graph: fx.Graph) -> list[int | None]:
    """Returns the position of the argument of the compiled graph that each backward output is the gradient of."""
    (output,) = graph.find_nodes(op="output")
    found = (desc.grad_of if isinstance(desc, GradAOTOutput) else None for desc in _descriptors(output))
    return [_position(desc, PlainAOTInput) for desc in found]


def replace_saved(forward: fx.Graph, saved: fx.Node, others: Sequence[fx.Node]) -> None:
    """Make a partitioned forward return other tensors in place of one that it saves for the backward.

    Each result keeps its descriptor; new results have that of the tensor they replace.
    """
    (output,) = forward.find_nodes(op="output")
    results, descriptors = list(cast(Sequence[Any], output.args[0])), list(_descriptors(output))
    place = results.index(saved)
    results[place : place + 1] = others
    descriptors[place : place + 1] = descriptors[place : place + 1] * len(others)
    output.args = (tuple(results),)
    if "desc" in output.meta:
        output.meta["desc"] = descriptors


def _descriptors(output: fx.Node) -> list[Any]:
    return output.meta.get("desc") or [None] * len(cast(Sequence[object], output.args[0]))


def _position(desc: Any, kind: type) -> int | None:
    return desc.idx if isinstance(desc, kind) else None


def drop_unread_results(module: fx.GraphModule) -> None:
    """Replace the unread results of traced `autograd.Function`s by None.

    torch 2.11 returns intermediate values of the forward beside its results. If the forward writes to its result
    (`output += bias`, as in ZeRO 3's linear layers), one of them is the same tensor: autograd sends the gradient to
    the last of the two, and parameters get zeros, also with plain `torch.compile`. Other releases return only the
    results (`torch/_dynamo/variables/higher_order_ops.py`); the function's backward gets zeros for unread ones.
    """
    if Version(torch.__version__).release[:2] != (2, 11):
        return
    parts = (part for part in module.modules() if isinstance(part, fx.GraphModule))
    calls = [(part, call) for part in parts for call in part.graph.find_nodes(op="call_function", target=_FUNCTION)]
    for part, call in calls:
        body = cast(fx.Node, call.args[0])
        forward = cast(fx.GraphModule, part.get_submodule(str(body.target)))
        (output,) = forward.graph.find_nodes(op="output")
        results, saved = cast("tuple[Any, Any]", output.args[0])
        read = {user.args[1] for user in call.users if user.target is operator.getitem}
        if isinstance(results, tuple | list) and len(call.users) == len(read) < len(results):
            output.args = ((tuple(each if place in read else None for place, each in enumerate(results)), saved),)
            forward.recompile()


def extract(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    num_fwd_outputs: int,
    unread: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns a forward graph that saves exactly `saved`, and a backward graph that recomputes whatever else it reads.

    `_extract_fwd_bwd_modules` copies every operator that the backward's outputs still need, from the saved values on.
    `reordering_to_mimic_autograd_engine` moves each copy to just before its first use; without it all layers would be
    recomputed at the beginning of the backward. `raise_getitems` frees the unread outputs of an operator at once.

    Args:
        unread: operators of the forward that run for their effect, such as the checks of `one_hot`. As dead code they
            would stay in the backward too, with all that they read, such as a codebook that has changed since.
    """
    tags = {node: node.meta.get(_TAG) for node in unread}
    for node in tags:
        node.meta[_TAG] = "must_be_in_forward"
    try:
        forward, backward = partitioners._extract_fwd_bwd_modules(
            joint, saved, saved_sym_nodes=saved_symbols, num_fwd_outputs=num_fwd_outputs
        )
    finally:
        for node, tag in tags.items():
            node.meta[_TAG] = tag
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    return partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)


# The key in a node's `meta` of the graph that it must be in (`_has_tag_must_be_in_forward` in
# `torch/_functorch/partitioners.py`).
_TAG = "partitioner_tag"


def _kept(*args: Any, **kwargs: Any) -> None:
    """Replaces the target of a node that a pass must not change."""


def remove_copies(graph: fx.Graph, returned: Iterable[fx.Node]) -> None:
    """Remove `clone` and other copies that make no difference (`torch/_inductor/fx_passes/post_grad.py`).

    inductor does so before it partitions; without a compiler, dropout of 0 would save its input twice.

    Args:
        graph: the graph, changed in place.
        returned: nodes that allocate the forward's outputs. They stay, since the caller may write to an output, which
            must not change what the backward reads; the pass only knows inputs and outputs.
    """
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    # The pass matches nodes by target. Users are protected too: one that is a copy would be replaced by its input.
    tensors = [node for node in returned if isinstance(node.meta.get("val"), torch.Tensor)]
    kept = {node: node.target for each in tensors for node in (each, *each.users) if node.op == "call_function"}
    for node in kept:
        node.target = _kept
    try:
        remove_noop_ops(graph)
    finally:
        for node, target in kept.items():
            node.target = target


# Replaces `clone` of an input during the passes that inductor runs on a joint graph; see `hide_snapshots`.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("snapshot(Tensor source, *, MemoryFormat? memory_format=None) -> Tensor")


def hide_snapshots(graph: fx.Graph) -> None:
    """Keep inductor from removing copies of inputs before the graph is partitioned.

    inductor replaces a copy by its source (`remove_noop_ops`, called in `torch/_inductor/fx_passes/joint_graph.py`),
    which the forward may write to before the backward reads the copy.
    """
    if any(map(is_tangent, graph.nodes)):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
                node.target = torch.ops.optimum_memopt.snapshot.default


def reveal_snapshots(graph: fx.Graph) -> None:
    """Undo `hide_snapshots`."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.optimum_memopt.snapshot.default):
        node.target = torch.ops.aten.clone.default


def default_partition(
    joint: fx.GraphModule, joint_inputs: Any, kept: Iterable[fx.Node] = (), **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a graph as torch.compile does, but recompute none of the nodes in `kept`.

    During the call these nodes have the tag of a checkpoint policy, as nodes that torch itself forces to be saved
    (`torch/_functorch/partitioners.py`, `force_save_bw_mutation_src`).
    """
    tagged = [node for node in kept if "recompute" not in node.meta]
    for node in tagged:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **options)
    finally:
        for node in tagged:
            del node.meta["recompute"]


def is_checkpointed(graph: fx.Graph) -> bool:
    """True if the model checkpoints a part of the traced code.

    torch's own partition recomputes that part. If it draws random numbers, this is only possible during the trace
    (`functionalize_rng_ops`).
    """
    return any("recompute" in node.meta for node in graph.nodes)


def has_higher_order(graph: fx.Graph) -> bool:
    """True if an operator takes a function as an argument: run alone, flex attention computes all scores."""
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.nodes)


def run_operators(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile as `aot_eager` does (`boxed_nop` in `torch/_dynamo/backends/debugging.py`), with views that may copy.

    Some kernels return other strides than were traced (`softplus_backward`, `_native_batch_norm_legit_functional`), on
    which a `view` may raise an error. inductor changes its graphs in the same way (`torch/_inductor/compile_fx.py`).
    """
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    view_to_reshape(graph)
    return boxed_nop(graph, inputs)


def run_backward_operators(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile as `run_operators` does, with results that are not views, like inductor's.

    A view keeps its base alive, so autograd would add two gradients of one parameter into a third tensor instead of in
    place (`can_accumulate_inplace` in `torch/csrc/autograd/input_buffer.cpp`, 2.13).
    """
    run = run_operators(graph, inputs)

    def without_bases(args: Any) -> list[Any]:
        return [without_base(result) for result in run(args)]

    return boxed(without_bases)


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as boxed, and return it: AOTAutograd passes it a list of arguments, which it may clear.

    `make_boxed_func` in `torch/_functorch/_aot_autograd/utils.py` is for functions of separate arguments.
    """
    run._boxed_call = True
    return run


def without_base(result: Any) -> Any:
    """Returns a tensor with the same memory that is not a view (`_reinterpret_tensor` of inductor's programs, torch
    2.9 to 2.15)."""
    if type(result) is not torch.Tensor or not result._is_view():
        return result
    # 2.15 takes only tuples, not `torch.Size`.
    return torch._C._dynamo.guards._reinterpret_tensor(result, tuple(result.shape), result.stride(), 0)


@contextlib.contextmanager
def without_modes_and_autocast() -> Iterator[None]:
    """Run operators on real tensors and without autocast, even while a graph is traced."""
    with without_modes(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def autocast_dtype(node: fx.Node, device_type: str) -> torch.dtype | None:
    """Returns the autocast dtype at an operator of a graph that dynamo has traced; None if autocast is off there.

    Dynamo calls its backend in the autocast state in which the traced function was called; changes by the function
    itself are in the graph (`torch/_dynamo/variables/ctx_manager.py`, `AutocastModeVariable`).
    """
    dtype = current_autocast(device_type)
    inside: dict[fx.Node, torch.dtype | None] = {}
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        if earlier.target is autocast_mode._enter_autocast and earlier.args[0] == device_type:
            _, given, is_enabled, *_ = earlier.args
            inside[earlier] = (given or torch.get_autocast_dtype(device_type)) if is_enabled else None
        elif earlier.target is autocast_mode._exit_autocast:
            inside.pop(earlier.args[0], None)
    return list(inside.values())[-1] if inside else dtype
