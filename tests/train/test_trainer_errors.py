"""One-line errors before the optimizer's first step, and steps that are retried after running out of memory."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

from optimum_memopt import MemOptError, MemOptTrainer, MemOptTrainingArguments, attach, optimize
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import engine_names
from tests.trainer_runs import arguments, build, collate, distance, log_lines, make, rows, weights

NAME = "roberta-classification"


class OptimizerSteps(TrainerCallback):
    count = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.count += 1


def refusal(folder, **changes):
    """Train with refused arguments, and return the error's message; checks that nothing was changed."""
    model, steps = build(NAME), OptimizerSteps()
    before = weights(model)
    with pytest.raises(MemOptError) as caught:
        args = arguments(MemOptTrainingArguments, folder, **changes)
        trainer = MemOptTrainer(model, args, collate, rows(NAME), callbacks=[steps])
        trainer.train()
    assert steps.count == 0
    assert distance(weights(model), before) == 0
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_a_good_run_does_step(tmp_path):
    """A valid run steps the optimizer, so that the absence of steps above is meaningful."""
    steps = OptimizerSteps()
    make(tmp_path, NAME, callbacks=[steps], max_steps=2).train()
    assert steps.count == 2


@pytest.mark.parametrize(
    ("engine", "flag", "message"),
    [
        ("ort", "bf16", "--bf16 with the ort engine on the CPU"),
        ("compile", "torch_compile", "--torch_compile with the compile engine"),
    ],
)
def test_arguments_that_an_engine_cannot_train_with(tmp_path, engine, flag, message):
    assert message in refusal(tmp_path, memory_opt_engine=engine, **{flag: True})


def test_attach_and_optimize_refuse_alike(tmp_path):
    for start in (lambda **options: attach(make(tmp_path, NAME, plain=True), **options), options_of_optimize):
        with pytest.raises(MemOptError, match="--memory_opt_level 5"):
            start(memory_opt_level=5)
        with pytest.raises(MemOptError, match="2 fields instead of 3"):
            start(memory_opt_config="Gelu+:1")
    trainer = make(tmp_path, NAME, plain=True, bf16=True)
    with pytest.raises(MemOptError, match="--bf16 with the ort engine"):
        attach(trainer, memory_opt_level=1, memory_opt_engine="ort")
    assert "create_optimizer" not in vars(trainer) and not hasattr(trainer, "memopt")


def options_of_optimize(**options):
    model = build(NAME)
    try:
        return optimize(model, **options)
    finally:
        assert engine_of(model) is None


class CallsParts:
    """Computes its loss from the model's submodules, without the model's forward."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model.head(model.layer[0](model.embedding(inputs["input_ids"])).mean(1))
        loss = torch.nn.functional.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


# `auto` switches to its second engine before training.
SWITCHED = {"memory_opt_engine": "auto", "ort_fallback": True, "bf16": True}


@pytest.mark.parametrize(
    ("engine", "chosen"), [*((name, {"memory_opt_engine": name}) for name in engine_names()), ("compile", SWITCHED)]
)
def test_a_model_of_which_training_calls_parts_is_refused_before_a_weight_has_changed(tmp_path, engine, chosen):
    kind = type("Parts", (CallsParts, MemOptTrainer), {})
    trainer = make(tmp_path, "small", trainer=kind, memory_opt_level=1, **chosen)
    before = weights(trainer.model)
    with pytest.raises(MemOptError, match=f"submodules of .*, so the {engine} engine does not run"):
        trainer.train()
    assert distance(weights(trainer.model), before) == 0


def test_without_a_plan_that_is_a_warning(tmp_path):
    found = {}
    for plain in (True, False):
        kind = type("Parts", (CallsParts, Trainer if plain else MemOptTrainer), {})
        trainer = make(
            tmp_path, "small", plain=plain, trainer=kind, **({} if plain else {"memory_opt_engine": "compile"})
        )
        with log_lines() as lines:
            trainer.train()
        found[plain] = weights(trainer.model)
    assert sum("there is no plan table; attach an engine to the submodule" in line for line in lines) == 1
    assert distance(found[True], found[False]) == 0


# Out of memory: accelerate's retry with a smaller batch.


class RunsDry:
    """Runs out of memory once, after a forward whose backward then never runs."""

    dry = 1

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 1 and self.dry:
            self.dry -= 1
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss


class MasksAgree(TrainerCallback):
    """Checks that the classifier's gradient uses the dropout mask of the forward that computed the logits.

    For `logits = W dropout(x) + b`, the sum of W times its gradient equals the sum of (logits - b) times the logits'
    gradient, which is known, unless the recomputed dropout drew a different mask.
    """

    def __init__(self):
        self.errors = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        layer = model.classifier.out_proj
        gradient = torch.softmax(self.logits, -1) - torch.nn.functional.one_hot(self.labels, 3)
        expected = ((self.logits - layer.bias) * gradient / len(self.labels)).sum()
        self.errors.append(abs((layer.weight * layer.weight.grad).sum() / expected - 1).item())


@pytest.mark.nightly
def test_a_dropout_plan_is_still_exact_after_running_out_of_memory(tmp_path):
    """A dropout plan is exact after an out-of-memory error, although a forward without backward would desynchronize
    ONNX Runtime's recomputed masks permanently."""
    masks = MasksAgree()

    class Watched(RunsDry):
        def compute_loss(self, model, inputs, *args, **kwargs):
            masks.labels = inputs["labels"]
            hook = model.register_forward_hook(lambda module, _, outputs: setattr(masks, "logits", outputs["logits"]))
            try:
                return super().compute_loss(model, inputs, *args, **kwargs)
            finally:
                hook.remove()

    own = {"model": build(NAME, hidden_dropout_prob=0.3), "callbacks": [masks], "memory_opt_config": "Dropout+:1:-1"}
    steps = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "max_steps": 4, "max_grad_norm": 0.0}
    trainer = make(tmp_path, NAME, trainer=type("Dry", (Watched, MemOptTrainer), {}), **own, **steps)
    trainer.train()
    assert trainer.dry == 0 and trainer.state.global_step == 4 and trainer.state.train_batch_size < 8
    assert [plan.config for plan in trainer.memopt.table.enabled] == ["Dropout+:1:-1"]
    assert len(masks.errors) == 1 + 4
    assert max(masks.errors) < 1e-4
