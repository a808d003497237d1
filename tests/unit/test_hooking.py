import pickle

import pytest
from transformers import TrainerCallback

from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from optimum_memopt.oom.guard import MemoryReportCallback

KINDS = (MemoryReportCallback, MemoryPhasesCallback, InputDensityCallback)


class Raises(TrainerCallback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self._raise)
        self.hooks = 0

    def _raise(self, args, state, control, model, **kwargs) -> None:
        self.hooks = len(model._forward_pre_hooks) + len(model._forward_hooks)
        raise KeyboardInterrupt


def left_by(trainer) -> tuple[int, bool]:
    model = trainer.model
    return len(model._forward_pre_hooks) + len(model._forward_hooks), "training_step" in vars(trainer)


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end", "on_epoch_end"])
def test_an_interrupted_stock_trainer_leaves_no_hook(trainer_of, event: str) -> None:
    raises = Raises(event)
    trainer = trainer_of([MemoryPhasesCallback(), InputDensityCallback(), raises])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert raises.hooks == 2 and left_by(trainer) == (0, False)
        pickle.dumps(trainer.model)


@pytest.mark.parametrize("kind", KINDS)
def test_each_callback_alone(trainer_of, kind: type) -> None:
    trainer = trainer_of([kind(), Raises("on_step_end")])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert left_by(trainer)[0] == 0


def test_a_callback_that_is_added_later_beside_one_of_the_constructor(trainer_of) -> None:
    trainer = trainer_of([InputDensityCallback()])
    trainer.add_callback(MemoryPhasesCallback())
    trainer.add_callback(Raises("on_step_end"))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert left_by(trainer) == (0, False)


def test_what_an_interrupted_run_left_goes_with_the_next(trainer_of) -> None:
    trainer, raises = trainer_of([]), Raises("on_step_end")
    for callback in (MemoryPhasesCallback(), raises):
        trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(raises)
    trainer.train()
    assert left_by(trainer) == (0, False)


def test_a_trainer_that_nobody_holds_trains(trainer_of) -> None:
    assert trainer_of([MemoryPhasesCallback()]).train().global_step == 3
