"""benchmarks/advise.py: the best of what stays within the budget, and what the page says."""

import advise
import pytest
from advise import LEVEL_1, NO_PLAN, Ran

MIB = 2**20
RAN = (
    Ran(NO_PLAN, False, 8, 700 * MIB, 1.0),
    Ran(NO_PLAN, False, 16, 900 * MIB, 0.5),
    Ran(LEVEL_1, False, 16, 650 * MIB, 1.25),
)


def advice(plan: str, rows: int, peak: int = 640) -> dict:
    chosen = {
        "plan": plan,
        "chunked_loss": False,
        "rows": rows,
        "samples_per_second": 12.0,
        "peak": peak * MIB,
    }
    return {"budget": 750 * MIB, "recommended": chosen}


@pytest.fixture
def sweep(monkeypatch):
    """What was run, and steps in turns that take as long as in the sweep, twice as long in one round."""

    def race(folder, name, limit, runners):
        seconds = {one.runner: one.seconds for one in RAN}
        return [[slower * seconds[runner] for runner in runners] for slower in (1, 1, 2)]

    def runs(folder, name, plan, chunked, sizes, budget):
        return [one for one in RAN if one.runner == (plan, chunked, *sizes)]

    monkeypatch.setattr(advise, "_runs", runs)
    monkeypatch.setattr(advise, "sweep", lambda *args: RAN)
    monkeypatch.setattr(advise, "race", race)


def test_the_best_other_is_one_within_the_budget(tmp_path, sweep):
    found = advise.compare(tmp_path, "gpt2", advice(LEVEL_1, 16))
    assert found["best other"] == "no plan, 8 rows"
    assert found["of its speed"] == pytest.approx(0.8)
    assert found["samples/s"] == pytest.approx(advise.ROWS / 1.25)
    assert (found["peak MiB"], found["peak MiB predicted"]) == (650, 640)


def test_the_page_counts_what_is_over_the_budget(tmp_path, sweep):
    rows = [advise.compare(tmp_path, "gpt2", advice(*chosen)) for chosen in ((NO_PLAN, 8), (NO_PLAN, 16))]
    text = advise.page(rows)
    assert text.endswith("At least 97% of the best other's speed in 1 of 2 cases, worst 1.250; over the budget in 1.")
    assert text.count("no plan, 8 rows") == 2
