"""Chooses plans for a forward's graphs, and re-plans until the compiled step fits the budget."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from optimum_memopt.compat.torch import of_all_ranks, tensors_in
from optimum_memopt.engines.api.run import NOTHING_HELD, LargestBatch, Run
from optimum_memopt.engines.compile.capture.traced_graph import ForwardProgress
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.costs.times import costs_of
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.symbols import input_sizes, is_length, larger_sizes, shaped_as
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss
from optimum_memopt.engines.compile.memory.footprint import StepContext
from optimum_memopt.engines.compile.memory.tape import Tape
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph, captured_graph
from optimum_memopt.engines.compile.partition.choice import Choice, InputsPlan
from optimum_memopt.engines.compile.partition.conversions import conversions_of
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.partition.producers.producer import Producer, SolvedForward
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.predict.plan_cache import CachedPlan, EarlierPlan, entry_path
from optimum_memopt.engines.compile.predict.step_limit import StepLimit, TracedBatch
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.sharding.leaf_layers import unpredicted
from optimum_memopt.engines.compile.solver.segments import Link
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.engines.torch_compat.compiler_errors import DraftFailedError
from optimum_memopt.errors import MemOptError, forget_frames
from optimum_memopt.logs import best_effort, get_logger
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import gib_text

# Maximum number of compilations of one batch's plan until the compiled step is within the budget too.
_MOST_COMPILES = 3
# Share of the budget by which this process may hold less than the process that the plan was solved in.
_LESS_HELD = 0.02


@dataclass(frozen=True)
class PlannerSpec:
    """The settings of a planner.

    Attributes:
        fused: whether the compiler fuses memory-bound operators.
        target: the device that steps are planned for; None: the model's device.
        options: all other options that a plan depends on, for the key of the plan cache; empty: no cache.
        is_sharded: ranks gather parameters together, so either all of them re-run a forward or none does.
        drafts: the forward that reveals the graphs runs them as drafts, uncompiled.
        loss: returns the step's loss that is computed outside of the forward with these inputs; None if there is
            none.
    """

    producer: Producer
    run: Callable[[], Run]
    fused: bool = False
    target: Device | None = None
    with_curve: bool = False
    with_lengths: bool = False
    options: str = ""
    is_sharded: bool = False
    drafts: bool = False
    loss: Callable[[Mapping[str, object]], EagerLoss | None] = lambda _: None


# The runs of a forward's graphs: digest, layer and call index of each, as in `SolvedForward.saved`.
RunKeys = frozenset[tuple[str, str, int]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt(Generic[_T]):
    """The result of a forward that has run under a plan.

    Attributes:
        predictor: predicts the forward's steps; None if they cannot be predicted.
        plan_file: None if there is no plan.
    """

    outputs: _T
    predictor: StepMemoryPredictor | None
    plan_file: PlanFile | None


class Planner:
    """Plans one model's steps for every batch up to the largest; under a budget, re-plans until the step is within it.

    A forward of one graph is solved when the graph is partitioned. torch compiles and runs each of several graphs
    before it traces the next one, so the first forward runs with little saved to reveal all of them. A cached plan of
    an earlier start is tried before either, and stays if its step is within the budget.

    Attributes:
        limit: the limit on the bytes of the steps.
        solved: the plan in force; None without a budget, and until all graphs are known.
        siblings: returns the planners for batches of other kinds.
        has_foreign: since it was last set to False, a graph has run that the plan in force was not solved for.
        has_unplanned: as `has_foreign`, but for a graph that no sibling's plan was solved for either.
        loss: see `PlannerSpec`; None before the first forward.
    """

    def __init__(self, model: torch.nn.Module, spec: PlannerSpec) -> None:
        self._model, self._spec = model, spec
        self.limit = StepLimit(model, spec.producer.bound, spec.run, spec.target)
        self.loss: EagerLoss | None = None
        self.solved: SolvedForward | None = None
        self._batch = TracedBatch()
        # Keyed by graph digest.
        self._analyzed: dict[str, AnalyzedGraph] = {}
        self._forward: CapturedForward | None = None
        # The plan that was replaced when the forward ran other graphs than it was solved for. torch may still run its
        # graphs from compiled code.
        self._former: SolvedForward | None = None
        self.siblings: Callable[[], Iterable[Planner]] = tuple
        self.has_foreign = self.has_unplanned = False
        # Keys of the forwards whose steps are within the budget.
        self._covered: set[RunKeys] = set()
        self._drafts, self._has_drafts = spec.drafts, False
        # The cached plan; None as soon as a graph differs from those that it was made for.
        self._earlier: EarlierPlan | None = None

    def for_another(self, largest: LargestBatch | None, spec: PlannerSpec) -> "Planner":
        """Returns a planner with the same limit for batches of another kind."""
        planner = Planner(self._model, spec)
        planner.limit = self.limit.for_another(largest)
        return planner

    @property
    def producer(self) -> Producer:
        return self._spec.producer

    @property
    def is_sharded(self) -> bool:
        return self._spec.is_sharded

    @property
    def run(self) -> Run:
        """Returns the current state of the run."""
        return self._spec.run()

    @property
    def solves(self) -> bool:
        """True if there is a budget to meet."""
        return self._spec.producer.bound is not None

    def plan(
        self, attempt: Callable[[], Attempt[_T]], again: Callable[[], None], inputs: Mapping[str, object] | None = None
    ) -> _T:
        """Run the forward until all of its graphs are known and its step is within the budget; returns its outputs.

        Args:
            attempt: runs the forward; each of its graphs calls `choose`.
            again: called before every further attempt; restores the state before the first.
            inputs: keyword arguments of the forward, for the key of the plan cache.

        Raises:
            DoesNotFitError: no plan fits.
        """
        self.loss = self._spec.loss(inputs or {})
        with self.limit.planning(self.is_sharded):
            if not self.solves:
                return self._plan_by_rule(attempt, again)
            return self._plan_by_budget(attempt, again, self._prepare(inputs or {}))

    def _plan_by_budget(self, attempt: Callable[[], Attempt[_T]], again: Callable[[], None], entry: Path | None) -> _T:
        """Returns the forward's outputs under a budget. Arguments as of `plan`, and `_plan_within`."""
        planned = self._attempt_first(attempt, again)
        first = planned.predictor
        if first is not None and (why := first.tape.sharding.unknown):
            raise unpredicted(why)
        if first is not None and self._is_within_by_earlier(first):
            self.cover(runs_of(first.graphs, first.tape))
            return planned.outputs
        if self.solved is None and first is not None:
            # The attempt holds the forward's saved activations.
            del planned
            again()
            self._forward = self._captured(first)
            if (solved := self._solved_by_sibling(first)) is not None:
                self.solved = solved
            else:
                self._solve_again()
            planned = attempt()
        # Only the list refers to the attempt, so its saved activations are freed before the next solve.
        ran = [planned]
        del planned
        return self._plan_within(ran, attempt, again, entry)

    def _attempt_first(self, attempt: Callable[[], Attempt[_T]], again: Callable[[], None]) -> Attempt[_T]:
        """Run the first attempt with graphs as drafts, and again without drafts if one fails, as for lack of memory,
        or if nothing can be predicted from them."""
        try:
            planned = attempt()
        except DraftFailedError as error:
            # The frames hold the saved activations of the graphs that have run.
            forget_frames(error)
        else:
            if planned.predictor is not None or not self._has_drafts:
                return planned
            del planned
        self._drafts = False
        again()
        return attempt()

    def _plan_by_rule(self, attempt: Callable[[], Attempt[_T]], again: Callable[[], None]) -> _T:
        """Returns the forward's outputs without a budget; re-runs the forward if a row name matches more candidates
        once all graphs are known."""
        planned = attempt()
        if any(self._of_ranks(planned.predictor is not None and self._know(planned.predictor.graphs))):
            del planned
            again()
            planned = attempt()
        return planned.outputs

    def _prepare(self, inputs: Mapping[str, object]) -> Path | None:
        """Look up the run's largest batch and a cached plan of an earlier start; returns the path to cache this
        start's plan at."""
        if self.limit.largest is None:
            # Not during tracing, when tensors cannot be read.
            largest = self.run.largest_batch()
            sizes = input_sizes(inputs)
            self.limit.largest = largest and shaped_as(largest, sizes)
            is_first_plan = self.limit.bytes is None
            if largest is None and is_first_plan and self.run.rows and any(map(is_length, sizes)):
                get_logger().info(
                    "--memory_opt_budget: planning for the first batch, since the lengths of the training data are "
                    "not read; a longer batch that no plan fits ends the run"
                )
        self._warn_of_loss()
        entry, bound = None, self.producer.bound
        if bound is not None and self._spec.options:
            entry = entry_path(self._model, inputs, bound, self.limit.largest, self.run, self._spec.options)
        cached = CachedPlan.read(entry) if entry is not None else None
        self._earlier = EarlierPlan(cached) if cached is not None else None
        return entry

    def _plan_within(
        self, ran: list[Attempt[_T]], attempt: Callable[[], Attempt[_T]], again: Callable[[], None], entry: Path | None
    ) -> _T:
        """Returns the outputs of the first attempt whose compiled step is within the limit, else of the last attempt.

        Args:
            ran: holds the first attempt; emptied.
        """
        number, planned = 1, ran.pop()
        while (predictor := planned.predictor) is not None:
            line = ""
            with best_effort("the predicted peak"):
                line = self.limit.exceeded(predictor)
                line = line and f"{line}{self._why_larger}"
            # torch may trace other graphs in the second run, using what the first run compared (LongT5).
            if not any(self._of_ranks(line or self.has_unplanned)):
                if entry is not None and planned.plan_file is not None:
                    CachedPlan(planned.plan_file, self.limit.constant).write(entry)
                break
            if number == _MOST_COMPILES or (line and self.limit.is_nearest):
                if line:
                    get_logger().warning(f"NOT within the budget: {line}")
                break
            if line:
                # Widen further if that was not enough: the allocator rounds tensors up to block sizes.
                unused = self.solved.unused if self.solved is not None else 0
                excess = self.limit.excess(predictor)
                self.limit.widen_margin(excess, unused + (number - 1) * excess)
                get_logger().info(f"{line}: solving again with a margin of that size")
            if self.has_foreign:
                get_logger().info("the forward ran different graphs than the plan was solved for: solving again")
                self._former, self._forward = self.solved, self._captured(predictor)
            del planned, predictor
            again()
            self.has_foreign = self.has_unplanned = False
            self._solve_again()
            planned = attempt()
            number += 1
        if planned.predictor is not None:
            self.cover(runs_of(planned.predictor.graphs, planned.predictor.tape))
        return planned.outputs

    def _solved_by_sibling(self, predictor: StepMemoryPredictor) -> SolvedForward | None:
        """Returns the plan of another kind of batch that runs the same graphs; None if there is none, or only for
        smaller batches."""
        runs, sizes = runs_of(predictor.graphs, predictor.tape), self.limit.largest_sizes(predictor)
        if self.is_sharded:
            return None
        siblings = (each for each in self.siblings() if each.covers(runs))
        # The step under the plan is checked after it is compiled.
        return next((each.solved for each in siblings if each.limit.was_solved_for(sizes)), None)

    def cover(self, runs: RunKeys) -> None:
        """Record that a forward with these runs needs no other plan."""
        self._covered.add(runs)

    def covers(self, runs: RunKeys) -> bool:
        """True if a forward with these runs needs no other plan: it is within the budget, or no plan for it is, or it
        is a part of one for which that is known."""
        return runs in self._covered or any(runs < each for each in self._covered)

    def note_outputs(self, outputs: Any) -> None:
        """Record whether the training loop computes an unpredicted loss from the outputs of the first forward."""
        run = self._spec.run()
        is_counted = run.has_trainer or run.held_outputs.loss > 0
        if self.loss is None and not is_counted and not _has_loss(outputs):
            self.loss = EagerLoss("the loss", unknown="the training loop computes it from the outputs")
            self._warn_of_loss()

    def _warn_of_loss(self) -> None:
        if self.solves and self.loss is not None and self.loss.unknown:
            name = type(self._model).__name__
            get_logger().warning(
                f"--memory_opt_budget bounds only the forward and backward of {name}; {self.loss.caveat}"
            )

    def has_room(self, predictor: StepMemoryPredictor) -> bool:
        """True if this predictor puts the step that the plan was solved for within the budget, on all ranks."""
        return all(self._of_ranks(self.limit.excess(predictor) <= 0))

    def has_room_for_less(self, predictor: StepMemoryPredictor) -> bool:
        """True if the plan recomputes or offloads, and this predictor leaves clearly more of the budget unused than
        when the plan was solved."""
        if self.solved is None or self.limit.bytes is None:
            return False
        is_cheapest = all(saved.is_by_torch for saved in self.solved.saved.values())
        return not is_cheapest and -self.limit.excess(predictor) - self.solved.unused > _LESS_HELD * self.limit.bytes

    def _is_within_by_earlier(self, predictor: StepMemoryPredictor) -> bool:
        """True if the forward ran under the cached plan of an earlier start and fits; adopts that plan."""
        if (earlier := self._earlier) is None:
            return False
        line, why, grown = "its step is not predicted", "", self.limit.constant - earlier.cached.constant
        with best_effort("the predicted peak"):
            line = self.limit.exceeded(predictor, "its step")
            if line and 0 < self.limit.excess(predictor) <= grown:
                why = f", since the process now holds {gib_text(grown)} more"
        if line:
            get_logger().info(f"the cached plan of an earlier run does not fit: {line}{why}; solving for a new one")
            self._earlier = None
        else:
            get_logger().info("within the budget under the cached plan of an earlier run")
            self.solved = earlier.solved
        return not line

    def _of_ranks(self, own: _T) -> list[_T]:
        """Returns the values of all ranks if they gather parameters together, else only this rank's."""
        return of_all_ranks(own) if self.is_sharded else [own]

    def _solve_again(self) -> None:
        """Solve for all graphs.

        If the ranks' segments differ, all ranks take the longest ones: either all ranks gather a layer that runs
        again, or none does.

        Raises:
            MemOptError: on all ranks, if one of them cannot solve.
        """
        segments = self._solve_on_ranks(())
        if len(set(segments)) > 1:
            self._solve_on_ranks(max(segments, key=len))

    def _solve_on_ranks(self, segments: tuple[Link, ...]) -> list[tuple[Link, ...]]:
        """Solve with these segments; returns the segments of each rank that gathers parameters together."""
        failed: MemOptError | None = None
        assert self._forward is not None
        try:
            segments = self._solve(self._forward, segments).segments
        except MemOptError as error:
            failed = error
        ranks = self._of_ranks(("" if failed is None else str(failed), segments))
        if failed is not None:
            raise failed
        if other := next((error for error, _ in ranks if error), ""):
            raise MemOptError(f"on another rank: {other}")
        return [links for _, links in ranks]

    def choose(self, graph: AnalyzedGraph, state: ForwardProgress) -> Choice:
        """Returns the choice for a graph.

        Raises:
            DoesNotFitError: no plan fits the budget.
        """
        if not self.solves:
            return self.producer.choose(graph, state.choices)
        choice = self.solved.choice(graph) if self.solved is not None else None
        if choice is None:
            self._batch = replace(self._batch, inputs=state.inputs)
            self._analyzed[graph.digest] = graph
            choice = self._choice_of_earlier(graph, state)
            if choice is None and state.is_all:
                state.progress.stage = "measuring operators, and solving for the cheapest recompute"
                self._batch = replace(self._batch, untrained=state.untrained, trained=state.trained)
                self._forward = self._captured_alone(graph)
                choice = self._solve(self._forward).choice(graph)
            elif choice is None and self.solved is not None:
                choice = self._choice_of_another_run(graph)
                self.has_foreign, self.has_unplanned = True, self.has_unplanned or choice is None
        if choice is None:
            choice = self._in_segments(graph, self.producer.choose(graph, state.choices))
            if self._drafts and self.solved is None and not fx_graph.has_higher_order(graph.joint.module.graph):
                self._has_drafts, choice = True, replace(choice, draft_limit=self.step().limit)
        return choice

    def _choice_of_another_run(self, graph: AnalyzedGraph) -> Choice | None:
        """Returns the choice for the same graph in another layer, in the former plan, or in a sibling's plan; None if
        there is none."""
        for solved in (self.solved, self._former, *(each.solved for each in self.siblings())):
            runs = {} if solved is None else solved.saved
            same = {key: saved for key, saved in runs.items() if key[0] == graph.digest}
            if solved is not None and same:
                own = same.get((graph.digest, graph.layer, graph.call_index), next(iter(same.values())))
                return self._in_segments(graph, replace(own, inputs=InputsPlan()).choice(graph, solved.why))
        return None

    def _in_segments(self, graph: AnalyzedGraph, choice: Choice) -> Choice:
        """Returns the choice for a graph outside the solved plan, such as that of a batch of one row or the first with
        padding, moved into the segments of its layer's solved graph: other ranks run those, and gather parameters for
        them."""
        if self.solved is None or not self.solved.segments:
            return choice
        choice = replace(choice, is_for_all_runs=False)
        for (digest, layer, call_index), saved in self.solved.saved.items():
            if (layer, call_index) == (graph.layer, graph.call_index) and not saved.inputs.is_empty:
                solved = self._analyzed[digest]
                recomputed = graph.places_like(solved, saved.inputs.recomputed)
                offloaded = saved.inputs.offloaded if graph.places == solved.places else frozenset()
                return replace(choice, inputs=replace(saved.inputs, offloaded=offloaded, recomputed=recomputed))
        return choice

    def _choice_of_earlier(self, graph: AnalyzedGraph, state: ForwardProgress) -> Choice | None:
        """Returns the choice of the cached plan; None if there is none, or it is for another graph."""
        if (earlier := self._earlier) is None:
            return None
        is_first = not earlier.has_choices
        choice = earlier.choice(graph, state.choices)
        if choice is None or (is_first and not self._is_about_as_large(earlier.cached)):
            self._earlier = None
            return None
        return choice

    def _is_about_as_large(self, cached: CachedPlan) -> bool:
        """True if this process holds at most little less than the earlier one, and may grow to the same size; else
        there is room for a cheaper plan."""
        step = self.step()
        return cached.constant - self.limit.constant <= step.room + _LESS_HELD * step.limit

    def _know(self, graphs: Sequence[PartitionedGraph]) -> bool:
        """Record all graphs of a forward; True if row names now match other candidates in one of them than were chosen
        for it."""
        if len(graphs) == 1:
            return False
        producer = self.producer.knowing([candidate for graph in graphs for candidate in graph.candidates])
        self._spec = replace(self._spec, producer=producer)
        return any(
            {candidate.row for candidate in graph.candidates} & producer.match(graph.candidates).requests.keys()
            != graph.choice.matched.requests.keys()
            for graph in graphs
        )

    def _captured_graph(self, graph: AnalyzedGraph) -> CapturedGraph:
        device = next(self._model.parameters()).device
        self.step()
        larger = replace(graph, size_hints=larger_sizes(graph.size_hints, graph.names, self.limit.largest))

        def priced(priced_graph: AnalyzedGraph) -> Costs:
            return costs_of(priced_graph, device, self._spec.fused, self._spec.target, self.limit.bytes)

        conversions = conversions_of(larger, priced) if self.producer.compresses else None
        captured = captured_graph(larger, priced(larger), conversions)
        return replace(captured, sizes=graph.size_hints, analyzed=graph)

    def _captured_alone(self, graph: AnalyzedGraph) -> CapturedForward:
        """Returns the captured forward that consists of one graph."""
        captured, held = (self._captured_graph(graph),), self.run.held_outputs
        if self.loss is None and held == NOTHING_HELD:
            return CapturedForward(captured)
        return CapturedForward(captured, Tape.of_one(graph.joint.num_fwd_outputs, self.loss, held))

    def _captured(self, predictor: StepMemoryPredictor) -> CapturedForward:
        """Returns the captured forward with all graphs that ran."""
        self._batch = replace(self._batch, untrained=predictor.untrained, trained=predictor.trained)
        captured = {graph.digest: self._captured_graph(self._analyzed[graph.digest]) for graph in predictor.graphs}
        graphs = tuple(replace(captured[graph.digest], partitioned=graph) for graph in predictor.graphs)
        return CapturedForward(graphs, predictor.tape, predictor.untrained)

    def _solve(self, forward: CapturedForward, segments: tuple[Link, ...] = ()) -> SolvedForward:
        """Solve; measuring operators grows resident memory, so the context is read again."""
        named = ((graph.sizes, *item) for graph in forward.graphs for item in graph.names.items())
        sizes = {name: sizes[symbol] for sizes, symbol, name in named if symbol in sizes}
        largest = self.limit.sizes_with_largest(sizes)
        growth = math.prod(largest[name] / size for name, size in sizes.items())
        step = self.step(growth)
        model = replace(StepModel.of(forward, step), segments=segments)
        if model.solver.everything > step.allowed:
            model.solver.solver.prepare()
            model = model.around(self.step(growth))
        wanted = self._spec.with_curve, self._spec.with_lengths
        self.solved = self.limit.solve(model, lambda step: self.producer.solve(step, *wanted))
        return self.solved

    def step(self, growth: float = 1.0) -> StepContext:
        """Returns the step context, with the batch scaled by `growth`."""
        # The process may still grow to the size at which the cached plan was solved.
        constant = 0 if self._earlier is None else self._earlier.cached.constant
        return self.limit.context(replace(self._batch, loss=self.loss), growth, constant)

    @property
    def _why_larger(self) -> str:
        """Returns why the compiled step may take more than the budget; empty if it may not."""
        if self.limit.is_nearest:
            return "; no plan takes less with the other forwards of its step"
        reasons = ["a compiler reorders operators"] if self._spec.fused else []
        reasons += ["CUDA's allocator rounds tensors up to larger blocks"] if self.limit.is_on_cuda else []
        return f", since {', and '.join(reasons)}" if reasons else ""


def runs_of(graphs: Sequence[PartitionedGraph], tape: Tape) -> RunKeys:
    """Returns the keys of a tape's runs."""
    return frozenset(tape.run_keys([graph.digest for graph in graphs]))


def _has_loss(outputs: Any) -> bool:
    """True if the outputs contain a scalar that requires a gradient."""
    return any(tensor.requires_grad and not tensor.dim() for tensor in tensors_in(outputs))
