"""Searches for micro-batches: those that fit, the fastest, and the smallest that is as good. Pure.

Samples per second rise with the micro-batch while launches and the optimizer's step are shared by more rows, and fall
once more must be recomputed to fit. So they have one maximum, which a golden-section search finds in few evaluations.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

from tabulate import tabulate

from optimum_memopt.engines.api.predictions import PredictedStep, StepPredictor, Technique
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.logs import watched
from optimum_memopt.memory.optimizers import OptimizerMemory, unknown
from optimum_memopt.sizes import gib_text

_GOLDEN = (math.sqrt(5) - 1) / 2
# Maximum rows of a micro-batch if no global batch limits them.
_MOST_ROWS = 2**15
# Relative loss of throughput up to which a micro-batch counts as good as the best.
AS_GOOD = 0.01


def micro_batches(rows: int | None) -> tuple[int, ...]:
    """Returns the micro-batches to choose from, the smallest first.

    Args:
        rows: rows per process and optimizer step, whose divisors are returned; None: steps have one micro-batch, of a
            power of two or three times one.
    """
    if rows is None:
        doubled = [1]
        while doubled[-1] < _MOST_ROWS:
            doubled.append(2 * doubled[-1])
        return tuple(sorted({*doubled, *(3 * size // 2 for size in doubled[1:])}))
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    return tuple(sorted({*small, *(rows // size for size in small)}))


def count_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Returns how many of the smallest sizes fit, assuming that a size fits if a larger one does."""
    low, high = 0, 1
    # Doubled from below, since sizes that are far too large may take long to evaluate.
    while high <= len(sizes) and fits(sizes[high - 1]):
        low, high = high, 2 * high
    high = min(high, len(sizes) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle - 1]) else (low, middle)
    return low


def highest(count: int, value: Callable[[int], float]) -> int:
    """Returns the index below `count` with the highest value, for values that rise up to it and fall after it.

    Args:
        count: number of values, at least 1.
        value: returns the value of an index; may be called repeatedly for the same index.
    """
    low, high = 0, count - 1
    while high - low > 2:
        step = max(1, round((high - low) * (1 - _GOLDEN)))
        left, right = low + step, max(high - step, low + step + 1)
        if value(left) < value(right):
            low = left + 1
        else:
            high = right - 1
    return max(range(low, high + 1), key=value)


def smallest_as_good(best: int, value: Callable[[int], float], least: float) -> int:
    """Returns the first index up to `best` whose value is at least `least`, for values that rise up to `best`."""
    return bisect.bisect_left(range(best), True, key=lambda index: value(index) >= least)


@dataclass(frozen=True)
class Row:
    """A plan with a micro-batch.

    Attributes:
        plan: how the model is trained.
        accumulation: micro-batches of an optimizer step.
        largest: rows of the largest available micro-batch that fits under this plan.
        samples_with_largest: samples per second with `largest` rows.
    """

    plan: Technique
    rows: int
    accumulation: int
    step: PredictedStep
    largest: int
    samples_with_largest: float

    @property
    def samples(self) -> float:
        return self.rows * self.accumulation / self.step.total(self.accumulation)

    @property
    def bound(self) -> tuple[str, float]:
        """Returns the resource that bounds most of the step's time, and its share of the time."""
        seconds = self.step.by_bound(self.accumulation)
        most = max(seconds, key=lambda bound: seconds[bound])
        return most, seconds[most] / sum(seconds.values())

    @property
    def recomputing(self) -> float:
        """Returns the share of the step's time that is spent on recompute."""
        return self.step.recomputing * self.accumulation / self.step.total(self.accumulation)


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer in the recommended setup.

    Attributes:
        saves: bytes of states and temporaries saved compared with the configured optimizer; negative if it takes more.
        peak: peak of a step, in bytes; None if the setup does not fit with this optimizer.
        largest: rows of the largest micro-batch that fits under the same plan; 0: none.
    """

    memory: OptimizerMemory
    saves: int
    peak: int | None
    largest: int


@dataclass(frozen=True)
class Advice:
    """The plans of one model at their best micro-batches.

    Attributes:
        rows: each plan that fits, at its best micro-batch.
        too_large: plans under which not even a micro-batch of one row fits, with its peak in bytes.
        recommended: the package's plan with the smallest micro-batch that is as good as the best.
    """

    rows: tuple[Row, ...]
    too_large: tuple[tuple[Technique, int], ...]
    recommended: Row

    @property
    def pays(self) -> str:
        """Returns the remark that larger micro-batches than the recommended one do not pay; empty if none fits."""
        row = self.recommended
        if row.largest <= row.rows:
            return ""
        gain = row.samples_with_largest / row.samples - 1
        return f"Larger micro-batches do not pay: {row.largest} rows also fit, for {gain:+.1%} samples per second."

    @property
    def faster_without(self) -> str:
        """Returns the remark that training without this package is predicted to be faster; empty if it is not."""
        others = [row for row in self.rows if not row.plan.is_own]
        fastest = max(others, key=lambda row: row.samples, default=self.recommended)
        gain = fastest.samples / self.recommended.samples - 1
        if gain <= AS_GOOD:
            return ""
        return (
            f"Faster without this package: {fastest.plan.name}, {fastest.rows} rows, {gain:+.1%} samples per second."
        )


def advise(predictor: StepPredictor, rows: int | None = None) -> Advice:
    """Choose a micro-batch and a plan.

    Args:
        rows: rows per process and optimizer step; None: each micro-batch is a step.

    Raises:
        DoesNotFitError: not even a micro-batch of one row is within the budget under any plan of the package.
    """
    searches = []
    for plan in predictor.plans:
        with watched(f"searching the micro-batch of {plan.name}, {_loss(plan)} loss"):
            search = _Search(predictor, plan, rows)
            if search.sizes:
                # Predicts and caches the steps that are needed below.
                search.row()
        searches.append(search)
    own = [search for search in searches if search.plan.is_own and search.sizes]
    if not own:
        lowest = min(predictor.lowest(plan, _most(rows, plan)) for plan in predictor.plans if plan.is_own)
        raise DoesNotFitError(
            f"a step with one row needs at least {gib_text(lowest)}, even with full recompute; the budget is "
            f"{gib_text(predictor.budget)}: give a larger budget, shorter rows, or an optimizer with smaller states",
            lowest,
        )
    least = (1 - AS_GOOD) * max(search.speed(search.best) for search in own)
    as_good = [search.row(least) for search in own if search.speed(search.best) >= least]
    # Among equal rows min() picks the first plan, which is the simplest.
    recommended = min(as_good, key=lambda row: row.rows)
    return Advice(
        rows=tuple(search.row() for search in searches if search.sizes),
        too_large=tuple(
            (search.plan, predictor.lowest(search.plan, _most(rows, search.plan)))
            for search in searches
            if not search.sizes
        ),
        recommended=recommended,
    )


def compare_optimizers(advice: Advice, predictor: StepPredictor, rows: int | None = None) -> tuple[OptimizerRow, ...]:
    """Returns the recommended setup with each optimizer, the one with the least memory first.

    Args:
        rows: as for `advise`.
    """
    setup, (current, *_) = advice.recommended, predictor.optimizers
    found = []
    for memory in sorted(predictor.optimizers, key=_bytes_of):
        with watched(f"searching the micro-batch of {memory.name}"):
            steps = predictor.with_optimizer(memory)
            sizes = fitting(partial(steps.fits, setup.plan), rows, setup.plan.accumulates)
            fits = setup.rows in sizes
            peak = steps.step(setup.plan, setup.rows, setup.accumulation).peak if fits else None
        found.append(OptimizerRow(memory, _bytes_of(current) - _bytes_of(memory), peak, max(sizes, default=0)))
    return tuple(found)


def _bytes_of(optimizer: OptimizerMemory) -> int:
    return optimizer.states + optimizer.temporaries


def optimizers_text(rows: Sequence[OptimizerRow], advice: Advice, predictor: StepPredictor) -> str:
    """Returns a table of optimizers, and the names of those whose memory is unknown."""
    setup, (current, *_) = advice.recommended, predictor.optimizers
    notes = list(dict.fromkeys(remark for row in rows for remark in row.memory.remarks))
    cells = [
        {
            "--optim": row.memory.name,
            "states": f"{row.memory.states:,}",
            "temporaries": f"{row.memory.temporaries:,}",
            "saves": f"{row.saves:,}",
            "predicted peak": "too large" if row.peak is None else gib_text(row.peak),
            "largest rows": str(row.largest),
            "notes": ", ".join(str(notes.index(remark) + 1) for remark in row.memory.remarks),
        }
        for row in rows
    ]
    align = ("left", *["right"] * 5, "left")
    grid = tabulate(cells, headers="keys", tablefmt="simple", disable_numparse=True, colalign=align)
    numbered = "\n".join(f"{number}: {note}" for number, note in enumerate(notes, 1))
    return (
        f"Optimizers in this setup ({setup.plan.name}, {_loss(setup.plan)} loss, {setup.rows} rows), in bytes, "
        f"compared to {current.name}:\n{grid}\n{numbered}\nUnknown: {', '.join(unknown())}"
    )


def optimizers_dict(rows: Sequence[OptimizerRow]) -> dict[str, Any]:
    """Returns a dict for JSON; sizes are bytes."""
    listed = [{**asdict(row.memory), "saves": row.saves, "peak": row.peak, "largest": row.largest} for row in rows]
    return {"optimizers": listed, "optimizers_not_known": list(unknown())}


class _Search:
    """The micro-batches that fit under one plan, by index."""

    def __init__(self, predictor: StepPredictor, plan: Technique, rows: int | None) -> None:
        self._predictor, self.plan, self._all_rows = predictor, plan, rows
        self.sizes = fitting(partial(predictor.fits, plan), rows, plan.accumulates)
        self._steps: Callable[[int], PredictedStep] = lru_cache(maxsize=None)(self._step)

    @property
    def best(self) -> int:
        return highest(len(self.sizes), self.speed)

    def speed(self, index: int) -> float:
        accumulation = self._accumulation(index)
        return self.sizes[index] * accumulation / self._steps(index).total(accumulation)

    def row(self, least: float | None = None) -> Row:
        """Returns the smallest micro-batch with at least `least` samples per second; None: as good as the plan's
        best."""
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
        return self._predictor.step(self.plan, self.sizes[index], self._accumulation(index))


def _most(rows: int | None, plan: Technique) -> int:
    """Returns the micro-batches of an optimizer step whose micro-batches have one row."""
    return rows if rows is not None and plan.accumulates else 1


def fitting(fits: Callable[[int, int], bool], rows: int | None, accumulates: bool = True) -> Sequence[int]:
    """Returns the micro-batches that fit, the smallest first.

    Args:
        fits: returns whether a micro-batch of n rows fits; the second argument is the number of micro-batches.
        accumulates: several micro-batches may make up the rows; False: all rows are one micro-batch.
    """
    sizes = micro_batches(rows)
    if rows is None:
        return sizes[: count_fitting(sizes, lambda size: fits(size, 1))]
    if not accumulates:
        return (rows,) if fits(rows, 1) else ()
    # With all rows in one micro-batch, no gradients of others are held.
    several = sizes[:-1]
    fitting = several[: count_fitting(several, lambda size: fits(size, rows // size))]
    return (*fitting, rows) if len(fitting) == len(several) and fits(rows, 1) else fitting


def flags(row: Row) -> tuple[str, ...]:
    return (
        f"--per_device_train_batch_size {row.rows}",
        f"--gradient_accumulation_steps {row.accumulation}",
        "--memory_opt_engine compile",
        *row.plan.flags,
        f"--memory_opt_loss {_loss(row.plan)}",
    )


def to_text(advice: Advice, predictor: StepPredictor) -> str:
    """Returns a table of plans, the recommended plan, and its flags."""
    has_accumulation = any(row.accumulation > 1 for row in advice.rows)
    cells = [_cells(row, has_accumulation) for row in advice.rows]
    grid = tabulate(cells, headers="keys", tablefmt="simple", disable_numparse=True)
    tokens = f", {predictor.tokens} tokens per row" if predictor.tokens else ""
    header = (
        f"{predictor.model} in {predictor.weights} on {predictor.device}{tokens}, within "
        f"{gib_text(predictor.budget)}: each plan at its best micro-batch ({predictor.costs} costs)"
    )
    too_large = [
        f"{plan.name}{' with a chunked loss' if plan.chunks_loss else ''} does not fit: {gib_text(peak)} with one row"
        for plan, peak in advice.too_large
    ]
    return "\n".join((header, grid, *too_large, *predictor.remarks, *_recommendation(advice, predictor)))


def to_dict(advice: Advice, predictor: StepPredictor) -> dict[str, Any]:
    """Returns a dict for JSON."""
    return {
        "model": predictor.model,
        "weights": predictor.weights,
        "device": predictor.device,
        "costs": predictor.costs,
        "budget": predictor.budget,
        "tokens": predictor.tokens,
        "remarks": list(predictor.remarks),
        "rows": [_row_dict(row) for row in advice.rows],
        "too_large": [
            {"plan": plan.name, "chunked_loss": plan.chunks_loss, "peak": peak} for plan, peak in advice.too_large
        ],
        "recommended": _row_dict(advice.recommended),
    }


def _cells(row: Row, has_accumulation: bool) -> dict[str, str]:
    bound, share = row.bound
    return {
        "plan": row.plan.name,
        "loss": _loss(row.plan),
        "rows": str(row.rows),
        **({"accumulated": str(row.accumulation)} if has_accumulation else {}),
        "predicted peak": gib_text(row.step.peak),
        "samples/s": f"{row.samples:.1f}",
        "recompute": f"{row.recomputing:.1%}",
        "bound by": f"{bound} {share:.0%}",
    }


def _recommendation(advice: Advice, predictor: StepPredictor) -> Sequence[str]:
    row = advice.recommended
    tokens = f", {row.rows * predictor.tokens:,} tokens" if predictor.tokens else ""
    chosen = f"{row.plan.name}, {_loss(row.plan)} loss, micro-batches of {row.rows} rows{tokens}"
    on_host = f" and {gib_text(row.step.host_bytes)} on the host" if row.step.host_bytes else ""
    return (
        "",
        f"Recommended: {chosen}: {row.samples:.1f} samples per second, predicted peak {gib_text(row.step.peak)}"
        f"{on_host}.",
        *filter(None, (advice.pays, advice.faster_without)),
        " ".join(flags(row)),
    )


def _loss(plan: Technique) -> str:
    return "chunked" if plan.chunks_loss else "plain"


def _row_dict(row: Row) -> dict[str, Any]:
    bound, share = row.bound
    return {
        "plan": row.plan.name,
        "chunked_loss": row.plan.chunks_loss,
        "rows": row.rows,
        "accumulation": row.accumulation,
        "peak": row.step.peak,
        "host_bytes": row.step.host_bytes,
        "samples_per_second": row.samples,
        "seconds": row.step.by_bound(row.accumulation),
        "bound_by": bound,
        "bound_share": share,
        "recompute_share": row.recomputing,
        "largest": row.largest,
        "flags": list(flags(row)) if row.plan.is_own else [],
    }
