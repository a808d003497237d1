"""The memory that a Trainer's loss takes outside the model's forward is counted, or a line says that it is not."""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BatchEncoding, TrainerCallback, default_data_collator, set_seed

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments, optimize
from optimum_memopt.engines.torch_compat import kernels
from optimum_memopt.errors import DoesNotFitError
from tests.compiled import hold_still
from tests.model_zoo import SMALL
from tests.rotation import in_turn, nightly
from tests.small_model import CLASSES
from tests.trainer_runs import arguments, distance, log_lines, make, weights

WIDE = 5000
OPTIONS = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}


def equal_rows(length: int = 8, count: int = 16) -> list[dict[str, torch.Tensor]]:
    made = [SMALL.batch(1, length, seed=seed) for seed in range(count)]
    return [{name: value[0] for name, value in row.items()} for row in made]


class Wide(MemOptTrainer):
    """A Trainer whose loss computes scores over many classes from the model's logits.

    Attributes:
        asked: peak bytes of torch's allocator in each training step.
        predicted: the engine's predicted activations of each step.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.wide = 0.1 * torch.randn(CLASSES, WIDE, generator=torch.Generator().manual_seed(0))
        self.teacher = SMALL.build("eager").requires_grad_(False)
        self.asked: list[int] = []
        self.predicted: list[int] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.memopt.plan_stats.table:
            return super().training_step(*args, **kwargs)
        allocations = kernels.cpu_allocations(lambda: super(Wide, self).training_step(*args, **kwargs))
        self.asked.append(max(itertools.accumulate(allocations)))
        batch = args[1]["input_ids"]
        predictor = self.memopt.engine.predictor
        sizes = dict(zip(("inputs_input_ids_dim0", "inputs_input_ids_dim1"), batch.shape, strict=True))
        self.predicted.append(predictor.activations({name: sizes.get(name, 1) for name in predictor.first}))
        return torch.zeros(())

    def scores(self, outputs: Any) -> torch.Tensor:
        return outputs.logits @ self.wide


class Plain(Wide):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = self.scores(model(**inputs))
        with torch.no_grad():
            self.accuracy = (scores.softmax(-1).argmax(-1) == inputs["labels"]).float().mean().item()
        return functional.cross_entropy(scores, inputs["labels"])


class TeacherFirst(Wide):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            target = (self.scores(self.teacher(**inputs)) / 2).softmax(-1)
        outputs = model(**inputs)
        return outputs.loss + functional.kl_div((self.scores(outputs) / 2).log_softmax(-1), target)


class TeacherLast(Wide):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = self.scores(model(**inputs)) / 2
        with torch.no_grad():
            target = (self.scores(self.teacher(**inputs)) / 2).softmax(-1)
        return functional.kl_div(scores.log_softmax(-1), target, reduction="batchmean")


class Reference(Wide):
    """A head outside the model whose parameters require grad and get none: autocast caches their casts while it is on,
    as for DPO's reference model. The peak of this loss is in the backward."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.head = torch.nn.Linear(CLASSES, WIDE, bias=False)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = model(**inputs)
        with self.accelerator.autocast(), torch.no_grad():
            target = self.head(outputs.logits).float().mean()
        return (self.scores(outputs).float().sin().cos().tanh() - target).mean()


# Globals of a script.
TEACHER = SMALL.build("eager").requires_grad_(False)
HEAD = torch.nn.Linear(CLASSES, WIDE)
SEEN: list[float] = []


class Counting:
    """A loss that is an object with state."""

    count = 0

    def __call__(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return functional.cross_entropy(scores, labels)


COUNTING = Counting()


class OfGlobals(Wide):
    """A loss that uses the script's globals, and trains one of them."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            target = HEAD(TEACHER(**inputs).logits).softmax(-1)
        scores = HEAD(model(**inputs).logits)
        loss = COUNTING(scores, inputs["labels"]) + functional.kl_div(scores.log_softmax(-1), target, reduction="sum")
        SEEN.append(loss.item())
        return loss


class TwoForwards(Wide):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        one, two = (self.scores(model(**inputs)).log_softmax(-1) for _ in range(2))
        return functional.kl_div(one, two.detach().exp(), reduction="sum") + functional.cross_entropy(
            two, inputs["labels"]
        )


class Scoring(torch.nn.Module):
    """A model with wide results, in half precision under autocast."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.head = torch.nn.Linear(CLASSES, WIDE)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return {"scores": self.head(self.model(input_ids, attention_mask).logits)}


class Copied(Wide):
    """A loss of results that accelerate copies to float32, after which nothing holds them. The peak is in the loss."""

    def __init__(self, *, model: torch.nn.Module, **given: Any) -> None:
        super().__init__(model=Scoring(model), **given)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = model(**inputs)["scores"]
        with torch.no_grad():
            self.highest = torch.cat([scores] * 8).max().item()
        return functional.cross_entropy(scores, inputs["labels"])


class TakesOut(Wide):
    """A loss that removes the labels from its inputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return functional.cross_entropy(self.scores(outputs).float(), labels, label_smoothing=0.1)


class TakesOutOfEncoding(TakesOut):
    """Its batches are a tokenizer's `BatchEncoding`, which is not a dict."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.data_collator = lambda rows: BatchEncoding(default_data_collator(rows))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert inputs.input_ids.shape == inputs.attention_mask.shape
        return super().compute_loss(model, inputs, *args, **kwargs)


def trainer_of(kind: type[Wide], folder: Path, **changes: Any) -> Wide:
    args = arguments(MemOptTrainingArguments, folder, **{**OPTIONS, "max_steps": 3, "memory_opt_level": 1, **changes})
    return kind(model=SMALL.build("eager"), args=args, train_dataset=equal_rows())


@contextlib.contextmanager
def during_training(trainer: MemOptTrainer, ask: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Yields a list that gets the result of `ask` for the engine at the end of each step."""
    found: list[Any] = []

    class Asks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            found.append(ask(trainer.memopt.engine))

    trainer.add_callback(Asks())
    yield found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Plain, {}),
        pytest.param(TeacherFirst, {}, marks=pytest.mark.nightly),
        (TeacherLast, {"memory_opt_level": 0}),
        pytest.param(TwoForwards, {}, marks=pytest.mark.nightly),
        pytest.param(TakesOut, {}, marks=pytest.mark.nightly),
        (TakesOutOfEncoding, {}),
        pytest.param(TeacherFirst, {"memory_opt_unit": "model"}, marks=pytest.mark.nightly),
        pytest.param(TeacherLast, {"memory_opt_compiler": "inductor"}, marks=pytest.mark.nightly),
        pytest.param(TeacherFirst, {"bf16": True}, marks=pytest.mark.nightly),
        (Reference, {"bf16": True}),
        (Copied, {"bf16": True}),
    ],
)
def test_a_step_is_predicted_with_its_loss(kind: type[Wide], changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, **changes)
    trainer.train()
    (asked,), (predicted,) = set(trainer.asked), set(trainer.predicted)
    assert predicted == pytest.approx(asked, rel=0.01)
    # At least three tensors of scores.
    assert asked > 3 * 4 * 4 * WIDE
    assert "not counted" not in str(trainer.memopt.table)


@in_turn
def test_what_a_script_has_is_left_as_it_is(tmp_path: Path) -> None:
    SEEN.clear()
    COUNTING.count = 0
    trainer = trainer_of(OfGlobals, tmp_path)
    with during_training(trainer, lambda _: HEAD.zero_grad()):
        trainer.train()
    (predicted,) = set(trainer.predicted)
    assert predicted == pytest.approx(max(trainer.asked), rel=0.01)
    assert COUNTING.count == len(SEEN) == 3 and all(map(math.isfinite, SEEN))
    # The parameter was not replaced by a tensor without data.
    assert type(HEAD.weight) is torch.nn.Parameter and HEAD.weight.grad is None


@in_turn
def test_a_batch_of_other_sizes_is_predicted(tmp_path: Path) -> None:
    trainer = trainer_of(TeacherFirst, tmp_path, max_steps=4)
    short, long = equal_rows(4), equal_rows(12)
    trainer.train_dataset = [*short[:4], *long[:4], *short[4:7], *short[7:8]]
    trainer.args.train_sampling_strategy = "sequential"
    trainer.train()
    for asked, predicted in zip(trainer.asked, trainer.predicted, strict=True):
        assert predicted == pytest.approx(asked, rel=0.01)


def test_a_budget_bounds_the_step_with_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)

    def mib(size: int) -> dict[str, Any]:
        return {"memory_opt_level": 0, "memory_opt_budget": f"{size / 2**20:.6f}MiB", "max_steps": 2}

    trainer = trainer_of(TeacherLast, tmp_path / "none", memory_opt_level=0, max_steps=1)
    with during_training(trainer, lambda engine: engine.predictor.footprint().peak) as peaks:
        trainer.train()
    (peak,) = peaks
    fits = trainer_of(TeacherLast, tmp_path / "fits", **mib(peak + 1024))
    fits.train()
    assert "fits without a plan" in fits.memopt.table.header[0]
    # The difference is less than one tensor of scores, and more than everything that the model saves.
    with pytest.raises(DoesNotFitError):
        trainer_of(TeacherLast, tmp_path / "over", **mib(peak - 40_000)).train()


class Draws(Wide):
    """A loss that draws random numbers, counts, and keeps state, also in its modules."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.seen: list[float] = []
        self.count = 0
        self.history = {"losses": {"train": [0.0]}}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.count += 1
        noise = random.random() + torch.rand(())
        self.teacher.calls = getattr(self.teacher, "calls", 0) + 1
        with torch.no_grad():
            self.teacher.head.bias.add_(0.01)
        loss = functional.cross_entropy(self.scores(model(**inputs)) * noise, inputs["labels"])
        self.seen.append(noise.item())
        self.history["losses"]["train"].append(loss.item())
        return loss


@in_turn
def test_counting_leaves_no_trace(tmp_path: Path) -> None:
    """Counting a loss has no side effects: losses, random numbers, counters and state are a plain Trainer's."""
    ours = trainer_of(Draws, tmp_path / "ours")
    plain = trainer_of(Draws, tmp_path / "plain")
    plain.memopt.engine.attach = lambda model: None
    for trainer in (ours, plain):
        # Skips the measurement.
        trainer.training_step = super(Wide, trainer).training_step
        set_seed(0)
        trainer.train()
    assert "not counted" not in str(ours.memopt.table)
    assert ours.seen == plain.seen and ours.history == plain.history and ours.count == plain.count == 3
    assert ours.teacher.calls == plain.teacher.calls
    assert distance(weights(ours.teacher), weights(plain.teacher)) == 0
    assert distance(weights(ours.model), weights(plain.model)) == 0


class Keeps(Wide):
    """Replaces the model's forward by one that keeps its outputs while the loss is computed, as
    sentence-transformers' `MatryoshkaLoss` does."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.kept: list[int] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        own, kept = model.forward, []

        def keeping(**given: Any) -> Any:
            kept.append(own(**given))
            return kept[-1]

        model.forward = keeping
        try:
            scores = self.scores(model(**inputs))
        finally:
            model.forward = own
        self.kept.append(len(kept))
        return functional.cross_entropy(scores, inputs["labels"])


def test_a_forward_that_the_loss_replaces_sees_one_call_a_step(tmp_path: Path) -> None:
    trainer = trainer_of(Keeps, tmp_path)
    trainer.train()
    assert trainer.kept == [1, 1, 1]
    (asked,), (predicted,) = set(trainer.asked), set(trainer.predicted)
    assert predicted == pytest.approx(asked, rel=0.01)
    assert "not counted" not in str(trainer.memopt.table) and "forward" not in vars(trainer.model)


class FromIterator(Plain):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.others = iter(range(100))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().compute_loss(model, inputs) * (1 + next(self.others))


class Reads(Plain):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (model(**inputs).logits > 1e9).any():
            raise ValueError
        return super().compute_loss(model, inputs)


class Backward(Plain):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss(model, inputs)
        loss.backward(retain_graph=True)
        return loss


@pytest.mark.parametrize(
    ("kind", "why"),
    nightly(
        [
            (FromIterator, "it may consume an iterator, others"),
            (Reads, "the value of a tensor is read"),
            (Backward, "it calls backward itself"),
        ],
        but=[Reads],
    ),
)
def test_what_cannot_be_counted_is_said(kind: type[Wide], why: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, memory_opt_level=0, memory_opt_budget="16GiB", max_steps=1)
    with log_lines() as lines:
        trainer.train()
    caveat = f"not counted: {kind.__name__}.compute_loss ({why}"
    assert any(
        line.startswith("--memory_opt_budget bounds only the forward and backward of Small") and caveat in line
        for line in lines
    )
    assert caveat in trainer.memopt.table.header[1]
    if kind is FromIterator:
        # Only the step took a value from the iterator.
        assert next(trainer.others) == 1


@in_turn
@pytest.mark.parametrize("returns_loss", [True, False])
def test_a_training_loop_that_computes_its_own_loss(returns_loss: bool) -> None:
    model, batch = SMALL.build("eager").train(), SMALL.batch()
    labels = batch["labels"] if returns_loss else batch.pop("labels")
    engine = optimize(model, memory_opt_level=1, **OPTIONS)
    outputs = model(**batch)
    loss = outputs.loss if returns_loss else functional.cross_entropy(outputs.logits, labels)
    loss.backward()
    said = "not counted: the loss (the training loop computes it from the outputs)" in engine.plans().header[1]
    assert said != returns_loss
    engine.detach()


@in_turn
def test_a_stock_loss_is_the_models_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, "small", memory_opt_level=1, max_steps=1, **OPTIONS)
    losses = []
    with during_training(trainer, lambda engine: losses.append(engine.run().loss())):
        trainer.train()
    assert losses == [None]
    assert "not counted" not in str(trainer.memopt.table)
