"""Every rank gets equal work: the order itself, with accelerate's own sharding, and in runs."""

from itertools import chain

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, IterableDataset

from optimum_memopt import MemOptError, MemOptTrainer, optimize
from optimum_memopt.training.batches import ComplexitySampler, balance, complexities
from tests.train.sampling_runs import NAME
from tests.trainer_runs import build, collate, make, rows


def lengths(count, seed=0):
    """Returns skewed lengths, like those of real text."""
    return 5 + (60 * np.random.default_rng(seed).beta(1.5, 5, count)).astype(int)


def shards(sampler, world, size, drop_last, epoch=0):
    """Returns the batches of each rank as Trainer and accelerate make them."""
    sampler.set_epoch(epoch)
    if world == 1:
        return [list(BatchSampler(sampler, size, drop_last))]
    return [list(BatchSamplerShard(BatchSampler(sampler, size, drop_last), world, rank)) for rank in range(world)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 3, 16, 64, 67, 1003])
@pytest.mark.parametrize(("world", "size"), [(1, 4), (2, 4), (3, 5), (8, 2)])
def test_ranks_share_all_samples_in_as_many_batches(world, size, count, drop_last):
    sampler = ComplexitySampler(lengths(count), size, world, fill_last=world > 1 and not drop_last)
    ranks = shards(sampler, world, size, drop_last)
    used = [index for batches in ranks for batch in batches for index in batch]
    step = world * size
    assert len({len(batches) for batches in ranks}) == 1
    # Trainer computes its number of steps from this.
    batches = BatchSampler(sampler, size, drop_last)
    assert len(ranks[0]) == len(BatchSamplerShard(batches, world, 0) if world > 1 else batches)
    assert len(list(sampler)) == len(sampler)
    if drop_last:
        assert len(used) == len(set(used)) == count - count % (step if world > 1 else size)
    else:
        assert set(used) == set(range(count))
        # Samples repeat only to complete the last step of several ranks.
        assert len(used) == (-(-count // step) * step if world > 1 else count)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_step_is_even(world):
    tokens = lengths(4000)
    ranks = shards(ComplexitySampler(tokens, 8, world, fill_last=True), world, 8, False)
    for step in zip(*ranks, strict=True):
        work = [tokens[batch].sum() for batch in step]
        assert max(work) <= 1.15 * np.mean(work)
    found = balance(ComplexitySampler(tokens, 8, world).order(), tokens, 8, world)
    at_random = balance(np.random.default_rng(0).permutation(4000), tokens, 8, world)
    assert found.slowest_rank < 1.02 < 1.07 < at_random.slowest_rank
    assert found.slowest_rank_padded < 1.02 < 1.07 < at_random.slowest_rank_padded
    assert found.density > 0.9 > 0.7 > at_random.density


def test_balance_is_what_it_says():
    tokens = np.array([1, 2, 3, 4, 9])
    found = balance(np.array([0, 1, 2, 3, 4]), tokens, batch_size=2, world_size=2)
    assert found.slowest_rank == pytest.approx(7 / 5)
    assert found.slowest_rank_padded == pytest.approx(8 / 6)
    assert found.density == pytest.approx(10 / 12)
    assert found.step_tokens == 8
    assert balance(np.arange(3), tokens, 2, 2) is None


def test_the_order_depends_on_seed_and_epoch_alone():
    tokens = lengths(200)
    orders = {
        (seed, epoch): tuple(order)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
        for order in [shards(ComplexitySampler(tokens, 4, 2, seed=seed), 1, 4, False, epoch)[0]]
        for order in [list(chain.from_iterable(order))]
    }
    assert len(set(orders.values())) == len(orders)
    again = ComplexitySampler(tokens, 4, 2, seed=1)
    list(again)
    again.set_epoch(2)
    assert tuple(again) == orders[1, 2]


def test_the_longest_sample_comes_first_and_drop_last_loses_others_in_every_epoch():
    tokens = lengths(203)
    sampler = ComplexitySampler(tokens, 4, 2)
    lost = []
    for epoch in range(4):
        ranks = shards(sampler, 2, 4, True, epoch)
        used = {index for batches in ranks for batch in batches for index in batch}
        assert tokens[ranks[0][0]].max() == max(tokens[list(used)])
        lost.append(frozenset(range(203)) - used)
    assert all(len(each) == 3 for each in lost) and len(set(lost)) == 4


# The source of the lengths.


class Items(torch.utils.data.Dataset):
    """A data set that ends only by its length: larger indices wrap around."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index % len(self.items)]


ITEM = {"input_ids": [5, 6, 7, 1, 1], "attention_mask": [1, 1, 0, 0, 0], "length": 9, "label": 0}


@pytest.mark.parametrize("kind", ["items", "tensors", "columns"])
@pytest.mark.parametrize(
    ("without", "padding", "expected"),
    [((), 1, 9), (("length",), 1, 2), (("length", "attention_mask"), 1, 3), (("length", "attention_mask"), None, 5)],
)
def test_lengths_come_from_the_best_source_there_is(kind, without, padding, expected):
    short = {"input_ids": [5], "attention_mask": [1], "length": 1, "label": 0}
    items = [{name: value for name, value in item.items() if name not in without} for item in (ITEM, short)]
    if kind == "columns":
        dataset = pytest.importorskip("datasets").Dataset.from_list(items)
    else:
        make_value = torch.tensor if kind == "tensors" else lambda value: value
        dataset = Items([{name: make_value(value) for name, value in item.items()} for item in items])
    assert complexities(dataset, pad_token_id=padding).tolist() == [expected, 1]


def test_a_named_column_and_a_transform():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([{"text": "a b c", "work": 3.5}, {"text": "a", "work": 1.0}])
    dataset.set_transform(lambda batch: {"input_ids": [[7] * len(text.split()) for text in batch["text"]]})
    assert complexities(dataset).tolist() == [3, 1]
    assert complexities(dataset, length_column="work").tolist() == [3.5, 1.0]


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows(NAME)


def test_data_without_lengths_are_refused():
    with pytest.raises(MemOptError, match="no length, attention_mask or input_ids, only pixel_values; add a column"):
        complexities([{"pixel_values": torch.zeros(3)}])
    with pytest.raises(MemOptError, match="only tuple; add a column length"):
        complexities([(1, 2)])
    with pytest.raises(MemOptError, match="with a Stream: samples of a stream"):
        complexities(Stream())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "with the sampling strategy group_by_length"),
        ({"train_sampling_strategy": "batch_rebalance"}, "with the sampling strategy batch_rebalance"),
        ({"train_sampling_strategy": "sequential"}, "with the sampling strategy sequential"),
        ({"train_dataset": Stream()}, "with a Stream"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else value,
)
def test_refused_when_the_trainer_is_made(tmp_path, changes, message):
    with pytest.raises(MemOptError) as caught:
        make(tmp_path, NAME, group_by_complexity=True, **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_loop_without_a_trainer_has_no_sampler():
    with pytest.raises(MemOptError, match="--group_by_complexity needs a Trainer"):
        optimize(build(NAME), group_by_complexity=True)


def test_a_trainer_that_does_not_take_the_sampler_is_noticed(tmp_path):
    class Own(MemOptTrainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(torch.utils.data.DataLoader(rows(NAME), 4, collate_fn=collate))

    trainer = make(tmp_path, NAME, trainer=Own, group_by_complexity=True)
    with pytest.raises(MemOptError, match="Own makes its training data loader without the Trainer's sampler"):
        trainer.train()
    assert trainer.state.global_step == 0
