"""Loops hold the outputs of a forward until its backward, to the end of the step, or into the next forward."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocated

from optimum_memopt import MemOptTrainer, optimize
from optimum_memopt.engines.api.run import HeldUntil
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.compile.train.outputs_watch import OutputsWatch
from optimum_memopt.errors import DoesNotFitError
from tests.compiled import hold_still
from tests.gradients import Batch
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.trainer_runs import log_lines, make

NAMES = ["llama", "roberta-mlm", "t5"]
CHANGES = {"t5": {"num_layers": 4, "num_decoder_layers": 4}}


class Loop:
    """A training loop that holds outputs for the given time."""

    def __init__(self, model: torch.nn.Module, held: HeldUntil) -> None:
        self.model, self._held = model, held
        self.outputs: Any = None

    def forward(self, batch: Batch) -> torch.Tensor:
        if self._held == HeldUntil.BACKWARD:
            return self.model(**batch).loss
        self.outputs = self.model(**batch)
        return self.outputs.loss

    @property
    def earlier_bytes(self) -> int:
        return 0 if self.outputs is None else sum(each.nbytes for each in self.outputs.values() if each.dim())

    def step(self, batch: Batch) -> int:
        """Run a step, and return its peak over what was held before, outputs of earlier steps included."""
        self.model.zero_grad(set_to_none=True)
        earlier = self.earlier_bytes
        forward, saved, loss = allocated(lambda: self.forward(batch))
        backward, _, _ = allocated(loss.backward)
        if self._held == HeldUntil.END_OF_STEP:
            self.outputs = None
        return earlier + max(forward, saved + backward)


class Keeping(Loop):
    """A loop that keeps a part of its last forwards' outputs."""

    def __init__(self, model: torch.nn.Module, keep: Callable[[Any], Any], count: int) -> None:
        super().__init__(model, HeldUntil.NEXT_FORWARD)
        self._keep, self._kept = keep, deque[Any](maxlen=count)

    def forward(self, batch: Batch) -> torch.Tensor:
        outputs = self.model(**batch)
        self._kept.append(self._keep(outputs))
        return outputs.loss

    @property
    def earlier_bytes(self) -> int:
        logits = (each if isinstance(each, torch.Tensor) else each.logits for each in self._kept)
        return sum(each.nbytes for each in logits)


def looped(name: str, held: HeldUntil, vocab_size: int | None = None, **options: Any) -> tuple[Loop, CompileEngine]:
    torch.manual_seed(0)
    changes = {} if vocab_size is None else {"vocab_size": vocab_size}
    model = ZOO[name].build(**CHANGES.get(name, {"num_hidden_layers": 4}), **changes).train()
    plan = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain", **options}
    engine = optimize(model, **plan)
    assert isinstance(engine, CompileEngine)
    return Loop(model, held), engine


@pytest.mark.parametrize("held", nightly([*HeldUntil], but=[HeldUntil.NEXT_FORWARD]))
@pytest.mark.parametrize("unit", nightly([LAYER, MODEL], but=[LAYER]))
@pytest.mark.parametrize("name", nightly(NAMES, but=["llama"]))
def test_a_step_takes_what_is_predicted(name: str, unit: str, held: HeldUntil) -> None:
    loop, engine = looped(name, held, memory_opt_unit=unit, memory_opt_level=1)
    batch = ZOO[name].batch(4, 24)
    loop.step(batch)
    assert engine.predictor is not None
    assert engine.predictor.footprint().outputs > 0 or held == HeldUntil.BACKWARD
    loop.step(batch)
    measured = loop.step(batch)
    assert engine.predictor.tape.held_outputs.until == held
    assert engine.predictor.activations() == pytest.approx(measured, rel=5e-3)


@pytest.mark.parametrize(
    ("keep", "count"),
    nightly([(lambda outputs: outputs.logits.detach(), 1), (lambda outputs: outputs, 2)]),
    ids=["a detached view", "the last two"],
)
def test_loops_that_keep_something_else(keep: Callable[[Any], Any], count: int) -> None:
    loop, engine = looped("llama", HeldUntil.NEXT_FORWARD, memory_opt_level=1)
    loop = Keeping(loop.model, keep, count)
    batch = ZOO["llama"].batch(4, 24)
    for _ in range(4):
        loop.step(batch)
    measured = loop.step(batch)
    assert engine.predictor is not None
    held = engine.predictor.tape.held_outputs
    assert held.until == HeldUntil.NEXT_FORWARD
    assert engine.predictor.activations() + held.more == pytest.approx(measured, rel=5e-3)


def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that it returns copies of its outputs, as accelerate does under autocast."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        changed = {name: each.double() if each.dim() else each for name, each in outputs.items()}
        return type(outputs)(**changed)

    return wrapped


@pytest.mark.parametrize("held", nightly([*HeldUntil], but=[HeldUntil.NEXT_FORWARD]))
def test_copies_that_a_wrapper_returns(held: HeldUntil) -> None:
    loop, engine = looped("llama", held, memory_opt_level=1)
    loop.model.forward = in_double(loop.model.forward)
    batch = ZOO["llama"].batch(4, 24)
    loop.step(batch)
    loop.step(batch)
    loop.step(batch)
    measured = loop.step(batch)
    assert engine.predictor is not None
    assert engine.predictor.tape.held_outputs.until == held
    assert engine.predictor.activations() == pytest.approx(measured, rel=5e-3)
    assert not copy.deepcopy(loop.model)._forward_hooks and loop.model._forward_hooks
    engine.detach()
    assert not loop.model._forward_hooks


def test_the_header_says_that_outputs_may_be_held() -> None:
    loop, engine = looped("llama", HeldUntil.BACKWARD, memory_opt_level=1)
    loop.step(ZOO["llama"].batch(64, 64))
    table = engine.plans()
    assert table is not None
    assert any("of outputs that the loop may hold" in line for line in table.header)
    assert engine.predictor is not None
    assert engine.predictor.footprint().outputs == 0


@in_turn
def test_hidden_states_that_a_backward_still_needs_are_not_held_by_the_loop() -> None:
    loop, engine = looped("llama", HeldUntil.BACKWARD, memory_opt_level=1)
    batch = {**ZOO["llama"].batch(4, 24), "output_hidden_states": True}
    loop.step(batch)
    loop.step(batch)
    assert engine.predictor is not None
    assert engine.predictor.tape.held_outputs.until == HeldUntil.BACKWARD


LARGE, WORDS = (16, 64), 16384


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Footprint:
    """Returns the footprint of a step without a plan in a loop that holds outputs, with constant process memory."""
    hold_still(monkeypatch)
    loop, engine = looped("llama", HeldUntil.NEXT_FORWARD, vocab_size=WORDS)
    loop.step(ZOO["llama"].batch(*LARGE))
    assert engine.predictor is not None
    footprint = engine.predictor.footprint()
    engine.detach()
    return footprint


@in_turn
@pytest.mark.parametrize("held", [HeldUntil.BACKWARD, HeldUntil.NEXT_FORWARD])
def test_a_budget_has_room_for_outputs_as_long_as_they_may_be_held(free: Footprint, held: HeldUntil) -> None:
    batch = ZOO["llama"].batch(*LARGE)
    # Some layers must be recomputed while outputs are held.
    budget = free.peak - free.outputs // 32
    loop, engine = looped("llama", held, vocab_size=WORDS, memory_opt_budget=f"{budget / 2**20:.3f}MiB")
    with log_lines() as lines:
        for _ in range(3):
            loop.step(batch)
    solved_again = [line for line in lines if "holds less than assumed: solving again" in line]
    assert len(solved_again) == (held == HeldUntil.BACKWARD)
    assert engine.predictor is not None
    assert engine.predictor.tape.held_outputs.until == held
    assert engine.predictor.footprint().peak <= budget
    engine.detach()


@in_turn
@pytest.mark.parametrize("held", [HeldUntil.BACKWARD, HeldUntil.NEXT_FORWARD])
def test_a_budget_that_only_fits_without_outputs(free: Footprint, held: HeldUntil) -> None:
    batch = ZOO["llama"].batch(*LARGE)
    budget = free.peak - free.outputs // 2
    loop, engine = looped("llama", held, vocab_size=WORDS, memory_opt_budget=f"{budget / 2**20:.3f}MiB")
    with log_lines() as lines:
        loop.step(batch)
        assert any("no plan fits while it holds them" in line for line in lines)
        if held:
            with pytest.raises(DoesNotFitError, match="even with full recompute"):
                loop.step(batch)
        else:
            loop.step(batch)
            assert engine.predictor is not None
            assert engine.predictor.footprint().peak <= budget
    engine.detach()


class HoldingTrainer(MemOptTrainer):
    """Keeps the outputs of its last forward, as a metric does."""

    outputs: Any = None

    def compute_loss(self, model: torch.nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.outputs = model(**inputs)
        return self.outputs.loss


@in_turn
@pytest.mark.parametrize("held", [HeldUntil.BACKWARD, HeldUntil.NEXT_FORWARD])
def test_a_trainer_is_watched_too(tmp_path: Path, held: HeldUntil) -> None:
    options = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}
    kind = HoldingTrainer if held else MemOptTrainer
    trainer = make(tmp_path, "llama", trainer=kind, max_steps=3, memory_opt_level=1, **options)
    trainer.train()
    assert trainer.memopt.engine.predictor.tape.held_outputs.until == held


def forwards(watch: OutputsWatch, hold: Callable[[Any], object]) -> Iterator[HeldUntil]:
    """Run two steps of a loop that keeps `hold(outputs)`, and yield the watch's state before and after each step."""
    kept = None
    for _ in range(2):
        watch.begin()
        yield watch.held.until
        weight = torch.ones(3, requires_grad=True)
        outputs = {"logits": weight * 2}
        watch.watch(outputs)
        loss = outputs["logits"].sum()
        kept = hold(outputs)
        del outputs
        loss.backward()
        yield watch.held.until
    del kept


def test_what_a_loop_keeps_is_seen_when_its_next_forward_begins() -> None:
    assumed, until = HeldUntil.NEXT_FORWARD, HeldUntil.BACKWARD
    assert [*forwards(OutputsWatch(torch.nn.Linear(1, 1), assumed), lambda outputs: None)] == [
        assumed,
        until,
        until,
        until,
    ]
    assert [*forwards(OutputsWatch(torch.nn.Linear(1, 1), until), lambda outputs: outputs["logits"])] == [
        until,
        until,
        assumed,
        assumed,
    ]
