"""State that functions hold outside of modules, as a hook that appends to a list of the script.

A forward may run more than once in a step: to show its graphs to a budget, or under another plan. A hook is called in
each of these runs, and what it appends, adds up or counts would be there twice. So what functions may write to is
noted before the first run, and restored before the next:

- variables of a function's closure, and those of its module that its code names;
- attributes of the object that it is a method of, and of objects among those variables, of the function's own package;
- the same of functions of its module that it calls, and of what `functools.partial` wraps;
- what the lists, dicts and sets among all these hold, and the numbers of small tensors.

Functions of libraries that train are left out: those know how often they are called.
"""

import contextlib
import copy
import functools
import inspect
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Attributes that every module has, except `training`: torch's own bookkeeping.
MODULE_FIELDS = frozenset(vars(torch.nn.Module())) - {"training"}
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "deepspeed", "peft", "optimum_memopt"})
# Classes of objects that scripts hold their own state in.
_NAMESPACES = frozenset({"types", "argparse"})
# Containers in containers, and objects in objects.
_DEPTH = 3
# Entries of a container that a hook fills, and not of a data set.
_MOST_ENTRIES = 10_000
# Bytes of a tensor whose numbers are noted.
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
    """True where two containers hold the same objects in the same order."""
    pairs = (each.items() if isinstance(each, dict) else each for each in (one, other))
    flat = [[id(part) for each in pair for part in (each if isinstance(each, tuple) else (each,))] for pair in pairs]
    return flat[0] == flat[1]


def refill(container: Any, values: Any) -> None:
    """Have a container hold these values alone."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(values)


def containers_in(value: Any, depth: int = _DEPTH) -> Iterator[tuple[Any, Any]]:
    """Yields the containers in a value, each with a copy."""
    value = value.data if isinstance(value, UserDict) else value
    if type(value) in CONTAINERS and len(value) <= _MOST_ENTRIES:
        yield value, copy.copy(value)
    if depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers_in(item, depth - 1)


@dataclass(frozen=True)
class _Variable:
    """A variable, and what it was.

    Attributes:
        place: the cell of a closure, or the dict that has it by its name.
    """

    place: Any
    name: str
    value: Any

    def restore(self) -> None:
        if isinstance(self.place, types.CellType):
            self.place.cell_contents = self.value
        else:
            self.place[self.name] = self.value


@dataclass(frozen=True)
class FunctionState:
    """What functions may write to, and what was in it."""

    variables: tuple[_Variable, ...] = ()
    objects: tuple[tuple[dict[str, Any], frozenset[str]], ...] = ()
    containers: tuple[tuple[Any, Any], ...] = ()
    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @classmethod
    def of(cls, functions: Iterable[Callable[..., Any]], modules: Iterable[torch.nn.Module] = ()) -> "FunctionState":
        """The state of functions, and of objects that modules hold, whose forwards are among the functions."""
        walk = _Walk()
        for function in functions:
            walk.function(function)
        for module in modules:
            walk.module(module)
        return cls(tuple(walk.variables), tuple(walk.objects), tuple(walk.containers), tuple(walk.tensors))

    def restore(self) -> None:
        for variable in self.variables:
            variable.restore()
        for attributes, names in self.objects:
            for name in attributes.keys() - names:
                del attributes[name]
        for container, values in self.containers:
            if not holds_the_same(container, values):
                refill(container, values)
        for tensor, values in self.tensors:
            tensor.data.copy_(values)


class _Walk:
    """Collects what functions hold, each thing once."""

    def __init__(self) -> None:
        self.variables: list[_Variable] = []
        self.objects: list[tuple[dict[str, Any], frozenset[str]]] = []
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        # With what keeps another object from having the number of one.
        self._seen: dict[int, Any] = {}

    def function(self, function: Any) -> None:
        given: list[Any] = []
        while isinstance(function, functools.partial):
            given += (*function.args, *function.keywords.values())
            function = function.func
        if (package := _package_of(function)) in _LIBRARIES:
            return
        for value in given:
            self._value(value, package)
        if not isinstance(function, types.FunctionType):
            # A method, or an object that is called.
            is_method = isinstance(function, types.MethodType)
            owner = function.__self__ if is_method else function
            if _package_of(owner) not in _LIBRARIES:
                self._value(owner, _package_of(owner))
            function = function.__func__ if is_method else type(function).__call__
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType) or self._is_known(function):
            return
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, value in variables_around(function).items():
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                self.function(value)
            elif not isinstance(value, _CODE):
                self.variables.append(_Variable(cells.get(name, function.__globals__), name, value))
                self._value(value, package)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, package)

    def module(self, module: torch.nn.Module) -> None:
        if (package := _package_of(module)) not in _LIBRARIES:
            for name, value in vars(module).items():
                if name not in MODULE_FIELDS:
                    self._value(value, package)

    def _value(self, value: Any, package: str, depth: int = _DEPTH) -> None:
        if isinstance(value, (torch.nn.Module, *_CODE)) or self._is_known(value):
            return
        if type(value) is torch.Tensor and not value.requires_grad and value.nbytes <= _MOST_BYTES:
            self.tensors.append((value, value.detach().clone()))
        noted = list(containers_in(value, 0))
        self.containers.extend(noted)
        for _, items in noted if depth else ():
            for item in items.values() if isinstance(items, dict) else items:
                self._value(item, package, depth - 1)
        is_own = _package_of(value) in {package, *_NAMESPACES}
        if depth and is_own and isinstance(getattr(value, "__dict__", None), dict):
            self._attributes(value, package, depth - 1)

    def _attributes(self, owner: Any, package: str, depth: int) -> None:
        attributes = vars(owner)
        if not any(base.__module__.partition(".")[0] in _LIBRARIES for base in type(owner).__mro__):
            # A Trainer sets its own.
            self.objects.append((attributes, frozenset(attributes)))
        for name, value in attributes.items():
            # A flag may say that hooks have been put on modules, which stay.
            if value is None or type(value) in (int, float, *CONTAINERS) or isinstance(value, torch.Tensor):
                self.variables.append(_Variable(attributes, name, value))
            self._value(value, package, depth)

    def _is_known(self, value: Any) -> bool:
        is_known = id(value) in self._seen
        self._seen[id(value)] = value
        return is_known


# No state: modules of Python, functions, classes; and flags.
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, bool)


def _package_of(value: Any) -> str:
    """The package that a function, or the class of an object, comes from."""
    owner = value if isinstance(value, types.FunctionType | types.MethodType) else type(value)
    return (getattr(owner, "__module__", None) or "").partition(".")[0]
