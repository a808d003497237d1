"""Suggestions: flags with which a failed step would have fit, each with its predicted peak. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from optimum_memopt.engines.api.explanations import Suggestion
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.partition.captured_forward import ForwardSolver, forward_solver
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.predict.holdings import step_of
from optimum_memopt.engines.compile.predict.reconstruction import Reconstruction
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan
from optimum_memopt.logs import Deadline
from optimum_memopt.sizes import gib_text

# Of what was held: another run of the same step holds a little more or less.
_MARGIN = 0.02


@dataclass(frozen=True)
class FailedRun:
    """The run that failed.

    Attributes:
        step: of the compile engine, with the run's largest batch; its limit is what was held when an allocation
            failed.
        waste: of activations, what an allocator wastes on those of what ran, which come and go in all sizes.
        is_exact: the graphs are all that the step holds; else a budget's plan may take more than it is predicted to.
    """

    step: StepContext
    plain: Footprint
    rows: int
    accumulation: int
    waste: float
    is_exact: bool

    @property
    def budget(self) -> int:
        """Whole MiB that a budget may be."""
        return self.allowed >> 20

    @property
    def allowed(self) -> int:
        """Bytes that a step may be predicted to take."""
        return int(self.step.limit * (1 - _MARGIN))


def suggestions(
    planned: Callable[[], Sequence[CapturedGraph]], ran: Reconstruction, run: FailedRun, deadline: Deadline
) -> Iterator[tuple[int, Suggestion]]:
    """Suggestions, each with its place, the recommended one's the lowest, in the order in which they are found; none
    where not even one row fits.

    Raises:
        TimeIsUpError: some are not known in time.
    """
    solver = cache(lambda: solver_of(planned(), run))
    budget, smaller = (0, 1) if run.is_exact else (1, 0)
    is_any = False
    for place, search in (
        (smaller, lambda: _smaller(ran, run)),
        (2, lambda: _loss(planned(), ran, run)),
        (3, lambda: _level(solver(), run)),
        (budget, lambda: within_budget(solver(), run)),
    ):
        deadline.check()
        for suggestion in search():
            is_any = True
            yield place, suggestion
    if not is_any:
        for suggestion in _smaller_within_budget(planned(), run, deadline):
            yield 0, suggestion


def solver_of(graphs: Sequence[CapturedGraph], run: FailedRun) -> ForwardSolver:
    """To be solved for the run's largest batch."""
    return forward_solver(graphs, run.step, largest=run.step.largest)


def within_budget(graphs: ForwardSolver, run: FailedRun) -> Iterator[Suggestion]:
    """A budget; none where nothing fits."""
    allowed = run.step.fixed.activations_within(run.budget << 20)
    if (plan := _within(graphs, allowed, run)) is None:
        return
    peak = replace(run.step.fixed, activations=plan.peak).peak
    if peak > run.allowed:
        return
    yield Suggestion(
        f"--memory_opt_budget {run.budget}MiB", peak, _share(plan), f"{_words(plan)} with which every step fits"
    )


def _within(graphs: ForwardSolver, allowed: int, run: FailedRun) -> Plan | None:
    """The plan for a budget; None where in another process, with slightly less memory, nothing would fit."""
    less = allowed - int(run.step.limit * _MARGIN)
    # Without a host no long search for recompute that is below the lowest plan.
    if graphs.lowest > less and not (run.step.link and graphs.fits(less)):
        return None
    try:
        return graphs.cheapest(allowed)
    except Infeasible:
        return None


def _words(plan: Plan) -> str:
    on_host = f" and offload ({gib_text(plan.host_bytes)} on the host)" if plan.host_bytes else ""
    return f"the cheapest recompute{on_host}"


def _share(plan: Plan) -> float | None:
    """Time for recompute and copies, as a share of the rest; None where it is not known."""
    return plan.extra_seconds / plan.seconds if plan.seconds else None


def _smaller(ran: Reconstruction, run: FailedRun) -> Iterator[Suggestion]:
    for times in _parts(ran.rows, run):
        activations = ran.activations(times)
        peak = _micro(run.plain, activations, times).peak
        if peak + run.waste * activations <= run.allowed:
            yield Suggestion(_micro_flags(run, times), peak, None, "as many rows in an optimizer step")
            return


def _loss(planned: Sequence[CapturedGraph], ran: Reconstruction, run: FailedRun) -> Iterator[Suggestion]:
    if ran.chunks_loss or not any(graph.chunks_loss for graph in planned):
        return
    # Without a plan it is torch's own partition that runs.
    activations = step_of(planned, 1, run.step.largest, run.step.fixed.accumulated > 0).peak()
    peak = replace(run.step.fixed, activations=activations).peak
    if peak <= run.allowed:
        yield Suggestion(
            "--memory_opt_engine compile --memory_opt_loss chunked", peak, None, "a loss that never holds its logits"
        )


def _level(graphs: ForwardSolver, run: FailedRun) -> Iterator[Suggestion]:
    plan = graphs.solver.plan(graphs.solver.layers_recomputed)
    peak = replace(run.step.fixed, activations=plan.peak).peak
    if peak > run.allowed:
        return
    flags = "--memory_opt_engine compile --memory_opt_level 1"
    yield Suggestion(flags, peak, _share(plan), "every layer is recomputed from its input")


def _smaller_within_budget(
    planned: Sequence[CapturedGraph], run: FailedRun, deadline: Deadline
) -> Iterator[Suggestion]:
    for times in _parts([size for graph in planned for size in graph.rows_with(run.step.largest)], run):
        deadline.check()
        micro = replace(run.step, fixed=_micro(run.step.fixed, 0, times))
        solver = forward_solver(planned, micro, times, micro.largest)
        if (plan := _within(solver, micro.fixed.activations_within(run.budget << 20), run)) is None:
            continue
        peak = micro.footprint(plan.peak).peak
        if peak > run.allowed:
            continue
        yield Suggestion(
            f"{_micro_flags(run, times)} --memory_opt_budget {run.budget}MiB",
            peak,
            _share(plan),
            f"as many rows in an optimizer step, with {_words(plan)}",
        )
        return


def _micro(outside: Footprint, activations: int, times: int) -> Footprint:
    """The footprint of a micro-batch: gradients of the earlier ones are there while a later one runs."""
    return replace(outside, activations=activations, batch=outside.batch // times, accumulated=outside.gradients)


def _micro_flags(run: FailedRun, times: int) -> str:
    return (
        f"--per_device_train_batch_size {run.rows // times} --gradient_accumulation_steps {run.accumulation * times}"
    )


def _parts(rows: Sequence[int], run: FailedRun) -> Iterator[int]:
    """Numbers of equal parts that the rows can be cut into; `rows` are the sizes that are rows."""
    for times in range(2, run.rows + 1) if rows else ():
        if run.rows % times == 0 and all(size % times == 0 for size in rows):
            yield times
