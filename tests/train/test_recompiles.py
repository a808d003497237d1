"""How often a model is recompiled, which no other model of its class counts for."""

import copy
import re
from collections.abc import Iterator

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.compile.train.planned_forward import Recompiles
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import parse
from tests.trainer_runs import log_lines

LIMIT = 3
FRESH_MODELS = 2 * LIMIT


class Broken(torch.nn.Module):
    """Two graphs, the second in a function that torch makes for what follows a graph break."""

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


def attached(model: torch.nn.Module, selection: Selection | None = None) -> CompileEngine:
    engine = CompileEngine(selection, "aot_eager", dynamic=False)
    engine.outputs_read_by = lambda: ""
    engine.attach(model)
    return engine


def rows(count: int = 32) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


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
    # The first model's graphs are still there.
    with log_lines() as lines:
        engines[0]._model(rows())["loss"].backward()
    assert lines == []


@pytest.mark.parametrize("build", [Whole, Broken])
def test_a_model_that_recompiles_with_every_batch_is_stopped_and_told_why(build: type[torch.nn.Module]) -> None:
    model = build()
    attached(model)
    with log_lines() as lines:
        for index in range(LIMIT):
            model(rows(2 + index))["loss"].backward()
        with pytest.raises(MemOptError) as caught:
            model(rows(2 + LIMIT))
    recompiles = [line for line in lines if line.startswith("recompiled the training graph; failed guard: ")]
    assert recompiles and len({re.sub(r"\d+", "N", line) for line in recompiles}) == len(recompiles)
    message = str(caught.value)
    assert message.startswith(f"{build.__name__} was recompiled {LIMIT} times, which is the limit; last failed guard")
    assert "size mismatch at index 0" in message and "pad batches to fewer lengths" in message
    assert "\n" not in message and len(message) < 1000


def test_a_user_may_allow_more() -> None:
    with torch._dynamo.config.patch(recompile_limit=100):
        assert dynamo.recompile_limit() == 100


class Counting(Whole):
    """Computes with a number of its own and one of a submodule, which both change at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.second.temperature = 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"loss": super().forward(x)["loss"] * self.calls / self.second.temperature}


def test_a_number_that_changes_at_every_step_is_named_once_with_a_suggestion() -> None:
    model = Counting()
    attached(model)
    with log_lines() as lines:
        for _ in range(LIMIT):
            model(rows())["loss"].backward()
        with pytest.raises(MemOptError) as caught:
            model(rows())
    assert sum("failed guard: self.calls == " in line for line in lines) == 1, lines
    assert sum("recompiled for each value of self.calls" in line for line in lines) == 1, lines
    message = str(caught.value)
    assert "make self.calls a tensor" in message and "register_buffer('calls'" in message
    assert "pad batches" not in message and "\n" not in message


@pytest.mark.parametrize(
    ("guards", "advice"),
    [
        (["0/0: alpha == 0.5", "0/1: alpha == -1e-05"], "pass alpha as a tensor (torch.tensor(alpha))"),
        (
            ["0/0: self._modules['head'].scale == 1", "0/1: self._modules['head'].scale == 2"],
            "register_buffer('scale'",
        ),
        (["0/0: self.calls == 1"], "pad batches to fewer lengths"),
        (["0/0: L['x'].size()[0] == 4", "0/1: L['x'].size()[0] == 5"], "pad batches to fewer lengths"),
    ],
)
def test_advice(guards: list[str], advice: str) -> None:
    failed = Recompiles()
    assert failed.note(guards[0]) == f"recompiled the training graph; failed guard: {guards[0][5:]}"
    for guard in guards[1:] * 3:
        failed.note(guard)
    assert advice in failed.advice
    assert guards[-1][5:] in failed.last
