"""Logs numbers to the experiment trackers of a Trainer, and nowhere else."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

# A callback with a method of this name and `on_log`'s signature gets the numbers too.
HANDLER = "on_memopt_log"


def log_to_trackers(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Give metrics, at the current global step, to the Trainer's trackers.

    Trackers are the callbacks of `--report_to` (transformers' `INTEGRATION_TO_CALLBACK`, subclasses too), called by
    their `on_log` with what Trainer gives it, and callbacks that have a method `on_memopt_log`, called in the same
    way. Neither `trainer.log`, which trainers override to average and clear counters of their own (TRL), nor
    `state.log_history`, the progress bar or any other callback sees anything.
    """
    handler = trainer.callback_handler
    for callback in handler.callbacks:
        log = getattr(callback, HANDLER, None) or _on_log(callback)
        if log is None:
            continue
        with _own_steps_kept(callback, trainer.state.global_step):
            log(
                trainer.args,
                trainer.state,
                # The Trainer decides by it what happens at this step; a callback may change or return it.
                copy.copy(trainer.control),
                logs=dict(metrics),
                model=handler.model,
                processing_class=handler.processing_class,
                optimizer=handler.optimizer,
                lr_scheduler=handler.lr_scheduler,
                train_dataloader=handler.train_dataloader,
                eval_dataloader=handler.eval_dataloader,
            )


def _on_log(callback: TrainerCallback) -> Any:
    # Looked up each time: the table is open to integrations that others add.
    return callback.on_log if isinstance(callback, tuple(integration_utils.INTEGRATION_TO_CALLBACK.values())) else None


@contextlib.contextmanager
def _own_steps_kept(callback: TrainerCallback, global_step: int) -> Iterator[None]:
    """DVCLive numbers the calls of `on_log` instead of reading `global_step` (transformers 5.23, `DVCLiveCallback.
    on_log` ends in `live.next_step()`): our calls would shift the Trainer's own curves, so they get their own step."""
    live = callback.live if isinstance(callback, integration_utils.DVCLiveCallback) else None
    if live is None:
        yield
        return
    step, live.step = live.step, global_step
    try:
        yield
    finally:
        live.step = step
