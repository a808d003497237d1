import re

import pytest

from optimum_memopt.engines.ort.session.graph_plans import (
    Choice,
    check_applied,
    check_supported,
    choose_config,
    choose_level,
)
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import ConfigError, parse

EXISTING = (
    "Gelu+:1:-1",
    "FusedMatMul+Add+:1:-1",
    "FusedMatMul+Add+Dropout+:1:-1",
    "LayerNormalization+:1:-1",
    "Dropout+:1:-1",
    "Cast+Add+:2:-1",
    "Softmax+:1:-1",
    "Softmax+:2:-1",
)


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
    ],
)
def test_what_ort_cannot_do_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        check_supported(parse(text))


def test_a_config_is_applied_in_the_order_of_asking():
    choice = chosen("Softmax+:2:-1,Gelu+:1:-1")
    assert choice == Choice(("Softmax+:2:-1", "Gelu+:1:-1"))
    assert not choice.redraws_random_numbers


def test_off_is_off_but_must_exist():
    assert chosen("Gelu+:1:0,Softmax+:0:-1,Cast+Add+:2:-1").configs == ("Cast+Add+:2:-1",)
    assert chosen("Gelu+:0:-1") == Choice()
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
    with pytest.raises(ConfigError, match="Available: none"):
        chosen("Gelu+:1:-1", existing=())


def test_a_strategy_that_the_plan_does_not_have():
    with pytest.raises(ConfigError, match=r"^Cast\+Add\+:1:-1: this plan has strategy 2 only"):
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
    assert choice.notes == {"Gelu+:1:-1": "asked for as BiasGelu+"}
    (remark,) = choice.remarks
    assert remark.startswith("BiasGelu+:1:-1 is Gelu+:1:-1 on this provider")


def test_two_spellings_of_one_plan_are_applied_once():
    assert chosen("BiasGelu+:1:-1,Gelu+:1:-1").configs == ("Gelu+:1:-1",)


def test_a_fused_name_without_counterpart_is_left_out_of_a_longer_recipe_only():
    choice = chosen("BiasSoftmaxDropout+BiasGelu+:1:-1,Gelu+:1:-1")
    assert choice.configs == ("Gelu+:1:-1",)
    assert "no plan for that activation" in choice.remarks[0]
    with pytest.raises(ConfigError, match="no plan"):
        chosen("BiasSoftmaxDropout+BiasGelu+:1:-1")
    with pytest.raises(ConfigError, match="nothing of it applies"):
        chosen("BiasSoftmaxDropout+BiasGelu+:1:-1,BiasGelu+BiasGelu+:1:-1")


@pytest.mark.parametrize(
    "cluster_id, random",
    [("Dropout+", True), ("FusedMatMul+Add+Dropout+", True), ("Gelu+", False), ("BitmaskBiasDropout+", True)],
)
def test_which_plans_draw_random_numbers_again(cluster_id, random):
    assert Choice((f"{cluster_id}:1:-1",)).redraws_random_numbers is random


def test_level_1_takes_every_recompute_but_residual_normalizations():
    choice = choose_level(1, EXISTING, {"LayerNormalization"})
    left_out = {"LayerNormalization+:1:-1", "Cast+Add+:2:-1", "Softmax+:2:-1"}
    assert choice.configs == tuple(plan for plan in EXISTING if plan not in left_out)
    assert list(choice.notes) == ["LayerNormalization+:1:-1"]
    assert "left out" in choice.notes["LayerNormalization+:1:-1"]
    assert choice.remarks == ("level 1 leaves out 1 of 6 plans, see the table's notes",)


def test_level_1_in_a_pre_norm_model_takes_normalizations_too():
    choice = choose_level(1, EXISTING, frozenset())
    assert "LayerNormalization+:1:-1" in choice.configs
    assert (choice.notes, choice.remarks) == ({}, ())


def test_level_2_adds_plans_with_compromise():
    choice = choose_level(2, EXISTING, {"LayerNormalization"})
    assert "Cast+Add+:2:-1" in choice.configs
    assert set(choice.configs) >= set(choose_level(1, EXISTING, {"LayerNormalization"}).configs)


def test_plans_through_a_residual_normalization_are_left_out_too():
    choice = choose_level(1, ("Add+LayerNormalization+:1:-1", "Gelu+:1:-1"), {"LayerNormalization"})
    assert choice.configs == ("Gelu+:1:-1",)


def test_plans_that_ort_applied_nowhere():
    choice = Choice(("Gelu+:1:-1", "Add+:1:-1", "Tile+:1:-1"))
    applied = {"Gelu+:1:-1": (-1, 2), "Add+:1:-1": (-1, 0)}
    with pytest.raises(MemOptError, match=r"applied none of Add\+:1:-1, Tile\+:1:-1; leave them out"):
        check_applied(choice, applied, strict=True)
    assert check_applied(choice, applied, strict=False) == "ONNX Runtime applied none of Add+:1:-1, Tile+:1:-1"
    assert check_applied(Choice(("Gelu+:1:-1",)), applied, strict=True) == ""


def test_level_2_takes_the_full_saving_where_an_id_has_both_strategies():
    choice = choose_level(2, ["Add+:2:-1", "Add+:1:-1", "Cast+:2:-1"], ())
    assert set(choice.configs) == {"Add+:1:-1", "Cast+:2:-1"}
    assert "Add+:2:-1" in choice.notes
