"""Limits the bytes of training steps, and compares predicted peaks with the limit."""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from optimum_memopt.compat.torch import writes_to
from optimum_memopt.engines.api.run import ALONE, LargestBatch, OtherForwards, Run
from optimum_memopt.engines.compile.graph.symbols import larger_sizes
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss
from optimum_memopt.engines.compile.memory.footprint import StepContext, blocks_around, states_held, step_around
from optimum_memopt.engines.compile.partition.producers.budget import saved_nodes
from optimum_memopt.engines.compile.partition.producers.producer import SolvedForward
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.solver import Infeasible
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.logs import best_effort
from optimum_memopt.memory import process
from optimum_memopt.memory.optimizers import Optimizer
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import Budget, gib_text, text_of_at_least

# Share by which CUDA's allocator may exceed the predicted blocks: 0.1% in steps like the preceding ones, 0.3% in a
# step that begins with an empty cache (RoBERTa in bf16 on a stand-in for a device); on an H100 0.3 to 5.2 MiB of 2 to
# 4 GiB.
_ALLOCATOR_ERROR = 3e-3
# Maximum number of re-solves of one plan until its tensors are within the limit in these blocks.
_MOST_SOLVES = 4
# Margins that differ by less have the same plan.
_NO_PLAN_BETWEEN = 2**16


@dataclass(frozen=True)
class TracedBatch:
    """The batch that a forward was traced with, and the facts about the step that follow from it.

    Attributes:
        inputs: keyword arguments of the forward.
        untrained: names of parameters that get no gradient.
        trained: names of parameters that get one.
        loss: the loss that is computed outside of the forward; None if there is none.
    """

    inputs: Mapping[str, object] = field(default_factory=dict)
    untrained: Collection[str] = ()
    trained: Collection[str] = ()
    loss: EagerLoss | None = None


class StepLimit:
    """The limit on the bytes of one model's steps; checks predicted steps against it.

    The limit is fixed when it is first needed: available memory shrinks while training runs. Plans are solved within
    the limit less the margin, which grows if the compiled step takes more than the solver knows.

    Args:
        budget: None: unlimited.
        run: returns the current state of the run.
        target: see `PlannerSpec`.

    Attributes:
        largest: the run's largest batch; None if it is not known.
        solved_for: sizes that the plan in force was solved for, by the plan table's names.
        constant: bytes that the process held beside the step when the last context was made.
        bytes: the limit; None until a context was made.
        is_nearest: no plan fits all forwards before one backward into the limit, though each forward fits alone.
    """

    def __init__(
        self, model: torch.nn.Module, budget: Budget | None, run: Callable[[], Run], target: Device | None
    ) -> None:
        self._model, self._budget, self._run, self._target = model, budget, run, target
        self.largest: LargestBatch | None = None
        self.solved_for: Mapping[str, int] = {}
        self.constant = 0
        self.bytes: int | None = None
        self.is_nearest = False
        self._margin = 0
        # The most by which a compiled step has exceeded the limit.
        self._exceeded = 0
        self._resident: int | None = None
        # Bytes that the process held before the forward that is being planned.
        self._before: int | None = None
        # `constant`, and how often parameters were written to, before the run's first plan was made.
        self._first_constant: int | None = None
        self._writes: int | None = None
        self._peaks: dict[tuple[StepMemoryPredictor, int, frozenset[tuple[str, int]]], int] = {}
        # Memory held beside the step may have changed since the plan was solved.
        self._is_stale = False

    def for_another(self, largest: LargestBatch | None) -> "StepLimit":
        """Returns the same limit for batches of another kind."""
        limit = StepLimit(self._model, self._budget, self._run, self._target)
        limit.largest, limit.bytes, limit._margin = largest, self.bytes, self._margin
        limit._first_constant, limit._writes = self._first_constant, self._writes
        return limit

    def context(self, batch: TracedBatch, growth: float = 1.0, constant: int = 0) -> StepContext:
        """Returns the step context: all that the step holds beside the graphs.

        Args:
            growth: ratio of the run's largest batch to the traced one.
            constant: bytes that the process may grow to, beside the step.
        """
        assert self._budget is not None
        run = self._run()
        if self._target is None and not self.is_on_cuda:
            # What malloc keeps of earlier steps, as of plain PyTorch, is resident, but free for this one.
            process.trim()
        around = step_around(
            self._model, batch.inputs, self._budget, run, self._target, batch.untrained, batch.trained, self._before
        )
        if batch.loss is not None:
            # The loss is already among the events of the step.
            beside = max(0, around.fixed.constant - batch.loss.events.resident)
            around = replace(around, fixed=replace(around.fixed, constant=beside))
        # States of an optimizer that `optimize` was not given are assumed; they exist once parameters have changed.
        writes = sum(map(writes_to, self._model.parameters()))
        self._writes = writes if self._writes is None else self._writes
        assumed = around.fixed.optimizer if run.optimizer is None and writes != self._writes else 0
        step = _without_second_room(around, self._first_constant, assumed)
        self.constant = step.fixed.constant
        if self._first_constant is None:
            self._first_constant = self.constant
        if constant > self.constant:
            step = _with_constant(step, constant)
        self.bytes = step.limit if self.bytes is None else self.bytes
        self._peaks.clear()
        self._resident = step.resident
        fixed = replace(step.fixed, batch=math.ceil(step.fixed.batch * growth))
        return replace(step, fixed=fixed, limit=self.bytes, largest=self.largest, margin=self._margin)

    @contextlib.contextmanager
    def planning(self, is_sharded: bool) -> Iterator[None]:
        """Returns a context that begins before a forward that is to be planned: the bytes that the process holds then
        are those beside its step.

        Not on a CPU, where compiling the forward makes the process grow; nor under FSDP2 and ZeRO 3, where memory is
        counted with the parameters that the forward gathers.
        """
        if self.is_on_cuda and self._target is None and not is_sharded:
            self._before = held_bytes(next(self._model.parameters()).device)
        try:
            yield
        finally:
            self._before = None

    @property
    def reads_partitioned(self) -> bool:
        """True if `resident` derives its result from its argument."""
        return self._resident is None and self._target is None and self._before is None

    def resident(self, held: int) -> int:
        """Returns the process's bytes without optimizer states: as of the last plan, else before the forward, else
        derived from `held`."""
        if self._resident is not None:
            return self._resident
        if self._target is not None:
            return self._target.libraries
        run, held = self._run(), held if self._before is None else self._before
        return held - states_held(run.optimizer) - run.earlier_forwards

    def excess(self, predictor: StepMemoryPredictor) -> int:
        """Returns the bytes by which the step that the plan was solved for exceeds the limit; at most 0 if it does
        not."""
        return self._excess(predictor, self.solved_for)

    def excess_of_plan(self, step: StepModel, solved: SolvedForward) -> int:
        """Returns the bytes by which a plan exceeds the limit before it is compiled, counting what the solver does
        not: the allocator's blocks on CUDA, and other forwards of the step; at most 0 if it does not exceed the limit,
        0 if the solver counts everything."""
        plans, fixed = tuple(solved.saved.values()), step.context.fixed
        counts_all = not self.is_on_cuda and step.context.others == ALONE
        if self.bytes is None or counts_all or any(each.is_by_torch or each.compressed for each in plans):
            return 0
        events = functools.cache(lambda frees, without_caller: step.events(plans, frees, without_caller))
        around = step.among_others(events, fixed.frees_gradients)
        if not self.is_on_cuda:
            return around.peak - self.bytes
        optimizer, untrained = self._run().optimizer, step.forward.untrained
        later = events(True, False) if fixed.accumulated else None
        blocks = blocks_around(self._model, optimizer, untrained, around, events(fixed.releases, False), later)
        return _with_blocks(max(around.peak, blocks.allocated)) - self.bytes

    def solve(self, step: StepModel, solve: Callable[[StepModel], SolvedForward]) -> SolvedForward:
        """Returns a plan within the limit, counting CUDA's blocks and all forwards before one backward: leaves more
        bytes free and re-solves until it fits.

        Compiling a plan before rejecting it would take minutes.
        """
        return (self._solve_alone if step.context.others == ALONE else self._solve_among_others)(step, solve)

    def _solve_alone(self, step: StepModel, solve: Callable[[StepModel], SolvedForward]) -> SolvedForward:
        """Searches for the smallest margin whose plan fits in CUDA's blocks.

        Plans are few near the lowest peak: a margin that is wide enough for one plan may leave room for none, although
        a plan between the two fits. Then the margin is halved towards the last plan's. At last it is what the blocks
        of the lowest plan take; if not even that leaves room, the error names that plan's peak in blocks, and what
        compiled steps have exceeded their predictions by.
        """
        if not self.is_on_cuda:
            return solve(step)
        start = least = self._margin
        for number in range(_MOST_SOLVES + 1):
            if (found := self._within_margin(step, solve)) is None:
                break
            solved, excess = found
            if excess <= 0 or number == _MOST_SOLVES:
                return solved
            least = self._margin + solved.unused
            self._margin = least + excess
        # Once: finding that no plan fits takes longest, since offload and segments are tried, too.
        if self._margin - least >= _NO_PLAN_BETWEEN:
            self._margin = (least + self._margin) // 2
            found = self._within_margin(step, solve)
            if found is not None and found[1] <= 0:
                return found[0]
        # The margin so far may have bytes that earlier plans left unused, which are no part of the lowest peak.
        self._margin = min(start, self._exceeded) + self._waste_of_lowest(step)
        try:
            return solve(step.around(replace(step.context, margin=self._margin)))
        except (DoesNotFitError, Infeasible):
            self._margin = start
            raise

    def _within_margin(
        self, step: StepModel, solve: Callable[[StepModel], SolvedForward]
    ) -> tuple[SolvedForward, int] | None:
        """Returns the plan for the limit less the margin, and its `_excess_of_solved`; None if no plan fits."""
        tried = step.around(replace(step.context, margin=self._margin))
        try:
            # `solve` would also search the flags that an error suggests, which takes several times as long.
            tried.solver.cheapest(tried.context.allowed)
        except Infeasible:
            return None
        solved = solve(tried)
        return solved, self._excess_of_solved(step, solved)

    def _waste_of_lowest(self, step: StepModel) -> int:
        """Returns the bytes that the plan with the lowest peak takes in CUDA's blocks beyond its tensors."""
        solver = step.solver.solver
        lowest = solver.plan(solver.lowest)
        nodes = saved_nodes(step.solver.forward, lowest)
        solved = SolvedForward("", dict(zip(step.forward.run_keys, nodes, strict=True)), 0, lowest.segments)
        waste = 0
        with best_effort("a plan's peak in CUDA's blocks"):
            assert self.bytes is not None
            waste = self.excess_of_plan(step, solved) + self.bytes - step.peak(lowest.peak)
        return max(0, waste)

    def _solve_among_others(self, step: StepModel, solve: Callable[[StepModel], SolvedForward]) -> SolvedForward:
        solved, aside = solve(step), 0
        for number in range(2 * _MOST_SOLVES):
            if (excess := self._excess_of_solved(step, solved, self._margin)) <= 0:
                break
            # Saving less in one forward saves less in the others too; not all of a plan's peak is saved activations.
            share = 1 + step.context.others.earlier if number < _MOST_SOLVES else 1
            aside += solved.unused + math.ceil(excess / share)
            step = step.around(replace(step.context, margin=self._margin, aside=aside))
            try:
                solved = solve(step)
            except DoesNotFitError:
                # No plan comes nearer. It may still fit: the largest forward is only assumed to run last.
                self.is_nearest = True
                break
        return solved

    def _excess_of_solved(self, step: StepModel, solved: SolvedForward, margin: int = 0) -> int:
        """Returns `excess_of_plan` relative to the limit less the margin; 0 if it is not known."""
        excess = 0
        with best_effort("a plan's peak in CUDA's blocks"):
            excess = self.excess_of_plan(step, solved) + margin
        return excess

    def exceeded(self, predictor: StepMemoryPredictor, what: str = "the compiled step") -> str:
        """Returns a line if the compiled step exceeds the limit, else an empty string. Sets `solved_for` to the sizes
        of the largest batch."""
        self.solved_for = self.largest_sizes(predictor)
        return self._line(predictor, self.solved_for, what)

    def exceeded_by_runs(self, predictor: StepMemoryPredictor) -> str:
        """Returns a line if the largest step of a forward that the plan was not made for exceeds the limit, else an
        empty string."""
        return self._line(predictor, self.largest_sizes(predictor), "it")

    def exceeded_by_batch(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> str:
        """Returns a line if a batch's step would exceed the limit, else an empty string."""
        sizes = predictor.sizes_of(inputs)
        if self.bytes is None or self.is_solved_for(sizes):
            return ""
        if (run := self._run()).others != ALONE:
            # Other forwards are counted in addition to the step's largest.
            sizes = {name: max(size, self.solved_for.get(name, 0)) for name, size in sizes.items()}
        if (excess := self._excess(predictor, sizes)) <= 0:
            self._is_stale &= self._excess(predictor, self.largest_sizes(predictor)) > 0
            return ""
        shown = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
        among = ", one of several forwards before one backward," if run.others != ALONE else ""
        alone = "; earlier forwards of this step were planned as if alone" if run.earlier_forwards and among else ""
        return (
            f"a batch with {shown}{among} would take {gib_text(self.bytes + excess)}, over the budget of "
            f"{gib_text(self.bytes)}: solving again for it{alone}"
        )

    def exceeded_by_several(self, predictor: StepMemoryPredictor) -> str:
        """Returns a line if the forwards before one backward together exceeded the limit, as after a plan for the
        first one alone; else an empty string."""
        run = self._run()
        peak = predictor.peak(run.optimizer)
        if self.bytes is None or peak <= self.bytes:
            return ""
        return (
            f"several forwards before one backward take {gib_text(peak)} in this step, "
            f"{text_of_at_least(peak - self.bytes)} over the budget"
        )

    def is_within(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> bool:
        """True if a batch's step is within the limit."""
        return self._excess(predictor, predictor.sizes_of(inputs)) <= 0

    def is_solved_for(self, sizes: Mapping[str, int]) -> bool:
        """True if the plan in force was solved for a batch of at least these sizes, and need not be checked again."""
        return not self._is_stale and self.was_solved_for(sizes)

    def was_solved_for(self, sizes: Mapping[str, int]) -> bool:
        """True if the plan in force was solved for a batch of at least these sizes."""
        return all(size <= self.solved_for.get(name, 0) for name, size in sizes.items())

    def expect_more(self) -> None:
        """Have the plan checked again: batches of another kind may have added optimizer states."""
        self._is_stale = True
        self._peaks.clear()

    def widen_margin(self, excess: int, unused: int) -> None:
        """Leave more bytes free from now on, since a compiled step exceeds the limit.

        Args:
            unused: bytes that its plan has left unused; with a margin of the excess alone it may be found again.
        """
        self._margin += excess + unused
        self._exceeded = max(self._exceeded, excess)

    def sizes_with_largest(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Returns sizes by the plan table's names, raised to those of the run's largest batch."""
        return larger_sizes(sizes, {name: name for name in sizes}, self.largest)

    def largest_sizes(self, predictor: StepMemoryPredictor) -> Mapping[str, int]:
        """Returns the sizes of the largest batch, by the plan table's names."""
        return self.sizes_with_largest(predictor.first)

    @property
    def is_on_cuda(self) -> bool:
        device = next(self._model.parameters()).device if self._target is None else self._target.kind
        return device.type == "cuda"

    def _line(self, predictor: StepMemoryPredictor, sizes: Mapping[str, int], what: str) -> str:
        if self.bytes is None or (excess := self._excess(predictor, sizes)) <= 0:
            return ""
        return f"{what} takes {gib_text(self.bytes + excess)}, {text_of_at_least(excess)} over the budget"

    def _excess(self, predictor: StepMemoryPredictor, sizes: Mapping[str, int]) -> int:
        """Returns the bytes by which a step exceeds the limit; 0 without a limit."""
        if self.bytes is None:
            return 0
        # The first batch of a size may show a tape that the prediction did not have.
        key = predictor, predictor.known_tapes, frozenset(sizes.items())
        if key not in self._peaks:
            run = self._run()
            peak = bounded_bytes(predictor, sizes, run.optimizer, run.gradient_accumulation, run.others)
            self._peaks[key] = _with_blocks(peak) if self.is_on_cuda else peak
        return self._peaks[key] - self.bytes


def _with_blocks(peak: int) -> int:
    """Returns the upper bound of a peak on CUDA."""
    return math.ceil(peak * (1 + _ALLOCATOR_ERROR))


def bounded_bytes(
    predictor: StepMemoryPredictor,
    sizes: Mapping[str, int] | None = None,
    optimizer: Optimizer | None = None,
    gradient_accumulation: bool | None = None,
    others: OtherForwards = ALONE,
    *,
    batch_size: int | None = None,
) -> int:
    """Returns the bytes that a budget bounds: a step's peak, on CUDA that of the allocator's blocks.

    Args:
        others: see `Run`; further arguments as in `footprint`.
    """
    step = sizes, optimizer, gradient_accumulation
    saved = 0 if others == ALONE else predictor.saved(sizes)
    before = round(others.earlier * saved)
    blocks = predictor.allocator_peak(*step, before, batch_size=batch_size)
    peak = predictor.footprint(*step, before, batch_size=batch_size).peak
    if others != ALONE:
        peak = max(peak, predictor.footprint(*step, round(others.between * saved), is_followed=True).peak)
    return max(peak, blocks.allocated if blocks is not None else 0)


def _without_second_room(step: StepContext, first: int | None, assumed: int) -> StepContext:
    """Returns the context without counting growth of the process twice: by optimizer states and by headroom.

    Measuring operators and solving leave 4 to 14 MiB behind, which the first steps would take otherwise. With another
    full headroom on top, no step of a RoBERTa of 4 layers of 256 used the last 26 MiB of 732; now it is 9. Once the
    process has grown beyond the headroom, as by what a data set keeps, at most half of it is reserved again: a plan
    for a later batch takes 10 to 17 MiB, and a full headroom rejected batches in the middle of a run that fit.

    Args:
        first: `constant` before the first plan was made; None: no plan was made yet.
        assumed: bytes of the states that an unknown optimizer has created since.
    """
    grown = step.fixed.constant - first if first is not None else 0
    if first is None or grown <= 0:
        return step
    grown = max(0, grown - assumed)
    beyond = max(0, grown - step.room)
    return _with_constant(step, first + beyond + min(beyond, step.room // 2))


def _with_constant(step: StepContext, constant: int) -> StepContext:
    resident = step.resident + constant - step.fixed.constant
    return replace(step, fixed=replace(step.fixed, constant=constant), resident=resident)
