import copy
import functools
import json
import os
import subprocess
import sys
import types

import pytest
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification, TrainerCallback

from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback, format_line, format_table
from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.logs import set_log_level
from optimum_memopt.memory import peak_monitor
from optimum_memopt.memory.peak_monitor import CpuMemory, CudaMemory
from optimum_memopt.sizes import MIB
from tests.trackers import numbers, tracked

PHASES = ["pre_forward", "post_forward", "pre_backward", "post_backward", "post_optimizer_step"]
SPIKE = 256  # MiB
SLACK = 48  # MiB

exact_only = pytest.mark.skipif(not peak_monitor.can_reset_resident_peak(), reason="VmHWM cannot be reset here")


def spike(mib):
    torch.ones(int(mib * MIB) // 4)


class BackwardSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mib):
        ctx.mib = mib
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        spike(ctx.mib)
        return gradient, None


class Spiky(torch.nn.Module):
    """Briefly allocates known amounts in the forward and backward of chosen calls (None: every call)."""

    def __init__(self, forward=0, backward=0, calls=None):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.forward_mib, self.backward_mib, self.calls = forward, backward, calls
        self.call = -1

    def forward(self, x, labels=None):
        self.call += 1
        now = self.calls is None or self.call in self.calls
        spike(self.forward_mib if now else 0)
        output = BackwardSpike.apply(self.linear(x), self.backward_mib if now else 0)
        return {"loss": torch.nn.functional.mse_loss(output[:, 0], labels), "logits": output}


def spiky_data():
    return [{"x": torch.ones(4), "labels": torch.tensor(1.0)} for _ in range(8)]


def roberta():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return RobertaForSequenceClassification(RobertaConfig(vocab_size=50, max_position_embeddings=20, **sizes))


def token_data():
    return [{"input_ids": torch.randint(3, 50, (10,)), "labels": torch.tensor(n % 2)} for n in range(8)]


@pytest.fixture
def train(trainer_of, tmp_path):
    """Returns a function that trains a model, and returns the records of steps {step: {phase: record}} and runs."""

    def run(model, data, *, log_steps=0, callbacks=(), callback=None, **arguments):
        path = tmp_path / "memopt.jsonl"
        path.unlink(missing_ok=True)
        callback = callback or MemoryPhasesCallback(log_steps, path)
        own = {"model": model, "train_dataset": data, "eval_dataset": data}
        trainer = trainer_of([*callbacks, callback], own=own, **arguments)
        tracked(trainer).train()
        records = [json.loads(line) for line in path.read_text().splitlines()]
        steps = {}
        for record in records:
            if record["phase"] != "run":
                assert record["phase"] not in steps.setdefault(record["step"], {})
                steps[record["step"]][record["phase"]] = record
        runs = [record for record in records if record["phase"] == "run"]
        return types.SimpleNamespace(steps=steps, runs=runs, trainer=trainer, callback=callback, path=path)

    return run


def assert_complete(steps, numbers):
    assert {step: list(phases) for step, phases in steps.items()} == dict.fromkeys(numbers, PHASES)


def test_all_phases_at_the_steps_that_are_due(train):
    result = train(Spiky(), spiky_data(), max_steps=34)
    assert_complete(result.steps, [*range(10), 16, 32])
    assert_complete(train(Spiky(), spiky_data(), log_steps=3, max_steps=8).steps, [0, 3, 6])


@exact_only
def test_a_phase_sees_what_was_taken_in_it_and_the_others_do_not(train, capsys):
    steps = train(Spiky(forward=SPIKE, backward=2 * SPIKE), spiky_data()).steps
    phases = steps[2]
    before = phases["pre_forward"]["resident"]
    taken = {phase: phases[phase]["peak_resident"] - before for phase in PHASES}
    assert taken["post_forward"] == pytest.approx(SPIKE, abs=SLACK)
    assert taken["post_backward"] == pytest.approx(2 * SPIKE, abs=SLACK)
    assert "highest measured phase: up to post_backward of step" in capsys.readouterr().err
    for phase in ("pre_forward", "pre_backward", "post_optimizer_step"):
        assert taken[phase] < SLACK
    assert all(phases[phase]["resident"] - before < SLACK for phase in PHASES)
    assert phases["post_forward"]["method"] == "exact"


@exact_only
def test_peaks_are_the_highest_of_the_micro_batches(train):
    model = Spiky(forward=SPIKE, calls=[4])  # the first of the two micro-batches of step 2
    steps = train(model, spiky_data(), gradient_accumulation_steps=2).steps
    assert_complete(steps, range(3))
    peak = {step: phases["post_forward"]["peak_resident"] for step, phases in steps.items()}
    assert peak[2] - peak[1] == pytest.approx(SPIKE, abs=SLACK)


@exact_only
def test_the_runs_peak_counts_steps_that_are_not_reported(train):
    result = train(Spiky(forward=SPIKE, calls=[4]), spiky_data(), log_steps=3, max_steps=7)
    highest = max(record["peak_resident"] for phases in result.steps.values() for record in phases.values())
    assert result.callback.measured_peak_mib - highest == pytest.approx(SPIKE, abs=SLACK)
    assert [record["measured_peak"] for record in result.runs] == [result.callback.measured_peak_mib]


def test_table_and_metrics(train, capsys):
    result = train(roberta(), token_data(), max_steps=8)
    method = result.callback._monitor.method
    output = capsys.readouterr().err
    titles = [line.partition(")")[0] for line in output.splitlines() if line.startswith("step ")]
    assert titles == [f"step {step} (MiB, {method}" for step in (0, 1, 2, 4)], "not the steps that are alike"
    readings = {
        phase: CpuMemory(found["resident"], found["peak_resident"]) for phase, found in result.steps[4].items()
    }
    assert list(readings) == PHASES
    assert format_table(4, readings, method) in output
    assert "rank-0 step" not in output
    assert "measured peak of the run" in output
    assert [entry["step"] for entry in numbers(result.trainer) if "memopt/post_backward/resident_mib" in entry] == [
        *range(1, 9)
    ]
    assert numbers(result.trainer, "post_backward/resident_mib")[4] == readings["post_backward"].resident
    assert len(numbers(result.trainer, "measured_peak_mib")) == 1


def test_devinfo_shows_all_reported_steps_in_the_shape_of_onnx_runtime(train, capsys):
    set_log_level("devinfo")
    result = train(roberta(), token_data(), max_steps=4)
    output = capsys.readouterr().err
    for step, phases in result.steps.items():
        for phase, found in phases.items():
            reading = CpuMemory(found["resident"], found["peak_resident"])
            assert format_line(step, phase, reading, found["method"]) in output


def test_a_table_of_cuda_memory():
    lines = format_table(3, {"pre_forward": CudaMemory(1, 2, 3, 4, 5, 6)}, "exact").splitlines()
    names = "step 3 (MiB) allocated max allocated cached max cached inactive max inactive"
    assert [line.split() for line in lines[1:]] == [names.split(), ["pre_forward", "1", "2", "3", "4", "5", "6"]]


def test_line_shapes():
    assert format_line(3, "pre_forward", CpuMemory(1.4, 2.6), "sampled") == (
        "rank-0 step 3 memory (MiB) | phase: pre_forward | resident: 1 | peak resident: 3 (sampled)"
    )
    assert format_line(0, "post_backward", CudaMemory(1, 2, 3, 4, 5, 6), "exact") == (
        "rank-0 step 0 memory (MiB) | phase: post_backward | allocated: 1 | max allocated: 2 | cached: 3 | "
        "max cached: 4 | inactive: 5 | max inactive: 6"
    )


def test_tensors_are_found_in_any_output():
    a, b, c = (torch.ones(1) for _ in range(3))
    assert list(map(id, tensors_in({"x": a, "y": (b, [c, None, "text"])}))) == [id(a), id(b), id(c)]
    assert [id(tensor) for tensor in tensors_in(a)] == [id(a)]
    assert list(tensors_in(None)) == []


def test_a_forward_replaced_on_the_instance(train):
    model = roberta()
    inner = copy.copy(model)  # shares the model's hooks, like the engines' copies
    inner.forward = types.MethodType(type(model).forward, inner)

    @functools.wraps(type(model).forward)
    def forward(*args, **kwargs):
        return inner(*args, **kwargs)

    model.forward = forward
    assert_complete(train(model, token_data()).steps, range(3))


def test_a_compiled_model(train):
    model = roberta()
    model.compile(backend="eager")
    assert_complete(train(model, token_data()).steps, range(3))


@pytest.mark.parametrize(
    "arguments",
    [
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"bf16": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_ways_to_train(train, arguments):
    assert_complete(train(roberta(), token_data(), **arguments).steps, range(3))


class DiesOnce(TrainerCallback):
    def __init__(self):
        self.alive = True

    def on_step_end(self, args, state, control, **kwargs):
        if self.alive:
            self.alive = False
            raise RuntimeError("died")


def test_a_run_after_one_that_died(train, tmp_path):
    model, callback, dies = roberta(), MemoryPhasesCallback(path=tmp_path / "memopt.jsonl"), DiesOnce()
    with pytest.raises(RuntimeError, match="died"):
        train(model, token_data(), callback=callback, callbacks=[dies])
    assert not model._forward_hooks
    assert_complete(train(model, token_data(), callback=callback, callbacks=[dies]).steps, range(3))
    assert not model._forward_hooks


def test_a_copy_of_the_model_made_during_training_is_not_observed(train):
    class Copies(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            copied = copy.deepcopy(model).train()
            batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.tensor([0, 1])}
            copied(**batch).loss.backward()

    assert_complete(train(roberta(), token_data(), callbacks=[Copies()]).steps, range(3))


DDP_SCRIPT = """
import os, sys, torch
from transformers import Trainer, TrainingArguments
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from optimum_memopt.callbacks.input_density import InputDensityCallback
from transformers import RobertaConfig, RobertaForSequenceClassification

torch.set_num_threads(1)
config = RobertaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=32, max_position_embeddings=20)
data = [{"input_ids": torch.randint(3, 50, (10,)), "labels": torch.tensor(n % 2)} for n in range(8)]
args = TrainingArguments(sys.argv[1], use_cpu=True, report_to="none", save_strategy="no", max_steps=2,
                         per_device_train_batch_size=1, gradient_accumulation_steps=2, disable_tqdm=True)
path = sys.argv[1] + "/memopt.jsonl"
trainer = Trainer(model=RobertaForSequenceClassification(config), args=args, train_dataset=data,
                  callbacks=[MemoryPhasesCallback(path=path), InputDensityCallback(path=path)])
trainer.train()
assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
# torch 2.13's gloo thread may drop a Python tensor while the interpreter shuts down, which aborts the process.
os._exit(0)
"""


@pytest.mark.nightly
def test_two_ranks_write_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DDP_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(script), str(tmp_path)], env=environment, check=True, timeout=300)
    records = [json.loads(line) for line in (tmp_path / "memopt.jsonl").read_text().splitlines()]
    phases = [(record["step"], record["phase"]) for record in records if record["kind"] == "memory_phases"]
    assert phases == [(step, phase) for step in (0, 1) for phase in PHASES] + [(2, "run")]
    tokens = [(record["input"], record["total_tokens"]) for record in records if record.get("scope") == "step"]
    assert tokens == [("input_ids", 20), ("labels", 2)] * 2
