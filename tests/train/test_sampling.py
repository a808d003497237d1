import json
import math
from itertools import chain

import numpy as np
import pytest
import torch

from tests import fresh_process
from tests.rotation import in_turn
from tests.trackers import numbers
from tests.train import sampling_runs
from tests.train.sampling_runs import CASES, NAME, recorded_run
from tests.trainer_runs import make, rows


@pytest.mark.parametrize(
    "changes",
    [{}, {"dataloader_drop_last": True}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 1}],
    ids=["plain", "drop-last", "accumulation", "worker"],
)
def test_a_resumed_run_goes_on_with_the_same_batches(tmp_path, changes):
    if "dataloader_num_workers" in changes:
        # Workers record in their own memory, so only the final weights can be compared.
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


def test_a_second_training_starts_with_the_first_epoch_again(tmp_path):
    trainer, batches, _ = recorded_run(tmp_path, save_strategy="no", num_train_epochs=1)
    first = list(batches)
    batches.clear()
    trainer.train()
    assert batches == first


def test_the_length_column_counts_although_the_model_does_not_take_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = rows(NAME, 40)
    # In the reverse order of the real lengths.
    stored = [{**row, "length": 100 - len(row["input_ids"])} for row in data]
    trainer = make(
        tmp_path, NAME, train_dataset=datasets.Dataset.from_list(stored).with_format("torch"), group_by_complexity=True
    )
    trainer.train()
    (sampler,) = [callback.sampler for callback in trainer.callback_handler.callbacks if hasattr(callback, "sampler")]
    assert sampler.complexities.tolist() == [row["length"] for row in stored]


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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Returns the ranks' batches in each case, of a whole and a resumed run, and the log lines."""
    folder = tmp_path_factory.mktemp("ranks")
    done = fresh_process.run(sampling_runs.__file__, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@in_turn
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
        # Samples are dealt in order of length, so ranks differ by at most the longest minus the shortest sample.
        assert abs(tokens[mine].sum() - tokens[other].sum()) <= np.ptp(tokens[mine + other])
    first = [index for each in ranks for batch in each["batches"][:steps] for index in batch]
    assert len(set(first)) == (45 - 45 % (2 * size) if drops else 45)
    for each in ranks:
        assert each["batches"][:steps] != each["batches"][steps:]
        assert 0 < len(each["rest"]) < steps - 1
        assert each["rest"] == each["batches"][-len(each["rest"]) :]
    (line,) = [line for line in ranks[0]["lines"] if line.startswith("grouped by complexity")]
    assert "the slowest of 2 ranks has 1.0" in line
