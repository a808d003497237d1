"""Later starts of a run with a budget find the plan that the first start solved."""

import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.capture import variants
from optimum_memopt.engines.compile.costs.times import known_costs
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.engines.compile.options import LAYER
from optimum_memopt.engines.compile.predict.plan_cache import SWITCH, CachedPlan, entry_path
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import parse_budget
from tests.compiled import DROPOUT
from tests.gradients import accumulate, assert_bitwise_same
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_layers import Perceptrons
from tests.trainer_runs import log_lines

HELD = 2**29
FOUND, TOO_LARGE = "under the cached plan of an earlier run", "the cached plan of an earlier run does not fit"
# Models by unit, and a small one that is compiled by layers.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "layer": ("llama", {"num_hidden_layers": 4}),
    "model": ("roberta-mlm", {**DROPOUT, "num_hidden_layers": 2}),
    "own": ("own", {}),
}
# By model: gradients without a plan, and a budget.
PLAIN: dict[str, tuple[Any, int]] = {}


@dataclass
class Starts:
    """Starts of one run, as if each were a process.

    Attributes:
        unit: a key of `MODELS`.
        patch: patches of the environment and of process memory.
        cache: folder of the caches.
        held: bytes that the process holds.
        budget: the run's budget, in bytes.
        peak: predicted peak of the latest start.
        table: plan table of the latest start.
    """

    unit: str
    patch: pytest.MonkeyPatch
    cache: Path
    held: int = HELD
    budget: int = 0
    peak: int = 0
    table: PlanTable | None = None

    def __post_init__(self) -> None:
        self.patch.setenv("OPTIMUM_MEMOPT_CACHE", str(self.cache))
        self.patch.setenv(SWITCH, "1")
        for module in (footprint, variants):
            self.patch.setattr(module, "held_bytes", lambda device: self.held)
        self.patch.setattr(footprint, "room_to_grow", lambda *given: 2**16)
        if self.unit not in PLAIN:
            gradients, everything = self._run(Selection()), self.peak
            self._run(Selection(level=1))
            PLAIN[self.unit] = gradients, (everything + self.peak) // 2
        self.plain, self.budget = PLAIN[self.unit]

    def again(self) -> list[str]:
        """Start under the budget, check gradients and peak, and return the log lines."""
        with log_lines() as lines:
            gradients = self._run(Selection(budget=parse_budget(f"{self.budget / 2**20:.3f}MiB")))
        assert_bitwise_same(gradients, self.plain)
        assert self.peak <= self.budget
        return lines

    @property
    def entry(self) -> Path:
        (entry,) = (self.cache / "plans").glob("*.json")
        return entry

    def _run(self, selection: Selection) -> Any:
        name, changes = MODELS[self.unit]
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Perceptrons() if name == "own" else ZOO[name].build(**changes)
        engine = CompileEngine(selection, "aot_eager", unit=LAYER if name == "own" else self.unit)
        engine.attach(model)
        try:
            torch.manual_seed(1)
            batch = {"x": torch.randn(16, 256, 32)} if name == "own" else ZOO[name].batch(16, 48)
            results = accumulate(model, [batch])
            self.peak, self.table = engine.predictor.footprint().peak, engine.plans()
            return results
        finally:
            engine.detach()


@pytest.fixture
def starts(monkeypatch, tmp_path) -> Callable[[str], Starts]:
    return lambda unit="layer": Starts(unit, monkeypatch, tmp_path)


def has(lines: list[str], text: str) -> bool:
    return any(text in line for line in lines)


@in_turn
@pytest.mark.parametrize("unit", nightly(MODELS, but=["own"]))
def test_the_second_start_solves_nothing(starts, unit) -> None:
    run = starts(unit)
    assert not has(run.again(), FOUND)
    first = run.table
    assert any(row.is_on for row in first.plans)
    # A process that holds less may grow to the size of the first one.
    run.held -= 2**20
    assert has(run.again(), FOUND)
    assert run.table == first, "predicted for what the first process held"


@pytest.mark.nightly
@pytest.mark.parametrize("unit", MODELS)
def test_a_start_with_more_room_or_another_budget_solves_anew(starts, unit) -> None:
    run = starts(unit)
    run.again()
    run.held -= HELD // 16
    assert not has(run.again(), FOUND), "there is room for a cheaper plan"
    assert not any(row.is_on for row in run.table.plans)
    run.budget -= 2**18
    assert not has(run.again(), FOUND), "another budget"


@pytest.mark.nightly
def test_a_process_that_holds_more_solves_anew(starts) -> None:
    run = starts()
    run.again()
    # More than the plan leaves unused.
    run.held += run.budget - run.peak + 2**12
    lines = run.again()
    assert has(lines, TOO_LARGE) and not has(lines, FOUND)
    assert has(run.again(), FOUND), "the entry was replaced"


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _of_another_graph(text: str) -> str:
    content = json.loads(text)
    for graph in content["graphs"]:
        graph["signature"]["digest"] = "another"
    return json.dumps(content)


def _without_bytes(text: str) -> str:
    return json.dumps({**json.loads(text), "solved_for": {}})


@pytest.mark.nightly
@pytest.mark.parametrize("damage", [_cut, _of_another_graph, _without_bytes])
def test_an_entry_that_does_not_serve_is_replaced(starts, damage) -> None:
    run = starts()
    run.again()
    whole = run.entry.read_text()
    run.entry.write_text(damage(whole))
    assert not has(run.again(), FOUND)
    assert json.loads(run.entry.read_text())["graphs"] == json.loads(whole)["graphs"]
    assert has(run.again(), FOUND)


@pytest.mark.nightly
def test_it_can_be_switched_off(starts) -> None:
    run = starts()
    run.patch.setenv(SWITCH, "0")
    run.again()
    assert not (run.cache / "plans").exists()


def test_a_path_that_cannot_be_looked_up_has_no_plan() -> None:
    # Like a path in an inaccessible folder, which does not exist for a test that runs as root.
    assert CachedPlan.read(Path("n" * 1000)) is None


def _that_recomputes_nothing(text: str) -> str:
    content = json.loads(text)
    for graph in content["graphs"]:
        for layers in graph["layers"]:
            layers["recompute"] = []
    return json.dumps(content)


@pytest.mark.nightly
def test_a_plan_that_does_not_fit_is_not_blamed_on_the_compiler(starts) -> None:
    run = starts()
    run.again()
    run.entry.write_text(_that_recomputes_nothing(run.entry.read_text()))
    (line,) = (line for line in run.again() if TOO_LARGE in line)
    assert re.fullmatch(rf"{TOO_LARGE}: its step takes [\d.]+ MiB, [\d.]+ MiB over the budget; solving .*", line)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_no_entry(tmp_path, make: Callable[[Path], None]) -> None:
    """A path that is not a regular file is no cache entry; reading it would block."""
    entry = tmp_path / "entry.json"
    make(entry)
    found: list[object] = []

    def read() -> None:
        found.append(CachedPlan.read(entry))
        with known_costs(entry) as costs:
            found.append(dict(costs))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert found == [None, {}]


def test_each_optimizer_and_number_of_micro_batches_has_a_plan_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPTIMUM_MEMOPT_CACHE", str(tmp_path))
    monkeypatch.setenv(SWITCH, "1")
    model = torch.nn.Linear(8, 8)
    made = {
        "adamw": torch.optim.AdamW(model.parameters()),
        "amsgrad": torch.optim.AdamW(model.parameters(), amsgrad=True),
        "sgd": torch.optim.SGD(model.parameters()),
    }
    runs = [Run(each) for each in made.values()]
    runs += [Run(made["adamw"], gradient_accumulation=True, micro_batches=count) for count in (2, 4)]
    paths = [entry_path(model, {}, parse_budget("1GiB"), None, run, "") for run in runs]
    assert None not in paths and len(set(paths)) == len(runs)
    assert entry_path(model, {}, parse_budget("1GiB"), None, Run(made["sgd"]), "") == paths[2]
