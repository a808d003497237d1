"""A module of the user's, on fake tensors: nothing of it is run or allocated, and it stays as it is."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimum_memopt.engines.attached import engine_of
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.measure.trainable import freeze_others
from optimum_memopt.measure.workload import decide_problem_type

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ModuleWorkload:
    """What is trained.

    Attributes:
        module: on any device, the meta device too.
        inputs: keyword arguments of its forward; tensors among them may be anywhere too.
        batch_size: rows of a batch; the first dimension of all inputs that have as many rows as the first tensor.
        trainable: see `Workload`.
    """

    module: torch.nn.Module = field(repr=False)
    inputs: Mapping[str, Any] = field(repr=False)
    batch_size: int
    trainable: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, module: torch.nn.Module, inputs: object, batch_size: int | None, trainable: tuple[str, ...]
    ) -> "ModuleWorkload":
        """
        Args:
            module: see above.
            inputs: a mapping of keyword arguments, a sequence of positional ones, or a tensor.
            batch_size: None: as the first tensor has rows.
            trainable: see above.

        Raises:
            MemOptError: the inputs are not what the forward takes, or without a tensor that has rows; the module is
                of a kind that cannot be planned.
        """
        name = type(module).__name__
        if engine_of(module) is not None:
            raise MemOptError(f"{name} is being trained by an engine; detach() it, or ask trainer.memopt")
        for path, tensor in _tensors(module):
            if type(tensor) not in _PLAIN:
                raise MemOptError(f"{name}: {path} is a {type(tensor).__name__}; only plain tensors can be planned")
        keywords = _keywords(module, inputs)
        first = next((value for value in keywords.values() if isinstance(value, torch.Tensor) and value.dim()), None)
        if first is None:
            raise MemOptError("example_inputs: none of them is a tensor with a first dimension, the rows of a batch")
        rows = first.shape[0] if batch_size is None else batch_size
        if rows < 1:
            raise MemOptError(f"batch_size={rows}: allowed are numbers from 1 on")
        return cls(module, _resized(keywords, first.shape[0], rows), rows, trainable)

    @property
    def way_out(self) -> str:
        """Nothing can be done."""
        return ""

    def with_rows(self, rows: int) -> "ModuleWorkload":
        """The same with another batch size."""
        return replace(self, inputs=_resized(self.inputs, self.batch_size, rows), batch_size=rows)

    def build(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        """A copy of the module in training mode, and its inputs, on fake tensors of the default device.

        Raises:
            MemOptError: the module cannot be copied, or a pattern matches no parameter.
        """
        fakes = {id(tensor): _fake(tensor) for _, tensor in _tensors(self.module)}
        try:
            model = copy.deepcopy(self.module, fakes)
        # Whatever the module holds may refuse.
        except Exception as error:
            raise MemOptError(
                f"{type(self.module).__name__} cannot be copied ({type(error).__name__}: "
                f"{excerpt(' '.join(str(error).split()), longest=200)})"
            ) from error
        freeze_others(model, self.trainable)
        batch = {
            name: _fake(value) if isinstance(value, torch.Tensor) else value for name, value in self.inputs.items()
        }
        if isinstance(labels := batch.get("labels"), torch.Tensor) and hasattr(model, "config"):
            decide_problem_type(model.config, labels)
        return model.train(), batch


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes of a module or in its lists."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            for leaf in _leaves(value):
                yield f"{name}.{key}".strip("."), leaf


def _leaves(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Within fake tensors: one like this, on the default device."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _keywords(module: torch.nn.Module, inputs: object) -> dict[str, Any]:
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, Mapping | Sequence):
        raise MemOptError(f"example_inputs: a dict, a tuple or a tensor, not {excerpt(type(inputs).__name__)}")
    forward = f"example_inputs: forward of {type(module).__name__}"
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    except TypeError as error:
        raise MemOptError(f"{forward}: {error}") from error
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if any(signature.parameters[name].kind not in _NAMED for name in bound.arguments):
        raise MemOptError(f"{forward} takes arguments without names, which cannot be planned")
    return dict(bound.arguments)


def _resized(inputs: Mapping[str, Any], before: int, rows: int) -> dict[str, Any]:
    def resized(value: Any) -> Any:
        if rows == before or not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != before:
            return value
        return torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device="meta").requires_grad_(
            value.requires_grad
        )

    return {name: resized(value) for name, value in inputs.items()}
