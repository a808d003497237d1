"""The ways to train one model side by side: plain PyTorch, Trainer's checkpointing, and this engine's plans."""

from collections.abc import Sequence
from dataclasses import replace

from optimum_memopt.compat import CHECKPOINTING_FLAG
from optimum_memopt.engines.api.predictions import COMPUTE, COPIES, Technique, Training, Way, Workload
from optimum_memopt.engines.api.run import StepSpec
from optimum_memopt.engines.compile.costs.times import update_times
from optimum_memopt.engines.compile.memory.footprint import trainable_of
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.partition.captured_forward import problem_of
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.predict.holdings import step_of
from optimum_memopt.engines.compile.predict.live_step import LiveStep, plain_step
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, TracedStep
from optimum_memopt.engines.compile.solver.offload import stall_of
from optimum_memopt.engines.compile.solver.segments import seconds_again
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.optimizers import PlannedOptimizer
from optimum_memopt.sizes import Budget

_PLAIN = Technique("plain PyTorch", is_own=False)
_CHECKPOINTING = Technique("Trainer's checkpointing", (CHECKPOINTING_FLAG,), is_own=False)
_NO_PLAN = Technique("compile engine, no plan", ("--memory_opt_engine compile",))
_LEVEL_1 = Technique("compile engine, level 1", ("--memory_opt_level 1",))


def plain_ways(workload: Workload, spec: StepSpec) -> tuple[Way, ...]:
    """Plain PyTorch, and Trainer's checkpointing of every layer.

    Raises:
        MemOptError: an unknown device or optimizer, or a model that cannot be built.
    """
    ways = [_way(_PLAIN, plain_step(workload, spec, Training(keeps_outputs=spec.keeps_outputs)))]
    try:
        step = plain_step(workload, spec, Training(checkpoints=1, keeps_outputs=spec.keeps_outputs))
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
    context, optimizer = step.context(traced, Budget("", 0)), traced.run.optimizer
    assert isinstance(optimizer, PlannedOptimizer)
    trained = trainable_of(traced.model, traced.graphs[0].untrained)
    update = update_times(trained, optimizer, step.here, step.target)

    def way(index: int, plan: Technique) -> Way:
        # What passes between layers is recomputed or offloaded by the first of the plans alone.
        tape = traced.graphs[0].tape if index == 0 else traced.graphs[0].tape.with_all_held()
        graphs = [replace(graph, plans=(graph.plans[index],), tape=tape) for graph in traced.graphs]
        events = step_of(graphs, accumulates=context.fixed.accumulated > 0)
        around = context.footprint(events.peak())
        blocks = traced.predicted.blocks_of(events, around)
        return Way(
            replace(plan, chunks_loss=any(graph.chunks_loss for graph in graphs)),
            around.peak if blocks is None else max(around.peak, blocks.allocated),
            None if blocks is None else blocks.reserved,
            update.step(_seconds(graphs, context), step.spec.gradient_accumulation_steps),
        )

    return tuple(way(index, plan) for index, plan in plans)


def _seconds(graphs: Sequence[CapturedGraph], context: StepContext) -> dict[str, float]:
    """Seconds of a forward and its backward: of operators, recompute among them, and of waiting for copies."""
    forward = problem_of(graphs, [graph.sizes for graph in graphs], context.fixed.accumulated > 0)
    plans = [graphs[graph].plans[0] for graph in forward.graphs]
    simulation = simulate(forward.problem, forward.of_all([plan.saved for plan in plans]))
    calls, places = graphs[0].tape.calls, enumerate(forward.places)
    away = [
        node
        for node, (run, local) in places
        if local in plans[run].offloaded or forward.runs[run].positions.inputs.get(local) in calls[run].offloaded
    ]
    return {
        COMPUTE: sum(run.seconds(forward.problem) for run in (simulation.forward, simulation.backward))
        + seconds_again(forward, graphs[0].tape),
        COPIES: stall_of(forward.problem, simulation, away, context.link),
    }
