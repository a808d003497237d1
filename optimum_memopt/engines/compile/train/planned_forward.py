"""A model's training forward under one plan: compiled, shown, predicted, or plain PyTorch where it cannot be."""

import contextlib
import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimum_memopt.engines.compile.capture.recompiles import Recompiles
from optimum_memopt.engines.compile.capture.traced_forward import (
    ForwardArgs,
    GraphInForward,
    TracedCall,
    TracedForward,
    TraceSpec,
    no_training_graph,
)
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.symbols import is_covered
from optimum_memopt.engines.compile.loss.decide import refusing_gradients
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers import matched_in
from optimum_memopt.engines.compile.predict.planner import Planner
from optimum_memopt.engines.compile.predict.step_predictor import Predictors, StepMemoryPredictor
from optimum_memopt.engines.compile.predict.table import mismatch_line, show
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.dynamo import failure_of_compiler, own_error
from optimum_memopt.engines.shared.forward_patch import ForwardState, weak_method
from optimum_memopt.errors import is_out_of_memory, line_of
from optimum_memopt.logs import best_effort, get_logger
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable


@dataclass(frozen=True)
class _Attempt:
    outputs: Any
    predictor: StepMemoryPredictor | None


class PlannedForward:
    """Compiles at its first call, under a budget until the step is within it, and again for arguments of another kind.

    Attributes:
        predictors: None before the first call, and where nothing is predicted.
        is_one_graph: the first forward was one graph, which ran once and has all of it.
    """

    def __init__(
        self, model: torch.nn.Module, forward: Callable[..., Any], spec: TraceSpec, planner: Planner["_Attempt"]
    ) -> None:
        self._model, self._forward, self._spec, self.planner = model, forward, spec, planner
        self._forget()

    def _forget(self) -> None:
        # torch keeps what was compiled with it until the process ends.
        self._traced = TracedForward(self._model, self._forward, self._spec, weak_method(self._choose))
        self._recompiles = Recompiles()
        self._is_plain = False
        self.table: PlanTable | None = None
        self.plan_file: PlanFile | None = None
        self.predictors: Predictors | None = None
        self.is_one_graph = False
        self.choices: tuple[Choice, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """True once a forward has run."""
        return self.table is not None

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Predicts steps of the graphs that the table shows; None where nothing is predicted."""
        return self.predictors.first if self.predictors is not None else None

    def __call__(self, call: ForwardArgs) -> Any:
        """The forward's outputs.

        Raises:
            MemOptError: the plan does not go with the model, nothing fits a budget, torch recompiled too often, or the
                compiled forward fails under a plan that must hold.
        """
        if self.is_compiled or not self.planner.solves:
            return self._run(call)
        before = ForwardState.of(self._model, with_buffers=True)

        def attempt() -> _Attempt:
            return _Attempt(self._run(call), self.predictor)

        def forget() -> None:
            self._forget()
            before.restore(self._model)

        return self.planner.plan(attempt, forget).outputs

    def covers(self, sizes: Mapping[str, int]) -> bool:
        """True where its plan is made for a batch of these sizes; it may not be compiled for them yet."""
        return self.planner.largest is not None and is_covered(sizes, self.planner.largest)

    def is_within(self, inputs: Mapping[str, object]) -> bool:
        """True where a step with this batch is predicted to be within the budget; False where nothing is predicted."""
        is_within = False
        if self.predictors is not None:
            with self.predicting():
                is_within = self.planner.is_within(self.predictors.of(inputs), inputs)
        return is_within

    def excess(self, inputs: Mapping[str, object]) -> str:
        """A line about a batch that would pass the budget; empty where it does not, or where that is not known."""
        line = ""
        if self.planner.solves and self.predictors is not None:
            with self.predicting():
                line = self.planner.excess(self.predictors.of(inputs), inputs)
        return line

    def predicting(self) -> contextlib.AbstractContextManager:
        """Around what reads the predictor: an error there is logged, and nothing is predicted from then on."""
        return best_effort("the predicted peak", lambda: setattr(self, "predictors", None))

    def add_to_header(self, lines: list[str]) -> None:
        """Add lines to the table's header, after the first call."""
        if self.table is not None:
            self.table = replace(self.table, header=(*self.table.header, *lines))

    def run_plainly(self, call: ForwardArgs) -> Any:
        """The outputs of the model's own forward, changed as those of the compiled one."""
        return _refusing(self._traced.plainly(call), call)

    def give_up(self, why: str, failed: Exception | None = None) -> None:
        """Say that plain PyTorch trains the model from now on; the table has that line alone.

        Raises:
            UnsupportedModelError: the plan must hold.
        """
        if (refusal := self.planner.producer.refusal(why)) is not None:
            raise refusal from failed
        line = f"NOT under a plan: {why}"
        get_logger().warning(line)
        self.table = PlanTable(engine="compile", plans=(), header=(line,))
        self.predictors = self.plan_file = None

    def _choose(self, graph: AnalyzedGraph, state: GraphInForward) -> Choice:
        choice = self.planner.choose(graph, state)
        refuses = self.table is None and self._spec.strict
        if refuses and state.is_all:
            choice.matched.check()
        if line := mismatch_line(choice, refuses):
            self._traced.say(line)
        return choice

    def _run(self, call: ForwardArgs) -> Any:
        if self._is_plain:
            return self.run_plainly(call)
        try:
            traced = self._traced(call)
        except Exception as error:
            if not self._traced.is_first or own_error(error) is not None:
                raise
            outputs = self._plain_outputs(call, error)
            self._is_plain = True
            return outputs
        for line in self._recompiles.add(traced.recompiles, dynamo.recompile_limit(), type(self._model).__name__):
            self._traced.say(line)
        if traced.graphs:
            self._show(traced, call.inputs)
        elif self.table is None:
            self.give_up(no_training_graph(traced))
        if self.predictors is not None:
            with self.predicting():
                self.predictors.note_forward(traced.ran, traced.tape, call.inputs, traced.outputs)
        return _refusing(traced.outputs, call)

    def _show(self, traced: TracedCall, inputs: Mapping[str, Any]) -> None:
        """The first forward's graphs are the table; later ones were compiled for inputs of another kind."""
        graphs, producer = traced.graphs, self.planner.producer
        if self.table is not None:
            for remark in matched_in(producer, [(graph.choice, graph.candidates) for graph in graphs]).remarks:
                self._traced.say(f"in the new graph: {remark}")
            return
        resident = self.planner.resident(self._traced.held)
        shown = show(self._model, graphs, traced.tape, inputs, resident, producer, self._spec)
        for remark in shown.remarks:
            get_logger().warning(remark)
        if len(graphs) > 1:
            reasons = "; ".join(traced.graph_breaks)
            self._traced.say(
                f"graph breaks split the training forward into {len(graphs)} graphs, planned together: {reasons}"
            )
        self.table, self.plan_file, self.is_one_graph = shown.table, shown.plan_file, shown.is_one_graph
        self.choices = tuple(graph.choice for graph in graphs)
        self.predictors = Predictors(shown.predictor) if shown.predictor is not None else None

    def _plain_outputs(self, call: ForwardArgs, failed: Exception) -> Any:
        """Plain PyTorch's outputs, where the compiled forward has failed.

        Raises:
            UnsupportedModelError: the plan must hold.
            Exception: plain PyTorch's own, where it fails too.
        """
        # They hold what the graphs that have run saved for the backward.
        traceback.clear_frames(failed.__traceback__)
        gc.collect()
        if why := failure_of_compiler(failed):
            self.give_up(why, failed)
            return self.run_plainly(call)
        why = f"its compiled forward failed in the first step ({line_of(failed)})"
        try:
            outputs = self.run_plainly(call)
        except Exception as error:
            if is_out_of_memory(error):
                self.give_up(why, failed)
            raise
        self.give_up(why, failed)
        return outputs


def _refusing(outputs: Any, call: ForwardArgs) -> Any:
    return refusing_gradients(outputs) if call.loss_only else outputs
