"""Several processes through each launcher: wrong launches are refused, ranks train as one process and agree on the
plan, and each message is printed once."""

import json
import re
from itertools import pairwise

import pytest
import torch

from optimum_memopt.callbacks.reporting import is_printed
from optimum_memopt.memory.capacity import capacity
from tests.rotation import nightly
from tests.train.launchers import launching
from tests.train.launchers.worker import Job
from tests.trainer_runs import distance

STEPS = 10
# Two ranks take the same rows in the same order as one process with batches of twice the size. The model divides its
# loss by the number of tokens in all ranks' batches, or is the default of `Job`, whose loss is a mean over rows:
# Trainer scales the loss of RoBERTa and BERT as if they did the former (transformers 5.23), so with them even a stock
# Trainer trains differently on two ranks.
MODEL = "gpt2"
TWO = {"per_device_train_batch_size": 4, "max_steps": STEPS, "memory_opt_level": 1}
ONE = {"per_device_train_batch_size": 8, "max_steps": STEPS}
ROWS = 8 * STEPS
HALF = STEPS // 2
SAVING = {"save_strategy": "steps", "save_steps": HALF}
OBSERVED = {"log_input_density": True, "log_memory_phases": True}
ACCUMULATING = {"max_steps": HALF, "gradient_accumulation_steps": 2}
BUDGET = {"per_device_train_batch_size": 4, "max_steps": 2, "memory_opt_engine": "compile", "memory_opt_budget": "90%"}
COMPILE = {**TWO, "memory_opt_engine": "compile"}
# Without the chunked loss, results are bitwise equal under any plan.
REPLAN = {"per_device_train_batch_size": 4, "max_steps": 3, "memory_opt_engine": "compile"}
REPLAN |= {"memory_opt_loss": "plain", "memory_opt_on_oom": "replan"}


OWN = {"memory_opt_config": "Gelu+:1:-1"}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Run the jobs under `accelerate launch` with two processes."""
    folder = tmp_path_factory.mktemp("two")
    jobs = [
        Job("steps", model=MODEL, rows=ROWS, arguments={**TWO, **SAVING, **OBSERVED}),
        Job("accumulation", rows=ROWS, arguments={**TWO, **ACCUMULATING}, count_reductions=True),
        Job("compile-steps", model=MODEL, rows=ROWS, arguments=COMPILE),
        Job("compile-accumulation", rows=ROWS, arguments={**COMPILE, **ACCUMULATING}, count_reductions=True),
        Job("other-variable", arguments=OWN, environment={"1": {"ORTMODULE_PRINT_INPUT_DENSITY": "1"}}),
        Job("other-plan", arguments=OWN, rank_arguments={"1": {"memory_opt_config": "Gelu+:0:-1"}}),
        Job("fails-at-once", arguments=OWN, rank_arguments={"0": {"memory_opt_log_file": str(folder)}}),
        # The host's memory is divided by the number of processes, which leaves nothing.
        Job("fails-in-a-step", arguments=BUDGET, environment={"1": {"LOCAL_WORLD_SIZE": "99999999"}}),
        Job("fallback", rank_arguments={"0": {"ort_fallback": False}, "1": {"ort_fallback": True}}),
        Job("after-all-this", arguments=OWN),
    ]
    return launching.run_jobs(launching.launcher("accelerate"), folder, jobs)


@pytest.fixture(scope="module")
def two_ranks_that_plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    # Each rank has its own cache, as on two machines.
    caches = {rank: {"OPTIMUM_MEMOPT_CACHE": str(folder / f"cache-{rank}")} for rank in "01"}
    jobs = [
        Job("compile-budget", rows=ROWS, arguments=BUDGET, environment=caches),
        Job("batch-auto", rows=ROWS, arguments={**BUDGET, **ACCUMULATING, "memory_opt_batch": "auto"}),
        Job("replan-enough", "compile", rows=ROWS, arguments=REPLAN, runs_out={}),
        Job("replan", "compile", rows=ROWS, arguments=REPLAN, runs_out={"1": [1, 3]}),
    ]
    return launching.run_jobs(launching.launcher("accelerate"), folder, jobs)


@pytest.fixture(scope="module")
def one_rank(two_ranks, tmp_path_factory):
    """Train a stock Trainer on the same rows in one process, and resume from the two ranks' checkpoint."""
    jobs = [
        Job("steps", "plain", model=MODEL, rows=ROWS, arguments={**ONE, **SAVING}),
        Job("accumulation", "plain", rows=ROWS, arguments={**ONE, **ACCUMULATING}),
        Job("resumed", model=MODEL, rows=ROWS, arguments=ONE, resume=checkpoint(two_ranks)),
    ]
    return launching.run_jobs_alone(tmp_path_factory.mktemp("one"), jobs)


def checkpoint(done):
    return str(done.folder / "steps-output" / f"checkpoint-{HALF}")


each_engine = pytest.mark.parametrize("prefix", ["", "compile-"], ids=["ort", "compile"])


@each_engine
def test_two_ranks_train_as_one_process_does(two_ranks, one_rank, prefix):
    ranks = two_ranks.trained(f"{prefix}steps")
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert [rank["steps"] for rank in ranks] == [STEPS, STEPS]
    assert ranks[0]["digest"] == ranks[1]["digest"], "parameters are not bitwise equal"
    assert distance(two_ranks.weights(f"{prefix}steps"), one_rank.weights("steps")) < 1e-5


@each_engine
def test_accumulation_averages_gradients_once_a_step(two_ranks, one_rank, prefix):
    for rank in two_ranks.trained(f"{prefix}accumulation"):
        counts = [0, *rank["reductions"]]
        added = [after - before for before, after in pairwise(counts)]
        assert len(added) == 2 * HALF
        assert set(added[0::2]) == {0} and min(added[1::2]) > 0
    assert distance(two_ranks.weights(f"{prefix}accumulation"), one_rank.weights("accumulation")) < 1e-5


@each_engine
def test_ranks_have_the_same_plans_on(two_ranks, prefix):
    tables = [rank["table"]["plans"] for rank in two_ranks.trained(f"{prefix}steps")]
    named = [{plan["config"]: (plan["frequency"], plan["applied_count"]) for plan in table} for table in tables]
    assert named[0] == named[1]
    assert any(applied for _, applied in named[0].values())
    assert not prefix or named[0]["Loss+:1:-1"] == (1, 1)


@pytest.mark.nightly
def test_two_ranks_under_a_budget_agree(two_ranks_that_plan):
    """Two ranks resolve a budget of `90%` to that share of each rank's part of the host."""
    ranks = two_ranks_that_plan.trained("compile-budget")
    assert ranks[0]["digest"] == ranks[1]["digest"]
    budgets = [re.search(r"budget ([\d.]+) GiB", rank["table"]["header"][0])[1] for rank in ranks]
    assert budgets[0] == budgets[1]
    share = 0.9 * capacity(torch.device("cpu")).total / 2**30 / 2
    assert float(budgets[0]) == pytest.approx(share, rel=0.01)


@pytest.mark.nightly
def test_one_rank_measures_for_all(two_ranks_that_plan):
    measured = list(two_ranks_that_plan.folder.glob("cache-*/optimum_memopt/operators*.json"))
    assert len(measured) == 1 and json.loads(measured[0].read_text())


@pytest.mark.nightly
def test_two_ranks_take_the_same_micro_batch(two_ranks_that_plan, one_rank):
    """Both ranks choose the same micro-batch; with different ones a rank would wait for gradients forever."""
    ranks = two_ranks_that_plan.trained("batch-auto")
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert [rank["steps"] for rank in ranks] == [HALF, HALF]
    assert two_ranks_that_plan.output.count("per optimizer step of 8 rows a rank") == 1
    assert distance(two_ranks_that_plan.weights("batch-auto"), one_rank.weights("accumulation")) < 1e-5


@pytest.mark.nightly
def test_a_rank_that_runs_out_in_the_forward_has_all_run_the_step_again(two_ranks_that_plan):
    ranks, enough = (two_ranks_that_plan.trained(name) for name in ("replan", "replan-enough"))
    assert ranks[0]["digest"] == ranks[1]["digest"] == enough[0]["digest"]
    said = [[line for line in rank["lines"] if "rerunning it" in line] for rank in ranks]
    assert not said[0] and [line[:6] for line in said[1]] == ["step 1", "step 2"]


def test_ddp_leaves_the_compiled_forward_in_one_graph(two_ranks):
    """The compiled forward stays one graph; torch's DDPOptimizer would split it at each gradient bucket."""
    for rank in two_ranks.trained("compile-steps"):
        assert not any("graphs" in line for line in rank["lines"])


def test_everything_is_said_once(two_ranks):
    trained = ("steps", "accumulation", "after-all-this")
    tables = [line for line in two_ranks.output.splitlines() if line.startswith("[memopt] Memory plans of the ort ")]
    assert len(tables) == len(trained)
    shown = [str(step) for step in range(STEPS) if is_printed(step, 0)]
    assert re.findall(r"^step (\d+) \(MiB", two_ranks.output, re.MULTILINE) == shown
    assert re.findall(r"^\| (\d+) +\| LABEL ", two_ranks.output, re.MULTILINE) == shown


DIFFERENCES = {
    "other-variable": (
        "rank 1 trains with a different setup than rank 0: ORTMODULE_PRINT_INPUT_DENSITY in the environment: nothing "
        "on rank 0, 1 on rank 1"
    ),
    "other-plan": (
        "rank 1 trains with a different setup than rank 0: --memory_opt_config: Gelu+:1:-1 on rank 0, Gelu+:0:-1 on "
        "rank 1"
    ),
    "fallback": "rank 1 trains with a different setup than rank 0: --ort_fallback: False on rank 0, True on rank 1",
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_between_ranks_stops_all_of_them(two_ranks, name):
    ranks = two_ranks.ranks(name)
    assert [rank["error"] for rank in ranks] == [DIFFERENCES[name]] * 2
    assert [rank["steps"] for rank in ranks] == [0, 0]


def test_a_rank_that_fails_stops_all_of_them(two_ranks):
    first, second = two_ranks.ranks("fails-at-once")
    assert first["error"].startswith("the log file")
    assert second["error"].startswith(
        "rank 0 failed before its training, so all ranks stop: MemOptError: the log file"
    )
    first, second = two_ranks.ranks("fails-in-a-step")
    assert second["error"].startswith("--memory_opt_budget 90%: ")
    assert first["error"].startswith("rank 1 failed in its first training step, so all ranks stop: DoesNotFitError: ")
    assert [rank["steps"] for rank in (first, second)] == [0, 0]
    assert len(two_ranks.trained("after-all-this")) == 2


# Checkpoints.


def test_one_process_resumes_from_two_ranks(two_ranks, one_rank):
    assert one_rank.trained("resumed")[0]["steps"] == STEPS
    assert distance(one_rank.weights("resumed"), two_ranks.weights("steps")) < 1e-5


@pytest.mark.nightly
def test_two_ranks_resume_from_two_and_from_one(two_ranks, one_rank, tmp_path):
    jobs = [
        Job("from-two", model=MODEL, rows=ROWS, arguments=TWO, resume=checkpoint(two_ranks)),
        Job("from-one", model=MODEL, rows=ROWS, arguments=TWO, resume=checkpoint(one_rank)),
    ]
    done = launching.run_jobs(launching.launcher("torchrun"), tmp_path, jobs)
    for name in ("from-two", "from-one"):
        ranks = done.trained(name)
        assert [rank["steps"] for rank in ranks] == [STEPS, STEPS] and ranks[0]["digest"] == ranks[1]["digest"]
        assert distance(done.weights(name), two_ranks.weights("steps")) < 1e-5


# Launches whose processes would each train alone.

ACCELERATE = [launching.PROGRAMS / "accelerate", "launch"]
ADD_USE_CPU = "but each of them would train on its own: on a machine without a GPU add --use_cpu true"
WRITE_MULTI_GPU = "run: accelerate launch --multi_gpu --num_processes 2 "
CONFIG = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"


def trap(command, folder, **arguments):
    """Run a job, and return the processes' errors; a launcher may end the others after the first error."""
    done = launching.run_jobs(command, folder, [Job("job", rows=4, arguments={"max_steps": 1, **arguments})])
    return [line for line in done.output.splitlines() if line.startswith("error: ")], done


@pytest.mark.parametrize("flags", nightly(["--cpu --num_processes 2", "--num_processes 2", "--config_file FILE"]))
def test_accelerate_that_starts_one_process_is_refused(tmp_path, flags):
    (tmp_path / "config.yaml").write_text(CONFIG)
    errors, done = trap([*ACCELERATE, *flags.replace("FILE", str(tmp_path / "config.yaml")).split()], tmp_path)
    assert len(errors) == 1 and WRITE_MULTI_GPU in errors[0]
    assert done.ranks("job")[0]["steps"] == 0


@pytest.mark.nightly
def test_one_process_of_accelerate_trains(tmp_path):
    errors, done = trap([*ACCELERATE, "--cpu", "--num_processes", "1"], tmp_path)
    assert not errors and done.trained("job")[0]["world_size"] == 1


@pytest.mark.parametrize("name", nightly(["torchrun", "accelerate"]))
def test_ranks_without_use_cpu_are_refused(tmp_path, name):
    errors, _ = trap(launching.launcher(name), tmp_path, use_cpu=False)
    assert errors and all(ADD_USE_CPU in error for error in errors)


@launching.needs_deepspeed
@launching.needs_compiler
@pytest.mark.parametrize("name, stage", nightly([("deepspeed", None), ("deepspeed", 1), ("torchrun", 1)]))
def test_deepspeed_without_use_cpu_is_refused(tmp_path, name, stage):
    config = {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}}}
    errors, _ = trap(launching.launcher(name), tmp_path, use_cpu=False, **(config if stage else {}))
    assert errors and all(ADD_USE_CPU in error for error in errors)
