"""Predicted step memory against torch's allocator, for every byte that a step allocates and frees."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from allocations import allocated
from torch._dynamo.utils import counters

from optimum_memopt import optimize
from optimum_memopt.engines.compile.memory.footprint import Footprint, state_sizes, step_bytes
from optimum_memopt.engines.compile.memory.inductor_programs import _StorageTracker
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import dynamo, inductor
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.table import PlanTable
from tests.compiled import DROPOUT, selection
from tests.gradients import Batch
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly

MODELS = {
    "roberta": ("roberta-classification", {**DROPOUT, "num_hidden_layers": 1}),
    "deberta": ("deberta-v2-classification", {}),
    "gpt2": ("gpt2", {}),
    "t5": ("t5", {"num_layers": 1, "num_decoder_layers": 1}),
}
# The first size is traced; the others are predicted from the same graphs.
SIZES = ((8, 48), (5, 31), (11, 60))
PLANS_BY_NAME = ("keep all", "recompute", "offload", "compress")
PLANS = ("no plan", "no plan fp8", "level 1", "level 1 fp8", "level 2", *PLANS_BY_NAME)
BY_DEFAULT = {("roberta", "level 1")}
IN_TURN = {("roberta", "offload")}
# Tolerance: 0.5%, or the bytes of the loss, seeds and offsets, which are not predicted.
EXACT = {"rel": 5e-3, "abs": 64}


def marks(*case: str) -> list[pytest.MarkDecorator]:
    if case in BY_DEFAULT:
        return []
    return [in_turn if case in IN_TURN else pytest.mark.nightly]


def cases() -> list[Any]:
    return [pytest.param(name, plan, marks=marks(name, plan)) for name in MODELS for plan in PLANS]


def measured(model: torch.nn.Module, batch: Batch) -> tuple[int, int]:
    """Returns the bytes held between forward and backward, and the peak of both, if only the loss is kept."""
    model.zero_grad(set_to_none=True)
    forward, saved, loss = allocated(lambda: model(**batch).loss)
    backward, _, _ = allocated(loss.backward)
    return saved, max(forward, saved + backward)


def sizes_of(batch: Batch, known: Any) -> dict[str, int]:
    """Returns the values of the plan table's symbols for a batch."""
    found = (re.fullmatch(r"inputs_(\w+)_dim(\d+)", name) for name in known)
    return {match[0]: batch[match[1]].shape[int(match[2])] for match in found}


def asked(plan: str, table: PlanTable | None) -> str:
    """Returns a config of the largest rows; levels and no plan need no table."""
    if plan.startswith(("no plan", "level")):
        return plan.removeprefix("no plan")
    first = [row.config.split(":")[0] for row in table.plans if row.config.endswith(":1:-1")][:4]
    strategy = {"keep all": "1:0", "recompute": "1:-1", "offload": "3:-1", "compress": "4:-1"}[plan]
    return ",".join(f"{cluster_id}:{strategy}" for cluster_id in first)


@dataclass
class Predicted:
    model: torch.nn.Module
    engine: CompileEngine
    batches: list[Batch]
    table: PlanTable | None = None

    def train(self, plan: str) -> PlanTable:
        config = asked(plan, self.table or (self.train("no plan") if plan in PLANS_BY_NAME else None))
        self.engine.apply(selection(config))
        self.model(**self.batches[0]).loss.backward()
        self.table = self.engine.plans()
        assert bool(self.table.enabled) == (plan not in ("no plan", "keep all"))
        return self.table

    def check(self) -> None:
        predictor = self.engine.predictor
        for batch in self.batches:
            sizes = sizes_of(batch, predictor.first)
            saved, peak = measured(self.model, batch)
            assert predictor.saved(sizes) == pytest.approx(saved, **EXACT)
            assert predictor.activations(sizes) == pytest.approx(peak, **EXACT)
        assert predictor.caveat == ""


def predicted(name: str, compiler: str, **changes: Any) -> Predicted:
    zoo, own = MODELS[name]
    model = ZOO[zoo].build(**{**own, **changes})
    engine = CompileEngine(compiler=compiler)
    engine.attach(model)
    return Predicted(model, engine, [ZOO[zoo].batch(*size) for size in SIZES])


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Predicted]]:
    """Yields a cache of the models, with the tables that plans are chosen from."""
    found: dict[str, Predicted] = {}
    yield found
    for model in found.values():
        model.engine.detach()


@pytest.mark.parametrize(("name", "plan"), cases())
def test_saved_bytes_and_peak_are_the_allocators(models: dict[str, Predicted], name: str, plan: str) -> None:
    if name not in models:
        models[name] = predicted(name, "aot_eager")
    subject = models[name]
    subject.train(plan)
    subject.check()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name in ("roberta", "deberta") for plan in ("level 1", "no plan")]
    + [("gpt2", "level 1"), ("t5", "no plan")],
)
def test_inductors_peak_is_read_from_its_program(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """inductor's peak is read from its program for batches of any size, also from a cached program."""
    # With a single layer, recompute gains nothing if inductor fuses.
    layers = {"num_hidden_layers": 2} if name == "roberta" else {}
    subject = predicted(name, "inductor", **layers)
    subject.train(plan)
    subject.check()
    predictor = subject.engine.predictor
    ours = predictor.activations()
    without_inductor = predicted(name, "aot_eager", **layers)
    without_inductor.train(plan)
    assert ours != without_inductor.engine.predictor.activations(), "inductor changes nothing here"
    without_inductor.engine.detach()
    # The predictor caches the last two batches.
    for more in (1, 2):
        assert predictor.activations({name: size + more for name, size in predictor.first.items()}) > ours
    with monkeypatch.context() as patched:
        patched.setattr(inductor, "silenced", lambda runner: 1 / 0)
        assert predictor.activations() != ours
    assert predictor.caveat == "without inductor's fusions, since its program cannot be read (ZeroDivisionError)"
    subject.engine.detach()

    torch._dynamo.reset()
    before = counters["inductor"]["fxgraph_cache_hit"]
    again = predicted(name, "inductor", **layers)
    again.train(plan)
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 2
    assert again.engine.predictor.activations() == ours
    again.engine.detach()


# Steps with an optimizer.


def adamw(model: torch.nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **how)


@pytest.fixture(scope="module")
def small_and_wide() -> Predicted:
    subject = predicted("gpt2", "aot_eager", n_embd=128, n_layer=1)
    subject.train("no plan")
    return subject


@in_turn
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "how", nightly([{"fused": True}, {"foreach": True}, {"foreach": False}], but=[{"foreach": True}]), ids=str
)
@pytest.mark.parametrize("size", [0, 1])
def test_a_step_is_the_sum_of_its_parts(small_and_wide, micro_batches, how, size) -> None:
    model, batch = small_and_wide.model, small_and_wide.batches[size]
    model.zero_grad(set_to_none=True)
    optimizer = adamw(model, **how)

    def step() -> None:
        for _ in range(micro_batches):
            model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    peak, _, _ = allocated(lambda: (step(), step()))
    predictor = small_and_wide.engine.predictor
    footprint = predictor.footprint(
        sizes_of(batch, predictor.first), optimizer, gradient_accumulation=micro_batches > 1
    )
    over = footprint.peak - footprint.constant - footprint.parameters - footprint.buffers - footprint.batch
    # The prediction leaves out a step count per parameter.
    assert over == pytest.approx(peak, rel=5e-3)
    assert footprint.parameters == sum(tensor.nbytes for tensor in model.parameters())
    assert footprint.batch == sum(tensor.nbytes for tensor in batch.values())


def test_states_are_adamws_before_the_first_step_and_as_they_are_after_it(small_and_wide) -> None:
    parameters = list(small_and_wide.model.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    assert sum(state_sizes(None, parameters)) == 2 * weights
    plain = torch.optim.ASGD(parameters, lr=1e-4)
    assert sum(state_sizes(plain, parameters)) == 2 * weights
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    plain.step()
    assert sum(state_sizes(plain, parameters)) == weights
    assert step_bytes(None, parameters) == 0
    small_and_wide.model.zero_grad(set_to_none=True)


@in_turn
def test_frozen_weights_have_no_gradients_and_no_states() -> None:
    subject = predicted("roberta", "aot_eager")
    for parameter in subject.model.roberta.parameters():
        parameter.requires_grad_(False)
    subject.train("no plan")
    head = sum(parameter.nbytes for parameter in subject.model.classifier.parameters())
    footprint = subject.engine.predictor.footprint(gradient_accumulation=True)
    assert (footprint.gradients, footprint.accumulated, footprint.optimizer) == (head, head, 2 * head)
    assert footprint.parameters > 10 * head
    subject.check()
    subject.engine.detach()


def test_the_peak_is_the_higher_of_two_moments() -> None:
    low = Footprint(activations=5, parameters=10, optimizer=20, gradients=10, step=3, constant=100)
    assert low.peak == 100 + 10 + 20 + 13
    assert "gradients and the optimizer's step" in low.text("float32")
    high = Footprint(activations=50, parameters=10, buffers=1, optimizer=20, gradients=10, batch=2, accumulated=10)
    assert high.peak == 10 + 1 + 20 + 2 + 60
    assert "accumulated gradients" in high.text("float32")


@pytest.mark.parametrize("releases", [False, True])
def test_activations_within_a_budget_leave_room_for_what_the_backward_holds(releases: bool) -> None:
    """An optimizer that steps in the backward has its temporary tensors there."""
    step = Footprint(activations=0, parameters=500, accumulated=20, step=100, outputs=10, releases=releases)
    most = replace(step, activations=step.activations_within(1000))
    assert most.peak == 1000 and replace(most, activations=most.activations + 1).peak > 1000


def test_plain_names_of_sizes(small_and_wide) -> None:
    predictor = small_and_wide.engine.predictor
    symbols = {"inputs_input_ids_dim0": 64, "inputs_input_ids_dim1": 20}
    assert predictor.footprint(batch_size=64, seq_len=20) == predictor.footprint(symbols) != predictor.footprint()
    first = small_and_wide.batches[0]["input_ids"].shape
    assert predictor.footprint(batch_size=first[0], seq_len=first[1]) == predictor.footprint()
    with pytest.raises(MemOptError, match="allowed: whole numbers from 1 up"):
        predictor.footprint(batch_size=0)


def test_sizes_that_a_model_does_not_have(small_and_wide) -> None:
    predictor = small_and_wide.engine.predictor
    for sizes in ({"inputs_pixels_dim0": 3}, {"inputs_input_ids_dim0": 0}):
        with pytest.raises(
            MemOptError, match="allowed: whole numbers from 1 up for inputs_input_ids_dim0, inputs_input_ids_dim1"
        ):
            predictor.footprint(sizes)


def test_a_scalar_that_a_kernel_is_given_is_some_number() -> None:
    """A scalar that a kernel takes is replaced by some number; on CUDA, programs read DeBERTa's scale this way."""
    with dynamo.fake_tensors(), _StorageTracker(torch.device("cpu")) as tracker:
        assert torch.empty(()).item() == 1.0
        assert torch.empty((), dtype=torch.int64).item() == 1
    sizes: dict[object, int] = {}
    for key, size in tracker.log:
        sizes[key] = size
    assert not any(sizes.values())


class SavedAsViews(torch.nn.Module):
    """A linear layer whose result the backward reads as several views."""

    def __init__(self, width: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = torch.nn.Linear(64, width), function

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.function(self.linear(x)).square().sum()}


def attention(x: torch.Tensor) -> torch.Tensor:
    query, key, value = x.chunk(3, -1)
    return (query @ key.transpose(1, 2)).softmax(-1) @ value


def gram(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, 1)
    return rows.T @ rows


@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
@pytest.mark.parametrize(("width", "function"), [(192, attention), (64, gram)])
def test_a_storage_is_held_until_its_last_view_is_read(
    width: int, function: Callable[..., torch.Tensor], compiler: str
) -> None:
    model, x = SavedAsViews(width, function), torch.randn(8, 256, 64)
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler=compiler)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x)["loss"].backward()

    step()
    model.zero_grad(set_to_none=True)
    peak, _, _ = allocated(step)
    assert engine.predictor.footprint().activations == pytest.approx(peak, abs=256)
