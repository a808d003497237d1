"""benchmarks/frontier.py: the search under a cap, ratios, the page, and real processes."""

import math
from argparse import ArgumentTypeError
from dataclasses import replace

import baselines
import frontier
import pytest
import shared
from baselines import Baseline, capped, largest_batch
from frontier import Result

from optimum_memopt.errors import MemOptError
from optimum_memopt.measure.measure_case import Measurement
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload
from tests.saved_configs import save

ONE = Baseline(Workload("folder", "fill-mask"), None, name="budget 0.5, aot_eager", backend="aot_eager", budget=0.5)


@pytest.mark.parametrize("limit", [0, 3, 8, 9, 40, 129, 1000])
@pytest.mark.parametrize("guess", [0, 8, 41, 5000])
@pytest.mark.parametrize("step", [1, 8])
def test_the_largest_batch_is_found_from_any_guess(limit, guess, step):
    asked = []
    found = largest_batch(lambda batch: asked.append(batch) or batch <= limit, guess, step)
    assert found == limit // step * step
    assert len(asked) == len(set(asked)) and all(batch % step == 0 for batch in asked)


def _of_batch(mib_a_row, error=""):
    def measure(baseline):
        rows = baseline.workload.batch_size
        if baseline.memory_cap is not None and error and rows > 50:
            raise MemOptError(error)
        return Measurement(100 + mib_a_row * rows, 1.0, 1.0, held_mib=100)

    return measure


def test_under_a_cap_the_peak_counts_and_running_out_of_memory(monkeypatch):
    monkeypatch.setattr(baselines, "measure", _of_batch(2.5))
    found = capped(ONE, 200 * 2**20, 8)
    assert found == replace(ONE, workload=replace(ONE.workload, batch_size=40), memory_cap=200 * 2**20, optimizer=True)
    monkeypatch.setattr(baselines, "measure", _of_batch(0.1, "torch.OutOfMemoryError: CUDA out of memory. Tried"))
    assert capped(ONE, 200 * 2**20, 8).workload.batch_size == 48
    with pytest.raises(MemOptError, match="^a batch of 8 does not fit$"):
        capped(ONE, 100 * 2**20, 8)


def test_another_error_is_not_a_batch_too_large(monkeypatch):
    monkeypatch.setattr(baselines, "measure", _of_batch(0.1, "RuntimeError: no such operator"))
    with pytest.raises(MemOptError, match="no such operator"):
        capped(ONE, 200 * 2**20, 8)


def test_who_takes_part():
    workload = Workload("folder", "fill-mask")
    found = list(baselines.baselines(lambda **own: Baseline(workload, **own), ["aot_eager"], [1, 2], [0.5]))
    assert [one.name for one in found] == [
        "eager",
        "compile: no plan, aot_eager",
        "checkpointing, all layers",
        "checkpointing, 1 of 2 layers",
        "torch.compile, aot_eager",
        "budget 0.5, aot_eager",
        "compile: level 1, aot_eager",
        "compile: level 2, aot_eager",
        "ort: no plan",
        "ort: level 1",
        "ort: level 2",
    ]
    assert {one.family for one in found} == set(frontier.MARKERS)
    table = PlanTable("compile", (PlanRow("A+:1:-1", 1, 9, ""), PlanRow("B+:2:-1", 1, 5, "")))
    none = Measurement(1, 1, 1, table=table)
    (row,) = baselines.rows(lambda **own: Baseline(workload, **own), "inductor", none, 1)
    assert row.name == "compile: A+, inductor" and row.options["memory_opt_config"] == "A+:1:-1"


def test_results_travel_and_other_conditions_are_refused(tmp_path):
    result = Result(ONE, [Measurement(812.5, 1.25, 2.5, held_mib=300.0)])
    path = tmp_path / "found.json"
    assert frontier.load(path, "here") == {}
    frontier.save(path, "here", {"roberta": {ONE.name: result}})
    assert frontier.load(path, "here") == {"roberta": {ONE.name: result}}
    with pytest.raises(MemOptError, match="other conditions: here$"):
        frontier.load(path, "there")


def test_ratios_are_of_medians_over_what_is_held():
    eager = Result(replace(ONE, name="eager"), [Measurement(p, 4, 2, held_mib=100) for p in (500, 300, 310)])
    half = Result(ONE, [Measurement(705, 6, 5, held_mib=600)])
    first, second = frontier.lines({"eager": eager, ONE.name: half, "broken": Result(ONE, [], "why")}, "step_seconds")
    assert (first["activations MiB"], first["of eager"], first["of eager "]) == (210, 1, 1)
    assert (second["peak MiB"], second["of eager"], second["of eager "]) == (705, 0.5, 1.5)


def test_speeds_are_of_the_own_batch():
    def of(batch_size, seconds):
        workload = replace(ONE.workload, batch_size=batch_size)
        return Result(replace(ONE, workload=workload), [Measurement(9, seconds, 1)] if seconds else [])

    _, twice = frontier.capped_lines({"eager": of(16, 2.0), "other": of(32, 2.5)})
    assert (twice["batch"], twice["of eager"]) == (32, 2) and twice[" of eager "] == pytest.approx(1.6)
    (alone,) = frontier.capped_lines({"eager": of(16, None), "other": of(32, 2.5)})
    assert math.isnan(alone["of eager"]) and alone["samples/s"] == pytest.approx(12.8)


def test_nobody_is_on_the_frontier_who_is_beaten_in_both():
    points = [(1.0, 1.0), (1.5, 0.5), (1.2, 1.0), (1.4, 0.7), (2.0, 0.5), (1.0, 1.1)]
    assert frontier.frontier(points) == [(1.0, 1.0), (1.4, 0.7), (1.5, 0.5)]


def test_sizes():
    assert (frontier.size("40GiB"), frontier.size("1.5 MiB")) == (40 * 2**30, 3 * 2**19)
    with pytest.raises(ArgumentTypeError, match="40GB: allowed are"):
        frontier.size("40GB")


def test_only_what_is_between_the_markers_of_a_page_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- one: begin -->\nold\n<!-- one: end -->\nrest\n")
    shared.fill(page, {"one": "new", "two": "nowhere"})
    assert page.read_text() == "# A\n<!-- one: begin -->\n\nnew\n\n<!-- one: end -->\nrest\n"


def test_preparing_a_model(tmp_path):
    import torch

    workload = Workload(save(tmp_path, "roberta-mlm"), "fill-mask", 2, 8)
    model, _ = workload.build()
    Baseline(workload, None, activation_checkpointing=True, every_n_layers=2).prepare(model)
    layers = [layer.gradient_checkpointing for layer in model.roberta.encoder.layer]
    assert layers == [index % 2 == 0 for index in range(len(layers))] and len(layers) > 1
    before = torch._functorch.config.activation_memory_budget
    try:
        replace(ONE, workload=workload).prepare(model)
        assert torch._functorch.config.activation_memory_budget == 0.5
        assert model._compiled_call_impl is not None
    finally:
        torch._functorch.config.activation_memory_budget = before
