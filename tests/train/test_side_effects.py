"""Forwards with side effects: writes to state, parameters that are computed when read, and checks."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, one_hot
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.options import AUTO
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared import forward_patch
from optimum_memopt.sizes import parse_budget
from tests.compiled import hold_still, selection
from tests.gradients import assert_bitwise_same
from tests.rotation import nightly
from tests.trainer_runs import log_lines

LAYERS, WIDTH = 4, 16
AUXILIARY: list[torch.Tensor] = []


class Normalized(torch.nn.Module):
    """A layer whose weight is computed when it is read, each time with a step of a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + gelu(self.linear(x))


class Quantized(torch.nn.Module):
    """A layer that updates its codebook in the forward; `one_hot` checks its indices, which no gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        nearest = torch.cdist(hidden.reshape(-1, WIDTH), self.codes).argmin(1)
        quantized = self.codes[nearest].view_as(hidden)
        with torch.no_grad():
            members = one_hot(nearest, 8).float()
            sums = members.T @ hidden.reshape(-1, WIDTH)
            self.codes.mul_(0.9).add_(sums / (members.sum(0)[:, None] + 1), alpha=0.1)
        return x + (quantized - hidden).detach() + hidden + 0.1 * (hidden - quantized.detach()).square()


class Collecting(torch.nn.Module):
    """A layer that appends a loss to a global list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed = gelu(self.linear(x))
        note(changed)
        return x + changed


def note(changed: torch.Tensor) -> None:
    AUXILIARY.append(changed.square().mean())


class Stack(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module], layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def attached(model: torch.nn.Module, chosen: Selection) -> CompileEngine:
    engine = CompileEngine(chosen, "aot_eager", unit=AUTO)
    engine.attach(model)
    return engine


def trained(model: torch.nn.Module, batches: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a step per batch, accumulating gradients; returns the losses, and the final gradients and buffers."""
    losses = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        loss = model(batch) + sum(AUXILIARY)
        AUXILIARY.clear()
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return torch.stack(losses), {**gradients, **{name: each.clone() for name, each in model.named_buffers()}}


@pytest.mark.parametrize(
    ("kind", "layers", "asked"),
    nightly(
        [
            (kind, layers, asked)
            for kind in (Normalized, Quantized, Collecting)
            for layers in (2, 4)
            for asked in ("", "level 1")
        ],
        but=[(Normalized, 4, "level 1"), (Quantized, 4, "level 1"), (Quantized, 2, "level 1"), (Collecting, 4, "")],
    ),
)
def test_effects_are_those_of_plain_pytorch(kind: type[torch.nn.Module], layers: int, asked: str) -> None:
    model = Stack(kind, layers)
    plain, batches = copy.deepcopy(model), torch.randn(3, 4, 6, WIDTH)
    engine = attached(model, selection(asked))
    assert_bitwise_same(trained(model, batches), trained(plain, batches))
    engine.detach()


class Recorder:
    """A script's record of its forwards: loss terms, numbers, tensors; may itself be used as a hook."""

    def __init__(self) -> None:
        self.terms: dict[str, list[torch.Tensor]] = {"all": []}
        self.count, self.total, self.mean = 0, torch.zeros(()), 0.0

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self.note(output)
        self.latest = getattr(self, "latest", 0) + 1

    def note(self, output: torch.Tensor) -> None:
        self.terms["all"].append(output.square().mean())
        self.count += 1
        self.total += 1
        self.mean = self.mean + output.detach().mean()


class Noting(Stack):
    """A model that records its loss in a recorder that it holds."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(Quantized, LAYERS)
        self.recorder = recorder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        self.recorder.note(loss)
        return loss


def noted(model: torch.nn.Module, recorder: Recorder, by: str, hook_from: int) -> list[Any]:
    """Run steps whose losses include the recorder's terms; returns the losses, the records and the gradients."""
    calls, found = 0, []

    def counting(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        note(output)

    hooks = {"object": recorder, "method": partial(recorder.__call__), "closure": counting}
    for step in range(3):
        if step == hook_from and by in hooks:
            model.layers[1].register_forward_hook(hooks[by])
        torch.manual_seed(step)
        loss = model(torch.randn(4, 6 + step, WIDTH)) + sum(AUXILIARY) + sum(recorder.terms["all"])
        loss.backward()
        found.append((loss.item(), calls, len(AUXILIARY), recorder.count, recorder.total.item(), float(recorder.mean)))
        AUXILIARY.clear()
        recorder.terms["all"].clear()
    return [*found, getattr(recorder, "latest", 0), *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("hook_from", nightly([0, 1], but=[1]))
@pytest.mark.parametrize("by", nightly(["object", "method", "closure", "forward"], but=["forward"]))
def test_a_forward_that_runs_again_leaves_its_effects_once(
    by: str, hook_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun forward, for a budget or after a new hook, has its side effects only once."""
    hold_still(monkeypatch)
    found = []
    for is_plain in (True, False):
        recorder = Recorder()
        model = Noting(recorder) if by == "forward" else Stack(Quantized, LAYERS)
        if not is_plain:
            engine = attached(model, Selection(budget=parse_budget("64GiB")))
        with log_lines() as lines:
            found.append(noted(model, recorder, by, hook_from))
    assert sum(line.startswith("compiled the training graph") for line in lines) > 1
    assert_equal(*found)
    engine.detach()


def assert_equal(ours: list[Any], expected: list[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Initialized(Stack):
    """A model whose first forward sets a buffer, and a Python flag that it is set."""

    def __init__(self) -> None:
        super().__init__(Quantized, LAYERS)
        self.register_buffer("scale", torch.zeros(()))
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            with torch.no_grad():
                self.scale.copy_(x.std())
            self.is_ready = True
        return super().forward(x / self.scale)


class Following(Stack):
    """A model whose forward moves a frozen copy towards a weight, and shrinks a trained bias."""

    def __init__(self) -> None:
        super().__init__(Quantized, LAYERS)
        self.follower = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.follower.lerp_(self.layers[0].linear.weight, 0.1)
            self.layers[1].linear.bias.mul_(0.9)
            x = x @ self.follower
        return super().forward(x)


class Normalizing(Stack):
    """A model that scales its batch in place."""

    def __init__(self) -> None:
        super().__init__(Quantized, LAYERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


# Only Initialized is checkpointed: a checkpoint reruns the forward, which would repeat writes to batch or weights.
@pytest.mark.parametrize(
    ("kind", "is_checkpointed"), [(Initialized, False), (Initialized, True), (Following, False), (Normalizing, False)]
)
def test_a_forward_that_runs_again_begins_as_the_first(
    kind: type[torch.nn.Module], is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun forward starts from the same state, also under a user's checkpoint of the whole model."""
    hold_still(monkeypatch)
    monkeypatch.setattr(forward_patch, "_MOST_FROZEN", 0)
    model = kind()
    plain = copy.deepcopy(model)
    batches = torch.randn(3, 4, 6, WIDTH)
    engine = attached(model, Selection(budget=parse_budget("64GiB")))

    def trained_on(trained_model: torch.nn.Module) -> list[Any]:
        called = partial(checkpoint, trained_model, use_reentrant=False) if is_checkpointed else trained_model
        found = []
        for seed, batch in enumerate(batches.clone()):
            torch.manual_seed(seed)
            loss = called(batch)
            loss.backward()
            found += [loss.detach(), batch]
        tensors = (*trained_model.parameters(), *trained_model.buffers())
        return [*found, *tensors, *(each.grad for each in trained_model.parameters() if each.grad is not None)]

    with log_lines() as lines:
        ours = trained_on(model)
    assert sum(line.startswith("compiled the training graph") for line in lines) > 1
    assert_equal(ours, trained_on(plain))
    engine.detach()


class Positions(torch.nn.Module):
    """A model that saves a buffer for its backward, and writes its results into its input dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS))
        self.layers = torch.nn.ModuleList(blocks)
        self.embedding = torch.nn.Embedding(32, WIDTH)
        self.register_buffer("places", torch.arange(32))

    def forward(self, features: dict[str, Any]) -> Mapping[str, Any]:
        x = features["x"]
        x = x + self.embedding(self.places[: x.shape[1]])
        if features.get("scale") is not None:
            x = x * features["scale"]
        for layer in self.layers:
            x = layer(x)
        features.update(pooled=x.mean(1))
        return features


def contrasted(model: torch.nn.Module, lengths: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run two forwards before each backward, the second with a different kind of batch."""
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        pooled = [
            model({"x": torch.randn(4, length, WIDTH), "scale": torch.full((1, length, 1), 2.0) if place else None})[
                "pooled"
            ]
            for place, length in enumerate(lengths)
        ]
        loss = (pooled[0] @ pooled[1].T).logsumexp(1).mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("lengths", nightly([((8, 8),), ((8, 24),), ((24, 8),)], but=[((8, 24),)]))
def test_planning_again_changes_nothing_that_an_earlier_forward_has_saved(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Re-planning for a step's second forward, which reruns it, changes no saved tensor and ignores its results."""
    hold_still(monkeypatch)
    model = Positions()
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(budget=parse_budget("64GiB")))
    with log_lines() as lines:
        assert_bitwise_same(contrasted(model, lengths), contrasted(plain, lengths))
    planned = [line for line in lines if "solving for the budget again" in line]
    assert len(planned) == 1 and "scale" in planned[0] and "pooled" not in planned[0]
    engine.detach()


@pytest.mark.parametrize("step", nightly([0, 1, 2], but=[1]))
def test_the_forward_of_a_layer_is_replaced_between_steps(step: int) -> None:
    """A layer's forward may be replaced and restored between steps, as by accelerate's hooks, adapters or patches."""
    model = Stack(Quantized, LAYERS)
    plain, batches = copy.deepcopy(model), torch.randn(4, 4, 6, WIDTH)

    def trained_on(trained_model: torch.nn.Module) -> list[Any]:
        found = []
        for number, batch in enumerate(batches):
            layer = trained_model.layers[2]
            if number == step:
                own = layer.forward
                layer.forward = lambda x, own=own: own(1.5 * x)
            elif number == 3:
                del layer.forward
            found.append(trained(trained_model, [batch]))
        return found

    engine = attached(model, selection("level 1"))
    for ours, expected in zip(trained_on(model), trained_on(plain), strict=True):
        assert_bitwise_same(ours, expected)
    engine.detach()


class Expanded(torch.nn.Module):
    """Scales by a buffer whose rows share their memory, and by every second column of another one."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(1, WIDTH).expand(rows, WIDTH))
        self.register_buffer("columns", torch.rand(rows, 2 * WIDTH)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + gelu(self.linear(x) * self.scale).tanh() * self.columns * self.scale


@pytest.mark.parametrize("asked", ["level 1", "budget"])
# More rows than numbers that are compared as a whole.
@pytest.mark.parametrize("rows", [6, 8192 // WIDTH])
def test_buffers_with_shared_memory(rows: int, asked: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(Expanded(rows) for _ in range(4)), torch.nn.Flatten(0), torch.nn.LayerNorm(WIDTH * rows)
    )
    model.append(Mean())
    plain, batches = copy.deepcopy(model), torch.randn(4, rows, WIDTH)
    chosen = Selection(budget=parse_budget("64GiB")) if asked == "budget" else selection(asked)
    engine = attached(model, chosen)
    assert_bitwise_same(trained(model, batches), trained(plain, batches))
    assert (table := engine.plans()) is not None and "by aot_eager" in table.header[0]


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()
