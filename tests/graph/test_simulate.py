"""`simulate` of plain loops, against the requests to torch's allocator when they run."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import optimum_memopt
from optimum_memopt import MemOptError
from optimum_memopt.engines.api.predictions import GRADIENTS, OPTIMIZER, OUTPUTS
from optimum_memopt.engines.simulator import simulated
from optimum_memopt.engines.torch_compat import kernels

# Scalars, such as step counts and the loss, and generator states.
_SLACK = 4096


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return 2 * x * gradient


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    for x, y in zip(batch["x"].chunk(4), batch["y"].chunk(4), strict=True):
        nn.functional.mse_loss(model(x), y).div(4).backward()
    optimizer.step()
    optimizer.zero_grad()


def custom_function(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    Squares.apply(model(batch["x"])).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def two_forwards(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        reference = model(batch["y"])
    first, second = model(batch["x"]), model(batch["y"])
    ((first - second).square().mean() + (second - reference).abs().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def made(checkpoints: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    model = Net(checkpoints)
    return model, adamw(model), {"x": torch.randn(512, 64), "y": torch.randn(512, 64)}


def measured(step: Callable[..., Any], *args: Any) -> int:
    """Returns the most bytes that the second step requests in addition to the initial ones."""
    step(*args)
    return max(itertools.accumulate(kernels.cpu_allocations(lambda: step(*args)), initial=0))


def predicted(step: Callable[..., Any], *args: Any) -> int:
    with simulated(None) as simulator:
        copied = simulator.copy((step, args))
        found = simulator.run(lambda: copied[0](*copied[1]), copied)
    return found.peak - found.given


@pytest.mark.parametrize("step", [train, clip, accumulate, custom_function, two_forwards])
def test_peak_is_that_of_the_allocator(step: Callable[..., Any]) -> None:
    args = made()
    assert predicted(step, *args) == pytest.approx(measured(step, *args), abs=_SLACK)


def test_gradients_that_a_step_frees_are_gone() -> None:
    held = optimum_memopt.simulate(train, *made()).timeline.held[GRADIENTS]
    assert held[0] == 0
    assert held[-1] == sum(parameter.nbytes for parameter in Net().parameters())


def test_checkpointing() -> None:
    args = made(checkpoints=True)
    here = predicted(clip, *args)
    assert here == pytest.approx(measured(clip, *args), abs=_SLACK + 6 * torch.get_rng_state().nbytes)
    assert here < predicted(clip, *made())


def test_a_forward_has_none_of_the_gradients_behind_an_update() -> None:
    found = optimum_memopt.simulate(clip, *made())
    gradients = sum(parameter.nbytes for parameter in Net().parameters())
    assert found.phases["optimizer"] >= found.timeline.phases[0].held + gradients
    assert found.phases["forward"] < found.phases["backward"] - gradients / 4


def test_arguments_stay_as_they_are() -> None:
    model, optimizer, batch = made()
    before = copy.deepcopy(model.state_dict())
    optimum_memopt.simulate(train, model, optimizer, batch)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, batch)


def test_on_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
        batch = {"x": torch.empty(512, 64), "y": torch.empty(512, 64)}
    found = optimum_memopt.simulate(train, model, torch.optim.AdamW(model.parameters()), batch, device="h100")
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert found.reserved is not None
    assert found.reserved >= found.peak >= max(found.phases.values())
    assert list(found.phases) == ["forward", "backward", "optimizer"]
    assert found.timeline.held[OPTIMIZER][0] == pytest.approx(2 * parameters, abs=_SLACK)
    # All parameters are updated at once, with copies of them.
    assert found.phases["optimizer"] > found.timeline.phases[0].held + parameters
    assert "train holds at its peak" in str(found)
    found.page(tmp_path / "step.html")
    assert (tmp_path / "step.html").exists()


def test_a_variable_has_its_place() -> None:
    def holds(model: nn.Module, x: torch.Tensor) -> None:
        exponential = x.exp()
        model(x).mean().backward()
        exponential.mean()

    groups = optimum_memopt.simulate(holds, Net(), torch.empty(4096, 64, device="meta")).timeline.alive
    assert any(group.category == OUTPUTS and "exponential in holds" in group.name for group in groups)


def test_methods_and_integers() -> None:
    class Loop:
        def __init__(self) -> None:
            self.model, self.calls = Net(), 0

        def step(self, lengths: torch.Tensor) -> None:
            self.calls += 1
            self.model(torch.zeros(int(lengths.max()), 64)).sum().backward()

    loop = Loop()
    found = optimum_memopt.simulate(loop.step, torch.tensor([3, 700]))
    assert loop.calls == 0
    assert found.phases["forward"] > 700 * 64 * 4 * 10


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (lambda x: x.sum().item(), r"the value of a tensor is read .*test_simulate\.py:\d+, in <lambda>"),
        (lambda x: {}["loss"], r"cannot be run on tensors without data \(KeyError: 'loss', at .*test_simulate"),
        # Like a Triton kernel, which would write there.
        (
            lambda x: (x + 1).data_ptr(),
            r"cannot be run on tensors without data \(RuntimeError: .*pointer.*test_simulate",
        ),
        (None, "the first argument is a step to call, not NoneType"),
    ],
)
def test_mistakes(step: Any, line: str) -> None:
    with pytest.raises(MemOptError, match=line) as raised:
        optimum_memopt.simulate(step, torch.ones(100))
    assert "\n" not in str(raised.value)


def test_a_tensor_that_is_no_argument() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(MemOptError, match="trains a tensor that is not one of its arguments"):
        optimum_memopt.simulate(lambda x: (x * weight).sum(), torch.ones(3))
    assert weight.grad is None
