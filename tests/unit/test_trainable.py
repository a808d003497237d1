import pytest
import torch

from optimum_memopt.errors import MemOptError
from optimum_memopt.predict.workload import freeze_others, matches

NAME = "roberta.encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("query", True),
        ("attention.self.query", True),
        ("query.weight", True),
        ("layer.0", True),
        ("uery", False),
        ("layer.1", False),
        ("self", True),
        ("*query*", True),
        ("roberta.*.weight", True),
        ("*.bias", False),
        (r".*layer\.[0-3]\..*(query|value).*", True),
        (r".*layer\.[4-7]\..*", False),
        ("query(", False),
        ("", False),
    ],
)
def test_a_pattern_is_a_part_of_the_name_a_glob_or_a_regular_expression(pattern: str, is_match: bool) -> None:
    assert matches(pattern, NAME) == is_match


def tied() -> torch.nn.Module:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("body", "head", "embedding")})
    model["head"].weight = model["embedding"].weight
    return model


def test_all_others_are_frozen_and_a_tied_weight_goes_by_each_of_its_names() -> None:
    for pattern in ("head", "embedding"):
        model = tied()
        freeze_others(model, [pattern])
        assert model["head"].weight.requires_grad and not model["body"].weight.requires_grad
    model = tied()
    freeze_others(model, ["body", "head"])
    assert all(parameter.requires_grad for parameter in model.parameters())
    model["body"].weight.requires_grad_(False)
    freeze_others(model, [])
    assert not model["body"].weight.requires_grad


def test_the_error_is_short_whatever_the_names_and_patterns() -> None:
    model = torch.nn.ModuleDict({letter * 70: torch.nn.Linear(4, 4) for letter in "abcdefgh"})
    with pytest.raises(MemOptError, match=r"Available: a{70}\.weight, .*…$") as caught:
        freeze_others(model, ["x" * 5000, "y" * 5000, "z" * 5000])
    assert len(str(caught.value)) <= 300


def test_a_pattern_that_matches_nothing_shows_the_names() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(MemOptError) as caught:
        freeze_others(model, ["0.weight", "wieght"])
    assert str(caught.value) == (
        "--trainable wieght: no parameter of Sequential has this name; did you mean weight? Available: 0.weight, "
        "0.bias, 1.weight, 1.bias, 2.weight, 2.bias"
    )
    assert all(parameter.requires_grad for parameter in model.parameters())
