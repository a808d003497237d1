import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.errors import MemOptError
from tests.gradients import accumulate, assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import ROBERTA, Attach, Pair, count_lines, needs_ort
from tests.rotation import nightly

pytestmark = needs_ort


def test_one_engine_for_a_model_and_one_model_for_an_engine(attach: Attach, pair: Pair) -> None:
    model, plain, engine = pair(ROBERTA.build())
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


class Failing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        raise ValueError("no forward")


def test_each_session_is_announced(lines: list[str]) -> None:
    def session_lines() -> list[str]:
        announced = [line.split(":")[0].split(" in ")[0] for line in lines if "session" in line]
        lines.clear()
        return announced

    model, batch = ZOO["roberta-mlm"].build(), ZOO["roberta-mlm"].batch()
    engine = OrtEngine(None, OrtOptions(ort_fallback=False))
    engine.attach(model)
    session = "the ONNX Runtime session of RobertaForMaskedLM"
    model(**batch).loss.backward()
    assert session_lines() == [f"building {session}", f"built {session}"]
    model(**ZOO["roberta-mlm"].batch(3, 7)).loss.backward()
    assert session_lines() == []
    del batch["labels"]
    model(**batch).logits.sum().backward()
    assert session_lines() == [f"building {session}", f"built {session}"]
    engine.detach()

    failing = Failing()
    engine.attach(failing)
    with pytest.raises(MemOptError, match="no forward"):
        failing(torch.ones(1, 2))
    assert session_lines() == ["building the ONNX Runtime session of Failing"]
    engine.detach()


def through_pickle(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", nightly([copy.deepcopy, through_pickle, through_torch_save], but=["deepcopy"]))
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "detached"])
def test_copies_of_every_kind_are_plain_models(pair: Pair, copied: Callable[..., Any], attached: bool) -> None:
    model, plain, engine = pair(ROBERTA.build(), Selection(level=1))
    accumulate(model, [ROBERTA.batch()])
    if not attached:
        engine.detach()
        assert "forward" not in model.__dict__
    other = copied(model)
    assert engine_of(other) is None
    assert_same_step(other, plain, ROBERTA.batch())
    assert (engine_of(model) is engine) == attached
    assert_same_step(model, plain, ROBERTA.batch(3, 7))


def test_saving_while_attached(attach: Attach, tmp_path: Any) -> None:
    model = ROBERTA.build()
    keys = list(model.state_dict())
    attach(model, Selection(level=1))
    accumulate(model, [ROBERTA.batch()])
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == [name for name, _ in ROBERTA.build().named_modules()]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").train()
    assert engine_of(loaded) is None
    assert_same_step(model, loaded, ROBERTA.batch())
