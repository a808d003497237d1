import itertools
import json
import random
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.plans.table import PlanRow, PlanTable, canonical_symbols, evaluated, simplified, sorted_plans

PLAN = st.builds(
    PlanRow,
    config=st.sampled_from(["Gelu+:1:-1", "Add+:1:-1", "Softmax+:2:-1", "A+:1:-1,B+:1:-1"]),
    frequency=st.integers(1, 100),
    saving_bytes=st.none() | st.integers(0, 3),
    saving_symbolic=st.sampled_from(["", "4*inputs_input_ids_dim0"]),
    requested_count=st.sampled_from([-1, 0]),
    applied_count=st.integers(0, 2),
    note=st.sampled_from(["", "left out: «why»"]),
    measured_saving_bytes=st.none() | st.integers(-3, 3),
)
TABLE = st.builds(
    PlanTable,
    engine=st.text(max_size=5),
    plans=st.lists(PLAN, max_size=5).map(tuple),
    symbols=st.dictionaries(st.sampled_from(["inputs_input_ids_dim0", "inputs_input_ids_dim1"]), st.integers(1, 512)),
    header=st.lists(st.text(max_size=5), max_size=2).map(tuple),
)


@given(TABLE)
def test_json_round_trip(table):
    text = table.to_json()
    assert PlanTable.from_json(text) == table
    assert json.loads(text)["plans"] == [vars(plan) for plan in table.plans]


@given(st.lists(PLAN, max_size=6), st.randoms())
def test_order_is_the_same_whatever_order_the_rows_come_in(plans, generator):
    unique = list({plan.config: plan for plan in plans}.values())
    shuffled = generator.sample(unique, len(unique))
    assert sorted_plans(shuffled) == sorted_plans(unique)


def test_largest_saving_first_unknown_last_ties_by_config():
    rows = [("B+:1:-1", 5), ("A+:1:-1", 5), ("D+:1:-1", None), ("C+:1:-1", 9), ("E+:1:-1", 0)]
    plans = [PlanRow(config, 1, saving, "") for config, saving in rows]
    assert [plan.config[0] for plan in sorted_plans(plans)] == list("CABED")


def test_what_is_on_and_claimed():
    on = PlanRow("A+:1:-1,B+:1:-1", 2, 100, "100", requested_count=-1, applied_count=1)
    unknown = PlanRow("C+:1:-1", 2, None, "x", requested_count=-1, applied_count=2)
    idle = PlanRow("D+:1:-1", 2, 1000, "1000", requested_count=-1, applied_count=0)
    table = PlanTable("ort", (on, unknown, idle))
    assert table.enabled == (on, unknown)
    assert table.claimed_saving_bytes == 100
    assert on.cluster_ids == ("A+", "B+")


@given(TABLE)
def test_text_shows_every_row_with_its_numbers(table):
    lines = table.to_text().splitlines()
    for number, plan in enumerate(table.plans, 1):
        row = next(line for line in lines if re.match(rf"\s*{number} ", line) and plan.config in line)
        shown = "unknown" if plan.saving_bytes is None else str(plan.saving_bytes)
        state = "ON" if plan.applied_count else "OFF"
        counts = [str(plan.requested_count), str(plan.applied_count)]
        measured = [] if plan.measured_saving_bytes is None else [str(plan.measured_saving_bytes)]
        symbolic = [plan.saving_symbolic] if plan.saving_symbolic else []
        named = [str(number), state, plan.config, str(plan.frequency), shown]
        assert row.split() == [*named, *measured, *symbolic, *counts, *plan.note.split()]
    titles = next(line for line in lines if line.startswith("Plan"))
    assert ("Note" in titles) is any(plan.note for plan in table.plans)
    was_measured = any(plan.measured_saving_bytes is not None for plan in table.plans)
    assert any("Measured(Bytes)" in line for line in lines) is was_measured
    on = sum(plan.applied_count > 0 for plan in table.plans)
    assert f"On: {on} of {len(table.plans)} plans" in lines[-1]


@given(TABLE)
def test_printed_it_is_the_text(table):
    assert str(table) == table.to_text()


class Cells(HTMLParser):
    """Parses the cell texts of each table row, and the text around the table."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.around, self._in_cell = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.rows[-1][-1] += data
        elif data.strip():
            self.around.append(data.strip())


def test_a_notebook_shows_the_same_cells_and_no_markup_of_the_model():
    plan = PlanRow("A+:1:-1", 2, 1000, "4*s<b>", requested_count=-1, applied_count=2)
    table = PlanTable("ort", (plan,), {"inputs_x_dim0": 3}, ("<script>Model</script> on cpu",))
    cells = Cells(table._repr_html_())
    text = table.to_text().splitlines()
    header, row = cells.rows
    columns = ["Plan", "", "Config", "Freq", "Max Saving(Bytes)", "Saving Symbolic(Bytes)", "Requested", "Applied"]
    assert [cell.strip() for cell in header] == columns
    assert [cell.strip() for cell in row] == ["1", "ON", "A+:1:-1", "2", "1,000", "4*s<b>", "-1", "2"]
    assert cells.around == [*text[:2], *text[5:]]


def test_large_numbers_are_readable():
    text = PlanTable("ort", (PlanRow("A+:1:-1", 1, 1234567890, "", applied_count=1),)).to_text()
    assert "1,234,567,890" in text
    assert "1177.4 MiB" in text


def test_measured_savings_stand_beside_the_claimed():
    table = PlanTable("ort", (PlanRow("A+:1:-1", 1, 5000, ""), PlanRow("B+:1:-1,C+:1:-1", 1, 4000, "")))
    measured = table.with_measured({"A+:1:-1": -1234567})
    assert [plan.measured_saving_bytes for plan in measured.plans] == [-1234567, None]
    assert "-1,234,567" in measured.to_text()
    assert "Measured" not in table.to_text()


BATCH = {"attention_mask_dim0": 8, "attention_mask_dim1": 128, "input_ids_dim0": 8, "input_ids_dim1": 128}


def test_names_do_not_depend_on_the_order_or_the_choice_of_the_exporter():
    labels = {"labels_dim0": 8, "labels_dim1": 128, "token_type_ids_dim1": 128}
    items = [*BATCH.items(), *labels.items()]
    for order in itertools.islice(itertools.permutations(items), 0, 5040, 97):
        names = canonical_symbols(dict(order))
        assert set(names) == {name for name, _ in items}
        assert {names[name] for name in names if name.endswith("dim0")} == {"inputs_input_ids_dim0"}
        assert {names[name] for name in names if name.endswith("dim1")} == {"inputs_input_ids_dim1"}


def test_dimensions_of_other_value_or_kind_keep_their_own_name():
    names = canonical_symbols({**BATCH, "attention_mask_dim1": 64, "pixel_values_dim0": 8, "pixel_values_dim2": 128})
    assert names["attention_mask_dim1"] == "inputs_attention_mask_dim1"
    assert names["pixel_values_dim0"] == "inputs_input_ids_dim0", "all inputs share the batch's size"
    assert names["pixel_values_dim2"] == "inputs_pixel_values_dim2"
    assert canonical_symbols({"input_ids_dim0": 8, "other_dim0": 2})["other_dim0"] == "inputs_other_dim0"


@pytest.mark.parametrize("seed", range(5))
def test_labels_belong_to_the_decoder_of_an_encoder_decoder(seed):
    values = {**BATCH, "labels_dim0": 8, "labels_dim1": 128, "decoder_input_ids_dim1": 128}
    shuffled = dict(random.Random(seed).sample(list(values.items()), len(values)))
    assert canonical_symbols(shuffled, is_encoder_decoder=False)["labels_dim1"] == "inputs_input_ids_dim1"
    names = canonical_symbols(shuffled, is_encoder_decoder=True)
    assert names["labels_dim1"] == names["decoder_input_ids_dim1"] == "inputs_decoder_input_ids_dim1"
    assert names["attention_mask_dim1"] == "inputs_input_ids_dim1"
    assert names["labels_dim0"] == "inputs_input_ids_dim0"


def test_names_are_stable_when_they_go_in_again_and_others_are_left_out():
    names = canonical_symbols(BATCH)
    again = canonical_symbols({names[name]: value for name, value in BATCH.items()})
    assert set(again.values()) == set(names.values())
    assert canonical_symbols({"Gather_12_o0__d1": 4}) == {}


# Formulas as an exporter writes them: products of dimensions, numbers, and the saved fraction.
FACTOR = st.sampled_from(["input_ids_dim0", "attention_mask_dim1", "input_ids_dim1", "768", "4", "0.5", "1.0"])
TERM = st.lists(FACTOR, min_size=1, max_size=4).map("*".join)
FORMULA = st.lists(TERM.map("({})".format), min_size=1, max_size=4).map(" + ".join)


@given(FORMULA, st.integers(1, 64), st.integers(1, 512))
def test_simplified_formulas_give_what_the_original_gives(formula, batch, length):
    values = {"input_ids_dim0": batch, "input_ids_dim1": length, "attention_mask_dim1": length}
    names = canonical_symbols(values)
    shown = {names[name]: value for name, value in values.items()}
    result = simplified(formula, names)
    assert evaluated(result, shown) == pytest.approx(eval(formula, {}, values), abs=0.5)
    assert {symbol.name for symbol in result.free_symbols} <= set(shown)
    # The text in the table is a formula, too.
    assert eval(str(result), {}, shown) == pytest.approx(eval(formula, {}, values))


def test_equal_dimensions_are_collected():
    names = canonical_symbols(BATCH)
    result = simplified("2*(input_ids_dim0*input_ids_dim1)*4 + attention_mask_dim0*attention_mask_dim1*4*0.5", names)
    assert str(result) == "10*inputs_input_ids_dim0*inputs_input_ids_dim1"


def test_an_unknown_size_stays_unknown_until_it_cancels():
    names = {"input_ids_dim0": "b", "mystery": "mystery"}
    assert evaluated(simplified("4*input_ids_dim0*mystery", names), {"b": 2}) is None
    assert evaluated(simplified("4*input_ids_dim0 + 0*mystery", names), {"b": 2}) == 8
