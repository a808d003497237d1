import json
import types

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from optimum_memopt.callbacks.input_density import (
    Density,
    InputDensityCallback,
    Padding,
    embedding_inputs,
    label_inputs,
    padding_of,
    valid_count,
    valid_per_row,
)
from tests.trackers import numbers, tracked

LENGTHS = [3, 10, 7, 1]
WIDTH = 10


def padded(index, lengths=LENGTHS, low=5):
    ids = torch.randint(low, 40, (len(lengths), WIDTH))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = index
    return ids


def mask_of(lengths=LENGTHS):
    return (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()


def rows_of(**columns):
    return [{name: column[row] for name, column in columns.items()} for row in range(len(LENGTHS))]


def roberta(model_class=RobertaForMaskedLM, **config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return model_class(RobertaConfig(vocab_size=50, max_position_embeddings=20, **sizes, **config))


def density(tensor, index):
    return Density(tuple(valid_per_row(tensor, index).tolist()), tensor.numel())


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, bos_token_id=49, eos_token_id=49))


def tokenizer(pad, eos="[EOS]"):
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "[PAD]": 3, "[EOS]": 4}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token=pad, eos_token=eos)


@pytest.fixture
def train(trainer_of, tmp_path):
    """Returns a function that trains and returns {(step, input): record} of steps and {input: record} of the run."""

    def run(model, data, *, log_steps=1, processing_class=None, prepare=lambda trainer: None, **arguments):
        path = tmp_path / "memopt.jsonl"
        path.unlink(missing_ok=True)
        own = {"model": model, "train_dataset": data, "processing_class": processing_class}
        own["data_collator"] = lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        arguments = {"per_device_train_batch_size": len(LENGTHS), "max_steps": 1, **arguments}
        trainer = trainer_of([InputDensityCallback(log_steps, path)], own=own, **arguments)
        prepare(tracked(trainer))
        trainer.train()
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return types.SimpleNamespace(
            trainer=trainer,
            steps={(record["step"], record["input"]): record for record in records if record["scope"] == "step"},
            run={record["input"]: record for record in records if record["scope"] == "run"},
        )

    return run


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (0, 5), (5, 0), (1, 1), (3, 7), (2, 3, 4), (1, 513)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_density_against_counting(shape, dtype):
    torch.manual_seed(1)
    tensor = torch.randint(0, 3, shape, dtype=dtype)
    rows = tensor.reshape(1, 1) if not shape else tensor
    expected = tuple(sum(value != 1 for value in torch.atleast_1d(row).flatten().tolist()) for row in rows)
    found = density(tensor, 1)
    assert found == Density(rows=expected, total=tensor.numel())
    assert int(valid_count(tensor, 1)) == sum(expected)
    assert int(valid_count(tensor, -100)) == int(valid_count(tensor, None)) == tensor.numel()
    assert found.percent == pytest.approx(100 * sum(expected) / tensor.numel() if tensor.numel() else 100)
    assert density(tensor, None).percent == 100
    assert density(tensor, -100).percent == 100


def test_density_of_a_transposed_tensor():
    tensor = torch.tensor([[1, 1, 1], [1, 2, 3]])
    assert density(tensor, 1).rows == (0, 2)
    assert density(tensor.T, 1).rows == (0, 1, 1)


def test_which_inputs_count():
    ids, floats = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3)
    batch = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": ids,
        "token_type_ids": ids,
        "pixel_values": floats,
        "codes": ids,
        "labels": ids[:, 0],
    }
    assert embedding_inputs(batch, "codes") == ["input_ids", "decoder_input_ids", "codes"]
    assert embedding_inputs(batch, "pixel_values") == ["input_ids", "decoder_input_ids"]
    assert label_inputs(batch, ["labels"]) == ["labels"]
    assert label_inputs({"start_positions": ids[:, 0], "labels": floats}, ["start_positions"]) == ["start_positions"]
    assert label_inputs({"labels": ids.bool()}, []) == []


def test_padding_comes_from_the_tokenizer_then_the_embedding_then_the_config():
    batch = {"input_ids": padded(3), "attention_mask": mask_of()}
    assert padding_of("input_ids", batch, tokenizer("[PAD]"), roberta()) == Padding(index=3)
    processor = types.SimpleNamespace(tokenizer=tokenizer("[PAD]"))
    assert padding_of("input_ids", batch, processor, roberta()) == Padding(index=3)
    assert padding_of("input_ids", batch, None, roberta()) == Padding(index=1)
    model = gpt2()
    model.config.pad_token_id = 7
    assert padding_of("input_ids", batch, None, model) == Padding(index=7)
    assert padding_of("input_ids", batch, None, torch.nn.Linear(1, 1)) == Padding(mask="attention_mask")


def test_where_the_index_is_missing_or_a_real_token_the_mask_is_read():
    batch = {"input_ids": padded(4), "attention_mask": mask_of()}
    assert padding_of("input_ids", batch, None, gpt2()) == Padding(mask="attention_mask")
    ended = tokenizer("[EOS]")
    assert padding_of("input_ids", batch, ended, gpt2()) == Padding(index=4, mask="attention_mask")
    del batch["attention_mask"]
    assert padding_of("input_ids", batch, ended, gpt2()) == Padding(index=4)
    assert padding_of("input_ids", batch, None, gpt2()) == Padding()
    counted, index = Padding(mask="attention_mask").counted_in("input_ids", batch)
    assert counted is batch["input_ids"] and index is None, "a batch that lacks the mask is all valid"


def test_masked_language_model(train, capsys):
    labels = padded(-100, [1, 2, 3, 0])
    result = train(roberta(), rows_of(input_ids=padded(1), attention_mask=mask_of(), labels=labels))
    assert set(result.steps) == {(0, "input_ids"), (0, "labels")}
    ids, label = result.steps[0, "input_ids"], result.steps[0, "labels"]
    assert (ids["input_type"], ids["padding"], ids["valid_tokens"], ids["total_tokens"]) == ("EMBED", "1", 21, 40)
    assert ids["density"] == pytest.approx(52.5)
    assert sorted(ids["valid_tokens_per_row"]) == sorted(LENGTHS)
    assert (label["input_type"], label["padding"], label["valid_tokens"]) == ("LABEL", "-100", 6)
    assert label["density"] == pytest.approx(15.0)
    output = capsys.readouterr().err
    for column in ("STEP", "INPUT TYPE", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS", "VALID TOKENS/BATCH"):
        assert f"| {column}" in output
    assert "52.50%" in output
    logged = [entry for entry in numbers(result.trainer) if "memopt/density/input_ids" in entry]
    assert [(entry["step"], entry["memopt/valid_tokens/labels"]) for entry in logged] == [(1, 6.0)]


def test_a_step_sums_its_micro_batches_and_the_run_its_steps(train):
    data = rows_of(input_ids=padded(1), labels=padded(-100))
    result = train(
        roberta(), data, log_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3
    )
    assert set(result.steps) == {(0, "input_ids"), (0, "labels"), (2, "input_ids"), (2, "labels")}
    for record in result.steps.values():
        assert (record["valid_tokens"], record["total_tokens"]) == (21, 40)
    assert sorted(result.steps[2, "input_ids"]["valid_tokens_per_row"]) == sorted(LENGTHS)
    assert (result.run["input_ids"]["valid_tokens"], result.run["input_ids"]["total_tokens"]) == (63, 120)
    assert numbers(result.trainer, "run_density/input_ids") == [pytest.approx(52.5)]


def test_labels_are_seen_although_label_smoothing_takes_them_out(train):
    data = rows_of(input_ids=padded(1), labels=padded(-100))
    result = train(roberta(), data, label_smoothing_factor=0.1)
    assert result.steps[0, "labels"]["valid_tokens"] == 21


def test_classification_labels_are_dense_and_float_labels_are_skipped(train):
    model = roberta(RobertaForSequenceClassification)
    result = train(model, rows_of(input_ids=padded(1), labels=torch.tensor([0, 1, 1, 0])))
    assert (result.steps[0, "labels"]["density"], result.steps[0, "labels"]["total_tokens"]) == (100.0, 4)
    model = roberta(RobertaForSequenceClassification, num_labels=1, problem_type="regression")
    result = train(model, rows_of(input_ids=padded(1), labels=torch.rand(4)))
    assert set(result.steps) == {(0, "input_ids")}


def test_gpt2_without_a_padding_token_is_read_from_its_mask(train, capsys):
    data = rows_of(input_ids=padded(49), attention_mask=mask_of(), labels=padded(-100))
    result = train(gpt2(), data, max_steps=2)
    assert result.steps[1, "input_ids"]["padding"] == "mask"
    assert result.steps[1, "input_ids"]["valid_tokens"] == 21
    assert capsys.readouterr().err.count("counting padding by attention_mask, since no padding index is known") == 1


def test_t5_reports_encoder_decoder_and_labels(train):
    config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    decoder_lengths = [2, 4, 6, 8]
    decoder_ids = padded(0, decoder_lengths)
    decoder_ids[:, 0] = 0
    columns = {"input_ids": padded(0), "decoder_input_ids": decoder_ids, "labels": padded(-100, decoder_lengths)}
    steps = train(T5ForConditionalGeneration(config), rows_of(**columns)).steps
    assert {name: steps[0, name]["valid_tokens"] for name in columns} == {
        "input_ids": 21,
        "decoder_input_ids": 20 - 4,
        "labels": 20,
    }
    columns["decoder_attention_mask"] = mask_of(decoder_lengths)
    steps = train(T5ForConditionalGeneration(config), rows_of(**columns)).steps
    assert (steps[0, "decoder_input_ids"]["valid_tokens"], steps[0, "decoder_input_ids"]["padding"]) == (20, "mask")


def test_training_step_is_restored(train):
    data = rows_of(input_ids=padded(1), labels=padded(-100))
    assert "training_step" not in vars(train(roberta(), data).trainer)

    def replace(trainer):
        trainer.original, calls = trainer.training_step, []

        def mine(*args, **kwargs):
            calls.append(1)
            return trainer.original(*args, **kwargs)

        trainer.training_step, trainer.mine, trainer.calls = mine, mine, calls

    trainer = train(roberta(), data, prepare=replace).trainer
    assert trainer.training_step is trainer.mine
    assert trainer.calls == [1]


def test_training_twice_counts_once(train):
    result = train(
        roberta(), rows_of(input_ids=padded(1), labels=padded(-100)), prepare=lambda trainer: trainer.train()
    )
    assert result.run["input_ids"]["total_tokens"] == 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counting_does_not_wait_for_the_device():
    ids = padded(1).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows, counted = valid_per_row(ids, 1), valid_count(ids, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.tolist() == LENGTHS and int(counted) == sum(LENGTHS)
