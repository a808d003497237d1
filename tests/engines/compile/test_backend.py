"""What the backend does around its compilers; `test_inductor.py` trains with inductor."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as symbolic_config
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt.engines.compile import backend
from optimum_memopt.engines.compile.backend import _Partitioner, check_compiler, configured, default_compiler
from optimum_memopt.engines.compile.engine import CompileEngine
from optimum_memopt.errors import MemOptError
from tests.engines.compile.compiled import selection
from tests.gradients import accumulate

CONFIGS = (torch._dynamo.config, functorch_config, symbolic_config, inductor_config)


class Net(torch.nn.Module):
    """`fails` is read while the forward is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.fails = False

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        if self.fails:
            raise RuntimeError("the forward failed")
        return CausalLMOutput(loss=torch.nn.functional.gelu(self.linear(x)).square().sum())


@pytest.fixture
def batch():
    return {"x": torch.randn(64, 64)}


def switches() -> list[Mapping[str, Any]]:
    """All of torch's, as the user has them."""
    return [config.get_config_copy() for config in CONFIGS]


def attached(model: torch.nn.Module, asked: str = "") -> CompileEngine:
    engine = CompileEngine(selection(asked), "aot_eager", dynamic=False)
    engine.attach(model)
    return engine


def test_switches_are_on_within_and_given_back():
    before = switches()
    with pytest.raises(KeyError), configured():
        assert not torch._dynamo.config.optimize_ddp and torch._dynamo.config.recompile_limit > 1000
        assert not symbolic_config.use_duck_shape and not functorch_config.enable_autograd_cache
        assert switches() != before
        raise KeyError
    assert switches() == before


def test_a_users_own_switches_stay(batch):
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=3), symbolic_config.patch(use_duck_shape=True):
        before = switches()
        model = Net()
        attached(model)
        accumulate(model, [batch])
        assert switches() == before


@pytest.mark.parametrize("error", ["in the forward", "in the config", "in the backend"])
def test_an_error_leaves_nothing_behind(batch, monkeypatch, error):
    model = Net()
    expected = accumulate(model, [batch])
    before = switches()
    engine = attached(model, "Gellu+:1:-1" if error == "in the config" else "")
    if error == "in the backend":
        monkeypatch.setattr(backend.compat, "extract", None)
        monkeypatch.setattr(backend.compat, "default_partition", None)
    model.fails = error == "in the forward"
    with pytest.raises((MemOptError, RuntimeError, TypeError)) as raised:
        model(**batch)
    wanted = {"in the forward": "the forward failed", "in the config": "Gelu+", "in the backend": "not callable"}
    assert wanted[error] in str(raised.value)
    assert switches() == before
    assert backend._compiling.get(None) is None
    monkeypatch.undo()
    model.fails = False
    engine.apply(selection("Gelu+:1:-1" if error == "in the config" else ""))
    losses, gradients = accumulate(model, [batch])
    assert torch.equal(losses, expected[0])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    assert switches() == before
    assert sum(row.frequency for row in engine.plans().plans) == 2, "graphs of the forward that failed are counted"


def test_inductors_key_is_the_plan():
    def key(asked: str) -> bytes:
        return _Partitioner(str(selection(asked))).uuid()

    plans = ["", "Gelu+:1:-1", "Gelu+:1:1", "Gelu+:3:-1", "level 1", "level 2"]
    assert len({key(plan) for plan in plans}) == len(plans)
    assert key("Gelu+:1:-1") == key(" Gelu+:1:-1")
    partitioner = _Partitioner(str(selection("level 1")))
    for again in (copy.deepcopy(partitioner), pickle.loads(pickle.dumps(partitioner))):
        assert again.uuid() == key("level 1")
    script = """
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile.backend import _Partitioner
print(_Partitioner(str(Selection(level=1))).uuid().hex())
"""
    other_process = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert other_process.stdout.strip() == key("level 1").hex()


def test_compilers():
    assert default_compiler("cpu")[0] == default_compiler("meta")[0] == "aot_eager"
    # monkeypatch undoes a setting of torch's configuration by deleting it, for every test that follows.
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        lacking = r"there is no C\+\+ compiler; apt-get install g\+\+.*or take .*aot_eager"
        with pytest.raises(MemOptError, match=lacking):
            check_compiler("inductor", "cpu")
        check_compiler("aot_eager", "cpu")
        with pytest.raises(MemOptError, match="no C"):
            CompileEngine(compiler="inductor").attach(Net())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be Triton")
def test_compilers_for_a_gpu_without_triton():
    compiler, reason = default_compiler("cuda")
    assert compiler == "aot_eager" and "pip install triton" in reason
    with pytest.raises(MemOptError, match="no Triton; pip install triton; or take --memory_opt_compiler aot_eager"):
        check_compiler("inductor", "cuda")
