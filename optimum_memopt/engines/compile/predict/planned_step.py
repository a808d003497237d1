"""Traces a training step on fake tensors, for a device that need not be present."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers.initialization import no_init_weights

from optimum_memopt.engines.api.predictions import PlannedDevice, Workload
from optimum_memopt.engines.api.run import IN_FLOAT32, NOTHING_HELD, HeldOutputs, HeldUntil, Run, Selection
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.capture.capture import Capture
from optimum_memopt.engines.compile.capture.ranks import planned_ranks, shard
from optimum_memopt.engines.compile.capture.traced_graph import TraceSpec
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.costs.times import costs_of
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.loss.decide import loss_mode
from optimum_memopt.engines.compile.memory.footprint import StepContext, step_around
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.captured_graph import no_costs
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.predict.planner import Attempt, Planner, PlannerSpec
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.predict.table import ShownPlan, show
from optimum_memopt.engines.shared.forward_patch import Checkpointing
from optimum_memopt.engines.shared.released_gradients import check_step
from optimum_memopt.engines.simulator.devices import Device, device_at, device_of
from optimum_memopt.engines.simulator.standins import stand_in_place, traced_for
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.torch_compat.attention import KeptMasks, without_padding
from optimum_memopt.engines.torch_compat.compiler_errors import line_with_place
from optimum_memopt.errors import MemOptError
from optimum_memopt.generators import preserved_generators
from optimum_memopt.logs import get_logger
from optimum_memopt.memory.capacity import Capacity, capacity, capacity_of
from optimum_memopt.memory.optimizers import PlannedOptimizer, check
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import Budget
from optimum_memopt.step_settings import THIS_MACHINE, StepSpec


@dataclass(frozen=True)
class TracedStep:
    """The result of one training forward on fake tensors.

    Attributes:
        model: the traced model; must stay alive while its steps are predicted.
    """

    model: torch.nn.Module
    batch: Mapping[str, Any]
    forward: CapturedForward
    shown: ShownPlan
    run: Run

    @property
    def predicted(self) -> StepMemoryPredictor:
        """Returns the predictor of the step.

        Raises:
            MemOptError: the step cannot be predicted.
        """
        if self.shown.predictor is None:
            raise MemOptError("; ".join(self.shown.table.header))
        return self.shown.predictor


def build(workload: Workload, here: torch.device) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """Returns the workload's model and batch; their tensors are fake if a fake mode is active."""
    # Some models redraw initial values until they are in range, which values of fake tensors never are.
    with here, no_init_weights(), fake_tensors.known_steps():
        return workload.build()


def planned_device(name: str | None) -> PlannedDevice:
    """Returns the device of this name, or this machine's for None. Raises MemOptError for an unknown device."""
    if name is not None:
        target = device_of(name)
        return PlannedDevice(target.name, capacity_of(target.memory), target.lacks)
    here = stand_in_place(None)
    lacks = device_at(here).lacks if here.type == "cuda" else ()
    return PlannedDevice(here.type, capacity(here), lacks)


@dataclass(frozen=True)
class PlannedStep:
    """A step to plan, with its device and its settings.

    Raises:
        MemOptError: an unknown device or optimizer, or a step whose gradients cannot be released.
    """

    workload: Workload
    selection: Selection
    spec: StepSpec = THIS_MACHINE

    def __post_init__(self) -> None:
        check(self.spec.optim)
        if self.spec.release_gradients:
            steps, ranks = self.spec.gradient_accumulation_steps, self.spec.fsdp
            check_step(
                "release_gradients",
                accumulation=f"gradient_accumulation_steps {steps}" if steps > 1 else "",
                float16="fp16" if self.spec.fp16 else "",
                ranks=f"fsdp {ranks}" if ranks > 1 else "",
            )
        if self.target is None and self.here.type == "cpu":
            # A process that trains on a CPU also holds Trainer's imports: datasets, PEFT and bitsandbytes, 270 MiB.
            importlib.import_module("transformers.trainer")

    @cached_property
    def target(self) -> Device | None:
        """Returns the device that is planned for; None for this machine's."""
        return None if self.spec.device is None else device_of(self.spec.device)

    @property
    def here(self) -> torch.device:
        return stand_in_place(self.target)

    @property
    def device_name(self) -> str:
        return self.here.type if self.target is None else self.target.name

    @property
    def compiled_by(self) -> str:
        if self.spec.compiler is not None:
            return self.spec.compiler
        return default_compiler(self.here.type)[0] if self.target is None else "inductor"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.spec.autocast) if self.spec.autocast else None

    @property
    def cast_to(self) -> torch.dtype | None:
        """Returns the dtype that autocast casts to; on several ranks None: accelerate gathers half precision
        instead."""
        return self.autocast_dtype if self.spec.fsdp == 1 else None

    @property
    def held_outputs(self) -> HeldOutputs:
        """Returns the outputs that `keep_outputs` holds; under autocast these are accelerate's float32 copies."""
        if not self.spec.keep_outputs:
            return NOTHING_HELD
        return HeldOutputs(HeldUntil.NEXT_FORWARD, IN_FLOAT32 if self.cast_to is not None else 0.0)

    @property
    def capacity(self) -> Capacity:
        return planned_device(self.spec.device).memory

    def costs_of(self, graph: AnalyzedGraph) -> Costs:
        """Returns the costs of a graph's operators on the device."""
        return costs_of(graph, self.here, self.compiled_by == "inductor", self.target)

    def context(self, traced: TracedStep, budget: Budget) -> StepContext:
        """Returns the step context of a traced step."""
        untrained = traced.forward.untrained
        return step_around(traced.model, traced.batch, budget, traced.run, self.target, untrained=untrained)

    def trace(
        self,
        dynamic: bool,
        costs: Callable[[AnalyzedGraph], Costs] = no_costs,
        compared: Sequence[Producer] = (),
        compresses: bool = False,
    ) -> TracedStep:
        """Trace one training forward under the selection.

        Args:
            compared: producers whose choices are recorded after the selection's.
            compresses: plans of budgets may compress, as they may if the selection itself compresses.

        Raises:
            MemOptError: no plan fits the budget, the plan is invalid, or the model cannot be traced.
        """
        # The workload's random draws must not advance the caller's generators.
        # Its values are read outside of the fake mode: torch computes with real ones.
        forked, file, known = preserved_generators(), self.selection.plan, self.workload.values
        with (
            forked,
            planned_ranks(self.spec.fsdp, self.here.type) as mesh,
            traced_for(self.target, self.cast_to, self.here.type),
            dynamo.fake_tensors(),
        ):
            model, batch = build(self.workload, self.here)
            for name in without_padding(known):
                fake_tensors.with_mask(batch[name], has_padding=False)
            if mesh is not None:
                shard(model, mesh, self.autocast_dtype)
            selection = self._selection_for(model)
            config, loss = loss_mode(selection, self.spec.loss)
            producer = producer_for(replace(selection, config=config))
            accumulates, releases = self.spec.gradient_accumulation_steps > 1, self.spec.release_gradients
            spec = TraceSpec(
                self.compiled_by,
                dynamic,
                loss,
                selection.strict,
                target=self.target,
                unit=self.spec.unit,
                accumulates=accumulates,
            )
            held = self.held_outputs
            run = Run(
                self.optimizer_of(model),
                accumulates,
                micro_batches=self.spec.gradient_accumulation_steps,
                releases_gradients=releases,
                held_outputs=held,
            )
            planner = Planner(model, PlannerSpec(producer, lambda: run, spec.compiler == "inductor", self.target))
            capture = Capture(model, (), batch, spec, planner.choose, loss.reader(None) if held.until else "")
            if file is not None:
                capture.masks.keep(KeptMasks.of(file))

            def attempt() -> Attempt[TracedStep]:
                forward = capture.run(costs, compared, compresses or producer.compresses)
                forward = replace(forward, tape=replace(forward.tape, held_outputs=held))
                partitioned = [graph.partitioned for graph in forward.graphs if graph.partitioned is not None]
                warnings = (graph.choice.check_file(selection.strict) for graph in partitioned)
                for line in dict.fromkeys(filter(None, warnings)):
                    get_logger().warning(line)
                resident = planner.limit.resident(held_bytes(self.here))
                shown = show(
                    model, partitioned, forward.tape, batch, resident, planner.producer, spec, capture.masks.kept, run
                )
                return Attempt(TracedStep(model, batch, forward, shown, run), shown.predictor, shown.plan_file)

            try:
                traced = planner.plan(attempt, capture.choose_again)
            except MemOptError:
                raise
            except Exception as error:
                is_of_this_machine = replace(self.spec, compiler=None) == THIS_MACHINE
                raise MemOptError(
                    f"{type(model).__name__} cannot be traced on fake tensors ({line_with_place(error)})"
                    f"{self.workload.suggestion if is_of_this_machine else ''}"
                ) from error
        for remark in traced.shown.remarks:
            get_logger().warning(remark)
        return traced

    def _selection_for(self, model: torch.nn.Module) -> Selection:
        """Returns the selection, or level 1 if it is empty and the model checkpoints its activations."""
        plain = Selection(strict=self.selection.strict, compress=self.selection.compress)
        if self.selection != plain or not Checkpointing(model).is_on:
            return self.selection
        get_logger().info(f"treating activation checkpointing of {type(model).__name__} as level 1")
        return replace(plain, level=1)

    @property
    def is_on_cuda(self) -> bool:
        return self.here.type == "cuda" or (self.target is not None and self.target.cuda is not None)

    def optimizer_of(self, model: torch.nn.Module) -> PlannedOptimizer:
        return PlannedOptimizer.of_model(model, self.spec.optim, self.is_on_cuda)
