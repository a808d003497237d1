"""A training step that ran out of memory, and why it did. Pure."""

import inspect
import linecache
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

import torch

from optimum_memopt.compat.transformers import is_mask
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.predictions import Group
from optimum_memopt.engines.api.run import Run

FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "optimizer's step"


@dataclass(frozen=True)
class Part:
    """A category of what was held.

    Attributes:
        category: one of `predictions.CATEGORIES`.
        bytes: of the device's memory, of a CPU's process resident.
        tensors: what it is made of, largest first; empty where that is not known.
    """

    category: str
    bytes: int
    tensors: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Moment:
    """Where in the step the allocation failed.

    Attributes:
        layer: path of the layer or module; empty where it is outside of all, or not known.
        operator: as `gelu`; empty where it is not known.
        is_exact: the error's traceback names the operator; else it is the one at which the prediction holds as much
            as was held.
    """

    phase: str
    layer: str = ""
    operator: str = ""
    is_exact: bool = False

    def __str__(self) -> str:
        about = "" if self.is_exact or not self.operator else "at about "
        operator = f"operator {self.operator}" if self.operator else ""
        layer = f"in {self.layer}" if self.layer else ""
        place = " ".join(filter(None, (operator, layer)))
        return f"{self.phase}, {about}{place}" if place else self.phase


@dataclass(frozen=True)
class Suggestion:
    """Flags with which the step would have fit.

    Attributes:
        flags: to add to the command line, or to replace there.
        peak: predicted bytes of a step with it.
        extra_time: as a share of forward and backward; None: not known.
        what: what it does, in a few words.
    """

    flags: str
    peak: int
    extra_time: float | None
    what: str


# Code that torch.fx has generated: `gelu = torch.ops.aten.gelu.default(addmm);  addmm = None`.
_GENERATED = "<eval_with_key>"
_ASSIGNMENT = re.compile(r"\s*(?P<node>\w+)(?:: [^=]*)? = torch\.ops\.\w+\.(?P<operator>\w+)")
_AUTOGRAD = "torch/autograd/graph.py"


@dataclass(frozen=True)
class TensorLike:
    """A tensor without its data.

    Attributes:
        is_true: none of its elements is zero, as in a mask without padding; False where that is not known.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_true: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLike":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ForwardCall:
    """The arguments of a model's training forward, tensors as `TensorLike`.

    Attributes:
        reader: who may read more of the outputs than the loss, empty when nobody does.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reader: str

    def knowing(self, inputs: Mapping[str, Any]) -> "ForwardCall":
        """With what masks of the batch tell: whether there is padding."""
        true = {
            name: replace(like, is_true=bool(inputs[name].all()))
            for name, like in self.tensors.items()
            if is_mask(name) and isinstance(inputs.get(name), torch.Tensor)
        }
        return replace(self, kwargs={**self.kwargs, **true})

    @property
    def tensors(self) -> dict[str, TensorLike]:
        """Those that have a name."""
        return {name: value for name, value in self.kwargs.items() if isinstance(value, TensorLike)}


@dataclass(frozen=True)
class Place:
    """The place where an allocation failed, as its traceback tells it.

    Attributes:
        module: path of the innermost module whose forward ran; empty in a backward.
        node: of a graph that torch.fx has generated code for; empty in other code.
    """

    phase: str
    module: str = ""
    node: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Failure:
    """An allocation that failed, as it was found before anything was freed.

    Attributes:
        held: bytes at that moment.
        requested: bytes of the allocation; None: the error does not say.
        kept: bytes that the step has freed and a CPU's malloc has not returned, by when its error is seen.
    """

    error: str
    place: Place
    held: int
    requested: int | None
    kept: int


@dataclass(frozen=True)
class FailedStep(Failure):
    """A forward and backward that ran out of memory. What they had allocated is free again.

    Attributes:
        outside: bytes that were there before the step and belong to no tensor of the model, optimizer or batch.
        accumulated: bytes of gradients that earlier micro-batches have left.
        engine: that trained the model; None: plain PyTorch.
        rows: that the data loader takes for a micro-batch.
        accumulation: micro-batches of an optimizer step.
    """

    model: torch.nn.Module
    call: ForwardCall
    outside: int
    accumulated: int
    engine: Engine | None
    run: Run
    rows: int
    accumulation: int
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Explanation:
    """Why a step ran out of memory; the attributes are those of `MemoryReport`."""

    moment: Moment
    parts: tuple[Part, ...]
    suggestions: tuple[Suggestion, ...]
    remarks: tuple[str, ...] = ()


def place_of(traceback: TracebackType | None, model: torch.nn.Module) -> Place:
    """Where an error came from, whose frames must not be cleared yet; modules are those of `model`."""
    names = {module: name for name, module in model.named_modules()}
    phase, module, node, operator = FORWARD, "", "", ""
    while traceback is not None:
        frame, code = traceback.tb_frame, traceback.tb_frame.f_code
        if code.co_filename.replace("\\", "/").endswith(_AUTOGRAD):
            phase, module = BACKWARD, ""
        owner = _self_of(frame)
        if isinstance(owner, torch.nn.Module) and owner in names:
            module = names[owner]
        if code.co_filename.startswith(_GENERATED):
            line = linecache.getline(code.co_filename, traceback.tb_lineno, frame.f_globals)
            if match := _ASSIGNMENT.match(line):
                node, operator = match["node"], match["operator"]
        traceback = traceback.tb_next
    return Place(phase, module, node, operator)


def _self_of(frame: FrameType) -> Any:
    if "self" not in frame.f_code.co_varnames:
        return None
    variables = frame.f_locals
    owner = variables.get("self")
    if isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Before Python 3.13 a copy that stays with the frame, and keeps its tensors when the frame is cleared.
        variables.clear()
    return owner
