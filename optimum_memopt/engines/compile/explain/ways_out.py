"""What would have fit, each as flags with its predicted peak. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optimum_memopt.engines.compile.budget.largest_sizes import rows_of
from optimum_memopt.engines.compile.budget.mixed import Host, Mixed, cheapest
from optimum_memopt.engines.compile.budget.problem import Problem
from optimum_memopt.engines.compile.budget.simulation import Simulation, simulate_everything_saved
from optimum_memopt.engines.compile.budget.solve import Floor, Solution, Solver
from optimum_memopt.engines.compile.explain.captured import CapturedGraph
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.memory_report import WayOut
from optimum_memopt.engines.run import LargestBatch
from optimum_memopt.sizes import gib_text

Simulate = Callable[[CapturedGraph, Problem], Simulation]
# Of what was held: another run of the same step holds a little more or less.
_MARGIN = 0.02


@dataclass(frozen=True)
class Settings:
    """The run that failed.

    Attributes:
        limit: bytes that were held when an allocation failed.
        outside: what a step of the compile engine holds beside its graphs, with the run's largest batch.
        plain: the same for what ran.
        largest: the run's largest batch; None: not known.
        rows: of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        waste: of activations, what an allocator wastes on those of what ran, which come and go in all sizes.
        is_exact: the graphs are all that the step holds; else a budget's plan may take more than it is predicted to.
        link: between the device and the host, bytes a second in one direction; 0: nothing is offloaded.
        host: bytes that offload may take of the host's memory.
    """

    limit: int
    outside: Footprint
    plain: Footprint
    largest: LargestBatch | None
    rows: int
    accumulation: int
    waste: float
    is_exact: bool
    link: float = 0.0
    host: int = 0

    @property
    def budget(self) -> int:
        """Whole MiB that a budget may be."""
        return int(self.limit * (1 - _MARGIN)) >> 20

    @property
    def allowed(self) -> int:
        """Bytes that a step may be predicted to take."""
        return int(self.limit * (1 - _MARGIN))


@dataclass(frozen=True)
class Whole:
    """The graphs of one forward for one batch.

    Attributes:
        problems: in order.
        hosts: where activations of each may wait; None: nowhere.
    """

    problems: tuple[Problem, ...]
    hosts: tuple[Host | None, ...]

    @cached_property
    def solvers(self) -> tuple[Solver, ...]:
        return tuple(map(Solver, self.problems))

    @cached_property
    def lowest(self) -> int:
        """Bytes of the lowest peak that is found."""
        return peak_of([solver.lowest for solver in self.solvers])

    def fits(self, allowed: int) -> bool:
        """Whether there are plans with which all graphs stay within so many bytes."""
        return self.lowest <= allowed or (any(self.hosts) and self.solve(allowed) is not None)

    def solve(self, allowed: int) -> "Solved | None":
        """The cheapest plan of each graph with which all stay within so many bytes; None where nothing fits."""
        found: list[Solution | Mixed] = []
        before, peak = 0, 0
        for solver, host in zip(self.solvers, self.hosts, strict=True):
            solution = cheapest(solver, allowed - before, host)
            if isinstance(solution, Floor):
                return None
            found.append(solution)
            peak = max(peak, before + solution.peak)
            before += _stashed(solver.problem, solution)
        return Solved(tuple(found), peak)


@dataclass(frozen=True)
class Solved:
    """A budget's plans.

    Attributes:
        plans: of each graph.
        peak: bytes of all; what earlier graphs have saved is held while later ones run.
    """

    plans: tuple[Solution | Mixed, ...]
    peak: int

    @property
    def extra_share(self) -> float | None:
        """Time for recompute and copies, of that without; None: not known."""
        return _share(sum(plan.extra_seconds for plan in self.plans), sum(plan.seconds for plan in self.plans))

    @property
    def words(self) -> str:
        """What they do."""
        on_host = sum(plan.host_bytes for plan in self.plans if isinstance(plan, Mixed))
        return "the cheapest recompute" + (f" and offload ({gib_text(on_host)} on the host)" if on_host else "")


def _stashed(problem: Problem, solution: Solution | Mixed) -> int:
    on_host = solution.offloaded if isinstance(solution, Mixed) else ()
    saved = {problem.roots[node] for node in solution.saved} - {problem.roots[node] for node in on_host}
    return sum(problem.bytes[root] for root in saved)


def peak_of(runs: Sequence[Simulation]) -> int:
    """Bytes of graphs that run one after the other; what earlier ones have saved is held meanwhile."""
    before, peaks = 0, [0]
    for run in runs:
        peaks.append(before + run.peak)
        before += run.stashed
    return max(peaks)


def ways_out(
    planned: Sequence[CapturedGraph], ran: Sequence[CapturedGraph], simulate: Simulate, settings: Settings
) -> tuple[WayOut, ...]:
    """The recommended one first; empty where not even one row fits.

    Args:
        planned: the graphs as the compile engine would run them.
        ran: the graphs that ran out of memory.
        simulate: what they held.
        settings: of the run.
    """
    whole = whole_of(planned, settings)
    budget, smaller = list(within_budget(whole, settings)), list(_smaller(ran, simulate, settings))
    found = [
        *(budget + smaller if settings.is_exact else smaller + budget),
        *_loss(planned, ran, whole, settings),
        *_level(whole, settings),
    ]
    return tuple(found or _smaller_within_budget(planned, settings))


def whole_of(graphs: Sequence[CapturedGraph], settings: Settings, times: int = 1) -> Whole:
    """The problems of the run's largest batch, or of a micro-batch of one of `times` parts of its rows."""
    return Whole(
        tuple(_problem(graph, settings.largest, times) for graph in graphs),
        tuple(Host(settings.link, settings.host, graph.offloadable) if settings.link else None for graph in graphs),
    )


def _problem(graph: CapturedGraph, largest: LargestBatch | None, times: int) -> Problem:
    sizes = graph.sizes_for(largest)
    parts = {symbol: size // times for symbol, size in rows_of(sizes, graph.names).items()}
    return graph.problem_at({**sizes, **parts})


def within_budget(whole: Whole, settings: Settings) -> Iterator[WayOut]:
    """A budget; none where nothing fits.

    Args:
        whole: the graphs as the compile engine would run them.
        settings: of the run.
    """
    allowed = settings.outside.activations_within(settings.budget << 20)
    if (solved := _within(whole, allowed, settings)) is None:
        return
    peak = replace(settings.outside, activations=solved.peak).peak
    if peak > settings.allowed:
        return
    yield WayOut(
        f"--memory_opt_budget {settings.budget}MiB",
        peak,
        solved.extra_share,
        f"{solved.words} with which every step fits",
    )


def _within(whole: Whole, allowed: int, settings: Settings) -> Solved | None:
    """The plans of a budget, unless in another process, where a little more may be there, nothing would fit."""
    return whole.solve(allowed) if whole.fits(allowed - int(settings.limit * _MARGIN)) else None


def _smaller(ran: Sequence[CapturedGraph], simulate: Simulate, settings: Settings) -> Iterator[WayOut]:
    for times in _parts(ran, settings):
        runs = [
            simulate(graph, problem)
            for graph, problem in zip(ran, whole_of(ran, settings, times).problems, strict=True)
        ]
        peak = _micro(settings.plain, peak_of(runs), times).peak
        if peak + settings.waste * peak_of(runs) <= settings.allowed:
            yield WayOut(_micro_flags(settings, times), peak, None, "as many rows in an optimizer step")
            return


def _loss(
    planned: Sequence[CapturedGraph], ran: Sequence[CapturedGraph], whole: Whole, settings: Settings
) -> Iterator[WayOut]:
    if any(graph.chunks_loss for graph in ran) or not any(graph.chunks_loss for graph in planned):
        return
    # Without a plan it is torch's own partition that runs.
    runs = [graph.simulated(problem) for graph, problem in zip(planned, whole.problems, strict=True)]
    peak = replace(settings.outside, activations=peak_of(runs)).peak
    if peak <= settings.allowed:
        yield WayOut(
            "--memory_opt_engine compile --memory_opt_loss chunked", peak, None, "a loss that never holds its logits"
        )


def _level(whole: Whole, settings: Settings) -> Iterator[WayOut]:
    runs = [solver.layers_recomputed for solver in whole.solvers]
    peak = replace(settings.outside, activations=peak_of(runs)).peak
    if peak > settings.allowed:
        return
    pairs = list(zip(runs, whole.solvers, strict=True))
    share = _share(sum(s.extra_seconds(run) for run, s in pairs), sum(s.seconds for s in whole.solvers))
    yield WayOut(
        "--memory_opt_engine compile --memory_opt_level 1", peak, share, "every layer is recomputed from its input"
    )


def _smaller_within_budget(planned: Sequence[CapturedGraph], settings: Settings) -> Iterator[WayOut]:
    """The largest micro-batch with which some plan fits."""
    for times in _parts(planned, settings):
        whole = whole_of(planned, settings, times)
        step = _micro(settings.outside, 0, times)
        allowed = step.activations_within(settings.budget << 20)
        if (solved := _within(whole, allowed, settings)) is None:
            continue
        peak = replace(step, activations=solved.peak).peak
        if peak > settings.allowed:
            continue
        yield WayOut(
            f"{_micro_flags(settings, times)} --memory_opt_budget {settings.budget}MiB",
            peak,
            solved.extra_share,
            f"as many rows in an optimizer step, with {solved.words}",
        )
        return


def _share(extra: float, seconds: float) -> float | None:
    return extra / seconds if seconds else None


def _micro(outside: Footprint, activations: int, times: int) -> Footprint:
    """A micro-batch of so many: gradients of the earlier ones are there while a later one runs."""
    return replace(outside, activations=activations, batch=outside.batch // times, accumulated=outside.gradients)


def _micro_flags(settings: Settings, times: int) -> str:
    return (
        f"--per_device_train_batch_size {settings.rows // times} "
        f"--gradient_accumulation_steps {settings.accumulation * times}"
    )


def _parts(graphs: Sequence[CapturedGraph], settings: Settings) -> Iterator[int]:
    """Numbers of equal parts that the rows of all graphs can be cut into."""
    rows = [size for graph in graphs for size in rows_of(graph.sizes_for(settings.largest), graph.names).values()]
    for times in range(2, settings.rows + 1) if rows else ():
        if settings.rows % times == 0 and all(size % times == 0 for size in rows):
            yield times


def plain_run(graph: CapturedGraph, problem: Problem) -> Simulation:
    """What plain PyTorch holds; see `Simulate`."""
    return simulate_everything_saved(problem)


def planned_run(graph: CapturedGraph, problem: Problem) -> Simulation:
    """What the compile engine holds under the recorded plan; see `Simulate`."""
    return graph.simulated(problem)
