"""Recompiles are limited per model, not per class of models, and lead to a fallback with advice."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimum_memopt import optimize
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.compile.train.planned_forward import _MOST_OF_CAUSE, Recompiles
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.engines.torch_compat.recompiles import CodePlace, Recompile
from optimum_memopt.plans.grammar import parse
from tests.rotation import in_turn, nightly
from tests.small_model import CLASSES, WIDTH, Block
from tests.trainer_runs import log_lines

LIMIT = 3
FRESH_MODELS = 2 * LIMIT


class Broken(torch.nn.Module):
    """Two graphs; the second is in the resume function that torch makes after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.gelu(self.first(x))
        torch._dynamo.graph_break()
        return {"loss": self.second(hidden).tanh().sum(), "hidden": hidden}


class Whole(Broken):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.second(self.first(x).tanh()).sum()}


@pytest.fixture(autouse=True)
def _few_recompiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(dynamo, "_RECOMPILES", LIMIT)
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield


def attached(model: torch.nn.Module, selection: Selection | None = None, dynamic: bool = False) -> CompileEngine:
    engine = CompileEngine(selection, "aot_eager", dynamic=dynamic)
    engine.outputs_read_by = lambda: ""
    engine.attach(model)
    return engine


def rows(count: int = 32) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


@in_turn
@pytest.mark.parametrize(
    "isolates",
    [dynamo._ISOLATES, pytest.param(False, marks=pytest.mark.nightly)],
    ids=["as here", "as before torch 2.13"],
)
def test_fresh_models_of_a_class_in_pieces(monkeypatch: pytest.MonkeyPatch, isolates: bool) -> None:
    monkeypatch.setattr(dynamo, "_ISOLATES", isolates)
    engines = []
    for index in range(FRESH_MODELS):
        model = Broken()
        plain = copy.deepcopy(model)
        engine = attached(model, Selection(parse("Gemm+:1:-1")) if index % 2 else None)
        engines.append(engine)
        model(rows())["loss"].backward()
        plain(rows())["loss"].backward()
        assert "in 2 graphs" in engine.plans().header[0]
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    # The first model's graphs are still cached.
    with log_lines() as lines:
        engines[0]._model(rows())["loss"].backward()
    assert lines == []


def trained(model: torch.nn.Module, batches: Sequence[Any], change: Callable[[Any, int], None]) -> list[list[str]]:
    """Train a model, and check that it is bitwise plain PyTorch's.

    Args:
        model: the model.
        batches: the batch of each step.
        change: changes the model before each step.

    Returns:
        The log lines of each step.
    """
    plain, said = copy.deepcopy(model), []
    attached(model, Selection(level=1), dynamic=isinstance(model, Annealed | Handing))
    for step, batch in enumerate(batches):
        with log_lines() as lines:
            for each in (model, plain):
                change(each, step)
                each(**batch)["loss"].backward()
        said.append([line for line in lines if not line.startswith(("compiling ", "compiled "))])
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    return said


def unchanged(model: torch.nn.Module, step: int) -> None:
    """Leave the model unchanged."""


class Handing(torch.nn.Module):
    """Hands each layer a parameter of its own and an argument of the forward, unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Shifted() for _ in range(4))
        self.shift = torch.nn.Parameter(torch.ones(8, 64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x + self.shift[0]
        for layer in self.layers:
            x = layer(x, mask, self.shift)
        return {"loss": x.square().mean()}


class Shifted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x * mask + shift.sum(0)).tanh()


def test_a_batch_that_comes_again_is_not_compiled_again() -> None:
    batch, others = ({"x": rows(count), "mask": torch.ones(count, 1)} for count in (4, 6))
    model = Handing()
    assert not any(trained(model, [batch, batch, others, batch], unchanged))
    assert "in 3 graphs for 4 layers" in engine_of(model).plans().header[0]
    marks = [name for tensor in (batch["mask"], model.shift) for name in vars(tensor) if "static_indices" in name]
    assert not marks


@pytest.mark.parametrize("build", nightly([Whole, Broken], but=[Whole]))
def test_code_that_recompiles_with_every_batch_is_left_to_python_and_named(build: type[torch.nn.Module]) -> None:
    said = trained(build(), [{"x": rows(2 + step)} for step in range(LIMIT + 6)], unchanged)
    lines = [line for of_step in said for line in of_step]
    recompiles = [line for line in lines if line.startswith("recompiled the training graph; failed guard: ")]
    assert recompiles and len({re.sub(r"\d+", "N", line) for line in recompiles}) == len(recompiles)
    left = [line for line in lines if line.startswith("running forward in plain Python")]
    assert left and "size mismatch at index 0" in left[0] and "pad batches to fewer lengths" in left[0]
    assert not any("\n" in line or len(line) > 1000 for line in left)
    # The code is no longer compiled.
    assert not any(said[-2:])


def test_a_user_may_allow_more() -> None:
    with torch._dynamo.config.patch(recompile_limit=100):
        assert dynamo.recompile_limit() == 100


class Counting(Whole):
    """Computes with its own number, which changes at every step, and with a submodule's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.second.temperature = 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"loss": super().forward(x)["loss"] * self.calls / self.second.temperature}


@in_turn
def test_a_number_that_changes_at_every_step_is_named_once_with_a_suggestion() -> None:
    said = trained(Counting(), [{"x": rows()}] * (LIMIT + 3), unchanged)
    lines = [line for of_step in said for line in of_step]
    assert sum("failed guard: self.calls == " in line for line in lines) == 1, lines
    (left,) = [line for line in lines if "in plain Python" in line and "self.calls == " in line]
    assert f"{__file__}:" in left and "in forward; " in left
    assert "make self.calls a tensor" in left and "register_buffer('calls'" in left
    assert "pad batches" not in left and "\n" not in left
    assert not any(said[-2:])


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


class Annealed(torch.nn.Module):
    """Layers, and a number outside them that changes at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(4)])
        self.head, self.factor = torch.nn.Linear(WIDTH, CLASSES), 1.0

    def forward(self, x: torch.Tensor, weight: float = 1.0) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.loss(self.head(scaled(x, self.factor))) * weight}

    def loss(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.square().mean()


class Chained(Annealed):
    """A loop over tokens, as in a conditional random field, so that each length has a graph."""

    def loss(self, scores: torch.Tensor) -> torch.Tensor:
        total = scores[:, 0]
        for token in range(1, scores.shape[1]):
            total = torch.logsumexp(total[:, :, None] + scores[:, token][:, None], 1)
        return total.mean()


def saved_bytes(model: torch.nn.Module, batch: Mapping[str, Any]) -> int:
    """Returns the bytes that a forward saves for its backward, without parameters."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch)["loss"].backward()
    return sum(held.values())


def annealed(model: Any, step: int) -> None:
    model.factor = 1 / (1 + step)


def tokens(step: int) -> torch.Tensor:
    return torch.randn(8, 3 + step, WIDTH, generator=torch.Generator().manual_seed(step))


STEPS = LIMIT + 3
AROUND: dict[str, tuple[type[Annealed], list[dict[str, Any]], Callable[[Any, int], None], str]] = {
    "attribute": (Annealed, [{"x": tokens(1)}] * STEPS, annealed, "self.factor == "),
    "argument": (
        Annealed,
        [{"x": tokens(1), "weight": 1 / (1 + step)} for step in range(STEPS)],
        unchanged,
        "weight ==",
    ),
    "loop": (Chained, [{"x": tokens(step)} for step in range(STEPS)], unchanged, "'x' size mismatch at index 1"),
}


@in_turn
@pytest.mark.parametrize("case", nightly(AROUND, but=["argument"]))
def test_layers_keep_their_plan_where_the_code_around_them_is_left_to_python(case: str) -> None:
    build, batches, change, guard = AROUND[case]
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    said = trained(model, batches, change)
    (left,) = [line for of_step in said for line in of_step if "in plain Python" in line]
    assert left.startswith("running forward") and guard in left and f"{__file__}:" in left
    assert not any(said[-1])
    batch = {**batches[-1]}
    assert saved_bytes(model, batch) < 0.5 * saved_bytes(plain, batch)


@pytest.mark.nightly
def test_a_number_that_changes_in_layers_ends_no_run() -> None:
    class InLayers(Annealed):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.act = Scaling()

    def change(model: Any, step: int) -> None:
        for layer in model.layers:
            layer.act.scale = 1 / (1 + step)

    said = trained(InLayers(), [{"x": tokens(1)}] * (LIMIT + 3), change)
    (left,) = [line for of_step in said for line in of_step if "in plain Python" in line]
    assert "scale == " in left and not any(said[-1])


class Scaling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) * self.scale


@pytest.mark.nightly
def test_a_budget_goes_on() -> None:
    model = Annealed()
    optimize(model, memory_opt_compiler="aot_eager", memory_opt_budget="8GiB")
    with log_lines() as lines:
        for step in range(LIMIT + 2):
            annealed(model, step)
            model(tokens(1))["loss"].backward()
    assert sum("in plain Python" in line for line in lines) == 1


def recompile(guard: str) -> Recompile:
    return Recompile(guard, (CodePlace("model.py", 3, "forward"),))


@pytest.mark.parametrize(
    ("guards", "advice"),
    [
        (["alpha == 0.5", "alpha == -1e-05"], "pass alpha as a tensor (torch.tensor(alpha))"),
        (["self.head.scale == 1", "self.head.scale == 2"], "register_buffer('scale'"),
        (["self.sizes[0] == 1", "self.sizes[0] == 2"], "make self.sizes[0] a tensor"),
        (["___stack0 == 0.25", "___stack0 == 0.5"], "compute that number as a tensor"),
        (["x.size()[0] == 4", "x.size()[0] == 5"], "pad batches to fewer lengths"),
        (
            ["tensor 'x' rank mismatch. expected 2, actual 3", "tensor 'x' rank mismatch. expected 3, actual 2"],
            "give tensors the same number of dimensions",
        ),
        (["len(self.seen) == 4", "len(self.seen) == 5"], "keep the number of entries of self.seen the same"),
        (["self.mode is 1", "self.mode is 2"], "keep what it checks the same"),
    ],
)
def test_advice(guards: list[str], advice: str) -> None:
    failed = Recompiles()
    first, *later = map(recompile, guards)
    failed.add([first])
    assert failed.line(first) == f"recompiled the training graph; failed guard: {guards[0]}, at model.py:3, in forward"
    for each in later * 3:
        failed.add([each])
        assert not failed.line(each)
    assert advice in failed.too_many(later[-1], is_in_layers=False)
    assert guards[-1] in failed.too_many(later[-1], is_in_layers=False)


def test_layers_are_compiled_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_RECOMPILES", 2 * _MOST_OF_CAUSE)
    failed = Recompiles()
    for count in range(1, 2 * _MOST_OF_CAUSE + 1):
        failed.add([recompile(f"self.scale == {count}")])
        assert bool(failed.too_many(recompile("self.scale == 1"), is_in_layers=False)) == (count >= _MOST_OF_CAUSE)
        assert bool(failed.too_many(recompile("self.scale == 1"), is_in_layers=True)) == (count == 2 * _MOST_OF_CAUSE)


class Pictures(torch.nn.Module):
    """Strided convolutions over images, whose results are scaled by a mask of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = torch.nn.Conv2d(8, 4, 3, stride=2, padding=1)

    def forward(self, pixel_values: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.second(torch.nn.functional.gelu(self.first(pixel_values)))
        return {"loss": hidden.flatten(1).std(1).sum() * mask.mean()}


@in_turn
def test_images_of_other_sizes_recompile_once() -> None:
    model = Pictures()
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(parse("Gelu+:1:-1")), dynamic=True)
    symbols, recompiles = [], []
    for rows, size, length in ((2, 32, 8), (3, 32, 12), (2, 48, 8), (4, 40, 9)):
        images, mask = torch.randn(rows, 3, size, size), torch.rand(rows, 1, length, length)
        with log_lines() as lines:
            for each in (model, plain):
                each.zero_grad()
                each(pixel_values=images, mask=mask)["loss"].backward()
        recompiles.append([line for line in lines if "recompiled" in line])
        symbols.append(set(engine.plans().symbols))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert "_dynamo_static_indices" not in vars(images)
    assert symbols[0] == {"inputs_mask_dim0", "inputs_mask_dim2", "inputs_mask_dim3"}, "masks differ between batches"
    assert list(map(len, recompiles)) == [0, 0, 1, 0], "the second size has symbols"
    assert "size mismatch at index 2" in recompiles[2][0]


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ("not hasattr(attention_mask, '_memopt_has_no_padding')", "attention_mask has padding"),
        ("hasattr(kwargs['attention_mask'], '_memopt_has_no_padding')", "attention_mask has no padding"),
    ],
)
def test_a_guard_on_padding_is_in_words(guard: str, words: str) -> None:
    place = {"co_name": "forward", "co_firstlineno": 1, "co_filename": "model.py"}
    recompile = Recompile.of(SimpleNamespace(recompile_reason=f"0/0: {guard}", **place))
    assert recompile is not None and recompile.guard == words


class Listing(torch.nn.Module):
    """Lists its hidden states outside of all graphs; without its last layer one of them is listed twice, and a second
    list is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.count = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)), 2

    @torch.compiler.disable
    def listed(self, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        hidden, masks = [x], []
        for number, layer in enumerate(self.layers):
            hidden.append(layer(hidden[-1]) if number < self.count else hidden[-1])
            masks += [hidden[-1].sigmoid()] if number < self.count else []
        return hidden, masks

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, masks = self.listed(x)
        return {"loss": sum(each.square().mean() for each in hidden) + sum(each.mean() for each in masks)}


def test_a_guard_that_torch_cannot_name_is_a_recompile() -> None:
    """torch's reason for a recompile names items of lists that may be shorter now."""
    model = Listing()
    plain, x = copy.deepcopy(model), torch.randn(3, WIDTH)
    engine = attached(model, dynamic=True)
    with log_lines() as lines:
        for count in (2, 1, 2):
            losses = []
            for each in (model, plain):
                each.count = count
                each.zero_grad()
                losses.append(each(x)["loss"])
                losses[-1].backward()
            assert torch.equal(*losses)
            gradients = ([parameter.grad for parameter in each.parameters()] for each in (model, plain))
            for ours, theirs in zip(*gradients, strict=True):
                assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    assert len([line for line in lines if "failed guard: the call has other tensors" in line]) == 1
    engine.detach()
