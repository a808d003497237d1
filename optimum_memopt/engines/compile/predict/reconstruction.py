"""A step that ran out of memory, run again on tensors without data: in plain PyTorch, or as the engine's graphs; and
the tensors that it held."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from optimum_memopt.engines.api.explanations import BACKWARD, FailedStep, Moment, Part, Place, TensorLike
from optimum_memopt.engines.api.predictions import CATEGORIES, EagerSettings
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.capture.capture import Capture, chosen_by
from optimum_memopt.engines.compile.capture.traced_graph import TraceSpec
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.costs.times import costs_of
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.symbols import is_rows, larger_sizes
from optimum_memopt.engines.compile.loss.decide import LossMode
from optimum_memopt.engines.compile.memory.composition import StepEvents
from optimum_memopt.engines.compile.memory.events import bytes_during, held_before
from optimum_memopt.engines.compile.memory.footprint import groups
from optimum_memopt.engines.compile.memory.live import LiveRun
from optimum_memopt.engines.compile.options import AUTO
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.predict.live_step import run_micro_batches
from optimum_memopt.engines.compile.torch_compat import fake_tensors, kernels
from optimum_memopt.logs import only_warnings


@dataclass(frozen=True)
class Point:
    """An operator of a step, by the index of its event: bytes of all graphs before it allocates, and while it runs."""

    index: int
    before: int
    during: int


@dataclass(frozen=True)
class Reconstruction:
    """The step that failed, as it would have run with enough memory.

    Attributes:
        step: its events.
        modules: paths of modules, by operator.
        activations: bytes of a forward and its backward with one of n parts of the rows of the run's largest batch.
        rows: sizes that these rows are.
        untrained: names of parameters that require a gradient and get none.
        is_exact: the events are all that the step holds.
        begin: place of the step's first event in its recording.
        forward: of the engine; None for plain PyTorch.
        shows_layers: each operator is of the layer that it names.
    """

    step: StepEvents
    modules: Mapping[str, str]
    activations: Callable[[int], int]
    rows: Sequence[int]
    untrained: Collection[str]
    is_exact: bool
    begin: int = 0
    forward: CapturedForward | None = None
    shows_layers: bool = True

    @property
    def chunks_loss(self) -> bool:
        return self.forward is not None and self.forward.chunks_loss

    def moment(self, place: Place, held: int, requested: int | None) -> tuple[Moment, Point]:
        """Where the allocation failed."""
        points = self._points(place.phase == BACKWARD)
        named = [point for point in points if place.node and self._node(point) == place.node]
        if not named and place.module:
            points = [point for point in points if self.modules.get(self._node(point)) == place.module] or points
        point = named[0] if named else _likeliest(points, held, requested)
        event = self.step.events[point.index]
        return Moment(place.phase, self._layer(event.layer) or place.module, event.kind, bool(named)), point

    def parts(self, point: Point) -> list[Part]:
        """The storages that the graphs hold just before an operator allocates, by category."""
        held = held_before(self.step.events[: point.index]).values()
        found = groups(storage if self.shows_layers else storage._replace(layer="", module="") for storage in held)
        found.sort(key=lambda group: -group.bytes)
        of = {category: tuple(each for each in found if each.category == category) for category in CATEGORIES}
        return [Part(category, sum(each.bytes for each in own), own) for category, own in of.items() if own]

    def _layer(self, layer: str) -> str:
        """Empty where a graph runs for several layers, whose operators have the first one's path."""
        return layer if self.shows_layers else ""

    def _node(self, point: Point) -> str:
        return self.step.events[point.index].operator

    def _points(self, in_backward: bool) -> list[Point]:
        during, _ = bytes_during(self.step.events)
        return [
            Point(index, size - event.workspace - sum(storage.bytes for storage in event.allocates), size)
            for index, (event, size) in enumerate(zip(self.step.events, during, strict=True))
            if event.operator and (index > self.step.dropped_at) == in_backward
        ]


def of_forward(forward: CapturedForward, failed: FailedStep) -> Reconstruction:
    """The engine's run."""
    largest = failed.run.largest_batch()

    def activations(times: int) -> int:
        # Of several micro-batches all but the first have gradients before them.
        frees = times > 1 or failed.run.gradient_accumulation or failed.run.releases_gradients
        return forward.events(forward.sizes_for(times, largest), frees).peak()

    tape = forward.tape
    return Reconstruction(
        forward.events(forward.first, failed.accumulated > 0 or failed.run.releases_gradients),
        {node: module for graph in forward.graphs for node, module in graph.modules.items()},
        cache(activations),
        forward.rows_with(largest),
        forward.untrained,
        # What a caller computes from the logits, and what runs between graphs, is in none of them.
        forward.is_whole and not failed.call.reader,
        forward=forward,
        shows_layers=all(call.layer or tape.runs[call.graph] == 1 for call in tape.calls),
    )


def of_plain_pytorch(failed: FailedStep) -> Reconstruction:
    """The run without an engine, activation checkpointing included.

    Raises:
        MemOptError: the model reads values of its tensors.
    """
    run = live_run(failed)
    trained, largest = run.trained, failed.run.largest_batch()

    def activations(times: int) -> int:
        accumulated = trained if times > 1 or failed.run.gradient_accumulation else frozenset()
        return live_run(failed, largest, times, accumulated).micro_batch.peak()

    step = run.micro_batch
    names = {name for name, parameter in failed.model.named_parameters() if parameter.requires_grad}
    return Reconstruction(
        step,
        {event.operator: module for event, module in zip(run.events, run.modules, strict=True) if event.operator},
        cache(activations),
        [size for name, size in _sizes(failed, largest).items() if is_rows(name)][:1],
        names - trained,
        not failed.call.reader,
        run.begin,
    )


def live_run(
    failed: FailedStep,
    largest: LargestBatch | None = None,
    times: int = 1,
    accumulated: Collection[str] | None = None,
    inspect_at: int = -1,
) -> LiveRun:
    """A forward and backward of plain PyTorch.

    Args:
        largest: a batch whose sizes count where they are larger.
        times: n: with an n-th of the rows.
        accumulated: names of the parameters that have gradients of earlier micro-batches; None: as in the step that
            failed.
        inspect_at: see `LiveRecorder`.
    """
    mode, fake = fake_tensors.fake_model(failed.model)
    if accumulated is None:
        accumulated = {name for name, parameter in failed.model.named_parameters() if parameter.grad is not None}
    sizes = _sizes(failed, largest)
    cuda = kernels.multiprocessors_of(next(failed.model.parameters()).device)
    kwargs = {
        name: _resized(name, value, sizes, times) if isinstance(value, TensorLike) else value
        for name, value in failed.call.kwargs.items()
    }
    settings = EagerSettings(keeps_outputs=bool(failed.call.reader))
    with only_warnings(), torch.enable_grad(), mode:
        args, inputs = without_data(failed.call.args), without_data(kwargs)
        return run_micro_batches(
            fake, inputs, failed.autocast, settings, cuda, args=args, accumulated=accumulated, inspect_at=inspect_at
        )


def _sizes(failed: FailedStep, largest: LargestBatch | None) -> dict[str, int]:
    """Sizes of the batch by name, as `input_ids_dim0`, raised to those of the largest."""
    sizes = {f"{name}_dim{dim}": s for name, like in failed.call.tensors.items() for dim, s in enumerate(like.shape)}
    return larger_sizes(sizes, {name: name for name in sizes}, largest)


def _resized(name: str, like: TensorLike, sizes: Mapping[str, int], times: int) -> TensorLike:
    shape = tuple(
        max(1, sizes[key] // times) if is_rows(key := f"{name}_dim{dim}") else sizes[key]
        for dim in range(len(like.shape))
    )
    if shape == like.shape:
        return like
    return replace(like, shape=shape, stride=torch.empty(shape, device="meta").stride())


def capture_failed(failed: FailedStep, producer: Producer, loss: str, unit: str = AUTO) -> CapturedForward:
    """The failed forward, traced on a copy of the model whose tensors have no data."""
    mode, fake = fake_tensors.fake_model(failed.model)
    device, autocast = next(failed.model.parameters()).device, failed.autocast
    compiler, _ = default_compiler(device.type)
    # What a plan lacks in this graph is no mistake of the user's here.
    spec = TraceSpec(compiler, loss=LossMode(loss), strict=False, unit=unit)

    def costs(graph: AnalyzedGraph) -> Costs:
        return costs_of(graph, device, compiler == "inductor", most=failed.held)

    with (
        only_warnings(),
        torch.autocast(device.type, autocast, enabled=autocast is not None),
        torch.enable_grad(),
        mode,
    ):
        args, inputs = without_data(failed.call.args), without_data(failed.call.kwargs)
        forward = Capture(fake, args, inputs, spec, chosen_by(producer), failed.call.reader).run(costs)
    # Else what passes between graphs is not known, and nor is what was held.
    joints = [graph.analyzed.joint for graph in forward.graphs]
    assert all(len(joint.gradients) == len(joint.inputs) for joint in joints)
    return forward


def without_data(given: Any) -> Any:
    """With tensors of the current mode for `TensorLike`, in containers too."""
    if isinstance(given, TensorLike):
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        if given.is_true:
            fake_tensors.with_mask(made, has_padding=False)
        return made.requires_grad_(given.requires_grad)
    if isinstance(given, Mapping):
        return {key: without_data(value) for key, value in given.items()}
    if isinstance(given, tuple | list) and type(given) in (tuple, list):
        return type(given)(map(without_data, given))
    # A cache or another object that a forward writes to is not the failed step's.
    return given if isinstance(given, Collection | int | float | bool | None) else copy.copy(given)


def _likeliest(points: Sequence[Point], held: int, requested: int | None) -> Point:
    wanted = held + (requested or 1)
    # The step did not get further than to the first operator with which this much is held.
    reached = next((point for point in points if point.during >= wanted), None)
    # Messages round to hundredths of their unit.
    as_large = [p for p in points if requested and abs(p.during - p.before - requested) <= 0.01 * requested]
    likely = [*as_large, reached or max(points, key=lambda point: point.during)]
    return min(likely, key=lambda point: abs(point.before - held))
