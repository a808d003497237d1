"""Released gradients: the optimizer steps in the backward, as soon as a layer's gradients are complete.

A backward computes the gradients of the last layer first, and nothing but the optimizer reads them. So the parameters
of a layer are stepped when the last of its gradients is there, and these are freed before the layer in front of it
begins its backward. A step then holds the gradients of one layer, instead of those of the model. The update is the
optimizer's own, with its states, its groups and their learning rates of that moment: each parameter is stepped once in
a step, as it would be afterwards, so that the weights are the same to the last bit. What is left when the optimizer's
own `step` is called, as of a layer that was skipped, is stepped there.

After "How to save memory by fusing the optimizer step into the backward pass"
(https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html), which gives each parameter
an optimizer of its own; here the one optimizer stays, with its schedule and its checkpoints and steps a layer at once.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from optimum_memopt.compat.torch import step_without_hooks
from optimum_memopt.engines.api.run import Run
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.logs import get_logger

if TYPE_CHECKING:
    from transformers import TrainingArguments

FLAG = "--memory_opt_release_gradients"
# Optimizers that step each parameter by its own gradient and states.
_OF_TORCH = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
_OF_OTHERS = ("transformers.optimization.Adafactor",)
# Why a step needs all gradients at once, and what to do about it, by what it has.
_REASONS = {
    "accumulation": ("gradients are held until the last micro-batch", "give more rows to a micro-batch instead"),
    "clipping": ("gradients can be clipped when all of them are there", "give --max_grad_norm 0"),
    "float16": ("a loss scaler reads all gradients before the optimizer's step", "train in bfloat16"),
    "ranks": ("ranks exchange gradients before the optimizer's step", "train on one device"),
}


def check_step(flag: str = FLAG, **given: str) -> None:
    """Refuse a step that needs all gradients at once.

    Args:
        flag: as the user gave it.
        given: for keys of `_REASONS` the setting as the user gave it; empty where the step has none.

    Raises:
        MemOptError: one line with the first of the settings, and the reason.
    """
    for name, setting in given.items():
        reason, remedy = _REASONS[name]
        if setting:
            raise MemOptError(f"{flag} with {setting}: {reason}; {remedy}, or leave it out")


def check_arguments(args: "TrainingArguments") -> None:
    """Refuse arguments of a Trainer that need all gradients at once. Raises MemOptError."""
    steps, norm = args.gradient_accumulation_steps, args.max_grad_norm
    check_step(
        accumulation=f"--gradient_accumulation_steps {steps}" if steps > 1 else "",
        clipping=f"--max_grad_norm {norm} (Trainer's default is 1.0)" if norm else "",
        float16="--fp16" if args.fp16 else "",
        ranks=f"{args.world_size} processes" if args.world_size > 1 else "",
    )


def check_run(run: Run, **given: str) -> torch.optim.Optimizer:
    """Returns the optimizer of a run, without what accelerate wraps around it.

    Args:
        given: as for `check_step`.

    Raises:
        MemOptError: it has none, one that may look at several parameters together, or needs all gradients at once.
    """
    optimizer: Any = getattr(run.optimizer, "optimizer", run.optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MemOptError(f"{FLAG} without an optimizer, which steps in the backward: optimize(…, optimizer=…)")
    check_step(accumulation="gradient_accumulation=True" if run.gradient_accumulation else "", **given)
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim") and kind.__name__ in _OF_TORCH
    is_known = is_torchs or _is_bitsandbytes(optimizer)
    if not is_known and f"{kind.__module__}.{kind.__qualname__}" not in _OF_OTHERS:
        raise MemOptError(
            f"{FLAG} with {excerpt(kind.__qualname__)}, which may look at several parameters together; allowed are "
            f"torch.optim's {', '.join(_OF_TORCH)}, transformers' Adafactor, and bitsandbytes' optimizers"
        )
    return optimizer


@dataclass(eq=False)
class _Unit:
    """Parameters that are stepped together.

    Attributes:
        params: by the number of a group of the optimizer.
        expected: gradients in a step, as far as is known.
        complete: parameters whose gradients are complete, and not yet stepped.
        count: of those that were stepped in this step.
    """

    params: Mapping[int, list[torch.Tensor]]
    expected: int
    complete: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


class ReleasedGradients:
    """Steps an optimizer in the backward, from now until `stop`.

    Args:
        optimizer: as of `check_run`, held weakly.
        parameters: of the model, in its order.
        layers: the parameters of each layer.
        with_norm: `norm` is called between backward and step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[torch.Tensor],
        layers: Iterable[Iterable[torch.Tensor]],
        with_norm: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._units: dict[torch.Tensor, _Unit] = {}
        # Those with gradients that are complete and not stepped yet.
        self._begun: dict[_Unit, None] = {}
        # Of a first step parameters by the order of their gradients, those of one unit in a row together; None: known.
        self._order: list[list[torch.Tensor]] | None = []
        self._norms: list[torch.Tensor] | None = [] if with_norm else None
        self._stepped: set[torch.Tensor] = set()
        # Devices of a model that is split have threads of their own in a backward.
        self._lock = threading.RLock()
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        for own in _units(trained, parameters, layers):
            unit = _unit(optimizer, own)
            self._units.update(dict.fromkeys(own, unit))
        if not any(parameter.grad is not None for parameter in self._units):
            # bitsandbytes reads the places of all parameters in its first step.
            step_without_hooks(optimizer)
        # Hooks of tensors that held this would keep the model alive.
        note, finish = weak_method(self._note), weak_method(self._finish)
        handles = [each.register_post_accumulate_grad_hook(note) for each in self._units]
        self._stop = weakref.finalize(self, _remove, [*handles, optimizer.register_step_pre_hook(finish)])
        self._stop.atexit = False
        get_logger().info(
            "gradients are released: the optimizer steps in the backward, and whatever reads or clips gradients after "
            "it finds none"
        )

    def stop(self) -> None:
        """Step what is left in the optimizer's own step again."""
        self._stop()

    def norm(self, norm_of_others: Callable[[], torch.Tensor | float]) -> torch.Tensor:
        """Returns the norm of all gradients of the backward before.

        Args:
            norm_of_others: of the gradients that are still there.
        """
        self._release_all()
        others = torch.as_tensor(norm_of_others())
        norms = [norm.to(others.device, torch.float32) for norm in (*(self._norms or ()), others)]
        return torch.linalg.vector_norm(torch.stack(norms))

    def _note(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        with self._lock:
            unit = self._units[parameter]
            if parameter in self._stepped or any(parameter is each for each in unit.complete):
                raise MemOptError(
                    f"{FLAG}: a gradient of shape {tuple(parameter.shape)} came twice before the optimizer's step, by "
                    "several backwards or by a reentrant checkpoint; call optimizer.step() after each backward, or "
                    "leave it out"
                )
            if self._order is not None:
                if not self._order or self._units[self._order[-1][-1]] is not unit:
                    self._order.append([])
                self._order[-1].append(parameter)
            # The backward of the layer behind is over.
            for other in [each for each in self._begun if each is not unit]:
                self._release(other)
            unit.complete.append(parameter)
            self._begun[unit] = None
            if len(unit.complete) >= unit.expected:
                self._release(unit)

    def _release(self, unit: _Unit) -> None:
        """Step a unit's parameters whose gradients are complete, and free these."""
        optimizer, parameters = self._optimizer(), unit.complete
        unit.complete = []
        del self._begun[unit]
        if optimizer is None:
            return
        if self._norms is not None:
            gradients = (each.grad for each in parameters)
            self._norms.append(torch.nn.utils.get_total_norm([each for each in gradients if each is not None]))
        groups = optimizer.param_groups
        try:
            optimizer.param_groups = [{**groups[number], "params": own} for number, own in unit.params.items()]
            step_without_hooks(optimizer)
        finally:
            optimizer.param_groups = groups
        for parameter in parameters:
            parameter.grad = None
        self._stepped.update(parameters)
        unit.count += len(parameters)

    def _release_all(self) -> None:
        with self._lock:
            for unit in list(self._begun):
                self._release(unit)

    def _finish(self, *_: Any) -> None:
        """The optimizer's own step begins."""
        self._release_all()
        if self._order is not None and (optimizer := self._optimizer()) is not None:
            # What is behind the layers may have gradients at both ends of the backward.
            for own in self._order:
                self._units.update(dict.fromkeys(own, _unit(optimizer, own)))
            self._order = None
        for unit in dict.fromkeys(self._units.values()):
            unit.expected, unit.count = unit.count or unit.expected, 0
        self._stepped.clear()
        if self._norms is not None:
            self._norms.clear()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _units(
    trained: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], layers: Iterable[Iterable[torch.Tensor]]
) -> Iterator[list[torch.Tensor]]:
    """The trained parameters of each layer, and of what is before, between and behind the layers; each one that
    several layers share, or that is not the model's, by itself."""
    left, owners = dict.fromkeys(trained), dict[torch.Tensor, list[int]]()
    for number, layer in enumerate(layers):
        for parameter in layer:
            owners.setdefault(parameter, []).append(number)
    own = [each for each in parameters if each in left and len(owners.get(each, ())) < 2]
    for _, run in itertools.groupby(own, lambda each: owners.get(each)):
        unit = list(run)
        yield unit
        for parameter in unit:
            del left[parameter]
    yield from ([parameter] for parameter in left)


def _unit(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor]) -> _Unit:
    own, groups = set(parameters), dict(enumerate(group["params"] for group in optimizer.param_groups))
    if _is_bitsandbytes(optimizer):
        # Which knows parameters by their places: in those of others there is one without a gradient.
        absent = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        return _Unit(
            {at: [each if each in own else absent for each in group] for at, group in groups.items()}, len(own)
        )
    params = {at: [each for each in group if each in own] for at, group in groups.items()}
    return _Unit({at: group for at, group in params.items() if group}, len(own))


def _is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.optim.")
