"""Every rank gets as much to do as the others: the order itself, through accelerate's own sharding, and in runs."""

import json
import math
from itertools import chain

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, IterableDataset

from optimum_memopt import MemOptError, MemOptTrainer, optimize
from optimum_memopt.training.sampling import ComplexitySampler, balance, complexities
from tests import fresh_process
from tests.trackers import numbers
from tests.train import sampling_runs
from tests.train.sampling_runs import CASES, NAME, recorded_run
from tests.trainer_runs import build, collate, make, rows


def lengths(count, seed=0):
    """Skewed, as those of real text are."""
    return 5 + (60 * np.random.default_rng(seed).beta(1.5, 5, count)).astype(int)


def shards(sampler, world, size, drop_last, epoch=0):
    """The batches of each rank, as Trainer and accelerate make them."""
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
    # What a Trainer computes its steps from.
    batches = BatchSampler(sampler, size, drop_last)
    assert len(ranks[0]) == len(BatchSamplerShard(batches, world, 0) if world > 1 else batches)
    assert len(list(sampler)) == len(sampler)
    if drop_last:
        assert len(used) == len(set(used)) == count - count % (step if world > 1 else size)
    else:
        assert set(used) == set(range(count))
        # Nothing is repeated but to complete the last step of several ranks.
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


# Where the lengths come from.


class Items(torch.utils.data.Dataset):
    """A data set that knows no end but its length."""

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
    [
        ((), 1, 9),
        (("length",), 1, 2),
        (("length", "attention_mask"), 1, 3),
        (("length", "attention_mask"), None, 5),
    ],
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
    with pytest.raises(MemOptError, match="with a Stream: samples that come as a stream"):
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


# Runs.


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "changes",
    [{}, {"dataloader_drop_last": True}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 1}],
    ids=["plain", "drop-last", "accumulation", "worker"],
)
def test_a_resumed_run_goes_on_with_the_same_batches(tmp_path, changes):
    if "dataloader_num_workers" in changes:
        # Workers record in their own memory: only what the run ends in can be compared.
        ends = []
        for resume in (None, str(tmp_path / "checkpoint-18")):
            trainer, _, _ = recorded_run(tmp_path, resume, **changes)
            ends.append(trainer.model.state_dict())
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)
        return
    whole, batches, _ = recorded_run(tmp_path, **changes)
    per_epoch = len(batches) // 2
    assert per_epoch == (11 if changes.get("dataloader_drop_last") else 12)
    assert batches[:per_epoch] != batches[per_epoch:]
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        used = list(chain.from_iterable(epoch))
        assert len(used) == len(set(used)) == (44 if changes.get("dataloader_drop_last") else 45)
    step = math.ceil(0.75 * whole.state.global_step)
    _, rest, _ = recorded_run(tmp_path, str(tmp_path / f"checkpoint-{step}"), **changes)
    assert rest == batches[-len(rest) :]
    assert len(rest) == (per_epoch - 6 if "gradient_accumulation_steps" in changes else 2 * per_epoch - step)


@pytest.mark.end_to_end
def test_a_second_training_starts_with_the_first_epoch_again(tmp_path):
    trainer, batches, _ = recorded_run(tmp_path, save_strategy="no", num_train_epochs=1)
    first = list(batches)
    batches.clear()
    trainer.train()
    assert batches == first


@pytest.mark.end_to_end
def test_the_length_column_counts_although_the_model_does_not_take_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = rows(NAME, 40)
    # The other way round than the real lengths.
    stored = [{**row, "length": 100 - len(row["input_ids"])} for row in data]
    trainer = make(
        tmp_path, NAME, train_dataset=datasets.Dataset.from_list(stored).with_format("torch"), group_by_complexity=True
    )
    trainer.train()
    (sampler,) = [callback.sampler for callback in trainer.callback_handler.callbacks if hasattr(callback, "sampler")]
    assert sampler.complexities.tolist() == [row["length"] for row in stored]


@pytest.mark.end_to_end
def test_the_run_says_how_even_it_is(tmp_path):
    trainer, _, lines = recorded_run(
        tmp_path, save_strategy="no", memory_opt_log_file=str(tmp_path / "found.jsonl"), data_seed=5
    )
    (line,) = [line for line in lines if line.startswith("grouped by complexity")]
    assert "in random order" in line and "ranks" not in line
    first = numbers(trainer)[0]
    assert first["step"] == 0
    assert first["memopt/complexity/density"] > first["memopt/complexity/density_at_random"]
    assert first["memopt/complexity/slowest_rank"] == 1
    records = [json.loads(text) for text in (tmp_path / "found.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if record["kind"] == "complexity"]
    assert record["balance"]["density"] == pytest.approx(first["memopt/complexity/density"])


# Two ranks.


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Each rank's batches in each case, of a whole run and of one resumed in its second epoch, and what was said."""
    folder = tmp_path_factory.mktemp("ranks")
    done = fresh_process.run(sampling_runs.__file__, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.end_to_end
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_as_many_samples_of_the_same_lengths(two_ranks, case):
    ranks = [each[case] for each in two_ranks]
    size = 2 if case == "split-batches" else 4
    tokens = np.array([len(row["input_ids"]) for row in rows(NAME, 45)])
    drops = "dataloader_drop_last" in CASES[case]
    steps = 45 // (2 * size) if drops else -(-45 // (2 * size))
    assert [len(each["batches"]) for each in ranks] == [2 * steps, 2 * steps]
    for mine, other in zip(ranks[0]["batches"], ranks[1]["batches"], strict=True):
        assert len(mine) == len(other) == size and not set(mine) & set(other)
        # Dealt in order of length, hands differ by no more than the longest and the shortest card.
        assert abs(tokens[mine].sum() - tokens[other].sum()) <= np.ptp(tokens[mine + other])
    first = [index for each in ranks for batch in each["batches"][:steps] for index in batch]
    assert len(set(first)) == (45 - 45 % (2 * size) if drops else 45)
    for each in ranks:
        assert each["batches"][:steps] != each["batches"][steps:]
        assert 0 < len(each["rest"]) < steps - 1
        assert each["rest"] == each["batches"][-len(each["rest"]) :]
    (line,) = [line for line in ranks[0]["lines"] if line.startswith("grouped by complexity")]
    assert "tokens of the slowest of 2 ranks 1.0" in line
