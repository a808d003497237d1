import copy
import importlib
import logging
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.compat import ortmodule
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options import OrtOptions
from tests import fresh_process
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import needs_ort, run_script

pytestmark = needs_ort


def test_torch_and_its_exporter_are_left_as_they_were(tmp_path: Path) -> None:
    run_script("leave_torch_unchanged.py", cwd=tmp_path, run=fresh_process.run)


@pytest.mark.nightly
def test_a_table_is_the_same_in_every_process(tmp_path: Path) -> None:
    first = run_script("print_tables.py", cwd=tmp_path)
    assert first.count("saving_bytes") > 50
    assert run_script("print_tables.py", cwd=tmp_path) == first


STEPS = 3


def state() -> dict[str, Any]:
    """Returns all state that the engine changes during a call."""
    session = importlib.import_module(f"{ortmodule.ORTMODULE}._graph_transition_manager").GraphTransitionManager
    return {
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "logging": (list(logging.getLogger().handlers), logging.getLogger().level),
        "cross_entropy": torch.nn.functional.cross_entropy,
        "apply": torch.autograd.Function.__dict__["apply"],
        "export": torch.onnx.export,
        "session": dict(vars(session)),
    }


def test_two_models_in_two_threads() -> None:
    errors: list[BaseException] = []
    enabled: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def train(name: str, together: bool = True) -> None:
        case = ZOO[name]
        model = case.build()
        plain = copy.deepcopy(model)
        engine = OrtEngine(Selection(level=1), OrtOptions(ort_fallback=False, ort_module_with_loss=True))
        engine.attach(model)
        try:
            for seed in range(STEPS):
                if together:
                    barrier.wait(timeout=300)
                assert_same_step(model, plain, case.batch(seed=seed))
            enabled[name] = engine.plans().enabled
        except BaseException as error:
            errors.append(error)
            barrier.abort()
        finally:
            engine.detach()

    # torch and scipy leave state of their own behind when they are first used.
    train("bert-mlm", together=False)
    before = state()
    threads = [threading.Thread(target=train, args=(name,)) for name in ("roberta-mlm", "gpt2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert errors == []
    assert len(enabled) == 3 and all(enabled.values())
    assert state() == before


def test_an_arena_that_the_user_registered_stays():
    from optimum_memopt.engines.ort.session import session

    ortmodule.load()
    session.register_arena()
    # A second registration is an error in ORT, whoever made the first one.
    session.register_arena.cache_clear()
    session.register_arena()
    case = ZOO["roberta-mlm"]
    model = case.build()
    engine = OrtEngine(options=OrtOptions(ort_fallback=False, ort_arena=True))
    engine.attach(model)
    assert_same_step(model, case.build(), case.batch())
    engine.detach()
