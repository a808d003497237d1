"""An exported graph is taken from the cache for the model, and the inputs, that it was exported from, and no other."""

import contextlib
import copy
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import optimum_memopt
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.ort import missing
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import get_logger
from optimum_memopt.plans.grammar import parse
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO

pytestmark = pytest.mark.skipif(bool(missing()), reason="no onnxruntime-training")

TAKEN = "loaded the exported graph"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level("INFO")
    return caplog


@pytest.fixture
def attach() -> Iterator[Callable[..., OrtEngine]]:
    engines = []

    def attach(model: torch.nn.Module, folder: Path, selection: Selection | None = None) -> OrtEngine:
        engine = OrtEngine(selection, OrtOptions(ort_fallback=False, ort_cache_dir=str(folder)))
        engine.attach(model)
        engines.append(engine)
        return engine

    yield attach
    for engine in engines:
        engine.detach()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


class Scaled(torch.nn.Module):
    """Two constants that no config knows: a number and a tensor that is not a buffer."""

    def __init__(self, scale: float = 1.0, offset: float = 0.0, function: Callable[..., Any] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.scale = scale
        self.offset = torch.full((8,), offset)
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(values) * self.scale + self.offset).square().mean()


def lora(alpha: int) -> torch.nn.Module:
    config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(ZOO["llama"].build(), config).train()


MODELS = {
    "scale": [lambda: Scaled(), lambda: Scaled(scale=7.0), lambda: Scaled(scale=1.0 + 1e-7)],
    "tensor": [lambda: Scaled(), lambda: Scaled(offset=0.5)],
    "function": [lambda: Scaled(), lambda: Scaled(function=torch.sigmoid), lambda: Scaled(function=lambda x: x * 2)],
    "lora": [lambda: lora(4), lambda: lora(64)],
}


@pytest.mark.parametrize("which", MODELS)
def test_a_model_takes_its_own_graph_only(attach: Any, tmp_path: Path, log: Any, which: str) -> None:
    models = MODELS[which]
    batch = ZOO["llama"].batch() if which == "lora" else {"values": torch.randn(3, 8)}
    for make in models + models:
        model = make()
        plain = copy.deepcopy(model)
        engine = attach(model, tmp_path)
        if which == "lora":
            assert_same_step(model, plain, batch)
        else:
            losses = [trained(**batch) for trained in (model, plain)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
            torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
        engine.detach()
    assert len(entries(tmp_path)) == len(models)
    assert sum(TAKEN in record.getMessage() for record in log.records) == len(models)


def train(attach: Any, folder: Path, selection: Selection | None = None) -> OrtEngine:
    model = ZOO["roberta-mlm"].build()
    plain = copy.deepcopy(model)
    engine = attach(model, folder, selection)
    assert_same_step(model, plain, ZOO["roberta-mlm"].batch())
    return engine


def test_another_process_takes_it(attach: Any, tmp_path: Path) -> None:
    train(attach, tmp_path)
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.model_zoo import ZOO
import optimum_memopt
model = ZOO["roberta-mlm"].build()
optimum_memopt.optimize(model, memory_opt_engine="ort", ort_fallback=False, ort_cache_dir={str(tmp_path)!r})
model(**ZOO["roberta-mlm"].batch()).loss.backward()
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert TAKEN in finished.stderr
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"", lambda content: b"x" + content])
def test_a_damaged_entry_is_replaced(attach: Any, tmp_path: Path, log: Any, damage: Callable[[bytes], bytes]) -> None:
    train(attach, tmp_path)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    entry.write_bytes(damage(content))
    train(attach, tmp_path)
    assert entries(tmp_path) == [entry] and entry.read_bytes() == content
    assert f"{entry} is damaged and is replaced" in log.text
    assert TAKEN not in log.text


def test_what_cannot_be_written_costs_neither_the_training_nor_the_plan(attach: Any, tmp_path: Path, log: Any) -> None:
    selection = Selection(config=parse("Gelu+:1:-1"))
    no_folder = tmp_path / "file"
    no_folder.touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a full disk does, this lets a file begin and not end.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        engines = [train(attach, folder, selection) for folder in (tmp_path / "full", no_folder)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(engine.plans().enabled for engine in engines)
    assert entries(tmp_path) == [no_folder, tmp_path / "full"]
    lines = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len(lines) == 2 and all("training continues, the exported graph is not cached" in line for line in lines)


def test_a_file_is_refused_when_the_run_is_set_up(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(MemOptError, match=f"^--ort_cache_dir {folder}: {file} is a file; name a folder$"):
            optimum_memopt.MemOptOptions(ort_cache_dir=str(folder)).check()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_what_has_no_value_in_the_graph_is_not_kept(attach: Any, tmp_path: Path, log: Any) -> None:
    """Functions are exported by their address in this process (and without the torch extensions refused)."""
    model = Scaled(function=_Doubled.apply)
    attach(model, tmp_path)
    with contextlib.suppress(UnsupportedModelError):
        model(torch.randn(3, 8)).backward()
    assert entries(tmp_path) == []
    assert "the model has a torch.autograd.Function (_Doubled), so this graph is exported in each run" in log.text
