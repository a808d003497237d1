import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.trainer_runs import build

WORDS = ["<unk>", "<pad>", "<s>", "</s>", "good", "fine", "bad", "poor", "film", "food", "very", "not"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Returns a folder with a tiny RoBERTa, its tokenizer, and rows that it can learn."""
    folder = tmp_path_factory.mktemp("material")
    build("roberta-classification", num_labels=2).save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **special).save_pretrained(folder / "model")
    rows = [
        {"sentence": f"{'very ' * (index % 3)}{word} {thing}", "label": label}
        for index, (word, label) in enumerate([("good", 1), ("bad", 0), ("fine", 1), ("poor", 0)] * 8)
        for thing in ("film", "food")
    ]
    for name, written in (("rows", rows), ("texts", [{"text": row["sentence"]} for row in rows])):
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in written))
    return folder
