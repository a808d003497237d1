"""Facts that ranks compare, and how a difference reads; between real processes in test_launchers.py."""

from dataclasses import replace

import pytest

from optimum_memopt import MemOptError, MemOptOptions, PlanRow, PlanTable
from optimum_memopt.compat import installed_version
from optimum_memopt.distributed import describe_difference, digest, facts, failure
from optimum_memopt.engines.ort.compat.installation import DISTRIBUTIONS
from optimum_memopt.plans.plan_file import PlanFile

PLAN = PlanRow("Gelu+:1:-1", 2, 1024, "8*inputs_input_ids_dim0", requested_count=-1, applied_count=2)
OTHER = PlanRow("Dropout+:1:-1", 3, 512, "4*inputs_input_ids_dim0")
TABLE = PlanTable("ort", (PLAN, OTHER), {"inputs_input_ids_dim0": 4}, ("Model on CPUExecutionProvider",))
OPTIONS = MemOptOptions(memory_opt_config="Gelu+:1:-1")
OWN = facts("ort", OPTIONS, TABLE)


def difference(other):
    assert digest(other) != digest(OWN)
    return describe_difference([OWN, OWN, other])


def test_another_first_batch_is_no_difference():
    longer = replace(PLAN, saving_bytes=9, saving_symbolic="8*inputs_input_ids_dim1")
    table = replace(TABLE, plans=(OTHER, longer), symbols={"inputs_input_ids_dim0": 2})
    assert facts("ort", OPTIONS, table) == OWN


def test_what_the_first_batch_decides_is_no_difference():
    """The chunked loss, which few tokens are not worth, and what a budget recomputes."""
    loss = PlanRow("Loss+:1:-1", 1, 4096, "", applied_count=1, depends_on_batch=True)
    assert facts("ort", OPTIONS, replace(TABLE, plans=(*TABLE.plans, loss))) == OWN
    budget = MemOptOptions(memory_opt_engine="compile", memory_opt_budget="24GiB")
    fewer = replace(TABLE, plans=(replace(PLAN, applied_count=1), OTHER))
    assert facts("compile", budget, fewer) == facts("compile", budget, TABLE)
    assert facts("compile", OPTIONS, fewer) != facts("compile", OPTIONS, TABLE)


def test_where_things_lie_and_what_is_shown_is_no_difference(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "here")
    file = tmp_path / "plans.json"
    file.write_text('["Gelu+:1:-1"]')
    options = MemOptOptions(memory_opt_config=str(file), memory_opt_log_level="devinfo", ort_cache_dir="here")
    assert digest(facts("ort", options, TABLE)) == digest(OWN)


def test_each_difference_is_named_with_its_rank(monkeypatch):
    start = "rank 2 does not train as rank 0 does: "
    assert difference(facts("ort", replace(OPTIONS, memory_opt_config="Gelu+:0:-1"), TABLE)) == (
        start + "--memory_opt_config: Gelu+:1:-1 on rank 0, Gelu+:0:-1 on rank 2"
    )
    assert difference(facts("ort", OPTIONS, replace(TABLE, plans=(replace(PLAN, applied_count=0), OTHER)))) == (
        start + "plan Gelu+:1:-1: 2 occurrences, 2 applied on rank 0, 2 occurrences, 0 applied on rank 2"
    )
    assert difference({**OWN, "version of torch": "2.4"}).startswith(start + "version of torch: ")
    monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_BUILD_GRADIENT")
    assert difference(facts("ort", OPTIONS, TABLE)) == (
        start + "ORTMODULE_SKIPCHECK_POLICY in the environment: nothing on rank 0, SKIP_CHECK_BUILD_GRADIENT on rank 2"
    )


def test_plan_files_are_compared_by_what_they_do(tmp_path):
    plan = PlanFile("by hand", "plain", {}, ())
    options = []
    for name, one in (("a", plan), ("b", replace(plan, why="another text")), ("c", replace(plan, loss="chunked"))):
        one.save(tmp_path / name)
        options.append(MemOptOptions(memory_opt_engine="compile", memory_opt_plan=str(tmp_path / name)))
    first, same, other = (facts("compile", one, TABLE) for one in options)
    assert first == same
    assert [name for name in first if first[name] != other[name]] == ["--memory_opt_plan"]


def test_a_rank_without_a_graph_differs():
    message = difference(facts("ort", OPTIONS, replace(TABLE, plans=())))
    assert "plan Gelu+:1:-1: 2 occurrences, 2 applied on rank 0, nothing on rank 2" in message


def test_many_differences_are_counted():
    assert difference({}).endswith(f"(and {len(OWN) - 3} more)")


def test_a_rank_that_failed_is_named_before_one_that_differs():
    other = {**OWN, "version of torch": "2.4"}
    message = describe_difference([OWN, other, failure(MemOptError("no plan\n  here"))])
    assert message == "rank 2 failed in its first training step, so all ranks stop: MemOptError: no plan here"


@pytest.mark.parametrize("distributions", [("optimum-memopt",), ("torch",), ("transformers",), DISTRIBUTIONS])
def test_versions_are_among_the_facts(distributions):
    found = installed_version(distributions)
    if found is None:
        pytest.skip(f"none of {', '.join(distributions)} is installed")
    assert OWN[f"version of {found[0]}"] == found[1]
