"""Module paths of operators: where a graph holds only one module of the model, and layers in lists of any name.

After a graph break in a module (a full backward hook, FSDP) torch traces the forwards of inner modules by themselves,
and the module paths of their operators begin there: `attention.self` without `roberta.encoder.layer.0`.
"""

import re
from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

from optimum_memopt.engines.compile.analysis.saved_activations import LAYER, layer_of, module_path, module_stack

_TRACED = re.compile(r"^L\['self'\]")
_OUTER = "outer"
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


def add_outer_modules(graph: fx.Graph, model: torch.nn.Module, traced: torch.nn.Module | None) -> None:
    """Let the module paths of a graph's operators begin at `model`.

    Modules of one class may share a compiled graph; the paths are then those of the first.

    Args:
        graph: its nodes' metadata are changed.
        model: the outermost module.
        traced: the module whose forward the graph is; without effect where it is `model` or none of its modules.
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
        node.meta["nn_module_stack"] = {_OUTER: outer, **inner}


def note_layers(graph: fx.Graph) -> None:
    """Note each operator's layer where no list of layers has a name that `layer_of` knows, as in an `nn.Sequential`.

    Layers are then the items of the outermost numbered list around the operator two of which are alike.

    Args:
        graph: its nodes' metadata are changed.
    """
    operators = [node for node in graph.nodes if node.op == "call_function"]
    if any(map(layer_of, operators)):
        return
    classes = {path: name for node in operators for _, path, name in module_stack(node)}
    items: dict[str, Counter[object]] = {}
    for path in classes:
        outer, _, name = path.rpartition(".")
        if name.isdecimal():
            items.setdefault(outer, Counter())[_kind(path, classes)] += 1
    lists = {outer for outer, kinds in items.items() if max(kinds.values()) > 1}
    for node in operators:
        path = module_path(node)
        layers = (path[: number.end()] for number in _NUMBER.finditer(path) if path[: number.start()] in lists)
        if layer := next(layers, ""):
            node.meta[LAYER] = layer


def _kind(path: str, classes: Mapping[str, str]) -> object:
    """Equal for modules that are alike: of one class, and where that only holds others, with the same in it."""
    if classes[path] != "Sequential":
        return classes[path]
    inner = (other for other in classes if other.startswith(f"{path}."))
    return frozenset((other.removeprefix(path), classes[other]) for other in inner)
