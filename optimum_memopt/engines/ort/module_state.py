"""What an exported graph has built in of the model's Python state, compared with the model at each step.

The graph holds what the forward read when it was traced: numbers and flags on modules (`Dropout.p`, a LayerNorm's
`eps`, an attention's `scaling`) and in configs, activation functions, the module tree itself, tensors that are no
parameters. ONNX Runtime does not look at any of it again.
"""

import copy
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

# Attributes of every module, `training` apart: torch's own bookkeeping.
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
# What `save_pretrained`, and so every checkpoint of a Trainer, writes into a config. No exported forward reads it; the
# dtypes of the parameters are compared themselves.
_OF_SAVING = frozenset({"architectures", "dtype"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, set, frozenset, dict)
# Longer ones are tables, which no forward reads as a setting.
_MOST_ITEMS = 64
# As many changes of one attribute in as many training forwards are a schedule or a counter, not a setting.
_CHANGES = 3
_FORWARDS = 16


class ModuleState:
    """A model's Python state at one moment.

    It refers to all that it compares by identity, so that nothing new comes to lie where something old was and passes
    for it. Comparing takes 0.5 to 0.6 ms for BERT-base (233 modules, 202 parameters; 1 core), half of it for the
    parameters.

    Args:
        model: the root; its own `forward` is left out, which wrappers replace.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        modules = [_Part(name, module, vars(module)) for name, module in model.named_modules()]
        configs = [
            _Part(f"{part.name}.{name}" if part.name else name, value, vars(value))
            for part in modules
            for name, value in vars(part.owner).items()
            if _is_config(name, value)
        ]
        # Under the name nearest to the root, where modules share one.
        configs = {id(part.owner): part for part in reversed(configs)}.values()
        self._parts = (*modules, *configs)

    def is_current(self) -> bool:
        """Whether everything is as it was."""
        return all(part.is_current() for part in self._parts)

    def only_noted(self) -> bool:
        """Whether all that has changed was None, as what a forward works out at its first call and then keeps
        (`config.problem_type` of classifiers), or is a container that a forward notes things in."""
        containers = {
            part.prefix + field
            for part in self._parts
            for field in part.frozen
            if isinstance(vars(part.owner).get(field), _CONTAINERS)
        }
        return all(before == "None" or name in containers for name, (before, _) in self.changes().items())

    def changes(self) -> dict[str, tuple[str, str]]:
        """Dotted names to what they were and what they are; empty where nothing that counts has changed."""
        before = {name: value for part in self._parts for name, value in part.described().items()}
        after = {name: value for part in ModuleState(self._model)._parts for name, value in part.described().items()}
        names = dict.fromkeys((*before, *after))
        return {
            name: (str(before.get(name, "not there")), str(after.get(name, "not there")))
            for name in names
            if before.get(name) != after.get(name)
        }


class SharedCopy:
    """A shallow copy of a model, which shares submodules, parameters and buffers with it.

    Attributes:
        module: the copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.module = copy.copy(model)
        self._fields = dict(vars(self.module))

    def give_back_attributes(self) -> None:
        """Set on the model what the copy's forward, when it was traced, has set on the copy."""
        for name, value in vars(self.module).items():
            if name not in _OF_TORCH and isinstance(value, _PLAIN) and self._fields.get(name, self) is not value:
                self._fields[name] = value
                vars(self._model)[name] = value


class Churn:
    """Notices attributes that change again and again, each time for a new export.

    Attributes:
        refused: those that have.
    """

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self._forwards = 0
        self._changed: dict[str, deque[int]] = {}

    def forward(self) -> None:
        """Count a training forward."""
        self._forwards += 1

    def seen(self, names: Mapping[str, Any]) -> str:
        """Note changed attributes; modes, modules and tensors are none.

        Returns:
            The first of them that has changed too often, empty when none has.
        """
        often = ""
        for name in names:
            if " " in name or name.endswith(".training"):
                continue
            times = self._changed.setdefault(name, deque(maxlen=_CHANGES))
            times.append(self._forwards)
            if len(times) == _CHANGES and times[-1] - times[0] < _FORWARDS:
                often = often or name
                self.refused.add(name)
        return often


def in_words(changes: Mapping[str, tuple[str, str]]) -> str:
    """One line of what has changed."""
    (name, (before, after)), *others = changes.items()
    more = f" (and {len(others)} more)" if others else ""
    return f"{name} was {before[:40]}, is {after[:40]}{more}"


class _Part:
    """What is compared of one module or one config."""

    def __init__(self, name: str, owner: Any, fields: dict[str, Any]) -> None:
        self.name = name
        self.prefix = f"{name}." if name else ""
        self.owner = owner
        self._type = type(owner)
        self._is_module = is_module = isinstance(owner, torch.nn.Module)
        root = is_module and not name
        counted = [
            (field, value)
            for field, value in fields.items()
            if field not in (_OF_TORCH if is_module else _OF_SAVING) and not (root and field == "forward")
        ]
        self._size = len(fields)
        plain = [field for field, value in counted if isinstance(value, _PLAIN + _FUNCTIONS)]
        self._names = plain
        self._read: Callable[[Mapping[str, Any]], Any] = itemgetter(*plain) if plain else lambda fields: ()
        self._values = self._read(fields)
        self.frozen = {
            field: frozen
            for field, value in counted
            if isinstance(value, (*_CONTAINERS, torch.Tensor)) and (frozen := _frozen(value)) is not None
        }
        self._children = tuple(owner._modules.items()) if is_module else ()
        self._tensors = _tensors(owner) if is_module else ()
        # Kept alive for the identities in `_tensors`.
        self._held = (*owner._parameters.values(), *owner._buffers.values()) if is_module else ()

    def is_current(self) -> bool:
        fields = self.owner.__dict__
        if type(self.owner) is not self._type or len(fields) != self._size:
            return False
        try:
            if self._read(fields) != self._values:
                return False
        except KeyError:
            return False
        if self.frozen and any(_frozen(fields.get(name)) != value for name, value in self.frozen.items()):
            return False
        if not self._is_module:
            return True
        modules = fields["_modules"]
        if (modules or self._children) and tuple(modules.items()) != self._children:
            return False
        return _tensors(self.owner) == self._tensors

    def described(self) -> dict[str, Any]:
        """Full names to values that can be compared and shown."""
        prefix = self.prefix
        values = self._values if len(self._names) > 1 else (self._values,)
        described: dict[str, Any] = {}
        for name, value in zip(self._names, values, strict=False):
            described[prefix + name] = _Shown(value)
        for name, frozen in self.frozen.items():
            described[prefix + name] = _Shown(frozen, _words(frozen))
        described[f"class of {self.name or 'the model'}"] = self._type.__name__
        for name, module in self._children:
            described[f"module {prefix}{name}"] = _Shown(module, type(module).__name__)
        for name, *facts in self._tensors:
            identity, *rest = facts
            described[f"tensor {prefix}{name}"] = _Shown((identity, *rest), " ".join(map(str, rest)) or "another")
        return described


class _Shown:
    """A value that is compared as it is and shown in words."""

    def __init__(self, value: Any, words: str = "") -> None:
        self._value = value
        self._words = words or getattr(value, "__name__", None) or repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shown) and (self._value is other._value or self._value == other._value)

    def __hash__(self) -> int:
        return hash(self._words)

    def __str__(self) -> str:
        return self._words


def _tensors(module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Parameters, in the form that they were exported in, and buffers; those that ORT does not get at each step, which
    no state dict holds, with a count of their changes."""
    parameters, buffers = module._parameters, module._buffers
    if not parameters and not buffers:
        return ()
    facts = [
        (name, id(p), p.shape, p.requires_grad, p.dtype, p.device) for name, p in parameters.items() if p is not None
    ]
    if buffers:
        constants = module._non_persistent_buffers_set
        facts += [
            (name, id(b), b.shape, b.dtype, b.device, b._version if name in constants and not b.is_inference() else 0)
            for name, b in buffers.items()
            if b is not None
        ]
    return tuple(facts)


def _is_config(name: str, value: Any) -> bool:
    return (name == "config" or name.endswith("_config")) and hasattr(value, "__dict__")


def _frozen(value: Any, depth: int = 4) -> Any:
    """A copy that can be compared later; None for what holds something else than settings."""
    if isinstance(value, torch.Tensor):
        return id(value), value.shape, 0 if value.is_inference() else value._version
    if isinstance(value, _CONTAINERS):
        if not depth or len(value) > _MOST_ITEMS:
            return None
        items = value.items() if isinstance(value, dict) else value
        copies = [_frozen(item, depth - 1) for item in items]
        if any(copy is None for copy in copies):
            return None
        return type(value).__name__, frozenset(copies) if isinstance(value, set | frozenset) else tuple(copies)
    return (value,) if isinstance(value, _PLAIN + _FUNCTIONS) else None


def _words(frozen: tuple[Any, ...]) -> str:
    """What `_frozen` copied, for a reader."""
    if len(frozen) == 1:
        return repr(frozen[0])
    if isinstance(frozen[0], str):
        return f"{frozen[0]}({', '.join(map(_words, frozen[1]))})"
    return "another tensor"
