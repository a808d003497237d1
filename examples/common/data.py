"""Loads the rows of an example from the hub, from files or from a package."""

from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset

from common.arguments import RowArguments, loading
from optimum_memopt import MemOptError

FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text"}
HELD_OUT = 0.1


def load_rows(args: RowArguments, packaged: Callable[[int], DatasetDict]) -> DatasetDict:
    """Load the rows that the arguments name, or the packaged ones; the result always has a validation split."""
    if args.dataset_name:
        with loading("--dataset_name", args.dataset_name):
            rows = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        rows = _load_files(args.train_file, args.validation_file)
    else:
        return packaged(args.split_seed)
    return with_validation(rows, args.split_seed)


def _load_files(train_file: str, validation_file: str | None) -> DatasetDict:
    files = {"train": train_file} | ({"validation": validation_file} if validation_file else {})
    formats = {Path(file).suffix for file in files.values()}
    if len(formats) > 1 or not formats <= FILE_FORMATS.keys():
        raise MemOptError(f"data files must all be one of {', '.join(FILE_FORMATS)}, not {', '.join(sorted(formats))}")
    with loading("--train_file", train_file):
        return load_dataset(FILE_FORMATS[formats.pop()], data_files=files)


def with_validation(rows: DatasetDict, seed: int) -> DatasetDict:
    """Hold out a tenth of the training rows if the data has no validation split."""
    if "train" not in rows:
        raise MemOptError(f"the data has no `train` split, only {', '.join(rows)}")
    if any(name.startswith("validation") for name in rows):
        return rows
    halves = rows["train"].train_test_split(HELD_OUT, seed=seed)
    return DatasetDict(train=halves["train"], validation=halves["test"])


def take(rows: Dataset, count: int | None) -> Dataset:
    """Returns the first `count` rows, or all if None."""
    return rows if count is None else rows.select(range(min(count, len(rows))))
