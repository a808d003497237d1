"""Simulates a step's loss on fake tensors. The model's forward is one operator: its graphs count its memory."""

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from optimum_memopt.compat.torch import autocast_depth, set_autocast_depth, tensors_in
from optimum_memopt.engines.api.run import LossStep
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss, LossEvents
from optimum_memopt.engines.shared.forward_patch import TrainingForward
from optimum_memopt.engines.simulator.events import Event, bytes_during
from optimum_memopt.engines.simulator.live_run import BACKWARD
from optimum_memopt.engines.simulator.recorder import LiveRecorder
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.torch_compat.compiler_errors import line_with_place
from optimum_memopt.engines.torch_compat.trace_fixes import without_fixes
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.logs import get_logger

# Results of the forward with fewer bytes are not followed, such as the loss.
_SMALL = 512
# Maximum number of batch sizes whose losses are cached.
_MOST_LOSSES = 64
_FORWARD, _LOSS, _BACKWARD = "forward", "loss", "backward"


def eager_loss(
    model: torch.nn.Module,
    patch: TrainingForward,
    forward: Callable[..., Any],
    step: LossStep,
    inputs: Mapping[str, object],
) -> EagerLoss:
    """Returns the loss of a step, simulated for the batch of its first forward; arguments as in `LossSimulation`."""
    if step.unknown:
        return EagerLoss(step.name, unknown=step.unknown)
    try:
        simulation = LossSimulation(model, patch, forward, step, inputs)
        simulation({})
    except MemOptError as error:
        return EagerLoss(step.name, unknown=str(error))
    # The loss is user code, and the copied objects may be of user classes.
    except Exception as error:
        return EagerLoss(step.name, unknown=line_of(error))
    return EagerLoss(step.name, simulation)


class LossSimulation:
    """Simulates a step's loss once for each requested batch.

    Args:
        patch: the patch of the model's forward.
        forward: the forward of plain PyTorch; takes the tuple of positional arguments and the dict of keyword ones.
        inputs: keyword arguments of the model's first forward.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        patch: TrainingForward,
        forward: Callable[..., Any],
        step: LossStep,
        inputs: Mapping[str, object],
    ) -> None:
        self._model, self._patch, self._forward = weakref.ref(model), patch, forward
        # Drop the references to tensors with data.
        self._step, self._first = replace(step, inputs=None, arguments=((), {})), input_sizes(inputs)
        self._mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        given = step.inputs, step.arguments
        self._inputs, self._arguments = fake_tensors.fake_copy(given, self._mode, keeps_values=True)
        self._of_sizes = functools.lru_cache(_MOST_LOSSES)(self._run)

    def __call__(self, sizes: Mapping[str, int]) -> LossEvents:
        """Returns the events for a batch; a size that `sizes` does not name is the first batch's, or grows with it.

        Raises:
            MemOptError: the loss cannot be computed on tensors without data for the first batch.
        """
        other = {name: size for name, size in sizes.items() if self._first.get(name, size) != size}
        try:
            return self._of_sizes(frozenset(other.items()))
        except MemOptError as error:
            if not other:
                raise
            get_logger().debug(
                f"scaling the memory of {self._step.name} with the batch, since it cannot be simulated: {error}"
            )
            return self._of_sizes(frozenset()).scaled(math.prod(self._growth(other).values()))

    def _growth(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns by dimension, as `dim0`, the ratio of these sizes to the first batch's."""
        growth: dict[str, float] = {}
        for name, size in sizes.items():
            dim = name.rpartition("_")[2]
            growth[dim] = max(growth.get(dim, 0), size / self._first[name])
        return growth

    def _run(self, named: frozenset[tuple[str, int]]) -> LossEvents:
        model, sizes = self._model(), dict(named)
        if model is None:
            raise ReferenceError("the model whose loss is simulated was deleted")
        run = _Run(model, self._forward, self._mode)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_outside_of_autocast(next(model.parameters()).device.type))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            # The batch of a budget is only known while the model's forward is traced.
            stack.enter_context(without_fixes())
            stack.enter_context(self._step.prepared())
            stack.enter_context(fake_tensors.replaced(self._step.modules(), run.fakes_of))
            stack.enter_context(fake_tensors.run_as_eager())
            stack.enter_context(mock.patch.object(self._patch, "train", run.forward))
            stack.enter_context(self._mode)
            inputs = self._resized(self._inputs, sizes)
            try:
                return run.events(self._step, inputs, self._arguments)
            except MemOptError:
                raise
            except Exception as error:
                raise MemOptError(f"it cannot be run on tensors without data: {line_with_place(error)}") from error

    def _resized(self, inputs: Any, sizes: Mapping[str, int]) -> Any:
        """Returns the step's inputs resized to a batch of these sizes."""
        growth = self._growth(sizes)
        grown = {(name.rpartition("_")[2], self._first[name]): size for name, size in sizes.items()}

        def size_of(name: str, dim: str, size: int) -> int:
            if (key := f"{name}_{dim}") in sizes:
                return sizes[key]
            # An argument that the forward also takes grows only along with a size that it was equal to.
            own = size if key in self._first else math.ceil(size * growth.get(dim, 1))
            return grown.get((dim, size), own)

        def resized(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = [size_of(name, f"dim{dim}", size) for dim, size in enumerate(value.shape)]
            return value if shape == list(value.shape) else fake_tensors.tiled(value, shape, self._mode)

        if not isinstance(inputs, Mapping):
            return dynamo.tree_map(functools.partial(resized, ""), inputs)
        own = copy.copy(inputs) if isinstance(inputs, MutableMapping) else dict(inputs)
        own.update({name: dynamo.tree_map(functools.partial(resized, str(name)), each) for name, each in own.items()})
        return own


@contextlib.contextmanager
def _outside_of_autocast(device: str) -> Iterator[None]:
    """Turn autocast off, and make the next autocast context count as the outermost one, which frees its casts of
    parameters on exit. A simulated step begins outside of autocast, though the forward that requests it may run under
    autocast."""
    depth, is_on = autocast_depth(), torch.is_autocast_enabled(device)
    set_autocast_depth(0)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, is_on)
        set_autocast_depth(depth)


class _Mark(NamedTuple):
    """A moment of a step: the model's `call`-th forward, that forward's backward, or the start of the loss's
    backward."""

    kind: str
    call: int = 0


class _Run:
    """A run of one step on fake tensors."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], mode: fake_tensors.FakeTensorMode) -> None:
        self.recorder = LiveRecorder(model, reads_floats=True)
        self._forward, self._mode = forward, mode
        # Fake tensors of the modules, which exist before the step.
        self._fakes: list[torch.Tensor] = []
        self._calls = 0
        # Bytes of the last forward's outputs by storage number; and names of the storages of their gradients.
        self._returned: dict[int, int] = {}
        self._given: tuple[str, ...] = ()
        self._is_behind = False

    def fakes_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._fakes = fake_tensors.fakes_of(tensors, self._mode)
        return self._fakes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward as one operator."""
        self._calls += 1
        # Count the outputs of an earlier forward that the caller still holds.
        self.recorder.take_in(self._returned)
        self.recorder.mark(_Mark(_FORWARD, self._calls))
        with self.recorder.paused(), torch.no_grad():
            outputs, structure = dynamo.tree_flatten(self._forward(args, kwargs))
        places = [place for place, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
        with self.recorder.paused():
            # Not a parameter: its hooks would be called.
            anchor = torch.empty(0, requires_grad=True)
        given = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
        made = _Forward.apply(self, [outputs[place] for place in places], anchor, *given)
        self._returned = self.recorder.leave_out(made)
        for place, tensor in zip(places, made, strict=True):
            outputs[place] = tensor
        return dynamo.tree_unflatten(outputs, structure)

    def begin_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Mark the start of the model's own backward; from then on its graphs count the gradients."""
        if not self._is_behind:
            raise MemOptError("it calls backward itself")
        if not self._given:
            self._given = self.recorder.names_of(gradients)
        self.recorder.mark(_Mark(_BACKWARD, self._calls))

    def events(self, step: LossStep, inputs: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> LossEvents:
        recorder = self.recorder
        assert step.compute is not None
        with recorder:
            recorder.leave_out([*self._fakes, *tensors_in((inputs, arguments))])
            loss = step.compute(inputs, *arguments[0], **arguments[1])
            if not self._calls:
                raise MemOptError("it does not call the model's forward")
            recorder.begin(BACKWARD)
            self._is_behind = True
            recorder.mark(_Mark(_LOSS))
            recorder.take_in(self._returned)
            loss.backward()
        run = recorder.run()
        places = {mark: place for place, mark in reversed(run.marks)}
        begin = next((place for place, mark in run.marks if getattr(mark, "kind", "") == _BACKWARD), None)
        if begin is None:
            raise MemOptError("it passes no gradient to the model's outputs")
        first, last, loss_at = places[_Mark(_FORWARD, 1)], places[_Mark(_FORWARD, self._calls)], places[_Mark(_LOSS)]
        given, dropped_at = set(self._given), self._dropped_at(run.events[:loss_at])
        return LossEvents(
            tuple(run.between(0, last)),
            tuple(run.between(last, dropped_at)),
            (*run.between(loss_at, begin), Event("", frees=self._given)),
            tuple(
                event._replace(frees=tuple(name for name in event.frees if name not in given))
                for event in run.between(begin, len(run.events))
            ),
            tuple(run.between(dropped_at, loss_at)),
            bytes_during(run.between(0, first))[1],
        )

    def _dropped_at(self, events: Sequence[Event]) -> int:
        """Returns the number of the events after which the loss holds none of the forward's results, except for small
        ones: accelerate drops results in half precision once it has copied them to float32."""
        freed = {name: place for place, event in enumerate(events) for name in event.frees}
        places = (freed.get(str(number), len(events)) for number, size in self._returned.items() if size > _SMALL)
        return min(max(places, default=len(events)) + 1, len(events))


class _Forward(torch.autograd.Function):
    """The model's forward as a single autograd function, without its operators."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, likes: Sequence[torch.Tensor], anchor: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        with run.recorder.paused():
            # Not the tensors themselves: the model may not save them.
            ctx.given = [torch.empty_like(each) for each in given]
            made = tuple(torch.empty_like(each) for each in likes)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.run.begin_backward([each for each in gradients if each is not None])
        return (None, None, None, *ctx.given)
