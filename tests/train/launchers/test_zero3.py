"""DeepSpeed's ZeRO 3 with layers as the compilation unit, on two ranks: weights are bitwise those without the package.

The stock run has the same leaf modules, since gradients of a leaf are reduced together. `make test` runs the first
launch, and the second one in turn.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rotation import in_turn, nightly
from tests.train.launchers.launching import launcher, needs_deepspeed, run_jobs
from tests.train.launchers.sharded_jobs import DEPTH, LAYERS, SAVED, SEGMENTS, compared, differing
from tests.train.launchers.worker import Job
from tests.trainer_runs import CLOSE, distance


def zero_3(leaf: str = "", bf16: bool = False, **zero: Any) -> dict[str, Any]:
    """Returns a DeepSpeed config.

    Args:
        leaf: class name of the leaf modules; empty for none.
        bf16: whether bf16 is enabled.
        zero: further fields of `zero_optimization`.
    """
    auto = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
    leafs = {"leaf_module": {"classes": [leaf]}} if leaf else {}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": bf16},
        # Otherwise no parameter of so small a model would be sharded.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **auto, **leafs, **zero},
    }


def jobs(
    name: str,
    folder: Path,
    model: str = "llama",
    plan: dict[str, Any] | None = None,
    bf16: bool = False,
    arguments: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **fields: Any,
) -> Iterator[Job]:
    shared, zero = {"bf16": bf16, **(arguments or {})}, zero or {}
    stock = {"deepspeed": zero_3(LAYERS[model], bf16, **zero), **shared}
    ours = {"deepspeed": zero_3("", bf16, **zero), **(plan or {"memory_opt_level": 1}), **shared}
    return compared(name, folder, stock, ours, model=model, **fields)


# As in a model with more parameters than DeepSpeed keeps gathered: each layer is gathered again for its backward.
RELEASED = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 4000}
# Matrices are sharded, and smaller parameters are kept on all ranks.
PERSISTENT = {"stage3_param_persistence_threshold": 100}
CASES: dict[str, dict[str, Any]] = {
    "level": {"zero": RELEASED},
    "resumed": {"zero": RELEASED, "arguments": SAVED},
    "config": {"model": "roberta-classification", "plan": {"memory_opt_config": "Gelu+:1:2"}, "zero": PERSISTENT},
    "gathered": {},
    "lora": {"adapters": ["q_proj", "down_proj"]},
    "bf16": {"bf16": True},
    "accumulation": {"arguments": {"gradient_accumulation_steps": 2}},
    "init": {"sharded_from_start": True},
    "all": {
        "adapters": ["q_proj", "down_proj"],
        "bf16": True,
        "sharded_from_start": True,
        "zero": RELEASED | PERSISTENT,
        "arguments": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **SAVED},
    },
    "experts": {"model": "mixtral", "plan": {"memory_opt_level": 1}},
    # transformers registers hooks on the layers.
    "router": {"model": "mixtral", "config": {"num_hidden_layers": DEPTH, "output_router_logits": True}},
    "no_plan": {"plan": {"memory_opt_level": 0}, "zero": RELEASED},
    "budget": {"plan": {"memory_opt_budget": "90%"}, "zero": RELEASED},
    "segments": {**SEGMENTS, "zero": RELEASED},
    "segments_lora": {**SEGMENTS, "zero": RELEASED, "adapters": ["q_proj", "down_proj"]},
}
LAUNCHES = (
    "level",
    "resumed",
    "budget",
    "config lora bf16",
    "accumulation init all",
    "experts router no_plan gathered",
    "segments segments_lora",
)
# A layer with several graphs sums gradients in a different order.
ROUNDS = ("router",)


@needs_deepspeed
@pytest.mark.parametrize("names", [*LAUNCHES[:1], pytest.param(LAUNCHES[1], marks=in_turn), *nightly(LAUNCHES[2:])])
def test_weights_are_those_of_zero_3(tmp_path: Path, names: str) -> None:
    compare("torchrun", tmp_path, names)


@pytest.mark.nightly
@needs_deepspeed
@pytest.mark.parametrize("launched_by", ["accelerate", "deepspeed"])
def test_by_another_launcher(tmp_path: Path, launched_by: str) -> None:
    compare(launched_by, tmp_path, "resumed config lora")


def compare(launched_by: str, tmp_path: Path, names: str) -> None:
    wanted = [job for name in names.split() for job in jobs(name, tmp_path, **CASES[name])]
    done = run_jobs(launcher(launched_by), tmp_path, wanted, WITHOUT_SHARED_MEMORY="1")
    for job in wanted:
        name, ranks = job.name.partition("-")[0], done.trained(job.name)
        assert {rank["world_size"] for rank in ranks} == {2}
        assert len({rank["digest"] for rank in ranks}) == 1, "the ranks' parameters have gone apart"
        weights, plain = done.weights(job.name), done.weights(f"{name}-plain")
        if name in ROUNDS:
            assert distance(weights, plain) < CLOSE
            continue
        assert differing(weights, plain) == []
        for rank in ranks if job.engine == "compile" else ():
            lines, header = rank["lines"], rank["table"]["header"]
            counts = {plan["applied_count"] for plan in rank["table"]["plans"]}
            is_cut = name.startswith("segments")
            depth = SEGMENTS["config"]["num_hidden_layers"] if is_cut else DEPTH
            assert f" for {depth} layers, equal layers share one" in header[0]
            assert ("recomputed twice (segments)" in header[0]) == is_cut
            assert "ZeRO 3 on 2 ranks" in header[0] and "not exact" not in header[1]
            assert "without the parameters" not in header[1]
            assert not [
                line for line in lines if "graph break" in line or "NOT under" in line or "one graph for" in line
            ]
            assert any("the elements of a layer" in line for line in lines)
            wanted_counts = {"config": {0, 2}, "no_plan": {0}}
            if name in wanted_counts:
                assert counts == wanted_counts[name]
            elif name != "budget" and not is_cut:
                assert counts and not any(count % DEPTH for count in counts)


@needs_deepspeed
@pytest.mark.nightly
def test_budgets_that_are_refused_end_all_ranks(tmp_path: Path) -> None:
    elsewhere = ("offload_param", "offload_optimizer")
    wanted = {"small": {"deepspeed": zero_3(), "memory_opt_budget": "1%"}} | {
        name: {"deepspeed": zero_3(**{name: {"device": "cpu"}}), "memory_opt_budget": "90%"} for name in elsewhere
    }
    refused = [
        Job(name, "compile", model="llama", config={"num_hidden_layers": DEPTH}, arguments=arguments)
        for name, arguments in wanted.items()
    ]
    done = run_jobs(launcher("torchrun"), tmp_path, refused, WITHOUT_SHARED_MEMORY="1")
    assert all("budget 1%" in rank["error"] for rank in done.ranks("small")), done.ranks("small")
    for name in elsewhere:
        why = f"cannot be predicted, since {name} changes what the device holds"
        assert all(why in rank["error"] for rank in done.ranks(name)), done.ranks(name)
