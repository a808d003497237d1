"""A model's training forward, compiled under one plan, and what is known of it."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from optimum_memopt.compat import forward_hook_ids, is_encoder_decoder
from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.compile.capture.backend import Backend, configured
from optimum_memopt.engines.compile.capture.recompiles import Recompiles
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import Modules, gradients_of, without_gradient
from optimum_memopt.engines.compile.graph.saved_activations import add_outer_modules
from optimum_memopt.engines.compile.graph.symbols import SymbolNames, input_sizes
from optimum_memopt.engines.compile.loss.decide import LossPlan, check_row, plan_losses
from optimum_memopt.engines.compile.loss.outputs import refusing_gradients, with_detached_outputs, without_logits
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.inductor_programs import InductorPrograms
from optimum_memopt.engines.compile.memory.tape import Tape, TapeRecorder
from optimum_memopt.engines.compile.options import CHUNKED, PLAIN
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph, partition_joint
from optimum_memopt.engines.compile.partition.producers import matched_in
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.predict.step_predictor import Predictors, StepMemoryPredictor
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.trace_fixes import TraceFixes
from optimum_memopt.engines.compile.train.fallback import outputs_instead, own_error, without_plan
from optimum_memopt.engines.compile.train.plan_files import mismatch_line, plan_file_of
from optimum_memopt.engines.compile.train.table import host_line, plan_line, prediction_lines, to_table
from optimum_memopt.engines.shared.forward_patch import ForwardState, weak_method
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing, cross_entropy
from optimum_memopt.logs import best_effort, get_logger
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.progress import Progress, announced


@dataclass(frozen=True)
class Settings:
    """How a forward is compiled.

    Attributes:
        compiler: one of `options.COMPILERS`.
        dynamic: sizes of batches stay symbols.
        is_dry: no programs are compiled: the graphs are only looked at.
        loss: one of `options.LOSSES`.
        is_loss_row_asked: a config has the row of the loss.
        strict: what the graphs do not have is an error.
        smoothing: label smoothing, computed with the loss.
        purpose: for which batches, for log lines; empty: for all.
        target: the device that it is planned for; None: where the model lies.
        run: that is planned, where none trains.
    """

    compiler: str
    dynamic: bool
    is_dry: bool
    loss: str
    is_loss_row_asked: bool
    strict: bool
    smoothing: LabelSmoothing | None
    purpose: str = ""
    target: Device | None = None
    run: Run | None = None


class PlannedForward:
    """Compiles at its first call, and again for inputs of another kind.

    Args:
        model: that trains.
        forward: its own.
        producer: makes the choices.
        settings: how it is compiled.
        resident: bytes that the process holds beside the optimizer's states, asked when a graph was partitioned.

    Attributes:
        table: None before the first call.
        plan_file: None before the first call.
        predictors: None before the first call, and where nothing is predicted.
        progress: of the call that compiles.
        is_one_graph: the first forward was one graph, which ran once and has all of it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        producer: Producer,
        settings: Settings,
        resident: Callable[[], int],
    ) -> None:
        self._model, self._forward, self._producer = model, forward, producer
        self._settings, self._ask_resident = settings, resident
        self._name = type(model).__name__
        self._trace_fixes = TraceFixes(model)
        # By whether only the loss keeps its gradient, whether the logits are dropped, and the hooks of all modules.
        self._compiled: dict[tuple[bool, bool, tuple[int, ...]], Callable[..., Any]] = {}
        # What torch traces for them.
        self._traced: list[Callable[..., Any]] = []
        # Graphs that the current forward has compiled so far.
        self._graphs: list[PartitionedGraph] = []
        # Of the current forward.
        self._inputs: Mapping[str, Any] = {}
        # The losses of the graph that is compiled next, and of its inputs that are parameters the names.
        self._losses: list[LossPlan] = []
        self._parameters: tuple[str, ...] = ()
        # Of the current forward's graphs, the one that is partitioned included.
        self._gradients: list[Mapping[str, bool]] = []
        # All that were compiled, and what ran in the current forward.
        self._of_programs: dict[object, PartitionedGraph] = {}
        self._tape = TapeRecorder()
        self._resident = 0
        self._recompiles = Recompiles()
        self._said: set[str] = set()
        self._has_started_again = False
        self.table: PlanTable | None = None
        self.plan_file: PlanFile | None = None
        self.predictors: Predictors | None = None
        self.progress = Progress()
        self.is_one_graph = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_only: bool, reader: str) -> Any:
        """The forward's outputs.

        Args:
            args: of the forward.
            kwargs: of the forward.
            loss_only: nobody calls backward from any output but the loss.
            reader: who may read more of the outputs than the loss, empty when nobody does.

        Raises:
            MemOptError: the plan does not go with the model, nothing fits a budget, torch recompiled too often, or the
                compiled forward fails under a plan that must hold.
        """
        drops_logits = not reader and self._settings.loss != PLAIN
        variant = (loss_only, drops_logits, dynamo.global_hooks())
        is_new = variant not in self._compiled
        if is_new:
            self._compiled[variant] = self._compile(loss_only, drops_logits, reader)
        watch = dynamo.Watch()
        is_first = is_new or self.table is None
        before = ForwardState.of(self._model, with_buffers=True) if is_first and not self._settings.is_dry else None
        hooks = None if self.table is not None or self._has_started_again else forward_hook_ids(self._model)
        failed: Exception | None = None
        outputs, self._inputs = None, kwargs
        self._tape.begin(dynamo.tree_leaves((args, kwargs)))
        try:
            with (
                configured(compiles=is_first),
                self._trace_fixes.around_call(kwargs),
                self._announced(is_first) as self.progress,
            ):
                outputs = self._compiled[variant](*args, **kwargs)
        except BaseException as error:
            # Graphs of a forward that failed are no part of the next one's table.
            self._graphs = []
            if (own := own_error(error)) is None and before is not None and isinstance(error, Exception):
                failed = error
            elif not self._has_new_hooks(hooks) or not isinstance(error, Exception):
                if own is None or own is error:
                    raise
                raise own from None
        finally:
            self._inputs = {}
        if self._has_new_hooks(hooks):
            # transformers installs those that collect hidden states and router logits in a model's first forward,
            # which breaks its graph there; all later ones run with them.
            self._has_started_again, outputs, self._graphs = True, None, []
            self._compiled.clear()
            if before is not None:
                before.restore(self._model)
            self._say(f"the first forward of {self._name} has put hooks on its modules: compiling it again with them")
            return self(args, kwargs, loss_only, reader)
        if before is not None and failed is not None:
            # Graphs before the one that failed have run.
            before.restore(self._model)
            plain = self._wrapped(loss_only, drops_logits)
            outputs, self.table = outputs_instead(failed, lambda: plain(*args, **kwargs), self._producer)
            self._compiled[variant] = plain
        self._tape.end(dynamo.tree_leaves(outputs))
        if not is_first:
            for line in self._recompiles.add(watch.recompiles(), dynamo.recompile_limit(), self._name):
                self._say(line)
        if self._graphs:
            graphs, self._graphs = self._graphs, []
            self._of_programs.update((graph.programs, graph) for graph in graphs)
            self._show(graphs, watch, kwargs)
        elif self.table is None:
            reasons = "; ".join(watch.graph_breaks()) or "nothing in it can be trained"
            self.give_up(f"torch compiled no training graph of this model ({reasons})")
        if self.predictors is not None:
            with self.predicting():
                ran = [programs for programs in dict.fromkeys(self._tape.graphs) if programs in self._of_programs]
                graphs = [self._of_programs[programs] for programs in ran]
                self.predictors.note_forward(graphs, self._tape.tape(ran), kwargs, outputs)
        return refusing_gradients(outputs) if loss_only else outputs

    @property
    def graphs(self) -> tuple[PartitionedGraph, ...]:
        """Those of the current forward that are compiled, and have run."""
        return tuple(self._graphs)

    @property
    def tape(self) -> Tape:
        """The runs of `graphs` so far."""
        return self._tape.tape([graph.programs for graph in self._graphs])

    @property
    def untrained(self) -> frozenset[str]:
        """See `without_gradient`; also while a graph is partitioned."""
        return without_gradient(self._gradients)

    def _has_new_hooks(self, before: Sequence[int] | None) -> bool:
        return before is not None and forward_hook_ids(self._model) != before

    def add_to_header(self, lines: Sequence[str]) -> None:
        """Add lines to the table's header, after the first call."""
        if self.table is not None:
            self.table = replace(self.table, header=(*self.table.header, *lines))

    def predicting(self) -> contextlib.AbstractContextManager:
        """Around what reads the predictor: an error there is logged, and nothing is predicted from then on."""
        return best_effort("the predicted peak", lambda: setattr(self, "predictors", None))

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Of the graphs that the table shows."""
        return self.predictors.first if self.predictors is not None else None

    def _compile(self, loss_only: bool, drops_logits: bool, reader: str) -> Callable[..., Any]:
        if self._compiled:
            outputs = (
                "only the loss keeps its gradient"
                if loss_only
                else "outputs beside the loss may be read and keep theirs"
            )
            self._say(f"compiling another training graph for other hooks or another caller: {outputs}")
        settings = self._settings
        # torch keeps each backend until the process ends (`torch/_dynamo/eval_frame.py`, `cached_backends`, 2.13);
        # it must not keep the model with it.
        partition, prepare = weak_method(self._partition), weak_method(self._prepare)
        say = weak_method(self._say)
        backend = Backend(
            settings.compiler,
            partition,
            lambda module, inputs: prepare(module, inputs, reader),
            say,
            self._tape,
            settings.is_dry,
        )
        forward = dynamo.with_own_code(self._wrapped(loss_only, drops_logits))
        self._traced.append(forward)
        return dynamo.compile_alone(forward, backend, settings.dynamic)

    def _wrapped(self, loss_only: bool, drops_logits: bool) -> Callable[..., Any]:
        """The model's forward with what the engine changes of its outputs."""
        forward, smoothing = self._forward, self._settings.smoothing
        if smoothing is not None:
            forward = smoothing.wrap(forward, functools.partial(cross_entropy, smoothing))
        if loss_only:
            forward = with_detached_outputs(forward)
        return without_logits(forward) if drops_logits else forward

    def _prepare(self, module: fx.GraphModule, inputs: Sequence[Any], reader: str) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._parameters = tuple(names.get(id(given), "") for given in inputs)
        self._plan_losses(module, reader)

    def _plan_losses(self, module: fx.GraphModule, reader: str) -> None:
        mode = self._settings.loss
        self._losses, others = plan_losses(module.graph, mode, reader)
        if any(plan.is_chunked for plan in self._losses):
            module.recompile()
        told = [plan.reason for plan in self._losses if plan.reason and (plan.is_requested or plan.is_read_by_caller)]
        for reason in (*told, *(others if mode == CHUNKED else ())):
            self._say(f"the loss of {self._name} is not chunked: {reason}")

    def _partition(
        self,
        programs: InductorPrograms,
        module: fx.GraphModule,
        inputs: Any,
        num_fwd_outputs: int,
        others: dict[str, Any],
    ) -> tuple[Choice, Modules]:
        number = len(self._graphs) + 1
        self.progress.stage = f"partitioning graph {number} of {len(module.graph.nodes)} operators"
        add_outer_modules(module.graph, self._model, dynamo.traced_module())
        is_all = any(dynamo.is_all_of(forward) for forward in self._traced)
        refuses = self.table is None and self._settings.strict
        gradients = gradients_of(module.graph, num_fwd_outputs, self._parameters)
        self._gradients = [*(known.gradients for known in self._graphs), gradients]
        graph, modules = partition_joint(
            module,
            inputs,
            num_fwd_outputs,
            others,
            self._producer,
            self._graphs,
            refuses_mistakes=is_all and refuses,
            runs_operators=self._settings.compiler != "inductor",
            target=self._settings.target,
            batch=input_sizes(self._inputs),
        )
        losses, self._losses = tuple(self._losses), []
        known = replace(graph, programs=programs, is_all_of_forward=is_all, losses=losses, gradients=gradients)
        self._graphs.append(known)
        if line := mismatch_line(graph.choice, refuses):
            self._say(line)
        self._resident = self._ask_resident()
        self.progress.stage = f"compiling graph {number}"
        return graph.choice, modules

    def _announced(self, is_first: bool) -> contextlib.AbstractContextManager[Progress]:
        """Lines around the first call of a compiled forward; nothing around the later ones."""
        if not is_first:
            return contextlib.nullcontext(Progress())
        subject = f"the training graph of {self._name}{self._settings.purpose}"
        return announced(
            f"compiling {subject} with {self._settings.compiler}",
            f"compiled {subject} and ran its forward",
            "tracing forward and backward, partitioning, compiling; once, takes a minute for large models",
            stage="tracing",
        )

    def _show(self, graphs: list[PartitionedGraph], watch: dynamo.Watch, inputs: Mapping[str, Any]) -> None:
        """The first forward's graphs are the table; later ones were compiled for inputs of another kind.

        Raises:
            ConfigError: the first forward has several graphs, and the user asks for what none of them has.
        """
        strict = self._settings.strict
        matched = matched_in(self._producer, [(graph.choice, graph.candidates) for graph in graphs])
        if self.table is not None:
            for remark in matched.remarks:
                self._say(f"in the new graph: {remark}")
            return
        self.is_one_graph = len(graphs) == 1 and graphs[0].is_all_of_forward and graphs[0].programs.runs <= 1
        losses = [loss for graph in graphs for loss in graph.losses]
        remarks = [*matched.remarks, *check_row(losses, self._settings.is_loss_row_asked, strict)]
        # A later batch of one row may lack a plan (nothing to repeat), which is no mistake of the user.
        if strict:
            matched.check()
        for remark in remarks:
            get_logger().warning(remark)
        if len(graphs) > 1:
            reasons = "; ".join(watch.graph_breaks())
            self._say(
                f"graph breaks split the training forward into {len(graphs)} graphs, planned together: {reasons}"
            )
        names = SymbolNames()
        with best_effort("the names of sizes"):
            names = SymbolNames.of(graphs, is_encoder_decoder(self._model))
        if all(graph.prediction for graph in graphs):
            with self.predicting():
                tape = self._tape.tape([graph.programs for graph in graphs])
                first = StepMemoryPredictor(
                    self._model, graphs, inputs, self._resident, names, self._settings.run, tape=tape
                )
                self.predictors = Predictors(first)
        header, footprint = self._predicted(graphs)
        self.plan_file = plan_file_of(self._model, self._settings.compiler, graphs, names.first, footprint)
        self.table = PlanTable(engine="compile", plans=(), header=header)
        with best_effort("the plan table"):
            self.table = to_table(graphs, matched, names, header)

    def _predicted(self, graphs: list[PartitionedGraph]) -> tuple[tuple[str, ...], Footprint | None]:
        """The lines above the table, and the first step's memory."""
        line = plan_line(self._model, self._settings.compiler, graphs, self._settings.target)
        host = host_line(graphs)
        if self.predictor is not None:
            with self.predicting():
                return (line, *prediction_lines(self.predictor), *host), self.predictor.footprint()
        return (line, *host), None

    def run_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_only: bool, reader: str) -> Any:
        """The outputs of the model's own forward, changed as those of the compiled one; arguments as there."""
        outputs = self._wrapped(loss_only, not reader and self._settings.loss != PLAIN)(*args, **kwargs)
        return refusing_gradients(outputs) if loss_only else outputs

    def give_up(self, why: str, failed: Exception | None = None) -> None:
        """There is no plan and no prediction.

        Args:
            why: for the log and the table's header.
            failed: the error that has led to it.

        Raises:
            UnsupportedModelError: the plan must hold.
        """
        self.table = without_plan(self._producer, why, failed)
        self.predictors = self.plan_file = None

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            get_logger().info(line)
