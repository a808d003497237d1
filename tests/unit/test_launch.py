"""Which launches are refused as several processes in a world of one; test_launchers.py uses real launchers."""

import re
from dataclasses import replace

import pytest

from optimum_memopt import MemOptError, MemOptOptions, attach
from optimum_memopt import distributed as launch
from optimum_memopt.compat.installed import installed_version
from optimum_memopt.distributed import describe_difference, facts, failure
from optimum_memopt.engines.ort.compat.installation import DISTRIBUTIONS
from optimum_memopt.plans.plan_file import PlanFile
from tests.trainer_runs import log_lines

ONE_PROCESS_ONLY = {"ACCELERATE_USE_CPU": "True"}

COMMANDS = {
    "console-script": ["/venv/bin/python3", "/venv/bin/accelerate", "launch"],
    "own-script": ["/venv/bin/python", "/venv/bin/accelerate-launch"],
    "module": ["python", "-m", "accelerate.commands.launch"],
    "module-of-all-commands": ["python", "-u", "-m", "accelerate.commands.accelerate_cli", "launch"],
}


@pytest.fixture(autouse=True)
def no_default_config(tmp_path, monkeypatch):
    from accelerate.commands.config import config_args

    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))


def config_file(folder, **changes):
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 4, **changes}
    path = folder / "config.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in content.items()))
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_accelerate_launch_are_read(command):
    read = launch.accelerate_launch([*COMMANDS[command], "--cpu", "--num_processes", "3", "s.py", "--num_processes=9"])
    assert read == (3, "s.py")
    assert launch.accelerate_launch([*COMMANDS[command], "--num-processes=2", "s.py"])[0] == 2


def test_a_config_file_counts_where_no_flag_does(tmp_path):
    command = [*COMMANDS["console-script"], "--config_file", config_file(tmp_path)]
    assert launch.accelerate_launch([*command, "s.py"])[0] == 4
    assert launch.accelerate_launch([*command, "--num_processes", "1", "s.py"])[0] == 1


def test_the_default_config_file_counts_but_not_with_cpu(tmp_path, monkeypatch):
    from accelerate.commands.config import config_args

    monkeypatch.setattr(config_args, "default_config_file", config_file(tmp_path))
    command = COMMANDS["console-script"]
    assert launch.accelerate_launch([*command, "s.py"])[0] == 4
    assert launch.accelerate_launch([*command, "--cpu", "s.py"]) is None


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["bash"],
        ["python", "sweep.py"],
        ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"],
        ["/venv/bin/torchrun", "--nproc_per_node", "2", "s.py"],
        ["/venv/bin/accelerate", "test"],
        ["/venv/bin/accelerate", "launch"],
        ["/venv/bin/accelerate", "launch", "s.py"],
        ["/venv/bin/accelerate", "launch", "--a_flag_of_tomorrow", "s.py"],
        ["/venv/bin/accelerate", "launch", "--config_file", "no_such_file.yaml", "s.py"],
    ],
    ids=" ".join,
)
def test_what_says_nothing_is_let_through(command, monkeypatch):
    assert launch.accelerate_launch(command) is None
    monkeypatch.setattr(launch, "_parent_command", lambda: command)
    launch.check_world(1, ONE_PROCESS_ONLY)


def test_a_broken_config_file_is_let_through(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("[")
    assert launch.accelerate_launch([*COMMANDS["console-script"], "--config_file", str(path), "s.py"]) is None


def test_one_process_of_accelerate_is_let_through(monkeypatch):
    monkeypatch.setattr(launch, "_parent_command", lambda: ["accelerate", "launch", "--num_processes", "1", "s.py"])
    launch.check_world(1, ONE_PROCESS_ONLY)


def test_several_processes_of_accelerate_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "_parent_command", lambda: ["accelerate", "launch", "--num_processes", "2", "s.py"])
    suggestion = (
        "run: accelerate launch --multi_gpu --num_processes 2 s.py …, on a machine without a GPU with --use_cpu"
    )
    with pytest.raises(MemOptError, match=re.escape(suggestion)):
        launch.check_world(1, ONE_PROCESS_ONLY)
    # A process started by a script that was launched this way is not refused.
    launch.check_world(1, {})
    launch.check_world(2, ONE_PROCESS_ONLY)


@pytest.mark.parametrize("announced", ["1", "", "none", "-2", "²"])
def test_a_world_of_one_may_be_announced(announced):
    launch.check_world(1, {"WORLD_SIZE": announced, "LOCAL_RANK": "0"})


def test_an_announced_world_must_come_true():
    launch.check_world(2, {"WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(MemOptError, match="one of 2 .* add --use_cpu true to the script's arguments"):
        launch.check_world(1, {"WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(MemOptError, match="set RANK and LOCAL_RANK too, as torchrun does"):
        launch.check_world(1, {"WORLD_SIZE": "2"})


def test_this_process_has_a_parent_that_can_be_asked():
    assert launch._parent_command()
    launch.check_world(1)


OPTIONS = MemOptOptions(memory_opt_config="Gelu+:1:-1")
OWN = facts("ort", OPTIONS)


def difference(other):
    assert other != OWN
    return describe_difference([OWN, OWN, other])


def test_where_things_lie_and_what_is_shown_is_no_difference(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "here")
    file = tmp_path / "plans.json"
    file.write_text('["Gelu+:1:-1"]')
    options = MemOptOptions(memory_opt_config=str(file), memory_opt_log_level="devinfo", ort_cache_dir="here")
    assert facts("ort", options) == OWN


def test_each_difference_is_named_with_its_rank(monkeypatch):
    start = "rank 2 trains with a different setup than rank 0: "
    assert difference(facts("ort", replace(OPTIONS, memory_opt_config="Gelu+:0:-1"))) == (
        start + "--memory_opt_config: Gelu+:1:-1 on rank 0, Gelu+:0:-1 on rank 2"
    )
    assert difference({**OWN, "version of torch": "2.4"}).startswith(start + "version of torch: ")
    monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_BUILD_GRADIENT")
    assert difference(facts("ort", OPTIONS)) == (
        start + "ORTMODULE_SKIPCHECK_POLICY in the environment: nothing on rank 0, SKIP_CHECK_BUILD_GRADIENT on rank 2"
    )


def test_plan_files_are_compared_by_what_they_do(tmp_path):
    plan = PlanFile("by hand", "plain", {}, ())
    options = []
    for name, one in (("a", plan), ("b", replace(plan, why="another text")), ("c", replace(plan, loss="chunked"))):
        one.save(tmp_path / name)
        options.append(MemOptOptions(memory_opt_engine="compile", memory_opt_plan=str(tmp_path / name)))
    first, same, other = (facts("compile", one) for one in options)
    assert first == same
    assert [name for name in first if first[name] != other[name]] == ["--memory_opt_plan"]


def test_many_differences_are_counted():
    assert difference({}).endswith(f"(and {len(OWN) - 3} more)")


def test_a_rank_that_failed_is_named_before_one_that_differs():
    other = {**OWN, "version of torch": "2.4"}
    message = describe_difference([OWN, other, failure(MemOptError("no plan\n  here"), "in its first training step")])
    assert message == "rank 2 failed in its first training step, so all ranks stop: MemOptError: no plan here"


@pytest.mark.parametrize("distributions", [("optimum-memopt",), ("torch",), ("transformers",), DISTRIBUTIONS])
def test_versions_are_among_the_facts(distributions):
    found = installed_version(distributions)
    if found is None:
        pytest.skip(f"none of {', '.join(distributions)} is installed")
    assert OWN[f"version of {found[0]}"] == found[1]


def test_fsdp_that_accelerate_leaves_out_is_named(trainer_of, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with log_lines() as lines:
        attach(trainer_of([]), memory_opt_engine="compile", memory_opt_level=1)
    assert [line for line in lines if line.startswith("NOT sharded: FSDP is requested")]


def test_nothing_is_said_where_nobody_asks_for_fsdp(trainer_of):
    with log_lines() as lines:
        attach(trainer_of([]), memory_opt_engine="compile", memory_opt_level=1)
    assert not [line for line in lines if "FSDP" in line]
