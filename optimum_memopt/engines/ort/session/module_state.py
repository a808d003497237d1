"""Compares the Python state that an exported graph has baked in with the model at each step.

The graph holds what the forward read during tracing: numbers and flags on modules (`Dropout.p`, a LayerNorm's `eps`,
an attention's `scaling`) and in configs, activation functions, the module tree, tensors that are not parameters. ONNX
Runtime does not read any of it again.
"""

import copy
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch

from optimum_memopt.compat import writes_to
from optimum_memopt.engines.ort.compat import torch_modules

# What `save_pretrained`, and so every checkpoint of a Trainer, writes into a config. No exported forward reads it, and
# the dtypes of the parameters are compared separately.
_CHECKPOINT_FIELDS = frozenset({"architectures", "dtype"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_SETTINGS = (*_PLAIN, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, set, frozenset, dict)
# Longer containers are tables, which no forward reads as a setting.
_MAX_ITEMS = 64
# This many changes of one attribute within this many training forwards are a schedule or a counter, not a setting.
_MAX_CHANGES = 3
_WINDOW = 16


class ModuleState:
    """A snapshot of a model's Python state; the root's own `forward` is not compared, because wrappers replace it.

    Keeps a reference to everything that is compared by identity, so that no new object can get the id of an old one.
    A comparison takes 0.5 to 0.6 ms for BERT-base (233 modules, 202 parameters; 1 core), half of it for the
    parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        modules = [_ObjectState(name, module, vars(module)) for name, module in model.named_modules()]
        configs = [
            _ObjectState(f"{part.name}.{name}" if part.name else name, value, vars(value))
            for part in modules
            for name, value in vars(part.owner).items()
            if _is_config(name, value)
        ]
        # Where modules share a config, it gets the name nearest to the root.
        shared_once = {id(part.owner): part for part in reversed(configs)}.values()
        self._parts = (*modules, *shared_once)

    def is_current(self) -> bool:
        return all(part.is_current() for part in self._parts)

    def only_caches_changed(self) -> bool:
        """True where only caches of the forward have changed: attributes that were None and are set by the first call
        (`config.problem_type` of classifiers), and containers."""
        containers = {
            part.prefix + field
            for part in self._parts
            for field in part.snapshots
            if isinstance(vars(part.owner).get(field), _CONTAINERS)
        }
        return all(before == "None" or name in containers for name, (before, _) in self.changes().items())

    def changes(self) -> dict[str, tuple[str, str]]:
        """Dotted names to their values before and now; empty when nothing that is compared has changed."""
        before, after = self.values(), ModuleState(self._model).values()
        return {
            name: (str(before.get(name, "not there")), str(after.get(name, "not there")))
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        }

    def values(self) -> dict[str, "_StateValue"]:
        return {name: value for part in self._parts for name, value in part.values().items()}


class SharedCopy:
    """A shallow copy of a model, `module`, that shares its submodules, parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.module = copy.copy(model)
        self._fields = dict(vars(self.module))

    def write_back_attributes(self) -> None:
        """Copy attributes that the traced forward has set on the copy to the model."""
        for name, value in vars(self.module).items():
            if (
                name not in torch_modules.MODULE_FIELDS
                and isinstance(value, _PLAIN)
                and self._fields.get(name, self) is not value
            ):
                self._fields[name] = value
                vars(self._model)[name] = value


class ReexportLimit:
    """Detects attributes that keep changing, each time causing a new export; `exceeded` has their names."""

    def __init__(self) -> None:
        self.exceeded: set[str] = set()
        self._forwards = 0
        self._changed: dict[str, deque[int]] = {}

    def count_forward(self) -> None:
        self._forwards += 1

    def record(self, names: Iterable[str]) -> str:
        """The first of these changed attributes that has reached the limit, empty when none has.

        Training modes, modules and tensors do not count.
        """
        first = ""
        for name in names:
            if " " in name or name.endswith(".training"):
                continue
            times = self._changed.setdefault(name, deque(maxlen=_MAX_CHANGES))
            times.append(self._forwards)
            if len(times) == _MAX_CHANGES and times[-1] - times[0] < _WINDOW:
                first = first or name
                self.exceeded.add(name)
        return first


def describe_changes(changes: Mapping[str, tuple[str, str]]) -> str:
    (name, (before, after)), *rest = changes.items()
    more = f" (and {len(rest)} more)" if rest else ""
    return f"{name} was {before[:40]}, is {after[:40]}{more}"


class _ObjectState:
    def __init__(self, name: str, owner: Any, fields: dict[str, Any]) -> None:
        self.name = name
        self.prefix = f"{name}." if name else ""
        self.owner = owner
        self._type = type(owner)
        self._is_module = is_module = isinstance(owner, torch.nn.Module)
        ignored = torch_modules.MODULE_FIELDS if is_module else _CHECKPOINT_FIELDS
        if is_module and not name:
            ignored |= {"forward"}
        compared = [(field, value) for field, value in fields.items() if field not in ignored]
        self._size = len(fields)
        self._names = plain = [field for field, value in compared if isinstance(value, _SETTINGS)]
        self._read: Callable[[Mapping[str, Any]], Any] = itemgetter(*plain) if plain else lambda fields: ()
        self._values = self._read(fields)
        self.snapshots = {
            field: snapshot
            for field, value in compared
            if isinstance(value, (*_CONTAINERS, torch.Tensor)) and (snapshot := _snapshot(value)) is not None
        }
        self._children = tuple(torch_modules.children(owner).items()) if is_module else ()
        self._tensors = _tensors(owner) if is_module else ()
        # Kept alive for the identities in `_tensors`.
        kinds = (torch_modules.parameters, torch_modules.buffers) if is_module else ()
        self._held = tuple(tensor for tensors in kinds for tensor in tensors(owner).values())

    def is_current(self) -> bool:
        fields = self.owner.__dict__
        if type(self.owner) is not self._type or len(fields) != self._size:
            return False
        try:
            if self._read(fields) != self._values:
                return False
        except KeyError:
            return False
        if self.snapshots and any(_snapshot(fields.get(name)) != value for name, value in self.snapshots.items()):
            return False
        if not self._is_module:
            return True
        modules = torch_modules.children(self.owner)
        if (modules or self._children) and tuple(modules.items()) != self._children:
            return False
        return _tensors(self.owner) == self._tensors

    def values(self) -> dict[str, "_StateValue"]:
        prefix = self.prefix
        values = self._values if len(self._names) > 1 else (self._values,)
        named = {prefix + name: _StateValue(value) for name, value in zip(self._names, values, strict=False)}
        for name, snapshot in self.snapshots.items():
            named[prefix + name] = _StateValue(snapshot, _snapshot_text(snapshot))
        named[f"class of {self.name or 'the model'}"] = _StateValue(self._type.__name__, self._type.__name__)
        for name, module in self._children:
            named[f"module {prefix}{name}"] = _StateValue(module, type(module).__name__)
        for name, identity, *facts in self._tensors:
            named[f"tensor {prefix}{name}"] = _StateValue((identity, *facts), " ".join(map(str, facts)))
        return named


class _StateValue:
    """A value with the text that stands for it in a log line."""

    def __init__(self, value: Any, text: str = "") -> None:
        self._value = value
        self._text = text or getattr(value, "__name__", None) or repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StateValue) and (self._value is other._value or self._value == other._value)

    def __str__(self) -> str:
        return self._text


def _tensors(module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Parameters, as they were exported, and buffers. Non-persistent buffers, which ORT does not read at each step,
    come with their version counter."""
    parameters, buffers = torch_modules.parameters(module), torch_modules.buffers(module)
    if not parameters and not buffers:
        return ()
    facts: list[tuple[Any, ...]] = [
        (name, id(p), p.shape, p.requires_grad, p.dtype, p.device) for name, p in parameters.items() if p is not None
    ]
    if buffers:
        constants = torch_modules.non_persistent_buffers(module)
        facts += [
            (name, id(b), b.shape, b.dtype, b.device, writes_to(b) if name in constants else 0)
            for name, b in buffers.items()
            if b is not None
        ]
    return tuple(facts)


def _is_config(name: str, value: Any) -> bool:
    return (name == "config" or name.endswith("_config")) and hasattr(value, "__dict__")


def _snapshot(value: Any, depth: int = 4) -> Any:
    """A copy that can be compared later; None for values that hold anything but settings."""
    if isinstance(value, torch.Tensor):
        return id(value), value.shape, writes_to(value)
    if isinstance(value, _CONTAINERS):
        if not depth or len(value) > _MAX_ITEMS:
            return None
        items = value.items() if isinstance(value, dict) else value
        copies = [_snapshot(item, depth - 1) for item in items]
        if any(copy is None for copy in copies):
            return None
        return type(value).__name__, frozenset(copies) if isinstance(value, set | frozenset) else tuple(copies)
    return (value,) if isinstance(value, _SETTINGS) else None


def _snapshot_text(snapshot: tuple[Any, ...]) -> str:
    if len(snapshot) == 1:
        return repr(snapshot[0])
    if isinstance(snapshot[0], str):
        return f"{snapshot[0]}({', '.join(map(_snapshot_text, snapshot[1]))})"
    return "another tensor"
