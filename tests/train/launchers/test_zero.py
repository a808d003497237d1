"""Every launcher with every ZeRO stage and optimizer: a Trainer with an engine ends with a stock one's weights.

One launch trains with each engine and without, for two optimizers (the compile engine only for the first one, since
its graphs do not depend on the optimizer). `make test` runs the launch of `QUICK` in turn, with the two optimizers
that need no build, and without inductor, which compiles for a minute. `test_launchers.py` tests DDP under accelerate
and torchrun.
"""

import itertools

import pytest

from optimum_memopt.engines.compile.loss.decide import ROW
from tests.rotation import in_turn
from tests.train.launchers.launching import alone, launcher, needs_compiler, needs_deepspeed, run_jobs
from tests.train.launchers.worker import Job
from tests.trainer_runs import distance

LAUNCHERS = ("python", "accelerate", "torchrun", "deepspeed")
STAGES = (None, 0, 1, 2, 3)
OF_TORCH = ("adamw_torch", "torch_fused_adamw")
OF_DEEPSPEED = ("deepspeed_fused_adam", "deepspeed_cpu_adam")
QUICK = {("deepspeed", 2, OF_TORCH)}
# Stages at which a language model with tied weights is also trained with a chunked loss.
CHUNKED = (0, 1, 2)
CLASSES = {"deepspeed_fused_adam": "FusedAdam", "deepspeed_cpu_adam": "DeepSpeedCPUAdam"}


def cells() -> list:
    found = []
    for cell in itertools.product(LAUNCHERS, STAGES, (OF_TORCH, OF_DEEPSPEED)):
        name, stage, optimizers = cell
        slow = pytest.mark.extensions if optimizers is OF_DEEPSPEED else pytest.mark.nightly
        marks = [in_turn] if cell in QUICK else [slow]
        if stage is not None or name == "deepspeed" or optimizers is OF_DEEPSPEED:
            marks += [needs_deepspeed, needs_compiler]
        kind = "torch" if optimizers is OF_TORCH else "deepspeed"
        found.append(pytest.param(*cell, id=f"{name}-zero_{stage}-{kind}".lower(), marks=marks))
    return found


def jobs(name, stage, optimizers):
    # accelerate's launcher has its own DeepSpeed config; the others use the Trainer's argument.
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
    }
    shared = {} if stage is None or name == "accelerate" else {"deepspeed": config}
    plan = {"memory_opt_config": "Gelu+:1:-1"}
    inductor = {"memory_opt_compiler": "inductor"} if (name, stage, optimizers) not in QUICK else {}
    for optimizer in optimizers:
        yield Job(f"plain-{optimizer}", "plain", optimizer=optimizer, arguments=shared)
        for engine in engines(optimizer):
            compiler = inductor if engine == "compile" else {}
            yield Job(f"{engine}-{optimizer}", engine, optimizer=optimizer, arguments={**shared, **plan, **compiler})
    if optimizers is OF_TORCH and stage in CHUNKED:
        yield Job("plain-lm", "plain", model="gpt2", arguments=shared)
        yield Job("chunked-lm", "compile", model="gpt2", arguments={**shared, "memory_opt_loss": "chunked"})


def engines(optimizer):
    return ("ort", "compile") if optimizer == "adamw_torch" else ("ort",)


@pytest.mark.parametrize("name, stage, optimizers", cells())
@pytest.mark.timeout(1200)
def test_ends_where_a_stock_trainer_does(tmp_path, name, stage, optimizers):
    # DeepSpeed reads its world size from the environment.
    environment = alone() if name == "python" and stage is not None else {}
    if (name, stage, optimizers) in QUICK:
        environment["WITHOUT_SHARED_MEMORY"] = "1"
    world = 1 if name == "python" else 2
    done = run_jobs(launcher(name, zero=stage), tmp_path, list(jobs(name, stage, optimizers)), **environment)
    for optimizer in optimizers:
        stock = done.trained(f"plain-{optimizer}")
        assert len(stock) == world
        assert all(rank["world_size"] == world and rank["steps"] == 5 for rank in stock)
        assert {rank["optimizer"] for rank in stock} == {CLASSES.get(optimizer, "AdamW")}
        for engine in engines(optimizer):
            job = f"{engine}-{optimizer}"
            if stage == 3:
                refusals = [rank["error"] for rank in done.ranks(job)]
                assert len(refusals) == world
                reason = f"ZeRO stage 3 with the {engine} engine"
                assert all(reason in each and "stage 0, 1 or 2" in each for each in refusals)
                continue
            ours = done.trained(job)
            for field in ("world_size", "wrapped", "optimizer", "fused", "steps"):
                assert [rank[field] for rank in ours] == [rank[field] for rank in stock]
            assert len({rank["digest"] for rank in ours}) == 1, "the ranks' parameters have gone apart"
            assert all(
                [plan["applied_count"] for plan in rank["table"]["plans"] if plan["config"] == "Gelu+:1:-1"] == [1]
                for rank in ours
            )
            assert not any("graphs" in line for rank in ours for line in rank["lines"]), "one graph"
            assert distance(done.weights(job), done.weights(f"plain-{optimizer}")) < 1e-5
    if optimizers is OF_TORCH and stage in CHUNKED:
        ranks = done.trained("chunked-lm")
        assert len({rank["digest"] for rank in ranks}) == 1, "the ranks' parameters have gone apart"
        for rank in ranks:
            assert [plan["applied_count"] for plan in rank["table"]["plans"] if plan["config"] == ROW] == [1]
        assert distance(done.weights("chunked-lm"), done.weights("plain-lm")) < 1e-5
