"""The batches of a Trainer: a sampler that balances the ranks in each step, the largest batch of the data, and the
micro-batch chosen within a budget.

ONNX Runtime has such a sampler, `LoadBalancingDistributedBatchSampler`. It is not used: it needs onnxruntime-training,
shards the data itself, which a Trainer leaves to accelerate, and as released (1.19.2) raises ValueError at the second
epoch (`if not self.sample_complexities` on an array); past that error it takes unsorted groups.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import Reporter, callback_of
from optimum_memopt.compat.torch import of_all_ranks
from optimum_memopt.compat.transformers import collator, prepared_inputs, reread_batch_size, train_batch_size
from optimum_memopt.engines.api.predictions import ModelOfRun, StepPredictor
from optimum_memopt.engines.api.run import LargestBatch, Run
from optimum_memopt.engines.shared.registry import factory
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.generators import preserved_generators
from optimum_memopt.logs import get_logger
from optimum_memopt.options import MemOptOptions
from optimum_memopt.predict.advise import Row, advise
from optimum_memopt.sizes import gib_text
from optimum_memopt.step_settings import StepSpec
from optimum_memopt.trainer_patches import SMOOTHER, loss_name

FLAG = "--group_by_complexity"
# Trainer's own strategy that sorts samples by length within pools.
GROUPED = "group_by_length"
# Samples are sorted within pools of this many steps, as Trainer's own group_by_length does (trainer_pt_utils,
# `get_length_grouped_indices`): enough that a step's lengths are alike, few enough that steps differ in every epoch.
POOL_STEPS = 50


@dataclass(frozen=True)
class Balance:
    """Evenness of the ranks' shares in an order of samples, averaged over the steps.

    Attributes:
        slowest_rank: tokens of the rank with the most tokens in a step / mean of the ranks; 1 is even.
        slowest_rank_padded: the same, each batch padded to its longest sample.
        density: tokens / tokens after padding each batch to its longest sample.
        step_tokens: padded tokens of the slowest rank, which all ranks wait for.
    """

    slowest_rank: float
    slowest_rank_padded: float
    density: float
    step_tokens: float


def balance(order: np.ndarray, complexities: np.ndarray, batch_size: int, world_size: int) -> Balance | None:
    """Returns how evenly an order of samples loads the ranks, if consecutive batches go to consecutive ranks; None
    without a complete step.

    Args:
        order: indices of samples; an incomplete last step is left out.
        complexities: tokens of each sample.
        batch_size: samples of one rank in one step.
    """
    steps = len(order) // (batch_size * world_size)
    if not steps:
        return None
    tokens = complexities[order[: steps * batch_size * world_size]].reshape(steps, world_size, batch_size)
    # A step whose samples are all empty counts as even.
    work, padded = (np.maximum(each, 1e-9) for each in (tokens.sum(axis=2), tokens.max(axis=2) * batch_size))
    return Balance(
        slowest_rank=float((work.max(axis=1) / work.mean(axis=1)).mean()),
        slowest_rank_padded=float((padded.max(axis=1) / padded.mean(axis=1)).mean()),
        density=float(work.sum() / padded.sum()),
        step_tokens=float(padded.max(axis=1).mean()),
    )


class ComplexitySampler(Sampler[int]):
    """Yields indices in an order that gives all ranks of a step samples of nearly the same lengths.

    Each step takes samples that are neighbours by length and deals them to the ranks like cards. Steps come in random
    order, except that the one with the longest sample is first, so that a run that does not fit into memory fails at
    once. Torch and accelerate still do the batching, the sharding over ranks and the skipping after a checkpoint.

    Args:
        complexities: the work of each sample, in any unit, shape (samples,).
        batch_size: samples of one rank in one step.
        world_size: ranks; consecutive batches go to consecutive ranks, as accelerate deals them.
        seed: determines the order together with the epoch; the same on all ranks.
        fill_last: repeat samples so that the last step is complete and as even as the others.
    """

    def __init__(
        self, complexities: np.ndarray, batch_size: int, world_size: int = 1, seed: int = 0, fill_last: bool = False
    ) -> None:
        self.complexities = np.asarray(complexities, dtype=np.float64)
        self.batch_size, self.world_size = batch_size, world_size
        self.seed, self.fill_last, self.epoch = seed, fill_last, 0
        self._step = batch_size * world_size

    def set_epoch(self, epoch: int) -> None:
        """Select the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        count = len(self.complexities)
        return -(-count // self._step) * self._step if self.fill_last else count

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def order(self) -> np.ndarray:
        """Returns the indices of one epoch, shape (len(self),)."""
        random = np.random.default_rng((self.seed, self.epoch))
        shuffled = random.permutation(len(self.complexities))
        full = len(shuffled) - len(shuffled) % self._step
        steps = self._sorted_steps(shuffled[:full])
        random.shuffle(steps)
        if len(steps):
            longest = self.complexities[steps].max(axis=1).argmax()
            steps[[0, longest]] = steps[[longest, 0]]
        # The samples left over are random, so drop_last drops different samples in each epoch.
        rest = shuffled[full:]
        if len(rest) and self.fill_last:
            rest = np.concatenate([rest, np.resize(shuffled, self._step - len(rest))])
            steps = np.concatenate([steps, self._by_length(rest)[None]])
            rest = rest[:0]
        return np.concatenate([self._dealt(steps).reshape(-1), self._by_length(rest)])

    def _sorted_steps(self, samples: np.ndarray) -> np.ndarray:
        """Returns the samples of each step, neighbours by length within each pool, shape (steps, samples of a
        step)."""
        # As in `get_length_grouped_indices`, no pool is more than a quarter of a small data set.
        pool = self._step * max(1, min(POOL_STEPS, len(samples) // (self._step * 4)))
        pools = [self._by_length(samples[start : start + pool]) for start in range(0, len(samples), pool)]
        return np.concatenate([*pools, samples[:0]]).reshape(-1, self._step)

    def _by_length(self, samples: np.ndarray) -> np.ndarray:
        return samples[np.argsort(-self.complexities[samples], kind="stable")]

    def _dealt(self, steps: np.ndarray) -> np.ndarray:
        """Returns each step's samples, given sorted by length, dealt into one batch for each rank."""
        return steps.reshape(-1, self.batch_size, self.world_size).transpose(0, 2, 1)


def check(args: TrainingArguments, dataset: Any) -> None:
    """Refuse another sampling strategy, or a dataset without an index; `dataset` is None if not yet known. Raises
    MemOptError."""
    if (strategy := strategy_of(args)) != "random":
        raise MemOptError(
            f"{FLAG} with the sampling strategy {strategy}: both order the samples; leave out one of them"
        )
    if dataset is not None:
        _check_indexed(dataset)


def strategy_of(args: Any) -> str:
    """Returns the name of the Trainer's sampling strategy."""
    # Older transformers have this flag instead of strategies.
    return GROUPED if getattr(args, "group_by_length", False) else getattr(args, "train_sampling_strategy", "random")


def _check_indexed(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise MemOptError(
            f"{FLAG} with a {type(dataset).__name__}: samples of a stream cannot be chosen by length; give "
            "a dataset with a length and an index, or leave the flag out"
        )


def complexities(dataset: Any, length_column: str = "length", pad_token_id: int | None = None) -> np.ndarray:
    """Returns the number of tokens of each sample, shape (samples,); reads the whole dataset once.

    Taken from the column `length_column` if it exists, else the number of tokens that `attention_mask` includes, else
    the number of `input_ids` other than `pad_token_id`.

    Raises:
        MemOptError: the dataset has no index, or none of these fields.
    """
    _check_indexed(dataset)
    if not len(dataset):
        return np.zeros(0)
    stored = dataset.column_names if hasattr(dataset, "select_columns") else ()
    first = dataset[0]
    names = tuple(stored) if length_column in stored else tuple(first) if isinstance(first, Mapping) else ()
    field = next((name for name in (length_column, "attention_mask", "input_ids") if name in names), None)
    if field is None:
        raise MemOptError(
            f"{FLAG}: the training data has no {length_column}, attention_mask or input_ids, only "
            f"{', '.join(map(str, names)) or type(first).__name__}; add a column {length_column} with the length "
            "of each sample, or name yours in --length_column_name"
        )
    # A transform (`set_transform`) may change all fields; a stored length is read from its column all the same.
    in_columns = field in stored and (field == length_column or dataset.format["type"] != "custom")
    values = _values(dataset, field, in_columns)
    if field == length_column:
        return np.asarray([float(value) for value in values])
    if field == "input_ids" and pad_token_id is None:
        return np.asarray([len(value) for value in values], dtype=np.float64)
    padding = 0 if field == "attention_mask" else pad_token_id
    return np.asarray([np.count_nonzero(np.asarray(value) != padding) for value in values], dtype=np.float64)


def _values(dataset: Any, field: str, in_columns: bool) -> Iterable[Any]:
    """Returns a field of each sample; if it is a stored column, the other columns are not read."""
    if not in_columns:
        return (dataset[index][field] for index in range(len(dataset)))
    batches = dataset.select_columns([field]).with_format("numpy").iter(1000)
    return itertools.chain.from_iterable(rows[field] for rows in batches)


# Columns of TRL's trainers that compare answers (DPO, KTO, Reward; 1.16). A row of the model's batch is the prompt, if
# there is one, followed by one answer.
_PROMPT = "prompt_ids"
_ANSWERS = {"chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids"}
# Columns of other Trainers with one entry for each token of a row.
_TOKENS = ("input_ids", "attention_mask")


def row_lengths(trainer: Any, dataset: Any) -> np.ndarray:
    """Returns the width of the longest row that a Trainer makes of each sample, padding in the data included, shape
    (samples,); reads the whole dataset once. Raises MemOptError if the dataset has no field of tokens."""
    is_stored = hasattr(dataset, "select_columns")
    names = set(dataset.column_names if is_stored else dataset[0])
    answers = names & _ANSWERS
    fields = (*answers, *(names & {_PROMPT})) if answers else tuple(name for name in _TOKENS if name in names)[:1]
    if not fields:
        return complexities(dataset, trainer.args.length_column_name)
    counts = {name: np.asarray([len(value) for value in _values(dataset, name, is_stored)]) for name in fields}
    if not answers:
        return np.asarray(counts[fields[0]], dtype=np.float64)
    prompts = counts.pop(_PROMPT, 0)
    lengths = prompts + np.max(list(counts.values()), axis=0)
    # A collator may truncate the joined row.
    most = getattr(trainer.data_collator, "max_length", None)
    return np.asarray(lengths if most is None else np.minimum(lengths, most), dtype=np.float64)


class ComplexityCallback(TrainerCallback):
    """Logs once at the start how even the ranks' shares are, and sets the sampler's epoch to the Trainer's.

    Attributes:
        sampler: the sampler of the Trainer's latest data loader.
    """

    def __init__(self, path: str | None = None) -> None:
        self.reporter = Reporter("complexity", path)
        self.sampler: ComplexitySampler | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.reporter.begin(state)
        sampler = self.sampler
        if sampler is None:
            raise MemOptError(
                f"{FLAG}: {type(trainer).__name__} makes its training data loader without the Trainer's sampler (a "
                "get_train_dataloader of its own, or a stream); use Trainer's, or leave the flag out"
            )
        count = len(sampler.complexities)
        at_random = np.random.default_rng(sampler.seed).permutation(count)
        ours, before = (
            balance(order, sampler.complexities, sampler.batch_size, sampler.world_size)
            for order in (sampler.order(), at_random)
        )
        if ours is None or before is None:
            return
        ranks = (
            f"the slowest of {sampler.world_size} ranks has {ours.slowest_rank:.3f} times the mean tokens "
            f"({before.slowest_rank:.3f} in random order), "
        )
        self.reporter.lines(
            f"grouped by complexity: {ranks if sampler.world_size > 1 else ''}{ours.density:.0%} of a padded batch "
            f"are tokens ({before.density:.0%} in random order)"
        )
        self.reporter.metrics(
            {
                "complexity/slowest_rank": ours.slowest_rank,
                "complexity/slowest_rank_at_random": before.slowest_rank,
                "complexity/density": ours.density,
                "complexity/density_at_random": before.density,
            }
        )
        self.reporter.records(state.global_step, [{"balance": asdict(ours), "at_random": asdict(before)}])

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # accelerate forwards set_epoch to a sampler, but not through the two wrappers of a sharded loader that skips
        # the batches before a checkpoint (`DataLoaderShard.set_epoch` in 1.15): a resumed run would get epoch 0's
        # order.
        if self.sampler is not None:
            self.sampler.set_epoch(int(state.epoch or 0))


def sampler_of(trainer: Trainer, balanced: ComplexityCallback) -> Callable[..., ComplexitySampler]:
    """Returns a replacement for the Trainer's `_get_train_sampler`. Torch batches the sampler's indices, accelerate
    deals the batches to the ranks. The callback keeps the sampler, and raises an error if the Trainer never made
    one."""

    def get_train_sampler(dataset: Any = None) -> ComplexitySampler:
        args, accelerator = trainer.args, trainer.accelerator
        owners = (trainer.processing_class, getattr(trainer.model, "config", None))
        padding = next((each for owner in owners if (each := getattr(owner, "pad_token_id", None)) is not None), None)
        # `dataset` lacks the columns that the model does not take, such as the length.
        of_samples = complexities(trainer.train_dataset, args.length_column_name, padding)
        # With split_batches accelerate cuts each batch for the ranks instead of giving each rank a batch.
        parts = args.world_size if accelerator.split_batches else 1
        balanced.sampler = ComplexitySampler(
            of_samples,
            batch_size=train_batch_size(trainer) // parts,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            fill_last=args.world_size > 1 and accelerator.even_batches and not args.dataloader_drop_last,
        )
        return balanced.sampler

    return get_train_sampler


def run_of(trainer: Any) -> Run:
    """Returns the current or next training run of a Trainer."""
    accumulates, rows = trainer.args.gradient_accumulation_steps > 1, train_batch_size(trainer)
    return Run(trainer.optimizer, accumulates, partial(largest_batch, trainer), rows, micro_batches_of(trainer))


def micro_batches_of(trainer: Any) -> int:
    """Returns the number of micro-batches in a Trainer's optimizer step. It fetches all of them before it runs the
    first (`get_batch_samples`, transformers 5.23)."""
    steps, data = trainer.args.gradient_accumulation_steps, trainer.train_dataset
    if not hasattr(data, "__len__"):
        return steps
    rows = train_batch_size(trainer) * trainer.args.world_size
    return max(1, min(steps, math.ceil(len(data) / rows)))


def largest_batch(trainer: Any) -> LargestBatch | None:
    """Returns the sizes of the largest batch of the training data; None if reading the lengths would take long or run
    the user's code, or fails.

    Args:
        trainer: a Trainer, before or during `train()`.
    """
    dataset = trainer.train_dataset
    if not has_few_rows(dataset):
        return None
    rows = train_batch_size(trainer)
    try:
        lengths = row_lengths(trainer, dataset)
        most_tokens = int(np.sort(lengths)[-rows:].sum())
    except (MemOptError, TypeError, ValueError):
        return None
    collate = trainer.data_collator
    multiple = getattr(collate, "pad_to_multiple_of", None) or 1
    padded = np.ceil(lengths / multiple) * multiple
    longest = getattr(collate, "max_length", None)
    if getattr(collate, "padding", None) == "max_length" and isinstance(longest, int):
        padded = np.maximum(padded, longest)
    is_grouped = callback_of(trainer, ComplexityCallback) is not None
    strategy = GROUPED if is_grouped else strategy_of(trainer.args)
    return LargestBatch(rows, int(padded.max()), batch_lengths(padded, rows, strategy), most_tokens)


def is_readable(dataset: Any) -> bool:
    """True for a `datasets.Dataset` without a transform and for a list: reading rows runs no user code, which might
    draw random numbers."""
    is_stored = hasattr(dataset, "select_columns") and getattr(dataset, "format", {}).get("type") != "custom"
    return (is_stored or isinstance(dataset, list)) and len(dataset) > 0


def has_few_rows(dataset: Any) -> bool:
    """True if the lengths of all rows can be read in a second or two."""
    return is_readable(dataset) and len(dataset) <= 100_000


def batch_lengths(lengths: np.ndarray, rows: int, strategy: str) -> tuple[int, ...]:
    """Returns the length of the longest row of each batch in an epoch, for one order of the samples. Draws no random
    numbers of the run, and is the same on all ranks.

    Args:
        lengths: tokens of each sample, shape (samples,).
        strategy: name of the sampling strategy as in Trainer's arguments; unknown names count as random.
    """
    if strategy == "sequential":
        order = np.arange(len(lengths))
    elif strategy == GROUPED:
        order = ComplexitySampler(lengths, rows).order()
    else:
        order = np.random.default_rng(0).permutation(len(lengths))
    return tuple(int(lengths[order[start : start + rows]].max()) for start in range(0, len(order), rows))


_AUTO_BATCH = "--memory_opt_batch auto"


def check_micro_batch(trainer: Trainer) -> None:
    """Refuse `--memory_opt_batch auto` if DeepSpeed or accelerate sets the batch sizes, or if the data cannot be read
    before training. Raises MemOptError."""
    if trainer.is_deepspeed_enabled:
        raise MemOptError(f"{_AUTO_BATCH}: DeepSpeed's config sets the batch sizes; leave it out")
    if trainer.accelerator.split_batches:
        raise MemOptError(f"{_AUTO_BATCH}: split_batches divides each batch among the ranks; leave out one of them")
    if not is_readable(trainer.train_dataset):
        raise MemOptError(
            f"{_AUTO_BATCH} needs training data that can be read before training: a datasets.Dataset without a "
            "transform, or a list"
        )


@contextlib.contextmanager
def chosen_micro_batch(trainer: Trainer, options: MemOptOptions, engine: str) -> Iterator[None]:
    """Returns a context in which the Trainer has the chosen micro-batch size and gradient accumulation; restores the
    user's on exit.

    Raises:
        MemOptError: no micro-batch fits on some rank, or steps with other batch sizes cannot be predicted.
    """
    before = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    rows = math.prod(before)
    smallest = _agreed(trainer, options, engine, rows)
    try:
        _set(trainer, smallest, rows // smallest)
        yield
    finally:
        _set(trainer, *before)


def _set(trainer: Trainer, rows: int, accumulation: int) -> None:
    trainer.args.per_device_train_batch_size = rows
    trainer.args.gradient_accumulation_steps = accumulation
    reread_batch_size(trainer)


def _agreed(trainer: Trainer, options: MemOptOptions, engine: str, rows: int) -> int:
    """Returns the rows of the micro-batch: the smallest choice of all ranks, whose costs and free memory differ."""
    row: Row | None = None
    failure: Exception | None = None
    try:
        predictor = _predictor(trainer, options, engine)
        row = advise(predictor, rows).recommended
        own: int | str = row.rows
    except Exception as error:
        # The other ranks wait.
        own, failure = str(error) if isinstance(error, MemOptError) else line_of(error), error
    of_ranks = of_all_ranks(own)
    if failure is not None and not isinstance(failure, MemOptError):
        raise failure
    for rank, choice in enumerate(of_ranks):
        if isinstance(choice, str):
            raise MemOptError(f"{_AUTO_BATCH}: {f'rank {rank}: ' if len(of_ranks) > 1 else ''}{choice}")
    smallest = min(choice for choice in of_ranks if isinstance(choice, int))
    assert row is not None
    get_logger().info(
        f"{_AUTO_BATCH}: micro-batches of {smallest} rows, {rows // smallest} per optimizer step of {rows} rows a "
        f"rank; predicted on rank 0 for {row.rows}: {row.samples:.1f} samples per second, peak "
        f"{gib_text(row.step.peak)} within {gib_text(predictor.budget)}, {row.recomputing:.1%} of the time for "
        "recompute"
    )
    return smallest


def _predictor(trainer: Trainer, options: MemOptOptions, engine: str) -> StepPredictor:
    args, model = trainer.args, trainer.model
    assert isinstance(model, torch.nn.Module)
    collate = collator(trainer, "training")
    data: Any = trainer.train_dataset

    def make_batch(rows: int) -> Mapping[str, Any]:
        return prepared_inputs(trainer, collate([data[index % len(data)] for index in range(rows)]))

    largest = largest_batch(trainer)
    tokens = largest.length if largest is not None else 0
    # A custom loss may read other outputs than the model's loss. An engine that chunks the loss smooths labels itself.
    is_read = loss_name(trainer) not in ("", SMOOTHER)
    spec = StepSpec(
        compiler=options.memory_opt_compiler,
        bf16=args.bf16,
        fp16=args.fp16,
        optim=str(getattr(args.optim, "value", args.optim)),
    )
    # A collator may draw random numbers, for example to mask tokens for masked language models.
    with preserved_generators(next(model.parameters()).device):
        return factory(engine).predict_steps(
            ModelOfRun(model, make_batch, tokens, is_read, trainer.optimizer), options, spec
        )
