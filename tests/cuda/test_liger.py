"""Liger Kernel's kernels under the engine: one graph, and their bytes. On the stand-in they compute nothing;
`benchmarks/gpu/` compares gradients on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import optimum_memopt
from tests.cuda.steps import Training

liger = pytest.importorskip("liger_kernel.transformers")
VOCABULARY = 8192
# There torch takes the tensors that a norm's kernel reads for written ones, which are saved.
IS_OLD = Version(torch.__version__) < Version("2.13")


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    """Yields a model with all of Liger Kernel's kernels, which replace names in transformers' module."""
    held = dict(vars(modeling_llama))
    forward = LlamaForCausalLM.forward
    liger.apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False)
    yield modeling_llama.LlamaForCausalLM(config).cuda().train()
    for name, value in held.items():
        setattr(modeling_llama, name, value)
    LlamaForCausalLM.forward = forward


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
@pytest.mark.parametrize("unit", ["layer", "model"])
@pytest.mark.parametrize("level", [0, 1])
def test_bytes_are_the_prediction(model: torch.nn.Module, compiler: str, unit: str, level: int, caplog) -> None:
    how = {"memory_opt_engine": "compile", "memory_opt_compiler": compiler, "memory_opt_loss": "chunked"}
    engine = optimum_memopt.optimize(model, memory_opt_level=level, memory_opt_unit=unit, **how)
    ids = torch.randint(5, VOCABULARY, (8, 128), device="cuda")
    training = Training(model, engine, torch.optim.SGD(model.parameters()), {"input_ids": ids, "labels": ids}, "fp32")
    for _ in range(3):
        held = training.step()
    table = engine.plans()
    assert "loss in chunks" in table.header[0]
    assert not [line for line in (*table.header, *caplog.messages) if "graph break" in line or "NOT under" in line]
    assert engine.predictor.activations() == pytest.approx(held.activations, rel=0.02 if IS_OLD else 0.01)
    saved = engine.predictor.saved()
    engine.detach()
    if not IS_OLD:
        # Four layers, each of which keeps only its input.
        assert saved < 20 * 2**20 if level else saved > 35 * 2**20
