"""Two ranks train on batches of different kinds, whichever comes first, and end with the weights of stock ranks; ranks
with different options end before the first forward.

`make test` runs only the first launch.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.rotation import in_turn, nightly
from tests.train.launchers.launching import (
    Done,
    launcher,
    needs_compiler,
    needs_deepspeed,
    run_jobs,
    run_jobs_on_two_ranks,
)
from tests.train.launchers.sharded_jobs import DEPTH, SEGMENTS
from tests.train.launchers.test_fsdp import fsdp
from tests.train.launchers.test_zero3 import RELEASED, zero_3
from tests.train.launchers.worker import Job
from tests.trainer_runs import CLOSE, distance

LATE = {"0": ["whole"], "1": ["whole", "whole", "padded", "whole"]}
# The kinds of each rank's batches, in order; see `Batches`. All but LATE begin with a different kind on each rank.
BATCHES = {
    "padding": {"0": ["whole", "padded", "whole"], "1": ["padded", "whole"]},
    # With data of unknown lengths; "segments" has a budget that needs segments of layers.
    "late": LATE,
    "segments": LATE,
    "window": {"0": ["whole", "long", "whole"], "1": ["long", "whole"]},
    "labels": {"0": ["whole", "unlabelled", "whole"], "1": ["unlabelled", "whole"]},
    "masks": {"0": ["maskless", "whole", "padded"], "1": ["padded", "maskless", "whole"]},
}
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "level": {"memory_opt_level": 1},
    "config": {"memory_opt_config": "QuickGelu+:1:2"},
    "budget": {"memory_opt_budget": "90%"},
}
# Each rank's rows are shorter than the window, except in "long" batches.
WINDOW = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0}
ZERO_2 = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}


def sharding(shared_by: str, layer: str, is_stock: bool) -> dict[str, Any]:
    """Returns a Trainer's arguments; a stock one under ZeRO 3 gets the layers as leaf modules."""
    if shared_by == "fsdp2":
        return fsdp("llama", transformer_layer_cls_to_wrap=layer)
    configs = {"zero_2": ZERO_2, "zero_3": zero_3(layer if is_stock else "", **RELEASED)}
    return {"deepspeed": configs[shared_by]} if shared_by in configs else {}


def job(shared_by: str, batches: str, plan: str) -> Job:
    """Returns the job of a training; `plan` may be `stock`."""
    is_stock, is_cut, has_window = plan == "stock", batches == "segments", batches == "window"
    model, layer = ("qwen2", "Qwen2DecoderLayer") if has_window else ("llama", "LlamaDecoderLayer")
    ours = {} if is_stock else {"memory_opt_loss": "plain", **PLANS[plan]}
    config = {"num_hidden_layers": DEPTH, "use_cache": False, "attention": "sdpa"}
    return Job(
        f"{shared_by}-{batches}-{plan}",
        "plain" if is_stock else "compile",
        model,
        rows=SEGMENTS["rows"],
        arguments={**sharding(shared_by, layer, is_stock), **(SEGMENTS["arguments"] if is_cut else {}), **ours},
        batches=BATCHES[batches],
        unread=batches in ("late", "segments"),
        config={**config, **(WINDOW if has_window else {}), **(SEGMENTS["config"] if is_cut else {})},
        segments=is_cut and not is_stock,
    )


# Different options on rank 1, and the difference in the error.
OTHER_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "budget": (
        {"memory_opt_level": 0, "memory_opt_budget": "90%"},
        "--memory_opt_budget: None on rank 0, 90% on rank 1; --memory_opt_level: 1 on rank 0, 0 on rank 1",
    ),
    "unit": ({"memory_opt_unit": "model"}, "--memory_opt_unit: auto on rank 0, model on rank 1"),
}


def other_options(name: str) -> Job:
    own, _ = OTHER_OPTIONS[name]
    changes = {"memory_opt_level": 1, **fsdp("llama")}
    config = {"num_hidden_layers": DEPTH}
    return Job(f"other-{name}", "compile", "llama", arguments=changes, rank_arguments={"1": own}, config=config)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Run jobs that train, and jobs that are refused."""
    cells = ("ddp-padding-stock", "ddp-padding-level")
    jobs = [*map(other_options, OTHER_OPTIONS), *(job(*cell.split("-")) for cell in cells)]
    return run_jobs_on_two_ranks(tmp_path_factory.mktemp("launched"), jobs)


def check(done: Done, *cells: str) -> None:
    for cell in cells:
        ranks = done.trained(cell)
        assert [rank["steps"] for rank in ranks] == [5, 5]
        assert len({rank["digest"] for rank in ranks}) == 1
        stock = done.weights(f"{cell.rpartition('-')[0]}-stock")
        assert distance(done.weights(cell), stock) < CLOSE
        for rank in ranks:
            header = rank["table"]["header"][0]
            assert ("recomputed twice (segments)" in header) == cell.startswith("fsdp2-segments")
            assert rank["table"]["plans"] and not [line for line in rank["lines"] if "NOT " in line]
            # Ranks exchange objects only before and in the first forward.
            assert len(set(rank["exchanges"])) == 1


@in_turn
def test_padding_on_one_rank(launched: Done) -> None:
    check(launched, "ddp-padding-level")
    first, second = launched.trained("ddp-padding-level")
    assert first["table"]["plans"] != second["table"]["plans"]


@pytest.mark.nightly
def test_padding_on_one_rank_without_a_plan(tmp_path: Path) -> None:
    jobs = [job("ddp", "padding", plan) for plan in ("stock", "none")]
    check(run_jobs(launcher("torchrun"), tmp_path, jobs), "ddp-padding-none")


@pytest.mark.nightly
def test_later_padding_on_one_rank_of_those_that_gather_parameters(tmp_path: Path) -> None:
    """The rank with later padding compiles another graph, the other rank does not."""
    done = run_jobs(launcher("torchrun"), tmp_path, [job("fsdp2", "late", plan) for plan in ("stock", "level")])
    check(done, "fsdp2-late-level")
    said = [
        "compiling another training graph: the first batch with padding" in rank["lines"]
        for rank in done.trained("fsdp2-late-level")
    ]
    assert said == [False, True]


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_other_options_on_one_rank(launched: Done, name: str) -> None:
    line = f"rank 1 trains with a different setup than rank 0: {OTHER_OPTIONS[name][1]}"
    assert [(rank["error"], rank["steps"]) for rank in launched.ranks(f"other-{name}")] == [(line, 0)] * 2


MATRIX = (
    *(("torchrun", "ddp", batches, "level budget") for batches in ("window", "labels", "masks")),
    ("torchrun", "ddp", "padding", "config budget"),
    ("accelerate", "ddp", "padding", "none level budget"),
    *(("torchrun", "fsdp2", batches, "level budget") for batches in BATCHES if batches != "segments"),
    ("torchrun", "fsdp2", "segments", "budget"),
    ("accelerate", "fsdp2", "padding", "none level config"),
)
DEEPSPEED = (
    ("deepspeed", "zero_2", "padding", "none level budget"),
    *(("torchrun", "zero_3", batches, "level budget") for batches in BATCHES if batches != "segments"),
    ("deepspeed", "zero_3", "padding", "none level"),
)


@pytest.mark.parametrize("launched_by, shared_by, batches, plans", nightly(MATRIX))
def test_batches_of_other_kinds(tmp_path: Path, launched_by: str, shared_by: str, batches: str, plans: str) -> None:
    cells = [job(shared_by, batches, plan) for plan in ("stock", *plans.split())]
    done = run_jobs(launcher(launched_by), tmp_path, cells, WITHOUT_SHARED_MEMORY="1")
    check(done, *(each.name for each in cells[1:]))


@needs_deepspeed
@needs_compiler
@pytest.mark.parametrize("launched_by, shared_by, batches, plans", nightly(DEEPSPEED))
def test_under_deepspeed(tmp_path: Path, launched_by: str, shared_by: str, batches: str, plans: str) -> None:
    test_batches_of_other_kinds(tmp_path, launched_by, shared_by, batches, plans)
