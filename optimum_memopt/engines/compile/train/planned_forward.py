"""A model's training forward under one plan: compiled, shown in a table, predicted; plain PyTorch is the fallback."""

import contextlib
import gc
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from optimum_memopt.compat.torch import tensors_in, writes_to
from optimum_memopt.engines.api.run import NOTHING_HELD, HeldOutputs, Run
from optimum_memopt.engines.compile.capture.forward_call import ForwardArgs
from optimum_memopt.engines.compile.capture.traced_forward import TracedCall, TracedForward, no_training_graph
from optimum_memopt.engines.compile.capture.traced_graph import ForwardProgress, GraphChoices
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.symbols import is_covered
from optimum_memopt.engines.compile.loss.decide import refusing_gradients
from optimum_memopt.engines.compile.memory.known_tapes import OtherRunsError
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers import matched_in
from optimum_memopt.engines.compile.predict.pending import Pending
from optimum_memopt.engines.compile.predict.planner import Attempt, Planner, RunKeys, runs_of
from optimum_memopt.engines.compile.predict.step_predictor import Predictors, StepMemoryPredictor
from optimum_memopt.engines.compile.predict.table import show
from optimum_memopt.engines.shared.forward_patch import ForwardState, weak_method
from optimum_memopt.engines.torch_compat import autograd, dynamo
from optimum_memopt.engines.torch_compat.compiler_errors import (
    failure_of_compiler,
    is_of_trace,
    line_with_place,
    own_error,
)
from optimum_memopt.engines.torch_compat.recompiles import NUMBER, RUN_AHEAD_CALL, CodePlace, Recompile
from optimum_memopt.errors import UnsupportedModelError, clear_frames, is_out_of_memory, line_of
from optimum_memopt.logs import best_effort, get_logger
from optimum_memopt.memory.optimizers import planned_like
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable

# Prefix of torch's names for values on the stack at a graph break.
_UNNAMED = "___"


# Returned instead of outputs: rerun the forward under another plan, from the state before it.
RUN_AGAIN = object()
# Recompiles for one cause outside of layers, after which the code that causes them is left to Python. In layers, where
# that would end the plan, only the limit for all causes together counts.
_MOST_OF_CAUSE = 4
# Number of different batches that torch may fail to trace, each of which takes seconds.
_MOST_UNTRACED = 3


class Recompiles:
    """Counts the recompiles of a model after its first forward, by cause.

    Guards that differ only in their numbers have the same cause: batches of many sizes, or a number of the model that
    changes in every step.
    """

    def __init__(self) -> None:
        self._count = 0
        self._causes: Counter[tuple[str, CodePlace | None]] = Counter()

    @property
    def is_over(self) -> bool:
        """True if the number of forwards that recompiled has reached the limit."""
        return self._count >= dynamo.recompile_limit()

    def add(self, recompiles: Iterable[Recompile]) -> list[Recompile]:
        """Count the recompiles of a forward, if any. Returns one for each cause."""
        of_causes = {_cause(recompile): recompile for recompile in recompiles}
        self._count += bool(of_causes)
        self._causes.update(list(of_causes))
        return list(of_causes.values())

    def line(self, recompile: Recompile) -> str:
        """Returns the log line for the first recompile of a cause; empty for later ones."""
        is_first = self._causes[_cause(recompile)] == 1
        return f"recompiled the training graph; failed guard: {_described(recompile)}" if is_first else ""

    def too_many(self, recompile: Recompile, is_in_layers: bool) -> str:
        """Returns why the code that causes a recompile is left to Python; empty if it stays compiled."""
        count = self._causes[_cause(recompile)]
        if not self.is_over and (is_in_layers or count < _MOST_OF_CAUSE):
            return ""
        name, times = recompile.number, f"{count} times" if count > 1 else f"in one of {self._count} forwards"
        advice = _as_tensor(name) if name else _advice(recompile.guard)
        return f"recompiled {times} for this guard: {_described(recompile)}; to keep it compiled, {advice}"


def _cause(recompile: Recompile) -> tuple[str, CodePlace | None]:
    return NUMBER.sub("N", recompile.guard), recompile.place


def _described(recompile: Recompile) -> str:
    return recompile.guard if recompile.place is None else f"{recompile.guard}, at {recompile.place}"


# A guard on the length of a container: `len(self.history) == 4`.
_LENGTH = re.compile(r"len\((?P<name>[\w.\[\]'\"]+)\)")


def _advice(guard: str) -> str:
    """Returns advice on how to keep a guard from failing."""
    if guard.startswith("len(") and RUN_AHEAD_CALL in guard:
        # A list with one entry per row, such as SmolVLM's image features.
        return "use batches with the same number of rows (dataloader_drop_last)"
    if "size mismatch" in guard or ".size()" in guard:
        return "pad batches to fewer lengths (pad_to_multiple_of)"
    if "rank mismatch" in guard:
        return "give tensors the same number of dimensions in each step"
    if "dtype mismatch" in guard:
        return "give tensors the same dtype in each step"
    if (found := _LENGTH.search(guard)) is not None:
        return f"keep the number of entries of {found['name']} the same"
    return "keep what it checks the same in each step"


def _as_tensor(name: str) -> str:
    """Returns advice on how to keep a number from becoming a constant of the graph."""
    if name.startswith(_UNNAMED):
        return "compute that number as a tensor, whose value torch does not guard on"
    owner, _, attribute = name.rpartition(".")
    if not attribute.isidentifier():
        return f"make {name} a tensor (torch.tensor(…)), whose value torch does not guard on"
    if not owner:
        return f"pass {name} as a tensor (torch.tensor({name})), whose value torch does not guard on"
    return (
        f"make {name} a tensor, whose value torch does not guard on: register_buffer({attribute!r}, torch.tensor(…), "
        f"persistent=False), and change it in place (.fill_, .add_)"
    )


class PlannedForward:
    """Compiles the forward at its first call, replanning until the step is within a budget, and again for new kinds of
    arguments.

    Args:
        traced: the traced forward, which planned forwards for other batches may share.
        pending: forwards of the model whose backward is still to come, under any plan.
        purpose: see `GraphChoices`.
        is_later: another planned forward has trained the model, so that requested ids that are not in the graphs are
            no error.

    Attributes:
        predictors: None before the first call, and if nothing is predicted.
        is_plain: plain PyTorch trains the model.
        last_runs: graph runs of the last call, if the plan was not made for them; else None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        traced: TracedForward,
        planner: Planner,
        pending: Pending,
        purpose: str = "",
        is_later: bool = False,
    ) -> None:
        self._model, self.traced, self.planner, self._purpose = model, traced, planner, purpose
        self._pending = pending
        self._held_outputs = NOTHING_HELD
        self._recompiles = Recompiles()
        self.is_plain = False
        self._is_strict = traced.spec.strict and not is_later
        self.last_runs: RunKeys | None = None
        self._may_run_again = self._has_warned = False
        # Descriptions of batches that torch cannot trace.
        self._untraced: set[Hashable] = set()
        # The choices of the last call, if some are not from the plan.
        self._others: GraphChoices | None = None
        self._reset()

    def _reset(self) -> None:
        self._choices = GraphChoices(weak_method(self._choose), self._purpose)
        self.table: PlanTable | None = None
        self.plan_file: PlanFile | None = None
        self.predictors: Predictors | None = None
        self._remarks: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """True after the first forward."""
        return self.table is not None

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Returns the predictor for steps with the graphs of the table; None if nothing is predicted."""
        return self.predictors.first if self.predictors is not None else None

    def __call__(self, call: ForwardArgs, may_run_again: bool = False) -> Any:
        """Run the forward, and return its outputs.

        Args:
            may_run_again: return `RUN_AGAIN` instead of outputs, with the state restored, if graphs ran that the plan
                was not made for and that may exceed the budget.

        Raises:
            MemOptError: the plan does not match the model, no plan fits a budget, or the compiled forward fails or is
                recompiled too often under a plan that must hold.
        """
        if self.is_compiled:
            return self._run(call, may_run_again)
        self.traced.move_scales()
        before = ForwardState.of(self._model, with_buffers=True, arguments=(call.args, call.inputs))
        forget, earlier = self.traced.shared.forgetting(), self._pending.numbers
        held: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        held |= {f"argument {place}": each for place, each in enumerate(tensors_in((call.args, call.inputs)))}
        writes = {name: writes_to(each) for name, each in held.items()}

        def restore() -> None:
            known = {id(each) for each in (*self.traced.overwritten, *(parameter for parameter, _ in before.frozen))}
            # If ranks gather parameters, gathering writes to them.
            for name, each in () if self.planner.is_sharded else held.items():
                if id(each) not in known and writes_to(each) != writes[name]:
                    raise UnsupportedModelError(
                        f"the forward of {type(self._model).__name__} writes to {name} in Python code that torch does "
                        "not trace, and planning reruns the forward, which would write twice",
                        "write to it outside of the forward, or choose a plan by name or level",
                    )
            self.traced.restore_overwritten()
            before.restore()
            self._pending.keep(earlier)

        def attempt() -> Attempt[Any]:
            if (largest := self.planner.limit.largest) is not None:
                self.traced.masks.expect(largest)
            if self.planner.is_sharded:
                # Segments name layer arguments, among which are masks, so all ranks need the same masks.
                self.traced.masks.agree()
            return Attempt(self._run(call), self.predictor, self.plan_file)

        def again() -> None:
            self._reset()
            restore()
            forget()

        if autograd.checkpoint() is None:
            outputs = self.planner.plan(attempt, again, call.inputs)
        else:
            # A user's checkpoint around the model counts the tensors saved in every run: hide those of planning.
            with saved_tensors_hooks(_unchanged, _unchanged):
                self.planner.plan(attempt, again, call.inputs)
            restore()
            outputs = self._run(call)
        self.traced.forget_overwritten()
        for remark in self._remarks:
            get_logger().warning(remark)
        return outputs

    def covers(self, sizes: Mapping[str, int]) -> bool:
        """True if the plan is made for a batch of these sizes, whether or not it is compiled yet."""
        return self.planner.limit.largest is not None and is_covered(sizes, self.planner.limit.largest)

    def is_within(self, inputs: Mapping[str, object]) -> bool:
        """True if a step with this batch is predicted to be within the budget; False if nothing is predicted."""
        is_within = False
        if self.predictors is not None:
            with self.predicting():
                is_within = self.planner.limit.is_within(self.predictors.of(inputs), inputs)
        return is_within

    def excess(self, inputs: Mapping[str, object]) -> str:
        """Returns a line on a batch whose step would exceed the budget; empty if it would not, or that is unknown."""
        line = ""
        if self.planner.solves and self.predictors is not None:
            with self.predicting():
                lines = (self.planner.limit.exceeded_by_batch(predictor, inputs) for predictor in self.predictors)
                line = next(filter(None, lines), "")
        return line

    def hold_outputs(self, held: HeldOutputs) -> bool:
        """Count these outputs as held by the training loop from now on. Returns True if that leaves room for a cheaper
        plan."""
        if held == self._held_outputs:
            return False
        self._held_outputs = held
        has_room = False
        if self.predictors is not None:
            self.planner.limit.expect_more()
            self.predictors.hold_outputs(held)
            with self.predicting():
                has_room = self.planner.has_room_for_less(self.predictors.first)
        return has_room

    def gather_ahead(self, elements: int) -> bool:
        """Predict steps with this many elements gathered ahead of each module. Returns False, and changes nothing, if
        that is not within the budget on all ranks."""
        predictor, sharding = self.predictor, self.traced.sharding
        if predictor is None or sharding is None or (sharding := sharding.gathering_ahead(elements)) is None:
            return False
        wider = predictor.with_tapes(sharding=sharding)
        if has_room := self.planner.has_room(wider):
            self.traced.sharding, self.predictors = sharding, Predictors(wider)
        return has_room

    def predicting(self) -> contextlib.AbstractContextManager:
        """Returns a context for code that reads the predictor: an error is logged and ends all predictions."""
        return best_effort("the predicted peak", lambda: setattr(self, "predictors", None))

    def add_to_header(self, lines: list[str]) -> None:
        """Add lines to the table's header, after the first call."""
        if self.table is not None:
            self.table = replace(self.table, header=(*self.table.header, *lines))

    def run_plainly(self, call: ForwardArgs) -> Any:
        """Returns the outputs of the model's own forward, with the changes that compiled outputs have."""
        return _refusing(self.traced.plainly(call), call)

    def give_up(self, why: str, failed: Exception | None = None) -> None:
        """Warn that plain PyTorch trains the model from now on; the table consists of that line.

        Raises:
            UnsupportedModelError: the plan must hold.
        """
        if (refusal := self.planner.producer.refusal(why)) is not None:
            raise refusal from failed
        line = f"NOT under a plan: {why}"
        get_logger().warning(line)
        self.table = PlanTable(engine="compile", plans=(), header=(line,))
        self.predictors = self.plan_file = None

    def _choose(self, graph: AnalyzedGraph, state: ForwardProgress) -> Choice:
        choice = self.planner.choose(graph, state)
        if self._may_run_again and self.planner.has_foreign:
            self._choose_apart()
        refuses = self.table is None and self._is_strict
        if refuses and state.is_all:
            choice.matched.check()
        if line := choice.check_file(refuses):
            self.traced.say(line)
        return choice

    def _choose_apart(self) -> None:
        """Use separate choices for the rest of a forward, until it is known to be within the budget."""
        if self.planner.has_unplanned:
            # Save little, since the forward might exceed the budget otherwise.
            others = GraphChoices(weak_method(self._save_little))
        elif self._others is None:
            others = self._choices.copied()
        else:
            return
        self._others = others
        self.traced.go_on_with(others)

    def _save_little(self, graph: AnalyzedGraph, state: ForwardProgress) -> Choice:
        return self.planner.producer.choose(graph, state.choices)

    def _run(self, call: ForwardArgs, may_run_again: bool = False) -> Any:
        self.last_runs, self._may_run_again = None, may_run_again
        if self.is_plain or (self._untraced and call.description in self._untraced):
            return self.run_plainly(call)
        is_first = not self.is_compiled
        try:
            try:
                traced = self._traced_call(call)
            except OtherRunsError as error:
                # The frames hold activations that the graphs saved for the backward.
                clear_frames(error)
                traced = self._traced_call(call, records=True)
            if self.table is None:
                self.planner.note_outputs(traced.outputs)
            if (loss := self.planner.loss) is not None or self._held_outputs != NOTHING_HELD:
                tape = replace(traced.tape, loss=loss, held_outputs=self._held_outputs)
                traced = replace(traced, tape=tape)
        except Exception as error:
            refused = own_error(error)
            failed = error if refused is None else error.__context__
            may_be_plain = self.traced.is_first and refused is None
            if not may_be_plain:
                if failed is None or not is_of_trace(failed):
                    raise
                self.traced.check_plain(call, is_last=True)
                if refused is not None or self.planner.is_sharded or not self.traced.is_undone:
                    raise
                return self._later_plain_outputs(call, failed)
            outputs = self._plain_outputs(call, error)
            self.is_plain = True
            return outputs
        self._note_recompiles(traced.recompiles)
        if traced.graphs:
            self._show(traced, call.inputs)
        elif self.table is None:
            self.give_up(no_training_graph(traced))
        if not is_first and self.planner.solves and self._is_over(traced, call.inputs):
            assert traced.before is not None
            traced.before.restore()
            return RUN_AGAIN
        if self.predictors is not None:
            with self.predicting():
                has_more = self.predictors.note_forward(traced.ran, traced.tape, call.inputs, traced.outputs)
                if has_more and self.planner.solves:
                    self._warn_of_several(self.predictors.of(call.inputs))
        return _refusing(traced.outputs, call)

    def _warn_of_several(self, predictor: StepMemoryPredictor) -> None:
        line = "" if self._has_warned else self.planner.limit.exceeded_by_several(predictor)
        if line:
            self._has_warned = True
            get_logger().warning(f"NOT within the budget: {line}")

    def _traced_call(self, call: ForwardArgs, records: bool = False) -> TracedCall:
        self.planner.has_foreign = self.planner.has_unplanned = False
        self._others = None
        return self.traced(call, self._choices, records)

    def _is_over(self, traced: TracedCall, inputs: Mapping[str, Any]) -> bool:
        """True if a forward ran graphs that the plan was not made for, and must be rerun under another plan. If it
        cannot be rerun, a step over the budget is logged."""
        planner, over, is_known = self.planner, "", False
        runs = runs_of(traced.ran, traced.tape)
        if self.predictors is None or planner.covers(runs):
            return False
        with self.predicting():
            predictor = self.predictors.first.with_graphs(traced.ran, traced.tape, inputs)
            is_known = predictor is not None
            over = planner.limit.exceeded_by_runs(predictor) if predictor is not None else ""
        if is_known and not over and not planner.has_unplanned:
            planner.cover(runs)
            self._choices = self._others or self._choices
            return False
        self.last_runs = runs
        if self._may_run_again and traced.before is not None:
            return True
        if over:
            self.traced.say(f"NOT within the budget: this step runs graphs that were not planned: {over}")
        return False

    def _note_recompiles(self, recompiles: Iterable[Recompile]) -> None:
        """Leave code that is recompiled too often to Python; the whole model if that code is not the user's.

        Raises:
            UnsupportedModelError: nothing would be compiled, but the plan must hold.
        """
        for recompile in self._recompiles.add(recompiles):
            functions = recompile.functions
            if not functions and recompile.is_around_model:
                functions = self.traced.own_function
            if line := self._recompiles.line(recompile):
                self.traced.say(line)
            if not (why := self._recompiles.too_many(recompile, self.traced.is_in_layers(functions))):
                continue
            if self.traced.run_in_python(functions):
                in_order = sorted(functions, key=lambda place: [*recompile.places, place].index(place))
                names = ", ".join(dict.fromkeys(place.function for place in in_order))
                get_logger().warning(f"running {names} in plain Python, outside the plan and the prediction: {why}")
            elif self._recompiles.is_over:
                self.is_plain = True
                self.give_up(why)

    def _show(self, traced: TracedCall, inputs: Mapping[str, Any]) -> None:
        """Make the table from the graphs of the first forward; log remarks for graphs compiled later."""
        graphs, producer = traced.graphs, self.planner.producer
        if self.table is not None:
            # All graphs that ran count: the new ones may be only those of layers, or only those around layers.
            said = {line.partition(";")[0] for line in self._remarks}
            for remark in matched_in(producer, traced.ran).remarks:
                # What follows differs: the rows of the graphs so far.
                if remark.partition(";")[0] not in said:
                    self._remarks += (remark,)
                    self.traced.say(f"in the new graph: {remark}")
            return
        resident = self.planner.limit.resident(self.traced.variants.held)
        earlier = self.traced.variants.held_after if self.planner.limit.reads_partitioned else -1
        spec = replace(self.traced.spec, strict=self._is_strict)
        masks = self.traced.masks.kept
        now = self.planner.run
        run = Run(
            # Not the optimizer itself, which would be kept alive.
            optimizer=planned_like(now.optimizer, self.planner.limit.is_on_cuda),
            gradient_accumulation=now.gradient_accumulation,
            micro_batches=now.micro_batches,
            releases_gradients=now.releases_gradients,
            others=now.others,
        )
        shown = show(
            self._model, graphs, traced.tape, inputs, resident, producer, spec, masks, run, earlier, self._pending
        )
        self._remarks = shown.remarks
        if traced.graph_breaks:
            reasons = "; ".join(traced.graph_breaks)
            self.traced.say(
                f"graph breaks split the training forward into {len(graphs)} graphs, planned together: {reasons}"
            )
        self.table, self.plan_file = shown.table, shown.plan_file
        self.predictors = Predictors(shown.predictor) if shown.predictor is not None else None

    def _plain_outputs(self, call: ForwardArgs, failed: Exception) -> Any:
        """Returns plain PyTorch's outputs after the compiled forward has failed.

        Raises:
            UnsupportedModelError: the plan must hold.
            Exception: plain PyTorch's own, if it fails too.
        """
        # The frames hold activations that the graphs saved for the backward.
        clear_frames(failed)
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
            raise error from None
        self.give_up(why, failed)
        return outputs

    def _later_plain_outputs(self, call: ForwardArgs, failed: BaseException) -> Any:
        """Returns plain PyTorch's outputs for a batch that torch cannot trace, unlike the batches before it.

        After `_MOST_UNTRACED` different ones plain PyTorch trains the model.

        Raises:
            UnsupportedModelError: the plan must hold.
        """
        why = f"torch cannot trace this batch, unlike the batches before it: {line_with_place(failed)}"
        if (refusal := self.planner.producer.refusal(why)) is not None:
            raise refusal from failed
        self._untraced.add(call.description)
        if len(self._untraced) < _MOST_UNTRACED:
            get_logger().warning(f"running batches like this one in plain PyTorch, outside of the plan: {why}")
        else:
            self.is_plain = True
            self.give_up(why)
        return self.run_plainly(call)


def _unchanged(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _refusing(outputs: Any, call: ForwardArgs) -> Any:
    return refusing_gradients(outputs) if call.loss_only else outputs
