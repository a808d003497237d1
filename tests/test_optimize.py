"""What `optimize` says, and what a notebook shows."""

import pytest

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments, optimize
from tests.gradients import accumulate
from tests.model_zoo import ZOO

CASE = ZOO["roberta-classification"]
OPTIONS = {
    "compile": {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"},
    "ort": {"memory_opt_engine": "ort", "ort_fallback": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_engine_and_table_are_said_as_in_a_trainer(name, capsys):
    model = CASE.build("eager")
    engine = optimize(model, memory_opt_level=1, **OPTIONS[name])
    assert f"[memopt] engine {name} (asked for)\n" in capsys.readouterr().err
    accumulate(model, [CASE.batch()])
    said = capsys.readouterr().err
    assert said.count(f"[memopt] {engine.plans()}\n") == 1
    assert ("Predicted peak of a step" in said) == (name == "compile")
    accumulate(model, [CASE.batch(seed=1)])
    assert "Memory plans" not in capsys.readouterr().err
    engine.detach()


def test_the_log_level_decides(capsys):
    model = CASE.build("eager")
    engine = optimize(model, memory_opt_level=1, memory_opt_log_level="warning", **OPTIONS["compile"])
    accumulate(model, [CASE.batch()])
    assert "[memopt]" not in capsys.readouterr().err
    assert engine.plans().enabled
    engine.detach()


def test_a_notebook_shows_the_table_of_a_trainer(tmp_path):
    data = [{name: value[0] for name, value in CASE.batch(1).items()}] * 2
    args = MemOptTrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **OPTIONS["compile"]
    )
    trainer = MemOptTrainer(model=CASE.build("eager"), args=args, train_dataset=data)
    assert "first training step" in trainer.memopt._repr_html_()
    trainer.train()
    assert trainer.memopt._repr_html_() == trainer.memopt.table._repr_html_()
