"""Trains a model through torch.compile in place, with plans in ONNX Runtime's grammar applied by a partitioner."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import LabelSmoother

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.predictions import Frontier, StepTimeline
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.backend import check_compiler, default_compiler
from optimum_memopt.engines.compile.capture.recompiles import TooManyRecompilesError
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.loss.mode import mode_of
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.engines.compile.partition.passes import host_copies
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.length_buckets import ExtraByLength
from optimum_memopt.engines.compile.torch_compat.runtime import is_of_compiled_backward, start_libraries
from optimum_memopt.engines.compile.train import support_checks
from optimum_memopt.engines.compile.train.fallback import own_error
from optimum_memopt.engines.compile.train.length_buckets import Variants
from optimum_memopt.engines.compile.train.planned_forward import PlannedForward, Settings
from optimum_memopt.engines.compile.train.step_budget import StepBudget
from optimum_memopt.engines.compile.train.variant import Call, Variant
from optimum_memopt.engines.shared import in_place
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
from optimum_memopt.engines.shared.model_settings import without_key_value_cache
from optimum_memopt.errors import line_of
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import TrainingArguments


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
        variants: how many plans there may be within a budget.
        with_frontier: find out what other budgets would cost.
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
        variants: int = 1,
        with_frontier: bool = False,
    ) -> None:
        self._compiler_asked = compiler
        self._dynamic = dynamic
        self._loss_asked = loss
        self._target, self._producer_asked, self._is_dry = target, producer, is_dry
        self._most_variants = variants
        self._frontiers: list[Frontier] | None = [] if with_frontier else None
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
        elif not self._is_dry:
            host_copies.release_pinned()

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

    @property
    def _planned(self) -> PlannedForward | None:
        """The forward under the plan for the largest batch, which is what is shown; None before the first one."""
        return self._variants.largest.planned if self._variants is not None else None

    def plans(self) -> PlanTable | None:
        """The table of the current training graphs, None before the first training forward."""
        return self._planned.table if self._planned is not None else None

    def insight(self) -> str:
        """Nothing: the table holds all there is."""
        return ""

    def plan_file(self) -> PlanFile | None:
        """The plan in force, of several that for the largest batch; None before the first training forward."""
        return self._planned.plan_file if self._planned is not None else None

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Predicts a training step of any batch and sequence length under the plan for the largest batch; None before
        the first training forward."""
        return self._planned.predictor if self._planned is not None else None

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        """Of the batches so far the highest peak of a step, MiB; None before the first training forward."""
        if self._variants is None:
            return None
        peak = self._variants.predicted_peak(optimizer, gradient_accumulation)
        return None if peak is None else peak / MIB

    def timeline(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> StepTimeline | None:
        """Of the batches so far the step with the highest peak; None before the first training forward."""
        return self._variants.timeline(optimizer, gradient_accumulation) if self._variants is not None else None

    def frontier(self) -> Frontier | None:
        """What budgets cost the largest batch; None without a budget, before the first training forward, and for one
        in several graphs, whose first one is not all that it holds."""
        if not self._frontiers or self._planned is None or not self._planned.is_one_graph:
            return None
        return self._frontiers[-1]

    def without_plan(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        """See `Engine.without_plan`."""
        is_of_compiler = is_of_compiled_backward(error) and own_error(error) is None
        return self._plainly(error) if is_of_compiler and self._planned is not None else None

    @contextlib.contextmanager
    def _plainly(self, failed: Exception) -> Iterator[None]:
        assert self._planned is not None
        self._is_plain = True
        try:
            yield
            self._planned.give_up(f"its compiled backward failed in the first step ({line_of(failed)})", failed)
        except BaseException:
            self._is_plain = False
            raise

    @property
    def _compiler(self) -> str:
        return self._compiler_asked or default_compiler(next(self._model.parameters()).device.type)[0]

    def _forget(self) -> None:
        config, self._loss = mode_of(self._selection, self._loss_asked)
        self._producer = self._producer_asked or producer_for(replace(self._selection, config=config))
        self._variants: Variants | None = None
        self._is_plain = False

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = without_key_value_cache(self._model, args, kwargs)
        if self._variants is None:
            if not self._is_dry:
                start_libraries(next(self._model.parameters()).device)
            most = self._most_variants if isinstance(self._producer, FromBudget) else 1
            budget = StepBudget(weak_method(self._run_now), self._target)
            self._variants = Variants(most, budget, weak_method(self._new_variant))
        reader = self._outputs_read_by()
        loss_only = not reader and self.outputs_read_by is not None
        if self._is_plain and self._planned is not None:
            return self._planned.run_plainly(args, kwargs, loss_only, reader)
        try:
            return self._variants(Call(args, kwargs, loss_only, reader))
        except TooManyRecompilesError:
            self._forget()
            raise

    def _new_variant(self, budget: StepBudget, times: list[ExtraByLength] | None, purpose: str) -> Variant:
        settings = Settings(
            self._compiler,
            self._dynamic,
            self._is_dry,
            self._loss,
            is_loss_row_asked=self._loss == CHUNKED != self._loss_asked and self._selection.plan is None,
            strict=self._selection.strict,
            smoothing=self._smoothing,
            purpose=purpose,
            target=self._target,
            # A predictor must not keep the optimizer of a run that trains.
            run=self._run_now() if self._is_dry else None,
        )
        producer = self._producer
        if isinstance(producer, FromBudget):
            # The plan of the largest batches has no purpose of its own.
            producer = replace(producer, times=times, frontiers=None if purpose else self._frontiers)
        return Variant(self._model, self._attached.training_forward.plain_forward, producer, settings, budget)

    def _outputs_read_by(self) -> str:
        """Who may read more of the outputs than the loss; a training loop of one's own says so by its options."""
        if self.outputs_read_by is not None:
            return self.outputs_read_by()
        return "" if self._loss == CHUNKED else "the training loop"

    def _run_now(self) -> Run:
        return self.run() if self.run is not None else Run()
