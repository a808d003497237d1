import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from baselines import Baseline

from optimum_memopt import measure as measuring
from optimum_memopt.errors import MemOptError
from optimum_memopt.measure import Case, Measurement, spawn
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload
from tests.saved_configs import save

CASE = Case(Workload("folder", "fill-mask"), {"memory_opt_level": 1}, steps=3)
TABLE = PlanTable(
    "ort", (PlanRow("A+:1:-1,B+:1:-1", 2, 9, "", -1, 2), PlanRow("C+:1:-1", 1, 5, "")), {"dim": 2}, ("line",)
)


@pytest.mark.parametrize("case", [CASE, replace(CASE, options=None, bf16=True)])
def test_cases_travel(case):
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize("table", [None, TABLE])
def test_measurements_travel(table):
    measurement = Measurement(812.5, 1.25, 2.5, "sampled", table, ("level 1 leaves out 1 of 10 plans",), 512.25)
    assert Measurement.from_json(measurement.to_json()) == measurement
    assert measurement.activations_mib == 300.25
    assert measurement.claimed_bytes == (9 if table else 0)
    assert measurement.applied == ({"A+:1:-1", "B+:1:-1"} if table else frozenset())


@pytest.mark.nightly
def test_an_error_of_the_process_is_the_error(tmp_path):
    folder = save(tmp_path, "roberta-mlm")
    with pytest.raises(MemOptError, match="^--seq_len 65: this model has 64 positions$"):
        spawn(Case(Workload(folder, "fill-mask", seq_len=65), None))


def test_how_a_process_ended(monkeypatch):
    assert "SIGKILL, probably out of memory" in measuring._reason(-signal.SIGKILL, "half a line")
    assert (
        measuring._reason(1, "Traceback …\n  File …\nIndexError: index out of range\n\n")
        == "IndexError: index out of range"
    )
    assert measuring._reason(3, "") == "the measured process failed with exit code 3"


def test_untuned_malloc_stays_as_it_is(monkeypatch, tmp_path):
    """Untuned malloc keeps its settings and its environment variable; runs in this process."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    called = []
    monkeypatch.setattr("optimum_memopt.memory.process._libc", lambda: called.append(1))
    case = Baseline(Workload(save(tmp_path, "roberta-mlm"), "fill-mask", 2, 8), None, steps=1, tuned_malloc=False)
    measuring.measure(case)
    assert not called and os.environ["MALLOC_TRIM_THRESHOLD_"] == "131072"
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    measuring.measure(replace(case, tuned_malloc=True))
    assert called


@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"optimizer": True}], ids=str)
def test_a_step_does_what_the_case_says(monkeypatch, changes):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.seen = []

        def forward(self, x):
            y = self.linear(x)
            self.seen.append((y.dtype, self.linear.weight.detach().clone()))
            return SimpleNamespace(loss=y.float().square().sum())

    model = Model()
    monkeypatch.setattr(Workload, "build", lambda self: (model, {"x": torch.ones(1, 2)}))
    found = measuring.measure(Case(Workload("folder", "fill-mask"), None, steps=1, **changes))
    dtypes, weights = zip(*model.seen, strict=True)
    assert set(dtypes) == {torch.bfloat16 if "bf16" in changes else torch.float32}
    assert torch.equal(*weights) == ("optimizer" not in changes)
    assert 0 < found.held_mib <= found.peak_mib
