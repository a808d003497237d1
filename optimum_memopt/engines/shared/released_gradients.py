"""Released gradients: the optimizer steps in the backward, as soon as a layer's gradients are complete.

A backward computes the gradients of the last layer first, and only the optimizer reads them. So a layer's parameters
are stepped when the last of its gradients is complete, and the gradients are freed before the backward of the
preceding layer begins. A step then holds the gradients of one layer instead of the whole model. The update is the
optimizer's own, with its states, groups and current learning rates. Each parameter is stepped once per step, as it
would be after the backward, so the weights are bitwise equal. Parameters that are left when the optimizer's own `step`
is called, for example of a skipped layer, are stepped then.

Based on "How to save memory by fusing the optimizer step into the backward pass"
(https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html), which gives each parameter
its own optimizer. Here the single optimizer is kept, with its schedule and checkpoints, and steps one layer at a time.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.compat.torch import backward_pass, clipping_watched, scaling_watched, step_without_hooks
from optimum_memopt.engines.api.run import Run
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.logs import get_logger

if TYPE_CHECKING:
    from transformers import TrainingArguments

FLAG = "--memory_opt_release_gradients"
# Optimizers that update each parameter from its own gradient and states only.
_OF_TORCH = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
_OF_OTHERS = ("transformers.optimization.Adafactor",)
# Why a step needs all gradients at once, and the remedy, by the setting that causes it.
_REASONS = {
    "accumulation": ("gradients are held until the last micro-batch", "use larger micro-batches instead"),
    "clipping": ("clipping needs all gradients at once", "give --max_grad_norm 0"),
    "float16": ("a loss scaler reads all gradients before the optimizer's step", "train in bfloat16"),
    "ranks": ("ranks exchange gradients before the optimizer's step", "train on one device"),
}


def check_step(flag: str = FLAG, **given: str) -> None:
    """Refuse a step that needs all gradients at once.

    Args:
        flag: the flag that releases gradients, as the user gave it.
        given: for keys of `_REASONS`, the setting as the user gave it; empty if the step does not have it.

    Raises:
        MemOptError: one line with the first of the settings, and the reason.
    """
    for name, setting in given.items():
        reason, remedy = _REASONS[name]
        if setting:
            raise MemOptError(f"{flag} with {setting}: {reason}; {remedy}, or leave it out")


def check_arguments(args: "TrainingArguments") -> None:
    """Refuse Trainer arguments that need all gradients at once. Raises MemOptError."""
    steps, norm = args.gradient_accumulation_steps, args.max_grad_norm
    check_step(
        accumulation=f"--gradient_accumulation_steps {steps}" if steps > 1 else "",
        clipping=f"--max_grad_norm {norm} (Trainer's default is 1.0)" if norm else "",
        float16="--fp16" if args.fp16 else "",
        ranks=f"{args.world_size} processes" if args.world_size > 1 else "",
    )


def check_run(run: Run, **given: str) -> torch.optim.Optimizer:
    """Returns the optimizer of a run, without accelerate's wrapper.

    Args:
        given: as for `check_step`.

    Raises:
        MemOptError: the run has no optimizer, or one that may read several parameters together, or needs all
            gradients at once.
    """
    optimizer: Any = getattr(run.optimizer, "optimizer", run.optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MemOptError(f"{FLAG} needs the optimizer, to step it in the backward: optimize(…, optimizer=…)")
    check_step(accumulation="gradient_accumulation=True" if run.gradient_accumulation else "", **given)
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim") and kind.__name__ in _OF_TORCH
    is_known = is_torchs or _is_bitsandbytes(optimizer)
    if not is_known and f"{kind.__module__}.{kind.__qualname__}" not in _OF_OTHERS:
        raise MemOptError(
            f"{FLAG} with {excerpt(kind.__qualname__)}, which may read several parameters together; allowed: "
            f"torch.optim's {', '.join(_OF_TORCH)}, transformers' Adafactor, and bitsandbytes' optimizers"
        )
    return optimizer


@dataclass(eq=False)
class _Unit:
    """Parameters that are stepped together.

    Attributes:
        params: the parameters, by the index of their optimizer group.
        expected: expected number of gradients in a step.
        complete: parameters with complete gradients that are not stepped yet.
        count: number of parameters stepped in this step.
    """

    params: Mapping[int, list[torch.Tensor]]
    expected: int
    complete: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


class ReleasedGradients:
    """Steps an optimizer in the backward, from now until `stop`.

    Args:
        optimizer: optimizer returned by `check_run`, held weakly.
        parameters: the model's parameters, in its order.
        layers: the parameters of each layer.
        with_norm: whether `norm` is called between backward and step.
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
        # Units with parameters whose gradients are complete but not stepped yet.
        self._begun: dict[_Unit, None] = {}
        # Parameters in the order of their gradients in the first step, grouped by runs of one unit; None after it.
        self._order: list[list[torch.Tensor]] | None = []
        self._norms: list[torch.Tensor] | None = [] if with_norm else None
        self._stepped: set[torch.Tensor] = set()
        # If a model is split across devices, the backward uses one thread per device.
        self._lock = threading.RLock()
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        for own in _units(trained, parameters, layers):
            unit = _unit(optimizer, own)
            self._units.update(dict.fromkeys(own, unit))
        if not any(parameter.grad is not None for parameter in self._units):
            # bitsandbytes reads the positions of all parameters in its first step.
            step_without_hooks(optimizer)
        # Tensor hooks that hold this object strongly would keep the model alive.
        note, finish = weak_method(self._note), weak_method(self._finish)
        undo = contextlib.ExitStack()
        for each in self._units:
            undo.callback(each.register_post_accumulate_grad_hook(note).remove)
        undo.callback(optimizer.register_step_pre_hook(finish).remove)
        undo.callback(optimizer.register_step_post_hook(weak_method(self._note_own_step)).remove)
        undo.enter_context(clipping_watched(weak_method(self._warn_of_clipping)))
        undo.enter_context(scaling_watched(weak_method(self._note_scaled)))
        self._has_warned = self._has_warned_of_settings = self._is_asked = False
        # The last backward of a scaled loss.
        self._scaled = -1
        # Settings of the optimizer's groups when a unit was first released in this step; None before.
        self._settings: list[dict[str, Any]] | None = None
        self._stop = weakref.finalize(self, undo.close)
        self._stop.atexit = False
        get_logger().info(
            "gradients are released: the optimizer steps in the backward, so code that reads or clips gradients after "
            "it finds none"
        )

    def stop(self) -> None:
        """Stop releasing gradients: the optimizer's own step updates all parameters again."""
        self._stop()

    def norm(self, norm_of_others: Callable[[], torch.Tensor | float]) -> torch.Tensor:
        """Returns the norm of all gradients of the last backward.

        Args:
            norm_of_others: returns the norm of the gradients that are not released.
        """
        self._release_all()
        # Trainer computes this norm by clipping to infinity.
        self._is_asked = True
        try:
            others = torch.as_tensor(norm_of_others())
        finally:
            self._is_asked = False
        norms = [norm.to(others.device, torch.float32) for norm in (*(self._norms or ()), others)]
        return torch.linalg.vector_norm(torch.stack(norms))

    def _warn_of_clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        """Warn once of code that clips gradients after most of them were released."""
        left = {id(each.grad) for unit in self._begun for each in unit.complete}
        is_own = not gradients or any(id(each) in left for each in gradients)
        if is_own and self._stepped and not (self._has_warned or self._is_asked):
            self._has_warned = True
            get_logger().warning(
                f"clipping does not reach the gradients that {FLAG} has released: their parameters were stepped in "
                "the backward; remove the call, or leave the flag out"
            )

    def _note_scaled(self, backward: int) -> None:
        self._scaled = backward

    def _note(self, parameter: torch.Tensor) -> None:
        """Record that a parameter's gradient is complete, and release the units that are done."""
        if self._scaled >= 0 and self._scaled == backward_pass():
            check_step(float16="a GradScaler")
        with self._lock:
            unit = self._units[parameter]
            if parameter in self._stepped or any(parameter is each for each in unit.complete):
                raise MemOptError(
                    f"{FLAG}: a gradient of shape {tuple(parameter.shape)} was computed twice before the optimizer's "
                    "step: by several backwards, by a reentrant checkpoint, or after a backward that failed or whose "
                    "step was skipped; call optimizer.step() after each backward, or leave the flag out"
                )
            if self._order is not None:
                if not self._order or self._units[self._order[-1][-1]] is not unit:
                    self._order.append([])
                self._order[-1].append(parameter)
            # The backward of the following layer, which runs first, is over.
            for other in [each for each in self._begun if each is not unit]:
                self._release(other)
            unit.complete.append(parameter)
            self._begun[unit] = None
            if len(unit.complete) >= unit.expected:
                self._release(unit)

    def _release(self, unit: _Unit) -> None:
        """Step a unit's parameters with complete gradients, and free these gradients."""
        optimizer, parameters = self._optimizer(), unit.complete
        unit.complete = []
        del self._begun[unit]
        if optimizer is None:
            return
        if self._norms is not None:
            gradients = (each.grad for each in parameters)
            self._norms.append(torch.nn.utils.get_total_norm([each for each in gradients if each is not None]))
        groups = optimizer.param_groups
        if self._settings is None:
            self._settings = list(map(_settings, groups))
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
        """Release all pending units and reset the counts, before the optimizer's own step."""
        self._release_all()
        self._warn_of_settings()
        self._begin()

    def _note_own_step(self, *_: Any) -> None:
        """Reset what the optimizer's own step has updated: with a closure, the backward runs within it."""
        if not (self._begun or self._stepped):
            return
        with self._lock:
            for unit in self._begun:
                unit.count += len(unit.complete)
                unit.complete = []
            self._begun.clear()
        self._begin()

    def _warn_of_settings(self) -> None:
        """Warn once of settings that have changed since the parameters were stepped with them."""
        before, optimizer = self._settings, self._optimizer()
        if before is None or optimizer is None or self._has_warned_of_settings:
            return
        pairs = zip(before, optimizer.param_groups, strict=False)
        changed = {name for one, group in pairs for name, value in one.items() if not _is_same(value, group.get(name))}
        if changed:
            self._has_warned_of_settings = True
            get_logger().warning(
                f"{', '.join(sorted(changed))} of the optimizer changed between backward and step, but {FLAG} has "
                "stepped parameters in the backward; change it before the backward, or leave the flag out"
            )

    def _begin(self) -> None:
        """Reset the counts for the next step."""
        self._settings = None
        if self._order is not None and (optimizer := self._optimizer()) is not None:
            # Parameters outside of the layers may get gradients at both ends of the backward.
            for own in self._order:
                self._units.update(dict.fromkeys(own, _unit(optimizer, own)))
            self._order = None
        for unit in dict.fromkeys(self._units.values()):
            unit.expected, unit.count = unit.count or unit.expected, 0
        self._stepped.clear()
        if self._norms is not None:
            self._norms.clear()


def _units(
    trained: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], layers: Iterable[Iterable[torch.Tensor]]
) -> Iterator[list[torch.Tensor]]:
    """Yields the trained parameters of each layer, and of the modules before, between and after the layers. Parameters
    that several layers share, or that are not the model's, are yielded one by one."""
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
        # bitsandbytes identifies parameters by position, so other parameters are replaced by one without a gradient.
        absent = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        return _Unit(
            {at: [each if each in own else absent for each in group] for at, group in groups.items()}, len(own)
        )
    params = {at: [each for each in group if each in own] for at, group in groups.items()}
    return _Unit({at: group for at, group in params.items() if group}, len(own))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _is_same(one: Any, other: Any) -> bool:
    # Tensors are compared by identity: reading their values would wait for the device.
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def _is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.optim.")
