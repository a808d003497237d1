"""Each plan at its best micro-batch, and which of them to train with. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from optimum_memopt.advise.search import AS_GOOD, count_fitting, highest, micro_batches, smallest_as_good
from optimum_memopt.engines.predicted_steps import PredictedStep, StepPlan, StepPredictor
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.sizes import gib_text


@dataclass(frozen=True)
class Row:
    """A plan with a micro-batch.

    Attributes:
        plan: how the model is trained.
        rows: of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        step: an optimizer step.
        largest: rows of the largest micro-batch that fits under this plan, of those there are to choose from.
        samples_with_largest: samples a second with that.
    """

    plan: StepPlan
    rows: int
    accumulation: int
    step: PredictedStep
    largest: int
    samples_with_largest: float

    @property
    def samples(self) -> float:
        """Samples a second."""
        return self.rows * self.accumulation / self.step.total(self.accumulation)

    @property
    def bound(self) -> tuple[str, float]:
        """What most of the step's time is bound by, and its share."""
        seconds = self.step.by_bound(self.accumulation)
        most = max(seconds, key=lambda bound: seconds[bound])
        return most, seconds[most] / sum(seconds.values())

    @property
    def recomputing(self) -> float:
        """Share of the step's time that is for recompute."""
        return self.step.recomputing * self.accumulation / self.step.total(self.accumulation)


@dataclass(frozen=True)
class Advice:
    """Of one model.

    Attributes:
        rows: each plan that fits at its best micro-batch.
        too_large: plans under which not even a micro-batch of one row fits, with its peak in bytes.
        recommended: of the package's plans the one with the smallest micro-batch that is as good as the best.
        best: the most samples a second under a plan of the package.
    """

    rows: tuple[Row, ...]
    too_large: tuple[tuple[StepPlan, int], ...]
    recommended: Row
    best: float

    @property
    def pays(self) -> str:
        """Whether larger micro-batches than the recommended one pay, in a sentence; empty where none fits."""
        found = self.recommended
        if found.largest <= found.rows:
            return ""
        gain = found.samples_with_largest / found.samples - 1
        return f"Larger micro-batches do not pay: {found.largest} rows fit too, for {gain:+.1%} samples a second."


def advise(predictor: StepPredictor, rows: int | None = None) -> Advice:
    """Choose a micro-batch and a plan.

    Args:
        predictor: of the model's steps.
        rows: of a process and an optimizer step; None: each micro-batch is a step.

    Raises:
        DoesNotFitError: not even a micro-batch of one row is within the budget under any plan of the package.
    """
    searches = [_Search(predictor, plan, rows) for plan in predictor.plans]
    own = [search for search in searches if search.plan.is_own and search.sizes]
    if not own:
        lowest = min(predictor.lowest(plan, rows != 1) for plan in predictor.plans if plan.is_own)
        raise DoesNotFitError(
            f"a step with one row takes at least {gib_text(lowest)}, whatever is recomputed; the budget is "
            f"{gib_text(predictor.budget)}: give a larger budget, shorter rows, or an optimizer with fewer states"
        )
    best = max(search.speed(search.best) for search in own)
    least = (1 - AS_GOOD) * best
    as_good = [search.row(least) for search in own if search.speed(search.best) >= least]
    # Of equal ones the first plan, which is the simplest.
    recommended = min(as_good, key=lambda row: row.rows)
    return Advice(
        rows=tuple(search.row() for search in searches if search.sizes),
        too_large=tuple(
            (search.plan, predictor.lowest(search.plan, rows != 1)) for search in searches if not search.sizes
        ),
        recommended=recommended,
        best=best,
    )


class _Search:
    """The micro-batches of one plan that fit, by index.

    Args:
        predictor: of the model's steps.
        plan: one of its plans.
        rows: see `advise`.
    """

    def __init__(self, predictor: StepPredictor, plan: StepPlan, rows: int | None) -> None:
        self._predictor, self.plan, self._all_rows = predictor, plan, rows
        self.sizes = fitting(lambda size, accumulates: predictor.fits(plan, size, accumulates), rows)
        self._steps: Callable[[int], PredictedStep] = lru_cache(maxsize=None)(self._step)

    @property
    def best(self) -> int:
        """The fastest."""
        return highest(len(self.sizes), self.speed)

    def speed(self, index: int) -> float:
        """Samples a second."""
        accumulation = self._accumulation(index)
        return self.sizes[index] * accumulation / self._steps(index).total(accumulation)

    def row(self, least: float | None = None) -> Row:
        """The smallest one with so many samples a second; None: as good as this plan's best."""
        best = self.best
        least = (1 - AS_GOOD) * self.speed(best) if least is None else least
        index, last = smallest_as_good(best, self.speed, least), len(self.sizes) - 1
        return Row(
            self.plan,
            self.sizes[index],
            self._accumulation(index),
            self._steps(index),
            self.sizes[last],
            self.speed(last),
        )

    def _accumulation(self, index: int) -> int:
        return 1 if self._all_rows is None else self._all_rows // self.sizes[index]

    def _step(self, index: int) -> PredictedStep:
        return self._predictor.step(self.plan, self.sizes[index], self._accumulation(index) > 1)


def fitting(fits: Callable[[int, bool], bool], rows: int | None) -> Sequence[int]:
    """The micro-batches that fit, the smallest first.

    Args:
        fits: whether a micro-batch of so many rows does, with and without gradients of others beside it.
        rows: see `advise`.
    """
    sizes = micro_batches(rows)
    if rows is None:
        return sizes[: count_fitting(sizes, lambda size: fits(size, False))]
    # All rows at once have no gradients of others beside them.
    several = sizes[:-1]
    found = several[: count_fitting(several, lambda size: fits(size, True))]
    return (*found, rows) if len(found) == len(several) and fits(rows, False) else found
