import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from optimum_memopt.engines.ort.session.graph_plans import (
    ChosenPlans,
    Opportunity,
    applied_counts,
    check_applied,
    check_supported,
    choose_config,
    choose_level,
    parse_insight,
    residual_normalizations,
    to_plans,
)
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import ConfigError, parse
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
    assert sum(len(opportunity.savings) for opportunity in opportunities) == text.count("byte/elem")
    assert sum(opportunity.reuses_buffer for opportunity in opportunities) == text.count("ReuseFreq")
    assert sum(opportunity.frequency for opportunity in opportunities) == sum(
        map(int, re.findall(r"^\|(\d+) ", text, re.MULTILINE))
    )


@both
def test_the_rows_hold_every_stashed_byte_once(model):
    # Sums the cells between the dividing lines of the rows, with Python's arithmetic.
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
    # attention probabilities, embeddings, and the head's two on one token per row: value and mask each
    probabilities = LAYERS * BATCH * HEADS * LENGTH * LENGTH
    assert saving["Dropout+:1:-1"] == (probabilities + TOKENS * WIDTH + BATCH * WIDTH) * (FLOAT + MASK)
    # mean and deviation of all five; the output of only three
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
    assert counts.pop("Gelu+:1:-1") == LAYERS
    assert set(counts.values()) == {0}
    assert set(counts) == {config for row in ROWS["roberta"] for config in row.split(",")} - {"Gelu+:1:-1"}


def test_counts_of_several_cells_add_up():
    cells = [Opportunity("A+:1:-1", 3, applied_count=applied) for applied in (2, 1, 0)]
    assert applied_counts(cells) == {"A+:1:-1": 3}


def test_a_row_of_unknown_size_stays_in_the_table():
    opportunities = [Opportunity("A+:1:-1", 2, ("((input_ids_dim0)*(Gather_7_d0))*4*1.0",))]
    (plan,) = to_plans(
        opportunities, {"A+:1:-1": 2}, {"input_ids_dim0": "inputs_input_ids_dim0"}, {"inputs_input_ids_dim0": 4}
    )
    assert plan.saving_bytes is None
    assert plan.saving_symbolic == "8*Gather_7_d0*inputs_input_ids_dim0"


def test_equal_joint_rows_are_told_apart_by_frequency():
    def cell(frequency, bytes_each):
        return Opportunity("B+:1:-1", frequency, (f"(1)*{bytes_each}*1.0",), reuses_buffer=True)

    rows = {"A+:1:-1,B+:1:-1": 2, "B+:1:-1,C+:1:-1": 3}
    for opportunities in ([cell(2, 10), cell(3, 100)], [cell(3, 100), cell(2, 10)]):
        savings = {plan.config: plan.saving_bytes for plan in to_plans(opportunities, rows, {}, {})}
        assert savings == {"A+:1:-1,B+:1:-1": 20, "B+:1:-1,C+:1:-1": 300}


def test_a_joint_row_that_is_full_takes_no_more():
    def cell(bytes_each):
        return Opportunity("B+:1:-1", 2, (f"(1)*{bytes_each}*1.0",), reuses_buffer=True)

    rows = {"A+:1:-1,B+:1:-1": 2, "B+:1:-1,C+:1:-1": 2}
    assert sorted(plan.saving_bytes for plan in to_plans([cell(10), cell(100)], rows, {}, {})) == [20, 200]


def test_nothing_in_nothing_out():
    assert parse_insight("") == ()
    assert to_plans((), {}, {}, {}) == ()


def node(operator, inputs, outputs):
    return SimpleNamespace(op_type=operator, input=inputs, output=outputs)


def graph(*nodes):
    return SimpleNamespace(node=nodes)


def post_norm(operator="LayerNormalization", layers=2):
    """Returns the nodes of BERT's pattern: x = Norm(x + Layer(x))."""
    nodes, stream = [], "x0"
    for number in range(1, layers + 1):
        nodes += [
            node("MatMul", [stream, "w"], [f"h{number}"]),
            node("Add", [stream, f"h{number}"], [f"s{number}"]),
            node(operator, [f"s{number}", "scale", "bias"], [f"x{number}", f"mean{number}", f"deviation{number}"]),
        ]
        stream = f"x{number}"
    return nodes


def pre_norm(operator="LayerNormalization", layers=2):
    """Returns the nodes of GPT-2's pattern: x = x + Layer(Norm(x)), and a final Norm."""
    nodes, stream = [], "x0"
    for number in range(1, layers + 1):
        nodes += [
            node(operator, [stream, "scale", "bias"], [f"n{number}", f"mean{number}", f"deviation{number}"]),
            node("MatMul", [f"n{number}", "w"], [f"h{number}"]),
            node("Add", [stream, f"h{number}"], [f"x{number}"]),
        ]
        stream = f"x{number}"
    return [*nodes, node(operator, [stream, "scale", "bias"], ["last"]), node("MatMul", ["last", "w"], ["logits"])]


@pytest.mark.parametrize("operator", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_the_normalization_is_the_residual_stream_in_post_norm_models_only(operator):
    assert residual_normalizations(graph(*post_norm(operator))) == {operator}
    assert residual_normalizations(graph(*pre_norm(operator))) == frozenset()
    assert residual_normalizations(graph(*post_norm(layers=1))) == frozenset()


def test_additions_of_gradients_and_to_statistics_do_not_count():
    backward = [node("YieldOp", ["logits"], ["g"]), node("Add", ["n1", "g"], ["g1"])]
    assert residual_normalizations(graph(*pre_norm(), *backward)) == frozenset()
    assert residual_normalizations(graph(*post_norm(), *backward)) == {"LayerNormalization"}
    statistics = node("Add", ["mean1", "one"], ["shifted"])
    assert residual_normalizations(graph(*pre_norm(), statistics)) == frozenset()


def test_each_kind_of_normalization_is_judged_by_itself():
    other = [node("SimplifiedLayerNormalization", ["logits", "scale"], ["r"]), node("MatMul", ["r", "w"], ["out"])]
    assert residual_normalizations(graph(*post_norm(), *other)) == {"LayerNormalization"}
    assert residual_normalizations(graph()) == frozenset()


RECOMPUTED = ("Gelu+", "FusedMatMul+Add+", "FusedMatMul+Add+Dropout+", "LayerNormalization+", "Dropout+", "Softmax+")
EXISTING = (*(f"{name}:1:-1" for name in RECOMPUTED), "Cast+Add+:2:-1", "Softmax+:2:-1")


def chosen(text, strict=True, existing=EXISTING):
    return choose_config(parse(text), existing, strict)


@pytest.mark.parametrize("text", ["Gelu+:1:-1", "Gelu+:2:0", "Gelu+:0:-1", "A+:1:-1,B+:2:-1,C+:0:0"])
def test_what_ort_can_do(text):
    check_supported(parse(text))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("Gelu+:1:3", r"^Gelu\+:1:3: count 3 .* applies every occurrence .* allowed: -1 \(all\) and 0 \(off\)"),
        ("A+:1:-1,Gelu+:1:1", r"^Gelu\+:1:1: count 1 "),
        ("Gelu+:3:-1", r"^Gelu\+:3:-1: strategy 3 \(offload\) .* allowed: 0, 1, 2"),
        ("Gelu+:4:2", r"^Gelu\+:4:2: strategy 4 \(compress\) .* allowed: 0, 1, 2"),
    ],
)
def test_what_ort_cannot_do_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        check_supported(parse(text))


def test_a_config_is_applied_in_the_order_of_asking():
    choice = chosen("Softmax+:2:-1,Gelu+:1:-1")
    assert choice == ChosenPlans(("Softmax+:2:-1", "Gelu+:1:-1"))
    assert not choice.redraws_random_numbers


def test_off_is_off_but_must_exist():
    assert chosen("Gelu+:1:0,Softmax+:0:-1,Cast+Add+:2:-1").configs == ("Cast+Add+:2:-1",)
    assert chosen("Gelu+:0:-1") == ChosenPlans()
    with pytest.raises(ConfigError, match=r'no plan "Gellu\+"'):
        chosen("Gellu+:1:0")


@pytest.mark.parametrize(
    "asked, near",
    [("Gellu+", "Gelu+"), ("FusedMatmul+Add+", "FusedMatMul+Add+"), ("LayerNorm+", "LayerNormalization+")],
)
def test_an_unknown_id_lists_what_exists_near_matches_first(asked, near):
    with pytest.raises(ConfigError) as error:
        chosen(f"{asked}:1:-1")
    message = str(error.value)
    assert f'no plan "{asked}"' in message
    assert re.search(r"did you mean ([^ ]+)", message)[1].rstrip("?") == near
    listed = message.split("Available: ")[1].split(", ")
    assert listed[0] == near
    assert sorted(listed) == sorted({plan.split(":")[0] for plan in EXISTING})
    assert "\n" not in message


def test_an_id_like_nothing_lists_what_exists():
    with pytest.raises(ConfigError) as error:
        chosen("Xyz+:1:-1")
    assert "did you mean" not in str(error.value)
    with pytest.raises(ConfigError, match="available: none"):
        chosen("Gelu+:1:-1", existing=())


def test_a_strategy_that_the_plan_does_not_have():
    with pytest.raises(ConfigError, match=r"^Cast\+Add\+:1:-1: this plan supports only strategy 2"):
        chosen("Cast+Add+:1:-1")
    assert chosen("Softmax+:1:-1").configs == ("Softmax+:1:-1",)


def test_without_strict_unknown_ids_are_remarks_and_the_rest_is_applied():
    choice = chosen("Gellu+:1:-1,Gelu+:1:-1,Cast+Add+:1:-1", strict=False)
    assert choice.configs == ("Gelu+:1:-1",)
    assert len(choice.remarks) == 2
    assert "Gellu+" in choice.remarks[0] and "left out" in choice.remarks[0]
    assert chosen("Gellu+:1:-1", strict=False).configs == ()


def test_fused_names_are_understood_with_one_remark_and_a_note_in_the_table():
    choice = chosen("BiasGelu+:1:-1")
    assert choice.configs == ("Gelu+:1:-1",)
    assert choice.notes == {"Gelu+:1:-1": "requested as BiasGelu+"}
    (remark,) = choice.remarks
    assert remark.startswith("BiasGelu+:1:-1 is Gelu+:1:-1 on this provider")
    assert chosen("BiasGelu+:1:-1,Gelu+:1:-1").configs == ("Gelu+:1:-1",), "two spellings, applied once"


def test_a_fused_name_without_counterpart_is_left_out_of_a_longer_recipe_only():
    choice = chosen("BiasSoftmaxDropout+BiasGelu+:1:-1,Gelu+:1:-1")
    assert choice.configs == ("Gelu+:1:-1",)
    assert "no plan for this activation" in choice.remarks[0]
    with pytest.raises(ConfigError, match="no plan"):
        chosen("BiasSoftmaxDropout+BiasGelu+:1:-1")
    with pytest.raises(ConfigError, match="no plan in it applies"):
        chosen("BiasSoftmaxDropout+BiasGelu+:1:-1,BiasGelu+BiasGelu+:1:-1")


@pytest.mark.parametrize(
    "cluster_id, random",
    [("Dropout+", True), ("FusedMatMul+Add+Dropout+", True), ("Gelu+", False), ("BitmaskBiasDropout+", True)],
)
def test_which_plans_draw_random_numbers_again(cluster_id, random):
    assert ChosenPlans((f"{cluster_id}:1:-1",)).redraws_random_numbers is random


def test_level_1_takes_every_recompute_but_residual_normalizations():
    choice = choose_level(1, EXISTING, {"LayerNormalization"})
    left_out = {"LayerNormalization+:1:-1", "Cast+Add+:2:-1", "Softmax+:2:-1"}
    assert choice.configs == tuple(plan for plan in EXISTING if plan not in left_out)
    assert list(choice.notes) == ["LayerNormalization+:1:-1"]
    assert "left out" in choice.notes["LayerNormalization+:1:-1"]
    assert choice.remarks == ("level 1 leaves out 1 of 6 plans, see the table's notes",)

    choice = choose_level(1, EXISTING, frozenset())
    assert "LayerNormalization+:1:-1" in choice.configs
    assert (choice.notes, choice.remarks) == ({}, ())


def test_level_2_adds_plans_with_compromise():
    choice = choose_level(2, EXISTING, {"LayerNormalization"})
    assert "Cast+Add+:2:-1" in choice.configs
    assert set(choice.configs) >= set(choose_level(1, EXISTING, {"LayerNormalization"}).configs)

    choice = choose_level(1, ("Add+LayerNormalization+:1:-1", "Gelu+:1:-1"), {"LayerNormalization"})
    assert choice.configs == ("Gelu+:1:-1",)


def test_plans_that_ort_applied_nowhere():
    choice = ChosenPlans(("Gelu+:1:-1", "Add+:1:-1", "Tile+:1:-1"))
    applied = {"Gelu+:1:-1": 2, "Add+:1:-1": 0}
    with pytest.raises(MemOptError, match=r"applied none of Add\+:1:-1, Tile\+:1:-1; leave them out"):
        check_applied(choice, applied, strict=True)
    assert check_applied(choice, applied, strict=False) == "ONNX Runtime applied none of Add+:1:-1, Tile+:1:-1"
    assert check_applied(ChosenPlans(("Gelu+:1:-1",)), applied, strict=True) == ""


def test_level_2_takes_the_full_saving_where_an_id_has_both_strategies():
    choice = choose_level(2, ["Add+:2:-1", "Add+:1:-1", "Cast+:2:-1"], ())
    assert set(choice.configs) == {"Add+:1:-1", "Cast+:2:-1"}
    assert "Add+:2:-1" in choice.notes
