import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optimum_memopt.cache_files import CACHE_VARIABLE
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.errors import MemOptError
from tests.ort.helpers import Attach, Pair, environment_variables


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Yields a function that attaches an engine without fallback; all engines are detached after the test."""
    from optimum_memopt.engines.ort.engine import OrtEngine

    engines = []

    def attach(model: torch.nn.Module, selection: Selection | None = None, **options: Any) -> OrtEngine:
        engine = OrtEngine(selection, OrtOptions(**{"ort_fallback": False, **options}))
        engine.attach(model)
        engines.append(engine)
        return engine

    yield attach
    for engine in engines:
        engine.detach()


@pytest.fixture
def pair(attach: Attach) -> Pair:
    """Returns a function that copies a model and then attaches an engine to it."""

    def pair(model: torch.nn.Module, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
        plain = copy.deepcopy(model)
        return model, plain, attach(model, *args, **options)

    return pair


@pytest.fixture
def lines() -> Iterator[list[str]]:
    from tests.trainer_runs import log_lines

    with log_lines() as lines:
        yield lines


@pytest.fixture(scope="session")
def environment_with_extensions() -> dict[str, str]:
    """Returns the environment of a process that finds the built extensions, either in the named cache or in the user's
    own, where they are built if missing."""
    if not installation.onnxruntime_dir():
        pytest.skip("no onnxruntime-training")
    with pytest.MonkeyPatch.context() as environment:
        if extensions.find() is None:
            environment.delenv(CACHE_VARIABLE, raising=False)
        if extensions.find() is None:
            try:
                extensions.check_compiler()
            except MemOptError as error:
                pytest.skip(str(error))
            extensions.build()
        return dict(os.environ)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment_variables():
        monkeypatch.delenv(name)


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    """Fake a machine with a GPU, the CUDA build of onnxruntime-training and the built extensions."""
    monkeypatch.setattr(installation, "cuda_missing", lambda: "")
    monkeypatch.setattr(extensions, "find", lambda: {})
