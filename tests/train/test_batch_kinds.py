"""Batches of several kinds, which run different graphs, under one budget; and parameters that begin to train."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocated

from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.predict import planner
from optimum_memopt.engines.compile.train.batch_kind import BatchKind, input_kinds
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat.attention import KeptMasks
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.sizes import Budget
from tests.captured import by_bytes
from tests.compiled import hold_still, selection
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import EXACT
from tests.train.tower import Block
from tests.trainer_runs import distance, log_lines, make, tables
from tests.trainer_runs import weights as weights_of_model

ROWS, LENGTH, WIDTH = 32, 30, 32
# Bytes that are allocated besides the graph's tensors: the loss, seeds, offsets.
SLACK = 256
AGAIN = "solving for the budget again"


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix process memory, which grows by more than these models take, and costs, which vary on a busy machine."""
    hold_still(monkeypatch)
    monkeypatch.setattr(footprint, "room_to_grow", lambda *given: 0)
    monkeypatch.setattr(planner, "costs_of", lambda graph, *others: by_bytes(graph))


class Tasks(torch.nn.Module):
    """Layers with a narrow and a wide head, and layers for a second modality."""

    def __init__(self, breaks: bool = False, width: int = 256) -> None:
        super().__init__()
        self.task, self.breaks = "narrow", breaks
        self.layers, self.images = (torch.nn.ModuleList(Block() for _ in range(4)) for _ in range(2))
        self.narrow, self.norm = torch.nn.Linear(WIDTH, 4), torch.nn.BatchNorm1d(WIDTH)
        self.wide = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, width), torch.nn.GELU(), torch.nn.Tanh(), torch.nn.Linear(width, 4)
        )

    def forward(
        self,
        x: torch.Tensor,
        task: str | None = None,
        weights: torch.Tensor | None = None,
        image: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(torch.nn.functional.dropout(x, 0.1))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if image is not None:
            for layer in self.images:
                image = layer(image)
            x = x + image.mean(1, keepdim=True)
        is_wide = "wide" in (task, self.task) or weights is not None
        x = self.wide(x) if is_wide else self.narrow(x)
        return {"loss": (x if weights is None else x * weights).square().mean()}


def _x(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(0))


# Arguments that a batch of the second kind has in addition.
SECOND: dict[str, Callable[[], dict[str, Any]]] = {
    "name": lambda: {"task": "wide"},
    "optional tensor": lambda: {"weights": _x()[..., :4]},
    "modality": lambda: {"image": _x(4 * LENGTH)},
    "attribute": dict,
}


class Attached:
    """A model that trains under a selection, and a plain copy."""

    def __init__(self, model: torch.nn.Module, chosen: Selection, unit: str) -> None:
        self.model, self.plain = copy.deepcopy(model), copy.deepcopy(model)
        self.engine = CompileEngine(chosen, "aot_eager", loss="plain", unit=unit)
        self.engine.attach(self.model)

    def step(self, batch: dict[str, Any], task: str = "narrow") -> int:
        """Run a step, check that it is bitwise plain PyTorch's, and return its peak of allocated bytes."""
        for model in (self.plain, self.model):
            model.task = task
            model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        self.plain(**batch)["loss"].backward()
        torch.manual_seed(1)
        forward, saved, loss = allocated(lambda: self.model(**batch)["loss"])
        backward, _, _ = allocated(loss.backward)
        for ours, expected in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert ours.grad is expected.grad is None or torch.equal(ours.grad, expected.grad)
        for ours, expected in zip(self.model.buffers(), self.plain.buffers(), strict=True):
            assert torch.equal(ours, expected)
        return max(forward, saved + backward)

    @property
    def recomputed(self) -> int:
        return sum(row.applied_count for row in self.engine.plans().enabled)


@pytest.fixture
def attached() -> Iterator[Callable[..., Attached]]:
    made: list[Attached] = []

    def attach(*args: Any) -> Attached:
        made.append(Attached(*args))
        return made[-1]

    yield attach
    for one in made:
        one.engine.detach()


def within(share: float, model: torch.nn.Module, unit: str, kinds: dict[str, tuple[dict[str, Any], str]]) -> Selection:
    """Returns a budget with room for a share of the larger kind's activations without a plan."""
    parts = []
    for batch, task in kinds.values():
        free = Attached(model, Selection(), unit)
        free.step(batch, task)
        parts.append(free.engine.predictor.footprint())
        free.engine.detach()
    largest = max(parts, key=lambda each: each.peak)
    bytes = largest.peak - int((1 - share) * largest.activations)
    return Selection(budget=Budget(f"{bytes} bytes", bytes))


def kinds_of(second: str) -> dict[str, tuple[dict[str, Any], str]]:
    task = "wide" if second == "attribute" else "narrow"
    return {"first": ({"x": _x()}, "narrow"), "second": ({"x": _x(), **SECOND[second]()}, task)}


EVERY = [(second, unit, breaks) for second in SECOND for unit in (LAYER, MODEL) for breaks in (False, True)]
# An attribute that changes behind a graph break is only noticed after the graph before it has run.
EVERY = [case for case in EVERY if case != ("attribute", case[1], True)]


@in_turn
@pytest.mark.parametrize(("second", "unit", "breaks"), nightly(EVERY, but=[("name", LAYER, False)]))
def test_a_later_kind_stays_within_the_budget(attached, second: str, unit: str, breaks: bool) -> None:
    model, kinds = Tasks(breaks), kinds_of(second)
    chosen = within(0.75, model, unit, kinds)
    one = attached(model, chosen, unit)
    recomputed = {}
    for name in ("first", "second", "first", "second"):
        with log_lines() as lines:
            peak = one.step(*kinds[name])
        around = one.engine.predictor.footprint()
        assert peak <= around.activations_within(chosen.budget.bytes) + SLACK
        assert not any(line.startswith("NOT within") for line in lines), lines
        is_new, recomputed[name] = name not in recomputed, one.recomputed
        if (second, unit) != ("attribute", MODEL):
            assert sum(AGAIN in line for line in lines) == (is_new and name == "second"), lines
            assert one.engine.predictor.footprint().peak <= chosen.budget.bytes
            assert recomputed["first"] == 0 or second == "attribute", "there is room"
            assert name == "first" or recomputed["second"]
    peak = one.engine.predicted_peak_mib(None) * 2**20
    assert peak <= chosen.budget.bytes


@pytest.mark.nightly
def test_a_kind_that_does_not_fit_is_refused_and_others_go_on(attached) -> None:
    model, kinds = Tasks(width=2048), kinds_of("name")
    one = attached(model, within(1.0, model, LAYER, {"first": kinds["first"]}), LAYER)
    one.step(*kinds["first"])
    state = copy.deepcopy(one.plain.state_dict())
    with pytest.raises(DoesNotFitError, match="infeasible: even with full recompute"):
        one.step(*kinds["second"])
    # A refused forward writes no running statistics.
    one.plain.load_state_dict(state)
    with log_lines() as lines:
        one.step(*kinds["first"])
    assert not any(AGAIN in line for line in lines), lines


@pytest.mark.nightly
def test_inputs_that_change_no_graph_are_not_solved_for(attached, monkeypatch) -> None:
    kinds = kinds_of("name")
    one = attached(Tasks(), within(0.75, Tasks(), LAYER, kinds), LAYER)
    one.step(*kinds["second"])
    solved = []
    original = planner.Planner._solve
    monkeypatch.setattr(planner.Planner, "_solve", lambda *args: solved.append(args) or original(*args))
    one.step({**kinds["second"][0], "image": None})
    assert not solved


def kind(trains: bool = True, **inputs: Any) -> BatchKind:
    return BatchKind(KeptMasks(padding=False, local=False), (trains,), input_kinds((), inputs))


def test_what_torch_guards_on_is_a_kind() -> None:
    x = torch.zeros(4, 6)
    first = kind(x=x, task="a", step=1, scale=0.5)
    assert first == kind(x=torch.ones(8, 2), task="a", step=2, scale=0.25)
    for other in (
        kind(x=x.double(), task="a", step=1, scale=0.5),
        kind(x=x[:1], task="a", step=1, scale=0.5),
        kind(x=x, task="a", step=1, scale=0.5, image={"pixels": x}),
        kind(x=x, task=None, step=1, scale=0.5),
    ):
        assert other != first
    assert kind(x=x, task="b").first_after(kind(x=x, task="a")) == "the first batch with task='b'"
    assert kind(x=x).first_after(kind(x=x, image=x)) == "the first batch with no image"
    assert kind(False, x=x).first_after(kind(x=x)) == "the trained parameters changed"


@in_turn
@pytest.mark.parametrize("unit", nightly([LAYER, MODEL], but=[LAYER]))
def test_layers_that_begin_to_train_are_shown_and_predicted(attached, unit: str) -> None:
    model = Tasks()
    for frozen in (model.layers, model.images):
        frozen.requires_grad_(False)
    one, batch = attached(model, selection("level 1"), unit), {"x": _x()}
    with log_lines() as lines:
        one.step(batch)
    assert "--memory_opt_level 1: no layer of this model trains; it applies once one does" in lines
    head = one.engine.plans()
    assert not head.enabled
    for each in (one.model, one.plain):
        each.layers.requires_grad_(True)
    one.step(batch)
    assert sum(row.applied_count for row in one.engine.plans().enabled) >= 4
    assert one.engine.predictor.activations() == pytest.approx(one.step(batch), **EXACT)
    for each in (one.model, one.plain):
        each.layers.requires_grad_(False)
    one.step(batch)
    assert one.engine.plans() is head


@in_turn
def test_states_of_what_trains_for_the_first_time_are_counted(attached) -> None:
    """The optimizer states of parameters that train for the first time are counted; the next step holds them."""
    model = Tasks()
    model.layers.requires_grad_(False)
    one, batch = attached(model, selection("level 1"), LAYER), {"x": _x()}
    optimizer = torch.optim.AdamW(one.model.parameters())
    one.engine.run = lambda: Run(optimizer=optimizer)
    one.step(batch)
    optimizer.step()
    for each in (one.model, one.plain):
        each.layers.requires_grad_(True)
        each.load_state_dict(one.model.state_dict())
    one.step(batch)
    predicted = one.engine.predictor.footprint(optimizer=optimizer).optimizer
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    assert predicted == sum(value.nbytes for value in states if value.dim())


def _of_one_kind(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


@pytest.mark.nightly
def test_a_trainer_plans_each_kind_once(tmp_path: Path) -> None:
    """Each kind is planned once, although batches of the two kinds alternate, also within an optimizer step."""
    first, second = (kind for kind, _ in kinds_of("optional tensor").values())
    # Two batches per step.
    order = (first, first, second, second, first, second, second, first)
    data = [{name: value[row] for name, value in kind.items()} for kind in order for row in range(ROWS)]
    budget = within(0.75, Tasks(), LAYER, kinds_of("optional tensor")).budget.bytes
    # A second set of gradients, and the optimizer's states, are held in addition.
    weights = 3 * sum(parameter.nbytes for parameter in Tasks().parameters())
    of_run = {
        "train_dataset": data,
        "data_collator": _of_one_kind,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    torch.manual_seed(0)
    model = Tasks()
    weights_of = {}
    for name, options in (
        ("plain", {"plain": True}),
        ("ours", {"memory_opt_engine": "compile", "memory_opt_unit": "layer", "memory_opt_loss": "plain"}),
    ):
        if name == "ours":
            options["memory_opt_budget"] = f"{(budget + weights) / 2**20:.3f}MiB"
        trainer = make(tmp_path / name, "small", model=copy.deepcopy(model), **options, **of_run)
        with log_lines() as lines:
            trainer.train()
        weights_of[name] = weights_of_model(trainer.model)
    assert distance(weights_of["ours"], weights_of["plain"]) == 0
    assert [AGAIN in line for line in lines].count(True) == 1
    assert not any("NOT within" in line for line in lines), lines
    assert len(tables(lines)) == 2, "each once"
    assert trainer.memopt.plan_stats.predicted_peak_mib * 2**20 <= budget + weights
