"""FSDP2 with layers as the compilation unit, on two ranks: losses and weights are bitwise those without the package.

`make test` runs only the first launch, without a launcher; for ZeRO 3 it uses torchrun.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.rotation import nightly
from tests.train.launchers.launching import launcher, run_jobs, run_jobs_on_two_ranks, start
from tests.train.launchers.sharded_jobs import DEPTH, LAYERS, SAVED, SEGMENTS, compared, differing
from tests.train.launchers.worker import Job
from tests.trainer_runs import CLOSE, distance


def fsdp(model: str, **config: Any) -> dict[str, Any]:
    """Returns a Trainer's arguments for FSDP2."""
    policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": LAYERS[model]}
    return {"fsdp": True, "fsdp_config": {"version": 2, **policy, **config}}


def jobs(
    name: str,
    folder: Path,
    model: str = "llama",
    plan: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    fsdp_config: dict[str, Any] | None = None,
    **fields: Any,
) -> Iterator[Job]:
    by_trainer = {} if fields.get("distributed") else fsdp(model, **(fsdp_config or {}))
    shared = {**by_trainer, **(arguments or {})}
    # A chunked loss changes the order of sums.
    ours = {"memory_opt_loss": "plain", **(plan or {"memory_opt_level": 1}), **shared}
    return compared(name, folder, shared, ours, model=model, **fields)


ACCUMULATION = {"gradient_accumulation_steps": 2}
TIED = {"num_hidden_layers": DEPTH, "tie_word_embeddings": True}
LORA = {"adapters": ["q_proj", "down_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "level": {"arguments": {**SAVED, **ACCUMULATION}},
    "budget": {"plan": {"memory_opt_budget": "90%"}},
    "lora": LORA,
    "bf16": {"arguments": {"bf16": True, **SAVED}, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "gathered": {"fsdp_config": {"reshard_after_forward": False}, "arguments": ACCUMULATION},
    "config": {"model": "roberta-classification", "plan": {"memory_opt_config": "Gelu+:1:2"}},
    "experts": {"model": "mixtral", "arguments": {"bf16": True}},
    "tied": {"config": TIED, "arguments": {"eval_strategy": "steps", "eval_steps": 2}},
    # accelerate's checkpointing does not support key-value caches.
    "checkpointing": {
        "config": {"num_hidden_layers": DEPTH, "use_cache": False},
        "plan": {"memory_opt_level": 0},
        "fsdp_config": {"activation_checkpointing": True},
    },
    # transformers shards, or replicates, the model while loading it.
    "native": {"distributed": {"fsdp_size": 2}, "arguments": {"bf16": True, **ACCUMULATION}},
    "replicas": {"distributed": {"fsdp_size": 1, "dp_replicate_size": 2}, "plan": {"memory_opt_budget": "90%"}},
    "tied_lora": {**LORA, "config": TIED},
    "all": {**LORA, "arguments": {"bf16": True, **ACCUMULATION, **SAVED}},
    "segments": SEGMENTS,
    "chunked": {"plan": {"memory_opt_loss": "chunked", "memory_opt_level": 1}, "arguments": {"bf16": True}},
}
LAUNCHES = (
    "level",
    "budget",
    "lora bf16 gathered",
    "config experts tied",
    "checkpointing all chunked",
    "native replicas tied_lora",
    "segments",
)
# A chunked loss changes the order of sums.
ROUNDS = ("chunked",)


@pytest.mark.nightly
def test_ranks_end_together_where_nothing_fits(tmp_path: Path) -> None:
    arguments = {**fsdp("llama"), "memory_opt_budget": "1%"}
    job = Job("refused", "compile", model="llama", config={"num_hidden_layers": DEPTH}, arguments=arguments)
    done = run_jobs(launcher("torchrun"), tmp_path, [job])
    assert all("budget 1%" in rank["error"] for rank in done.ranks("refused")), done.ranks("refused")


@pytest.mark.parametrize("names", nightly(LAUNCHES, but=["level"]))
def test_weights_are_those_of_fsdp2(tmp_path: Path, names: str) -> None:
    compare("", tmp_path, names)


@pytest.mark.nightly
@pytest.mark.parametrize("launched_by", ["accelerate", "torchrun"])
def test_by_a_launcher(tmp_path: Path, launched_by: str) -> None:
    compare(launched_by, tmp_path, "level budget config lora")


def compare(launched_by: str, tmp_path: Path, names: str) -> None:
    wanted = [job for name in names.split() for job in jobs(name, tmp_path, **CASES[name])]
    if launched_by:
        done = run_jobs(launcher(launched_by), tmp_path, wanted)
    else:
        done = run_jobs_on_two_ranks(tmp_path, wanted)
    for job in wanted:
        name, ranks = job.name.partition("-")[0], done.trained(job.name)
        assert {rank["world_size"] for rank in ranks} == {2}
        assert len({rank["digest"] for rank in ranks}) == 1
        weights, plain = done.weights(job.name), done.weights(f"{name}-plain")
        if name in ROUNDS:
            assert distance(weights, plain) < 0.05
            assert job.engine == "plain" or "loss in chunks" in ranks[0]["table"]["header"][0]
            continue
        assert differing(weights, plain) == []
        for rank in ranks if job.engine == "compile" else ():
            lines, header = rank["lines"], rank["table"]["header"]
            depth = SEGMENTS["config"]["num_hidden_layers"] if name == "segments" else DEPTH
            assert f" for {depth} layers, equal layers share one" in header[0]
            assert "not exact" not in header[1]
            assert ("level 1" in header[0]) == (name not in ("budget", "config", "replicas", "segments"))
            assert ("recomputed twice (segments)" in header[0]) == (name == "segments")
            assert not [line for line in lines if "graph break" in line or "NOT " in line or "one graph for" in line]


# Both numbers of ranks have the same rows in each step.
ROWS, SAVED_AT = 40, 2
WHOLE, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def resumable(kind: str, ranks: int, resume: Path | None = None) -> Job:
    plan = {"memory_opt_level": 1, "memory_opt_loss": "plain", **SAVED, "per_device_train_batch_size": 8 // ranks}
    arguments = {**fsdp("llama", state_dict_type=kind), **plan}
    name = f"{kind}-{'begun' if resume is None else 'resumed'}"
    whence = None if resume is None else str(resume / f"{kind}-begun-output" / f"checkpoint-{SAVED_AT}")
    config = {"num_hidden_layers": DEPTH}
    return Job(name, "compile", model="llama", rows=ROWS, arguments=arguments, resume=whence, config=config)


@pytest.mark.nightly
def test_another_number_of_ranks_resumes(tmp_path: Path) -> None:
    kinds, begun = (WHOLE, SHARDED), {}
    for ranks in (2, 1):
        jobs = [resumable(kind, ranks) for kind in kinds]
        begun[ranks] = run_jobs(launcher("torchrun", processes=ranks), tmp_path / f"begun-{ranks}", jobs)
    for ranks, before in ((1, begun[2]), (2, begun[1])):
        jobs = [resumable(kind, ranks, before.folder) for kind in kinds]
        done = run_jobs(launcher("torchrun", processes=ranks), tmp_path / f"resumed-{ranks}", jobs)
        for kind in kinds:
            assert [(rank["world_size"], rank["steps"]) for rank in done.trained(f"{kind}-resumed")] == [
                (ranks, 5)
            ] * ranks
            for undisturbed in begun.values():
                weights = undisturbed.weights(f"{kind}-begun")
                assert distance(done.weights(f"{kind}-resumed"), weights) < CLOSE


@pytest.mark.nightly
def test_lightnings_strategy(tmp_path: Path) -> None:
    script = Path(__file__).with_name("lightning_run.py")
    ended: dict[str, dict[str, Any]] = {}
    for way in ("plain", "level 1"):
        done = start([*launcher("torchrun"), script, tmp_path, way])
        assert not done.returncode, done.stderr
        ended[way] = json.loads((tmp_path / f"{way}.json").read_text())
    assert ended["level 1"]["losses"] == ended["plain"]["losses"]
    assert "level 1" in ended["level 1"]["header"] and "FSDP2 on 2 ranks" in ended["level 1"]["header"]
    weights, plain = (load_file(tmp_path / f"{way}.safetensors") for way in ended)
    assert differing(weights, plain) == []
