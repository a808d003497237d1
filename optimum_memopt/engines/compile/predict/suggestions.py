"""What would have fit, each as flags with its predicted peak. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from optimum_memopt.engines.api.explanations import WayOut
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.graph.symbols import rows_of
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.simulation import Simulation, simulate_everything_saved
from optimum_memopt.engines.compile.predict.captured import CapturedGraph
from optimum_memopt.engines.compile.predict.holdings import Simulate, step_of
from optimum_memopt.engines.compile.solver.multi_graph import Plans, Together
from optimum_memopt.engines.compile.solver.offload import Host
from optimum_memopt.engines.compile.solver.solver import Floor
from optimum_memopt.progress import Deadline
from optimum_memopt.sizes import gib_text

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


def peak_of(graphs: Sequence[CapturedGraph], simulate: Simulate, problems: Sequence[Problem]) -> int:
    """Bytes of a step's activations.

    Args:
        graphs: in the order of the forward.
        simulate: what each saves.
        problems: the graphs as numbers.
    """
    return step_of(graphs, simulate, problems).peak()


def ways_out(
    planned: Callable[[], Sequence[CapturedGraph]],
    ran: Sequence[CapturedGraph],
    simulate: Simulate,
    settings: Settings,
    deadline: Deadline,
) -> Iterator[tuple[int, WayOut]]:
    """Each with its place, the recommended one's the lowest, and what is found soonest first; none where not even one
    row fits.

    Args:
        planned: asked for the graphs as the compile engine would run them, which may take long.
        ran: the graphs that ran out of memory.
        simulate: what they held.
        settings: of the run.
        deadline: for all of them.

    Raises:
        TimeIsUpError: some are not known in time.
    """
    together = cache(lambda: together_of(planned(), settings))
    budget, smaller = (0, 1) if settings.is_exact else (1, 0)
    is_any = False
    for place, search in (
        (smaller, lambda: _smaller(ran, simulate, settings)),
        (2, lambda: _loss(planned(), ran, settings)),
        (3, lambda: _level(together(), settings)),
        (budget, lambda: within_budget(together(), settings)),
    ):
        deadline.check()
        for found in search():
            is_any = True
            yield place, found
    if not is_any:
        for found in _smaller_within_budget(planned(), settings, deadline):
            yield 0, found


def together_of(graphs: Sequence[CapturedGraph], settings: Settings, times: int = 1) -> Together:
    """To be solved for the run's largest batch, or for a micro-batch of one of `times` parts of its rows."""
    return Together(
        problems_of(graphs, settings, times),
        [graph.runs for graph in graphs],
        hosts=[Host(settings.link, settings.host, graph.offloadable) if settings.link else None for graph in graphs],
    )


def problems_of(graphs: Sequence[CapturedGraph], settings: Settings, times: int = 1) -> list[Problem]:
    """The graphs as numbers; see `together_of`."""
    return [_problem(graph, settings.largest, times) for graph in graphs]


def _problem(graph: CapturedGraph, largest: LargestBatch | None, times: int) -> Problem:
    sizes = graph.sizes_for(largest)
    parts = {symbol: size // times for symbol, size in rows_of(sizes, graph.names).items()}
    return graph.problem_at({**sizes, **parts})


def within_budget(graphs: Together, settings: Settings) -> Iterator[WayOut]:
    """A budget; none where nothing fits.

    Args:
        graphs: as the compile engine would run them.
        settings: of the run.
    """
    allowed = settings.outside.activations_within(settings.budget << 20)
    if (found := _within(graphs, allowed, settings)) is None:
        return
    peak = replace(settings.outside, activations=found.peak).peak
    if peak > settings.allowed:
        return
    yield WayOut(
        f"--memory_opt_budget {settings.budget}MiB",
        peak,
        _share(found),
        f"{_words(found)} with which every step fits",
    )


def _within(graphs: Together, allowed: int, settings: Settings) -> Plans | None:
    """The plans of a budget, unless in another process, where a little more may be there, nothing would fit."""
    less = allowed - int(settings.limit * _MARGIN)
    # Without a host no long search for recompute that is below the lowest found.
    if graphs.lowest > less and not (settings.link and graphs.is_within(less)):
        return None
    found = graphs.cheapest(allowed)
    return None if isinstance(found, Floor) else found


def _words(found: Plans) -> str:
    on_host = f" and offload ({gib_text(found.host_bytes)} on the host)" if found.host_bytes else ""
    return f"the cheapest recompute{on_host}"


def _share(found: Plans) -> float | None:
    """Time for recompute and copies, of that without; None: not known."""
    return found.extra_seconds / found.seconds if found.seconds else None


def _smaller(ran: Sequence[CapturedGraph], simulate: Simulate, settings: Settings) -> Iterator[WayOut]:
    for times in _parts(ran, settings):
        activations = peak_of(ran, simulate, problems_of(ran, settings, times))
        peak = _micro(settings.plain, activations, times).peak
        if peak + settings.waste * activations <= settings.allowed:
            yield WayOut(_micro_flags(settings, times), peak, None, "as many rows in an optimizer step")
            return


def _loss(planned: Sequence[CapturedGraph], ran: Sequence[CapturedGraph], settings: Settings) -> Iterator[WayOut]:
    if any(graph.chunks_loss for graph in ran) or not any(graph.chunks_loss for graph in planned):
        return
    # Without a plan it is torch's own partition that runs.
    activations = peak_of(planned, planned_run, problems_of(planned, settings))
    peak = replace(settings.outside, activations=activations).peak
    if peak <= settings.allowed:
        yield WayOut(
            "--memory_opt_engine compile --memory_opt_loss chunked", peak, None, "a loss that never holds its logits"
        )


def _level(graphs: Together, settings: Settings) -> Iterator[WayOut]:
    found = graphs.layers_recomputed
    peak = replace(settings.outside, activations=found.peak).peak
    if peak > settings.allowed:
        return
    flags = "--memory_opt_engine compile --memory_opt_level 1"
    yield WayOut(flags, peak, _share(found), "every layer is recomputed from its input")


def _smaller_within_budget(
    planned: Sequence[CapturedGraph], settings: Settings, deadline: Deadline
) -> Iterator[WayOut]:
    """The largest micro-batch with which some plan fits."""
    for times in _parts(planned, settings):
        deadline.check()
        step = _micro(settings.outside, 0, times)
        allowed = step.activations_within(settings.budget << 20)
        if (found := _within(together_of(planned, settings, times), allowed, settings)) is None:
            continue
        peak = replace(step, activations=found.peak).peak
        if peak > settings.allowed:
            continue
        yield WayOut(
            f"{_micro_flags(settings, times)} --memory_opt_budget {settings.budget}MiB",
            peak,
            _share(found),
            f"as many rows in an optimizer step, with {_words(found)}",
        )
        return


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
