from typing import Any

import pytest

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.plans.grammar import ConfigError, parse
from tests.gradients import accumulate, assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import DROPOUT, MLM, Attach, Pair, config, count_lines, needs_ort
from tests.rotation import nightly

pytestmark = needs_ort


def first_step(attach: Attach, selection: Selection, **options: Any) -> OrtEngine:
    model = MLM.build()
    engine = attach(model, selection, **options)
    accumulate(model, [MLM.batch()])
    return engine


def test_an_error_is_the_same_when_the_step_is_tried_again(pair: Pair) -> None:
    model, plain, engine = pair(MLM.build(), config("Nothing+:1:-1"))
    for _ in range(2):
        with pytest.raises(ConfigError, match='no plan "Nothing[+]"'):
            model(**MLM.batch())
    engine.apply(config("Gelu+:1:-1"))
    assert_same_step(model, plain, MLM.batch())


def test_without_strict_an_unknown_id_is_a_warning_and_the_rest_is_applied(attach: Attach, lines: list[str]) -> None:
    lenient = Selection(config=parse("Gelu+:1:-1,Nothing+:1:-1"), strict=False)
    engine = first_step(attach, lenient)
    assert [plan.config for plan in engine.plans().enabled] == ["Gelu+:1:-1"]
    assert count_lines(lines, 'no plan "Nothing+"') == 1
    engine = first_step(attach, Selection(config=parse("Nothing+:1:-1"), strict=False))
    assert engine.plans().enabled == ()


@pytest.mark.parametrize(
    ("asked", "applied", "changes"),
    [("BiasGelu+:1:-1", "Gelu+:1:-1", {}), ("BitmaskDropout+:1:-1", "Dropout+:1:-1", DROPOUT)],
)
def test_recipes_made_for_cuda_train_on_the_cpu(
    attach: Attach, lines: list[str], asked: str, applied: str, changes: dict[str, Any]
) -> None:
    model = MLM.build(**changes)
    engine = attach(model, config(asked))
    accumulate(model, [MLM.batch()])
    (plan,) = engine.plans().enabled
    assert (plan.config, plan.applied_count) == (applied, plan.frequency)
    assert plan.note == f"requested as {asked.split(':')[0]}"
    assert count_lines(lines, f"{asked} is {applied} on this provider") == 1


@pytest.mark.parametrize(
    "name", nightly(["roberta-mlm", "bert-mlm", "deberta-v2-mlm", "gpt2", "llama", "vit"], but=["roberta-mlm", "gpt2"])
)
@pytest.mark.parametrize("level", [1, 2])
def test_a_level_leaves_normalizations_out_where_they_make_the_residual_stream(
    attach: Attach, lines: list[str], name: str, level: int
) -> None:
    case = ZOO[name]
    model = case.build()
    engine = attach(model, Selection(level=level))
    accumulate(model, [case.batch()])
    normalizations = [plan for plan in engine.plans().plans if "LayerNormalization+" in plan.config]
    assert normalizations
    post_norm = name in ("roberta-mlm", "bert-mlm", "deberta-v2-mlm")
    assert {plan.is_on for plan in normalizations} == {not post_norm}
    assert all(plan.note.startswith("left out") == post_norm for plan in normalizations)
    assert count_lines(lines, f"level {level} leaves out") == int(post_norm)
