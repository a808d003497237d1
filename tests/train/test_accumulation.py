"""The backward of a graph of the whole forward accumulates gradients in place, one after the other."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocated

from optimum_memopt import optimize, plan
from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.options import MODEL
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import Budget
from tests.compiled import DROPOUT, hold_still
from tests.gradients import assert_bitwise_same_step, assert_same_step
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import EXACT
from tests.trainer_runs import make, weights

NAME = "roberta-classification"
AS_ONE = {
    "memory_opt_engine": "compile",
    "memory_opt_compiler": "aot_eager",
    "memory_opt_loss": "plain",
    "memory_opt_unit": "model",
}
CASES = [
    ("llama", ""),
    ("llama", "1"),
    ("roberta-classification", "1"),
    ("bert-classification", ""),
    ("deberta-v2-classification", "1"),
]
BY_DEFAULT = [("llama", "1")]


def options_of(level: str, **changes: Any) -> dict[str, Any]:
    return {**AS_ONE, **({"memory_opt_level": int(level)} if level else {}), **changes}


def pair(name: str, level: str = "1", **changes: Any) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """Returns a model under an engine for gradient accumulation, its plain copy, and the engine."""
    model = ZOO[name].build()
    plain = copy.deepcopy(model)
    return model, plain, optimize(model, gradient_accumulation=True, **options_of(level, **changes))


@pytest.mark.parametrize(("name", "level"), nightly(CASES, but=BY_DEFAULT))
def test_gradients_of_micro_batches_are_plain_pytorchs(name: str, level: str) -> None:
    model, plain, engine = pair(name, level)
    batches = [ZOO[name].batch(2, length, seed=length) for length in (8, 12, 8)]
    for _ in range(2):
        assert_bitwise_same_step(model, plain, *batches)
    engine.detach()


@in_turn
@pytest.mark.parametrize("level", nightly(["", "1"], but=["1"]))
def test_compiled_backwards_add_gradients_before_they_reuse_memory(level: str) -> None:
    model, plain, engine = pair("llama", level, memory_opt_compiler="inductor")
    batches = [ZOO["llama"].batch(2, length, seed=length) for length in (8, 12, 8)]
    for _ in range(2):
        assert_same_step(model, plain, *batches)
    engine.detach()


@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
def test_the_second_micro_batch_holds_one_set_of_gradients(compiler: str) -> None:
    model, batch = ZOO["llama"].build(hidden_size=128, intermediate_size=512), ZOO["llama"].batch(1, 4)
    plain = copy.deepcopy(model)
    engine = optimize(model, gradient_accumulation=True, **options_of("1", memory_opt_compiler=compiler))
    peaks = []
    for each in (plain, model):
        for _ in range(2):
            each(**batch).loss.backward()
        forward, saved, loss = allocated(lambda each=each: each(**batch).loss)
        backward, _, _ = allocated(loss.backward)
        peaks.append(max(forward, saved + backward))
    footprint = engine.predictor.footprint(gradient_accumulation=True)
    if compiler == "aot_eager":
        assert footprint.activations == pytest.approx(peaks[1], **EXACT)
    assert footprint.accumulated == sum(each.grad.nbytes for each in model.parameters())
    assert peaks[1] <= peaks[0] < footprint.accumulated
    engine.detach()


@in_turn
def test_a_planned_step_is_the_real_one() -> None:
    def predicted(table: PlanTable) -> str:
        return next(line for line in table.header if line.startswith("Predicted for the first batch:"))

    model, batch = ZOO["llama"].build(hidden_size=128, intermediate_size=512), ZOO["llama"].batch(1, 4)
    wanted = {"level": 1, "compiler": "aot_eager", "loss": "plain"}
    planned = plan(model, example_inputs=batch, gradient_accumulation_steps=2, **wanted)
    engine = optimize(model, gradient_accumulation=True, **options_of("1"))
    model(**batch).loss.backward()
    assert predicted(planned.table) == predicted(engine.plans())
    engine.detach()


@in_turn
def test_a_budget_counts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)
    model, batch = ZOO["llama"].build(), ZOO["llama"].batch(2, 8)
    engine = optimize(model, gradient_accumulation=True, **options_of("1"))
    model(**batch).loss.backward()
    footprint = engine.predictor.footprint(gradient_accumulation=True)
    engine.detach()
    budget = footprint.peak + footprint.activations // 10
    for fits in (True, False):
        selection = Selection(
            budget=Budget(f"{budget if fits else budget // 2} bytes", budget if fits else budget // 2)
        )
        engine = CompileEngine(selection, "aot_eager", loss="plain", unit=MODEL)
        engine.run = lambda: Run(gradient_accumulation=True, has_trainer=False)
        engine.attach(model)
        if fits:
            model(**batch).loss.backward()
            assert engine.predictor.footprint().peak <= budget
        else:
            with pytest.raises(DoesNotFitError):
                model(**batch)
        engine.detach()


def test_hooks_see_their_gradients() -> None:
    """Hooks before and behind the accumulation of a gradient are called as by plain PyTorch."""

    def seen(model: torch.nn.Module) -> list[torch.Tensor]:
        before, behind, of_node = [], [], []
        first, second, third, *_ = (each for each in model.parameters() if each.dim() == 2)
        # DDP and DeepSpeed put their hooks there.
        node = third.view_as(third).grad_fn.next_functions[0][0]
        handles = (
            first.register_hook(lambda gradient: before.append(gradient.clone()) or 2 * gradient),
            second.register_post_accumulate_grad_hook(lambda parameter: behind.append(parameter.grad.clone())),
            node.register_hook(lambda *_: of_node.append(third.grad.clone())),
        )
        for seed in range(3):
            model(**ZOO["llama"].batch(2, 8, seed=seed)).loss.backward()
        for handle in handles:
            handle.remove()
        assert len(before) == len(behind) == len(of_node) == 3
        return [*before, *behind, *of_node, *(each.grad for each in model.parameters())]

    model, plain, engine = pair("llama")
    assert all(map(torch.equal, seen(model), seen(plain)))
    engine.detach()


def test_other_ways_to_compute_gradients() -> None:
    """`torch.autograd.grad` adds nothing, `backward(inputs=...)` adds these only, and a second backward adds again."""

    def computed(model: torch.nn.Module) -> list[torch.Tensor | None]:
        parameters = list(model.parameters())
        batch = ZOO["llama"].batch(2, 8)
        model(**batch).loss.backward()
        returned = torch.autograd.grad(model(**batch).loss, parameters)
        model(**batch).loss.backward(inputs=parameters[2:4])
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return [*returned, *(each.grad for each in parameters)]

    model, plain, engine = pair("llama")
    assert all(map(torch.equal, computed(model), computed(plain)))
    engine.detach()


@in_turn
def test_gradients_of_another_kind_are_left_to_autograd() -> None:
    """Gradients that the loop has set itself: of another layout, and held by the loop."""

    def computed(model: torch.nn.Module) -> list[torch.Tensor | None]:
        batch, held = ZOO["llama"].batch(2, 8), []
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full(parameter.shape[::-1], 0.5).T if parameter.dim() == 2 else None
            held += [parameter.grad] if number == 1 else []
        for _ in range(2):
            model(**batch).loss.backward()
        return [*held, *(each.grad for each in model.parameters())]

    model, plain, engine = pair("llama")
    assert all(map(torch.equal, computed(model), computed(plain)))
    engine.detach()


@in_turn
def test_several_forwards_before_one_backward() -> None:
    """The gradients of several forwards are added one after the other, in another order than autograd's."""

    def computed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        for seed in range(2):
            losses = [model(**ZOO["llama"].batch(2, 8, seed=2 * seed + each)).loss for each in range(2)]
            sum(losses).backward()
        return {name: each.grad for name, each in model.named_parameters()}

    model, plain, engine = pair("llama")
    found, expected = computed(model), computed(plain)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    engine.detach()


@pytest.mark.parametrize("changes", nightly([{}, DROPOUT], but=[DROPOUT]))
def test_a_trainer_accumulates_as_a_stock_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Also in the last step of an epoch, which has fewer micro-batches."""

    def run(folder: str, plain: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        steps = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_steps": -1, "weight_decay": 0.1}
        model = ZOO[NAME].build(**changes)
        trainer = make(tmp_path / folder, NAME, plain, model=model, **steps, **({} if plain else options_of("1")))
        trainer.train()
        return weights(trainer.model)

    found, expected = run("ours", False), run("plain", True)
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
