"""The page: loads nothing, is small, is valid HTML, and has the numbers of what it shows."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from optimum_memopt.errors import MemOptError
from optimum_memopt.report.data import ReportData
from optimum_memopt.report.page import at_peak, paragraph, render
from optimum_memopt.sizes import gib_text
from tests.unit.made import FRONTIER, FULL, MIB, TABLE, timeline
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
    assert "Left out of the picture: 4.00 GiB that the process" in page.by_id("timeline").text


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
    assert "The largest that is off, A<b>&c+:1:-1, would free 1.2 MiB." in text
    assert "The plan takes +10.0% time (measured costs)." in text
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


def test_the_same_data_is_the_same_page():
    assert render(FULL) == render(FULL)
