from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.engines.api.predictions import (
    BANDWIDTH,
    COMPUTE,
    LAUNCHES,
    OPTIMIZER_PART,
    PredictedStep,
    Technique,
)
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.predict.advise import (
    advise,
    count_fitting,
    highest,
    micro_batches,
    smallest_as_good,
    to_dict,
    to_text,
)

GIB = 2**30
NO_PLAN = Technique("no plan")
LEVEL_1 = Technique("level 1", ("--memory_opt_level 1",))
THEIRS = Technique("Trainer's checkpointing, every layer", is_own=False)
# Bytes per row, and time relative to no plan.
ROW = {NO_PLAN: 4 * GIB, LEVEL_1: GIB, THEIRS: GIB // 2}
SLOWER = {NO_PLAN: 1.0, LEVEL_1: 1.3, THEIRS: 1.4}


@dataclass
class MadeUp:
    """A device that computes a row in 10 ms, and fewer than four rows in the time of four; from `slow` rows on, a row
    takes five times as long, like an allocator that runs out of blocks near the memory limit."""

    budget: int = 40 * GIB
    optimizer: float = 0.0
    slow: int = 10**9
    plans: tuple[Technique, ...] = (NO_PLAN, LEVEL_1, THEIRS)
    model = "MadeUpForCausalLM"
    weights = "bfloat16"
    remarks = ()
    device = "H100"
    costs = "made-up"
    tokens = 512
    looked: set[tuple[str, int]] = field(default_factory=set)

    def _peak(self, plan: Technique, rows: int, accumulation: int) -> int:
        return (8 + 2 * (accumulation > 1)) * GIB + ROW[plan] * rows

    def fits(self, plan: Technique, rows: int, accumulation: int) -> bool:
        return self._peak(plan, rows, accumulation) <= self.budget

    def lowest(self, plan: Technique, accumulation: int) -> int:
        return self._peak(plan, 1, accumulation)

    def step(self, plan: Technique, rows: int, accumulation: int) -> PredictedStep:
        assert self.fits(plan, rows, accumulation)
        self.looked.add((plan.name, rows))
        computing = 0.01 * rows * SLOWER[plan] * (5 if rows >= self.slow else 1)
        seconds = {COMPUTE: computing, LAUNCHES: max(0.0, 0.04 * SLOWER[plan] - computing)}
        return PredictedStep(self._peak(plan, rows, accumulation), seconds, 0.0, self.optimizer)


def test_the_smallest_micro_batch_that_is_as_good():
    found = advise(MadeUp())
    assert (found.recommended.plan, found.recommended.rows) == (NO_PLAN, 4)
    assert found.recommended.samples == pytest.approx(100)
    assert found.recommended.bound == (COMPUTE, 1.0)
    assert "do not pay: 8 rows also fit, for +0.0% samples per second" in found.pays
    assert {(row.plan, row.rows, row.largest) for row in found.rows} == {
        (NO_PLAN, 4, 8),
        (LEVEL_1, 4, 32),
        (THEIRS, 4, 64),
    }


def test_a_plan_pays_where_the_optimizer_is_shared_by_more_rows():
    found = advise(MadeUp(optimizer=1.0))
    assert found.recommended.plan is LEVEL_1
    assert found.recommended.rows == found.recommended.largest == 32
    assert not found.pays
    # With a global batch, the number of optimizer steps does not depend on the micro-batch.
    found = advise(MadeUp(optimizer=1.0), 256)
    assert (found.recommended.plan, found.recommended.rows, found.recommended.accumulation) == (NO_PLAN, 4, 64)
    assert advise(MadeUp(optimizer=10.0), 256).recommended.bound[0] == OPTIMIZER_PART


def test_the_largest_batch_is_not_chosen_where_it_is_the_slowest():
    found = advise(MadeUp(optimizer=1.0, slow=24))
    assert found.recommended.rows == 16
    assert found.recommended.largest == 32
    assert found.recommended.samples_with_largest < 0.9 * found.recommended.samples
    assert "32 rows also fit, for -" in found.pays


def test_gradients_of_other_micro_batches_take_memory():
    # All rows at once fit, but half of them do not fit beside the gradients of the other half.
    assert [advise(MadeUp(budget=17 * GIB, plans=(NO_PLAN,)), rows).recommended.rows for rows in (2, 4)] == [2, 1]
    assert advise(MadeUp(budget=12 * GIB, plans=(NO_PLAN,)), 1).recommended.accumulation == 1


def test_only_plans_of_the_package_are_recommended():
    with pytest.raises(DoesNotFitError, match=r"one row needs at least 11.00 GiB, .*the budget is 10.60 GiB"):
        advise(MadeUp(budget=int(10.6 * GIB)), 8)


def test_plain_pytorch_is_said_to_be_faster_where_it_is(monkeypatch):
    assert not advise(MadeUp()).faster_without
    monkeypatch.setitem(SLOWER, THEIRS, 0.8)
    predictor = MadeUp()
    said = "Faster without this package: Trainer's checkpointing, every layer, 4 rows, +25.0% samples per second."
    assert said in to_text(advise(predictor), predictor).splitlines()


def test_what_does_not_fit_is_said():
    predictor = MadeUp(budget=12 * GIB)
    found = advise(predictor, 8)
    assert found.too_large == ((NO_PLAN, 14 * GIB),)
    text = to_text(found, predictor)
    assert "no plan does not fit: 14.00 GiB with one row" in text
    assert text.splitlines()[-1] == (
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --memory_opt_engine compile "
        "--memory_opt_level 1 --memory_opt_loss plain"
    )
    as_json = to_dict(found, predictor)
    assert as_json["recommended"]["rows"] == 2 and len(as_json["rows"]) == 2
    assert as_json["recommended"]["flags"][0] == "--per_device_train_batch_size 2"


def test_memory_of_the_host_is_said():
    class Offloading(MadeUp):
        def step(self, plan: Technique, rows: int, accumulation: int) -> PredictedStep:
            return replace(super().step(plan, rows, accumulation), host_bytes=3 * GIB)

    for predictor, said in ((MadeUp(), "24.00 GiB."), (Offloading(), "24.00 GiB and 3.00 GiB on the host.")):
        found = advise(predictor)
        assert said in to_text(found, predictor)
        assert to_dict(found, predictor)["recommended"]["host_bytes"] == found.recommended.step.host_bytes


def test_few_micro_batches_are_looked_at():
    predictor = MadeUp(budget=2**15 * GIB)
    advise(predictor)
    assert len({rows for name, rows in predictor.looked if name == "level 1"}) < 16


def test_memory_bandwidth_is_named():
    step = PredictedStep(GIB, {BANDWIDTH: 2.0, COMPUTE: 1.0}, 0.5, 1.0)
    assert step.total(3) == 11
    assert step.by_bound(3) == {BANDWIDTH: 6, COMPUTE: 3, OPTIMIZER_PART: 2}


def test_micro_batches_of_a_global_batch_are_its_divisors():
    assert micro_batches(12) == (1, 2, 3, 4, 6, 12)
    assert micro_batches(16) == (1, 2, 4, 8, 16)
    assert micro_batches(1) == (1,)
    assert micro_batches(None)[:8] == (1, 2, 3, 4, 6, 8, 12, 16)


@pytest.mark.parametrize("limit", range(14))
def test_what_fits_is_found_and_nothing_far_too_large_is_looked_at(limit):
    looked = []

    def fits(size: int) -> bool:
        looked.append(size)
        return size <= limit

    sizes = range(1, 13)
    assert count_fitting(sizes, fits) == min(limit, 12)
    assert max(looked) <= max(1, 2 * limit)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40, unique=True), st.data())
def test_the_highest_of_values_with_one_maximum(values, data):
    rising = sorted(data.draw(st.lists(st.sampled_from(values), unique=True)))
    values = [*rising, *sorted(set(values) - set(rising), reverse=True)]
    looked = set()

    def value(index: int) -> float:
        looked.add(index)
        return values[index]

    assert values[highest(len(values), value)] == max(values)
    assert len(looked) <= 14


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0, 1))
def test_the_smallest_that_is_as_good(values, share):
    rising = sorted(values)
    least = share * rising[-1]
    found = smallest_as_good(len(rising) - 1, rising.__getitem__, least)
    assert rising[found] >= least
    assert not any(value >= least for value in rising[:found])
