import json

import pytest

pytest.importorskip("datasets", reason="needs the examples extra")

from common.arguments import DataArguments
from common.data import load_rows, take
from optimum_memopt import MemOptError


def unused(seed: int):
    raise AssertionError("the packaged data is for runs that name no data")


def write_csv(path, count: int = 40) -> str:
    path.write_text("text,label\n" + "".join(f"row {i},{i % 2}\n" for i in range(count)))
    return str(path)


def test_file_without_validation_is_split(tmp_path):
    rows = load_rows(DataArguments(train_file=write_csv(tmp_path / "a.csv")), unused)
    assert {name: len(split) for name, split in rows.items()} == {"train": 36, "validation": 4}
    assert not set(rows["train"]["text"]) & set(rows["validation"]["text"])
    again = load_rows(DataArguments(train_file=str(tmp_path / "a.csv")), unused)
    assert again["validation"]["text"] == rows["validation"]["text"]


def test_json_and_validation_file(tmp_path):
    for name, count in (("train", 3), ("eval", 2)):
        lines = (json.dumps({"text": f"{name} {i}", "label": i}) for i in range(count))
        (tmp_path / f"{name}.json").write_text("\n".join(lines))
    args = DataArguments(train_file=str(tmp_path / "train.json"), validation_file=str(tmp_path / "eval.json"))
    rows = load_rows(args, unused)
    assert (rows["train"]["text"][0], rows["validation"]["text"]) == ("train 0", ["eval 0", "eval 1"])


def test_data_set_in_a_folder(tmp_path):
    write_csv(tmp_path / "train.csv")
    rows = load_rows(DataArguments(dataset_name=str(tmp_path)), unused)
    assert len(rows["train"]) + len(rows["validation"]) == 40


def test_take_is_a_prefix(tmp_path):
    rows = load_rows(DataArguments(train_file=write_csv(tmp_path / "a.csv")), unused)["train"]
    assert take(rows, 5)["text"] == rows["text"][:5]
    assert len(take(rows, 500)) == len(take(rows, None)) == len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_file": "b.csv"}, "--validation_file needs --train_file"),
        ({"train_file": "a.csv", "dataset_name": "x"}, "exclude each other"),
        ({"max_train_samples": 0}, "--max_train_samples must be at least 1, not 0"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(MemOptError, match=message):
        DataArguments(**arguments)


@pytest.mark.parametrize("name", ["rows.xlsx", "nowhere.csv"])
def test_files_that_cannot_be_read_are_one_line(tmp_path, name):
    with pytest.raises(MemOptError, match=name.split(".")[1]) as caught:
        load_rows(DataArguments(train_file=str(tmp_path / name)), unused)
    assert "\n" not in str(caught.value)
