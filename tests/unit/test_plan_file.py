import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import ConfigError, parse_file
from optimum_memopt.plans.plan_file import GraphEntry, GraphSignature, LayerEntry, PlanFile

SIGNATURE = GraphSignature({"float32": (12, 3400), "int64": (1, 8)}, {"addmm": 24, "gelu": 12}, "12ab")
LAYERS = LayerEntry(("h.0", "h.1"), recompute=("mlp.act/gelu",), offload=("attn/addmm",), save=("attn/randint#2",))
PLAN = PlanFile(
    "budget 24.00 GiB", "chunked", {"model": "GPT2LMHeadModel"}, (GraphEntry(SIGNATURE, False, (LAYERS,)),)
)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert PlanFile.load(tmp_path / "plan.json") == PLAN


def test_a_digest_is_of_what_is_done() -> None:
    same = replace(PLAN, why="by hand", solved_for={})
    other = replace(PLAN, graphs=(replace(PLAN.graphs[0], layers=(replace(LAYERS, recompute=()),)),))
    assert same.digest == PLAN.digest != other.digest
    assert replace(PLAN, loss="plain").digest != PLAN.digest


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


def changed_graph(**changes: Any) -> str:
    return changed(graphs=[{**json.loads(PLAN.to_json())["graphs"][0], **changes}])


def changed_signature(**changes: Any) -> str:
    return changed_graph(signature={**json.loads(PLAN.to_json())["graphs"][0]["signature"], **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON, line 1 column 1"),
        ("[" * 100_000, 'expected "format": "optimum-memopt plan"'),
        ('["Gelu+:1:-1"]', "a list, as --memory_opt_config takes it"),
        ("{}", 'expected "format": "optimum-memopt plan", as optimum-cli memopt plan --budget'),
        ("null", 'expected "format"'),
        (changed(version=2), "version 2; this optimum-memopt reads 1"),
        (changed(graphs=[{}]), "KeyError: 'signature'"),
        (changed(graphs=3), "TypeError: "),
        (changed(why=None), "expected a string, not None"),
        (changed(loss="evil"), "loss evil: allowed: plain, chunked"),
        (changed(loss=["plain"]), "expected a string, not ['plain']"),
        (changed(solved_for=[["model", "GPT2"]]), "expected an object, not [['model', 'GPT2']]"),
        (changed(graphs={"1": 2}), "expected a list, not {'1': 2}"),
        (changed_graph(layers="h.0"), "expected a list, not h.0"),
        (changed_graph(layers=[["h.0"]]), "expected an object, not ['h.0']"),
        (changed_graph(by_torch="no"), "expected true or false, not no"),
        (changed_graph(by_torch=0), "expected true or false, not 0"),
        (changed_graph(signature=[]), "expected an object, not []"),
        (changed_signature(digest=[[]] * 1000), "expected a string, not [[], []"),
        (changed_signature(operators={"gelu": float("inf")}), "expected a count from 0 up, not inf"),
        (changed_signature(operators={"gelu": float("nan")}), "expected a count from 0 up, not nan"),
        (changed_signature(operators={"gelu": -1}), "expected a count from 0 up, not -1"),
        (changed_signature(operators={"gelu": True}), "expected a count from 0 up, not True"),
        (changed_signature(operators={"gelu": 10**400}), "expected a count from 0 up, not 1000"),
        (changed_signature(operators={"gelu": ""}), "expected a count from 0 up, not ''"),
        (changed_signature(parameters={"float32": "12"}), "expected a list, not 12"),
        (changed_signature(parameters={"float32": [1]}), "argument 2 is shorter than argument 1"),
    ],
)
def test_what_is_no_plan_file_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(MemOptError) as refused:
        PlanFile.load(path)
    line = str(refused.value)
    assert reason in line and str(path) in line and "\n" not in line and len(line) < 300 + len(str(path))


def test_a_plan_file_is_no_config(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"plan\.json: a plan file; give it to --memory_opt_plan"):
        parse_file(tmp_path / "plan.json")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MemOptError, match="plan file .*: not written: No such file or directory"):
        PLAN.save(tmp_path / "nowhere" / "plan.json")
    for no_path in (5, None, 1.5, ["plan.json"], "plan\0.json"):
        with pytest.raises(MemOptError, match="plan file .*: not written: .") as refused:
            PLAN.save(no_path)  # type: ignore[arg-type]
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (SIGNATURE, ""),
        (replace(SIGNATURE, digest="34cd"), "the same operators, but in other modules or in another order"),
        (replace(SIGNATURE, operators={"addmm": 24, "relu": 12}), "gelu: 12 in the file, 0 here; relu: 0 in the file"),
        (
            replace(SIGNATURE, parameters={"float32": (12, 3500), "int64": (1, 8)}),
            "12 with 3,400 elements in the file",
        ),
        (replace(SIGNATURE, operators=dict.fromkeys("abcd", 1)), " and 3 more"),
    ],
)
def test_a_difference_is_named(other: GraphSignature, difference: str) -> None:
    found = SIGNATURE.difference(other)
    assert found == difference if not difference else difference in found
