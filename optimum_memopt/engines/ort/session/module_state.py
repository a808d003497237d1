"""Compares the Python state baked into an exported graph with the model's at each step.

The graph has baked in everything that the forward read during tracing: numbers and flags of modules (`Dropout.p`, a
LayerNorm's `eps`, an attention's `scaling`) and of configs, activation functions, the module tree, tensors that are
not parameters. ONNX Runtime does not read any of it again.
"""

import copy
import enum
import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from optimum_memopt.compat.torch import own_parameters, writes_to
from optimum_memopt.engines.ort.compat import internals
from optimum_memopt.engines.shared.function_state import MODULE_FIELDS

# Config fields that `save_pretrained`, and so every checkpoint of a Trainer, sets. No exported forward reads them, and
# the dtypes of the parameters are compared separately.
_CHECKPOINT_FIELDS = frozenset({"architectures", "dtype"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_SETTINGS = (*_PLAIN, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, tuple, set, frozenset, dict)
# Longer containers are lookup tables, which no forward reads as a setting.
_MAX_ITEMS = 64
# An attribute that changes `_MAX_CHANGES` times within `_WINDOW` training forwards is a schedule or a counter, not a
# setting.
_MAX_CHANGES = 3
_WINDOW = 16


class ModuleState:
    """A snapshot of a model's Python state, and of autocast on its device. It excludes the root's `forward`, because
    wrappers replace it.

    A comparison takes 1.6 ms for BERT-base (233 modules, 202 parameters; 1 core).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        device_type = next(model.parameters()).device.type
        self.autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        self.values = dict(_values(model))

    def only_caches_changed(self, now: "ModuleState") -> bool:
        """True if only caches of the forward have changed: attributes that were None until the first call set them
        (`config.problem_type` of classifiers), and containers."""
        return all(isinstance(self.values.get(name, ...), _Items | None) for name in self.changes(now))

    def changes(self, now: "ModuleState") -> dict[str, tuple[str, str]]:
        """Returns the dotted names of changed values, with the values before and now as text; empty if there are
        none."""
        before, after = self.values, now.values
        # Compare within lists, which checks identity before equality.
        changed = (name for name in {**before, **after} if [before.get(name, ...)] != [after.get(name, ...)])
        autocast = {"autocast": (str(self.autocast), str(now.autocast))} if self.autocast != now.autocast else {}
        return autocast | {name: (_text(before.get(name, ...)), _text(after.get(name, ...))) for name in changed}


class SharedCopy:
    """A shallow copy of a model.

    Attributes:
        module: the copy, which shares the model's submodules, parameters and buffers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.module = copy.copy(model)
        self._fields = dict(vars(self.module))

    def write_back_attributes(self) -> None:
        """Set attributes on the model that the traced forward has set on the copy."""
        for name, value in vars(self.module).items():
            if name not in MODULE_FIELDS and isinstance(value, _PLAIN) and self._fields.get(name, self) is not value:
                self._fields[name] = value
                vars(self._model)[name] = value


class ReexportLimit:
    """Detects attributes that keep changing, where each change causes a new export.

    Attributes:
        exceeded: names of the attributes that have reached the limit.
    """

    def __init__(self) -> None:
        self.exceeded: set[str] = set()
        self._forwards = 0
        self._changed: dict[str, deque[int]] = {}

    def record(self, names: Iterable[str]) -> str:
        """Count a forward and the attributes that have changed before it.

        Changes of training modes, modules and tensors are not counted.

        Returns:
            The first attribute that has reached the limit; empty if none has.
        """
        self._forwards += 1
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


def _values(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields all values to compare with their dotted names: of the modules, then of the configs that they hold."""
    configs: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield f"class of {name or 'the model'}", type(module)
        for field, value in vars(module).items():
            if field in MODULE_FIELDS or (field == "forward" and not name):
                continue
            yield from _compared(prefix + field, value)
            if (field == "config" or field.endswith("_config")) and hasattr(value, "__dict__"):
                # A config shared by several modules gets the name nearest to the root.
                configs.setdefault(id(value), (prefix + field, value))
        for child, inner in internals.children(module).items():
            yield f"module {prefix}{child}", inner
        constants = internals.non_persistent_buffers(module)
        for leaf, tensor in (*own_parameters(module).items(), *internals.buffers(module).items()):
            if tensor is not None:
                yield f"tensor {prefix}{leaf}", _Tensor.of(tensor, leaf in constants)
    for name, config in configs.values():
        yield f"class of {name}", type(config)
        for field, value in vars(config).items():
            if field not in _CHECKPOINT_FIELDS:
                yield from _compared(f"{name}.{field}", value)


def _compared(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if (copied := _copied(value)) is not _NOT_COMPARED:
        yield name, copied


class _Tensor(NamedTuple):
    """A tensor, compared by identity and by its properties that an export depends on. The reference keeps its id from
    being reused.

    Attributes:
        facts: shape, requires_grad, dtype, device, and for constants, which ORT does not read at each step, the
            version counter, else 0.
    """

    tensor: torch.Tensor
    facts: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, is_constant: bool) -> "_Tensor":
        version = writes_to(tensor) if is_constant else 0
        return cls(tensor, (tensor.shape, tensor.requires_grad, tensor.dtype, tensor.device, version))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensor) and self.tensor is other.tensor and self.facts == other.facts

    def __hash__(self) -> int:
        return id(self.tensor)


class _Items(NamedTuple):
    """A copy of a container."""

    kind: type
    items: Collection[Any]


_NOT_COMPARED = object()


def _copied(value: Any, depth: int = 4) -> Any:
    """Returns a snapshot of a value, to compare with later; `_NOT_COMPARED` unless it is a setting, a tensor or a
    small container of these."""
    if isinstance(value, _SETTINGS):
        return value
    if isinstance(value, torch.Tensor):
        return _Tensor.of(value, is_constant=True)
    if not isinstance(value, _CONTAINERS) or not depth or len(value) > _MAX_ITEMS:
        return _NOT_COMPARED
    copies = [_copied(item, depth - 1) for item in (value.items() if isinstance(value, dict) else value)]
    if _NOT_COMPARED in copies:
        return _NOT_COMPARED
    return _Items(type(value), frozenset(copies) if isinstance(value, set | frozenset) else tuple(copies))


def _text(value: Any) -> str:
    """Returns the text of a value for a log line."""
    if value is ...:
        return "not there"
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, _Tensor):
        return " ".join(map(str, value.facts))
    if isinstance(value, _Items):
        return f"{value.kind.__name__}({', '.join(map(_text, value.items))})"
    return getattr(value, "__name__", None) or repr(value)
