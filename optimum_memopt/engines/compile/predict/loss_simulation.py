"""A step's loss on tensors without data, with the model's forward as one operator, whose memory its graphs count."""

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

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.engines.api.run import LossStep
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss, LossEvents
from optimum_memopt.engines.compile.memory.events import Event, bytes_during
from optimum_memopt.engines.compile.memory.live import BACKWARD, LiveRecorder
from optimum_memopt.engines.compile.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.compile.torch_compat.compiler_errors import line_with_place
from optimum_memopt.engines.shared.forward_patch import TrainingForward
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.logs import get_logger

# Batches of different sizes whose losses are kept.
_MOST_LOSSES = 64
_FORWARD, _LOSS, _BACKWARD = "forward", "loss", "backward"


def eager_loss(
    model: torch.nn.Module,
    patch: TrainingForward,
    forward: Callable[..., Any],
    step: LossStep,
    inputs: Mapping[str, object],
) -> EagerLoss:
    """Returns the loss of a step, simulated for the batch of its first forward; arguments as of `LossSimulation`."""
    if step.unknown:
        return EagerLoss(step.name, unknown=step.unknown)
    try:
        simulation = LossSimulation(model, patch, forward, step, inputs)
        simulation({})
    except MemOptError as error:
        return EagerLoss(step.name, unknown=str(error))
    # The loss is the user's own code, and so may be what is copied.
    except Exception as error:
        return EagerLoss(step.name, unknown=line_of(error))
    return EagerLoss(step.name, simulation)


class LossSimulation:
    """Runs a step's loss for each batch that is asked for, once.

    Args:
        patch: of the model's forward.
        forward: plain PyTorch's, of positional arguments and those by keyword.
        inputs: of the model's first forward.
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
        # Keeps no tensors with data.
        self._step, self._first = replace(step, inputs=None, arguments=((), {})), input_sizes(inputs)
        self._mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        given = step.inputs, step.arguments
        self._inputs, self._arguments = fake_tensors.fake_copy(given, self._mode, keeps_values=True)
        self._of_sizes = functools.lru_cache(_MOST_LOSSES)(self._run)

    def __call__(self, sizes: Mapping[str, int]) -> LossEvents:
        """The events with a batch; what `sizes` does not name is as large as in the first batch, or grows with it.

        Raises:
            MemOptError: the loss cannot be computed on tensors without data for the first batch.
        """
        other = {name: size for name, size in sizes.items() if self._first.get(name, size) != size}
        try:
            return self._of_sizes(frozenset(other.items()))
        except MemOptError as error:
            if not other:
                raise
            get_logger().debug(f"{self._step.name} for another batch is counted as growing with it: {error}")
            return self._of_sizes(frozenset()).scaled(math.prod(self._growth(other).values()))

    def _growth(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """By dimension, `dim0`, how many times as large a batch is."""
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
        """The step's inputs in a batch of these sizes."""
        growth = self._growth(sizes)
        grown = {(name.rpartition("_")[2], self._first[name]): size for name, size in sizes.items()}

        def size_of(name: str, dim: str, size: int) -> int:
            if (key := f"{name}_{dim}") in sizes:
                return sizes[key]
            # What the forward is given, too, grows only with a size that it was equal to.
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
    """Turns autocast off, and has the next context count as the outermost one, which frees its casts of parameters
    where it ends. A simulated step begins so, though the forward that asks for it may run under autocast."""
    depth, is_on = torch.autocast_increment_nesting() - 1, torch.is_autocast_enabled(device)
    while torch.autocast_decrement_nesting():
        pass
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, is_on)
        for _ in range(depth):
            torch.autocast_increment_nesting()


class _Mark(NamedTuple):
    """A moment of a step: the model's forward of this number, or its backward, or the begin of that of the loss."""

    kind: str
    call: int = 0


class _Run:
    """One step on fake tensors."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], mode: fake_tensors.FakeTensorMode) -> None:
        self.recorder = LiveRecorder(model, reads_floats=True)
        self._forward, self._mode = forward, mode
        # Of modules, which are there before the step.
        self._fakes: list[torch.Tensor] = []
        self._calls = 0
        # Bytes of what the last forward has returned, by number; and storages of the gradients of the last one.
        self._returned: dict[int, int] = {}
        self._given: tuple[str, ...] = ()
        self._is_behind = False

    def fakes_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._fakes = fake_tensors.fakes_of(tensors, self._mode)
        return self._fakes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward as one operator."""
        self._calls += 1
        # What the caller still holds of an earlier one.
        self.recorder.take_in(self._returned)
        self.recorder.mark(_Mark(_FORWARD, self._calls))
        with self.recorder.paused(), torch.no_grad():
            outputs, structure = dynamo.tree_flatten(self._forward(args, kwargs))
        places = [place for place, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
        with self.recorder.paused():
            # Not a parameter, whose hooks would be called.
            anchor = torch.empty(0, requires_grad=True)
        given = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
        made = _Forward.apply(self, [outputs[place] for place in places], anchor, *given)
        sizes = [tensor.untyped_storage().nbytes() for tensor in made]
        self._returned = dict(zip(self.recorder.leave_out(made), sizes, strict=True))
        for place, tensor in zip(places, made, strict=True):
            outputs[place] = tensor
        return dynamo.tree_unflatten(outputs, structure)

    def begin_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """The model's own backward begins; its graphs count its gradients from then on."""
        if not self._is_behind:
            raise MemOptError("it calls backward by itself")
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
            raise MemOptError("no gradient comes from it to the model's outputs")
        first, last, loss_at = places[_Mark(_FORWARD, 1)], places[_Mark(_FORWARD, self._calls)], places[_Mark(_LOSS)]
        given = set(self._given)
        return LossEvents(
            tuple(run.between(0, last)),
            tuple(run.between(last, loss_at)),
            (*run.between(loss_at, begin), Event("", frees=self._given)),
            tuple(
                event._replace(frees=tuple(name for name in event.frees if name not in given))
                for event in run.between(begin, len(run.events))
            ),
            bytes_during(run.between(0, first))[1],
        )


class _Forward(torch.autograd.Function):
    """The model's forward, without what is in it."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, likes: Sequence[torch.Tensor], anchor: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        with run.recorder.paused():
            # Not the tensors themselves, which the model may not save.
            ctx.given = [torch.empty_like(each) for each in given]
            made = tuple(torch.empty_like(each) for each in likes)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.run.begin_backward([each for each in gradients if each is not None])
        return (None, None, None, *ctx.given)
