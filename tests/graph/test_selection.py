"""What a user asks for against the rows of real graphs."""

import re

import pytest

from optimum_memopt.engines.compile.partition.producers.stated import FromConfig
from optimum_memopt.plans.grammar import ConfigError, parse
from optimum_memopt.plans.matching import Matched
from tests.captured import Captured


def asked(captured: Captured, config: str, strict: bool = True, graphs: int = 1) -> Matched:
    matched = FromConfig(parse(config)).match(captured.candidates * graphs)
    if strict:
        matched.check()
    return matched


def test_the_same_config_as_for_onnx_runtime_applies(roberta):
    matched = asked(roberta, "Gelu+:1:-1,Dropout+:1:-1")
    assert list(matched.requests) == ["Gelu+:1:-1", "Dropout+:1:-1"]
    assert matched.remarks == ()


def test_a_fused_id_is_said_to_mean_the_activation(roberta):
    matched = asked(roberta, "BiasGelu+:1:-1")
    assert list(matched.requests) == ["Gelu+:1:-1"] and matched.note("Gelu+:1:-1") == "asked for as BiasGelu+"
    assert matched.remarks == (
        "BiasGelu+:1:-1 is Gelu+:1:-1 on this engine: the same activation, not fused the same way",
    )


@pytest.mark.parametrize(
    "typed, near",
    [
        ("Gellu+", "Gelu+"),
        ("gelu+", "Gelu+"),
        ("LayerNorm+", "LayerNormalization+"),
        ("FusedMatMul+add+", "FusedMatMul+Add+"),
        ("MatMul+Mul+Add+Sofmax+", "MatMul+Mul+Add+Softmax+"),
    ],
)
def test_a_mistyped_id_is_refused_with_near_ones(roberta, typed, near):
    with pytest.raises(ConfigError) as caught:
        asked(roberta, f"{typed}:1:-1")
    message = str(caught.value)
    assert message.startswith(f'no plan "{typed}" in this model; did you mean ')
    assert near in re.search(r"did you mean (.*?)\?", message)[1].split(" or ")
    assert set(re.search(r"Available: (.*)", message)[1].split(", ")) == {
        candidate.cluster_id for candidate in roberta.candidates
    }
    assert "\n" not in message


def test_a_mistyped_id_is_a_remark_where_not_strict(roberta):
    matched = asked(roberta, "Gellu+:1:-1,Gelu+:1:-1", strict=False)
    assert list(matched.requests) == ["Gelu+:1:-1"]
    assert "Gellu+" in matched.remarks[0] and matched.remarks[0].endswith("left out")


def test_another_strategy_is_refused_with_those_there_are(roberta):
    with pytest.raises(ConfigError, match=r"^Gelu\+:2:-1: this plan has strategy 1 or 3 only$"):
        asked(roberta, "Gelu+:2:-1")


@pytest.mark.parametrize("count, graphs, said", [(2, 1, False), (3, 1, True), (3, 2, False), (-1, 1, False)])
def test_more_than_there_are_are_all_of_them_with_a_remark(roberta, count, graphs, said):
    matched = asked(roberta, f"Gelu+:1:{count}", graphs=graphs)
    assert matched.remarks == ((f"Gelu+:1:{count}: there are 2 only, all of them are on",) if said else ())
