"""The first forward takes long: the log says when it begins to build a session, and when it has."""

import pytest
import torch

from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options.flags import OrtOptions
from optimum_memopt.errors import MemOptError
from tests.model_zoo import ZOO
from tests.ort.helpers import needs_ort

pytestmark = needs_ort


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
