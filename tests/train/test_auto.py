"""`auto` trains with an engine that can: options, arguments, the model or a training forward decide which."""

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from optimum_memopt import MemOptError, MemOptOptions, optimize
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort import checks
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import create
from optimum_memopt.errors import UnsupportedModelError
from optimum_memopt.options import resolve
from tests.trainer_runs import CASES, build, distance, log_lines, make, weights

NAME = "small"
AUTO = {"memory_opt_engine": "auto", "ort_fallback": True}
SWITCHED = "training with the compile engine"


class NoGradient(torch.nn.Module):
    """A forward that ONNX Runtime cannot train; it draws random numbers and writes a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(200, 16)
        self.drop = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(16, 3)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, input_ids, labels=None, attention_mask=None):
        self.forwards.add_(1)
        hidden = torch.nn.functional.gelu(self.drop(self.embed(input_ids)).mean(1))
        scale = torch.histc(hidden.detach(), bins=4).max() / 100
        logits = self.head(hidden) * (1 + scale)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def switches(lines):
    return [line for line in lines if SWITCHED in line]


def test_a_forward_that_fails_leaves_the_run_of_the_other_engine(tmp_path):
    """After a failed forward the run is bitwise the other engine's: same random numbers, buffers written once."""
    found = {}
    for engine in ("auto", "compile"):
        options = AUTO if engine == "auto" else {"memory_opt_engine": "compile"}
        trainer = make(tmp_path / engine, NAME, model=NoGradient(), memory_opt_config="Gelu+:1:-1", **options)
        with log_lines() as lines:
            trainer.train()
            trainer.train()
        found[engine] = weights(trainer.model)
        assert [plan.config for plan in trainer.memopt.table.enabled] == ["Gelu+:1:-1"]
        assert trainer.memopt.engine.name == trainer.memopt.table.engine == "compile"
        expected = "ONNX Runtime cannot train NoGradient: "
        assert [line.startswith(expected) for line in switches(lines)] == [True] * (engine == "auto"), lines
        assert engine_of(trainer.model) is None
    assert found["auto"]["forwards"] == 10
    assert distance(found["auto"], found["compile"]) == 0


def test_a_model_that_the_first_engine_trains_stays_there():
    model = build(NAME)
    engine = optimize(model, **AUTO, memory_opt_level=1)
    assert engine_of(model) is engine and engine.name == "ort"
    model(**CASES[NAME].batch()).loss.backward()
    assert engine.plans().engine == "ort" and engine.plans().enabled
    engine.detach()
    assert engine_of(model) is None and "forward" not in vars(model)


def test_a_later_forward_that_fails_is_trained_too():
    """The engine switches in a later forward, even while a forward of the first engine waits for its backward."""
    model, plain = build(NAME), build(NAME)
    engine = optimize(model, **AUTO)
    batch = CASES[NAME].batch()
    for trained in (model, plain):
        loss = trained(**batch).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss + trained(**batch).loss
        loss.backward()
    assert engine.name == "compile" and engine_of(model) is engine
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-4)
    engine.detach()
    assert "forward" not in vars(model)


def test_a_rank_that_has_trained_does_not_switch_alone():
    model = build(NAME)
    batch = CASES[NAME].batch()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        engine = optimize(model, **AUTO)
        model(**batch).loss.backward()
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(UnsupportedModelError, match="give --memory_opt_engine compile"),
        ):
            model(**batch)
        assert engine.name == "ort"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "changes",
    [{"memory_opt_config": "Gelu+:1:1"}, {"memory_opt_config": "Gelu+:3:-1"}, {"memory_opt_compiler": "aot_eager"}],
    ids=str,
)
def test_what_only_the_other_engine_does_is_its_from_the_beginning(changes):
    assert create(resolve(MemOptOptions(**changes))).name == "compile"
    with pytest.raises(MemOptError, match="--ort_arena with the compile engine"):
        resolve(MemOptOptions(**changes, ort_arena=True))


def test_arguments_and_dtypes_of_the_other_engine(tmp_path):
    with log_lines() as lines:
        trainer = make(tmp_path, NAME, bf16=True, memory_opt_level=1, max_steps=2, ort_arena=True, **AUTO)
    assert trainer.memopt.engine.name == "compile"
    assert any(
        line.startswith("engine compile (auto: --bf16 with the ort engine on the CPU")
        and "(--ort_arena not used)" in line
        for line in lines
    ), lines
    trainer.train()
    assert trainer.memopt.table.enabled
    model = build(NAME).bfloat16()
    with log_lines() as lines:
        engine = optimize(model, **AUTO)
    assert engine.name == "compile" and len(switches(lines)) == 1 and "bfloat16 parameters" in lines[0]


def test_what_neither_engine_trains_is_refused(tmp_path):
    with pytest.raises(MemOptError, match="torch_compile with the compile engine"):
        make(tmp_path, NAME, torch_compile=True, **AUTO)
    with pytest.raises(UnsupportedModelError, match="does not support torch.nn.DataParallel"):
        optimize(torch.nn.DataParallel(build(NAME)), **AUTO)


def test_label_smoothing_inside_the_model_survives_the_switch(tmp_path):
    changes = {"label_smoothing_factor": 0.3, "max_steps": 3}
    models = [NoGradient(), NoGradient()]
    for model in models:
        model.config = PreTrainedConfig()
        model.drop.p = 0.0  # the compile engine draws different masks than PyTorch
    plain = make(tmp_path / "plain", NAME, plain=True, model=models[0], **changes)
    ours = make(tmp_path / "ours", NAME, model=models[1], ort_module_with_loss=True, **AUTO, **changes)
    for trainer in (plain, ours):
        trainer.train()
    assert ours.memopt.engine.name == "compile"
    assert distance(weights(ours.model), weights(plain.model)) < 1e-6


def test_parameters_where_onnx_runtime_does_not_run():
    """Parameters on another device than ONNX Runtime's are refused; its CPU build would read GPU memory and crash."""
    message = r"is on cuda, where onnxruntime-training-cpu \S+ does not run; give --memory_opt_engine compile"
    with pytest.raises(UnsupportedModelError, match=message):
        checks.check_device("Model", "cuda")
    with pytest.raises(UnsupportedModelError, match="RobertaForSequenceClassification is on meta"):
        optimize(build("roberta-classification").to("meta"), memory_opt_engine="ort")


def test_an_explicit_engine_names_the_other_one():
    for fallback in (True, False):
        engine = create(resolve(MemOptOptions(memory_opt_engine="ort", ort_fallback=fallback)))
        model = NoGradient()
        engine.attach(model)
        batch = CASES[NAME].batch()
        if fallback:
            model(**batch)
            assert "--memory_opt_engine compile trains it" in engine.plans().header[0]
        else:
            with pytest.raises(UnsupportedModelError, match="--memory_opt_engine compile trains it under a plan"):
                model(**batch)
        engine.detach()


def test_other_plans_are_the_second_engines_too():
    model = build(NAME).bfloat16()
    engine = optimize(model, **AUTO, memory_opt_level=1)
    assert engine.selection == Selection(None, 1, True)
    engine.apply(Selection())
    model(**CASES[NAME].batch()).loss.backward()
    assert not engine.plans().enabled
