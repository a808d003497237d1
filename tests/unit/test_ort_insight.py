"""The texts in data/ are what onnxruntime-training-cpu 1.19.2 wrote for two layers of width 16, feed-forward 24, two
heads, 4 x 12 tokens: a RobertaForSequenceClassification under `Gelu+:1:-1`, a DebertaV2ForMaskedLM without a plan.
insight_rows.json is what it returned with them: its rows and their frequency."""

import json
import random
import re
from pathlib import Path

import pytest

from optimum_memopt.engines.ort.session.graph_plans import (
    Opportunity,
    StashedOutput,
    applied_counts,
    parse_insight,
    to_plans,
)
from optimum_memopt.plans.table import canonical_symbols

DATA = Path(__file__).parent / "data"
ROWS = json.loads((DATA / "insight_rows.json").read_text())
BATCH, LENGTH, WIDTH, FEED_FORWARD, HEADS, LAYERS = 4, 12, 16, 24, 2, 2
DIMENSIONS = {
    "roberta": {"input_ids_dim0": 4, "input_ids_dim1": 12, "attention_mask_dim0": 4, "attention_mask_dim1": 12}
    | {"labels_dim0": 4},
    "deberta": {"input_ids_dim0": 4, "input_ids_dim1": 12, "attention_mask_dim0": 4, "attention_mask_dim1": 12}
    | {"labels_dim0": 4, "labels_dim1": 12},
}
FLOAT, MASK = 4, 1
TOKENS = BATCH * LENGTH

both = pytest.mark.parametrize("model", ["roberta", "deberta"])


def read(model):
    return (DATA / f"insight_{model}.txt").read_text()


def plans_of(model, text=None, opportunities=None):
    dimensions = DIMENSIONS[model]
    names = canonical_symbols(dimensions)
    values = {names[name]: value for name, value in dimensions.items()}
    opportunities = parse_insight(text or read(model)) if opportunities is None else opportunities
    return {plan.config: plan for plan in to_plans(opportunities, ROWS[model], names, values)}


@both
def test_every_cell_of_the_text_is_read(model):
    text = read(model)
    opportunities = parse_insight(text)
    assert len(opportunities) == text.count(">>Option")
    assert sum(len(opportunity.outputs) for opportunity in opportunities) == text.count("byte/elem")
    assert sum(opportunity.reuses_buffer for opportunity in opportunities) == text.count("ReuseFreq")
    assert sum(opportunity.frequency for opportunity in opportunities) == sum(
        map(int, re.findall(r"^\|(\d+) ", text, re.MULTILINE))
    )


@both
def test_the_rows_hold_every_stashed_byte_once(model):
    # Cells between the lines that divide the rows, with Python's own arithmetic.
    stashed = 0
    for cell in re.split(r"\n\|_ _ .*\n", read(model)):
        frequency = re.match(r"\|(\d+) ", cell)
        for elements, size, percent in re.findall(r"\[(.+)\], byte/elem: (\d+), (\d+)%", cell):
            stashed += int(frequency[1]) * eval(elements, {}, DIMENSIONS[model]) * int(size) * int(percent) // 100
    plans = plans_of(model)
    assert sum(plan.saving_bytes for plan in plans.values()) == stashed > 0
    assert {config: plan.frequency for config, plan in plans.items()} == ROWS[model]


def test_roberta_s_rows_are_what_its_layers_stash():
    plans = plans_of("roberta")
    saving = {config: plan.saving_bytes for config, plan in plans.items()}
    assert saving["Gelu+:1:-1"] == LAYERS * TOKENS * FEED_FORWARD * FLOAT
    assert saving["FusedMatMul+Add+Dropout+:1:-1"] == 2 * LAYERS * TOKENS * WIDTH * MASK
    # query, key, value
    assert saving["FusedMatMul+Add+Reshape+Transpose+:1:-1"] == 3 * LAYERS * TOKENS * WIDTH * FLOAT
    # attention probabilities, embeddings and the head's two on one token a row: value and mask each
    probabilities = LAYERS * BATCH * HEADS * LENGTH * LENGTH
    assert saving["Dropout+:1:-1"] == (probabilities + TOKENS * WIDTH + BATCH * WIDTH) * (FLOAT + MASK)
    # mean and deviation of all five; the output itself of three only
    assert saving["LayerNormalization+:1:-1"] == (5 * 2 * TOKENS + 3 * TOKENS * WIDTH) * FLOAT
    # int64, half of it saved
    assert saving["Cast+Add+:2:-1"] == TOKENS * 8 // 2


def test_deberta_s_joint_rows_take_what_only_both_together_save():
    plans = plans_of("deberta")
    scores = 2 * BATCH * LENGTH * LENGTH
    assert plans["Dropout+:1:-1,Reshape+:1:-1"].saving_bytes == 2 * scores * FLOAT
    assert plans["Dropout+:1:-1,Unsqueeze+:1:-1"].saving_bytes == 2 * 16 * 16 * FLOAT
    assert plans["Dropout+:1:-1"].saving_bytes == (2 * scores + 2 * 16 * 16) * MASK
    assert plans["Reshape+:1:-1"].saving_bytes == TOKENS * 8, "the labels; the other Reshape+ is in the joint row"


@both
def test_symbols_have_one_name_for_each_dimension(model):
    symbols = set(re.findall(r"inputs_\w+", " ".join(plan.saving_symbolic for plan in plans_of(model).values())))
    assert symbols == {"inputs_input_ids_dim0", "inputs_input_ids_dim1"}


@both
@pytest.mark.parametrize("seed", range(3))
def test_the_table_is_the_same_for_what_ort_varies_between_runs(model, seed):
    generator = random.Random(seed)
    text = re.sub(
        r"\b(?:input_ids|attention_mask)(_dim\d)",
        lambda match: generator.choice(["input_ids", "attention_mask"]) + match[1],
        read(model),
    )
    assert text != read(model)
    opportunities = generator.sample(parse_insight(text), len(parse_insight(text)))
    assert list(plans_of(model, opportunities=opportunities).values()) == list(plans_of(model).values())


def test_counts_are_read_back():
    counts = applied_counts(parse_insight(read("roberta")))
    assert counts.pop("Gelu+:1:-1") == (-1, LAYERS)
    assert set(counts.values()) == {(0, 0)}
    assert set(counts) == {config for row in ROWS["roberta"] for config in row.split(",")} - {"Gelu+:1:-1"}


def test_counts_of_several_cells_add_up():
    def cell(requested, applied):
        return Opportunity("A+", 1, 3, (), requested_count=requested, applied_count=applied)

    assert applied_counts([cell(-1, 2), cell(-1, 1), cell(0, 0)]) == {"A+:1:-1": (-1, 3)}


def test_a_row_of_unknown_size_stays_in_the_table():
    opportunities = [Opportunity("A+", 1, 2, (StashedOutput("(input_ids_dim0)*(Gather_7_d0)", 4, 1.0),))]
    (plan,) = to_plans(
        opportunities, {"A+:1:-1": 2}, {"input_ids_dim0": "inputs_input_ids_dim0"}, {"inputs_input_ids_dim0": 4}
    )
    assert plan.saving_bytes is None
    assert plan.saving_symbolic == "8*Gather_7_d0*inputs_input_ids_dim0"


def test_equal_joint_rows_are_told_apart_by_frequency():
    def cell(frequency, bytes_each):
        return Opportunity("B+", 1, frequency, (StashedOutput("1", bytes_each, 1.0),), reuses_buffer=True)

    rows = {"A+:1:-1,B+:1:-1": 2, "B+:1:-1,C+:1:-1": 3}
    for opportunities in ([cell(2, 10), cell(3, 100)], [cell(3, 100), cell(2, 10)]):
        savings = {plan.config: plan.saving_bytes for plan in to_plans(opportunities, rows, {}, {})}
        assert savings == {"A+:1:-1,B+:1:-1": 20, "B+:1:-1,C+:1:-1": 300}


def test_a_joint_row_that_is_full_takes_no_more():
    def cell(bytes_each):
        return Opportunity("B+", 1, 2, (StashedOutput("1", bytes_each, 1.0),), reuses_buffer=True)

    rows = {"A+:1:-1,B+:1:-1": 2, "B+:1:-1,C+:1:-1": 2}
    assert sorted(plan.saving_bytes for plan in to_plans([cell(10), cell(100)], rows, {}, {})) == [20, 200]


def test_nothing_in_nothing_out():
    assert parse_insight("") == ()
    assert to_plans((), {}, {}, {}) == ()
