from optimum_memopt import Estimate
from tests.nightly.notebooks import values_of


def test_plan() -> None:
    estimate, breakdown, (fits, fits_less), batches, run, curve, planned, module = values_of("plan.ipynb")
    rows, rows_recomputed = batches
    assert isinstance(estimate, Estimate) and sum(breakdown.values()) == estimate.peak
    assert fits and fits_less == (estimate.peak <= 512 * 2**20)
    assert 16 < rows < rows_recomputed
    peak, held = run
    assert peak < estimate.peak / 2**20 and held["optimizer"] < held["parameters"]
    assert len(curve) == 10 and curve[-1][1] == "+0.0%"
    budget, peak, _ = planned
    assert peak <= float(budget.removesuffix("MiB")) < estimate.peak / 2**20
    held, most = module
    assert held["optimizer"] == 0 and most > 512
