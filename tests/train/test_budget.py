"""Models trained under a budget: gradients are plain PyTorch's, and the allocator never exceeds the budget."""

import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allocations import allocated
from budget_graphs import Within, attach
from torch.utils._pytree import tree_leaves

from optimum_memopt import MemOptTrainer
from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.capture import variants
from optimum_memopt.engines.compile.capture.traced_forward import TracedForward
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.producer import TorchDefault
from optimum_memopt.engines.compile.predict.planner import Planner, PlannerSpec
from optimum_memopt.engines.compile.predict.step_limit import StepLimit
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import Budget, parse_budget
from tests.captured import by_bytes
from tests.compiled import DROPOUT, recorded
from tests.gradients import accumulate, assert_bitwise_same
from tests.model_zoo import SMALL, VOCABULARY, ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import measured
from tests.train.tower import Tower, tower_batch
from tests.trainer_runs import log_lines, make

# Bytes that are allocated besides the graph's tensors: the loss, seeds, offsets.
SLACK = 256


def trained(name: str, budget: int | None, changes: dict[str, Any], batch: dict[str, torch.Tensor]) -> Any:
    torch.manual_seed(0)
    model = ZOO[name].build(**changes)
    engine = attach(model, TorchDefault() if budget is None else Within(budget, by_bytes))
    try:
        torch.manual_seed(1)
        result = accumulate(model, [batch])
        predicted = engine.predictor.activations()
        _, peak = measured(model, batch)
        return result, predicted, peak, engine.plans(), engine.plans().header
    finally:
        engine.detach()


CASES = {
    "one layer": ("roberta-mlm", {**DROPOUT, "num_hidden_layers": 1}),
    "roberta": ("roberta-mlm", DROPOUT),
    "deberta": ("deberta-v2-mlm", {}),
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "t5": ("t5", {}),
}


# Positions of budgets between the floor and no plan.
SHARES = (0.02, 0.3, 0.6, 0.9)


@pytest.mark.parametrize(
    ("case", "shares"),
    nightly([*((case, SHARES) for case in CASES), ("one layer", SHARES[1::2])], but=[("one layer", SHARES[1::2])]),
)
def test_the_allocator_stays_within_the_budget(case: str, shares: tuple[float, ...]) -> None:
    name, changes = CASES[case]
    # Errors give MiB with one decimal, whose rounding must be less than 2% of the floor.
    batch = ZOO[name].batch(64, 48)
    plain, free, _, _, _ = trained(name, None, changes, batch)
    with pytest.raises(MemOptError, match="infeasible: even with full recompute") as refused:
        trained(name, free // 20, changes, batch)
    number, unit = re.search(r"peaks at ([\d.]+) (MiB|GiB)", str(refused.value)).groups()
    floor = float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]
    peaks = []
    for share in shares:
        budget = int(floor * 1.02 + share * (free - floor))
        ours, predicted, peak, table, _ = trained(name, budget, changes, batch)
        assert_bitwise_same(ours, plain)
        assert predicted <= budget
        assert peak <= budget + SLACK
        assert any(row.is_on for row in table.plans) or free <= budget
        peaks.append(peak)
    assert peaks == sorted(peaks)


@in_turn
def test_a_budget_that_all_fits_in_is_torchs_own_partition() -> None:
    batch = ZOO["roberta-mlm"].batch(4, 16)
    _, _, _, table, header = trained("roberta-mlm", 2**30, {"num_hidden_layers": 1}, batch)
    assert "fits without a plan, torch's own partition" in header[0]
    assert not any(row.is_on for row in table.plans)


def a_step(
    batch: dict[str, torch.Tensor], budget: Budget | None, build: Callable[[], torch.nn.Module] = Tower
) -> CompileEngine:
    model = build()
    engine = CompileEngine(Selection(budget=budget), "aot_eager")
    engine.attach(model)
    model(**batch).loss.backward()
    assert isinstance(engine.plans(), PlanTable)
    return engine


def budget_of(bytes: int) -> Budget:
    return parse_budget(f"{bytes / 2**20:.3f}MiB")


LARGE = tower_batch(64, 60)


@pytest.fixture(scope="module")
def steady_process() -> Iterator[None]:
    """Fix the process's memory, which otherwise varies by more than a small model takes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (footprint, variants):
            patch.setattr(module, "held_bytes", lambda device: 2**29)
        patch.setattr(footprint, "_GROWTH", 0)
        patch.setattr(footprint, "_GROWTH_SHARE", 0)
        yield


@pytest.fixture(scope="module")
def free(steady_process: None) -> Footprint:
    """Returns the footprint of a step with the large batch and no plan."""
    return held(a_step(LARGE, None))


def held(engine: CompileEngine) -> Footprint:
    """Returns the footprint of an engine's step, and detaches the engine."""
    try:
        return engine.predictor.footprint()
    finally:
        engine.detach()


def test_a_budget_bounds_the_whole_step(free: Footprint) -> None:
    """A budget includes the process, parameters, gradients, optimizer states and the batch."""
    budget = budget_of(free.peak - free.activations // 4)
    engine = a_step(LARGE, budget)
    found = engine.predictor.footprint()
    assert "budget" in engine.plans().header[0]
    assert found.peak <= budget.bytes
    engine.detach()


@pytest.mark.parametrize("lengths", nightly([((60,),), ((60, 60),), ((20, 60),), ((60, 20, 40),)], but=[(60, 20, 40)]))
def test_a_budget_is_for_all_forwards_before_one_backward(
    free: Footprint, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is solved again at the second forward, and all later steps use the same plan."""
    batches = [tower_batch(64, length) for length in lengths]
    # Enough for one forward without a plan.
    budget = budget_of(free.peak + free.activations // 8)
    model, reference = Tower(), Tower()
    reference.load_state_dict(model.state_dict())
    plain = contrasted(reference, batches)
    engine = CompileEngine(Selection(budget=budget), "aot_eager")
    engine.attach(model)
    of_process = footprint.held_bytes
    monkeypatch.setattr(footprint, "held_bytes", lambda device: of_process(device) + engine._pending.saved_bytes)
    with log_lines() as lines:
        assert_bitwise_same(contrasted(model, batches), plain)
        solved = engine.plans().header[0]
        for _ in range(2):
            assert_bitwise_same(contrasted(model, batches), plain)
    assert any("one of several forwards before one backward" in line for line in lines) == (len(lengths) > 1)
    assert not any(line.startswith("NOT within the budget") for line in lines)
    assert engine.plans().header[0] == solved
    assert ("for other forwards that save" in solved) == (len(lengths) > 1)
    assert engine.predicted_peak_mib(None) * 2**20 <= budget.bytes
    engine.detach()


def contrasted(model: torch.nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> tuple[Any, Any]:
    """Run several forwards before one backward, and return the losses and gradients."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    losses = torch.stack([model(**batch).loss for batch in batches])
    losses.sum().backward()
    return losses.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def test_what_planning_leaves_behind_is_part_of_the_room_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth while operators are measured counts towards the growth headroom, which is not reserved twice."""
    room, model = 2**25, Tower()
    monkeypatch.setattr(footprint, "_GROWTH", room)
    spec = PlannerSpec(FromBudget(budget_of(2**30)), Run)

    def constant(planner: Planner, held: int) -> int:
        monkeypatch.setattr(footprint, "held_bytes", lambda device: held)
        return planner.step().fixed.constant

    planner = Planner(model, spec)
    first = constant(planner, 2**29)
    assert constant(planner, 2**29 + room // 2) == constant(planner, 2**29 + room) == first
    # A process that grew more than expected may grow again by half as much; memory that it frees is usable.
    assert constant(planner, 2**29 + room + 4) == first + 2 * 4
    assert constant(planner, 2**29 + 3 * room) == first + 2 * room + room // 2
    assert constant(planner, 2**29 - room // 2) == first - room // 2
    assert constant(planner.for_another(None, spec), 2**29 - room // 2) == first - room // 2


def test_an_attempt_that_is_over_is_freed_before_another_is_planned(
    free: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt's saved activations are freed before re-planning; else they would count as process memory."""
    losses: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    exceeded, solve_again = StepLimit.exceeded, Planner._solve_again

    def over_once(limit: StepLimit, *args: Any) -> str:
        return exceeded(limit, *args) or ("" if alive else "over the budget")

    def noted(planner: Planner) -> None:
        alive.append(any(loss() is not None for loss in losses))
        solve_again(planner)

    model = Tower()
    call = TracedForward._call

    def called(traced: TracedForward, *args: Any) -> Any:
        found = call(traced, *args)
        losses.extend(map(weakref.ref, tree_leaves(found.outputs)))
        return found

    monkeypatch.setattr(StepLimit, "exceeded", over_once)
    monkeypatch.setattr(Planner, "_solve_again", noted)
    monkeypatch.setattr(TracedForward, "_call", called)
    engine = CompileEngine(Selection(budget=budget_of(free.peak - free.activations // 4)), "aot_eager")
    engine.attach(model)
    model(**LARGE)
    assert losses and alive == [False]
    engine.detach()


class Cyclic(Tower):
    """Returns outputs that only the garbage collector frees."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        vars(outputs)["own"] = outputs
        return outputs


def test_the_forward_of_a_discarded_attempt_is_not_pending(free: Footprint, monkeypatch: pytest.MonkeyPatch) -> None:
    exceeded, asked = StepLimit.exceeded, itertools.count()
    monkeypatch.setattr(
        StepLimit, "exceeded", lambda *args: exceeded(*args) or ("" if next(asked) else "over the budget")
    )
    model = Cyclic()
    engine = CompileEngine(Selection(budget=budget_of(free.peak - free.activations // 4)), "aot_eager")
    engine.attach(model)
    gc.disable()
    try:
        outputs = model(**LARGE)
        assert next(asked) > 1 and len(list(engine._pending)) == 1
        outputs.loss.backward()
        assert not list(engine._pending)
    finally:
        gc.enable()
    engine.detach()


def test_a_larger_batch_is_solved_for_before_it_runs(free: Footprint) -> None:
    """A larger batch is solved for before it runs; a smaller or equally large one is not."""
    small, budget = tower_batch(16, 30), budget_of(free.peak - free.activations // 4)
    engine = a_step(small, budget)
    assert "fits without a plan" in engine.plans().header[0]
    model = engine._model
    with log_lines() as lines:
        model(**tower_batch(15, 29)).loss.backward()
    assert lines == []
    with log_lines() as lines:
        model(**LARGE).loss.backward()
    assert sum("over the budget of" in line for line in lines) == 1
    assert engine.plans().enabled
    assert engine.predictor.footprint().peak <= budget.bytes
    with log_lines() as lines:
        model(**LARGE).loss.backward()
        model(**small).loss.backward()
    assert lines == []
    engine.detach()


def suggested(error: MemOptError) -> tuple[int, int]:
    """Returns the suggested rows of a micro-batch, and how many micro-batches make the batch."""
    rows, times = re.search(r"--per_device_train_batch_size (\d+) and (\d+) times", str(error)).groups()
    return int(rows), int(times)


def test_a_budget_that_nothing_fits_in_names_a_batch_that_does(steady_process: None) -> None:
    free = held(a_step(SMALL.batch(64, 60), None, SMALL.build))
    # Half of the batch takes half of the activations.
    budget = budget_of(free.peak - free.activations * 3 // 4)
    with pytest.raises(MemOptError) as refused:
        a_step(SMALL.batch(64, 60), budget, SMALL.build)
    rows, times = suggested(refused.value)
    assert rows * times == 64 and 1 < rows < 64
    assert held(a_step(SMALL.batch(rows, 60), budget, SMALL.build)).peak <= budget.bytes


class Pairs(MemOptTrainer):
    """Gives the model two rows for each row of the data, as TRL does with pairs."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **others: Any) -> Any:
        return super().compute_loss(model, {name: value.repeat(2, 1) for name, value in inputs.items()}, **others)


@pytest.mark.nightly
def test_the_batch_that_does_has_the_rows_of_the_data_loader(steady_process: None, tmp_path: Path) -> None:
    of_run = {"trainer": Pairs, "memory_opt_engine": "compile", "per_device_train_batch_size": 8, "max_steps": 1}
    free = make(tmp_path, "llama", **of_run)
    free.train()
    parts = free.memopt.engine.predictor.footprint()
    budget = budget_of(parts.peak - parts.activations * 7 // 10)
    with pytest.raises(MemOptError) as refused:
        make(tmp_path, "llama", **of_run, memory_opt_budget=budget.text).train()
    rows, times = suggested(refused.value)
    assert rows * times == 8


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 2048), torch.nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.down(torch.nn.functional.gelu(self.up(x))).square().mean()}


@in_turn
def test_measuring_for_a_larger_batch_stays_within_the_budget(steady_process: None, tmp_path, monkeypatch) -> None:
    # No operator costs are cached.
    monkeypatch.setenv("OPTIMUM_MEMOPT_CACHE", str(tmp_path))
    room, engine = 48 * 2**20, CompileEngine(Selection(budget=budget_of(2**29 + 48 * 2**20)), "aot_eager")
    model = Wide()
    engine.attach(model)
    model(x=torch.randn(64, 64))["loss"].backward()
    larger = torch.randn(32_768, 64)

    def refused() -> None:
        with pytest.raises(MemOptError, match="infeasible: even with full recompute"):
            model(x=larger)

    peak, _, _ = allocated(refused)
    assert peak <= room
    engine.detach()


class Viewed(torch.nn.Module):
    """A model whose graph may have two more views, which do not change its signature but renumber all later nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, has_views: bool = False) -> torch.Tensor:
        if has_views:
            x = x.unsqueeze(0).squeeze(0)
        for layer in self.layers:
            x = torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.1)
        return x.square().mean()


@in_turn
def test_another_graph_of_the_same_operators_is_solved_by_itself(steady_process: None) -> None:
    model, x = Viewed(), torch.randn(512, 64)
    free = CompileEngine(compiler="aot_eager")
    free.attach(model)
    model(x).backward()
    parts = free.predictor.footprint()
    free.detach()
    engine = CompileEngine(Selection(budget=budget_of(parts.peak - parts.activations // 3)), "aot_eager")
    with recorded() as splits:
        engine.attach(model)
        for has_views in (False, True):
            torch.manual_seed(0)
            model(x, has_views=has_views).backward()
    (first, second) = (split.graph for split in splits)
    assert first.plan.signature == second.plan.signature and first.digest != second.digest
    for graph in (first, second):
        assert graph.choice.why.startswith("budget") and graph.choice.recomputed
    assert [c.row for c in first.choice.candidates] == [c.row for c in second.choice.candidates]
    engine.detach()


@pytest.mark.nightly
def test_graphs_that_only_a_second_run_has_are_planned_too(steady_process: None) -> None:
    """Graphs that appear in a second run are planned, too: LongT5's encoder is traced differently after the first."""
    config = transformers.LongT5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, dropout_rate=0.0,
        local_radius=3, pad_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    batch = ZOO["t5"].batch(96, 48)

    def step(selection: Selection) -> CompileEngine:
        torch.manual_seed(0)
        model = transformers.LongT5ForConditionalGeneration(config)
        engine = CompileEngine(selection, "aot_eager", unit="layer")
        engine.attach(model)
        model(**batch).loss.backward()
        return engine

    by_level = held(step(Selection(level=1)))
    budget = budget_of(by_level.peak + by_level.activations // 4)
    engine = step(Selection(budget=budget))
    assert "level 1" not in engine.plans().header[0]
    assert engine.predictor.footprint().peak <= budget.bytes
    engine.detach()
