"""The programs of benchmarks/: picture labels, GPU checks, ratios, searches under a memory cap, and pages."""

import math
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import advise
import baselines
import frontier
import loss
import pytest
import shared
import torch
from advise import LEVEL_1, NO_PLAN, Ran
from baselines import Baseline, capped, largest_batch
from frontier import Result
from gpu import picture, report
from gpu.checks import ALONE, FAIL, PASS, SKIP, Check, Figure, Outcome, Setting, crash, heard, within
from gpu.steps import error_of_all, largest_error, offload_config
from hypothesis import given
from hypothesis import strategies as st
from labels import Box, label, places
from loss_worker import PLAIN, is_chunked_by_auto

from optimum_memopt.errors import MemOptError
from optimum_memopt.measure import Measurement
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload
from tests.saved_configs import save

ROOM = Box(0, 0, 400, 300)
DOT = 8


@given(st.lists(st.tuples(st.integers(60, 340), st.integers(30, 270)), min_size=1, max_size=12, unique=True))
def test_few_labels_are_never_over_one_another_or_a_point(points):
    boxes = places(points, [(50, 9)] * len(points), ROOM, DOT)
    dots = [Box(x - DOT / 2, y - DOT / 2, DOT, DOT) for x, y in points]
    for number, box in enumerate(boxes):
        # Boxes that touch may overlap by rounding errors.
        assert not any(box.overlap(other) > 1e-3 for other in boxes[:number])
        assert not any(box.overlap(dot) > 1e-3 for dot in dots)
        assert box.overlap(ROOM) == pytest.approx(box.width * box.height)


def test_a_label_alone_is_beside_its_point():
    (box,) = places([(200, 150)], [(50, 9)], ROOM, DOT)
    assert abs(box.left - 200) < 60 and 150 < box.bottom < 165


def test_labels_of_points_in_a_heap_have_lines():
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = [(f"number {index}", (1 + index / 1000, 1.0)) for index in range(8)]
    axes.scatter(*zip(*(point for _, point in points), strict=True))
    axes.set_xlim(0, 2)
    label(axes, points)
    texts = [text for text in axes.texts if text.get_text()]
    assert [text.get_text() for text in texts] == [name for name, _ in points]
    assert any(text.arrow_patch is not None for text in texts)
    renderer = figure.canvas.get_renderer()
    extents = [text.get_window_extent(renderer) for text in texts if text.arrow_patch is None]
    assert not any(a.overlaps(b) for number, a in enumerate(extents) for b in extents[:number])


FOUND = {
    PLAIN: {"peak": 100.0, "resident": 200.0, "seconds": [1.0, 2.0, 4.0]},
    "chunked": {"peak": 40.0, "resident": 50.0, "seconds": [0.5, 1.6, 3.0]},
    "ort, loss inside": {"peak": 1.0, "resident": 100.0, "seconds": [2.0, 4.0, 8.0]},
    "TRL": {"error": "it is not installed"},
}


def test_ratios_of_time_are_of_the_same_round():
    _, chunked, ort = loss.lines(FOUND)
    assert (chunked["of plain"], chunked[" of plain "], chunked["  of plain  "]) == (0.4, 0.25, 0.75)
    assert chunked["CPU-s"] == 1.6
    assert (ort["peak MiB"], ort[" of plain "], ort["  of plain  "]) == ("", 0.5, 2)


def test_the_report_says_what_failed_and_what_auto_does():
    text = loss.report({"masked LM, 15% labels": FOUND}, {case.name: case for case in loss.cases()})
    assert "30,000, batch 16 x 128 = 2,048 tokens, 15% with a label; `auto` takes chunked, 3 rounds:" in text
    assert text.endswith("\n\nTRL: it is not installed")


def test_auto_leaves_few_tokens():
    assert not is_chunked_by_auto(replace(loss.CAUSAL, vocabulary=1_000, hidden=512))
    assert is_chunked_by_auto(replace(loss.CAUSAL, vocabulary=1_000, hidden=448))


MIB = 2**20
RAN = (
    Ran(NO_PLAN, False, 8, 700 * MIB, 1.0),
    Ran(NO_PLAN, False, 16, 900 * MIB, 0.5),
    Ran(LEVEL_1, False, 16, 650 * MIB, 1.25),
)


def advice(plan: str, rows: int, peak: int = 640) -> dict:
    chosen = {"plan": plan, "chunked_loss": False, "rows": rows, "samples_per_second": 12.0, "peak": peak * MIB}
    return {"budget": 750 * MIB, "recommended": chosen}


@pytest.fixture
def sweep(monkeypatch):
    """Patch in the runs of a sweep, and races that take as long, or twice as long in one of the rounds."""

    def race(folder, name, limit, runners):
        seconds = {one.runner: one.seconds for one in RAN}
        return [[slower * seconds[runner] for runner in runners] for slower in (1, 1, 2)]

    def runs(folder, name, plan, chunked, sizes, budget):
        return [one for one in RAN if one.runner == (plan, chunked, *sizes)]

    monkeypatch.setattr(advise, "_runs", runs)
    monkeypatch.setattr(advise, "sweep", lambda *args: RAN)
    monkeypatch.setattr(advise, "race", race)


def test_the_best_other_is_one_within_the_budget(tmp_path, sweep):
    found = advise.compare(tmp_path, "gpt2", advice(LEVEL_1, 16))
    assert found["best other"] == "no plan, 8 rows"
    assert found["of its speed"] == pytest.approx(0.8)
    assert found["samples/s"] == pytest.approx(advise.ROWS / 1.25)
    assert (found["peak MiB"], found["peak MiB predicted"]) == (650, 640)


def test_the_page_counts_what_is_over_the_budget(tmp_path, sweep):
    rows = [advise.compare(tmp_path, "gpt2", advice(*chosen)) for chosen in ((NO_PLAN, 8), (NO_PLAN, 16))]
    text = advise.page(rows)
    assert text.endswith("At least 97% of the best other's speed in 1 of 2 cases, worst 1.250; over the budget in 1.")
    assert text.count("no plan, 8 rows") == 2


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
    with pytest.raises(ArgumentTypeError, match="40GB: allowed:"):
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


def outcomes(run, **more):
    return list(Check("a check", run, **more).outcomes(Setting()))


def test_figures_pass_or_fail_by_their_limit():
    def run(setting):
        yield within("small", 0.5, 1.0)
        yield within("large", 2.0, 1.0)
        yield within("no number", math.nan, 1.0)

    found = outcomes(run)
    assert [(one.name, one.status) for one in found] == [("small", PASS), ("large", FAIL), ("no number", FAIL)]
    assert not any(one.crashed for one in found)
    assert str(found[1]).split() == ["FAIL", "a", "check:", "large", "2.00e+00", "1.00e+00"]


def test_an_error_is_a_failure_and_keeps_what_was_found(capsys):
    def run(setting):
        yield Figure("first", True, "1")
        raise RuntimeError("CUDA error: out of luck\nwith a second line")

    first, second = outcomes(run)
    assert first.status == PASS and second.crashed
    assert (second.status, second.figure) == (FAIL, "RuntimeError: CUDA error: out of luck")
    assert "out of luck" in capsys.readouterr().err


def test_a_check_without_what_it_needs_is_left_out():
    (found,) = outcomes(lambda setting: iter(()), needs=("no_such_module", "torch"))
    assert (found.status, found.figure) == (SKIP, "no_such_module not installed")


def test_what_is_timed_waits_for_its_turn():
    order = []

    def run(setting):
        order.append("prepared")
        yield ALONE
        order.append("alone")
        yield within("small", 0.5, 1.0)

    (found,) = Check("a check", run).outcomes(Setting(), lambda: order.append("its turn"))
    assert order == ["prepared", "its turn", "alone"] and found.status == PASS


STEPS = {
    "llama tc": {"wall": 0.090, "allocated": 12000.0},
    "llama ckpt": {"wall": 0.200, "allocated": 9000.0},
    "llama none": {"wall": 0.080, "allocated": 13000.0},
    "llama L1": {"wall": 0.160, "allocated": 4000.0},
}


def test_goals_are_shares_of_other_ways():
    found = {(one.check, one.name): (one.status, one.figure) for one in report.goals(STEPS, is_quick=False)}
    assert found == {
        ("llama, no plan of torch.compile", "wall"): (PASS, "0.89"),
        ("llama, no plan of torch.compile", "allocated"): (FAIL, "1.08"),
        ("llama, level 1 of checkpointing", "wall"): (FAIL, "0.80"),
        ("llama, level 1 of checkpointing", "allocated"): (PASS, "0.44"),
    }
    assert {one.status for one in report.goals(STEPS, is_quick=True)} == {PASS}


def test_steps_are_compared_with_those_of_an_earlier_run(tmp_path):
    published = Path(report.__file__).parent / "h100.json"
    table = report.compared(STEPS, published)
    assert [line.split()[1:3] for line in table.splitlines()[2:]] == [name.split() for name in STEPS]
    assert "| 199.4" in table and "| 200.0" in table
    outcomes = [Outcome(name, PASS, "step", "", data=step) for name, step in STEPS.items()]
    picture.draw(report.steps_in(published), tmp_path / "steps.svg")
    drawn = (tmp_path / "steps.svg").read_text()
    assert all(
        text in drawn for text in ("Llama-1B with LoRA", "level 1", "checkpointing", "torch.compile", "Liger Kernel")
    )
    report.save(tmp_path, "worth", "a GPU", outcomes)
    assert report.steps_in(tmp_path / "worth.json") == STEPS


def test_what_others_print_is_no_event(capsys):
    assert heard("Loading weights\n") is None
    assert capsys.readouterr().err == "Loading weights\n"
    assert heard('@gpu {"begin": "a check"}\n') == {"begin": "a check"}


def test_errors_of_gradients():
    expected = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.0, 1e-9])}
    assert largest_error(expected, expected) == error_of_all(expected, expected) == 0
    ours = {"weight": torch.tensor([3.0, 4.5]), "bias": torch.tensor([1e-9, 0.0])}
    # The bias is noise compared with the weight.
    assert largest_error(ours, expected) == pytest.approx(0.1)
    assert error_of_all(ours, expected) == pytest.approx(0.1)
    for wrong in ({"weight": expected["weight"]}, {**expected, "bias": torch.tensor([math.nan, 0.0])}):
        assert not largest_error(wrong, expected) <= 1
        assert not error_of_all(wrong, expected) <= 1


def test_all_rows_but_the_loss_are_offloaded():
    rows = [
        PlanRow(config=config, frequency=1, saving_bytes=1, saving_symbolic="")
        for config in ("Gelu+:1:-1", "Gelu+:2:-1", "Loss+:1:-1", "Attention+:3:-1")
    ]
    assert offload_config(rows) == "Gelu+:3:-1,Attention+:3:-1"


def test_the_report_is_a_table_of_the_page(tmp_path):
    found = [Outcome("a check", PASS, "a|b", "1 | 2", "3"), crash("another", "RuntimeError: no")]
    report.save(tmp_path / "out", "right", "a device", found)
    (tmp_path / "gpu.md").write_text("<!-- right: begin -->\n<!-- right: end -->\n")
    report.fill_docs(tmp_path / "out", tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "a device" in text and "| FAIL | another" in text and "1 \\| 2" in text
