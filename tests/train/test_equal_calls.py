"""Forwards with the same kind of arguments as an earlier call reuse its recorded runs, if they are still the same."""

import copy

import pytest
import torch

from optimum_memopt.engines.compile.memory.tape import TapeRecorder
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.train.engine import CompileEngine
from tests.compiled import selection
from tests.gradients import assert_bitwise_same_step
from tests.model_zoo import ZOO
from tests.rotation import in_turn
from tests.train.test_caveat import Output

LAYERS = 5


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Stack(torch.nn.Module):
    """Runs the layers in its attribute `runs`, which is no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.runs = tuple(range(LAYERS))

    def forward(self, x: torch.Tensor) -> Output:
        for number in self.runs:
            x = self.layers[number](x)
        return Output(loss=x.square().sum())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets an entry for each forward whose runs are recorded."""
    noted: list[int] = []
    end = TapeRecorder.end

    def counted(self: TapeRecorder, outputs: object) -> None:
        noted.append(self.count)
        end(self, outputs)

    monkeypatch.setattr(TapeRecorder, "end", counted)
    return noted


@pytest.mark.parametrize("unit", [LAYER, pytest.param(MODEL, marks=in_turn)])
@pytest.mark.parametrize("asked", ["level 1", pytest.param("", marks=in_turn)])
def test_runs_are_noted_once_for_each_size(unit: str, asked: str, recorded: list[int]) -> None:
    model, zoo = ZOO["roberta-mlm"].build(**ZOO["roberta-mlm"].deep(LAYERS)), ZOO["roberta-mlm"]
    engine = CompileEngine(selection(asked), "aot_eager", loss="plain", unit=unit)
    plain = copy.deepcopy(model)
    engine.attach(model)
    batch = zoo.batch()
    shorter = {name: value[:, :-3].contiguous() for name, value in batch.items()}
    for each in (batch, shorter, batch, shorter, batch):
        assert_bitwise_same_step(model, plain, each)
    assert len(recorded) == 2
    engine.detach()


def test_layers_that_are_left_out_are_seen(recorded: list[int]) -> None:
    """Skipped layers are noticed although no argument changed: each step is bitwise that of the layers that ran."""
    model = Stack()
    plain = copy.deepcopy(model)
    engine = CompileEngine(selection("level 1"), "aot_eager", unit=LAYER)
    engine.attach(model)
    batch = {"x": torch.randn(4, 16)}
    everything = tuple(range(LAYERS))
    calls = [everything, everything, (0, 2), (0, 2), everything, (4, 3, 1), (1,), everything, (1, 1, 1)]
    for runs in calls:
        model.runs = plain.runs = runs
        assert_bitwise_same_step(model, plain, batch)
    # All calls except the second and the fourth, which are equal to the calls before them.
    assert len(recorded) == len(calls) - 2
    engine.detach()


@in_turn
def test_an_argument_that_is_another_one_is_recorded(recorded: list[int]) -> None:
    """A call is recorded again if two arguments that were one tensor are now two equal ones."""
    zoo = ZOO["llama"]
    model = zoo.build(**zoo.deep(LAYERS))
    plain = copy.deepcopy(model)
    engine = CompileEngine(selection("level 1"), "aot_eager", loss="plain", unit=LAYER)
    engine.attach(model)
    batch = zoo.batch()
    ids = batch["input_ids"]
    for labels in (ids, ids, ids.clone(), ids.clone(), ids):
        assert_bitwise_same_step(model, plain, {**batch, "labels": labels})
    assert len(recorded) == 2
    engine.detach()


class Counting(Stack):
    """Counts its forwards in Python code that a graph break in the loop leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Output:
        self.calls += 1
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return Output(loss=x.square().mean())


def test_code_between_graphs_runs_once() -> None:
    """A forward of another size runs other graphs; rerunning it to record them would repeat what Python did."""
    model = Counting().train()
    engine = CompileEngine(selection("level 1"), compiler="aot_eager")
    engine.attach(model)
    for step in range(5):
        model(torch.randn(4, 6 + step % 2, 16)).loss.backward()
        assert model.calls == step + 1
    engine.detach()
