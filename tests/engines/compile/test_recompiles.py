"""How often a model is recompiled, which no other model of its class counts for."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.engine import CompileEngine
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
    monkeypatch.setattr(compat, "_RECOMPILES", LIMIT)
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield


def attached(model: torch.nn.Module, selection: Selection | None = None) -> CompileEngine:
    engine = CompileEngine(selection, "aot_eager", dynamic=False)
    engine.is_for_loss_alone = lambda: True
    engine.attach(model)
    return engine


def rows(count: int = 32) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("isolates", [compat._ISOLATES, False], ids=["as here", "as before torch 2.13"])
def test_fresh_models_of_a_class_in_pieces(monkeypatch: pytest.MonkeyPatch, isolates: bool) -> None:
    """All at once and more than one model may be recompiled, each under its own plan."""
    monkeypatch.setattr(compat, "_ISOLATES", isolates)
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
def test_a_model_that_recompiles_with_every_batch_is_stopped_and_told_why(
    build: Callable[[], torch.nn.Module],
) -> None:
    model = build()
    attached(model)
    with log_lines() as lines:
        for index in range(LIMIT):
            model(rows(2 + index))["loss"].backward()
        with pytest.raises(MemOptError) as caught:
            model(rows(2 + LIMIT))
    recompiles = [line for line in lines if line.startswith("recompiled the training graph; failed guard: ")]
    assert len(recompiles) >= LIMIT and len(set(recompiles)) == len(recompiles)
    message = str(caught.value)
    assert message.startswith(
        f"{build.__name__} was recompiled {LIMIT} times, which is the limit; last failed guards: "
    )
    assert "size mismatch at index 0" in message and "pad batches to fewer lengths" in message
    assert "\n" not in message and len(message) < 1000


def test_a_user_may_allow_more() -> None:
    with torch._dynamo.config.patch(recompile_limit=100):
        assert compat.recompile_limit() == 100
