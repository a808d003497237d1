"""Explains why a training step ran out of memory: what it held, and which settings would have fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import itemgetter

import torch

from optimum_memopt.compat.bitsandbytes import buffers_of
from optimum_memopt.compat.torch import world_size
from optimum_memopt.engines.api.explanations import OPTIMIZER_STEP, Explanation, FailedStep, Moment, Part, Suggestion
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.memory.footprint import (
    Footprint,
    StepContext,
    footprint_of,
    link_of,
    local_bytes,
    room_to_grow,
    trainable_of,
)
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, MODEL, PLAIN
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.producers import producer_for
from optimum_memopt.engines.compile.partition.producers.producer import Producer, TorchDefault
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.predict.reconstruction import (
    Reconstruction,
    capture_failed,
    live_run,
    of_forward,
    of_plain_pytorch,
)
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan
from optimum_memopt.engines.torch_compat.trace_fixes import one_at_a_time
from optimum_memopt.errors import is_out_of_memory, line_of, with_causes
from optimum_memopt.logs import Deadline, Progress, TimeIsUpError, announced
from optimum_memopt.memory.optimizers import DEFAULT, PlannedOptimizer, smaller_optimizers
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import gib_text

# Share of the bytes that were held: another run of the same step holds a little more or less.
_MARGIN = 0.02
# Share of plain PyTorch's activations that allocators waste: CUDA's, and on a CPU (True) glibc's, which keeps blocks
# of up to 32 MiB (activations of 180 MiB grew a process by 300).
_WASTE = {False: 0.1, True: 1.0}
# Bytes outside of all graphs as a multiple of the activations (TRL's accuracy and entropy of tokens take several times
# the logits).
_UNKNOWN = 2.0
# No part of the search begins after this many seconds: the error waits meanwhile, and should be delayed by at most 20
# unless a single trace takes longer.
_SECONDS = 15.0
_NAME = "compile"


@dataclass(frozen=True)
class Search:
    """Searches for settings that would have fit.

    Attributes:
        ran: the step that failed, as it would have run with enough memory.
        forward: returns the forward as the compile engine would run it; called when a suggestion first needs it.
        step: context of the compile engine's step with the run's largest batch; its limit is the bytes held when the
            allocation failed.
        plain: footprint of the step that ran.
        waste: share of its activations, which come and go in all sizes, that the allocator wastes.
    """

    failed: FailedStep
    ran: Reconstruction
    forward: Callable[[], CapturedForward]
    deadline: Deadline
    step: StepContext
    plain: Footprint
    waste: float

    @property
    def budget(self) -> int:
        """Returns the largest budget to suggest, in whole MiB."""
        return self.allowed >> 20

    @property
    def allowed(self) -> int:
        """Returns the highest predicted peak that counts as fitting, in bytes."""
        return int(self.step.limit * (1 - _MARGIN))

    @cached_property
    def model(self) -> StepModel:
        """Returns the step as the compile engine would run it."""
        return StepModel.of(self.forward(), self.step)

    def suggestions(self) -> Iterator[tuple[int, Suggestion]]:
        """Yields suggestions with their ranks, 0 for the recommended one, in the order in which they are found; none
        if not even one row fits.

        Raises:
            TimeIsUpError: the time is up before all parts of the search have run.
        """
        # If the graphs do not cover all of the step, a budget's plan may take more than predicted.
        budget, smaller = (0, 1) if self.ran.is_exact else (1, 0)
        is_any = False
        for place, search in (
            (smaller, self._smaller),
            (2, self._chunked_loss),
            (3, self._level),
            (4, self._released_gradients),
            (budget, self.within_budget),
        ):
            self.deadline.check()
            for suggestion in search():
                is_any = True
                yield place, suggestion
        if not is_any:
            for suggestion in self._smaller_within_budget():
                yield 0, suggestion

    def within_budget(self) -> Iterator[Suggestion]:
        """Yields a budget; none if no plan fits."""
        allowed = self.step.fixed.activations_within(self.budget << 20)
        if (plan := self._within(self.model.solver, allowed)) is None:
            return
        flags = f"--memory_opt_budget {self.budget}MiB"
        yield from self._planned(self.model, plan, flags, f"{_words(plan)} with which every step fits")

    def _planned(self, model: StepModel, plan: Plan, flags: str, what: str) -> Iterator[Suggestion]:
        """Yields a plan if the step fits with it."""
        peak = model.peak(plan.peak)
        if peak <= self.allowed:
            yield Suggestion(flags, peak, _share(plan), what)

    def _within(self, solver: ForwardSolver, allowed: int) -> Plan | None:
        """Returns the plan for a budget; None if no plan would fit in another process with slightly less memory."""
        less = allowed - int(self.step.limit * _MARGIN)
        # Without offload, skip the long search for recompute below the lowest plan.
        if solver.lowest > less and not (self.step.link and solver.fits(less)):
            return None
        try:
            return solver.cheapest(allowed)
        except Infeasible:
            return None

    def _smaller(self) -> Iterator[Suggestion]:
        for times in self._parts(self.ran.rows):
            activations = self.ran.activations(times)
            peak = replace(self.plain.of_later_micro_batch(), activations=activations).peak
            if peak + self.waste * activations <= self.allowed:
                yield Suggestion(self._micro_flags(times), peak, None, "the same number of rows per optimizer step")
                return

    def _chunked_loss(self) -> Iterator[Suggestion]:
        if self.ran.chunks_loss or not self.model.forward.chunks_loss:
            return
        # Without a plan, torch's own partition runs.
        peak = self.model.peak(self.model.events().peak())
        if peak <= self.allowed:
            flags = "--memory_opt_engine compile --memory_opt_loss chunked"
            yield Suggestion(flags, peak, None, "the loss never holds all logits")

    def _level(self) -> Iterator[Suggestion]:
        flags, what = "--memory_opt_engine compile --memory_opt_level 1", "every layer is recomputed from its input"
        yield from self._planned(self.model, self.model.level_1(), flags, what)

    def _released_gradients(self) -> Iterator[Suggestion]:
        """Yields level 1 with the optimizer in the backward; none if the run needs all gradients at once, or if
        releasing them saves little."""
        is_possible = self.failed.accumulation == 1 and world_size() == 1
        is_released = self.step.fixed.releases
        if not is_possible or is_released or self.failed.autocast == torch.float16 or len(self.forward().graphs) == 1:
            return
        released = self.model.releasing_gradients()
        plan = released.level_1()
        if released.peak(plan.peak) < (1 - _MARGIN) * self.model.peak(self.model.solver.lowest):
            flags = "--memory_opt_engine compile --memory_opt_level 1 --memory_opt_release_gradients --max_grad_norm 0"
            what = "the optimizer steps in the backward; gradients are not clipped"
            yield from self._planned(released, plan, flags, what)

    def _smaller_within_budget(self) -> Iterator[Suggestion]:
        for times in self._parts(self.model.forward.rows_with(self.step.largest)):
            self.deadline.check()
            micro = self.model.part(times)
            allowed = micro.context.fixed.activations_within(self.budget << 20)
            if (plan := self._within(micro.solver, allowed)) is None:
                continue
            peak = micro.peak(plan.peak)
            if peak <= self.allowed:
                flags = f"{self._micro_flags(times)} --memory_opt_budget {self.budget}MiB"
                what = f"the same number of rows per optimizer step, with {_words(plan)}"
                yield Suggestion(flags, peak, _share(plan), what)
                return

    def _micro_flags(self, times: int) -> str:
        rows, accumulation = self.failed.rows // times, self.failed.accumulation * times
        return f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {accumulation}"

    def _parts(self, rows: Sequence[int]) -> Iterator[int]:
        """Yields the numbers of equal parts that the rows can be split into; `rows` has the sizes that count rows."""
        for times in range(2, self.failed.rows + 1) if rows else ():
            if self.failed.rows % times == 0 and all(size % times == 0 for size in rows):
                yield times

    def other_optimizers(self) -> Iterator[Suggestion]:
        """Yields other optimizers that fit, each with as little recompute as it needs: none, or a budget's.

        Raises:
            TimeIsUpError: the time is up before all optimizers were tried.
        """
        model, optimizer = self.failed.model, self.failed.run.optimizer
        # accelerate's optimizer wraps the run's own.
        is_adamw = isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.AdamW)
        is_cuda, trainable = next(model.parameters()).is_cuda, trainable_of(model, self.ran.untrained)
        for name in smaller_optimizers(is_cuda):
            self.deadline.check()
            planned = PlannedOptimizer.of_model(model, name, is_cuda)
            states, temporary = sum(planned.state_sizes(trainable)), planned.step_bytes(trainable)
            plain, fixed = (replace(held, optimizer=states, step=temporary) for held in (self.plain, self.step.fixed))
            what = f"states and temporaries of {gib_text(states + temporary)}, " + (
                "the same update" if is_adamw and name == DEFAULT else "a different update: the run trains differently"
            )
            peak = replace(plain, activations=self.ran.activations(1)).peak
            # The held bytes include the allocator's waste: forward and backward had run.
            if peak <= self.allowed:
                yield Suggestion(f"--optim {name}", peak, None, what)
                continue
            other = replace(self, plain=plain, step=replace(self.step, fixed=fixed))
            for found in other.within_budget():
                yield replace(found, flags=f"--optim {name} {found.flags}", what=f"{what}; {found.what}")


def _words(plan: Plan) -> str:
    on_host = f" and offload ({gib_text(plan.host_bytes)} on the host)" if plan.host_bytes else ""
    return f"the cheapest recompute{on_host}"


def _share(plan: Plan) -> float | None:
    """Returns the time for recompute and copies as a share of the rest; None if it is not known."""
    return plan.extra_seconds / plan.seconds if plan.seconds else None


@dataclass(frozen=True)
class _Ran:
    """The engine's plan for the step that failed.

    Attributes:
        compiler: the compiler of its graphs; empty: the device's default.
    """

    producer: Producer
    loss: str
    unit: str = AUTO
    compiler: str = ""


@one_at_a_time
def explain(failed: FailedStep) -> Explanation:
    """Returns the explanation of a failed step, with the suggestions found in time: the error waits meanwhile.

    Raises:
        Exception: the step cannot be run on fake tensors, or memory ran out again.
    """
    with announced(
        "analyzing the out-of-memory error",
        "analyzed the out-of-memory error",
        f"rerun on tensors without data, for at most {_SECONDS:.0f} seconds",
        stage="rerunning the step",
        every=_SECONDS / 4,
    ) as progress:
        deadline = Deadline(_SECONDS)
        planned, remarks = _plan_of(failed)
        if planned is None:
            ran = of_plain_pytorch(failed)
        else:
            progress.stage = "tracing"
            forward = capture_failed(failed, planned.producer, planned.loss, planned.unit, planned.compiler)
            ran = of_forward(forward, failed)
        moment, parts = _held(failed, ran, is_plain=planned is None)
        if ran.forward is not None and not ran.forward.is_whole:
            remarks += (
                f"the forward has {len(ran.forward.tape.calls)} graphs; memory used between them is not known",
            )
        ranked: list[tuple[int, Suggestion]] = []
        try:
            for suggestion in _suggestions(failed, ran, planned, progress, deadline):
                ranked.append(suggestion)
        except TimeIsUpError:
            remarks += (f"the search stopped after {_SECONDS:.0f} seconds: other settings may fit, too",)
        # The parts that were held are known all the same.
        except Exception as error:
            if any(map(is_out_of_memory, with_causes(error))):
                raise
            remarks += (f"the compile engine has no suggestions, since it cannot trace this step: {line_of(error)}",)
    ranked.sort(key=itemgetter(0))
    return Explanation(moment, parts, tuple(suggestion for _, suggestion in ranked), remarks)


def _held(failed: FailedStep, ran: Reconstruction, is_plain: bool) -> tuple[Moment, tuple[Part, ...]]:
    """Returns where the allocation failed and the parts that were held; no parts in the optimizer's step, since
    activations are freed by then."""
    if failed.place.phase == OPTIMIZER_STEP:
        return Moment(OPTIMIZER_STEP), ()
    made_before = _tensors_of(failed) + failed.accumulated + failed.outside + failed.kept
    moment, point = ran.moment(failed.place, max(0, failed.held - made_before), failed.requested)
    if is_plain:
        ran = replace(ran, step=live_run(failed, inspect_at=ran.begin + point.index).micro_batch)
    return moment, tuple(ran.parts(point))


def _suggestions(
    failed: FailedStep, ran: Reconstruction, planned: _Ran | None, progress: Progress, deadline: Deadline
) -> Iterator[tuple[int, Suggestion]]:
    """Yields suggestions, see `Search.suggestions`; other optimizers if the optimizer's step failed."""

    @cache
    def forward() -> CapturedForward:
        """Returns the forward as the compile engine would run it; a new trace takes as long as the first one."""
        if planned is not None and planned.loss != PLAIN:
            assert ran.forward is not None
            return ran.forward
        deadline.check(needed=deadline.elapsed)
        progress.stage = "tracing"
        loss, compiler = (AUTO, "") if planned is None else (CHUNKED, planned.compiler)
        traced = capture_failed(failed, TorchDefault(), loss, compiler=compiler)
        progress.stage = "searching for suggestions"
        return traced

    model, run = failed.model, failed.run
    device = next(model.parameters()).device
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    batch = sum(tensor.bytes for tensor in failed.call.tensors.values())
    # Measured after tracing, since the compile engine traces too.
    now = max(0, held_bytes(device) - (_tensors_of(failed) - batch) - gradients)
    constant = max(failed.outside, now)
    constant += room_to_grow(device, constant)
    accumulates, outside = run.gradient_accumulation, failed.outside
    plain = footprint_of(
        model,
        run.optimizer,
        accumulates,
        batch=batch,
        constant=outside,
        untrained=ran.untrained,
        releases_gradients=run.releases_gradients,
    )
    link, host = link_of(device)
    fixed, largest = replace(plain, constant=constant), run.largest_batch()
    search = Search(
        failed,
        ran,
        forward,
        deadline,
        StepContext(failed.held, fixed, largest=largest, link=link, host=host),
        plain,
        waste=(0.0 if planned is not None else _WASTE[device.type == "cpu"]) if ran.is_exact else _UNKNOWN,
    )
    if failed.place.phase == OPTIMIZER_STEP:
        yield from enumerate(search.other_optimizers())
    else:
        yield from search.suggestions()


def _plan_of(failed: FailedStep) -> tuple[_Ran | None, tuple[str, ...]]:
    """Returns the engine's plan, None for plain PyTorch, and remarks."""
    engine = failed.engine
    if engine is None:
        return None, ()
    if engine.name != _NAME:
        return None, (f"the parts are those of plain PyTorch, since the {engine.name} engine's graph is not known",)
    if (plan := engine.plan_file()) is not None:
        unit = MODEL if len(plan.graphs) == 1 else AUTO
        compiler = str(plan.solved_for.get("compiler", ""))
        return _Ran(producer_for(Selection(plan=plan, strict=False)), plan.loss, unit, compiler), ()
    if engine.selection.budget is not None:
        # The solver had not finished.
        remark = "the parts are those without a plan, since the budget's plan was not known yet"
        return _Ran(producer_for(Selection(strict=False)), AUTO), (remark,)
    return _Ran(producer_for(replace(engine.selection, strict=False)), AUTO), ()


def _tensors_of(failed: FailedStep) -> int:
    """Returns the bytes of the model, its batch, and the optimizer's existing states."""
    run, model = failed.run, failed.model
    states = 0
    if isinstance(run.optimizer, torch.optim.Optimizer) and run.optimizer.state:
        states = footprint_of(model, run.optimizer).optimizer
    batch = sum(tensor.bytes for tensor in failed.call.tensors.values())
    return local_bytes([*model.parameters(), *buffers_of(model)]) + states + batch
