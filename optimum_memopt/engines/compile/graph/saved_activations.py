"""Saved activations: the storages of the forward that the backward reads. Pure."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import cast

import sympy
import torch
from torch import fx

from optimum_memopt.engines.api.layer_paths import layer_in, within_layer
from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    first_input,
    has_parts,
    is_output,
    is_tensor,
    is_view,
    root,
    storage_bytes,
    tensor_value,
)

# Key of a node's meta: the layer, in a graph without such a list (see `note_layers`).
LAYER = "optimum_memopt_layer"
# Dynamo's suffix of a module's second and later calls, in keys of `nn_module_stack`.
_CALL = re.compile(r"@\d+$")
# Activations of constant size below this many bytes get no row and are not counted.
_NEGLIGIBLE = 4096
# ATen's operators and PyTorch's names for them, in the order in which they are shown.
ATTENTION_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
}
_NORMS = ("_fused_rms_norm", "native_batch_norm", "native_group_norm", "native_layer_norm")
# All outputs of these operators but the first are per-row statistics: tiny, and expensive to recompute.
_WITH_STATISTICS = frozenset({*ATTENTION_KERNELS, *_NORMS})
_STATISTICS = frozenset({"amax", "var_mean", "logsumexp", "mean", "sum", "rsqrt"})


def operator_name(node: fx.Node) -> str:
    """Returns an operator's name, `gelu` for `aten.gelu.default`; for a picked output that of its operator."""
    target = first_input(node).target if is_output(node) else node.target
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def module_path(node: fx.Node) -> str:
    """Returns the path of the module that calls the operator: `roberta.encoder.layer.0.intermediate.dense`."""
    stack = module_stack(node)
    return stack[-1][1] if stack else ""


def layer_of(node: fx.Node) -> str:
    """Returns the path of the operator's transformer layer, "" outside of all layers.

    Each call of a layer that is called several times (ALBERT) is a layer of its own: the paths of later calls end in
    `@1`, `@2` and so on.
    """
    stack = module_stack(node)
    path: str = node.meta.get(LAYER, "") or (layer_in(stack[-1][1]) if stack else "")
    calls = (_CALL.search(key) for key, outer, _ in stack if path.startswith(outer)) if path else ()
    # A layer group and the layer in it have the same call number, which is appended once.
    return path + "".join(dict.fromkeys(call[0] for call in calls if call))


def module_in_layer(node: fx.Node) -> str:
    """Returns the path of the module that calls the operator, within its layer, or in the model outside of layers."""
    return within_layer(module_path(node), layer_of(node))


def module_stack(node: fx.Node) -> list[tuple[str, str, str]]:
    """Returns dynamo's key, the path and the class name of each module that encloses the operator, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [
        (key, _module_path(path), kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)
        for key, (path, kind) in stack.items()
    ]


@cache
def _module_path(source: str) -> str:
    """Returns a module's path from dynamo's source of it, such as `L['self'].layer.0`.

    Up to torch 2.10, sources of list items contain `_modules`, as in `L['self']._modules['layer']._modules['0']`. In
    all versions, sources in a module that has set an attribute in its forward contain `__dict__`, as in
    `L['self'].__dict__['_modules']['layer'].0`.
    """
    path = re.sub(r"\.(?:_modules|__dict__\['_modules'\])\['([^']*)'\]", r".\1", source)
    # `L['self']`, or `L['args'][0]` in a forward that is compiled as a function.
    return re.sub(r"^L\['[^']*'\](?:\[\d+\])?\.?", "", path)


def is_generator_state(node: fx.Node) -> bool:
    """True for the generator state from which a dropout redraws its mask: 5 KB on a CPU, 16 bytes on CUDA."""
    return is_output(node) and operator_name(node) == "draw_mask" and cast(int, node.args[1]) == 0


def is_negligible(size: sympy.Expr) -> bool:
    """True for a storage that is too small to matter and does not grow with the batch."""
    return not size.free_symbols and size < _NEGLIGIBLE


@dataclass(frozen=True, eq=False)
class SavedActivation:
    """A storage that the forward allocates and the backward reads.

    Attributes:
        root: the operator (or output of one) that allocates it.
        reads: the nodes through which the backward reads it: the root itself or views of it.
        bytes: its size, in the symbols of the graph.
        is_returned: the forward also returns it, so its caller may hold it.
        leaves_layer: the forward reads it outside of the layer that computes it (the residual stream), or returns it.
        is_differentiated: it is computed, in floating point throughout, from an input that gets a gradient; false for
            masks, positions and results computed from a comparison.
    """

    root: fx.Node
    reads: tuple[fx.Node, ...]
    bytes: sympy.Expr
    is_returned: bool
    leaves_layer: bool
    is_differentiated: bool

    @property
    def layer(self) -> str:
        return layer_of(self.root)


def find_saved_activations(joint: JointGraph) -> tuple[SavedActivation, ...]:
    """Returns all saved activations in graph order, without parameters and other inputs."""
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.backward_reads():
        storage = root(node)
        if storage.op == "call_function":
            reads.setdefault(storage, []).append(node)
    returned = {root(node) for node in joint.forward_outputs}
    differentiated = _differentiated(joint)
    readers: dict[fx.Node, set[str]] = {}
    for node in joint.forward:
        if not is_view(node):
            for read in node.all_input_nodes:
                readers.setdefault(root(read), set()).add(layer_of(node))

    def activation(storage: fx.Node) -> SavedActivation:
        leaves_layer = storage in returned or bool(readers.get(storage, set()) - {layer_of(storage)})
        nodes, size = tuple(reads[storage]), storage_bytes(storage)
        return SavedActivation(storage, nodes, size, storage in returned, leaves_layer, storage in differentiated)

    return tuple(map(activation, sorted(reads, key=joint.order.__getitem__)))


def _differentiated(joint: JointGraph) -> set[fx.Node]:
    """Returns the differentiated nodes, see `SavedActivation`; if the inputs' gradients are not known, every
    floating-point input counts."""
    gradients = joint.gradients
    found = {node for node in joint.inputs if _is_floating(node) and (not gradients or gradients[node] is not None)}
    for node in joint.forward:
        if (has_parts(node) or _is_floating(node)) and any(read in found for read in node.all_input_nodes):
            found.add(node)
    return found


def _is_floating(node: fx.Node) -> bool:
    return is_tensor(node) and tensor_value(node).is_floating_point()


def is_statistic(node: fx.Node) -> bool:
    """True for a per-row result of a reduction, which every plan saves.

    A statistic that the backward does not read (the sums of a decomposed softmax) is recomputed with its operator.
    """
    if is_output(node) and operator_name(node) in _WITH_STATISTICS:
        return cast(int, node.args[1]) > 0
    return is_tensor(node) and operator_name(node) in _STATISTICS


_TRACED = re.compile(r"^L\['self'\]")
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


def add_outer_modules(graph: fx.Graph, model: torch.nn.Module, traced: torch.nn.Module | None) -> None:
    """Make the module paths in the graph of a traced submodule start at `model`.

    Modules of one class may share a compiled graph; the paths are then those of the first.
    """
    path = next((name for name, module in model.named_modules() if module is traced), "")
    if not path:
        return
    outer = (f"L['self'].{path}", type(traced))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        inner = {key: (_TRACED.sub(outer[0], name), kind) for key, (name, kind) in stack.items()}
        node.meta["nn_module_stack"] = {"outer": outer, **inner}


def note_layers(graph: fx.Graph, layer: str = "") -> None:
    """Record each operator's layer if no layer list has a name that `layer_of` knows, as in an `nn.Sequential`.

    Layers are then the items of the operator's outermost numbered list that has at least two items alike.

    Args:
        layer: the layer of all operators; empty: not known.
    """
    operators = [node for node in graph.nodes if node.op == "call_function"]
    if layer:
        for node in operators:
            node.meta[LAYER] = layer
    if any(map(layer_of, operators)):
        return
    classes = {path: name for node in operators for _, path, name in module_stack(node)}
    items: dict[str, Counter[object]] = {}
    for path, kind in classes.items():
        outer, _, name = path.rpartition(".")
        # Two containers are alike if the modules in them are.
        inner = {other.removeprefix(path): classes[other] for other in classes if other.startswith(f"{path}.")}
        if name.isdecimal():
            items.setdefault(outer, Counter())[frozenset(inner.items()) if kind == "Sequential" else kind] += 1
    lists = {outer for outer, kinds in items.items() if max(kinds.values()) > 1}
    for node in operators:
        path = module_path(node)
        layers = (path[: number.end()] for number in _NUMBER.finditer(path) if path[: number.start()] in lists)
        if layer := next(layers, ""):
            node.meta[LAYER] = layer
