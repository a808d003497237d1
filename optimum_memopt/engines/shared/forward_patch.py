"""The changes that engines make on a model: its training forward, activation checkpointing, the key-value cache."""

import copy
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from optimum_memopt import copies
from optimum_memopt.compat.torch import (
    forward_hooks,
    give_compiled_calls,
    has_hook_since,
    hooks_around_call,
    next_hook_id,
    take_compiled_calls,
)
from optimum_memopt.compat.transformers import offloads_checkpoints
from optimum_memopt.engines.shared.function_state import (
    CONTAINERS,
    LIBRARIES,
    MODULE_FIELDS,
    FunctionState,
    containers_in,
    holds_the_same,
    package_of,
    refill,
)
from optimum_memopt.generators import GeneratorStates, set_state, state_of


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, called while its object is alive; or a function, while somebody else holds it."""
    held = weakref.WeakMethod(method) if isinstance(method, types.MethodType) else weakref.ref(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = held()
        assert alive is not None
        return alive(*args, **kwargs)

    return call


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool | str | tuple | np.generic)


@dataclass(frozen=True)
class Attribute:
    """A number, tensor, container, generator or flag that a module holds beside its buffers, and what it was."""

    module: torch.nn.Module
    name: str
    value: Any
    values: Any

    @classmethod
    def all_of(cls, module: torch.nn.Module) -> "Iterator[Attribute]":
        yield from cls.containers_of(module)
        for name, value in vars(module).items():
            if type(value) in (int, float) or (_is_flag(value) and name not in MODULE_FIELDS):
                yield cls(module, name, value, None)
            elif isinstance(value, torch.Tensor):
                yield cls(module, name, value, None if value.requires_grad else value.detach().clone())
            elif (state := state_of(value)) is not None:
                yield cls(module, name, value, state)

    @classmethod
    def containers_of(cls, module: torch.nn.Module) -> "Iterator[Attribute]":
        for name, value in vars(module).items():
            if type(value) in CONTAINERS and name not in MODULE_FIELDS:
                yield cls(module, name, value, copy.copy(value))

    @property
    def is_other_container(self) -> bool:
        """True for a container that holds other objects than it did."""
        return type(self.value) in CONTAINERS and not holds_the_same(self.value, self.values)

    @property
    def is_flag(self) -> bool:
        return _is_flag(self.value)

    def restore(self) -> None:
        now = vars(self.module).get(self.name)
        if type(self.value) in (int, float):
            if type(now) in (int, float) and now != self.value:
                setattr(self.module, self.name, self.value)
            return
        if now is not self.value:
            setattr(self.module, self.name, self.value)
        if isinstance(self.value, torch.Tensor):
            if self.values is not None:
                self.value.data.copy_(self.values)
        elif self.is_other_container:
            refill(self.value, self.values)
        elif state_of(self.value) is not None:
            set_state(self.value, self.values)


# Bytes of frozen parameters that are copied before a first forward.
_MOST_FROZEN = 2**24


@dataclass(frozen=True)
class ForwardState:
    """The state that a forward may have changed: random generators, the buffers of modules, small frozen
    parameters, the numbers, tensors, containers and generators among the modules' attributes, the containers among its
    arguments, and what hooks and forwards of a script hold."""

    generators: GeneratorStates
    buffers: tuple[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor], ...]
    attributes: tuple[Attribute, ...]
    frozen: tuple[tuple[torch.nn.Parameter, torch.Tensor], ...] = ()
    arguments: tuple[tuple[Any, Any], ...] = ()
    functions: tuple[FunctionState, ...] = ()
    names: tuple[tuple[torch.nn.Module, frozenset[str]], ...] = ()
    next_hook: int = 0

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        with_buffers: bool,
        others: Sequence[torch.nn.Module] = (),
        on_host: bool = True,
        arguments: Any = (),
        functions: Iterable[Callable[..., Any]] = (),
    ) -> "ForwardState":
        """The state before a forward, in which `others` may take part, as a module that computes the loss.

        Args:
            with_buffers: with that of modules; False: that of random generators alone.
            on_host: copies go to the host, which waits for the device. Copies on the device would be counted as memory
                of all steps where only the first forward needs them.
            functions: that take part in it, beside hooks and forwards of the modules whose state is noted.
        """
        copied = _on_host if on_host else _clone
        parameter = next(model.parameters(), None)
        modules = tuple(torch.nn.ModuleList([model, *others]).modules()) if with_buffers else ()
        hooks = (hook for module in modules for of_kind in hooks_around_call(module) for hook in of_kind.values())
        forwards = dict.fromkeys(type(module).forward for module in modules)
        return cls(
            GeneratorStates.of(parameter.device if parameter is not None else None),
            tuple(
                (module, name, buffer, copied(buffer))
                for module in modules
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            ),
            tuple(attribute for module in modules for attribute in Attribute.all_of(module)),
            tuple((parameter, copied(parameter)) for parameter in _small_frozen(modules)),
            tuple(containers_in(arguments)),
            (FunctionState.of((*functions, *hooks, *forwards), modules),),
            tuple((module, _names_in(module)) for module in modules),
            next_hook_id(),
        )

    def restore(self) -> None:
        self.generators.restore()
        with torch.no_grad():
            for module, name, buffer, values in self.buffers:
                # An earlier forward may have saved it for a backward to come, which finds there what it has saved.
                buffer.data.copy_(values)
                setattr(module, name, buffer)
            for parameter, values in self.frozen:
                parameter.data.copy_(values)
            # A flag may say that hooks have been put on modules, which stay.
            has_hooks = has_hook_since(
                (hooks for module, _ in self.names for hooks in hooks_around_call(module)), self.next_hook
            )
            for attribute in self.attributes:
                if not attribute.is_flag or not (has_hooks or package_of(attribute.module) in LIBRARIES):
                    attribute.restore()
            for module, names in () if has_hooks else self.names:
                for name in () if package_of(module) in LIBRARIES else _names_in(module) - names:
                    delattr(module, name)
        for container, values in self.arguments:
            if not holds_the_same(container, values):
                refill(container, values)
        for functions in self.functions:
            functions.restore()


def _names_in(module: torch.nn.Module) -> frozenset[str]:
    """The names of a module's own attributes and buffers."""
    buffers = (name for name, _ in module.named_buffers(recurse=False, remove_duplicate=False))
    return frozenset(vars(module)).union(buffers)


def _small_frozen(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Yields the smallest frozen parameters, up to `_MOST_FROZEN` bytes: hooks may update a small teacher in place."""
    own = {each: None for module in modules for each in module.parameters(recurse=False) if not each.requires_grad}
    left = _MOST_FROZEN
    for parameter in sorted((each for each in own if type(each) is torch.nn.Parameter), key=lambda each: each.nbytes):
        if (left := left - parameter.nbytes) < 0:
            return
        yield parameter


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return _clone(tensor) if tensor.is_meta else tensor.detach().to("cpu", copy=True)


TrainForward = Callable[..., Any]


class TrainingForward:
    """Patches the forward of one model: training calls go elsewhere, all others to the model's own forward.

    The model keeps its class, modules, parameters and state-dict keys; a deep copy or a pickle of it is a plain model.
    Where something has wrapped the patched forward after `start` (accelerate's autocast), `stop` leaves the patch in
    place, with nothing to do until the next `start`. Get it from `training_forward`.

    Attributes:
        train: called as the model's forward where gradients are enabled; None: the model's own is.
        plain_forward: the model's own, bound.
        before: a forward of the instance, over that of its class; None: there was none.
        function: what takes its place, not bound.
    """

    name = "forward"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.train: TrainForward | None = None
        self.before = model.__dict__.get("forward")
        self.plain_forward: Callable[..., Any] = model.forward
        # The forward that had wrapped this one at `stop`, so that it could not be removed.
        self._wrapped_by: Any = None
        patched = self.before.__func__ if isinstance(self.before, types.MethodType) else type(model).forward

        @functools.wraps(patched)
        def forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if module is not self._model:
                return types.MethodType(patched, module)(*args, **kwargs)
            if self.train is not None and torch.is_grad_enabled():
                return self.train(*args, **kwargs)
            return self.plain_forward(*args, **kwargs)

        self.function: Callable[..., Any] = forward
        copies.mark(self)
        copies.leave_out_of_copies(model)

    def start(self, train: TrainForward) -> None:
        """Send training forwards to `train` until `stop`."""
        # A `torch.compile` of the user's around the model ends its graph here, instead of tracing the engine.
        self.train = torch.compiler.disable(train)
        if self._wrapped_by is None:
            self._model.forward = types.MethodType(self.function, self._model)
        self._wrapped_by = None

    def stop(self) -> None:
        """Restore the model's own forward; without effect the second time."""
        if self.train is None:
            return
        self.train = None
        if self.is_wrapped:
            self._wrapped_by = self._model.__dict__.get("forward")
        elif self.before is None:
            del self._model.forward
        else:
            self._model.forward = self.before

    @property
    def is_wrapped(self) -> bool:
        """True if another function calls the patched forward in the model's `forward`, and may change its outputs."""
        return getattr(self._model.__dict__.get("forward"), "__func__", None) is not self.function

    @property
    def is_replaced(self) -> bool:
        """True if the model's `forward` does not wrap the patched one (`functools.wraps`)."""
        current: Any = self._model.__dict__.get("forward")
        while current is not None:
            current = getattr(current, "__func__", current)
            if current is self.function:
                return False
            current = getattr(current, "__wrapped__", None)
        return True

    @property
    def is_in_place(self) -> bool:
        """True where `start` would patch the same forward as the last time."""
        current = self._model.__dict__.get("forward")
        return self.train is not None or current is (self.before if self._wrapped_by is None else self._wrapped_by)


# Weak both ways: one that something has wrapped is kept by the model, any other one by its engine.
_training_forwards: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[TrainingForward]]" = (
    weakref.WeakKeyDictionary()
)


def training_forward(model: torch.nn.Module) -> TrainingForward:
    """The model's patch: the last one while it is still in its place.

    accelerate wraps the forward of a model once and for all (1.15, `prepare_model`): the next engine has to take the
    place of the last one, under autocast.
    """
    held = _training_forwards.get(model)
    patch = held() if held is not None else None
    if patch is None or not patch.is_in_place:
        patch = TrainingForward(model)
        _training_forwards[model] = weakref.ref(patch)
    return patch


_SWITCH = "gradient_checkpointing"
# transformers' `enable_input_require_grads`; PEFT's `_prepare_model_for_gradient_checkpointing` (0.21).
_INPUT_GRADIENT_HOOKS = frozenset({"make_inputs_require_grads", "make_inputs_require_grad"})


class Checkpointing:
    """Activation checkpointing of a model: its modules' flags, and hooks that make its inputs require gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Known once, so that a look at each training forward costs next to nothing. Not hasattr of a module, which
        # looks through PEFT's wrappers.
        self._able = [
            module for module in model.modules() if _SWITCH in vars(module) or hasattr(type(module), _SWITCH)
        ]
        self._switched_off: list[torch.nn.Module] = []
        self._hooks: list[tuple[dict[int, Any], int, Callable[..., Any]]] = []

    @property
    def is_on(self) -> bool:
        """True where any module would checkpoint its next training forward."""
        return any(module.gradient_checkpointing for module in self._able)

    @property
    def offloads(self) -> bool:
        """True where any of them would hold its inputs in host memory."""
        return any(module.gradient_checkpointing and offloads_checkpoints(module) for module in self._able)

    def switch_off(self) -> None:
        for module in self._able:
            if module.gradient_checkpointing:
                setattr(module, _SWITCH, False)
                self._switched_off.append(module)
        for module in self._model.modules():
            hooks = forward_hooks(module)
            for key, hook in tuple(hooks.items()):
                if getattr(hook, "__name__", "") in _INPUT_GRADIENT_HOOKS:
                    # A handle's remove() finds the hook by its key, also after `restore`.
                    self._hooks.append((hooks, key, hooks.pop(key)))

    def restore(self) -> None:
        for module in self._switched_off:
            setattr(module, _SWITCH, True)
        for hooks, key, hook in self._hooks:
            hooks[key] = hook
        self._switched_off, self._hooks = [], []


class ModuleCompilation:
    """`Module.compile` on the modules of a model: an engine cannot see the operators in a compiled call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._calls: dict[torch.nn.Module, Any] = {}

    def switch_off(self) -> list[str]:
        """Switch it off; returns the names of the modules on which it was on."""
        calls = take_compiled_calls(self._model)
        self._calls.update(calls)
        names = {module: name for name, module in self._model.named_modules()}
        return [names[module] or type(module).__name__ for module in calls]

    def restore(self) -> None:
        give_compiled_calls(self._calls)
        self._calls = {}


_NAME = "use_cache"
# Of a forward: the position of `use_cache` (-1: no such parameter), and whether it takes any keyword.
_signatures: "weakref.WeakKeyDictionary[Callable[..., Any], tuple[int, bool]]" = weakref.WeakKeyDictionary()


def without_key_value_cache(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], forced: bool = False
) -> dict[str, Any]:
    """`kwargs` with `use_cache=False` where the model's forward takes it.

    A caller would hold the caches, so that no plan could free them. The config is not enough: Trainer sets
    `use_cache` of the outer one only, while T5's decoder reads a copy of its own.

    `forced`: also where `use_cache` was given by name, for an engine that cannot return caches.
    """
    position = _position(model) if forced or _NAME not in kwargs else None
    if position is None or 0 <= position < len(args):
        return dict(kwargs)
    return {**kwargs, _NAME: False}


def _position(model: torch.nn.Module) -> int | None:
    """Where `model.forward` takes `use_cache`, -1: as a keyword only; None: it does not, as far as known."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        # Passes keywords on.
        return None if _position(model.get_base_model()) is None else -1
    config = getattr(model, "config", None)
    # Of images and text, and of an encoder and a decoder, the config has others in it.
    if not any(hasattr(each, _NAME) for each in (config, *getattr(config, "__dict__", {}).values())):
        return None
    position, takes_any = _signature(model.forward)
    if position >= 0:
        return position
    if not takes_any:
        return None
    from transformers import PreTrainedModel

    # `generate` passes it to them (LLaVA, Gemma 3).
    if isinstance(model, PreTrainedModel) and model.can_generate():
        return -1
    # Models with a head pass keywords on to the model below it; what others do with them is not known.
    inner = model.base_model if isinstance(model, PreTrainedModel) else model
    return None if inner is model or _position(inner) is None else -1


def _signature(forward: Callable[..., Any]) -> tuple[int, bool]:
    function = getattr(forward, "__func__", forward)
    if function not in _signatures:
        parameters = inspect.signature(forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        _signatures[function] = (list(parameters).index(_NAME) if _NAME in parameters else -1, takes_any)
    return _signatures[function]
