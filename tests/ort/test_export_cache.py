"""A cached graph is used only for the model and the inputs that it was exported from."""

import contextlib
import copy
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import optimum_memopt
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import set_log_level
from tests import fresh_process
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.ort import helpers
from tests.ort.helpers import DROPOUT, MLM, Attach
from tests.rotation import nightly

pytestmark = helpers.needs_ort

LOADED = "loaded the exported graph"


def attach_with_cache(
    attach: Attach, model: torch.nn.Module, folder: Path, selection: Selection | None = None
) -> OrtEngine:
    return attach(model, selection, ort_cache_dir=str(folder))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


class Scaled(torch.nn.Module):
    """Has two constants that no config contains: a number and a tensor that is not a buffer."""

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
    lora_config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(ZOO["llama"].build(), lora_config).train()


MODELS = {
    "scale": [lambda: Scaled(), lambda: Scaled(scale=7.0), lambda: Scaled(scale=1.0 + 1e-7)],
    "tensor": [lambda: Scaled(), lambda: Scaled(offset=0.5)],
    "function": [lambda: Scaled(), lambda: Scaled(function=torch.sigmoid), lambda: Scaled(function=lambda x: x * 2)],
    "lora": [lambda: lora(4), lambda: lora(64)],
}


@pytest.mark.parametrize("which", nightly(MODELS, but=["scale", "lora"]))
def test_a_model_takes_its_own_graph_only(attach: Attach, tmp_path: Path, lines: list[str], which: str) -> None:
    models = MODELS[which]
    batch = ZOO["llama"].batch() if which == "lora" else {"values": torch.randn(3, 8)}
    for make in models + models:
        model = make()
        plain = copy.deepcopy(model)
        engine = attach_with_cache(attach, model, tmp_path)
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
    assert helpers.count_lines(lines, LOADED) == len(models)


def train(attach: Attach, folder: Path, selection: Selection | None = None) -> OrtEngine:
    model = MLM.build()
    plain = copy.deepcopy(model)
    engine = attach_with_cache(attach, model, folder, selection)
    assert_same_step(model, plain, MLM.batch())
    return engine


def test_another_process_uses_it(attach: Attach, tmp_path: Path) -> None:
    train(attach, tmp_path)
    assert LOADED in helpers.run_script("train_with_export_cache.py", tmp_path, run=fresh_process.run)
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-9], *nightly([lambda content: b"", lambda content: b"x" + content], but=[])]
)
def test_a_damaged_entry_is_replaced(
    attach: Attach, tmp_path: Path, lines: list[str], damage: Callable[[bytes], bytes]
) -> None:
    train(attach, tmp_path)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    entry.write_bytes(damage(content))
    train(attach, tmp_path)
    assert entries(tmp_path) == [entry] and entry.read_bytes() == content
    assert helpers.count_lines(lines, f"{entry} is damaged and is replaced") == 1
    assert helpers.count_lines(lines, LOADED) == 0


def test_what_cannot_be_written_costs_neither_the_training_nor_the_plan(
    attach: Attach, tmp_path: Path, lines: list[str]
) -> None:
    selection = helpers.config("Gelu+:1:-1")
    no_folder = tmp_path / "file"
    no_folder.touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Like a full disk: files can be created but not completed.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    set_log_level("warning")
    try:
        engines = [train(attach, folder, selection) for folder in (tmp_path / "full", no_folder)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        set_log_level("info")
    assert all(engine.plans().enabled for engine in engines)
    assert entries(tmp_path) == [no_folder, tmp_path / "full"]
    assert len(lines) == 2 and all("training continues, the exported graph is not cached" in line for line in lines)


def test_a_file_is_refused_when_the_run_is_set_up(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(MemOptError, match=f"^--ort_cache_dir {folder}: {file} is a file; give a folder$"):
            optimum_memopt.MemOptOptions(ort_cache_dir=str(folder)).check()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_what_has_no_value_in_the_graph_is_not_kept(attach: Attach, tmp_path: Path, lines: list[str]) -> None:
    """A graph with a function's address in this process is not cached (and refused without the torch extensions)."""
    model = Scaled(function=_Doubled.apply)
    attach_with_cache(attach, model, tmp_path)
    with contextlib.suppress(UnsupportedModelError):
        model(torch.randn(3, 8)).backward()
    assert entries(tmp_path) == []
    assert helpers.count_lines(
        lines, "the model has a torch.autograd.Function (_Doubled), so this graph is exported in each run"
    )


def test_a_cached_export_is_not_taken_for_another_graph(attach: Attach, tmp_path: Path) -> None:
    cases = [
        (MLM.build(), MLM.batch()),
        (MLM.build(), MLM.batch()),
        (MLM.build(), helpers.inputs(MLM, token_type_ids=torch.zeros(4, 12, dtype=torch.long))),
        (MLM.build(), helpers.inputs(MLM, labels=None)),
        (MLM.build(layer_norm_eps=0.1), MLM.batch()),
        (MLM.build(tie_word_embeddings=False), MLM.batch()),
        (MLM.build(**DROPOUT), MLM.batch()),
    ]
    frozen = MLM.build()
    helpers.freeze(frozen)
    cases.append((frozen, MLM.batch()))
    for model, batch in cases:
        plain = copy.deepcopy(model)
        engine = attach_with_cache(attach, model, tmp_path)
        if model.config.hidden_dropout_prob:
            # With dropout, the losses of two calls differ; without dropout, a graph's losses would not.
            assert len({float(model(**batch).loss.detach()) for _ in range(3)}) == 3
        else:
            helpers.assert_same_outputs(model, plain, batch)
        engine.detach()
    assert any(tmp_path.rglob("*.onnx"))
