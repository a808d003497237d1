"""The batches that a Trainer's training data can give, read from the data before anything trains."""

from typing import Any

import numpy as np

from optimum_memopt import compat
from optimum_memopt.engines.run import LargestBatch
from optimum_memopt.errors import MemOptError
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
