"""Predicts steps with any micro-batch under the plans that `memopt advise` compares, from one trace for each loss."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch

from optimum_memopt.engines.api.predictions import (
    BANDWIDTH,
    COPIES,
    LAUNCHES,
    EagerSettings,
    ModelOfRun,
    PredictedStep,
    Technique,
    Workload,
)
from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.capture.capture import Capture, chosen_by
from optimum_memopt.engines.compile.capture.ranks import planned_ranks, shard
from optimum_memopt.engines.compile.capture.traced_graph import TraceSpec
from optimum_memopt.engines.compile.costs import times
from optimum_memopt.engines.compile.costs.costs import seconds_by_bound
from optimum_memopt.engines.compile.costs.times import OperatorTimes, UpdateTimes
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.loss.decide import LossMode, may_have_vocabulary
from optimum_memopt.engines.compile.memory.footprint import (
    Footprint,
    StepContext,
    step_around,
    trainable_of,
    weights_by_dtype,
)
from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, simulate, simulate_everything_saved
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem
from optimum_memopt.engines.compile.options import AUTO, PLAIN
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.partition.producers.compressed import Compressed
from optimum_memopt.engines.compile.partition.producers.producer import TorchDefault
from optimum_memopt.engines.compile.partition.producers.stated import FromLevel
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, build
from optimum_memopt.engines.compile.predict.table import collective_lines
from optimum_memopt.engines.compile.solver.offload import with_offload
from optimum_memopt.engines.compile.solver.solver import Plan
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.simulator.events import StepEvents, interpolated
from optimum_memopt.engines.simulator.live_run import LiveRun
from optimum_memopt.engines.simulator.standins import eager_standin, multiprocessors, traced_for
from optimum_memopt.engines.simulator.trainer_step import run_micro_batches
from optimum_memopt.engines.simulator.work import Work, work_between
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.torch_compat.attention import without_padding
from optimum_memopt.engines.torch_compat.compiler_errors import line_with_place
from optimum_memopt.engines.torch_compat.trace_fixes import one_at_a_time
from optimum_memopt.errors import MemOptError
from optimum_memopt.generators import preserved_generators
from optimum_memopt.logs import only_warnings, watched
from optimum_memopt.memory.capacity import capacity
from optimum_memopt.memory.optimizers import DEFAULT, OptimizerMemory, PlannedOptimizer, is_known, planned_like
from optimum_memopt.sizes import Budget
from optimum_memopt.step_settings import StepSpec

_NO_PLAN, _LEVEL_1, _BUDGET = "no plan", "level 1", "budget"
# The same plans with activations saved in fp8, by the names of the exact ones.
_INEXACT = {_NO_PLAN: "no plan in fp8", _LEVEL_1: "level 1 in fp8", _BUDGET: "budget with fp8"}
# Plans that do not depend on a budget, in the order of the graphs' choices.
_FIXED = (_NO_PLAN, _LEVEL_1, _INEXACT[_NO_PLAN], _INEXACT[_LEVEL_1])
_BUDGETS = {_BUDGET: _FIXED[:2], _INEXACT[_BUDGET]: _FIXED}
_REMARK = "in fp8: the loss is exact, gradients are not (docs/compress.md)"
# Plain PyTorch: names of techniques, and n if transformers checkpoints every nth layer (0: no checkpointing).
_PLAIN = {
    "plain PyTorch": 0,
    "Trainer's checkpointing, every layer": 1,
    **{f"Trainer's checkpointing, every {every} layers": every for every in (2, 4)},
}
# Rows of the batch that answers questions with the same answer for any batch.
_REFERENCE = 8
# Rows of the traced batch, for each loss: a chunked loss pays with many rows. The second number is used if the first
# one is also another size of the batch, which torch would give the same symbol.
_ROWS = {PLAIN: (7, 11), AUTO: (61, 67)}
_FEW = _ROWS[PLAIN][0]
# Rows of the two batches that are run in plain PyTorch.
_TWO_BATCHES = (2, 6)


@dataclass(frozen=True)
class _Batch:
    """A step of the compile engine with one batch.

    Attributes:
        forward: the forward's problem, with conversions if plans may compress.
        times: the times of the problem's nodes.
    """

    step: StepModel
    forward: TapeProblem
    times: OperatorTimes

    @property
    def problem(self) -> Problem:
        return self.forward.problem


class ForwardSteps:
    """Predicts the steps of one traced forward.

    Args:
        forward: computes the loss as the model does, or in chunks; each graph has torch's own choice and that of level
            1, and with conversions both in fp8.
        step: context of the graphs, with a batch of one row.
        tokens: tokens of a row; 0: as many as were traced.
        times: returns the times of each graph and of its conversions, for a batch of n rows.
        plain: see `_plain_steps`.
        releases: the engine's plans release gradients in the backward, and never accumulate them.
    """

    def __init__(
        self,
        forward: CapturedForward,
        step: StepContext,
        tokens: int,
        times: Callable[[int], Sequence["_GraphTimes"]],
        plain: Callable[[int, int, bool], "_PlainStep"],
        releases: bool = False,
    ) -> None:
        self._forward, self._context, self._tokens, self._releases = forward, step, tokens, releases
        self._times, self._plain = times, plain
        self._batch = cache(self._new_batch)
        self._simulation = cache(self._simulate)
        self._within_budget = cache(self._solve)

    def within(self, budget: int) -> "ForwardSteps":
        """Returns the same graphs with another budget, in bytes."""
        return self._around(replace(self._context, limit=budget))

    def with_optimizer(self, optimizer: OptimizerMemory) -> "ForwardSteps":
        """Returns the same graphs with the memory of another optimizer."""
        fixed = replace(self._context.fixed, optimizer=optimizer.states, step=optimizer.temporaries)
        return self._around(replace(self._context, fixed=fixed))

    def _around(self, step: StepContext) -> "ForwardSteps":
        """Returns the same graphs in another step context; shares the cached results that do not depend on it."""
        other = copy.copy(self)
        vars(other).update(_context=step, _within_budget=cache(partial(ForwardSteps._solve, other)))
        return other

    @property
    def layers(self) -> int:
        """Returns the number of layers in the forward."""
        return len(_layers_of(self._batch(_REFERENCE, 1, False).problem))

    @property
    def costs(self) -> str:
        """Returns the source of the operator times."""
        return self._batch(_REFERENCE, 1, False).times.source

    def fits(self, plan: str, rows: int, accumulation: int) -> bool:
        """True if the peak is within the budget."""
        # A budget's plan is never worse than the fixed plans, and takes longer to find.
        fixed_plans = _BUDGETS.get(plan, (plan,))
        if any(
            self._is_within(name, self._activations(name, rows, accumulation), rows, accumulation)
            for name in fixed_plans
        ):
            return True
        if plan not in _BUDGETS:
            return False
        lowest = self._batch(rows, accumulation, False).step.solver.lowest
        is_within = self._is_within(plan, lowest, rows, accumulation)
        others = self._context.link > 0 or plan != _BUDGET
        return is_within or (others and self._within_budget(plan, rows, accumulation) is not None)

    def lowest(self, plan: str, accumulation: int) -> int:
        """Returns the peak with a micro-batch of one row, in bytes."""
        if plan in _BUDGETS:
            activations = self._batch(1, accumulation, False).step.solver.lowest
            if plan != _BUDGET:
                fixed = (self._activations(each, 1, accumulation) for each in _BUDGETS[plan])
                activations = min(activations, *fixed)
        else:
            activations = self._activations(plan, 1, accumulation)
        return self._footprint(plan, 1, accumulation, activations).peak

    def step(self, plan: str, rows: int, accumulation: int, update: UpdateTimes) -> PredictedStep:
        """Predict a step; falls back to level 1 if no plan fits the budget."""
        batch = self._batch(rows, accumulation, plan in _INEXACT.values())
        solved = self._within_budget(plan, rows, accumulation) if plan in _BUDGETS else None
        if solved is not None:
            compression = batch.step.compression
            if compression is None:
                simulation = simulate(batch.problem, frozenset(solved.saved))
            else:
                simulation = compression.simulated(batch.step.problem, solved)
            peak, stall, host_bytes = solved.peak, solved.stall, solved.host_bytes
        else:
            plan = {_BUDGET: _LEVEL_1, _INEXACT[_BUDGET]: _INEXACT[_LEVEL_1]}.get(plan, plan)
            if plan in _PLAIN and (step := self._plain_step(plan, rows, accumulation, update)) is not None:
                return step
            simulation = self._simulation(plan, rows, accumulation)
            peak, stall, host_bytes = self._activations(plan, rows, accumulation), 0.0, 0
        seconds = batch.times.by_bound((*simulation.forward.order, *simulation.backward.order))
        for bound, more in ((LAUNCHES, batch.times.call), (COPIES, stall)):
            if more:
                seconds[bound] = seconds.get(bound, 0.0) + more
        return PredictedStep(
            self._footprint(plan, rows, accumulation, peak).peak,
            seconds,
            update.accumulating,
            update.optimizer,
            sum(batch.times.by_bound(simulation.recomputed).values()),
            host_bytes,
        )

    def _plain_step(self, plan: str, rows: int, accumulation: int, update: UpdateTimes) -> PredictedStep | None:
        """Predict a step of plain PyTorch at the rates of a named device; None if no device is named."""
        step, without = (self._plain(every, rows, accumulation > 1) for every in (_PLAIN[plan], 0))
        if step.seconds is None or without.seconds is None:
            return None
        return PredictedStep(
            self._footprint(plan, rows, accumulation, step.peak).peak,
            step.seconds,
            update.accumulating,
            update.optimizer,
            max(0.0, sum(step.seconds.values()) - sum(without.seconds.values())),
        )

    def _footprint(self, plan: str, rows: int, accumulation: int, activations: int) -> Footprint:
        fixed = self._context.fixed
        if self._releases and plan not in _PLAIN:
            fixed = fixed.with_released_gradients()
        # Trainer holds all micro-batches of an optimizer step on the device.
        return replace(
            fixed,
            batch=fixed.batch * rows * accumulation,
            activations=activations,
            accumulated=fixed.accumulated if accumulation > 1 else 0,
        )

    def _is_within(self, plan: str, activations: int, rows: int, accumulation: int) -> bool:
        return self._footprint(plan, rows, accumulation, activations).peak <= self._context.limit

    def _activations(self, plan: str, rows: int, accumulation: int) -> int:
        if plan in _PLAIN:
            return self._plain(_PLAIN[plan], rows, accumulation > 1).peak
        return self._simulation(plan, rows, accumulation).peak

    def _solve(self, plan: str, rows: int, accumulation: int) -> Plan | None:
        is_inexact = plan in _INEXACT.values()
        solver = self._batch(rows, accumulation, is_inexact).step.solver
        plain = self._simulation(_NO_PLAN, rows, accumulation)
        if self._is_within(_BUDGET, plain.peak, rows, accumulation):
            return solver.solver.plan(plain)
        allowed = self._footprint(_BUDGET, rows, accumulation, 0).activations_within(self._context.limit)
        # Skip the long search for recompute that might still fit: most candidate batches do not fit.
        if solver.lowest <= allowed:
            return solver.cheapest(allowed)
        if is_inexact and (compressing := solver.compressing(None, allowed)) is not None:
            return compressing
        return None if solver.host is None else with_offload(solver.solver, None, allowed, solver.host)

    def _simulate(self, plan: str, rows: int, accumulation: int) -> GraphSimulation:
        batch = self._batch(rows, accumulation, plan in _INEXACT.values())
        if plan in _PLAIN:
            return _checkpointed(batch.problem, _PLAIN[plan])
        plans = [graph.plans[_FIXED.index(plan)] for graph in self._forward.graphs]
        return batch.step.simulated(plans, batch.forward)

    def _new_batch(self, rows: int, accumulation: int, is_inexact: bool) -> _Batch:
        of_graphs, forward = self._times(rows), self._forward
        times = [own.operators for own in of_graphs]
        context = replace(self._context, fixed=self._footprint(_BUDGET, rows, accumulation, 0))
        priced = forward.priced([own.seconds for own in times])
        conversions = [graph.conversions for graph in priced.graphs]
        graphs = zip(priced.graphs, conversions, of_graphs, strict=True)
        priced = replace(
            priced,
            graphs=tuple(
                replace(graph, conversions=known.priced(own.conversions) if is_inexact and known is not None else None)
                for graph, known, own in graphs
            ),
        )
        step = StepModel(priced, context, forward.sizes_of(rows, self._tokens))
        problem = step.problem if step.compression is None else step.compression.forward
        bounds = tuple(_bound_of(times[problem.graphs[run]], local) for run, local in problem.places)
        calls = sum(times[graph].call for graph in problem.graphs)
        return _Batch(step, problem, OperatorTimes(problem.problem.seconds, bounds, times[0].source, calls))


def _bound_of(times: OperatorTimes, local: int) -> str:
    """Returns what bounds a node of a graph; conversions, numbered after the graph's own nodes, move bytes."""
    if local < 0:
        return ""
    return times.bounds[local] if local < len(times.bounds) - 1 else BANDWIDTH


class _GraphTimes(NamedTuple):
    """The times of a graph's nodes, and the seconds of its conversions' operators."""

    operators: OperatorTimes
    conversions: tuple[float, ...]


def _layers_of(problem: Problem) -> tuple[str, ...]:
    """Returns the paths of the layers in the order in which the forward runs them."""
    layers = zip(problem.layers, problem.is_forward, strict=True)
    return tuple(dict.fromkeys(layer for layer, is_forward in layers if layer and is_forward))


def _checkpointed(problem: Problem, every: int) -> GraphSimulation:
    """Simulate transformers' activation checkpointing of every nth layer (0: of none), in the order of this engine's
    recompute: its operators take as long.

    The input of a checkpointed layer is saved; everything in the layer runs again, including random draws, whose state
    is restored (`torch.utils.checkpoint`). The last layer is no exception. The choice of layers is that of
    `every_n_layers` in `PreTrainedModel.activation_checkpointing_enable` (transformers 5.23).
    """
    chosen = set(_layers_of(problem)[::every] if every else ())
    # A kept node that is a view is an argument from another run of the tape, not a random draw.
    is_kept = zip(problem.is_kept, problem.is_view, problem.layers, strict=True)
    kept = tuple(is_one and (is_given or layer not in chosen) for is_one, is_given, layer in is_kept)
    runs_again = replace(problem, is_kept=kept)
    saved = {node for node in problem.activations if problem.layers[node] not in chosen}
    return simulate(runs_again, runs_again.closure(saved | problem.boundaries))


@dataclass(frozen=True, eq=False)
class MicroBatchPredictor:
    """A `StepPredictor` for any micro-batch.

    Attributes:
        tokens: tokens of a row; 0 if rows have no tokens.
        graphs: steps of the traced forwards, by whether the loss is chunked.
        compares: offer other plans beside that of the budget, with either loss.
        ranks: number of ranks that shard parameters, gradients and states; plain PyTorch is simulated on one device.
        releases: see `ForwardSteps`.
        optimizers: memory of the known optimizers, that of the step first.
        compresses: offer plans in fp8 too.
    """

    model: str
    weights: str
    device: str
    budget: int
    budget_text: str
    tokens: int
    graphs: Mapping[bool, ForwardSteps]
    update: UpdateTimes
    compares: bool = True
    ranks: int = 1
    remarks: tuple[str, ...] = ()
    optimizers: tuple[OptimizerMemory, ...] = ()
    releases: bool = False
    compresses: bool = False

    def within(self, budget: int) -> "MicroBatchPredictor":
        """Returns the same model with another budget, in bytes, from the same traces."""
        graphs = {chunks: graph.within(budget) for chunks, graph in self.graphs.items()}
        return replace(self, budget=budget, budget_text=f"{budget // 2**20}MiB", graphs=graphs)

    def with_optimizer(self, optimizer: OptimizerMemory) -> "MicroBatchPredictor":
        graphs = {chunks: graph.with_optimizer(optimizer) for chunks, graph in self.graphs.items()}
        return replace(self, graphs=graphs)

    @property
    def costs(self) -> str:
        return self.graphs[False].costs

    @cached_property
    def plans(self) -> tuple[Technique, ...]:
        in_fp8 = ("--memory_opt_compress fp8",)
        within_budget: tuple[str, tuple[str, ...]] = _BUDGET, (f"--memory_opt_budget {self.budget_text}",)
        if not self.compares:
            name, flags = within_budget
            if self.compresses:
                name, flags = _INEXACT[name], (*flags, *in_fp8)
            return (Technique(name, flags, chunks_loss=True in self.graphs),)
        released = ("--memory_opt_release_gradients", "--max_grad_norm 0") if self.releases else ()
        layers = self.graphs[False].layers
        level_1: list[tuple[str, tuple[str, ...]]] = [(_LEVEL_1, ("--memory_opt_level 1",))] if layers else []
        own: list[tuple[str, tuple[str, ...]]] = [(_NO_PLAN, ()), *level_1, within_budget]
        if self.compresses:
            own += [(_INEXACT[name], (*flags, *in_fp8)) for name, flags in own]
        plain = _PLAIN if self.ranks == 1 else {}
        return (
            *(
                Technique(name, (*flags, *released), chunks, accumulates=not self.releases)
                for name, flags in own
                for chunks in self.graphs
            ),
            *(Technique(name, is_own=False) for name, every in plain.items() if every <= layers),
        )

    @one_at_a_time
    def fits(self, plan: Technique, rows: int, accumulation: int) -> bool:
        return self.graphs[plan.chunks_loss].fits(plan.name, rows, accumulation)

    @one_at_a_time
    def lowest(self, plan: Technique, accumulation: int) -> int:
        return self.graphs[plan.chunks_loss].lowest(plan.name, accumulation)

    @one_at_a_time
    def step(self, plan: Technique, rows: int, accumulation: int) -> PredictedStep:
        return self.graphs[plan.chunks_loss].step(plan.name, rows, accumulation, self.update)


@dataclass(frozen=True)
class _Case:
    """The settings of the predicted training.

    Attributes:
        make: returns a fake mode, and a model and a batch of n rows on its tensors.
        target: the device that steps are predicted for; None: the model's device.
        optimizer: the user's own; None: that of `spec`.
        values_at: returns `Workload.values` of a batch of n rows, which plain PyTorch reads.
    """

    make: Callable[[int], tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]]
    spec: StepSpec
    compiler: str
    target: Device | None
    autocast: torch.dtype | None
    budget: Budget
    tokens: int
    may_chunk: bool = True
    compares: bool = True
    compresses: bool = False
    optimizer: torch.optim.Optimizer | None = None
    values_at: Callable[[int], Mapping[str, torch.Tensor]] = lambda rows: {}


@one_at_a_time
def of_workload(workload: Workload, budget: Budget, spec: StepSpec, compresses: bool = False) -> MicroBatchPredictor:
    """Returns the predictor of a model that is built from its config, on fake tensors only, for any batch size.

    Args:
        compresses: plans may save activations in fp8.

    Raises:
        MemOptError: the device or optimizer is unknown, sizes are bad, or the model cannot be traced without data, or
            not for any batch.
    """
    planned = PlannedStep(workload, Selection(), spec)
    with planned_ranks(spec.fsdp, planned.here.type) as mesh:

        def make(rows: int) -> tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]:
            with dynamo.fake_tensors() as fake:
                model, batch = build(workload.with_rows(rows), planned.here)
                if mesh is not None:
                    shard(model, mesh, planned.autocast_dtype)
                return fake, model, batch

        case = _Case(
            make,
            spec,
            planned.compiled_by,
            planned.target,
            planned.cast_to,
            budget,
            workload.tokens,
            compresses=compresses,
            values_at=lambda rows: workload.with_rows(rows).values,
        )
        _, model, batch = make(_FEW)
        return _predictor(case, model, batch)


@one_at_a_time
def of_model(
    run: ModelOfRun, budget: Budget, spec: StepSpec, may_chunk: bool, compresses: bool = False
) -> MicroBatchPredictor:
    """Returns the predictor of a model that is about to train, on its device; the model is not changed.

    Args:
        spec: an optimizer whose memory is not known counts as AdamW.
        may_chunk: the loss may be chunked: the model's own loss is not requested, and its logits are not read.
        compresses: see `of_workload`.

    Raises:
        MemOptError: the model cannot be traced without data, or not for any batch.
    """
    compiled_by = spec.compiler or default_compiler(next(run.model.parameters()).device.type)[0]
    spec = spec if is_known(spec.optim) else replace(spec, optim=DEFAULT)
    autocast = getattr(torch, spec.autocast) if spec.autocast else None

    def make(rows: int) -> tuple[dynamo.FakeTensorMode, torch.nn.Module, Mapping[str, Any]]:
        fake, copied = fake_tensors.fake_model(run.model)
        return fake, copied.train(), fake_tensors.fake_copy(dict(run.make_batch(rows)), fake)

    case = _Case(
        make,
        spec,
        compiled_by,
        None,
        autocast,
        budget,
        run.tokens,
        may_chunk,
        compares=False,
        compresses=compresses,
        optimizer=run.optimizer,
    )
    return _predictor(case, run.model, run.make_batch(_FEW))


def _predictor(case: _Case, model: torch.nn.Module, batch: Mapping[str, Any]) -> MicroBatchPredictor:
    losses = (PLAIN, AUTO) if case.may_chunk and may_have_vocabulary(model) else (PLAIN,)
    traced = [_captured(case, loss) for loss in losses]
    captured = [forward for _, forward in traced]
    if case.spec.fsdp > 1:
        # FSDP2 sets the dtypes in which a parameter is gathered and reduced when the model first runs.
        model = traced[0][0]
    untrained, target, device = captured[0].untrained, case.target, next(model.parameters()).device
    is_on_cuda = device.type == "cuda" if target is None else target.cuda is not None
    if case.optimizer is None:
        optimizer = PlannedOptimizer.of_model(model, case.spec.optim, is_on_cuda)
    else:
        optimizer = planned_like(case.optimizer, is_on_cuda)
    run = Run(optimizer, gradient_accumulation=True)
    # On a CPU, tracing the model grows the process, as it does in training.
    step = step_around(model, batch, case.budget, run, target, untrained=untrained)
    step = replace(step, fixed=replace(step.fixed, batch=step.fixed.batch // _FEW))
    plain = _plain_steps(case)
    graphs = {
        forward.chunks_loss: ForwardSteps(
            forward, step, case.tokens, cache(_times(case, forward, device, step)), plain, case.spec.release_gradients
        )
        for forward in captured
    }
    trained = trainable_of(model, untrained)
    return MicroBatchPredictor(
        model=type(model).__name__,
        weights=" and ".join(weights_by_dtype(model)),
        device=device.type if target is None else target.name,
        budget=step.limit,
        budget_text=case.budget.text,
        tokens=case.tokens,
        graphs=graphs,
        update=times.update_times(trained, optimizer, device, target),
        compares=case.compares,
        ranks=case.spec.fsdp,
        remarks=(*collective_lines(captured[0].tape), *([_REMARK] if case.compresses else ())),
        optimizers=optimizer.compared(trained),
        releases=case.spec.release_gradients,
        compresses=case.compresses,
    )


@dataclass(frozen=True)
class _PlainStep:
    """A forward and its backward in plain PyTorch.

    Attributes:
        peak: peak in bytes over the memory held before.
        seconds: seconds by what bounds them; None without the rates of a named device.
    """

    peak: int
    seconds: Mapping[str, float] | None


def _plain_steps(case: _Case) -> Callable[[int, int, bool], _PlainStep]:
    """Returns a function that predicts a step of plain PyTorch: with Trainer's checkpointing of every nth layer (0: of
    none), for a batch of n rows, without or with gradients of earlier micro-batches.

    Two batches are run; for any other batch, the size of each storage and the work of each operator are interpolated.
    """

    @cache
    def run(every: int, rows: int, accumulated: frozenset[str]) -> LiveRun:
        fake, model, batch = case.make(rows)
        device = next(model.parameters()).device
        cuda = multiprocessors(case.target, device)
        settings = EagerSettings(every, case.spec.keep_outputs)
        values = case.values_at(rows)
        name = next(name for name, n in _PLAIN.items() if n == every)
        simulating = watched(f"simulating {name}, {rows} rows")
        with simulating, preserved_generators(), only_warnings(), eager_standin(case.target), fake:
            for name in values:
                fake_tensors.with_values(batch[name], values[name])
            return run_micro_batches(
                model, batch, case.autocast, settings, cuda, accumulated=accumulated, records_work=True
            )

    def between(every: int, rows: int, accumulated: frozenset[str]) -> tuple[StepEvents, Sequence[Work]]:
        low, high = (run(every, size, accumulated) for size in _TWO_BATCHES)
        small, large = _TWO_BATCHES
        share = (rows - small) / (large - small)
        step = interpolated(low.micro_batch, high.micro_batch, share)
        calls = work_between(low.calls, high.calls, share)
        if step is None or calls is None:
            exact = run(every, rows, accumulated)
            return exact.micro_batch, exact.calls
        return step, calls

    @cache
    def plain_step(every: int, rows: int, accumulates: bool) -> _PlainStep:
        alone = run(every, _TWO_BATCHES[0], frozenset())
        events, calls = between(every, rows, frozenset())
        seconds = None if case.target is None else seconds_by_bound(calls, case.target)
        if accumulates:
            # The time of adding up gradients is not among the calls, but in `UpdateTimes`.
            events, _ = between(every, rows, alone.trained)
        return _PlainStep(events.peak(), seconds)

    return plain_step


def _captured(case: _Case, loss: str) -> tuple[torch.nn.Module, CapturedForward]:
    rows, other_rows = _ROWS[loss]
    fake, model, batch = case.make(rows)
    if any(rows in tensor.shape[1:] for tensor in batch.values() if isinstance(tensor, torch.Tensor)):
        fake, model, batch = case.make(other_rows)
    name = type(model).__name__
    spec = TraceSpec(case.compiler, loss=LossMode(loss), target=case.target, unit=case.spec.unit, accumulates=True)
    try:
        full = list(without_padding(case.values_at(rows)))
        with fake, traced_for(case.target, case.autocast, next(model.parameters()).device.type):
            for mask in full:
                fake_tensors.with_mask(batch[mask], has_padding=False)
            capture = Capture(model, (), batch, spec, chosen_by(TorchDefault()))
            inexact = (Compressed(TorchDefault()), Compressed(FromLevel(1))) if case.compresses else ()
            forward = capture.run(compared=(FromLevel(1), *inexact), compresses=case.compresses)
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(
            f"{name} cannot be traced on fake tensors ({line_with_place(error)}), so nothing can be "
            "predicted for other batches"
        ) from error
    if not forward.is_whole:
        count = len(forward.graphs)
        raise MemOptError(
            f"the training forward of {name} runs unknown code outside its {count} graph{'s' * (count > 1)}; "
            "advice needs a forward that is traced completely"
        )
    if not forward.graphs[0].row_symbols:
        raise MemOptError(f"the graph of {name} is specialized to one batch size, so no other one can be predicted")
    return model, forward


def _times(
    case: _Case, forward: CapturedForward, device: torch.device, step: StepContext
) -> Callable[[int], Sequence[_GraphTimes]]:
    """Returns a function from a number of rows to the times of each graph, at the sizes of its first run."""

    @cache
    def first_sizes(rows: int) -> Mapping[int, SymbolValues]:
        tape, of_runs = forward.sizes_of_runs(forward.sizes_of(rows, case.tokens))
        calls = zip(reversed(tape.calls), reversed(of_runs), strict=True)
        return {call.graph: sizes for call, sizes in calls}

    def peak(rows: int) -> int:
        """Returns the peak of a step without a plan; the graph is measured on parameters of its own, before there is
        an optimizer."""
        fixed, problem = step.fixed, forward.problem(forward.sizes_of(rows, case.tokens))
        return replace(
            fixed,
            batch=fixed.batch * rows,
            accumulated=0,
            activations=simulate_everything_saved(problem.problem).peak,
            optimizer=max(fixed.optimizer, fixed.parameters),
        ).peak

    # A budget may exceed the available memory.
    most = step.limit if case.target is not None else min(step.limit, capacity(device).available)
    fused = case.compiler == "inductor"

    def of_graph(number: int, graph: CapturedGraph) -> Callable[[int], _GraphTimes]:

        def sizes(rows: int) -> SymbolValues:
            return first_sizes(rows)[number]

        def of_analyzed(analyzed: AnalyzedGraph) -> Callable[[int], OperatorTimes]:
            if case.target is not None:
                return times.estimated(analyzed, sizes, case.target, fused)
            return times.measured_times(analyzed, sizes, device, fused, most, peak)

        own = of_analyzed(graph.analyzed)
        parts = () if graph.conversions is None else tuple(map(of_analyzed, graph.conversions.graphs))

        def both(rows: int) -> _GraphTimes:
            return _GraphTimes(own(rows), tuple(itertools.chain(*(part(rows).seconds for part in parts))))

        return both

    of_graphs = [of_graph(number, graph) for number, graph in enumerate(forward.graphs)]
    return lambda rows: [times_of(rows) for times_of in of_graphs]
