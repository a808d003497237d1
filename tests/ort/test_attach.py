"""Attaching and detaching, hooks, and forwards that the user has replaced."""

import copy
import gc
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options.flags import OrtOptions
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.errors import MemOptError
from tests.gradients import accumulate, assert_same_step
from tests.ort.helpers import (
    ROBERTA,
    Attach,
    config,
    count_lines,
    needs_ort,
)

pytestmark = needs_ort


def test_one_engine_for_a_model_and_one_model_for_an_engine(attach: Attach) -> None:
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    engine = attach(model)
    engine.attach(model)
    with pytest.raises(MemOptError, match="already has the ort engine attached"):
        attach(model)
    with pytest.raises(MemOptError, match="is attached to another model"):
        engine.attach(ROBERTA.build())
    assert_same_step(model, plain, ROBERTA.batch())
    engine.detach()
    engine.detach()
    assert engine_of(model) is None
    assert "forward" not in model.__dict__
    assert_same_step(model, plain, ROBERTA.batch())
    attach(model)
    assert_same_step(model, plain, ROBERTA.batch())


def test_two_models_train_side_by_side(attach: Attach) -> None:
    models = [ROBERTA.build(seed=0), ROBERTA.build(seed=1)]
    plain = copy.deepcopy(models)
    attach(models[0], config("Gelu+:1:-1"))
    attach(models[1], Selection(level=1))
    for seed in range(2):
        for model, reference in zip(models, plain, strict=True):
            assert_same_step(model, reference, ROBERTA.batch(seed=seed))


def test_a_dropped_model_and_engine_are_freed() -> None:
    import weakref

    model = ROBERTA.build()
    engine = OrtEngine(Selection(level=1), OrtOptions(ort_fallback=False))
    engine.attach(model)
    accumulate(model, [ROBERTA.batch()])
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None


def test_hooks_on_the_model_run_once_and_those_inside_are_warned_about(attach: Attach, lines: list[str]) -> None:
    model = ROBERTA.build()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_forward_hook(lambda *_: calls.append("post"))
    model.roberta.encoder.register_forward_hook(lambda *_: None)
    attach(model)
    assert count_lines(lines, "hooks on 1 submodules (roberta.encoder)") == 1
    for _ in range(2):
        calls.clear()
        accumulate(model, [ROBERTA.batch()])
        assert calls == ["pre", "post"]


def test_a_forward_that_the_user_replaced_is_the_one_that_trains(attach: Attach) -> None:
    import types

    model = ROBERTA.build()

    def doubled(self: torch.nn.Module, **kwargs: Any) -> Any:
        outputs = type(self).forward(self, **kwargs)
        outputs.loss = outputs.loss * 2
        return outputs

    model.forward = types.MethodType(doubled, model)
    plain = copy.deepcopy(model)
    plain.forward = types.MethodType(doubled, plain)
    engine = attach(model)
    assert_same_step(model, plain, ROBERTA.batch())
    engine.detach()
    assert model.forward.__func__ is doubled
