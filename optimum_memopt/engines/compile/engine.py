"""Trains a model through torch.compile in place, with plans in ONNX Runtime's grammar applied by a partitioner."""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from optimum_memopt.engines import in_place
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile import compat, support_checks
from optimum_memopt.engines.compile.analysis.module_paths import add_outer_modules
from optimum_memopt.engines.compile.backend import Backend, check_compiler, configured, default_compiler
from optimum_memopt.engines.compile.detach_outputs import loss_only, refusing_gradients
from optimum_memopt.engines.compile.memory.footprint import resident
from optimum_memopt.engines.compile.memory.inductor_memory import InductorPrograms
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.engines.compile.partitioned_graph import Modules, PartitionedGraph, split
from optimum_memopt.engines.compile.recompiles import FailedGuards
from optimum_memopt.engines.compile.selection import matches
from optimum_memopt.engines.compile.table import to_table
from optimum_memopt.engines.compile.trace_fixes import TraceFixes
from optimum_memopt.engines.key_value_cache import without_key_value_cache
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger, informing
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.matching import Matches
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.progress import Progress, announced

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
    """

    name = "compile"

    def __init__(self, selection: Selection | None = None, compiler: str | None = None, dynamic: bool = True) -> None:
        self._compiler_asked = compiler
        self._dynamic = dynamic
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
        if self._compiler_asked is not None:
            check_compiler(self._compiler_asked, next(model.parameters()).device.type)

    def _enter(self) -> None:
        self._is_on_cpu = next(self._model.parameters()).device.type == "cpu"
        if self._is_on_cpu:
            malloc.return_freed_memory()

    def _leave(self) -> None:
        if self._is_on_cpu:
            malloc.restore()

    def plans(self) -> PlanTable | None:
        """The table of the current training graphs, None before the first training forward."""
        return self._table

    def insight(self) -> str:
        """Nothing: the table holds all there is."""
        return ""

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
        # By whether the loss alone is in the graph, and the hooks of all modules.
        self._compiled: dict[tuple[bool, tuple[int, ...]], Callable[..., Any]] = {}
        # What torch traces for them.
        self._traced: list[Callable[..., Any]] = []
        # Graphs that the current forward has compiled so far.
        self._graphs: list[PartitionedGraph] = []
        self._table: PlanTable | None = None
        self._predictor: StepMemoryPredictor | None = None
        self._resident = 0
        self._progress = Progress()
        # How often a forward after the first recompiled, and why.
        self._recompiles = 0
        self._failed_guards = FailedGuards()
        self._said: set[str] = set()

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        alone = self.backward_from_loss_only()
        variant = (alone, compat.global_hooks())
        is_new = variant not in self._compiled
        if is_new:
            self._compiled[variant] = self._compile(alone)
        kwargs = without_key_value_cache(self._model, args, kwargs)
        watch = compat.Watch()
        is_first = is_new or self._table is None
        try:
            with configured(), self._trace_fixes.around_call(kwargs), self._announced(is_first) as self._progress:
                outputs = self._compiled[variant](*args, **kwargs)
        except BaseException as error:
            # Graphs of a forward that did not come to its end are no part of the next one's table.
            self._graphs = []
            if isinstance(refusal := getattr(error, "inner_exception", None), MemOptError):
                raise refusal from None
            raise
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
        return refusing_gradients(outputs) if alone else outputs

    def _compile(self, alone: bool) -> Callable[..., Any]:
        if self._compiled:
            kept = (
                "the loss alone keeps its gradient" if alone else "outputs beside the loss may be read and keep theirs"
            )
            self._say(f"compiling another training graph for other hooks or another caller: {kept}")
        else:
            self._trace_fixes = TraceFixes(self._model)
        # torch keeps each backend until the process ends (`torch/_dynamo/eval_frame.py`, `cached_backends`, 2.13);
        # it must not keep the model with it.
        split_of = weakref.WeakMethod(self._split)
        backend = Backend(self._compiler, lambda *joint: split_of()(*joint), str(self._selection))
        plain = self._training_forward.plain_forward
        forward = compat.with_own_code(loss_only(plain) if alone else plain)
        self._traced.append(forward)
        return compat.compile_alone(forward, backend, self._dynamic)

    def _split(
        self,
        programs: InductorPrograms,
        module: fx.GraphModule,
        inputs: Any,
        num_fwd_outputs: int,
        others: dict[str, Any],
    ) -> Modules:
        number = len(self._graphs) + 1
        self._progress.stage = f"partitioning graph {number} of {len(module.graph.nodes)} operators"
        add_outer_modules(module.graph, self._model, compat.traced_module())
        is_all = any(compat.is_all_of(forward) for forward in self._traced)
        is_only = self._table is None and is_all
        graph, modules = split(module, inputs, num_fwd_outputs, others, self._selection, self._graphs, is_only)
        self._graphs.append(replace(graph, programs=programs, is_all_of_forward=is_all))
        self._resident = resident(next(self._model.parameters()).device)
        self._progress.stage = f"compiling graph {number}"
        return modules

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
        """Say why a later forward recompiled.

        Raises:
            MemOptError: it did so too often.
        """
        reasons = watch.recompiles()
        if not reasons:
            return
        self._recompiles += 1
        for reason in reasons:
            if line := self._failed_guards.add(reason):
                self._say(line)
        limit = compat.recompile_limit()
        if self._recompiles >= limit:
            guards = self._failed_guards
            self._forget()
            raise MemOptError(
                f"{type(self._model).__name__} was recompiled {limit} times, which is the limit; last failed guards: "
                f"{guards.last}; {guards.advice}, or raise torch._dynamo.config.recompile_limit"
            )

    def _show(self, graphs: list[PartitionedGraph], watch: compat.Watch, inputs: dict[str, Any]) -> None:
        """The first forward's graphs are the table; later ones were compiled for inputs of another kind.

        A config is matched against all graphs of the forward, so that an id may be in any of them. Where the forward
        is one graph, that has been done before it was compiled. With several graphs it is done when they have run:
        each is compiled and run before the next one is traced, from values that it gave, so that only the end of the
        forward tells which ids there are.
        """
        candidates = [candidate for graph in graphs for candidate in graph.candidates]
        again = self._table is not None
        asked = Matches()
        if self._selection.config is not None:
            # A batch of one row may not have every plan (nothing to repeat), which is no mistake of the user.
            asked = matches(self._selection.config, candidates, self._selection.strict and not again)
        if again:
            for remark in asked.remarks:
                self._say(f"in the new graph: {remark}")
            return
        for remark in asked.remarks:
            get_logger().warning(remark)
        if len(graphs) > 1:
            reasons = "; ".join(watch.graph_breaks())
            self._say(f"the training forward is in {len(graphs)} graphs, planned together: {reasons}")
        is_encoder_decoder = bool(getattr(getattr(self._model, "config", None), "is_encoder_decoder", False))
        if all(graph.prediction for graph in graphs):
            with self._predicting():
                self._predictor = StepMemoryPredictor(self._model, graphs, inputs, self._resident, is_encoder_decoder)
        header = self._header(graphs)
        self._table = PlanTable(engine=self.name, plans=(), header=header)
        with informing("the plan table"):
            self._table = to_table(graphs, self._selection, asked, header, is_encoder_decoder)
        if self._selection.level and not self._table.enabled:
            get_logger().warning(
                f"--memory_opt_level {self._selection.level}: nothing in a layer of {type(self._model).__name__} can "
                "be made again from what goes into the layer; take plans by name"
            )

    def _show_nothing(self, watch: compat.Watch) -> None:
        reasons = "; ".join(watch.graph_breaks()) or "nothing in it can be trained"
        line = f"NOT under a plan: torch made no training graph of this model ({reasons})"
        get_logger().warning(line)
        self._table = PlanTable(engine=self.name, plans=(), header=(line,))

    def _predicting(self) -> contextlib.AbstractContextManager:
        """Around what reads the predictor: an error there is said, and nothing more is predicted."""
        return informing("the predicted peak", lambda: setattr(self, "_predictor", None))

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            get_logger().info(line)

    def _header(self, graphs: list[PartitionedGraph]) -> tuple[str, ...]:
        asked = "no plan: torch's own partition"
        if self._selection.config is not None:
            asked = f"config {self._selection.config}"
        elif self._selection.level:
            asked = f"level {self._selection.level}"
        device = next(self._model.parameters()).device.type
        pieces = f", in {len(graphs)} graphs" if len(graphs) > 1 else ""
        line = f"{type(self._model).__name__} on {device} by {self._compiler}, {asked}{pieces}"
        if self._predictor is not None:
            with self._predicting():
                return (line, *self._predicted())
        return (line,)

    def _predicted(self) -> tuple[str, str]:
        predictor, footprint = self._predictor, self._predictor.footprint()
        return (
            f"Predicted for the first batch: {predictor.stashed / MIB:.1f} MiB stashed, peak of activations and "
            f"gradients {footprint.activations / MIB:.1f} MiB{predictor.caveat and f' ({predictor.caveat})'}",
            f"Predicted peak of a step with AdamW: {footprint.peak / MIB:.1f} MiB = {footprint}",
        )
