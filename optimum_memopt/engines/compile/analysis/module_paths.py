"""Module paths of operators, for a graph that holds only one module of the model.

After a graph break in a module (a full backward hook, FSDP) torch traces the forwards of inner modules by themselves,
and the module paths of their operators begin there: `attention.self` without `roberta.encoder.layer.0`.
"""

import re

import torch
from torch import fx

_TRACED = re.compile(r"^L\['self'\]")
_OUTER = "outer"


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
