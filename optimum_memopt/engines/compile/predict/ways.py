"""The ways to train one model side by side: plain PyTorch, Trainer's checkpointing, and this engine's plans."""

from collections.abc import Sequence
from dataclasses import replace

from optimum_memopt.compat import CHECKPOINTING_FLAG
from optimum_memopt.engines.api.predictions import Technique, Training, Way, Workload
from optimum_memopt.engines.api.run import StepSpec
from optimum_memopt.engines.compile.costs.costs import Work, compiled_seconds, works
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.predict.holdings import step_of
from optimum_memopt.engines.compile.predict.live_step import LiveStep, plain_step
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, TracedStep
from optimum_memopt.errors import MemOptError
from optimum_memopt.sizes import Budget

_PLAIN = Technique("plain PyTorch", is_own=False)
_CHECKPOINTING = Technique("Trainer's checkpointing", (CHECKPOINTING_FLAG,), is_own=False)
_NO_PLAN = Technique("compile engine, no plan", ("--memory_opt_engine compile",))
_LEVEL_1 = Technique("compile engine, level 1", ("--memory_opt_level 1",))


def plain_ways(workload: Workload, spec: StepSpec, keeps_outputs: bool) -> tuple[Way, ...]:
    """Plain PyTorch, and Trainer's checkpointing of every layer.

    Args:
        keeps_outputs: see `Training`.

    Raises:
        MemOptError: an unknown device or optimizer, or a model that cannot be built.
    """
    ways = [_way(_PLAIN, plain_step(workload, spec, Training(keeps_outputs=keeps_outputs)))]
    try:
        step = plain_step(workload, spec, Training(checkpoints=1, keeps_outputs=keeps_outputs))
        ways.append(_way(_CHECKPOINTING, step))
    except MemOptError as error:
        ways.append(Way(_CHECKPOINTING, note=str(error)))
    return tuple(ways)


def _way(plan: Technique, step: LiveStep) -> Way:
    blocks = step.allocator
    return Way(
        plan,
        step.peak if blocks is None else max(step.peak, blocks.allocated),
        None if blocks is None else blocks.reserved,
        step.seconds,
        timeline=step.timeline,
    )


def engine_ways(step: PlannedStep, traced: TracedStep) -> tuple[Way, ...]:
    """This engine without a plan, under level 1, and under what is selected.

    Args:
        traced: whose graphs have the choices of these three, that of the selection first.
    """
    selection = step.selection
    plans = [(1, _NO_PLAN), (2, _LEVEL_1)]
    if selection.budget is not None:
        plans.append((0, Technique("compile engine, budget", (f"--memory_opt_budget {selection.budget.text}",))))
    elif selection.plan is not None:
        plans.append((0, Technique("compile engine, plan file", ("--memory_opt_plan",))))
    elif selection.config:
        plans.append((0, Technique("compile engine, config", (f"--memory_opt_config {selection.config}",))))
    elif selection.level > 1:
        plans.append((0, Technique(f"compile engine, level {selection.level}", ("--memory_opt_level 2",))))
    context, work = step.context(traced, Budget("", 0)), [_works(step, graph) for graph in traced.graphs]

    def way(index: int, plan: Technique) -> Way:
        graphs = [replace(graph, plans=(graph.plans[index],)) for graph in traced.graphs]
        events = step_of(graphs, accumulates=context.fixed.accumulated > 0)
        around = context.footprint(events.peak())
        blocks = traced.predicted.blocks_of(events, around)
        return Way(
            replace(plan, chunks_loss=any(graph.chunks_loss for graph in graphs)),
            around.peak if blocks is None else max(around.peak, blocks.allocated),
            None if blocks is None else blocks.reserved,
            _seconds(step, graphs, work) or None,
        )

    return tuple(way(index, plan) for index, plan in plans)


def _works(step: PlannedStep, graph: CapturedGraph) -> Sequence[Work | None]:
    """The work of a graph's nodes; empty where their seconds are measured."""
    if step.target is None or graph.analyzed is None:
        return ()
    return works(graph.analyzed.joint, graph.sizes)


def _seconds(step: PlannedStep, graphs: Sequence[CapturedGraph], of_graphs: Sequence[Sequence[Work | None]]) -> float:
    """Seconds of a forward and its backward, recompute included: at the rates that plain PyTorch's are estimated with,
    where a device is named."""
    seconds = 0.0
    for graph, of_nodes in zip(graphs, of_graphs, strict=True):
        problem = graph.problem_at(graph.sizes)
        simulation = graph.simulated(problem)
        if step.target is None or not of_nodes:
            seconds += graph.runs * sum(run.seconds(problem) for run in (simulation.forward, simulation.backward))
            continue
        ran = (of_nodes[node] for node in (*simulation.forward.order, *simulation.backward.order))
        operators = [work for work in ran if work is not None]
        seconds += graph.runs * compiled_seconds(operators, step.target, step.compiled_by == "inductor")
    return seconds
