"""Several plans within one budget: each batch runs under the cheapest that fits, and gradients are plain PyTorch's."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import default_data_collator

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.run import LargestBatch, Selection
from optimum_memopt.engines.compile.capture import variants
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.options import AUTO, LAYER, MODEL
from optimum_memopt.engines.compile.predict import planner, step_predictor
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.sizes import MIB, Budget
from tests.captured import by_bytes
from tests.compiled import recorded
from tests.gradients import Batch, assert_bitwise_same_step
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import EXACT, measured
from tests.train.tower import Tower, tower_batch
from tests.trainer_runs import log_lines, make, tables

LONG, SHORT = tower_batch(64, 60), tower_batch(64, 24)
# Bytes that are allocated besides the graph's tensors: the loss, seeds, offsets.
SLACK = 256
HELD = 2**29


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the process's memory, which otherwise varies by more than a small model takes."""
    hold(monkeypatch, HELD)
    monkeypatch.setattr(footprint, "_GROWTH", 0)
    monkeypatch.setattr(footprint, "_GROWTH_SHARE", 0)


@pytest.fixture(autouse=True)
def _fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix operator costs, which decide how many plans pay off and vary on a busy machine."""
    monkeypatch.setattr(planner, "costs_of", lambda graph, *others: by_bytes(graph))


def hold(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    for module in (footprint, variants):
        monkeypatch.setattr(module, "held_bytes", lambda device: held)


class Attached:
    """A model under a budget, in a run whose batches have the given lengths."""

    def __init__(
        self, budget: int | None, variants: int = 1, lengths: tuple[int, ...] = (60, 24), unit: str = AUTO
    ) -> None:
        torch.manual_seed(0)
        self.model = Tower()
        self.plain = copy.deepcopy(self.model)
        selection = Selection(budget=None if budget is None else Budget(f"{budget} bytes", budget))
        self.engine = CompileEngine(selection, "aot_eager", variants=variants, unit=unit)
        largest = LargestBatch(64, max(lengths), lengths) if lengths else None
        self.engine.run = lambda: Run(largest_batch=lambda: largest)
        self.engine.attach(self.model)

    def step(self, batch: Batch) -> None:
        self.model(**batch).loss.backward()

    @property
    def header(self) -> tuple[str, ...]:
        return self.engine.plans().header


@pytest.fixture(scope="module")
def free() -> Footprint:
    """Returns the footprint of a step without a plan."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hold(monkeypatch, HELD)
        one = Attached(None)
        one.step(LONG)
        found = one.engine.predictor.footprint()
        one.engine.detach()
    return found


@pytest.fixture
def attached() -> Iterator[Callable[..., Attached]]:
    made = []

    def attach(*args: object, **options: object) -> Attached:
        made.append(Attached(*args, **options))
        return made[-1]

    yield attach
    for one in made:
        one.engine.detach()


@pytest.fixture
def budget(free: Footprint) -> int:
    return free.peak - free.activations // 4


def test_two_plans_for_batches_that_take_turns(attached, budget: int) -> None:
    one = attached(budget, 2)
    with recorded() as splits:
        for batch in (LONG, SHORT, LONG, SHORT, SHORT, LONG):
            assert_bitwise_same_step(one.model, one.plain, batch)
    assert len(splits) == 2
    dear, cheap = (split.graph.choice for split in splits)
    assert len(dear.recomputed) > len(cheap.recomputed)
    # Neither plan compiles again for the other's batches.
    with recorded() as splits, log_lines() as lines:
        peaks = {name: measured(one.model, batch) for name, batch in (("long", LONG), ("short", SHORT))}
    assert not splits and not lines
    for name, batch in (("long", LONG), ("short", SHORT)):
        around = one.engine.predictor.footprint(one.engine.predictor.sizes_of(batch))
        assert peaks[name][1] <= around.activations_within(budget) + SLACK
    single = attached(budget)
    single.step(LONG)
    # A short batch saves more for its backward than under the long batch's plan.
    assert measured(single.model, SHORT)[0] < peaks["short"][0]
    assert measured(single.model, LONG) == peaks["long"]
    assert single.engine.plan_file().graphs == one.engine.plan_file().graphs


@in_turn
@pytest.mark.parametrize("unit", nightly([MODEL, LAYER], but=[MODEL]))
def test_another_bucket_is_traced_by_none(attached, budget: int, unit: str) -> None:
    """Another length bucket is not retraced: it is another choice for the first one's graphs, whichever came first."""
    for first, second in ((LONG, SHORT), (SHORT, LONG)):
        one = attached(budget, 2, unit=unit)
        traces = counters["stats"]["unique_graphs"]
        one.step(first)
        once = counters["stats"]["unique_graphs"] - traces
        # The first layer's input needs no gradient.
        assert once == (1 if unit == MODEL else 3)
        with recorded() as splits:
            for batch in (second, SHORT, LONG, SHORT):
                assert_bitwise_same_step(one.model, one.plain, batch)
        assert splits
        assert counters["stats"]["unique_graphs"] - traces == once
        shorter = one.engine._buckets._shorter[0].forward
        assert shorter.predictor.first["inputs_input_ids_dim1"] == SHORT["input_ids"].shape[1]
        for batch in (SHORT, LONG):
            predictor = one.engine._buckets._cheapest(batch).predictor
            saved, peak = measured(one.model, batch)
            assert predictor.saved(predictor.sizes_of(batch)) == pytest.approx(saved, **EXACT)
            assert predictor.activations(predictor.sizes_of(batch)) == pytest.approx(peak, **EXACT)


@in_turn
def test_the_header_has_a_line_for_each_variant(attached, budget: int) -> None:
    one = attached(budget, 2)
    assert one.engine.predicted_peak_mib(None) is None
    with log_lines() as lines:
        one.step(SHORT)
        first = one.engine.plans()
        one.step(SHORT)
    # The first batch ran under the plan for the largest batch.
    under_largest = one.engine.predictor.peak(None)
    assert under_largest < one.engine.predicted_peak_mib(None) * MIB <= budget
    assert "for batches up to 64 x 60" in first.header[0]
    assert first.header[-2] == "variant 2: batches up to inputs_input_ids_dim1=24: +0.0% time"
    two, single = re.fullmatch(
        r"2 variants: \+([\d.]+)% time over the run's batches, \+([\d.]+)% with one", first.header[-1]
    ).groups()
    assert 0 < float(two) < float(single)
    # The table that was shown does not change.
    assert one.engine.plans() is first
    assert [line.split(" with ")[0] for line in lines if line.startswith("compiling ")] == [
        "compiling the training graph of Tower",
        "compiling the training graph of Tower for batches up to inputs_input_ids_dim1=24",
    ]


@pytest.mark.nightly
def test_lengths_that_are_not_known_count_alike(attached, budget: int) -> None:
    one = attached(budget, 3, lengths=())
    one.step(LONG)
    *_, longer, shorter, gain = one.header
    lengths = [
        int(re.match(rf"variant {number}: batches up to inputs_input_ids_dim1=(\d+): ", line)[1])
        for number, line in ((2, longer), (3, shorter))
    ]
    assert 60 > lengths[0] > lengths[1]
    assert "3 variants:" in gain and "over batches of all lengths" in gain
    with recorded() as splits:
        for length in (60, lengths[0], lengths[1], lengths[0], 60, 8):
            one.step(tower_batch(64, length))
    assert len(splits) == 2


@pytest.mark.nightly
def test_a_larger_batch_gets_a_plan_and_the_former_one_stays(attached, budget: int) -> None:
    one = attached(budget, 2, lengths=())
    with recorded() as splits, log_lines() as lines:
        for batch in (SHORT, LONG, SHORT, LONG):
            assert_bitwise_same_step(one.model, one.plain, batch)
    assert len(splits) == 2
    assert sum("over the budget of" in line for line in lines) == 1
    assert not splits[0].graph.choice.recomputed and splits[1].graph.choice.recomputed
    assert one.header[-1] == "variant 2: batches up to inputs_input_ids_dim1=24: +0.0% time"
    # The limit of variants is reached: the plan for the longest batch so far replaces the previous one.
    with recorded() as splits:
        for batch in (tower_batch(80, 60), LONG, SHORT):
            one.step(batch)
    assert len(splits) == 1


def test_a_batch_without_need_of_a_plan_needs_no_variant(attached) -> None:
    one = attached(2**40, 2)
    one.step(LONG)
    assert one.header[-1] == "one variant: another one would save less than 0.5% time"


@in_turn
def test_a_process_that_has_grown_goes_on_with_the_plan_it_has(attached, budget, monkeypatch) -> None:
    one = attached(budget, 2)
    one.step(LONG)
    hold(monkeypatch, HELD + budget // 2)
    with log_lines() as lines:
        assert_bitwise_same_step(one.model, one.plain, SHORT)
    dropped = [line for line in lines if "run under the plan for the largest one: --memory_opt_budget" in line]
    assert len(dropped) == 1 and re.match(r"batches up to length \d+ run under", dropped[0])
    with recorded() as splits:
        one.step(SHORT)
    assert not splits


@pytest.mark.nightly
def test_what_was_compiled_is_checked_for_each_variant(attached, free, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant's compiled step is checked, with a compiler that exceeds the predicted memory more each time."""
    original = step_predictor.StepMemoryPredictor.activations

    def takes_more(size: int) -> None:
        monkeypatch.setattr(step_predictor.StepMemoryPredictor, "activations", lambda *args: original(*args) + size)

    takes_more(2**20)
    one = attached(free.peak - free.activations // 4, 2, lengths=(60, 48))
    for batch, more in ((LONG, 2**20), (tower_batch(64, 48), 2**21)):
        takes_more(more)
        with log_lines() as lines:
            assert_bitwise_same_step(one.model, one.plain, batch)
        assert any("the compiled step takes" in line and line.endswith("with a margin of that size") for line in lines)
        assert not [line for line in lines if line.startswith("NOT within")]


class InPieces(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            input_ids = torch.nn.functional.gelu(self.first(input_ids))
        torch._dynamo.graph_break()
        return self.second(input_ids).exp().mean()


def test_a_trainer_says_and_runs_what_its_batches_need(tmp_path: Path, budget: int) -> None:
    """A Trainer with long rows in every other batch runs both variants; evaluation runs the model's own forward."""
    lengths = [60 if index // 64 % 2 else 20 for index in range(384)]
    examples = [{"input_ids": tower_batch(1, length)["input_ids"][0]} for length in lengths]
    data = {"train_dataset": examples, "eval_dataset": examples[:4], "data_collator": default_data_collator}
    options = {"memory_opt_engine": "compile", "memory_opt_budget": f"{budget / MIB:.3f}MiB", "memory_opt_variants": 2}
    steps = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "per_device_train_batch_size": 64}
    steps["train_sampling_strategy"] = "sequential"
    trainer = make(tmp_path, "roberta-mlm", model=Tower(), **data, **options, **steps)
    with log_lines() as lines, recorded() as splits:
        trainer.train()
    dear, cheap = (split.graph.choice for split in splits)
    assert len(dear.recomputed) > len(cheap.recomputed)
    (table,) = tables(lines)
    assert "variant 2: batches up to inputs_input_ids_dim1=24: " in table
    assert "2 variants: " in table and "over the run's batches" in table
    assert sum("eval_runtime" in entry for entry in trainer.state.log_history) == 2
    assert trainer.memopt.plan_stats.predicted_peak_mib <= budget / MIB
