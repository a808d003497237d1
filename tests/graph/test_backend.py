"""The backend apart from its compilers; `test_inductor.py` trains with inductor."""

import copy
import gc
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as symbolic_config
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt.engines.compile.capture.backend import _Partitioner, check_compiler, default_compiler
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.process import fewer_collections
from tests import fresh_process
from tests.compiled import selection
from tests.gradients import accumulate, assert_bitwise_same_step

CONFIGS = (torch._dynamo.config, functorch_config, symbolic_config, inductor_config)


class Net(torch.nn.Module):
    """A model whose forward raises while it is traced if `fails` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.fails = False

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        if self.fails:
            raise RuntimeError("the forward failed")
        return CausalLMOutput(loss=torch.nn.functional.gelu(self.linear(x)).square().sum())


class Gated(torch.nn.Module):
    """A softplus of a gate, made contiguous: its backward returns strides other than those that torch traces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        gate = torch.nn.functional.softplus(self.gate(x)).transpose(1, 2).contiguous()
        return CausalLMOutput(loss=gate.square().sum())


@pytest.fixture
def batch():
    return {"x": torch.randn(64, 64)}


def switches() -> list[Mapping[str, Any]]:
    return [config.get_config_copy() for config in CONFIGS]


def attached(model: torch.nn.Module, asked: str = "") -> CompileEngine:
    engine = CompileEngine(selection(asked), "aot_eager", dynamic=False)
    engine.attach(model)
    return engine


def test_switches_are_on_within_and_given_back():
    before, collector = switches(), gc.get_threshold()
    with pytest.raises(KeyError), dynamo.configured(has_regions=False), fewer_collections():
        assert not torch._dynamo.config.optimize_ddp and torch._dynamo.config.recompile_limit > 1000
        assert not symbolic_config.use_duck_shape and not functorch_config.enable_autograd_cache
        assert switches() != before
        assert gc.get_threshold()[0] > collector[0]
        raise KeyError
    assert switches() == before and gc.get_threshold() == collector


def test_a_collector_that_is_off_stays_off():
    before = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with fewer_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_users_own_switches_stay(batch):
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=3), symbolic_config.patch(use_duck_shape=True):
        before = switches()
        model = Net()
        attached(model)
        accumulate(model, [batch])
        assert switches() == before


@pytest.mark.falls_back
@pytest.mark.parametrize("error", ["in the forward", "in the config", "in the backend"])
def test_an_error_leaves_nothing_behind(batch, monkeypatch, error):
    model = Net()
    expected = accumulate(model, [batch])
    before = switches()
    engine = attached(model, "Gellu+:1:-1" if error == "in the config" else "")
    if error == "in the backend":
        monkeypatch.setattr(fx_graph, "extract", None)
        monkeypatch.setattr(fx_graph, "default_partition", None)
    model.fails = error == "in the forward"
    if error == "in the backend":
        model(**batch)
        assert engine.plans().header[0].startswith("NOT under a plan: torch cannot compile this model (TypeError: ")
    else:
        with pytest.raises((MemOptError, RuntimeError)) as raised:
            model(**batch)
        assert {"in the forward": "the forward failed", "in the config": "Gelu+"}[error] in str(raised.value)
    assert switches() == before
    monkeypatch.undo()
    model.fails = False
    engine.apply(selection("Gelu+:1:-1" if error == "in the config" else ""))
    losses, gradients = accumulate(model, [batch])
    assert torch.equal(losses, expected[0])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    assert switches() == before
    assert sum(row.frequency for row in engine.plans().plans) == 2, "graphs of the forward that failed are counted"


def key_of(choice: Choice) -> bytes:
    """Returns the key in inductor's cache of a graph partitioned by this choice."""
    partitioner = _Partitioner(lambda *joint: (choice, ()))
    partitioner(None, None, num_fwd_outputs=1)
    return partitioner.uuid()


@pytest.mark.parametrize("asked", ["", "level 1"])
def test_strides_that_were_traced_otherwise_are_no_error(asked):
    model = Gated()
    plain = copy.deepcopy(model)
    attached(model, asked)
    assert_bitwise_same_step(model, plain, {"x": torch.randn(4, 5, 8)})


def test_inductors_key_is_the_choice(roberta):
    def key(asked: str) -> bytes:
        return key_of(roberta.choose(asked))

    plans = ["", "Gelu+:1:-1", "Gelu+:1:1", "Gelu+:3:-1", "Gelu+:1:0", "level 1"]
    keys = {asked: key(asked) for asked in plans}
    assert len(set(keys.values())) == len(plans)
    for same in (" Gelu+:1:-1", "BiasGelu+:1:-1", "Gelu+:1:2", "Gelu+:1:99", "Gelu+:1:-1,Dropout+:1:0"):
        assert key(same) == keys["Gelu+:1:-1"], same
    assert key("Gelu+:1:-1,Dropout+:1:1") == key("Dropout+:1:1,BiasGelu+:1:2")


@pytest.mark.nightly
def test_inductors_key_is_known_to_copies(roberta):
    partitioner = _Partitioner(lambda *joint: (roberta.split("level 1").graph.choice, ()))
    # inductor copies its configuration before it receives the joint graph.
    before, without_choice = copy.deepcopy(partitioner), partitioner.uuid()
    partitioner(None, None, num_fwd_outputs=1)
    key = partitioner.uuid()
    assert key != without_choice
    for again in (before, copy.deepcopy(partitioner), pickle.loads(pickle.dumps(partitioner))):
        assert again.uuid() == key
    script = f"""
from optimum_memopt.engines.compile.capture.backend import _Partitioner
print(_Partitioner(None, {roberta.split("level 1").graph.choice.key!r}).uuid().hex())
"""
    other_process = fresh_process.run("-c", script)
    assert other_process.stdout.strip() == key.hex()


def test_compilers():
    assert default_compiler("cpu")[0] == default_compiler("meta")[0] == "aot_eager"
    # monkeypatch undoes a torch setting by deleting it, which would affect every later test.
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        lacking = r"there is no C\+\+ compiler; apt-get install g\+\+.*or use .*aot_eager"
        with pytest.raises(MemOptError, match=lacking):
            check_compiler("inductor", "cpu")
        check_compiler("aot_eager", "cpu")
        with pytest.raises(MemOptError, match="no C"):
            CompileEngine(compiler="inductor").attach(Net())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be Triton")
def test_compilers_for_a_gpu_without_triton():
    compiler, reason = default_compiler("cuda")
    assert compiler == "aot_eager" and "pip install triton" in reason
    with pytest.raises(
        MemOptError, match="Triton is not installed; pip install triton; or use --memory_opt_compiler aot_eager"
    ):
        check_compiler("inductor", "cuda")
