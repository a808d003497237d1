"""Checks that all ranks train under the same plan with the same software, before the first gradient is averaged.

Ranks that differ do train: DDP and ZeRO average whatever they are given. So a node with another version of an engine,
or with another variable in its environment, would go unnoticed.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from transformers import Trainer, TrainerState

from optimum_memopt.engines.api.options import REPLAN
from optimum_memopt.engines.shared.registry import factory, registrations
from optimum_memopt.errors import MemOptError
from optimum_memopt.installed import installed_version
from optimum_memopt.options import MemOptOptions
from optimum_memopt.plans.table import PlanTable

_SOFTWARE = ("optimum-memopt", "torch", "transformers")
# What may differ from rank to rank: where things lie, and what is shown.
_OWN_OPTIONS = frozenset(
    {
        "memory_opt_log_level",
        "memory_opt_log_steps",
        "memory_opt_log_file",
        "memory_opt_report",
        "log_input_density",
        "log_memory_phases",
    }
)
_FAILURE = "failure"
_ABSENT = "nothing"


def facts(engine: str, options: MemOptOptions, table: PlanTable | None) -> dict[str, str]:
    """What must be the same on all ranks, by name.

    Of the table that is what each row is and whether it is on. Bytes, formulas and the order of the rows come from the
    first batch, which is another one on each rank. So may what a budget turns on, where the length of the run's rows
    is not known or the processes hold different amounts, and a plan after memory ran out on one of the ranks. A plan
    changes no gradient, so ranks may differ in it.
    """
    own = _OWN_OPTIONS.union(*(registration.per_rank for registration in registrations()))
    names = [field.name for field in dataclasses.fields(MemOptOptions) if field.name not in own]
    chosen = {f"--{name}": str(getattr(options, name)) for name in names}
    # As it was read: files of one name may differ on two nodes, and files of two names may say the same.
    chosen["--memory_opt_config"] = str(options.plan_config)
    chosen["--memory_opt_plan"] = options.plan_file.digest if options.plan_file is not None else "None"
    versions = (installed_version((distribution,)) for distribution in _SOFTWARE)
    of_engines = (factory(registration.name).version_facts() for registration in registrations())
    may_differ = options.budget is not None or options.memory_opt_on_oom == REPLAN
    rows = {
        f"plan {plan.config}": f"{plan.frequency} occurrences"
        + ("" if may_differ else f", {plan.applied_count} applied")
        for plan in (table.plans if table is not None else ())
        if not plan.depends_on_batch
    }
    return {
        "engine": engine,
        **{f"version of {version[0]}": version[1] for version in versions if version},
        **{name: value for facts_of_engine in of_engines for name, value in facts_of_engine.items()},
        **chosen,
        **rows,
    }


def failure(error: BaseException) -> dict[str, str]:
    """What a rank tells the others instead of its facts when its first step has failed."""
    return {_FAILURE: " ".join(f"{type(error).__name__}: {error}".split())}


def check_ranks_agree(own: Mapping[str, str]) -> None:
    """Compare this rank's facts with those of all others; every rank must call this, and all of them get the error.

    Args:
        own: from `facts` or `failure`.

    Raises:
        MemOptError: a rank differs or has failed; it is named with what differs.
    """
    if len(set(gathered(digest(own)))) > 1:
        raise MemOptError(describe_difference(gathered(dict(own))))


def digest(own: Mapping[str, str]) -> str:
    """A hash of the facts, short enough to be compared on any number of ranks."""
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def describe_difference(ranks: Sequence[Mapping[str, str]]) -> str:
    """One line about the first rank that failed, else the first that differs from rank 0; empty if all agree.

    Args:
        ranks: the facts of each rank.
    """
    for rank, other in enumerate(ranks):
        if _FAILURE in other:
            return f"rank {rank} failed in its first training step, so all ranks stop: {other[_FAILURE]}"
    first = ranks[0]
    for rank, other in enumerate(ranks):
        names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
        if names:
            shown = "; ".join(
                f"{name}: {first.get(name, _ABSENT)} on rank 0, {other.get(name, _ABSENT)} on rank {rank}"
                for name in names[:3]
            )
            more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
            return f"rank {rank} does not train as rank 0 does: {shown}{more}"
    return ""


def gathered(value: Any) -> list[Any]:
    """This value of every rank, in their order; every rank must call this."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def comparing(
    trainer: Trainer, facts_of_run: Callable[[], dict[str, str]], compute_loss: Callable[..., Any]
) -> Callable[..., Any]:
    """`compute_loss` that compares the ranks after the first training forward of each run.

    Then the plan table exists and no gradient does: DDP averages during the backward, and under DeepSpeed even the
    optimizer steps there (accelerate, `DeepSpeedEngineWrapper.backward`).
    """
    compared: TrainerState | None = None

    def compute_and_compare(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal compared
        # Each train() makes a new state.
        if not model.training or compared is trainer.state:
            return compute_loss(model, *args, **kwargs)
        compared = trainer.state
        try:
            result = compute_loss(model, *args, **kwargs)
            own = facts_of_run()
        except Exception as error:
            compared = None
            # The others wait for this rank; it ends in its own error in any case.
            with contextlib.suppress(Exception):
                check_ranks_agree(failure(error))
            raise
        check_ranks_agree(own)
        return result

    return compute_and_compare
