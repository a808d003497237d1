"""The largest batch that a Trainer's training data can give, read from the data before anything trains."""

from typing import Any

from optimum_memopt import compat
from optimum_memopt.engines.base import LargestBatch
from optimum_memopt.errors import MemOptError
from optimum_memopt.training.sampling import complexities

# Rows whose lengths are read in a second or two.
_MOST_ROWS = 100_000


def largest_batch(trainer: Any) -> LargestBatch | None:
    """As many rows as a batch has, as long as the longest row; None where reading that would take long or run code.

    Read are columns of a `datasets.Dataset` and lists of rows, as `group_by_complexity` reads them. Any other data set
    may draw random numbers when it is asked for a row.

    Args:
        trainer: before or in its `train()`.
    """
    dataset = trainer.train_dataset
    is_stored = hasattr(dataset, "select_columns") and getattr(dataset, "format", {}).get("type") != "custom"
    if not (is_stored or isinstance(dataset, list)) or not 0 < len(dataset) <= _MOST_ROWS:
        return None
    try:
        longest = complexities(dataset, trainer.args.length_column_name).max()
    except (MemOptError, TypeError, ValueError):
        return None
    return LargestBatch(compat.train_batch_size(trainer), int(longest))
