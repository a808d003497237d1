"""The changes that engines make to a model: training forward, activation checkpointing, key-value cache."""

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
    class_forward,
    give_compiled_calls,
    has_hook_since,
    hooks_around_call,
    hooks_around_forward,
    next_hook_id,
    take_compiled_calls,
    write_back,
)
from optimum_memopt.compat.transformers import offloads_checkpoints
from optimum_memopt.engines.shared.function_state import (
    CONTAINERS,
    LIBRARIES,
    MODULE_FIELDS,
    FunctionState,
    contents_of,
    holds_the_same,
    package_of,
    refill,
    restore_containers,
)
from optimum_memopt.generators import GeneratorStates, set_state, state_of


def weak_reference(method: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """Returns a function that returns a method, or a function, until its object is gone, then None.

    `weakref.WeakMethod` prints an error if the garbage collector frees it together with its object
    (https://github.com/python/cpython/issues/85923, seen in 3.11).
    """
    if not isinstance(method, types.MethodType):
        return weakref.ref(method)
    held, function = weakref.ref(method.__self__), method.__func__
    return lambda: None if (alive := held()) is None else types.MethodType(function, alive)


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a callable that holds a method's object, or a function, weakly; it must be alive at each call."""
    held = weak_reference(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = held()
        assert alive is not None
        return alive(*args, **kwargs)

    return call


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool | str | tuple | np.generic)


@dataclass(frozen=True)
class Attribute:
    """A number, tensor, container, generator or flag among a module's attributes, with its original value.

    Attributes:
        value: the original object.
        values: a copy of its contents: of a tensor's numbers, a container's entries or a generator's state; else None.
    """

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
        """True for a container that holds other objects than originally."""
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
                write_back(self.value, self.values)
        elif self.is_other_container:
            refill(self.value, self.values)
        elif state_of(self.value) is not None:
            set_state(self.value, self.values)


# Maximum bytes of frozen parameters that are copied before a first forward.
_MOST_FROZEN = 2**24


@dataclass(frozen=True)
class ForwardState:
    """The state that a forward may change: random generators, buffers, small frozen parameters, the numbers, tensors,
    containers and generators among the modules' attributes, the containers and objects among its arguments, and the
    state that hooks and forwards of a script hold."""

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
        """Returns the state before a forward.

        Args:
            with_buffers: include the state of modules; False: random generators, `arguments` and `functions` only.
            others: other modules that take part, such as one that computes the loss.
            on_host: copy to the host, which waits for the device. Copies on the device would be counted as memory of
                all steps, although only the first forward needs them.
            arguments: the forward's arguments, whose containers and objects are saved.
            functions: functions that take part, in addition to the hooks and forwards of the saved modules.
        """
        copied = _on_host if on_host else _clone
        parameter = next(model.parameters(), None)
        modules = tuple(torch.nn.ModuleList([model, *others]).modules()) if with_buffers else ()
        hooks = (hook for module in modules for of_kind in hooks_around_call(module) for hook in of_kind.values())
        forwards = dict.fromkeys(filter(inspect.isfunction, map(class_forward, modules)))
        return cls(
            GeneratorStates.of(parameter.device if parameter is not None else None),
            tuple(
                (module, name, buffer, copied(buffer))
                for module in modules
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            ),
            tuple(attribute for module in modules for attribute in Attribute.all_of(module)),
            tuple((parameter, copied(parameter)) for parameter in _small_frozen(modules)),
            tuple(contents_of(arguments)),
            (FunctionState.of((*functions, *hooks, *forwards), modules),),
            tuple((module, _names_in(module)) for module in modules),
            next_hook_id(),
        )

    def restore(self) -> None:
        self.generators.restore()
        with torch.no_grad():
            for module, name, buffer, values in self.buffers:
                write_back(buffer, values)
                setattr(module, name, buffer)
            for parameter, values in self.frozen:
                write_back(parameter, values)
            # A flag may record that hooks were registered on modules, and these hooks stay.
            has_hooks = has_hook_since(
                (hooks for module, _ in self.names for hooks in hooks_around_call(module)), self.next_hook
            )
            for attribute in self.attributes:
                if not attribute.is_flag or not (has_hooks or package_of(attribute.module) in LIBRARIES):
                    attribute.restore()
            for module, names in () if has_hooks else self.names:
                for name in () if package_of(module) in LIBRARIES else _names_in(module) - names:
                    delattr(module, name)
        restore_containers(self.arguments)
        for functions in self.functions:
            functions.restore()


def _names_in(module: torch.nn.Module) -> frozenset[str]:
    """Returns the names of a module's own attributes and buffers."""
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
    """Patches the forward of one model: training calls go to `train`, all others to the model's own forward.

    The model keeps its class, modules, parameters and state-dict keys; a deep copy or a pickle of it is a plain model.
    If the patched forward has been wrapped after `start` (accelerate's autocast), `stop` leaves the patch in place,
    inactive until the next `start`. Create it with `training_forward`.

    Attributes:
        train: the forward to call when gradients are enabled; None: the model's own.
        plain_forward: the model's own forward, bound.
        before: the instance's own `forward` attribute before the patch; None: the class's forward was used.
        function: the patched forward, unbound.
    """

    name = "forward"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.train: TrainForward | None = None
        self.before = model.__dict__.get("forward")
        self.plain_forward: Callable[..., Any] = model.forward
        # The function that wrapped this forward at `stop`, so that the patch could not be removed.
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
        # If the user compiles the model with `torch.compile`, the graph breaks here instead of tracing the engine.
        self.train = torch.compiler.disable(train)
        if self._wrapped_by is None:
            self._model.forward = types.MethodType(self.function, self._model)
        self._wrapped_by = None

    def stop(self) -> None:
        """Restore the model's own forward; no effect if already stopped."""
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
        """True if the model's `forward` is another function, which may wrap the patched one and change its outputs."""
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
        """True if `start` would patch the same forward as last time."""
        current = self._model.__dict__.get("forward")
        return self.train is not None or current is (self.before if self._wrapped_by is None else self._wrapped_by)


# Weak keys and values: a patch that has been wrapped is kept alive by the model, any other by its engine.
_training_forwards: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[TrainingForward]]" = (
    weakref.WeakKeyDictionary()
)


def training_forward(model: torch.nn.Module) -> TrainingForward:
    """Returns the model's patch: the last one if it is still in place, else a new one.

    accelerate wraps the forward of a model permanently (1.15, `prepare_model`), so the next engine must reuse the last
    engine's patch inside autocast.
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


# Value of a switch that an engine turns off; a user turns it off with False.
_OFF = 0


def would_checkpoint(module: torch.nn.Module) -> bool:
    """True if a module would checkpoint its next forward in plain PyTorch."""
    switch = getattr(module, _SWITCH, False)
    return module.training and (bool(switch) or _is_off(switch))


def _is_off(switch: Any) -> bool:
    return type(switch) is int and switch == _OFF


class Checkpointing:
    """Activation checkpointing of a model: its modules' flags, and hooks that make its inputs require gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Collected once, so that the check at each training forward is almost free. Does not use hasattr on a module,
        # which PEFT's wrappers forward to the wrapped module.
        self._able = [
            module for module in model.modules() if _SWITCH in vars(module) or hasattr(type(module), _SWITCH)
        ]
        self._switched_off: list[torch.nn.Module] = []
        self._hooks: list[tuple[dict[int, Any], int, Callable[..., Any]]] = []

    @property
    def is_on(self) -> bool:
        """True if any module would checkpoint its next training forward."""
        return any(module.gradient_checkpointing for module in self._able)

    @property
    def offloads(self) -> bool:
        """True if any module that checkpoints would keep its inputs in host memory."""
        return any(module.gradient_checkpointing and offloads_checkpoints(module) for module in self._able)

    def switch_off(self) -> None:
        for module in self._able:
            if module.gradient_checkpointing:
                setattr(module, _SWITCH, _OFF)
                self._switched_off.append(module)
        for module in self._model.modules():
            _, hooks = hooks_around_forward(module)
            for key, hook in tuple(hooks.items()):
                if getattr(hook, "__name__", "") in _INPUT_GRADIENT_HOOKS:
                    # Keep the key: a handle's remove() finds the hook by it, also after `restore`.
                    self._hooks.append((hooks, key, hooks.pop(key)))

    def restore(self) -> None:
        for module in self._switched_off:
            if _is_off(getattr(module, _SWITCH, False)):
                setattr(module, _SWITCH, True)
        for hooks, key, hook in self._hooks:
            hooks[key] = hook
        self._switched_off, self._hooks = [], []


class ModuleCompilation:
    """`Module.compile` on a model's modules, which is disabled: it hides the operators of a call from an engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._calls: dict[torch.nn.Module, Any] = {}

    def switch_off(self) -> list[str]:
        """Switch off `Module.compile`, and return the names of the modules that had it on."""
        calls = take_compiled_calls(self._model)
        self._calls.update(calls)
        names = {module: name for name, module in self._model.named_modules()}
        return [names[module] or type(module).__name__ for module in calls]

    def restore(self) -> None:
        give_compiled_calls(self._calls)
        self._calls = {}


_NAME = "use_cache"
# For each forward: the position of its `use_cache` parameter (-1: none), and whether it takes any keyword argument.
_signatures: "weakref.WeakKeyDictionary[Callable[..., Any], tuple[int, bool]]" = weakref.WeakKeyDictionary()


def without_key_value_cache(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], forced: bool = False
) -> dict[str, Any]:
    """Returns `kwargs` with `use_cache=False` if the model's forward takes it.

    The caller would hold the caches, and no plan could free them. Setting the config is not enough: Trainer sets
    `use_cache` of the outer config only, but T5's decoder reads its own copy.

    Args:
        forced: also override a `use_cache` keyword argument, for an engine that cannot return caches.
    """
    position = _position(model) if forced or _NAME not in kwargs else None
    if position is None or 0 <= position < len(args):
        return dict(kwargs)
    return {**kwargs, _NAME: False}


def _position(model: torch.nn.Module) -> int | None:
    """Returns the position of `use_cache` among the arguments of `model.forward`; -1: keyword only, None: not known
    to take it."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        # PeftModel passes keywords on.
        return None if _position(model.get_base_model()) is None else -1
    config = getattr(model, "config", None)
    # Configs of multimodal and encoder-decoder models contain further configs.
    if not any(hasattr(each, _NAME) for each in (config, *getattr(config, "__dict__", {}).values())):
        return None
    position, takes_any = _signature(model.forward)
    if position >= 0:
        return position
    if not takes_any:
        return None
    from transformers import PreTrainedModel

    # `generate` passes `use_cache` to these models (LLaVA, Gemma 3).
    if isinstance(model, PreTrainedModel) and model.can_generate():
        return -1
    # Models with a head pass keywords on to their base model; what others do with keywords is unknown.
    inner = model.base_model if isinstance(model, PreTrainedModel) else model
    return None if inner is model or _position(inner) is None else -1


def _signature(forward: Callable[..., Any]) -> tuple[int, bool]:
    function = getattr(forward, "__func__", forward)
    if function not in _signatures:
        parameters = inspect.signature(forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        _signatures[function] = (list(parameters).index(_NAME) if _NAME in parameters else -1, takes_any)
    return _signatures[function]
