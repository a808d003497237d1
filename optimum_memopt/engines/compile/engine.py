"""Trains a model through torch.compile in place, with plans in ONNX Runtime's grammar applied by a partitioner."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import LabelSmoother

from optimum_memopt.engines import in_place
from optimum_memopt.engines.base import Run, Selection
from optimum_memopt.engines.compile import support_checks
from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.backend import check_compiler, default_compiler
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.devices import Device
from optimum_memopt.engines.compile.budget.in_step import Step
from optimum_memopt.engines.compile.budget.step_budget import StepBudget
from optimum_memopt.engines.compile.loss.plan import mode_of
from optimum_memopt.engines.compile.memory.cuda_libraries import start_libraries
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.engines.compile.planned_forward import PlannedForward, Settings
from optimum_memopt.engines.compile.producers import Producer, producer_for
from optimum_memopt.engines.compile.producers.budget import FromBudget
from optimum_memopt.engines.compile.producers.budget_curve import BudgetCurve
from optimum_memopt.engines.compile.recompiles import TooManyRecompilesError
from optimum_memopt.engines.forward_state import ForwardState
from optimum_memopt.engines.key_value_cache import without_key_value_cache
from optimum_memopt.engines.label_smoothing import LabelSmoothing
from optimum_memopt.engines.weak_method import weak_method
from optimum_memopt.logs import get_logger
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import Budget

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Of one batch's plan, until what was compiled is within the budget too.
_MOST_COMPILES = 3


class CompileEngine(in_place.InPlaceEngine):
    """The `compile` engine.

    Training forwards (training mode, gradients on) run through torch.compile, all others through the model's own
    forward. Without a config or level torch partitions the graph as it always does.

    Args:
        selection: which plans.
        compiler: `inductor`, or `aot_eager`: the same graphs, run operator by operator; None: see `default_compiler`.
        dynamic: sizes of batches stay symbols; False: traced several times as fast, for the sizes of the first only.
        loss: one of `options.LOSSES`.
        target: the device that steps are planned for; None: where the model lies.
        producer: makes the choices instead of what is selected.
        is_dry: no programs are compiled: the graphs are only looked at.
    """

    name = "compile"

    def __init__(
        self,
        selection: Selection | None = None,
        compiler: str | None = None,
        dynamic: bool = True,
        loss: str = AUTO,
        target: Device | None = None,
        producer: Producer | None = None,
        is_dry: bool = False,
    ) -> None:
        self._compiler_asked = compiler
        self._dynamic = dynamic
        self._loss_asked = loss
        self._target, self._producer_asked, self._is_dry = target, producer, is_dry
        self._smoothing: LabelSmoothing | None = None
        self._is_on_cpu = False
        super().__init__(selection)

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Refuse Trainer arguments that do the engine's work too.

        Raises:
            MemOptError: torch_compile, FSDP, ZeRO 3, several GPUs in one process.
        """
        support_checks.check_arguments(args)

    def _check(self, model: torch.nn.Module) -> None:
        support_checks.check(model)
        if self._compiler_asked is not None and not self._is_dry:
            check_compiler(self._compiler_asked, next(model.parameters()).device.type)

    def _enter(self) -> None:
        self._is_on_cpu = next(self._model.parameters()).device.type == "cpu"
        if self._is_on_cpu:
            malloc.return_freed_memory()

    def _leave(self) -> None:
        if self._is_on_cpu:
            malloc.restore()

    def smooth_labels(self, smoothing: Any) -> bool:
        """Compute the smoothed loss of the Trainer in training forwards with labels, where that may be chunked.

        Args:
            smoothing: a `LabelSmoothing`; None: the model's own loss.
        """
        if self._loss == PLAIN or (smoothing is not None and type(smoothing.smoother) is not LabelSmoother):
            return False
        if smoothing != self._smoothing:
            self._smoothing = smoothing
            self._forget()
        return True

    def plans(self) -> PlanTable | None:
        """The table of the current training graphs, None before the first training forward."""
        return self._planned.table if self._planned is not None else None

    def insight(self) -> str:
        """Nothing: the table holds all there is."""
        return ""

    def plan_file(self) -> PlanFile | None:
        """The plan in force, None before the first training forward."""
        return self._planned.plan_file if self._planned is not None else None

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Predicts a training step of any batch and sequence length; None before the first training forward."""
        return self._planned.predictor if self._planned is not None else None

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        """Of the batches so far the highest peak of a step, MiB; None before the first training forward."""
        if self._planned is None or self._planned.predictor is None:
            return None
        with self._planned.predicting():
            return self._planned.predictor.peak(optimizer, gradient_accumulation) / MIB
        return None

    @property
    def _compiler(self) -> str:
        return self._compiler_asked or default_compiler(next(self._model.parameters()).device.type)[0]

    def _forget(self) -> None:
        config, self._loss = mode_of(self._selection.config, self._loss_asked)
        if self._loss == AUTO and self._selection.plan is not None:
            self._loss = self._selection.plan.loss
        self._producer = self._producer_asked or producer_for(replace(self._selection, config=config))
        if isinstance(self._producer, FromBudget | BudgetCurve):
            self._producer = replace(self._producer, step=weak_method(self._step), costs=weak_method(self._costs))
        # Keyword arguments of the forward that is compiled.
        self._inputs: Mapping[str, object] = {}
        self._step_budget = StepBudget(weak_method(self._run_now), self._target)
        self._planned: PlannedForward | None = None

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = without_key_value_cache(self._model, args, kwargs)
        self._solve_again_for_larger(kwargs)
        for is_last in (*(False,) * (_MOST_COMPILES - 1), True):
            is_new = self.plans() is None and isinstance(self._producer, FromBudget)
            before = ForwardState.of(self._model, with_buffers=True) if is_new else None
            outputs = self._planned_forward(args, kwargs)
            if before is None or not self._solve_again_for_compiler(is_last):
                break
            outputs = None
            before.restore(self._model)
        return outputs

    def _planned_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._planned is None:
            if not self._is_dry:
                start_libraries(next(self._model.parameters()).device)
            if isinstance(self._producer, FromBudget):
                self._step_budget.read_largest()
            self._planned = self._new_forward()
        reader = self._outputs_read_by()
        self._inputs = kwargs
        try:
            return self._planned(args, kwargs, not reader and self.outputs_read_by is not None, reader)
        except TooManyRecompilesError:
            self._forget()
            raise
        finally:
            self._inputs = {}

    def _new_forward(self) -> PlannedForward:
        settings = Settings(
            self._compiler,
            self._dynamic,
            self._is_dry,
            self._loss,
            is_loss_row_asked=self._loss == CHUNKED != self._loss_asked and self._selection.plan is None,
            strict=self._selection.strict,
            smoothing=self._smoothing,
        )
        forward = self._attached.training_forward.plain_forward
        return PlannedForward(self._model, forward, self._producer, settings, weak_method(self._resident))

    def _outputs_read_by(self) -> str:
        """Who may read more of the outputs than the loss; a training loop of one's own says so by its options."""
        if self.outputs_read_by is not None:
            return self.outputs_read_by()
        return "" if self._loss == CHUNKED else "the training loop"

    def _run_now(self) -> Run:
        return self.run() if self.run is not None else Run()

    def _resident(self) -> int:
        return self._step_budget.resident(next(self._model.parameters()).device)

    def _step(self, budget: Budget) -> Step:
        return self._step_budget.step(self._model, self._inputs, budget)

    def _costs(self, graph: AnalyzedGraph) -> Costs:
        if self._planned is not None:
            self._planned.progress.stage = "measuring operators, and solving for the cheapest recompute"
        return self._step_budget.costs(graph, next(self._model.parameters()).device, self._compiler == "inductor")

    def _solve_again_for_larger(self, inputs: Mapping[str, object]) -> None:
        """Forget a plan under which this batch would pass the budget, before it runs."""
        line = self._of_budget(lambda predictor: self._step_budget.excess(predictor, inputs))
        if line:
            get_logger().info(line)
            self._forget_plan()

    def _solve_again_for_compiler(self, is_last: bool) -> bool:
        """Whether what was just compiled passes the budget and is forgotten, with a margin for the next plan."""
        line = self._of_budget(self._step_budget.check)
        if not line:
            return False
        if is_last:
            get_logger().warning(f"NOT within the budget: {line}")
            return False
        get_logger().info(f"{line}: solving again with that much less")
        self._forget_plan()
        return True

    def _of_budget(self, ask: Callable[[StepMemoryPredictor], str]) -> str:
        """What the budget says of the plan in force; empty where there is no budget or no prediction."""
        planned, line = self._planned, ""
        if planned is not None and planned.predictor is not None and isinstance(self._producer, FromBudget):
            with planned.predicting():
                line = ask(planned.predictor)
        return line

    def _forget_plan(self) -> None:
        """Forget what was compiled, and keep what the budget has learned."""
        budget = self._step_budget
        self._forget()
        self._step_budget = budget
