import inspect
import json
import re
import threading
from dataclasses import dataclass

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments

from optimum_memopt import MemOptError, MemOptOptions, attach, optimize, run_summary
from optimum_memopt.engines.compile.capture.capture import check_trainer_arguments
from optimum_memopt.engines.ort.compat import installation
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import choose_engines
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import assert_bitwise_same_step
from tests.rotation import nightly
from tests.trackers import numbers, tracked
from tests.trainer_runs import CASES, arguments, build, collate, distance, log_lines, make, rows, tables, weights

ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def test_a_default_of_a_subclass_is_nothing_that_the_user_gave():
    @dataclass
    class Recipe(MemOptOptions):
        ort_fallback: bool = False

    Recipe(memory_opt_engine="compile").check()
    with pytest.raises(MemOptError, match="--ort_fallback with the compile engine"):
        Recipe(memory_opt_engine="compile", ort_fallback=True).check()


def test_fsdp_1_by_accelerate_and_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(MemOptError, match="does not support FSDP 1, .*use FSDP2"):
        check_trainer_arguments(arguments(TrainingArguments, tmp_path))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    args = arguments(TrainingArguments, tmp_path)
    args._n_gpu = 2
    with pytest.raises(MemOptError, match="2 GPUs in one process.*CUDA_VISIBLE_DEVICES=0"):
        check_trainer_arguments(args)


def test_trls_offloading_is_refused(tmp_path):
    trl = pytest.importorskip("trl")
    args = arguments(trl.SFTConfig, tmp_path, bf16=False, activation_offloading=True)
    with pytest.raises(MemOptError, match="--activation_offloading with the compile engine: .* leave it out"):
        check_trainer_arguments(args)


@pytest.mark.parametrize("by_launcher", [True, False])
def test_parallelism_within_a_layer_is_refused(tmp_path, monkeypatch, by_launcher):
    asked = {}
    if by_launcher:
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    else:
        asked["parallelism_config"] = ParallelismConfig(tp_size=2)
    kind = "context" if by_launcher else "tensor"
    with pytest.raises(MemOptError, match=f"does not support {kind} parallelism, .*use FSDP2"):
        check_trainer_arguments(arguments(TrainingArguments, tmp_path, **asked))


def test_auto_takes_it_where_onnx_runtime_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(installation, "missing", lambda: "onnxruntime-training is not installed")
    assert choose_engines("auto") == (
        ("compile",),
        "auto: the first engine that works here; ort: onnxruntime-training is not installed",
    )
    model = build("gpt2")
    with pytest.raises(MemOptError, match="--ort_arena with the compile engine"):
        optimize(model, ort_arena=True)
    assert optimize(model) is engine_of(model)
    assert engine_of(model).name == "compile"


@pytest.mark.parametrize(
    "name", nightly(["small", "roberta-classification", "deberta-v2-classification"], but=["small"])
)
def test_checkpoints_are_the_plain_trainers(tmp_path, name):
    """Checkpoints are bitwise the plain Trainer's, with dropout, also if a plain run is resumed under a plan. Both
    models infer their problem type; only one writes it to its config."""
    saved = {}
    dropout = {"dropout": 0.1} if name == "small" else CASES[name].dropout
    for kind in ("plain", "ours"):
        changes = {"plain": True} if kind == "plain" else {**ENGINE, "memory_opt_level": 1}
        trainer = make(tmp_path / kind, name, model=build(name, **dropout), **SAVING, **changes)
        with log_lines() as lines:
            trainer.train()
        folder = tmp_path / kind / "checkpoint-4"
        files = {str(path.relative_to(tmp_path / kind)) for path in (tmp_path / kind).rglob("*") if path.is_file()}
        config = json.loads((folder / "config.json").read_text())
        saved[kind] = files, config, load_file(folder / "model.safetensors")
    assert saved["ours"][:2] == saved["plain"][:2]
    assert distance(saved["ours"][2], saved["plain"][2]) == 0
    assert len(tables(lines)) == 1 and not any("recompiled" in line for line in lines), lines

    again = make(
        tmp_path / "plain", name, model=build(name, seed=5, **dropout), **SAVING, **ENGINE, memory_opt_level=1
    )
    with log_lines() as lines:
        again.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    # Steps are counted from the checkpoint on.
    assert len([line for line in lines if line.startswith("predicted ") and "after 2 steps" in line]) == 1
    assert distance(weights(again.model), weights(trainer.model)) == 0


def test_a_recompile_says_its_reason_once():
    model = build("small")
    engine = optimize(model, **ENGINE, memory_opt_level=1)
    with log_lines() as lines:
        for size in (4, 3, 1, 1, 2):
            model(**CASES["small"].batch(size, 5 + size)).loss.backward()
    assert [line.split(" in ")[0] for line in lines[:2]] == [
        "compiling the training graph of SmallForSequenceClassification with aot_eager: traces, partitions "
        "and compiles forward and backward once; takes a minute for large models",
        "compiled the training graph of SmallForSequenceClassification and ran its forward",
    ]
    assert lines[2] == str(engine.plans())
    assert len(lines) == 4 and lines[3].startswith("recompiled the training graph; failed guard: "), lines
    assert "size()[0]" in lines[3], lines
    assert engine.plans().enabled


@pytest.mark.parametrize(
    "name, own", nightly([("small", {"picks_labelled": True}), ("deberta-v2-classification", {})], but=["small"])
)
def test_a_forward_in_pieces_is_planned_together_and_says_why(name, own):
    """A forward in several graphs is planned together and says why; DeBERTa selects rows with labels by an index."""
    model, plain, batch = build(name, **own), build(name, **own), CASES[name].batch()
    batch["labels"][1] = -1
    optimize(model, **ENGINE, memory_opt_level=1)
    with log_lines() as lines:
        model(**batch).loss.backward()
    plain(**batch).loss.backward()
    assert model.config.problem_type is None
    assert sum("graphs, planned together: " in line for line in lines) == 1, lines
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_model_that_torch_cannot_trace_says_so():
    class Untraceable(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        @torch.compiler.disable
        def forward(self, x):
            return (self.weight * x).sum()

    model = Untraceable()
    engine = optimize(model, **ENGINE)
    with log_lines() as lines:
        model(torch.arange(3.0)).backward()
    assert model.weight.grad.tolist() == [0.0, 1.0, 2.0]
    assert sum(line.startswith("NOT under a plan") for line in lines) == 1
    assert engine.plans().header[0].startswith("NOT under a plan")


class Collecting(torch.nn.Module):
    """Registers a hook on its layer in the first forward, like transformers' models that collect hidden states."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())])
        self.register_buffer("forwards", torch.zeros(()))
        self.lock, self.is_hooked = threading.Lock(), False

    def forward(self, x):
        self.forwards += 1
        if not self.is_hooked:
            with self.lock:
                self.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
                self.is_hooked = True
        return self.layers[0](x).square().sum()


@pytest.mark.parametrize("asked", [{"memory_opt_level": 1}, {"memory_opt_budget": "100GiB"}], ids=str)
def test_a_forward_that_hooks_its_modules_at_first_is_planned_with_the_hooks(asked):
    model, plain = Collecting(), Collecting()
    plain.load_state_dict(model.state_dict())
    engine = optimize(model, **ENGINE, **asked)
    x = torch.rand(8, 64)
    with log_lines() as lines:
        for one in (model, plain):
            for _ in range(2):
                one(x).backward()
    again = "the first forward of Collecting registered module hooks: recompiling"
    assert lines.count(again) == 1
    assert not any("graphs" in line or "recompiled" in line for line in lines), lines
    assert engine.predictor.caveat == ""
    assert model.forwards == plain.forwards
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class NoText:
    """A dict key without a repr, which torch needs when a forward reads the dict."""

    def __repr__(self):
        raise ZeroDivisionError("no text")


class Halfway(torch.nn.Module):
    """A model that cannot be traced after a graph break."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("forwards", torch.zeros(()))
        self.table = {NoText(): 1}

    def forward(self, x):
        self.forwards += 1
        x = self.weight * x * torch.rand(3)
        torch._dynamo.graph_break()
        return (x * len(self.table)).sum()


def why_not_traced():
    lines, first = inspect.getsourcelines(NoText.__repr__)
    place = f"{__file__}:{first + len(lines) - 1}, in __repr__"
    return f"torch cannot trace this model (ZeroDivisionError: no text, at {place})"


@pytest.mark.falls_back
def test_a_model_that_breaks_torchs_tracer_trains_as_plain_pytorch():
    model, plain = Halfway(), Halfway()
    engine = optimize(model, **ENGINE, memory_opt_level=1)
    with log_lines() as lines:
        for one in (model, plain):
            torch.manual_seed(0)
            for _ in range(2):
                one(torch.arange(3.0)).backward()
    said = [f"NOT under a plan: {why_not_traced()}"]
    assert [line for line in lines if line.startswith("NOT")] == said
    assert list(engine.plans().header) == said
    assert model.forwards == plain.forwards
    assert torch.equal(model.weight.grad, plain.weight.grad)


def test_a_model_that_breaks_torchs_tracer_has_no_budget():
    model = Halfway()
    optimize(model, **ENGINE, memory_opt_budget="64GiB")
    said = f"--memory_opt_budget 64GiB: {why_not_traced()}, so that nothing"
    with pytest.raises(UnsupportedModelError, match=re.escape(said)):
        model(torch.arange(3.0))
    assert model.forwards == 0


@pytest.mark.parametrize("name, own", nightly([("small", {"repeats": True}), ("deberta-v2-mlm", {})], but=["small"]))
def test_a_last_batch_of_one_row_has_fewer_plans_and_trains_on(name, own):
    """A last batch of one row trains with fewer plans: DeBERTa repeats nothing, so a row of the config is missing."""
    model, plain = build(name, **own), build(name, **own)
    engine = optimize(model, **ENGINE, memory_opt_config="Gelu+:1:-1,Tile+:1:-1")
    with log_lines() as lines:
        for size in (3, 1):
            assert_bitwise_same_step(model, plain, CASES[name].batch(size))
    assert len(engine.plans().enabled) == 2, "the table is the first batch's"
    assert sum('no plan "Tile+" in this model' in line for line in lines) == 1, lines


def lora(name):
    torch.manual_seed(0)
    # By default one factor is initialized to zero, so that the other's gradient is zero.
    modules = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    # With a single layer level 1 recomputes nothing, since the peak is in that layer's backward.
    return get_peft_model(build(name, num_hidden_layers=3), LoraConfig(r=4, init_lora_weights=False, **modules))


@pytest.mark.nightly
def test_lora(tmp_path):
    name = "roberta-classification"
    saved = {}
    for kind, own in (("plain", {"plain": True}), ("ours", {**ENGINE, "memory_opt_level": 1})):
        trainer = make(tmp_path / kind, name, model=lora(name), **SAVING, **own)
        trainer.train()
        folder = tmp_path / kind / "checkpoint-4"
        saved[kind] = {path.name for path in folder.iterdir()}, load_file(folder / "adapter_model.safetensors")
    assert saved["ours"][0] == saved["plain"][0]
    assert distance(saved["ours"][1], saved["plain"][1]) < 1e-6
    assert distance(weights(trainer.model), weights(lora(name))) > 1e-3
    table = trainer.memopt.table
    assert len(table.enabled) > 2
    # Only the gradient of the following weights, which are frozen, would read a Gelu's output.
    assert "Gelu+:1:-1" not in {plan.config for plan in table.plans}


def test_the_plan_of_a_run_is_the_plan_of_the_next(tmp_path):
    name, path = "small", tmp_path / "plan.json"
    trained = {}
    for kind, plan in (("level", {"memory_opt_level": 1}), ("file", {"memory_opt_plan": str(path)})):
        torch.manual_seed(0)
        trainer = make(tmp_path / kind, name, model=build(name), **ENGINE, **plan)
        if kind == "level":
            with pytest.raises(MemOptError, match="no plan before the first training step"):
                trainer.memopt.save_plan(path)
        trainer.train()
        trained[kind] = weights(trainer.model), [row.applied_count for row in trainer.memopt.table.plans]
        trainer.memopt.save_plan(path)
    assert distance(trained["file"][0], trained["level"][0]) == 0
    assert trained["file"][1] == trained["level"][1] and any(trained["file"][1])


@pytest.mark.nightly
def test_generation_during_evaluation(tmp_path):
    """A Seq2SeqTrainer generates with the model in training as without an engine. The loss is plain, since the chunked
    one equals PyTorch's only up to rounding."""
    predicted = {}
    for kind in ("plain", "ours"):
        steps = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
        generation = {"predict_with_generate": True, "generation_max_length": 6}
        args = arguments(Seq2SeqTrainingArguments, tmp_path, **steps, **generation)
        model = build("t5", num_layers=1, num_decoder_layers=1)
        trainer = Seq2SeqTrainer(model, args, collate, rows("t5"), rows("t5", 4, seed=1))
        if kind == "ours":
            attach(trainer, **ENGINE, memory_opt_level=1, memory_opt_loss="plain")
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        predicted[kind] = losses, trainer.predict(rows("t5", 4, seed=1)).predictions.tolist()
    assert len(losses) == 2 and trainer.memopt.table.enabled
    assert predicted["ours"] == predicted["plain"]


def test_every_observer_and_both_peaks_at_the_end(tmp_path):
    file = tmp_path / "found.jsonl"
    observers = {"log_input_density": True, "log_memory_phases": True, "memory_opt_log_file": str(file)}
    trainer = make(tmp_path, "small", **ENGINE, memory_opt_level=1, **observers)
    with log_lines() as lines:
        tracked(trainer).train()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {record["kind"] for record in records} == {"plan_stats", "input_density", "memory_phases"}
    predicted, measured = trainer.memopt.plan_stats.predicted_peak_mib, trainer.memopt.measured_peak_mib
    assert f"predicted {predicted:.1f} MiB, measured {measured:.1f} MiB" in "\n".join(lines)
    compared = [line for line in lines if line.startswith("predicted ")]
    assert [line.split(") ")[1] for line in compared] == ["after 2 steps", "at the peak of the run"]
    summary = run_summary(trainer)
    assert f"predicted peak {predicted:.1f} MiB" in summary and f"measured peak  {measured:.1f} MiB" in summary
    logged = {name for entry in numbers(trainer) for name in entry}
    assert {"memopt/plans/on", "memopt/run_peak_mib", "memopt/predicted_peak_mib"} <= logged
    assert [entry["step"] for entry in numbers(trainer) if "memopt/measured_of_predicted" in entry] == [2, 5]
