"""A plan is made for the largest batch of a run."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding, PreTrainedTokenizerFast

from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.graph.symbols import larger_sizes, shaped_as
from optimum_memopt.errors import MemOptError
from optimum_memopt.training.batches import ComplexityCallback, largest_batch
from tests.rotation import nightly
from tests.trainer_runs import log_lines, make, rows

UNREAD = "planning for the first batch, since the lengths of the training data are not read"
NAMES = {"a": "input_ids_dim0", "b": "input_ids_dim1", "c": "labels_dim1", "d": "pixel_values_dim1"}


def test_rows_and_length_are_raised_and_nothing_else() -> None:
    first = {"a": 4, "b": 20, "c": 8, "d": 3, "unnamed": 5}
    assert larger_sizes(first, NAMES, LargestBatch(16, 30)) == {**first, "a": 16, "b": 30}
    assert larger_sizes(first, NAMES, LargestBatch(2, 10)) == first
    assert larger_sizes(first, NAMES, None) == first


def trainer_on(dataset: object, collator: object = None, callbacks: Sequence[object] = ()) -> SimpleNamespace:
    args = SimpleNamespace(length_column_name="length", train_batch_size=4)
    handler = SimpleNamespace(callbacks=callbacks)
    return SimpleNamespace(
        train_dataset=dataset, args=args, _train_batch_size=4, data_collator=collator, callback_handler=handler
    )


LISTS = [{"input_ids": [1] * length} for length in (3, 9, 5)]


@pytest.mark.parametrize("dataset", [LISTS, Dataset.from_list(LISTS), Dataset.from_dict({"length": [3, 9, 5]})])
def test_stored_rows_tell(dataset: object) -> None:
    assert largest_batch(trainer_on(dataset)) == LargestBatch(4, 9)


def test_batches_are_those_of_the_runs_order() -> None:
    rows = [{"input_ids": [1] * (1 + 37 * index % 100)} for index in range(100)]
    at_random = largest_batch(trainer_on(rows)).lengths
    grouped = largest_batch(trainer_on(rows, callbacks=[ComplexityCallback()])).lengths
    assert len(at_random) == len(grouped) == 25
    assert max(at_random) == max(grouped) == 100 and sum(grouped) < sum(at_random)
    in_order = trainer_on(rows)
    in_order.args.train_sampling_strategy = "sequential"
    assert largest_batch(in_order).lengths[:2] == (75, 86)


ANSWERS = {"dpo": ("chosen_ids", "rejected_ids"), "reward": ("chosen_ids", "rejected_ids"), "kto": ("completion_ids",)}


@pytest.mark.parametrize("most", [None, 11])
@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_that_are_compared_come_behind_their_prompt(kind: str, multiple: int | None, most: int | None) -> None:
    source, named = random.Random(0), {"pad_token_id": 0, "pad_to_multiple_of": multiple}
    if kind == "reward":
        collator = pytest.importorskip("trl.trainer.reward_trainer").DataCollatorForPreference(**named)
    else:
        module = pytest.importorskip(f"trl.trainer.{kind}_trainer")
        name = "DataCollatorForPreference" if kind == "dpo" else "DataCollatorForUnpairedPreference"
        collator = getattr(module, name)(**named, max_length=most)
    columns = (*ANSWERS[kind], *(() if kind == "reward" else ("prompt_ids",)))
    of_kind = [{name: [5] * source.randint(1, 12) for name in columns} | {"label": True} for _ in range(12)]
    longest = max(collator([row])["input_ids"].shape[1] for row in of_kind)
    for dataset in (of_kind, Dataset.from_list(of_kind)):
        found = largest_batch(trainer_on(dataset, collator))
        assert found == LargestBatch(4, longest)
        assert max(found.lengths) == longest


def test_rows_are_padded_to_a_multiple() -> None:
    found = largest_batch(trainer_on(LISTS, SimpleNamespace(pad_to_multiple_of=8)))
    assert (found.length, found.lengths, found.tokens) == (16, (16,), 17)


PADDED = [{"attention_mask": [1] * length + [0] * (12 - length), "input_ids": [1] * 12} for length in (3, 9, 5)]


def test_padding_in_the_data_counts() -> None:
    for dataset in (PADDED, Dataset.from_list(PADDED)):
        assert largest_batch(trainer_on(dataset)).length == 12


def test_collators_that_pad_all_batches_to_one_length() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})), pad_token="a")
    collator = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=20)
    found = largest_batch(trainer_on(LISTS, collator))
    assert (found.length, found.lengths) == (collator(LISTS)["input_ids"].shape[1], (20,))


class Random(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise AssertionError("a row was made")


OTHERS = [Dataset.from_dict({"text": ["a"]}), Dataset.from_list(LISTS).with_transform(dict)]


@pytest.mark.parametrize("dataset", [None, [], Random(), iter(LISTS), *OTHERS])
def test_others_are_not_asked(dataset: object) -> None:
    assert largest_batch(trainer_on(dataset)) is None


def test_rows_that_come_one_after_another_in_one_are_those_together() -> None:
    rows = [{"input_ids": [1] * length} for length in (3, 9, 5, 7, 2)]
    of_data = largest_batch(trainer_on(rows))
    assert shaped_as(of_data, {"input_ids_dim0": 4, "input_ids_dim1": 9}) == LargestBatch(4, 9)
    assert shaped_as(of_data, {"input_ids_dim0": 1, "input_ids_dim1": 9}) == LargestBatch(4, 9)
    assert shaped_as(of_data, {"input_ids_dim0": 1, "input_ids_dim1": 17}) == LargestBatch(1, 24, flattened=4)


@pytest.mark.parametrize("budget", nightly(["90%", "1MiB"], but=["1MiB"]))
def test_a_padding_free_run_is_planned_for_its_longest_rows_together(tmp_path: Path, budget: str) -> None:
    ragged = [{"input_ids": list(range(5, 5 + length))} for length in (5, 5, 6, 6, 7, 8, 9, 9)]
    options = {"memory_opt_engine": "compile", "memory_opt_budget": budget, "max_steps": 2}
    own = {"train_dataset": ragged, "data_collator": DataCollatorWithFlattening()}
    trainer = make(tmp_path, "llama", **options, **own, train_sampling_strategy="sequential")
    if budget == "90%":
        trainer.train()
        assert "for batches up to 1 x 33: fits without a plan" in trainer.memopt.table.header[0]
    else:
        with pytest.raises(MemOptError, match=r"\(batch 1 x 33, the 4 longest rows in one\), over 1.0 MiB"):
            trainer.train()


def test_a_trainers_first_plan_holds_for_all_its_batches(tmp_path: Path) -> None:
    """A Trainer's first plan holds for all batches: the longest rows come last and compile nothing."""
    ragged = sorted(rows("roberta-classification", 24), key=lambda row: len(row["input_ids"]))
    options = {"memory_opt_engine": "compile", "memory_opt_budget": "90%"}
    order = {"train_dataset": ragged, "train_sampling_strategy": "sequential", "max_steps": 6}
    trainer = make(tmp_path, "roberta-classification", **options, **order)
    with log_lines() as lines:
        trainer.train()
    header = trainer.memopt.table.header[0]
    assert "for batches up to 4 x 9" in header and "fits without a plan" in header
    assert sum(line.startswith("compiling ") for line in lines) == 1
    assert not any(UNREAD in line for line in lines)


def test_lengths_that_are_not_read_are_said(tmp_path: Path) -> None:
    data = torch.utils.data.Subset(rows("roberta-classification", 8), range(8))
    options = {"memory_opt_engine": "compile", "memory_opt_budget": "90%", "max_steps": 2}
    with log_lines() as lines:
        make(tmp_path, "roberta-classification", **options, train_dataset=data).train()
    assert sum(UNREAD in line for line in lines) == 1
