import json

import pytest
import torch
from transformers import CanineConfig, CLIPConfig, T5Config, XLNetConfig

from optimum_memopt.errors import MemOptError
from optimum_memopt.predict.workload import TASKS, Workload, freeze_others, matches
from tests.saved_configs import save

MODELS = {
    "text-classification": "roberta-mlm",
    "token-classification": "bert-classification",
    "question-answering": "deberta-v2-mlm",
    "fill-mask": "roberta-mlm",
    "text-generation": "gpt2",
    "text2text-generation": "t5",
    "image-classification": "vit",
}


@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_loss_with_gradients(task, has_padding, tmp_path):
    folder = save(tmp_path, MODELS[task])
    model, batch = Workload(folder, task, batch_size=3, seq_len=11, padding=has_padding).build()
    assert model.training
    model(**batch).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "pooler" not in name)
    assert all(tensor.shape[0] == 3 for tensor in batch.values())
    if "input_ids" in batch:
        assert batch["input_ids"].shape == (3, 11)
        # As in a prediction: attention without a mask is a different kernel.
        assert batch["attention_mask"].all() != has_padding
        assert model.config.pad_token_id not in batch["input_ids"].tolist()[0]


def test_a_decoder_without_a_first_token_in_its_config():
    config = T5Config(num_layers=1, d_model=16, d_ff=32, d_kv=8, num_heads=2, vocab_size=50)
    assert getattr(config, "decoder_start_token_id", None) is None
    model, batch = Workload(config, "text2text-generation", 2, 5).build()
    model(**batch).loss.backward()


_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.mark.parametrize(
    ("config", "task"),
    [
        # No limit on the length.
        (XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=24), "text-classification"),
        # Characters instead of a vocabulary.
        (CanineConfig(**_SMALL, num_hash_buckets=128, local_transformer_stride=8), "token-classification"),
        # The image size is in a nested config.
        (
            CLIPConfig(
                text_config={**_SMALL, "vocab_size": 50}, vision_config={**_SMALL, "image_size": 16, "patch_size": 8}
            ),
            "image-classification",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_configs_that_say_less(config, task):
    model, batch = Workload(config, task, 2, 128).build()
    model(**batch).loss.backward()


def test_a_regression(tmp_path):
    model, batch = Workload(save(tmp_path, "roberta-mlm", num_labels=1), "text-classification", 2, 5).build()
    assert batch["labels"].dtype == torch.float32
    model(**batch).loss.backward()


def test_a_config_file_and_the_same_numbers_each_time(tmp_path):
    folder = save(tmp_path, "roberta-mlm")
    paths = (folder, f"{folder}/config.json")
    (one, batch), (other, again) = (Workload(path, "fill-mask", seq_len=9).build() for path in paths)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert torch.equal(batch["input_ids"], again["input_ids"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task": "text-clasification"}, "--task text-clasification: did you mean text-classification?"),
        ({"task": "nonsense"}, "--task nonsense: allowed: text-classification, "),
        ({"batch_size": 0}, "--batch_size 0: allowed: whole numbers from 1 to 2147483648"),
        ({"seq_len": -1}, "--seq_len -1: allowed"),
        ({"model": "no/such/folder"}, "--model no/such/folder: no such folder or config file"),
        ({"model": "/nowhere"}, "--model /nowhere: no such folder or config file"),
        ({"model": "tests"}, "--model tests: there is no config.json in this folder"),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_loaded(changes, message, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MemOptError) as caught:
        Workload(**{"model": "bert-base-uncased", "task": "fill-mask", **changes}).check()
    assert str(caught.value).startswith(message)


def test_what_is_wrong_with_the_model(tmp_path):
    folder = save(tmp_path, "vit")
    with pytest.raises(MemOptError, match="--task fill-mask: transformers has no vit model for it"):
        Workload(folder, "fill-mask").build()
    folder = save(tmp_path, "qwen2-vl")
    with pytest.raises(MemOptError, match="has no qwen2_vl model for it; optimum-cli memopt dry-run --device h100"):
        Workload(folder, "text2text-generation").build()
    folder = save(tmp_path, "roberta-mlm")
    with pytest.raises(MemOptError, match="--seq_len 65: this model has 64 positions"):
        Workload(folder, "fill-mask", seq_len=65).build()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(MemOptError, match="no-such-model") as caught:
        Workload(folder, "fill-mask").build()
    assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_does_not_give(monkeypatch):
    with pytest.raises(MemOptError, match="^--model no-such-owner/no-such-model: neither a folder") as caught:
        Workload("no-such-owner/no-such-model", "fill-mask").build()
    assert "\n" not in str(caught.value)


NAME = "roberta.encoder.layer.0.attention.self.query.weight"


REGULAR = r".*layer\.[0-3]\..*(query|value).*"


@pytest.mark.parametrize(
    "pattern",
    ["query", "attention.self.query", "query.weight", "layer.0", "self", "*query*", "roberta.*.weight", REGULAR],
)
def test_a_pattern_is_a_part_of_the_name_a_glob_or_a_regular_expression(pattern: str) -> None:
    assert matches(pattern, NAME)


@pytest.mark.parametrize("pattern", ["uery", "layer.1", "*.bias", r".*layer\.[4-7]\..*", "query(", ""])
def test_other_patterns_are_not(pattern: str) -> None:
    assert not matches(pattern, NAME)


def tied() -> torch.nn.Module:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("body", "head", "embedding")})
    model["head"].weight = model["embedding"].weight
    return model


def test_all_others_are_frozen_and_a_tied_weight_goes_by_each_of_its_names() -> None:
    for pattern in ("head", "embedding"):
        model = tied()
        freeze_others(model, [pattern])
        assert model["head"].weight.requires_grad and not model["body"].weight.requires_grad
    model = tied()
    freeze_others(model, ["body", "head"])
    assert all(parameter.requires_grad for parameter in model.parameters())
    model["body"].weight.requires_grad_(False)
    freeze_others(model, [])
    assert not model["body"].weight.requires_grad


def test_the_error_is_short_whatever_the_names_and_patterns() -> None:
    model = torch.nn.ModuleDict({letter * 70: torch.nn.Linear(4, 4) for letter in "abcdefgh"})
    with pytest.raises(MemOptError, match=r"available: a{70}\.weight, .*…$") as caught:
        freeze_others(model, ["x" * 5000, "y" * 5000, "z" * 5000])
    assert len(str(caught.value)) <= 300


def test_a_pattern_that_matches_nothing_shows_the_names() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(MemOptError) as caught:
        freeze_others(model, ["0.weight", "wieght"])
    assert str(caught.value) == (
        "--trainable wieght: no parameter of Sequential has this name; did you mean weight? Available: 0.weight, "
        "0.bias, 1.weight, 1.bias, 2.weight, 2.bias"
    )
    assert all(parameter.requires_grad for parameter in model.parameters())
