"""Why a training step ran out of memory: what it held, and what would have fit."""

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from optimum_memopt.engines.api.explanations import (
    OPTIMIZER_STEP,
    Explanation,
    FailedStep,
    Moment,
    Part,
    Suggestion,
    TensorLike,
)
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.capture.capture import capture, chosen_by
from optimum_memopt.engines.compile.capture.traced_forward import TraceSpec
from optimum_memopt.engines.compile.costs.cache import costs_of
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.loss.decide import LossMode, may_have_vocabulary
from optimum_memopt.engines.compile.memory.footprint import footprint_of, tensor_bytes, trainable_of
from optimum_memopt.engines.compile.memory.step_context import StepContext, link_of, room_to_grow
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph, no_costs
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.producer import Producer, TorchDefault
from optimum_memopt.engines.compile.predict.holdings import HeldStep, Simulate, step_of
from optimum_memopt.engines.compile.predict.suggestions import (
    FailedRun,
    peak_of,
    plain_run,
    planned_run,
    problems_of,
    solver_of,
    suggestions,
    within_budget,
)
from optimum_memopt.engines.compile.torch_compat import fake_tensors
from optimum_memopt.engines.shared.forward_patch import Checkpointing
from optimum_memopt.logs import Deadline, Progress, TimeIsUpError, announced, only_warnings
from optimum_memopt.memory.optimizers import DEFAULT, PlannedOptimizer, embeddings_of, smaller_optimizers
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import gib_text

# Of plain PyTorch's activations what allocators waste: CUDA's, and on a CPU glibc's, which keeps blocks of up to 32
# MiB (activations of 180 MiB grew a process by 300).
_WASTE = {False: 0.1, True: 1.0}
# Of activations what is in no graph (TRL's accuracy and entropy of tokens take several times the logits).
_UNKNOWN = 2.0
# After which no part of the search begins: the error waits meanwhile, and is to be held back for 20 at most, unless a
# single trace takes longer.
_SECONDS = 15.0
_NAME, _AS_WRITTEN = "compile", "aot_eager"


@dataclass(frozen=True)
class _Ran:
    """The run that ran out of memory."""

    producer: Producer
    loss: str
    simulate: Simulate
    is_planned: bool
    remarks: tuple[str, ...] = ()


@dataclass
class _Search:
    """A search for why memory ran out, as far as it has come.

    Attributes:
        is_traced: what the step held is known, and how long a trace takes.
    """

    moment: Moment
    is_traced: bool = False
    parts: tuple[Part, ...] = ()
    remarks: tuple[str, ...] = ()
    suggestions: list[tuple[int, Suggestion]] = field(default_factory=list)


def explain(failed: FailedStep) -> Explanation:
    """The explanation of a failed step, as far as the search came in time, since the error waits meanwhile.

    Raises:
        Exception: the forward cannot be traced on fake tensors, or memory ran out again.
    """
    search = _Search(Moment(failed.place.phase, failed.place.module, failed.place.operator))
    with announced(
        "looking for why memory ran out in a training step",
        "looked for why memory ran out in a training step",
        f"traced on tensors without data, {_SECONDS:.0f} seconds at most",
        stage="tracing",
        every=_SECONDS / 4,
    ) as progress:
        remarks: tuple[str, ...] = ()
        try:
            _run_search(failed, search, progress, Deadline(_SECONDS))
        except TimeIsUpError:
            remarks = (f"what was found in {_SECONDS:.0f} seconds is here: more may fit",)
    ranked = sorted(search.suggestions, key=itemgetter(0))
    return Explanation(
        search.moment, search.parts, tuple(suggestion for _, suggestion in ranked), (*search.remarks, *remarks)
    )


def _run_search(failed: FailedStep, search: _Search, progress: Progress, deadline: Deadline) -> None:
    device = next(failed.model.parameters()).device
    compiler = default_compiler(device.type)[0]
    ran = _what_ran(failed)

    def captured(
        producer: Producer, loss: str, compiled_by: str, costs: Callable[[AnalyzedGraph], Costs]
    ) -> tuple[CapturedGraph, ...]:
        progress.stage = "tracing"
        traced = capture_failed(failed, producer, LossMode(loss), compiled_by, costs)
        progress.stage = "searching for suggestions"
        return traced

    def measured(graph: AnalyzedGraph) -> Costs:
        return costs_of(graph, device, compiler == "inductor", most=failed.held)

    @functools.cache
    def planned() -> tuple[CapturedGraph, ...]:
        """The graphs as the compile engine would run them, which take as long as the first where they are others."""
        deadline.check(needed=deadline.elapsed if search.is_traced else 0.0)
        if ran.is_planned:
            return (captured(TorchDefault(), CHUNKED, compiler, measured) if ran.loss == PLAIN else None) or graphs
        return captured(TorchDefault(), AUTO, compiler, measured)

    # Else there may be logits, which the engine does without.
    is_same = not ran.is_planned and compiler == _AS_WRITTEN and not may_have_vocabulary(failed.model)
    if ran.is_planned:
        graphs = captured(ran.producer, ran.loss, compiler, measured)
    elif is_same and not any(graph.chunks_loss for graph in planned()):
        graphs = planned()
    else:
        graphs = captured(ran.producer, PLAIN, _AS_WRITTEN, no_costs)
    # What a caller computes from the logits, and what runs between graphs, is in none of them.
    count = sum(graph.runs for graph in graphs)
    is_exact = count == 1 and not failed.call.reader
    model, untrained = failed.model, graphs[0].untrained
    search.is_traced, search.remarks = True, ran.remarks
    run = _failed_run(failed, ran.is_planned, is_exact, untrained)
    if failed.place.phase == OPTIMIZER_STEP:
        # What recompute saves is free by then.
        search.moment, trainable = Moment(OPTIMIZER_STEP), trainable_of(model, untrained)
        runs = {
            name: _with_optimizer(run, model, trainable, name) for name in smaller_optimizers(device.type == "cuda")
        }
        # accelerate's wraps the run's own.
        is_adamw = isinstance(getattr(failed.run.optimizer, "optimizer", failed.run.optimizer), torch.optim.AdamW)
        same = DEFAULT if is_adamw else ""
        for place, suggestion in enumerate(other_optimizers(planned, graphs, ran.simulate, runs, same, deadline)):
            search.suggestions.append((place, suggestion))
        return
    held = HeldStep(graphs, step_of(graphs, ran.simulate))
    made_before = _tensors_of(failed) + failed.accumulated + failed.outside + failed.kept
    search.moment, point = held.moment(failed.place, max(0, failed.held - made_before), failed.requested)
    search.parts = tuple(held.parts(point))
    if count > 1:
        search.remarks += (f"the forward is {count} graphs, and what runs between them is not known",)
    for place, suggestion in suggestions(planned, graphs, ran.simulate, run, deadline):
        search.suggestions.append((place, suggestion))


def _what_ran(failed: FailedStep) -> _Ran:
    engine, is_checkpointed = failed.engine, Checkpointing(failed.model).is_on
    if engine is None or engine.name != _NAME:
        if engine is not None:
            remark = f"what was held is that of plain PyTorch: the {engine.name} engine's own graph is not known"
            return _Ran(TorchDefault(), PLAIN, plain_run, is_planned=False, remarks=(remark,))
        if is_checkpointed:
            remark = "activation checkpointing counts as level 1"
            return _Ran(producer_for(Selection(level=1)), PLAIN, planned_run, is_planned=False, remarks=(remark,))
        return _Ran(TorchDefault(), PLAIN, plain_run, is_planned=False)
    if (plan := engine.plan_file()) is not None:
        return _Ran(producer_for(Selection(plan=plan, strict=False)), plan.loss, planned_run, is_planned=True)
    selection, remarks = engine.selection, tuple[str, ...]()
    if selection.budget is not None:
        # Its solver had not come to an end.
        selection, remarks = Selection(), ("what was held is that of no plan: the budget's was not known yet",)
    return _Ran(producer_for(replace(selection, strict=False)), AUTO, planned_run, is_planned=True, remarks=remarks)


def _tensors_of(failed: FailedStep) -> int:
    """Bytes of the model, its batch, and the states that the optimizer has."""
    run, model = failed.run, failed.model
    states = 0
    if isinstance(run.optimizer, torch.optim.Optimizer) and run.optimizer.state:
        states = footprint_of(model, run.optimizer).optimizer
    batch = sum(tensor.bytes for tensor in failed.call.tensors.values())
    return tensor_bytes([*model.parameters(), *model.buffers()]) + states + batch


def _failed_run(failed: FailedStep, is_planned: bool, is_exact: bool, untrained: Collection[str]) -> FailedRun:
    model, run = failed.model, failed.run
    device = next(model.parameters()).device
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    batch = sum(tensor.bytes for tensor in failed.call.tensors.values())
    # After tracing, which the compile engine does too.
    now = max(0, held_bytes(device) - (_tensors_of(failed) - batch) - gradients)
    constant = max(failed.outside, now)
    constant += room_to_grow(device, constant)
    around = {"batch": batch, "constant": failed.outside}
    plain = footprint_of(model, run.optimizer, run.gradient_accumulation, **around, untrained=untrained)
    link, host = link_of(device)
    return FailedRun(
        step=StepContext(
            failed.held, replace(plain, constant=constant), largest=run.largest_batch(), link=link, host=host
        ),
        plain=plain,
        rows=failed.rows,
        accumulation=failed.accumulation,
        waste=(0.0 if is_planned else _WASTE[device.type == "cpu"]) if is_exact else _UNKNOWN,
        is_exact=is_exact,
    )


def _with_optimizer(run: FailedRun, model: torch.nn.Module, trainable: Sequence[torch.Tensor], name: str) -> FailedRun:
    optimizer = PlannedOptimizer(name, next(model.parameters()).is_cuda, embeddings_of(model))
    states, temporary = sum(optimizer.state_sizes(trainable)), optimizer.step_bytes(trainable)
    plain, fixed = (replace(held, optimizer=states, step=temporary) for held in (run.plain, run.step.fixed))
    return replace(run, plain=plain, step=replace(run.step, fixed=fixed))


def capture_failed(
    failed: FailedStep, producer: Producer, loss: LossMode, compiler: str, costs: Callable[[AnalyzedGraph], Costs]
) -> tuple[CapturedGraph, ...]:
    """The graphs of the failed forward, traced on a copy of the model whose tensors have no data."""
    mode, fake = fake_tensors.fake_model(failed.model)
    device_type, autocast = next(failed.model.parameters()).device.type, failed.autocast
    # What a plan lacks in this graph is no mistake of the user's here.
    spec = TraceSpec(compiler, loss=loss, strict=False)
    with (
        only_warnings(),
        torch.autocast(device_type, autocast, enabled=autocast is not None),
        torch.enable_grad(),
        mode,
    ):
        args, inputs = _without_data(failed.call.args), _without_data(failed.call.kwargs)
        graphs = capture(fake, args, inputs, spec, chosen_by(producer), failed.call.reader, costs)
    # Else what passes between graphs is not known, and nor is what was held.
    joints = [graph.analyzed.joint for graph in graphs if graph.analyzed is not None]
    assert all(len(joint.gradients) == len(joint.inputs) for joint in joints)
    return graphs


def _without_data(given: Any) -> Any:
    """With tensors of the current mode for `TensorLike`, in containers too."""
    if isinstance(given, TensorLike):
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        return made.requires_grad_(given.requires_grad)
    if isinstance(given, Mapping):
        return {key: _without_data(value) for key, value in given.items()}
    if isinstance(given, tuple | list) and type(given) in (tuple, list):
        return type(given)(map(_without_data, given))
    # A cache or another object that a forward writes to is not the failed step's.
    return given if isinstance(given, Collection | int | float | bool | None) else copy.copy(given)


def other_optimizers(
    planned: Callable[[], Sequence[CapturedGraph]],
    ran: Sequence[CapturedGraph],
    simulate: Simulate,
    runs: Mapping[str, FailedRun],
    same: str,
    deadline: Deadline,
) -> Iterator[Suggestion]:
    """Each with as little recompute as it needs: none, or that of a budget; none where none fits.

    Args:
        runs: the run with another optimizer, by Trainer's name of it, the recommended one first.
        same: name of the one that computes what the run's own does; empty: none does.

    Raises:
        TimeIsUpError: some are not known in time.
    """
    for name, run in runs.items():
        deadline.check()
        states = run.plain.optimizer + run.plain.step
        what = f"states and temporaries of {gib_text(states)}, " + (
            "the same update" if name == same else "another update: the run trains differently"
        )
        activations = peak_of(ran, simulate, problems_of(ran, run))
        peak = replace(run.plain, activations=activations).peak
        # What an allocator wastes is in what was held: forward and backward had run.
        if peak <= run.allowed:
            yield Suggestion(f"--optim {name}", peak, None, what)
            continue
        for suggestion in within_budget(solver_of(planned(), run), run):
            yield replace(suggestion, flags=f"--optim {name} {suggestion.flags}", what=f"{what}; {suggestion.what}")
