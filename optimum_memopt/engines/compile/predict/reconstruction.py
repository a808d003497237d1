"""Re-runs a step that ran out of memory on tensors without data, in plain PyTorch or as the engine's graphs, and lists
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
from optimum_memopt.engines.compile.options import AUTO
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.simulator.events import StepEvents, bytes_during, groups, held_before
from optimum_memopt.engines.simulator.live_run import LiveRun
from optimum_memopt.engines.simulator.trainer_step import run_micro_batches
from optimum_memopt.engines.torch_compat import fake_tensors, kernels
from optimum_memopt.logs import only_warnings


@dataclass(frozen=True)
class Point:
    """An operator of a step by its event's index, with the bytes of all graphs before it allocates and while it
    runs."""

    index: int
    before: int
    during: int


@dataclass(frozen=True)
class Reconstruction:
    """The step that failed, as it would have run with enough memory.

    Attributes:
        step: events of the step.
        modules: module paths by operator.
        activations: returns the peak in bytes of a forward and its backward with 1/n of the rows of the run's largest
            batch, given n.
        rows: the sizes of that batch that count rows.
        untrained: names of parameters that require a gradient and get none.
        is_exact: the events cover everything that the step holds.
        begin: index of the step's first event in its recording.
        forward: the engine's forward; None for plain PyTorch.
        shows_layers: each operator belongs to the layer that it names.
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
        """Returns where the allocation failed, and the operator's point."""
        points = self._points(place.phase == BACKWARD)
        named = [point for point in points if place.node and self._node(point) == place.node]
        if not named and place.module:
            points = [point for point in points if self.modules.get(self._node(point)) == place.module] or points
        point = named[0] if named else _likeliest(points, held, requested)
        event = self.step.events[point.index]
        return Moment(place.phase, self._layer(event.layer) or place.module, event.kind, bool(named)), point

    def parts(self, point: Point) -> list[Part]:
        """Returns the storages that the graphs hold just before an operator allocates, by category."""
        held = held_before(self.step.events[: point.index]).values()
        found = groups(storage if self.shows_layers else storage._replace(layer="", module="") for storage in held)
        found.sort(key=lambda group: -group.bytes)
        of = {category: tuple(each for each in found if each.category == category) for category in CATEGORIES}
        return [Part(category, sum(each.bytes for each in own), own) for category, own in of.items() if own]

    def _layer(self, layer: str) -> str:
        """Returns the layer; empty if graphs run for several layers, since their operators name only the first one."""
        return layer if self.shows_layers else ""

    def _node(self, point: Point) -> str:
        return self.step.events[point.index].operator

    def _points(self, in_backward: bool) -> list[Point]:
        during, _ = bytes_during(self.step.events)
        return [
            Point(index, size - event.workspace - sum(storage.bytes for storage in event.allocates), size)
            for index, (event, size) in enumerate(zip(self.step.events, during, strict=True))
            if event.operator and (index > self.step.forward_end) == in_backward
        ]


def of_forward(forward: CapturedForward, failed: FailedStep) -> Reconstruction:
    """Returns the reconstruction of a forward that the engine ran."""
    largest = failed.run.largest_batch()

    def activations(times: int) -> int:
        # All micro-batches but the first find gradients of earlier ones.
        frees = times > 1 or failed.run.gradient_accumulation or failed.run.releases_gradients
        return forward.events(forward.sizes_for(times, largest), frees).peak()

    tape = forward.tape
    return Reconstruction(
        forward.events(forward.first, failed.accumulated > 0 or failed.run.releases_gradients),
        {node: module for graph in forward.graphs for node, module in graph.modules.items()},
        cache(activations),
        forward.rows_with(largest),
        forward.untrained,
        # The graphs contain neither what a caller computes from the logits nor what runs between graphs.
        forward.is_whole and not failed.call.reader,
        forward=forward,
        shows_layers=all(call.layer or tape.runs[call.graph] == 1 for call in tape.calls),
    )


def of_plain_pytorch(failed: FailedStep) -> Reconstruction:
    """Returns the reconstruction of a run without an engine, including activation checkpointing.

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
    """Run a forward and backward of plain PyTorch on tensors without data.

    Args:
        largest: raises the failed batch's sizes to those of this batch.
        times: divides the number of rows.
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
    """Returns the sizes of the batch by name, as `input_ids_dim0`, raised to those of the largest batch."""
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


def capture_failed(
    failed: FailedStep, producer: Producer, loss: str, unit: str = AUTO, compiler: str = ""
) -> CapturedForward:
    """Trace the failed forward on a copy of the model whose tensors have no data.

    Args:
        compiler: the compiler of its graphs; empty: the device's default.
    """
    mode, fake = fake_tensors.fake_model(failed.model)
    device, autocast = next(failed.model.parameters()).device, failed.autocast
    compiler = compiler or default_compiler(device.type)[0]
    # Not strict: a plan that does not match this graph is not the user's mistake here.
    spec = TraceSpec(compiler, loss=LossMode(loss), strict=False, unit=unit, accumulates=failed.accumulation > 1)

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
    # Unless the backward has an output for each input, the tensors passed between graphs are unknown, and so is what
    # was held.
    joints = [graph.analyzed.joint for graph in forward.graphs]
    assert all(len(joint.gradients) == len(joint.inputs) for joint in joints)
    return forward


def without_data(given: Any) -> Any:
    """Returns the value with each `TensorLike` replaced by a tensor of the current mode, in containers too."""
    if isinstance(given, TensorLike):
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        if given.is_true:
            fake_tensors.with_mask(made, has_padding=False)
        return made.requires_grad_(given.requires_grad)
    if isinstance(given, Mapping):
        return {key: without_data(value) for key, value in given.items()}
    if isinstance(given, tuple | list) and type(given) in (tuple, list):
        return type(given)(map(without_data, given))
    # Copy a cache or another object that a forward writes to: the failed step's own must not change.
    return given if isinstance(given, Collection | int | float | bool | None) else copy.copy(given)


def _likeliest(points: Sequence[Point], held: int, requested: int | None) -> Point:
    wanted = held + (requested or 1)
    # The step cannot have passed the first operator at which this much is held.
    reached = next((point for point in points if point.during >= wanted), None)
    # Error messages round to hundredths of their unit.
    as_large = [p for p in points if requested and abs(p.during - p.before - requested) <= 0.01 * requested]
    likely = [*as_large, reached or max(points, key=lambda point: point.during)]
    return min(likely, key=lambda point: abs(point.before - held))
