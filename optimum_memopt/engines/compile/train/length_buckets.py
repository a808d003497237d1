"""The compiled forwards of one model: each batch runs the cheapest whose step is predicted to be within the budget.

Without a budget there is one. With a budget there may be several. That of the largest batch is compiled first, by
whichever batch comes first. Its solver also finds what plans for shorter batches would take, and for which lengths one
is worth compiling: those that save most of an epoch's time, by the lengths of the run's batches, or where they are not
known, as if all lengths were as frequent. Each is compiled when the first batch comes that it is made for. From then
on its predicted peak decides, so that it also runs batches that are longer, but fit.

A batch over the budget under all of them gets a plan of its own, as the largest so far. The one that was the largest
stays for shorter batches where the number of variants allows it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optimum_memopt.engines.api.predictions import StepTimeline
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.graph.symbols import largest_of, length_name
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.length_buckets import WORTH, ExtraByLength, best_lengths, expected_extra
from optimum_memopt.engines.compile.train.planned_forward import PlannedForward
from optimum_memopt.engines.compile.train.step_budget import StepBudget
from optimum_memopt.engines.compile.train.variant import Call, Variant
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.logs import get_logger

# Makes a variant, not compiled yet, of its budget, of what its solver is to find out, and of what it is for.
_NewVariant = Callable[[StepBudget, list[ExtraByLength] | None, str], Variant]


@dataclass(frozen=True)
class _Cheaper:
    """A variant for shorter batches.

    Attributes:
        length: tokens of the longest batch that its plan is made for.
        share: extra time of its plan.
    """

    variant: Variant
    length: int
    share: float


class Variants:
    """The compiled forwards of one model.

    Args:
        most: how many there may be.
        budget: of the run's steps.
        new_variant: makes them.

    Attributes:
        largest: the one for the run's largest batch.
    """

    def __init__(self, most: int, budget: StepBudget, new_variant: _NewVariant) -> None:
        self._most, self._new_variant = most, new_variant
        # From the cheapest to the dearest.
        self._cheaper: tuple[_Cheaper, ...] = ()
        self._times: list[ExtraByLength] = []
        self.largest = self._new_largest(budget)

    def __call__(self, call: Call) -> Any:
        """The outputs of the cheapest forward for this batch; see `PlannedForward`."""
        variant = self._cheapest(call.inputs)
        is_first = not variant.is_compiled
        try:
            outputs = variant(call)
        except DoesNotFitError as error:
            if variant is self.largest:
                raise
            # The process has grown since its length was chosen.
            self._cheaper = tuple(cheaper for cheaper in self._cheaper if cheaper.variant is not variant)
            get_logger().info(f"going on without this variant: {error}")
            return self(call)
        if is_first and variant is self.largest:
            self._plan_cheaper()
        return outputs

    def predicted_peak(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> int | None:
        """Of the batches so far the highest peak of a step, in bytes; None where nothing is predicted."""
        peaks = self._peaks(optimizer, gradient_accumulation)
        return max(peaks.values()) if self.largest.predictor is not None else None

    def timeline(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> StepTimeline | None:
        """Of the batches so far the step with the highest peak; None where nothing is predicted."""
        peaks = self._peaks(optimizer, gradient_accumulation)
        found = None
        if highest := max(peaks, key=peaks.__getitem__, default=None):
            planned, predictor = highest
            with planned.predicting():
                found = predictor.timeline(optimizer, gradient_accumulation)
        return found

    def _peaks(
        self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool
    ) -> dict[tuple[PlannedForward, StepMemoryPredictor], int]:
        """The highest peak under each plan, and of each time that its forward was traced, in bytes."""
        peaks = {}
        for variant in (*(cheaper.variant for cheaper in self._cheaper), self.largest):
            if (planned := variant.planned) is not None and planned.predictors is not None:
                with planned.predicting():
                    for predictor in planned.predictors:
                        peaks[planned, predictor] = predictor.peak(optimizer, gradient_accumulation)
        return peaks

    def _cheapest(self, inputs: Mapping[str, object]) -> Variant:
        if self._cheaper and (predictor := self.largest.predictor) is not None:
            sizes = predictor.sizes_of(inputs)
            for cheaper in self._cheaper:
                variant = cheaper.variant
                if variant.is_within(inputs) if variant.is_compiled else variant.covers(sizes):
                    return variant
        if line := self.largest.excess(inputs):
            get_logger().info(line)
            self._replace_largest()
        return self.largest

    @property
    def _extra(self) -> ExtraByLength:
        return self._times[0] if self._times else ExtraByLength()

    def _new_largest(self, budget: StepBudget) -> Variant:
        self._times = []
        return self._new_variant(budget, self._times if self._most > 1 else None, "")

    def _replace_largest(self) -> None:
        former, budget = self.largest, self.largest.budget
        is_one_graph = former.planned is not None and former.planned.is_one_graph
        if is_one_graph and self._most > 1 and (solved := largest_of(budget.solved_for)) is not None:
            share = max(self._extra.shares.values(), default=0.0)
            self._cheaper = (*self._cheaper, _Cheaper(former, solved.length, share))[: self._most - 1]
        self.largest = self._new_largest(budget.for_another(budget.largest))

    def _plan_cheaper(self) -> None:
        """Choose lengths for further variants, once the one for the largest batch is compiled, and say so."""
        budget, planned = self.largest.budget, self.largest.planned
        solved, name = largest_of(budget.solved_for), length_name(budget.solved_for)
        if self._most == 1 or planned is None or planned.predictor is None or solved is None:
            return
        if not planned.is_one_graph:
            # Of later graphs only the sizes of the first batch are known.
            planned.add_to_header(["one variant: the forward is not one graph"])
            return
        lines = []
        if not self._cheaper:
            times = self._extra
            lengths = best_lengths(times.batches, times.shares, self._most - 1)
            self._cheaper = tuple(self._new_cheaper(LargestBatch(solved.rows, length), name) for length in lengths)
            lines.append(self._gain(lengths))
        planned.add_to_header(
            [
                f"variant {number}: batches up to {name}={cheaper.length}: {cheaper.share:+.1%} time"
                for number, cheaper in enumerate(reversed(self._cheaper), 2)
            ]
            + lines
        )

    def _new_cheaper(self, batch: LargestBatch, name: str) -> _Cheaper:
        purpose = f" for batches up to {name}={batch.length}"
        variant = self._new_variant(self.largest.budget.for_another(batch), None, purpose)
        return _Cheaper(variant, batch.length, self._extra.shares[batch.length])

    def _gain(self, lengths: tuple[int, ...]) -> str:
        """What the variants save, for the header."""
        times = self._extra
        if not lengths:
            return f"one variant: another one would save less than {WORTH:.1%} time"
        counts, longest = Counter(times.batches), max(times.shares)
        one, all_of = (expected_extra(counts, times.shares, chosen) for chosen in ((longest,), (*lengths, longest)))
        batches = "the run's batches" if times.is_known else "batches of all lengths"
        return f"{len(lengths) + 1} variants: {all_of:+.1%} time over {batches}, {one:+.1%} with one"
