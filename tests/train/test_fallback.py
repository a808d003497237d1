"""A first step whose compiled forward or backward fails runs in plain PyTorch, or is refused if a plan must hold."""

import copy
import itertools
import queue
import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import CPTConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_memopt import MemOptError, optimize
from tests.rotation import in_turn, nightly
from tests.trainer_runs import build, log_lines, make, rows, weights

pytestmark = pytest.mark.falls_back

ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
# The kernel's error about a matrix product of two dtypes.
REASON = r"\(RuntimeError: .*\)"


@torch.library.custom_op("optimum_memopt_tests::widened", mutates_args=())
def widened(x: torch.Tensor) -> torch.Tensor:
    """Returns a different dtype than in its trace, where a conversion after it is a no-op."""
    return x.double()


widened.register_fake(torch.empty_like)
widened.register_autograd(lambda context, gradient: gradient.float())


class WidenedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return widened(gradient).to(gradient.dtype)


class Faulty(torch.nn.Module):
    """An activation with dropout and a counter, which only plain PyTorch can run.

    Attributes:
        counter: counts the calls that raise, traced or not; as an iterator it is not restored before a rerun.
    """

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails, self.counter = fails, itertools.count()
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.dropout(torch.nn.functional.gelu(x))
        if self.fails == "forward":
            return widened(x).to(x.dtype)
        if self.fails == "backward":
            return WidenedGradient.apply(x)
        torch.compiler.disable(self.raise_error)()
        return x

    def raise_error(self) -> None:
        next(self.counter)
        raise {"user": ValueError, "memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt}[self.fails](
            "out of memory"
        )


def faulty(fails: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build("small")
    model.layer[0].act = Faulty(fails)
    return model


def trained(folder: Path, model: torch.nn.Module, **changes: Any) -> Any:
    torch.manual_seed(1)
    trainer = make(folder, "small", model=model, **changes)
    trainer.train()
    return trainer


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", nightly([1, 2], but=[1]))
def test_what_only_the_compiled_step_cannot_do_is_done_by_plain_pytorch(tmp_path, fails, accumulation):
    changes = {"gradient_accumulation_steps": accumulation, "max_steps": 2}
    expected = weights(trained(tmp_path / "plain", faulty(fails), plain=True, **changes).model)
    with log_lines() as lines:
        trainer = trained(tmp_path / "ours", faulty(fails), **ENGINE, memory_opt_level=1, **changes)
    found = weights(trainer.model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    said = [line for line in lines if line.startswith("NOT under a plan")]
    assert len(said) == 1 and re.match(
        f"NOT under a plan: its compiled {fails} failed in the first step {REASON}", *said
    )
    assert list(trainer.memopt.table.header) == said
    assert not trainer.memopt.engine.predicted_peak_mib(trainer.optimizer)
    with log_lines() as lines:
        trainer.train()
    assert not any("compiling" in line for line in lines)


@in_turn
def test_a_loop_without_a_trainer_goes_on_after_a_forward_that_fails():
    batch = {key: value[None] for key, value in rows("small")[0].items()}
    model, plain = faulty("forward"), faulty("forward")
    engine = optimize(model, **ENGINE)
    for one in (model, plain):
        torch.manual_seed(0)
        one(**batch).loss.backward()
    assert engine.plans().header[0].startswith("NOT under a plan: its compiled forward failed")
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class FailsWithCause(torch.nn.Module):
    """Fails once, in Python outside of the graphs, with a cause whose frame holds a tensor.

    Attributes:
        held: references to that tensor, and whether it still existed at the next call; a queue is not restored before
            a rerun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = torch.nn.Linear(4, 4), queue.SimpleQueue()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch.compiler.disable(self.outside)()
        return x

    def outside(self) -> None:
        if not self.held.empty():
            self.held.put(self.held.get()() is not None)
            return
        try:
            self.cause()
        except RuntimeError as error:
            raise ValueError("outside") from error

    def cause(self) -> None:
        activation = torch.ones(4)
        self.held.put(weakref.ref(activation))
        raise RuntimeError("inside")


def test_plain_pytorch_runs_without_the_tensors_of_a_failed_forward():
    model = FailsWithCause()
    optimize(model, **ENGINE)
    model(torch.ones(2, 4)).sum().backward()
    assert model.held.get_nowait() is False


@pytest.mark.parametrize("fails", nightly(["forward", "backward"], but=["forward"]))
def test_a_budget_is_refused(tmp_path, fails):
    said = (
        f"--memory_opt_budget 64GiB: its compiled {fails} failed in the first step {REASON}, so that nothing can be "
        "planned; without a budget it trains as plain PyTorch, and --gradient_checkpointing recomputes its layers"
    )
    with pytest.raises(MemOptError, match=said) as caught:
        trained(tmp_path, faulty(fails), **ENGINE, memory_opt_budget="64GiB")
    assert isinstance(caught.value.__cause__, RuntimeError)


@in_turn
def test_a_plan_file_is_refused(tmp_path):
    model, file = faulty("backward"), tmp_path / "plan.json"
    engine = optimize(model, **ENGINE)
    model(**{key: value[None] for key, value in rows("small")[0].items()})
    engine.plan_file().save(file)
    said = f"--memory_opt_plan: its compiled backward failed in the first step {REASON}, so that the file cannot be"
    with pytest.raises(MemOptError, match=said):
        trained(tmp_path, faulty("backward"), **ENGINE, memory_opt_plan=str(file))


@pytest.mark.parametrize("asked", nightly([{}, {"memory_opt_budget": "64GiB"}], but=[{}]), ids=["no plan", "budget"])
@pytest.mark.parametrize(
    ("fails", "kind", "calls"),
    [("user", ValueError, 2), ("memory", torch.OutOfMemoryError, 1), ("interrupt", KeyboardInterrupt, 1)],
)
def test_what_plain_pytorch_cannot_do_either_comes_out(asked, fails, kind, calls):
    """A user's error is raised after plain PyTorch fails, too; out-of-memory and interrupts are not retried.

    Random numbers that were drawn, and buffers that were written, are those of plain PyTorch.
    """
    batch = {key: value[None] for key, value in rows("small")[0].items()}
    model, plain = faulty(fails), faulty(fails)
    optimize(model, **ENGINE, **asked)
    states = []
    with log_lines() as lines:
        for one in (plain, model):
            torch.manual_seed(0)
            with pytest.raises(kind, match="^out of memory$"):
                one(**batch)
            states.append((torch.get_rng_state(), one.layer[0].act.forwards))
    assert next(plain.layer[0].act.counter) == 1 and next(model.layer[0].act.counter) == calls
    (drawn, written), (ours, our_written) = states
    assert torch.equal(ours, drawn) and torch.equal(our_written, written)
    assert not any("NOT under a plan" in line for line in lines)


def test_an_error_of_compute_loss_does_not_run_the_step_again(tmp_path):
    calls = []

    def compute_loss(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(given)
        raise ValueError("no such label")

    with pytest.raises(ValueError, match="no such label"):
        trained(tmp_path, build("small"), **ENGINE, compute_loss_func=compute_loss)
    assert len(calls) == 1


def contextual_prompt() -> torch.nn.Module:
    """Returns a model with PEFT's CPT, which assigns `weight.data` in its forward (0.21); AOTAutograd refuses that."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    loss = {"opt_weighted_loss_type": "decay", "opt_loss_decay_factor": 0.95}
    loss |= {"opt_projection_epsilon": 0.2, "opt_projection_format_epsilon": 0.1}
    prompt = {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]}
    return get_peft_model(model, CPTConfig(task_type="CAUSAL_LM", **prompt, **loss))


def prompted(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (length,))
    ones = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": ones, "labels": ids, "input_type_mask": 4 * ones}


@in_turn
def test_cpt_of_peft_trains_as_plain_pytorch(tmp_path):
    torch.manual_seed(2)
    data = {"train_dataset": [prompted(7) for _ in range(8)], "data_collator": torch.utils.data.default_collate}
    make_one = partial(trained, **data, max_steps=2, remove_unused_columns=False)
    expected = weights(make_one(tmp_path / "plain", contextual_prompt(), plain=True).model)
    with log_lines() as lines:
        trainer = make_one(tmp_path / "ours", contextual_prompt(), **ENGINE)
    assert all(torch.equal(value, expected[key]) for key, value in weights(trainer.model).items())
    said = [line for line in lines if line.startswith("NOT under a plan: torch cannot compile this model (Assertion")]
    assert len(said) == 1 and "set_ on a graph input" in said[0]
    with pytest.raises(
        MemOptError, match="--memory_opt_budget 64GiB: torch cannot compile this model .* set_ on a graph"
    ):
        make_one(tmp_path / "budget", contextual_prompt(), **ENGINE, memory_opt_budget="64GiB")


class Attention(torch.nn.Module):
    """A layer that splits its heads like transformers' models, which is ambiguous for an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(x).view(len(x), -1, 2, 4)
        return x + self.out(torch.nn.functional.gelu(heads).reshape(x.shape))


class Layered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@in_turn
@pytest.mark.parametrize(
    "plan", nightly([{}, {"memory_opt_level": 1}, {"memory_opt_budget": "64GiB"}], but=[{"memory_opt_level": 1}])
)
@pytest.mark.parametrize("unit", ["layer", "model"])
def test_a_later_batch_that_plain_pytorch_cannot_run_has_its_error(unit: str, plan: dict[str, Any]) -> None:
    """A later batch that plain PyTorch cannot run raises its one-line error, and the next batch trains."""
    model, rows_of = Layered(), partial(torch.randn, generator=torch.Generator().manual_seed(0))
    batches = [rows_of(3, 5, 8), torch.empty(0, 5, 8), rows_of(3, 5, 9), rows_of(4, 5, 8)]
    errors: list[Exception] = []
    for batch in batches[1:3]:
        with pytest.raises(RuntimeError) as caught:
            model(batch)
        errors.append(caught.value)
    expected = [model(batch)["loss"].item() for batch in (batches[0], batches[-1])]
    optimize(model, memory_opt_unit=unit, **ENGINE, **plan)
    found = [model(batches[0])["loss"].item()]
    for batch, error in zip(batches[1:3], errors, strict=True):
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                model(batch)
            assert type(caught.value) is type(error) and str(caught.value) == str(error)
            assert "\n" not in str(error) and caught.value.__suppress_context__
    found.append(model(batches[-1])["loss"].item())
    assert found == expected


class Masked(Layered):
    """Computes a mask for rows without one only if it is not traced, as LongT5 does; has dropout, and a buffer that
    each forward writes to before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.forwards.add_(1)
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:2])
        for layer in self.layers:
            x = self.dropout(layer(x))
        mask = torch.zeros(1, 5) if mask is None else mask
        return {"loss": torch.cat([mask, x.sum(-1)], dim=-1).square().mean()}


def masked_step(model: torch.nn.Module, rows: int, has_mask: bool) -> list[torch.Tensor]:
    """Returns a step's loss and gradients, the model's buffer, and the state of torch's generator after it."""
    model.zero_grad()
    x = torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(rows))
    loss = model(x, torch.ones(rows, 5) if has_mask else None)["loss"]
    loss.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    return [loss.detach(), *gradients, model.forwards.clone(), torch.get_rng_state()]


@pytest.mark.parametrize("plan", nightly([{}, {"memory_opt_level": 1}], but=[{"memory_opt_level": 1}]))
@pytest.mark.parametrize("unit", nightly(["layer", "model"], but=["model"]))
def test_a_later_batch_that_torch_cannot_trace_is_plain(unit: str, plan: dict[str, Any]) -> None:
    """The first two such batches run in plain PyTorch; after the third, all do."""
    steps = [(3, True), (3, False), (3, True), (3, False), (4, False), (4, True), (6, False), (4, True)]
    model = Masked()
    plain = copy.deepcopy(model)
    engine = optimize(model, memory_opt_unit=unit, **ENGINE, **plan)
    torch.manual_seed(0)
    with log_lines() as lines:
        found = [masked_step(model, *step) for step in steps]
    torch.manual_seed(0)
    expected = [masked_step(plain, *step) for step in steps]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    why = "torch cannot trace this batch, unlike the batches before it"
    said = [line.partition(f": {why}: RuntimeError")[0] for line in lines if why in line and "\n" not in line]
    assert said == ["running batches like this one in plain PyTorch, outside of the plan"] * 2 + ["NOT under a plan"]
    engine.detach()


@in_turn
def test_a_later_batch_that_torch_cannot_trace_ends_a_budget() -> None:
    model = Masked()
    engine = optimize(model, memory_opt_budget="64GiB", **ENGINE)
    masked_step(model, 3, True)
    with pytest.raises(MemOptError, match="^--memory_opt_budget 64GiB: .*RuntimeError: Sizes of tensors must match"):
        masked_step(model, 3, False)
    masked_step(model, 4, True)
    engine.detach()


class Checked(Layered):
    """Checks its batch first."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.dim() != 3:
            raise ValueError("x needs three dimensions")
        return super().forward(x)


def test_a_first_batch_that_plain_pytorch_cannot_run_leaves_layers_compiled_by_themselves() -> None:
    model, batch = Checked(), torch.randn(3, 5, 8)
    expected = model(batch)["loss"].item()
    engine = optimize(model, memory_opt_unit="layer", **ENGINE)
    with pytest.raises(ValueError, match="^x needs three dimensions$"):
        model(batch[0])
    assert model(batch)["loss"].item() == expected
    assert "for 2 layers, equal layers share one" in engine.plans().header[0]
