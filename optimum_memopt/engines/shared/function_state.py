"""State that functions hold outside of modules, for example a hook that appends to a list of the script.

A forward may run more than once in a step: to capture its graphs for a budget's solver, or under another plan. A hook
is called in each of these runs, and would append, add or count twice. So the state that functions may write to is
saved before the first run, and restored before the next:

- variables of a function's closure, and the variables of its module that its code names;
- attributes of a method's object, and of objects among those variables, if they belong to the function's own package;
- attributes of their classes, and the state held by the methods of these classes;
- the same for functions of its module that it calls, and for functions wrapped by `functools.partial`;
- contents of the lists, dicts and sets among all these, the numbers of small tensors and arrays, and the states of
  random generators.

Functions of training libraries are left out, since these handle repeated calls. An iterator cannot be restored.
"""

import contextlib
import copy
import functools
import inspect
import threading
import types
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from optimum_memopt.compat.torch import write_back
from optimum_memopt.generators import set_state, state_of

# Attributes that every module has for torch's own bookkeeping, except `training`.
MODULE_FIELDS = frozenset(vars(torch.nn.Module())) - {"training"}
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
LIBRARIES = frozenset({"torch", "transformers", "accelerate", "deepspeed", "peft", "optimum_memopt"})
# Packages of namespace classes that scripts store their own state in.
_NAMESPACES = frozenset({"types", "argparse", threading.local.__module__})
# Maximum nesting of containers in containers, and objects in objects.
_DEPTH = 3
# The same for what a forward is called with: a cache holds a list of layers, and each of these its tensors.
_DEPTH_OF_ARGUMENTS = 6
# What `contents_of` does not look into. Modules are saved by themselves.
_NOT_WRITTEN = (
    *(torch.Tensor, torch.nn.Module, torch.Generator, np.ndarray, type),
    *(types.FunctionType, types.MethodType, types.ModuleType),
)
# Maximum entries of a container that a hook may fill; larger ones are taken for data sets.
_MOST_ENTRIES = 10_000
# Maximum bytes of a tensor or array whose numbers are saved.
_MOST_BYTES = 2**20


def variables_around(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables of a function's closure and module that its code names."""
    around = function.__globals__
    variables = {name: around[name] for name in function.__code__.co_names if name in around}
    # A variable of the closure may not be set yet.
    with contextlib.suppress(ValueError):
        variables |= inspect.getclosurevars(function).nonlocals
    return variables


def holds_the_same(one: Any, other: Any) -> bool:
    """True if two containers hold the same objects in the same order."""
    pairs = (each.items() if isinstance(each, dict) else each for each in (one, other))
    flat = [[id(part) for each in pair for part in (each if isinstance(each, tuple) else (each,))] for pair in pairs]
    return flat[0] == flat[1]


def refill(container: Any, values: Any) -> None:
    """Replace the contents of a container by these values."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(values)


def restore_containers(noted: Iterable[tuple[Any, Any]]) -> None:
    """Restore containers, each with its copy as `contents_of` yields them."""
    for container, values in noted:
        if not holds_the_same(container, values):
            refill(container, values)


def container_in(value: Any) -> Any:
    """Returns a list, dict or set, or the dict in a `UserDict`; None for other values, and for large containers."""
    value = value.data if isinstance(value, UserDict) else value
    return value if type(value) in CONTAINERS and len(value) <= _MOST_ENTRIES else None


def contents_of(arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the containers in a forward's arguments and the attribute dicts of objects there, such as a key-value
    cache, each with a shallow copy."""
    seen: dict[int, Any] = {}
    pending = [(arguments, 0)]
    while pending and len(seen) < _MOST_ENTRIES:
        value, depth = pending.pop()
        value = value.data if isinstance(value, UserDict) else value
        if isinstance(value, list | tuple | dict | set | deque):
            contents = value
        elif hasattr(value, "__dict__") and not isinstance(value, _NOT_WRITTEN):
            contents = vars(value)
        else:
            continue
        if id(value) in seen or depth > _DEPTH_OF_ARGUMENTS or len(contents) > _MOST_ENTRIES:
            continue
        seen[id(value)] = value
        if container_in(contents) is not None:
            yield contents, copy.copy(contents)
        items = contents.values() if isinstance(contents, dict) else contents
        pending += ((item, depth + 1) for item in items)


@dataclass(frozen=True)
class _Variable:
    """A variable with its original value.

    Attributes:
        place: the closure cell, the dict, or the object that holds the variable.
    """

    place: Any
    name: str
    value: Any

    def restore(self) -> None:
        if isinstance(self.place, types.CellType):
            self.place.cell_contents = self.value
        elif isinstance(self.place, dict):
            self.place[self.name] = self.value
        elif getattr(self.place, self.name, None) is not self.value:
            setattr(self.place, self.name, self.value)


@dataclass(frozen=True)
class FunctionState:
    """The state that functions may write to, with its original contents.

    Attributes:
        variables: variables with their original values.
        objects: attribute dicts of objects, with the original names in them.
        containers: lists, dicts and sets, each with a shallow copy.
        arrays: tensors, NumPy arrays and other arrays, each with a copy.
        contexts: context variables with their original values.
        generators: random generators, each with its state.
    """

    variables: tuple[_Variable, ...] = ()
    objects: tuple[tuple[dict[str, Any], frozenset[str]], ...] = ()
    containers: tuple[tuple[Any, Any], ...] = ()
    arrays: tuple[tuple[Any, Any], ...] = ()
    contexts: tuple[tuple[ContextVar[Any], Any], ...] = ()
    generators: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def of(cls, functions: Iterable[Callable[..., Any]], modules: Iterable[torch.nn.Module] = ()) -> "FunctionState":
        """Returns the state of functions, and of the classes and attributes of modules."""
        walk = _Walk()
        for function in functions:
            walk.function(function)
        for module in modules:
            walk.module(module)
        return cls(
            tuple(walk.variables),
            tuple(walk.objects),
            tuple(walk.containers),
            tuple(walk.arrays),
            tuple(walk.contexts),
            tuple(walk.generators),
        )

    def restore(self) -> None:
        for variable in self.variables:
            variable.restore()
        for attributes, names in self.objects:
            for name in attributes.keys() - names:
                del attributes[name]
        restore_containers(self.containers)
        for held, values in self.arrays:
            if isinstance(held, torch.Tensor):
                write_back(held, values)
            else:
                held[... if isinstance(held, np.ndarray) else slice(None)] = values
        for context, value in self.contexts:
            context.set(value)
        for generator, state in self.generators:
            set_state(generator, state)


class _Walk:
    """Collects the state that functions hold, each object once."""

    def __init__(self) -> None:
        self.variables: list[_Variable] = []
        self.objects: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.containers: list[tuple[Any, Any]] = []
        self.arrays: list[tuple[Any, Any]] = []
        self.contexts: list[tuple[ContextVar[Any], Any]] = []
        self.generators: list[tuple[Any, Any]] = []
        # Visited objects by id, held so that no id is reused.
        self._seen: dict[int, Any] = {}

    def function(self, function: Any) -> None:
        given: list[Any] = []
        while isinstance(function, functools.partial):
            given += (*function.args, *function.keywords.values())
            function = function.func
        if (package := package_of(function)) in LIBRARIES:
            return
        for value in given:
            self._value(value, package)
        if not isinstance(function, types.FunctionType):
            # A method, or a callable object.
            is_method = isinstance(function, types.MethodType)
            owner = function.__self__ if is_method else function
            if package_of(owner) not in LIBRARIES:
                self._value(owner, package_of(owner))
            function = function.__func__ if is_method else type(function).__call__
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType) or self._is_known(function):
            return
        self._named(vars(function), package, _DEPTH)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, value in variables_around(function).items():
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                self.function(value)
            elif isinstance(value, type):
                self._class(value, package)
            elif not isinstance(value, _CODE):
                self.variables.append(_Variable(cells.get(name, function.__globals__), name, value))
                self._value(value, package)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, package)

    def module(self, module: torch.nn.Module) -> None:
        if (package := package_of(module)) not in LIBRARIES:
            self._class(type(module), package)
            for name, value in vars(module).items():
                if name not in MODULE_FIELDS:
                    self._value(value, package)

    def _class(self, owner: type, package: str) -> None:
        """Collect attributes of a class and its bases, and the state that their methods hold."""
        for base in owner.__mro__:
            if base.__module__.partition(".")[0] != package or self._is_known(base):
                continue
            for name, value in list(vars(base).items()):
                if isinstance(value, types.FunctionType):
                    self.function(value)
                elif _is_plain(value) and not name.startswith("__"):
                    self.variables.append(_Variable(base, name, value))
                    self._value(value, package)

    def _value(self, value: Any, package: str, depth: int = _DEPTH) -> None:
        if isinstance(value, (torch.nn.Module, type, *_CODE)) or self._is_known(value):
            return
        if isinstance(value, ContextVar) and (held := value.get(None)) is not None:
            self.contexts.append((value, held))
            self._value(held, package, depth - 1)
        if (state := state_of(value)) is not None:
            self.generators.append((value, state))
        self._array(value)
        if (container := container_in(value)) is not None:
            items = copy.copy(container)
            self.containers.append((container, items))
            for item in (items.values() if isinstance(items, dict) else items) if depth else ():
                self._value(item, package, depth - 1)
        if depth > 0 and package_of(value) in {package, *_NAMESPACES}:
            self._attributes(value, package, depth - 1)

    def _array(self, value: Any) -> None:
        # A tensor without data is that of a dry run.
        is_tensor = type(value) is torch.Tensor and not value.requires_grad and not value.is_meta
        if is_tensor and value.nbytes <= _MOST_BYTES:
            self.arrays.append((value, value.detach().clone()))
        elif isinstance(value, np.ndarray | array | bytearray) and value.__sizeof__() <= _MOST_BYTES:
            self.arrays.append((value, copy.copy(value)))

    def _attributes(self, owner: Any, package: str, depth: int) -> None:
        self._class(type(owner), package)
        attributes = getattr(owner, "__dict__", None)
        if isinstance(attributes, dict):
            # Objects of library classes, such as a Trainer, add attributes themselves: these are not removed.
            is_own = not any(base.__module__.partition(".")[0] in LIBRARIES for base in type(owner).__mro__)
            self._named(attributes, package, depth, may_remove=is_own)
            return
        for name in (name for base in type(owner).__mro__ for name in getattr(base, "__slots__", ())):
            value = getattr(owner, name, None)
            if _is_plain(value) or isinstance(value, torch.Tensor):
                self.variables.append(_Variable(owner, name, value))
            self._value(value, package, depth)

    def _named(self, attributes: dict[str, Any], package: str, depth: int, may_remove: bool = True) -> None:
        if may_remove:
            self.objects.append((attributes, frozenset(attributes)))
        for name, value in attributes.items():
            # Flags are not restored: one may record that hooks were registered on modules, and these hooks stay.
            if _is_plain(value) or isinstance(value, torch.Tensor):
                self.variables.append(_Variable(attributes, name, value))
            self._value(value, package, depth)

    def _is_known(self, value: Any) -> bool:
        is_known = id(value) in self._seen
        self._seen[id(value)] = value
        return is_known


# Values that are not saved: Python modules, functions, and flags.
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, bool)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (int, float, *CONTAINERS)


def package_of(value: Any) -> str:
    """Returns the top-level package that a function, or the class of an object, comes from."""
    owner = value if isinstance(value, types.FunctionType | types.MethodType) else type(value)
    return (getattr(owner, "__module__", None) or "").partition(".")[0]
