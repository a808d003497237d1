"""Every optimizer steps as torch's AdamW, with Trainer's own parameter groups; those that cannot run are refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from optimum_memopt import MemOptError, MemOptTrainer, attach, optimize
from optimum_memopt.engines.ort import optimizers
from optimum_memopt.engines.ort.compat import ortmodule
from optimum_memopt.engines.shared.optimizers import OPTIMIZERS
from tests import fresh_process
from tests.train import deepspeed_runs
from tests.train.deepspeed_runs import NAME, TRAINING
from tests.train.launchers.launching import alone, needs_compiler, needs_deepspeed
from tests.trainer_runs import build, distance, log_lines, make, weights

ROOT = Path(__file__).parents[2]
CLOSE = 1e-5


def can_build():
    return shutil.which("c++") is not None and shutil.which("ninja") is not None


# Tests that may build two operators, which takes minutes each.
builds = pytest.mark.timeout(1800)
BUILT = (pytest.mark.extensions, needs_deepspeed, needs_compiler, builds)
OF_DEEPSPEED = ("deepspeed_fused_adam", "deepspeed_cpu_adam")
EACH = ["torch_fused_adamw", *(pytest.param(name, marks=BUILT) for name in OF_DEEPSPEED)]
CLASSES = {
    "torch_fused_adamw": "torch.optim.adamw.AdamW",
    "deepspeed_fused_adam": "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed_cpu_adam": "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
}


@pytest.fixture(autouse=True)
def _deepspeed_on_the_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Returns a stock Trainer after 20 steps of torch's AdamW."""
    trainer = make(tmp_path_factory.mktemp("reference"), NAME, plain=True, optim="adamw_torch", **TRAINING)
    trainer.train()
    return trainer


def optimizer_class(trainer):
    kind = type(trainer.optimizer.optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def groups(trainer):
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return [
        ([names[id(p)] for p in group["params"]], group["weight_decay"], group["lr"])
        for group in trainer.optimizer.param_groups
    ]


@pytest.mark.parametrize("name", EACH)
def test_it_steps_as_torchs_adamw(tmp_path, reference, name):
    whole = make(tmp_path, NAME, memory_opt_optim=name, save_strategy="steps", save_steps=10, **TRAINING)
    whole.train()
    assert optimizer_class(whole) == CLASSES[name]
    assert groups(whole) == groups(reference)
    assert {decay for _, decay, _ in groups(whole)} == {0.3, 0.0}
    assert distance(weights(whole.model), weights(reference.model)) < CLOSE
    assert distance(weights(whole.model), weights(build(NAME))) > 0.01

    other = build(NAME, seed=5)
    resumed = make(tmp_path / "again", NAME, model=other, memory_opt_optim=name, **TRAINING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed.state.global_step == 20
    assert optimizer_class(resumed) == CLASSES[name]
    assert distance(weights(resumed.model), weights(reference.model)) < CLOSE


@pytest.mark.parametrize("changed", ["weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate"])
def test_each_argument_counts(tmp_path, reference, changed):
    """A change of any argument changes the weights, so that their closeness in the test above is meaningful."""
    ours = make(tmp_path, NAME, memory_opt_optim="torch_fused_adamw", **{**TRAINING, changed: TRAINING[changed] * 0.9})
    ours.train()
    assert distance(weights(ours.model), weights(reference.model)) > 10 * CLOSE


def test_attach_and_a_second_training(tmp_path):
    trainer = make(tmp_path, NAME, plain=True, model=None, model_init=lambda: build(NAME), max_steps=2)
    attach(trainer, memory_opt_optim="torch_fused_adamw")
    trainer.train()
    trainer.args.learning_rate = 0.5
    trainer.train()
    assert trainer.optimizer.param_groups[0]["fused"] is True
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.5
    assert trainer.optimizer_cls_and_kwargs is None


# Refusals.


def refusal(folder, **changes):
    with pytest.raises(MemOptError) as caught:
        make(folder, NAME, **changes)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("--memory_opt_optim ")
    return message


def test_an_unknown_name(tmp_path):
    allowed = "deepspeed_fused_adam, deepspeed_cpu_adam, torch_fused_adamw, ort_fused_adam"
    assert f"adamw: allowed: {allowed}" in refusal(tmp_path, memory_opt_optim="adamw")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "sgd"}, "--optim sgd names an optimizer too"),
        ({"optim": "adamw_torch"}, "--optim adamw_torch names an optimizer too"),
        ({"optim_args": "a=1"}, "--optim_args are for Trainer's own"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, "was given optimizer_cls_and_kwargs"),
    ],
    ids=str,
)
def test_something_else_names_the_optimizer(tmp_path, changes, message):
    assert message in refusal(tmp_path, memory_opt_optim="torch_fused_adamw", **changes)


def test_an_optimizer_that_is_given(tmp_path):
    model = build(NAME)
    given = (torch.optim.SGD(model.parameters()), None)
    message = refusal(tmp_path, model=model, optimizers=given, memory_opt_optim="torch_fused_adamw")
    assert "was given an optimizer (optimizers=…)" in message


def test_a_trainer_that_makes_its_own(tmp_path):
    class Own(MemOptTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.SGD(self.model.parameters())
            return self.optimizer

    trainer = make(tmp_path, NAME, trainer=Own, memory_opt_optim="torch_fused_adamw")
    with pytest.raises(MemOptError, match="Own.create_optimizer creates its own SGD; leave out one of them"):
        trainer.train()


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without CUDA says")
def test_onnx_runtimes_adam_needs_cuda(tmp_path):
    message = refusal(tmp_path, memory_opt_optim="ort_fused_adam")
    assert message.endswith("runs on CUDA only, this run is on cpu; use torch_fused_adamw")
    missing = OPTIMIZERS["ort_fused_adam"].missing("cuda")
    assert "needs its torch extension fused_ops, which is not built here; use deepspeed_fused_adam" in missing


@needs_deepspeed
def test_what_deepspeed_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    fused, cpu = (OPTIMIZERS[name].missing for name in OF_DEEPSPEED)
    assert "DeepSpeedCPUAdam steps on the CPU, but this run is on cuda; turn on DeepSpeed's offload" in cpu("cuda")
    assert fused("cuda") == "DeepSpeed builds for cpu, but this run is on cuda; set DS_ACCELERATOR=cuda"
    with log_lines() as lines:
        assert fused("cpu") == "" or not can_build()
    assert any("compiles its operator fused_adam" in line and "minutes" in line for line in lines)
    assert not any("another process that compiles" in line for line in lines)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for name in OF_DEEPSPEED:
        message = refusal(tmp_path, memory_opt_optim=name)
        assert "no C++ compiler no-such-compiler here; install one, or name yours in CXX" in message
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("c++") or ""))
    monkeypatch.setattr("torch.utils.cpp_extension.is_ninja_available", lambda: False)
    assert "no ninja on the PATH; pip install ninja" in refusal(tmp_path, memory_opt_optim="deepspeed_cpu_adam")


@needs_deepspeed
@needs_compiler
def test_a_build_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with log_lines() as lines:
        assert OPTIMIZERS["deepspeed_cpu_adam"].missing("cpu") == ""
    assert any(line.startswith(f"{lock}: ") and line.endswith("a killed process leaves behind") for line in lines)


def test_a_loop_without_a_trainer_has_no_optimizer():
    for options in ({"memory_opt_optim": "torch_fused_adamw"}, {"ort_fp16_optimizer": True}):
        with pytest.raises(MemOptError, match=f"--{next(iter(options))} needs a Trainer"):
            optimize(build(NAME), **options)


# FP16_Optimizer, and DeepSpeed's own rules, in a separate process, since DeepSpeed's state stays in a process.


def test_a_run_that_is_not_in_fp16_says_so(tmp_path):
    trainer = make(tmp_path, NAME, ort_fp16_optimizer=True, max_steps=1)
    with log_lines() as lines:
        trainer.train()
    (line,) = [line for line in lines if line.startswith("--ort_fp16_optimizer")]
    assert "the optimizer is unchanged" in line and line.endswith(": this run is not in fp16 (--fp16)")


def run_under_deepspeed(folder, what):
    """Run `deepspeed_runs.py`, and return its results and stderr."""
    environment = {**os.environ, **alone(), "DS_ACCELERATOR": "cpu"}
    done = fresh_process.run(deepspeed_runs.__file__, what, folder, environment=environment, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text()), done.stderr


@pytest.fixture(scope="module")
def under_deepspeed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, *run_under_deepspeed(folder, "zero")


@needs_deepspeed
@builds
def test_what_deepspeeds_config_does_not_go_with(under_deepspeed):
    _, found, _ = under_deepspeed
    assert 'the DeepSpeed config has its own "optimizer"' in found["own"]
    for case in ("offload", "offload-fused"):
        assert "offload_optimizer steps on the CPU; use --memory_opt_optim deepspeed_cpu_adam" in found[case]
    assert found["offload-unforced"] == ""
    assert found["offload-cpu"] == "" or not can_build()


@needs_deepspeed
@builds
def test_zero_takes_the_optimizer_without_being_told_that_it_may(under_deepspeed, reference):
    folder, found, _ = under_deepspeed
    assert found["optimizer"] == "DeepSpeedZeroOptimizer AdamW True"
    assert distance(torch.load(folder / "weights.pt"), weights(reference.model)) < CLOSE


@pytest.mark.nightly
@needs_deepspeed
@needs_compiler
@builds
def test_offload_keeps_the_weight_decay_decoupled(tmp_path, reference):
    """Weight decay stays decoupled under offload; accelerate would replace DeepSpeedCPUAdam by one with L2 decay."""
    run_under_deepspeed(tmp_path, "offload")
    assert distance(torch.load(tmp_path / "weights.pt"), weights(reference.model)) < CLOSE


@needs_deepspeed
@builds
def test_fp16_optimizer_leaves_what_onnx_runtime_does_not_know_and_says_so(under_deepspeed):
    """FP16_Optimizer skips optimizers unknown to ONNX Runtime; on CUDA it would know DeepSpeed up to 0.13.1."""
    _, found, errors = under_deepspeed
    assert found["reason"].startswith("Skip modifying optimizer because of unsupported DeepSpeed version")
    assert found["untouched"] is True
    assert "optimizer name not found in the registry: torch.optim.adamw.AdamW" in found["unknown"]
    assert any(line.endswith("this run is not in fp16 (--fp16)") for line in found["lines"])
    assert "Old Source Code Start" not in errors


class MegatronsOptimizer:
    """The only optimizer that ONNX Runtime's FP16_Optimizer modifies on a CPU, by its name and these methods."""

    def __init__(self):
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    def _check_overflow(self): ...

    def clip_master_grads(self): ...


MegatronsOptimizer.__module__, MegatronsOptimizer.__qualname__ = "megatron.fp16.fp16", "FP16_Optimizer"


@pytest.mark.parametrize("built", [False, True])
def test_fp16_optimizer_modifies_what_it_knows_if_its_operators_are_there(monkeypatch, built):
    monkeypatch.setattr(optimizers, "has_fused_ops", lambda: ortmodule.load() is not None and built)
    optimizer = MegatronsOptimizer()
    reason = optimizers.modify_fp16_optimizer(optimizer)
    assert ("clip_master_grads" in vars(optimizer)) == ("_check_overflow" in vars(optimizer)) == built
    assert reason == "" if built else "fused_ops, which the new methods call, is not built here" in reason
