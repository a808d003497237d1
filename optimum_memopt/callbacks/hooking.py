"""Callbacks that hook a model, or wrap a Trainer's method, while it trains."""

import functools
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import find_trainer


class HookingCallback(TrainerCallback):
    """Removes its hooks when `train()` is over, however it ends, in a Trainer with `attach` or whose constructor was
    given such a callback. In others they stay after an error, until the next `train()`.
    """

    def remove_hooks(self) -> None:
        """Leave the model and the Trainer as they were; a second call does nothing."""
        raise NotImplementedError

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = find_trainer(state)
        # A method of the class: no other callback has done it, and no subclass.
        if "train" not in vars(trainer):
            trainer.train = removing_hooks(trainer, trainer.train)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.remove_hooks()


def removing_hooks(trainer: Trainer, train: Callable[..., Any]) -> Any:
    """`train` that removes the hooks of all callbacks when it is over: after an error a Trainer has no event.

    Args:
        trainer: whose callbacks they are.
        train: its method.
    """

    @functools.wraps(train)
    def train_and_remove_hooks(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, HookingCallback):
                    callback.remove_hooks()

    return train_and_remove_hooks
