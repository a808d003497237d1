"""Optimizer steps during the backward give the same weights with fewer gradients at a time."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocated
from transformers import TrainerCallback, TrainingArguments

from optimum_memopt import MemOptError, optimize, plan
from optimum_memopt.compat.transformers import GRADIENT_NORM
from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.options import LAYER
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared import released_gradients
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.sizes import Budget
from tests.compiled import hold_still
from tests.gradients import Batch
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_layers import Perceptrons
from tests.train.test_step_memory import EXACT
from tests.trainer_runs import arguments, build, log_lines, make, weights

LAYERS, STEPS = 4, 4
COMPILED = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}
RELEASED = {**COMPILED, "memory_opt_level": 1, "memory_opt_release_gradients": True}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": partial(torch.optim.AdamW, fused=True),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "loop": partial(torch.optim.AdamW, foreach=False),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
}


def deep(name: str, **changes: Any) -> torch.nn.Module:
    return ZOO[name].build(**ZOO[name].deep(LAYERS), **changes)


def grouped(model: torch.nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns an optimizer with groups: no weight decay for biases and norms, a low learning rate for embeddings."""
    named = dict(model.named_parameters())
    slow = [name for name in named if "embed" in name]
    flat = [name for name, each in named.items() if each.dim() < 2 and name not in slow]
    rest = [name for name in named if name not in (*slow, *flat)]
    groups = [
        {"params": [named[name] for name in rest], "weight_decay": 0.1},
        {"params": [named[name] for name in flat], "weight_decay": 0.0},
        {"params": [named[name] for name in slow], "lr": 1e-4},
    ]
    return make_optimizer([group for group in groups if group["params"]], lr=1e-3)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[torch.Tensor]:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


CASES = [
    *(("llama", kind) for kind in OPTIMIZERS),
    *((name, "fused") for name in ("roberta-mlm", "t5", "gpt2", "vit")),
]


@pytest.mark.parametrize(("name", "kind"), nightly(CASES, but=[("llama", "fused")]))
def test_weights_are_those_of_a_step_behind_the_backward(name: str, kind: str) -> None:
    model, batches = deep(name), [ZOO[name].batch(seed=seed) for seed in range(STEPS)]
    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    expecting = grouped(plain, OPTIMIZERS[kind])
    if name != "llama":
        # Sums round differently when compiled by layers.
        optimize(plain, optimizer=expecting, **{**RELEASED, "memory_opt_release_gradients": False})
    expected = trained(plain, expecting, batches)
    torch.manual_seed(0)
    optimizer = grouped(model, OPTIMIZERS[kind])
    engine = optimize(model, optimizer=optimizer, **RELEASED)
    found = trained(model, optimizer, batches)
    assert all(map(torch.equal, found, expected))
    theirs = plain.state_dict()
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, theirs[key])] == []
    engine.detach()


@in_turn
def test_a_model_with_tied_weights_that_some_steps_skip_a_layer_of() -> None:
    """Parameters that a step did not reach are treated as by a step after the backward."""
    name = "llama"

    def run(is_released: bool) -> dict[str, torch.Tensor]:
        model = deep(name, tie_word_embeddings=True)
        optimizer = grouped(model, OPTIMIZERS["fused"])
        engine = optimize(model, optimizer=optimizer, **{**RELEASED, "memory_opt_release_gradients": is_released})
        for step in range(STEPS):
            model.model.layers[2].requires_grad_(step % 2 == 0)
            trained(model, optimizer, [ZOO[name].batch(seed=step)])
        engine.detach()
        return weights(model)

    expected = run(False)
    assert [key for key, value in run(True).items() if not torch.equal(value, expected[key])] == []


@pytest.mark.parametrize("name", nightly(["llama", "roberta-mlm", "t5"], but=["llama"]))
def test_the_peak_has_the_gradients_of_one_layer(name: str) -> None:
    peaks = {}
    for is_released in (False, True):
        model, batch = deep(name), ZOO[name].batch(2, 8)
        optimizer = OPTIMIZERS["fused"](model.parameters())
        options = {**RELEASED, "memory_opt_release_gradients": is_released}
        engine = optimize(model, optimizer=optimizer, **options)
        trained(model, optimizer, [batch, batch])
        forward, saved, loss = allocated(lambda model=model, batch=batch: model(**batch).loss)
        backward, _, _ = allocated(loss.backward)
        peaks[is_released] = max(forward, saved + backward)
        footprint = engine.predictor.footprint()
        assert footprint.activations == pytest.approx(peaks[is_released], **EXACT)
        assert (footprint.gradients > 0) != is_released
        engine.detach()
    # The peak of a T5 of this size is in the forward.
    assert name == "t5" or peaks[True] < 0.8 * peaks[False]


@in_turn
def test_a_budget_counts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget takes released gradients into account: nothing fits if all gradients are held to the backward's end."""
    hold_still(monkeypatch)
    model, batch = deep("llama"), ZOO["llama"].batch(2, 8)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    engine = optimize(model, optimizer=optimizer, **RELEASED)
    trained(model, optimizer, [batch])
    footprint = engine.predictor.footprint()
    engine.detach()
    budget = footprint.peak + footprint.activations // 10
    for is_released in (True, False):
        selection = Selection(budget=Budget(f"{budget} bytes", budget))
        engine = CompileEngine(selection, "aot_eager", loss="plain", unit=LAYER, releases_gradients=is_released)
        engine.run = lambda: Run(optimizer, has_trainer=False)
        engine.attach(model)
        if is_released:
            trained(model, optimizer, [batch])
            assert engine.predictor.footprint().peak <= budget
        else:
            with pytest.raises(DoesNotFitError):
                trained(model, optimizer, [batch])
        engine.detach()


class Half(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == 2
        return control


NAME = "roberta-classification"
CLIPS_NOTHING = {"max_grad_norm": 0.0, "weight_decay": 0.1, "warmup_steps": 2, "max_steps": 6, "logging_steps": 1}


def run_of(folder: Path, plain: bool, resume: str | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    trainer = make(folder, NAME, plain, **CLIPS_NOTHING, **({} if plain else RELEASED), **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@in_turn
def test_a_trainer_resumes_and_loads_its_best_model(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    best = {**saving, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    expected = run_of(tmp_path / "plain", True, **best)
    with log_lines() as lines:
        whole = run_of(tmp_path / "whole", False, **best)
    # Trainer reads the norm by clipping to infinity.
    assert not any("clip_grad_norm_" in line for line in lines)
    run_of(tmp_path / "half", False, callbacks=[Half()], **best)
    resumed = run_of(tmp_path / "half", False, str(tmp_path / "half" / "checkpoint-2"), **best)
    for trainer in (whole, resumed):
        theirs = weights(expected.model)
        assert [key for key, value in weights(trainer.model).items() if not torch.equal(value, theirs[key])] == []
        norms, plain = (
            [entry["grad_norm"] for entry in each.state.log_history if "grad_norm" in entry]
            for each in (trainer, expected)
        )
        assert norms == pytest.approx(plain, rel=1e-5)
        if hasattr(trainer, GRADIENT_NORM):
            assert len(norms) == 6 and min(norms) > 0
        assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())
    assert whole.state.best_metric == expected.state.best_metric


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, r"--max_grad_norm 1.0 \(Trainer's default is 1.0\)"),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, "--gradient_accumulation_steps 2"),
        ({"max_grad_norm": 0.0, "memory_opt_unit": "model"}, "--memory_opt_unit model"),
        ({"max_grad_norm": 0.0, "memory_opt_on_oom": "replan"}, "--memory_opt_on_oom replan"),
        ({"max_grad_norm": 0.0, "memory_opt_engine": "ort"}, "compile engine"),
    ],
)
def test_a_trainer_that_needs_all_gradients_is_refused(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(MemOptError, match=line):
        make(tmp_path, NAME, **{**RELEASED, **changes})


@pytest.mark.parametrize("scaling", [{"fp16": True}, {"world_size": 2}])
def test_arguments_that_this_machine_cannot_make_are_refused(tmp_path: Path, scaling: dict[str, Any]) -> None:
    args = arguments(TrainingArguments, tmp_path, max_grad_norm=0.0)

    class Given:
        def __getattr__(self, name: str) -> Any:
            return scaling.get(name, getattr(args, name))

    with pytest.raises(MemOptError, match="fp16|2 processes"):
        released_gradients.check_arguments(Given())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 2: gradients are held until the last"),
        ({"fp16": True}, "fp16: a loss scaler reads all gradients"),
        ({"fsdp": 8}, "fsdp 8: ranks exchange gradients"),
    ],
)
def test_a_planned_step_that_needs_all_gradients_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(MemOptError, match=f"^release_gradients with {line}"):
        plan(deep("llama"), batch_size=2, seq_len=8, device="h100", release_gradients=True, **changes)


class OfAll(torch.optim.AdamW):
    """A third-party optimizer."""


def test_a_loop_that_needs_all_gradients_is_refused() -> None:
    model, batch = build("small"), ZOO["roberta-classification"].batch()
    with pytest.raises(MemOptError, match="needs the optimizer"):
        optimize(model, **RELEASED)
    with pytest.raises(MemOptError, match="gradient_accumulation"):
        optimize(model, optimizer=torch.optim.SGD(model.parameters()), gradient_accumulation=True, **RELEASED)
    with pytest.raises(MemOptError, match="OfAll, which may read several parameters"):
        optimize(model, optimizer=OfAll(model.parameters()), **RELEASED)
    assert "loss" in model(**batch)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@in_turn
def test_a_model_is_not_kept_alive() -> None:
    model, batch = deep("llama"), ZOO["llama"].batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimize(model, optimizer=optimizer, **RELEASED)
    trained(model, optimizer, [batch])
    held = weakref.ref(model.model.embed_tokens.weight)
    del model, optimizer
    gc.collect()
    assert held() is None


@in_turn
def test_a_second_backward_before_the_step_is_refused() -> None:
    model, batch = deep("llama"), ZOO["llama"].batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = optimize(model, optimizer=optimizer, **RELEASED)
    model(**batch).loss.backward()
    with pytest.raises(MemOptError, match=r"was computed twice before the optimizer's step"):
        model(**batch).loss.backward()
    engine.detach()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_clipping_is_warned_of() -> None:
    model, other, batch = Perceptrons(4), torch.nn.Linear(4, 4), {"x": torch.randn(4, 32)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    original = torch.nn.utils.clip_grad._get_total_norm
    other(torch.randn(2, 4)).sum().backward()

    def warned(*clipped: torch.nn.Module) -> int:
        with log_lines() as lines:
            model(**batch).loss.backward()
            for each in clipped:
                torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
        return len([line for line in lines if "clipping does not reach the gradients that" in line])

    engine = optimize(model, optimizer=optimizer, **RELEASED)
    assert (warned(), warned(other), warned(model), warned(model)) == (0, 0, 1, 0)
    engine.detach()
    assert torch.nn.utils.clip_grad._get_total_norm is original and not warned(model)


@pytest.mark.parametrize("layers", nightly([2, 4], but=[2]))
def test_layers_in_one_graph_are_warned_of(layers: int) -> None:
    model, batch = Perceptrons(layers), {"x": torch.randn(4, 32)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with log_lines() as lines:
        optimize(model, optimizer=optimizer, **RELEASED)
        trained(model, optimizer, [batch, batch])
    assert len([line for line in lines if "saves little here: the layers of Perceptrons" in line]) == (layers < 4)


class WithUnused(torch.nn.Module):
    """A model whose first parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.model = torch.nn.Linear(4, 4), deep("llama")

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def test_a_closure_steps_each_parameter_once() -> None:
    """With a closure, the backward runs within the optimizer's own step."""
    torch.manual_seed(0)
    model, batches = WithUnused(), [ZOO["llama"].batch(seed=seed) for seed in range(3)]
    plain = copy.deepcopy(model)

    def end(model: torch.nn.Module, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if options:
            optimize(model, optimizer=optimizer, **options)

        def closure(batch: Batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            return loss

        for batch in batches:
            optimizer.step(partial(closure, batch))
        return model.state_dict()

    expected = end(plain, {})
    assert [key for key, value in end(model, RELEASED).items() if not torch.equal(value, expected[key])] == []


def in_a_loop(between: Callable[[torch.nn.Module, torch.optim.Optimizer], Any]) -> list[str]:
    """Returns the warnings of a loop that does something between backward and step."""
    model = deep("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = optimize(model, optimizer=optimizer, **RELEASED)
    with log_lines() as lines:
        for seed in range(2):
            model(**ZOO["llama"].batch(seed=seed)).loss.backward()
            between(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    engine.detach()
    return [line for line in lines if "has released" in line or "has stepped" in line]


def test_settings_that_change_behind_the_backward_are_warned_of() -> None:
    def set_rate(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    (line,) = in_a_loop(set_rate)
    assert line.startswith("lr of the optimizer changed between backward and step")
    assert in_a_loop(lambda *_: None) == []


@pytest.mark.parametrize("clip", ["value", "norm in two calls"])
def test_other_ways_to_clip_are_warned_of(clip: str) -> None:
    def clipped(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
        parameters = list(model.parameters())
        if clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, 0.1)
        else:
            gradients = [each.grad for each in parameters if each.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)

    (line,) = in_a_loop(clipped)
    assert "clipping does not reach the gradients" in line


def test_a_loss_scaler_is_refused_before_the_first_update() -> None:
    model = deep("llama")
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler.scale
    engine = optimize(model, optimizer=optimizer, **RELEASED)
    loss = model(**ZOO["llama"].batch()).loss
    with pytest.raises(MemOptError, match=r"with a GradScaler: .* train in bfloat16"):
        torch.amp.GradScaler("cpu").scale(loss).backward()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    engine.detach()
    assert torch.amp.GradScaler.scale is scale
