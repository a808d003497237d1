"""The compiled forwards of one model: each batch runs the cheapest whose step is predicted to be within the budget.

Without a budget there is one forward; with a budget there may be several. The forward for the largest batch is
compiled with the first batch, whatever its size. Its solver also finds the time of plans for shorter batches, and the
lengths for which one is worth compiling: those that save most of an epoch's time, by the lengths of the run's batches,
or, if these are not known, as if all lengths were equally frequent. Each is compiled when its first batch comes. From
then on its predicted peak decides, so that it also runs longer batches that fit. None is retraced: a bucket is another
choice for the same graphs.

A batch that exceeds the budget under all plans gets a plan of its own, as the new largest batch. The plan for the
former largest one stays for shorter batches if the number of buckets allows it.

Batches of other kinds run other graphs: with padding, with other inputs, for another task. Each kind has a plan, made
when its first batch comes. Differences that a batch does not show, such as an attribute of the model, are found once
the graphs have run: then that forward is rerun under a plan for them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optimum_memopt.engines.api.predictions import Frontier, StepTimeline
from optimum_memopt.engines.api.run import ALONE, NOTHING_HELD, HeldOutputs, LargestBatch
from optimum_memopt.engines.compile.capture.forward_call import ForwardArgs
from optimum_memopt.engines.compile.graph.symbols import largest_of, length_name
from optimum_memopt.engines.compile.predict.pending import Pending
from optimum_memopt.engines.compile.predict.planner import Planner
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.solver import WORTH, ExtraByLength, best_lengths, expected_extra
from optimum_memopt.engines.compile.train.batch_kind import BatchKind, InputKinds, input_kinds
from optimum_memopt.engines.compile.train.planned_forward import RUN_AGAIN, PlannedForward
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.engines.torch_compat.attention import KeptMasks
from optimum_memopt.errors import DoesNotFitError, forget_frames
from optimum_memopt.logs import get_logger
from optimum_memopt.memory.optimizers import Optimizer

# Makes a forward that is not compiled yet. Arguments: the former forward, whose budget and traces it shares; the
# largest batch of the new one (None: the run's); its purpose.
_NewForward = Callable[[PlannedForward | None, LargestBatch | None, str], PlannedForward]
# The most kinds of batches with plans of their own. More mean that inputs do not define kinds: names that differ in
# each batch, for example.
_MOST_KINDS = 16


@dataclass(frozen=True)
class LengthBucket:
    """A forward for shorter batches.

    Attributes:
        length: tokens of the longest batch that its plan is made for.
        share: extra time of the plan, as a share of the time without a plan.
    """

    forward: PlannedForward
    length: int
    share: float


@dataclass(frozen=True, eq=False)
class _KindPlans:
    """The forwards for batches of one kind.

    Attributes:
        largest: the forward for the largest batch.
        shorter: forwards for shorter batches, from the cheapest to the most expensive.
    """

    kind: BatchKind
    largest: PlannedForward
    shorter: tuple[LengthBucket, ...]


class LengthBuckets:
    """The compiled forwards of one model.

    Args:
        most: the most plans for batches of one kind.
        pending: forwards of the model whose backward is still to come.
        may_rerun: this rank may rerun a forward on its own; False if ranks gather parameters together.
        largest: the largest batch, if it is known without the run's data.
    """

    def __init__(
        self,
        most: int,
        new_forward: _NewForward,
        pending: Pending,
        may_rerun: bool = True,
        largest: LargestBatch | None = None,
    ) -> None:
        self._most, self._new_forward, self._may_rerun, self._is_over = most, new_forward, may_rerun, False
        self._pending = pending
        # From the cheapest to the most expensive.
        self._shorter: tuple[LengthBucket, ...] = ()
        self._extra = ExtraByLength()
        self._held = NOTHING_HELD
        self.largest = self._new_largest(None, None)
        self.largest.planner.limit.largest = largest
        # The kind of the last batch, and the plans for other kinds, several of which may be for the same kind; least
        # recently used first.
        self._kind: BatchKind | None = None
        self._by_batch_kind: list[_KindPlans] = []
        self._must_plan = False
        # The highest peak under earlier sets of trainable parameters.
        self._left_peak = 0
        # There is room for a cheaper plan, since less is held than the plan was solved for.
        self._has_room = False

    def __call__(self, call: ForwardArgs, may_run_again: bool = True) -> Any:
        """Returns the outputs of the cheapest forward for this batch; see `PlannedForward`."""
        self.largest.traced.masks.note(call.inputs)
        # A forward may write to a dict that it is given (sentence-transformers').
        inputs = self._inputs_of(call)
        self._plan_for_kind(inputs)
        if self.largest.planner.solves and self._pending.count(call.inputs):
            self._expect_more()
        if self._has_room:
            self._use_room()
        forward = self._cheapest(call.inputs)
        is_first, failed = not forward.is_compiled, None
        try:
            outputs = forward(call, may_run_again and self._may_plan)
        except DoesNotFitError as error:
            if forward is self.largest:
                raise
            failed = error
        if failed is not None:
            # The process has grown since the bucket's length was chosen. The frames of the error's traceback hold
            # activations that the graphs saved for the backward.
            forget_frames(failed)
            lengths = [bucket.length for bucket in self._shorter if bucket.forward is forward]
            self._shorter = tuple(bucket for bucket in self._shorter if bucket.forward is not forward)
            get_logger().info(f"batches up to length {max(lengths)} run under the plan for the largest one: {failed}")
            return self(call, may_run_again)
        if outputs is RUN_AGAIN:
            self._take_plan_for_runs(forward)
            return self(call, may_run_again=False)
        if is_first and forward is self.largest:
            # The kind may have changed: masks for the run's largest batch were added before this first forward.
            self._kind = self._kind_of(inputs)
            for plans in self._by_batch_kind:
                plans.largest.planner.limit.expect_more()
            self._plan_shorter()
        self._must_plan = forward.last_runs is not None and self._may_plan
        return outputs

    def hold_outputs(self, held: HeldOutputs) -> None:
        """Count these outputs as held by the training loop, under all plans."""
        if held == self._held:
            return
        if held.loss > self._held.loss and self.largest.is_compiled and self.largest.planner.solves:
            get_logger().info(
                f"the training loop takes {held.loss:.3g} times the model's outputs between forward and backward; "
                f"the plan allowed for {self._held.loss:.3g}"
            )
        self._held = held
        for forward in self._forwards(self._by_batch_kind):
            has_room = forward.hold_outputs(held)
            self._has_room |= has_room and forward is self.largest

    def _expect_more(self) -> None:
        """Have all plans checked against the budget again."""
        for forward in self._forwards(self._by_batch_kind):
            forward.planner.limit.expect_more()

    def _forwards(self, kinds: Iterable[_KindPlans]) -> Iterator[PlannedForward]:
        """Yields the forwards of the current kind, then of `kinds`; within a kind, those for shorter batches first."""
        for largest, shorter in ((self.largest, self._shorter), *((each.largest, each.shorter) for each in kinds)):
            yield from (bucket.forward for bucket in shorter)
            yield largest

    def _use_room(self) -> None:
        """Solve again, since the loop holds less than the plan was solved for; only if this rank may rerun a forward
        on its own."""
        self._has_room = False
        if self._may_rerun:
            get_logger().info("the training loop holds less than assumed: solving again to use that memory")
            self.largest, self._shorter = self._new_largest(self.largest, self.known_largest), ()

    @property
    def known_largest(self) -> LargestBatch | None:
        """Returns the largest batch that the plan must fit; None if that is the current batch."""
        limit = self.largest.planner.limit
        # Another forward of the step may be larger than the current one.
        seen = largest_of(limit.solved_for) if self._pending.most != ALONE else None
        return limit.largest or seen

    def predicted_peak(self, optimizer: Optimizer | None) -> int | None:
        """Returns the highest peak of a step with the batches so far, in bytes; None if nothing is predicted."""
        if self.largest.predictor is None:
            return None
        return max(self._left_peak, self._peak_of_kind(optimizer)) or None

    def _peak_of_kind(self, optimizer: Optimizer | None) -> int:
        return max(self._peaks(optimizer).values(), default=0)

    def timeline(self, optimizer: torch.optim.Optimizer | None) -> StepTimeline | None:
        """Returns the step with the highest peak of the batches so far; None if nothing is predicted."""
        peaks = self._peaks(optimizer)
        timeline = None
        if highest := max(peaks, key=peaks.__getitem__, default=None):
            forward, predictor = highest
            with forward.predicting():
                timeline = predictor.timeline(optimizer)
        return timeline

    def frontier(self) -> Frontier | None:
        solved = self.largest.planner.solved
        return solved.frontier if solved is not None else None

    def _peaks(self, optimizer: Optimizer | None) -> dict[tuple[PlannedForward, StepMemoryPredictor], int]:
        """Returns the highest peak in bytes for each plan and each predictor of its forward, one per trace."""
        peaks = {}
        trains = self.largest.traced.trains
        for forward in self._forwards(each for each in self._by_batch_kind if each.kind.trains == trains):
            if forward.predictors is not None:
                with forward.predicting():
                    for predictor in forward.predictors:
                        peaks[forward, predictor] = predictor.peak(optimizer)
        return peaks

    def _cheapest(self, inputs: Mapping[str, object]) -> PlannedForward:
        # With several forwards before a backward, a cheaper plan for a shorter batch would save more than the others
        # leave room for.
        if self._shorter and self._pending.most == ALONE and (predictor := self.largest.predictor) is not None:
            sizes = predictor.sizes_of(inputs)
            for bucket in self._shorter:
                forward = bucket.forward
                if forward.is_within(inputs) if forward.is_compiled else forward.covers(sizes):
                    return forward
        if line := self.largest.excess(inputs):
            if self._may_rerun:
                get_logger().info(line)
                self._replace_largest()
            elif not self._is_over:
                self._is_over = True
                get_logger().warning(
                    f"NOT within the budget: {line.partition(':')[0]}; not replanned, since ranks share parameters"
                )
        return self.largest

    def _replace_largest(self) -> None:
        former, planner = self.largest, self.largest.planner
        if self._most > 1 and (solved := largest_of(planner.limit.solved_for)) is not None:
            share = max(self._extra.shares.values(), default=0.0)
            self._shorter = (*self._shorter, LengthBucket(former, solved.length, share))[: self._most - 1]
        self._pending.replace_plan()
        self.largest = self._new_largest(former, self.known_largest)

    @property
    def _may_plan(self) -> bool:
        """True if this process may make further plans, without the other ranks."""
        return self._may_rerun and len(self._by_batch_kind) < _MOST_KINDS

    def _inputs_of(self, call: ForwardArgs) -> InputKinds:
        tells = self.largest.planner.solves and self._may_rerun
        return input_kinds(call.args, call.inputs) if tells else frozenset()

    def _kind_of(self, inputs: InputKinds) -> BatchKind:
        traced = self.largest.traced
        if not self.largest.planner.solves:
            # A plan without a budget is for all batches; only its prediction and table depend on what trains.
            return BatchKind(KeptMasks(padding=False, local=False), traced.trains)
        return BatchKind(traced.masks.kept, traced.trains, inputs)

    def _plan_for_kind(self, inputs: InputKinds) -> None:
        """Switch to the forwards planned for these inputs, and for the masks and trainable parameters of now."""
        before = self._kind
        if (
            before is None
            or self.largest.is_plain
            or ((now := self._kind_of(inputs)) == before and not self._must_plan)
        ):
            return
        # Solving reruns the forward, and the other ranks may have no batch of this kind.
        if self.largest.planner.solves and not self._may_rerun:
            return
        if now.trains != before.trains:
            self._left_peak = max(self._left_peak, self._peak_of_kind(self.largest.planner.run.optimizer))
        plans = next((each for each in reversed(self._by_batch_kind) if each.kind == now), None)
        if now != before and plans is not None:
            self._take(plans, before)
        elif self._may_plan or now[:2] != before[:2]:
            why = now.first_after(before) if now != before else "this batch runs different graphs than earlier ones"
            self._take(None, before, why)
        self._kind = now

    def _take_plan_for_runs(self, forward: PlannedForward) -> None:
        """Switch to forwards whose plan was solved for the graph runs of this one, or to new ones."""
        assert self._kind is not None
        runs = forward.last_runs
        if forward is not self.largest and runs is not None and self.largest.planner.covers(runs):
            # The plan for the largest batch covers these runs: drop this bucket for shorter batches.
            self._shorter = tuple(bucket for bucket in self._shorter if bucket.forward is not forward)
            return
        covering = (
            each for each in reversed(self._by_batch_kind) if runs is not None and each.largest.planner.covers(runs)
        )
        self._take(next(covering, None), self._kind, "this batch runs different graphs than earlier ones")

    def _take(self, plans: _KindPlans | None, before: BatchKind, why: str = "") -> None:
        former, others = self.largest, [each for each in self._by_batch_kind if each is not plans]
        if former.is_compiled:
            others.append(_KindPlans(before, former, self._shorter))
        self._by_batch_kind = others[-_MOST_KINDS:]
        if plans is not None:
            self.largest, self._shorter = plans.largest, plans.shorter
        elif former.is_compiled:
            if former.planner.solves:
                get_logger().info(f"{why}: solving for the budget again")
            self.largest, self._shorter = self._new_largest(former, former.planner.limit.largest), ()

    def _new_largest(self, former: PlannedForward | None, largest: LargestBatch | None) -> PlannedForward:
        forward = self._made(former, largest, "")
        forward.planner.siblings = weak_method(self._planners)
        return forward

    def _made(self, former: PlannedForward | None, largest: LargestBatch | None, purpose: str) -> PlannedForward:
        """Returns a new forward that counts the outputs held by the training loop; arguments: see `_NewForward`."""
        forward = self._new_forward(former, largest, purpose)
        forward.hold_outputs(self._held)
        return forward

    def _planners(self) -> list[Planner]:
        return [each.largest.planner for each in self._by_batch_kind]

    def _plan_shorter(self) -> None:
        largest, planner = self.largest, self.largest.planner
        self._extra = (planner.solved.by_length if planner.solved is not None else None) or ExtraByLength()
        solved, name = largest_of(planner.limit.solved_for), length_name(planner.limit.solved_for)
        if self._most == 1 or largest.predictor is None or solved is None:
            return
        lines = []
        if not self._shorter:
            extra = self._extra
            lengths = best_lengths(extra.batches, extra.shares, self._most - 1)
            self._shorter = tuple(self._new_bucket(LargestBatch(solved.rows, length), name) for length in lengths)
            lines.append(self._gain(lengths))
        largest.add_to_header(
            [
                f"variant {number}: batches up to {name}={bucket.length}: {bucket.share:+.1%} time"
                for number, bucket in enumerate(reversed(self._shorter), 2)
            ]
            + lines
        )

    def _new_bucket(self, batch: LargestBatch, name: str) -> LengthBucket:
        purpose = f" for batches up to {name}={batch.length}"
        forward = self._made(self.largest, batch, purpose)
        return LengthBucket(forward, batch.length, self._extra.shares[batch.length])

    def _gain(self, lengths: tuple[int, ...]) -> str:
        extra = self._extra
        if not lengths:
            return f"one variant: another one would save less than {WORTH:.1%} time"
        counts, longest = Counter(extra.batches), max(extra.shares)
        single, several = (
            expected_extra(counts, extra.shares, chosen) for chosen in ((longest,), (*lengths, longest))
        )
        batches = "the run's batches" if extra.is_known else "batches of all lengths"
        return f"{len(lengths) + 1} variants: {several:+.1%} time over {batches}, {single:+.1%} with one"
