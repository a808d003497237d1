"""`plan --device` with the CPU's operators, against the same model traced on the device."""

import pytest
import torch
from gpu.steps import MODELS, forward

from optimum_memopt.engines.api.predictions import StepEstimate
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.predict.workload import Workload
from optimum_memopt.step_settings import StepSpec
from tests.cuda.steps import model_of, training

AUTOCAST = {"fp32": "", "bf16": "bfloat16"}
is_h100 = pytest.mark.skipif("H100" not in torch.cuda.get_device_name(), reason="the table's H100 is compared")


def planned(folder: str, name: str, dtype: str) -> StepEstimate:
    task = "text-generation" if name == "llama" else "fill-mask"
    workload = Workload(folder, task, batch_size=8, seq_len=256)
    return estimate(workload, Selection(), StepSpec("h100", "aot_eager", AUTOCAST[dtype]))


@is_h100
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", AUTOCAST)
def test_the_step_is_that_of_the_device(name: str, dtype: str, tmp_path) -> None:
    model = model_of(name)
    model.config.save_pretrained(tmp_path)
    found = planned(str(tmp_path), name, dtype)
    trained = training(name, dtype, memory_opt_level=0, memory_opt_loss="auto")
    forward(trained.model, trained.batch, dtype)
    footprint = trained.engine.predictor.footprint()
    assert found.parts["activations"] == pytest.approx(footprint.activations, rel=0.001)
    assert found.peak_mib * 2**20 == pytest.approx(footprint.peak, rel=0.02)
    assert (
        found.table.header[0].split(", attention: ")[1] == trained.engine.plans().header[0].split(", attention: ")[1]
    )
