"""The page loads nothing, is small and valid HTML, and shows the right numbers."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz as viewer

from optimum_memopt import InputDensityCallback, MemoryPhasesCallback
from optimum_memopt.callbacks.input_density import thinned
from optimum_memopt.report.charts import Span, columns, layer_spans, short_names
from optimum_memopt.report.snapshot import blocks_of, measured_snapshot, predicted_snapshot
from tests.trackers import Tracker
from tests.unit.made import FULL, MIB, timeline

pytest.importorskip("matplotlib")

from optimum_memopt.errors import MemOptError
from optimum_memopt.report.page import ReportData, at_peak, paragraph, render
from optimum_memopt.sizes import gib_text
from tests.unit.made import FRONTIER, TABLE
from tests.unit.pages import Parsed, cells, check_alone


def without(**changes: object) -> ReportData:
    return replace(FULL, **changes)


CASES = {
    "full": FULL,
    "predicted alone": without(measured=None, measured_peak=0, densities={}),
    "no prediction": without(timeline=None, frontier=None),
    "failed before a step": ReportData("Model", failure="RuntimeError: <b>no</b>"),
    "no frontier": without(frontier=None),
    "a plan whose place is not known": without(frontier=replace(FRONTIER, chosen=None)),
    "one phase measured": without(measured=replace(FULL.measured, phases=FULL.measured.phases[:1])),
    "a process larger than the step": without(timeline=timeline(other=4096 * MIB)),
    "one operator a layer": without(timeline=timeline(layers=2, per_layer=1)),
    "large": without(timeline=timeline(layers=96, per_layer=40)),
    "long runs": without(densities={f"input_{n}": [(step, step % 100) for step in range(512)] for n in range(4)}),
    "empty table": without(table=replace(TABLE, plans=())),
}


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_alone_and_valid(case):
    data = CASES[case]
    page = check_alone(render(data).html)
    assert data.title in page.by_id("summary").text or data.title in page.root.text
    shown = {element.attributes["id"] for element in page.root.all("figure")}
    assert shown == {
        *(["timeline"] if data.timeline else []),
        *(["phases"] if data.timeline or data.measured else []),
        *(["frontier"] if data.frontier else []),
        *(["density"] if data.densities else []),
    }
    if data.failure:
        assert data.failure in page.root.text


def test_the_plan_table_has_the_numbers_of_the_table():
    page = check_alone(render(FULL).html)
    found = cells(page, "plans")
    assert len(found) == len(TABLE.plans)
    for row, plan in zip(found, TABLE.plans, strict=True):
        state, config, frequency, _, saving, requested, applied, note = row
        names = [element.text for element in config.all("code")]
        assert names == [plan.config, *([plan.saving_symbolic] if plan.saving_symbolic else [])]
        assert state.text == ("ON" if plan.is_on else "OFF")
        assert [int(cell.text) for cell in (frequency, requested, applied)] == [
            plan.frequency,
            plan.requested_count,
            plan.applied_count,
        ]
        assert note.text == plan.note
        if plan.saving_bytes is None:
            assert saving.text == "unknown" and "data-bytes" not in saving.attributes
        else:
            assert int(saving.attributes["data-bytes"]) == plan.saving_bytes
            assert saving.text == gib_text(plan.saving_bytes)


def test_what_is_held_at_the_peak_adds_up_to_the_peak():
    page = check_alone(render(FULL).html)
    rows = page.by_id("peak").all("tr")[1:]
    assert sum(int(row.attributes["data-bytes"]) for row in rows) == FULL.timeline.peak
    assert int(page.by_id("peak").attributes["data-bytes"]) == FULL.timeline.peak
    shares = [float(row.all("td")[-1].text.rstrip("%")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_phases_stand_beside_each_other():
    page = check_alone(render(FULL).html)
    for row, phase, measured in zip(
        cells(page, "phase-table"), FULL.timeline.phases, FULL.measured.phases, strict=True
    ):
        assert [cell.text for cell in row] == [
            phase.name.replace("_", " "),
            gib_text(phase.held),
            gib_text(phase.peak),
            gib_text(measured.held),
            gib_text(measured.peak),
        ]


def test_small_groups_are_summed_up():
    found = at_peak(timeline(always=10**6 * MIB, other=0))
    assert [group.category for group in found] == ["parameters", ""]
    assert sum(group.bytes for group in found) == timeline(always=10**6 * MIB, other=0).peak


def test_a_timeline_of_fixed_sizes_has_those_of_the_table():
    page = check_alone(render(without(timeline=replace(FULL.timeline, sizes={}))).html)
    assert "batch inputs_input_ids_dim0=16, inputs_input_ids_dim1=111" in page.by_id("timeline").text


def test_numbers_in_pictures_are_whole():
    found = timeline(always=1234 * MIB)
    page = check_alone(render(without(timeline=found)).html)
    assert gib_text(found.peak) == "1.37 GiB"
    assert "peak 1.37 GiB" in page.by_id("timeline").text
    assert "1.21 GiB" in page.by_id("phases").text
    larger = timeline(other=4096 * MIB)
    page = check_alone(render(without(timeline=larger)).html)
    assert f"peak {gib_text(larger.peak)} with the process" in page.by_id("timeline").text
    assert "Not shown: 4.00 GiB that the process" in page.by_id("timeline").text


def test_the_pictures_name_the_peak_and_the_plan():
    page = check_alone(render(FULL).html)
    assert f"peak {gib_text(FULL.timeline.peak)}" in page.by_id("timeline").text
    assert "this plan: +10.0% time" in page.by_id("frontier").text
    assert "room for the process to grow" not in page.by_id("frontier").text
    grown = replace(FRONTIER, chosen=replace(FRONTIER.chosen, peak=FULL.timeline.peak + 32 * MIB, extra_seconds=0.7))
    page = check_alone(render(without(frontier=grown)).html)
    assert "this plan: +70.0% time" in page.by_id("frontier").text
    assert "room for the process to grow, so peaks are 32.0 MiB higher here" in page.by_id("frontier").text
    assert {"0", "1", "2", "3", "forward", "backward", "optimizer"} <= {
        element.text.strip() for element in page.by_id("timeline").all("text")
    }


def test_a_paragraph_in_words():
    text = paragraph(FULL)
    peak = FULL.timeline.peak
    assert f"is predicted to peak at {gib_text(peak)}, in the forward, at op_11 of model.layers.3." in text
    assert f"Measured: 345.0 MiB resident, {345 * MIB / peak:.1%} of the prediction." in text
    assert "1 of 3 plans are on and free 62.4 MiB of saved activations" in text
    assert "The largest plan that is off, A<b>&c+:1:-1, would free 1.2 MiB." in text
    assert "The plan adds +10.0% time (measured costs)." in text
    failed = paragraph(ReportData("Model", failure="KeyboardInterrupt"))
    assert failed == "Training stopped with KeyboardInterrupt. No training step has run, so there is no plan table."


def test_a_page_in_a_notebook_and_in_a_file(tmp_path):
    page = render(FULL)
    frame = Parsed(page._repr_html_())
    (element,) = frame.root.all("iframe")
    assert element.attributes["srcdoc"] == page.html
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    for name in ("predicted", "measured"):
        assert (tmp_path / f"page.{name}.pickle").read_bytes() == page.snapshots[name]
    with pytest.raises(MemOptError, match="^report .*page.html: not written: No such file or directory$"):
        page.save(tmp_path / "nowhere" / "page.html")


def test_operators_of_no_layer_within_a_layer_are_its_own():
    layers = ["", "h.0", "", "h.0", "h.1", "", "", "h.1", "h.0", ""]
    assert layer_spans(layers, border=10) == [Span("h.0", 1, 4), Span("h.1", 4, 8), Span("h.0", 8, 9)]
    assert layer_spans(["a", "a", "", "a"], border=2) == [Span("a", 0, 2), Span("a", 3, 4)]
    assert layer_spans([], 0) == layer_spans(["", ""], 1) == []


def test_layers_are_named_by_what_tells_them_apart():
    assert short_names(["model.layers.0", "model.layers.11"]) == {"model.layers.0": "0", "model.layers.11": "11"}
    both = ["encoder.block.0", "decoder.block.0"]
    assert short_names(both) == {path: path for path in both}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 40), st.data())
def test_columns_cover_all_operators_and_have_the_highest(total, most, data):
    begin = data.draw(st.integers(0, len(total) - 1))
    end = data.draw(st.integers(begin, len(total)))
    found = columns(total, begin, end, most)
    assert len(found) == min(most, end - begin)
    edges = [first for first, _ in found] + [end]
    assert edges == sorted(set(edges)) and (not found or edges[0] == begin)
    for (first, highest), last in zip(found, edges[1:], strict=True):
        assert first <= highest < last and total[highest] == max(total[first:last])


LARGE = timeline(layers=8, per_layer=20)


def replayed(snapshot: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields the operator index and the allocated bytes after each event; checks that addresses do not overlap."""
    alive: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(address + size <= other or other + alive[other] <= address for other in alive)
            alive[address] = size
        elif event["action"] == "free_completed":
            assert alive.pop(address) == size
        yield event["time_us"], sum(alive.values())


@pytest.mark.parametrize("step", [FULL.timeline, LARGE], ids=["small", "large"])
def test_the_trace_holds_what_the_timeline_holds(step):
    snapshot = pickle.loads(predicted_snapshot(step))
    held = dict(replayed(snapshot))
    now = 0
    for index, total in enumerate(step.total):
        now = held.get(index, now)
        assert now == total
    (segment,) = snapshot["segments"]
    assert segment["allocated_size"] == step.total[-1]
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] >= step.peak
    events = snapshot["device_traces"][0]
    saved = [event for event in events if event["category"] == "saved activations" and event["action"] == "alloc"]
    assert [event["frames"][0]["name"] for event in saved] == list(step.operators[: step.backward_at])
    assert saved[0]["frames"][0]["filename"] == step.layers[0]


def test_a_measured_step_has_its_phases():
    held = dict(replayed(pickle.loads(measured_snapshot(FULL.measured))))
    assert held[0] == round(199.5 * MIB) and max(held.values()) == 204 * MIB
    assert list(held.values())[-1] == 200 * MIB


@pytest.mark.parametrize("show", [viewer.trace_plot, viewer.segment_plot, viewer.trace, viewer.segsum])
def test_pytorchs_tools_take_it(show):
    for data in (predicted_snapshot(FULL.timeline), measured_snapshot(FULL.measured)):
        assert show(pickle.loads(data))


def test_a_block_is_freed_whole_where_its_size_is_the_difference():
    freed = [block for block in blocks_of({"saved": (10, 30, 60, 40, 0)}) if block.end == 3]
    assert [(block.begin, block.bytes) for block in freed] == [(1, 20)]
    split = blocks_of({"saved": (10, 30, 25, 25)})
    assert [(block.begin, block.end, block.bytes) for block in split] == [(0, 4, 10), (1, 2, 5), (1, 4, 15)]


def test_phases_of_the_highest_step_and_densities_of_all(trainer_of):
    memory, density, tracker = MemoryPhasesCallback(), InputDensityCallback(), Tracker()
    trainer = trainer_of([memory, density, tracker], max_steps=4)
    trainer.train()
    peaks = {
        entry["step"]: max(value for name, value in entry.items() if name.endswith("/peak_resident_mib"))
        for entry in tracker.ours
        if "memopt/post_forward/resident_mib" in entry
    }
    assert sorted(peaks) == [1, 2, 3, 4]
    del peaks[1]
    assert memory.highest_step.step in peaks and memory.highest_step.peak == round(max(peaks.values()) * MIB)
    assert [phase.name for phase in memory.highest_step.phases] == [
        "pre_forward",
        "post_forward",
        "pre_backward",
        "post_backward",
        "post_optimizer_step",
    ]
    logged = [
        (entry["step"], entry["memopt/density/input_ids"])
        for entry in tracker.ours
        if "memopt/density/input_ids" in entry
    ]
    assert density.densities["input_ids"] == logged and len(logged) == 4
    assert density.densities.keys() == {"input_ids", "labels"}


def test_a_run_of_one_step_has_its_phases_and_the_next_run_its_own(trainer_of):
    memory = MemoryPhasesCallback()
    trainer = trainer_of([memory], max_steps=1)
    trainer.train()
    first = memory.highest_step
    assert first.step == 1
    trainer.train()
    assert memory.highest_step is not first


def test_long_runs_are_thinned():
    points = list(range(9))
    assert thinned(points, 9) == points
    assert thinned(points, 8) == [0, 2, 4, 6, 8]
    assert thinned(range(8), 7) == [0, 2, 4, 6, 7]
