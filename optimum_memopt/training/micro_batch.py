"""The batches that a Trainer's training data can give, read from the data before anything trains."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from optimum_memopt import compat
from optimum_memopt.distributed.rank_consistency import gathered
from optimum_memopt.engines.api.predictions import ModelOfRun, StepPredictor
from optimum_memopt.engines.api.run import LargestBatch, StepSpec
from optimum_memopt.engines.shared.forward_patch import ForwardState
from optimum_memopt.engines.shared.registry import factory
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger
from optimum_memopt.options import MemOptOptions
from optimum_memopt.predict.advise import Row, advise, count_fitting
from optimum_memopt.sizes import gib_text
from optimum_memopt.training.sampling import GROUPED, ComplexitySampler, complexities, strategy_of

# Rows whose lengths are read in a second or two.
_MOST_ROWS = 100_000


def largest_batch(trainer: Any, is_grouped: bool = False) -> LargestBatch | None:
    """As many rows as a batch has, as long as the longest row; None where reading that would take long or run code.

    Read are columns of a `datasets.Dataset` and lists of rows, as `group_by_complexity` reads them. Any other data set
    may draw random numbers when it is asked for a row.

    Args:
        trainer: before or in its `train()`.
        is_grouped: batches have rows of like length, whatever the Trainer's arguments say.
    """
    dataset = trainer.train_dataset
    if not is_readable(dataset) or len(dataset) > _MOST_ROWS:
        return None
    try:
        lengths = complexities(dataset, trainer.args.length_column_name)
        longest = int(lengths.max())
    except (MemOptError, TypeError, ValueError):
        return None
    rows = compat.train_batch_size(trainer)
    strategy = GROUPED if is_grouped else strategy_of(trainer.args)
    return LargestBatch(rows, longest, batch_lengths(lengths, rows, strategy))


def is_readable(dataset: Any) -> bool:
    """Whether reading a row of a data set runs no code of its own, which may draw random numbers."""
    is_stored = hasattr(dataset, "select_columns") and getattr(dataset, "format", {}).get("type") != "custom"
    return (is_stored or isinstance(dataset, list)) and len(dataset) > 0


def batch_lengths(lengths: np.ndarray, rows: int, strategy: str) -> tuple[int, ...]:
    """The longest row of each batch of an epoch, as one order of the samples has them. Draws no random numbers of the
    run, and is the same on all ranks.

    Args:
        lengths: tokens of each sample, shape (samples,).
        rows: samples of a batch.
        strategy: as in Trainer's arguments; one that is not known counts as random.
    """
    if strategy == "sequential":
        order = np.arange(len(lengths))
    elif strategy == GROUPED:
        order = ComplexitySampler(lengths, rows).order()
    else:
        order = np.random.default_rng(0).permutation(len(lengths))
    return tuple(int(lengths[order[start : start + rows]].max()) for start in range(0, len(order), rows))


_FLAG = "--memory_opt_batch auto"


def check(trainer: Trainer) -> None:
    """Refuse a Trainer whose batches something else decides on.

    Raises:
        MemOptError: DeepSpeed, split_batches, or training data that cannot be read before it trains.
    """
    if trainer.is_deepspeed_enabled:
        raise MemOptError(f"{_FLAG}: DeepSpeed's config has the batch sizes; leave it out")
    if trainer.accelerator.split_batches:
        raise MemOptError(f"{_FLAG}: split_batches divides each batch among the ranks; leave one of the two out")
    if not is_readable(trainer.train_dataset):
        raise MemOptError(
            f"{_FLAG} needs training data that can be read beforehand: a datasets.Dataset without a transform, or a "
            "list"
        )


def choosing(trainer: Trainer, options: MemOptOptions, engine: str) -> Any:
    """`train`, within `chosen` if the options ask for that.

    Raises:
        MemOptError: see `check`.
    """
    train = trainer.train
    if options.memory_opt_batch is None:
        return train
    check(trainer)

    @functools.wraps(train)
    def choose_and_train(*args: Any, **kwargs: Any) -> Any:
        with chosen(trainer, options, engine):
            return train(*args, **kwargs)

    return choose_and_train


@contextlib.contextmanager
def chosen(trainer: Trainer, options: MemOptOptions, engine: str) -> Iterator[None]:
    """Within it the Trainer has the chosen micro-batch and gradient accumulation, afterwards the user's.

    Args:
        trainer: before its `train()`.
        options: with a budget.
        engine: the one that trains, by name.

    Raises:
        MemOptError: no micro-batch fits on some rank, or the model cannot be predicted for other batches.
    """
    args = trainer.args
    before = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rows = before[0] * before[1]
    found = _agreed(trainer, options, engine, rows)
    try:
        _set(trainer, found, rows // found)
        yield
    finally:
        _set(trainer, *before)


def _set(trainer: Trainer, rows: int, accumulation: int) -> None:
    trainer.args.per_device_train_batch_size = rows
    trainer.args.gradient_accumulation_steps = accumulation
    compat.reread_batch_size(trainer)


def _agreed(trainer: Trainer, options: MemOptOptions, engine: str, rows: int) -> int:
    """Rows of the micro-batch, the smallest that any rank chooses: costs and free memory differ from rank to rank.

    Raises:
        MemOptError: on all ranks, where one finds none.
    """
    row: Row | None = None
    try:
        predictor = _predictor(trainer, options, engine)
        row = advise(predictor, rows).recommended
        own: int | str = row.rows
    except MemOptError as error:
        own = str(error)
    of_ranks = gathered(own) if trainer.args.world_size > 1 else [own]
    for rank, found in enumerate(of_ranks):
        if isinstance(found, str):
            raise MemOptError(f"{_FLAG}: {f'rank {rank}: ' if len(of_ranks) > 1 else ''}{found}")
    smallest = min(found for found in of_ranks if isinstance(found, int))
    assert row is not None
    get_logger().info(
        f"{_FLAG}: micro-batches of {smallest} rows, {rows // smallest} to each optimizer step of {rows} rows a rank; "
        f"predicted on rank 0 for {row.rows}: {row.samples:.1f} samples a second, peak {gib_text(row.step.peak)} "
        f"within {gib_text(predictor.budget)}, {row.recomputing:.1%} of the time for recompute"
    )
    _check_evaluation(trainer, predictor)
    return smallest


def _check_evaluation(trainer: Trainer, predictor: StepPredictor) -> None:
    rows = trainer.args.per_device_eval_batch_size
    if trainer.eval_dataset is None or (peak := predictor.evaluation(rows)) <= predictor.budget:
        return
    fits = count_fitting(range(1, rows), lambda size: predictor.evaluation(size) <= predictor.budget)
    get_logger().warning(
        f"--per_device_eval_batch_size {rows}: evaluating rows as long as the longest of the training data would take "
        f"{gib_text(peak)}, over the budget of {gib_text(predictor.budget)}; "
        + (f"{fits} rows fit" if fits else "not even one row fits")
    )


def _predictor(trainer: Trainer, options: MemOptOptions, engine: str) -> StepPredictor:
    args, model = trainer.args, trainer.model
    assert isinstance(model, torch.nn.Module)
    collate = compat.training_collator(trainer)
    data: Any = trainer.train_dataset

    def make_batch(rows: int) -> Mapping[str, Any]:
        return compat.prepared_inputs(trainer, collate([data[index % len(data)] for index in range(rows)]))

    largest = largest_batch(trainer, options.group_by_complexity)
    # A collator may draw random numbers, as that of masked language models does.
    before = ForwardState.of(model, with_buffers=False)
    try:
        spec = StepSpec(
            compiler=options.memory_opt_compiler,
            autocast="bfloat16" if args.bf16 else "float16" if args.fp16 else "",
            optim=str(getattr(args.optim, "value", args.optim)),
        )
        tokens = largest.length if largest is not None else 0
        return factory(engine).predict_steps(ModelOfRun(model, make_batch, tokens, _is_read(trainer)), options, spec)
    finally:
        before.restore(model)


def _is_read(trainer: Trainer) -> bool:
    """Whether more of the model's outputs is read than its loss; see `training.loss_only`."""
    is_stock = type(trainer).compute_loss is Trainer.compute_loss
    return not is_stock or trainer.compute_loss_func is not None or trainer.label_smoother is not None
