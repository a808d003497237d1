"""Layers as leaf modules of DeepSpeed's ZeRO 3: hooks gather, release and reduce a layer at a time, outside of graphs.

A leaf is a module without hooks inside; a flag marks it for `deepspeed.initialize`. DeepSpeed detects the end of its
backward by the gradients of its positional inputs (DeepSpeed 0.19, `runtime/zero/parameter_offload.py`).
"""

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.compat.deepspeed import full_shape
from optimum_memopt.compat.torch import backward_pass
from optimum_memopt.copies import add_hook
from optimum_memopt.engines.compile.options import CHUNKED, MODEL
from optimum_memopt.engines.torch_compat import zero3
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import get_logger

if TYPE_CHECKING:
    from transformers import TrainingArguments

_STAGE = 3
_NAME = f"DeepSpeed ZeRO stage {_STAGE} with the compile engine"
_INSTEAD = "use ZeRO stage 0, 1 or 2 (`zero_optimization.stage`)"
_PREFETCH, _LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"


class Zero3Layers:
    """Makes the layers of a model leaf modules of ZeRO 3.

    Args:
        config: DeepSpeed's `zero_optimization`, before a Trainer fills it in.
        has_budget: layers are gathered ahead only if the budget's plan leaves room for it.
    """

    def __init__(self, config: MutableMapping[str, Any], has_budget: bool = False) -> None:
        self._config, self._has_budget = config, has_budget
        self._sizes_prefetch = config.get(_PREFETCH) == "auto"
        # Elements of a layer to gather ahead, until it is known whether there is room for them; else 0.
        self._ahead = 0
        self._hooks: list[Callable[[], None]] = []

    @classmethod
    def of(
        cls, args: "TrainingArguments", unit: str, has_budget: bool = False, must_chunk: bool = False
    ) -> "Zero3Layers | None":
        """Returns the layers for a Trainer with these arguments; None if it does not train with ZeRO 3.

        Raises:
            MemOptError: another option is incompatible with ZeRO 3.
        """
        plugin = getattr(args, "deepspeed_plugin", None)
        if plugin is None or plugin.zero_stage != _STAGE:
            return None
        if unit == MODEL:
            raise MemOptError(
                f"{_NAME}, --memory_opt_unit {MODEL}: the hooks that gather parameters break the graph, and can only "
                f"be around layers; leave the flag out, or {_INSTEAD}"
            )
        if must_chunk:
            raise MemOptError(
                f"{_NAME}, a chunked loss: code outside of the layers is not compiled; leave out --memory_opt_loss "
                f"{CHUNKED}, or the loss row of a config or plan, or {_INSTEAD}"
            )
        config = plugin.deepspeed_config["zero_optimization"]
        if has_budget and (elsewhere := _offloaded(config)):
            raise unpredicted(f"{elsewhere} changes what the device holds")
        return cls(config, has_budget)

    def start(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Make a model's layers leaf modules, before DeepSpeed registers hooks on it.

        Raises:
            UnsupportedModelError: the model has no equal layers, or they share parameters.
        """
        if not layers:
            raise UnsupportedModelError(
                f"{_NAME}: no module list in {type(model).__name__} has two equal layers, around which parameters can "
                "be gathered",
                _INSTEAD,
            )
        utils = importlib.import_module("deepspeed.utils")
        inner = {module for layer in layers for module in layer.modules()} - set(layers)
        _check_unshared(model, layers, inner)
        if "leaf_module" in self._config or any(map(utils.z3_leaf_module, inner)):
            get_logger().info(f"{_NAME}: nested leaf modules replaced by their layer")
        for layer in layers:
            utils.set_z3_leaf_module(layer, True)
            is_trained = any(parameter.requires_grad for parameter in layer.parameters())
            hook = functools.partial(_with_gradient, _first_parameter(layer), is_trained)
            # Runs before the hooks of DeepSpeed, which may remain from an earlier run.
            self._hooks.append(add_hook(layer, "forward_pre", hook, prepend=True, with_kwargs=True))
            if is_trained:
                self._hooks.append(add_hook(layer, "full_backward", _OnceInABackward()))
        own, elements = self._config.get(_PREFETCH), max(map(_elements, layers))
        if self._sizes_prefetch and isinstance(own, int) and own < elements:
            self._ahead = elements
        if not self._has_budget and self._ahead:
            # DeepSpeed reads this option later.
            self._config[_PREFETCH], self._ahead = self._ahead, 0
            get_logger().info(f"{_ahead(elements)}, instead of {own}; gathers up to {_LIVE} ahead")

    def gather_ahead(self, model: torch.nn.Module, plan_for: Callable[[int], bool]) -> None:
        """Gather a layer while the one before runs, if the budget's plan leaves room; called once, after the first
        forward.

        Args:
            plan_for: if there is room for this many elements, makes the plan count them and returns True.
        """
        elements, self._ahead = self._ahead, 0
        if not elements:
            return
        own = self._config[_PREFETCH]
        if plan_for(elements):
            zero3.gather_ahead(model, elements)
            get_logger().info(f"{_ahead(elements)}, instead of {own}: the budget has room for them")
        else:
            get_logger().info(
                f"{_NAME}: {_PREFETCH} auto stays {own}: the budget has no room for the {elements} elements of a layer"
            )

    def stop(self) -> None:
        """Undo `start` except for the leaf flags, which DeepSpeed's hooks still need."""
        while self._hooks:
            self._hooks.pop()()


def unpredicted(why: str) -> MemOptError:
    """Returns the error for a budget that cannot be predicted under ZeRO 3."""
    return MemOptError(
        f"a budget under DeepSpeed ZeRO stage 3: a rank's memory cannot be predicted, since {why}; use "
        "--memory_opt_level 1 or --memory_opt_config"
    )


def _offloaded(config: Mapping[str, Any]) -> str:
    """Returns the option that offloads parameters or optimizer states from the device; empty if none does.

    DeepSpeed compiles its optimizer for such a step before the first forward, which takes minutes.
    """
    devices = {name: (config.get(name) or {}).get("device") for name in ("offload_param", "offload_optimizer")}
    return next((name for name, device in devices.items() if device not in (None, "none")), "")


def _ahead(elements: int) -> str:
    return f"{_NAME}: {_PREFETCH} auto is {elements}, the elements of a layer"


# DeepSpeed reduces a leaf's gradients after each backward of the leaf, and overwrites earlier ones
# (`reduce_leaf_module_grads`, `partition_grads` in `runtime/zero/stage3.py`): a second backward in one step loses the
# gradients of the first.
_LOST = "DeepSpeed would lose some of its gradients"


def _check_unshared(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], inner: Collection[torch.nn.Module]
) -> None:
    """Raises UnsupportedModelError if a layer shares a trained parameter with another module."""
    outside = {module for module in model.modules() if module not in inner} - set(layers)
    owners = Counter(parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad)
    owners.update({parameter for module in outside for parameter in module.parameters(recurse=False)} & owners.keys())
    if shared := [name for name, parameter in model.named_parameters() if owners[parameter] > 1]:
        raise UnsupportedModelError(f"{_NAME}: a layer shares {shared[0]} with another module, so {_LOST}", _INSTEAD)


class _OnceInABackward:
    """A layer's backward hook, which checks that it runs at most once per backward pass."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, layer: torch.nn.Module, *gradients: Any) -> None:
        """Raises UnsupportedModelError if the layer has several backwards in this backward pass."""
        if (now := backward_pass()) == self._last:
            raise UnsupportedModelError(
                f"{_NAME}: {type(layer).__name__} ran several times before its backward, so {_LOST}", _INSTEAD
            )
        self._last = now


def _elements(layer: torch.nn.Module) -> int:
    return sum(full_shape(parameter).numel() for parameter in layer.parameters())


def _first_parameter(layer: torch.nn.Module) -> str:
    return next(iter(inspect.signature(layer.forward).parameters), "")


def _with_gradient(
    name: str, is_trained: bool, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a layer's arguments as DeepSpeed needs them: the first is positional and, if the layer is trained,
    requires a gradient even if nothing before the layer is trained.

    Args:
        name: name of the first parameter of the layer's forward.

    Raises:
        UnsupportedModelError: the first argument is not a tensor of hidden states.
    """
    if not args and name in kwargs:
        args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
    hidden = args[0] if args else None
    if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
        raise UnsupportedModelError(
            f"{_NAME}: the first argument of {type(layer).__name__} is not a tensor of hidden states, whose gradient "
            "tells DeepSpeed that the layer's backward is over",
            _INSTEAD,
        )
    if is_trained and torch.is_grad_enabled() and not hidden.requires_grad:
        args = (hidden.detach().requires_grad_(), *args[1:])
    return args, kwargs
