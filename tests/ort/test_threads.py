"""Models that are trained in several threads at once are all trained by ONNX Runtime, and nothing global is left."""

import copy
import importlib
import logging
import os
import threading
import warnings
from typing import Any

import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.compat import ortmodule
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options.flags import OrtOptions
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import needs_ort

pytestmark = needs_ort

STEPS = 3


def state() -> dict[str, Any]:
    """What the engine changes for the time of a call."""
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

    # torch and scipy leave things of their own behind when they are first used.
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
