from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from optimum_memopt import MemoryReportCallback, attach
from optimum_memopt.trainer_patches import Patch, TrainerPatches, loss_name

STEP_PATCHES = [patch for patch in Patch if patch.method == Patch.FALLBACK.method]


class Stepping:
    def training_step(self) -> list[Patch | str]:
        """Returns the wrappers that the call passes, innermost first."""
        return ["own"]


def passing(patch: Patch | str) -> Callable[..., Any]:
    return lambda inner: lambda: [*inner(), patch]


@pytest.mark.parametrize("order", [STEP_PATCHES, STEP_PATCHES[::-1]])
def test_wrappers_are_called_in_the_order_of_the_list(order):
    trainer, patches = Stepping(), TrainerPatches()
    for patch in order:
        patches.put(trainer, patch, passing(patch))
    assert trainer.training_step() == ["own", Patch.FALLBACK, Patch.GUARDED_STEP, Patch.COUNTED_TOKENS]
    assert trainer.training_step.__name__ == "training_step"
    patches.close()
    patches.close()
    assert vars(trainer) == {}


def test_what_was_assigned_before_is_there_again():
    trainer, patches = Stepping(), TrainerPatches()
    trainer.training_step = before = lambda: ["user"]
    patches.put(trainer, Patch.GUARDED_STEP, passing(Patch.GUARDED_STEP))
    assert trainer.training_step() == ["user", Patch.GUARDED_STEP]
    patches.close()
    assert trainer.training_step is before


def test_a_wrapper_of_somebody_else_stays_with_nothing_of_ours_inside():
    trainer, attached, of_run = Stepping(), TrainerPatches(), TrainerPatches()
    attached.put(trainer, Patch.FALLBACK, passing(Patch.FALLBACK))
    theirs = trainer.training_step = passing("user")(trainer.training_step)
    of_run.put(trainer, Patch.GUARDED_STEP, passing(Patch.GUARDED_STEP))
    assert trainer.training_step() == ["own", Patch.FALLBACK, "user", Patch.GUARDED_STEP]
    of_run.close()
    assert trainer.training_step is theirs and trainer.training_step() == ["own", Patch.FALLBACK, "user"]
    attached.close()
    assert trainer.training_step is theirs and trainer.training_step() == ["own", "user"]


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "assigned", "name"),
    [
        (Trainer, "", ""),
        (OwnLoss, "", "OwnLoss.compute_loss"),
        (Trainer, "compute_loss", "Trainer.compute_loss"),
        (Trainer, "compute_loss_func", "compute_loss_func"),
        (Trainer, "label_smoother", "the Trainer's label smoother"),
    ],
)
def test_the_loss_of_a_trainer_has_the_name_of_its_function(tmp_path, kind, assigned, name):
    trainer = kind(torch.nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    if assigned:
        setattr(trainer, assigned, lambda *_: None)
    assert loss_name(trainer) == name
    with TrainerPatches() as patches:
        patches.put(trainer, Patch.NOTED_LOSS, lambda inner: lambda *args: inner(*args))
        assert loss_name(trainer) == name


class Refusing(Trainer):
    refuses = False

    def add_callback(self, callback):
        if self.refuses and isinstance(callback, MemoryReportCallback):
            raise KeyboardInterrupt
        super().add_callback(callback)


def test_an_interrupted_attach_leaves_the_trainer_as_it_was(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Refusing(torch.nn.Linear(2, 2), arguments)
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    trainer.refuses = True
    with pytest.raises(KeyboardInterrupt):
        attach(trainer, memory_opt_engine="compile")
    del trainer.refuses
    assert vars(trainer) == before and trainer.callback_handler.callbacks == callbacks
    attach(trainer, memory_opt_engine="compile")
