"""Equal layers of a model, and other modules whose code is compiled separately from the code around them."""

import functools
import re
import types
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from optimum_memopt.compat.deepspeed import full_shape
from optimum_memopt.compat.transformers import embeddings
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.shared.function_state import MODULE_FIELDS
from optimum_memopt.engines.torch_compat import fully_shard
from optimum_memopt.engines.torch_compat.fake_tensors import DESCRIBED, described
from optimum_memopt.errors import UnsupportedModelError

# Layers of one class and structure by their paths in the model, in order.
LayerGroup = Mapping[str, torch.nn.Module]


def layer_groups(model: torch.nn.Module) -> tuple[LayerGroup, ...]:
    """Returns groups of equal layers of a `ModuleList` or `Sequential` with at least two layers each, in module order.

    A list inside an item of a list belongs to that item: the experts of a layer are no layers. Modules without
    children are left out, since they are cheaper to compile in the outer graph, and so are layers with a replaced
    forward.
    """
    groups: list[LayerGroup] = []
    inside: set[torch.nn.Module] = set()
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) or module in inside:
            continue
        kinds: dict[Hashable, dict[str, torch.nn.Module]] = {}
        for name, layer in module.named_children():
            is_called = not isinstance(layer, torch.nn.ModuleList | torch.nn.ModuleDict)
            if is_called and next(layer.children(), None) is not None and "forward" not in vars(layer):
                kinds.setdefault(_structure(layer), {})[f"{path}.{name}" if path else name] = layer
        for layers in kinds.values():
            if len(layers) > 1:
                groups.append(layers)
                inside.update(inner for layer in layers.values() for inner in layer.modules())
    return tuple(groups)


# The fewest equal layers that are worth a region: fewer are traced about as fast in one graph.
_ENOUGH = 4


def regions_of(model: torch.nn.Module, unit: str) -> tuple[LayerGroup, ...]:
    """Returns the groups to compile separately: equal layers, and modules whose parameters are gathered in hooks.

    Args:
        unit: one of `options.UNITS`.

    Raises:
        UnsupportedModelError: the unit is a layer, and no two layers are equal.
    """
    groups = () if unit == MODEL else layer_groups(model)
    if unit == LAYER and not groups:
        raise UnsupportedModelError(
            f"--memory_opt_unit layer: no module list in {type(model).__name__} has two equal layers",
            "leave the flag out",
        )
    sharded = () if unit == MODEL else _sharded_modules(model, groups)
    # Each hook that gathers parameters would break the graph of a whole forward.
    is_hooked = unit != MODEL and fully_shard.is_sharded(model)
    is_worth_it = unit == LAYER or is_hooked or any(len(group) >= _ENOUGH for group in groups)
    return (*groups, *sharded) if is_worth_it else ()


def _sharded_modules(model: torch.nn.Module, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Returns one group for each module that FSDP2 shards separately, except layers, modules inside or around layers,
    and open modules."""
    layers = [path for group in groups for path in group]
    opened = opened_modules(model)
    return tuple(
        {path: model.get_submodule(path)}
        for paths in fully_shard.sharded_groups(model)
        for path in paths
        if path not in opened and not any(_contains(path, layer) or _contains(layer, path) for layer in layers)
    )


def opened_modules(model: torch.nn.Module) -> LayerGroup:
    """Returns the head, which computes the logits, and the modules that FSDP2 gathers with it, by their paths."""
    head = embeddings(model, "output")
    groups = ({path: model.get_submodule(path) for path in paths} for paths in fully_shard.sharded_groups(model))
    return next((modules for modules in groups if head in modules.values()), {})


def _contains(path: str, inner: str) -> bool:
    return inner == path or inner.startswith(f"{path}.")


def _structure(layer: torch.nn.Module) -> Hashable:
    """Returns a key that is equal for layers of one class with the same modules, parameter shapes and fractions.

    A fraction, such as the rate of stochastic depth, is read by almost every forward, so layers that differ in one
    would need a graph each.
    """
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    kinds = tuple((name, type(module)) for name, module in layer.named_modules())
    shapes = tuple((name, full_shape(tensor), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    fractions = (
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    )
    return kinds, shapes, tuple(fractions)


def contents_of(layers: Sequence[torch.nn.Module]) -> list[dict[tuple[str, str], tuple[Any, ...]]]:
    """Returns all attributes of the modules in each layer, by path and name, as values that are equal for equal ones:
    tensors without their data, containers and plain objects by their contents, the paths of modules without their
    numbers (PEFT's layers have their own in a dict), functions and other objects by identity. Whole numbers as
    `described`."""
    # By object and depth: layers share their config.
    known: dict[tuple[int, int], tuple[Any, ...]] = {}

    def content(value: Any, depth: int) -> tuple[Any, ...]:
        if isinstance(value, str):
            return str, _NUMBER_IN_PATH.sub("#", value)
        if isinstance(value, DESCRIBED):
            return described(value)
        if (key := (id(value), depth)) not in known:
            known[key] = inner(value, depth)
        return known[key]

    def inner(value: Any, depth: int) -> tuple[Any, ...]:
        kind: type = type(value)
        if isinstance(value, torch.nn.Module):
            # Its own attributes are compared.
            return (kind,)
        if isinstance(value, types.MethodType):
            return kind, value.__func__
        if isinstance(value, functools.partial):
            return kind, *(content(each, depth) for each in (value.func, value.args, value.keywords))
        if depth and isinstance(value, Mapping):
            return kind, *((content(name, depth - 1), content(each, depth - 1)) for name, each in value.items())
        if depth and isinstance(value, list | tuple | deque):
            return kind, *(content(each, depth - 1) for each in value)
        if isinstance(value, set) and _is_hashable(values := frozenset(value)):
            return kind, values
        is_plain = depth > 0 and not isinstance(value, type | Enum | types.FunctionType | types.ModuleType)
        if (held := getattr(value, "__dict__", None) if is_plain else None) is not None:
            return kind, content(held, depth - 1)
        return kind, value if _is_hashable(value) else id(value)

    return [
        {
            (path, name): content(value, _DEPTH)
            for path, module in layer.named_modules()
            for name, value in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
                *vars(module).items(),
            )
            # A layer's forward is replaced while its model's forward runs.
            if name not in MODULE_FIELDS and (path or name != "forward")
        }
        for layer in layers
    ]


# What is nested deeper is compared by identity.
_DEPTH = 6
_NUMBER_IN_PATH = re.compile(r"(?<=\.)\d+(?=\.)")


def _is_hashable(value: Any) -> bool:
    # A frozen dataclass has a `__hash__`, which fails if a field of it is a dict.
    try:
        hash(value)
    except TypeError:
        return False
    return True
