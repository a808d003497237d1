import contextlib
import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments, PlanStatsCallback, optimize
from optimum_memopt.callbacks import reporting
from optimum_memopt.engines.api.run import Run
from optimum_memopt.engines.compile.capture import variants
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.predict.step_limit import StepLimit, TracedBatch
from optimum_memopt.errors import DoesNotFitError, MemOptError, UnsupportedModelError
from optimum_memopt.sizes import parse_budget
from tests.gradients import accumulate, assert_bitwise_same_step
from tests.model_zoo import SMALL as CASE
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.trainer_runs import log_lines

WIDTH = 512
OPTIONS = {
    "compile": {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"},
    "ort": {"memory_opt_engine": "ort", "ort_fallback": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_engine_and_table_are_said_as_in_a_trainer(name, capsys):
    model = CASE.build("eager")
    engine = optimize(model, memory_opt_level=1, **OPTIONS[name])
    assert f"[memopt] engine {name} (requested)\n" in capsys.readouterr().err
    accumulate(model, [CASE.batch()])
    said = capsys.readouterr().err
    assert said.count(f"[memopt] {engine.plans()}\n") == 1
    assert ("Predicted peak of a step" in said) == (name == "compile")
    accumulate(model, [CASE.batch(seed=1)])
    assert "Memory plans" not in capsys.readouterr().err
    engine.detach()


def test_the_log_level_decides(capsys):
    model = CASE.build("eager")
    engine = optimize(model, memory_opt_level=1, memory_opt_log_level="warning", **OPTIONS["compile"])
    accumulate(model, [CASE.batch()])
    assert "[memopt]" not in capsys.readouterr().err
    assert engine.plans().enabled
    engine.detach()


def test_function_transforms_run_in_plain_pytorch() -> None:
    """Per-sample gradients by `torch.func` run in plain PyTorch, interleaved with the engine's steps."""
    ours, plain, batch = CASE.build("eager"), CASE.build("eager"), CASE.batch()

    def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor], sample: dict[str, torch.Tensor]) -> torch.Tensor:
            one = {name: value.unsqueeze(0) for name, value in sample.items()}
            return torch.func.functional_call(model, parameters, (), one).loss

        parameters = {name: each.detach() for name, each in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")(parameters, batch)

    engine = optimize(ours, memory_opt_level=1, **OPTIONS["compile"])
    with log_lines() as lines:
        found = gradients_of(ours), gradients_of(ours)
    expected = gradients_of(plain)
    for each in found:
        assert all(torch.equal(each[name], gradient) for name, gradient in expected.items())
    assert [line for line in lines if "torch.func (grad, vmap, jvp) run in plain PyTorch" in line] == lines
    assert_bitwise_same_step(ours, plain, batch)
    assert engine.plans().enabled
    engine.detach()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("plan", [{}, {"memory_opt_level": 1}])
def test_a_forward_that_is_replaced_behind_the_engine_is_said(name: str, plan: dict[str, int]) -> None:
    """A forward that replaces the engine's (as some fused kernels do) is reported before weights change, unless it
    calls the engine's."""
    for calls in (True, False):
        model, batch = CASE.build("eager"), CASE.batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = optimize(model, optimizer=optimizer, **OPTIONS[name], **plan)
        own = model.forward if calls else partial(type(model).forward, model)
        model.forward = lambda own=own, **inputs: own(**inputs)
        # There are no gradients yet.
        optimizer.step()
        model(**batch).loss.backward()
        before = [each.clone() for each in model.parameters()]
        with log_lines() as lines:
            if plan and not calls:
                with pytest.raises(UnsupportedModelError, match="was replaced after the .* engine"):
                    optimizer.step()
                assert all(map(torch.equal, before, model.parameters()))
            else:
                optimizer.step()
                optimizer.step()
        assert sum("was replaced after" in line for line in lines) == (not plan and not calls)
        engine.detach()


@pytest.mark.parametrize("plan", [{"memory_opt_level": 1}, {"memory_opt_budget": "3GiB"}], ids=str)
def test_a_first_step_under_a_dispatch_mode_runs_in_plain_pytorch(plan: dict[str, Any]) -> None:
    """Torch compiles nothing while operations are counted; the first step without that has the plan."""
    ours, plain, batch = CASE.build("eager"), CASE.build("eager"), CASE.batch()
    engine = optimize(ours, **plan, **OPTIONS["compile"])
    with log_lines() as lines:
        for _ in range(2):
            with FlopCounterMode(display=False):
                assert_bitwise_same_step(ours, plain, batch)
        assert engine.plans() is None
        assert_bitwise_same_step(ours, plain, batch)
    assert sum("under FlopCounterMode run in plain PyTorch" in line for line in lines) == 1
    assert engine.plans().plans and not any("NOT under a plan" in line for line in lines)
    engine.detach()


def test_an_optimizer_of_several_models_may_train_one_of_them_first() -> None:
    models = [CASE.build("eager").train() for _ in range(2)]
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    for model in models:
        optimize(model, optimizer=optimizer, memory_opt_level=1, **OPTIONS["compile"])
    for trained in (models[:1], models):
        for model in trained:
            model(**CASE.batch()).loss.backward()
        optimizer.step()


class Scripted(torch.nn.Module):
    """A residual layer, whose activation may be TorchScript."""

    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = torch.nn.Linear(8, 8), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.activation(self.linear(x))


def test_modules_of_torchscript_inside_a_model() -> None:
    """A model may have them; it must not be one."""
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*(Scripted(torch.jit.script(torch.nn.GELU())) for _ in range(4)))
    plain = torch.nn.Sequential(*(Scripted(torch.nn.GELU()) for _ in range(4)))
    plain.load_state_dict(ours.state_dict())
    optimize(ours, memory_opt_level=1, **OPTIONS["compile"])
    x = torch.randn(3, 8)
    for model in (ours, plain):
        model(x).square().mean().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with pytest.raises(MemOptError, match="does not support TorchScript models, .*pass the module that torch.jit"):
        optimize(torch.jit.script(Scripted(torch.nn.GELU())), **OPTIONS["compile"])


@pytest.mark.parametrize("plan", [{}, {"memory_opt_level": 1}], ids=str)
def test_a_batched_backward(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*(Scripted(torch.nn.GELU()) for _ in range(4)))
    plain, x = copy.deepcopy(ours), torch.randn(3, 8)
    optimize(ours, **plan, **OPTIONS["compile"])
    vectors = torch.randn(5, 3, 8)
    found, expected = (
        torch.autograd.grad(model(x), list(model.parameters()), vectors, is_grads_batched=True)
        for model in (ours, plain)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_hooks_of_an_optimizer_run_beside_the_engines() -> None:
    """An optimizer's hooks run alongside the engine's, which do not remove themselves while others are pending."""
    models = [CASE.build("eager").train() for _ in range(2)]
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    options = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
    for model in models:
        optimize(model, optimizer=optimizer, **options)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        for model in models:
            model(**CASE.batch()).loss.backward()
        optimizer.step()
    assert len(calls) == 2


def test_a_notebook_shows_the_table_of_a_trainer(tmp_path):
    data = [{name: value[0] for name, value in CASE.batch(1).items()}] * 2
    args = MemOptTrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **OPTIONS["compile"]
    )
    trainer = MemOptTrainer(model=CASE.build("eager"), args=args, train_dataset=data)
    assert "first training step" in trainer.memopt._repr_html_()
    trainer.train()
    shown = trainer.memopt._repr_html_()
    assert trainer.memopt.table._repr_html_() in shown
    assert f"measured peak {trainer.memopt.measured_peak_mib:.1f} MiB" in shown


@pytest.mark.parametrize("steps", [1, 2])
def test_a_callback_beside_optimize_does_not_show_the_table_again(tmp_path, capsys, steps):
    model = CASE.build("eager")
    engine = optimize(model, memory_opt_level=1, **OPTIONS["compile"])
    data = [{name: value[0] for name, value in CASE.batch(1).items()}] * 16
    args = TrainingArguments(str(tmp_path), max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True)
    callback = PlanStatsCallback()
    Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    said = capsys.readouterr().err
    assert said.count(str(engine.plans())) == 1
    assert callback.table is engine.plans() and "measured peak of the run" in said
    engine.detach()


def test_the_peak_of_a_run_is_in_one_line_and_no_stack_is_walked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reporting, "find_trainer", lambda state: pytest.fail("attach has named the Trainer"))
    data = [{name: value[0] for name, value in CASE.batch(1).items()}] * 4
    flags = {"log_memory_phases": True, "log_input_density": True, "group_by_complexity": True, **OPTIONS["compile"]}
    args = MemOptTrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **flags
    )
    MemOptTrainer(model=CASE.build("eager"), args=args, train_dataset=data).train()
    said = capsys.readouterr().err
    assert said.count("measured peak of the run") == 1
    assert "highest measured phase: up to " in said


@in_turn
@pytest.mark.parametrize(
    "plan",
    nightly([{"memory_opt_level": 1}, {"memory_opt_budget": "100MiB"}], but=[{"memory_opt_level": 1}]),
    ids=["level", "refused"],
)
@pytest.mark.parametrize("unit", nightly(["model", "layer"], but=["layer"]))
def test_what_was_compiled_is_freed_with_the_engine(unit, plan):
    def held() -> list[int]:
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        return [kinds.count(PartitionedGraph), kinds.count(fx.Node)]

    # Graphs of other tests' fixtures.
    graphs, nodes = held()
    model = ZOO["llama"].build("eager")
    engine = optimize(model, memory_opt_unit=unit, **plan, **OPTIONS["compile"])
    with contextlib.nullcontext() if "memory_opt_level" in plan else pytest.raises(DoesNotFitError):
        accumulate(model, [ZOO["llama"].batch()])
    engine.detach()
    del engine, model
    # A process may re-plan a run for other memory, or train another model of the same class.
    now = held()
    assert now[0] <= graphs and now[1] <= nodes


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)])
def test_states_that_are_there_count_once(kind, monkeypatch):
    """The states of an optimizer that stepped before the engine was attached count once."""
    # A process's own size changes between two readings.
    monkeypatch.setattr(variants, "held_bytes", lambda device: 2**30)
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    optimizer, x = kind(model.parameters(), lr=1e-4), torch.randn(4, WIDTH)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if tensor.dim())
    parts = {}
    for name, given in (("told", {"optimizer": optimizer}), ("not told", {})):
        engine = optimize(model, **given, **OPTIONS["compile"])
        step()
        parts[name] = engine.predictor.footprint(optimizer=given.get("optimizer"))
        engine.detach()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert parts["told"].optimizer == pytest.approx(states, abs=100)
    assert parts["not told"].optimizer == pytest.approx(2 * weights, abs=100)
    assert parts["not told"].constant - parts["told"].constant == states
    with pytest.raises(MemOptError, match=r"optimizer must be a torch\.optim\.Optimizer, not list"):
        optimize(model, optimizer=[optimizer], **OPTIONS["compile"])


def test_the_table_names_the_optimizer_of_the_loop():
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = optimize(model, optimizer=optimizer, **OPTIONS["compile"])
    model(torch.randn(4, WIDTH)).sum().backward()
    (line,) = (line for line in engine.plans().header if "Predicted peak of a step with sgd: " in line)
    assert "optimizer" not in line.replace("the optimizer's step", "")
    engine.detach()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_later_plan_counts_states_once(kind, is_told, monkeypatch):
    model = Layer()
    optimizer = kind(model.parameters(), lr=1e-4)
    limit = StepLimit(model, parse_budget("4GiB"), lambda: Run(optimizer if is_told else None), None)

    def states() -> int:
        return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if tensor.dim())

    # The optimizer's states are all that is added between the two plans.
    monkeypatch.setattr(footprint, "held_bytes", lambda device: 2**30 + states())
    before = limit.context(TracedBatch()).fixed
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert limit.context(TracedBatch()).fixed.peak == before.peak


def test_unsloths_forwards_are_refused(monkeypatch):
    """Unsloth's forwards are refused, on a patched class and on a single layer."""

    def fast_forward(self, x):
        return self(x)

    monkeypatch.setattr(fast_forward, "__module__", "unsloth.models.llama")
    patched, alone = torch.nn.Sequential(Layer()), torch.nn.Sequential(Layer())
    alone[0].up.forward = fast_forward.__get__(alone[0].up)
    optimize(patched, **OPTIONS["compile"]).detach()
    monkeypatch.setattr(Layer, "forward", fast_forward)
    for model in (patched, alone):
        with pytest.raises(MemOptError, match=r"does not support Unsloth's kernels, .*--use_liger_kernel"):
            optimize(model, **OPTIONS["compile"])
