import re

import pytest
import torch
from transformers import TrainerCallback

pytest.importorskip("matplotlib")

from optimum_memopt import MemOptError, attach
from optimum_memopt.report import page as page_module
from optimum_memopt.sizes import gib_text
from tests.trainer_runs import log_lines, make
from tests.unit.pages import cells, check_alone

ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}


class Stops(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise self.error


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    file = folder / "report.html"
    trainer = make(
        folder, "small", **ENGINE, memory_opt_level=1, memory_opt_report=str(file), log_input_density=True, max_steps=4
    )
    with log_lines() as lines:
        trainer.train()
    assert f"wrote the report on this run to {file}" in lines
    return trainer, file


def test_the_page_has_what_the_run_was(run):
    trainer, file = run
    page = check_alone(file.read_text(encoding="utf-8"))
    table, predicted = trainer.memopt.table, trainer.memopt.plan_stats.predicted_peak_mib
    assert [row[1].all("code")[0].text for row in cells(page, "plans")] == [plan.config for plan in table.plans]
    assert int(page.by_id("peak").attributes["data-bytes"]) == round(predicted * 2**20)
    words = page.by_id("summary").text
    assert f"predicted to peak at {gib_text(round(predicted * 2**20))}" in words
    assert f"Measured: {gib_text(round(trainer.memopt.measured_peak_mib * 2**20))} resident" in words
    assert {element.attributes["id"] for element in page.root.all("figure")} == {"timeline", "phases", "density"}
    assert len(cells(page, "phase-table")) == 5 and all(
        cell.text for row in cells(page, "phase-table") for cell in row
    )
    assert "4 of 4" in page.root.text and "Training stopped" not in page.root.text


def test_the_timelines_peak_is_the_engines(run):
    trainer, _ = run
    timeline = trainer.memopt.engine.timeline(trainer.optimizer)
    assert timeline.peak == round(trainer.memopt.engine.predicted_peak_mib(trainer.optimizer) * 2**20)


def test_the_page_can_be_asked_for(run, tmp_path):
    trainer, file = run
    page = trainer.memopt.report(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page.html == file.read_text(encoding="utf-8")
    with pytest.raises(MemOptError, match="nowhere/page.html: not written: No such file"):
        trainer.memopt.report(tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError("the data\nran <out>"), "RuntimeError: the data"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "OutOfMemoryError: CUDA out of memory. Tried to"),
    ],
    ids=["error", "interrupt", "memory"],
)
def test_it_is_written_when_training_fails(tmp_path, error, words):
    file = tmp_path / "report.html"
    trainer = make(tmp_path, "small", **ENGINE, memory_opt_report=file, callbacks=[Stops(error)])
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error
    page = check_alone(file.read_text(encoding="utf-8"))
    assert f"Training stopped: {words}" in page.root.text and "1 of 5" in page.root.text
    assert page.by_id("timeline") and cells(page, "plans")


def test_a_run_that_fails_before_its_first_step_has_a_page(tmp_path):
    file = tmp_path / "report.html"
    trainer = make(tmp_path, "small", **ENGINE, memory_opt_config="Gellu+:1:-1", memory_opt_report=str(file))
    with pytest.raises(MemOptError, match="no plan"):
        trainer.train()
    page = check_alone(file.read_text(encoding="utf-8"))
    assert 'no plan "Gellu+" in this model' in page.root.text and not page.root.all("figure")


@pytest.mark.parametrize("fails", [False, True])
def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, fails):
    error = RuntimeError("the run's own")
    file = tmp_path / "report.html"
    trainer = make(
        tmp_path, "small", **ENGINE, memory_opt_report=file, max_steps=2, callbacks=[Stops(error)] if fails else []
    )
    # As if the folder had been deleted in the meantime.
    monkeypatch.setattr(page_module.Page, "save", lambda self, path: (_ for _ in ()).throw(OSError("disk full")))
    with log_lines() as lines:
        if fails:
            with pytest.raises(RuntimeError) as caught:
                trainer.train()
            assert caught.value is error
        else:
            trainer.train()
    assert "could not write the report (OSError: disk full)" in lines


def test_a_budget_has_its_frontier(tmp_path):
    file = tmp_path / "report.html"
    trainer = make(tmp_path, "small", **ENGINE, memory_opt_budget="90%", memory_opt_report=file, max_steps=1)
    trainer.train()
    page = check_alone(file.read_text(encoding="utf-8"))
    frontier = trainer.memopt.engine.frontier()
    assert len(frontier.points) == 10 and frontier.chosen.extra_seconds == 0
    assert "this plan: +0.0% time" in page.by_id("frontier").text


def test_nothing_is_written_or_measured_without_the_option(tmp_path):
    trainer = make(tmp_path, "small", **ENGINE, max_steps=1)
    with log_lines() as lines:
        trainer.train()
    assert not list(tmp_path.rglob("*.html")) and not any(line.startswith("memory phases") for line in lines)
    page = check_alone(trainer.memopt.report().html)
    assert re.search(r"Not measured; --log_memory_phases", page.root.text)


def test_a_missing_matplotlib_is_a_line_before_training(tmp_path, monkeypatch):
    from optimum_memopt import option_values

    find = option_values.importlib.util.find_spec
    monkeypatch.setattr(
        option_values.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    trainer = make(tmp_path, "small", plain=True)
    with pytest.raises(MemOptError) as caught:
        attach(trainer, memory_opt_report=str(tmp_path / "report.html"))
    assert str(caught.value) == ("--memory_opt_report: the page needs matplotlib: pip install optimum-memopt[report]")
    assert not hasattr(trainer, "memopt")
