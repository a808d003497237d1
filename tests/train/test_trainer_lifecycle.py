"""An engine is attached to a Trainer's model only during `train()`; before and after it the model is plain."""

import pickle

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from optimum_memopt import (
    MemOptError,
    MemOptOptions,
    MemOptTrainer,
    MemOptTrainingArguments,
    MemoryPhasesCallback,
    attach,
    optimize,
    run_summary,
)
from optimum_memopt.engines.shared.in_place import engine_of
from tests.rotation import in_turn
from tests.trainer_runs import CLOSE, arguments, build, collate, distance, log_lines, make, rows, tables, weights

NAME, ATTENTION = "small", "roberta-classification"
COMPILED = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}


class Engines(TrainerCallback):
    """Records the engine that is attached to the model at the end of each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.seen.append(engine_of(model))


class Interrupt(TrainerCallback):
    def __init__(self, error):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise self.error


def assert_plain(model, attention):
    assert engine_of(model) is None and "forward" not in vars(model)
    assert model.config._attn_implementation == attention


def sdpa_with_dropout():
    """Returns a model with sdpa and attention dropout, which ONNX Runtime trains only with eager attention."""
    model = build(ATTENTION, attention_probs_dropout_prob=0.0001)
    model.set_attn_implementation("sdpa")
    return model


def test_trainers_take_turns_on_a_model(tmp_path, engine):
    """Trainers may take turns on a model: with an engine, plain, with another engine, and the first again, already
    compiled."""
    model, engines = build(NAME), Engines()
    first, second = (make(tmp_path, NAME, model=model, memory_opt_engine=engine, memory_opt_level=1) for _ in range(2))
    between = make(tmp_path, NAME, plain=True, model=model, callbacks=[engines])
    expected = weights_after_turns(tmp_path)
    tables_of_first = []
    for trainer, weights_then in zip((first, between, second, first), expected, strict=True):
        trainer.train()
        assert_plain(model, "eager")
        assert distance(weights(model), weights_then) < CLOSE
        if trainer is first:
            tables_of_first.append(trainer.memopt.table)
    assert engines.seen == [None] * 5
    assert tables_of_first[0].enabled and tables_of_first[0] is tables_of_first[1], "compiled anew"


def weights_after_turns(folder, **changes):
    """Run three plain Trainers on a model in the order first, second, third, first; returns the weights after each."""
    model = build(NAME)
    first, second, third = (make(folder, NAME, plain=True, model=model, **changes) for _ in range(3))
    found = []
    for trainer in (first, second, third, first):
        trainer.train()
        found.append(weights(model))
    return found


def test_a_second_train_compiles_nothing_and_shows_its_table(tmp_path, engine):
    trainer = make(tmp_path, NAME, memory_opt_engine=engine, memory_opt_level=1)
    with log_lines() as lines:
        trainer.train()
        torch._dynamo.utils.counters.clear()
        table = trainer.memopt.table
        trainer.train()
    assert trainer.memopt.table is table and not torch._dynamo.utils.counters["stats"].get("unique_graphs")
    assert len(tables(lines)) == 2 and trainer.memopt.measured_peak_mib > 0
    assert not any("new graph" in line or "new training graph" in line for line in lines), lines
    trainer.memopt.detach()
    assert trainer.memopt.table is None, "what was compiled is freed"


def test_the_model_is_plain_after_a_run_that_failed(tmp_path, engine):
    observed = {"log_memory_phases": True, "log_input_density": True}
    trainer = make(tmp_path, ATTENTION, model=sdpa_with_dropout(), memory_opt_engine=engine, **observed)
    for error in (KeyboardInterrupt(), RuntimeError("of the user's callback")):
        trainer.add_callback(Interrupt(error))
        with pytest.raises(type(error)):
            trainer.train()
        assert_plain(trainer.model, "sdpa")
        assert not trainer.model._forward_pre_hooks and not trainer.model._forward_hooks
        pickle.dumps(trainer.model)
        trainer.pop_callback(Interrupt)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.train()
    assert trainer.state.global_step == 5 and trainer.memopt.table.plans
    assert_plain(trainer.model, "sdpa")


@in_turn
def test_under_autocast_the_engine_comes_into_the_place_of_the_last_one(tmp_path):
    """Under autocast an engine replaces the previous one, since accelerate wraps the forward only once."""
    model = build(NAME)
    asked = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_level": 1, "bf16": True}
    first, second = (make(tmp_path, NAME, model=model, **asked) for _ in range(2))
    between = make(tmp_path, NAME, plain=True, model=model, bf16=True)
    expected = weights_after_turns(tmp_path, bf16=True)
    for trainer, weights_then in zip((first, between, second, first), expected, strict=True):
        with log_lines() as lines:
            trainer.train()
        assert engine_of(model) is None
        assert distance(weights(model), weights_then) < CLOSE
        assert not any(kind in line for line in lines for kind in ("recompiled", "another training graph")), lines
    assert first.memopt.table.enabled and second.memopt.table.enabled


def test_two_engines_at_a_time_are_refused_with_a_public_suggestion(tmp_path):
    model = build(NAME)
    engine = optimize(model, memory_opt_engine="compile")
    trainer = make(tmp_path, NAME, model=model, memory_opt_engine="compile")
    with pytest.raises(MemOptError, match=r"that optimize\(\) returned, or with trainer.memopt.detach\(\)"):
        trainer.train()
    assert engine_of(model) is engine
    engine.detach()
    trainer.train()
    assert trainer.memopt.table.plans


def test_a_subclass_that_overrides_train(tmp_path):
    class Twice(MemOptTrainer):
        def train(self, *args, **kwargs):
            super().train(*args, **kwargs)
            return super().train(*args, **kwargs)

    engines = Engines()
    trainer = make(tmp_path, NAME, trainer=Twice, memory_opt_level=1, callbacks=[engines], max_steps=2)
    trainer.train()
    assert engines.seen == [trainer.memopt.engine] * 4
    assert_plain(trainer.model, "eager")


@in_turn
def test_another_attach_after_detach(tmp_path):
    """After detach another attach has its own options and callbacks; the user's callbacks stay."""
    given = MemoryPhasesCallback()
    trainer = make(tmp_path, NAME, plain=True, callbacks=[given], max_steps=1)
    kinds = []
    first = attach(trainer, memory_opt_level=1, log_input_density=True, **COMPILED)
    with pytest.raises(MemOptError, match=r"first call trainer.memopt.detach\(\), but not during training"):
        attach(trainer, memory_opt_level=2)
    for changes in ({"memory_opt_level": 2}, {"memory_opt_config": "Gelu+:1:-1"}):
        trainer.train()
        with pytest.raises(MemOptError, match="this Trainer already has an engine"):
            attach(trainer, **changes, **COMPILED)
        trainer.memopt.detach()
        second = attach(trainer, **changes, **COMPILED)
        assert trainer.memopt is second is not first
        kinds.append(sorted(type(callback).__name__ for callback in trainer.callback_handler.callbacks))
    assert kinds[0] == kinds[1] and kinds[0].count("MemoryPhasesCallback") == 1
    assert "InputDensityCallback" not in kinds[0] and given in trainer.callback_handler.callbacks
    trainer.train()
    assert [plan.config for plan in second.table.enabled] == ["Gelu+:1:-1"]


def test_detach_in_a_run_is_not_followed_by_attach(tmp_path):
    """Attaching during a run, after detach, is refused, since it would have no effect on the run."""

    class Detach(TrainerCallback):
        refused = None

        def on_step_end(self, args, state, control, **kwargs):
            trainer.memopt.detach()
            with pytest.raises(MemOptError, match="not during training") as self.refused:
                attach(trainer, memory_opt_level=2)

    detach = Detach()
    trainer = make(tmp_path, NAME, max_steps=1, callbacks=[detach], memory_opt_level=1, memory_opt_engine="compile")
    trainer.train()
    assert detach.refused is not None
    trainer.memopt.detach()
    assert attach(trainer, memory_opt_level=2) is trainer.memopt


def test_an_optimizer_that_is_made_before_train(tmp_path):
    trainer = make(tmp_path, NAME, memory_opt_level=1, memory_opt_optim="torch_fused_adamw")
    optimizer = trainer.create_optimizer()
    assert optimizer.defaults["fused"] and engine_of(trainer.model) is None
    trainer.train()
    assert trainer.memopt.table.enabled


# Options of attach.


def test_attach_overrides_single_options_of_the_arguments(tmp_path):
    args = arguments(MemOptTrainingArguments, tmp_path, memory_opt_engine="compile", memory_opt_level=1, max_steps=1)
    trainer = Trainer(build(NAME), args, data_collator=collate, train_dataset=rows(NAME))
    with pytest.raises(MemOptError, match="needs a Trainer with an engine"):
        run_summary(trainer)
    with log_lines() as lines:
        attach(trainer, log_memory_phases=True)
        trainer.train()
    assert trainer.memopt.table.enabled, "level 1 of the arguments is lost"
    assert trainer.memopt.options.log_memory_phases and not args.log_memory_phases
    assert any("forward" in line for line in lines)


def test_attach_takes_the_options_as_one_object(tmp_path):
    options = MemOptOptions(memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    args = arguments(TrainingArguments, tmp_path, max_steps=1)
    trainer = Trainer(build(NAME), args, data_collator=collate, train_dataset=rows(NAME))
    with pytest.raises(MemOptError, match="the second argument is a MemOptOptions"):
        attach(trainer, {"memory_opt_level": 1})
    attach(trainer, options, memory_opt_level=0, memory_opt_config="Gelu+:1:-1")
    trainer.train()
    assert [plan.config for plan in trainer.memopt.table.enabled] == ["Gelu+:1:-1"]
    assert options.memory_opt_level == 1 and options.memory_opt_config is None
    with pytest.raises(MemOptError, match="options are given twice, as MemOptOptions and in the Trainer's MemOpt"):
        attach(Trainer(build(NAME), arguments(MemOptTrainingArguments, tmp_path)), options)


def test_attach_without_a_plan_says_so(tmp_path):
    with log_lines() as lines:
        attach(make(tmp_path, NAME, plain=True))
    assert sum(line.startswith("attach without a plan") for line in lines) == 1, lines
    with log_lines() as lines:
        attach(make(tmp_path, NAME, plain=True), memory_opt_engine="compile")
    assert not any("without a plan" in line for line in lines)


@pytest.mark.parametrize(
    "given",
    [
        {"log_memory_phases": True},
        {"log_input_density": True},
        {"memory_opt_log_file": "found.jsonl"},
        {"memory_opt_log_steps": 3},
        {"group_by_complexity": True, "memory_opt_optim": "torch_fused_adamw"},
    ],
    ids=str,
)
def test_optimize_refuses_what_needs_a_trainer(given):
    model = build(NAME)
    with pytest.raises(MemOptError, match="a Trainer: see optimum_memopt.attach") as caught:
        optimize(model, memory_opt_engine="compile", **given)
    assert all(f"--{name}" in str(caught.value) for name in given) and engine_of(model) is None
