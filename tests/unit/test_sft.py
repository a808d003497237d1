import math

import pytest

pytest.importorskip("trl")

from datasets import Dataset

from optimum_memopt import MemOptError
from sft import sft

ROWS = Dataset.from_list(
    [{"prompt": f"Literal: {word} there was. Modern:", "completion": f" There was {word}.", "id": 7} for word in "abc"]
)


@pytest.fixture(scope="module")
def tokenizer():
    return sft.new_tokenizer(sft.texts_of(ROWS))


def test_a_tokenizer_learns_from_all_columns_of_text(tokenizer):
    assert " ".join(sft.texts_of(ROWS)).startswith("Literal: a there was. Modern:  There was a. Literal: b")
    assert len(tokenizer("there was")["input_ids"]) < 6, "merged into longer tokens than characters"
    assert tokenizer.decode(tokenizer("Fröhlich, 日本")["input_ids"], skip_special_tokens=True) == "Fröhlich, 日本"


def test_a_prompt_is_the_beginning_of_prompt_and_completion(tokenizer):
    """A prompt's ids begin its row's ids, so that TRL finds the completion; only TRL appends the end token."""
    row = ROWS[0]
    prompt, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"]))
    assert whole[: len(prompt)] == prompt and prompt[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in whole
    assert tokenizer(tokenizer.eos_token)["input_ids"] == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_a_new_llama_knows_its_tokenizer(tokenizer):
    model = sft.new_llama(tokenizer)
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 2)


def test_adapters_only_where_asked_for():
    assert sft.ModelArguments(lora_r=4).adapters is None
    adapters = sft.ModelArguments(lora=True, lora_r=4).adapters
    assert (adapters.r, adapters.lora_alpha, adapters.task_type) == (4, 8, "CAUSAL_LM")
    assert sft.ModelArguments(qlora=True, lora_r=4).adapters.target_modules == adapters.target_modules
    with pytest.raises(MemOptError, match="--lora_r must be at least 1, not 0"):
        sft.ModelArguments(lora_r=0)


def test_quantized_weights_need_bitsandbytes(monkeypatch):
    monkeypatch.setattr(sft, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(MemOptError, match="--qlora needs bitsandbytes: pip install bitsandbytes"):
        sft.ModelArguments(qlora=True)


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(MemOptError, match="--model_name_or_path /no/such/model: "):
        sft.load(sft.ModelArguments(model_name_or_path="/no/such/model"), ROWS)


def test_results():
    shown = sft.results({"eval_loss": math.log(12.5), "eval_mean_token_accuracy": 0.25})
    assert shown == {"perplexity": "12.5", "token accuracy": "0.250"}
    assert sft.results({}) == {}
