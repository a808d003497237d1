"""A model's training forward under one plan, planned again while what was compiled passes its budget."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.symbols import is_covered
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.partition.producers.recorded import RecordedForward
from optimum_memopt.engines.compile.predict.step_predictor import Predictors, StepMemoryPredictor
from optimum_memopt.engines.compile.train.planned_forward import PlannedForward, Settings
from optimum_memopt.engines.compile.train.step_budget import StepBudget
from optimum_memopt.engines.compile.train.step_context import Step
from optimum_memopt.engines.shared.forward_patch import ForwardState, weak_method
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.logs import get_logger
from optimum_memopt.sizes import Budget

# Of one batch's plan, until what was compiled is within the budget too.
_MOST_COMPILES = 3
# Of each of those, in which no further graph of the forward was reached, until all of them fit.
_MOST_RESERVES = 3


@dataclass(frozen=True)
class Call:
    """The arguments of a `PlannedForward`."""

    args: tuple[Any, ...]
    inputs: dict[str, Any]
    loss_only: bool
    reader: str


class Variant:
    """One compiled forward of a model.

    Args:
        model: that trains.
        forward: its own.
        producer: makes the choices.
        settings: how it is compiled.
        budget: of its steps; counts where the producer is a budget.

    Attributes:
        planned: None before the first call.
        budget: of its steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        producer: Producer,
        settings: Settings,
        budget: StepBudget,
    ) -> None:
        if isinstance(producer, FromBudget | RecordedForward):
            # torch keeps what was compiled with them until the process ends.
            producer = replace(producer, step=weak_method(self._step), costs=weak_method(self._costs))
        if isinstance(producer, FromBudget):
            producer = replace(producer, graphs=budget.graphs)
        self._model, self._forward, self._producer, self._settings = model, forward, producer, settings
        self._has_budget = isinstance(producer, FromBudget)
        self._inputs: Mapping[str, object] = {}
        self.budget = budget
        self.planned: PlannedForward | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether a forward has run."""
        return self.planned is not None and self.planned.table is not None

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """None before the first call, and where nothing is predicted."""
        return self.planned.predictor if self.planned is not None else None

    def __call__(self, call: Call) -> Any:
        """The forward's outputs; see `PlannedForward`."""
        for is_last in (*(False,) * (_MOST_COMPILES - 1), True):
            is_new = self._has_budget and not self.is_compiled
            before = ForwardState.of(self._model, with_buffers=True) if is_new else None
            outputs = self._run(call) if before is None else self._run_with_room(call, before)
            if before is None or not self._solve_again(is_last):
                break
            outputs = None
            before.restore(self._model)
        return outputs

    def covers(self, sizes: Mapping[str, int]) -> bool:
        """Whether its plan is made for a batch of these sizes, which it may not have been compiled for yet."""
        return self.budget.largest is not None and is_covered(sizes, self.budget.largest)

    def is_within(self, inputs: Mapping[str, object]) -> bool:
        """Whether a step with this batch is predicted to be within the budget; False where nothing is predicted."""
        found = False
        if self.planned is not None and self.planned.predictors is not None:
            with self.planned.predicting():
                found = self.budget.is_within(self.planned.predictors.of(inputs), inputs)
        return found

    def excess(self, inputs: Mapping[str, object]) -> str:
        """A line about a batch that would pass the budget; empty where it does not, or where that is not known."""
        return self._of_budget(lambda predictors: self.budget.excess(predictors.of(inputs), inputs))

    def _run_with_room(self, call: Call, before: ForwardState) -> Any:
        """The outputs, compiled again where earlier graphs of the forward leave a later one too little.

        Args:
            call: see `_run`.
            before: restored if nothing fits: another variant may run this batch.
        """
        known, tries = 0, 0
        while True:
            try:
                return self._run(call)
            except DoesNotFitError as error:
                before.restore(self._model)
                # A try that was the first to reach a graph could not have left it room.
                tries += self.budget.graphs.count == known
                known = self.budget.graphs.count
                line = "" if tries > _MOST_RESERVES else self.budget.make_room(error)
                if not line:
                    raise
            get_logger().info(line)
            self.planned = None
            # The error's frames hold what the graphs that ran have saved.
            gc.collect()

    def _run(self, call: Call) -> Any:
        if self.planned is None:
            if self._has_budget:
                self.budget.read_largest()
            self.planned = PlannedForward(
                self._model, self._forward, self._producer, self._settings, weak_method(self._resident)
            )
        self._inputs = call.inputs
        try:
            return self.planned(call.args, call.inputs, call.loss_only, call.reader)
        finally:
            self._inputs = {}

    def _solve_again(self, is_last: bool) -> bool:
        """Whether what was just compiled passes the budget and is forgotten, with a margin for the next plan."""
        line = self._of_budget(lambda predictors: self.budget.check(predictors.first))
        if not line:
            return False
        if is_last:
            get_logger().warning(f"NOT within the budget: {line}")
            return False
        how = self._of_budget(lambda predictors: self.budget.tighten(predictors.first))
        get_logger().info(f"{line}: solving again {how}")
        self.planned = None
        return True

    def _of_budget(self, ask: Callable[[Predictors], str]) -> str:
        """What the budget says of the plan in force; empty where there is no budget or no prediction."""
        line = ""
        if self._has_budget and self.planned is not None and self.planned.predictors is not None:
            with self.planned.predicting():
                line = ask(self.planned.predictors)
        return line

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _resident(self) -> int:
        return self.budget.resident(self._device)

    def _step(self, budget: Budget) -> Step:
        if self.planned is None:
            return self.budget.step(self._model, self._inputs, budget)
        earlier, tape, untrained = self.planned.graphs, self.planned.tape, self.planned.untrained
        return self.budget.step(self._model, self._inputs, budget, earlier, tape, untrained)

    def _costs(self, graph: AnalyzedGraph) -> Costs:
        if self.planned is not None:
            self.planned.progress.stage = "measuring operators, and solving for the cheapest recompute"
        return self.budget.costs(graph, self._device, self._settings.compiler == "inductor")
