"""What a joint graph saves under the plans that the advice compares. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from optimum_memopt.engines.api.predictions import COPIES, LAUNCHES, PredictedStep, Technique
from optimum_memopt.engines.compile.costs.times import OperatorTimes, UpdateTimes
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.simulation import Simulation, simulate
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.solver.offload import cheapest, with_offload
from optimum_memopt.engines.compile.solver.plan import Plan
from optimum_memopt.engines.compile.solver.solver import Solver


def checkpointed(problem: Problem, every: int) -> Simulation:
    """transformers' activation checkpointing of every so many layers, in the order of this engine's recompute.

    Of a layer that is checkpointed its input is saved; everything in it runs again, random draws too, whose state is
    restored (`torch.utils.checkpoint`). The last layer is no exception. Which layers: `every_n_layers` of
    `PreTrainedModel.activation_checkpointing_enable` (transformers 5.23).

    Args:
        problem: a joint graph with layers.
        every: checkpoints the first layer, and every so many after it.
    """
    chosen = set(layers_of(problem)[::every])
    runs_again = replace(
        problem,
        is_kept=tuple(
            kept and layer not in chosen for kept, layer in zip(problem.is_kept, problem.layers, strict=True)
        ),
    )
    kept = {node for node in problem.activations if problem.layers[node] not in chosen}
    return simulate(runs_again, runs_again.closure(kept | problem.boundaries))


def layers_of(problem: Problem) -> tuple[str, ...]:
    """Paths of the layers in the order in which the forward runs them."""
    in_forward = (
        layer for layer, is_forward in zip(problem.layers, problem.is_forward, strict=True) if layer and is_forward
    )
    return tuple(dict.fromkeys(in_forward))


def without_gradients(problem: Problem) -> int:
    """The peak of a forward that saves nothing, bytes over parameters and inputs, its outputs among them."""
    return simulate(replace(problem, backward_outputs=(), backward_reads=()), frozenset()).forward.peak


# Of transformers' activation checkpointing.
_EVERY = (1, 2, 4)
_NO_PLAN, _LEVEL_1, _BUDGET = "no plan", "level 1", "budget"
# Rows of the batch that is asked for what is the same with any.
_REFERENCE = 8


class GraphSteps:
    """Steps of one traced graph.

    Args:
        graph: with the loss as the model computes it, or in chunks, with torch's own choice and that of level 1.
        step: around it, with a batch of one row.
        tokens: of a row; 0: as many as were traced.
        times: seconds of the graph's operators for batches of so many rows.
    """

    def __init__(
        self, graph: CapturedGraph, step: StepContext, tokens: int, times: Callable[[int], OperatorTimes]
    ) -> None:
        self._graph, self._context, self._tokens, self._times_at = graph, step, tokens, times
        self._problems: dict[int, Problem] = {}
        self._times: dict[int, OperatorTimes] = {}
        self._solvers: dict[int, Solver] = {}
        self._found: dict[tuple[str, int], Simulation] = {}
        self._within_budget: Callable[[int, bool], _Run | None] = lru_cache(maxsize=None)(self._solve)
        self._host = graph.host(step)

    def within(self, budget: int) -> "GraphSteps":
        """The same graph with another budget, in bytes."""
        return GraphSteps(self._graph, replace(self._context, limit=budget), self._tokens, self._times_at)

    @cached_property
    def layers(self) -> int:
        """How many layers the forward has."""
        return len(layers_of(self._problem(_REFERENCE)))

    @cached_property
    def costs(self) -> str:
        """Where seconds are from."""
        return self._times_of(_REFERENCE).source

    def fits(self, plan: str, rows: int, accumulates: bool) -> bool:
        """See `StepPredictor.fits`; plans by name."""
        # A budget's plan is never worse than these, and takes longer to find.
        known = (_NO_PLAN, _LEVEL_1) if plan == _BUDGET else (plan,)
        if any(self._is_within(self._simulation(name, rows), rows, accumulates) for name in known):
            return True
        if plan != _BUDGET:
            return False
        is_within = self._is_within(self._solver(rows).lowest, rows, accumulates)
        return is_within or (self._host is not None and self._within_budget(rows, accumulates) is not None)

    def lowest(self, plan: str, accumulates: bool) -> int:
        """See `StepPredictor.lowest`; plans by name."""
        found = self._solver(1).lowest if plan == _BUDGET else self._simulation(plan, 1)
        return self._peak(found, 1, accumulates)

    def step(self, plan: str, rows: int, accumulates: bool, update: UpdateTimes) -> PredictedStep:
        """See `StepPredictor.step`; plans by name.

        Args:
            plan: of those above.
            rows: of a micro-batch.
            accumulates: there are several.
            update: seconds of what is done to all parameters.
        """
        run = self._within_budget(rows, accumulates) if plan == _BUDGET else _of(self._simulation(plan, rows))
        if run is None:
            run = _of(self._simulation(_LEVEL_1, rows))
        found, times = run.simulation, self._times_of(rows)
        seconds = times.by_bound((*found.forward.order, *found.backward.order))
        for bound, more in ((LAUNCHES, times.call), (COPIES, run.stall)):
            if more:
                seconds[bound] = seconds.get(bound, 0.0) + more
        return PredictedStep(
            self._footprint(rows, accumulates, run.peak).peak,
            seconds,
            update.accumulating,
            update.optimizer,
            sum(times.by_bound(found.recomputed).values()),
            run.host_bytes,
        )

    def evaluation(self, rows: int) -> int:
        """See `StepPredictor.evaluation`."""
        outside = self._footprint(rows, False, without_gradients(self._problem(rows)))
        return replace(outside, gradients=0, step=0).peak

    def _footprint(self, rows: int, accumulates: bool, activations: int) -> Footprint:
        """The step with micro-batches of so many rows, of one or of several."""
        step = self._context.accumulating() if accumulates else self._context
        return replace(step.fixed, batch=step.fixed.batch * rows, activations=activations)

    def _is_within(self, found: Simulation, rows: int, accumulates: bool) -> bool:
        return self._peak(found, rows, accumulates) <= self._context.limit

    def _peak(self, found: Simulation, rows: int, accumulates: bool) -> int:
        return self._footprint(rows, accumulates, found.peak).peak

    def _solve(self, rows: int, accumulates: bool) -> "_Run | None":
        plain = self._simulation(_NO_PLAN, rows)
        if self._is_within(plain, rows, accumulates):
            return _of(plain)
        solver = self._solver(rows)
        allowed = self._footprint(rows, accumulates, 0).activations_within(self._context.limit)
        # Not the long search for recompute that fits after all: most rows that are looked at do not fit.
        plan: Plan | None = None
        if solver.lowest.peak <= allowed:
            plan = cheapest(solver, allowed, self._host)
        elif self._host is not None:
            plan = with_offload(solver, None, allowed, self._host)
        if plan is None:
            return None
        return _Run(simulate(self._problem(rows), frozenset(plan.saved)), plan.peak, plan.stall, plan.host_bytes)

    def _simulation(self, plan: str, rows: int) -> Simulation:
        key = plan, rows
        if key not in self._found:
            problem = self._problem(rows)
            saved = dict(zip((_NO_PLAN, _LEVEL_1), self._graph.plans, strict=True)).get(plan)
            if saved is None:
                self._found[key] = checkpointed(problem, _CHECKPOINTED[plan])
            else:
                self._found[key] = simulate(problem, problem.saving(saved.saved))
        return self._found[key]

    def _problem(self, rows: int) -> Problem:
        if rows not in self._problems:
            self._problems[rows] = self._graph.problem_at(self._graph.sizes_of(rows, self._tokens))
        return self._problems[rows]

    def _solver(self, rows: int) -> Solver:
        if rows not in self._solvers:
            problem = self._problem(rows)
            self._solvers[rows] = Solver(replace(problem, seconds=self._times_of(rows).seconds[: len(problem.names)]))
        return self._solvers[rows]

    def _times_of(self, rows: int) -> OperatorTimes:
        if rows not in self._times:
            self._times[rows] = self._times_at(rows)
        return self._times[rows]


@dataclass(frozen=True)
class _Run:
    """A forward and backward.

    Attributes:
        simulation: with all saved activations on the device.
        peak: bytes of both, with some of them on the host.
        stall: seconds that the device waits for copies.
        host_bytes: that they take there.
    """

    simulation: Simulation
    peak: int
    stall: float = 0.0
    host_bytes: int = 0


def _of(simulation: Simulation) -> _Run:
    return _Run(simulation, simulation.peak)


def _checkpointing_name(every: int) -> str:
    which = "every layer" if every == 1 else f"every {every} layers"
    return f"Trainer's checkpointing, {which}"


_CHECKPOINTED = {_checkpointing_name(every): every for every in _EVERY}


class StepsOfModel:
    """See `StepPredictor`.

    Args:
        model: name of its class.
        device: `H100`, `cpu`.
        budget: bytes, and as the flag has it.
        tokens: of a row; 0 where rows have no tokens.
        graphs: by whether the loss is chunked.
        update: seconds of what is done to all parameters.
        compares: there are other plans beside that of the budget, with either loss.
    """

    def __init__(
        self,
        model: str,
        device: str,
        budget: tuple[int, str],
        tokens: int,
        graphs: Mapping[bool, GraphSteps],
        update: UpdateTimes,
        compares: bool = True,
    ) -> None:
        self.model, self.device, self.tokens = model, device, tokens
        self.budget, self._budget_text = budget
        self._graphs, self._update = graphs, update
        self._compares = compares

    def within(self, budget: int) -> "StepsOfModel":
        """The same model with another budget, in bytes, from the same traces."""
        graphs = {chunks: graph.within(budget) for chunks, graph in self._graphs.items()}
        text = f"{budget // 2**20}MiB"
        return StepsOfModel(self.model, self.device, (budget, text), self.tokens, graphs, self._update, self._compares)

    @property
    def costs(self) -> str:
        return self._graphs[False].costs

    @cached_property
    def plans(self) -> tuple[Technique, ...]:
        within_budget = _BUDGET, (f"--memory_opt_budget {self._budget_text}",)
        if not self._compares:
            return (Technique(*within_budget, chunks_loss=True in self._graphs),)
        has_layers = self._graphs[False].layers
        compared = [name for name, every in _CHECKPOINTED.items() if every <= self._graphs[False].layers]
        own: list[tuple[str, tuple[str, ...]]] = [
            (_NO_PLAN, ()),
            *([(_LEVEL_1, ("--memory_opt_level 1",))] if has_layers else []),
        ]
        own.append(within_budget)
        return (
            *(Technique(name, flags, chunks) for name, flags in own for chunks in self._graphs),
            *(Technique(name, is_own=False) for name in compared),
        )

    def fits(self, plan: Technique, rows: int, accumulates: bool) -> bool:
        return self._graphs[plan.chunks_loss].fits(plan.name, rows, accumulates)

    def lowest(self, plan: Technique, accumulates: bool) -> int:
        return self._graphs[plan.chunks_loss].lowest(plan.name, accumulates)

    def step(self, plan: Technique, rows: int, accumulates: bool) -> PredictedStep:
        return self._graphs[plan.chunks_loss].step(plan.name, rows, accumulates, self._update)

    def evaluation(self, rows: int) -> int:
        return self._graphs[False].evaluation(rows)
