"""Ctrl-C anywhere in the first forward leaves nothing behind, and ONNX Runtime runs the next forward."""

import copy
import importlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.compat import ortmodule
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import parse
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import needs_ort
from tests.rotation import nightly

pytestmark = needs_ort

CASE = ZOO["roberta-mlm"]
PLAN = Selection(config=parse("Gelu+:1:-1"))
# Methods of ORT's TrainingManager, in the call order of a first forward.
PLACES = ("_build_graph", "_create_execution_agent", "execution_session_run_forward")


@pytest.fixture(autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """Restore the default handler, since a run started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def attached(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[torch.nn.Module, torch.nn.Module, OrtEngine]:
    """Returns a model, its copy and the engine; temporary files go into the folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    model = CASE.build()
    plain = copy.deepcopy(model)
    # The fallback is on, as by default: an interrupt must not end in it.
    engine = OrtEngine(PLAN)
    engine.attach(model)
    return model, plain, engine


def interrupt_in(model: torch.nn.Module, place: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Send this process SIGINT at that place; returns a function that stops it."""
    if place == "export":
        layer = model.get_submodule("roberta.encoder.layer.1")
        return layer.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT)).remove
    ortmodule.load()
    session = importlib.import_module(f"{ortmodule.ORTMODULE}._training_manager").TrainingManager
    original = getattr(session, place)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    is_static = place == "execution_session_run_forward"
    context = monkeypatch.context()
    context.__enter__().setattr(session, place, staticmethod(interrupted) if is_static else interrupted)
    return lambda: context.__exit__(None, None, None)


@pytest.mark.parametrize("place", nightly(["export", *PLACES], but=["export", "_build_graph"]))
def test_an_interrupted_first_forward(monkeypatch: Any, tmp_path: Path, place: str) -> None:
    model, plain, engine = attached(monkeypatch, tmp_path)
    variables, export = dict(os.environ), torch.onnx.export
    try:
        end = interrupt_in(model, place, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            model(**CASE.batch())
        end()
        # torch creates a folder of its own.
        assert [path for path in tmp_path.iterdir() if path.is_file()] == []
        assert engine.plans() is None
        assert (dict(os.environ), torch.onnx.export) == (variables, export)
        assert_same_step(model, plain, CASE.batch())
        assert [plan.config for plan in engine.plans().enabled] == ["Gelu+:1:-1"]
        assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    finally:
        engine.detach()


def test_a_plan_that_cannot_be_written_is_not_the_model_s_fault(monkeypatch: Any, tmp_path: Path) -> None:
    model, plain, engine = attached(monkeypatch, tmp_path / "missing")
    try:
        with pytest.raises(MemOptError, match=rf"^cannot write the plan .*{tmp_path}.*: No such file or directory"):
            model(**CASE.batch())
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert_same_step(model, plain, CASE.batch())
    finally:
        engine.detach()
