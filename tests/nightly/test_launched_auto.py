"""Two ranks under `auto` with a model that ONNX Runtime cannot train: both end on the compile engine, in step."""

from tests.train.launchers.launching import launcher, run_jobs
from tests.train.launchers.worker import Job
from tests.trainer_runs import distance

ARGUMENTS = {"max_steps": 2, "per_device_train_batch_size": 4, "memory_opt_level": 1}


def test_all_ranks_go_on_with_compile(tmp_path):
    jobs = [
        Job("auto", "auto", model="modernbert-mlm", arguments=ARGUMENTS),
        Job("compile", "compile", model="modernbert-mlm", arguments=ARGUMENTS),
    ]
    done = run_jobs(launcher("accelerate"), tmp_path, jobs)
    first, second = done.trained("auto")
    assert first["world_size"] == 2 and first["steps"] == second["steps"] == 2
    assert first["table"]["engine"] == second["table"]["engine"] == "compile"
    assert first["digest"] == second["digest"]
    assert distance(done.weights("auto"), done.weights("compile")) == 0
    assert sum("training with the compile engine" in line for line in first["lines"]) == 1
