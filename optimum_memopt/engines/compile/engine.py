"""Trains a model through torch.compile in place, with plans in ONNX Runtime's grammar applied by a partitioner."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from transformers.trainer_pt_utils import LabelSmoother

from optimum_memopt.compat import is_encoder_decoder
from optimum_memopt.engines import in_place
from optimum_memopt.engines.base import Run, Selection
from optimum_memopt.engines.compile import compat, support_checks
from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph, Modules
from optimum_memopt.engines.compile.analysis.module_paths import add_outer_modules
from optimum_memopt.engines.compile.backend import Backend, check_compiler, configured, default_compiler
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.devices import Device
from optimum_memopt.engines.compile.budget.in_step import Step
from optimum_memopt.engines.compile.budget.step_budget import StepBudget
from optimum_memopt.engines.compile.choice import Choice
from optimum_memopt.engines.compile.detach_outputs import (
    refusing_gradients,
    with_detached_outputs,
    without_logits,
)
from optimum_memopt.engines.compile.header import plan_line, prediction_lines
from optimum_memopt.engines.compile.loss.plan import LossPlan, check_row, mode_of, plan_losses
from optimum_memopt.engines.compile.memory.inductor_memory import InductorPrograms
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph, partition_joint
from optimum_memopt.engines.compile.plan_files import mismatch_line, plan_file_of
from optimum_memopt.engines.compile.producers import Producer, matched_in, producer_for
from optimum_memopt.engines.compile.producers.budget import FromBudget
from optimum_memopt.engines.compile.producers.budget_curve import BudgetCurve
from optimum_memopt.engines.compile.recompiles import Recompiles
from optimum_memopt.engines.compile.symbol_names import SymbolNames
from optimum_memopt.engines.compile.table import to_table
from optimum_memopt.engines.compile.trace_fixes import TraceFixes
from optimum_memopt.engines.key_value_cache import without_key_value_cache
from optimum_memopt.engines.label_smoothing import LabelSmoothing, cross_entropy
from optimum_memopt.engines.weak_method import weak_method
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger, informing
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.progress import Progress, announced
from optimum_memopt.sizes import Budget

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
        return self._table

    def insight(self) -> str:
        """Nothing: the table holds all there is."""
        return ""

    def plan_file(self) -> PlanFile | None:
        """The plan in force, None before the first training forward."""
        return self._plan_file

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Predicts a training step of any batch and sequence length; None before the first training forward."""
        return self._predictor

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        """Of the batches so far the highest peak of a step, MiB; None before the first training forward."""
        if self._predictor is None:
            return None
        with self._predicting():
            return self._predictor.peak(optimizer, gradient_accumulation) / MIB
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
        # By whether only the loss keeps its gradient, whether the logits are dropped, and the hooks of all modules.
        self._compiled: dict[tuple[bool, bool, tuple[int, ...]], Callable[..., Any]] = {}
        # What torch traces for them.
        self._traced: list[Callable[..., Any]] = []
        # Graphs that the current forward has compiled so far.
        self._graphs: list[PartitionedGraph] = []
        # The losses of the graph that is compiled next.
        self._losses: list[LossPlan] = []
        self._table: PlanTable | None = None
        self._plan_file: PlanFile | None = None
        self._predictor: StepMemoryPredictor | None = None
        self._resident = 0
        self._progress = Progress()
        self._recompiles = Recompiles()
        self._said: set[str] = set()

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = without_key_value_cache(self._model, args, kwargs)
        self._solve_again_for_larger(kwargs)
        reader = self._outputs_read_by()
        loss_only = not reader and self.outputs_read_by is not None
        drops_logits = not reader and self._loss != PLAIN
        variant = (loss_only, drops_logits, compat.global_hooks())
        is_new = variant not in self._compiled
        if is_new:
            self._compiled[variant] = self._compile(loss_only, drops_logits, reader)
        self._inputs = kwargs
        watch = compat.Watch()
        is_first = is_new or self._table is None
        try:
            with configured(), self._trace_fixes.around_call(kwargs), self._announced(is_first) as self._progress:
                outputs = self._compiled[variant](*args, **kwargs)
        except BaseException as error:
            # Graphs of a forward that failed are no part of the next one's table.
            self._graphs = []
            if isinstance(refusal := getattr(error, "inner_exception", None), MemOptError):
                raise refusal from None
            raise
        finally:
            self._inputs = {}
        if not is_first:
            self._note_recompile(watch)
        if self._graphs:
            graphs, self._graphs = self._graphs, []
            self._show(graphs, watch, kwargs)
        elif self._table is None:
            self._show_nothing(watch)
        if self._predictor is not None:
            with self._predicting():
                self._predictor.note_forward(kwargs, outputs)
        return refusing_gradients(outputs) if loss_only else outputs

    def _outputs_read_by(self) -> str:
        """Who may read more of the outputs than the loss; a training loop of one's own says so by its options."""
        if self.outputs_read_by is not None:
            return self.outputs_read_by()
        return "" if self._loss == CHUNKED else "the training loop"

    def _compile(self, loss_only: bool, drops_logits: bool, reader: str) -> Callable[..., Any]:
        if self._compiled:
            outputs = (
                "only the loss keeps its gradient"
                if loss_only
                else "outputs beside the loss may be read and keep theirs"
            )
            self._say(f"compiling another training graph for other hooks or another caller: {outputs}")
        else:
            self._trace_fixes = TraceFixes(self._model)
        # torch keeps each backend until the process ends (`torch/_dynamo/eval_frame.py`, `cached_backends`, 2.13);
        # it must not keep the model with it.
        partition, prepare = weak_method(self._partition), weak_method(self._plan_losses)
        backend = Backend(self._compiler, partition, lambda module: prepare(module, reader), self._is_dry)
        forward = self._attached.training_forward.plain_forward
        if self._smoothing is not None:
            forward = self._smoothing.wrap(forward, functools.partial(cross_entropy, self._smoothing))
        if loss_only:
            forward = with_detached_outputs(forward)
        if drops_logits:
            forward = without_logits(forward)
        forward = compat.with_own_code(forward)
        self._traced.append(forward)
        return compat.compile_alone(forward, backend, self._dynamic)

    def _plan_losses(self, module: fx.GraphModule, reader: str) -> None:
        self._losses, others = plan_losses(module.graph, self._loss, reader)
        if any(plan.is_chunked for plan in self._losses):
            module.recompile()
        told = [plan.reason for plan in self._losses if plan.reason and (plan.is_requested or plan.is_read_by_caller)]
        for reason in (*told, *(others if self._loss == CHUNKED else ())):
            self._say(f"the loss of {type(self._model).__name__} is not chunked: {reason}")

    def _partition(
        self,
        programs: InductorPrograms,
        module: fx.GraphModule,
        inputs: Any,
        num_fwd_outputs: int,
        others: dict[str, Any],
    ) -> tuple[Choice, Modules]:
        number = len(self._graphs) + 1
        self._progress.stage = f"partitioning graph {number} of {len(module.graph.nodes)} operators"
        add_outer_modules(module.graph, self._model, compat.traced_module())
        is_all = any(compat.is_all_of(forward) for forward in self._traced)
        graph, modules = partition_joint(
            module,
            inputs,
            num_fwd_outputs,
            others,
            self._producer,
            self._graphs,
            refuses_mistakes=is_all and self._table is None and self._selection.strict,
            runs_operators=self._compiler != "inductor",
        )
        losses, self._losses = tuple(self._losses), []
        self._graphs.append(replace(graph, programs=programs, is_all_of_forward=is_all, losses=losses))
        if line := mismatch_line(graph.choice, refuses=self._table is None and self._selection.strict):
            self._say(line)
        self._resident = self._step_budget.resident(next(self._model.parameters()).device)
        self._progress.stage = f"compiling graph {number}"
        return graph.choice, modules

    def _run_now(self) -> Run:
        return self.run() if self.run is not None else Run()

    def _step(self, budget: Budget) -> Step:
        return self._step_budget.step(self._model, self._inputs, budget)

    def _solve_again_for_larger(self, inputs: Mapping[str, object]) -> None:
        """Forget a plan under which this batch would pass the budget, before it runs."""
        if self._predictor is None or not isinstance(self._producer, FromBudget):
            return
        line = ""
        with self._predicting():
            line = self._step_budget.excess(self._predictor, inputs)
        if line:
            get_logger().info(line)
            budget = self._step_budget
            self._forget()
            self._step_budget = budget

    def _check_budget(self) -> None:
        if self._predictor is not None and isinstance(self._producer, FromBudget):
            with self._predicting():
                if line := self._step_budget.check(self._predictor):
                    get_logger().warning(line)

    def _costs(self, graph: AnalyzedGraph) -> Costs:
        self._progress.stage = "measuring operators, and solving for the cheapest recompute"
        return self._step_budget.costs(graph, next(self._model.parameters()).device, self._compiler == "inductor")

    def _announced(self, is_first: bool) -> contextlib.AbstractContextManager[Progress]:
        """Lines around the first call of a compiled forward; nothing around the later ones."""
        if not is_first:
            return contextlib.nullcontext(Progress())
        name = type(self._model).__name__
        return announced(
            f"compiling the training graph of {name} with {self._compiler}",
            f"compiled the training graph of {name} and ran its forward",
            "tracing forward and backward, partitioning, compiling; once, takes a minute for large models",
            stage="tracing",
        )

    def _note_recompile(self, watch: compat.Watch) -> None:
        """Say why a later forward recompiled. Raises MemOptError where it did so too often."""
        try:
            for line in self._recompiles.add(watch.recompiles(), compat.recompile_limit(), type(self._model).__name__):
                self._say(line)
        except MemOptError:
            self._forget()
            raise

    def _show(self, graphs: list[PartitionedGraph], watch: compat.Watch, inputs: dict[str, Any]) -> None:
        """The first forward's graphs are the table; later ones were compiled for inputs of another kind.

        Raises:
            ConfigError: the first forward has several graphs, and the user asks for what none of them has.
        """
        is_first = self._table is None
        matched = matched_in(self._producer, [(graph.choice, graph.candidates) for graph in graphs])
        if not is_first:
            for remark in matched.remarks:
                self._say(f"in the new graph: {remark}")
            return
        losses = [loss for graph in graphs for loss in graph.losses]
        is_asked = self._loss == CHUNKED != self._loss_asked
        remarks = [*matched.remarks, *check_row(losses, is_asked, self._selection.strict)]
        # A later batch of one row may lack a plan (nothing to repeat), which is no mistake of the user.
        if self._selection.strict:
            matched.check()
        for remark in remarks:
            get_logger().warning(remark)
        if len(graphs) > 1:
            reasons = "; ".join(watch.graph_breaks())
            self._say(
                f"graph breaks split the training forward into {len(graphs)} graphs, planned together: {reasons}"
            )
        names = SymbolNames()
        with informing("the names of sizes"):
            names = SymbolNames.of(graphs, is_encoder_decoder(self._model))
        if all(graph.prediction for graph in graphs):
            with self._predicting():
                self._predictor = StepMemoryPredictor(self._model, graphs, inputs, self._resident, names)
        self._check_budget()
        self._plan_file = plan_file_of(self._model, self._compiler, graphs, names.first)
        header = self._header(graphs)
        self._table = PlanTable(engine=self.name, plans=(), header=header)
        with informing("the plan table"):
            self._table = to_table(graphs, matched, names, header)

    def _show_nothing(self, watch: compat.Watch) -> None:
        reasons = "; ".join(watch.graph_breaks()) or "nothing in it can be trained"
        line = f"NOT under a plan: torch compiled no training graph of this model ({reasons})"
        get_logger().warning(line)
        self._table = PlanTable(engine=self.name, plans=(), header=(line,))

    def _predicting(self) -> contextlib.AbstractContextManager:
        """Around what reads the predictor: an error there is logged, and nothing is predicted from then on."""
        return informing("the predicted peak", lambda: setattr(self, "_predictor", None))

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            get_logger().info(line)

    def _header(self, graphs: list[PartitionedGraph]) -> tuple[str, ...]:
        line = plan_line(self._model, self._compiler, graphs)
        if self._predictor is not None:
            with self._predicting():
                return (line, *prediction_lines(self._predictor))
        return (line,)
